"""The types that cross the engine's boundary: sampling parameters in, outputs out."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from batchserve.config import DRAFTERS, SCOPE_NAME_BOUND, is_scope_name, is_utf8
from batchserve.errors import InvalidRequestError, invalid

MAX_REQUEST_ID_CHARS = 256
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_SEED = 2**64 - 1
MAX_PRIORITY = 1000
MAX_REFERENCES = 64
# For all references of a request together: as long as the longest contexts in common use. It limits what one request
# makes the server tokenise, keep and index: about a second, and some megabytes.
MAX_REFERENCE_TOKENS = 131_072
MAX_REFERENCE_CHARS = 8 * MAX_REFERENCE_TOKENS


def _normalize_number(holder: object, name: str, kind: Callable[[Any], int | float]) -> None:
    """Converts a field to a plain int or float, also from NumPy. Refuses other types by name, and floats for counts."""
    value = getattr(holder, name)
    if value is None:
        return
    allowed = numbers.Integral if kind is int else numbers.Real
    try:
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise TypeError
        object.__setattr__(holder, name, kind(value))
    except (TypeError, OverflowError) as error:
        bound = "an integer" if kind is int else "a number"
        raise InvalidRequestError(invalid(name), name, value, bound) from error


def check_priority(value: object) -> int:
    """Returns a request's priority as a plain integer. Raises InvalidRequestError."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or abs(int(value)) > MAX_PRIORITY:  # type: ignore[call-overload]
        bound = f"an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}"
        raise InvalidRequestError("INVALID_PRIORITY", "priority", value, bound)
    return int(value)  # type: ignore[call-overload,no-any-return]


def _check_bool(reason: str, field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(reason, field, value, "True or False")


def _tuple_of(reason: str, field: str, values: object, kind: type) -> tuple[Any, ...]:
    """Returns a tuple of plain values, empty for None. NumPy's integers and an enumeration's texts are converted."""
    allowed = numbers.Integral if kind is int else kind
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequestError(reason, field, values, "a list")
    try:
        items = tuple(values)
    except TypeError:  # arrays with zero dimensions claim to be iterable
        raise InvalidRequestError(reason, field, values, "a list") from None
    if set(map(type, items)) <= {kind}:  # ten times faster, and references are long
        return items
    for i, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, allowed):
            bound = "a string" if kind is str else "an integer"
            raise InvalidRequestError(reason, f"{field}[{i}]", item, bound)
    # str() of an enumeration's member would be its name.
    return tuple(map(str.__str__ if kind is str else int, items))


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"  # the EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    `None` takes the model's default: its generation_config if that samples, otherwise greedy. `max_tokens=None` goes on
    to the end of the context, and `seed=None` draws a seed. Nothing is clamped: a value out of bounds raises
    InvalidRequestError when the object is made. Bounds that need the model (top_k and token ids against the vocabulary,
    lengths against the context) are checked when the request is added.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 is off
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of("INVALID_STOP_STRINGS", "stop", stop, str))
        token_ids = _tuple_of("INVALID_STOP_TOKEN_IDS", "stop_token_ids", self.stop_token_ids, int)
        object.__setattr__(self, "stop_token_ids", token_ids)
        for name in ("temperature", "top_p"):
            _normalize_number(self, name, float)
        for name in ("top_k", "seed", "max_tokens"):
            _normalize_number(self, name, int)
        for name in ("ignore_eos", "skip_special_tokens"):
            _check_bool(invalid(name), name, getattr(self, name))
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequestError("INVALID_TEMPERATURE", "temperature", self.temperature, "finite and >= 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidRequestError("INVALID_TOP_P", "top_p", self.top_p, "in (0, 1]")
        if self.top_k is not None and self.top_k < 0:
            raise InvalidRequestError("INVALID_TOP_K", "top_k", self.top_k, ">= 0 (0 is off)")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError("INVALID_SEED", "seed", self.seed, f"in 0..{MAX_SEED}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError("INVALID_MAX_TOKENS", "max_tokens", self.max_tokens, ">= 1")
        self._check_stop_strings()

    def _check_stop_strings(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                "TOO_MANY_STOP_STRINGS", "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings"
            )
        for i, text in enumerate(self.stop):
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    "INVALID_STOP_STRING", f"stop[{i}]", text, f"1..{MAX_STOP_STRING_CHARS} characters"
                )
            if not is_utf8(text):
                raise InvalidRequestError(
                    "INVALID_STOP_STRING", f"stop[{i}]", text, "text that can be encoded as UTF-8"
                )


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Where a request's drafts come from. Nothing here can change an answer.

    `max_draft_tokens` (per step) and `branch_length` (per path of the draft tree) are caps within the server's own
    bounds. While a request's time per output token is above `tpot_target_ms`, its drafts are preferred to those of
    others (adaptive decoding length). None takes the server's target; a request without drafts must leave it None.
    `drafter` is one of config.DRAFTERS; empty is the server's. Requests of one `draft_scope` draft from each other's
    answers, and share the K/V of common prefixes; empty is the server's default, "request" shares nothing.
    `references` are texts, or token ids, that the answer may quote: retrieved documents, earlier turns, cached answers.
    Drafters read them, the model does not. If is_enabled is False, max_draft_tokens is 0 or the drafter is "none", all
    other draft options are checked but not used, except draft_scope, which also decides with whom K/V is shared.
    """

    is_enabled: bool = True
    max_draft_tokens: int | None = None
    drafter: str = ""
    branch_length: int | None = None
    draft_scope: str = ""
    references: tuple[str | tuple[int, ...], ...] = ()
    tpot_target_ms: float | None = None

    def __post_init__(self) -> None:
        _check_bool("INVALID_MODE", "is_enabled", self.is_enabled)
        _normalize_number(self, "tpot_target_ms", float)
        target = self.tpot_target_ms
        if target is not None and not (math.isfinite(target) and target > 0):
            raise InvalidRequestError(
                "INVALID_TPOT_TARGET_MS", "tpot_target_ms", target, "finite and > 0 (milliseconds)"
            )
        for name, least in (("max_draft_tokens", 0), ("branch_length", 1)):
            _normalize_number(self, name, int)
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidRequestError(invalid(name), name, value, f">= {least}")
        if not isinstance(self.drafter, str) or self.drafter not in ("", *DRAFTERS):
            names = ", ".join(DRAFTERS)
            raise InvalidRequestError("UNKNOWN_DRAFTER", "drafter", self.drafter, f"one of {names}")
        if not isinstance(self.draft_scope, str) or (self.draft_scope and not is_scope_name(self.draft_scope)):
            raise InvalidRequestError("INVALID_DRAFT_SCOPE", "draft_scope", self.draft_scope, SCOPE_NAME_BOUND)
        object.__setattr__(self, "references", _references(self.references))


class CallOptions(TypedDict, total=False):
    """The fields of GenerateCall that may be left out, for methods that take them as keyword arguments."""

    request_id: str
    model: str
    speculation: SpeculationParams | None
    deadline_s: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation, as a client asks for it. Checked when it is submitted.

    prompt: text or token ids. params, speculation: None is the defaults. request_id: must not be in flight; empty draws
    one. model: empty, or the served model's name. deadline_s: from now. priority: -1000..1000, higher comes first.
    """

    prompt: str | Sequence[int]
    params: SamplingParams | None = None
    request_id: str = ""
    model: str = ""
    speculation: SpeculationParams | None = None
    deadline_s: float | None = None
    priority: int = 0


def _references(values: object) -> tuple[str | tuple[int, ...], ...]:
    if values is None or isinstance(values, str):  # a single text may be given alone
        return () if values is None else (values,)
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InvalidRequestError("INVALID_REFERENCES", "references", values, "a list of texts or token ids")
    try:
        items = tuple(values)
    except TypeError:  # see _tuple_of
        raise InvalidRequestError("INVALID_REFERENCES", "references", values, "a list of texts or token ids") from None
    if len(items) > MAX_REFERENCES:
        raise InvalidRequestError("TOO_MANY_REFERENCES", "references", len(items), f"at most {MAX_REFERENCES}")
    references = tuple(_reference(i, item) for i, item in enumerate(items))
    for kind, most, unit in ((str, MAX_REFERENCE_CHARS, "characters"), (tuple, MAX_REFERENCE_TOKENS, "tokens")):
        size = sum(len(reference) for reference in references if isinstance(reference, kind))
        if size > most:
            bound = f"at most {most} {unit} together"
            raise InvalidRequestError("REFERENCES_TOO_LONG", "references", f"{size} {unit}", bound)
    return references


def _reference(index: int, item: object) -> str | tuple[int, ...]:
    if item is None:
        raise InvalidRequestError("INVALID_REFERENCES", f"references[{index}]", item, "a text or token ids")
    return item if isinstance(item, str) else _tuple_of("INVALID_TOKEN_IDS", f"references[{index}]", item, int)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since arrival: first scheduled, first token, last token."""

    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def tpot_s(self, completion_tokens: int) -> float | None:
        """Returns the time per output token, from first to last, over the tokens after the first; None without any."""
        return (self.total_s - self.first_token_s) / (completion_tokens - 1) if completion_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A whole answer. `token_ids` excludes the EOS or the matched stop token."""

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted. This is the first event of a stream."""

    request_id: str
    prompt_tokens: int
    prompt_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Delta:
    """What one verified step added to an answer. `finish_reason`, `usage` and `timing` are set on the last delta."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and how it runs.

    decoding_length: the most draft tokens of one request in one step, with the server's own drafter. execution: what
    runs a step, a native program or modules. instruction_set: that of the kernels on a CPU.
    """

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    drafter: str
    decoding_length: int
    has_tokenizer: bool
    execution: str = ""
    instruction_set: str = ""
