"""Puts chats into a model's own template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchserve.conversation import Chat, with_parts, with_text
from batchserve.errors import ConfigError, InvalidRequestError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchserve.runner.compiled_tokenizer import AnyTokenizer

MARKER, ANSWER = "batchserve-7f3a-asked", "batchserve-7f3a-said"  # strings that no template contains
DEVELOPER = "developer"
TOOL_TEMPLATE = "tool_use"  # of several templates, the one for chats with tools


def chat_token_ids(text: str, tokenizer: AnyTokenizer | None, model: str) -> list[int]:
    """Returns the token ids of a user's text in the chat template. Raises ConfigError, which names `model`."""
    try:
        return ChatTemplate(tokenizer).token_ids(Chat([{"role": "user", "content": text}]))
    except InvalidRequestError as error:
        raise ConfigError(f"model = {model!r}: {error.bound}") from None


class ChatTemplate:
    """The chat template of a tokenizer.

    Some templates take a message's content as text, others only as a list of parts and silently drop text. Which it is
    is tried out. Templates are third-party code, and may raise anything.
    """

    def __init__(self, tokenizer: AnyTokenizer | None) -> None:
        self._tokenizer = tokenizer

    def token_ids(self, chat: Chat) -> list[int]:
        """Returns the prompt of a chat. Raises InvalidRequestError.

        If it was returned as text, it would get a second BOS token. The template says what special tokens there are.
        """
        tokenizer = self._tokenizer
        text = self.text(chat)
        from batchserve.runner.compiled_tokenizer import CompiledTokenizer

        if isinstance(tokenizer, CompiledTokenizer) or chat.continue_final_message:
            assert tokenizer is not None
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        # Others may have special tokens that they do not read in a text (mistral-common).
        return list(self._applied(chat, self._messages(chat), tokenize=True))

    def text(self, chat: Chat) -> str:
        """Returns the prompt of a chat as text. Raises InvalidRequestError."""
        template = self._template(has_tools=bool(chat.tools))
        messages = self._messages(chat)
        _check_variables(chat, template)
        if chat.tools and self._applied(chat, messages) == self._applied(chat, messages, has_tools=False):
            raise InvalidRequestError("INVALID_CHAT", "tools", chat.tools, "empty: the model's template uses none")
        if not chat.continue_final_message:
            return str(self._applied(chat, messages))
        # The marker's space is there after it, unless the template trims texts: then the answer's end is trimmed, too.
        last = with_text(chat.messages[-1])["content"]
        marked = replace(chat, messages=[*chat.messages[:-1], {**chat.messages[-1], "content": f"{last}{MARKER} "}])
        before, found, after = str(self._applied(marked, self._messages(marked))).rpartition(MARKER)
        before = before if after.startswith(" ") else before.rstrip()
        if not found:
            bound = "one that the model's template renders as it is"
            raise InvalidRequestError("INVALID_CHAT", f"messages[{len(messages) - 1}].content", last, bound)
        return before

    def source(self) -> str:
        """Returns all templates as they are written; "" if there are none."""
        templates = None if self._tokenizer is None else self._tokenizer.chat_template
        return "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""

    def can_render(self, chat: Chat) -> bool:
        """Returns whether the template takes a chat, all that it has of tools included."""
        try:
            self.text(chat)
        except InvalidRequestError:
            return False
        return True

    def _messages(self, chat: Chat) -> list[dict[str, Any]]:
        """Returns the messages with their contents as the template takes them. A template that does not know the
        OpenAI API's developers takes their messages as the system's, whom they replace there.
        """
        if DEVELOPER not in self.source():
            chat = replace(chat, messages=[_as_system(each) for each in chat.messages])
        asked = [{"role": "user", "content": MARKER}]
        failure = "leaves out what the user says"
        for form in (with_text, with_parts):
            try:
                if MARKER in str(self._rendered([form(each) for each in asked], add_generation_prompt=True)):
                    return [form(each) for each in chat.messages]
            except Exception as error:
                failure = one_line(error)
        raise _not_applicable(failure)

    def _applied(
        self, chat: Chat, messages: list[dict[str, Any]], *, tokenize: bool = False, has_tools: bool = True
    ) -> Any:
        options: dict[str, Any] = {**chat.chat_template_kwargs, "add_generation_prompt": chat.add_generation_prompt}
        if chat.tools and has_tools:
            options["tools"] = [*chat.tools]
        try:
            return self._rendered(messages, tokenize=tokenize, **options)
        except Exception as error:
            raise _not_applicable(one_line(error)) from None

    def _rendered(self, messages: list[dict[str, Any]], *, tokenize: bool = False, **options: Any) -> Any:
        assert self._tokenizer is not None
        template = self._template(has_tools="tools" in options)
        how: dict[str, Any] = {"tokenize": True, "return_dict": False} if tokenize else {"tokenize": False}
        return self._tokenizer.apply_chat_template(messages, chat_template=template, **how, **options)

    def _template(self, *, has_tools: bool) -> str:
        templates = None if self._tokenizer is None else self._tokenizer.chat_template
        if has_tools and isinstance(templates, dict) and TOOL_TEMPLATE in templates:
            return str(templates[TOOL_TEMPLATE])
        found = _only(templates)
        if found is None:
            raise _no_template(self._tokenizer, templates)
        return found


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == DEVELOPER else message


def _check_variables(chat: Chat, template: str) -> None:
    """Refuses variables that the template would not look at."""
    if not chat.chat_template_kwargs:
        return
    from batchserve.runner.chat_template import variables_of

    try:
        known = variables_of(template)
    except Exception as error:
        raise _not_applicable(one_line(error)) from None
    for name, value in chat.chat_template_kwargs.items():
        if name not in known:
            bound = "absent: the model's template knows no such variable"
            raise InvalidRequestError("INVALID_CHAT", f"chat_template_kwargs[{name}]", value, bound)


def _not_applicable(reason: str) -> InvalidRequestError:
    """Returns the error for messages with which the template fails: mostly it says what it wants of them."""
    bound = f"what the model's template takes; its chat template cannot be applied: {reason}"
    return InvalidRequestError("INVALID_CHAT", "messages", "<messages>", bound)


def turn_end(tokenizer: AnyTokenizer) -> int | None:
    """Returns the id of the added token that follows the assistant's text in the chat template, if there is one."""
    template = _only(tokenizer.chat_template)
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()} if template else {}
    for form in (with_text, with_parts) if special else ():
        turns = [form({"role": "user", "content": MARKER}), form({"role": "assistant", "content": ANSWER})]
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


def _no_template(tokenizer: AnyTokenizer | None, templates: object) -> InvalidRequestError:
    """Returns the error for a model without a template, with a remedy."""
    if isinstance(templates, dict) and templates:
        names = ", ".join(sorted(templates))
        bound = (
            f"has chat templates named {names}, and none named 'default'; put the one that is meant into its folder "
        )
        bound += "as chat_template.jinja"
    elif tokenizer is not None and Path(str(getattr(tokenizer, "vocab_file", ""))).name == "tekken.json":
        bound = "has no chat template: mistral-common makes one from its tekken.json: pip install "
        bound += "'mistral-common>=1.11.5', or put a chat_template.jinja into its folder"
    else:
        bound = "has no chat template; put the model's chat_template.jinja into its folder, or ask with a plain prompt"
    return InvalidRequestError("NO_CHAT_TEMPLATE", "messages", "<messages>", f"absent: the model {bound}")


def _only(templates: object) -> str | None:
    """Returns the template to use when none is named: the only one, or the one named "default"."""
    if isinstance(templates, dict):
        return next(iter(templates.values())) if len(templates) == 1 else templates.get("default")
    return templates if isinstance(templates, str) and templates else None
