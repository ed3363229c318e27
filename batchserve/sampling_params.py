"""How the tokens of an answer are chosen, as a client asks for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from batchserve.config import is_utf8
from batchserve.errors import InvalidRequestError, invalid
from batchserve.field_checks import check_bool, normalize_number, plain_number, tuple_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_BYTES = 64 << 10  # of a schema, a regular expression or an EBNF
MAX_CHOICES = 256
MAX_CHOICE_CHARS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_SAMPLES = 64
MAX_SEED = 2**64 - 1
MAX_NGRAM_SIZE = 2**31 - 1
GRAMMAR_FIELDS = ("json_schema", "json_object", "regex", "ebnf", "choice")
FLOAT32_0_01 = 0.0099999997  # 0.01 as it comes over the wire


class _Range(NamedTuple):
    """Where a number may lie. bound: for the message. is_open: `least` itself is not allowed."""

    kind: type[int] | type[float]
    bound: str
    least: float
    most: float = math.inf
    is_open: bool = False


_RANGES = {
    "temperature": _Range(float, "finite and >= 0", 0.0),
    "top_p": _Range(float, "in (0, 1]", 0.0, 1.0, is_open=True),
    "top_k": _Range(int, ">= 0 (0 is off)", 0),
    "min_p": _Range(float, "in [0, 1] (0 is off)", 0.0, 1.0),
    "presence_penalty": _Range(float, "in [-2, 2] (0 is off)", -2.0, 2.0),
    "frequency_penalty": _Range(float, "in [-2, 2] (0 is off)", -2.0, 2.0),
    "repetition_penalty": _Range(float, "in [0.01, 100] (1 is off)", FLOAT32_0_01, 100.0),
    "no_repeat_ngram_size": _Range(int, f"in 0..{MAX_NGRAM_SIZE} (0 is off)", 0, MAX_NGRAM_SIZE),
    "seed": _Range(int, f"in 0..{MAX_SEED}", 0, MAX_SEED),
    "max_tokens": _Range(int, ">= 1", 1),
    "min_tokens": _Range(int, ">= 0, and at most max_tokens", 0),
    "n": _Range(int, f"in 1..{MAX_SAMPLES}", 1, MAX_SAMPLES),
    "logprobs": _Range(int, f"in 0..{MAX_LOGPROBS}", 0, MAX_LOGPROBS),
    "prompt_logprobs": _Range(int, f"in 0..{MAX_LOGPROBS}", 0, MAX_LOGPROBS),
}


class LogitsProcessor(Protocol):
    """A caller's own change of logits, in Python."""

    def __call__(self, token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        """Returns the logits that the next token is chosen from, float32 [vocab_size]; may change those given.

        token_ids: the request's prompt and answer so far. Called for each row that a walk down a draft tree reaches,
        drafts on the way to it included, and again for the same tokens after drafts that were not accepted: the result
        must depend on nothing but the arguments. What it raises ends the request.
        """


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. Names and meanings are those of vLLM and of the OpenAI API.

    `None` takes the model's default: its generation_config if that samples, otherwise greedy. `max_tokens=None` goes on
    to the end of the context, and `seed=None` draws a seed. Nothing is clamped: a value out of bounds raises
    InvalidRequestError when the object is made. Bounds that need the model (top_k and token ids against the vocabulary,
    lengths against the context) are checked when the request is added.

    Of each row of logits, allowed_token_ids (empty: all) are kept; the last token of a bad word, the tokens that would
    repeat a sequence of no_repeat_ngram_size tokens, and the tokens that end an answer of fewer than min_tokens are
    banned; logit_bias is added; then come the penalties: repetition_penalty divides positive logits and multiplies
    negative ones, of tokens of prompt and answer; frequency_penalty is subtracted for each time that a token is in the
    answer, presence_penalty once. Then temperature, min_p, top_k and top_p, in this order.

    logprobs: give the log probability of each token of the answer, and as many of the likeliest tokens at its place;
    those of the model, or after all of the above (the engine's option logprobs_mode). n: so many samples of one prompt,
    which is computed once; the seed of each is one more than that of the one before.
    prompt_logprobs: the same of each token of the prompt but the first; then nothing is taken from the prefix cache.
    json_schema (text or a mapping), json_object, regex, ebnf (llama.cpp's GBNF or llguidance's Lark) or choice: the
    answer follows it; at most one of them (docs/sampling.md, "Structured output").
    echo: the text begins with that of the prompt's tokens. logits_processors: called one after the other, before all
    else is done to logits; only in the process of the engine, and slow.
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
    min_p: float | None = None  # of the likeliest token's probability; 0 is off
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None  # 1 is off
    no_repeat_ngram_size: int | None = None  # 0 is off
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None  # None is none; 0: only those of the answer's tokens
    include_stop_str_in_output: bool = False
    n: int = 1
    prompt_logprobs: int | None = None  # as logprobs; always the model's
    echo: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()
    json_schema: str | Mapping[str, Any] | None = None  # kept as text
    json_object: bool = False
    regex: str | None = None
    ebnf: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in _RANGES.items():
            normalize_number(self, name, known.kind)
            value = getattr(self, name)
            if value is None:
                continue
            is_low = value <= known.least if known.is_open else value < known.least
            if is_low or value > known.most or (isinstance(value, float) and not math.isfinite(value)):
                raise InvalidRequestError(invalid(name), name, value, known.bound)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo", "json_object"):
            check_bool(invalid(name), name, getattr(self, name))
        for name in ("stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, tuple_of(invalid(name), name, getattr(self, name), int))
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            raise InvalidRequestError(
                "TOO_MANY_ALLOWED_TOKEN_IDS",
                "allowed_token_ids",
                len(self.allowed_token_ids),
                f"at most {MAX_ALLOWED_TOKEN_IDS}",
            )
        if self.n is None:
            raise InvalidRequestError("INVALID_N", "n", self.n, _RANGES["n"].bound)
        if self.min_tokens is None or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise InvalidRequestError(
                "INVALID_MIN_TOKENS", "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        self._set_texts("stop", "STOP_STRING", MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        self._set_texts("bad_words", "BAD_WORD", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        self._set_texts("choice", "CHOICE", MAX_CHOICES, MAX_CHOICE_CHARS)
        self._set_grammar()
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))

    @property
    def has_grammar(self) -> bool:
        """Whether the answer has to follow a schema, an expression, a grammar or a choice."""
        return any(getattr(self, name) not in (None, False, ()) for name in GRAMMAR_FIELDS)

    def _set_grammar(self) -> None:
        if isinstance(self.json_schema, Mapping):
            try:
                text = json.dumps(self.json_schema, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                bound = f"what JSON can hold ({error})"
                raise InvalidRequestError("INVALID_JSON_SCHEMA", "json_schema", self.json_schema, bound) from None
            object.__setattr__(self, "json_schema", text)
        for name in ("json_schema", "regex", "ebnf"):
            text = getattr(self, name)
            if text is None:
                continue
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(invalid(name), name, text, "a text that is not empty")
            if not is_utf8(text):
                raise InvalidRequestError(invalid(name), name, text, "text that can be encoded as UTF-8")
            if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
                raise InvalidRequestError(invalid(name), name, f"{size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) not in (None, False, ())]
        if len(given) > 1:
            bound = f"unset, as {given[0]} is set: at most one of {', '.join(GRAMMAR_FIELDS)}"
            raise InvalidRequestError("CONFLICTING_GRAMMARS", given[1], getattr(self, given[1]), bound)

    def _set_texts(self, name: str, reason: str, most: int, most_chars: int) -> None:
        """Makes a field a tuple of texts that are not empty and can be encoded; a single text may be given alone."""
        given = getattr(self, name)
        texts = tuple_of(f"INVALID_{reason}S", name, (given,) if isinstance(given, str) else given, str)
        object.__setattr__(self, name, texts)
        if len(texts) > most:
            raise InvalidRequestError(f"TOO_MANY_{reason}S", name, len(texts), f"at most {most} strings")
        for i, text in enumerate(texts):
            if not 0 < len(text) <= most_chars:
                raise InvalidRequestError(f"INVALID_{reason}", f"{name}[{i}]", text, f"1..{most_chars} characters")
            if not is_utf8(text):
                raise InvalidRequestError(
                    f"INVALID_{reason}", f"{name}[{i}]", text, "text that can be encoded as UTF-8"
                )


def _processors(given: object) -> tuple[LogitsProcessor, ...]:
    """Returns callables; a single one may be given alone."""
    if given is None or callable(given):
        return () if given is None else (given,)
    try:
        processors: tuple[LogitsProcessor, ...] = tuple(given)  # type: ignore[arg-type]
    except TypeError:
        bound = "a list of callables"
        raise InvalidRequestError("INVALID_LOGITS_PROCESSORS", "logits_processors", given, bound) from None
    for i, processor in enumerate(processors):
        if not callable(processor):
            name = f"logits_processors[{i}]"
            raise InvalidRequestError("INVALID_LOGITS_PROCESSORS", name, processor, "callable")
    return processors


def _biases(given: object) -> Mapping[int, float]:
    """Returns each token id's bias. Keys may be decimal texts, as in JSON."""
    if given is None:
        return {}
    pairs = given.items() if isinstance(given, Mapping) else given
    bound = "a mapping of token ids to numbers"
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise InvalidRequestError("INVALID_LOGIT_BIAS", "logit_bias", given, bound)
    try:
        each = [(_token_id(token), plain_number(value, float)) for token, value in pairs]
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError("INVALID_LOGIT_BIAS", "logit_bias", given, bound) from None
    found = dict(each)
    if len(found) < len(each):
        raise InvalidRequestError("INVALID_LOGIT_BIAS", "logit_bias", given, "one bias for each token id")
    if len(found) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            "TOO_MANY_LOGIT_BIASES", "logit_bias", len(found), f"at most {MAX_LOGIT_BIASES} token ids"
        )
    for token, value in found.items():
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidRequestError(
                "INVALID_LOGIT_BIAS", "logit_bias", f"{value} for token {token}", f"in [-{MAX_BIAS:g}, {MAX_BIAS:g}]"
            )
    return found


def _token_id(key: object) -> int:
    return int(key) if isinstance(key, str) and key.isdecimal() else int(plain_number(key, int))
