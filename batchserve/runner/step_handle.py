"""A launched step on a CPU, and how the trees of its requests are walked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from batchserve.native import pool
from batchserve.row_adjustments import ProcessorError
from batchserve.sampling.argmax_kernel import best_tokens
from batchserve.sampling.logprobs import RAW, FoundLogprobs, note_tokens
from batchserve.sampling.sampled_walk import Rows, SampledWalks, walk_loop
from batchserve.sampling.sampler import NO_TOKEN, RowSampler, sample_by_definition
from batchserve.sampling.verify import NOT_SAMPLED, StepTokens, VerifiedTokens, walk_tree
from batchserve.sampling.walk_kernel import walk_greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchserve.request import ResolvedSampling
    from batchserve.row_adjustments import RowAdjustments
    from batchserve.runner.ragged_batch import RaggedBatch, RequestRows
    from batchserve.sampling.recordings import Recordings
    from batchserve.sampling.sampler import FindBest
    from batchserve.types import TokenLogprobs


ALONE = 1 << 17  # logits, at least, that one thread has sampled from before another one has begun


class StepRunner(Protocol):
    """The part of an executor that its LazySteps use."""

    forced: Recordings
    num_threads: int
    was_trial: bool  # StepHandle.is_trial of the last forward

    @property
    def find_best(self) -> FindBest:
        """See RowSampler."""

    @property
    def can_walk_sampled(self) -> Callable[[], bool]:
        """Returns whether the walks of sampled requests are compiled, or may be compiled now."""

    def forward(self, batch: RaggedBatch) -> np.ndarray:
        """Returns float32 logits [batch.num_logits, vocab_size], and writes the K/V of every row."""


class LazyStep:
    """StepHandle of a CPU: the forward runs in wait()."""

    is_running = False

    @property
    def is_trial(self) -> bool:
        return self._runner.was_trial

    def __init__(self, runner: StepRunner, batch: RaggedBatch) -> None:
        self._runner, self._batch = runner, batch

    def wait(self) -> StepTokens:
        runner = self._runner
        logits = runner.forward(self._batch)
        options = runner.find_best, runner.num_threads
        return verify_batch(self._batch, logits, runner.forced, *options, can_walk_sampled=runner.can_walk_sampled)


def verify_batch(
    batch: RaggedBatch,
    logits: np.ndarray,
    forced: Recordings,
    find_best: FindBest = best_tokens,
    num_threads: int = 1,
    *,
    can_walk_sampled: Callable[[], bool] = lambda: True,
) -> StepTokens:
    """Walks every request's tree. logits: float32, of batch.logit_rows. forced: ModelRunner's; find_best: RowSampler's.

    can_walk_sampled: asked if there are sampled requests; if False, their trees are walked one by one, without compiled
    code. Raises MemoryError.
    """
    sampler, spans = RowSampler(logits, find_best), batch.spans
    greedy = [place for place, each in enumerate(batch.samplings) if each is not None and each.is_argmax]
    sampled: dict[int, ResolvedSampling] = {}
    if len(greedy) < len(batch.samplings):
        walking = enumerate(batch.samplings)
        sampled = {place: each for place, each in walking if each is not None and not each.is_argmax}
    where = (spans.rows, batch.num_pending, batch.first_logit)
    drafts = (batch.input_ids, spans.parents, batch.is_verified)
    recorded, walked = forced.places(batch.request_ids), np.empty((3, batch.num_rows), np.int64)
    if greedy:
        walk_greedy(np.array(greedy), where, sampler.greedy(), recorded, drafts, walked)
    logprobs: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, Exception] = {}
    if sampled:
        is_ready = can_walk_sampled()
        compiled = {place: each for place, each in sampled.items() if is_ready and not each.logits_processors}
        if compiled:
            rows = Rows(*where, *drafts, recorded)
            logprobs = _walk_sampled(compiled, logits, rows, walked, batch.adjustments, num_threads)
        for place in sampled.keys() - compiled.keys():
            verified = _walk_in_python(batch, place, logits, forced, walked)
            if verified.logprobs:
                logprobs[place] = verified.logprobs
            if verified.error is not None:
                errors[place] = verified.error
    starts = spans.rows[:, 0].copy()  # in one piece, as kernels were compiled for it
    counts = walked[2].take(starts)
    if len(greedy) + len(sampled) < len(starts):
        counts[batch.first_logit < 0] = NOT_SAMPLED
    tokens = StepTokens(counts, starts, walked[1], walked[0], logprobs=logprobs, errors=errors)
    if batch.prompts:
        tokens.prompt_logprobs = prompt_logprobs(batch, {at: logits[batch.prompt_rows(at)] for at in batch.prompts})
    if 0 in batch.is_verified.tobytes():
        for place, (own, first) in enumerate(zip(batch.requests, batch.first_logit.tolist(), strict=True)):
            if first >= 0 and not all(own.is_verified):
                tokens.unverified_token_ids[place] = _unverified(own, sampler, first)
    return tokens


def _walk_sampled(
    samplings: dict[int, ResolvedSampling],
    logits: np.ndarray,
    rows: Rows,
    walked: np.ndarray,
    adjustments: Mapping[int, RowAdjustments],
    num_threads: int,
) -> dict[int, list[TokenLogprobs]]:
    """Walks the trees of the requests at these places, on several threads if there is enough to sample from.

    Returns the log probabilities of those that ask for them.
    """
    places = [*samplings]
    walks = SampledWalks(places, [*samplings.values()], rows, np.ascontiguousarray(logits), walked, adjustments)
    lengths, starts = walked[2], rows.spans[places, 0]
    lengths[starts] = -1  # compiled code cannot raise: whoever finds no memory writes none
    is_shared = len(samplings) * logits.shape[1] > ALONE
    pool.run(walk_loop().address, walks.address, num_threads if is_shared else 1)
    if lengths[starts].min() < 0:
        raise MemoryError(f"no memory to sample from {logits.shape[1]} tokens")
    each = zip(samplings.items(), starts.tolist(), strict=True)
    return {
        place: walks.logprobs.tokens(start, int(lengths[start]) + 1, sampling.logprobs)
        for (place, sampling), start in each
        if sampling.logprobs is not None
    }


def _walk_in_python(
    batch: RaggedBatch, place: int, logits: np.ndarray, forced: Recordings, walked: np.ndarray
) -> VerifiedTokens:
    """Does for one request what _walk_sampled does: while that is being compiled, and for processors in Python."""
    rows, first, start = batch.requests[place], int(batch.first_logit[place]), int(batch.spans.rows[place, 0])
    own = logits[first : first + 1 + rows.num_draft_tokens]
    sampler = RowSampler(own, sample=sample_by_definition)
    verified = verify_request(rows, sampler, forced.get(rows.request_id, ()), batch.adjustments.get(place))
    walked[0, start : start + len(verified.rows)] = verified.rows
    walked[1, start : start + len(verified.token_ids)] = verified.token_ids
    walked[2, start] = len(verified.rows)
    return verified


def prompt_logprobs(batch: RaggedBatch, logits: Mapping[int, np.ndarray]) -> dict[int, list[TokenLogprobs]]:
    """Returns the log probabilities of batch.prompts by place. logits: float32, of their rows, by place."""
    found = {}
    for place, (tokens, num_tops) in batch.prompts.items():
        noted = FoundLogprobs.empty(len(tokens), num_tops)
        note_tokens(logits[place], RAW, np.array(tokens), num_tops, noted)
        found[place] = noted.tokens(0, len(tokens), num_tops)
    return found


def _unverified(rows: RequestRows, sampler: RowSampler, first: int) -> tuple[int, ...]:
    """The argmax behind each row that only the drafter wants to know of."""
    argmax = sampler.argmax()[first + 1 :].tolist()
    return tuple(argmax[i] for i, is_verified in enumerate(rows.is_verified) if not is_verified)


def verify_request(
    rows: RequestRows, sampler: RowSampler, recorded: Sequence[int], adjustments: RowAdjustments | None = None
) -> VerifiedTokens:
    """Walks one request's tree. The sampler's rows are the root's and the drafts'; recorded: its own of Recordings.

    adjustments: if it changes logits. An error of its logits processors is in the result.
    """
    if rows.sampling is None:
        raise ValueError(f"{rows.request_id!r}: nothing is sampled")
    sampling, root = rows.sampling, rows.root
    next_position = rows.context_len + rows.num_pending
    path: list[int] = []  # the tokens of the rows walked so far, without the root's
    logprobs: list[TokenLogprobs] = []

    def target(row: int, depth: int) -> int:
        if adjustments is None and sampling.logprobs is None:
            return sampler.token_at(row - root, next_position + depth, sampling)
        path[depth - 1 :] = [rows.token_ids[row]] if depth else []
        place = row - root, next_position + depth
        try:
            return sampler.adjusted_token_at(*place, sampling, adjustments, path, logprobs)
        except ProcessorError:
            if depth == 0:
                raise
            return NO_TOKEN  # it is called again in the next step, unless the answer ends before

    def forced(row: int, depth: int) -> int:
        token, position = target(row, depth), next_position + depth
        return int(recorded[position]) if position < len(recorded) else token

    token_of = forced if len(recorded) else target
    try:
        verified = walk_tree(rows.token_ids, rows.parents, root, token_of, rows.is_verified)
    except ProcessorError as error:
        return VerifiedTokens([NO_TOKEN], [], error=error)
    verified.logprobs = logprobs[: len(verified.token_ids)]
    if not all(rows.is_verified):
        verified.unverified_token_ids = _unverified(rows, sampler, 0)
    return verified
