"""Records one forward of a model as the list of operators that it calls.

The model's code needs no changes: it runs as it is, over a few rows, and torch's dispatcher reports every operator.
Values are kept: what depends on no input is a constant, and some patterns are recognised by their numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from batchserve.attention.base import AttentionParams

    Forward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

NUM_ROWS = 37  # of the forward; no other dimension should have this size
ATTEND = "attend"


@dataclass(slots=True, eq=False)
class Call:
    """A call of an operator, or of attention (name ATTEND; its arguments are layer, q, k, v and params)."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Tape:
    """The calls of one forward in order. ids, positions and keep are its inputs; logits is its output."""

    calls: list[Call]
    ids: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    logits: torch.Tensor


class UnsuitableModelError(Exception):
    """A model's calls cannot be made into a program; the message says why."""


@dataclass(slots=True)
class _Recorder:
    """The attention backend of the recorded forward. It returns each row's own value, as only shapes matter."""

    calls: list[Call] = field(default_factory=list)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            group = query.shape[1] // key.shape[1]
            out = value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous()
        self.calls.append(Call(ATTEND, None, (layer, query, key, value, params), {}, (out,)))
        return out


class _Watch(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = tuple(each for each in (out if isinstance(out, tuple | list) else [out])
                        if isinstance(each, torch.Tensor))  # fmt: skip
        self._calls.append(Call(func.overloadpacket.__name__, func, tuple(args), kwargs or {}, results))
        return out


@torch.inference_mode()
def record(
    forward: Forward,
    vocab_size: int,
    num_positions: int,
    noting: Callable[[Callable[[Call], None]], AbstractContextManager[None]] = lambda note: nullcontext(),
) -> Tape:
    """Records one forward of NUM_ROWS rows and keeps all of their logits.

    forward(attention, ids, positions, keep): returns the model's logits, [num_rows, vocab_size]. noting: a context in
    which the model records calls of functions other than operators (experts.py).
    """
    recorder = _Recorder()
    ids, positions = (torch.arange(NUM_ROWS) * 7 + 3) % vocab_size, torch.arange(NUM_ROWS).clamp(max=num_positions - 1)
    keep = torch.arange(NUM_ROWS)
    with noting(recorder.calls.append), _Watch(recorder.calls):
        logits = forward(recorder, ids, positions, keep)
    return Tape(recorder.calls, ids, positions, keep, logits)


def tensors_in(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Returns all tensors in arguments, including those in lists."""
    found = []
    for each in arguments:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            found += tensors_in(each)
    return found


def mapped(arguments: Iterable[Any], change: Callable[[torch.Tensor], Any]) -> list[Any]:
    """Returns arguments with all tensors changed, including those in lists."""
    return [
        change(each) if isinstance(each, torch.Tensor)
        else mapped(each, change) if isinstance(each, tuple | list) else each
        for each in arguments
    ]  # fmt: skip
