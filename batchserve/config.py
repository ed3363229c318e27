"""Configuration: frozen, validated once at the edge, then passed down; no option is read from the environment."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from batchserve.errors import ConfigError
from batchserve.native.instruction_set import AUTO, INSTRUCTION_SETS
from batchserve.option_checks import (
    MOST_BYTES,
    at_least,
    expanded_path,
    is_model_path,
    number,
    one_of,
    path_text,
)

DRAFTERS = ("mixture", "trie", "reference", "jacobi", "none")
TRIE_MODES = ("hierarchical", "parallel", "single")
PRIVATE_SCOPE = "request"  # the draft scope that shares nothing
MAX_SCOPE_CHARS = 256
SCOPE_NAME_BOUND = f"1..{MAX_SCOPE_CHARS} characters of text"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "cpu", "flashinfer", "triton", "torch")
FLASHINFER_MASKS = ("custom", "tree", "front")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
COMPILE_MODES = ("auto", "off", "layers", "whole")
MIN_TARGET_MS = 0.001
ITL_INFLATION = 1.25  # of a running request's steps, by others' drafts
# ... by prompts: so these get half of the time. Less, and long prompts arrive faster than they are computed
# (docs/adaptive.md, "Prompts beside running requests").
PROMPT_INFLATION = 2.0
MAX_RECEIVE_BYTES = (1 << 31) - 1  # gRPC counts them in an int
MiB = 1 << 20
MOST_BRANCH_LENGTH = 4096  # tokens; the trie walks through as many windows for each token that it is given
MOST_MIN_MATCH = 32  # tokens; no drafter compares more of a context (draft/text_index.py)
MAX_THREADS = 4 * (os.cpu_count() or 1)  # OpenMP ends the process where it cannot start as many as it is told to


class UnchosenScope(str):
    """The name of a draft scope that nobody has chosen: where it must not be shared it gives way to PRIVATE_SCOPE."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What the drafters are made with; None takes a drafter's own default.

    trie_*: Lookahead (KDD'24), sections 4.2 and 4.3; a capacity of None is 16 x the decoding length (table 4).
    reference_*: LLMA, section 2.2: n tokens that must match, k that are copied.
    jacobi_*: Lookahead Decoding, section 3: W, N and G. A window of None goes by the model's size, guesses follow it.
    max_scope_bytes, max_draft_bytes: what one scope, and all scopes of all drafters, may keep of shared texts; the
    default drafter has twice another's part.
    draft_cache: a file that the default drafter's shared texts are loaded from at start, which waits for the drafter to
    be ready, and that AsyncEngine.shutdown saves them to.
    """

    trie_mode: str = "hierarchical"
    trie_capacity: int | None = None
    trie_prompt_weight: float | None = None
    trie_min_retrieved_tokens: int | None = None
    reference_min_match: int = 1
    reference_copy_length: int | None = None
    jacobi_window: int | None = None
    jacobi_ngram: int = 5
    jacobi_guesses: int | None = None
    max_scope_bytes: int = 64 * MiB
    max_draft_bytes: int = 256 * MiB
    draft_cache: str | None = None

    def __post_init__(self) -> None:
        one_of("trie_mode", self.trie_mode, TRIE_MODES)
        optional = ("trie_capacity", "trie_min_retrieved_tokens", "jacobi_window", "jacobi_guesses")
        for name in (*optional, "reference_copy_length"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        at_least("reference_min_match", self.reference_min_match, 1)
        for name in ("max_scope_bytes", "max_draft_bytes"):
            at_least(name, getattr(self, name), 1, MOST_BYTES)
        if self.reference_min_match > MOST_MIN_MATCH:
            raise ConfigError(f"reference_min_match = {self.reference_min_match}: must be at most {MOST_MIN_MATCH}")
        at_least("jacobi_ngram", self.jacobi_ngram, 2)
        weight = self.trie_prompt_weight
        if weight is not None:
            number("trie_prompt_weight", weight, 0.0)
            if weight == 0:
                raise ConfigError(f"trie_prompt_weight = {weight}: must be more than 0")
        if self.max_draft_bytes < self.max_scope_bytes:
            raise ConfigError(
                f"max_draft_bytes = {self.max_draft_bytes}: must be at least max_scope_bytes = {self.max_scope_bytes}"
            )
        if self.draft_cache is not None:
            object.__setattr__(self, "draft_cache", expanded_path("draft_cache", self.draft_cache))

    def cache_path(self) -> Path | None:
        """Where draft_cache is; None: there is none. Raises ConfigError where nothing could be saved."""
        if self.draft_cache is None:
            return None
        path, named = Path(self.draft_cache), f"draft_cache = {self.draft_cache!r}"
        try:
            if not path.parent.is_dir():
                raise ConfigError(f"{named}: must be a file in a folder that exists")
            if path.exists() and not path.is_file():
                raise ConfigError(f"{named}: must be a file, and is not a file")
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
                pass
        except OSError as error:
            raise ConfigError(f"{named}: must be in a folder that can be written to ({error.strerror})") from error
        return path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs to know; `batchserve serve --help` explains each option.

    model: a local folder, a hub id, or "bundled".
    device: where the model runs; auto: a CUDA device if there is one.
    attention_backend: auto: on a CPU its own, on a GPU the first of triton, flashinfer and torch that can serve the
    model. torch is slow: the reference of the others, which also runs the GPU path on a CPU.
    flashinfer_mask: how FlashInfer is told of trees: its own custom mask, or our variant of its kernel, which may have
    a step's own rows in front of their context (not measured yet).
    kv_cache_memory: bytes for K/V; None takes a quarter of the memory that is free at start, at most twice what all
    sequences at full length take, or on a GPU what gpu_memory_utilization (a share of the device's memory) leaves
    beside weights and the largest step. Without prefix_cache no more is taken than all sequences can use.
    enforce_eager: no CUDA graphs; max_graph_rows: steps of more rows have none.
    compile_model: whether torch.compile makes the model faster: "layers" one program for all layers of a kind, "whole"
    one for all of it, which takes longer; auto: layers, where steps are CUDA graphs and the model can be compiled.
    custom_kernels: on a CPU, steps as one native program where the model can have one; on a GPU with CUDA graphs,
    norms, and linears of few rows where that is measured to be faster, by kernels of our own. kernel_overlap: kernels
    begin while those before them end, on GPUs that can (Hopper and later).
    max_model_len: None takes the model's own limit, or what the K/V memory holds if that is less.
    max_num_batched_tokens: rows of one step, prefill chunks, drafts and plain rows together.
    prefill_chunk_size: the most prompt tokens of one request in one step; None: only the step's bound.
    drafter: the one that requests get which name none; "none" leaves the others for requests to choose.
    adaptive: choose in every step which draft tokens are worth their rows; False: run all that are drafted.
    decoding_length: so many draft tokens of each request in every step, not adaptive; None: as many as pay, or the
    drafter's own number where `adaptive` is False; 0: none for anybody.
    max_itl_inflation: drafts stretch the steps of running requests to at most so many times their length, further where
    everybody gains or is even (docs/adaptive.md), and all prompts together steps with drafts to so many times theirs.
    None: ITL_INFLATION, and for prompts PROMPT_INFLATION, or where max_itl_ms is given that alone.
    max_itl_ms: the longest step beside running requests that prompts and drafts may make; None: as max_itl_inflation.
    Drafts of a fixed length are bounded by neither.
    max_priority_wait_s: a request that came so long ago, waiting or running, comes before all that came later, whatever
    their priority.
    tpot_target_ms: favour requests while their time per output token is above this; they may name their own.
    prefix_cache: prompts of the same scope that begin alike share K/V: that of requests that are running, and of ended
    ones, which is kept where memory is free.
    tokenizer_end_tokens: answers also end at the tokenizer's end-of-sequence token and at the token that ends a turn in
    the chat template, where the model's own configuration does not name them.
    cache_dir: where measured step times are kept.
    branch_length: the most draft tokens in one line of descent; None: the drafter's own.
    default_draft_scope: whose answers requests draft from that name no scope; "request" shares nothing, and is what a
    server on an address that is not loopback takes where none is given.
    wait_for_drafter: do not serve before drafts are ready (the first start ever compiles them); False: serve without.
    num_threads: compute threads on a CPU, at most MAX_THREADS; None takes what measures fastest at start. Beside a GPU
    those that drafts are made on.
    instruction_set: that compiled kernels use on a CPU; it has to be chosen before these are loaded
    (choose_instruction_set), as the command line does.
    """

    model: str = "bundled"
    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    flashinfer_mask: str = "tree"
    drafter: str = "mixture"
    adaptive: bool = True
    decoding_length: int | None = None
    max_itl_inflation: float | None = None
    max_itl_ms: float | None = None
    max_priority_wait_s: float = 10.0
    tpot_target_ms: float | None = None
    branch_length: int | None = None
    default_draft_scope: str = UnchosenScope("default")
    wait_for_drafter: bool = False
    draft: DraftConfig = field(default_factory=DraftConfig)
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    prefill_chunk_size: int | None = None
    max_waiting: int = 256
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    max_graph_rows: int = 512
    compile_model: str = "auto"
    custom_kernels: bool = True
    kernel_overlap: bool = True
    num_threads: int | None = None
    instruction_set: str = AUTO
    batch_invariant: bool = False
    trust_remote_code: bool = False
    served_model_name: str | None = None
    prefix_cache: bool = True
    tokenizer_end_tokens: bool = True
    cache_dir: str = field(default_factory=lambda: default_cache_dir())

    @property
    def has_hub_model(self) -> bool:
        """Whether `model` is a hub id."""
        return self.model != "bundled" and not is_model_path(self.model)

    @property
    def is_adaptive(self) -> bool:
        """Whether drafts are chosen by what they are worth in each step."""
        return self.adaptive and self.decoding_length is None

    @property
    def draft_inflation(self) -> float:
        """How far drafts may stretch a step."""
        return ITL_INFLATION if self.max_itl_inflation is None else self.max_itl_inflation

    @property
    def prompt_inflation(self) -> float:
        """How far all prompts may stretch a step: whoever bounds steps in milliseconds alone means these to be used."""
        if self.max_itl_inflation is not None:
            return float(self.max_itl_inflation)  # an int would be other code to compile
        return PROMPT_INFLATION if self.max_itl_ms is None else math.inf

    @property
    def max_step_s(self) -> float:
        """The longest step beside running requests that prompts and drafts may make."""
        return math.inf if self.max_itl_ms is None else self.max_itl_ms / 1e3

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_graph_rows"):
            at_least(name, getattr(self, name), 1)
        if self.branch_length is not None:
            at_least("branch_length", self.branch_length, 1, MOST_BRANCH_LENGTH)
        for name in ("prefill_chunk_size", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.kv_cache_memory is not None:
            at_least("kv_cache_memory", self.kv_cache_memory, 1, MOST_BYTES)
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads = {self.num_threads}: must be at most {MAX_THREADS}, 4 for each processor")
        if not isinstance(self.draft, DraftConfig):
            raise ConfigError(f"draft = {self.draft!r}: must be a DraftConfig")
        if self.decoding_length is not None:
            at_least("decoding_length", self.decoding_length, 0)
        if not is_scope_name(self.default_draft_scope):
            raise ConfigError(f"default_draft_scope = {self.default_draft_scope!r}: must be {SCOPE_NAME_BOUND}")
        for name in ("model", "cache_dir"):
            object.__setattr__(self, name, expanded_path(name, getattr(self, name)))
        if self.served_model_name is not None:
            path_text("served_model_name", self.served_model_name)
        if not is_utf8(served := self.served_model_name or self.model):
            raise ConfigError(f"served_model_name = {served!r}: must be text that is UTF-8 (the default is model)")
        flags = ("adaptive", "wait_for_drafter", "batch_invariant", "trust_remote_code", "prefix_cache")
        for name in (*flags, "tokenizer_end_tokens", "enforce_eager", "custom_kernels", "kernel_overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be True or False")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len = 1: must be at least 2, a token of the prompt and one of the answer")
        if self.max_itl_inflation is not None:
            number("max_itl_inflation", self.max_itl_inflation, 1.0)
        number("max_priority_wait_s", self.max_priority_wait_s, 0.0)
        for name in ("max_itl_ms", "tpot_target_ms"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), MIN_TARGET_MS)
        if self.tpot_target_ms is not None and not self.is_adaptive:
            raise ConfigError(
                f"tpot_target_ms = {self.tpot_target_ms}: must be unset without the adaptive decoding length "
                f"(adaptive = {self.adaptive}, decoding_length = {self.decoding_length})"
            )
        one_of("drafter", self.drafter, DRAFTERS)
        one_of("dtype", self.dtype, DTYPES)
        one_of("device", self.device, DEVICES)
        one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        one_of("flashinfer_mask", self.flashinfer_mask, FLASHINFER_MASKS)
        one_of("instruction_set", self.instruction_set, INSTRUCTION_SETS)
        one_of("compile_model", self.compile_model, COMPILE_MODES)
        number("gpu_memory_utilization", self.gpu_memory_utilization, 0.01)
        if self.gpu_memory_utilization > 1:
            raise ConfigError(f"gpu_memory_utilization = {self.gpu_memory_utilization!r}: must be at most 1")
        wrong_device = {"cpu": "cuda", "flashinfer": "cpu", "triton": "cpu"}.get(self.attention_backend)
        if self.device == wrong_device:
            raise ConfigError(
                f"attention_backend = {self.attention_backend!r}: does not run on device = {self.device!r}"
            )
        if self.batch_invariant and (self.device == "cuda" or self.attention_backend not in ("auto", "cpu")):
            raise ConfigError(
                f"batch_invariant = True: must be with attention_backend 'cpu', not {self.attention_backend!r} "
                f"(device = {self.device!r})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs + 1:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens}: must be at least max_num_seqs + 1 = "
                f"{self.max_num_seqs + 1}, so that prefill goes on while every sequence decodes"
            )
        self._check_drafts_fit()

    def _check_drafts_fit(self) -> None:
        """Of what was asked for, that is: a default is cut to what a step holds."""
        draft = self.draft
        copied = draft.reference_copy_length or 0
        window, guesses, levels = draft.jacobi_window or 0, draft.jacobi_guesses or 0, draft.jacobi_ngram - 1
        self.check_fits("decoding_length", self.decoding_length, self.decoding_length or 0)
        self.check_fits("reference_copy_length", copied, copied)
        self.check_fits("jacobi_guesses", guesses, guesses * levels)
        self.check_fits("jacobi_window", window, (window + (guesses or window)) * levels if window else 0)

    def check_fits(self, name: str, value: object, num_rows: int) -> None:
        """Raises ConfigError where what the option asks for is more draft tokens than a step holds."""
        most = self.max_num_batched_tokens - 1
        if num_rows > most:
            raise ConfigError(
                f"{name} = {value}: must be for at most {most} draft tokens, which is one less than "
                f"max_num_batched_tokens, but is for {num_rows}"
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how the server listens.

    has_engine_process: the engine runs in a process of its own (docs/performance.md, "The engine's own process").
    stall_timeout_s: a step that takes longer than that makes health say NOT_SERVING, until it ends.
    unread_timeout_s, max_unread_deltas: how long a message waits for its client to take it, and how many deltas behind
    it, before the call is ended with RESOURCE_EXHAUSTED; all streams together may leave 64 times as many unread.
    log_level, log_format: from which level on the process logs, and how each line looks.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    max_receive_bytes: int = 16 * MiB
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 600.0
    unread_timeout_s: float = 60.0
    max_unread_deltas: int = 1024
    has_reflection: bool = True
    metrics_port: int | None = None
    has_engine_process: bool = True
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        host = path_text("host", self.host)
        if host.startswith("[") and host.endswith("]"):  # as IPv6 addresses are written in front of a port
            object.__setattr__(self, "host", host[1:-1])
        for name, port in (("port", self.port), ("metrics_port", self.metrics_port)):
            if name == "metrics_port" and port is None:
                continue
            if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
                raise ConfigError(f"{name} = {port!r}: must be an integer in 0..65535 (0 picks a free one)")
        if self.port and self.metrics_port == self.port:
            raise ConfigError(f"metrics_port = {self.metrics_port}: must be another one than port")
        at_least("max_receive_bytes", self.max_receive_bytes, 1024, MAX_RECEIVE_BYTES)
        for name in ("has_reflection", "has_engine_process"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be True or False")
        number("drain_timeout_s", self.drain_timeout_s, 0.0)
        number("stall_timeout_s", self.stall_timeout_s, 1.0)
        number("unread_timeout_s", self.unread_timeout_s, 0.1)
        at_least("max_unread_deltas", self.max_unread_deltas, 1)
        one_of("log_level", self.log_level, LOG_LEVELS)
        one_of("log_format", self.log_format, LOG_FORMATS)


def default_cache_dir() -> str:
    """The user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "batchserve")


def is_scope_name(name: object) -> bool:
    """Whether it can name a draft scope: scopes are saved under their names, as UTF-8."""
    return isinstance(name, str) and 0 < len(name) <= MAX_SCOPE_CHARS and is_utf8(name)


def is_utf8(text: str) -> bool:
    """Whether it can be sent or written: what the system gives for other bytes has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
