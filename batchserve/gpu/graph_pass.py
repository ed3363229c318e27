"""What is done to a model's graph before torch's compiler makes kernels of it."""

from __future__ import annotations

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

RESIDUAL = 3  # of the operator's arguments


class CannotOverlapError(RuntimeError):
    """Kernels that the compiler makes of this graph must not begin before those in front of them have ended."""


class GraphPass(CustomGraphPass):
    """Linears add what is added to their results; with `overlaps`, graphs that cannot have it raise CannotOverlapError.

    A graph that the compiler has in its cache on disk has come through here before.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self._overlaps = overlaps

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self._overlaps:
            check_overlap(graph)
        add_residuals(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,), f"overlaps: {self._overlaps}")


def check_overlap(graph: torch.fx.Graph) -> None:
    """Raises CannotOverlapError where a tensor is made of nothing.

    Inductor has a kernel wait only beside what it loads. One that loads nothing may end before the kernel in front of
    it, and the kernel behind, which waits for that one only, would begin too early.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and not node.all_input_nodes:
            raise CannotOverlapError(f"{node.target} loads nothing")


def add_residuals(graph: torch.fx.Graph) -> None:
    """linear(x) + residual, of the same shape, becomes one operator where nobody else wants linear(x)."""
    for node in list(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)):
        for product, residual in (node.args, node.args[::-1]):
            if not node.kwargs and _takes(product, residual):
                arguments = [*product.args]
                arguments[RESIDUAL] = residual
                with graph.inserting_before(node):
                    joined = graph.call_function(product.target, tuple(arguments))
                joined.meta = node.meta
                node.replace_all_uses_with(joined)
                graph.erase_node(node)
                graph.erase_node(product)
                break


def _takes(product: object, residual: object) -> bool:
    if not isinstance(product, torch.fx.Node) or not isinstance(residual, torch.fx.Node) or product is residual:
        return False
    if product.target is not torch.ops.batchserve.row_product.default or len(product.users) > 1:
        return False
    own, added = product.meta["val"], residual.meta["val"]
    is_alike = own.dtype == added.dtype and statically_known_true(sym_eq(own.shape, added.shape))
    return is_alike and product.args[RESIDUAL] is None
