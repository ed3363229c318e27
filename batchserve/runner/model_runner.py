"""The forward of one ragged batch, and the verification of its rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.attention.interface import STEP_ARGUMENT
from batchserve.attention.paged import PagedBackend
from batchserve.attention.step_buffer import upload
from batchserve.sampling.sampler import RowSampler
from batchserve.sampling.verify import VerifiedTokens, walk_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.attention.base import AttentionBackend
    from batchserve.runner.loader import LoadedModel
    from batchserve.runner.ragged_batch import RaggedBatch


class StepHandle:
    """A launched step: on a GPU it is queued; on a CPU it is lazy, the forward runs in wait(). Both launch at once."""

    def __init__(self, runner: ModelRunner, batch: RaggedBatch) -> None:
        self._runner = runner
        self._batch = batch
        self._logits = runner.forward(batch) if runner.is_paged else None

    def wait(self) -> list[VerifiedTokens | None]:
        """For every request of the batch its verified tokens, None where nothing was sampled."""
        logits = self._runner.forward(self._batch) if self._logits is None else self._logits
        return verify_batch(self._batch, logits.cpu(), self._runner.forced)


class ModelRunner:
    """Runs ragged batches through unmodified modelling code.

    forced: by request id, a prompt and the answer that is to be given to it, whatever the model says: for benchmarks
    that send recorded answers through other weights. A row's own token is still sampled, so its cost is not hidden;
    behind the recording's end it is the one that counts. Nothing that a client sends gets here.
    """

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend) -> None:
        self.backend = backend
        self.forced: dict[str, Sequence[int]] = {}
        self.num_threads = torch.get_num_threads()
        self._model = loaded.model
        self._device = loaded.device

    @property
    def is_paged(self) -> bool:
        """Whether this is the GPU path, on whatever device."""
        return isinstance(self.backend, PagedBackend)

    def bind_thread(self) -> None:
        """Give the calling thread its compute threads: OpenMP keeps their number per thread."""
        torch.set_num_threads(self.num_threads)

    def launch(self, batch: RaggedBatch) -> StepHandle:
        return StepHandle(self, batch)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [len(batch.logit_rows), vocab_size]; writes the K/V of every row."""
        self.backend.begin(batch.spans)
        arguments: dict[str, Any] = {STEP_ARGUMENT: self.backend}
        # With nothing to sample the head still has to run on something: one row is the least it takes.
        keep = batch.logit_rows if len(batch.logit_rows) else np.zeros(1, dtype=np.int64)
        arrays = {"ids": batch.input_ids, "positions": batch.position_ids, "keep": keep}
        if self.is_paged:
            inputs = upload(arrays, self._device)
        else:
            inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        output = self._model(
            input_ids=inputs["ids"].unsqueeze(0),
            position_ids=inputs["positions"].unsqueeze(0),
            use_cache=False,
            logits_to_keep=inputs["keep"],
            **arguments,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def verify_batch(
    batch: RaggedBatch, logits: torch.Tensor, forced: Mapping[str, Sequence[int]]
) -> list[VerifiedTokens | None]:
    """Walk every request's tree; logits are those of batch.logit_rows, forced is ModelRunner's."""
    sampler = RowSampler(logits)
    results: list[VerifiedTokens | None] = []
    for rows, first in zip(batch.requests, batch.first_logit, strict=True):
        if rows.sampling is None:
            results.append(None)
            continue
        sampling, root = rows.sampling, rows.root
        next_position = rows.context_len + rows.num_pending
        recorded = forced.get(rows.request_id, ())

        def target(row: int, depth: int) -> int:
            position = next_position + depth  # noqa: B023
            token = sampler.token_at(first + row - root, position, sampling)  # noqa: B023
            return recorded[position] if position < len(recorded) else token  # noqa: B023

        verified = walk_tree(rows.token_ids, rows.parents, root, target, rows.is_verified)
        unverified = [i for i, is_verified in enumerate(rows.is_verified) if not is_verified]
        if unverified:
            tokens = [sampler.argmax_at(first + 1 + i) for i in unverified]
            verified = dataclasses.replace(verified, unverified_token_ids=tokens)
        results.append(verified)
    return results
