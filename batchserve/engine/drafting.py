"""The draft stage of a step: whose drafter is asked, which of the proposed rows are run, and what came of them."""

from __future__ import annotations

import dataclasses
from itertools import compress, pairwise
from operator import and_
from typing import TYPE_CHECKING

import numpy as np

from batchserve.decoding_length.acceptance import DEPTH_OF_BIN
from batchserve.decoding_length.adaptive import UNDRAFTED
from batchserve.decoding_length.policy import StepOutcome
from batchserve.draft.base import DraftRequest
from batchserve.draft.forest import ANY_TOKEN, DraftForest, DraftQueries
from batchserve.engine.guarded_drafter import GuardedDrafter
from batchserve.faults import Faults
from batchserve.metrics import Acceptance
from batchserve.scheduler.plan import MOST_DRAFT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from batchserve.decoding_length.policy import DraftPolicy
    from batchserve.draft.base import Drafter
    from batchserve.kv.allocator import KVAllocator
    from batchserve.native.pool import Team
    from batchserve.request import DraftScope, Request
    from batchserve.scheduler.plan import SchedulerOutput

SCARCE = 64  # K/V entries for each request, beside its drafts: with fewer that are free, who comes first matters
PLAIN_STEP = "the step's requests go on without drafts"
LATE_STEPS = 4  # whoever was not asked for more of them is told what has happened since in one piece


@dataclasses.dataclass(slots=True)
class _Told:
    """What a request's drafter was told of it until now."""

    request: Request
    num_tokens: int  # of all of its tokens
    num_shared: int  # of those that the client was given; what its scope has forgotten is not told any more
    step: int  # in which that was


class DraftStage:
    """Asks the drafters, lets the policy choose (a fixed or an adaptive decoding length), and tells both what came of
    it.

    No fault of theirs ends a request: where a drafter fails, the request that it was asked for goes on without drafts;
    where the policy does, a step has none. `faults` counts them.
    """

    def __init__(
        self,
        drafter: Drafter,
        policy: DraftPolicy,
        allocator: KVAllocator,
        clock: Callable[[], float],
        vocab_size: int = ANY_TOKEN,
    ) -> None:
        self.policy = policy
        self.faults = Faults()
        self._guarded = GuardedDrafter(drafter, vocab_size, self.faults)
        self._policy_contained = self.faults.contained("draft policy", PLAIN_STEP)
        self._allocator = allocator
        self._clock = clock
        self._started: dict[str, _Told] = {}  # requests that have draft state
        self._num_steps = 0
        self._forgotten: dict[str, int] = {}  # of others: so many tokens were published when their scope was cleared
        self._step: StepOutcome | None = None  # the one under way

    @property
    def drafter(self) -> Drafter:
        return self._guarded.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self._guarded.drafter = drafter

    def propose(self, plan: SchedulerOutput) -> DraftForest:
        """The drafts of one step, a tree for every scheduled request, with K/V reserved for their rows."""
        self._num_steps += 1
        self._step = step = StepOutcome(plan.load, plan.decoding, plan.load)
        with self._policy_contained:
            if len(plan.drafted) and self.policy.begin_step(plan.load, plan.decoding, len(plan.drafted)):
                return self._propose(plan, step)
        return DraftForest.empty(len(plan.requests))

    def _propose(self, plan: SchedulerOutput, step: StepOutcome) -> DraftForest:
        num_trees, places, policy = len(plan.requests), plan.drafted, self.policy
        request_ids = plan.request_ids
        if len(places) < num_trees:
            request_ids = [request_ids[place] for place in places.tolist()]
        began_s = self._clock()
        if not self._tell(request_ids):
            are_left = [name in self._started for name in request_ids]
            request_ids, places = [*compress(request_ids, are_left)], places[are_left]
            if not request_ids:
                return DraftForest.empty(num_trees)
        for name in policy.windows_run(request_ids):
            policy.window_earned(name, self._guarded.window_tokens(name))
        bounds = plan.columns[places, MOST_DRAFT:]
        queries = DraftQueries(request_ids, bounds, policy.bound(request_ids, bounds, plan.max_draft_rows))
        forest = self._guarded.propose_all(queries)
        decoding = plan.requests
        if plan.decoding.num_requests < num_trees:
            decoding = [*compress(decoding, plan.is_decoding.tolist())]
        forest = forest.take(policy.choose(forest, request_ids, decoding, plan.max_draft_rows))
        step.draft_s, step.num_asked = self._clock() - began_s, len(places)
        if not len(forest.token_ids):
            return DraftForest.empty(num_trees)
        forest = self._with_memory(request_ids, forest)
        step.load = plan.load_with(places, forest.starts)
        return forest if len(places) == num_trees else forest.spread(places, num_trees)

    def _with_memory(self, request_ids: Sequence[str], forest: DraftForest) -> DraftForest:
        """What there is memory for. Several requests may have been promised the same last of it: the tree whose rows
        are likeliest gets it. Where one does not fit, its first nodes are run, and no window, which is of no use in
        part.
        """
        sizes = forest.sizes.tolist()
        starts = compress(forest.starts[:-1].tolist(), sizes)
        trees = [*zip(compress(request_ids, sizes), starts, filter(None, sizes), strict=True)]
        if self._allocator.free_tokens < len(forest.token_ids) + SCARCE * len(trees):
            trees.sort(key=lambda tree: -forest.probs[tree[1] : tree[1] + tree[2]].mean())
        if self._allocator.reserve_all([name for name, _, _ in trees], [1 + size for _, _, size in trees]):
            return forest
        keep = np.ones(len(forest.token_ids), np.bool_)
        for name, start, size in trees:
            end, fitting = start + size, self._reserve_most(name, 1 + size)
            if fitting < size:
                keep[start:end] = forest.is_verified[start:end]
                keep[start + fitting : end] = False
                self.policy.refused(name)
        return forest.take(keep)

    def _reserve_most(self, request_id: str, num_rows: int) -> int:
        """Reserve K/V for one row and as many drafts of the others as there is memory for; returns how many drafts."""
        if not self._allocator.reserve(request_id, num_rows):
            num_rows = max(1, min(num_rows, self._allocator.reservable_tokens([request_id])[0]))
            if not self._allocator.reserve(request_id, num_rows):  # the system may have less than was promised
                num_rows = 1
        return num_rows - 1

    def are_asked(self, requests: Sequence[Request]) -> list[bool]:
        """Whose drafters are to be called in this step, of these that decode; once a step."""
        with self._policy_contained:
            self._drop_failed()
            started = self._started
            are_ready = [r.request_id in started or self._begin(r) for r in requests]
            are_asked = self.policy.are_asked([r.request_id for r in requests])
            return are_asked if all(are_ready) else [*map(and_, are_ready, are_asked)]
        return [False] * len(requests)

    def _drop_failed(self) -> bool:
        """Go on without drafts where a drafter has failed; whether there were any such requests."""
        failed = self._guarded.failed & self._started.keys()
        for request_id in failed:
            del self._started[request_id]
            self.policy.end(request_id)
        return bool(failed)

    def _tell(self, request_ids: Collection[str]) -> bool:
        """Let the drafter hear what it has missed. A drafter that is not asked costs nothing, not even to listen.

        False where that failed: then the requests concerned have no draft state any more, some only for now.
        """
        accepted: dict[str, list[int]] = {}
        late: dict[str, list[int]] = {}
        shared: dict[str, list[int]] = {}  # what clients were given: that may reach other requests
        for request_id in request_ids:
            told = self._started[request_id]
            request, token_ids = told.request, told.request.token_ids
            if told.num_tokens < len(token_ids):
                is_late = self._num_steps - told.step > LATE_STEPS
                (late if is_late else accepted)[request_id] = token_ids[told.num_tokens :]
                told.num_tokens = len(token_ids)
            if told.num_shared < request.num_given_tokens:
                begin, last = request.num_prompt_tokens, request.num_given_tokens
                shared[request_id] = token_ids[begin + told.num_shared : begin + last]
                told.num_shared = last
            told.step = self._num_steps
        lost, failed = set[str](), self._guarded.failed
        for method, tokens in (("accept_all", accepted), ("catch_up", late), ("share_all", shared)):
            if lost or failed:
                tokens = {name: those for name, those in tokens.items() if name not in lost and name not in failed}
            if tokens:
                lost.update(self._guarded.tell(method, tokens))
        for request_id in lost:
            self._forgotten[request_id] = self._started.pop(request_id).num_shared
            self.policy.end(request_id)
        return not (self._drop_failed() or lost)

    def _begin(self, request: Request) -> bool:
        """Whether it can be drafted now; its state begins when its drafter is ready, with all that it has by then."""
        name = request.speculation.drafter
        if not self._guarded.is_ready_for(request.request_id, name):
            return False
        if not self._guarded.start(_draft_request(request)):
            return False
        self.policy.start(request.request_id, name or self.drafter.name, request.speculation.tpot_target_s)
        # Of its answer it hears before it is asked; it is late where that is long.
        begun_at = self._num_steps + 1 - request.num_output_tokens
        forgotten = self._forgotten.pop(request.request_id, 0)
        self._started[request.request_id] = _Told(request, request.num_prompt_tokens, forgotten, begun_at)
        return True

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The argmax of a request's rows that were not verified."""
        if request_id in self._started:
            self._guarded.observe(request_id, token_ids)

    def step_done(self, token_ids: Mapping[str, Sequence[int]], step_s: float, forward_s: float) -> None:
        """The step took so long, from its beginning to its commit, and gave its decoding requests these tokens."""
        if self._step is None:
            return
        step, self._step = self._step, None
        step.step_s, step.forward_s = step_s, forward_s
        with self._policy_contained:
            self.policy.step_done(step, token_ids)

    def use_threads(self, team: Team) -> None:
        """Draft on these threads from now on."""
        self._guarded.use_threads(team)

    def preempted(self, requests: Iterable[Request]) -> None:
        """These begin again: the token behind their next prefill is none that a drafter was asked for."""
        with self._policy_contained:
            for request in requests:
                self.policy.skip(request.request_id)

    def acceptance(self) -> dict[str, Acceptance]:
        """What has come of drafts until now, by drafter. Any thread may ask."""
        depths = depth_labels()
        return {
            drafter: Acceptance(depths, scored.num_scored, scored.num_accepted, scored.error())
            for drafter, scored in self.policy.acceptance.reliability.items()
            if drafter != UNDRAFTED
        }

    def end(self, request: Request) -> None:
        """Forget a request, which is sure to be forgotten whatever fails."""
        told = self._started.get(request.request_id)
        with self._policy_contained:
            if told is not None:
                if self._num_steps - told.step > LATE_STEPS:  # nobody will draft from this text
                    told.num_tokens = len(request.token_ids)
                self._tell([request.request_id])
            self.policy.end(request.request_id)
        if told is not None or request.request_id in self._guarded.failed:
            self._started.pop(request.request_id, None)
            self._guarded.end(request.request_id)
        self._forgotten.pop(request.request_id, None)

    def clear_scope(self, scope: DraftScope, in_flight: Iterable[Request]) -> None:
        """Forget the text of the scope's requests until now, of those in flight, too, told or not."""
        for request in in_flight:
            if request.speculation.draft_scope == scope:
                told = self._started.get(request.request_id)
                if told is None:
                    self._forgotten[request.request_id] = request.num_published_tokens
                else:
                    told.num_shared = request.num_published_tokens
        self.drafter.clear_scope(scope)


def depth_labels() -> tuple[str, ...]:
    """What the depths are called that acceptance is counted by: 1, 2, ..., 5-6, ..., and more."""
    labels = [str(b) if b == a + 1 else f"{a + 1}-{b}" for a, b in pairwise((0, *DEPTH_OF_BIN))]
    return (*labels, f"{DEPTH_OF_BIN[-1] + 1}+")


def _draft_request(request: Request) -> DraftRequest:
    sampling, speculation = request.sampling, request.speculation
    return DraftRequest(
        request.request_id,
        request.token_ids[: request.num_prompt_tokens],
        references=speculation.references,
        scope=speculation.draft_scope,
        drafter=speculation.drafter,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )
