"""Runs the GPU path's steps as CUDA graphs: forward, head, greedy sampling and tree walk in one launch.

There is one graph per bucket of rows. Its number of requests is the most that a step with so many rows can have, or the
one that the kernel runs fastest with; unused requests have no rows. Within a bucket, prefill chunks, trees and plain
rows may be spread over requests in any way. Steps with more rows than the largest bucket run eagerly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from batchserve.attention.paged import step_arrays
from batchserve.attention.static_step import MAX_CHANGES, StaticStep
from batchserve.attention.step_buffer import BufferRing, StepLayout, upload
from batchserve.request import GREEDY
from batchserve.runner.queued_step import QueuedStep
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.sampling.device import DeviceSampler, SamplingKind
from batchserve.sampling.recordings import Recordings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.attention.paged import PagedBackend
    from batchserve.attention.tree_metadata import TreeKernel
    from batchserve.config import EngineConfig
    from batchserve.runner.ragged_batch import RaggedBatch

SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LARGE_STEP = 256  # rows between two larger buckets
INT64 = np.dtype(np.int64)

Replay = Callable[[], None]


class Capturer(Protocol):
    """Captures a function's launches in a graph. Returns (output, replay); replays write to the output's memory."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]: ...


class CudaCapturer:
    """Captures CUDA graphs that share one memory pool and one stream, as only one of them runs at a time.

    The stream is not torch's default for captures. Graphs hold the address of the cuBLAS workspace of their stream, and
    newer versions of torch free that when another engine's graph of the same stream is destroyed.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                run()  # libraries do setup per stream here that is not allowed during a capture
                run_without_waiting(run)
        finally:  # after a failure, kernels may still be running on memory that will be reused
            before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = run()
        finally:  # torch leaves its capture stream current if a capture fails
            torch.cuda.set_stream(before)
        return output, graph.replay


class CannotBeCapturedError(RuntimeError):
    """A step waits for the device. It was not captured, but nothing is damaged: eager steps may follow."""


def run_without_waiting(run: Callable[[], torch.Tensor]) -> None:
    """Runs a function once. Raises CannotBeCapturedError if it waits for the device.

    Meanwhile, any other wait in the process raises, too. A capture would fail as well, but torch's allocator would then
    assume for good that the capture is still under way.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # unrelated to waiting
    except RuntimeError as error:
        raise CannotBeCapturedError(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Disables garbage collection: a graph that is destroyed while another one is captured breaks that capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def choose_capturer(config: EngineConfig, device: torch.device, kernel: TreeKernel) -> Capturer | None:
    """Returns None if steps are to run eagerly."""
    if config.enforce_eager or device.type != "cuda" or not kernel.can_be_captured:
        return None
    return CudaCapturer()


def bucket_sizes(max_rows: int) -> list[int]:
    """Returns the number of rows of each graph, ascending. The last is max_rows."""
    small = [size for size in SMALL_BUCKETS if size < max_rows]
    large = range(SMALL_BUCKETS[-1] + LARGE_STEP, max_rows, LARGE_STEP)
    return [*small, *large, max_rows]


def buckets(
    row_sizes: Sequence[int],
    max_num_seqs: int,
    max_model_len: int,
    request_sizes: Sequence[int] | None = None,
    most_rows_as_requests: int = 0,
) -> list[tuple[int, int]]:
    """Returns (rows, requests) of the graphs, ascending. StepGraphs and TreeKernel describe the last two arguments.

    By default a graph has as many requests as rows, or above most_rows_as_requests at most max_num_seqs. It never has
    more than rows: FlashInfer selects the query tile by the most rows of one request, which are the rows minus the
    other requests, in unsigned numbers. A negative result would select the largest tile for the smallest steps.
    """
    found = []
    for rows in row_sizes:
        if request_sizes is None and rows <= most_rows_as_requests:
            found.append((rows, rows))
            continue
        most = min(rows, max_num_seqs)
        sizes = [most] if request_sizes is None else sorted(request_sizes)
        enough = next((size for size in sizes if size >= most), None)
        if enough is None or sizes[-1] > max_num_seqs:
            raise ValueError(f"request_sizes = {request_sizes}: the largest must be max_num_seqs = {max_num_seqs}")
        found += [(rows, size) for size in sizes if size <= enough and size * max_model_len >= rows]
    return found


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured graph. inputs: the step's inputs on the device; tokens: DeviceSampler.sample's for greedy rows.

    hosts: the inputs as arrays in each of the alternating buffers; copies: (destination, source) of each buffer's copy.
    """

    hosts: list[dict[str, np.ndarray]]
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    step: StaticStep
    inputs: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    replay: Replay


class StepGraphs:
    """The graphs of all buckets, captured on construction. Raises CannotBeCapturedError. After any other RuntimeError,
    which is torch's own, this process must not go on.

    run_model: ModelRunner's run_model, or its compiled form.

    All inputs of a step reach the device in one copy from pinned buffers that take turns. Rows that are sampled rather
    than greedy are sampled after the graph.

    There is no bucket with more rows than the K/V memory, or max_num_seqs requests of max_model_len tokens, can have.

    request_sizes: buckets of rows and of these numbers of requests, including max_num_seqs, instead of rows alone, to
    compare the two (benchmarks/gpu). A step takes the fewest rows with room for it, and then the fewest requests.
    """

    def __init__(
        self,
        backend: PagedBackend,
        run_model: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        capturer: Capturer,
        *,
        max_rows: int,
        max_num_seqs: int,
        max_model_len: int,
        say: Callable[[str], None],
        request_sizes: Sequence[int] | None = None,
    ) -> None:
        self._backend = backend
        self._run_model = run_model
        self._max_model_len = max_model_len
        self._sampler = DeviceSampler(max_num_seqs)
        self.sizes = bucket_sizes(min(max_rows, backend.allocator.total_tokens, max_num_seqs * max_model_len))
        as_requests = backend.kernel.most_rows_as_requests
        self.buckets = buckets(self.sizes, max_num_seqs, max_model_len, request_sizes, as_requests)
        steps = {bucket: StaticStep(*bucket) for bucket in self.buckets}
        layouts = {bucket: StepLayout(self._fields(step)) for bucket, step in steps.items()}
        num_bytes = max(layout.num_bytes for layout in layouts.values())
        self._ring = BufferRing(num_bytes, backend.device)
        columns = backend.allocator.table_shape[1]
        self._table_shape = backend.allocator.table_shape  # once the table has grown, steps run eagerly
        # Inference tensors, as in every step: compiled programs distinguish them from others.
        with torch.inference_mode():
            self._blob = torch.zeros(num_bytes, dtype=torch.uint8, device=backend.device)
            self._kv_indices = torch.zeros(max_num_seqs * columns, dtype=torch.int32, device=backend.device)
        self._logits: torch.Tensor | None = None
        self._graphs: dict[tuple[int, int], _Graph] = {}
        gc.collect()  # frees the graphs of earlier engines
        with nothing_collected():
            # The largest bucket comes first: all others reuse its memory.
            for number, bucket in enumerate(reversed(self.buckets), 1):
                rows, requests = bucket
                say(f"capturing a CUDA graph of {rows} rows, {requests} requests ({number} of {len(self.buckets)})")
                self._graphs[bucket] = self._capture(capturer, layouts[bucket], steps[bucket])

    def _fields(self, step: StaticStep) -> dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]:
        return {
            "ids": (INT64, (step.num_rows,)),
            "position_ids": (INT64, (step.num_rows,)),
            "keep": (INT64, (step.num_rows,)),
            "sampling": (INT64, (self._sampler.blob_size(step.num_rows),)),
            **step.fields,
        }

    @torch.inference_mode()
    def _capture(self, capturer: Capturer, layout: StepLayout, step: StaticStep) -> _Graph:
        hosts = [layout.arrays(buffer) for buffer in self._ring.buffers]
        blob = self._blob[: layout.num_bytes]
        inputs = layout.views(blob)
        copies = [(blob, buffer[: layout.num_bytes]) for buffer in self._ring.buffers]
        columns = self._backend.allocator.table_shape[1]
        step.bind(inputs, self._kv_indices[: step.max_requests * columns], columns)

        def run() -> torch.Tensor:
            self._backend.find_slots(step)
            logits = self._run_model(inputs["ids"], inputs["position_ids"], inputs["keep"])
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            kept = self._logits[: step.num_rows]
            kept.copy_(logits)
            return self._sampler.sample(kept, inputs["sampling"], SamplingKind.GREEDY)

        allocator, names = self._backend.allocator, []
        requests = []
        for start in range(0, step.num_rows, self._max_model_len):
            names.append(f"capture-{start}")
            count = min(self._max_model_len, step.num_rows - start)
            allocator.reserve(names[-1], count)
            requests.append(RequestRows(names[-1], 0, [0] * count, list(range(-1, count - 1)), 1, GREEDY))
        try:
            self._fill(hosts, copies, step, build_batch(requests), Recordings())
            run()  # kernels are compiled and planned here, and allocate the memory that they keep
            tokens, replay = capturer.capture(run)
        finally:
            for name in names:
                allocator.release(name)
        return _Graph(hosts, copies, step, inputs, tokens, replay)

    @torch.inference_mode()
    def launch(self, batch: RaggedBatch, forced: Recordings) -> QueuedStep | None:
        """Starts a step. `forced` is ModelRunner's. Returns None if no graph can run the step."""
        bucket = self._bucket_for(batch)
        if bucket is None or self._backend.allocator.table_shape != self._table_shape:
            return None
        graph = self._graphs[bucket]
        kind = self._fill(graph.hosts, graph.copies, graph.step, batch, forced)
        graph.replay()
        if self._logits is None:
            raise RuntimeError("a graph without logits")
        logits, tokens = self._logits[: graph.step.num_rows], graph.tokens
        if kind is not SamplingKind.GREEDY:
            tokens = self._sampler.sample(logits, graph.inputs["sampling"], kind, batch.num_logits)
        return QueuedStep(batch, self._sampler, logits, tokens if len(batch.logit_rows) else None, forced)

    def _bucket_for(self, batch: RaggedBatch) -> tuple[int, int] | None:
        """Returns the smallest bucket with room for the step. The search is linear, as there are few buckets."""
        rows, requests = batch.num_rows, len(batch.request_ids)
        return next((bucket for bucket in self.buckets if bucket[0] >= rows and bucket[1] >= requests), None)

    def _fill(
        self,
        hosts: Sequence[dict[str, np.ndarray]],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        step: StaticStep,
        batch: RaggedBatch,
        forced: Recordings,
    ) -> SamplingKind:
        """Copies a step's inputs to the device and plans its kernels."""
        self._ring.take()
        host, (target, source) = hosts[self._ring.turn], copies[self._ring.turn]
        kind = self._sampler.build_metadata(batch, step.num_rows, forced, out=host["sampling"]).kind
        arrays, _ = step_arrays(batch.spans, self._backend.allocator, out=host)
        if len(arrays["changed_places"]) > MAX_CHANGES:
            names = ("changed_places", "changed_slots")
            self._backend.update_table(*upload({n: arrays[n] for n in names}, self._backend.device).values())
            arrays.update({name: arrays[name][:0] for name in names})
        for name, filled in (
            ("ids", batch.input_ids[: batch.num_rows]),
            ("position_ids", batch.position_ids[: batch.num_rows]),
            ("keep", batch.logit_rows[: batch.num_logits]),
        ):
            host[name][: len(filled)] = filled
            host[name][len(filled) :] = 0
        target.copy_(source, non_blocking=True)
        self._ring.sent()
        self._backend.begin_static(step, arrays)
        return kind
