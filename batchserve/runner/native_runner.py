"""Runs a model's steps as a native program. Needs torch only if the program has operators that torch computes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from batchserve.attention.compiled import CompiledAttention
from batchserve.runner.step_handle import LazyStep
from batchserve.runner.thread_choice import ThreadChoice
from batchserve.sampling.recordings import Recordings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from batchserve.kv.slab import SlabAllocator
    from batchserve.program.model import NativeModel
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.runner.served_model import ServedModel


class NativeRunner:
    """The Executor of a native program. forced: as in ModelRunner."""

    bucket_sizes: Sequence[int] = ()

    def __init__(self, native: NativeModel, allocator: SlabAllocator, model: ServedModel, num_threads: int) -> None:
        self.allocator, self.num_threads, self.num_parameters = allocator, num_threads, model.num_parameters
        self.choice = ThreadChoice(num_threads, 1.0, is_fixed=True)
        self.was_trial = False  # the last forward
        self.forced = Recordings()
        self.find_best = native.best_tokens
        self.can_walk_sampled: Callable[[], bool] = lambda: True
        self._native = native
        native.use_attention(CompiledAttention(allocator, model.num_heads))

    def bind_thread(self) -> None:
        self.num_threads = self._native.use_threads(self.num_threads)

    def check_device(self) -> None:
        """Does nothing: a CPU has no faults of its own."""

    def launch(self, batch: RaggedBatch) -> LazyStep:
        return LazyStep(self, batch)

    def forward(self, batch: RaggedBatch) -> np.ndarray:
        """Returns float32 logits [batch.num_logits, vocab_size], and writes the K/V of every row."""
        rows = batch.input_ids, batch.position_ids, batch.logit_rows[: batch.num_logits]
        num_threads, began_s = self.choice.pick(batch.num_rows), time.perf_counter()
        logits = self._native.run(batch.spans, *rows, num_threads)
        self.was_trial = self.choice.note(batch.num_rows, time.perf_counter() - began_s)
        return logits

    def choose_threads(self, min_gain: float, *, is_fixed: bool) -> None:
        """Lets each step run on as many threads as are worth it; is_fixed: always on all of them."""
        self.bind_thread()
        is_fixed = is_fixed or bool(self._native.image.torch_calls)  # torch's number is for all of a thread's steps
        self.choice = ThreadChoice(self.num_threads, min_gain, is_fixed=is_fixed)
