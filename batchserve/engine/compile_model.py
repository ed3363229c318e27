"""What makes a model faster at start, on a GPU: kernels of our own, and torch's compiler.

Both are used where they can be, and only if the model answers as before.
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
from batchserve.gpu.linears import Choices
from batchserve.kernel_overlap import can_overlap
from batchserve.request import GREEDY
from batchserve.runner.compiled import CompiledLayers, CompiledModel
from batchserve.runner.cuda_graphs import choose_capturer
from batchserve.runner.gpu_modules import swap_for_gpu
from batchserve.runner.probe import PROBE_TOKENS, compare_logits
from batchserve.runner.ragged_batch import RequestRows, build_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.config import EngineConfig
    from batchserve.runner.loader import LoadedModel
    from batchserve.runner.model_runner import ModelRunner


def use_own_kernels(config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, say: Callable[[str], None]) -> bool:
    """Whether linears and norms have kernels of our own now: where steps are CUDA graphs, and launches take no time."""
    backend = runner.backend
    if not config.custom_kernels or not isinstance(backend, PagedBackend):
        return False
    if choose_capturer(config, loaded.device, backend.kernel) is None:
        return False
    choices = Choices(overlaps=config.kernel_overlap and can_overlap(loaded.device))
    shapes = swap_for_gpu(loaded.model, int(loaded.model.config.get_text_config().hidden_size), choices)
    if not shapes:
        return False
    say("timing products of few rows (their kernels are compiled at the first start, some seconds)")
    choose_products(shapes, choices, CudaTimer(loaded.device, overlaps=choices.overlaps), say)
    return True


def compile_model(config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, say: Callable[[str], None]) -> None:
    """Before anything is captured. Raises ConfigError where that was asked for and cannot be."""
    way, backend = config.compile_model, runner.backend
    can_be = isinstance(backend, PagedBackend) and choose_capturer(config, loaded.device, backend.kernel) is not None
    if way in ("layers", "whole") and not can_be:
        raise ConfigError(
            f"compile_model = {way!r}: must be with CUDA graphs: on a GPU, without enforce_eager, and not with "
            "attention_backend torch"
        )
    if way == "off" or not can_be:
        return
    assert isinstance(backend, PagedBackend)
    say(f"compiling the model ({way if way == 'whole' else 'layers'}; longer at the first start)")
    began_s = time.monotonic()
    expected, program = _trial_logits(loaded, runner), CompiledModel if way == "whole" else CompiledLayers
    error = None
    # What begins early is kept only where it is as right: in some graphs it cannot be (gpu/graph_pass.py).
    for overlaps in (True, False) if config.kernel_overlap and can_overlap(loaded.device) else (False,):
        error = _use_compiled(program, loaded, runner, expected, overlaps=overlaps)
        if error is None:
            say(f"compiled in {time.monotonic() - began_s:.0f} s")
            return
        if overlaps:
            say(f"compiling again, without overlap: {type(error).__name__}: {error}")
    if way != "auto":
        raise ConfigError(f"compile_model = {way!r}: {type(error).__name__}: {error}") from error
    say(f"the model is not compiled: {type(error).__name__}: {error}")


def _use_compiled(
    program: type[CompiledModel | CompiledLayers],
    loaded: LoadedModel,
    runner: ModelRunner,
    expected: list[torch.Tensor],
    *,
    overlaps: bool,
) -> Exception | None:
    """Have the runner run it, if it gives the expected logits; else the model is as it was, and this is why."""
    assert isinstance(runner.backend, PagedBackend)
    compiled = None
    try:
        compiled = runner.compiled = program(loaded.model, runner.backend, overlaps=overlaps)
        for found, logits in zip(_trial_logits(loaded, runner), expected, strict=True):
            compare_logits(loaded.model, found, logits, "compiled", "torch's compiler")
    except Exception as error:  # torch's compilers have errors of many kinds
        if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
            raise  # a fault of the device is no matter of compilers
        runner.compiled = None
        if compiled is not None:
            compiled.undo()
        return error
    return None


@torch.inference_mode()
def _trial_logits(loaded: LoadedModel, runner: ModelRunner) -> list[torch.Tensor]:
    """float32 [rows, vocab_size] of a short text, all of whose rows are sampled, and of a single row."""
    name, allocator = "trial", runner.backend.allocator
    most = min(PROBE_TOKENS, loaded.max_model_len, allocator.reservable_tokens([name])[0])
    found = []
    for count in (most, 1):
        ids = [(7 * i) % loaded.vocab_size for i in range(count)]
        allocator.reserve(name, count)
        try:
            batch = build_batch([RequestRows(name, 0, ids, list(range(-1, count - 1)), 1, GREEDY)])
            runner.backend.begin(batch.spans)
            # Not through forward(), which pads: a graph of one row has one.
            arrays = {"ids": batch.input_ids[:count], "positions": batch.position_ids[:count], "keep": np.arange(count)}
            inputs = upload(arrays, loaded.device)
            found.append(runner.run_model(inputs["ids"], inputs["positions"], inputs["keep"]).float())
        finally:
            allocator.release(name)
    return found
