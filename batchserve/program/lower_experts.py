"""Emits the instructions of experts: routing of rows, sorting of pairs, products, and the sum of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchserve.program import instructions as at
from batchserve.program.expert_operations import GROUPS_OF_PAIR
from batchserve.program.instructions import Op
from batchserve.program.routing import Route, route_of
from batchserve.program.tape import UnsuitableModelError

if TYPE_CHECKING:
    from batchserve.program.graph import Columns, Node
    from batchserve.program.lower import Lowering
    from batchserve.program.program import Buffer


class ExpertLowering:
    """The part of a Lowering that handles the experts of its graph."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._routes: dict[bytes, Route] = {}  # by the columns of the expert numbers
        self._weights: dict[bytes, bytes] = {}
        self._groups: dict[bytes, Buffer] = {}
        self._gathered: dict[tuple[bytes, bytes], Buffer] = {}

    def plan(self, node: Node) -> tuple[Node, ...]:
        """Finds the route of `node`, experts' second products, and returns the nodes whose work the route does."""
        _, index, weights = node.inputs
        key = index.elements.tobytes(), weights.elements.tobytes()
        if self._weights.setdefault(key[0], key[1]) != key[1]:
            raise UnsuitableModelError("the same experts with other weights")
        route = self._routes[key[0]] = route_of(index, weights)
        return route.nodes

    def rows_of_pairs(self, node: Node) -> tuple[Buffer, int]:
        """Returns the place of the rows that experts' first products multiply."""
        x, index = node.inputs[0], node.inputs[1]
        key, k = (x.elements.tobytes(), index.elements.tobytes()), node.facts["per_row"]
        if key not in self._gathered:
            lowering, groups = self._lowering, self.groups(node, index)
            place = lowering.factor(x, node.facts["weight"])
            out = lowering.buffer(node, x.elements.size, is_bf16=place[0].is_bf16)
            fields = {at.COLUMNS: -(-place[0].width // 2) if out.is_bf16 else x.elements.size, at.PER_ROW: 0}
            lowering.add(Op.GATHER, node, out, x=place, y=(groups, 0), fields=fields | {at.GROUPS: k})
            self._gathered[key] = out
        return self._gathered[key], 0

    def groups(self, node: Node, index: Columns) -> Buffer:
        """Returns the groups of pairs for these expert numbers."""
        key = index.elements.tobytes()
        if key not in self._groups:
            lowering, route, k = self._lowering, self._routes[key], node.facts["per_row"]
            num_experts = node.facts["weight"].shape[0]
            fields = {at.COLUMNS: num_experts, at.GROUPS: k, at.PER_ROW: 0}
            routes = lowering.buffer(node, 2 * k, per_row=1)
            x = lowering.place(route.scores, "scores of experts")
            kind = {at.FUNCTION: route.kind, at.FACTORS: at.two_floats(route.factor)}
            y = None if route.weights is None else lowering.place(route.weights, "weights of experts")
            lowering.add(Op.ROUTE, node, routes, x=x, y=y, fields=fields | kind)
            groups = self._groups[key] = lowering.buffer(node, 2 * GROUPS_OF_PAIR * k, per_row=1, is_dense=True)
            lowering.add(Op.GROUP, node, groups, x=(routes, 0), fields=dict(fields))
        return self._groups[key]

    def combine(self, node: Node, pairs: Buffer) -> Buffer:
        """Returns the sum of each row's pairs."""
        out = self._lowering.buffer(node, per_row=1)
        groups = self.groups(node, node.inputs[1])
        fields = {at.COLUMNS: node.width, at.GROUPS: node.facts["per_row"]}
        self._lowering.add(Op.COMBINE, node, out, x=(pairs, 0), y=(groups, 0), fields=fields)
        return out
