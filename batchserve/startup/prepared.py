"""A model that is ready to run steps, and how one is made of a native program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchserve.attention.compiled import compile_kernels
from batchserve.errors import ConfigError
from batchserve.free_memory import free_memory_bytes
from batchserve.kv.slab import EXTENT, SlabAllocator, bytes_per_token
from batchserve.native.compile_progress import Part
from batchserve.native.cores import default_threads
from batchserve.native.vector_code import kernel_level
from batchserve.request import GREEDY
from batchserve.runner.native_runner import NativeRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.startup import kernels
from batchserve.startup.kernels import ATTENTION_S, CPU_PARTS
from batchserve.startup.kv_memory import Progress, check_free, described, kv_capacity, share_of

if TYPE_CHECKING:
    from batchserve.config import EngineConfig
    from batchserve.engine.executor import Executor
    from batchserve.program.model import NativeModel
    from batchserve.runner.compiled_tokenizer import AnyTokenizer
    from batchserve.runner.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model with its executor.

    max_model_len: the longest request, in tokens, that the K/V memory holds. max_threads: the most compute threads to
    try. execution: what computes a step, for people. instruction_set: of the compiled attention; empty without one.
    marks: what step times depend on besides the model and the processor. check_threads: raises UnsupportedModelError
    if the model answers otherwise on the executor's threads than on one.
    """

    facts: ServedModel
    tokenizer: AnyTokenizer | None
    executor: Executor
    max_model_len: int
    max_threads: int
    execution: str
    attention: str = "cpu"
    device: str = "cpu"
    instruction_set: str = ""
    marks: tuple[str, ...] = ()
    check_threads: Callable[[], None] = field(default=lambda: None)


def prepare_native(
    config: EngineConfig, facts: ServedModel, tokenizer: AnyTokenizer | None, native: NativeModel, say: Progress
) -> PreparedModel:
    """Gives a native program its K/V memory. Raises ConfigError."""
    operators = native.image.torch_operators
    if config.batch_invariant and operators:
        raise ConfigError(
            f"batch_invariant = True: {facts.architecture} has operators that torch computes, whose bits may depend on "
            f"the batch: {', '.join(operators)}"
        )
    refuse_compiling(config)
    free = free_memory_bytes()
    budget = config.kv_cache_memory or share_of(free)
    total_tokens, max_model_len = kv_capacity(config, facts, budget, unit=EXTENT)
    check_free(config, total_tokens * bytes_per_token(facts.layers, facts.dtype), free)
    allocator = SlabAllocator(facts.layers, facts.dtype, total_tokens)
    attention = Part("attention", ATTENTION_S, lambda: compile_kernels(facts.layers, facts.dtype))
    kernels.compile_kernels([*CPU_PARTS, attention], say)
    say(described(config, total_tokens, allocator.bytes_per_token, max_model_len))
    native.limit_model_len(max_model_len)
    threads = default_threads()
    runner = NativeRunner(native, allocator, facts, config.num_threads or threads)
    runner.bind_thread()
    warm_up(runner, min(config.max_num_seqs, max_model_len - 1))
    execution = "native program" + (f", with torch for {', '.join(operators)}" if operators else "")
    return PreparedModel(
        facts, tokenizer, runner, max_model_len, threads, execution, instruction_set=kernel_level(), marks=(execution,)
    )


def refuse_compiling(config: EngineConfig) -> None:
    """Raises ConfigError if torch's compiler was asked for: it is of use only with CUDA graphs."""
    if config.compile_model in ("layers", "whole"):
        raise ConfigError(
            f"compile_model = {config.compile_model!r}: must be with CUDA graphs: on a GPU, without enforce_eager, and "
            "not with attention_backend torch"
        )


def warm_up(executor: Executor, rows: int) -> None:
    """Runs one forward of so many rows: the first pays for what libraries set up lazily."""
    name = "warm-up"
    if not executor.allocator.reserve(name, rows):
        raise MemoryError(f"K/V of {rows} tokens")
    batch = build_batch([RequestRows(name, 0, [0] * rows, list(range(-1, rows - 1)), rows, GREEDY)])
    executor.launch(batch).wait()
    executor.allocator.release(name)
