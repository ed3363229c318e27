"""Attention as one opaque operator of torch, so that a compiler sees a whole model without looking into it.

An operator takes tensors and numbers only: the backend behind it is found by its number, in the one table of this
module. Caches are named as what the operator writes to, so that no compiler moves another use of them across it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from batchserve.attention.base import AttentionParams

if TYPE_CHECKING:
    from batchserve.attention.paged import PagedBackend

_backends: WeakValueDictionary[int, PagedBackend] = WeakValueDictionary()
_numbers = itertools.count()


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    sinks: torch.Tensor | None,
    backend: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """PagedBackend.attend_over of the step that the backend has begun.

    The caches that are given are those to write to: where a compiler makes copies of them, it copies these back.
    """
    params = AttentionParams(scaling, sliding_window, softcap, sinks)
    return _backends[backend].attend_over(key_cache, value_cache, query, key, value, params)


attend_op = torch.library.custom_op(
    "batchserve::attend",
    _attend,
    mutates_args=("key_cache", "value_cache"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor? sinks, "
    "int backend, float scaling, int? sliding_window, float? softcap) -> Tensor",
)


@attend_op.register_fake
def _shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class OpaqueAttention:
    """What modelling code is given in place of a PagedBackend: attend() only, through the operator."""

    def __init__(self, backend: PagedBackend) -> None:
        self._backend = backend  # kept alive: the table does not
        self._number = next(_numbers)
        self._caches = backend.caches
        _backends[self._number] = backend

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        key_cache, value_cache = self._caches[layer]
        out: torch.Tensor = torch.ops.batchserve.attend(
            query,
            key,
            value,
            key_cache,
            value_cache,
            params.sinks,
            self._number,
            params.scaling,
            params.sliding_window,
            params.softcap,
        )
        return out
