"""A trie of every window of up to `depth` tokens of a text, with frequencies; it grows token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Node = list[Any]  # [count, {token: Node}]: a list is the cheapest mutable pair that Python has
COUNT, CHILDREN = 0, 1


class SuffixTrie:
    """Windows of every text that was fed, merged by prefix (Lookahead, KDD'24, section 4.2).

    `capacity` bounds the number of nodes; at the bound all counts are halved and what falls to zero is dropped, and if
    that is not enough the rarest leaves go, so memory is bounded whatever the texts are.
    """

    def __init__(self, depth: int, capacity: int | None = None) -> None:
        self.depth = depth
        self.capacity = capacity
        self.num_nodes = 0
        self.generation = 0  # changes when pruning invalidates cursors
        self.root: Node = [0, {}]

    def extend(self, cursors: list[Node], token_ids: Iterable[int]) -> list[Node]:
        """Feed the next tokens of a text; `cursors` are its open windows (longest first), [] at its start.

        Returns the new cursors: the nodes of all suffixes of the text, of depth - 1 tokens down to one.
        """
        keep = self.depth - 1
        for token in token_ids:
            cursors.append(self.root)
            opened = []
            for node in cursors:
                children = node[CHILDREN]
                child = children.get(token)
                if child is None:
                    child = children[token] = [0, {}]
                    self.num_nodes += 1
                child[COUNT] += 1
                opened.append(child)
            self.root[COUNT] += 1
            cursors = opened[-keep:] if keep else []
        return cursors

    def find(self, suffix: Sequence[int]) -> Node | None:
        """The node of exactly this token sequence, or None."""
        node = self.root
        for token in suffix:
            node = node[CHILDREN].get(token)
            if node is None:
                return None
        return node

    def prune(self) -> bool:
        """Decay until at most three quarters of the capacity are left; True if anything was dropped."""
        if self.capacity is None or self.num_nodes <= self.capacity:
            return False
        target = self.capacity * 3 // 4
        while self.num_nodes > target:
            self._decay(self.root)
            self.num_nodes = sum(1 for _ in self._nodes())
        self.generation += 1
        return True

    def _decay(self, root: Node) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            children = node[CHILDREN]
            for token in [t for t, child in children.items() if child[COUNT] <= 1]:
                del children[token]
            for child in children.values():
                child[COUNT] >>= 1
                stack.append(child)

    def _nodes(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            for child in stack.pop()[CHILDREN].values():
                yield child
                stack.append(child)
