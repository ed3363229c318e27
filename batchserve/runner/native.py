"""A model's native program, if it can have one and answers as the model does."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.attention.base import Span, Spans
from batchserve.attention.cpu import CpuBackend, kernel_supports
from batchserve.attention.slab import EXTENT, SlabAllocator
from batchserve.program.instructions import FEW_ROWS
from batchserve.program.model import NativeModel
from batchserve.program.tape import UnsuitableModelError
from batchserve.runner.forward import logits_of
from batchserve.runner.probe import SMALL_WINDOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from batchserve.attention.base import LayerShape
    from batchserve.runner.probe import ModelProbe

logger = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16)
NAME = "probe"


def native_model(
    model: PreTrainedModel, probe: ModelProbe, layers: list[LayerShape], longest: int
) -> NativeModel | None:
    """None where steps are to run the model's own modules, which is logged with the reason.

    longest: the most tokens of a request. The model's weights are given up for packed ones. Raises
    UnsupportedModelError where the program answers differently.
    """
    if model.dtype not in DTYPES or not kernel_supports(layers, model.dtype):
        return None
    if model.dtype == torch.bfloat16 and multiplies_halves():
        logger.info("steps run the model's modules, not a native program: this processor multiplies bfloat16 itself")
        return None
    try:
        native = NativeModel(partial(logits_of, model), model.dtype, probe.vocab_size, longest)
    except UnsuitableModelError as error:
        logger.info("steps run the model's modules, not a native program: %s", error)
        return None
    allocator = SlabAllocator(layers, model.dtype, 2 * EXTENT)
    native.backend = CpuBackend(allocator, probe.num_heads, has_sinks=probe.has_sinks, is_native=True)

    def answers(ids: Sequence[int], far: int) -> torch.Tensor:
        """By steps of one row, of few and of many, beside a row of another request at a position of its own."""
        found, context = [], 0
        with native.windows_at_most(SMALL_WINDOW):
            for count in _step_sizes(len(ids)):
                found.append(_step(native, allocator, ids[context : context + count], context, far))
                context += count
        allocator.release(NAME)
        return torch.cat(found)

    probe.check_program(answers)
    native.release_weights(model)
    return native


def multiplies_halves() -> bool:
    """Whether the processor has instructions for products of bfloat16, which a program has none of yet: long prompts
    are faster in oneDNN's.
    """
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _step_sizes(num_rows: int) -> list[int]:
    """One row, few, and many: each has a path of its own."""
    sizes, left = [], num_rows
    for size in (1, 2, FEW_ROWS - 1, num_rows):
        sizes.append(min(size, left))
        left -= sizes[-1]
    return [size for size in sizes if size]


def _step(native: NativeModel, allocator: SlabAllocator, ids: Sequence[int], context: int, far: int) -> torch.Tensor:
    """Logits of rows that follow each other."""
    count = len(ids)
    if not (allocator.reserve(NAME, count) and allocator.reserve("other", 1)):
        raise MemoryError("K/V of the probe's tokens")
    places = np.arange(count, dtype=np.int32)
    spans = [
        Span("other", 0, 0, np.array([-1], np.int32), np.array([far]), is_chain=True),
        Span(NAME, 1, context, places - 1, context + places.astype(np.int64), is_chain=True),
    ]
    assert native.backend is not None
    native.backend.begin(Spans.of(spans))
    positions = np.concatenate([[far], context + np.arange(count)])
    logits = native.run(np.array([ids[0], *ids]), positions, np.arange(1, count + 1))
    allocator.commit(NAME, range(count))
    allocator.release("other")
    return logits
