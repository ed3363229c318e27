"""Fuses nodes into the instruction of their only user: the operations after a product, gates and sums."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from batchserve.program.experts import UP
from batchserve.program.instructions import Function

if TYPE_CHECKING:
    from batchserve.program.graph import Columns, Graph, Node

FUNCTIONS = {
    "silu": Function.SILU, "gelu": Function.GELU, "gelu_tanh": Function.GELU_TANH, "relu": Function.RELU,
    "sigmoid": Function.SIGMOID, "tanh": Function.TANH,
}  # fmt: skip
PRODUCTS = ("product", UP)


class Fusion:
    """Plans which nodes one instruction computes. reached: the numbers of the nodes that the logits need. users: these
    nodes' users. fused: by a node's number, the node whose instruction computes it. Gates and sums are in facts.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.reached = reachable(graph)
        self.fused: dict[int, Node] = {}
        self.users: dict[int, list[Node]] = defaultdict(list)
        for number in self.reached:
            for each in {id(source): source for source in sources(graph.nodes[number])}.values():
                self.users[each.number].append(graph.nodes[number])

    def plan(self, node: Node) -> None:
        """Fuses what it can into a node's instruction. Must be called for nodes in order."""
        if node.op == "binary" and node.facts["function"] == "mul" and len(node.inputs) == 2:
            self._plan_gate(node)
        elif node.op in ("unary", "scale", "cap"):
            source = self._only(node.inputs[0], node)
            if source is not None and self._can_end(node, self.chain(source)):
                self.fused[source.number] = node
        elif node.op == "binary" and node.facts["function"] == "add" and len(node.inputs) == 2:
            self._plan_sum(node)

    def _can_end(self, node: Node, chain: list[Node]) -> bool:
        """True if a chain and the node after it can be one instruction."""
        if node.op == "unary":
            return len(chain) == 1 and chain[-1].op in PRODUCTS and node.facts["function"] in FUNCTIONS
        if chain[-1].op == "embedding":
            return len(chain) == 1 and node.op == "scale"
        return chain[-1].op == "product" and not any(each.op == "cap" for each in chain)

    def chain(self, node: Node) -> list[Node]:
        """Returns a node and the nodes fused into it, down to the product."""
        chain = [node]
        while chain[-1].op in ("unary", "scale", "cap"):
            source = chain[-1].inputs[0].node()
            if source is None or self.fused.get(source.number) is not chain[-1]:
                break
            chain.append(source)
        return chain

    def _only(self, columns: Columns, user: Node) -> Node | None:
        """Returns the node whose columns these are, all and in order, if `user` is its only user."""
        run = columns.run()
        if run is None or run[1] != 0 or run[0].width != columns.elements.size:
            return None
        node = run[0]
        return node if self.users[node.number] == [user] and node is not self.last() else None

    def last(self) -> Node | None:
        """Returns the node of the logits."""
        run = self._graph.logits.run()
        return None if run is None else run[0]

    def _plan_gate(self, node: Node) -> None:
        """Fuses function(x times gate) * (x times up)."""
        for gate, up in (node.inputs, node.inputs[::-1]):
            function, other = gate.run(), up.run()
            if function is None or other is None or function[1] != 0 or function[0].op != "unary":
                continue
            activated = function[0]
            source = activated.inputs[0].run()
            if source is None or activated.facts["function"] not in FUNCTIONS or activated.width != node.width:
                continue
            products, users = (source[0], other[0]), {activated.number, node.number}
            mine = self.users[activated.number] == [node] and all(
                each.op in PRODUCTS and {user.number for user in self.users[each.number]} <= users for each in products
            )
            if mine and products[0].inputs[0].same(products[1].inputs[0]):
                node.facts["gate"] = (source, other, activated.facts["function"])
                self.fused.update({activated.number: node, source[0].number: node, other[0].number: node})
                return

    def _plan_sum(self, node: Node) -> None:
        """Fuses a product into a sum whose other operand nothing reads afterwards."""
        for base, added in (node.inputs, node.inputs[::-1]):
            product, run = self._only(added, node), base.run()
            if product is None or run is None or run[1] != 0 or run[0].width != node.width:
                continue
            chain = self.chain(product)
            if chain[-1].op != "product" or any(each.op in ("unary", "cap") for each in chain):
                continue
            others = [user for user in self.users[run[0].number] if user is not node]
            if run[0].number in self.fused or run[0].op in ("attend", "position", "norm"):
                continue
            if all(self._place_of(user) < node.number for user in others):
                node.facts["sum"] = (run[0], product)
                self.fused[product.number] = node
                return

    def _place_of(self, node: Node) -> int:
        """Returns the number of the node whose instruction computes this one."""
        while node.number in self.fused:
            node = self.fused[node.number]
        return node.number


def sources(node: Node) -> list[Node]:
    """Returns the nodes that a node is computed from."""
    columns = [*node.inputs, *(node.facts[name] for name in ("cosine", "sine") if name in node.facts)]
    graph = columns[0].graph if columns else None
    return (
        [] if graph is None else [graph.nodes[int(each)] for source in columns for each in np.unique(source.numbers())]
    )


def reachable(graph: Graph) -> set[int]:
    """Returns the numbers of all nodes that the logits are computed from."""
    found: set[int] = set()
    left = [graph.nodes[int(each)] for each in np.unique(graph.logits.numbers())]
    while left:
        node = left.pop()
        if node.number not in found:
            found.add(node.number)
            left += sources(node)
    return found
