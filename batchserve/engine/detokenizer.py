"""Tokens to text, piece by piece, and the search for stop strings. Runs in the publish half of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast as FastTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 16  # tokens without text that are decoded again with every new one
# So many of the last tokens tell whether the text's last character is complete. One of them begins with a character,
# which has four bytes at most: some tokenizers make nothing of bytes behind a torn one.
TAILS = (8, 7, 6, 5)


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **options: Any) -> Any: ...


def decoder_of(tokenizer: PreTrainedTokenizerBase | None) -> Decoder | None:
    """What decodes like the tokenizer: its compiled part, where the Python around that would change nothing.

    It is asked twice for every piece of text, and the way through Python takes four times as long. Nobody cleans up
    spaces: what a client was sent cannot be joined with what comes.
    """
    if tokenizer is None:
        return None
    if all(getattr(type(tokenizer), name) is getattr(FastTokenizer, name) for name in ("decode", "_decode")):
        decoder: Decoder = tokenizer.backend_tokenizer
        return decoder
    return _Uncleaned(tokenizer) if tokenizer.clean_up_tokenization_spaces else tokenizer


class TokenTexts(dict[int, str]):
    """The text of each token by itself, filled as they come; of a torn character it is REPLACEMENT."""

    def __init__(self, decoder: Decoder, skip_special_tokens: bool) -> None:
        super().__init__()
        self._decoder, self._skip_special_tokens = decoder, skip_special_tokens

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = str(self._decoder.decode([token_id], skip_special_tokens=self._skip_special_tokens))
        return text


def token_texts(decoder: Decoder | None, *, skip_special_tokens: bool) -> TokenTexts | None:
    """Where tokens are just bytes, as in GPT-2. Elsewhere a token's text may depend on those before it: None."""
    is_bytes = isinstance(decoder, Tokenizer) and isinstance(decoder.decoder, ByteLevel)
    return TokenTexts(decoder, skip_special_tokens) if decoder and is_bytes else None


@dataclass(frozen=True, slots=True)
class _Uncleaned:
    """A tokenizer that would clean up spaces, without that."""

    tokenizer: PreTrainedTokenizerBase

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        more = {**options, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **more)


class TextPiece(NamedTuple):
    """What a step added: text that may be shown, the tokens it counts for, and whether a stop string ended it."""

    text: str
    token_ids: list[int]
    is_stopped: bool = False


@dataclass(slots=True)
class IncrementalDetokenizer:
    """Text of one growing answer.

    Concatenated pieces are the same however tokens are spread over steps. They equal decoding all tokens at once, but
    for this: around bytes that make no character some tokenizers lose whole characters, and what is out stays out.
    Text is held back while its last character is incomplete or while it could still become a stop string. Without a
    tokenizer every piece is empty. A token costs the same however long the answer is, and however many tokens before it
    had no text or were bytes that make no character. token_texts: those of the decoder, for the same
    skip_special_tokens.
    """

    decoder: Decoder | None
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    token_texts: TokenTexts | None = None
    _token_ids: list[int] = field(default_factory=list)
    _prefix: int = 0  # first token of the window that is decoded again
    _read: int = 0  # tokens whose text is out
    _checked: int = 0  # tokens behind _read that are known not to be invisible
    _held: str = ""

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> TextPiece:
        """Add tokens; `is_last` releases what is held back. Tokens behind a completed stop string are dropped."""
        if self.decoder is None:
            return TextPiece("", list(token_ids))
        if not self.stop:
            return TextPiece(self._text_of(token_ids, is_last=is_last), list(token_ids))
        return self._feed_until_stop(token_ids, is_last=is_last)

    def _text_of(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Of all tokens at once where no character is torn, else of one after the other."""
        if self.token_texts is not None and self._read == len(self._token_ids):
            text = "".join(map(self.token_texts.__getitem__, token_ids))
            if REPLACEMENT not in text:
                return text
        if len(token_ids) > 1 and len(self._token_ids) - self._read <= MAX_PENDING:
            before = self._decode(self._token_ids[self._prefix : self._read])
            after = self._decode([*self._token_ids[self._prefix :], *token_ids])
            if REPLACEMENT not in after:
                self._token_ids.extend(token_ids)
                return self._take(before, after)
        text = "" if token_ids else self._new_text(is_last=is_last)
        for left, token_id in zip(reversed(range(len(token_ids))), token_ids, strict=True):
            self._token_ids.append(token_id)
            text += self._new_text(is_last=is_last and not left)
        return text

    def _feed_until_stop(self, token_ids: Sequence[int], *, is_last: bool) -> TextPiece:
        shown = ""
        steps = [[token_id] for token_id in token_ids] or [[]]  # none: an end lets out what is torn
        for i, step in enumerate(steps):
            is_end = is_last and i == len(steps) - 1
            self._held += self._text_of(step, is_last=is_end)
            found = self._first_stop()
            if found is not None:
                shown += self._held[:found]
                self._held = ""
                return TextPiece(shown, list(token_ids[: i + 1]), is_stopped=True)
            cut = len(self._held) - (0 if is_end else self._undecided())
            shown, self._held = shown + self._held[:cut], self._held[cut:]
        return TextPiece(shown, list(token_ids))

    def _new_text(self, *, is_last: bool) -> str:
        """Text behind what is out already; empty while the last character is incomplete.

        A few tokens before the new ones are decoded along, because a token's text may depend on its neighbour.
        """
        if not is_last and self._is_pointless():
            return ""
        before = self._decode(self._token_ids[self._prefix : self._read])
        after = self._decode(self._token_ids[self._prefix :])
        if after.endswith(REPLACEMENT) and not is_last:
            return ""
        # What is out was torn together with what is new; or is a space alone, which some tokenizers drop.
        if REPLACEMENT in after and not (before and after.startswith(before)):
            before, after = "", self._decode(self._token_ids[self._read :])
        return self._take(before, after)

    def _take(self, before: str, after: str) -> str:
        """What is behind `before`, which is out; nothing if that is no text."""
        if len(after) <= len(before):
            return ""
        size = len(self._token_ids)
        self._prefix, self._read = self._read if self.token_texts is None else size, size
        return after[len(before) :]

    def _is_pointless(self) -> bool:
        """Whether many tokens are pending and decoding them all is sure to end in an incomplete character again.

        Forgets those of them that never have any text: special tokens that are skipped, ids that stand for nothing.
        """
        if len(self._token_ids) - self._read <= MAX_PENDING:
            return False
        start = max(self._read, self._checked)
        # Twice: some tokenizers drop the space in front of a text, which is all that one token may be.
        self._token_ids[start:] = [token for token in self._token_ids[start:] if self._decode([token, token])]
        self._checked = len(self._token_ids)
        if len(self._token_ids) - self._read <= MAX_PENDING:
            return False
        return all(self._decode(self._token_ids[-size:]).endswith(REPLACEMENT) for size in TAILS)

    def _decode(self, token_ids: list[int]) -> str:
        if self.decoder is None or not token_ids:
            return ""
        return str(self.decoder.decode(token_ids, skip_special_tokens=self.skip_special_tokens))

    def _first_stop(self) -> int | None:
        """Where the stop string begins that is complete first; of several that end there, the longest."""
        found = [(place + len(text), place) for text in self.stop if (place := self._held.find(text)) >= 0]
        return min(found)[1] if found else None

    def _undecided(self) -> int:
        """Characters at the end of the held text that are the beginning of a stop string."""
        longest = min(max(len(text) for text in self.stop) - 1, len(self._held))
        for size in range(longest, 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self.stop):
                return size
        return 0
