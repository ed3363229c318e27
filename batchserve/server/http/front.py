"""What the handlers of all routes share: the open calls, and what is known of the served model's texts."""

from __future__ import annotations

import functools
import time
import uuid
from typing import TYPE_CHECKING

from batchserve.engine.chat_facts import ChatFacts, TokenBytes
from batchserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.server.http.generation import Asked
    from batchserve.server.keys import Caller
    from batchserve.server.open_calls import OpenCalls


class Front:
    """version: of this package. tool_call_parser: a format of tool calls, or "auto"."""

    def __init__(self, calls: OpenCalls, version: str, tool_call_parser: str) -> None:
        self.calls, self.version, self.tool_call_parser = calls, version, tool_call_parser
        self.created = int(time.time())

    @property
    def engine(self) -> AsyncEngine:
        """Raises UnavailableError."""
        return self.calls.engine

    @functools.cached_property
    def chat_facts(self) -> ChatFacts:
        """Takes some milliseconds the first time."""
        return ChatFacts.of(self.engine.tokenizer)

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.engine.tokenizer)

    async def predicted(self, asked: Asked) -> Sequence[int] | None:
        """Returns the token ids of a prediction, which becomes a reference of the drafters; None if there is none."""
        if not asked.predicted:
            return None
        try:
            token_ids = await self.engine.tokenize(asked.predicted, add_special_tokens=False)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, "prediction.content", error.value, error.bound) from None
        asked.speculation["references"] = [*asked.speculation.get("references", ()), token_ids]
        return token_ids

    async def identify(self, caller: Caller, asked: Asked, prefix: str) -> str:
        """Gives a request an id if it has none, and returns the id of its answer."""
        if asked.request_id:
            await self.calls.wait_cancelled(asked.request_id, caller)
        else:
            asked.request_id = uuid.uuid4().hex
        return f"{prefix}-{asked.request_id}"
