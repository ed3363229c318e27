"""The reference drafter: copies from a text that the answer quotes.

LLMA (Yang et al. 2023, arXiv 2304.04487, sections 2.2 and 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from batchserve.config import MiB
from batchserve.draft.answer_cache import AnswerCache
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.reference_kernels import MAX_OCCURRENCES, find_copy
from batchserve.draft.text_index import MAX_MATCH, TextIndex
from batchserve.errors import ConfigError
from batchserve.request import DraftScope

if TYPE_CHECKING:
    from collections.abc import Sequence

# Accuracy of copied tokens on recorded answers (benchmarks/reference_ablation.py): of a copy's first token by the
# length of the match, of later ones by the number of tokens copied before.
FIRST_TOKEN = (0.32, 0.44, 0.44, 0.5)
LATER_TOKENS = (0.55, 0.64, 0.73, 0.8, 0.85)
LONG_MATCH, LONG_MATCH_TOKEN = 16, 0.93


@dataclass(slots=True)
class _RequestState:
    """`sources` begins with num_cached tokens of others' answers, and ends with the prompt and the answer so far."""

    sources: TextIndex
    scope: DraftScope | None
    prompt_token_ids: Sequence[int]
    num_cached: int
    published: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)  # the last draft
    copied_from: int = -1
    read_at: int = -1  # where the last useful copy ended


class ReferenceDrafter(Drafter):
    """Copies the `copy_length` (k) tokens after the longest match of at least `min_match` (n) tokens, as one branch.

    The end of the prompt and answer so far is matched. The sources, oldest first, are cached answers to similar
    prompts, the request's references, its prompt (with any retrieved documents or earlier turns) and the answer itself,
    which the paper leaves out. Of equally long matches the most recent is used, with two exceptions: a match near the
    end of the last useful copy continues that copy, and otherwise a continuation that most matches share comes first.
    The latest 64 occurrences of a context are considered, and 32 tokens of a match.

    When a request ends, its published answer is cached under its scope. It becomes a source of later requests if its
    prompt is among the `similar` most similar ones to theirs (section 2.3, "cache-assisted generation"). Prompts are
    compared by their sets of tokens, which must overlap by at least min_similarity. The cache is bounded by max_answers
    and max_scope_bytes per scope, and by max_total_bytes in all. A request without a scope neither reads nor fills it.
    Raises ConfigError for options out of bounds.
    """

    name = "reference"

    def __init__(
        self,
        min_match: int = 1,
        copy_length: int = 16,
        *,
        similar: int = 4,
        min_similarity: float = 0.3,
        max_answers: int = 256,
        max_scope_bytes: int = 64 * MiB,
        max_total_bytes: int = 256 * MiB,
    ) -> None:
        if not 1 <= min_match <= MAX_MATCH:
            raise ConfigError(f"min_match = {min_match}: must be in 1..{MAX_MATCH}")
        if copy_length < 1:
            raise ConfigError(f"copy_length = {copy_length}: must be at least 1")
        if similar < 0:
            raise ConfigError(f"similar = {similar}: must be at least 0")
        if not 0 <= min_similarity <= 1:
            raise ConfigError(f"min_similarity = {min_similarity}: must be in 0..1")
        self._min_match = min_match
        self._copy_length = copy_length
        self._similar = similar
        self._min_similarity = min_similarity
        self._cache = AnswerCache(max_answers, max_scope_bytes, max_total_bytes)
        self._requests: dict[str, _RequestState] = {}
        self._places, self._lengths = np.empty((2, MAX_OCCURRENCES), np.int64)
        self._copied = np.empty(copy_length, np.int32)

    def start(self, request: DraftRequest) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} has draft state already")
        prompt, scope = request.prompt_token_ids, request.scope if self._similar else None
        cached = [] if scope is None else self._cache.find(scope, prompt, self._similar, self._min_similarity)
        texts: list[Sequence[int] | np.ndarray] = [*cached, *request.references, prompt]
        sources = TextIndex(1 << 40, sum(map(len, texts)) + len(texts) + 256)
        num_cached = 0
        for i, text in enumerate(texts):
            sources.separate()
            if i == len(cached):
                num_cached = len(sources)
            sources.append(text)
        self._requests[request.request_id] = _RequestState(sources, scope, prompt, num_cached)

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self._propose(query) for query in queries]

    def _propose(self, query: DraftQuery) -> DraftTree:
        state = self._requests[query.request_id]
        most = min(query.max_tokens, query.max_depth, self._copy_length)
        if most < 1:
            return DraftTree()
        count, state.copied_from, length = find_copy(
            state.sources.source, self._min_match, state.read_at, most, self._places, self._lengths, self._copied
        )
        state.copied = self._copied[:count].tolist()
        return DraftTree(list(state.copied), list(range(-1, count - 1)), _path_probs(length, count))

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        state = self._requests[request_id]
        used = 0
        for copied, token_id in zip(state.copied, token_ids, strict=False):
            if copied != token_id:
                break
            used += 1
        if used:
            state.read_at = state.copied_from + used
        state.copied = []
        state.sources.append(token_ids)

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._requests[request_id].published += token_ids

    def end(self, request_id: str) -> None:
        state = self._requests.pop(request_id, None)
        if state is not None and state.scope is not None:
            self._cache.add(state.scope, state.prompt_token_ids, state.published)

    def clear_scope(self, scope: DraftScope) -> None:
        """Drops the scope's cached answers, also as sources of running requests, and what these have published."""
        self._cache.clear(scope)
        for state in self._requests.values():
            if state.scope == scope:
                state.published = []
                own = state.sources.tokens()[state.num_cached :]
                state.sources = TextIndex(1 << 40, len(own) + 256)
                state.sources.append(own)
                state.num_cached, state.read_at, state.copied = 0, -1, []

    def memory_bytes(self) -> int:
        return self._cache.nbytes + sum(state.sources.nbytes for state in self._requests.values())


def _path_probs(match_length: int, count: int) -> list[float]:
    """Returns the estimated path probability of each copied token, which falls along the copy."""
    prob, probs = 1.0, []
    for i in range(count):
        if match_length + i >= LONG_MATCH:
            prob *= LONG_MATCH_TOKEN
        elif i == 0:
            prob *= FIRST_TOKEN[min(match_length, len(FIRST_TOKEN)) - 1]
        else:
            prob *= LATER_TOKENS[min(i, len(LATER_TOKENS)) - 1]
        probs.append(prob)
    return probs


def compile_kernels() -> None:
    """Compiles every kernel by drafting a step, or loads it from the cache on disk."""
    drafter = ReferenceDrafter()
    drafter.start(DraftRequest("warm-up", [0, 0, 0]))
    drafter.propose([DraftQuery("warm-up", 2, 2)])
