"""How rows choose their experts: what a graph computes from the scores of all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.program.instructions import Routing
from batchserve.program.tape import UnsuitableModelError

if TYPE_CHECKING:
    from batchserve.program.graph import Columns, Node


@dataclass(frozen=True, slots=True)
class Route:
    """scores: of all experts. nodes: those that a route computes."""

    scores: Columns
    kind: int  # bits of Routing
    factor: float
    num_chosen: int
    nodes: tuple[Node, ...]


def route_of(index: Columns, weights: Columns) -> Route:
    """The route of experts by such numbers and weights. Raises UnsuitableModelError where it is another kind."""
    chosen, nodes = _whole(index), []
    if chosen is None or chosen.op != "topk_index":
        raise UnsuitableModelError("experts that are not those of the highest scores")
    kind, scores = 0, chosen.inputs[0]
    shares = _whole(scores)
    if shares is not None and shares.op == "softmax":
        kind, scores = Routing.SHARES_OF_ALL, shares.inputs[0]
        nodes.append(shares)
    factor, weight = 1.0, _whole(weights)
    if weight is not None and weight.op == "scale":
        nodes.append(weight)
        factor, weight = weight.facts["factor"], _whole(weight.inputs[0])
    if weight is not None and weight.op == "softmax":
        nodes.append(weight)
        kind, weight = kind | Routing.SHARES_OF_CHOSEN, _whole(weight.inputs[0])
    elif weight is not None and weight.op == "binary" and weight.facts["function"] == "div" and len(weight.inputs) == 2:
        total = weight.inputs[1].node()
        if total is None or total.op != "sum" or not total.inputs[0].same(weight.inputs[0]):
            raise UnsuitableModelError("weights of experts that are divided by something else than their sum")
        nodes += [weight, total]
        kind, weight = kind | Routing.ADDS_UP_TO_ONE, _whole(weight.inputs[0])
    if weight is None or weight.op != "topk_value" or not weight.inputs[0].same(chosen.inputs[0]):
        raise UnsuitableModelError("weights of experts that are not their scores")
    return Route(scores, kind, factor, chosen.width, (chosen, weight, *nodes))


def _whole(columns: Columns) -> Node | None:
    """The node whose columns these all are, in order."""
    run = columns.run()
    return run[0] if run is not None and run[1] == 0 and run[0].width == columns.elements.size else None
