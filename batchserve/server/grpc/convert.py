"""Converts requests between messages and domain types (answers: answers.py). Values without an equivalent are refused.

`SamplingParams` checks the bounds that it can check by itself. The engine checks the bounds that need the model.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from batchserve.conversation import MAX_MESSAGES, MAX_TOOLS, Chat
from batchserve.errors import InvalidRequestError, invalid
from batchserve.sampling_params import (
    GRAMMAR_FIELDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from batchserve.server.grpc.chats import from_chat, to_chat
from batchserve.types import (
    MAX_REFERENCE_TOKENS,
    MAX_REFERENCES,
    MAX_REQUEST_ID_CHARS,
    GenerateCall,
    Prompt,
    SpeculationParams,
    check_priority,
)
from batchserve.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message


MAX_STOP_TOKEN_IDS = 1024
MAX_UINT32 = 2**32 - 1
MAX_TAG_BYTES = 5  # of a field's number and wire type

# Fields of the message SamplingParams that are a single value, with the same name in Python.
SAMPLING_VALUES = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence
                        and field.message_type is None)  # fmt: skip
# The most items of repeated fields, by path; checked before any code copies or visits the items.
MAX_ITEMS = {
    "references": ("TOO_MANY_REFERENCES", MAX_REFERENCES),
    "stop.stop_strings": ("TOO_MANY_STOP_STRINGS", MAX_STOP_STRINGS),
    "stop.stop_token_ids": ("TOO_MANY_STOP_TOKEN_IDS", MAX_STOP_TOKEN_IDS),
    "sampling_params.allowed_token_ids": ("TOO_MANY_ALLOWED_TOKEN_IDS", MAX_ALLOWED_TOKEN_IDS),
    "sampling_params.bad_words": ("TOO_MANY_BAD_WORDS", MAX_BAD_WORDS),
    "sampling_params.logit_bias.token_ids": ("TOO_MANY_LOGIT_BIASES", MAX_LOGIT_BIASES),
    "sampling_params.logit_bias.biases": ("TOO_MANY_LOGIT_BIASES", MAX_LOGIT_BIASES),
    "chat.messages": ("TOO_MANY_MESSAGES", MAX_MESSAGES),
    "chat.tools": ("TOO_MANY_TOOLS", MAX_TOOLS),
    "structured_output.choice.texts": ("TOO_MANY_CHOICES", MAX_CHOICES),
}
# Python argument names and their paths in a GenerateRequest, where the two differ.
_PATHS = {
    "deadline_s": "grpc-timeout",
    **{name: f"sampling_params.{name}" for name in (*SAMPLING_VALUES, "allowed_token_ids", "bad_words", "logit_bias")},
    **{name: f"structured_output.{name}" for name in GRAMMAR_FIELDS},
    "choice": "structured_output.choice.texts",
    **{each.name: f"chat.{each.name}" for each in pb.Chat.DESCRIPTOR.fields},
    "min_tokens": "stop.min_tokens",
    "max_tokens": "stop.max_tokens",
    "stop": "stop.stop_strings",
    "stop_token_ids": "stop.stop_token_ids",
    "ignore_eos": "stop.ignore_eos",
    "skip_special_tokens": "output.skip_special_tokens",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "echo": "output.echo",
    "include_stop_str_in_output": "output.include_stop_str_in_output",
    "is_enabled": "speculation.mode",
    "max_draft_tokens": "speculation.max_draft_tokens",
    "drafter": "speculation.drafter",
    "branch_length": "speculation.branch_length",
    "tpot_target_ms": "speculation.tpot_target_ms",
}


def from_generate_request(
    request: pb.GenerateRequest, max_model_len: int, deadline_s: float | None = None
) -> GenerateCall:
    """Converts a request to domain types. Raises InvalidRequestError, to be passed to `with_path`."""
    _check_counts(request, max_model_len)
    return GenerateCall(
        prompt=_prompt(request),
        params=_sampling_params(request),
        request_id=_request_id(request),
        model=request.model,
        speculation=_speculation(request),
        deadline_s=deadline_s,
        priority=check_priority(request.priority),
    )


def _check_counts(request: pb.GenerateRequest, max_model_len: int) -> None:
    """Checks item counts before any code copies or visits the items: 16 MB can hold millions of them."""
    for path, (reason, most) in MAX_ITEMS.items():
        items = functools.reduce(getattr, path.split("."), request)
        if len(items) > most:  # type: ignore[arg-type]
            raise InvalidRequestError(reason, path, len(items), f"at most {most}")  # type: ignore[arg-type]
    check_num_prompt_tokens(len(request.token_ids.ids), max_model_len)
    check_num_reference_tokens(sum(len(reference.token_ids.ids) for reference in request.references))


def check_num_prompt_tokens(num_tokens: int, max_model_len: int) -> None:
    """Raises InvalidRequestError if `token_ids` do not fit the context."""
    if num_tokens >= max_model_len:
        bound = f"at most {max_model_len - 1} tokens (max_model_len - 1)"
        raise InvalidRequestError("PROMPT_TOO_LONG", "token_ids", f"{num_tokens} tokens", bound)


def check_num_reference_tokens(num_tokens: int) -> None:
    """Raises InvalidRequestError if the references have too many token ids in total."""
    if num_tokens > MAX_REFERENCE_TOKENS:
        raise references_too_long(f"{num_tokens} tokens", f"{MAX_REFERENCE_TOKENS} tokens")


def references_too_long(value: str, most: str) -> InvalidRequestError:
    """Returns the error for references whose total length is too large."""
    return InvalidRequestError("REFERENCES_TOO_LONG", "references", value, f"at most {most} together")


def unknown_field(path: str, number: int, wire_type: int, message: str) -> InvalidRequestError:
    """Returns the error for a field that this version of the message lacks. `path` precedes the field number."""
    bound = f"unset: {message} has no such field in this server's version"
    return InvalidRequestError("UNKNOWN_FIELD", f"{path}#{number}", f"<wire type {wire_type}>", bound)


def refuse_unknown_fields(message: Message) -> None:
    """Raises InvalidRequestError for the first field, at any depth, that this version of the protocol does not have.

    Protobuf keeps unknown fields silently: a newer client's parameter would be ignored and the answer would be wrong.
    A known field with the wrong wire type counts as unknown too. The fields are not visited one by one, because 16 MB
    can hold millions.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        _refuse_first_unknown(message, "")


def _refuse_first_unknown(message: Message, path: str) -> None:
    unknown = type(message)()
    unknown.CopyFrom(message)
    for descriptor, _ in message.ListFields():
        unknown.ClearField(descriptor.name)
    if head := unknown.SerializeToString()[:MAX_TAG_BYTES]:
        tag = _varint(head)
        raise unknown_field(path, tag >> 3, tag & 7, message.DESCRIPTOR.full_name)
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        if descriptor.is_repeated:
            for i, item in enumerate(value):
                _refuse_first_unknown(item, f"{path}{descriptor.name}[{i}].")
        else:
            _refuse_first_unknown(value, f"{path}{descriptor.name}.")


def _varint(data: bytes) -> int:
    """Decodes the leading varint: seven bits per byte, lowest first, up to a byte without the highest bit."""
    value = 0
    for place, byte in enumerate(data):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            break
    return value


def to_generate_request(
    prompt: Prompt, params: SamplingParams, speculation: SpeculationParams, priority: int = 0
) -> pb.GenerateRequest:
    """Builds a request without an id and a model. The inverse of `from_generate_request`, except for 32-bit floats.

    Raises InvalidRequestError for a priority out of bounds and for a count that does not fit into the wire's 32 bits.
    """
    for name, value in (
        ("top_k", params.top_k),
        ("no_repeat_ngram_size", params.no_repeat_ngram_size),
        ("max_tokens", params.max_tokens),
        ("min_tokens", params.min_tokens),
        ("max_draft_tokens", speculation.max_draft_tokens),
        ("branch_length", speculation.branch_length),
    ):
        if value is not None and value > MAX_UINT32:
            raise InvalidRequestError(invalid(name), name, value, f"at most {MAX_UINT32}")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name):
            if not 0 <= token_id <= MAX_UINT32:
                raise InvalidRequestError("TOKEN_ID_OUT_OF_RANGE", name, token_id, f"token ids in 0..{MAX_UINT32}")
    if params.logits_processors:
        bound = "empty: processors cannot be sent to a server"
        raise InvalidRequestError("INVALID_LOGITS_PROCESSORS", "logits_processors", params.logits_processors, bound)
    return pb.GenerateRequest(
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str | Chat) else pb.TokenIds(ids=prompt),
        chat=to_chat(prompt) if isinstance(prompt, Chat) else None,
        sampling_params=pb.SamplingParams(
            **{name: getattr(params, name) for name in SAMPLING_VALUES},
            logit_bias=_logit_bias(params),
            allowed_token_ids=params.allowed_token_ids,
            bad_words=params.bad_words,
        ),
        stop=pb.StopConditions(
            max_tokens=params.max_tokens,
            stop_strings=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
        ),
        output=pb.OutputOptions(
            skip_special_tokens=params.skip_special_tokens,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            echo=params.echo,
            include_stop_str_in_output=params.include_stop_str_in_output,
        ),
        speculation=pb.SpeculationOptions(
            mode=pb.SpeculationOptions.MODE_AUTO if speculation.is_enabled else pb.SpeculationOptions.MODE_OFF,
            max_draft_tokens=speculation.max_draft_tokens,
            drafter=speculation.drafter,
            branch_length=speculation.branch_length,
            tpot_target_ms=speculation.tpot_target_ms,
        ),
        references=[
            pb.Reference(text=item) if isinstance(item, str) else pb.Reference(token_ids=pb.TokenIds(ids=item))
            for item in speculation.references
        ],
        draft_scope=speculation.draft_scope,
        priority=check_priority(priority),
        structured_output=_structured_output(params),
    )


def with_path(error: InvalidRequestError, request: Message) -> InvalidRequestError:
    """Returns the same error with its field as a path in the message, instead of a Python argument name.

    Errors found in the message itself already have a path.
    """
    name, bracket, index = error.field.partition("[")
    path, index = _PATHS.get(name, name), bracket + index
    if name == "prompt":
        path = str(request.WhichOneof("input"))
    elif name == "references" and index.endswith("]"):  # "[1]" is a text, "[1][2]" a token id
        index = index.replace("][", "].token_ids[") if "][" in index else f"{index}.text"
    return InvalidRequestError(error.reason, path + index, error.value, error.bound.replace("token ids", "token_ids"))


def from_tokenize_request(request: pb.TokenizeRequest) -> Prompt:
    """Returns what is to be tokenised. Raises InvalidRequestError, to be passed to `with_path`."""
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            return from_chat(request.chat)
        case _:
            raise InvalidRequestError("MISSING_INPUT", "input", None, "set: text or chat")


def check_num_tokens(num_tokens: int, max_model_len: int) -> None:
    """Raises InvalidRequestError if a DetokenizeRequest has more token ids than any answer."""
    if num_tokens > max_model_len:
        bound = f"at most {max_model_len} (max_model_len)"
        raise InvalidRequestError("TOO_MANY_TOKEN_IDS", "token_ids", num_tokens, bound)


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case "chat":
            return from_chat(request.chat)
        case _:
            raise InvalidRequestError("MISSING_INPUT", "input", None, "set: text, token_ids or chat")


def _request_id(request: pb.GenerateRequest) -> str:
    request_id = request.request_id
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequestError(
            "INVALID_REQUEST_ID", "request_id", request_id, f"at most {MAX_REQUEST_ID_CHARS} printable characters"
        )
    return request_id


def _sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    sampling, stop, output = request.sampling_params, request.stop, request.output
    bias = sampling.logit_bias
    if len(bias.token_ids) != len(bias.biases) or len(set(bias.token_ids)) < len(bias.token_ids):
        counts = f"{len(bias.token_ids)} token_ids and {len(bias.biases)} biases"
        bound = "different token_ids, and a bias for each"
        raise InvalidRequestError("INVALID_LOGIT_BIAS", "sampling_params.logit_bias", counts, bound)
    return SamplingParams(
        **{name: getattr(sampling, name) for name in SAMPLING_VALUES if sampling.HasField(name)},
        logit_bias=dict(zip(bias.token_ids, bias.biases, strict=True)),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(sampling.bad_words),
        min_tokens=stop.min_tokens,
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        stop=tuple(stop.stop_strings),
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        echo=output.echo,
        include_stop_str_in_output=output.include_stop_str_in_output,
        **_grammar(request),
    )


def _grammar(request: pb.GenerateRequest) -> dict[str, Any]:
    """Returns the one of GRAMMAR_FIELDS that is set."""
    name = request.structured_output.WhichOneof("grammar")
    if name is None:
        return {}
    if name == "choice":
        texts = tuple(request.structured_output.choice.texts)
        if not texts:
            raise InvalidRequestError("INVALID_CHOICES", "structured_output.choice.texts", texts, "at least one text")
        return {name: texts}
    return {name: getattr(request.structured_output, name)}


def _structured_output(params: SamplingParams) -> pb.StructuredOutput | None:
    if not params.has_grammar:
        return None
    choice = pb.Choices(texts=params.choice) if params.choice else None
    others = {name: getattr(params, name) or None for name in GRAMMAR_FIELDS if name != "choice"}
    return pb.StructuredOutput(**others, choice=choice)


def _logit_bias(params: SamplingParams) -> pb.LogitBias | None:
    biases = params.logit_bias
    return pb.LogitBias(token_ids=biases.keys(), biases=biases.values()) if biases else None


def _speculation(request: pb.GenerateRequest) -> SpeculationParams:
    options = request.speculation
    # proto3 enums are open: an unknown number arrives unchanged.
    if options.mode not in pb.SpeculationOptions.Mode.values():
        names = ", ".join(pb.SpeculationOptions.Mode.keys())
        raise InvalidRequestError("UNKNOWN_ENUM_VALUE", "speculation.mode", int(options.mode), f"one of {names}")
    return SpeculationParams(
        is_enabled=options.mode != pb.SpeculationOptions.MODE_OFF,
        max_draft_tokens=options.max_draft_tokens if options.HasField("max_draft_tokens") else None,
        drafter=options.drafter,
        branch_length=options.branch_length if options.HasField("branch_length") else None,
        tpot_target_ms=options.tpot_target_ms if options.HasField("tpot_target_ms") else None,
        draft_scope=request.draft_scope,
        references=_references(request),
    )


def _references(request: pb.GenerateRequest) -> tuple[str | tuple[int, ...], ...]:
    references = request.references
    for i, reference in enumerate(references):
        if reference.WhichOneof("content") is None:
            raise InvalidRequestError(
                "MISSING_CONTENT", f"references[{i}].content", None, "set: either text or token_ids"
            )
    return tuple(
        reference.text if reference.WhichOneof("content") == "text" else tuple(reference.token_ids.ids)
        for reference in references
    )
