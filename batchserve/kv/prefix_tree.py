"""Radix trees, one per scope, of the slots that hold the K/V of ended requests. Texts share nodes of common prefixes.

So a token that many texts have in common is kept once, in one slot, and costs nothing when the tail of one of them is
dropped (as in SGLang's RadixAttention; Zheng et al., 2023, section 3). Torch-free.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from batchserve.kv.prefix_index import MAX_ENTRIES, MIN_TOKENS, common_length

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence


@dataclass(slots=True, eq=False)
class PrefixNode:
    """Tokens that follow those of the nodes above, and their slots; both int32 [num_tokens].

    A root has no tokens and no parent. children: by their first token.
    """

    scope: Hashable
    parent: PrefixNode | None = None
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    children: dict[int, PrefixNode] = field(default_factory=dict)

    def extend(self, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Appends to the node's own tokens and slots."""
        self.token_ids, self.slots = np.concatenate((self.token_ids, token_ids)), np.concatenate((self.slots, slots))


class PrefixTree:
    """The nodes except the roots, least recently used first. The first one never has children.

    (Every use of a node also uses the nodes above it, after the node itself.) Only prompts of the same scope match.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, PrefixNode] = {}
        # Not a dict, which would skip all deleted entries to find its first one.
        self._nodes: OrderedDict[PrefixNode, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes)

    def match(self, scope: Hashable, token_ids: Sequence[int]) -> np.ndarray:
        """Returns the slots of the longest prefix of these tokens that is kept; none for fewer than MIN_TOKENS."""
        path, length = self._find(scope, np.array(token_ids, np.int32))
        if length < MIN_TOKENS:
            return np.zeros(0, np.int32)
        self._use(path)
        return np.concatenate([node.slots for node in path])[:length]

    def add(self, scope: Hashable, token_ids: Sequence[int], slots: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Keeps these slots for these tokens, except for leading tokens that other slots are already kept for.

        Returns the slots that are newly kept, and those that were dropped to make room.
        """
        wanted = np.array(token_ids, np.int32)
        path, length = self._find(scope, wanted)
        new = slots[length:].copy()
        beyond = sum(len(node.slots) for node in path) - length
        if len(new) and path and not beyond and not path[-1].children:  # the same text, longer
            path[-1].extend(wanted[length:], new)
        elif len(new):
            if beyond:
                path[-1] = self._split(path[-1], len(path[-1].slots) - beyond)
            above = path[-1] if path else self._roots.setdefault(scope, PrefixNode(scope))
            node = above.children[int(wanted[length])] = PrefixNode(scope, above, wanted[length:].copy(), new)
            path.append(node)
        self._use(path)
        gone = []
        while len(self) > MAX_ENTRIES:
            gone.append(self.drop(next(iter(self))))
        return new, gone

    def _find(self, scope: Hashable, token_ids: np.ndarray) -> tuple[list[PrefixNode], int]:
        """Returns the nodes that match these tokens, the last one perhaps in part, and the number of tokens matched."""
        path, length, node = list[PrefixNode](), 0, self._roots.get(scope)
        while node is not None and length < len(token_ids):
            node = node.children.get(int(token_ids[length]))
            if node is not None:
                common = common_length(node.token_ids, token_ids[length:])
                path.append(node)
                length += common
                if common < len(node.token_ids):
                    break
        return path, length

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Moves a node's first `length` tokens to a new node above it, and returns that."""
        assert node.parent is not None
        upper = PrefixNode(node.scope, node.parent, node.token_ids[:length].copy(), node.slots[:length].copy())
        node.parent.children[int(upper.token_ids[0])] = upper
        node.parent, node.token_ids, node.slots = upper, node.token_ids[length:].copy(), node.slots[length:].copy()
        upper.children[int(node.token_ids[0])] = node
        return upper

    def _use(self, path: list[PrefixNode]) -> None:
        for node in reversed(path):
            self._nodes[node] = None
            self._nodes.move_to_end(node)

    def drop(self, node: PrefixNode) -> np.ndarray:
        """Drops a node without children, and returns its slots. A sibling left alone is merged with their parent."""
        above = node.parent
        assert above is not None
        del self._nodes[node], above.children[int(node.token_ids[0])]
        if above.parent is None and not above.children:
            del self._roots[node.scope]
        elif above.parent is not None and len(above.children) == 1:
            (child,) = above.children.values()
            del self._nodes[child]
            above.extend(child.token_ids, child.slots)
            above.children = child.children
            for each in above.children.values():
                each.parent = above
        return node.slots

    def drop_scope(self, scope: Hashable) -> list[np.ndarray]:
        """Drops a scope, and returns its slots."""
        left, gone = [*self._roots.pop(scope, PrefixNode(scope)).children.values()], []
        while left:
            node = left.pop()
            left += node.children.values()
            del self._nodes[node]
            gone.append(node.slots)
        return gone

    def check(self) -> None:
        """Raises RuntimeError if nodes are linked wrongly, or the order of eviction does not fit the tree."""
        reached, left = set[PrefixNode](), [*self._roots.values()]
        while left:
            node = left.pop()
            left += node.children.values()
            for token, child in node.children.items():
                reached.add(child)
                if child.parent is not node or token != child.token_ids[0] or len(child.token_ids) != len(child.slots):
                    raise RuntimeError(f"a kept prefix of {len(child.slots)} K/V slots is in the wrong place")
        older = set[PrefixNode]()
        for node in self._nodes:
            older.add(node)
            if node not in reached or any(child not in older for child in node.children.values()):
                raise RuntimeError(f"a kept prefix of {len(node.slots)} K/V slots is nobody's, or would go too early")
        if len(reached) != len(older):
            raise RuntimeError(f"of {len(reached)} kept prefixes {len(older)} are in order to be dropped")
