"""The mixture drafter, the default: whatever has followed the same words before, weighed by what that was worth.

It goes beyond the published systems in what it blends (all matching contexts of a request's and its scope's texts, with
weights learned online; mixture_kernels.py) and in how it grows a tree (best-first by path probability;
mixture_growth.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batchserve.config import MiB
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.draft_cache import SavedScope, read_scopes, write_scopes
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.draft.mixture_batch import (
    GROW_JOB,
    NUM_WEIGHTS,
    REQUEST,
    accept_all,
    begin_request,
    grow_all,
    grow_loop,
    scope_addresses,
)
from batchserve.draft.mixture_batch import compile_kernels as compile_kernels
from batchserve.draft.mixture_kernels import (
    NODE,
    OCCURRENCE,
    ROOM,
    SCRATCH,
    count_common,
    initial_weights,
    make_common,
)
from batchserve.draft.mixture_noise import noise_bin_of
from batchserve.draft.text_index import BYTES_PER_TOKEN, MIN_CAPACITY, START, TextIndex
from batchserve.errors import ConfigError
from batchserve.native.pool import ONE_THREAD, Team
from batchserve.request import DraftScope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)
SHARED_AT_ONCE = 32  # published tokens of one request that wait for being written to its scope in one piece
CONTEXT = 8  # tokens repeated before such a piece, so that its beginning has a context, too
SCOPE_BYTES = 16 << 10  # what a scope is counted for beside its text: weights, the commonest tokens
MIN_SCOPE_BYTES = MIN_CAPACITY * BYTES_PER_TOKEN + SCOPE_BYTES
REQUEST_BYTES = NODE.itemsize + ROOM * OCCURRENCE.itemsize  # what a request takes beside its text
LATE_LEARNED = 2  # tokens
MAX_THREADS = 8
SHARED_NODES = 400  # to wake threads for fewer takes about as long as they save
MIN_GROWTH = 2  # by less than such a part of what it has no scope grows, nor are others dropped for it
UNBOUNDED = 1 << 40  # a request's own text is bounded by its context


@dataclass(slots=True)
class _Experience:
    """Mixing weights, and how often each was learned from."""

    weights: np.ndarray = field(default_factory=initial_weights)
    seen: np.ndarray = field(default_factory=lambda: np.zeros(NUM_WEIGHTS, np.int64))


class _Scope:
    """The published answers of one key's requests, and what was learned from them."""

    def __init__(self, index: TextIndex) -> None:
        self.writer = ""  # the request whose text is open
        self.num_requests = 0
        self.counted_bytes = 0  # of nbytes, by the drafter
        self.card = np.zeros(6, np.int64)  # where its arrays are, for compiled code
        self.begin(index, _Experience())

    def begin(self, index: TextIndex, experience: _Experience) -> None:
        """Go on with these, and forget what it had."""
        self.index, self.experience, self.common = index, experience, make_common()
        self.card[:] = scope_addresses(index, self.common, experience.weights, experience.seen)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + SCOPE_BYTES

    def saved(self, key: DraftScope) -> SavedScope:
        return SavedScope(key, self.index.tokens(), self.experience.weights, self.experience.seen)


@dataclass(slots=True)
class _RequestState:
    slot: int  # its row in the drafter's table
    own: TextIndex  # references, prompt, answer
    scope: _Scope  # nobody else's, and never written to, where nothing is shared
    is_sharing: bool
    root: np.ndarray = field(default_factory=lambda: np.zeros(1, NODE))
    found: np.ndarray = field(default_factory=lambda: np.empty(ROOM, OCCURRENCE))  # the root's occurrences
    published: list[int] = field(default_factory=list)  # not yet written to the scope
    context: list[int] = field(default_factory=list)  # the last CONTEXT tokens that were


class MixtureDrafter(Drafter):
    """Contexts of a request's own text and of its scope's answers, blended; trees grown best-first.

    A scope takes at most max_scope_bytes; there its oldest text is overwritten. All scopes together take at most
    max_total_bytes (and, for a new scope of a request that runs, some tens of kilobytes): scopes that nobody uses go
    first, then none grows. A request's own text takes BYTES_PER_TOKEN a token, and REQUEST_BYTES beside, until it ends.
    is_using_noise=False drafts sampled requests as if they were greedy (to measure what the noise gains).
    """

    name = "mixture"

    def __init__(
        self,
        branch_length: int = 64,
        *,
        max_scope_bytes: int = 64 * MiB,
        max_total_bytes: int = 256 * MiB,
        is_using_noise: bool = True,
    ) -> None:
        for name, value in (("max_scope_bytes", max_scope_bytes), ("max_total_bytes", max_total_bytes)):
            if value < MIN_SCOPE_BYTES:
                raise ConfigError(f"{name} = {value}: must be at least {MIN_SCOPE_BYTES}, the smallest scope")
        self._branch_length = branch_length
        self._is_using_noise = is_using_noise
        self._max_scope_tokens = (max_scope_bytes - SCOPE_BYTES) // BYTES_PER_TOKEN
        self._max_total_bytes = max_total_bytes
        self._requests: dict[str, _RequestState] = {}
        self._scopes: dict[DraftScope, _Scope] = {}  # the one that was used last comes last
        self._scope_bytes = 0  # of all of them
        self._table = np.zeros(0, REQUEST)
        self._free: list[int] = []  # rows of the table
        self._found: tuple[list[str], np.ndarray] = [], np.zeros(0, np.int64)  # whose slots were asked for last
        self._is_verified = np.zeros(0, np.bool_)
        self._team = ONE_THREAD
        self._job = np.zeros(1, GROW_JOB)
        self._make_nodes(1)

    def use_threads(self, team: Team) -> None:
        self._team = team
        self._make_nodes(self._nodes.shape[1])

    def _make_nodes(self, count: int) -> None:
        """Work memory of each thread's largest tree; what is not used of it is address space only."""
        size = max(1, min(self._team.size, MAX_THREADS))
        self._nodes, self._scratch = np.zeros((size, count), NODE), np.zeros(size, SCRATCH)
        self._room = np.empty((size, count * ROOM), OCCURRENCE)
        self._scratch["room"] = self._room.ctypes.data + self._room.strides[0] * np.arange(size)
        self._own_nodes = self._nodes[0]  # of the thread that makes all calls
        self._work = (self._nodes, self._scratch)
        self._own_work = (self._nodes[:1], self._scratch[:1])

    def start(self, request: DraftRequest) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} has draft state already")
        texts = [*request.references, request.prompt_token_ids]
        own = TextIndex(UNBOUNDED, sum(map(len, texts)) + len(texts) + 256)
        for text in texts:
            own.separate()
            own.append(text)
        own.mark_answer_start()
        # What may be refused comes before anything is taken.
        noise_bin = noise_bin_of(request.temperature if self._is_using_noise else 0.0, NUM_WEIGHTS)
        position, seed = len(request.prompt_token_ids), np.uint64(request.seed)
        scope = self._open(request.scope) if request.scope is not None else _Scope(TextIndex(1))
        state = _RequestState(self._new_slot(), own, scope, request.scope is not None)
        where = (own.address, scope.card, state.root, state.found)
        begin_request(self._table, state.slot, *where, position, noise_bin, seed)
        self._requests[request.request_id] = state

    def _new_slot(self) -> int:
        if not self._free:
            size = len(self._table)
            self._free = list(range(2 * size + 15, size - 1, -1))
            self._table = np.concatenate((self._table, np.zeros(len(self._free), REQUEST)))
        return self._free.pop()

    def _open(self, key: DraftScope) -> _Scope:
        scope = self._scopes.pop(key, None) or self._new_scope()
        self._scopes[key] = scope
        self._count(scope)
        scope.num_requests += 1
        return scope

    def _new_scope(self) -> _Scope:
        scope = _Scope(TextIndex(self._max_scope_tokens))
        self._is_room_for(scope.nbytes)
        return scope

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return self.propose_all(DraftQueries.of(queries)).trees()

    def propose_all(self, queries: DraftQueries) -> DraftForest:
        slots = self._slots(queries.request_ids)
        starts = np.zeros(len(slots) + 1, np.int64)
        wanted = [max(0, most) for most in queries.bounds[:, 0].tolist()]
        size = sum(wanted)
        if len(self._own_nodes) < (largest := max(wanted, default=0)):
            self._make_nodes(largest)
        if len(self._is_verified) < size:
            self._is_verified = np.ones(size, np.bool_)
        links, probs, bounds = np.empty((3, size), np.int64), np.empty(size), (queries.bounds, queries.min_probs)
        work, team = (self._own_work, ONE_THREAD) if size < SHARED_NODES else (self._work, self._team)
        memory, trees = (self._job, np.zeros(len(slots), np.int64)), (starts, links, probs)
        grow_all(self._table, slots, bounds, self._branch_length, work, memory, trees, grow_loop().address, tuple(team))
        end = int(starts[-1])
        return DraftForest(starts, links[0, :end], links[1, :end], probs[:end], self._is_verified[:end])

    def _slots(self, request_ids: Iterable[str]) -> np.ndarray:
        names = list(request_ids)
        if names != self._found[0]:
            self._found = names, np.array([self._requests[name].slot for name in names], np.int64)
        return self._found[1]

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.accept_all({request_id: token_ids})

    def accept_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        self._accept(token_ids, UNBOUNDED)

    def catch_up(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """All of it is text to draft from; weights are learned from the last few tokens only, for that takes longer."""
        self._accept(token_ids, LATE_LEARNED)

    def _accept(self, token_ids: Mapping[str, Sequence[int]], max_learned: int) -> None:
        slots = self._slots(token_ids)
        starts = np.array([0, *accumulate(map(len, token_ids.values()))])
        tokens = np.array(list(chain.from_iterable(token_ids.values())), np.int32)
        learned, request_ids = 0, list(token_ids)
        while learned < len(slots):
            rest = (max_learned, learned, self._own_nodes, self._scratch)
            learned = accept_all(self._table, slots, starts, tokens, *rest)
            if learned < len(slots):
                name = request_ids[learned]
                self._requests[name].own.reserve(len(token_ids[name]))

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.share_all({request_id: token_ids})

    def share_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        states = self._requests
        for request_id, tokens in token_ids.items():
            state = states[request_id]
            if state.is_sharing:
                state.published += tokens
                if len(state.published) >= SHARED_AT_ONCE:
                    self._write(request_id, state)

    def _write(self, request_id: str, state: _RequestState) -> None:
        """Published tokens go to the scope in pieces: texts of several requests alternate there."""
        scope, tokens = state.scope, state.published
        self._make_room(scope, CONTEXT + 2 + len(tokens))
        if scope.writer == request_id:
            scope.index.append(tokens)
        elif state.context:
            scope.index.separate()
            # The context's last token was the end of a piece: only here is it followed by what comes next.
            scope.index.append(state.context + tokens, first_indexed=len(state.context) - 1)
        else:
            scope.index.append([START, *tokens])
        self._count(scope)
        scope.writer = request_id
        count_common(scope.common, np.array(tokens, np.int32))
        state.context = (state.context + tokens)[-CONTEXT:]
        state.published = []

    def _make_room(self, scope: _Scope, num_tokens: int) -> None:
        """Let the scope grow, as far as the bound on all of them allows."""
        index = scope.index
        index.max_tokens = self._max_scope_tokens
        if index.capacity_for(num_tokens) == index.capacity:
            return
        others = sum(each.counted_bytes for each in self._scopes.values() if each.num_requests and each is not scope)
        most = (self._max_total_bytes - others - SCOPE_BYTES) // BYTES_PER_TOKEN  # without those that nobody uses
        if most < index.capacity + index.capacity // MIN_GROWTH:
            index.max_tokens = index.capacity
            return
        index.max_tokens = min(self._max_scope_tokens, most)
        wanted = index.capacity_for(num_tokens) * BYTES_PER_TOKEN - index.nbytes
        if wanted > 0 and not self._is_room_for(wanted):
            index.max_tokens = index.capacity

    def _is_room_for(self, num_bytes: int) -> bool:
        """Whether so much more may be taken; drops scopes that nobody uses, the longest unused first, if need be."""
        while self._scope_bytes + num_bytes > self._max_total_bytes:
            unused = next((key for key, scope in self._scopes.items() if scope.num_requests == 0), None)
            if unused is None:
                return False
            self._drop(unused)
        return True

    def _count(self, scope: _Scope) -> None:
        """Bring the sum up to date: there may be thousands of scopes, and every request would wait for all of them."""
        self._scope_bytes += scope.nbytes - scope.counted_bytes
        scope.counted_bytes = scope.nbytes

    def _drop(self, key: DraftScope) -> None:
        self._scope_bytes -= self._scopes.pop(key).counted_bytes

    def end(self, request_id: str) -> None:
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        self._found = [], np.zeros(0, np.int64)
        scope = state.scope
        try:
            if state.published:
                self._write(request_id, state)
        finally:  # a scope may have no room for it
            self._free.append(state.slot)
            scope.num_requests -= 1
        if state.is_sharing and scope.writer == request_id:
            scope.writer = ""
            scope.index.separate()
            self._count(scope)

    def clear_scope(self, scope: DraftScope) -> None:
        cleared = self._scopes.get(scope)
        if cleared is None:
            return
        for state in self._requests.values():
            if state.scope is cleared:
                state.published, state.context = [], []
                self._table["is_root_known"][state.slot] = 0
        cleared.begin(TextIndex(self._max_scope_tokens), _Experience())
        cleared.writer = ""
        self._count(cleared)
        if cleared.num_requests == 0:
            self._drop(scope)

    def memory_bytes(self) -> int:
        own = sum(state.own.nbytes + REQUEST_BYTES for state in self._requests.values())
        return own + sum(scope.nbytes for scope in self._scopes.values())

    def num_tokens(self) -> int:
        """How many all scopes keep, with those that stand between two texts."""
        return sum(len(scope.index) for scope in self._scopes.values())

    def save(self, path: Path, fingerprint: str) -> None:
        """Write all scopes: whole, or not at all. `fingerprint` names the tokenizer that the ids are of.

        Nobody else may read the file. Where path is a link, what it leads to is replaced. Raises OSError.
        """
        write_scopes(path, fingerprint, [scope.saved(key) for key, scope in self._scopes.items()])

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        """Take over scopes that `save` wrote, in place of those of the same key.

        Raises ConfigError for what is not such a file, is damaged or larger than what may be kept, or belongs to
        another tokenizer or version. What does not fit is left out, the oldest first, with a warning.
        """
        all_saved = read_scopes(path, fingerprint, vocab_size, self._max_total_bytes)
        for saved in all_saved:
            if saved.key in self._scopes:
                self._drop(saved.key)
            scope = self._new_scope()
            scope.begin(scope.index, _Experience(saved.weights, saved.seen))
            self._make_room(scope, len(saved.text))
            scope.index.append(saved.text)
            scope.index.separate()
            count_common(scope.common, saved.text)
            self._scopes[saved.key] = scope
            self._count(scope)
        total = sum(len(saved.text) for saved in all_saved)
        kept = sum(len(self._scopes[saved.key].index) for saved in all_saved if saved.key in self._scopes)
        if kept < total:
            logger.warning("%s: max_scope_bytes and max_draft_bytes leave room for %d of %d tokens", path, kept, total)
