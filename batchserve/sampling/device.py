"""Samples and walks the draft trees of a whole step on the device, with one small copy back to the host.

The host describes the step in one blob of int64 (`build_metadata`). From logits and blob, the device computes each
row's token and which rows are accepted (`sample`). The host reads that as the walk's result (`to_verified`). In
between, nothing waits for the device; torch.where with a Python number would wait for a copy of the number to it. All
shapes follow from the padded number of rows and max_num_seqs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.sampling.device_columns import NOT_FORCED, ROW_COLUMNS, UNVERIFIED, describe_rows
from batchserve.sampling.device_noise import stream_keys
from batchserve.sampling.device_rows import NEEDS_HOST, RowParams, sample_rows
from batchserve.sampling.sampler import NO_TOKEN
from batchserve.sampling.verify import VerifiedTokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.request import ResolvedSampling
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.recordings import Recordings

REQUEST_COLUMNS = 4  # seed, top_k; temperature and top_p as the bits of a float64


class SamplingKind(Enum):
    """The kind of sampling that a step needs. Each is a program of its own, because what it omits costs the most."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    TRUNCATED = "truncated"  # sampled, and some row has top_k or top_p


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """A step as the device needs it: int64 [DeviceSampler.blob_size(num_rows)], to be copied there as it is."""

    blob: np.ndarray
    kind: SamplingKind


@dataclass(frozen=True, slots=True)
class DeviceSampler:
    """Verifies the trees of a step as walk_tree and RowSampler do, for all requests at once.

    num_candidates: how many tokens top_k and top_p may keep on the device; rows that keep more are sampled on the host.
    rows_at_once bounds the memory: uncompiled, sampling takes about 45 bytes per row and token.
    """

    max_num_seqs: int
    num_candidates: int = 1024
    rows_at_once: int = 64

    def blob_size(self, num_rows: int) -> int:
        # One request more than there are: padding rows belong to it.
        return REQUEST_COLUMNS * (self.max_num_seqs + 1) + ROW_COLUMNS * num_rows

    def build_metadata(
        self,
        batch: RaggedBatch,
        num_rows: int,
        forced: Recordings,
        out: np.ndarray | None = None,
    ) -> SamplingMetadata:
        """Describes a step whose logits are padded to `num_rows` rows; forced is ModelRunner's.

        `out` (int64 [blob_size(num_rows)], for example pinned memory) is filled and used; None: a new array. Raises
        ValueError if the step does not fit.
        """
        if batch.num_logits > num_rows:
            raise ValueError(f"rows with logits = {batch.num_logits}: at most num_rows = {num_rows}")
        if len(batch.request_ids) > self.max_num_seqs:
            raise ValueError(f"requests = {len(batch.request_ids)}: at most max_num_seqs = {self.max_num_seqs}")
        blob = np.empty(self.blob_size(num_rows), dtype=np.int64) if out is None else out
        of_requests, of_rows = self._split(blob, num_rows)
        where = (batch.spans.rows, batch.num_pending, batch.first_logit)
        drafts = (batch.input_ids, batch.spans.parents, batch.is_verified)
        recorded = forced.places(batch.request_ids)
        describe_rows(*where, drafts, batch.position_ids, recorded, self.max_num_seqs, of_rows)
        return SamplingMetadata(blob, _fill_requests(of_requests, batch))

    def _split(self, blob: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        border = REQUEST_COLUMNS * (self.max_num_seqs + 1)
        return blob[:border].reshape(REQUEST_COLUMNS, -1), blob[border:].reshape(ROW_COLUMNS, num_rows)

    def sample(
        self, logits: torch.Tensor, blob: torch.Tensor, kind: SamplingKind, num_sampled: int | None = None
    ) -> torch.Tensor:
        """Returns int32 [2, num_rows]: every row's token, and whether the walk reached the row (to_verified reads it).

        logits [num_rows, vocab_size] of any float type and blob, int64 as built, are on one device. Waits for nothing
        and changes neither. `kind` is the blob's own, or a later one of SamplingKind. num_sampled: the step's
        num_logits, if the rows after them, which are padding, need not be sampled; these are greedy then.
        """
        num_rows = logits.shape[0]
        border = REQUEST_COLUMNS * (self.max_num_seqs + 1)
        parents, draft_tokens, forced, positions, request = blob[border:].view(ROW_COLUMNS, num_rows).unbind()
        likeliest = logits.argmax(dim=-1, keepdim=True)  # the first of equals; a NaN is above all numbers
        is_finite = logits.gather(1, likeliest).isfinite().squeeze(1)
        tokens = likeliest.squeeze(1)
        is_unverified = draft_tokens == UNVERIFIED
        if kind is not SamplingKind.GREEDY:
            seeds, top_k, temperature, top_p = blob[:border].view(REQUEST_COLUMNS, -1)[:, request].unbind()
            params = RowParams(
                stream_keys(seeds, positions), temperature.view(torch.float64), top_k, top_p.view(torch.float64)
            )
            end = num_rows if num_sampled is None else num_sampled
            sampled = torch.cat([*self._sample_rows(logits[:end], params, kind), tokens[end:]])
            tokens = torch.where(is_unverified | (params.temperature == 0), tokens, sampled)
        tokens = tokens.masked_fill(~(is_finite | is_unverified), NO_TOKEN)
        tokens = torch.where(forced == NOT_FORCED, tokens, forced)
        is_reached = _reached(tokens, parents, draft_tokens)
        return torch.stack([tokens, is_reached.to(torch.int64)]).to(torch.int32)

    def _sample_rows(self, logits: torch.Tensor, params: RowParams, kind: SamplingKind) -> list[torch.Tensor]:
        """Returns the tokens of all rows of `logits`, sampled in chunks. `params` may have more rows."""
        num_candidates = self.num_candidates if kind is SamplingKind.TRUNCATED else 0
        count = logits.shape[0]
        chunks = [slice(start, min(start + self.rows_at_once, count)) for start in range(0, count, self.rows_at_once)]
        return [
            sample_rows(logits[chunk], RowParams(*(column[chunk] for column in params)), num_candidates)
            for chunk in chunks
        ]

    def to_verified(
        self, rows: np.ndarray, batch: RaggedBatch, verify_on_host: Callable[[int], VerifiedTokens]
    ) -> list[VerifiedTokens | None]:
        """Converts sample()'s result, copied to the host, to verify_batch's result.

        verify_on_host(i) verifies the i-th request of the batch from its logits. It is called for requests whose walk
        reached a row that the device could not decide, because of a rare tie, or a very wide top_k or top_p; and for
        those that change logits, have a min_p or ask for logprobs.
        """
        tokens: list[int] = rows[0].tolist()
        is_reached = np.flatnonzero(rows[1][: batch.num_logits])
        reached: list[int] = is_reached.tolist()
        drafted: list[int] = batch.input_ids[batch.logit_rows[is_reached]].tolist()
        roots = batch.num_pending - 1
        ends = batch.first_logit + batch.spans.rows[:, 1] - roots
        place = 0
        results: list[VerifiedTokens | None] = []
        for_host = {i for i, each in enumerate(batch.samplings) if i in batch.adjustments or _is_for_host(each)}
        where = zip(batch.first_logit.tolist(), ends.tolist(), roots.tolist(), strict=True)
        for index, (first, end, root) in enumerate(where):
            if first < 0:
                results.append(None)
                continue
            start = place + 1  # the root itself is always reached
            place = bisect_left(reached, end, start)
            bonus = tokens[reached[place - 1]]
            if bonus == NEEDS_HOST or index in for_host:
                results.append(verify_on_host(index))
                continue
            path, accepted = [row - first + root for row in reached[start:place]], drafted[start:place]
            if bonus == NO_TOKEN and path:  # as in walk_tree: computed again in the next step
                results.append(VerifiedTokens(accepted, path[:-1]))
            else:
                results.append(VerifiedTokens([*accepted, bonus], path))
        if not batch.is_verified.all():
            for verified, request, first in zip(results, batch.requests, batch.first_logit.tolist(), strict=True):
                if verified is not None:
                    behind = zip(tokens[first + 1 :], request.is_verified, strict=False)
                    verified.unverified_token_ids = tuple(token for token, is_verified in behind if not is_verified)
        return results


def _is_for_host(sampling: ResolvedSampling | None) -> bool:
    """Whether the device does not do all that the sampling parameters ask for."""
    return sampling is not None and (sampling.min_p > 0.0 or sampling.logprobs is not None)


def _reached(tokens: torch.Tensor, parents: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Returns bool [num_rows]: True if the draft tokens of the row and all its ancestors are their parents' own tokens.

    tokens [num_rows] are the target's; a root's parent is the root itself. Every row points at its parent, or at a sink
    if it does not continue it. Following pointers of pointers finds the end of a path in logarithmically many rounds.
    """
    num_rows = len(tokens)
    indices = torch.arange(num_rows + 1, device=tokens.device)
    is_on = (tokens[parents] == draft_tokens) | (parents == indices[:num_rows])
    goal = torch.cat([parents.masked_fill(~is_on, num_rows), indices[num_rows:]])
    for _ in range((num_rows - 1).bit_length()):
        goal = goal[goal]
    return goal[:num_rows] < num_rows


def _fill_requests(columns: np.ndarray, batch: RaggedBatch) -> SamplingKind:
    """Fills columns [REQUEST_COLUMNS, max_num_seqs + 1]; those without a request or without samples are greedy."""
    columns[:] = 0
    all_sampling = batch.samplings
    if not any(s is not None and s.temperature > 0.0 for s in all_sampling):
        return SamplingKind.GREEDY
    count = len(all_sampling)
    temperature = np.array([s.temperature if s else 0.0 for s in all_sampling])
    top_k = np.array([s.top_k if s else 0 for s in all_sampling], dtype=np.int64)
    top_p = np.array([s.top_p if s else 1.0 for s in all_sampling])
    columns[0, :count] = np.array([s.seed if s else 0 for s in all_sampling], dtype=np.uint64).view(np.int64)
    columns[1, :count] = top_k
    columns[2, :count] = temperature.view(np.int64)
    columns[3, :count] = top_p.view(np.int64)
    is_truncated = (temperature > 0) & ((top_k > 0) | (top_p < 1.0))
    return SamplingKind.TRUNCATED if is_truncated.any() else SamplingKind.SAMPLED
