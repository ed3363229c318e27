"""The draft trees of one step as a few arrays: what is done to all of their nodes is one call, not one a request."""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchserve.draft.base import DraftQuery, DraftTree
from batchserve.native.jit import njit

if TYPE_CHECKING:
    from collections.abc import Sequence


@njit(cache=True, nogil=True)
def _take(starts, token_ids, parents, probs, is_verified, keep, taken):  # type: ignore[no-untyped-def]
    """Copy the nodes to keep into `taken`, arrays as those before.

    Returns their number, or -1 if a parent is not kept or does not come before its node.
    """
    new_starts, new_tokens, new_parents, new_probs, new_verified = taken
    places = np.empty(len(keep), np.int64)
    count = 0
    for tree in range(len(starts) - 1):
        first = count
        for node in range(starts[tree], starts[tree + 1]):
            parent = parents[node]
            if not -1 <= parent < node - starts[tree]:
                return -1
            if not keep[node]:
                continue
            if parent >= 0 and not keep[starts[tree] + parent]:
                return -1
            places[node] = count - first
            new_tokens[count], new_probs[count], new_verified[count] = token_ids[node], probs[node], is_verified[node]
            new_parents[count] = places[starts[tree] + parent] if parent >= 0 else -1
            count += 1
        new_starts[tree + 1] = count
    return count


@njit(cache=True, nogil=True)
def _is_sound(starts, token_ids, parents, probs, is_verified, bounds, vocab_size):  # type: ignore[no-untyped-def]
    """Whether all trees keep DraftTree's contract; bounds [num_trees, 3]: most nodes, deepest verified, deepest row."""
    depths = np.empty(len(parents), np.int64)
    if starts[0] != 0 or starts[-1] != len(parents):
        return False
    for tree in range(len(starts) - 1):
        start, end = starts[tree], starts[tree + 1]
        if not start <= end <= len(parents) or end - start > bounds[tree, 0]:
            return False
        for node in range(start, end):
            parent = parents[node]
            if not -1 <= parent < node - start or not 0 <= token_ids[node] < vocab_size:
                return False
            if not 0.0 <= probs[node] <= MAX_CLAIMED:  # not of NaN either
                return False
            depths[node] = 1 if parent < 0 else depths[start + parent] + 1
            if depths[node] > bounds[tree, 1 if is_verified[node] else 2]:
                return False
            if not is_verified[node]:
                continue
            if parent >= 0 and not is_verified[start + parent]:
                return False
            for other in range(start + max(0, parent + 1), node):
                if parents[other] == parent and token_ids[other] == token_ids[node] and is_verified[other]:
                    return False
    return True


@njit(cache=True, nogil=True)
def _spread(starts, places, spread_starts):  # type: ignore[no-untyped-def]
    """Fill the starts of more trees than there are: tree i comes to places[i], and the others are empty."""
    tree = 0
    for place in range(len(spread_starts) - 1):
        spread_starts[place] = starts[tree]
        tree += tree < len(places) and places[tree] == place
    spread_starts[-1] = starts[tree]


ANY_TOKEN = 1 << 31
MAX_CLAIMED = 1.001  # of products of probabilities, which are rounded
FORCED = 2.0  # in the place of a path probability: the token is sure to follow its parent's. Not for drafters
_NO_NODES = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.bool_)


class DraftQueries(NamedTuple):
    """What the trees of one step may be, tree by tree: see DraftQuery.

    bounds int64 [num_queries, 3]: the most nodes, the deepest that is verified, the deepest of all; min_probs float64
    [num_queries].
    """

    request_ids: Sequence[str]
    bounds: np.ndarray
    min_probs: np.ndarray

    @classmethod
    def of(cls, queries: Sequence[DraftQuery]) -> DraftQueries:
        bounds = [(query.max_tokens, query.max_depth, query.max_row_depth) for query in queries]
        min_probs = np.array([query.min_prob for query in queries], np.float64)
        return cls([query.request_id for query in queries], np.array(bounds, np.int64).reshape(-1, 3), min_probs)

    def at(self, places: Sequence[int]) -> DraftQueries:
        """Some of them."""
        return DraftQueries([self.request_ids[i] for i in places], self.bounds[places], self.min_probs[places])

    def each(self) -> list[DraftQuery]:
        return [
            DraftQuery(request_id, most, depth, row_depth, min_prob)
            for request_id, (most, depth, row_depth), min_prob in zip(
                self.request_ids, self.bounds.tolist(), self.min_probs.tolist(), strict=True
            )
        ]


class DraftForest(NamedTuple):
    """Draft trees node behind node; tree i has the nodes from starts[i] to starts[i + 1].

    starts int64 [num_trees + 1]; of each node token_ids and parents (inside its tree) int64, probs float64, is_verified
    bool: see DraftTree.
    """

    starts: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    probs: np.ndarray
    is_verified: np.ndarray

    @property
    def num_trees(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> DraftForest:
        """Raises ValueError on a tree whose fields are of different lengths."""
        for tree in trees:
            if not len(tree.token_ids) == len(tree.parents) == len(tree.probs) == len(tree.is_verified):
                raise ValueError(f"draft tree of {len(tree)} tokens: parents, probs or is_verified are not as many")
        starts = np.array([0, *accumulate(map(len, trees))])
        size = int(starts[-1])
        return cls(
            starts,
            np.fromiter(chain.from_iterable(tree.token_ids for tree in trees), np.int64, size),
            np.fromiter(chain.from_iterable(tree.parents for tree in trees), np.int64, size),
            np.fromiter(chain.from_iterable(tree.probs for tree in trees), np.float64, size),
            np.fromiter(chain.from_iterable(tree.is_verified for tree in trees), np.bool_, size),
        )

    @classmethod
    def empty(cls, num_trees: int) -> DraftForest:
        """Trees without nodes."""
        return cls(np.zeros(num_trees + 1, np.int64), *_NO_NODES)

    @classmethod
    def merged(cls, parts: Sequence[tuple[Sequence[int], DraftForest]]) -> DraftForest:
        """The trees of several forests as one, each beside the places that its trees come to.

        Raises ValueError where these are not as many.
        """
        for places, forest in parts:
            if forest.num_trees != len(places):
                raise ValueError(f"{forest.num_trees} draft trees for {len(places)} queries")
        order = np.argsort(np.concatenate([places for places, _ in parts]))
        sizes = np.concatenate([forest.sizes for _, forest in parts])
        began, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        nodes = np.arange(starts[-1]) + np.repeat(began - starts[:-1], sizes)
        fields = zip(*(forest[1:] for _, forest in parts), strict=True)
        return cls(starts, *(np.concatenate(each)[nodes] for each in fields))

    @property
    def sizes(self) -> np.ndarray:
        """int64 [num_trees]: how many nodes each has."""
        sizes: np.ndarray = self.starts[1:] - self.starts[:-1]
        return sizes

    def spread(self, places: np.ndarray, num_trees: int) -> DraftForest:
        """The same trees at ascending `places` among more of them; the others are empty."""
        starts = np.empty(num_trees + 1, np.int64)
        _spread(self.starts, places, starts)
        return DraftForest(starts, self.token_ids, self.parents, self.probs, self.is_verified)

    def trees(self) -> list[DraftTree]:
        token_ids, parents, probs = self.token_ids.tolist(), self.parents.tolist(), self.probs.tolist()
        is_verified = self.is_verified.tolist()
        return [
            DraftTree(token_ids[a:b], parents[a:b], probs[a:b], is_verified[a:b])
            for a, b in pairwise(self.starts.tolist())
        ]

    def take(self, keep: np.ndarray) -> DraftForest:
        """The trees of the nodes to keep, bool [num_nodes]; of each its parent must be among them, and come before it.

        Raises ValueError otherwise.
        """
        starts, (tokens, parents) = np.zeros(len(self.starts), np.int64), np.empty((2, len(keep)), np.int64)
        probs, is_verified = np.empty(len(keep)), np.empty(len(keep), np.bool_)
        taken = starts, tokens, parents, probs, is_verified
        size = _take(self.starts, self.token_ids, self.parents, self.probs, self.is_verified, keep, taken)
        if size < 0:
            raise ValueError("a draft node's parent does not come before it, or is left out")
        return DraftForest(starts, tokens[:size], parents[:size], probs[:size], is_verified[:size])

    def verified(self) -> DraftForest:
        """The trees of the verified nodes alone."""
        return self.take(self.is_verified) if 0 in self.is_verified.tobytes() else self

    def check(self, queries: DraftQueries, vocab_size: int = ANY_TOKEN) -> None:
        """Raises ValueError on a tree that breaks the contract, or is more than its query asks for."""
        if not all(isinstance(each, np.ndarray) and each.ndim == 1 for each in self):
            raise ValueError("draft trees whose fields are not arrays of one dimension")
        if len(queries.request_ids) != self.num_trees:
            raise ValueError(f"{self.num_trees} draft trees for {len(queries.request_ids)} queries")
        if len({len(each) for each in self[1:]}) > 1:
            raise ValueError(f"draft trees whose fields have {[len(each) for each in self[1:]]} nodes")
        if not _is_sound(*self, queries.bounds, vocab_size):
            for tree, query in zip(self.trees(), queries.each(), strict=True):
                tree.check(query)
            raise ValueError(f"draft trees break their contract: tokens in 0..{vocab_size - 1}, probs in 0..1")


def compile_kernels() -> None:
    """Compile every kernel, or load it from the cache on disk."""
    forest = DraftForest.of([DraftTree([1], [-1], [1.0])])
    forest.take(np.ones(1, np.bool_))
    bounds = np.ones((1, 3), np.int64)
    forest.spread(np.zeros(1, np.int64), 1)
    _is_sound(*forest, bounds, ANY_TOKEN)
