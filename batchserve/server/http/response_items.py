"""The output items of the Responses API, made of an answer's deltas, with the events of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchserve.server.http.tools.pieces import CallArguments, CallBegin, Piece, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchserve.server.http.logprobs import TokenNames
    from batchserve.server.http.tools.pieces import ToolParser
    from batchserve.types import Delta

Event = dict[str, Any]


class ResponseItems:
    """Makes one item of each run of text, a message, and of each call of a function."""

    def __init__(
        self, answer_id: str, names: TokenNames, parser: ToolParser | None, *, is_parallel: bool = True
    ) -> None:
        self.output: list[dict[str, Any]] = []
        self._answer_id, self._names, self._parser, self._is_parallel = answer_id, names, parser, is_parallel
        self._logprobs: list[dict[str, Any]] = []  # of text that is held back
        self._is_open = False  # the last item
        self._num_calls = 0

    def add(self, delta: Delta) -> Iterator[Event]:
        """Yields the events that a delta makes."""
        if delta.logprobs:
            self._logprobs += self._names.chat_content(delta.token_ids, delta.logprobs)
        pieces: Iterable[Piece] = (Text(delta.text),) if delta.text else ()
        if self._parser is not None:
            pieces = [*self._parser.feed(delta.text)]
            if delta.finish_reason is not None:
                pieces = [*pieces, *self._parser.end()]
        for piece in pieces:
            yield from self._piece(piece)

    def end(self, status: str) -> Iterator[Event]:
        """Yields the events that end the last item. status: how the answer has ended."""
        if not self.output:
            yield from self._begin_message()
        yield from self._close(status)

    def _piece(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, CallBegin):
            self._num_calls += 1
        if self._num_calls > 1 and not self._is_parallel and not isinstance(piece, Text):
            return
        if isinstance(piece, CallBegin):
            yield from self._close("completed")
            yield from self._begin(
                "function_call",
                f"fc_{piece.call_id}",
                {"call_id": piece.call_id, "name": piece.name, "arguments": ""},
            )
        elif isinstance(piece, CallArguments):
            self.output[-1]["arguments"] += piece.text
            yield self._event("function_call_arguments.delta", delta=piece.text)
        else:
            if not self._is_open or self.output[-1]["type"] != "message":
                yield from self._close("completed")
                yield from self._begin_message()
            part = self.output[-1]["content"][0]
            part["text"] += piece.text
            part["logprobs"] += self._logprobs
            logprobs, self._logprobs = self._logprobs, []
            yield self._event("output_text.delta", content_index=0, delta=piece.text, logprobs=logprobs)

    def _begin_message(self) -> Iterator[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item_id = f"msg_{self._answer_id.partition('-')[2]}_{len(self.output)}"
        yield from self._begin("message", item_id, {"role": "assistant", "content": []})
        self.output[-1]["content"].append(part)
        yield self._event("content_part.added", content_index=0, part={**part, "logprobs": []})

    def _begin(self, kind: str, item_id: str, more: dict[str, Any]) -> Iterator[Event]:
        item = {"type": kind, "id": item_id, "status": "in_progress", **more}
        self.output.append(item)
        self._is_open = True
        shown = {key: [] if key == "content" else value for key, value in item.items()}
        yield self._whole_item("output_item.added", shown)

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"])
            yield self._event("content_part.done", content_index=0, part=part)
        else:
            yield self._event("function_call_arguments.done", arguments=item["arguments"])
        yield self._whole_item("output_item.done", item)

    def _event(self, kind: str, /, **more: Any) -> Event:
        at = len(self.output) - 1
        return {"type": f"response.{kind}", "item_id": self.output[at]["id"], "output_index": at, **more}

    def _whole_item(self, name: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.{name}", "output_index": len(self.output) - 1, "item": item}
