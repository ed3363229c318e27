"""Predicted outputs: how many tokens of a prediction an answer has (OpenAI's accepted_prediction_tokens)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT = 2  # tokens of the answer that lead back into the prediction after it has left it


class PredictionCount:
    """Follows an answer through its prediction. A token of the prediction is accepted if the answer has it where the
    tokens before led to it: at the beginning, after the token before it, or after two tokens of the prediction.

    This depends on the two texts alone, not on how many drafts the engine ran.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._after: dict[tuple[int, ...], list[int]] = {}
        for at in range(CONTEXT, len(prediction)):
            self._after.setdefault(tuple(prediction[at - CONTEXT : at]), []).append(at)
        self._is_accepted = bytearray(len(prediction))
        self._at = 0  # the token of the prediction that should come next; its length: none
        self._last: tuple[int, ...] = ()

    def add(self, token_ids: Sequence[int]) -> None:
        """Counts further tokens of the answer."""
        for token_id in token_ids:
            self._last = (*self._last, token_id)[-CONTEXT:]
            if self._at < len(self._prediction) and self._prediction[self._at] == token_id:
                self._is_accepted[self._at] = 1
                self._at += 1
                continue
            places = self._after.get(self._last, ())
            self._at = next((at for at in places if at > self._at), places[0] if places else len(self._prediction))

    @property
    def num_accepted(self) -> int:
        return sum(self._is_accepted)

    @property
    def num_rejected(self) -> int:
        return len(self._prediction) - self.num_accepted
