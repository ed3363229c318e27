"""Answers of a model with a Llama-2-like tokenizer: spaces, special tokens in stop strings, end tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from batchserve import LLM, RequestOutput, SamplingParams, SpeculationParams
from batchserve.types import FinishReason
from tests.engine.test_tokenizer_shapes import llama2
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.faults
CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
OFF = SpeculationParams(is_enabled=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model; it says special tokens now and then."""
    tokenizer = llama2()
    tokenizer.add_special_tokens([AddedToken(f"<|{i}|>", special=True) for i in range(60)])
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama") / "model", vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": CHATML}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", drafter="none", num_threads=1)


def answer(llm: LLM, prompt: str, **options: object) -> RequestOutput:
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=80, ignore_eos=True, **options)  # type: ignore[arg-type]
    return llm.generate(prompt, params, speculation=OFF, show_progress=False)[0]


def test_an_answer_goes_on_where_the_prompt_ends(llm: LLM, folder: Path) -> None:
    """With the space that the tokenizer drops in front of a text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for prompt in ("Hello,", "é 😀"):
        output = answer(llm, prompt)
        whole = tokenizer.decode([*output.prompt_token_ids, *output.token_ids])
        before = tokenizer.decode(output.prompt_token_ids)
        assert "\ufffd" in whole or before + output.text == whole
        first = next(i for i, token_id in enumerate(output.token_ids) if tokenizer.decode([token_id]))
        if tokenizer.id_to_token(output.token_ids[first]).startswith("\u2581"):
            assert output.text.startswith(" ")


def test_a_stop_string_may_be_a_special_token(llm: LLM, folder: Path) -> None:
    special = Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder()
    free = answer(llm, "Hello,")
    place = next(i for i, token_id in enumerate(free.token_ids) if token_id in special and i > 2)
    name = special[free.token_ids[place]].content
    stopped = answer(llm, "Hello,", stop=(name,))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: place + 1]
    assert free.text.startswith(stopped.text)
    assert name not in stopped.text


def test_answers_end_at_the_tokenizers_end_and_the_end_of_a_turn_unless_told_otherwise(llm: LLM, folder: Path) -> None:
    known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    assert llm.info.eos_token_ids == (2, known["<|im_end|>"])
    assert known["</s>"] == 2
    off = LLM(str(folder), dtype="float32", drafter="none", num_threads=1, tokenizer_end_tokens=False)
    assert off.info.eos_token_ids == (2,)
