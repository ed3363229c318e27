"""Caches the answers of finished requests by draft scope, and finds the answers to similar prompts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchserve.errors import ConfigError
from batchserve.request import DraftScope

if TYPE_CHECKING:
    from collections.abc import Sequence

OVERHEAD_BYTES = 900  # of an answer that is alone in its scope, in addition to its arrays


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer and the sorted distinct tokens of its prompt, both int32."""

    prompt_tokens: np.ndarray
    token_ids: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.prompt_tokens.nbytes + self.token_ids.nbytes + OVERHEAD_BYTES


class AnswerCache:
    """Keeps the latest answers of each scope. A new answer to a prompt replaces the old one.

    A scope keeps at most max_answers and max_scope_bytes, all scopes together max_total_bytes. The least recently used
    answer goes first; for the total, that of the least recently used scope. Raises ConfigError for bounds below 1.
    """

    def __init__(self, max_answers: int, max_scope_bytes: int, max_total_bytes: int) -> None:
        bounds = {"max_answers": max_answers, "max_scope_bytes": max_scope_bytes, "max_total_bytes": max_total_bytes}
        for name, value in bounds.items():
            if value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")
        self._max_answers = max_answers
        self._max_scope_bytes = min(max_scope_bytes, max_total_bytes)
        self._max_total_bytes = max_total_bytes
        self._scopes: OrderedDict[DraftScope, OrderedDict[bytes, _Answer]] = OrderedDict()
        self._scope_bytes: dict[DraftScope, int] = {}
        self._nbytes = 0  # the sum of _scope_bytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def add(self, scope: DraftScope, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Adds an answer, unless it is too large for a scope, or it or its prompt is empty."""
        prompt = np.asarray(prompt_token_ids, np.int32)
        answer = _Answer(np.unique(prompt), np.array(token_ids, np.int32))
        if not len(prompt) or not token_ids or answer.nbytes > self._max_scope_bytes:
            return
        key = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        answers = self._scopes.setdefault(scope, OrderedDict())
        self._scopes.move_to_end(scope)
        if key in answers:
            self._remove(scope, key)
        answers[key] = answer
        self._scope_bytes[scope] = self._scope_bytes.get(scope, 0) + answer.nbytes
        self._nbytes += answer.nbytes
        while len(answers) > self._max_answers or self._scope_bytes[scope] > self._max_scope_bytes:
            self._remove(scope, next(iter(answers)))
        while self.nbytes > self._max_total_bytes:
            oldest = next(iter(self._scopes))
            self._remove(oldest, next(iter(self._scopes[oldest])))
            if not self._scopes[oldest]:
                self.clear(oldest)

    def _remove(self, scope: DraftScope, key: bytes) -> None:
        num_bytes = self._scopes[scope].pop(key).nbytes
        self._scope_bytes[scope] -= num_bytes
        self._nbytes -= num_bytes

    def find(
        self, scope: DraftScope, prompt_token_ids: Sequence[int], most: int, min_similarity: float
    ) -> list[np.ndarray]:
        """Returns the answers to the `most` most similar prompts of the scope, the most similar last.

        Similarity is the Jaccard overlap of the token sets, and must be at least min_similarity. On a tie, the more
        recently used prompt counts as the more similar.
        """
        answers = self._scopes.get(scope)
        if not answers:
            return []
        self._scopes.move_to_end(scope)
        wanted = np.unique(np.asarray(prompt_token_ids, np.int32))
        prompts = [answer.prompt_tokens for answer in answers.values()]
        sizes = np.array([len(prompt) for prompt in prompts])
        together = np.concatenate(prompts)
        is_wanted = np.zeros(1 + max(int(together.max()), int(wanted.max(initial=0))), np.uint8)
        is_wanted[wanted] = 1
        common = np.add.reduceat(is_wanted[together], np.cumsum(sizes) - sizes, dtype=np.int32)
        similarities = common / (len(wanted) + sizes - common)
        order = np.argsort(similarities, kind="stable")[max(0, len(answers) - most) :]
        known = list(answers)
        keys = [known[i] for i in order if similarities[i] >= min_similarity]
        for key in keys:
            answers.move_to_end(key)
        return [answers[key].token_ids for key in keys]

    def clear(self, scope: DraftScope) -> None:
        """Drops all answers of a scope."""
        self._scopes.pop(scope, None)
        self._nbytes -= self._scope_bytes.pop(scope, 0)
