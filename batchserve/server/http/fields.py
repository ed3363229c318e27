"""Reads the fields of a JSON object that a client has sent. A field that nobody has read is unknown, and refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchserve.errors import InvalidRequestError, invalid

PLAIN = {bool: "true or false", str: "a string", int: "an integer", list: "a list", dict: "an object"}


class Fields:
    """The fields of one object. A field that is null is the same as one that is absent.

    path: what comes before the names of its fields in messages, such as "stream_options.".
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values, self._path = values, path
        self._unread = {name: None for name, value in values.items() if value is not None}

    def raw(self, name: str) -> Any:
        """Returns any value, None if there is none."""
        self._unread.pop(name, None)
        return self._values.get(name)

    def given(self, *names: str) -> dict[str, Any]:
        """Returns those of these fields that are there, with any value."""
        return {name: value for name in names if (value := self.raw(name)) is not None}

    def flag(self, name: str, default: bool = False) -> bool:
        found = self._typed(name, bool)
        return default if found is None else bool(found)

    def text(self, name: str) -> str | None:
        found: str | None = self._typed(name, str)
        return found

    def integer(self, name: str) -> int | None:
        found: int | None = self._typed(name, int)
        return found

    def items(self, name: str) -> list[Any] | None:
        found: list[Any] | None = self._typed(name, list)
        return found

    def given_items(self, *names: str) -> dict[str, list[Any]]:
        """Returns those of these fields that are there, which must be lists."""
        return {name: value for name in names if (value := self.items(name)) is not None}

    def mapping(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._typed(name, dict)
        return found

    def nested(self, name: str) -> Fields | None:
        """Returns the fields of an object. Whoever reads them calls its `end`."""
        found = self._typed(name, dict)
        return None if found is None else Fields(found, f"{self._path}{name}.")

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str | None:
        found = self.text(name)
        if found is not None and found not in allowed:
            raise self.refused(name, found, f"one of {', '.join(allowed)}")
        return found

    def only(self, name: str, *allowed: object) -> None:
        """Reads a field that changes nothing with these values, and is refused with any other."""
        found = self.raw(name)
        if found is not None and not any(type(found) is type(each) and found == each for each in allowed):
            shown = [str(each).lower() if isinstance(each, bool) else repr(each) for each in allowed]
            raise self.refused(name, found, f"{' or '.join(dict.fromkeys([*shown, 'absent']))}: nothing else is served")

    def ignored(self, *names: str) -> None:
        """Reads fields that change nothing, whatever they say."""
        for name in names:
            self._unread.pop(name, None)

    def end(self) -> None:
        """Raises InvalidRequestError for a field that nobody has read. Keeps no value from now on: a body may be large,
        and its request long.
        """
        for name in self._unread:
            raise InvalidRequestError("UNKNOWN_FIELD", self.path(name), self._values[name], "absent: it is not known")
        self._values = {}

    def path(self, name: str) -> str:
        return f"{self._path}{name}"

    def refused(self, name: str, value: object, bound: str) -> InvalidRequestError:
        return InvalidRequestError(invalid(name), self.path(name), value, bound)

    def _typed(self, name: str, kind: type) -> Any:
        found = self.raw(name)
        if found is not None and (not isinstance(found, kind) or (kind is int and isinstance(found, bool))):
            raise self.refused(name, found, PLAIN[kind])
        return found
