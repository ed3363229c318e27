"""Checks sizes and counts in the bytes of a large message before it is parsed.

Protobuf takes up to a tenth of a second per megabyte of tiny fields. It holds the interpreter lock meanwhile, which
would stall every stream. A message that passes these checks is parsed in about the time that it takes to copy it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from batchserve.errors import InvalidRequestError, invalid
from batchserve.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
)
from batchserve.server.grpc.convert import (
    MAX_ITEMS,
    check_num_prompt_tokens,
    check_num_reference_tokens,
    check_num_tokens,
    references_too_long,
    unknown_field,
)
from batchserve.types import MAX_REFERENCE_CHARS

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

SMALL_MESSAGE_BYTES = 16 << 10  # parsed within a millisecond, whatever it contains
MAX_FIELDS = 4096  # per message, nested messages included; packed ids count as one field
MAX_FIELD_BYTES = 64 << 10  # for a text field without a bound of its own here
MAX_TEXT_BYTES_PER_TOKEN = 32  # text has 3 to 15; single tokens that are runs of spaces have more
MAX_CHAR_BYTES = 4
MAX_VARINT_BYTES = 10
COUNTED_AT_ONCE = 64 << 10
PROMPT_IDS, REFERENCE_IDS, DETOKENIZED_IDS = "token_ids.ids", "references.token_ids.ids", "token_ids"
REFERENCE_TEXT = "references.text"
CHAT_TEXTS = (f"chat.messages.{name}" for name in ("text", "parts.texts", "tool_calls", "extra_fields"))
PROMPT_TEXTS = ("text", "chat.tools", *CHAT_TEXTS)
# Lists of short texts: how many, of how many characters, and the reason for refusing one.
TEXTS = {
    "stop.stop_strings": (MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS, "INVALID_STOP_STRING"),
    "sampling_params.bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, "INVALID_BAD_WORD"),
    "structured_output.choice.texts": (MAX_CHOICES, MAX_CHOICE_CHARS, "INVALID_CHOICE"),
}
VARINT, FIXED64, SIZED, GROUP, FIXED32 = 0, 1, 2, 3, 5  # wire types
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def check_sizes(data: bytes, message: Descriptor, max_model_len: int) -> None:
    """Raises InvalidRequestError for a message that is slow to parse, or that has unknown or malformed fields.

    Small messages pass unchecked: the same checks are made on the parsed message.
    """
    if len(data) > SMALL_MESSAGE_BYTES:
        try:
            _Sizes(data, max_model_len).add(message, "", 0, len(data))
        except IndexError:  # the data ends in the middle of a varint
            raise malformed() from None


def malformed() -> InvalidRequestError:
    """Returns the error for bytes that do not parse as a message."""
    bound = "bytes that parse as the method's request message"
    return InvalidRequestError("MALFORMED_MESSAGE", "request", "<bytes>", bound)


class _Sizes:
    """Running totals of the fields of one message."""

    def __init__(self, data: bytes, max_model_len: int) -> None:
        self._data = data
        self._max_model_len = max_model_len
        self._num_fields = 0
        self._totals = Counter[str]()  # token ids, or bytes of text, by field path

    def add(self, message: Descriptor, path: str, at: int, end: int) -> None:
        """Counts and checks the fields of the message in data[at:end]."""
        while at < end:
            tag, at = self._varint(at)
            number, wire_type = tag >> 3, tag & 7
            field = message.fields_by_number.get(number)
            if field is None or wire_type == GROUP or not _is_expected(field, wire_type):
                raise unknown_field(path, number, wire_type, message.full_name)
            self._count(path + field.name)
            if wire_type == VARINT:
                _, value_end = self._varint(at)
                self._add_ids(path + field.name, 1)
            elif wire_type == SIZED:
                size, at = self._varint(at)
                value_end = at + size
                if value_end <= end:
                    self._add_sized(field, path + field.name, at, value_end)
            else:
                value_end = at + FIXED_BYTES[wire_type]
            if value_end > end:
                raise malformed()
            at = value_end

    def _add_sized(self, field: FieldDescriptor, path: str, at: int, end: int) -> None:
        if field.message_type is not None:
            self.add(field.message_type, f"{path}.", at, end)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            self._add_text(path, end - at)
        else:
            self._add_ids(path, _num_varints(self._data, at, end))

    def _add_ids(self, path: str, count: int) -> None:
        self._totals[path] += count
        if path == PROMPT_IDS:
            check_num_prompt_tokens(self._totals[path], self._max_model_len)
        elif path == DETOKENIZED_IDS:
            check_num_tokens(self._totals[path], self._max_model_len)
        elif path == REFERENCE_IDS:
            check_num_reference_tokens(self._totals[path])
        elif path in MAX_ITEMS and self._totals[path] > MAX_FIELD_BYTES:
            raise _too_many(path, str(self._totals[path]))

    def _add_text(self, path: str, size: int) -> None:
        self._totals[path] += size
        size = self._totals[path]
        if path in PROMPT_TEXTS:
            most = MAX_TEXT_BYTES_PER_TOKEN * self._max_model_len + MAX_FIELD_BYTES
            if size > most:
                bound = f"at most {self._max_model_len - 1} tokens (max_model_len - 1) of some {most} bytes in all"
                raise InvalidRequestError("PROMPT_TOO_LONG", path, f"{size} bytes", bound)
        elif path == REFERENCE_TEXT:
            if size > MAX_CHAR_BYTES * MAX_REFERENCE_CHARS:
                raise references_too_long(f"{size} bytes", f"{MAX_REFERENCE_CHARS} characters")
        elif path in TEXTS:
            most, most_chars, reason = TEXTS[path]
            if size > MAX_CHAR_BYTES * most * most_chars:
                bound = f"at most {most} strings of at most {most_chars} characters"
                raise InvalidRequestError(reason, path, f"{size} bytes", bound)
        elif size > MAX_FIELD_BYTES:
            reason = invalid(path.rpartition(".")[2])
            raise InvalidRequestError(reason, path, f"{size} bytes", f"at most {MAX_FIELD_BYTES} bytes")

    def _count(self, path: str) -> None:
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise _too_many(path, f"more than {MAX_FIELDS}")

    def _varint(self, at: int) -> tuple[int, int]:
        """Returns (the varint that starts at this offset, the offset of its end)."""
        value = 0
        for place in range(MAX_VARINT_BYTES):
            byte = self._data[at + place]
            value |= (byte & 127) << 7 * place
            if byte < 128:
                return value, at + place + 1
        raise malformed()


def _is_expected(field: FieldDescriptor, wire_type: int) -> bool:
    """True if the field may have this wire type. Repeated numbers may be packed."""
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE):
        return wire_type == SIZED
    fixed = {FieldDescriptor.TYPE_FLOAT: FIXED32, FieldDescriptor.TYPE_DOUBLE: FIXED64}
    return wire_type == fixed.get(field.type, VARINT) or (field.is_repeated and wire_type == SIZED)


def _num_varints(data: bytes, at: int, end: int) -> int:
    """Returns the number of varints in data[at:end]. Each has one byte without the highest bit."""
    count = 0
    for start in range(at, end, COUNTED_AT_ONCE):  # each piece stays in the CPU cache
        piece = np.frombuffer(data, np.uint8, min(COUNTED_AT_ONCE, end - start), start)
        count += int(np.count_nonzero(piece < 128))
    return count


def _too_many(path: str, value: str) -> InvalidRequestError:
    if path in MAX_ITEMS:
        reason, most = MAX_ITEMS[path]
        return InvalidRequestError(reason, path, value, f"at most {most}")
    bound = f"in a message of at most {MAX_FIELDS} fields, ids packed"
    return InvalidRequestError("TOO_MANY_FIELDS", path, value, bound)
