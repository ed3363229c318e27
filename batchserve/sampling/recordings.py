"""Recorded answers that replace the model's own, for benchmarks that send recorded answers through other weights."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, MutableMapping, Sequence

import numpy as np

TOKEN = "q"  # array's type code for int64


class Recordings(MutableMapping[str, Sequence[int]]):
    """The prompt and answer recorded for each request id. Compiled code reads them by address."""

    def __init__(self, texts: dict[str, Sequence[int]] | None = None) -> None:
        self._texts: dict[str, array[int]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # address and length
        self.update(texts or {})

    def __getitem__(self, request_id: str) -> Sequence[int]:
        return self._texts[request_id]

    def __setitem__(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id] = text = array(TOKEN, token_ids)
        self._places[request_id] = text.buffer_info()

    def __delitem__(self, request_id: str) -> None:
        del self._texts[request_id], self._places[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def places(self, request_ids: Sequence[str]) -> np.ndarray:
        """Returns int64 [num_requests, 2]: the address and length of each request's text; length 0 if it has none."""
        if not self._places:
            return np.zeros((len(request_ids), 2), np.int64)
        found = [self._places.get(request_id, (0, 0)) for request_id in request_ids]
        return np.array(found, np.int64).reshape(-1, 2)
