"""The fields that all generation requests over HTTP have in common, as the engine's types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchserve.errors import InvalidRequestError
from batchserve.sampling_params import GRAMMAR_FIELDS
from batchserve.types import GenerateCall, Prompt, SamplingParams, SpeculationParams, check_priority

if TYPE_CHECKING:
    from batchserve.server.http.fields import Fields

# What changes no token of an answer.
IGNORED = ("user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
# Fields with the name and the meaning that they have in SamplingParams.
SAMPLING = (
    *("temperature", "top_p", "min_p", "seed", "n", "ignore_eos", "min_tokens", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "no_repeat_ngram_size", "include_stop_str_in_output"),
    *("skip_special_tokens", "prompt_logprobs"),
)
SAMPLING_LISTS = ("stop_token_ids", "bad_words", "allowed_token_ids")
SPECULATION = ("is_enabled", "max_draft_tokens", "drafter", "branch_length", "tpot_target_ms")
STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "ebnf",
    "choice": "choice",
}
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "ebnf", "guided_choice": "choice"}


@dataclass(slots=True)
class Asked:
    """What a request asks for, but its prompt.

    sampling: arguments of SamplingParams. names: those arguments that are called otherwise in the request's body.
    predicted: the text that the answer is expected to have much in common with (OpenAI's predicted outputs).
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    model: str = ""
    deadline_s: float | None = None
    priority: int = 0
    is_streaming: bool = False
    gives_usage: bool = False
    gives_usage_always: bool = False
    gives_token_ids: bool = False
    names_token_ids: bool = False
    predicted: str = ""

    @property
    def grammar(self) -> str | None:
        """The argument of SamplingParams that the answer has to follow."""
        return next((name for name in GRAMMAR_FIELDS if name in self.sampling), None)

    def call(self, prompt: Prompt, suffix: str = "") -> GenerateCall:
        """Returns what the engine is asked. Raises InvalidRequestError. suffix: of the request id."""
        return GenerateCall(
            prompt,
            SamplingParams(**self.sampling),
            self.request_id + suffix,
            self.model,
            SpeculationParams(**self.speculation),
            self.deadline_s,
            self.priority,
        )


def read_common(fields: Fields) -> Asked:
    """Reads what all kinds of requests have. Raises InvalidRequestError."""
    asked = Asked(
        sampling=fields.given(*SAMPLING) | fields.given_items(*SAMPLING_LISTS) | _stop(fields),
        model=fields.text("model") or "",
        request_id=fields.text("request_id") or "",
        deadline_s=fields.raw("deadline_s"),
        is_streaming=fields.flag("stream"),
        gives_token_ids=fields.flag("return_token_ids"),
        names_token_ids=fields.flag("return_tokens_as_token_ids"),
    )
    fields.ignored(*IGNORED)
    fields.only("store", False)
    if (priority := fields.raw("priority")) is not None:
        # As in vLLM, a lower one comes first; the engine's own order is the other way round.
        try:
            asked.priority = -check_priority(priority)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, fields.path("priority"), priority, error.bound) from None
    if (top_k := fields.raw("top_k")) is not None:
        asked.sampling["top_k"] = 0 if top_k == -1 and not isinstance(top_k, bool) else top_k
    if (biases := fields.mapping("logit_bias")) is not None:
        asked.sampling["logit_bias"] = {_token_id(fields, name): bias for name, bias in biases.items()}
    if asked.is_streaming and "prompt_logprobs" in asked.sampling:
        bound = "absent, as stream is true; completions have those of an echoed prompt"
        raise fields.refused("prompt_logprobs", asked.sampling["prompt_logprobs"], bound)
    _read_stream_options(fields, asked)
    _read_grammar(fields, asked)
    _read_speculation(fields, asked)
    return asked


def read_max_tokens(fields: Fields, asked: Asked, *names: str) -> None:
    """Reads the most tokens of an answer, which may have several names."""
    given = fields.given(*names)
    if len(set(map(repr, given.values()))) > 1:
        first, second = [*given][:2]
        raise fields.refused(second, given[second], f"absent, or the same as {first}")
    for name, value in given.items():
        asked.sampling["max_tokens"], asked.names["max_tokens"] = value, name


def read_prediction(fields: Fields, asked: Asked) -> None:
    """Reads OpenAI's predicted output: the drafters may quote from it."""
    prediction = fields.nested("prediction")
    if prediction is None:
        return
    prediction.one_of("type", ("content",))
    content = prediction.raw("content")
    prediction.end()
    if isinstance(content, list):
        asked.predicted = "".join(_text_of(prediction, part) for part in content)
    elif isinstance(content, str):
        asked.predicted = content
    else:
        raise prediction.refused("content", content, "a text, or a list of parts of type text")


def _text_of(prediction: Fields, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if part != {"type": "text", "text": text} or not isinstance(text, str):
        raise prediction.refused("content", part, "a text, or a list of parts of type text, which have a text each")
    return text


def read_response_format(fields: Fields, asked: Asked, name: str = "response_format") -> bool:
    """Reads what form the answer has to have. Returns whether it is other than plain text."""
    wanted = fields.nested(name)
    if wanted is None:
        return False
    kind = wanted.one_of("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise wanted.refused("type", None, "one of text, json_object, json_schema")
    if kind == "json_schema":
        # The Responses API has the schema beside its type, Chat Completions in an object of its own.
        holder = wanted if name == "format" else wanted.nested("json_schema")
        if holder is None:
            raise wanted.refused("json_schema", None, "an object with a schema")
        holder.ignored("name", "description", "strict")
        schema = holder.mapping("schema")
        if schema is None:
            raise holder.refused("schema", None, "a JSON schema")
        holder.end()
        _set_grammar(fields, asked, "json_schema", schema, holder.path("schema"))
    elif kind == "json_object":
        _set_grammar(fields, asked, "json_object", True, wanted.path("type"))
    wanted.end()
    return kind != "text"


def _read_stream_options(fields: Fields, asked: Asked) -> None:
    options = fields.nested("stream_options")
    if options is None:
        return
    if not asked.is_streaming:
        raise fields.refused("stream_options", options.given("include_usage"), "absent, as stream is not true")
    asked.gives_usage_always = options.flag("continuous_usage_stats")
    asked.gives_usage = options.flag("include_usage") or asked.gives_usage_always
    options.flag("include_obfuscation")  # padding against those who watch the network, who see no more than its size
    options.end()


def _read_grammar(fields: Fields, asked: Asked) -> None:
    """Reads vLLM's names for what an answer has to follow."""
    for name, ours in GUIDED.items():
        if (value := fields.raw(name)) is not None:
            _set_grammar(fields, asked, ours, value, name)
    structured = fields.nested("structured_outputs")
    if structured is not None:
        for name, ours in STRUCTURED.items():
            if (value := structured.raw(name)) is not None and value is not False:
                _set_grammar(fields, asked, ours, value, structured.path(name))
        structured.end()


def _set_grammar(fields: Fields, asked: Asked, ours: str, value: Any, path: str) -> None:
    if ours in asked.sampling:
        bound = f"absent, as {asked.names[ours]} is set"
        raise InvalidRequestError("CONFLICTING_GRAMMARS", path, value, bound)
    if ours == "choice" and (not isinstance(value, list) or not value):
        raise InvalidRequestError("INVALID_CHOICE", path, value, "a list of at least one text")
    asked.sampling[ours], asked.names[ours] = value, path


def _read_speculation(fields: Fields, asked: Asked) -> None:
    """Reads the fields that are our own: where drafts come from."""
    asked.speculation = fields.given_items("references") | fields.given("draft_scope")
    if (salt := fields.text("cache_salt")) is not None:  # vLLM's: K/V is shared among requests with the same one
        if "draft_scope" in asked.speculation:
            raise fields.refused("cache_salt", salt, "absent, as draft_scope is set")
        asked.speculation["draft_scope"], asked.names["draft_scope"] = salt, "cache_salt"
    if (options := fields.nested("speculation")) is not None:
        asked.speculation |= options.given(*SPECULATION)
        asked.names |= {name: options.path(name) for name in SPECULATION}
        options.end()


def _stop(fields: Fields) -> dict[str, Any]:
    found = fields.raw("stop")
    if found is not None and not isinstance(found, str | list):
        raise fields.refused("stop", found, "a string, or a list of strings")
    return {} if found is None else {"stop": found}


def _token_id(fields: Fields, name: str) -> int:
    try:
        if name.isascii() and name.lstrip("-").isdecimal():
            return int(name)
        raise ValueError
    except ValueError:
        raise InvalidRequestError("INVALID_LOGIT_BIAS", fields.path("logit_bias"), name, "token ids as keys") from None
