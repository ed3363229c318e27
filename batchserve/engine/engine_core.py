"""The step: schedule -> draft -> execute -> verify -> update. Synchronous and deterministic; no clock, no asyncio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftScope, DraftTree
from batchserve.engine.detokenizer import Decoder, IncrementalDetokenizer
from batchserve.errors import BatchserveError, DeadlineExceededError
from batchserve.request import Request
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from batchserve.types import Delta, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.metrics import EngineMetrics
    from batchserve.runner.model_runner import ModelRunner
    from batchserve.sampling.verify import VerifiedTokens
    from batchserve.scheduler.scheduler import ScheduledRequest, Scheduler


TENANT = "default"  # there is no authentication: all callers are one


@dataclass(frozen=True, slots=True)
class Failure:
    """A request's end by an error."""

    request_id: str
    error: BatchserveError


@dataclass(slots=True)
class _Answer:
    """What publishing keeps of one request."""

    request: Request
    detokenizer: IncrementalDetokenizer
    num_delivered: int = 0
    has_draft_state: bool = False


@dataclass(slots=True)
class _Commit:
    """What one step added to a request, waiting to be published."""

    request: Request
    token_ids: list[int]
    num_accepted: int


Event = tuple[Request, Delta | Failure]


class EngineCore:
    """All requests of one engine. Not thread-safe: one thread owns it.

    Events go to `emit`, one call a step. Every request that is added ends in exactly one Failure, or Delta with a
    finish_reason, unless it is aborted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafter: Drafter,
        runner: ModelRunner,
        decoder: Decoder | None,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.drafter = drafter
        self.runner = runner
        self.metrics = metrics
        self.emit: Callable[[list[Event]], None] = lambda events: None
        self._decoder = decoder
        self._clock = clock
        self._answers: dict[str, _Answer] = {}  # by request id
        self._unpublished: list[_Commit] = []
        self._stopped: list[Request] = []  # by a stop string, while their next step is under way

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or bool(self._unpublished)

    def add(self, request: Request) -> None:
        """Queue a request. Its id must not be in flight (the front has seen to that)."""
        if request.request_id in self._answers:
            raise RuntimeError(f"request {request.request_id!r} is in flight already")
        sampling = request.sampling
        detokenizer = IncrementalDetokenizer(self._decoder, sampling.stop, sampling.skip_special_tokens)
        self._answers[request.request_id] = _Answer(request, detokenizer)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Forget a request and free its memory now; nothing more is said of it. Harmless when it has ended."""
        answer = self._answers.get(request.request_id)
        if answer is not None and answer.request is request:
            self._end(request)

    def abort_all(self) -> list[Request]:
        """Forget every request; returns them."""
        requests = [answer.request for answer in self._answers.values()]
        for request in requests:
            self._end(request)
        self._unpublished.clear()
        self._stopped.clear()
        return requests

    def step(self) -> None:
        """One step of all requests."""
        self._expire()
        plan = self.scheduler.schedule()
        self.metrics.preempted(len(plan.preempted))
        if not plan.scheduled:
            self._publish()
        else:
            drafts = self._draft(plan.scheduled)
            batch = self._build(plan.scheduled, drafts)
            started_s = self._clock()
            handle = self.runner.launch(batch)
            self._publish()
            results = handle.wait()
            self.metrics.step_done(batch.num_rows, self._clock() - started_s)
            self._commit(plan.scheduled, batch, results)
        # Only now: the step under way was still using their memory.
        stopped, self._stopped = self._stopped, []
        for request in stopped:
            self._end(request)

    def check_integrity(self) -> None:
        """Raises RuntimeError if memory, requests and drafts disagree."""
        self.runner.backend.allocator.check_integrity({r.request_id for r in self.scheduler.running})
        known = set(self._answers)
        queued = {r.request_id for r in self.scheduler.requests()}
        unpublished = {c.request.request_id for c in self._unpublished}
        if not queued <= known or known - queued - unpublished:
            raise RuntimeError(f"requests in flight {sorted(known)}, scheduled {sorted(queued)}")

    def clear_draft_scope(self, name: str) -> None:
        """Forget what the scope's requests have shared; those in flight keep their own text, and go on sharing."""
        self.drafter.clear_scope(DraftScope(TENANT, name))

    def _draft(self, scheduled: list[ScheduledRequest]) -> dict[str, DraftTree]:
        queries = [
            DraftQuery(s.request.request_id, s.max_draft_tokens, s.max_draft_depth, s.max_row_depth)
            for s in scheduled
            if s.max_draft_tokens > 0 and self._ensure_draft_state(s.request)
        ]
        if not queries:
            return {}
        trees = self.drafter.propose(queries)
        drafts = {}
        allocator = self.runner.backend.allocator
        for query, tree in zip(queries, trees, strict=True):
            tree.check(query)
            # Two requests may have been promised the same last free memory.
            if len(tree) and allocator.reserve(query.request_id, 1 + len(tree)):
                drafts[query.request_id] = tree
        return drafts

    def _ensure_draft_state(self, request: Request) -> bool:
        """Whether it can be drafted now; its state begins when its drafter is ready, with all that it has by then."""
        answer = self._answers[request.request_id]
        if answer.has_draft_state:
            return True
        if not self.drafter.is_ready_for(request.speculation.drafter):
            return False
        self.drafter.start(_draft_request(request))
        answer.has_draft_state = True
        outputs = request.token_ids[request.num_prompt_tokens :]
        self.drafter.accept(request.request_id, outputs)
        # What is committed but not yet published is shared with the rest of its step.
        self.drafter.share(request.request_id, outputs[: answer.num_delivered])
        return True

    def _build(self, scheduled: list[ScheduledRequest], drafts: dict[str, DraftTree]) -> RaggedBatch:
        now_s = self._clock()
        rows = []
        for item in scheduled:
            request = item.request
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now_s
            rows.append(_request_rows(item, drafts.get(request.request_id)))
        return build_batch(rows)

    def _commit(
        self, scheduled: list[ScheduledRequest], batch: RaggedBatch, results: list[VerifiedTokens | None]
    ) -> None:
        """Keep the K/V of accepted paths, append tokens, end what is complete: all that the next step depends on."""
        now_s = self._clock()
        for item, rows, verified in zip(scheduled, batch.requests, results, strict=True):
            request = item.request
            if request.finish_reason is not None:  # a stop string was found while the step was under way
                continue
            accepted = verified.rows if verified is not None else []
            kept = [*range(rows.num_pending), *accepted]
            self.runner.backend.allocator.commit(request.request_id, kept)
            request.num_computed_tokens += len(kept)
            if verified is None:
                continue
            if verified.unverified_token_ids:
                self.drafter.observe(request.request_id, verified.unverified_token_ids)
            request.num_draft_tokens += rows.num_verified
            num_accepted = self._append(request, verified, now_s)
            self.metrics.verified(rows.num_verified, num_accepted)

    def _append(self, request: Request, verified: VerifiedTokens, now_s: float) -> int:
        """Give the request its new tokens, up to its end, and end it there; returns how many of them were drafted."""
        room = request.sampling.max_tokens - request.num_output_tokens
        given = verified.token_ids[:room]
        end = next((i for i, token in enumerate(given) if token in request.sampling.end_token_ids), None)
        if end is not None:
            given = given[:end]
            request.finish_reason = FinishReason.STOP
        elif len(verified.token_ids) >= room:
            request.finish_reason = FinishReason.LENGTH
        # What was accepted behind the answer's end helped nobody.
        num_accepted = min(len(verified.rows), len(given))
        request.num_accepted_draft_tokens += num_accepted
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        request.token_ids.extend(given)
        self._unpublished.append(_Commit(request, given, num_accepted))
        if request.finish_reason is not None:
            self.scheduler.finish(request)
        elif self._answers[request.request_id].has_draft_state:
            self.drafter.accept(request.request_id, given)
        return num_accepted

    def _publish(self) -> None:
        """Text, stop strings, shared drafts and messages of the step before; runs while the next forward does."""
        commits, self._unpublished = self._unpublished, []
        events: list[Event] = []
        for commit in commits:
            request = commit.request
            answer = self._answers.get(request.request_id)
            if answer is None or answer.request is not request:  # aborted since
                continue
            piece = answer.detokenizer.feed(commit.token_ids, is_last=request.finish_reason is not None)
            if piece.is_stopped:
                request.finish_reason = FinishReason.STOP
                request.num_accepted_draft_tokens -= max(0, commit.num_accepted - len(piece.token_ids))
            if answer.has_draft_state:
                self.drafter.share(request.request_id, piece.token_ids)
            answer.num_delivered += len(piece.token_ids)
            events.append((request, self._delta(answer, piece.text, piece.token_ids)))
        if events:
            self.emit(events)

    def _delta(self, answer: _Answer, text: str, token_ids: list[int]) -> Delta:
        request = answer.request
        if request.finish_reason is None:
            return Delta(request.request_id, text, token_ids)
        usage = request.usage(answer.num_delivered)
        timing = request.timing(self._clock())
        self.metrics.finished(usage, timing)
        if request.is_finished:
            self._end(request)
        else:
            self._stopped.append(request)
        return Delta(request.request_id, text, token_ids, request.finish_reason, usage, timing)

    def _expire(self) -> None:
        events: list[Event] = []
        for request in self.scheduler.expired(self._clock()):
            message = f"deadline passed while {request.status.value}, after {request.num_output_tokens} tokens"
            self._end(request)
            events.append((request, Failure(request.request_id, DeadlineExceededError(message))))
        if events:
            self.emit(events)

    def _end(self, request: Request) -> None:
        if not request.is_finished:
            self.scheduler.finish(request)
        answer = self._answers.pop(request.request_id)
        if answer.has_draft_state:
            self.drafter.end(request.request_id)


def _request_rows(item: ScheduledRequest, draft: DraftTree | None) -> RequestRows:
    request = item.request
    start, count = request.num_computed_tokens, item.num_scheduled_tokens
    token_ids = request.token_ids[start : start + count]
    parents = list(range(-1, count - 1))
    if draft is not None:
        token_ids = token_ids + draft.token_ids
        parents += [count - 1 if parent < 0 else count + parent for parent in draft.parents]
    sampling = request.sampling if item.is_sampled else None
    is_verified = draft.is_verified if draft is not None else []
    return RequestRows(request.request_id, start, token_ids, parents, count, sampling, is_verified)


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
