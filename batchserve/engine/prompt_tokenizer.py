"""Makes token ids of prompts, references and bad words, and checks them against the model."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING

from batchserve.conversation import Chat, with_text
from batchserve.engine.detokenizer import REPLACEMENT, decoder_of
from batchserve.errors import InvalidRequestError
from batchserve.runner.chat import ChatTemplate
from batchserve.types import MAX_REFERENCE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.runner.compiled_tokenizer import AnyTokenizer
    from batchserve.types import Prompt

HEAD_CHARS, CUT_TOKENS = 16, 64  # characters per context position; extra tokens that cutting the text there may cause


class PromptTokenizer:
    """The tokenizer of one model, with its bounds. Thread-safe: it keeps no state."""

    def __init__(self, tokenizer: AnyTokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer, self._vocab_size, self._max_model_len = tokenizer, vocab_size, max_model_len
        self._longest_token_chars = _longest_token(tokenizer)

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the checked token ids of a prompt. Raises InvalidRequestError. add_special_tokens: to a text."""
        is_text = isinstance(prompt, str | Chat)
        if isinstance(prompt, Chat):
            ids = self._tokenize_chat(prompt)
        else:
            ids = self._tokenize_prompt(prompt, add_special_tokens) if isinstance(prompt, str) else _integers(prompt)
        self.check_ids("prompt", ids, is_text=is_text)
        if not ids:  # some tokenizers give no tokens for a text of spaces
            raise InvalidRequestError("EMPTY_PROMPT", "prompt", prompt, "at least one token")
        # One position is left for a generated token.
        if len(ids) > self._max_model_len - 1:
            raise InvalidRequestError(
                "PROMPT_TOO_LONG",
                "prompt",
                f"{len(ids)} tokens",
                f"at most {self._max_model_len - 1} tokens (max_model_len - 1)",
            )
        return ids

    def _tokenize_chat(self, chat: Chat) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("NO_TOKENIZER", "messages", "<messages>", "token ids: the model has no tokenizer")
        self._check_length("messages", "\n".join(str(with_text(each)["content"]) for each in chat.messages))
        try:
            return ChatTemplate(self._tokenizer).token_ids(chat)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                "INVALID_TEXT", "messages", "<messages>", "text that can be encoded as UTF-8"
            ) from error

    def _tokenize_prompt(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is not None:
            if not text:
                raise InvalidRequestError("EMPTY_PROMPT", "prompt", text, "at least one character")
            self._check_length("prompt", text)
        options = {} if add_special_tokens else {"add_special_tokens": False}
        return self._tokenize_text("prompt", text, **options)

    def _check_length(self, field: str, text: str) -> None:
        """Refuses megabytes without tokenising them. They cannot fit even in the longest tokens."""
        fewest = len(text) // self._longest_token_chars
        if fewest <= self._max_model_len and len(text) > HEAD_CHARS * self._max_model_len:
            # Some vocabularies have a token of a hundred spaces but hardly any other as long. Tokenise a prefix.
            fewest = len(self._tokenize_text(field, text[: HEAD_CHARS * self._max_model_len])) - CUT_TOKENS
        if fewest > self._max_model_len:
            raise InvalidRequestError(
                "PROMPT_TOO_LONG",
                field,
                f"{len(text)} characters",
                f"at most {self._max_model_len - 1} tokens (max_model_len - 1); this is at least {fewest}",
            )

    def _tokenize_text(self, field: str, text: str, **options: bool) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidRequestError("NO_TOKENIZER", field, text, "token ids: the model has no tokenizer")
        try:
            ids: list[int] = tokenizer(text, **options)["input_ids"]
        except (TypeError, UnicodeEncodeError) as error:  # lone surrogates cannot be encoded
            raise InvalidRequestError("INVALID_TEXT", field, text, "text that can be encoded as UTF-8") from error
        return ids

    def references(self, references: Sequence[str | Sequence[int]]) -> tuple[array[int], ...]:
        """Returns the checked token ids of each reference, in four bytes per token to save memory while waiting."""
        found, num_tokens = [], 0
        for i, reference in enumerate(references):
            field, is_text = f"references[{i}]", isinstance(reference, str)
            if isinstance(reference, str):
                ids: Sequence[int] = self._tokenize_text(field, reference, add_special_tokens=False)
            else:
                ids = reference
            num_tokens += len(ids)
            if num_tokens > MAX_REFERENCE_TOKENS:
                bound = f"at most {MAX_REFERENCE_TOKENS} tokens together"
                raise InvalidRequestError("REFERENCES_TOO_LONG", "references", f"{num_tokens} tokens", bound)
            self.check_ids(field, ids, is_text=is_text)
            if ids:
                found.append(array("i", ids))
        return tuple(found)

    def check_ids(self, field: str, ids: Sequence[int], *, is_text: bool = False) -> None:
        """Checks ids against the vocabulary. is_text: from a tokenizer, which may know more ids than its model."""
        if not ids or (min(ids) >= 0 and max(ids) < self._vocab_size):
            return
        for i, token_id in enumerate(ids):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    "TOKEN_ID_OUT_OF_RANGE",
                    field if is_text else f"{field}[{i}]",
                    token_id,
                    f"in 0..{self._vocab_size - 1}",
                )

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of each word, and, as in vLLM, of each with a space in front if these are as many."""
        found: list[tuple[int, ...]] = []
        for i, word in enumerate(words):
            field = f"bad_words[{i}]"
            alone, spaced = (
                tuple(self._tokenize_text(field, text, add_special_tokens=False))
                for text in (word.lstrip() or word, f" {word.lstrip()}")
            )
            if not alone or not spaced:
                raise InvalidRequestError("INVALID_BAD_WORD", field, word, "text that has tokens")
            is_another = len(spaced) == len(alone) and spaced[0] != alone[0]
            for ids in (alone, spaced) if is_another else (alone,):
                self.check_ids(field, ids, is_text=True)
                found.append(ids)
        return tuple(found)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, field: str) -> str:
        """Returns the text of token ids. Raises InvalidRequestError, which names `field`."""
        decoder = decoder_of(self._tokenizer)
        if decoder is None:
            raise InvalidRequestError("NO_TOKENIZER", field, "<token ids>", "unset: the model has no tokenizer")
        return str(decoder.decode([*token_ids], skip_special_tokens=skip_special_tokens))

    def echoed(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns a prompt's text, but for an incomplete character: that comes with the token that completes it."""
        return self.decode(token_ids, skip_special_tokens, "echo").rstrip(REPLACEMENT)


def _integers(token_ids: Sequence[int]) -> list[int]:
    """Converts ids to plain ints, also NumPy's. Refuses floats, booleans and bytes (text that was not decoded)."""
    try:
        # An iterator could be read only once. A mapping's keys are not a prompt.
        if not isinstance(token_ids, Sized) or isinstance(token_ids, bytes | bytearray | Mapping):
            raise TypeError
        if bool in set(map(type, token_ids)):
            raise TypeError
        return list(map(int, map(operator.index, token_ids)))  # plain ints, as `_plain` gives plain strs
    except TypeError:
        raise InvalidRequestError("INVALID_TOKEN_IDS", "prompt", token_ids, "integers") from None


def _longest_token(tokenizer: AnyTokenizer | None) -> int:
    if tokenizer is None:
        return 1
    return max((len(token) for token in tokenizer.get_vocab()), default=1)
