"""The types that cross the engine's boundary: sampling parameters in, outputs out."""

from __future__ import annotations

import enum
import math
import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from batchserve.config import DRAFTERS, SCOPE_NAME_BOUND, is_scope_name
from batchserve.conversation import Chat as Chat
from batchserve.errors import InvalidRequestError, invalid
from batchserve.field_checks import check_bool, normalize_number, tuple_of
from batchserve.sampling_params import SamplingParams as SamplingParams

Prompt = str | Sequence[int] | Chat
MAX_REQUEST_ID_CHARS = 256
MAX_PRIORITY = 1000
TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TENANT_BOUND = "1 to 64 letters, digits, dots, dashes and underscores"
MAX_REFERENCES = 64
# For all references of a request together: as long as the longest contexts in common use. It limits what one request
# makes the server tokenise, keep and index: about a second, and some megabytes.
MAX_REFERENCE_TOKENS = 131_072
MAX_REFERENCE_CHARS = 8 * MAX_REFERENCE_TOKENS


def check_priority(value: object) -> int:
    """Returns a request's priority as a plain integer. Raises InvalidRequestError."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or abs(int(value)) > MAX_PRIORITY:  # type: ignore[call-overload]
        bound = f"an integer in -{MAX_PRIORITY}..{MAX_PRIORITY}"
        raise InvalidRequestError("INVALID_PRIORITY", "priority", value, bound)
    return int(value)  # type: ignore[call-overload,no-any-return]


def check_tenant(value: object) -> str:
    """Returns a tenant's name, "" for none. Raises InvalidRequestError."""
    if not isinstance(value, str) or (value and not TENANT_NAME.fullmatch(value)):
        raise InvalidRequestError("INVALID_TENANT", "tenant", value, TENANT_BOUND)
    return str.__str__(value)


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"  # the EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context


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
        check_bool("INVALID_MODE", "is_enabled", self.is_enabled)
        normalize_number(self, "tpot_target_ms", float)
        target = self.tpot_target_ms
        if target is not None and not (math.isfinite(target) and target > 0):
            raise InvalidRequestError(
                "INVALID_TPOT_TARGET_MS", "tpot_target_ms", target, "finite and > 0 (milliseconds)"
            )
        for name, least in (("max_draft_tokens", 0), ("branch_length", 1)):
            normalize_number(self, name, int)
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
    tenant: str


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation, as a client asks for it. Checked when it is submitted.

    prompt: text, token ids or a chat. params, speculation: None is the defaults. request_id: must not be in flight;
    empty draws one. model: empty, or the served model's name. deadline_s: from now. priority: -1000..1000, higher
    comes first. tenant: whose callers share drafts and K/V; empty: those of calls without one.
    """

    prompt: Prompt
    params: SamplingParams | None = None
    request_id: str = ""
    model: str = ""
    speculation: SpeculationParams | None = None
    deadline_s: float | None = None
    priority: int = 0
    tenant: str = ""

    @property
    def num_samples(self) -> int:
        return 1 if self.params is None else self.params.n


def _references(values: object) -> tuple[str | tuple[int, ...], ...]:
    if values is None or isinstance(values, str):  # a single text may be given alone
        return () if values is None else (values,)
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InvalidRequestError("INVALID_REFERENCES", "references", values, "a list of texts or token ids")
    try:
        items = tuple(values)
    except TypeError:  # see tuple_of
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
    return item if isinstance(item, str) else tuple_of("INVALID_TOKEN_IDS", f"references[{index}]", item, int)


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
class TokenLogprobs:
    """The log probability of a token (natural logarithm) and its rank, 1 for the likeliest; and the likeliest tokens at
    its place, as (token id, log probability), descending. text_offset: of a token of an answer, where in its text (the
    prompt's included, if that is echoed) the token's begins, in characters.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A whole answer. `token_ids` excludes the EOS or the matched stop token.

    stop_reason: the stop string or stop token that ended it; None for the EOS, or if it did not end so. logprobs: of
    each of token_ids, if the request asked for them. samples: all of them, this one first, if the request asked for
    several. prompt_logprobs: of each token of the prompt, None for the first.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    samples: tuple[RequestOutput, ...] = ()
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted. This is the first event of a stream."""

    request_id: str
    prompt_tokens: int
    prompt_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Delta:
    """The part of an answer that one verified step added. The last one has finish_reason, usage and timing.

    stop_reason and logprobs: as in RequestOutput; logprobs are those of this delta's token_ids. index: of the sample
    that it belongs to, from 0. prompt_logprobs: as in RequestOutput, in the first delta.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    index: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


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
