"""A model's tokenizer without transformers: the compiled part of it, and its chat templates.

It has the part of transformers' interface that batchserve uses, so that tokenizers written in Python can stand in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

    AnyTokenizer: TypeAlias = "CompiledTokenizer | PreTrainedTokenizerBase"

Templates = str | dict[str, str] | None


class CompiledTokenizer:
    """Tokenises, decodes and renders chats.

    definition: tokenizer.json's text, as it was resolved. special_tokens: the texts of special tokens, by the names
    that templates know (bos_token). chat_template: one, or several by name. vocab_file: what it was made from.
    """

    def __init__(
        self, definition: str, special_tokens: Mapping[str, Any], chat_template: Templates = None, vocab_file: str = ""
    ) -> None:
        self._definition = definition
        self.backend_tokenizer: Any = Tokenizer.from_str(definition)
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.special_tokens_map = dict(special_tokens)
        self.chat_template: Templates = chat_template
        self.vocab_file = vocab_file

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledTokenizer, (self._definition, self.special_tokens_map, self.chat_template, self.vocab_file)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Returns the token ids of a text. Raises TypeError or UnicodeEncodeError for what is no text."""
        return {"input_ids": list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(map(int, token_ids))
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        token: str | None = self.backend_tokenizer.id_to_token(token_id)
        return token

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        token_id: int | None = self.backend_tokenizer.token_to_id(text) if isinstance(text, str) else None
        return token_id

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Returns the conversation's token ids, or its text without `tokenize`. Templates may raise anything."""
        from batchserve.runner.chat_template import compiled_template

        variables.pop("return_dict", None)
        given = {**self.special_tokens_map, **variables}
        text: str = compiled_template(chat_template or "").render(
            messages=conversation,
            tools=given.pop("tools", None),
            documents=given.pop("documents", None),
            add_generation_prompt=add_generation_prompt,
            **given,
        )
        return self(text, add_special_tokens=False)["input_ids"] if tokenize else text

    def as_json(self) -> str:
        """Returns all of it as text."""
        return json.dumps([self._definition, self.special_tokens_map, self.chat_template, self.vocab_file])

    @classmethod
    def from_json(cls, text: str) -> CompiledTokenizer:
        return cls(*json.loads(text))


def compiled_of(loaded: Any, probes: Sequence[str]) -> Any:
    """Returns the compiled part of one of transformers' tokenizers if it gives the same ids, or else the tokenizer.

    probes: texts to compare on.
    """
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None or _has_own_code(loaded):
        return loaded
    special = {
        name: list(map(str, text)) if isinstance(text, list) else str(text)
        for name, text in loaded.special_tokens_map.items()
    }
    found = CompiledTokenizer(backend.to_str(), special, loaded.chat_template, str(getattr(loaded, "vocab_file", "")))
    ways: tuple[Callable[[Any, str], object], ...] = (
        lambda tokenizer, text: list(tokenizer(text)["input_ids"]),
        lambda tokenizer, text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    is_same = all(way(found, text) == way(loaded, text) for way in ways for text in probes)
    return found if is_same and _rendered(found) == _rendered(loaded) else loaded


def _rendered(tokenizer: Any) -> object:
    """Returns a short chat by each of the tokenizer's templates, or that they cannot render it."""
    templates = tokenizer.chat_template
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    found = []
    for template in templates.values() if isinstance(templates, dict) else [templates] if templates else []:
        for start in range(3):
            try:
                options = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
                found.append(tokenizer.apply_chat_template(turns[start:], **options))
            except Exception as error:  # a template is third-party code and may raise anything
                found.append(type(error).__name__)
    return found


def decodes_plainly(loaded: PreTrainedTokenizerBase) -> bool:
    """Returns whether a tokenizer of transformers decodes as its compiled part does."""
    return not _changes(loaded, "decode", "_decode")


def _has_own_code(loaded: Any) -> bool:
    return _changes(loaded, "__call__", "_encode_plus", "decode", "_decode", "apply_chat_template", "get_vocab")


def _changes(loaded: Any, *methods: str) -> bool:
    """Returns whether a class changes what transformers does around the compiled part."""
    from transformers import PreTrainedTokenizerFast

    return any(
        getattr(type(loaded), each, None) is not getattr(PreTrainedTokenizerFast, each, None) for each in methods
    )
