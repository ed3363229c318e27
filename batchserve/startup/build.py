"""From a configuration to a running core: load the model, size the K/V memory, put the parts together."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchserve.config import EngineConfig, MiB
from batchserve.decoding_length import accounts, budget_kernels
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
from batchserve.engine.grammar_queue import give_grammar
from batchserve.engine.input_processor import InputProcessor, ModelFacts
from batchserve.errors import ConfigError
from batchserve.forks import check_not_forked
from batchserve.free_memory import name_memory_errors
from batchserve.grammar.compiler import GrammarCompiler
from batchserve.metrics import EngineMetrics
from batchserve.native import pool
from batchserve.native.cores import processor_name
from batchserve.native.instruction_set import choose_instruction_set
from batchserve.parallel.lookahead import LookaheadExecutor
from batchserve.parallel.starting import RanksBeingBuilt
from batchserve.request import NewRequest, Request
from batchserve.runner.native_runner import NativeRunner
from batchserve.scheduler.scheduler import Scheduler
from batchserve.startup.choose_threads import ThreadWatch, choose_threads
from batchserve.startup.kernels import SAMPLERS
from batchserve.startup.kv_memory import Progress
from batchserve.startup.measure_steps import measured_table, time_decoding
from batchserve.startup.prepare import prepare
from batchserve.startup.prepared import PreparedModel
from batchserve.types import ModelInfo
from batchserve.version import __version__

# How many times as fast steps must be on twice as many threads. A server has an event loop to run beside its steps, and
# often its clients, too; what that costs shows in steps' times while they run, so a native program may take more.
THREAD_GAIN, SERVING_GAIN = 1.1, 1.3
NATIVE_THREAD_GAIN, NATIVE_SERVING_GAIN = 1.0, 1.1
MAX_THREADS = 8  # that share a draft beside a GPU


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A core with its door and its description."""

    core: EngineCore
    processor: InputProcessor
    info: ModelInfo
    grammars: GrammarCompiler

    def begin(self, new: NewRequest) -> Request:
        """Returns the engine's state of a request, whose grammar may take seconds to compile. Raises GrammarError."""
        request = new.begin()
        give_grammar(request, self.grammars, self.info.vocab_size)
        return request

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
    ranks = RanksBeingBuilt(config)
    prepared = prepare(ranks.config, say)
    executor, facts, max_model_len = prepared.executor, prepared.facts, prepared.max_model_len
    limits = draft_limits(config, facts.num_parameters)
    processor = InputProcessor(ModelFacts.of(facts, prepared.tokenizer), max_model_len, config, limits)
    kernels.wait_for_begun()  # nothing is measured beside it
    is_on_cpu, min_gain = prepared.device == "cpu", SERVING_GAIN if is_serving else THREAD_GAIN
    _use_threads(ranks.config, prepared, min_gain, NATIVE_SERVING_GAIN if is_serving else NATIVE_THREAD_GAIN, say)
    if config.lookahead_parallel_size > 1:
        prepared = ranks.joined(prepared)
        executor = prepared.executor
    step_time = _build_step_time(config, prepared, say)
    scheduler = Scheduler(config, executor.allocator, max_model_len, step_time)
    used_drafter = drafter or _build_drafter(config, facts.num_parameters, processor, kernels, is_serving, say)
    # Beside a GPU nobody else uses the processor's threads: they sleep, and to wake all of them takes too long.
    most_threads = executor.num_threads if is_on_cpu else MAX_THREADS
    drafts = DraftStage(used_drafter, _draft_policy(config, step_time), executor.allocator, clock, facts.vocab_size)
    drafts.use_threads(pool.team(min(executor.num_threads, most_threads)))
    core = EngineCore(scheduler, drafts, executor, decoder_of(prepared.tokenizer), EngineMetrics(), clock)
    # Of modules: bits may depend on the number of threads. A native program chooses for each step.
    is_alone = not isinstance(executor, NativeRunner | LookaheadExecutor)
    if is_on_cpu and is_alone and config.num_threads is None and prepared.max_threads > 1:

        def changed(ratio: float) -> None:
            step_time.rescale(ratio)
            drafts.use_threads(pool.team(executor.num_threads))

        def time_step() -> float:
            return time_decoding(executor, config.max_num_seqs, 1)  # without contexts, which would need more memory

        core.threads = ThreadWatch(executor, prepared.max_threads, min_gain, time_step, changed, clock)
    if is_serving and is_on_cpu:
        executor.can_walk_sampled = lambda: all(map(kernels.is_ready, SAMPLERS))  # not at once: each starts a process
    info = _describe(config, prepared, used_drafter.name, limits[config.drafter].max_draft_tokens)
    say(
        f"{info.architecture} in {info.dtype} on {prepared.device}, {executor.num_threads} threads, "
        f"attention {info.attention_backend}, drafter {info.drafter} (decoding length {info.decoding_length}), "
        f"steps: {info.execution}{f' ({info.instruction_set})' if info.instruction_set else ''}"
    )
    return BuiltEngine(core, processor, info, GrammarCompiler(processor.facts.vocabulary))


def _use_threads(
    config: EngineConfig, prepared: PreparedModel, min_gain: float, native_gain: float, say: Progress
) -> None:
    """Gives the executor its compute threads: of a native program as many as there are, of which steps choose some."""
    executor = prepared.executor
    if prepared.device == "cpu":
        executor.num_threads = config.num_threads or prepared.max_threads
    if isinstance(executor, NativeRunner):
        executor.choose_threads(native_gain, is_fixed=config.num_threads is not None)
    elif prepared.device == "cpu" and config.num_threads is None:
        executor.num_threads = choose_threads(executor, config.max_num_seqs, prepared.max_model_len, min_gain)
    executor.bind_thread()
    if config.num_threads is not None and executor.num_threads < config.num_threads:
        say(
            f"num_threads = {config.num_threads}: OpenMP starts {executor.num_threads}; see OMP_THREAD_LIMIT in the "
            "environment"
        )
    prepared.check_threads()


def _describe(config: EngineConfig, prepared: PreparedModel, drafter: str, decoding_length: int) -> ModelInfo:
    facts = prepared.facts
    return ModelInfo(
        name=facts.name,
        architecture=facts.architecture,
        dtype=facts.dtype,
        vocab_size=facts.vocab_size,
        max_model_len=prepared.max_model_len,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=facts.eos_token_ids,
        attention_backend=prepared.attention,
        drafter=drafter,
        decoding_length=decoding_length,
        has_tokenizer=prepared.tokenizer is not None,
        execution=prepared.execution,
        instruction_set=prepared.instruction_set,
    )


def _build_step_time(config: EngineConfig, prepared: PreparedModel, say: Progress) -> StepTimeModel:
    """Returns what a step of this model takes on this machine, from the cache or measured."""
    say("step times (measured at a model's first start, some seconds)")
    executor = prepared.executor
    key = [*_machine_key(prepared), str(executor.num_threads)]
    limits = config.max_num_batched_tokens, config.max_num_seqs, prepared.max_model_len
    table = measured_table(executor, *limits, Path(config.cache_dir), key, say)
    model = StepTimeModel(table)
    say(
        f"a step of {table.rows[0]} rows takes {table.seconds[0] * 1e3:.1f} ms; critical decoding length "
        f"{model.critical_length()} rows"
    )
    return model


def _machine_key(prepared: PreparedModel) -> list[str]:
    """Returns what the times of a model's steps depend on, apart from the number of threads."""
    facts, machine = prepared.facts, platform.processor() or platform.machine()
    level = prepared.instruction_set
    return [__version__, machine, processor_name(), level, facts.dtype, *prepared.marks, facts.configuration]


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
