"""Configuration: frozen, validated once at the edge, then passed down. No option is read from the environment."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from batchserve.errors import ConfigError
from batchserve.native.instruction_set import AUTO, INSTRUCTION_SETS
from batchserve.option_checks import (
    MAX_BYTES,
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
GENERATION_CONFIGS = ("auto", "off")
LOGPROBS_MODES = RAW_LOGPROBS, PROCESSED_LOGPROBS = ("raw_logprobs", "processed_logprobs")
JSON_WHITESPACES = COMPACT_JSON, ANY_JSON = ("compact", "any")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "cpu", "flashinfer", "triton", "torch")
FLASHINFER_MASKS = ("custom", "tree", "front")
COMPILE_MODES = ("auto", "off", "layers", "whole")
MIN_TARGET_MS = 0.001
ITL_INFLATION = 1.25  # how far others' drafts may stretch a running request's steps
# The same for prompts, which therefore get half of the time. With less, long prompts arrive faster than they are
# computed (docs/adaptive.md, "Prompts beside running requests").
PROMPT_INFLATION = 2.0
MiB = 1 << 20
MAX_BRANCH_LENGTH = 4096  # tokens; the trie walks as many windows for each token that it is given
MAX_RANKS, MIN_RANK_TIMEOUT_S = 64, 0.1
MAX_MIN_MATCH = 32  # tokens; no drafter compares more of a context (draft/text_index.py)
MAX_THREADS = 4 * (os.cpu_count() or 1)  # OpenMP ends the process if it cannot start as many as asked for


class UnchosenScope(str):
    """A draft scope name that is only a default. It gives way to PRIVATE_SCOPE where it must not be shared."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Options of the drafters. None means the drafter's own default.

    trie_*: Lookahead (KDD'24), sections 4.2 and 4.3. A capacity of None is 16 x the decoding length (table 4).
    reference_*: LLMA, section 2.2: n tokens that must match, k that are copied.
    jacobi_*: Lookahead Decoding, section 3: W, N and G. If None, W depends on the model's size, and G is W.
    max_scope_bytes, max_draft_bytes: the most memory for the shared texts of one scope, and of all scopes of all
    drafters. The default drafter gets twice the share of another one.
    draft_cache: a file of the default drafter's shared texts. It is loaded at start, which then waits for the drafter
    to be ready, and saved by AsyncEngine.shutdown.
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
            at_least(name, getattr(self, name), 1, MAX_BYTES)
        if self.reference_min_match > MAX_MIN_MATCH:
            raise ConfigError(f"reference_min_match = {self.reference_min_match}: must be at most {MAX_MIN_MATCH}")
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
        """Returns the path of draft_cache, or None if it is not set. Raises ConfigError if nothing could be saved."""
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
    """All options of the engine. `batchserve serve --help` explains each of them.

    model: a local folder, a hub id, or "bundled".
    device: where the model runs. auto: a CUDA device if there is one.
    attention_backend: auto: on a CPU its own, on a GPU the first of triton, flashinfer and torch that can serve the
    model. torch is slow: it is the reference for the others, and also runs the GPU path on a CPU.
    flashinfer_mask: how FlashInfer receives trees: by its own custom mask, or by our variant of its kernel, which can
    have a step's own rows in front of their context (not measured yet).
    kv_cache_memory: bytes for K/V. None: a quarter of the memory that is free at start, at most twice what all
    sequences at full length take; on a GPU, what gpu_memory_utilization (a share of the device's memory) leaves after
    weights and the largest step. Without prefix_cache, no more is taken than all sequences can use.
    enforce_eager: no CUDA graphs. max_graph_rows: steps with more rows have none.
    compile_model: whether torch.compile makes the model faster, as "layers" (one program for all layers of a kind) or
    "whole" (one in all, which takes longer). auto: layers, if steps are CUDA graphs and the model can be compiled.
    custom_kernels: on a CPU, run steps as one native program if the model can have one. On a GPU with CUDA graphs, use
    our own kernels for norms, and for linears of few rows where they are measured to be faster.
    kernel_overlap: kernels start while the ones before them finish, on GPUs that can do so (Hopper and later).
    max_model_len: None: the model's own limit, or what the K/V memory holds if that is less.
    max_num_batched_tokens: rows of one step: prefill chunks, drafts and plain rows together.
    prefill_chunk_size: the most prompt tokens of one request in one step. None: only the step's limit applies.
    drafter: the drafter of requests that name none. "none" still lets requests choose another.
    adaptive: choose in every step which draft tokens are worth their rows. False: run all draft tokens.
    decoding_length: a fixed number of draft tokens per request and step, not adaptive. None: as many as pay, or the
    drafter's own number if `adaptive` is False. 0: no drafts for any request.
    max_itl_inflation: drafts may make steps of running requests up to this many times as long, or longer if every
    request gains or breaks even (docs/adaptive.md). All prompts together may do the same to steps with drafts. None:
    ITL_INFLATION for drafts, and for prompts PROMPT_INFLATION, or only max_itl_ms if that is set.
    max_itl_ms: the longest step that prompts and drafts may cause for running requests. None: only max_itl_inflation
    applies. Neither option limits drafts of a fixed length.
    max_priority_wait_s: a request that arrived longer ago than this, waiting or running, precedes all later ones
    whatever their priority.
    tpot_target_ms: favour requests while their time per output token is above this. Requests may set their own.
    prefix_cache: prompts of the same scope that begin alike share K/V, also that of ended requests, which is kept while
    memory is free.
    tokenizer_end_tokens: answers also end at the tokenizer's end-of-sequence token and at the token that ends a turn in
    the chat template, if the model's own configuration does not name them.
    cache_dir: where measured step times and native programs are kept.
    max_kept_bytes: the most bytes of native programs with their weights in cache_dir, from which later starts are fast;
    those used least recently are deleted first. 0: none are kept or used.
    share_weights: map a kept program's weights, so that the engines of a machine share their memory, in pages of 4 KB.
    False: each engine reads them into memory of its own, in huge pages, which makes steps some per cent faster.
    branch_length: the most draft tokens on one path of the draft tree. None: the drafter's own.
    default_draft_scope: the scope of requests that name none; requests draft from the answers of their scope. "request"
    shares nothing, and is the default of a server on an address that is not loopback.
    wait_for_drafter: serve only when drafts are ready (the very first start compiles them). False: serve without.
    generation_config: auto: requests that leave a sampling parameter out take the model's generation_config. off: they
    are greedy, without penalties.
    logprobs_mode: log probabilities of tokens are the model's (raw_logprobs), or those that tokens were drawn by, after
    penalties, bans, temperature, min_p, top_k and top_p (processed_logprobs).
    json_whitespace: where a request asks for JSON, its white space is that of Python's json.dumps (compact), which
    leaves more tokens that are forced; or any.
    num_threads: compute threads on a CPU, at most MAX_THREADS. None: what measures fastest at start. With a GPU, the
    threads that make drafts.
    lookahead_parallel_size: processes with the whole model that each verify some branches of every draft tree.
    rank_timeout_s: one of these that says nothing for longer than this, in a step, ends the engine.
    instruction_set: the instructions that compiled kernels use on a CPU. It has to be chosen before they are loaded
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
    lookahead_parallel_size: int = 1
    rank_timeout_s: float = 60.0
    instruction_set: str = AUTO
    batch_invariant: bool = False
    trust_remote_code: bool = False
    served_model_name: str | None = None
    prefix_cache: bool = True
    tokenizer_end_tokens: bool = True
    cache_dir: str = field(default_factory=lambda: default_cache_dir())
    max_kept_bytes: int = 32 << 30
    share_weights: bool = False
    logprobs_mode: str = RAW_LOGPROBS
    json_whitespace: str = COMPACT_JSON
    generation_config: str = "auto"

    @property
    def has_hub_model(self) -> bool:
        """True if `model` is a hub id."""
        return self.model != "bundled" and not is_model_path(self.model)

    @property
    def is_adaptive(self) -> bool:
        """True if each step chooses the drafts that are worth their rows."""
        return self.adaptive and self.decoding_length is None

    @property
    def draft_inflation(self) -> float:
        """The factor by which drafts may stretch a step."""
        return ITL_INFLATION if self.max_itl_inflation is None else self.max_itl_inflation

    @property
    def prompt_inflation(self) -> float:
        """The factor by which all prompts may stretch a step. Unlimited if only max_itl_ms is set, to use all of it."""
        if self.max_itl_inflation is not None:
            return float(self.max_itl_inflation)  # an int would be compiled separately
        return PROMPT_INFLATION if self.max_itl_ms is None else math.inf

    @property
    def max_step_s(self) -> float:
        """The longest step that prompts and drafts may cause for running requests."""
        return math.inf if self.max_itl_ms is None else self.max_itl_ms / 1e3

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_graph_rows"):
            at_least(name, getattr(self, name), 1)
        if self.branch_length is not None:
            at_least("branch_length", self.branch_length, 1, MAX_BRANCH_LENGTH)
        for name in ("prefill_chunk_size", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.kv_cache_memory is not None:
            at_least("kv_cache_memory", self.kv_cache_memory, 1, MAX_BYTES)
        at_least("max_kept_bytes", self.max_kept_bytes, 0, MAX_BYTES)
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
        flags: tuple[str, ...] = (
            "adaptive",
            "wait_for_drafter",
            "batch_invariant",
            "trust_remote_code",
            "prefix_cache",
        )
        flags += ("tokenizer_end_tokens", "enforce_eager", "custom_kernels", "kernel_overlap", "share_weights")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be True or False")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len = 1: must be at least 2, a token of the prompt and one of the answer")
        if self.max_itl_inflation is not None:
            number("max_itl_inflation", self.max_itl_inflation, 1.0)
        number("max_priority_wait_s", self.max_priority_wait_s, 0.0)
        at_least("lookahead_parallel_size", self.lookahead_parallel_size, 1, MAX_RANKS)
        number("rank_timeout_s", self.rank_timeout_s, MIN_RANK_TIMEOUT_S)
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
        one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        one_of("json_whitespace", self.json_whitespace, JSON_WHITESPACES)
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
        """Checks only options that were given. A default is cut to what a step holds."""
        draft = self.draft
        copied = draft.reference_copy_length or 0
        window, guesses, levels = draft.jacobi_window or 0, draft.jacobi_guesses or 0, draft.jacobi_ngram - 1
        self.check_fits("decoding_length", self.decoding_length, self.decoding_length or 0)
        self.check_fits("reference_copy_length", copied, copied)
        self.check_fits("jacobi_guesses", guesses, guesses * levels)
        self.check_fits("jacobi_window", window, (window + (guesses or window)) * levels if window else 0)

    def check_fits(self, name: str, value: object, num_rows: int) -> None:
        """Raises ConfigError if the option asks for more draft tokens than a step holds."""
        most = self.max_num_batched_tokens - 1
        if num_rows > most:
            raise ConfigError(
                f"{name} = {value}: must be for at most {most} draft tokens, which is one less than "
                f"max_num_batched_tokens, but is for {num_rows}"
            )


def default_cache_dir() -> str:
    """Returns the user's folder for files that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "batchserve")


def is_scope_name(name: object) -> bool:
    """True if it can name a draft scope. Scopes are saved under their names, as UTF-8."""
    return isinstance(name, str) and 0 < len(name) <= MAX_SCOPE_CHARS and is_utf8(name)


def is_utf8(text: str) -> bool:
    """True if the text can be encoded. Other bytes that the system passes become lone surrogates, which cannot be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
