"""A launched step: what it gives once it is through, and how its rows' trees are walked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch

from batchserve.sampling.sampler import RowSampler
from batchserve.sampling.verify import VerifiedTokens, walk_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from batchserve.runner.ragged_batch import RaggedBatch, RequestRows
    from batchserve.sampling.device import DeviceSampler


class StepHandle(Protocol):
    """A launched step."""

    def wait(self) -> list[VerifiedTokens | None]:
        """For every request of the batch its verified tokens, None where nothing was sampled. To be called once."""


class QueuedStep:
    """StepHandle of the GPU path: forward, sampling and tree walk are queued, and a copy of the tokens behind them.

    logits [at least len(batch.logit_rows), vocab_size] stay on the device, and as they are until wait() has returned:
    of requests that the device could not decide, the host reads their rows. tokens: DeviceSampler.sample's; None:
    nothing is sampled.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        sampler: DeviceSampler,
        logits: torch.Tensor,
        tokens: torch.Tensor | None,
        forced: Mapping[str, Sequence[int]],
    ) -> None:
        self._batch = batch
        self._sampler = sampler
        self._logits = logits
        self._forced = forced
        self._is_sampled = tokens is not None
        # Where nothing is sampled it is still waited for: what the step took is learned from.
        self._copy = HostCopy(_nothing(logits) if tokens is None else tokens)

    def wait(self) -> list[VerifiedTokens | None]:
        rows = self._copy.wait()
        if not self._is_sampled:
            return [None] * len(self._batch.requests)
        return self._sampler.to_verified(rows, self._batch, self._verify_on_host)

    def _verify_on_host(self, index: int) -> VerifiedTokens:
        rows, first = self._batch.requests[index], self._batch.first_logit[index]
        logits = self._logits[first : first + 1 + rows.num_draft_tokens].cpu()
        return verify_request(rows, RowSampler(logits), 0, self._forced.get(rows.request_id, ()))


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
    batch: RaggedBatch, logits: torch.Tensor, forced: Mapping[str, Sequence[int]]
) -> list[VerifiedTokens | None]:
    """Walk every request's tree; logits are those of batch.logit_rows, forced is ModelRunner's."""
    sampler = RowSampler(logits)
    return [
        None if first < 0 else verify_request(rows, sampler, first, forced.get(rows.request_id, ()))
        for rows, first in zip(batch.requests, batch.first_logit, strict=True)
    ]


def verify_request(rows: RequestRows, sampler: RowSampler, first: int, recorded: Sequence[int]) -> VerifiedTokens:
    """Walk one request's tree. first: its root's row among the sampler's; recorded: its text of ModelRunner.forced."""
    if rows.sampling is None:
        raise ValueError(f"{rows.request_id!r}: nothing is sampled")
    sampling, root = rows.sampling, rows.root
    next_position, first_at = rows.context_len + rows.num_pending, first - root
    # A walk asks for every accepted token: what is known of all rows by then is not worked out one by one.
    greedy = sampler.greedy() if sampling.temperature == 0.0 else None

    def target(row: int, depth: int) -> int:
        return greedy[first_at + row] if greedy else sampler.token_at(first_at + row, next_position + depth, sampling)

    def forced(row: int, depth: int) -> int:
        token, position = target(row, depth), next_position + depth
        return recorded[position] if position < len(recorded) else token

    token_of = forced if recorded else target
    if not rows.num_draft_tokens:
        return VerifiedTokens([token_of(root, 0)], [])
    verified = walk_tree(rows.token_ids, rows.parents, root, token_of, rows.is_verified)
    if not all(rows.is_verified):
        tokens = [sampler.argmax_at(first + 1 + i) for i, is_verified in enumerate(rows.is_verified) if not is_verified]
        verified = dataclasses.replace(verified, unverified_token_ids=tokens)
    return verified
