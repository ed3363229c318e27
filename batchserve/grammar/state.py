"""How far one answer has followed its grammar, and what may come next along each path of its draft tree."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from batchserve.draft.base import DraftTree
from batchserve.draft.forest import FORCED
from batchserve.errors import GrammarError
from batchserve.grammar.compiler import MAX_REASON_CHARS
from batchserve.row_adjustments import BITS, mask_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.grammar.compiler import GrammarCompiler
    from batchserve.grammar.definition import Grammar

# Seconds of processor time: what one request may take in one call, and in all beyond that. Some grammars compile at
# once and then take ever longer to follow.
STEP_S, MAX_OVERRUN_S = 0.01, 1.0
GROWTH = 4  # a tree may grow to this many times its bound before it is cut to its likeliest nodes
LIKELY = 0.3  # path probability above which forced tokens after a draft node are looked for
MAX_DEPTH = 256  # of a tree: each level is a call


class GrammarState:
    """A request's place in its grammar. What is allowed is a function of the answer's tokens alone.

    num_words: uint32 words in a mask. Draft trees are explored with the answer's own matcher, which is rolled back
    afterwards: to copy it takes longer, the longer the answer is.
    """

    def __init__(
        self, grammar: Grammar, compiler: GrammarCompiler, vocab_size: int, ignored_ends: Sequence[int] = ()
    ) -> None:
        """Compiles the grammar, unless the compiler has it. Raises GrammarError.

        vocab_size: the model's. ignored_ends: end tokens of the model that do not end this answer, and are not given.
        """
        self._grammar, self._compiler = grammar, compiler
        self._start, num_words = compiler.matcher(grammar)
        self._matcher = self._start.deep_copy()
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._forced: list[int] | None = None  # after the answer so far; None: not known
        self._overrun_s, self._is_slow = 0.0, False
        self.num_words = num_words
        never = [*ignored_ends, *compiler.stand_in]
        self._kept = ~np.frombuffer(mask_of(never, num_words * BITS), np.uint32) if never else None

    def accept(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the answer. Raises GrammarError."""
        self._tokens += token_ids
        self._forced = None
        began_s = time.thread_time()
        if token_ids and not self._matcher.consume_tokens([*token_ids]):
            self._compile_again("the answer does not follow its grammar")
        self._count(began_s)

    def _count(self, began_s: float) -> None:
        """Counts the time since then. Raises GrammarError if there was too much of it."""
        spent_s = time.thread_time() - began_s
        self._is_slow = spent_s > STEP_S
        if self._is_slow:
            self._overrun_s += spent_s - STEP_S
        if self._overrun_s > MAX_OVERRUN_S:
            raise GrammarError("what the grammar allows next takes too long to find")

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come but an end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def forced(self) -> list[int]:
        """The tokens that must come next; empty where there is a choice, or that would take long to find."""
        if self._is_slow:
            return []
        if self._forced is None:
            self._forced = self._forced_here()
            if self._matcher.is_error():
                self._begin_again()
        return self._forced

    def _forced_here(self) -> list[int]:
        """Returns the tokens that must come after what the matcher has taken, draft tokens included."""
        found = self._matcher.compute_ff_tokens()
        beyond = (place for place, token in enumerate(found) if token >= self._vocab_size)
        return found[: next(beyond, len(found))]

    def mask_after(self, path: Sequence[int]) -> np.ndarray:
        """Returns the mask, uint32 [num_words], of the tokens that may come after the answer and a path of drafts.

        Empty if that cannot be found.
        """
        masks = np.zeros((len(path) + 1, self.num_words), np.uint32)
        with suppress(GrammarError):
            self.fill_masks(masks, path, range(-1, len(path) - 1), [True] * len(path))
        last: np.ndarray = masks[-1]
        return last

    def fill_masks(
        self, masks: np.ndarray, token_ids: Sequence[int], parents: Sequence[int], is_verified: Sequence[bool]
    ) -> None:
        """Fills masks, uint32 [1 + num_nodes, num_words]: the tokens that may come after the answer, and after each
        node of its draft tree (parents: inside the tree, -1 for its root). None after a node that is not verified, or
        not allowed itself.

        Raises GrammarError if what may come after the answer cannot be found. Where that is so of a node, or takes
        long, its mask is empty: it is not accepted now, and looked at again once the answer has come there.
        """
        began_s = time.thread_time()
        masks[:] = 0
        path: list[int] = []  # the nodes whose tokens the matcher has taken
        wrong = {node for node, is_known in enumerate(is_verified) if not is_known}
        self._fill(masks[0])
        if self._matcher.is_error():
            self._compile_again("what its grammar allows next cannot be found")
            self._fill(masks[0])
        self._count(began_s)  # without the drafts below, which only take time that is left
        for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            is_lost = node in wrong or parent in wrong or time.thread_time() - began_s > STEP_S
            if is_lost or not self._go_to(path, parent, token_ids, parents) or not self._take(token):
                wrong.add(node)
            else:
                path.append(node)
                self._fill(masks[node + 1])
            if self._matcher.is_error():
                masks[node + 1] = 0
                self._begin_again()
                path.clear()
        if path:
            self._matcher.rollback(len(path))

    def _fill(self, mask: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._kept is not None:
            mask &= self._kept

    def _go_to(self, path: list[int], node: int, token_ids: Sequence[int], parents: Sequence[int]) -> bool:
        """Moves the matcher from the end of `path` to a node, and changes the path to the one there."""
        wanted: list[int] = []
        while node >= 0 and node not in path:
            wanted.append(node)
            node = parents[node]
        num_kept = path.index(node) + 1 if node >= 0 else 0
        if num_kept < len(path):
            self._matcher.rollback(len(path) - num_kept)
            del path[num_kept:]
        for each in reversed(wanted):
            if not self._take(token_ids[each]):
                return False
            path.append(each)
        return True

    def _take(self, token: int) -> bool:
        """Moves the matcher past a token, if that is allowed."""
        return self._matcher.try_consume_tokens([token]) == 1 and not self._matcher.is_error()

    def constrain(self, tree: DraftTree, most: int, deepest: int) -> DraftTree:
        """Returns a draft tree without the nodes that the grammar forbids, and with the tokens that it forces.

        It has at most so many nodes, and verified ones are no deeper; of too many the likeliest are taken.
        """
        if self._is_slow:
            return DraftTree()
        grown = _Growth(tree, most, min(deepest, MAX_DEPTH))
        self._grow(grown, -1, -1, 1.0, 1, self.forced)
        if self._matcher.is_error():
            self._begin_again()
            return DraftTree()
        return grown.likeliest()

    def _grow(self, grown: _Growth, node: int, place: int, prob: float, depth: int, forced: list[int]) -> None:
        """Adds what follows a node of the drafter's tree. The matcher has taken the node's token.

        node: -1 for the root, NO_NODE for one that the drafter does not have. place: the node's place in the new tree.
        prob: its path probability. depth: that of its children. forced: the tokens that must come next.
        """
        tree, children = grown.tree, grown.children.get(node, ())
        for child in children:
            if not tree.is_verified[child]:
                grown.copy(child, place)
        if self._matcher.is_error() or depth > grown.deepest or grown.is_over:
            return
        if forced:
            same = [each for each in children if tree.is_verified[each] and tree.token_ids[each] == forced[0]]
            if grown.is_full or not self._take(forced[0]):
                return
            at = grown.add(forced[0], place, prob, is_forced=True)
            self._grow(grown, same[0] if same else NO_NODE, at, prob, depth + 1, forced[1:])
            self._matcher.rollback(1)
            return
        above = tree.probs[node] if node >= 0 else 1.0
        for child in children:
            if not tree.is_verified[child] or grown.is_full or not self._take(tree.token_ids[child]):
                continue
            own = prob * min(1.0, tree.probs[child] / above if above > 0 else 0.0)
            at = grown.add(tree.token_ids[child], place, own)
            self._grow(grown, child, at, own, depth + 1, self._forced_here() if own > LIKELY else [])
            self._matcher.rollback(1)

    def _begin_again(self) -> None:
        """Replaces a matcher that has failed while a draft tree was looked at: the answer itself may well go on."""
        self._matcher = self._start.deep_copy()
        if self._tokens:
            self._matcher.consume_tokens(self._tokens)

    def _compile_again(self, failure: str) -> None:
        """Replaces a matcher that has failed. The states that all answers of a grammar share may have reached their
        bound, which is not this answer's fault. Raises GrammarError if it fails by itself.
        """
        reason = " ".join(self._matcher.get_error().split())[:MAX_REASON_CHARS]
        fresh = self._compiler.fresh(self._grammar)
        if fresh is not None:
            self._start = fresh
            self._begin_again()
            again = self._matcher.deep_copy()
            again.compute_bitmask()
        if fresh is None or again.is_error():
            raise GrammarError(f"{failure}: {reason}")


NO_NODE = -2


class _Growth:
    """The tree that is made of a drafter's tree."""

    def __init__(self, tree: DraftTree, most: int, deepest: int) -> None:
        self.tree, self.deepest = tree, deepest
        self._most, self._began_s = most, time.thread_time()
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            self.children.setdefault(parent, []).append(node)
        self._found = DraftTree()
        self._paths: list[float] = []  # the path probability of each node found

    @property
    def is_over(self) -> bool:
        """Whether it has taken long enough."""
        return time.thread_time() - self._began_s > STEP_S

    @property
    def is_full(self) -> bool:
        return len(self._paths) >= GROWTH * self._most

    def add(self, token: int, place: int, prob: float, *, is_forced: bool = False) -> int:
        self._paths.append(prob)
        return self._found.add(token, place, FORCED if is_forced else prob)

    def copy(self, node: int, place: int) -> None:
        """Adds a node that is not verified, and all that come after it."""
        tree = self.tree
        self._paths.append(tree.probs[node])
        at = self._found.add(tree.token_ids[node], place, tree.probs[node], is_verified=False)
        for child in self.children.get(node, ()):
            self.copy(child, at)

    def likeliest(self) -> DraftTree:
        """Returns the tree, cut to its likeliest nodes; nodes that are not verified are of use only together."""
        found, paths = self._found, self._paths
        if len(paths) <= self._most:
            return found
        order = sorted(range(len(paths)), key=lambda node: (found.is_verified[node], -paths[node], node))
        kept: set[int] = {-1}
        for node in sorted(order[: self._most]):
            if found.parents[node] in kept:
                kept.add(node)
        return found.take(sorted(kept - {-1}))
