"""Configures torch's compiler for a model with our own linears and overlapping kernels.

Importing this module imports the compiler, which takes a second.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.scheduler import Scheduler
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

RESIDUAL = 3  # index among the operator's arguments


def inductor_options(*, overlaps: bool) -> dict[str, Any]:
    """Returns options for torch.compile. Kernels overlap only if this version of Inductor can make them wait."""
    # Computes a norm of few rows in one kernel instead of two.
    options: dict[str, Any] = {"split_reductions": False, "post_grad_custom_post_pass": AddResiduals()}
    return {**options, "triton.enable_pdl": True} if overlaps and _can_be_made_to_wait() else options


def _can_be_made_to_wait() -> bool:
    """Returns whether Inductor uses the previous node, which _node_before hides, and waits if it is unknown."""
    decides = getattr(TritonKernel, "_handle_pdl_before_access", None)
    if decides is None or not hasattr(config.triton, "enable_pdl"):
        return False
    source = inspect.getsource(decides)
    return "scheduler.previous_node" in source and "prev_node is None or" in source


def _node_before(scheduler: Scheduler) -> object:
    """Replaces Scheduler.previous_node. While kernels overlap it is always None.

    By default Inductor makes a kernel wait if it reads, by name, what the node before it has written, and trusts that
    all earlier nodes have ended. It misses what is written in place. It also misses nodes without inputs: their kernels
    never wait, so the next kernel would start too early. If the node before is unknown, every kernel waits before it
    loads or stores anything.
    """
    return None if config.triton.enable_pdl else vars(scheduler).get("previous_node")


def _note_node(scheduler: Scheduler, node: object) -> None:
    vars(scheduler)["previous_node"] = node


# Permanent and process-wide: what is compiled elsewhere in the process at the same time must not change it back.
if _can_be_made_to_wait():
    type.__setattr__(Scheduler, "previous_node", property(_node_before, _note_node))


class AddResiduals(CustomGraphPass):
    """Joins linear(x) + residual of the same shape into one operator, if nothing else uses linear(x)."""

    def __call__(self, graph: torch.fx.Graph) -> None:
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

    def uuid(self) -> bytes:
        """Ties Inductor's programs on disk to this file, which also decides how kernels wait."""
        return get_hash_for_files((__file__,))


def _takes(product: object, residual: object) -> bool:
    if not isinstance(product, torch.fx.Node) or not isinstance(residual, torch.fx.Node) or product is residual:
        return False
    if product.target is not torch.ops.batchserve.row_product.default or len(product.users) > 1:
        return False
    own, added = product.meta["val"], residual.meta["val"]
    if not isinstance(added, torch.Tensor) or own.dtype != added.dtype:  # the other operand may be a size
        return False
    return statically_known_true(sym_eq(own.shape, added.shape)) and product.args[RESIDUAL] is None
