"""The drafting contract: what a drafter is told, and the trees that it proposes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class DraftTree:
    """Candidate continuations of one request, as a tree that hangs from its last token.

    token_ids, parents and probs have one entry a node; a parent is an index into the same tree, or -1 for the
    request's last token. Parents come before children, and the likeliest child first (the accepted path is then
    mostly already in place in the K/V memory). No two children of one parent have the same token.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_id: int, parent: int, prob: float = 1.0) -> int:
        """Append a node and return its index."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.probs.append(prob)
        return len(self.token_ids) - 1

    def depths(self) -> list[int]:
        """1 for a child of the last token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def check(self, max_tokens: int, max_depth: int) -> None:
        """Raises ValueError on a tree that breaks the contract."""
        if len(self) > max_tokens:
            raise ValueError(f"draft of {len(self)} tokens: at most {max_tokens} were asked for")
        seen: set[tuple[int, int]] = set()
        for i, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not -1 <= parent < i:
                raise ValueError(f"draft node {i}: parent {parent} does not come before it")
            if (parent, token_id) in seen:
                raise ValueError(f"draft node {i}: parent {parent} has two children with token {token_id}")
            seen.add((parent, token_id))
        if self.token_ids and max(self.depths()) > max_depth:
            raise ValueError(f"draft of depth {max(self.depths())}: at most {max_depth} was asked for")


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """A proposal of at most `max_tokens` nodes, no deeper than `max_depth`, is wanted for this request."""

    request_id: str
    max_tokens: int
    max_depth: int


class Drafter(Protocol):
    """Proposes draft trees. State is keyed by request id, never by batch row.

    Calls of one request come in this order: start, any number of (propose, accept, share), end. `accept` is called
    with every verified token before the next proposal; `share` later, with those of them that the client was given:
    only these may reach other requests.
    """

    @property
    def name(self) -> str: ...

    def start(self, request_id: str, prompt_token_ids: Sequence[int]) -> None: ...

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]: ...

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None: ...

    def share(self, request_id: str, token_ids: Sequence[int]) -> None: ...

    def end(self, request_id: str) -> None: ...


class NullDrafter:
    """Never drafts: plain decoding."""

    name = "none"

    def start(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        """Nothing to keep."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [DraftTree() for _ in queries]

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Nothing to learn."""

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Nothing to share."""

    def end(self, request_id: str) -> None:
        """Nothing to free."""
