"""Recognises how a graph chooses experts for rows from the scores of all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.program.instructions import Routing

if TYPE_CHECKING:
    from batchserve.program.graph import Columns, Node


@dataclass(frozen=True, slots=True)
class Route:
    """How rows choose experts. scores: of all experts, or the numbers of the chosen ones if `weights` are given. nodes:
    the nodes that the route computes.
    """

    scores: Columns
    weights: Columns | None
    kind: int  # bits of Routing
    factor: float
    num_chosen: int
    nodes: tuple[Node, ...]


def route_of(index: Columns, weights: Columns) -> Route:
    """Returns the route to experts with these numbers and weights. A route of a known kind computes both."""
    return _known(index, weights) or Route(index, weights, Routing.GIVEN, 1.0, index.elements.size, ())


def _known(index: Columns, weights: Columns) -> Route | None:
    chosen, nodes = _whole(index), []
    if chosen is None or chosen.op != "topk_index":
        return None
    kind, scores = 0, chosen.inputs[0]
    shares = _whole(scores)
    if shares is not None and shares.op == "softmax":
        kind, scores = Routing.SOFTMAX_ALL, shares.inputs[0]
        nodes.append(shares)
    factor, weight = 1.0, _whole(weights)
    if weight is not None and weight.op == "scale":
        nodes.append(weight)
        factor, weight = weight.facts["factor"], _whole(weight.inputs[0])
    if weight is not None and weight.op == "softmax":
        nodes.append(weight)
        kind, weight = kind | Routing.SOFTMAX_TOP_K, _whole(weight.inputs[0])
    elif weight is not None and weight.op == "binary" and weight.facts["function"] == "div" and len(weight.inputs) == 2:
        total = weight.inputs[1].node()
        if total is None or total.op != "sum" or not total.inputs[0].same(weight.inputs[0]):
            return None
        nodes += [weight, total]
        kind, weight = kind | Routing.NORMALIZE_TOP_K, _whole(weight.inputs[0])
    if weight is None or weight.op != "topk_value" or not weight.inputs[0].same(chosen.inputs[0]):
        return None
    return Route(scores, None, kind, factor, chosen.width, (chosen, weight, *nodes))


def _whole(columns: Columns) -> Node | None:
    """Returns the node whose columns these are, all and in order."""
    run = columns.run()
    return run[0] if run is not None and run[1] == 0 and run[0].width == columns.elements.size else None
