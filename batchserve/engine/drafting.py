"""The draft stage of a step: whose drafter is asked, which of the proposed rows are run, and what came of them."""

from __future__ import annotations

import dataclasses
from itertools import compress, pairwise
from operator import not_
from typing import TYPE_CHECKING

import numpy as np

from batchserve.draft.base import DraftRequest, DraftScope
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.metrics import Acceptance
from batchserve.scheduler.acceptance import DEPTH_OF_BIN
from batchserve.scheduler.adaptive import UNDRAFTED, StepOutcome
from batchserve.scheduler.step_time import StepLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from batchserve.draft.base import Drafter
    from batchserve.request import Request
    from batchserve.scheduler.adaptive import AdaptiveDrafting
    from batchserve.scheduler.kv_allocator import KVAllocator
    from batchserve.scheduler.scheduler import ScheduledRequest, SchedulerOutput
    from batchserve.scheduler.step_time import StepTimeModel

LATE_STEPS = 4  # whoever was not asked for more of them is told what has happened since in one piece
TENANT = "default"  # there is no authentication: all callers are one


@dataclasses.dataclass(slots=True)
class _Unheard:
    """Tokens of a request that its drafter was not told of yet: accepted ones, and those that the client was given."""

    accepted: list[int] = dataclasses.field(default_factory=list)
    shared: list[int] = dataclasses.field(default_factory=list)
    num_steps: int = 0  # in which they were accepted


class DraftStage:
    """Asks the drafters, lets the adaptive decoding length choose, and tells both what came of it.

    Without `adaptive` every proposed row is run; prompts still go by step_time, which is corrected here.
    """

    def __init__(
        self,
        drafter: Drafter,
        adaptive: AdaptiveDrafting | None,
        allocator: KVAllocator,
        clock: Callable[[], float],
        step_time: StepTimeModel | None = None,
    ) -> None:
        self.drafter = drafter
        self.adaptive = adaptive
        self._allocator = allocator
        self._clock = clock
        self._step_time = step_time
        self._started: dict[str, _Unheard] = {}  # requests that have draft state
        self._forgotten: dict[str, int] = {}  # of others: so many tokens were published when their scope was cleared
        self._step: StepOutcome | None = None  # the one under way

    def propose(self, plan: SchedulerOutput) -> DraftForest:
        """The drafts of one step, a tree for every scheduled request, with K/V reserved for their rows."""
        decoding = [s for s in plan.scheduled if s.is_decoding]
        without = _load(plan.scheduled)
        alone = without if len(decoding) == len(plan.scheduled) else _load(decoding)
        self._step = step = StepOutcome(without, alone, without)
        places = [place for place, s in enumerate(plan.scheduled) if s.max_draft_tokens > 0]
        if not places or (self.adaptive is not None and not self.adaptive.begin_step(without, alone)):
            return DraftForest.empty(len(plan.scheduled))
        asked = [plan.scheduled[place] for place in places]
        request_ids = [s.request.request_id for s in asked]
        began_s = self._clock()
        self._tell(request_ids)
        started_s = self._clock()
        queries = self._queries(asked, request_ids)
        forest = self.drafter.propose_all(queries)
        if forest.num_trees != len(asked):
            raise ValueError(f"drafter {self.drafter.name!r}: {forest.num_trees} trees for {len(asked)} queries")
        ended_s = self._clock()
        step.draft_s, step.propose_s, step.num_asked = ended_s - began_s, ended_s - started_s, len(asked)
        if self.adaptive is not None:
            requests = [s.request for s in decoding]
            forest = forest.take(self.adaptive.choose(forest, request_ids, requests, plan.max_draft_rows))
        if not len(forest.token_ids):
            return DraftForest.empty(len(plan.scheduled))
        forest.check(queries)
        forest, attended = self._with_memory(asked, forest)
        rows = len(forest.token_ids)
        more = without.num_rows + rows, without.num_logit_rows + rows, without.attended_tokens + attended
        step.load = without._replace(num_rows=more[0], num_logit_rows=more[1], attended_tokens=more[2])
        return forest if len(places) == len(plan.scheduled) else forest.spread(places, len(plan.scheduled))

    def _with_memory(self, asked: Sequence[ScheduledRequest], forest: DraftForest) -> tuple[DraftForest, int]:
        """The trees whose rows there is memory for, and the pairs of a row and a K/V entry that they are.

        Two requests may have been promised the same last of it.
        """
        sizes = [end - start for start, end in pairwise(forest.starts.tolist())]
        drafted = [(s.request, size) for s, size in zip(asked, sizes, strict=True) if size]
        names, rows = [request.request_id for request, _ in drafted], [1 + size for _, size in drafted]
        if not self._allocator.reserve_all(names, rows):
            has_room = [self._allocator.reserve(*each) for each in zip(names, rows, strict=True)]
            for name in compress(names, map(not_, has_room)):
                if self.adaptive is not None:
                    self.adaptive.refused(name)
            forest = forest.take(np.repeat(has_room, [size for _, size in drafted]))
            drafted = list(compress(drafted, has_room))
        return forest, sum(size * request.num_computed_tokens for request, size in drafted)

    def asks(self, request: Request) -> bool:
        """Whether a decoding request's drafter is to be called in this step; once a step and request."""
        if request.request_id not in self._started and not self._begin(request):
            return False
        return self.adaptive is None or self.adaptive.asks(request.request_id)

    def _tell(self, request_ids: Collection[str]) -> None:
        """Let the drafter hear what it has missed. A drafter that is not asked costs nothing, not even to listen."""
        accepted: dict[str, list[int]] = {}
        late: dict[str, list[int]] = {}
        shared: dict[str, list[int]] = {}
        for request_id in request_ids:
            each = self._started[request_id]
            if each.accepted:
                (late if each.num_steps > LATE_STEPS else accepted)[request_id] = each.accepted
                each.accepted = []
            if each.shared:
                shared[request_id] = each.shared
                each.shared = []
            each.num_steps = 0
        if accepted:
            self.drafter.accept_all(accepted)
        if late:
            self.drafter.catch_up(late)
        for request_id, token_ids in shared.items():
            self.drafter.share(request_id, token_ids)

    def _queries(self, asked: Sequence[ScheduledRequest], request_ids: Sequence[str]) -> DraftQueries:
        flat: list[int] = []
        for item in asked:
            flat += item[3:]  # the most draft tokens, the deepest draft, the deepest row
        bounds = np.array(flat, np.int64).reshape(-1, 3)
        if self.adaptive is None:
            return DraftQueries(request_ids, bounds, np.zeros(len(asked)))
        return DraftQueries(request_ids, bounds, self.adaptive.bound(request_ids, bounds))

    def _begin(self, request: Request) -> bool:
        """Whether it can be drafted now; its state begins when its drafter is ready, with all that it has by then."""
        name = request.speculation.drafter
        if not self.drafter.is_ready_for(name):
            return False
        self.drafter.start(_draft_request(request))
        if self.adaptive is not None:
            self.adaptive.start(request.request_id, name or self.drafter.name, request.speculation.tpot_target_s)
        outputs = request.token_ids[request.num_prompt_tokens :]
        # What is committed but not yet published is shared with the rest of its step.
        forgotten = self._forgotten.pop(request.request_id, 0)
        shared = outputs[forgotten : request.num_published_tokens]
        self._started[request.request_id] = _Unheard(outputs, shared, len(outputs))
        return True

    def accept(self, request: Request, token_ids: Sequence[int], unverified_token_ids: Sequence[int]) -> None:
        """A request's new tokens, and the argmax of its rows that were not verified."""
        unheard = self._started.get(request.request_id)
        if unheard is not None:
            if unverified_token_ids:
                self.drafter.observe(request.request_id, unverified_token_ids)
            unheard.accepted += token_ids
            unheard.num_steps += 1

    def step_done(self, token_ids: Mapping[str, Sequence[int]], step_s: float) -> None:
        """The step took so long, from its beginning to its commit, and gave its decoding requests these tokens."""
        if self._step is None:
            return
        step, self._step = self._step, None
        if self.adaptive is None:
            if self._step_time is not None:
                self._step_time.observe(step.load, step_s - step.draft_s)
            return
        step.step_s = step_s
        self.adaptive.step_done(step, token_ids)

    def preempted(self, requests: Iterable[Request]) -> None:
        """These begin again: the token behind their next prefill is none that a drafter was asked for."""
        if self.adaptive is not None:
            for request in requests:
                self.adaptive.skip(request.request_id)

    def gauges(self) -> dict[str, float]:
        """What the adaptive decoding length went by in the last step that it learned from. Any thread may ask."""
        adaptive = self.adaptive
        last = None if adaptive is None else adaptive.last
        if adaptive is None or last is None:
            return {}
        return {
            "price_tokens_per_second": last.price,
            "predicted_step_seconds": last.predicted_s,
            "actual_step_seconds": last.step_s,
            "step_time_factor": adaptive.step_time.factor,
        }

    def acceptance(self) -> dict[str, Acceptance]:
        """What has come of drafts until now, by drafter. Any thread may ask."""
        if self.adaptive is None:
            return {}
        depths = depth_labels()
        return {
            drafter: Acceptance(depths, scored.num_scored, scored.num_accepted, scored.error())
            for drafter, scored in self.adaptive.acceptance.reliability.items()
            if drafter != UNDRAFTED
        }

    def share(self, request: Request, token_ids: Sequence[int]) -> None:
        """Tokens that the client was given."""
        unheard = self._started.get(request.request_id)
        if unheard is not None:
            unheard.shared += token_ids

    def end(self, request: Request) -> None:
        if request.request_id in self._started:
            unheard = self._started[request.request_id]
            if unheard.num_steps > LATE_STEPS:  # its drafter was not asked any more: nobody will draft from this text
                unheard.accepted.clear()
            self._tell([request.request_id])
            del self._started[request.request_id]
            self.drafter.end(request.request_id)
        self._forgotten.pop(request.request_id, None)
        if self.adaptive is not None:
            self.adaptive.end(request.request_id)

    def clear_scope(self, name: str, in_flight: Iterable[Request]) -> None:
        """Forget what the scope's requests have been given until now, those in flight included."""
        self._tell(self._started)  # what was said before is forgotten, too
        self.drafter.clear_scope(DraftScope(TENANT, name))
        for request in in_flight:
            if request.request_id not in self._started and request.speculation.draft_scope == name:
                self._forgotten[request.request_id] = request.num_published_tokens


def depth_labels() -> tuple[str, ...]:
    """What the depths are called that acceptance is counted by: 1, 2, ..., 5-6, ..., and more."""
    labels = [str(b) if b == a + 1 else f"{a + 1}-{b}" for a, b in pairwise((0, *DEPTH_OF_BIN))]
    return (*labels, f"{DEPTH_OF_BIN[-1] + 1}+")


def _load(scheduled: Iterable[ScheduledRequest]) -> StepLoad:
    rows = logit_rows = requests = context = attended = 0
    for item in scheduled:
        computed, count = item.request.num_computed_tokens, item.num_scheduled_tokens
        rows += count
        logit_rows += item.is_sampled
        requests += 1
        context += computed
        attended += computed * count
    return StepLoad(rows, logit_rows, requests, context, attended)


def _draft_request(request: Request) -> DraftRequest:
    sampling, speculation = request.sampling, request.speculation
    return DraftRequest(
        request.request_id,
        request.prompt_token_ids,
        references=speculation.references,
        scope=None if speculation.draft_scope is None else DraftScope(TENANT, speculation.draft_scope),
        drafter=speculation.drafter,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )
