"""The forward of one ragged batch, and the verification of its rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from batchserve.attention.interface import STEP_ARGUMENT
from batchserve.attention.paged import PagedBackend
from batchserve.attention.step_buffer import upload
from batchserve.sampling.device import DeviceSampler
from batchserve.sampling.sampler import RowSampler
from batchserve.sampling.verify import VerifiedTokens, walk_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.attention.base import AttentionBackend
    from batchserve.runner.cuda_graphs import StepGraphs
    from batchserve.runner.loader import LoadedModel
    from batchserve.runner.ragged_batch import RaggedBatch, RequestRows


class StepHandle(Protocol):
    """A launched step."""

    def wait(self) -> list[VerifiedTokens | None]:
        """For every request of the batch its verified tokens, None where nothing was sampled. To be called once."""


class LazyStep:
    """StepHandle of the CPU's own path: the forward runs in wait()."""

    def __init__(self, runner: ModelRunner, batch: RaggedBatch) -> None:
        self._runner = runner
        self._batch = batch

    def wait(self) -> list[VerifiedTokens | None]:
        return verify_batch(self._batch, self._runner.forward(self._batch), self._runner.forced)


class QueuedStep:
    """StepHandle of the GPU path: forward, sampling and tree walk are queued, and a copy of the tokens behind them.

    logits [at least len(batch.logit_rows), vocab_size] stay on the device, and as they are until wait() has returned:
    of requests that the device could not decide, the host reads their rows. tokens: DeviceResult.rows; None: nothing is
    sampled.
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
        self._copy = None if tokens is None else HostCopy(tokens)

    def wait(self) -> list[VerifiedTokens | None]:
        if self._copy is None:
            return [None] * len(self._batch.requests)
        return self._sampler.to_verified(self._copy.wait(), self._batch, self._verify_on_host)

    def _verify_on_host(self, index: int) -> VerifiedTokens:
        rows, first = self._batch.requests[index], self._batch.first_logit[index]
        logits = self._logits[first : first + 1 + rows.num_draft_tokens].cpu()
        return verify_request(rows, RowSampler(logits), 0, self._forced.get(rows.request_id, ()))


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


class ModelRunner:
    """Runs ragged batches through unmodified modelling code.

    forced: by request id, a prompt and the answer that is to be given to it, whatever the model says: for benchmarks
    that send recorded answers through other weights. A row's own token is still sampled, so its cost is not hidden;
    behind the recording's end it is the one that counts. Nothing that a client sends gets here.

    graphs: captured steps of the GPU path; None, and steps that fit into none of them: eager.
    """

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend) -> None:
        self.backend = backend
        self.forced: dict[str, Sequence[int]] = {}
        self.num_threads = torch.get_num_threads()
        self._model = loaded.model
        self._device = loaded.device
        self.graphs: StepGraphs | None = None

    @property
    def is_paged(self) -> bool:
        """Whether this is the GPU path, on whatever device."""
        return isinstance(self.backend, PagedBackend)

    def bind_thread(self) -> None:
        """Give the calling thread its compute threads: OpenMP keeps their number per thread."""
        torch.set_num_threads(self.num_threads)

    def launch(self, batch: RaggedBatch) -> StepHandle:
        """Start a step, and wait for nothing. Only one may be under way."""
        if not self.is_paged:
            return LazyStep(self, batch)
        graphed = None if self.graphs is None else self.graphs.launch(batch, self.forced)
        return graphed or self._launch_eager(batch)

    @torch.inference_mode()
    def _launch_eager(self, batch: RaggedBatch) -> QueuedStep:
        logits, sampler = self.forward(batch), DeviceSampler(len(batch.requests))
        tokens = None
        if len(batch.logit_rows):
            metadata = sampler.build_metadata(batch, len(logits), self.forced)
            blob = upload({"sampling": metadata.blob}, self._device)["sampling"]
            tokens = sampler.sample(logits, blob, metadata.kind).rows
        return QueuedStep(batch, sampler, logits, tokens, self.forced)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [len(batch.logit_rows), vocab_size]; writes the K/V of every row."""
        self.backend.begin(batch.spans)
        # With nothing to sample the head still has to run on something: one row is the least it takes.
        keep = batch.logit_rows if len(batch.logit_rows) else np.zeros(1, dtype=np.int64)
        arrays = {"ids": batch.input_ids, "positions": batch.position_ids, "keep": keep}
        if self.is_paged:
            inputs = upload(arrays, self._device)
        else:
            inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return self.run_model(inputs["ids"], inputs["positions"], inputs["keep"])

    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Logits [len(keep), vocab_size] of the rows `keep`, of those that the backend has begun; all int64."""
        arguments: dict[str, Any] = {STEP_ARGUMENT: self.backend}
        output = self._model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep,
            **arguments,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


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
    next_position = rows.context_len + rows.num_pending

    def target(row: int, depth: int) -> int:
        position = next_position + depth
        token = sampler.token_at(first + row - root, position, sampling)
        return recorded[position] if position < len(recorded) else token

    if not rows.num_draft_tokens:
        return VerifiedTokens([target(root, 0)], [])
    verified = walk_tree(rows.token_ids, rows.parents, root, target, rows.is_verified)
    unverified = [i for i, is_verified in enumerate(rows.is_verified) if not is_verified]
    if unverified:
        tokens = [sampler.argmax_at(first + 1 + i) for i in unverified]
        verified = dataclasses.replace(verified, unverified_token_ids=tokens)
    return verified
