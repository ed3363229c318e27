"""The trie drafter: branches of the prompt and of outputs, drafted as one hierarchical tree.

After Lookahead (KDD'24, sections 4.2 and 4.3): prompt branches live as long as their request, outputs are inserted on
the fly and shared, retrieval goes from longer to shorter matching suffixes. Unlike its code, the tree is grown by path
probability instead of depth first, matches are merged instead of overwritten, and a prompt is never drafted to others.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.suffix_trie import CHILDREN, Node, SuffixTrie

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CONTEXT = 6  # longest suffix that is looked up
MAX_SOURCES = 4  # contexts blended for one proposal
MIN_PATH_PROB = 0.04  # a node that is less likely than this is not worth its row
# A prompt is learned a part a step, and only its end: neither the step nor the memory depends on its length.
LEARNED_PER_STEP = 256  # tokens, a few milliseconds
LEARNED_AT_MOST = 8192  # tokens, some 30 MB


@dataclass(slots=True)
class _RequestState:
    trie: SuffixTrie
    cursors: list[Node] = field(default_factory=list)
    shared_cursors: list[Node] = field(default_factory=list)
    shared_generation: int = 0
    unlearned: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)  # the last MAX_CONTEXT tokens


class TrieDrafter(Drafter):
    """One trie per request (prompt and own output) and one shared by all (outputs only).

    share_outputs=False keeps every request to itself.
    """

    name = "trie"

    def __init__(self, branch_length: int = 12, capacity: int = 200_000, *, share_outputs: bool = True) -> None:
        self._depth = branch_length + 1
        self._shared = SuffixTrie(self._depth, capacity)
        self._is_sharing = share_outputs
        self._requests: dict[str, _RequestState] = {}

    def start(self, request: DraftRequest) -> None:
        request_id, prompt_token_ids = request.request_id, request.prompt_token_ids
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} has draft state already")
        unlearned = list(prompt_token_ids[-LEARNED_AT_MOST:])
        state = _RequestState(SuffixTrie(self._depth), unlearned=unlearned, tail=unlearned[-MAX_CONTEXT:])
        self._requests[request_id] = state
        self._learn(state)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        state = self._requests[request_id]
        state.unlearned += token_ids
        state.tail = [*state.tail, *token_ids[-MAX_CONTEXT:]][-MAX_CONTEXT:]
        self._learn(state)

    def _learn(self, state: _RequestState) -> None:
        part, state.unlearned = state.unlearned[:LEARNED_PER_STEP], state.unlearned[LEARNED_PER_STEP:]
        state.cursors = state.trie.extend(state.cursors, part)

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        if not self._is_sharing:
            return
        state = self._requests[request_id]
        if state.shared_generation != self._shared.generation:
            state.shared_cursors, state.shared_generation = [], self._shared.generation
        state.shared_cursors = self._shared.extend(state.shared_cursors, token_ids)
        self._shared.prune()

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self._propose(query) for query in queries]

    def _propose(self, query: DraftQuery) -> DraftTree:
        if query.max_tokens < 1 or query.max_depth < 1:
            return DraftTree()
        return _depth_first(_grow(self._sources(self._requests[query.request_id]), query))

    def _sources(self, state: _RequestState) -> list[Node]:
        """Trie nodes of the matching suffixes that have a continuation, longest first, own before shared."""
        sources: list[Node] = []
        for length in range(min(MAX_CONTEXT, len(state.tail)), 0, -1):
            has_own = length <= len(state.cursors) and not state.unlearned  # cursors stand at the end of the text
            own = state.cursors[-length] if has_own else None
            shared = self._shared.find(state.tail[-length:]) if self._is_sharing else None
            for node in (own, shared):
                if node is not None and node[CHILDREN]:
                    sources.append(node)
            if len(sources) >= MAX_SOURCES:
                break
        return sources


def _blend(sources: list[Node]) -> dict[int, float]:
    """Next-token probabilities: each context, longest first, speaks for the mass that longer ones left over."""
    probs: dict[int, float] = {}
    left = 1.0
    for node in sources:
        children = node[CHILDREN]
        if not children:
            continue
        total = 0
        for child in children.values():
            total += child[0]
        # The estimate of a novel token after n sightings with k distinct followers (PPM, method C, tempered).
        share = left / (total + 0.5 * len(children))
        for token, child in children.items():
            probs[token] = probs.get(token, 0.0) + share * child[0]
        left *= 0.5 * len(children) / (total + 0.5 * len(children))
        if left < 0.05:
            break
    return probs


def _grow(sources: list[Node], query: DraftQuery) -> DraftTree:
    """Best-first growth by path probability. Entries of the heap: (-prob, order, token, parent, depth, sources)."""
    tree = DraftTree()
    heap: list[tuple[float, int, int, int, int, list[Node]]] = []
    order = 0

    def push(parent: int, depth: int, path_prob: float, nodes: list[Node]) -> None:
        nonlocal order
        for token, prob in _blend(nodes).items():
            if path_prob * prob >= MIN_PATH_PROB:
                order += 1
                heapq.heappush(heap, (-path_prob * prob, order, token, parent, depth, nodes))

    push(-1, 1, 1.0, sources)
    while heap and len(tree) < query.max_tokens:
        negative, _, token, parent, depth, nodes = heapq.heappop(heap)
        index = tree.add(token, parent, -negative)
        if depth < query.max_depth:
            deeper = [node[CHILDREN][token] for node in nodes if token in node[CHILDREN]]
            push(index, depth + 1, -negative, deeper)
    return tree


def _depth_first(tree: DraftTree) -> DraftTree:
    """The same tree in depth-first order; growth has put likelier siblings first already."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(i)
    ordered = DraftTree()
    stack = [(i, -1) for i in reversed(children.get(-1, []))]
    while stack:
        i, parent = stack.pop()
        index = ordered.add(tree.token_ids[i], parent, tree.probs[i])
        stack.extend((child, index) for child in reversed(children.get(i, [])))
    return ordered
