"""Sizes the K/V memory: how many tokens a budget holds, and how long a request may be."""

from __future__ import annotations

from collections.abc import Callable

from batchserve.config import EngineConfig, MiB
from batchserve.errors import ConfigError
from batchserve.kv.slab import bytes_per_token
from batchserve.runner.served_model import ServedModel

KEPT = 2  # times what all sequences at full length take, if no size is given; half of it keeps ended requests
SHARE_OF_FREE_MEMORY = 0.25
UNKNOWN_BYTES = 4096 * MiB  # assumed to be free if the system does not say
Progress = Callable[[str], None]


def kv_capacity(
    config: EngineConfig,
    model: ServedModel,
    budget: int,
    unit: int,
    draft_rows: int = 0,
    num_dummies: int = 0,
    *,
    is_on_cpu: bool = True,
) -> tuple[int, int]:
    """Returns (tokens of K/V, longest request) for a budget in bytes, in units of `unit` tokens. Raises ConfigError.

    draft_rows: tokens that can be used beyond all sequences' full length; num_dummies: tokens that no request gets.
    """
    per_token = bytes_per_token(model.layers, model.dtype)
    wanted_len = config.max_model_len or model.max_model_len
    if wanted_len > model.max_model_len:
        raise ConfigError(f"max_model_len = {wanted_len}: the model's own limit is {model.max_model_len}")

    def rounded(tokens: int) -> int:
        return -(-tokens // unit) * unit

    # Memory beyond every sequence at full length is used only to keep the K/V of ended requests.
    most = config.max_num_seqs * rounded(wanted_len) + draft_rows
    total_tokens = budget // per_token // unit * unit - num_dummies
    if not config.prefix_cache:
        total_tokens = min(total_tokens, most)
    elif config.kv_cache_memory is None and is_on_cpu:  # other programs share the machine's memory
        total_tokens = min(total_tokens, KEPT * most)
    max_model_len = min(wanted_len, total_tokens)
    least = config.max_model_len or 2  # a token of the prompt and one of the answer
    if max_model_len < least:
        what = f"kv_cache_memory = {budget} bytes"
        if config.kv_cache_memory is None and not is_on_cpu:
            what = f"gpu_memory_utilization = {config.gpu_memory_utilization}: K/V memory of {max(0, budget)} bytes"
        needed = rounded(least) + num_dummies
        raise ConfigError(
            f"{what}: must be at least {needed * per_token} bytes, for {needed} tokens of {per_token} bytes"
            + (f" (max_model_len = {least})" if config.max_model_len else " (memory is taken in units of so many)")
        )
    return total_tokens, max_model_len


def share_of(free: int | None) -> int:
    """Returns the budget in bytes if none is configured. free: the free memory, if known."""
    return int((UNKNOWN_BYTES if free is None else free) * SHARE_OF_FREE_MEMORY)


def check_free(config: EngineConfig, kv_bytes: int, free: int | None) -> None:
    """Raises ConfigError if more was asked for, and could be used, than is free."""
    if config.kv_cache_memory is not None and free is not None and kv_bytes > free:
        raise ConfigError(
            f"kv_cache_memory = {config.kv_cache_memory} bytes: must be at most {free} bytes, what is free"
        )


def described(config: EngineConfig, total_tokens: int, per_token: int, max_model_len: int) -> str:
    """Returns a line for the log."""
    return (
        f"K/V memory: {total_tokens} tokens of {per_token} bytes, {total_tokens * per_token / MiB:.0f} MiB at most; "
        f"max_model_len {max_model_len}, max_num_seqs {config.max_num_seqs}"
    )
