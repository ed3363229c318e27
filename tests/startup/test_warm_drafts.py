"""A draft cache from recorded answers: what is read reaches the drafter, and what is wrong is refused by its line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve import LLM, SamplingParams
from batchserve.cli import main
from batchserve.config import DraftConfig, EngineConfig
from batchserve.demo.prompts import PROMPTS
from batchserve.draft.base import DraftRequest, NullDrafter
from batchserve.draft.factory import create_drafters
from batchserve.errors import ConfigError
from batchserve.startup import warm_drafts as module
from batchserve.startup.warm_drafts import warm_drafts

ROWS = [{"prompt": "Say hello", "response": "hello there"}, {"prompt": "", "response": "again, hello"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


class Keeper(NullDrafter):
    """Keeps every answer it is told of, and saves them as JSON."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, list[int]]] = []
        self.open: dict[str, DraftRequest] = {}

    def start(self, request: DraftRequest) -> None:
        assert request.prompt_token_ids[0] == 0, "a prompt begins with the BOS, as one that is served does"
        self.open[request.request_id] = request

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.accepted = list(token_ids)

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        assert list(token_ids) == self.accepted
        scope = self.open[request_id].scope
        assert scope is not None
        assert scope.tenant == "default"
        self.answers.append((scope.name, list(token_ids)))

    def end(self, request_id: str) -> None:
        del self.open[request_id]

    def memory_bytes(self) -> int:
        return 2048 * len(self.answers)

    def num_tokens(self) -> int:
        return sum(2 + len(token_ids) for _, token_ids in self.answers)

    def save(self, path: Path, fingerprint: str) -> None:
        assert not self.open
        path.write_text(json.dumps([fingerprint, self.answers]))

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        saved, answers = json.loads(path.read_text())
        if saved != fingerprint:
            raise ConfigError("of another vocabulary")
        self.answers = [(scope, token_ids) for scope, token_ids in answers]


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "create_drafter", lambda name, config, size, part: Keeper())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")  # an empty line is none
    return path


def config(cache: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{"drafter": "trie", "draft": DraftConfig(draft_cache=str(cache)), **options})


def saved(cache: Path) -> list[list[Any]]:
    _, answers = json.loads(cache.read_text())
    return answers


def test_every_answer_is_kept_and_a_second_file_adds_to_the_first(keeper: None, rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "drafts"
    warmed = warm_drafts(rows, config(cache))
    first = saved(cache)
    assert (warmed.num_answers, warmed.num_tokens, warmed.num_bytes) == (2, sum(len(ids) for _, ids in first), 4096)
    assert (warmed.num_kept, warmed.num_lost) == (4 + warmed.num_tokens, 0)
    assert [scope for scope, _ in first] == ["default"] * 2
    warm_drafts(rows, config(cache, default_draft_scope="team"))
    assert saved(cache) == [*first, *(["team", token_ids] for _, token_ids in first)]


def test_the_command_says_what_it_has_done(keeper: None, rows: Path, tmp_path: Path, capsys: Any) -> None:
    cache = tmp_path / "drafts"
    flags = ["--drafter", "trie", "--draft-cache", str(cache), "--draft-scope", "team"]
    assert main(["warm-drafts", str(rows), *flags]) == 0
    assert {scope for scope, _ in saved(cache)} == {"team"}
    assert f"2 answers of {sum(len(ids) for _, ids in saved(cache))} tokens" in capsys.readouterr().err


def test_files_that_hold_nothing_and_folders_that_are_not_there(keeper: None, rows: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl: holds no answers"):
        warm_drafts(empty, config(tmp_path / "drafts"))
    with pytest.raises(ConfigError, match=r"draft_cache = .*: must be a file in a folder that exists"):
        warm_drafts(rows, config(tmp_path / "nowhere" / "drafts"))
    assert sorted(tmp_path.iterdir()) == [empty, rows]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not JSON"),
        (b'{"prompt": "\xff", "response": ""}', "is not JSON"),
        (b'["prompt", "response"]', "must be a JSON object, is list"),
        (b'{"prompt": "x"}', "field 'response' is missing"),
        (b'{"prompt": "x", "response": null}', "field 'response' must be a text"),
        (b'{"prompt": "x", "response": "\\ud800"}', "field 'response' must be a text"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_line_that_is_wrong_is_named_and_nothing_is_written(
    keeper: None, rows: Path, tmp_path: Path, line: bytes, reason: str
) -> None:
    rows.write_bytes(rows.read_bytes() + line)
    with pytest.raises(ConfigError) as caught:
        warm_drafts(rows, config(tmp_path / "drafts"))
    assert f"{rows} line 4: " in str(caught.value)
    assert reason in str(caught.value)
    assert not (tmp_path / "drafts").exists()


def test_tokens_that_the_model_does_not_have_are_refused(
    keeper: None, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be drafted to a model that has no embedding for them."""
    vocabulary = module._Vocabulary(config(tmp_path))
    vocabulary.size = 20
    monkeypatch.setattr(module, "_Vocabulary", lambda config: vocabulary)
    with pytest.raises(ConfigError, match=r"line 1: .*the model's vocabulary ends at 19"):
        warm_drafts(rows, config(tmp_path / "drafts"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": DraftConfig()}, "draft_cache = None"),
        ({"default_draft_scope": "request"}, "shares nothing"),
        ({"model": "/nowhere"}, "model = '/nowhere': must be a folder that exists"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(
    keeper: None, rows: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        warm_drafts(rows, config(tmp_path / "drafts", **options))


def test_a_model_without_a_tokenizer_is_refused(keeper: None, rows: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="has no tokenizer"):
        warm_drafts(rows, config(tmp_path / "drafts", model=str(bare)))


def test_no_more_is_kept_than_a_server_would(tmp_path: Path) -> None:
    """It would drop the scopes that do not fit, and save the rest over the file."""
    cache, rng = tmp_path / "drafts", random.Random(0)
    draft = DraftConfig(draft_cache=str(cache), max_scope_bytes=64 << 10, max_draft_bytes=512 << 10)
    kept = 0
    for i in range(9):
        rows, text = tmp_path / f"{i}.jsonl", " ".join(str(rng.random()) for _ in range(200))
        rows.write_text(json.dumps({"prompt": "", "response": text}) + "\n")
        warmed = warm_drafts(rows, EngineConfig(drafter="mixture", default_draft_scope=f"s{i}", draft=draft))
        assert warmed.num_bytes <= (512 << 10) // 2
        kept = max(kept, warmed.num_bytes)
    assert kept > (512 << 10) // 4
    server = create_drafters(EngineConfig(drafter="mixture", draft=draft), 0)["mixture"]
    vocabulary = module._Vocabulary(EngineConfig())
    server.load(cache, vocabulary.fingerprint, vocabulary.size)  # type: ignore[attr-defined]
    assert server.memory_bytes() == warmed.num_bytes


def test_what_finds_no_room_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, rng, rows = tmp_path / "drafts", random.Random(0), tmp_path / "rows.jsonl"
    answers = [{"prompt": "", "response": " ".join(str(rng.random()) for _ in range(100))} for _ in range(12)]
    rows.write_text("\n".join(map(json.dumps, answers)))
    command = ["warm-drafts", str(rows), "--draft-cache", str(cache), "--max-scope-bytes"]
    assert main([*command, "16MiB"]) == 0
    assert "left out" not in capsys.readouterr().err
    cache.unlink()
    assert main([*command, "60KiB"]) == 0
    said = re.search(r"the oldest (\d+) tokens were left out: .* room for (\d+)", capsys.readouterr().err)
    assert said is not None
    lost, kept = said.groups()
    with np.load(cache) as arrays:
        assert len(arrays["text0"]) == int(kept)
    vocabulary = module._Vocabulary(EngineConfig())
    tokens = sum(2 + len(vocabulary.tokenize(answer["response"], is_prompt=False)) for answer in answers)
    assert int(lost) == tokens - int(kept) > 0


def test_files_that_cannot_be_read_or_written_are_named(
    keeper: None, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"missing\.jsonl: cannot be read"):
        warm_drafts(tmp_path / "missing.jsonl", config(tmp_path / "drafts"))
    monkeypatch.setattr(Keeper, "save", fill_up)
    with pytest.raises(ConfigError, match=r"draft_cache = .*: cannot be written: .*No space"):
        warm_drafts(rows, config(tmp_path / "drafts"))


def test_a_cache_of_another_vocabulary_is_not_added_to(keeper: None, rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "drafts"
    cache.write_text(json.dumps(["other", []]))
    with pytest.raises(ConfigError, match="another vocabulary"):
        warm_drafts(rows, config(cache))


def test_recorded_answers_are_drafted_by_the_engine_that_loads_them(tmp_path: Path) -> None:
    """With the real drafter: from JSONL to accepted drafts, and back to a file by the engine itself."""
    prompt = PROMPTS[0].text
    cache, again = tmp_path / "drafts", tmp_path / "again"

    def accepted(draft: DraftConfig, scope: str = "team") -> tuple[int, str, LLM]:
        # A fixed decoding length: what is drafted shall not depend on how busy the machine is.
        llm = LLM(
            dtype="float32",
            max_model_len=512,
            drafter="mixture",
            decoding_length=8,
            draft=draft,
            default_draft_scope=scope,
        )
        (output,) = llm.generate(prompt, GREEDY, show_progress=False)
        return output.usage.accepted_draft_tokens, output.text, llm

    cold, answer, _ = accepted(DraftConfig())
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": prompt, "response": answer}) + "\n")
    flags = ["--drafter", "mixture", "--draft-cache", str(cache), "--draft-scope", "team"]
    assert main(["warm-drafts", str(rows), *flags]) == 0
    warm, same, llm = accepted(DraftConfig(draft_cache=str(cache)))
    assert same == answer
    assert warm > cold + 10
    assert accepted(DraftConfig(draft_cache=str(cache)), scope="other")[0] == cold, "told to another scope"
    llm.save_drafts(again)
    assert accepted(DraftConfig(draft_cache=str(again)))[0] >= warm
