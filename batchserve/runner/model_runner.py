"""The forward of one ragged batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.attention.paged import PagedBackend
from batchserve.attention.step_buffer import upload
from batchserve.native import openmp
from batchserve.runner.forward import logits_of
from batchserve.runner.queued_step import QueuedStep
from batchserve.runner.step_handle import LazyStep
from batchserve.sampling.argmax_kernel import best_tokens
from batchserve.sampling.device import DeviceSampler
from batchserve.sampling.recordings import Recordings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.attention.base import AttentionBackend, Spans
    from batchserve.engine.executor import StepHandle
    from batchserve.kv.allocator import KVAllocator
    from batchserve.runner.compiled import CompiledLayers, CompiledModel
    from batchserve.runner.cuda_graphs import StepGraphs
    from batchserve.runner.loader import LoadedModel
    from batchserve.runner.ragged_batch import RaggedBatch


class ModelRunner:
    """Runs ragged batches through unmodified modelling code.

    forced: by request id, a prompt and the answer that is to be given to it, whatever the model says: for benchmarks
    that send recorded answers through other weights. A row's own token is still sampled, so its cost is not hidden;
    behind the recording's end it is the one that counts. Nothing that a client sends gets here.

    graphs: captured steps of the GPU path; None, and steps that fit into none of them: eager.
    compiled: what runs the model where torch.compile has made something of it, in graphs and in eager steps.
    """

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend) -> None:
        self.backend = backend
        self.forced = Recordings()
        self.num_threads, self.was_trial = torch.get_num_threads(), False
        self.num_parameters = loaded.num_parameters
        self._model = loaded.model
        self._device = loaded.device
        self.graphs: StepGraphs | None = None
        self.compiled: CompiledModel | CompiledLayers | None = None
        self.find_best = best_tokens
        self.can_walk_sampled: Callable[[], bool] = lambda: True

    @property
    def allocator(self) -> KVAllocator:
        return self.backend.allocator

    @property
    def bucket_sizes(self) -> Sequence[int]:
        return () if self.graphs is None else self.graphs.sizes

    @property
    def is_paged(self) -> bool:
        """Whether this is the GPU path, on whatever device."""
        return isinstance(self.backend, PagedBackend)

    def bind_thread(self) -> None:
        """Give the calling thread its compute threads, and its device: OpenMP and CUDA keep these per thread.

        Where OpenMP starts fewer threads than num_threads, that becomes num_threads.
        """
        self.num_threads = openmp.use_threads(self.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def check_device(self) -> None:
        """Raises RuntimeError where the device takes no more work: a fault of a CUDA kernel stays for good."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def launch(self, batch: RaggedBatch) -> StepHandle:
        """Start a step, and wait for nothing. Only one may be under way."""
        if not self.is_paged:
            return LazyStep(self, batch)
        graphed = None if self.graphs is None else self.graphs.launch(batch, self.forced)
        return graphed or self._launch_eager(batch)

    @torch.inference_mode()
    def _launch_eager(self, batch: RaggedBatch) -> QueuedStep:
        logits, sampler = self._logits(batch), DeviceSampler(len(batch.request_ids))
        tokens = None
        if len(batch.logit_rows):
            metadata = sampler.build_metadata(batch, len(logits), self.forced)
            blob = upload({"sampling": metadata.blob}, self._device)["sampling"]
            tokens = sampler.sample(logits, blob, metadata.kind)
        return QueuedStep(batch, sampler, logits, tokens, self.forced)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> np.ndarray:
        """Returns float32 logits [len(batch.logit_rows), vocab_size], and writes the K/V of every row."""
        logits: np.ndarray = self._logits(batch).float().cpu().numpy()
        return logits

    def _logits(self, batch: RaggedBatch) -> torch.Tensor:
        # With nothing to sample the head still has to run on something: one row is the least it takes.
        keep = batch.logit_rows if len(batch.logit_rows) else np.zeros(1, dtype=np.int64)
        arrays = {"ids": batch.input_ids, "positions": batch.position_ids, "keep": keep}
        if self.is_paged:
            inputs = upload(arrays, self._device)
        else:
            inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return self.run(batch.spans, inputs["ids"], inputs["positions"], inputs["keep"])

    def run(self, spans: Spans, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Returns logits [len(keep), vocab_size] of the rows `keep` of a step; all int64."""
        self.backend.begin(spans)
        return self.run_model(input_ids, positions, keep)

    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """The same by the model's modules, of the rows that the backend has begun."""
        if self.compiled is not None:
            return self.compiled(input_ids, positions, keep)
        return logits_of(self._model, self.backend, input_ids, positions, keep)
