"""Who runs in the next step, and with how many rows. Plain Python: the same requests give the same plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchserve.kv.sharing import best_source
from batchserve.request import FORKS, Request, RequestStatus
from batchserve.request_table import RequestTable
from batchserve.scheduler.plan import SchedulerOutput, all_decode, find_draftable, lay_plan
from batchserve.scheduler.policy import prompt_rank, rank
from batchserve.scheduler.prompt_room import PromptRoom, StepBound
from batchserve.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchserve.config import EngineConfig
    from batchserve.decoding_length.step_time import StepTimeModel
    from batchserve.kv.allocator import KVAllocator
    from batchserve.scheduler.plan import BoolArray, IntArray


DRAFT_ROWS_RATE = 0.2
NONE = np.zeros(0, np.int64)
MAX_LOGIT_ROWS = 64  # of a prompt whose log probabilities are asked for: each has as many logits as there are tokens
MAX_OVERTAKING = 32  # of those who wait are looked at for a short prompt, in a step


def everybody(slots: IntArray) -> BoolArray:
    """All of them are drafted."""
    return np.ones(len(slots), np.bool_)


class Selected(NamedTuple):
    """The requests of one step, before its drafts are planned.

    slots, counts int64 [num_requests]: slots in the RequestTable, and the tokens that the step computes.
    """

    requests: list[Request]
    request_ids: list[str]
    slots: IntArray
    counts: IntArray
    preempted: list[Request]


class Scheduler:
    """Higher priority first, then first come, first served, under max_num_seqs, max_num_batched_tokens and K/V memory.

    Prompts are computed in chunks that leave running requests their inter-token latency, where step times are known; of
    those that are let in, the one with the fewest tokens left comes first. Whoever is let in begins with what is cached
    of its tokens, or with what a running request has computed of them.
    When memory runs out whoever comes last is preempted: his K/V is freed and recomputed later, from the prompt and the
    tokens that he has already given.
    """

    def __init__(
        self,
        config: EngineConfig,
        allocator: KVAllocator,
        max_model_len: int,
        step_time: StepTimeModel | None = None,
    ) -> None:
        self._config = config
        self._step_time = step_time
        self._allocator = allocator
        self._max_model_len = max_model_len
        self._now_s = 0.0
        self._draft_rows = 0.0  # of a step, smoothed
        # Who was last, beside how many that decode; and how much memory was free.
        self._refused: tuple[tuple[Request | None, int], int] = (None, 0), 0
        self.table = RequestTable()  # of all requests, waiting and running
        self.waiting = WaitingQueue(config.max_priority_wait_s)
        self._set_running([])

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def _set_running(self, running: list[Request]) -> None:
        """The requests that run, in the order in which they were admitted. The list itself is never changed."""
        self.running = running
        self._running_ids = [request.request_id for request in running]
        self._running_slots = np.array([request.slot for request in running], np.int64)
        self._one_each = np.ones(len(running), np.int64)

    def add(self, request: Request) -> None:
        self.table.add(request)
        self.waiting.add(request)

    def forget(self, request: Request) -> None:
        """Free the slot of a request that is finished."""
        self.table.remove(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its K/V at once."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        if request is self._refused[0][0]:
            self._refused = (None, 0), 0
        scope = request.prefix_scope
        if scope is not None and scope.tenant != FORKS and request.num_computed_tokens > 0:
            # An answer's end may have been inside an accepted run, and what is behind it is not among its tokens.
            count = min(request.num_computed_tokens, len(request.token_ids))
            self._allocator.retire(request.request_id, scope, request.token_ids[:count])
        else:
            self._allocator.release(request.request_id)
        request.move_to(RequestStatus.FINISHED)

    def expired(self, now_s: float) -> list[Request]:
        """Requests whose deadline has passed, waiting or running."""
        late = [r for r in self.running if r.deadline_s is not None and r.deadline_s <= now_s]
        return late + self.waiting.expired(now_s)

    def requests(self) -> Iterable[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self, now_s: float = 0.0, are_drafted: Callable[[IntArray], BoolArray] = everybody) -> SchedulerOutput:
        """Plan one step: `select`, then `lay_out`."""
        return self.lay_out(self.select(now_s), are_drafted)

    def select(self, now_s: float = 0.0) -> Selected:
        """Choose who runs in a step: a row for every decoding request, then chunks of prompts with what is left."""
        self._now_s = now_s
        if not self.waiting and self._all_decode():
            return Selected(self.running, self._running_ids, self._running_slots, self._one_each, [])
        preempted: list[Request] = []
        planned = self._plan_decoding(preempted)
        if self.waiting or len(planned) < len(self.running):
            self._plan_prompts(planned, preempted)
        # A request planned above may have been preempted by an older one after that.
        running = [r for r in self.running if r.request_id in planned]
        names, slots = [request.request_id for request in running], [request.slot for request in running]
        counts = [planned[name] for name in names]
        return Selected(running, names, np.array(slots, np.int64), np.array(counts, np.int64), preempted)

    def _all_decode(self) -> bool:
        """True if every running request has one token without K/V, and memory for it."""
        if not all_decode(self.table.rows, self._running_slots):
            return False
        return self._allocator.reserve_all(self._running_ids, [1] * len(self._running_ids))

    def _plan_prompts(self, planned: dict[str, int], preempted: list[Request]) -> None:
        """Chunks of the prompts that are being computed, and of those that are let in."""
        computing = self._computing(planned)
        if not computing and len(self.running) == self._config.max_num_seqs:
            return  # nobody can be let in
        room = self._prompt_room(planned, self._config.max_num_batched_tokens - len(planned))
        for request in computing:
            if request.status is RequestStatus.RUNNING:
                if not preempted:
                    self._admit(room, planned, before=request)
                self._plan_chunk(request, room, planned, preempted)
        if not preempted:
            self._admit(room, planned)

    def step_done(self, num_draft_rows: int) -> None:
        """The step that was planned last ran with so many draft rows."""
        self._draft_rows += DRAFT_ROWS_RATE * (num_draft_rows - self._draft_rows)

    def _plan_decoding(self, preempted: list[Request]) -> dict[str, int]:
        """A row for everyone who decodes, by request id."""
        decoding = [r for r in self.running if r.num_pending_tokens == 1]
        names = [request.request_id for request in decoding]
        if self._allocator.reserve_all(names, [1] * len(names)):
            return dict.fromkeys(names, 1)
        return {request.request_id: 1 for request in decoding if self._reserve(request, 1, preempted)}

    def _rank(self, request: Request) -> tuple[bool, int, float]:
        return rank(request, self._now_s, self._config.max_priority_wait_s)

    def _prompt_rank(self, request: Request) -> tuple[bool, int, int, float]:
        return prompt_rank(request, self._now_s, self._config.max_priority_wait_s)

    def _computing(self, planned: dict[str, int]) -> list[Request]:
        """Those whose prompt is being computed, in the order in which they get rows."""
        return sorted((r for r in self.running if r.request_id not in planned), key=self._prompt_rank)

    def _prompt_room(self, planned: dict[str, int], rows: int) -> PromptRoom:
        """The rows, at most so many, that prompts get beside the requests that are planned already."""
        if not planned:
            return PromptRoom(rows)
        decoding = [r for r in self.running if r.request_id in planned]
        # The others are kept for drafts: as many as may be asked for, or twice as many as there were of late where they
        # are chosen by their worth, so that they can become more; at most half.
        num_asked = sum(r.speculation.max_draft_tokens for r in decoding)
        if self._config.is_adaptive:
            num_asked = min(num_asked, len(decoding) + 2 * round(self._draft_rows))
        rows -= min(rows // 2, num_asked)
        if self._step_time is None:
            return PromptRoom(rows)
        bound = StepBound.beside(
            self._step_time,
            decoding,
            round(self._draft_rows),
            self._config.prompt_inflation,
            self._config.max_step_s,
        )
        return PromptRoom(rows, bound)

    def _plan_chunk(
        self, request: Request, room: PromptRoom, planned: dict[str, int], preempted: list[Request]
    ) -> None:
        chunk = self._chunk(request, room)
        if chunk >= 1 and self._reserve(request, chunk, preempted):
            self._take(request, chunk, room, planned)

    def _chunk(self, request: Request, room: PromptRoom) -> int:
        """How many of the request's tokens a step with so much room left computes."""
        wanted = min(request.num_pending_tokens, self._config.prefill_chunk_size or request.num_pending_tokens)
        if request.sampling.prompt_logprobs is not None:
            wanted = min(wanted, MAX_LOGIT_ROWS)
        return room.rows_for(wanted, request.num_computed_tokens)

    def _take(self, request: Request, chunk: int, room: PromptRoom, planned: dict[str, int]) -> None:
        planned[request.request_id] = chunk
        room.take(chunk, request.num_computed_tokens)

    def _admit(self, room: PromptRoom, planned: dict[str, int], before: Request | None = None) -> None:
        """Let waiting requests in, only those whose prompt comes before that of `before` if it is given."""
        while self.waiting and len(self.running) < self._config.max_num_seqs and room.rows_for(1, 0) > 0:
            request = self.waiting.first(self._now_s) if before is None else self._overtaking(before)
            if request is None:
                break
            # Room for all of its tokens, not only the first chunk: half a prompt in memory helps nobody.
            if not self._begin(request):
                break
            self.waiting.remove(request)
            request.move_to(RequestStatus.RUNNING)
            self._set_running([*self.running, request])
            chunk = self._chunk(request, room)
            if chunk < 1:  # behind what is cached of it not even a row fits any more
                break
            self._take(request, chunk, room, planned)

    def _overtaking(self, before: Request) -> Request | None:
        """Returns the first waiting request whose prompt comes before that of `before`.

        The first request of all is passed over only if that takes neither its seat nor (apart from rounding up) its
        memory.
        """
        first, rank = self.waiting.first(self._now_s), self._prompt_rank(before)
        if self._prompt_rank(first) < rank:
            return first
        if self._config.max_num_seqs - len(self.running) < 2:
            return None
        later = self.waiting.foremost(self._now_s, MAX_OVERTAKING)[1:]
        found = next((request for request in later if self._prompt_rank(request) < rank), None)
        num_tokens = first.num_pending_tokens + (0 if found is None else found.num_pending_tokens)
        return found if num_tokens <= self._allocator.free_tokens else None

    def _begin(self, request: Request) -> bool:
        """Reserve memory for all tokens of a waiting request; what others have left or have is computed already."""
        # To look again in every step would take as long as some drafts: only if more is free, or a prompt was computed.
        state = request, sum(other.num_pending_tokens == 1 for other in self.running)
        if state == self._refused[0] and self._allocator.free_tokens <= self._refused[1]:
            return False
        known = self._match(request)
        while known is None and self._reclaim():
            known = self._match(request)
        if known is None:
            self._refused = state, self._allocator.free_tokens
            return False
        request.num_computed_tokens = known
        if request.first_scheduled_s is None:  # else what it computed itself may be there
            request.num_cached_tokens = known
        return True

    def _match(self, request: Request) -> int | None:
        """How many of its tokens are there already, now that there is memory for all of them; None: there is not."""
        name, scope = request.request_id, request.prefix_scope
        if scope is None:
            return request.num_computed_tokens if self._allocator.reserve(name, request.num_pending_tokens) else None
        return self._allocator.match_prefix(name, scope, request.token_ids, *best_source(request, self.running))

    def _reserve(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Reserve, preempting whoever comes last for as long as it takes; False if that was this one.

        Before that, others give back what drafts took that were not accepted: nobody is preempted for a guess.
        """
        while request.status is RequestStatus.RUNNING:
            if self._allocator.reserve(request.request_id, num_tokens):
                return True
            if self._reclaim():
                continue
            preempted.append(self.preempt_last())
        return False

    def _reclaim(self) -> bool:
        """Whether somebody who is running gave back memory that it does not need in this step."""
        return self._allocator.reclaim({r.request_id: r.num_pending_tokens for r in self.running})

    def preempt_last(self) -> Request:
        """Whoever comes last of those who are running begins again later; returns it."""
        last = max(reversed(self.running), key=self._rank)
        self._preempt(last)
        return last

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self._allocator.release(request.request_id)
        request.num_computed_tokens = 0
        if request.first_scheduled_s is None:  # it had no rows yet, and may find less when it begins again
            request.num_cached_tokens = 0
        request.num_preemptions += 1
        request.move_to(RequestStatus.WAITING)
        self.waiting.put_back(request)

    def _leave(self, request: Request) -> None:
        self._set_running([each for each in self.running if each is not request])

    def lay_out(self, selected: Selected, are_drafted: Callable[[IntArray], BoolArray]) -> SchedulerOutput:
        """Plan the drafts of the selected requests.

        are_drafted is called at most once, with the slots of the requests that may have drafts. It returns which of
        them are to have any.
        """
        running, names, slots, counts, preempted = selected
        table = self.table.rows
        places, rooms = np.empty(len(slots), np.int64), NONE
        places = places[: find_draftable(table, slots, counts, places)]
        if len(places):
            places = places[are_drafted(slots[places])]
            # Drafts take what memory is free.
            rooms = np.array(self._allocator.reservable_tokens([names[place] for place in places.tolist()]), np.int64)
        rows_left = self._config.max_num_batched_tokens - int(counts.sum())
        # Where rows are chosen by their worth, each request may be offered all of them.
        share = rows_left if self._config.is_adaptive else rows_left // max(1, len(places))
        bounds, planned = (share, self._max_model_len), (table, slots, counts)
        return lay_plan(running, names, planned, (places, rooms), preempted, rows_left, bounds)
