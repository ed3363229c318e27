"""Prepares a model whose steps are computed by its modules, on a GPU or on a CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import transformers

from batchserve.attention.cpu import CpuBackend
from batchserve.attention.paged import PagedBackend
from batchserve.errors import ConfigError
from batchserve.gpu.linears import ROW_COUNTS
from batchserve.native.vector_code import kernel_level
from batchserve.request import GREEDY
from batchserve.runner.cuda_graphs import CannotBeCapturedError, StepGraphs, choose_capturer
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.probe import compare_logits
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.startup.backend import build_backend
from batchserve.startup.optimize import optimize_model, trial_logits
from batchserve.startup.prepared import PreparedModel, warm_up

if TYPE_CHECKING:
    from batchserve.config import EngineConfig
    from batchserve.runner.loader import LoadedModel
    from batchserve.startup.kv_memory import Progress


def prepare_modules(config: EngineConfig, loaded: LoadedModel, say: Progress) -> PreparedModel:
    """Gives a model its attention and K/V memory, and makes it faster where the device allows. Raises ConfigError."""
    backend, max_model_len = build_backend(config, loaded, say)
    loaded.limit_model_len(max_model_len)
    runner = ModelRunner(loaded, backend)
    warm_up(runner, min(config.max_num_seqs, max_model_len - 1))
    is_on_cpu = loaded.device.type == "cpu"
    if config.num_threads and not is_on_cpu:
        runner.num_threads = config.num_threads
        runner.bind_thread()  # compiled programs are for so many threads
    made_faster = optimize_model(config, loaded, runner, say)
    _capture_graphs(config, loaded, runner, max_model_len, made_faster, say)
    if runner.graphs is not None:
        most = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
        _warm_up_beyond(runner, runner.graphs.sizes[-1], most, max_model_len)
    execution = "modules, native linears" if loaded.has_packed_linears else "modules"
    graphs = [] if runner.graphs is None else [f"graphs of {runner.graphs.sizes}"]
    versions = torch.__version__, transformers.__version__
    gpu = "" if is_on_cpu else torch.cuda.get_device_name(loaded.device)
    return PreparedModel(
        loaded.plain(),
        loaded.tokenizer,
        runner,
        max_model_len,
        max_threads=torch.get_num_threads(),
        execution=execution,
        attention=backend.name,
        device=loaded.device.type,
        instruction_set=kernel_level() if isinstance(backend, CpuBackend) else "",
        marks=(*versions, gpu, f"{backend.name} {execution}", *graphs, *made_faster),
        check_threads=partial(_check_threads, loaded, runner) if is_on_cpu else lambda: None,
    )


def _capture_graphs(
    config: EngineConfig,
    loaded: LoadedModel,
    runner: ModelRunner,
    max_model_len: int,
    made_faster: list[str],
    say: Progress,
) -> None:
    """Steps become CUDA graphs where there can be any. Raises ConfigError if a capture fails."""
    backend = runner.backend
    capturer = choose_capturer(config, loaded.device, backend.kernel) if isinstance(backend, PagedBackend) else None
    if capturer is None or not isinstance(backend, PagedBackend):
        return
    max_rows = min(config.max_graph_rows, config.max_num_batched_tokens)
    try:
        runner.graphs = StepGraphs(
            backend,
            runner.run_model,
            capturer,
            max_rows=max_rows,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            say=say,
        )
    except torch.OutOfMemoryError as error:
        is_asked_for = config.kv_cache_memory is not None
        what = "kv_cache_memory" if is_asked_for else "gpu_memory_utilization"
        raise ConfigError(
            f"{what} = {getattr(config, what)}: leaves no memory for CUDA graphs; lower it, or max_graph_rows = "
            f"{max_rows}, or set enforce_eager"
        ) from error
    except CannotBeCapturedError as error:  # models that read what they computed
        say(f"all steps are eager: {loaded.architecture} cannot be captured: {error}")
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) and "captur" not in str(error):
            raise  # a fault of the device is no matter of graphs
        # Not eagerly in this process: what has failed inside of a capture leaves torch's allocator in its midst.
        name = loaded.architecture
        raise ConfigError(
            f"enforce_eager = False: the CUDA graph capture of {name} failed ({error}); set enforce_eager"
            + ("" if not made_faster else ", or compile_model = 'off', custom_kernels or kernel_overlap = False")
        ) from error


def _warm_up_beyond(runner: ModelRunner, graphed: int, most: int, max_model_len: int) -> None:
    """Runs eager steps that are too large for any graph: their kernels are compiled now, not between requests."""
    allocator = runner.backend.allocator
    for rows in sorted({graphed + 1, most, *ROW_COUNTS}):
        for is_tree in (False, True):
            if not graphed < rows <= min(most, allocator.free_tokens):
                continue
            requests = []
            for start in range(0, rows, max_model_len):
                count = min(max_model_len, rows - start)
                allocator.reserve(f"warm-up-{start}", count)
                parents = [(row - 1) // 2 if is_tree and row else row - 1 for row in range(count)]
                num_pending = 1 if is_tree else count
                requests.append(RequestRows(f"warm-up-{start}", 0, [0] * count, parents, num_pending, GREEDY))
            runner.launch(build_batch(requests)).wait()
            for each in requests:
                allocator.release(each.request_id)


def _check_threads(loaded: LoadedModel, runner: ModelRunner) -> None:
    """Raises UnsupportedModelError unless the model answers on the runner's compute threads as it does on one."""
    chosen, logits = runner.num_threads, {}
    for count in {1, chosen}:
        runner.num_threads = count
        runner.bind_thread()
        logits[count] = trial_logits(loaded, runner, ())[0]
    runner.num_threads = chosen
    runner.bind_thread()
    where, suspect = f"on {chosen} compute threads", "OpenMP's settings in the environment"
    compare_logits(loaded.model, logits[chosen], logits[1], where, suspect)
