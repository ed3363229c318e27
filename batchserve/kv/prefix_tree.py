"""Which slots hold the K/V of ended requests: a radix tree a scope, in which texts that begin alike share nodes.

So a token that many have in common has one slot, is kept once, and costs nothing when one of their tails is dropped
(as SGLang's RadixAttention has it; Zheng et al., 2023, section 3). Torch-free.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from batchserve.kv.prefix_index import FEWEST_TOKENS, MOST_ENTRIES, common_length

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence


@dataclass(slots=True, eq=False)
class PrefixNode:
    """Some tokens behind those of the nodes above, and their slots; both int32 [num_tokens].

    A root has none, and is nobody's child. children: by their first token.
    """

    scope: Hashable
    parent: PrefixNode | None = None
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    children: dict[int, PrefixNode] = field(default_factory=dict)

    def extend(self, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Put these behind its own."""
        self.token_ids, self.slots = np.concatenate((self.token_ids, token_ids)), np.concatenate((self.slots, slots))


class PrefixTree:
    """Nodes but for the roots, the least recently used first: the first has no children.

    (Whoever uses a node has used all above it after it.) Only the same scope's prompts ever match.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, PrefixNode] = {}
        # Ordered, not a dict, which would look for its first one behind all that went.
        self._nodes: OrderedDict[PrefixNode, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes)

    def match(self, scope: Hashable, token_ids: Sequence[int]) -> np.ndarray:
        """Slots of the longest beginning of these tokens that is kept; of fewer than FEWEST_TOKENS none."""
        path, length = self._find(scope, np.array(token_ids, np.int32))
        if length < FEWEST_TOKENS:
            return np.zeros(0, np.int32)
        self._use(path)
        return np.concatenate([node.slots for node in path])[:length]

    def add(self, scope: Hashable, token_ids: Sequence[int], slots: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Keep these slots for these tokens, but for those at the beginning that others are kept for already.

        Returns the ones that are kept from now on, and those that had to go for it.
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
        while len(self) > MOST_ENTRIES:
            gone.append(self.drop(next(iter(self))))
        return new, gone

    def _find(self, scope: Hashable, token_ids: np.ndarray) -> tuple[list[PrefixNode], int]:
        """The nodes that these tokens begin with, the last one in part, maybe; and how many tokens that is."""
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
        """Give a node's first tokens to a new one above it, which is returned."""
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
        """Forget a node that has no children; its slots. Where it leaves an only child, that and its parent are one."""
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
        """Forget a scope; its slots."""
        left, gone = [*self._roots.pop(scope, PrefixNode(scope)).children.values()], []
        while left:
            node = left.pop()
            left += node.children.values()
            del self._nodes[node]
            gone.append(node.slots)
        return gone

    def check(self) -> None:
        """Raises RuntimeError where nodes and their places disagree."""
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
