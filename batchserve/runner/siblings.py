"""Linears of a module that take the same input, as one product: queries, keys and values, or a gate and what it gates.

Fewer and larger products read weights faster. Which linears these are is seen, not known: in the probe at load they
are called one behind the other with the same tensor.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Product = Callable[[torch.Tensor, torch.Tensor | None], torch.nn.Module]
    # Of each group: the parent, and the names of its children in the order they are called.
    Siblings = list[tuple[torch.nn.Module, list[str]]]


class InputWatch:
    """Which linears forwards have called, one by one, and with what."""

    def __init__(self) -> None:
        self._calls: list[tuple[torch.nn.Linear, torch.Tensor]] = []  # inputs live on: a new one is another object

    def note(self, linear: torch.nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
        self._calls.append((linear, arguments[0] if arguments else torch.empty(0)))  # by its name: nobody's sibling

    def siblings(self, model: torch.nn.Module) -> Siblings:
        """Who was called with the same tensor; nothing is remembered afterwards, so that weights can be given up."""
        num_calls = Counter(linear for linear, _ in self._calls)
        places = {each: (parent, name) for parent in model.modules() for name, each in parent.named_children()}
        found = []
        for _, calls in groupby(self._calls, lambda call: (id(call[1]), places[call[0]][0], call[0].bias is None)):
            own = [linear for linear, _ in calls]
            if len(own) > 1 and all(num_calls[linear] == 1 for linear in own):
                found.append((places[own[0]][0], [places[linear][1] for linear in own]))
        self._calls.clear()
        return found


@contextmanager
def watch_inputs(model: torch.nn.Module) -> Iterator[InputWatch]:
    """What the model's linears are called with until this ends."""
    watch = InputWatch()
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    hooks = [linear.register_forward_pre_hook(watch.note) for linear in linears]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def lying_apart(siblings: Siblings) -> Iterator[None]:
    """Until this ends, rows of what they give lie as they will in one product: what others give is between them."""
    linears = [getattr(parent, name) for parent, names in siblings for name in names]
    hooks = [linear.register_forward_hook(_between_others) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _between_others(linear: torch.nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
    return torch.cat([output, output], -1)[..., : output.shape[-1]]


class _SharedProduct(torch.nn.Module):
    """The product of all siblings; of the last input it remembers what some of them have not asked for yet."""

    def __init__(self, linears: Sequence[torch.nn.Linear], product: Product) -> None:
        super().__init__()
        self._sizes = [linear.out_features for linear in linears]
        weights = tuple(linear.weight for linear in linears)
        biases = tuple(linear.bias for linear in linears if linear.bias is not None)
        self._product = product(torch.cat(weights), torch.cat(biases) if biases else None)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """What one of the siblings gives for x."""
        if x is not self._input:
            self._input, self._outputs = x, self._product(x).split(self._sizes, -1)
        output = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class Sibling(torch.nn.Module):
    """Stands where a linear was."""

    def __init__(self, shared: _SharedProduct, number: int) -> None:
        super().__init__()
        self.shared = shared  # a module of this one, for whoever goes through all modules
        self._output = partial(shared.output, number)  # no search for a module's attribute in every call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._output(x)


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """A linear of these weights."""
    out_features, in_features = weight.shape
    linear = torch.nn.Linear(in_features, out_features, bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


@torch.inference_mode()
def join_siblings(siblings: Siblings, product: Product) -> None:
    """Swap them. product(weight [out_features, in_features], bias) is what multiplies."""
    for parent, names in siblings:
        shared = _SharedProduct([getattr(parent, name) for name in names], product)
        for number, name in enumerate(names):
            setattr(parent, name, Sibling(shared, number))
