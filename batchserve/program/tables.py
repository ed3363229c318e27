"""Tables of values that depend on positions alone: rotary factors, learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.program.patterns import rows_first
from batchserve.program.tape import NUM_ROWS

if TYPE_CHECKING:
    from batchserve.program.graph import Columns, Graph

GROWTH = 1024  # positions


class PositionTables:
    """float32 arrays [positions, columns], which grow with the largest position so far.

    The model's own operators compute them, for as many positions at once as when the operators were recorded.
    """

    def __init__(self, graph: Graph, most: int) -> None:
        """most: the number of positions."""
        self._most = most
        self._calls, self._positions = graph.position_calls, graph.positions
        self._wanted: list[tuple[torch.Tensor, np.ndarray]] = []  # recorded values, and their wanted columns
        self.arrays: list[np.ndarray] = []
        self.length = 0

    def add(self, columns: Columns) -> int:
        """Returns the number of the table for these columns, which must be of one node."""
        node, places = columns.node(), columns.places().reshape(-1)
        assert node is not None
        recorded = node.facts["tensor"]
        for number, (other, chosen) in enumerate(self._wanted):
            if other is recorded and np.array_equal(chosen, places):
                return number
        self._wanted.append((recorded, places))
        self.arrays.append(np.zeros((0, len(places)), np.float32))
        return len(self._wanted) - 1

    def grow(self, length: int) -> bool:
        """Grows to at least `length` positions. Returns True if arrays have been replaced."""
        if length <= self.length or not self._wanted:
            return False
        wanted = min(self._most, -(-length // GROWTH) * GROWTH)
        pieces = [self._compute(start) for start in range(self.length, wanted, NUM_ROWS)]
        for number, old in enumerate(self.arrays):
            new = np.concatenate([old, *(piece[number] for piece in pieces)])[:wanted]
            self.arrays[number] = np.ascontiguousarray(new)
        self.length = wanted
        return True

    def limit(self, most: int) -> None:
        """Changes the number of positions and drops all values, as the model's values may depend on that number."""
        self._most, self.length = most, 0
        self.arrays = [array[:0] for array in self.arrays]

    @torch.inference_mode()
    def _compute(self, start: int) -> list[np.ndarray]:
        values: dict[int, Any] = {id(self._positions): torch.arange(start, start + NUM_ROWS).clamp(max=self._most - 1)}

        def now(argument: Any) -> Any:
            if isinstance(argument, tuple | list):
                return [now(each) for each in argument]
            return values.get(id(argument), argument)

        for call in self._calls:
            results = call.function(*now(call.arguments), **call.options)
            for old, new in zip(call.results, results if isinstance(results, tuple | list) else [results], strict=True):
                values[id(old)] = new
        return [
            rows_first(values[id(recorded)])[:, torch.from_numpy(places)].float().numpy()
            for recorded, places in self._wanted
        ]
