"""Token counts in the shapes of the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchserve.server.http.prediction import PredictionCount
from batchserve.types import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.types import Delta


@dataclass(slots=True)
class UsageCount:
    """The counts of all answers to one call. num_samples: of each prompt. prediction: token ids that the answers were
    expected to have.
    """

    num_samples: int = 1
    prediction: Sequence[int] | None = None
    _prompt_tokens: dict[int, int] = field(default_factory=dict)  # by prompt
    _ended: dict[int, Usage] = field(default_factory=dict)  # by choice
    _predictions: dict[int, PredictionCount] = field(default_factory=dict)  # by choice
    _num_tokens: int = 0

    def started(self, prompt: int, num_tokens: int) -> None:
        """A prompt has so many tokens. prompt: its index."""
        self._prompt_tokens[prompt] = num_tokens

    def add(self, index: int, delta: Delta) -> None:
        """Counts a delta of a choice."""
        self._num_tokens += len(delta.token_ids)
        if self.prediction is not None:
            if index not in self._predictions:
                self._predictions[index] = PredictionCount(self.prediction)
            self._predictions[index].add(delta.token_ids)
        if delta.usage is not None:
            self._ended[index] = delta.usage

    def body(self) -> dict[str, Any]:
        """Returns the counts so far, as of Chat Completions and Completions."""
        prompt, completion = self._totals()
        details = self._draft_details() | {"reasoning_tokens": 0}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
            "completion_tokens_details": details,
        }

    def responses_body(self) -> dict[str, Any]:
        """Returns the counts so far, as of the Responses API."""
        prompt, completion = self._totals()
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._cached(), "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0} | self._draft_details(),
            "total_tokens": prompt + completion,
        }

    def _totals(self) -> tuple[int, int]:
        return sum(self._prompt_tokens.values()), self._num_tokens

    def _cached(self) -> int:
        """Counts a prompt once: its other samples begin with the first one's K/V."""
        return sum(usage.cached_tokens for index, usage in self._ended.items() if index % self.num_samples == 0)

    def _draft_details(self) -> dict[str, int]:
        details = {
            "draft_tokens": sum(usage.draft_tokens for usage in self._ended.values()),
            "accepted_draft_tokens": sum(usage.accepted_draft_tokens for usage in self._ended.values()),
        }
        if self.prediction is not None:
            details["accepted_prediction_tokens"] = sum(each.num_accepted for each in self._predictions.values())
            details["rejected_prediction_tokens"] = sum(each.num_rejected for each in self._predictions.values())
        return details
