"""A drafter whose faults cost one request its drafts: the seam between an engine and its drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from batchserve.draft.forest import DraftForest, DraftQueries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchserve.draft.base import Drafter, DraftRequest
    from batchserve.faults import Faults
    from batchserve.native.pool import Team

T = TypeVar("T")
PLAIN = "the request goes on without drafts"
LEFT = "the request goes on or ends as it would have; what the drafter keeps of it may be left"
TOGETHER = "the requests of the call are drafted one by one, to find the one that it was"


class GuardedDrafter:
    """Calls a drafter, and contains what that raises or proposes against its contract.

    A request at which its drafter fails is not drafted any more: its state is ended at once, and the request is in
    `failed` until `end`. Where a call for several requests fails, they are called one by one until the one that it was
    has been found. Nothing here raises an Exception.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, faults: Faults) -> None:
        self.drafter = drafter
        self.failed: set[str] = set()
        self._suspects: set[str] = set()  # they were in a call that failed, and nobody knows which one it was
        self._vocab_size = vocab_size
        self._faults = faults

    def is_ready_for(self, request_id: str, drafter: str) -> bool:
        return self._call("is_ready_for", request_id, lambda: bool(self.drafter.is_ready_for(drafter)), otherwise=False)

    def use_threads(self, team: Team) -> None:
        with self._faults.contained("drafter.use_threads", "it drafts on the threads that it had"):
            self.drafter.use_threads(team)

    def start(self, request: DraftRequest) -> bool:
        """Whether the request has draft state now."""
        self._call("start", request.request_id, self.drafter.start, request, otherwise=None)
        return request.request_id not in self.failed

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._call("observe", request_id, self.drafter.observe, request_id, token_ids, otherwise=None)

    def window_tokens(self, request_id: str) -> int:
        return self._call("window_tokens", request_id, lambda: int(self.drafter.window_tokens(request_id)), otherwise=0)

    def end(self, request_id: str) -> None:
        """Forget a request, whether it has draft state or not."""
        self._call("end", request_id, self.drafter.end, request_id, otherwise=None)
        self.failed.discard(request_id)
        self._suspects.discard(request_id)

    def tell(self, method: str, token_ids: Mapping[str, Sequence[int]]) -> Sequence[str]:
        """Call accept_all, catch_up or share_all.

        Returns whose draft state was ended for another one's fault, and may be started again: some of them may have
        been told, and others not.
        """
        call = getattr(self.drafter, method)
        if self._suspects or len(token_ids) == 1:
            for request_id, tokens in token_ids.items():
                self._call(method, request_id, call, {request_id: tokens}, otherwise=None)
            return ()
        try:
            call(token_ids)
        except Exception as error:
            self._faults.note(f"drafter.{method}", error, TOGETHER)
            self._suspects.update(token_ids)
            for request_id in token_ids:
                self._end_state(request_id)
            return [*token_ids]
        return ()

    def propose_all(self, queries: DraftQueries) -> DraftForest:
        """A tree for each query; an empty one where the drafter fails."""
        request_ids = queries.request_ids
        if len(request_ids) == 1:
            return self._call("propose_all", request_ids[0], self._propose, queries, otherwise=DraftForest.empty(1))
        if not self._suspects and self.failed.isdisjoint(request_ids):
            try:
                return self._propose(queries)
            except Exception as error:
                self._faults.note("drafter.propose_all", error, TOGETHER)
                self._suspects.update(request_ids)
        return DraftForest.merged(
            [([place], self.propose_all(queries.at([place]))) for place in range(len(request_ids))]
        )

    def _propose(self, queries: DraftQueries) -> DraftForest:
        # A copy: what the drafter does to it must not change what its trees are checked against.
        asked = DraftQueries([*queries.request_ids], queries.bounds.copy(), queries.min_probs.copy())
        forest = self.drafter.propose_all(asked)
        forest.check(queries, self._vocab_size)
        return forest

    def _call(self, method: str, request_id: str, call: Callable[..., T], *arguments: object, otherwise: T) -> T:
        """What a call for one request returns, or `otherwise` if that fails, or if an earlier one did."""
        if request_id in self.failed:
            return otherwise
        try:
            return call(*arguments)
        except Exception as error:
            self._faults.note(f"drafter.{method}", error, PLAIN if method != "end" else LEFT)
            self.failed.add(request_id)
            self._suspects.clear()
            if method != "end":
                self._end_state(request_id)
            return otherwise

    def _end_state(self, request_id: str) -> None:
        """Leave nothing behind, as far as a drafter that has failed can still do that."""
        try:
            self.drafter.end(request_id)
        except KeyError:  # it had none yet, or has none any more
            return
        except Exception as error:
            self._faults.note("drafter.end", error, LEFT)
