"""Configuration: frozen, validated once at the edge, then passed down; nothing below reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from batchserve.errors import ConfigError

DRAFTERS = ("mixture", "trie", "reference", "jacobi", "none")
TRIE_MODES = ("hierarchical", "parallel", "single")
PRIVATE_SCOPE = "request"  # the draft scope that shares nothing
MAX_SCOPE_CHARS = 256
SCOPE_NAME_BOUND = f"1..{MAX_SCOPE_CHARS} characters of text"
DTYPES = ("auto", "float32", "bfloat16", "float16")
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What the drafters are made with; None takes a drafter's own default.

    trie_*: Lookahead (KDD'24), sections 4.2 and 4.3; a capacity of None is 16 x the decoding length (table 4).
    reference_*: LLMA, section 2.2: n tokens that must match, k that are copied.
    jacobi_*: Lookahead Decoding, section 3: W, N and G. A window of None goes by the model's size, guesses follow it.
    max_scope_bytes, max_draft_bytes: what one scope, and all scopes of one drafter, may keep of shared texts.
    draft_cache: a file that the default drafter's shared texts are loaded from at start, which waits for the drafter to
    be ready, and that AsyncEngine.shutdown saves them to.
    """

    trie_mode: str = "hierarchical"
    trie_capacity: int | None = None
    trie_prompt_weight: float | None = None
    trie_min_retrieved_tokens: int | None = None
    reference_min_match: int = 1
    reference_copy_length: int = 16
    jacobi_window: int | None = None
    jacobi_ngram: int = 5
    jacobi_guesses: int | None = None
    max_scope_bytes: int = 64 * MiB
    max_draft_bytes: int = 256 * MiB
    draft_cache: str | None = None

    def __post_init__(self) -> None:
        _one_of("trie_mode", self.trie_mode, TRIE_MODES)
        for name in ("trie_capacity", "trie_min_retrieved_tokens", "jacobi_window", "jacobi_guesses"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("reference_min_match", "reference_copy_length", "max_scope_bytes", "max_draft_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("jacobi_ngram", self.jacobi_ngram, 2)
        weight = self.trie_prompt_weight
        if weight is not None and not (isinstance(weight, int | float) and 0 < weight < float("inf")):
            raise ConfigError(f"trie_prompt_weight = {weight!r}: must be a finite number > 0")
        if self.max_draft_bytes < self.max_scope_bytes:
            raise ConfigError(
                f"max_draft_bytes = {self.max_draft_bytes}: must be at least max_scope_bytes = {self.max_scope_bytes}"
            )
        if self.draft_cache is not None:
            object.__setattr__(self, "draft_cache", os.fspath(self.draft_cache))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs to know; `batchserve serve --help` explains each option.

    model: a local folder, a hub id, or "bundled".
    kv_cache_memory: bytes for K/V; None takes a quarter of the memory that is free at start.
    max_model_len: None takes the model's own limit, or what the K/V memory holds if that is less.
    max_num_batched_tokens: rows of one step, prefill chunks, drafts and plain rows together.
    prefill_chunk_size: the most prompt tokens of one request in one step; None: only the step's bound.
    drafter: the one that requests get which name none; "none" leaves the others for requests to choose.
    decoding_length: the most draft tokens of one request in one step; None: the drafter's own; 0: none for anybody.
    branch_length: the most draft tokens in one line of descent; None: the drafter's own.
    default_draft_scope: whose answers requests draft from that name no scope; "request" shares nothing.
    wait_for_drafter: do not serve before drafts are ready (the first start ever compiles them); False: serve without.
    num_threads: compute threads on a CPU; None takes what measures fastest at start.
    """

    model: str = "bundled"
    dtype: str = "auto"
    drafter: str = "mixture"
    decoding_length: int | None = None
    branch_length: int | None = None
    default_draft_scope: str = "default"
    wait_for_drafter: bool = False
    draft: DraftConfig = field(default_factory=DraftConfig)
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
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            _at_least(name, getattr(self, name), 1)
        for name in ("branch_length", "prefill_chunk_size", "max_model_len", "kv_cache_memory", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.decoding_length is not None:
            _at_least("decoding_length", self.decoding_length, 0)
        if not is_scope_name(self.default_draft_scope):
            raise ConfigError(f"default_draft_scope = {self.default_draft_scope!r}: must be {SCOPE_NAME_BOUND}")
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


def is_scope_name(name: object) -> bool:
    """Whether it can name a draft scope: scopes are saved under their names, as UTF-8."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SCOPE_CHARS:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True


def _at_least(name: str, value: object, bound: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} = {value!r}: must be an integer")
    if value < bound:
        raise ConfigError(f"{name} = {value}: must be at least {bound}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")
