"""The draft stage of a step: whose drafter is asked, which of the proposed rows are run, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from batchserve.decoding_length.acceptance import DEPTH_OF_BIN
from batchserve.decoding_length.adaptive import UNDRAFTED
from batchserve.decoding_length.policy import Drafted, StepOutcome
from batchserve.draft.base import DraftRequest
from batchserve.draft.forest import ANY_TOKEN, DraftForest, DraftQueries
from batchserve.engine.grammar_drafts import GrammarDrafts, num_forced
from batchserve.engine.guarded_drafter import GuardedDrafter
from batchserve.faults import Faults
from batchserve.metrics import Acceptance
from batchserve.scheduler.plan import COMPUTED, MOST_DRAFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchserve.decoding_length.acceptance import Given
    from batchserve.decoding_length.policy import DraftPolicy
    from batchserve.draft.base import Drafter
    from batchserve.kv.allocator import KVAllocator
    from batchserve.native.pool import Team
    from batchserve.request import DraftScope, Request
    from batchserve.scheduler.plan import BoolArray, IntArray, SchedulerOutput

T = TypeVar("T")
SCARCE = 64  # K/V entries for each request, beside its drafts: with fewer that are free, who comes first matters
PLAIN_STEP = "the step's requests go on without drafts"
LATE_STEPS = 4  # whoever was not asked for more of them is told what has happened since in one piece


@dataclass(slots=True)
class _Progress:
    """How far a request's drafter has been told of it."""

    num_told: int = 0  # of all of its tokens
    num_shared: int = 0  # of those that the client was given; what its scope has forgotten is not shared again
    step: int = 0  # in which that was


class DraftStage:
    """Asks the drafters, lets the policy choose (a fixed or an adaptive decoding length), and tells both what came of
    it.

    A fault in a drafter ends no request: the request goes on without drafts. After a fault in the policy a step has no
    drafts. `faults` counts both.
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
        self._is_started = np.zeros(0, np.bool_)  # by slot: it has draft state
        self._progress: dict[str, _Progress] = {}  # of all requests in flight
        self._started: dict[str, Request] = {}  # requests that have draft state
        self._unstarted: dict[str, Request] = {}  # the others that are in flight and may have drafts
        self._grammars = GrammarDrafts()
        self._num_steps = 0
        self._step: StepOutcome | None = None  # the one under way

    @property
    def drafter(self) -> Drafter:
        return self._guarded.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self._guarded.drafter = drafter

    def add(self, request: Request) -> None:
        """A request is in flight. It has a slot until `end`."""
        if request.slot >= len(self._is_started):
            self._is_started = np.pad(self._is_started, (0, request.slot + 16))
        self._progress[request.request_id] = _Progress()
        self._grammars.add(request)
        if request.speculation.max_draft_tokens > 0:
            self._unstarted[request.request_id] = request

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
        began_s = self._clock()
        requests, request_ids = _at(plan.requests, places), _at(plan.request_ids, places)
        slots = plan.slots[places]
        if not self._tell(self._asked(requests, slots)):
            is_left = self._is_started[slots]
            if not is_left.any():
                return DraftForest.empty(num_trees)
            places, slots = places[is_left], slots[is_left]
            requests, request_ids = _at(plan.requests, places), _at(plan.request_ids, places)
        for place in policy.windows_run(slots):
            policy.window_earned(int(slots[place]), self._guarded.window_tokens(request_ids[place]))
        bounds = plan.columns[places, MOST_DRAFT:]
        queries = DraftQueries(request_ids, bounds, policy.bound(slots, bounds, plan.max_draft_rows))
        if self._grammars:
            most = plan.columns[places, MOST_DRAFT:]
            forest = self._grammars.propose(self._guarded.propose_all, queries, slots, most)
        else:
            forest = self._guarded.propose_all(queries)
        drafted = _among_decoding(plan, requests, slots, places)
        forest = forest.take(policy.choose(forest, drafted, plan.max_draft_rows))
        step.draft_s, step.num_asked = self._clock() - began_s, len(places)
        if not len(forest.token_ids):
            return DraftForest.empty(num_trees)
        forest = self._with_memory(requests, forest)
        step.num_forced = num_forced(forest) if self._grammars else 0
        step.load = plan.load_with(places, forest.starts)
        return forest if len(places) == num_trees else forest.spread(places, num_trees)

    def _asked(self, requests: list[Request], slots: IntArray) -> list[Request]:
        """Returns those whose drafters are asked."""
        return _at(requests, np.flatnonzero(self._grammars.are_drafters_asked(slots))) if self._grammars else requests

    def _with_memory(self, requests: Sequence[Request], forest: DraftForest) -> DraftForest:
        """The part of the forest that there is memory for. Several requests may have been promised the same last part
        of it: the tree with the likeliest rows comes first. Of a tree that does not fit its first nodes are run, and
        no window, which is of no use in part.
        """
        sizes = forest.sizes.tolist()
        starts = compress(forest.starts[:-1].tolist(), sizes)
        trees = [*zip(compress(requests, sizes), starts, filter(None, sizes), strict=True)]
        if self._allocator.free_tokens < len(forest.token_ids) + SCARCE * len(trees):
            trees.sort(key=lambda tree: -forest.probs[tree[1] : tree[1] + tree[2]].mean())
        if self._allocator.reserve_all([each.request_id for each, _, _ in trees], [1 + size for _, _, size in trees]):
            return forest
        keep = np.ones(len(forest.token_ids), np.bool_)
        for request, start, size in trees:
            end, fitting = start + size, self._reserve_most(request.request_id, 1 + size)
            if fitting < size:
                keep[start:end] = forest.is_verified[start:end]
                keep[start + fitting : end] = False
                self.policy.refused(request.slot)
        return forest.take(keep)

    def _reserve_most(self, request_id: str, num_rows: int) -> int:
        """Reserve K/V for one row and as many drafts of the others as there is memory for; returns how many drafts."""
        if not self._allocator.reserve(request_id, num_rows):
            num_rows = max(1, min(num_rows, self._allocator.reservable_tokens([request_id])[0]))
            if not self._allocator.reserve(request_id, num_rows):  # the system may have less than was promised
                num_rows = 1
        return num_rows - 1

    def are_asked(self, slots: IntArray) -> BoolArray:
        """Returns whose drafters are to be called in this step, of these decoding requests. Called once a step."""
        with self._policy_contained:
            is_started: BoolArray = self._is_started[slots]
            is_asked = self.policy.are_asked(slots)
            return is_started & (self._grammars.add_forced(slots, is_asked) if self._grammars else is_asked)
        return np.zeros(len(slots), np.bool_)

    def start(self, running: Sequence[Request]) -> None:
        """Begin the draft state of a step's decoding requests, if their drafter is ready. Called once a step."""
        with self._policy_contained:
            self._drop_failed()
            if self._unstarted:
                for request in [each for each in running if each.request_id in self._unstarted]:
                    if request.num_pending_tokens == 1:
                        self._begin(request)

    def _drop_failed(self) -> bool:
        """Go on without drafts where a drafter has failed; returns whether there were any such requests."""
        failed = self._guarded.failed
        if not failed:
            return False
        dropped = [*(failed & self._started.keys())]
        for request_id in dropped:
            self._leave(request_id)
        return bool(dropped)

    def _leave(self, request_id: str) -> Request:
        """The request has no draft state any more."""
        request = self._started.pop(request_id)
        self._is_started[request.slot] = False
        self.policy.end(request.slot)
        return request

    def _tell(self, requests: Sequence[Request]) -> bool:
        """Tell the drafter what it has missed. A drafter that is not asked is not told either, which costs nothing.

        Returns False if that failed: then the requests concerned have no draft state any more, some only for now.
        """
        accepted: dict[str, list[int]] = {}
        late: dict[str, list[int]] = {}
        shared: dict[str, list[int]] = {}  # what clients were given: that may reach other requests
        for request in requests:
            name, token_ids, progress = request.request_id, request.token_ids, self._progress[request.request_id]
            if progress.num_told < len(token_ids):
                is_late = self._num_steps - progress.step > LATE_STEPS
                (late if is_late else accepted)[name] = token_ids[progress.num_told :]
                progress.num_told = len(token_ids)
            if progress.num_shared < request.num_given_tokens:
                begin, last = request.num_prompt_tokens, request.num_given_tokens
                shared[name] = token_ids[begin + progress.num_shared : begin + last]
                progress.num_shared = last
            progress.step = self._num_steps
        lost, failed = set[str](), self._guarded.failed
        for method, tokens in (("accept_all", accepted), ("catch_up", late), ("share_all", shared)):
            if lost or failed:
                tokens = {name: those for name, those in tokens.items() if name not in lost and name not in failed}
            if tokens:
                lost.update(self._guarded.tell(method, tokens))
        for request_id in lost:
            self._unstarted[request_id] = self._leave(request_id)
        return not (self._drop_failed() or lost)

    def _begin(self, request: Request) -> None:
        """Begin draft state with all tokens that there are by now, if the drafter is ready."""
        name = request.speculation.drafter
        if not self._guarded.is_ready_for(request.request_id, name):
            return
        del self._unstarted[request.request_id]
        if not self._guarded.start(_draft_request(request)):
            return
        self._started[request.request_id] = request
        self.policy.start(request.slot, name or self.drafter.name, request.speculation.tpot_target_s)
        self._is_started[request.slot] = True
        progress = self._progress[request.request_id]
        # It is told of the answer before it is asked, and counts as late if that is long.
        progress.num_told, progress.step = request.num_prompt_tokens, self._num_steps + 1 - request.num_output_tokens

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The argmax of a request's rows that were not verified."""
        if request_id in self._started:
            self._guarded.observe(request_id, token_ids)

    def step_done(self, given: Given, step_s: float, forward_s: float, *, is_trial: bool = False) -> None:
        """The step took so long, from its beginning to its commit, and gave its decoding requests these tokens.

        is_trial: see StepHandle.
        """
        if self._step is None:
            return
        step, self._step = self._step, None
        step.step_s, step.forward_s, step.is_trial = step_s, forward_s, is_trial
        with self._policy_contained:
            self.policy.step_done(step, given)

    def use_threads(self, team: Team) -> None:
        """Draft on these threads from now on."""
        self._guarded.use_threads(team)

    def preempted(self, requests: Iterable[Request]) -> None:
        """These begin again: the token after their next prefill is none that a drafter was asked for."""
        with self._policy_contained:
            for request in requests:
                self.policy.skip(request.slot)

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
        name, slot = request.request_id, request.slot
        is_started = name in self._started
        with self._policy_contained:
            if is_started:
                progress = self._progress[name]
                if self._num_steps - progress.step > LATE_STEPS:  # nobody will draft from this text
                    progress.num_told = len(request.token_ids)
                self._tell([request])
            self.policy.end(slot)
        if is_started or name in self._guarded.failed:
            self._started.pop(name, None)
            self._guarded.end(name)
        self._unstarted.pop(name, None)
        self._grammars.end(slot)
        self._progress.pop(name, None)
        self._is_started[slot] = False

    def clear_scope(self, scope: DraftScope, in_flight: Iterable[Request]) -> None:
        """Forget the text of the scope's requests until now, also of those in flight, told or not."""
        for request in in_flight:
            if request.speculation.draft_scope == scope:
                is_read = request.is_read_along
                num_tokens = request.num_published_tokens if is_read else request.num_output_tokens
                self._progress[request.request_id].num_shared = num_tokens
        self.drafter.clear_scope(scope)


def _at(items: list[T], places: IntArray) -> list[T]:
    """The items at these places, ascending."""
    return items if len(places) == len(items) else [items[place] for place in places.tolist()]


def _among_decoding(plan: SchedulerOutput, requests: Sequence[Request], slots: IntArray, places: IntArray) -> Drafted:
    """The requests at these places of the plan, among those that decode."""
    if plan.is_all_decoding:
        return Drafted(requests, slots, places, plan.slots, plan.columns[:, COMPUTED].copy())
    is_decoding = plan.is_decoding
    among = np.cumsum(is_decoding)[places] - 1
    return Drafted(requests, slots, among, plan.slots[is_decoding], plan.columns[is_decoding, COMPUTED])


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
