"""Who runs in the next step, and with how many rows. Plain Python: the same requests give the same plan."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchserve.config import EngineConfig
    from batchserve.scheduler.kv_allocator import KVAllocator


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step: this many pending tokens, and at most so many draft tokens behind them.

    Verified draft tokens may be max_draft_depth deep; no row at all may be deeper than max_row_depth.
    """

    request: Request
    num_scheduled_tokens: int
    max_draft_tokens: int = 0
    max_draft_depth: int = 0
    max_row_depth: int = 0

    @property
    def is_sampled(self) -> bool:
        """Whether the rows reach the request's last token, so that the next one is sampled."""
        return self.num_scheduled_tokens == self.request.num_pending_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. K/V for the pending tokens is reserved; for drafts it is not yet."""

    scheduled: list[ScheduledRequest]
    preempted: list[Request]


class Scheduler:
    """First come, first served, under max_num_seqs, max_num_batched_tokens and the K/V budget.

    Running requests are kept in order of arrival. When memory runs out the newest is preempted: its K/V is freed and
    recomputed later, from the prompt and the tokens that it has already given.
    """

    def __init__(self, config: EngineConfig, allocator: KVAllocator, max_model_len: int) -> None:
        self._config = config
        self._allocator = allocator
        self._max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its K/V at once."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._allocator.release(request.request_id)
        request.move_to(RequestStatus.FINISHED)

    def expired(self, now_s: float) -> list[Request]:
        """Requests whose deadline has passed, waiting or running."""
        return [r for r in self.requests() if r.deadline_s is not None and r.deadline_s <= now_s]

    def requests(self) -> Iterable[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self) -> SchedulerOutput:
        """Plan one step: a row for everyone who decodes, prefill chunks, then drafts with what is left."""
        preempted: list[Request] = []
        rows_left = self._config.max_num_batched_tokens
        planned: dict[str, int] = {}
        for request in list(self.running):
            if request.num_pending_tokens == 1 and self._reserve(request, 1, preempted):
                planned[request.request_id] = 1
                rows_left -= 1
        # Rows kept for drafts while prompts are waiting to be computed: what they ask for, at most half.
        wanted = sum(r.speculation.max_draft_tokens for r in self.running if r.request_id in planned)
        chunk_rows = rows_left - min(rows_left // 2, wanted)
        for request in list(self.running):
            if request.status is RequestStatus.RUNNING and request.request_id not in planned:
                chunk_rows -= self._plan_chunk(request, chunk_rows, planned, preempted)
        if not preempted:
            self._admit(chunk_rows, planned)
        # A request planned above may have been preempted by an older one after that.
        running = [r for r in self.running if r.request_id in planned]
        rows_left = self._config.max_num_batched_tokens - sum(planned[r.request_id] for r in running)
        return SchedulerOutput(self._with_drafts(running, planned, rows_left), preempted)

    def _plan_chunk(self, request: Request, rows: int, planned: dict[str, int], preempted: list[Request]) -> int:
        chunk = min(rows, request.num_pending_tokens, self._config.prefill_chunk_size or rows)
        if chunk < 1 or not self._reserve(request, chunk, preempted):
            return 0
        planned[request.request_id] = chunk
        return chunk

    def _admit(self, rows: int, planned: dict[str, int]) -> None:
        while self.waiting and rows > 0 and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            # Room for all of its tokens, not only the first chunk: half a prompt in memory helps nobody.
            if not self._allocator.reserve(request.request_id, request.num_pending_tokens):
                return
            self.waiting.popleft()
            request.move_to(RequestStatus.RUNNING)
            self.running.append(request)
            chunk = min(rows, request.num_pending_tokens, self._config.prefill_chunk_size or rows)
            planned[request.request_id] = chunk
            rows -= chunk

    def _reserve(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Reserve, preempting the newest request for as long as it takes; False if that was this one."""
        while request.status is RequestStatus.RUNNING:
            if self._allocator.reserve(request.request_id, num_tokens):
                return True
            newest = self.running[-1]
            self._preempt(newest)
            preempted.append(newest)
        return False

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._allocator.release(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.move_to(RequestStatus.WAITING)
        self.waiting.appendleft(request)

    def _with_drafts(self, running: list[Request], planned: dict[str, int], rows_left: int) -> list[ScheduledRequest]:
        drafting = [
            r
            for r in running
            if planned[r.request_id] == r.num_pending_tokens == 1 and r.speculation.max_draft_tokens > 0
        ]
        fair_share = rows_left // len(drafting) if drafting else 0
        scheduled = []
        for request in running:
            tokens = planned[request.request_id]
            budget = self._draft_budget(request, fair_share) if tokens == request.num_pending_tokens == 1 else (0, 0, 0)
            scheduled.append(ScheduledRequest(request, tokens, *budget))
        return scheduled

    def _draft_budget(self, request: Request, fair_share: int) -> tuple[int, int, int]:
        """(most draft tokens, deepest draft, deepest row): no draft deeper than could still be given to the client."""
        # The bonus token comes on top of the accepted ones, so the last place is never drafted.
        row_depth = self._max_model_len - len(request.token_ids) - 1
        depth = min(request.sampling.max_tokens - request.num_output_tokens - 1, row_depth)
        budget = min(request.speculation.max_draft_tokens, fair_share)
        # Drafts take what memory is free; nobody is preempted for a guess.
        budget = min(budget, self._allocator.reservable_tokens(request.request_id) - 1)
        if depth < 1 or budget < 1:
            return 0, 0, 0
        return budget, min(depth, request.speculation.branch_length), row_depth
