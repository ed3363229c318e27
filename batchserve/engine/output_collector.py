"""Collects streamed deltas into a complete answer."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from batchserve.types import Delta, RequestOutput, Started, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence


async def collected(events: AsyncGenerator[Started | Delta, None]) -> RequestOutput:
    """Returns the complete output of a request's events. Raises what they raise, and closes them in every case."""
    prompt: list[int] = []
    collectors: dict[int, OutputCollector] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Started):
                prompt = event.prompt_token_ids
            else:
                collectors.setdefault(event.index, OutputCollector(prompt)).add(event)
    return OutputCollector.joined([collectors[index] for index in sorted(collectors)])


class OutputCollector:
    """Joins the deltas of one request."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += delta.logprobs
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._last = delta

    def whole(self) -> Delta:
        """Returns all deltas joined into one."""
        if self._last is None:
            raise RuntimeError("the answer has not begun")
        text = "".join(self._texts)
        more = {"logprobs": self._logprobs, "prompt_logprobs": self._prompt_logprobs}
        return replace(self._last, text=text, token_ids=self._token_ids, **more)  # type: ignore[arg-type]

    @classmethod
    def joined(cls, each: Sequence[OutputCollector]) -> RequestOutput:
        """Returns the complete output of a request's samples."""
        outputs = [one.output() for one in each]
        return outputs[0] if len(outputs) == 1 else replace(outputs[0], samples=tuple(outputs))

    def output(self) -> RequestOutput:
        """Returns the complete output. Call it only after the delta with a finish_reason."""
        last = self._last
        if last is None or last.finish_reason is None or last.usage is None or last.timing is None:
            raise RuntimeError("the answer is not complete")
        return RequestOutput(
            request_id=last.request_id,
            prompt_token_ids=self._prompt_token_ids,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=last.finish_reason,
            usage=last.usage,
            timing=last.timing,
            stop_reason=last.stop_reason,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )
