"""A pass of torch's compiler: what is added to a linear's result is added by the linear's own kernel."""

from __future__ import annotations

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

RESIDUAL = 3  # of the operator's arguments


class AddResiduals(CustomGraphPass):
    """linear(x) + residual, of the same shape, becomes one operator where nobody else wants linear(x)."""

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
        return get_hash_for_files((__file__,))


def _takes(product: object, residual: object) -> bool:
    if not isinstance(product, torch.fx.Node) or not isinstance(residual, torch.fx.Node):
        return False
    if product.target is not torch.ops.batchserve.row_product.default or len(product.users) > 1:
        return False
    own, added = product.meta["val"], residual.meta["val"]
    is_alike = own.dtype == added.dtype and statically_known_true(sym_eq(own.shape, added.shape))
    return is_alike and product.args[RESIDUAL] is None
