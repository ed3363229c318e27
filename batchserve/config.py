"""Configuration: frozen, validated once at the edge, then passed down; nothing below reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from batchserve.errors import ConfigError

DRAFTERS = ("trie", "none")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs to know; `batchserve serve --help` explains each option.

    model: a local folder, a hub id, or "bundled".
    kv_cache_memory: bytes for K/V; None takes a quarter of the memory that is free at start.
    max_model_len: None takes the model's own limit, or what the K/V memory holds if that is less.
    max_num_batched_tokens: rows of one step, prefill chunks, drafts and plain rows together.
    prefill_chunk_size: the most prompt tokens of one request in one step; None: only the step's bound.
    decoding_length: draft tokens of one request in one step.
    num_threads: compute threads on a CPU; None takes what measures fastest at start.
    """

    model: str = "bundled"
    dtype: str = "auto"
    drafter: str = "trie"
    decoding_length: int = 8
    branch_length: int = 12
    share_drafts: bool = True
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    prefill_chunk_size: int | None = None
    max_waiting: int = 256
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    num_threads: int | None = None
    batch_invariant: bool = False
    trust_remote_code: bool = False
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "branch_length"):
            _at_least(name, getattr(self, name), 1)
        for name in ("prefill_chunk_size", "max_model_len", "kv_cache_memory", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("decoding_length", self.decoding_length, 0)
        object.__setattr__(self, "model", os.fspath(self.model))
        if self.max_model_len == 1:
            raise ConfigError("max_model_len = 1: must be at least 2, a token of the prompt and one of the answer")
        _one_of("drafter", self.drafter, DRAFTERS)
        _one_of("dtype", self.dtype, DTYPES)
        if self.max_num_batched_tokens < self.max_num_seqs + 1:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens}: must be at least max_num_seqs + 1 = "
                f"{self.max_num_seqs + 1}, so that prefill goes on while every sequence decodes"
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how the server listens."""

    host: str = "127.0.0.1"
    port: int = 50051
    max_receive_bytes: int = 16 * MiB
    drain_timeout_s: float = 30.0
    has_reflection: bool = True
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("metrics_port", self.metrics_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name} = {port}: must be in 0..65535 (0 picks a free one)")
        _at_least("max_receive_bytes", self.max_receive_bytes, 1024)
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(f"drain_timeout_s = {self.drain_timeout_s}: must be finite and >= 0")


def _at_least(name: str, value: object, bound: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} = {value!r}: must be an integer")
    if value < bound:
        raise ConfigError(f"{name} = {value}: must be at least {bound}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")
