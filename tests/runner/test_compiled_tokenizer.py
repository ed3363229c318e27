"""The compiled part of a tokenizer says what transformers says, and stands in only where it does."""

from __future__ import annotations

import pickle
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchserve.runner.chat_template import compiled_template
from batchserve.runner.compiled_tokenizer import CompiledTokenizer, compiled_of
from batchserve.runner.model_folder import resolve_model
from batchserve.runner.tokenizer import PROBES
from tests.factories import examples

TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "blocks": "{% for m in messages %}\n  {%- if m.role == 'user' %}\n  U: {{ m.content | trim }}\n  {% endif %}\n"
    "{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ '<&é>' | tojson }}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
    "{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "undefined": "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "parts": "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "raises": "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}",
    "unsafe": "{{ messages.append(1) }}",
    "broken": "{% if %}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hello "}],
    [{"role": "system", "content": "be"}, {"role": "user", "content": "é<b>"}, {"role": "assistant", "content": "y"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
]


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_model("bundled"))
    return found


@pytest.fixture(scope="module")
def ours(theirs: PreTrainedTokenizerBase) -> CompiledTokenizer:
    found = compiled_of(theirs, PROBES)
    assert isinstance(found, CompiledTokenizer)
    return found


@examples(200)
@given(st.text(max_size=60))
def test_texts_have_the_same_ids_and_come_back(
    ours: CompiledTokenizer, theirs: PreTrainedTokenizerBase, text: str
) -> None:
    for options in ({}, {"add_special_tokens": False}):
        ids = ours(text, **options)["input_ids"]
        assert ids == theirs(text, **options)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids)


def test_its_vocabulary_is_the_same(ours: CompiledTokenizer, theirs: PreTrainedTokenizerBase) -> None:
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.added_tokens_decoder.keys() == theirs.added_tokens_decoder.keys()
    assert ours.convert_ids_to_tokens(7) == theirs.convert_ids_to_tokens(7)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("is_asking", [True, False])
def test_chats_are_rendered_the_same(
    ours: CompiledTokenizer, theirs: PreTrainedTokenizerBase, name: str, chat: list[dict[str, Any]], is_asking: bool
) -> None:
    def rendered(tokenizer: Any, **options: Any) -> object:
        try:
            return tokenizer.apply_chat_template(
                chat, chat_template=TEMPLATES[name], add_generation_prompt=is_asking, **options
            )
        except Exception as error:  # templates may raise anything
            return type(error).__name__

    assert rendered(ours, tokenize=False) == rendered(theirs, tokenize=False)
    assert rendered(ours, return_dict=False) == rendered(theirs, return_dict=False)


def test_templates_know_the_date() -> None:
    assert compiled_template("{{ strftime_now('%Y') }}").render() == str(datetime.now().year)


def test_it_can_be_sent_and_kept(ours: CompiledTokenizer) -> None:
    for other in (pickle.loads(pickle.dumps(ours)), CompiledTokenizer.from_json(ours.as_json())):
        assert other("Some text")["input_ids"] == ours("Some text")["input_ids"]
        assert other.special_tokens_map == ours.special_tokens_map
        assert other.chat_template == ours.chat_template


def test_a_tokenizer_with_code_of_its_own_stays(theirs: PreTrainedTokenizerBase) -> None:
    class Shouting(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text.upper(), **options)

    own = Shouting(tokenizer_object=theirs.backend_tokenizer)
    assert compiled_of(own, PROBES) is own
