"""From a configuration to a running core: load the model, size the K/V memory, put the parts together."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from batchserve.attention.cpu import CpuBackend
from batchserve.attention.paged import PagedBackend
from batchserve.config import EngineConfig, MiB
from batchserve.decoding_length import accounts, budget_kernels, time_kernels
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import DraftPolicy, FixedDrafting
from batchserve.decoding_length.step_time import StepTimeModel
from batchserve.draft import forest
from batchserve.draft.base import Drafter
from batchserve.draft.factory import LARGEST_MODEL, create_drafters, draft_limits
from batchserve.draft.kernels import KernelLoader
from batchserve.draft.router import RoutingDrafter, drafter_modules
from batchserve.engine.detokenizer import decoder_of
from batchserve.engine.drafting import DraftStage
from batchserve.engine.engine_core import EngineCore
from batchserve.engine.input_processor import InputProcessor, ModelFacts
from batchserve.errors import ConfigError
from batchserve.forks import check_not_forked
from batchserve.free_memory import check_weights_fit, name_memory_errors
from batchserve.gpu.linears import ROW_COUNTS
from batchserve.metrics import EngineMetrics
from batchserve.native import pool
from batchserve.native.instruction_set import choose_instruction_set
from batchserve.native.vector_code import kernel_level
from batchserve.request import GREEDY
from batchserve.runner.cuda_graphs import CannotBeCapturedError, StepGraphs, choose_capturer
from batchserve.runner.loader import LoadedModel, load_model, weight_bytes
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.scheduler.scheduler import Scheduler
from batchserve.startup.backend import build_backend
from batchserve.startup.choose_threads import ThreadWatch, check_threads, choose_threads
from batchserve.startup.kv_memory import Progress
from batchserve.startup.measure_steps import measured_table, time_decoding
from batchserve.startup.optimize import optimize_model
from batchserve.types import ModelInfo
from batchserve.version import __version__

# A server has an event loop to run beside its steps, and often its clients, too.
THREAD_GAIN, SERVING_GAIN = 1.1, 1.3
MAX_THREADS = 8  # that share a draft beside a GPU


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A core with its door and its description."""

    core: EngineCore
    processor: InputProcessor
    info: ModelInfo

    def save_drafts(self, path: Path) -> None:
        """Keep what the default drafter shares in a file, for `draft_cache`. Raises ConfigError, OSError."""
        if not isinstance(self.core.drafter, RoutingDrafter):
            raise ConfigError(f"drafter = {self.core.drafter.name!r}: is not one of those that can be saved")
        self.core.drafter.save(path, self.processor.vocabulary_fingerprint())


def build_engine(
    config: EngineConfig,
    on_progress: Progress | None = None,
    *,
    drafter: Drafter | None = None,
    clock: Callable[[], float] = time.monotonic,
    is_serving: bool = False,
) -> BuiltEngine:
    """Everything between a configuration and the first step.

    Raises ConfigError, UnsupportedModelError, and ForkedProcessError in a fork of a process that has built an engine.

    `drafter` overrides all configured ones (for tests and experiments). While serving, drafters are compiled in the
    background, and requests are decoded without drafts until theirs is ready; otherwise where they are first needed.
    """
    kernels = KernelLoader(in_background=is_serving)
    try:
        with name_memory_errors(f"to serve {config.model!r}"):
            say = on_progress or (lambda message: None)
            return _build_engine(config, say, drafter, clock, kernels, is_serving=is_serving)
    except BaseException:
        kernels.close()
        raise


def _build_engine(
    config: EngineConfig,
    say: Progress,
    drafter: Drafter | None,
    clock: Callable[[], float],
    kernels: KernelLoader,
    *,
    is_serving: bool,
) -> BuiltEngine:
    # What cannot be is refused before minutes have gone into loading.
    choose_instruction_set(config.instruction_set)
    config.draft.cache_path()
    drafters = create_drafters(config, LARGEST_MODEL)
    check_not_forked()
    if drafter is None and (config.wait_for_drafter or not is_serving):
        kernels.begin(drafter_modules(drafters[_default_drafter(config)], _shared_modules(config)))
    say(f"loading {config.model}")
    check_weights_fit(config.model, weight_bytes(config))
    loaded = load_model(config, say)
    backend, max_model_len = build_backend(config, loaded, say)
    loaded.limit_model_len(max_model_len)
    num_parameters = loaded.num_parameters
    limits = draft_limits(config, num_parameters)
    processor = InputProcessor(ModelFacts.of(loaded), max_model_len, config, limits)
    runner = ModelRunner(loaded, backend)
    rows = min(config.max_num_seqs, max_model_len - 1)
    _warm_up(runner, rows)
    if config.num_threads and loaded.device.type != "cpu":
        runner.num_threads = config.num_threads
        runner.bind_thread()  # compiled programs are for so many threads
    made_faster = optimize_model(config, loaded, runner, say)
    _capture_graphs(config, loaded, runner, max_model_len, made_faster, say)
    if runner.graphs is not None:
        most = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
        _warm_up_beyond(runner, runner.graphs.sizes[-1], most, max_model_len)
    kernels.wait_for_begun()  # nothing is measured beside it
    max_threads, min_gain = torch.get_num_threads(), SERVING_GAIN if is_serving else THREAD_GAIN
    if loaded.device.type == "cpu":
        runner.num_threads = config.num_threads or choose_threads(runner, config.max_num_seqs, max_model_len, min_gain)
    runner.bind_thread()
    if config.num_threads is not None and runner.num_threads < config.num_threads:
        say(
            f"num_threads = {config.num_threads}: OpenMP starts {runner.num_threads}; see OMP_THREAD_LIMIT in the "
            "environment"
        )
    if loaded.device.type == "cpu":
        check_threads(loaded, runner)
    marks = [*([] if runner.graphs is None else [f"graphs of {runner.graphs.sizes}"]), *made_faster]
    step_time = _build_step_time(config, loaded, runner, max_model_len, marks, say)
    scheduler = Scheduler(config, backend.allocator, max_model_len, step_time)
    used_drafter = drafter or _build_drafter(config, num_parameters, processor, kernels, is_serving, say)
    # Beside a GPU nobody else uses the processor's threads: they sleep, and to wake all of them takes too long.
    is_on_cpu = loaded.device.type == "cpu"
    drafts = DraftStage(used_drafter, _draft_policy(config, step_time), backend.allocator, clock, loaded.vocab_size)
    drafts.use_threads(pool.team(runner.num_threads if is_on_cpu else min(runner.num_threads, MAX_THREADS)))
    core = EngineCore(scheduler, drafts, runner, decoder_of(loaded.tokenizer), EngineMetrics(), clock)
    # Bits may depend on the number of threads.
    if is_on_cpu and config.num_threads is None and max_threads > 1:

        def changed(ratio: float) -> None:
            step_time.rescale(ratio)
            drafts.use_threads(pool.team(runner.num_threads))

        def time_step() -> float:
            return time_decoding(runner, config.max_num_seqs, 1)  # without contexts, which would need more memory

        core.threads = ThreadWatch(runner, max_threads, min_gain, time_step, changed, clock)
    info = ModelInfo(
        name=loaded.name,
        architecture=type(loaded.model).__name__,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=loaded.eos_token_ids,
        attention_backend=backend.name,
        drafter=used_drafter.name,
        decoding_length=limits[config.drafter].max_draft_tokens,
        has_tokenizer=loaded.tokenizer is not None,
        execution=step_kind(loaded),
        instruction_set=kernel_level() if isinstance(backend, CpuBackend) else "",
    )
    say(
        f"{info.architecture} in {info.dtype} on {loaded.device.type}, {runner.num_threads} threads, "
        f"attention {info.attention_backend}, drafter {info.drafter} (decoding length {info.decoding_length}), "
        f"steps: {info.execution}{f' ({info.instruction_set})' if info.instruction_set else ''}"
    )
    return BuiltEngine(core, processor, info)


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
        say(f"all steps are eager: {type(loaded.model).__name__} cannot be captured: {error}")
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) and "captur" not in str(error):
            raise  # a fault of the device is no matter of graphs
        # Not eagerly in this process: what has failed inside of a capture leaves torch's allocator in its midst.
        name = type(loaded.model).__name__
        raise ConfigError(
            f"enforce_eager = False: the CUDA graph capture of {name} failed ({error}); set enforce_eager"
            + ("" if not made_faster else ", or compile_model = 'off', custom_kernels or kernel_overlap = False")
        ) from error


def _warm_up(runner: ModelRunner, rows: int) -> None:
    """One forward of so many rows: the first pays for what libraries set up lazily."""
    name = "warm-up"
    if not runner.backend.allocator.reserve(name, rows):
        raise MemoryError(f"K/V of {rows} tokens")
    batch = build_batch([RequestRows(name, 0, [0] * rows, list(range(-1, rows - 1)), rows, GREEDY)])
    runner.launch(batch).wait()
    runner.backend.allocator.release(name)


def _warm_up_beyond(runner: ModelRunner, graphed: int, most: int, max_model_len: int) -> None:
    """Eager steps behind the largest graph, of prompts and of trees: kernels are compiled now, not between requests."""
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


def _build_step_time(
    config: EngineConfig,
    loaded: LoadedModel,
    runner: ModelRunner,
    max_model_len: int,
    marks: list[str],
    say: Progress,
) -> StepTimeModel:
    """What a step of this model takes on this machine, from the cache or measured. marks: what else it depends on."""
    say("step times (measured at a model's first start, some seconds)")
    time_kernels.compile_kernels()
    key = (
        __version__,
        torch.__version__,
        transformers.__version__,
        platform.processor() or platform.machine(),
        machine_name(loaded.device),
        str(runner.num_threads),
        f"{runner.backend.name} {config.batch_invariant} {step_kind(loaded)} {loaded.dtype}",
        *marks,
        loaded.model.config.to_json_string(),
    )
    table = measured_table(
        runner, config.max_num_batched_tokens, config.max_num_seqs, max_model_len, Path(config.cache_dir), key, say
    )
    model = StepTimeModel(table)
    say(
        f"a step of {table.rows[0]} rows takes {table.seconds[0] * 1e3:.1f} ms; critical decoding length "
        f"{model.critical_length()} rows"
    )
    return model


def _draft_policy(config: EngineConfig, step_time: StepTimeModel) -> DraftPolicy:
    if config.is_adaptive:
        return AdaptiveDrafting(step_time, config.draft_inflation, config.max_step_s)
    return FixedDrafting(step_time)


def _default_drafter(config: EngineConfig) -> str:
    return "none" if config.decoding_length == 0 else config.drafter


def _shared_modules(config: EngineConfig) -> list[str]:
    """Modules whose kernels are needed for the drafts of any drafter."""
    return [forest.__name__, (accounts if config.is_adaptive else budget_kernels).__name__]


def _build_drafter(
    config: EngineConfig,
    num_parameters: int,
    processor: InputProcessor,
    kernels: KernelLoader,
    is_serving: bool,
    say: Progress,
) -> RoutingDrafter:
    name = _default_drafter(config)
    router = RoutingDrafter(name, create_drafters(config, num_parameters), kernels, _shared_modules(config))
    cache = config.draft.cache_path()
    if cache is not None:
        if config.decoding_length == 0:
            raise ConfigError(
                f"draft_cache = {str(cache)!r}: must be unset with decoding_length = 0: nothing is drafted"
            )
        router.persistent()
    # What is to be loaded is loaded before anybody is served, so that a file that cannot be used is refused here.
    has_cache = cache is not None and cache.exists()
    if has_cache or config.wait_for_drafter or not is_serving:
        if name != "none":
            say(f"preparing drafter {name} (compiled at the first start)")
        router.prepare(say)
    elif not router.is_ready_for(name):
        say(f"drafter {name} is being prepared; until it is ready, requests are answered without drafts")
    if cache is not None and has_cache:
        router.load(cache, processor.vocabulary_fingerprint(), processor.vocab_size)
        say(f"draft cache: {router.memory_bytes() / MiB:.1f} MiB from {cache}")
    return router


def step_kind(loaded: LoadedModel) -> str:
    """Names what runs a step: a native program or the model's modules."""
    if loaded.native is not None:
        names = ", ".join(loaded.native.torch_operators)
        return f"native program, with torch for {names}" if names else "native program"
    return "modules, native linears" if loaded.has_packed_linears else "modules"


def machine_name(device: torch.device) -> str:
    """The processor's or the GPU's model, empty where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
