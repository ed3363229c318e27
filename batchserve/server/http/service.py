"""The routes beside generation: models, tokens, health, metrics, the version."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchserve.errors import InvalidRequestError, UnknownModelError
from batchserve.server.http.chat import chat_options, make_chat
from batchserve.server.http.errors import HttpRefusal
from batchserve.server.http.generation import Asked
from batchserve.server.http.tools.choice import read_tools

if TYPE_CHECKING:
    from batchserve.server.health import ServingStatus
    from batchserve.server.http.call import HttpCall
    from batchserve.server.http.fields import Fields
    from batchserve.server.http.front import Front
    from batchserve.server.metrics_text import MetricsText


async def models(front: Front, call: HttpCall) -> None:
    """Lists the one model that is served."""
    await call.answer({"object": "list", "data": [_model(front)]})


async def model(front: Front, call: HttpCall) -> None:
    """Describes a model by its name, which may have slashes."""
    name, served = call.path_params["model"], front.engine.info.name
    if name != served:
        raise UnknownModelError(name, served)
    await call.answer(_model(front))


def _model(front: Front) -> dict[str, Any]:
    info = front.engine.info
    return {
        "id": info.name,
        "object": "model",
        "created": front.created,
        "owned_by": "batchserve",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


async def tokenize(front: Front, call: HttpCall, fields: Fields) -> None:
    """Returns the token ids of a text or a chat, as vLLM does."""
    engine = front.engine
    _check_model(front, fields)
    add_special_tokens = fields.raw("add_special_tokens")
    has_strings = fields.flag("return_token_strs")
    messages, prompt = fields.items("messages"), fields.text("prompt")
    if (messages is None) == (prompt is None):
        raise InvalidRequestError("MISSING_INPUT", "prompt", prompt, "a text; or else messages, but not both")
    if messages is not None:
        if add_special_tokens:
            raise fields.refused("add_special_tokens", add_special_tokens, "false or absent: the template says which")
        chat = make_chat(front, Asked(), read_tools(fields), False, messages, **chat_options(fields))
        fields.end()
        token_ids = await engine.tokenize(chat)
    else:
        is_whole = True if add_special_tokens is None else add_special_tokens
        if not isinstance(is_whole, bool):
            raise fields.refused("add_special_tokens", is_whole, "true or false")
        fields.end()
        token_ids = await engine.tokenize(str(prompt), add_special_tokens=is_whole)
    texts = [front.token_bytes[token_id].decode(errors="replace") for token_id in token_ids] if has_strings else None
    length = engine.info.max_model_len
    await call.answer({"count": len(token_ids), "max_model_len": length, "tokens": token_ids, "token_strs": texts})


async def detokenize(front: Front, call: HttpCall, fields: Fields) -> None:
    """Returns the text of token ids, as vLLM does."""
    engine = front.engine
    _check_model(front, fields)
    token_ids = fields.items("tokens")
    is_skipping = fields.flag("skip_special_tokens")
    fields.end()
    call.names = {"token_ids": "tokens"}
    if token_ids is None or not all(type(token_id) is int for token_id in token_ids):
        raise InvalidRequestError("INVALID_TOKEN_IDS", "tokens", token_ids, "a list of integers")
    if len(token_ids) > (most := engine.info.max_model_len):
        raise InvalidRequestError("TOO_MANY_TOKEN_IDS", "tokens", len(token_ids), f"at most {most} (max_model_len)")
    await call.answer({"prompt": await engine.detokenize(token_ids, skip_special_tokens=is_skipping)})


async def health(status: ServingStatus, call: HttpCall) -> None:
    """Returns 200 as long as the process should go on: also while it warms up and drains."""
    await _state(status, call, is_well=status.is_alive)


async def ready(status: ServingStatus, call: HttpCall) -> None:
    """Returns 200 while requests are served."""
    await _state(status, call, is_well=status.trouble is None)


async def _state(status: ServingStatus, call: HttpCall, *, is_well: bool) -> None:
    await call.answer({"status": status.trouble or "serving"}, 200 if is_well else 503)


async def metrics(text: MetricsText, call: HttpCall) -> None:
    """Returns the figures for Prometheus. They may wait for the engine's process for some seconds."""
    call.caller.check_figures("/metrics")
    status, content_type, body = await asyncio.to_thread(text.read, call.headers.get("accept", ""))
    await call.answer_bytes(body, content_type, status)


async def version(front: Front, call: HttpCall) -> None:
    await call.answer({"version": front.version})


async def wrong_method(method: str, call: HttpCall) -> None:
    raise HttpRefusal(405, "METHOD_NOT_ALLOWED", f"the method must be {method}", {"allow": method})


async def not_found(call: HttpCall) -> None:
    raise HttpRefusal(404, "NOT_FOUND", f"there is no {call.path[:200]!r}; docs/http.md lists what there is")


def _check_model(front: Front, fields: Fields) -> None:
    name, served = fields.text("model"), front.engine.info.name
    if name and name != served:
        raise UnknownModelError(name, served)
