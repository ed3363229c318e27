"""Facts about a model's tokenizer and chat template: how it writes tool calls, and the bytes of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.conversation import Chat
from batchserve.engine.detokenizer import decoder_of, special_texts
from batchserve.runner.chat import ChatTemplate

if TYPE_CHECKING:
    from batchserve.runner.compiled_tokenizer import AnyTokenizer

# What a template has in it whose model writes calls in this format; the first that is found counts.
_SIGNS = {
    "mistral": "[TOOL_CALLS]",
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "pythonic": "func_name",
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "text", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """tool_format: how the model writes calls of tools; None if its template does not show it. takes_tools: the
    template describes the tools that it is given. takes_system: it takes messages of the system. special_tokens: the
    texts that are skipped by default.
    """

    tool_format: str | None = None
    takes_tools: bool = False
    takes_system: bool = False
    special_tokens: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: AnyTokenizer | None) -> ChatFacts:
        template = ChatTemplate(tokenizer)
        text = template.source()
        found = next((name for name, sign in _SIGNS.items() if sign in text), None)
        user = {"role": "user", "content": "text"}
        takes_tools = template.can_render(Chat([user], [TOOL]))
        takes_system = template.can_render(Chat([{"role": "system", "content": "text"}, user]))
        return cls(found, takes_tools, takes_system, frozenset(special_texts(decoder_of(tokenizer)).values()))


class TokenBytes(dict[int, bytes]):
    """The bytes that each token stands for. Bytes of one character may be those of several tokens."""

    def __init__(self, tokenizer: AnyTokenizer | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        self._is_byte_level, self._has_byte_pieces = b'"ByteLevel"' in decoder, b'"ByteFallback"' in decoder
        self._has_spaces = "\N{LOWER ONE EIGHTH BLOCK}".encode() in decoder or b"\\u2581" in decoder

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(piece, str) and token_id not in self._tokenizer.added_tokens_decoder:
            if self._is_byte_level and all(letter in _BYTES for letter in piece):
                return bytes(_BYTES[letter] for letter in piece)
            if self._has_byte_pieces and len(piece) == 6 and piece.startswith("<0x"):
                return bytes([int(piece[3:5], 16)])
            if self._has_spaces:
                return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _byte_letters() -> dict[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for (GPT-2's encoder)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
