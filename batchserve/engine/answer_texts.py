"""Makes the deltas that clients are given of their requests' new tokens: texts, log probabilities, stop strings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchserve.engine.detokenizer import Decoder, IncrementalDetokenizer, special_texts, token_texts
from batchserve.engine.output_collector import OutputCollector
from batchserve.types import Delta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchserve.request import Request


class AnswerTexts:
    """The texts of the answers of all requests in flight, which it is asked for in the order of their arrival."""

    def __init__(self, decoder: Decoder | None) -> None:
        self._decoder = decoder
        self._token_texts = [token_texts(decoder, skip_special_tokens=skip) for skip in (False, True)]
        self._special_texts = special_texts(decoder)
        self._detokenizers: dict[Request, IncrementalDetokenizer] = {}
        self._held: dict[Request, OutputCollector] = {}  # of requests whose client is given all at the end

    def __contains__(self, request: Request) -> bool:
        return request in self._detokenizers

    def __iter__(self) -> Iterator[Request]:
        return iter(self._detokenizers)

    def begin(self, request: Request) -> None:
        """A request is in flight. Raises whatever its tokenizer raises for the end of its prompt."""
        sampling = request.sampling
        is_skipping = sampling.skip_special_tokens
        how = (self._decoder, sampling.stop, is_skipping, self._token_texts[is_skipping])
        more = sampling.include_stop_str_in_output, sampling.logprobs is not None, len(request.echo)
        self._detokenizers[request] = IncrementalDetokenizer(*how, request.token_ids, self._special_texts, *more)

    def end(self, request: Request) -> None:
        del self._detokenizers[request]
        self._held.pop(request, None)

    def delta(self, request: Request, num_accepted: int) -> Delta | None:
        """Returns what the client is given next: the tokens since the last delta. None if that is held until the end.

        num_accepted: the accepted drafts among the last step's tokens. A stop string ends the request. Raises whatever
        its tokenizer raises.
        """
        first = request.num_published_tokens
        token_ids = request.token_ids[request.num_prompt_tokens + first :]
        piece = self._detokenizers[request].feed(token_ids, is_last=request.finish_reason is not None)
        if piece.stop is not None:
            request.stop(piece.stop, max(0, num_accepted - len(piece.token_ids)))
        new = Delta(request.request_id, piece.text, piece.token_ids)
        if request.echo:
            new.text, request.echo = request.echo + new.text, ""
        if request.prompt_logprobs:
            new.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        if request.sampling.logprobs is not None:
            offsets: Sequence[int | None] = piece.offsets or [None] * len(piece.token_ids)
            each = zip(request.logprobs[first:], offsets, strict=False)
            new.logprobs = [replace(one, text_offset=offset) for one, offset in each]
        delta = self._whole(request, new) if request.is_whole else new
        request.num_published_tokens += len(piece.token_ids)
        return delta

    def _whole(self, request: Request, delta: Delta) -> Delta | None:
        """Returns all deltas of a request with is_whole as one, at its end; before that None."""
        held = self._held.setdefault(request, OutputCollector([]))
        held.add(delta)
        has_ended = request.finish_reason is not None
        return held.whole() if has_ended else None
