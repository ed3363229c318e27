"""From a configuration to an engine: which drafter it has, when that is ready, and what it starts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchserve.config import DraftConfig, EngineConfig
from batchserve.draft.base import NullDrafter
from batchserve.draft.router import RoutingDrafter
from batchserve.errors import ConfigError
from batchserve.startup import build
from batchserve.startup.build import BuiltEngine, build_engine
from tests.drafters import RandomTreeDrafter


class Keeper(NullDrafter):
    """Says whether it was loaded, from what, and whether its kernels were ready then."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Path, str, int]] = []
        self.error: Exception | None = None

    def save(self, path: Path, fingerprint: str) -> None:
        path.write_text(fingerprint)

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        if self.error is not None:
            raise self.error
        self.loaded.append((path, fingerprint, vocab_size))

    def memory_bytes(self) -> int:
        return 3 << 20

    def num_tokens(self) -> int:
        return 0


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    keeper = Keeper()
    monkeypatch.setattr(build, "create_drafters", lambda config, size: {"trie": keeper, "none": NullDrafter()})
    return keeper


def start(folder: Path, says: list[str] | None = None, **options: Any) -> BuiltEngine:
    serving = {name: options.pop(name) for name in ("is_serving", "drafter_object") if name in options}
    config = EngineConfig(**{"model": str(folder), "dtype": "float32", "num_threads": 1, "drafter": "trie", **options})
    given = {"drafter": serving["drafter_object"]} if "drafter_object" in serving else {}
    on_progress = None if says is None else says.append
    return build_engine(config, on_progress, is_serving=serving.get("is_serving", False), **given)


def test_what_is_served_is_described(tiny_model: dict[str, Path]) -> None:
    info = start(tiny_model["llama"], drafter="jacobi", draft=DraftConfig(jacobi_window=3, jacobi_ngram=4)).info
    assert (info.drafter, info.decoding_length) == ("jacobi", 18)
    off = start(tiny_model["llama"], drafter="jacobi", decoding_length=0).info
    assert (off.drafter, off.decoding_length) == ("none", 0)


@pytest.mark.parametrize(("max_model_len", "num_extents"), [(None, 1), (65, 2)])
def test_too_little_memory_is_refused_with_what_is_needed(
    tiny_model: dict[str, Path], max_model_len: int | None, num_extents: int
) -> None:
    """The bytes that the message names are enough, and one less is not."""
    options: dict[str, Any] = {"drafter": "none", "max_model_len": max_model_len}
    with pytest.raises(ConfigError, match=r"kv_cache_memory = 1 bytes: must be at least \d+ bytes") as caught:
        start(tiny_model["llama"], kv_cache_memory=1, **options)
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    with pytest.raises(ConfigError, match=f"must be at least {needed} bytes, for {64 * num_extents} tokens"):
        start(tiny_model["llama"], kv_cache_memory=needed - 1, **options)
    assert start(tiny_model["llama"], kv_cache_memory=needed, **options).info.max_model_len == (max_model_len or 64)


def test_a_draft_cache_is_loaded_before_anybody_is_served(
    tiny_model: dict[str, Path], keeper: Keeper, tmp_path: Path
) -> None:
    cache, says = tmp_path / "drafts", list[str]()
    options: dict[str, Any] = {"draft": DraftConfig(draft_cache=str(cache)), "is_serving": True}
    built = start(tiny_model["llama"], says, **options)
    assert keeper.loaded == []  # there is no such file yet
    cache.write_text("")
    built = start(tiny_model["llama"], says, **options)
    assert keeper.loaded == [(cache, built.processor.vocabulary_fingerprint(), built.info.vocab_size)]
    assert f"draft cache: 3.0 MiB from {cache}" in says
    built.save_drafts(tmp_path / "other")
    assert (tmp_path / "other").read_text() == built.processor.vocabulary_fingerprint()


def test_a_draft_cache_that_cannot_be_used_is_refused(
    tiny_model: dict[str, Path], keeper: Keeper, tmp_path: Path
) -> None:
    cache = tmp_path / "drafts"
    cache.write_text("")
    keeper.error = ConfigError("draft cache: of another vocabulary")
    with pytest.raises(ConfigError, match="another vocabulary"):
        start(tiny_model["llama"], draft=DraftConfig(draft_cache=str(cache)), is_serving=True)


@pytest.mark.parametrize("place", ["/proc/drafts", ".", "x" * 300, "a\0b"])
def test_a_draft_cache_that_could_not_be_saved_is_refused_before_the_model_is_loaded(
    tmp_path: Path, place: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"draft_cache = .*: must (be (a file, and is not|in a folder that can be written)|not hold a NUL)",
    ):
        start(tmp_path / "no model either", draft=DraftConfig(draft_cache=str(tmp_path / place)))


def test_a_draft_cache_in_no_folder_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "drafts"
    with pytest.raises(ConfigError, match=r"draft_cache = .*missing.*: must be a file in a folder that exists"):
        start(tmp_path / "no model either", draft=DraftConfig(draft_cache=str(nowhere)))


def test_a_draft_cache_needs_drafts(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_cache = .*: must be unset with decoding_length = 0"):
        start(tiny_model["llama"], draft=DraftConfig(draft_cache=str(tmp_path / "drafts")), decoding_length=0)


def test_a_draft_cache_needs_a_drafter_that_can_be_saved(tiny_model: dict[str, Path], keeper: Keeper) -> None:
    with pytest.raises(ConfigError, match=r"drafter = 'none': .*trie can"):
        start(tiny_model["llama"], drafter="none", draft=DraftConfig(draft_cache="drafts"))


def test_a_drafter_from_outside_cannot_be_saved(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    built = start(tiny_model["llama"], drafter_object=RandomTreeDrafter(100, 0))
    assert built.info.drafter == "random"
    with pytest.raises(ConfigError, match="drafter = 'random'"):
        built.save_drafts(tmp_path / "drafts")


@pytest.mark.parametrize(
    ("options", "is_waiting"),
    [({}, True), ({"is_serving": True}, False), ({"is_serving": True, "wait_for_drafter": True}, True)],
    ids=str,
)
def test_only_a_server_starts_before_its_drafter_is_ready(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], is_waiting: bool
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(RoutingDrafter, "prepare", lambda router, say: prepared.append(router.name))
    monkeypatch.setattr(RoutingDrafter, "is_ready_for", lambda router, name: False)
    says: list[str] = []
    start(tiny_model["llama"], says, **options)
    assert prepared == (["trie"] if is_waiting else [])
    assert any("until it is ready" in message for message in says) is not is_waiting
