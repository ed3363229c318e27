"""Incremental detokenization and the search for stop strings. Runs in the publish half of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from batchserve.runner.compiled_tokenizer import CompiledTokenizer, decodes_plainly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from batchserve.runner.compiled_tokenizer import AnyTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 16  # tokens without text that are decoded again with every new one
# Numbers of last tokens that show whether the text's last character is complete. A character has at most four bytes, so
# one of the tails starts with a character. Some tokenizers give no text for bytes after an incomplete character.
TAILS = (8, 7, 6, 5)
# Numbers of last prompt tokens to decode with the answer: more if these have no text or start within a character.
PROMPT_TAILS = (*range(4, 13), 24, 64)
MAX_TORN = 3  # the most tokens of an incomplete character


class Decoder(Protocol):
    """The part of a tokenizer's interface that is needed here."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **options: Any) -> Any: ...


def decoder_of(tokenizer: AnyTokenizer | None) -> Decoder | None:
    """Returns a decoder for the tokenizer: its compiled part, if no Python code around it changes anything.

    It never cleans up spaces, because text that a client already has cannot be changed by later text.
    """
    if tokenizer is None:
        return None
    if isinstance(tokenizer, CompiledTokenizer) or decodes_plainly(tokenizer):
        decoder: Decoder = tokenizer.backend_tokenizer
        return decoder
    return _Uncleaned(tokenizer) if tokenizer.clean_up_tokenization_spaces else tokenizer


class TokenTexts(dict[int, str]):
    """A cache of the text of each single token. A part of a character has the text REPLACEMENT."""

    def __init__(self, decoder: Decoder, skip_special_tokens: bool) -> None:
        super().__init__()
        self._decoder, self._skip_special_tokens = decoder, skip_special_tokens

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = str(self._decoder.decode([token_id], skip_special_tokens=self._skip_special_tokens))
        return text


def token_texts(decoder: Decoder | None, *, skip_special_tokens: bool) -> TokenTexts | None:
    """Returns the texts of byte-level tokens, as in GPT-2. None otherwise: a text may depend on earlier tokens."""
    is_bytes = isinstance(decoder, Tokenizer) and isinstance(decoder.decoder, ByteLevel)
    return TokenTexts(decoder, skip_special_tokens) if decoder and is_bytes else None


def special_texts(decoder: Decoder | None) -> dict[int, str]:
    """Returns the text of each special token. A decoder that skips special tokens leaves these texts out."""
    tokenizer = decoder.tokenizer if isinstance(decoder, _Uncleaned) else decoder
    if isinstance(tokenizer, Tokenizer):
        known: Mapping[int, Any] = tokenizer.get_added_tokens_decoder()
    else:
        known = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id: token.content for token_id, token in known.items() if token.special and token.content}


@dataclass(frozen=True, slots=True)
class _Uncleaned:
    """Decodes like a tokenizer that cleans up spaces, but without the clean-up."""

    tokenizer: PreTrainedTokenizerBase

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        more = {**options, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **more)


class TextPiece(NamedTuple):
    """The output of a step: text that may be shown, its tokens, and the stop string that ended the answer, if any.

    offsets: where in the answer's text each token's begins; that of a part of a character, where the character begins.
    """

    text: str
    token_ids: list[int]
    stop: str | None = None
    offsets: list[int] | None = None


@dataclass(slots=True)
class IncrementalDetokenizer:
    """Detokenizes one growing answer.

    The joined pieces do not depend on how tokens are split into steps. They equal decoding all tokens at once, with one
    exception: around bytes that form no character some tokenizers drop whole characters, but returned text is final.
    Text is held back while its last character is incomplete or while it could still become a stop string. Without a
    tokenizer every piece is empty. The cost of a token depends neither on the length of the answer nor on the number of
    earlier tokens without text or with bytes that form no character.

    token_texts: of the decoder, for the same skip_special_tokens. prompt_token_ids: the last ones are decoded with the
    answer, because some tokenizers drop the space in front of a text and because the answer may complete a character
    begun in the prompt. special_texts: of the decoder. A stop string that contains one is found although special
    tokens are skipped. includes_stop: the stop string is part of the text. gives_offsets: pieces have offsets, counted
    from num_chars.
    """

    decoder: Decoder | None
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    token_texts: TokenTexts | None = None
    prompt_token_ids: InitVar[Sequence[int]] = ()
    special_texts: Mapping[int, str] = field(default_factory=dict)
    includes_stop: bool = False
    gives_offsets: bool = False
    num_chars: int = 0  # of the text so far, held or not; counted for offsets
    _token_ids: list[int] = field(default_factory=list)
    _prefix: int = 0  # first token of the window to decode again
    _read: int = 0  # tokens whose text has been returned
    _checked: int = 0  # end of the tokens that were checked for having text
    _held: str = ""
    _skipped: list[tuple[int, int]] = field(default_factory=list)  # spans of special tokens in _held
    _torn: str = ""  # the text of the prompt's last, incomplete character

    def __post_init__(self, prompt_token_ids: Sequence[int]) -> None:
        if not self.skip_special_tokens or not any(
            text in stop for stop in self.stop for text in self.special_texts.values()
        ):
            self.special_texts = {}
        if self.decoder is not None and prompt_token_ids:
            self._begin_after(prompt_token_ids)

    def _begin_after(self, prompt: Sequence[int]) -> None:
        """Starts with a window of the prompt's last tokens, already returned except for an incomplete character."""
        if self.token_texts is not None and not self.token_texts[prompt[-1]].endswith(REPLACEMENT):
            return  # byte-level tokens that end with a complete character
        tail: list[int] = []
        for size in PROMPT_TAILS:
            tail = list(prompt[-size:])
            is_whole = len(tail) == len(prompt)
            for num_read in range(len(tail), max(0, len(tail) - MAX_TORN) - 1, -1):
                before = self._decode(tail[:num_read])
                if REPLACEMENT not in before and (before or (is_whole and num_read < len(tail))):
                    self._token_ids, self._read = tail, num_read
                    self._torn = self._decode(tail)[len(before) :]
                    return
            if is_whole:
                break
        self._token_ids, self._read = tail, len(tail)

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> TextPiece:
        """Adds tokens. `is_last` releases held-back text. Tokens after a completed stop string are dropped."""
        if self.decoder is None:
            return TextPiece("", list(token_ids))
        if self.stop:
            return self._feed_until_stop(token_ids, is_last=is_last)
        if self.gives_offsets:
            return self._feed_one_by_one(token_ids, is_last=is_last)
        return TextPiece(self._text_of(token_ids, is_last=is_last), list(token_ids))

    def _feed_one_by_one(self, token_ids: Sequence[int], *, is_last: bool) -> TextPiece:
        text, offsets = "", []
        for left, token_id in zip(reversed(range(len(token_ids))), token_ids, strict=True):
            offsets.append(self.num_chars)
            new = self._text_of([token_id], is_last=is_last and not left)
            text, self.num_chars = text + new, self.num_chars + len(new)
        if not token_ids:
            text = self._text_of((), is_last=is_last)
        return TextPiece(text, list(token_ids), offsets=offsets)

    def _text_of(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Returns the new text: of all tokens at once if every character is complete, else token by token."""
        if self.token_texts is not None and self._read == len(self._token_ids):
            text = "".join(map(self.token_texts.__getitem__, token_ids))
            if REPLACEMENT not in text:
                self._prefix = self._read
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
        shown, offsets = "", list[int]()
        steps = [[token_id] for token_id in token_ids] or [[]]  # no tokens: the end releases an incomplete character
        for i, step in enumerate(steps):
            is_end = is_last and i == len(steps) - 1
            offsets.append(self.num_chars)
            new = self._text_of(step, is_last=is_end)
            self._held, self.num_chars = self._held + new, self.num_chars + len(new)
            if step and step[0] in self.special_texts:
                start = len(self._held)
                self._held += self.special_texts[step[0]]
                self._skipped.append((start, len(self._held)))
            found = self._first_stop()
            if found is not None:
                place, stop = found
                size = place + len(stop) if self.includes_stop else place
                return TextPiece(shown + self._cut(size), list(token_ids[: i + 1]), stop, offsets)
            shown += self._cut(len(self._held) - (0 if is_end else self._undecided()))
        return TextPiece(shown, list(token_ids), offsets=offsets[: len(token_ids)])

    def _cut(self, size: int) -> str:
        """Removes the first `size` characters of the held text. Returns them without those of special tokens."""
        text, self._held = self._held[:size], self._held[size:]
        if self._skipped:
            spans, self._skipped = self._skipped, [(max(0, i - size), j - size) for i, j in self._skipped if j > size]
            for start, end in reversed(spans):
                text = text[:start] + text[end:]
        return text

    def _new_text(self, *, is_last: bool) -> str:
        """Returns the text after what was returned already; empty while the last character is incomplete.

        A few tokens before the new ones are decoded too, because a token's text may depend on its neighbour.
        """
        if not is_last and self._is_pointless():
            return ""
        before = self._decode(self._token_ids[self._prefix : self._read])
        after = self._decode(self._token_ids[self._prefix :])
        if after.endswith(REPLACEMENT) and not is_last:
            return ""
        # The returned and the new text share an incomplete character, or the former is a space that a tokenizer drops.
        if REPLACEMENT in after and not (before and after.startswith(before)):
            before, after = "", self._decode(self._token_ids[self._read :])
        return self._take(before, after)

    def _take(self, before: str, after: str) -> str:
        """Returns the text of `after` that follows `before`, which was returned already. Advances the window."""
        if len(after) <= len(before):
            return ""
        size = len(self._token_ids)
        self._prefix, self._read = self._read if self.token_texts is None else size, size
        text = after[len(before) :]
        if self._torn:  # either still incomplete or now completed
            text, self._torn = text.removeprefix(self._torn), ""
        return text

    def _is_pointless(self) -> bool:
        """True if many tokens are pending and decoding them all is sure to end in an incomplete character again.

        Removes pending tokens that never have text: skipped special tokens and unused ids.
        """
        if len(self._token_ids) - self._read <= MAX_PENDING:
            return False
        start = max(self._read, self._checked)
        # Decoded twice: some tokenizers drop the space in front of a text, and a token may be only a space.
        self._token_ids[start:] = [token for token in self._token_ids[start:] if self._decode([token, token])]
        self._checked = len(self._token_ids)
        if len(self._token_ids) - self._read <= MAX_PENDING:
            return False
        return all(self._decode(self._token_ids[-size:]).endswith(REPLACEMENT) for size in TAILS)

    def _decode(self, token_ids: list[int]) -> str:
        if self.decoder is None or not token_ids:
            return ""
        return str(self.decoder.decode(token_ids, skip_special_tokens=self.skip_special_tokens))

    def _first_stop(self) -> tuple[int, str] | None:
        """Returns where the stop string begins that is complete first, or the longest that ends there, and its text."""
        found = [(place + len(text), place, text) for text in self.stop if (place := self._held.find(text)) >= 0]
        return min(found)[1:] if found else None

    def _undecided(self) -> int:
        """Returns the number of characters at the end of the held text that are the beginning of a stop string."""
        longest = min(max(len(text) for text in self.stop) - 1, len(self._held))
        for size in range(longest, 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self.stop):
                return size
        return 0
