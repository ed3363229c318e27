"""The Jacobi drafter: n-grams that the model itself generates alongside its answer, without references or training.

Lookahead Decoding (Fu et al., ICML 2024, arXiv 2402.02057, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.jacobi_kernels import COMPUTED, HEIGHT, draft, insert_text, open_window, roll_window
from batchserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

FILLERS = 64  # last tokens of the text, from which the window's first guesses are drawn


@dataclass(slots=True)
class _RequestState:
    """jacobi_kernels describes `pool` and `window`; `columns` is the number of window columns in the last tree.

    candidates: the verified nodes of that tree, each with its parent and whether only the window knew it. earned: how
    many window-only nodes were accepted.
    """

    pool: tuple[np.ndarray, ...]
    window: tuple[np.ndarray, ...]
    following: np.ndarray
    recent: np.ndarray  # the text's last tokens
    columns: int = 0
    candidates: tuple[list[int], list[int], list[bool]] = ([], [], [])
    earned: int = 0

    @property
    def shape(self) -> np.ndarray:
        return self.window[2]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.pool, *self.window, self.following, self.recent))


class JacobiDrafter(Drafter):
    """Drafts n-grams from a pool that is filled by a window of W x (N - 1) Jacobi tokens.

    `window` is W, `ngram` is N, and `guesses` is G (None: W). All state belongs to a single request.

    The window holds W trajectories of N - 1 tokens. A step computes the next token of each (the argmax, whatever the
    request's sampling; section 3.2), which completes W n-grams. In a tree (figure 2b), level 0 is a chain after the
    last token, which is itself column 0, and the row of level l and column j is a child of level l - 1, column j. So a
    row sees level 0 up to its own column and its own trajectory, all at smaller positions, and needs no special mask.
    The first N - 2 steps build up the levels, starting from W + N - 2 columns. When m tokens are accepted, all columns
    keep their positions in the text: m - 1 columns drop out on the left, and as many start on the right with random
    tokens of the text. The n-grams of the new columns are not collected until the model has generated all their tokens.
    (The published code moves by one column however many tokens are accepted; with the bundled model that took 5% more
    steps.) A step without a draft, or whose tree was dropped, moves the window in the same way but completes no
    n-grams.

    The pool maps a token to the last G distinct n-grams that begin with it, and holds `max_ngrams` in all; the least
    recently seen go first. prompt_ngrams adds those of the references, the prompt and the answer itself (the paper's
    "prompt as reference"). The last token's n-grams, merged by prefix, are the candidates.

    Once all levels exist, a step takes up to (W + G)(N - 1) - 1 rows. If a query allows fewer, the likeliest candidates
    come first, followed by as many whole columns of the window as fit, from the left. Columns with rows deeper than
    max_row_depth are left out, too, and candidates are cut at max_depth. Raises ConfigError for options out of bounds.
    """

    name = "jacobi"

    def __init__(
        self,
        window: int = 15,
        ngram: int = 5,
        guesses: int | None = None,
        *,
        prompt_ngrams: bool = True,
        max_ngrams: int = 1 << 15,
    ) -> None:
        self._guesses = window if guesses is None else guesses
        bounds = (
            ("window", window, 1),
            ("ngram", ngram, 2),
            ("guesses", self._guesses, 1),
            ("max_ngrams", max_ngrams, 1),
        )
        for option, value, least in bounds:
            if value < least:
                raise ConfigError(f"{option} = {value}: must be at least {least}")
        self._levels, self._first_columns = ngram - 1, window + ngram - 2
        self._num_recent = max(FILLERS, ngram)
        self._has_prompt_ngrams = prompt_ngrams
        self._max_ngrams = max_ngrams
        self._requests: dict[str, _RequestState] = {}
        max_nodes = self._guesses * self._levels
        most_rows = max(h * (self._first_columns + 1 - h) for h in range(1, ngram))
        self._nodes = np.empty((6, max_nodes + 1), np.int32)
        self._weights = np.empty(max_nodes, np.float64)
        size = max_nodes + most_rows
        integers = np.empty((2, size), np.int32)
        self._tree = (integers[0], integers[1], np.empty(size, np.float64), np.empty(size, np.bool_))

    def start(self, request: DraftRequest) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} has draft state already")
        prompt = np.array(request.prompt_token_ids, np.int32)
        recent = prompt[-self._num_recent :].copy() if len(prompt) else np.zeros(1, np.int32)
        state = _RequestState(self._new_pool(), self._new_window(), np.empty(self._first_columns, np.int32), recent)
        if self._has_prompt_ngrams:
            for text in (*request.references, prompt):
                insert_text(state.pool, self._guesses, np.asarray(text, np.int32))
        open_window(state.window, recent)
        self._requests[request.request_id] = state

    def _new_pool(self) -> tuple[np.ndarray, ...]:
        return (
            np.empty((self._max_ngrams, self._levels + 1), np.int32),
            np.empty(self._max_ngrams, np.int32),
            np.full(1 << self._max_ngrams.bit_length(), -1, np.int32),
            np.zeros(1, np.int64),
            np.zeros(self._max_ngrams, np.bool_),
        )

    def _new_window(self) -> tuple[np.ndarray, ...]:
        size = (self._levels, self._first_columns)
        return np.empty(size, np.int32), np.empty(size, np.bool_), np.zeros(3, np.int64)

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self._propose(query) for query in queries]

    def _propose(self, query: DraftQuery) -> DraftTree:
        state = self._requests[query.request_id]
        num_verified, count, state.columns = draft(
            state.pool,
            self._guesses,
            state.window,
            query.max_tokens,
            query.max_depth,
            query.max_row_depth,
            self._nodes,
            self._weights,
            self._tree,
        )
        token_ids, parents = self._tree[0][:count].tolist(), self._tree[1][:count].tolist()
        probs, are_found = self._tree[2][:count].tolist(), self._tree[3][:num_verified].tolist()
        state.candidates = token_ids[:num_verified], parents[:num_verified], are_found
        return DraftTree(token_ids, parents, probs, [True] * num_verified + [False] * (count - num_verified))

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Keeps the deepest level's tokens only: the window already has the other levels' tokens."""
        state = self._requests[request_id]
        columns = state.columns
        if state.shape[HEIGHT] == 1:  # column 0 is the last token: its row is verified, and its argmax is not reported
            state.following[0] = -1
            state.following[1:columns] = token_ids
        else:
            state.following[:columns] = token_ids[-columns:]
        state.shape[COMPUTED] = columns

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        state = self._requests[request_id]
        state.earned = _num_found(*state.candidates, token_ids[:-1])
        accepted = np.array(token_ids, np.int32)
        text = np.concatenate((state.recent, accepted))
        state.recent = text[-self._num_recent :]
        roll_window(state.pool, self._guesses, state.window, state.following, state.recent, accepted)
        if self._has_prompt_ngrams:
            insert_text(state.pool, self._guesses, text[-self._levels - len(accepted) :])

    def window_tokens(self, request_id: str) -> int:
        return self._requests[request_id].earned

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def memory_bytes(self) -> int:
        return sum(state.nbytes for state in self._requests.values())


def _num_found(
    token_ids: Sequence[int], parents: Sequence[int], are_found: Sequence[bool], accepted: Sequence[int]
) -> int:
    """Returns how many window-only nodes are on the path of the accepted tokens down the tree."""
    node, depth, count = -1, 0, 0
    for place, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if depth < len(accepted) and parent == node and token == accepted[depth]:
            node, depth, count = place, depth + 1, count + are_found[place]
    return count


def compile_kernels() -> None:
    """Compiles every kernel by drafting a step, or loads it from the cache on disk."""
    drafter = JacobiDrafter(2, 3)
    drafter.start(DraftRequest("warm-up", [0, 0, 0, 0]))
    (tree,) = drafter.propose([DraftQuery("warm-up", 8, 8)])
    drafter.observe("warm-up", [0] * (len(tree) - tree.num_verified))
    drafter.accept("warm-up", [0])
