"""Joins linears of a module that take the same input into one product: query, key and value, or gate and up.

Fewer and larger products read weights faster. These linears are found by observation: in the probe at load, they are
called one after the other with the same tensor.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Product = Callable[[torch.Tensor, torch.Tensor | None], torch.nn.Module]
    # For each group: the parent, and the names of its children in call order.
    FusedLinears = list[tuple[torch.nn.Module, list[str]]]


class InputWatch:
    """Records the calls of linears, in order, with their inputs. Inference mode does not count in-place changes."""

    def __init__(self) -> None:
        # (linear, input, its in-place changes so far). Inputs are kept alive, so that a new one has another id.
        self._calls: list[tuple[torch.nn.Linear, torch.Tensor, int]] = []

    def note(self, linear: torch.nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
        x = arguments[0] if arguments else torch.empty(0)  # passed by keyword: has no siblings
        self._calls.append((linear, x, x._version))

    def siblings(self, model: torch.nn.Module) -> FusedLinears:
        """Returns groups of linears called with the same tensor. Clears the record, so that weights can be freed."""
        num_calls = Counter(linear for linear, _, _ in self._calls)
        places = {each: (parent, name) for parent in model.modules() for name, each in parent.named_children()}

        def kind(call: tuple[torch.nn.Linear, torch.Tensor, int]) -> tuple[object, ...]:
            linear, x, version = call
            return id(x), version, places[linear][0], linear.bias is None

        found = []
        for _, calls in groupby(self._calls, kind):
            own = [linear for linear, _, _ in calls]
            if len(own) > 1 and all(num_calls[linear] == 1 for linear in own):
                found.append((places[own[0]][0], [places[linear][1] for linear in own]))
        self._calls.clear()
        return found


@contextmanager
def watch_inputs(model: torch.nn.Module) -> Iterator[InputWatch]:
    """Records the calls of the model's linears inside the block, except those with hooks, which a swap would lose."""
    watch = InputWatch()
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear and not has_hooks(module)]
    hooks = [linear.register_forward_pre_hook(watch.note) for linear in linears]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def trial_fusion(siblings: FusedLinears) -> Iterator[None]:
    """Swaps the linears inside the block as if they were one product. Each of them still multiplies by itself."""
    linears = [[getattr(parent, name) for name in names] for parent, names in siblings]
    try:
        for (parent, names), own in zip(siblings, linears, strict=True):
            _swap(parent, names, _SharedProduct(_EachByItself(own), [each.out_features for each in own]))
        yield
    finally:
        for (parent, names), own in zip(siblings, linears, strict=True):
            for name, linear in zip(names, own, strict=True):
                setattr(parent, name, linear)


class _EachByItself(torch.nn.Module):
    """Concatenates the outputs of several linears."""

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        super().__init__()
        self._linears = torch.nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self._linears], -1)


class _SharedProduct(torch.nn.Module):
    """The product of all siblings. Keeps each sibling's output for the last input until the sibling takes it."""

    def __init__(self, product: torch.nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self._product, self._sizes = product, sizes
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Returns one sibling's output for x. It is handed out once, as the model may change it in place."""
        if x is not self._input or self._outputs[number] is None:
            self._input, self._outputs = x, [*self._product(x).split(self._sizes, -1)]
        output, self._outputs[number] = self._outputs[number], None
        if number == len(self._sizes) - 1:
            self._input, self._outputs = None, []
        return cast("torch.Tensor", output)


class FusedOutput(torch.nn.Module):
    """Takes the place of a linear."""

    def __init__(self, shared: _SharedProduct, number: int) -> None:
        super().__init__()
        self.shared = shared  # registered as a submodule, for code that walks all modules
        self._number = number
        self._output = partial(shared.output, number)  # avoids a module attribute lookup in every call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_compiling():  # a partial of a method would be another function in every layer
            return self.shared.output(self._number, x)
        return self._output(x)


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """Returns a linear with these weights."""
    out_features, in_features = weight.shape
    linear = torch.nn.Linear(in_features, out_features, bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


@torch.inference_mode()
def fuse_linears(siblings: FusedLinears, product: Product) -> None:
    """Swaps the siblings. product(weight [out_features, in_features], bias) makes the module that multiplies."""
    for parent, names in siblings:
        linears = [getattr(parent, name) for name in names]
        weight = torch.cat([linear.weight for linear in linears])
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        _swap(parent, names, _SharedProduct(product(weight, bias), [linear.out_features for linear in linears]))


def _swap(parent: torch.nn.Module, names: list[str], shared: _SharedProduct) -> None:
    for number, name in enumerate(names):
        setattr(parent, name, FusedOutput(shared, number))
