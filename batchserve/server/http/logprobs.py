"""Log probabilities of tokens in the shapes of the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.engine.chat_facts import TokenBytes
    from batchserve.types import Delta, TokenLogprobs

LEAST = -9999.0  # in place of minus infinity, which JSON does not have


def num_parts(delta: Delta) -> int:
    """Returns how many parts a delta has in a response: its text, and log probabilities, those of its prompt too."""
    each = [*(delta.logprobs or ()), *(delta.prompt_logprobs or ())]
    return 1 + sum(1 + len(one.top) for one in each if one is not None)


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are shown: by their text, or as "token_id:N" (vLLM's return_tokens_as_token_ids)."""

    token_bytes: TokenBytes
    shows_ids: bool = False

    def name(self, token_id: int) -> str:
        if self.shows_ids:
            return f"token_id:{token_id}"
        return self.token_bytes[token_id].decode(errors="replace")

    def chat_content(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Returns `logprobs.content` of Chat Completions."""
        return [
            {
                **self._token(token_id, one.logprob),
                "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in one.top],
            }
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]

    def prompt_content(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, Any] | None]:
        """Returns `prompt_logprobs` as vLLM has them: by token id, the prompt's own token first."""
        found: list[dict[str, Any] | None] = []
        for token_id, one in zip(token_ids, logprobs, strict=True):
            if one is None:
                found.append(None)
                continue
            own = {str(token_id): self._ranked(token_id, one.logprob, one.rank)}
            top = {str(top_id): self._ranked(top_id, value, rank) for rank, (top_id, value) in enumerate(one.top, 1)}
            found.append({**own, **top})
        return found

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": self.name(token_id)}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": max(logprob, LEAST),
            "bytes": [*self.token_bytes[token_id]],
        }


@dataclass(slots=True)
class CompletionLogprobs:
    """`logprobs` of Completions, for tokens in the order in which they come. most: how many likeliest ones to show."""

    names: TokenNames
    most: int
    skipped: frozenset[str] = frozenset()  # special tokens that the text leaves out
    offset: int = 0  # of the next token of a prompt in the text, in characters
    _body: dict[str, list[Any]] = field(default_factory=lambda: _empty())

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Adds a prompt's tokens. The first one has no log probability."""
        for token_id, one in zip(token_ids, logprobs, strict=True):
            self._add(token_id, one, self.offset)
            text = self.names.token_bytes[token_id].decode(errors="replace")
            self.offset += 0 if text in self.skipped else len(text)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds tokens of an answer."""
        for token_id, one in zip(token_ids, logprobs, strict=True):
            self._add(token_id, one, one.text_offset)

    def take(self) -> dict[str, list[Any]]:
        """Returns what was added since the last call."""
        taken, self._body = self._body, _empty()
        return taken

    def _add(self, token_id: int, one: TokenLogprobs | None, offset: int | None) -> None:
        name = self.names.name(token_id)
        body = self._body
        body["tokens"].append(name)
        body["text_offset"].append(self.offset if offset is None else offset)
        body["token_logprobs"].append(None if one is None else max(one.logprob, LEAST))
        if one is None:
            body["top_logprobs"].append(None)
            return
        # As in the OpenAI API, the token itself is among them even if it is none of the likeliest.
        top = {self.names.name(top_id): max(logprob, LEAST) for top_id, logprob in one.top[: self.most]}
        body["top_logprobs"].append({name: max(one.logprob, LEAST), **top} if name not in top else top)


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
