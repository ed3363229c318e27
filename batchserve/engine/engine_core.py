"""The step: schedule -> draft -> execute -> verify -> update.

Synchronous and deterministic: it has no clock of its own, and no asyncio.

Longer than 400 lines: what is here ends requests, in six ways (finished, stopped, aborted, expired, failed, without
memory), and all of them change the same books. Commit is in commit.py, drafting in drafting.py (docs/PLAN.md).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from batchserve.engine.answer_texts import AnswerTexts
from batchserve.engine.batching import batch_of
from batchserve.engine.commit import FULL, GOES_ON, NUM_GIVEN, NUM_KEPT, OVERFLOWED, STATUS, STOPPED, commit_step
from batchserve.errors import (
    BatchserveError,
    DeadlineExceededError,
    EngineFaultError,
    GrammarError,
    NonFiniteLogitsError,
    OutOfMemoryError,
)
from batchserve.free_memory import describe_out_of_memory
from batchserve.request import Request
from batchserve.scheduler.plan import COMPUTED
from batchserve.types import Delta, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.draft.base import Drafter
    from batchserve.draft.forest import DraftForest
    from batchserve.engine.commit import Committed
    from batchserve.engine.detokenizer import Decoder
    from batchserve.engine.drafting import DraftStage
    from batchserve.engine.executor import Executor
    from batchserve.engine.step_watch import StepWatch
    from batchserve.metrics import EngineMetrics
    from batchserve.request import DraftScope
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.verify import StepTokens
    from batchserve.scheduler.plan import SchedulerOutput
    from batchserve.scheduler.scheduler import Scheduler
    from batchserve.startup.choose_threads import ThreadWatch


T = TypeVar("T")
MAX_RELIEFS = 64  # of a step that has no memory, before one of its requests is ended
COMPLETE = -1  # of a request, beside commit.py's: its grammar lets nothing follow
DEADLINE_SLACK_S = 0.05  # by which a front may take a request back before the deadline that it has told
# A request that a step added tokens to, waiting for them to be published, and how many of these were drafts.
_Commit = tuple[Request, int]
Event = tuple[Request, Delta | BatchserveError]


class EngineCore:
    """All requests of one engine. Not thread-safe: one thread owns it.

    Events go to `emit`, one call a step. Every request that is added ends in exactly one error, or Delta with a
    finish_reason, unless it is aborted. A fault in drafting or in counting ends nobody, and one in making an answer's
    text that request alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafts: DraftStage,
        executor: Executor,
        decoder: Decoder | None,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.drafts = drafts
        self.executor = executor
        self.metrics = metrics
        self._counting = metrics.contained
        metrics.draft_faults = lambda: self.drafts.faults.counts
        metrics.acceptance = lambda: self.drafts.acceptance()  # the stage may be exchanged
        metrics.adaptive = lambda: self.drafts.policy.gauges()
        metrics.load = self._load
        self.emit: Callable[[list[Event]], None] = lambda events: None
        self._clock = clock
        self._texts = AnswerTexts(decoder)  # of all requests in flight
        self._names: set[str] = set()  # theirs
        self._unusual: set[Request] = set()  # those that change logits or ask for the logprobs of their prompt
        self._forks: dict[str, list[Request]] = {}  # by the id of the request whose prompt they wait for
        self._unpublished: list[_Commit] = []
        self._stopped: list[Request] = []  # by a stop string, while their next step is under way
        self._failed: dict[Request, BatchserveError] = {}  # in the step under way
        self.threads: ThreadWatch | None = None  # where their number may change
        self.watch: StepWatch | None = None  # while somebody looks
        self._num_failed_steps = 0  # in a row, for want of memory
        self._want = ""  # the last one's

    @property
    def drafter(self) -> Drafter:
        return self.drafts.drafter

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or bool(self._unpublished)

    def add(self, request: Request) -> None:
        """Queue a request. Its id must not be in flight (the front has seen to that), and its grammar compiled."""
        if request.request_id in self._names:
            raise RuntimeError(f"request {request.request_id!r} is in flight already")
        has_grammar = request.adjustments is not None and request.adjustments.grammar is not None
        if request.sampling.grammar is not None and not has_grammar:
            raise RuntimeError(f"request {request.request_id!r}: its grammar is not compiled")
        try:
            self._texts.begin(request)
        except Exception as error:
            self.refuse(request, self._no_text(request, error))
            return
        self._names.add(request.request_id)
        if request.adjustments is not None or request.sampling.prompt_logprobs is not None:
            self._unusual.add(request)
        if request.fork_of in self._forks:
            self._forks[request.fork_of].append(request)
            return
        if request.num_forks:
            self._forks[request.request_id] = []
        self.scheduler.add(request)
        self.drafts.add(request)

    def refuse(self, request: Request, error: BatchserveError) -> None:
        """Ends a request that was not added."""
        self._count_unfinished(num_failed=1)
        self.emit([(request, error)])

    def _add_forks(self, request: Request) -> None:
        """Lets those begin that have waited for the prompt of this request to be computed, or for its end."""
        for fork in self._forks.pop(request.request_id, ()):
            self.scheduler.add(fork)
            self.drafts.add(fork)

    def abort(self, request: Request) -> None:
        """Forget a request and free its memory now; nothing more is said of it. Harmless when it has ended."""
        if request in self._texts:
            self._end(request)
            # gRPC takes a call back at its deadline, and that mostly comes before a step finds it passed.
            is_expired = request.deadline_s is not None and request.deadline_s <= self._clock() + DEADLINE_SLACK_S
            self._count_unfinished(num_aborted=not is_expired, num_expired=is_expired)

    def abort_all(self) -> list[Request]:
        """Forget every request; returns them."""
        requests = [*self._texts]
        for request in requests:
            self._end(request)
        self._unpublished.clear()
        self._stopped.clear()
        self._failed.clear()
        return requests

    def idle(self) -> float | None:
        """Use a lull, in which the books are in order; returns the seconds after which there is more to do, if any."""
        if self.threads is None:
            return None
        self._look_at_threads(is_idle=True)
        return self.threads.idle_s()

    def _look_at_threads(self, *, is_idle: bool) -> None:
        if self.threads is not None:
            with self.metrics.faults.contained("threads", "their number stays as it is"):
                self.threads.look(is_idle=is_idle)

    def step(self) -> None:
        """One step of all requests."""
        self._look_at_threads(is_idle=False)
        self._expire()
        began_s = self._clock()
        selected = self.scheduler.select(began_s)
        self.drafts.start(selected.requests)
        plan = self.scheduler.lay_out(selected, self.drafts.are_asked)
        with self._counting:
            self.metrics.preempted(len(plan.preempted))
        self.drafts.preempted(plan.preempted)
        if plan.requests:
            self._run(plan, began_s)
        else:
            # Before others may begin because of what is published:
            is_stuck = bool(self.scheduler.waiting) and not self.scheduler.running and not plan.preempted
            self._publish()
            if is_stuck:
                # All memory is free and yet too little for one request: the system has less than was planned with.
                request = self.scheduler.waiting.first(began_s)
                self._end_without_memory(request, f"no memory for K/V of {len(request.token_ids)} tokens")
        self._end_late()

    def _run(self, plan: SchedulerOutput, began_s: float) -> None:
        """Draft, execute, verify and update what was scheduled; publish the step before meanwhile."""
        drafts = self.drafts.propose(plan)
        batch = self._build(plan, drafts)
        started_s = self._clock()
        handle = self._unless_out_of_memory(lambda: self.executor.launch(batch), batch.num_rows)
        launched_s = self._clock()
        self._publish()
        self._mask_rows(plan, batch)
        published_s = self._clock()
        results = None if handle is None else self._unless_out_of_memory(handle.wait, batch.num_rows)
        if results is None:
            self._relieve(plan, batch)
            return
        self._num_failed_steps = 0
        num_drafted, forward_s = len(drafts.token_ids), self._clock() - started_s
        if handle is not None and not handle.is_running:  # else it ran while the step before was published
            forward_s -= published_s - launched_s
        done = self._commit(plan, batch, results)
        is_trial = handle is not None and handle.is_trial
        self.drafts.step_done(done.given, self._clock() - began_s, forward_s, is_trial=is_trial)
        self.scheduler.step_done(num_drafted)
        if self.watch is not None:
            with self.metrics.faults.contained("watch", "those who watch see no step"):
                self.watch.look(plan, drafts, batch, results, began_s, self._clock())
        with self._counting:
            counts = batch.num_rows, done.num_draft_rows, len(done.given.slots)
            self.metrics.step_done(*counts, forward_s, done.verified)

    def _mask_rows(self, plan: SchedulerOutput, batch: RaggedBatch) -> None:
        """Finds what grammars allow after each row of the step; on a GPU while its forward runs."""
        for place, adjustments in batch.adjustments.items():
            if adjustments.grammar is not None and batch.first_logit[place] >= 0:
                try:
                    adjustments.mask_rows(*batch.tree(place))
                except GrammarError as error:
                    self._failed[plan.requests[place]] = error

    def _unless_out_of_memory(self, call: Callable[[], T], num_rows: int) -> T | None:
        """What the call returns; None where the system has no memory for a step of so many rows."""
        try:
            return call()
        except (RuntimeError, MemoryError) as error:
            want = describe_out_of_memory(f"for a step of {num_rows} rows", error)
            if want is None:
                raise
            self._want = want
            return None

    def _relieve(self, plan: SchedulerOutput, batch: RaggedBatch) -> None:
        """A step had no memory, and is made again: without what is cached, then with ever fewer requests. If that does
        not help the request that has most rows is ended.
        """
        self._num_failed_steps += 1
        self.drafts.preempted(plan.requests)
        if 1 < self._num_failed_steps <= MAX_RELIEFS and len(self.scheduler.running) > 1:
            self.drafts.preempted([self.scheduler.preempt_last()])
            with self._counting:
                self.metrics.preempted(1)
        elif self._num_failed_steps > 1:
            rows = zip(batch.spans.rows[:, 1].tolist(), plan.requests, strict=True)
            going_on = [each for each in rows if each[1] in self._texts and each[1].finish_reason is None]
            if going_on:
                _, request = max(going_on, key=lambda each: each[0])
                self._end_without_memory(request, self._want)
        self.executor.allocator.give_way()

    def _end_without_memory(self, request: Request, want: str) -> None:
        where = f"request_id = {request.request_id!r}, after {request.num_output_tokens} tokens"
        self._count_unfinished(num_failed=1)
        self._fail([(request, OutOfMemoryError(f"{where}: {want}"))])

    def _end_late(self) -> None:
        """End whom a step has found to be over while it was still using their memory."""
        stopped, self._stopped = self._stopped, []
        for request in stopped:
            self._end(request)
        found, self._failed = self._failed, {}
        failed = [each for each in found.items() if each[0] in self._texts]  # the others were aborted since
        if failed:
            self._count_unfinished(num_failed=len(failed))
            self._fail(failed)

    def check_integrity(self) -> None:
        """Raises RuntimeError if memory, requests and drafts disagree."""
        self.executor.allocator.check_integrity({r.request_id for r in self.scheduler.running})
        self.scheduler.table.check_integrity()
        known = {request.request_id for request in self._texts}
        if known != self._names:
            raise RuntimeError(f"requests in flight {sorted(known)}, names {sorted(self._names)}")
        queued = {r.request_id for r in chain(self.scheduler.requests(), *self._forks.values())}
        unpublished = {request.request_id for request, _ in self._unpublished}
        if not queued <= known or known - queued - unpublished:
            raise RuntimeError(f"requests in flight {sorted(known)}, scheduled {sorted(queued)}")

    def _load(self) -> dict[str, float]:
        """metrics.LOAD; any thread may ask."""
        allocator, scheduler = self.executor.allocator, self.scheduler
        return {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "kv_used_tokens": allocator.total_tokens - allocator.free_tokens,
            "kv_total_tokens": allocator.total_tokens,
        }

    def clear_draft_scope(self, scope: DraftScope) -> None:
        """Forget what the scope's requests have shared, drafts and K/V.

        Those in flight go on. What they are given from now on is drafted from, as before; their K/V, which is of what
        came before, too, is nobody else's any more. Raises EngineFaultError where a drafter cannot forget:
        all else is forgotten then.
        """
        self.executor.allocator.forget_prefixes(scope)
        for request in self._texts:
            if request.prefix_scope == scope:
                request.prefix_scope = None
        try:
            self.drafts.clear_scope(scope, self._texts)
        except Exception as error:
            self.metrics.faults.note("drafter.clear_scope", error, "its caller is told")
            what = f"draft_scope = {scope.name!r}: drafts of it cannot be forgotten; restart the server"
            raise EngineFaultError(what) from error

    def _build(self, plan: SchedulerOutput, drafts: DraftForest) -> RaggedBatch:
        """The rows of a step. drafts: a tree for every scheduled request, empty ones included."""
        for request in [each for each in plan.requests if each.first_scheduled_s is None]:
            self._begun(request)
        return batch_of(plan, drafts, self.scheduler.table.last_token, has_unusual=bool(self._unusual))

    def _begun(self, request: Request) -> None:
        request.first_scheduled_s = self._clock()
        is_looked_for = request.prefix_scope is not None
        with self._counting:
            self.metrics.begun(request.num_prompt_tokens, request.num_cached_tokens if is_looked_for else None)

    def _commit(self, plan: SchedulerOutput, batch: RaggedBatch, verified: StepTokens) -> Committed:
        """Keep the K/V of accepted paths, append tokens, end what is complete: all that the next step depends on."""
        now_s = self._clock()
        done = commit_step(self.scheduler.table.rows, plan, batch, verified, now_s)
        self.executor.allocator.commit_all(plan.request_ids, [each[NUM_KEPT] for each in done.columns], done.moved)
        all_tokens = verified.token_ids.tolist()
        for place, noted in verified.prompt_logprobs.items():
            request, start = plan.requests[place], int(plan.columns[place, COMPUTED]) + 1
            request.prompt_logprobs[start : start + len(noted)] = noted
        for place, logprobs in verified.logprobs.items():
            if done.columns[place][STATUS] <= FULL:
                plan.requests[place].logprobs += logprobs[: done.columns[place][NUM_GIVEN]]
        for request, (_, _, start, num_given, num_accepted, has_drafts, is_first, status) in zip(
            plan.requests, done.columns, strict=True
        ):
            if status <= FULL:
                request.token_ids += all_tokens[start : start + num_given]
                if request.adjustments is not None:
                    status = self._adjust(request, all_tokens[start : start + num_given], status)
                if num_given:  # an end alone is no token
                    request.last_token_s = now_s
                    if is_first:
                        request.first_token_s = now_s
                        self._add_forks(request)
                if status != GOES_ON:
                    request.finish_reason = FinishReason.LENGTH if status == FULL else FinishReason.STOP
                    if status == STOPPED and all_tokens[start + num_given] in request.sampling.stop_token_ids:
                        request.stop_reason = all_tokens[start + num_given]
                    self.scheduler.finish(request)
                if status != GOES_ON or request.is_read_along or request.is_sharing_early:
                    self._unpublished.append((request, num_accepted))
            elif status == OVERFLOWED:
                self._overflow(request, has_drafts=bool(has_drafts))
        for place, error in verified.errors.items():
            request = plan.requests[place]
            where = f"request_id = {request.request_id!r}, after {request.num_output_tokens} tokens"
            self._failed[request] = EngineFaultError(f"{where}: {error}")
        for place, unverified in verified.unverified_token_ids.items():
            if done.columns[place][STATUS] == GOES_ON:
                self.drafts.observe(plan.request_ids[place], unverified)
        return done

    def _adjust(self, request: Request, token_ids: list[int], status: int) -> int:
        """Tells a request's adjustments of new tokens; returns its status: it may be complete by its grammar."""
        adjustments = request.adjustments
        assert adjustments is not None
        try:
            adjustments.append(token_ids)
        except GrammarError as error:
            self._failed[request] = error
            return status
        return COMPLETE if adjustments.is_complete and status != STOPPED else status

    def _overflow(self, request: Request, has_drafts: bool) -> None:
        """The logits after the request's last token say nothing."""
        if has_drafts:
            # A draft's K/V may have spoilt the other rows: kernels multiply by zero what a row does not see.
            request.pause_drafts()
            with self._counting:
                self.metrics.drafts_paused()
        else:
            request.prefix_scope = None  # nobody shall begin with its K/V
            self._failed.setdefault(request, _no_logits(request))

    def _publish(self) -> None:
        """Text, stop strings and messages of the step before; on a GPU while the next forward runs."""
        commits, self._unpublished = self._unpublished, []
        events: list[Event] = []
        num_given = 0
        for request, num_accepted in commits:
            if request not in self._texts:  # aborted since
                continue
            if request.finish_reason is None and not request.is_read_along:  # it is sharing early
                num_given += request.num_output_tokens - request.num_given_tokens
                request.num_given_tokens = request.num_output_tokens
                continue
            try:
                delta = self._texts.delta(request, num_accepted)
            except Exception as error:
                self._failed[request] = self._no_text(request, error)
                continue
            if delta is not None or request.is_sharing_early:
                num_given += request.num_published_tokens - request.num_given_tokens
                request.num_given_tokens = request.num_published_tokens
            if delta is None:
                continue
            if request.finish_reason is not None:
                delta = self._last_delta(request, delta)
            events.append((request, delta))
        if num_given:
            with self._counting:
                self.metrics.given(num_given)
        if events:
            self.emit(events)

    def _no_text(self, request: Request, error: Exception) -> EngineFaultError:
        """What a request ends with whose text cannot be made."""
        self.metrics.faults.note("detokenizer", error, "the request has failed")
        return EngineFaultError(f"request_id = {request.request_id!r}: the text of the answer cannot be made")

    def _last_delta(self, request: Request, delta: Delta) -> Delta:
        """Returns the delta as the last one of a request, which ends."""
        usage = request.usage(request.num_published_tokens)
        timing = request.timing(self._clock())
        with self._counting:
            self.metrics.finished(timing, usage.completion_tokens)
        if request.is_finished:
            self._end(request)
        else:
            self._stopped.append(request)
        reasons = {"finish_reason": request.finish_reason, "stop_reason": request.stop_reason}
        return replace(delta, **reasons, usage=usage, timing=timing)  # type: ignore[arg-type]

    def _expire(self) -> None:
        now_s = self._clock()
        if self.scheduler.expired(now_s):
            self._publish()  # what came in time, be it an answer's end
            self._end_late()
            late = [(request, _expiry(request)) for request in self.scheduler.expired(now_s)]
            self._count_unfinished(num_expired=len(late))
            self._fail(late)

    def _count_unfinished(self, **amounts: int) -> None:
        with self._counting:
            self.metrics.unfinished(**amounts)

    def _fail(self, failures: Sequence[tuple[Request, BatchserveError]]) -> None:
        for request, _ in failures:
            self._end(request)
        if failures:
            self.emit([*failures])

    def _end(self, request: Request) -> None:
        self._texts.end(request)
        self._unusual.discard(request)
        self._names.remove(request.request_id)
        if request in self._forks.get(request.fork_of, ()):
            self._forks[request.fork_of].remove(request)
            return
        if not request.is_finished:
            self.scheduler.finish(request)
        self.drafts.end(request)
        self.scheduler.forget(request)
        self._add_forks(request)


def _expiry(request: Request) -> DeadlineExceededError:
    what = f"while {request.status.value}, after {request.num_output_tokens} tokens"
    return DeadlineExceededError(f"deadline passed {what}")


def _no_logits(request: Request) -> NonFiniteLogitsError:
    where = f"request_id = {request.request_id!r}, after {request.num_output_tokens} tokens"
    why = "the model's logits are NaN or infinite; a wider dtype may hold its numbers"
    if request.adjustments is not None:
        why = "the sampling parameters leave no token, or the logits are NaN or infinite"
    return NonFiniteLogitsError(f"{where}: {why}")
