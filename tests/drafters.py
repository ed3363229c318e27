"""Drafters for tests: random trees, always wrong ones, and the truth hidden among corrupted siblings."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree


class ScriptedDrafter(Drafter):
    """Base: keeps every request's tokens, checks the order of calls, and knows true continuations by prompt."""

    name = "scripted"

    def __init__(
        self, vocab_size: int, seed: int, continuations: dict[tuple[int, ...], list[int]] | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.rng = random.Random(seed)
        self.continuations = continuations or {}
        self.tokens: dict[str, list[int]] = {}

    def start(self, request: DraftRequest) -> None:
        assert request.request_id not in self.tokens
        self.tokens[request.request_id] = list(request.prompt_token_ids)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.tokens[request_id] += token_ids

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        assert request_id in self.tokens

    def end(self, request_id: str) -> None:
        del self.tokens[request_id]

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self.tree(query) for query in queries]

    @abstractmethod
    def tree(self, query: DraftQuery) -> DraftTree:
        """The proposal for one request."""

    def truth(self, request_id: str) -> list[int]:
        """The tokens that are still to come, where known."""
        tokens = self.tokens[request_id]
        for prompt, continuation in self.continuations.items():
            so_far = len(tokens) - len(prompt)
            if (
                so_far >= 0
                and tuple(tokens[: len(prompt)]) == prompt
                and tokens[len(prompt) :] == continuation[:so_far]
            ):
                return continuation[so_far:]
        return []

    def random_tree(self, query: DraftQuery, forbidden: dict[int, int]) -> DraftTree:
        """A random tree; forbidden[parent] is a token that no child of that node may have."""
        tree, depths, used = DraftTree(), [], set()
        for _ in range(self.rng.randint(0, query.max_tokens)):
            parent = self.rng.randint(-1, len(tree) - 1)
            depth = 1 if parent < 0 else depths[parent] + 1
            token = self.rng.randrange(self.vocab_size)
            if depth > query.max_depth or (parent, token) in used or forbidden.get(parent) == token:
                continue
            used.add((parent, token))
            depths.append(depth)
            tree.add(token, parent, self.rng.random())
        return tree


class RandomTreeDrafter(ScriptedDrafter):
    name = "random"

    def tree(self, query: DraftQuery) -> DraftTree:
        return self.random_tree(query, {})


class HostileDrafter(ScriptedDrafter):
    """Never right: the true next token is never a child of the root."""

    name = "hostile"

    def tree(self, query: DraftQuery) -> DraftTree:
        truth = self.truth(query.request_id)
        return self.random_tree(query, {-1: truth[0]} if truth else {})


class OracleDrafter(ScriptedDrafter):
    """The true continuation down to a random depth, hidden among corrupted siblings at random places."""

    name = "oracle"

    def tree(self, query: DraftQuery) -> DraftTree:
        truth = self.truth(query.request_id)
        depth = self.rng.choice([0, len(truth), self.rng.randint(0, len(truth))])
        depth = min(depth, query.max_depth, max(1, query.max_tokens - 3), len(truth))
        spare = query.max_tokens - depth
        tree, parent = DraftTree(), -1
        for level in range(depth):
            for _ in range(self.rng.randint(0, min(2, spare))):
                wrong = self.rng.randrange(self.vocab_size)
                if spare > 0 and wrong != truth[level] and not self._has_child(tree, parent, wrong):
                    corrupted = tree.add(wrong, parent, 0.5)
                    spare -= 1
                    if spare > 0 and level + 2 <= query.max_depth:  # the truth again, in the wrong place
                        tree.add(truth[level], corrupted, 0.4)
                        spare -= 1
            parent = tree.add(truth[level], parent, 0.9)
        self._corrupt_end(tree, parent, truth[depth] if depth < len(truth) else -1, depth, query)
        return tree

    def _corrupt_end(self, tree: DraftTree, parent: int, right: int, depth: int, query: DraftQuery) -> None:
        """A wrong chain behind the true path, most of the time."""
        for level in range(self.rng.choice([0, 1, 3])):
            wrong = self.rng.randrange(self.vocab_size)
            if len(tree) < query.max_tokens and depth + level < query.max_depth and wrong != right:
                if self._has_child(tree, parent, wrong):
                    return
                parent = tree.add(wrong, parent, 0.1)
                right = -1

    @staticmethod
    def _has_child(tree: DraftTree, parent: int, token: int) -> bool:
        return any(p == parent and t == token for p, t in zip(tree.parents, tree.token_ids, strict=True))
