"""The trie drafter: branches of prompts and outputs, drafted as one tree (Lookahead, KDD'24, arXiv 2312.12728).

It implements sections 4.2 and 4.3 with two stores. Each scope has a trie of its outputs, as branches with frequencies,
which decay prunes at a capacity. A request's own text (prompt, references, answer) is only indexed, and its branches
are read wherever the last tokens occur in it. So a prompt of any length can be drafted from at once, no other request
can reach it, and eliminating its branches means dropping the text. Unlike the published code, matches are merged by
prefix instead of overwritten, and the tree is grown by path probability instead of depth first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchserve.config import MiB
from batchserve.draft import trie_growth, trie_kernels
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.text_index import TextIndex
from batchserve.errors import ConfigError
from batchserve.native import pages
from batchserve.request import DraftScope

if TYPE_CHECKING:
    from collections.abc import Sequence

MODES = {
    "hierarchical": trie_growth.HIERARCHICAL,
    "parallel": trie_growth.PARALLEL,
    "single": trie_growth.SINGLE,
}
PROMPT_WEIGHT = 4.0
MIN_ROWS = 1024
ROW_BYTES = 4 * (trie_kernels.NODE_WIDTH + 1)  # a node and its bucket
SCOPE_BYTES = 16 << 10  # counted for each scope in addition to its nodes, so empty scopes are bounded, too
MIN_ANSWER = 512  # tokens that a text has room for before it grows
MAX_TEXT = 1 << 30  # tokens of one request, never reached: its index must not wrap


class _SharedTrie:
    """The trie of one scope's outputs, and the number of requests that use it."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.clear()

    def clear(self) -> None:
        """Drops all branches. Open branches lead nowhere from then on and have to be started anew."""
        self.nodes = np.zeros((MIN_ROWS, trie_kernels.NODE_WIDTH), dtype=np.int32)
        self.buckets = np.zeros(MIN_ROWS, dtype=np.int32)
        self.header = np.array(trie_kernels.EMPTY_HEADER, dtype=np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.nodes, self.buckets, self.header

    @property
    def num_nodes(self) -> int:
        return int(self.header[trie_kernels.NUM_NODES])

    @property
    def num_rows(self) -> int:
        """Rows that were ever used. The rows after them are not counted: in large arrays they are zero pages."""
        return int(self.header[trie_kernels.USED])

    def memory_bytes(self) -> int:
        return self.num_rows * ROW_BYTES + SCOPE_BYTES

    def insert(self, branches: _Branches, token_ids: Sequence[int] | np.ndarray, capacity: int, max_rows: int) -> None:
        """Inserts the next tokens of a text: every branch that ends in one of them."""
        wanted = min(self.num_rows + len(token_ids) * len(branches.cursors), max_rows)
        if wanted > len(self.nodes):
            # Grows eightfold to copy rarely. The unused rest takes no memory.
            rows = max(wanted, min(8 * len(self.nodes), max_rows))
            nodes = pages.zeros((rows, trie_kernels.NODE_WIDTH), np.int32)
            buckets = pages.zeros(rows, np.int32)
            nodes[: len(self.nodes)], buckets[: len(self.buckets)] = self.nodes, self.buckets
            self.nodes, self.buckets = nodes, buckets
        tokens = np.array(token_ids, dtype=np.int32)
        trie_kernels.insert_branches(
            self.nodes, self.buckets, self.header, branches.cursors, branches.num_tokens, tokens, capacity, max_rows
        )
        branches.num_tokens += len(tokens)


class _Branches:
    """The open branches of one text that is being inserted."""

    def __init__(self, depth: int) -> None:
        self.cursors = np.zeros((depth, 3), dtype=np.int32)
        self.num_tokens = 0


@dataclass(slots=True)
class _RequestState:
    text: TextIndex  # references, prompt and answer, one after another; never wraps
    readable: int  # drafts read the text up to here
    trie: _SharedTrie | None
    branches: _Branches


class TrieDrafter(Drafter):
    """Drafts branches of the request's own text and of its scope's outputs.

    decoding_length: the most nodes of one draft. branch_length: the depth of drafts, and of branches after their first
    token. capacity: the most nodes of one tree, which is all branches that begin with one token; None: 16 x
    decoding_length (table 4). prompt_weight: how much a branch of the own text counts relative to a shared one; None:
    4. min_retrieved_tokens: matches are shortened until they have yielded this many tokens; None: twice the
    decoding_length. mode: "hierarchical" merges branches by prefix; "parallel" drafts the likeliest branch after every
    first token, without branching again; "single" drafts the likeliest branch alone.

    max_scope_bytes bounds what one scope keeps of outputs, max_total_bytes what all scopes keep. For the total, idle
    scopes are dropped, least recently used first. In a full scope, or if no scope is idle, frequency decay makes room.

    Raises ConfigError.
    """

    name = "trie"

    def __init__(
        self,
        *,
        decoding_length: int = 64,
        branch_length: int = 12,
        capacity: int | None = None,
        mode: str = "hierarchical",
        prompt_weight: float | None = None,
        min_retrieved_tokens: int | None = None,
        max_scope_bytes: int = 64 * MiB,
        max_total_bytes: int = 256 * MiB,
    ) -> None:
        capacity = 16 * decoding_length if capacity is None else capacity
        prompt_weight = PROMPT_WEIGHT if prompt_weight is None else prompt_weight
        min_retrieved_tokens = 2 * decoding_length if min_retrieved_tokens is None else min_retrieved_tokens
        bounds = {
            "decoding_length": decoding_length,
            "branch_length": branch_length,
            "capacity": capacity,
            "min_retrieved_tokens": min_retrieved_tokens,
            "max_scope_bytes": max_scope_bytes,
            "max_total_bytes": max_total_bytes,
        }
        for name, value in bounds.items():
            if value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")
        if mode not in MODES:
            raise ConfigError(f"mode = {mode!r}: must be one of {', '.join(MODES)}")
        if not 0 < prompt_weight < float("inf"):
            raise ConfigError(f"prompt_weight = {prompt_weight}: must be a finite number > 0")
        self._decoding_length = decoding_length
        self._branch_length = branch_length
        self._mode = MODES[mode]
        self._prompt_weight = float(prompt_weight)
        self._min_retrieved_tokens = min_retrieved_tokens
        self._max_rows = max(1, max_scope_bytes // ROW_BYTES)
        self._max_total_bytes = max_total_bytes
        self._capacity = capacity
        self._requests: dict[str, _RequestState] = {}
        self._scopes: dict[DraftScope, _SharedTrie] = {}  # least recently used first
        self._shared_bytes = 0
        self._nothing = _SharedTrie().arrays
        self._slots = np.zeros(trie_growth.NUM_SLOTS, dtype=np.int32)
        self._out = (
            np.zeros(decoding_length, dtype=np.int32),
            np.zeros(decoding_length, dtype=np.int32),
            np.zeros(decoding_length, dtype=np.float64),
        )

    def start(self, request: DraftRequest) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} has draft state already")
        texts = [*request.references, request.prompt_token_ids]
        text = TextIndex(MAX_TEXT, 1 << (sum(len(each) + 1 for each in texts) + MIN_ANSWER).bit_length())
        for each in texts:
            text.separate()
            text.append(each)
        trie = self._use_scope(request.scope) if request.scope is not None else None
        self._requests[request.request_id] = _RequestState(text, len(text), trie, self._branches())

    def _use_scope(self, scope: DraftScope) -> _SharedTrie:
        trie = self._scopes.pop(scope, None)
        if trie is None:
            trie = _SharedTrie()
            self._shared_bytes += trie.memory_bytes()
        self._scopes[scope] = trie
        trie.num_requests += 1
        self._make_room(0)
        return trie

    def _make_room(self, num_rows: int) -> int:
        """Drops idle scopes until num_rows more rows are in bounds. Returns how many are."""
        free = self._max_total_bytes - self._shared_bytes
        if free < num_rows * ROW_BYTES:
            for scope in [scope for scope, trie in self._scopes.items() if trie.num_requests == 0]:
                size = self._scopes.pop(scope).memory_bytes()
                self._shared_bytes -= size
                free += size
                if free >= num_rows * ROW_BYTES:
                    break
        return max(0, free // ROW_BYTES)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        state = self._requests[request_id]
        state.text.append(token_ids)
        state.readable = len(state.text)

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        state = self._requests[request_id]
        if state.trie is not None:
            self._insert(state.trie, state.branches, token_ids)

    def _insert(self, trie: _SharedTrie, branches: _Branches, token_ids: Sequence[int] | np.ndarray) -> None:
        before = trie.num_rows
        room = self._make_room(min(len(token_ids) * len(branches.cursors), self._max_rows - before))
        trie.insert(branches, token_ids, self._capacity, min(self._max_rows, before + room))
        self._shared_bytes += (trie.num_rows - before) * ROW_BYTES

    def end(self, request_id: str) -> None:
        state = self._requests.pop(request_id, None)
        if state is None or state.trie is None:
            return
        state.trie.num_requests -= 1
        self._make_room(0)

    def _branches(self) -> _Branches:
        return _Branches(self._branch_length + 1)  # with the token that they begin with

    def clear_scope(self, scope: DraftScope) -> None:
        trie = self._scopes.get(scope)
        if trie is None:
            return
        self._shared_bytes -= trie.memory_bytes()
        if trie.num_requests == 0:
            del self._scopes[scope]
            return
        trie.clear()
        for state in self._requests.values():
            if state.trie is trie:
                state.branches = self._branches()
        self._shared_bytes += trie.memory_bytes()

    def memory_bytes(self) -> int:
        return self._shared_bytes + sum(state.text.nbytes for state in self._requests.values())

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self._propose(query) for query in queries]

    def _propose(self, query: DraftQuery) -> DraftTree:
        state = self._requests[query.request_id]
        max_tokens = min(query.max_tokens, self._decoding_length)
        max_depth = min(query.max_depth, self._branch_length)
        if max_tokens < 1 or max_depth < 1:
            return DraftTree()
        token_ids, parents, probs = self._out
        count = trie_growth.grow_draft(
            state.text.source,
            state.readable,
            self._nothing if state.trie is None else state.trie.arrays,
            max_tokens,
            max_depth,
            self._min_retrieved_tokens,
            self._prompt_weight,
            self._mode,
            self._slots,
            self._out,
        )
        return DraftTree(token_ids[:count].tolist(), parents[:count].tolist(), probs[:count].tolist())


def compile_kernels() -> None:
    """Compiles everything that a drafter calls, or loads it from Numba's cache on disk. Repeating it does nothing."""
    drafter = TrieDrafter()
    drafter.start(DraftRequest("warm-up", [1, 2, 1, 2, 3], scope=DraftScope("", "")))
    drafter.accept("warm-up", [1])
    drafter.share("warm-up", [1])
    drafter.propose([DraftQuery("warm-up", 4, 4)])
