"""Attention as opaque torch operators, so that a compiler sees a model or a layer without looking into attention.

An operator takes only tensors and numbers, so it finds its backend by number in this module's table.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from batchserve.attention.base import AttentionParams

if TYPE_CHECKING:
    from batchserve.attention.paged import PagedBackend

LAYER = "batchserve_layer"  # an attention module's layer_idx as a tensor, so that layers share a compiled program

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
    """Calls PagedBackend.attend_over for the step that the backend has begun.

    The caches are declared as mutated, so that no compiler moves another use of them across this operator. It must
    write to the caches that it is given: a compiler may pass copies, which it copies back.
    """
    params = AttentionParams(scaling, sliding_window, softcap, sinks)
    return _backends[backend].attend_over(key_cache, value_cache, query, key, value, params)


def _attend_in_layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: torch.Tensor,
    backend: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Calls PagedBackend.attend with the layer index from a CPU tensor, so that one program serves all layers.

    It writes to caches that the program does not know, and that nothing else in the program could read or write.
    """
    params = AttentionParams(scaling, sliding_window, softcap, sinks)
    return _backends[backend].attend(int(layer), query, key, value, params)


attend_op = torch.library.custom_op(
    "batchserve::attend",
    _attend,
    mutates_args=("key_cache", "value_cache"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor? sinks, "
    "int backend, float scaling, int? sliding_window, float? softcap) -> Tensor",
)


layer_op = torch.library.custom_op(
    "batchserve::attend_in_layer",
    _attend_in_layer,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor layer, int backend, float scaling, "
    "int? sliding_window, float? softcap) -> Tensor",
)


@attend_op.register_fake
@layer_op.register_fake
def _shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class OpaqueAttention:
    """Stands in for a PagedBackend in modelling code. Has only attend(), which calls the operator."""

    def __init__(self, backend: PagedBackend) -> None:
        self._backend = backend  # kept alive here: the table has a weak reference
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


class LayerAttention:
    """Stands in for a PagedBackend in compiled layers. Has only attend(), which calls the operator."""

    def __init__(self, backend: PagedBackend, model: torch.nn.Module) -> None:
        self._backend = backend  # kept alive here: the table has a weak reference
        self._number = next(_numbers)
        _backends[self._number] = backend
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, LAYER, torch.tensor(module.layer_idx))

    def attend(
        self, layer: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.batchserve.attend_in_layer(
            query,
            key,
            value,
            params.sinks,
            layer,
            self._number,
            params.scaling,
            params.sliding_window,
            params.softcap,
        )
        return out
