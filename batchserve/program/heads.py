"""Finds the rotary node that rotated attention's queries, keys or values, and where their heads lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchserve.program.tape import UnsuitableModelError

if TYPE_CHECKING:
    from batchserve.program.graph import Columns, Graph, Node


def turned(graph: Graph, columns: Columns) -> tuple[Node | None, Columns]:
    """Returns (the rotary node that rotated the first columns of each head, or None; all columns before rotation)."""
    numbers = np.unique(columns.numbers())
    found = [graph.nodes[int(number)] for number in numbers if graph.nodes[int(number)].op == "rotary"]
    if not found:
        return None, columns
    if len(found) > 1:
        raise UnsuitableModelError("heads that are turned in two ways")
    rotary, elements = found[0], columns.elements.copy()
    mine = columns.numbers() == rotary.number
    dim = rotary.facts["dim"]
    if not (mine == (np.arange(columns.shape[1]) < dim)).all():
        raise UnsuitableModelError("heads of which not the first columns are turned")
    places = columns.places()[mine].reshape(columns.shape[0], dim)
    if (places != np.arange(places.size).reshape(places.shape)).any():
        raise UnsuitableModelError("heads in another order than they were turned in")
    elements[mine] = rotary.inputs[0].elements.reshape(-1)
    return rotary, columns.pick(elements)


def groups_of(columns: Columns) -> tuple[Node, int, int] | None:
    """Returns (node, first column, columns from head to head) of [heads, dim], or None if the heads are uneven."""
    node, places = columns.node(), columns.places()
    if node is None or (np.diff(places, axis=1) != 1).any():
        return None
    steps = np.diff(places[:, 0])
    if len(steps) and (steps != steps[0]).any():
        return None
    return node, int(places[0, 0]), int(steps[0]) if len(steps) else places.shape[1]
