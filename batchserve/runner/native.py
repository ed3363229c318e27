"""Builds a model's native program, if it can have one and gives the model's answers."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.attention.base import Span, Spans
from batchserve.attention.compiled import CompiledAttention, kernel_supports
from batchserve.attention.matrix_code import can_use_amx
from batchserve.config import MiB
from batchserve.errors import is_out_of_memory
from batchserve.free_memory import free_memory_bytes
from batchserve.kv.slab import EXTENT, SlabAllocator
from batchserve.program.instructions import FEW_ROWS, Kernel
from batchserve.program.link import LinkedModel
from batchserve.program.model import NativeModel
from batchserve.program.product import BF16_KERNEL
from batchserve.program.tape import UnsuitableModelError
from batchserve.runner.forward import logits_of
from batchserve.runner.probe import SMALL_WINDOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from batchserve.attention.base import LayerShape
    from batchserve.runner.probe import ModelProbe

logger = logging.getLogger(__name__)
NAME, OTHER = "probe", "other"


def native_model(
    model: PreTrainedModel,
    probe: ModelProbe,
    layers: list[LayerShape],
    longest: int,
    num_threads: int,
) -> NativeModel | None:
    """Returns the native program, or None, with the reason in the log, if steps are to run the model's own modules.

    longest: the most tokens of a request. The model's weights are replaced by packed ones once the program has given
    the model's answers. Raises MemoryError.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if not kernel_supports(layers, dtype):
        return None
    if reason := _reason_for_modules(model):
        logger.info("steps run the model's modules, not a native program: %s", reason)
        return None
    try:
        linked = LinkedModel(model, partial(logits_of, model), model.dtype, probe.vocab_size, longest)
        native = NativeModel(linked.image, linked.tables)
        native.use_threads(num_threads)
        probe.check_program(_Trial(native, probe, layers, dtype).answers)
    except UnsuitableModelError as error:
        logger.info("steps run the model's modules, not a native program: %s", error)
        return None
    except Exception as error:  # tracing a third-party model may raise anything, but its modules may still work
        if is_out_of_memory(error):
            raise
        logger.warning("steps run the model's modules: a native program of it fails: %s", repr(error))
        return None
    linked.release_weights(model)
    if names := native.image.torch_operators:
        logger.info("a native program runs the model; between its parts torch computes: %s", ", ".join(names))
    return native


def _reason_for_modules(model: PreTrainedModel) -> str:
    """Returns why steps run the modules, or an empty string if a program is made."""
    if model.dtype == torch.bfloat16 and BF16_KERNEL == Kernel.TILES and not can_use_amx():
        return "the system does not let this process use the processor's tiles"
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free = free_memory_bytes()
    if free is not None and needed > free:  # weights exist twice until the program has been compared
        return f"packed weights take {needed / MiB:.0f} MiB, and {free / MiB:.0f} MiB can be had"
    return ""


class _Trial:
    """Runs steps of one row, of few rows and of many, each next to a row of another request."""

    def __init__(self, native: NativeModel, probe: ModelProbe, layers: list[LayerShape], dtype: str) -> None:
        self._native = native
        self._allocator = SlabAllocator(layers, dtype, 2 * EXTENT)
        native.use_attention(CompiledAttention(self._allocator, probe.num_heads))

    def answers(self, ids: Sequence[int], far: int) -> torch.Tensor:
        """Returns the logits of consecutive rows. far: the position of the other request's row."""
        found, context = [], 0
        with self._native.limit_windows(SMALL_WINDOW):
            for size in (1, 2, FEW_ROWS - 1, len(ids)):
                rows = ids[context : context + size]
                if rows:
                    found.append(self._step(rows, context, far))
                context += len(rows)
        self._allocator.release(NAME)
        return torch.from_numpy(np.concatenate(found))

    def _step(self, ids: Sequence[int], context: int, far: int) -> np.ndarray:
        count, allocator = len(ids), self._allocator
        if not (allocator.reserve(NAME, count) and allocator.reserve(OTHER, 1)):
            raise MemoryError("K/V of the probe's tokens")
        places = np.arange(count, dtype=np.int32)
        spans = [
            Span(OTHER, 0, 0, np.array([-1], np.int32), np.array([far]), is_chain=True),
            Span(NAME, 1, context, places - 1, context + places.astype(np.int64), is_chain=True),
        ]
        positions = np.concatenate([[far], context + np.arange(count)])
        logits = self._native.run(Spans.of(spans), np.array([ids[0], *ids]), positions, np.arange(1, count + 1))
        allocator.commit(NAME, range(count))
        allocator.release(OTHER)
        return logits
