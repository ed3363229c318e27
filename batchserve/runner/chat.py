"""Applies a model's chat template to a user's text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchserve.errors import ConfigError, one_line

if TYPE_CHECKING:
    from batchserve.runner.compiled_tokenizer import AnyTokenizer

Content = str | list[dict[str, str]]
MARKER, ANSWER = "batchserve-7f3a-asked", "batchserve-7f3a-said"  # strings that no template contains


def chat_token_ids(text: str, tokenizer: AnyTokenizer | None, model: str) -> list[int]:
    """Returns the token ids of a prompt in the chat template. If returned as text, it would get a second BOS token.

    Some templates take the content as text, others only as a list of parts and silently drop text, so both are tried.
    Raises ConfigError, which names `model`.
    """
    template = _template(tokenizer, model)
    assert tokenizer is not None
    failure = "leaves out what the user says"
    for make in (_as_text, _as_parts):
        try:
            if MARKER not in _render(tokenizer, template, [{"role": "user", "content": make(MARKER)}]):
                continue
            turns: list[dict[str, Any]] = [{"role": "user", "content": make(text)}]
            ids: Any = tokenizer.apply_chat_template(
                turns,
                chat_template=template,
                add_generation_prompt=True,
                return_dict=False,
            )
            return list(ids)
        except Exception as error:  # a template is third-party code and may raise anything
            failure = one_line(error)
    raise ConfigError(f"model = {model!r}: its chat template cannot be applied: {failure}")


def turn_end(tokenizer: AnyTokenizer) -> int | None:
    """Returns the id of the added token that follows the assistant's text in the chat template, if there is one."""
    template = _only(tokenizer.chat_template)
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()} if template else {}
    for make in (_as_text, _as_parts) if special else ():
        turns = [{"role": "user", "content": make(MARKER)}, {"role": "assistant", "content": make(ANSWER)}]
        try:
            rendered = _render(tokenizer, template, turns, is_answered=True)
            prompt = _render(tokenizer, template, turns[:1]).rstrip()
        except Exception:  # chat_token_ids reports the error; other requests need no template
            continue
        before, said, after = rendered.rpartition(ANSWER)
        # Templates that always add the generation prompt put the token that begins an answer here, too.
        between = before.rpartition(MARKER)[2].rstrip()
        begins = [token for token in special if prompt.endswith(token) and token not in between]
        begins += [token for token in special if between.endswith(token)]
        ends = special.keys() - set(begins)
        found = [token for token in ends if said and after.lstrip().startswith(token)]
        if found:
            return special[max(found, key=len)]
    return None


def _render(
    tokenizer: AnyTokenizer, template: str | None, turns: list[dict[str, Any]], *, is_answered: bool = False
) -> str:
    return str(
        tokenizer.apply_chat_template(
            turns, chat_template=template, add_generation_prompt=not is_answered, tokenize=False
        )
    )


def _template(tokenizer: AnyTokenizer | None, model: str) -> str:
    """Returns the tokenizer's chat template. Raises ConfigError with a remedy if there is none."""
    templates = None if tokenizer is None else tokenizer.chat_template
    found = _only(templates)
    if found is not None:
        return found
    if isinstance(templates, dict) and templates:
        raise ConfigError(
            f"model = {model!r}: has chat templates named {', '.join(sorted(templates))}, and none named 'default', "
            "which --chat needs; put the one that is meant into its folder as chat_template.jinja"
        )
    if tokenizer is not None and Path(str(getattr(tokenizer, "vocab_file", ""))).name == "tekken.json":
        raise ConfigError(
            f"model = {model!r}: has no chat template, which --chat needs: mistral-common makes one from its "
            "tekken.json: pip install 'mistral-common>=1.11.5', or put a chat_template.jinja into its folder"
        )
    raise ConfigError(
        f"model = {model!r}: has no chat template, which --chat needs; put the model's chat_template.jinja into its "
        "folder, or ask without --chat"
    )


def _only(templates: object) -> str | None:
    """Returns the template to use when none is named: the only one, or the one named "default"."""
    if isinstance(templates, dict):
        return next(iter(templates.values())) if len(templates) == 1 else templates.get("default")
    return templates if isinstance(templates, str) and templates else None


def _as_text(text: str) -> Content:
    return text


def _as_parts(text: str) -> Content:
    return [{"type": "text", "text": text}]
