"""Checks of fields of parameter objects, which raise InvalidRequestError with the field, its value and its bound."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from batchserve.errors import InvalidRequestError, invalid


def plain_number(value: object, kind: type[int] | type[float]) -> int | float:
    """Converts a number, also NumPy's, to a plain int or float. Raises TypeError for other types, also for booleans
    and for floats as counts, and OverflowError.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if kind is int else numbers.Real):
        raise TypeError
    return kind(value)  # type: ignore[call-overload]


def normalize_number(holder: object, name: str, kind: type[int] | type[float]) -> None:
    """Converts a field, unless it is None, to a plain int or float. Refuses other types by name."""
    value = getattr(holder, name)
    if value is None:
        return
    try:
        object.__setattr__(holder, name, plain_number(value, kind))
    except (TypeError, OverflowError) as error:
        bound = "an integer" if kind is int else "a number"
        raise InvalidRequestError(invalid(name), name, value, bound) from error


def check_bool(reason: str, field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(reason, field, value, "True or False")


def tuple_of(reason: str, field: str, values: object, kind: type) -> tuple[Any, ...]:
    """Returns a tuple of plain values, empty for None. NumPy's integers and an enumeration's texts are converted."""
    allowed = numbers.Integral if kind is int else kind
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequestError(reason, field, values, "a list")
    try:
        items = tuple(values)
    except TypeError:  # arrays with zero dimensions claim to be iterable
        raise InvalidRequestError(reason, field, values, "a list") from None
    if set(map(type, items)) <= {kind}:  # ten times faster, and references are long
        return items
    for i, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, allowed):
            bound = "a string" if kind is str else "an integer"
            raise InvalidRequestError(reason, f"{field}[{i}]", item, bound)
    # str() of an enumeration's member would be its name.
    return tuple(map(str.__str__ if kind is str else int, items))
