"""A launched step: what it gives once it is through, and how its rows' trees are walked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.native import pool
from batchserve.sampling.argmax_kernel import best_tokens
from batchserve.sampling.sampled_walk import IS_BFLOAT, IS_FLOAT, Logits, Rows, SampledWalks, walk_loop
from batchserve.sampling.sampler import RowSampler
from batchserve.sampling.verify import NOT_SAMPLED, StepTokens, VerifiedTokens, walk_tree
from batchserve.sampling.walk_kernel import walk_greedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.request import ResolvedSampling
    from batchserve.runner.ragged_batch import RaggedBatch, RequestRows
    from batchserve.sampling.device import DeviceSampler
    from batchserve.sampling.recordings import Recordings
    from batchserve.sampling.sampler import FindBest


ALONE = 1 << 17  # logits, at least, that one thread has sampled from before another one has begun
# Logits that compiled code reads; others are widened first.
KINDS = {torch.float32: IS_FLOAT, torch.bfloat16: IS_BFLOAT}


class QueuedStep:
    """StepHandle of the GPU path: forward, sampling and tree walk are queued, and a copy of the tokens behind them.

    logits [at least len(batch.logit_rows), vocab_size] stay on the device, and as they are until wait() has returned:
    of requests that the device could not decide, the host reads their rows. tokens: DeviceSampler.sample's; None:
    nothing is sampled.
    """

    is_running = True

    def __init__(
        self,
        batch: RaggedBatch,
        sampler: DeviceSampler,
        logits: torch.Tensor,
        tokens: torch.Tensor | None,
        forced: Recordings,
    ) -> None:
        self._batch = batch
        self._sampler = sampler
        self._logits = logits
        self._forced = forced
        self._is_sampled = tokens is not None
        # Where nothing is sampled it is still waited for: what the step took is learned from.
        self._copy = HostCopy(_nothing(logits) if tokens is None else tokens)

    def wait(self) -> StepTokens:
        rows = self._copy.wait()
        if not self._is_sampled:
            return StepTokens.of([None] * len(self._batch.request_ids))
        return StepTokens.of(self._sampler.to_verified(rows, self._batch, self._verify_on_host))

    def _verify_on_host(self, index: int) -> VerifiedTokens:
        rows, first = self._batch.requests[index], int(self._batch.first_logit[index])
        logits = self._logits[first : first + 1 + rows.num_draft_tokens].cpu()
        return verify_request(rows, RowSampler(logits), self._forced.get(rows.request_id, ()))


def _nothing(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32, device=logits.device)


class HostCopy:
    """A tensor on its way to the host: the copy is queued behind what computes it."""

    def __init__(self, source: torch.Tensor) -> None:
        self._host, self._event = source, None
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


def verify_batch(
    batch: RaggedBatch, logits: torch.Tensor, forced: Recordings, find_best: FindBest = best_tokens
) -> StepTokens:
    """Walk every request's tree; logits are of batch.logit_rows, forced is ModelRunner's, find_best RowSampler's."""
    sampler, spans = RowSampler(logits, find_best), batch.spans
    greedy = [place for place, each in enumerate(batch.samplings) if each is not None and each.temperature == 0.0]
    sampled = {place: each for place, each in enumerate(batch.samplings) if each is not None and each.temperature > 0.0}
    where = (spans.rows, batch.num_pending, batch.first_logit)
    drafts = (batch.input_ids, spans.parents, batch.is_verified)
    recorded, walked = forced.places(batch.request_ids), np.empty((3, batch.num_rows), np.int64)
    if greedy:
        walk_greedy(np.array(greedy), where, sampler.greedy(), recorded, drafts, walked)
    if sampled:
        _walk_sampled(sampled, logits, Rows(*where, *drafts, recorded), walked)
    starts = spans.rows[:, 0].copy()  # in one piece, as kernels were compiled for it
    counts = walked[2].take(starts)
    if len(greedy) + len(sampled) < len(starts):
        counts[batch.first_logit < 0] = NOT_SAMPLED
    verified = StepTokens(counts, starts, walked[1], walked[0])
    if 0 in batch.is_verified.tobytes():
        for place, (own, first) in enumerate(zip(batch.requests, batch.first_logit.tolist(), strict=True)):
            if first >= 0 and not all(own.is_verified):
                verified.unverified_token_ids[place] = _unverified(own, sampler, first)
    return verified


def _walk_sampled(samplings: dict[int, ResolvedSampling], logits: torch.Tensor, rows: Rows, walked: np.ndarray) -> None:
    """Of the requests at these places; on several threads where there is enough to be drawn from.

    Raises MemoryError if there was none to work in.
    """
    known = (logits if logits.dtype in KINDS else logits.float()).contiguous()
    place = Logits(known.data_ptr(), known.stride(0) * known.element_size(), KINDS[known.dtype], known.shape[1])
    places = [*samplings]
    walks = SampledWalks(places, [*samplings.values()], rows, place, walked)
    lengths, starts = walked[2], rows.spans[places, 0]
    lengths[starts] = -1  # compiled code cannot raise: whoever finds no memory writes none
    is_shared = len(samplings) * known.shape[1] > ALONE
    pool.run(walk_loop().address, walks.address, torch.get_num_threads() if is_shared else 1)
    if lengths[starts].min() < 0:
        raise MemoryError(f"no memory to sample from {known.shape[1]} tokens")


def _unverified(rows: RequestRows, sampler: RowSampler, first: int) -> tuple[int, ...]:
    """The argmax behind each row that only the drafter wants to know of."""
    argmax = sampler.argmax()[first + 1 :].tolist()
    return tuple(argmax[i] for i, is_verified in enumerate(rows.is_verified) if not is_verified)


def verify_request(rows: RequestRows, sampler: RowSampler, recorded: Sequence[int]) -> VerifiedTokens:
    """Walk one request's tree. The sampler's rows are the root's and the drafts'; recorded: its own of Recordings."""
    if rows.sampling is None:
        raise ValueError(f"{rows.request_id!r}: nothing is sampled")
    sampling, root = rows.sampling, rows.root
    next_position = rows.context_len + rows.num_pending

    def target(row: int, depth: int) -> int:
        return sampler.token_at(row - root, next_position + depth, sampling)

    def forced(row: int, depth: int) -> int:
        token, position = target(row, depth), next_position + depth
        return int(recorded[position]) if position < len(recorded) else token

    token_of = forced if len(recorded) else target
    verified = walk_tree(rows.token_ids, rows.parents, root, token_of, rows.is_verified)
    if not all(rows.is_verified):
        verified.unverified_token_ids = _unverified(rows, sampler, 0)
    return verified
