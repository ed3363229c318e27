"""The scheduler under any traffic: bounds of every step, higher priority first, and nobody starves."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchserve.config import DRAFTERS, EngineConfig
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.factory import draft_limits
from batchserve.kv.slots import SlotAllocator
from batchserve.request import DraftScope, Request, RequestStatus
from batchserve.scheduler.plan import SchedulerOutput
from batchserve.scheduler.policy import rank
from batchserve.scheduler.prompt_room import MIN_CHUNK
from batchserve.scheduler.scheduler import Scheduler
from batchserve.types import SpeculationParams
from tests.factories import examples, make_request, resolve_speculation
from tests.scheduler.scheduled import ScheduledRequest, each_scheduled

# Reading a long context takes as long as many rows.
TABLE = StepTimeTable((1, 8, 64), (0.010, 0.011, 0.060), 0.0002, 0.0, 1e-5, 1e-5)


class FakeAllocator:
    """A KVAllocator of bookkeeping alone, in extents of any size; refuses to be used out of order."""

    def __init__(self, total_tokens: int, extent: int) -> None:
        self.extent = extent
        self.total_tokens = total_tokens // extent * extent
        self.committed: dict[str, int] = {}
        self.owned: dict[str, int] = {}
        self.kept: dict[Hashable, int] = {}  # the longest prefix by scope; all texts here are alike

    @property
    def free_tokens(self) -> int:
        return self.total_tokens - sum(self.owned.values())

    def reservable_tokens(self, request_ids: Sequence[str]) -> list[int]:
        return [self.owned.get(each, 0) - self.committed.get(each, 0) + self.free_tokens for each in request_ids]

    def reserve_all(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> bool:
        return all(map(self.reserve, request_ids, num_tokens))

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        if num_tokens > self.reservable_tokens([request_id])[0]:
            return False
        wanted = self.committed.setdefault(request_id, 0) + num_tokens
        self.owned[request_id] = max(self.owned.get(request_id, 0), -(-wanted // self.extent) * self.extent)
        return True

    def reclaim(self, num_needed: Mapping[str, int]) -> bool:
        for each, needed in num_needed.items():
            enough = -(-(self.committed[each] + needed) // self.extent) * self.extent
            if self.owned[each] > enough:
                self.owned[each] = enough
                return True
        return False

    def commit(self, request_id: str, rows: Sequence[int]) -> None:
        self.committed[request_id] += len(rows)
        assert self.committed[request_id] <= self.owned[request_id], "more rows than were reserved"

    def match_prefix(
        self, request_id: str, scope: Hashable, token_ids: Sequence[int], source_id: str = "", num_shared: int = 0
    ) -> int | None:
        cached = min(self.kept.get(scope, 0), len(token_ids) - 1)
        if num_shared > cached:
            return num_shared if self.fork(request_id, source_id, num_shared, len(token_ids)) else None
        return cached if self._begin(request_id, cached, len(token_ids)) else None

    def fork(self, request_id: str, source_id: str, num_shared: int, num_tokens: int) -> bool:
        assert num_shared <= self.committed[source_id], "shared before it is there"
        return self._begin(request_id, num_shared, num_tokens)

    def _begin(self, request_id: str, num_shared: int, num_tokens: int) -> bool:
        assert request_id not in self.owned
        assert num_shared < num_tokens, "nothing left to be computed"
        if not self.reserve(request_id, num_tokens):
            return False
        self.committed[request_id] = num_shared
        return True

    def retire(self, request_id: str, scope: Hashable, token_ids: Sequence[int]) -> None:
        assert len(token_ids) <= self.committed[request_id], "kept as K/V of tokens that it is not of"
        self.kept[scope] = max(self.kept.get(scope, 0), len(token_ids))
        self.release(request_id)

    def release(self, request_id: str) -> None:
        self.owned.pop(request_id, None)
        self.committed.pop(request_id, None)

    def check_integrity(self, request_ids: Collection[str]) -> None:
        assert set(self.owned) == set(request_ids)
        assert 0 <= self.free_tokens <= self.total_tokens


class Traffic:
    """A scheduler with made-up execution behind it: drafts are accepted as told, answers run to max_tokens."""

    def __init__(
        self,
        config: EngineConfig,
        allocator: FakeAllocator,
        max_model_len: int,
        step_time: StepTimeModel | None = None,
    ) -> None:
        self.config = config
        self.allocator = allocator
        self.max_model_len = max_model_len
        self.step_time = step_time
        self.scheduler = Scheduler(config, allocator, max_model_len, step_time)
        self.arrivals: dict[str, int] = {}
        self.wishes: dict[str, SpeculationParams] = {}
        self.finished: list[str] = []
        self.now_s = 0.0  # a step takes a second

    def add(
        self,
        prompt_len: int,
        max_tokens: int,
        speculation: SpeculationParams | None = None,
        priority: int = 0,
        scope: str | DraftScope | None = None,
        deadline_s: float | None = None,
    ) -> Request:
        request_id = f"r{len(self.arrivals)}"
        self.arrivals[request_id] = len(self.arrivals)
        resolved = resolve_speculation(self.config, speculation)
        request = make_request(request_id, [5] * prompt_len, max_tokens=max_tokens, speculation=resolved)
        # No two arrive at the same moment: who comes first is never a matter of where he stands in a list.
        request.arrival_s = self.now_s + 1e-6 * len(self.arrivals)
        scope = DraftScope("", scope) if isinstance(scope, str) else scope
        request.priority, request.prefix_scope, request.deadline_s = priority, scope, deadline_s
        self.wishes[request_id] = speculation or SpeculationParams()
        self.scheduler.add(request)
        return request

    def place(self, request: Request) -> tuple[bool, int, float, int]:
        """In the line of all requests at this moment, the first before the others."""
        place = rank(request, self.now_s, self.config.max_priority_wait_s)
        return *place, self.arrivals[request.request_id]

    def step(self, accepted_share: float = 0.5) -> SchedulerOutput:
        running_before, waiting_before = list(self.scheduler.running), list(self.scheduler.waiting)
        self.decoding = [r for r in running_before if r.num_pending_tokens == 1]
        plan = self.scheduler.schedule(self.now_s)
        self.check(plan, running_before, waiting_before)
        self.now_s += 1.0
        for item in each_scheduled(plan):
            self.execute(item, accepted_share)
        return plan

    def execute(self, item: ScheduledRequest, accepted_share: float) -> None:
        request, rows = item.request, item.num_scheduled_tokens
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self.now_s
            assert request.num_cached_tokens == request.num_computed_tokens, "counted as cached"
        drafted = 0
        if item.max_draft_tokens and self.allocator.reserve(request.request_id, rows + item.max_draft_tokens):
            drafted = item.max_draft_tokens
        accepted = min(int(accepted_share * (drafted + 1)), drafted, item.max_draft_depth)
        is_sampled = item.is_sampled
        self.allocator.commit(request.request_id, range(rows + accepted))
        request.num_computed_tokens += rows + accepted
        if is_sampled:
            request.append([7] * (accepted + 1))
        assert request.num_output_tokens <= request.sampling.max_tokens, "more than the client asked for"
        assert len(request.token_ids) <= self.max_model_len
        if request.num_output_tokens == request.sampling.max_tokens:
            self.scheduler.finish(request)
            self.finished.append(request.request_id)

    def check(self, plan: SchedulerOutput, running_before: list[Request], waiting_before: list[Request]) -> None:
        config, scheduler = self.config, self.scheduler
        scheduled = {item.request.request_id: item for item in each_scheduled(plan)}
        assert len(scheduled) == len(each_scheduled(plan)), "a request is scheduled twice"
        assert len(scheduler.running) <= config.max_num_seqs
        # Where drafts are chosen by their worth, each request may be offered all rows that are left.
        drafts = plan.max_draft_rows if config.is_adaptive else sum(i.max_draft_tokens for i in each_scheduled(plan))
        assert sum(i.num_scheduled_tokens for i in each_scheduled(plan)) + drafts <= config.max_num_batched_tokens
        assert all(item.max_draft_tokens <= plan.max_draft_rows for item in each_scheduled(plan))
        self.check_order(plan, running_before, waiting_before)
        for request in scheduler.running:
            assert request.status is RequestStatus.RUNNING
            if request.num_pending_tokens == 1 and request in running_before:  # decodes: has a row in every step
                assert request.request_id in scheduled
        for item in each_scheduled(plan):
            self.check_item(item)
        assert each_scheduled(plan) or not scheduler.running, "a step without progress"
        if self.step_time is not None and not plan.preempted:
            self.check_length(plan, self.step_time)
        self.allocator.check_integrity({r.request_id for r in scheduler.running})

    def check_order(self, plan: SchedulerOutput, running_before: list[Request], waiting_before: list[Request]) -> None:
        """Whoever is first in line is let in first, and the last is preempted, and only for want of memory."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        admitted = [request for request in running if request in waiting_before]
        if plan.preempted:
            assert not admitted, "memory is out: nobody may be let in"
            assert min(running_before, key=self.place) in running, "the first in line must go on"
            assert [r for r in running_before if r not in running] == sorted(plan.preempted, key=running_before.index)
            assert max(map(self.place, running)) < min(map(self.place, plan.preempted)), "not the last in line"
        else:
            assert running[: len(running_before)] == running_before
        for place, request in enumerate(admitted):
            behind = [*admitted[place + 1 :], *waiting]
            assert all(self.comes_before(request, other) for other in behind), "not the first in line"
        for request in plan.preempted:
            assert request.status is RequestStatus.WAITING
            assert request.num_computed_tokens == 0
        for request in admitted:
            assert request.num_cached_tokens < request.num_prompt_tokens
            assert request.num_cached_tokens == 0 or request.prefix_scope is not None

    def comes_before(self, request: Request, other: Request) -> bool:
        """A shorter prompt may pass the first in line, but nobody who has waited long."""
        is_overdue = self.now_s - other.arrival_s > self.config.max_priority_wait_s
        is_shorter = request.num_output_tokens > 0 or len(request.token_ids) < len(other.token_ids)
        may_pass = request.priority == other.priority and is_shorter and not is_overdue
        return self.place(request) < self.place(other) or may_pass

    def check_length(self, plan: SchedulerOutput, step_time: StepTimeModel) -> None:
        """Prompts stretch the step of those who decode no further than they may, whatever they have behind them."""
        decoding = [i for i in each_scheduled(plan) if i.request in self.decoding]
        prompts = [i for i in each_scheduled(plan) if i not in decoding]
        if not decoding or sum(i.num_scheduled_tokens for i in prompts) <= MIN_CHUNK:
            return
        plain_s, step_s = (step_time.predict(load_of(items)) for items in (decoding, [*decoding, *prompts]))
        assert step_s <= plain_s * self.config.prompt_inflation * (1 + 1e-9)
        assert self.config.max_itl_ms is None or step_s <= self.config.max_itl_ms / 1e3 * (1 + 1e-9)

    def check_item(self, item: ScheduledRequest) -> None:
        request, config = item.request, self.config
        assert request in self.scheduler.running
        assert 1 <= item.num_scheduled_tokens <= request.num_pending_tokens
        if config.prefill_chunk_size:
            assert item.num_scheduled_tokens <= config.prefill_chunk_size
        reserved = self.allocator.owned[request.request_id] - self.allocator.committed[request.request_id]
        assert reserved >= item.num_scheduled_tokens
        if not item.max_draft_tokens:
            assert item.max_draft_depth == 0
            return
        assert request.num_pending_tokens == 1
        # Within the request's own caps and its drafter's bounds.
        wish = self.wishes[request.request_id]
        bounds = draft_limits(config, 0)[wish.drafter or config.drafter]
        assert wish.is_enabled
        assert item.max_draft_tokens <= min(bounds.max_draft_tokens, _or(wish.max_draft_tokens, 1000))
        assert 1 <= item.max_draft_depth <= min(bounds.branch_length, _or(wish.branch_length, 1000))
        # All drafts accepted and the bonus token: still within what may be given.
        assert item.max_draft_depth + 1 <= request.sampling.max_tokens - request.num_output_tokens
        assert item.max_draft_depth + 1 <= self.max_model_len - len(request.token_ids)

    def run_to_the_end(self, accepted_share: float = 0.0) -> int:
        """Steps until nobody is left; every step gives the first in line a token or a chunk, so there is a bound."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        bound = 10 + sum(2 * r.num_prompt_tokens + 2 * r.sampling.max_tokens for r in requests) * (len(requests) + 1)
        steps = 0
        while self.scheduler.has_requests:
            self.step(accepted_share)
            steps += 1
            assert steps <= bound, "a request starves"
        return steps


def load_of(scheduled: Sequence[ScheduledRequest]) -> StepLoad:
    """Of a step with these: the head runs on one row of each who decodes, and on no prompt's."""
    parts = [(i.num_scheduled_tokens, i.request.num_computed_tokens) for i in scheduled]
    rows, context = sum(count for count, _ in parts), sum(context for _, context in parts)
    num_decoding = sum(count == 1 for count, _ in parts)
    return StepLoad(rows, num_decoding, len(parts), context, sum(count * context for count, context in parts))


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        max_num_seqs=st.integers(1, 5),
        spare_rows=st.integers(1, 30),
        chunk=st.sampled_from([None, 1, 3, 8]),
        decoding_length=st.one_of(st.none(), st.integers(0, 6)),
        branch_length=st.one_of(st.none(), st.integers(1, 4)),
        extent=st.sampled_from([1, 4, 16]),
        memory=st.integers(3, 12),
        max_priority_wait_s=st.sampled_from([0.0, 7.0, 1e9]),
        max_itl_ms=st.sampled_from([None, 12.0, 30.0]),
        is_timed=st.booleans(),
    )
    def start(
        self,
        max_num_seqs: int,
        spare_rows: int,
        chunk: int | None,
        decoding_length: int | None,
        branch_length: int | None,
        extent: int,
        memory: int,
        max_priority_wait_s: float,
        max_itl_ms: float | None,
        is_timed: bool,
    ) -> None:
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_rows,
            prefill_chunk_size=chunk,
            decoding_length=None if decoding_length is None else min(decoding_length, max_num_seqs + spare_rows - 1),
            branch_length=branch_length,
            max_priority_wait_s=max_priority_wait_s,
            max_itl_ms=max_itl_ms,
        )
        allocator = FakeAllocator(memory * 16, extent)
        self.max_model_len = min(60, allocator.total_tokens)
        step_time = StepTimeModel(TABLE) if is_timed else None
        self.traffic = Traffic(config, allocator, self.max_model_len, step_time)

    @rule(
        prompt_share=st.floats(0, 1),
        max_tokens_share=st.floats(0, 1),
        is_enabled=st.booleans(),
        max_draft_tokens=st.one_of(st.none(), st.integers(0, 8)),
        drafter=st.sampled_from(["", *DRAFTERS]),
        branch_length=st.one_of(st.none(), st.integers(1, 8)),
        priority=st.sampled_from([0, 0, 0, -1, 5]),
        scope=st.sampled_from([None, None, "s", "t"]),
    )
    def add(
        self, prompt_share: float, max_tokens_share: float, priority: int, scope: str | None, **speculation: Any
    ) -> None:
        prompt_len = 1 + int(prompt_share * (self.max_model_len - 2))
        max_tokens = 1 + int(max_tokens_share * (self.max_model_len - prompt_len - 1))
        self.traffic.add(prompt_len, max_tokens, SpeculationParams(**speculation), priority, scope)

    @rule(share=st.floats(0, 1))
    def step(self, share: float) -> None:
        self.traffic.step(share)

    @precondition(lambda self: self.traffic.scheduler.has_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.traffic.scheduler.requests())))
        self.traffic.scheduler.finish(request)
        assert request.is_finished
        assert request.request_id not in self.traffic.allocator.owned

    @invariant()
    def only_running_requests_own_memory(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.allocator.check_integrity({r.request_id for r in self.traffic.scheduler.running})

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.run_to_the_end()
            assert self.traffic.allocator.free_tokens == self.traffic.allocator.total_tokens


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = examples(120, stateful_step_count=30)


@pytest.mark.slow
class TestSchedulerAtLength(SchedulerMachine.TestCase):
    settings = examples(600, stateful_step_count=80)


def make_traffic(total_tokens: int = 4096, max_model_len: int = 256, extent: int = 1, **options: object) -> Traffic:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return Traffic(config, FakeAllocator(total_tokens, extent), max_model_len)


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    traffic = make_traffic(max_num_seqs=4, max_num_batched_tokens=16, decoding_length=14)
    traffic.add(3, 20)
    traffic.step()
    traffic.add(200, 5)
    for _ in range(10):
        decoding, prefilling = each_scheduled(traffic.step(0.0))
        assert decoding.num_scheduled_tokens == 1
        assert decoding.max_draft_tokens > 0
        assert prefilling.num_scheduled_tokens >= 8  # drafts may take half of a busy step, not more


def test_prompts_are_kept_from_no_more_rows_than_drafts_may_soon_have() -> None:
    traffic = make_traffic(max_num_seqs=4, max_num_batched_tokens=128)
    for _ in range(2):
        traffic.add(3, 100)
    traffic.step(0.0)
    prompt = traffic.add(200, 5)
    chunks = []
    for num_draft_rows in (0, 40, 40, 40):
        chunks += [i.num_scheduled_tokens for i in each_scheduled(traffic.step(0.0)) if i.request is prompt]
        for _ in range(30):
            traffic.scheduler.step_done(num_draft_rows)
        prompt.num_computed_tokens = 0
    assert chunks == [124, 124, 63, 63], "a row for each who decodes, and then half of what is left"


def test_requests_join_and_leave_at_every_step() -> None:
    traffic = make_traffic(max_num_seqs=2, max_num_batched_tokens=64, decoding_length=0)
    first, second, third = traffic.add(4, 3), traffic.add(4, 1), traffic.add(4, 1)
    assert [i.request for i in each_scheduled(traffic.step())] == [first, second]
    assert [i.request for i in each_scheduled(traffic.step())] == [first, third]  # the place of the second, at once
    fourth = traffic.add(4, 1)
    assert [i.request for i in each_scheduled(traffic.step())] == [first, fourth]


def test_short_requests_do_not_overtake_one_that_waits_for_memory() -> None:
    traffic = make_traffic(total_tokens=100, max_model_len=100, max_num_seqs=8, decoding_length=0)
    traffic.add(60, 10)
    traffic.step()
    large, small = traffic.add(80, 1), traffic.add(2, 1)
    for _ in range(5):
        plan = traffic.step()
        assert {large, small}.isdisjoint(i.request for i in each_scheduled(plan))
    traffic.run_to_the_end()
    assert traffic.finished == ["r0", "r1", "r2"]


def test_two_that_outgrow_the_memory_both_finish_and_only_the_newer_is_preempted() -> None:
    traffic = make_traffic(total_tokens=128, max_model_len=128, extent=64, max_num_seqs=2)
    first, second = traffic.add(50, 60), traffic.add(50, 60)
    traffic.run_to_the_end()
    assert traffic.finished == [first.request_id, second.request_id]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)


def test_nobody_is_preempted_for_a_guess() -> None:
    """Drafts take what is free: with room for one more token each, both go on and neither drafts."""
    traffic = make_traffic(total_tokens=24, max_model_len=24, max_num_seqs=2, decoding_length=8)
    traffic.add(10, 10), traffic.add(10, 10)
    traffic.step()
    plan = traffic.step()
    assert not plan.preempted
    assert [item.num_scheduled_tokens for item in each_scheduled(plan)] == [1, 1]
    assert sum(item.max_draft_tokens for item in each_scheduled(plan)) <= 4


def test_whoever_is_not_drafted_leaves_the_rows_to_the_others() -> None:
    """And nobody is asked about who has none to give, or is asked about twice."""
    traffic = make_traffic(max_num_seqs=4, max_num_batched_tokens=64, decoding_length=63)
    drafted, undrafted = traffic.add(4, 100), traffic.add(4, 100)
    never, prompt = traffic.add(4, 100, SpeculationParams(max_draft_tokens=0)), traffic.add(60, 100)
    while not drafted.num_output_tokens or not undrafted.num_output_tokens or not never.num_output_tokens:
        traffic.step(0.0)
    traffic.scheduler.finish(prompt)
    asked: list[int] = []

    def are_drafted(slots: np.ndarray) -> np.ndarray:
        asked.extend(slots.tolist())
        return slots == drafted.slot

    plan = traffic.scheduler.schedule(0.0, are_drafted)
    assert asked == [drafted.slot, undrafted.slot]
    assert {s.request.request_id: s.max_draft_tokens for s in each_scheduled(plan)} == {"r0": 61, "r1": 0, "r2": 0}
    assert [s.is_decoding for s in each_scheduled(plan)] == [True] * 3


@pytest.mark.parametrize("scope", [None, "a"])
def test_who_waits_gets_what_others_have_reserved_in_vain(scope: str | None) -> None:
    traffic = make_traffic(total_tokens=64, max_model_len=64, max_num_seqs=2, decoding_length=0)
    first = traffic.add(20, 20)
    traffic.step()
    assert traffic.allocator.reserve(first.request_id, 40), "drafts, none of which is accepted"
    second = traffic.add(30, 4, scope=scope)
    assert [i.request for i in each_scheduled(traffic.step())] == [first, second]
    third = traffic.add(30, 4, scope=scope)
    traffic.step()
    assert third in traffic.scheduler.waiting
    traffic.run_to_the_end()


def test_who_is_preempted_would_not_have_fitted_any_more() -> None:
    """What its drafts had reserved beyond its tokens is given back before that."""
    traffic = make_traffic(total_tokens=40, max_model_len=40, max_num_seqs=2, decoding_length=8)
    older, newer = traffic.add(10, 20, SpeculationParams(is_enabled=False)), traffic.add(10, 20)
    plan = traffic.step(0.0)
    while not plan.preempted:
        plan = traffic.step(0.0)
    assert plan.preempted == [newer]
    assert [item.request for item in each_scheduled(plan)] == [older]
    assert traffic.allocator.free_tokens < newer.num_pending_tokens
    traffic.run_to_the_end()
    assert traffic.finished == [older.request_id, newer.request_id]


def test_an_overdue_request_is_not_preempted_for_any_that_came_later() -> None:
    """It comes back after its own preemption, before those of higher priority that go on arriving, and stays."""
    traffic = make_traffic(total_tokens=80, max_model_len=80, max_num_seqs=3, max_priority_wait_s=6.0)
    low = traffic.add(30, 40)
    traffic.step(0.0)
    for _ in range(60):
        traffic.add(20, 15, priority=1)
        traffic.step(0.0)
        if traffic.now_s > low.arrival_s + 6.0 + 15.0:  # overdue, and whoever ran then has ended
            assert low.status is not RequestStatus.WAITING
    assert 1 <= low.num_preemptions <= 6
    assert low.is_finished


@pytest.mark.parametrize("is_overdue", [False, True])
def test_of_two_that_outgrow_the_memory_the_same_one_always_gives_way(is_overdue: bool) -> None:
    """The one of lower priority, as long as it has not waited long; then the other, for good."""
    wait = 3.0 if is_overdue else 1000.0
    options = {"max_num_seqs": 2, "max_priority_wait_s": wait, "decoding_length": 0}
    traffic = make_traffic(total_tokens=64, max_model_len=64, **options)
    low = traffic.add(20, 40)
    traffic.step(0.0)
    high = traffic.add(20, 40, priority=1)
    traffic.run_to_the_end()
    first, second = (low, high) if is_overdue else (high, low)
    assert traffic.finished == [first.request_id, second.request_id]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)


def test_what_was_cached_of_who_never_had_a_row_is_counted_when_it_begins_again() -> None:
    traffic = make_traffic(total_tokens=96, max_model_len=96, max_num_seqs=2, decoding_length=0)
    traffic.add(40, 1, scope="s")
    traffic.run_to_the_end()
    request = traffic.add(30, 40, scope="s")
    traffic.scheduler.schedule()
    assert (request.num_cached_tokens, request.first_scheduled_s) == (29, None)
    traffic.scheduler._preempt(request)
    request.prefix_scope = None  # its scope was cleared
    traffic.step()
    assert request.num_cached_tokens == 0


def test_who_was_preempted_begins_again_with_what_is_cached() -> None:
    """And is counted as cached once: what its client is told is of its first beginning."""
    traffic = make_traffic(total_tokens=96, max_model_len=96, max_num_seqs=2, decoding_length=0)
    traffic.add(40, 1, scope="s")
    traffic.run_to_the_end()
    first, second = traffic.add(30, 40, scope="s"), traffic.add(30, 40, scope="s")
    traffic.step()
    assert first.num_cached_tokens == second.num_cached_tokens == 29
    plan = traffic.step()
    while not plan.preempted:
        plan = traffic.step()
    assert plan.preempted == [second]
    while second.status is RequestStatus.WAITING:
        traffic.step()
    assert (second.num_cached_tokens, second.num_preemptions) == (29, 1)
    traffic.run_to_the_end()


@pytest.mark.parametrize(("max_itl_ms", "most_rows"), [(20.0, 60), (None, 64)])
def test_a_prompt_whose_beginning_is_cached_stretches_a_step_no_further_than_any_other(
    max_itl_ms: float | None, most_rows: int
) -> None:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=256, decoding_length=0, max_itl_ms=max_itl_ms)
    table = StepTimeTable((1, 256), (0.010, 0.050), per_attended_token=1e-6)
    traffic = Traffic(config, FakeAllocator(9000, 1), 4000, StepTimeModel(table))
    traffic.add(3000, 1, scope="s")
    traffic.run_to_the_end()
    traffic.add(3, 900)
    traffic.step()
    cached, other = traffic.add(3500, 1, scope="s"), traffic.add(3500, 1, scope="t")
    first_rows: dict[str, int] = {}
    while len(first_rows) < 2:
        for item in each_scheduled(traffic.step())[1:]:  # Traffic.check_length looks at the whole step
            first_rows.setdefault(item.request.request_id, item.num_scheduled_tokens)
    assert cached.num_cached_tokens == 3000
    assert MIN_CHUNK <= first_rows[cached.request_id] < first_rows[other.request_id] <= most_rows


def test_who_has_room_only_because_he_shares_memory_is_bounded_as_well() -> None:
    """His tokens are more than memory is free, so that he is not foreseen."""
    allocator = SlotAllocator(450, max_requests=4, max_tokens=400, bytes_per_token=1)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=512, decoding_length=0, max_itl_ms=20.0)
    table = StepTimeTable((1, 512), (0.010, 0.522), 0.0, 0.0, 0.0, 0.0)  # a millisecond a row
    scheduler = Scheduler(config, allocator, 400, StepTimeModel(table))
    source, late = (make_request(name, [5] * count, max_tokens=30) for name, count in (("a", 250), ("b", 300)))
    late.token_ids[150:] = [6] * 150
    source.prefix_scope = late.prefix_scope = DraftScope("", "s")
    scheduler.add(source)
    for item in each_scheduled(scheduler.schedule()):
        allocator.commit("a", range(item.num_scheduled_tokens))
        source.num_computed_tokens = 250
        source.append([7])
    scheduler.add(late)
    assert allocator.free_tokens < late.num_pending_tokens
    decoding, prompt = each_scheduled(scheduler.schedule())
    assert (decoding.request, prompt.request, late.num_cached_tokens) == (source, late, 150)
    assert MIN_CHUNK <= prompt.num_scheduled_tokens <= 10


def sharing_traffic(memory: int = 4000) -> Traffic:
    return Traffic(EngineConfig(max_num_seqs=4, max_num_batched_tokens=64), FakeAllocator(memory, 1), 1000)


def test_what_a_running_request_has_computed_is_not_computed_again() -> None:
    traffic = sharing_traffic()
    traffic.add(20, 30, scope="s")
    traffic.add(50, 30, scope="s")
    traffic.step()
    late, stranger, private = (traffic.add(200, 3, scope=scope) for scope in ("s", "t", None))
    late.token_ids[30:] = [9] * 170
    traffic.step()
    assert [request.num_cached_tokens for request in (late, stranger, private)] == [30, 0, 0]
    traffic.run_to_the_end()


def test_what_one_tenant_has_computed_is_not_found_under_the_same_name_of_another() -> None:
    traffic = sharing_traffic()
    mine, yours = DraftScope("a", "s"), DraftScope("b", "s")
    traffic.add(50, 1, scope=mine)
    traffic.run_to_the_end()
    cached = [traffic.add(60, 30, scope=scope) for scope in (yours, mine)]
    traffic.step()
    assert [request.num_cached_tokens for request in cached] == [0, 50], "of an ended request"
    traffic.step()
    shared = [traffic.add(200, 3, scope=scope) for scope in (DraftScope("c", "s"), yours)]
    while any(request in traffic.scheduler.waiting for request in shared):
        traffic.step()
    assert shared[0].num_cached_tokens == 0
    assert shared[1].num_cached_tokens >= 60, "of a running one"
    traffic.run_to_the_end()


def test_the_longer_of_what_is_cached_and_what_is_running_is_taken() -> None:
    traffic = sharing_traffic()
    traffic.add(100, 1, scope="s")
    traffic.run_to_the_end()
    running, late = traffic.add(50, 30, scope="s"), traffic.add(200, 3, scope="s")
    traffic.step()
    assert (running.num_cached_tokens, late.num_cached_tokens) == (49, 100)
    traffic.allocator.kept.clear()
    later = traffic.add(200, 3, scope="s")
    later.token_ids[40:] = [9] * 160
    while later in traffic.scheduler.waiting:
        traffic.step()
    assert later.num_cached_tokens == 40


def test_who_was_refused_is_looked_at_again_when_memory_has_come_free() -> None:
    traffic = sharing_traffic(memory=100)
    first = traffic.add(60, 10, SpeculationParams(is_enabled=False), scope="s")
    traffic.step()
    refused = traffic.add(60, 3, SpeculationParams(is_enabled=False), scope="s")
    looked = []
    match_prefix = traffic.allocator.match_prefix
    traffic.allocator.match_prefix = lambda *args: (looked.append(args), match_prefix(*args))[1]  # type: ignore[func-returns-value, method-assign]
    for _ in range(8):
        traffic.step()
    assert len(looked) == 1, "as often as it was refused"
    traffic.run_to_the_end()
    assert first.is_finished
    assert refused.num_cached_tokens == 59


def test_a_name_that_was_refused_may_come_again_with_less() -> None:
    traffic = sharing_traffic(memory=100)
    traffic.add(60, 10, SpeculationParams(is_enabled=False), scope="s")
    traffic.step()
    refused = traffic.add(60, 3, SpeculationParams(is_enabled=False), scope="s")
    traffic.step()
    assert refused.status is RequestStatus.WAITING
    traffic.scheduler.finish(refused)
    again = make_request(refused.request_id, [1] * 20, max_tokens=3)
    again.prefix_scope = DraftScope("", "s")
    traffic.scheduler.add(again)
    traffic.scheduler.schedule()
    assert again.status is RequestStatus.RUNNING


def test_who_fits_only_beside_a_request_that_it_begins_like_is_let_in_when_that_is_computed() -> None:
    allocator = SlotAllocator(100, max_requests=4, max_tokens=100, bytes_per_token=1)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=30)
    scheduler = Scheduler(config, allocator, 100)
    source, late = (make_request(name, [5] * 60, max_tokens=30) for name in "ab")
    source.prefix_scope = late.prefix_scope = DraftScope("", "s")
    for request in (source, late):
        scheduler.add(request)
    for _ in range(3):
        assert late in scheduler.waiting
        for item in each_scheduled(scheduler.schedule()):
            allocator.commit(item.request.request_id, range(item.num_scheduled_tokens))
            item.request.num_computed_tokens += item.num_scheduled_tokens
            item.request.append([7] * item.is_sampled)
    assert late in scheduler.running
    assert late.num_cached_tokens == 59
    assert source in scheduler.running


def test_prompts_are_computed_in_the_order_of_their_priorities() -> None:
    traffic = make_traffic(max_num_seqs=3, max_num_batched_tokens=16, decoding_length=0)
    low = traffic.add(100, 1)
    traffic.step()
    high = traffic.add(32, 1, priority=1)
    for _ in range(2):  # it is let in at once, though low has had all rows until now
        assert [(i.request, i.num_scheduled_tokens) for i in each_scheduled(traffic.step())] == [(high, 16)]
    assert [(i.request, i.num_scheduled_tokens) for i in each_scheduled(traffic.step())] == [(low, 16)]


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one_nor_the_long_one_for_ever() -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "decoding_length": 0, "max_priority_wait_s": 10}
    traffic = make_traffic(max_model_len=1000, **options)  # type: ignore[arg-type]
    long = traffic.add(800, 1)
    traffic.step()
    traffic.add(24, 1)
    planned = [{i.request.request_id: i.num_scheduled_tokens for i in each_scheduled(traffic.step())} for _ in range(3)]
    assert planned == [{"r1": 16}, {"r0": 8, "r1": 8}, {"r0": 16}]
    while traffic.now_s <= 10.0:
        traffic.add(16, 1)
        assert long not in [i.request for i in each_scheduled(traffic.step())]
    traffic.add(16, 1)
    assert [i.request for i in each_scheduled(traffic.step())] == [long], "it has waited long enough"
    traffic.add(800, 1)
    traffic.run_to_the_end()
    assert traffic.finished[-3] == "r0", "nor does another long one, nor what waits behind that, come before it"


@pytest.mark.parametrize(
    ("seats", "total_tokens", "is_let_in"), [(3, 2000, True), (2, 2000, False), (3, 1724, True), (3, 1723, False)]
)
def test_a_short_prompt_passes_a_long_one_that_waits_as_well(seats: int, total_tokens: int, is_let_in: bool) -> None:
    """Behind 800 tokens that are computed and 900 that wait for rows, whose seat and memory it leaves alone."""
    traffic = make_traffic(
        total_tokens=total_tokens, max_model_len=1000, max_num_seqs=seats, max_num_batched_tokens=16, decoding_length=0
    )
    computing = traffic.add(800, 1)
    traffic.step()
    traffic.add(900, 1)
    short = traffic.add(24, 1)
    scheduled = [i.request for i in each_scheduled(traffic.step())]
    assert scheduled == [short if is_let_in else computing]
    traffic.run_to_the_end()
    assert traffic.finished == (["r2", "r0", "r1"] if is_let_in else ["r0", "r1", "r2"])


@examples(100)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 10), st.integers(1, 3), st.integers(0, 20), st.data())
def test_nobody_is_starved_by_a_steady_stream_of_higher_priority(
    seats: int, prompt_len: int, max_tokens: int, arrivals: int, wait: int, data: st.DataObject
) -> None:
    """Once he has waited so long, only those are let in before him who came before him: as many as there are of them.

    And each gives up his seat in a bounded time.
    """
    traffic = make_traffic(total_tokens=seats * 24, max_model_len=24, max_num_seqs=seats, max_priority_wait_s=wait)
    for _ in range(5):
        traffic.add(prompt_len, max_tokens, priority=1)
        traffic.step(0.0)
    low = traffic.add(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 10)), priority=-1)
    num_steps, num_older = 0, 0
    while low.status is RequestStatus.WAITING:
        waiting = list(traffic.scheduler.waiting)
        is_overdue = traffic.now_s - low.arrival_s > wait
        num_steps += is_overdue
        num_older = max(num_older, sum(is_overdue and request.arrival_s < low.arrival_s for request in waiting))
        traffic.step(0.0)
        if is_overdue and low in traffic.scheduler.waiting:
            admitted = [request for request in waiting if request.status is not RequestStatus.WAITING]
            assert all(request.arrival_s < low.arrival_s for request in admitted)
        assert num_steps <= (num_older + 1) * (max_tokens + 1)
        for _ in range(arrivals):
            traffic.add(prompt_len, max_tokens, priority=data.draw(st.integers(0, 5)))


def test_the_same_traffic_gives_the_same_plans() -> None:
    def plans() -> list[list[tuple[str, int, int, int]]]:
        traffic = make_traffic(total_tokens=200, max_model_len=100, extent=16, max_num_seqs=3, prefill_chunk_size=7)
        seen = []
        for i in range(40):
            if i % 4 == 0:
                traffic.add(5 + 3 * i % 40, 1 + i % 20)
            plan = traffic.step(0.7)
            seen.append(
                [
                    (s.request.request_id, s.num_scheduled_tokens, s.max_draft_tokens, s.max_draft_depth)
                    for s in each_scheduled(plan)
                ]
            )
        return seen

    assert plans() == plans()


def test_deadlines_are_found_waiting_and_running() -> None:
    traffic = make_traffic(max_num_seqs=1)
    running, waiting = (traffic.add(3, 9, deadline_s=deadline_s) for deadline_s in (10.0, 5.0))
    patient = traffic.add(3, 9)
    traffic.step(0.0)
    assert list(traffic.scheduler.expired(4.9)) == []
    assert list(traffic.scheduler.expired(5.0)) == [waiting]
    assert list(traffic.scheduler.expired(11.0)) == [running, waiting]
    assert patient.deadline_s is None


def test_a_request_that_has_ended_has_no_legal_transition() -> None:
    traffic = make_traffic()
    request = traffic.add(3, 1)
    traffic.run_to_the_end()
    for status in RequestStatus:
        with pytest.raises(RuntimeError, match="illegal transition"):
            request.move_to(status)
