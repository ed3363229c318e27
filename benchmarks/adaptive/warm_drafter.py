"""A drafter as a server's is that has been running for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from batchserve.bench.replay import SCOPE, ReplayRecord
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.request import DraftScope


class WarmDrafter(Drafter):
    """A drafter that has seen some records, and nothing else at the beginning of each run (`renew`).

    on_query is called with the number of requests that are to be drafted.
    """

    def __init__(
        self, inner: Drafter, warm: Sequence[ReplayRecord] = (), on_query: Callable[[int], None] = lambda number: None
    ) -> None:
        self._inner = inner
        self._warm = warm
        self._on_query = on_query
        self._is_new = False  # nobody has begun since it was renewed
        self.renew()

    def renew(self) -> None:
        """Forget all but the records: what a run shares, and what it teaches, the next one would find."""
        if self._is_new:
            return
        self._inner.clear_scope(SCOPE)
        for i, record in enumerate(self._warm):
            name = f"warm-{i}"
            self._inner.start(DraftRequest(name, record.prompt_token_ids, references=record.references, scope=SCOPE))
            self._inner.accept(name, record.response_token_ids)
            self._inner.share(name, record.response_token_ids)
            self._inner.end(name)
        self._is_new = True

    @property
    def name(self) -> str:
        return self._inner.name

    def start(self, request: DraftRequest) -> None:
        self._is_new = False
        self._inner.start(replace(request, scope=SCOPE, drafter=""))

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        self._on_query(len(queries))
        return self._inner.propose(queries)

    def propose_all(self, queries: DraftQueries) -> DraftForest:
        self._on_query(len(queries))
        return self._inner.propose_all(queries)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._inner.accept(request_id, token_ids)

    def accept_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        self._inner.accept_all(token_ids)

    def catch_up(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        self._inner.catch_up(token_ids)

    def end(self, request_id: str) -> None:
        self._inner.end(request_id)

    def clear_scope(self, scope: DraftScope) -> None:
        self._inner.clear_scope(scope)

    def memory_bytes(self) -> int:
        return self._inner.memory_bytes()
