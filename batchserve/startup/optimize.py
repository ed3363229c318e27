"""Makes a model faster at start, on a GPU, with our own kernels and torch's compiler.

Both are used where possible, and only if the model answers as before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.attention.paged import PagedBackend
from batchserve.attention.step_buffer import upload
from batchserve.errors import ConfigError
from batchserve.gpu.choose import CudaTimer, choose_products
from batchserve.gpu.linears import ROW_COUNTS, Choices
from batchserve.kernel_overlap import can_overlap
from batchserve.request import GREEDY
from batchserve.runner.compiled import CompiledLayers, CompiledModel
from batchserve.runner.cuda_graphs import choose_capturer
from batchserve.runner.gpu_modules import SwappedModules
from batchserve.runner.probe import PROBE_TOKENS, compare_logits
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.startup.prepared import refuse_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.config import EngineConfig
    from batchserve.runner.loader import LoadedModel
    from batchserve.runner.model_runner import ModelRunner


def optimize_model(
    config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, say: Callable[[str], None]
) -> list[str]:
    """Applies the speed-ups, before CUDA graphs are captured. Returns their names, which identify measured step times.

    Raises ConfigError if a compile mode was asked for that is not possible.
    """
    way, backend = config.compile_model, runner.backend
    can_be = isinstance(backend, PagedBackend) and choose_capturer(config, loaded.device, backend.kernel) is not None
    if not can_be:
        refuse_compiling(config)
        return []
    overlaps = config.kernel_overlap and can_overlap(loaded.device)
    done = ["overlap"] if overlaps else []
    if way == "off" and not config.custom_kernels:
        return done
    expected = trial_logits(loaded, runner)
    is_joined = way != "off"  # a compiler joins a linear and the residual added to it
    if config.custom_kernels and _use_own_kernels(
        loaded, runner, expected, say, overlaps=overlaps, is_joined=is_joined
    ):
        done.append("own kernels")
    if way != "off" and _compile(way, loaded, runner, expected, say, overlaps=overlaps):
        done.append(type(runner.compiled).__name__)
    return done


def _use_own_kernels(
    loaded: LoadedModel,
    runner: ModelRunner,
    expected: list[torch.Tensor],
    say: Callable[[str], None],
    *,
    overlaps: bool,
    is_joined: bool,
) -> bool:
    """True if linears and norms now have our own kernels. Otherwise, the model is as it was."""
    swapped = SwappedModules(loaded.model, Choices(overlaps=overlaps))
    try:
        hidden_size = int(loaded.model.config.get_text_config().hidden_size)
        shapes = swapped.swap(hidden_size)
        if not swapped:
            return False
        say("timing products of few rows (their kernels are compiled at the first start, some seconds)")
        timer = CudaTimer(loaded.device, loaded.torch_dtype, overlaps=overlaps)
        choose_products(shapes, hidden_size if is_joined else None, swapped.choices, timer, say)
        _compare(loaded, runner, expected, "with our own linears and norms", "these")
    except Exception as error:  # Triton's compiler raises errors of many kinds
        _raise_fault(error)
        swapped.undo()
        say(f"without linears and norms of our own: {type(error).__name__}: {error}")
        return False
    return True


def _compile(
    way: str,
    loaded: LoadedModel,
    runner: ModelRunner,
    expected: list[torch.Tensor],
    say: Callable[[str], None],
    *,
    overlaps: bool,
) -> bool:
    """True if the runner now runs a compiled model. Otherwise, the model is as it was."""
    assert isinstance(runner.backend, PagedBackend)
    say(f"compiling the model ({way if way == 'whole' else 'layers'}; longer at the first start)")
    began_s, compiled = time.monotonic(), None
    try:
        program = CompiledModel if way == "whole" else CompiledLayers
        compiled = runner.compiled = program(loaded.model, runner.backend, overlaps=overlaps)
        _compare(loaded, runner, expected, "compiled", "torch's compiler")
    except Exception as error:  # torch's compilers raise errors of many kinds
        _raise_fault(error)
        runner.compiled = None
        if compiled is not None:
            compiled.undo()
        if way != "auto":
            raise ConfigError(f"compile_model = {way!r}: {type(error).__name__}: {error}") from error
        say(f"the model is not compiled: {type(error).__name__}: {error}")
        return False
    say(f"compiled in {time.monotonic() - began_s:.0f} s")
    return True


def _raise_fault(error: Exception) -> None:
    """Re-raises device faults, which are unrelated to compilers."""
    if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
        raise error


def _compare(loaded: LoadedModel, runner: ModelRunner, expected: list[torch.Tensor], where: str, suspect: str) -> None:
    """Raises UnsupportedModelError if the model does not answer as before."""
    for found, logits in zip(trial_logits(loaded, runner), expected, strict=True):
        compare_logits(loaded.model, found, logits, where, suspect)


@torch.inference_mode()
def trial_logits(
    loaded: LoadedModel, runner: ModelRunner, row_counts: Sequence[int] = ROW_COUNTS
) -> list[torch.Tensor]:
    """Returns float32 logits [rows, vocab_size] for all rows of short texts. Their lengths are those at which kernels
    differ, and that of the probe.
    """
    name, allocator = "trial", runner.backend.allocator
    most = min(PROBE_TOKENS, loaded.max_model_len, allocator.reservable_tokens([name])[0])
    found = []
    for count in sorted({min(count, most) for count in (most, *row_counts)}, reverse=True):
        ids = [(7 * i) % loaded.vocab_size for i in range(count)]
        if not allocator.reserve(name, count):
            raise MemoryError(f"K/V of {count} tokens")
        try:
            batch = build_batch([RequestRows(name, 0, ids, list(range(-1, count - 1)), 1, GREEDY)])
            # Bypasses forward(), which pads: a graph of one row has one row.
            arrays = {"ids": batch.input_ids[:count], "positions": batch.position_ids[:count], "keep": np.arange(count)}
            inputs = upload(arrays, loaded.device)
            found.append(runner.run(batch.spans, inputs["ids"], inputs["positions"], inputs["keep"]).float())
        finally:
            allocator.release(name)
    return found
