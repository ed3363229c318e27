"""Chat templates: the user's text is in the prompt, or it is said why it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from batchserve.errors import ConfigError
from batchserve.runner.chat import chat_token_ids, turn_end
from batchserve.runner.eos_tokens import add_tokenizer_eos_ids

pytestmark = pytest.mark.faults
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<end_of_turn>"]
TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
BY_TYPE = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
FIRST = "<user>{{ messages[0]['content'][0]['text'] }}"
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0].content is string %}{{ raise_exception('parts please') }}{% endif %}" + PARTS
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer_with(template: Any, **tokens: str) -> PreTrainedTokenizerFast:
    rust = Tokenizer(models.BPE({text: i for i, text in enumerate(sorted(ByteLevel.alphabet()))}, []))
    rust.pre_tokenizer, rust.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=rust, chat_template=template, **tokens)


@pytest.mark.parametrize("template", [TEXT, PARTS, BY_TYPE, FIRST, EITHER, STRICT])
@pytest.mark.parametrize("text", ["Hello {{ you }}", "日本語 😀\n\nand more", "x"])
def test_the_users_text_is_in_the_prompt_whatever_a_content_is(template: str, text: str) -> None:
    tokenizer = tokenizer_with(template)
    assert tokenizer.decode(chat_token_ids(text, tokenizer, "m")) == f"<user>{text}"


def test_of_named_templates_the_default_or_the_only_one_is_taken() -> None:
    for templates in ({"default": TEXT, "tool_use": "no"}, {"chat": TEXT}):
        assert tokenizer_with(None).decode(chat_token_ids("hi", tokenizer_with(templates), "m")) == "<user>hi"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"tool_use": TEXT, "rag": TEXT}, "has chat templates named rag, tool_use, and none named 'default'"),
        (None, "has no chat template; put the model's chat_template.jinja into its folder"),
        ("", "has no chat template"),
        ("a system message only", "cannot be applied: leaves out what the user says"),
        ("{{ raise_exception('roles must\nalternate') }}", "cannot be applied: roles must alternate"),
        ("{{ nothing.at.all }}", "cannot be applied: 'nothing' is undefined"),
        ("{% for %}", "cannot be applied: "),
        ("{{ 1 / 0 }}", "cannot be applied: division by zero"),
        ("{{ messages[0].content + 1 }}", "cannot be applied: "),
        ("{{ messages[7].content }}", "cannot be applied: "),
        ("{{ ''.__class__.__mro__ }}", "cannot be applied: "),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line_that_says_why(template: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model = 'm': .*{message}") as caught:
        chat_token_ids("hi", tokenizer_with(template), "m")
    assert "\n" not in str(caught.value)


def test_a_tekken_tokenizer_without_a_template_says_what_makes_one() -> None:
    tokenizer = tokenizer_with(None)
    tokenizer.vocab_file = "/model/tekken.json"
    with pytest.raises(ConfigError, match=r"pip install 'mistral-common>=1.11.5', or put a chat_template.jinja"):
        chat_token_ids("hi", tokenizer, "m")
    with pytest.raises(ConfigError, match="has no chat template"):
        chat_token_ids("hi", None, "m")


def ids(tokenizer: PreTrainedTokenizerFast, *texts: str) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids([*texts]))


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, ["</s>"]),
        (CHATML, ["</s>", "<|im_end|>"]),
        (
            PARTS.replace("{% endfor %}{% endfor %}", "{% endfor %} <end_of_turn>\n{% endfor %}"),
            ["</s>", "<end_of_turn>"],
        ),
        (TEXT, ["</s>"]),
        (CHATML.replace("<|im_end|>", "###"), ["</s>"]),
        (CHATML.replace("<|im_end|>", "</s>"), ["</s>"]),
        ({"default": CHATML, "rag": TEXT}, ["</s>", "<|im_end|>"]),
        # These begin an answer.
        (TEXT + "<|im_start|>", ["</s>"]),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_start|>", ["</s>"]),
        ("{{ raise_exception('no') }}", ["</s>"]),
        ("{% for %}", ["</s>"]),
    ],
)
def test_the_tokenizers_end_and_the_templates_end_of_turn_are_added(
    template: Any, ends: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with a note; a turn that ends in plain text adds nothing."""
    tokenizer = tokenizer_with(template, eos_token="</s>")
    added = ids(tokenizer, *ends)
    assert add_tokenizer_eos_ids((7,), tokenizer, 300) == (7, *added)
    assert len(caplog.records) == 1
    assert all(f"{token_id} ({text}, " in caplog.text for token_id, text in zip(added, ends, strict=True))
    caplog.clear()
    assert add_tokenizer_eos_ids((7, *added), tokenizer, 300) == (7, *added)
    assert add_tokenizer_eos_ids((), tokenizer, 10) == ()  # ids that the model does not have
    assert add_tokenizer_eos_ids((7,), None, 300) == (7,)
    assert not caplog.records


def test_an_end_of_turn_need_not_be_special() -> None:
    tokenizer = tokenizer_with(CHATML)
    plain = Tokenizer(models.BPE({text: i for i, text in enumerate(sorted(ByteLevel.alphabet()))}, []))
    plain.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPECIAL])
    same = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=CHATML)
    assert turn_end(same) == turn_end(tokenizer) is not None
