"""The drafting contract: what a drafter is told, and the trees that it proposes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.draft.forest import DraftForest, DraftQueries
    from batchserve.native.pool import Team
    from batchserve.request import DraftScope


@dataclass(slots=True)
class DraftTree:
    """Candidate continuations of one request, as a tree that hangs from its last token.

    All lists have one entry a node; a parent is an index into the same tree, or -1 for the request's last token.
    Parents come before children, and the likeliest child first (the accepted path is then mostly already in place in
    the K/V memory). probs are path probabilities: the estimate that the node is accepted, the bonus token not counted.
    A node that is not verified is computed, but never accepted: the drafter is told the argmax behind it (`observe`).
    No two verified children of one parent have the same token, and a verified node has verified ancestors only.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    is_verified: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.is_verified:
            self.is_verified = [True] * len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_verified(self) -> int:
        return sum(self.is_verified)

    def add(self, token_id: int, parent: int, prob: float = 1.0, *, is_verified: bool = True) -> int:
        """Append a node and return its index."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.probs.append(prob)
        self.is_verified.append(is_verified)
        return len(self.token_ids) - 1

    def take(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes (ascending); of each its parent must be among them, too."""
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        return DraftTree(
            [self.token_ids[node] for node in nodes],
            [places[self.parents[node]] for node in nodes],
            [self.probs[node] for node in nodes],
            [self.is_verified[node] for node in nodes],
        )

    def depths(self) -> list[int]:
        """1 for a child of the last token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def check(self, query: DraftQuery) -> None:
        """Raises ValueError on a tree that breaks the contract, or is more than the query asks for."""
        if len(self) > query.max_tokens:
            raise ValueError(f"draft of {len(self)} tokens: at most {query.max_tokens} were asked for")
        seen: set[tuple[int, int]] = set()
        depths: list[int] = []
        nodes = zip(self.token_ids, self.parents, self.is_verified, strict=True)
        for i, (token_id, parent, is_verified) in enumerate(nodes):
            if not -1 <= parent < i:
                raise ValueError(f"draft node {i}: parent {parent} does not come before it")
            depths.append(1 if parent < 0 else depths[parent] + 1)
            bound = query.max_depth if is_verified else query.max_row_depth
            if depths[i] > bound:
                raise ValueError(f"draft of depth {depths[i]}: at most {bound} was asked for")
            if not is_verified:
                continue
            if parent >= 0 and not self.is_verified[parent]:
                raise ValueError(f"draft node {i}: it is verified, its parent {parent} is not")
            if (parent, token_id) in seen:
                raise ValueError(f"draft node {i}: parent {parent} has two children with token {token_id}")
            seen.add((parent, token_id))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request as a drafter sees it when it starts.

    references are texts that the answer may quote; the model does not read them. Without a scope nothing is shared
    with other requests, in neither direction. temperature and seed are the sampler's: its noise is a pure function of
    seed, position and token, so a drafter may use the same. An empty `drafter` is the server's default.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    references: Sequence[Sequence[int]] = ()
    scope: DraftScope | None = None
    drafter: str = ""
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class DraftQuery:
    """A tree is wanted for this request: at most `max_tokens` nodes, the verified ones no deeper than `max_depth`.

    `max_row_depth` bounds the depth of every row, so that its position stays inside the context; at least max_depth.
    Verified nodes whose path probability is below `min_prob` will not be run: a drafter may leave them out.
    """

    request_id: str
    max_tokens: int
    max_depth: int
    max_row_depth: int = 0
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        self.max_row_depth = max(self.max_row_depth, self.max_depth)


class Drafter(Protocol):
    """Proposes draft trees. State is keyed by request id, never by batch row.

    Calls of one request come in this order: start, any number of (propose, observe, accept, share), end. `accept` is
    called with every verified token before the next proposal, and before the end, unless it was not asked for long;
    `share` later, with what its client was given: only that may reach other requests. One thread makes all calls.
    """

    @property
    def name(self) -> str: ...

    def is_ready_for(self, drafter: str) -> bool:
        """Whether requests that chose this drafter may be started; until then they are decoded without drafts."""
        return True

    def start(self, request: DraftRequest) -> None: ...

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]: ...

    def propose_all(self, queries: DraftQueries) -> DraftForest:
        """The same in one piece: what an engine calls, and a drafter may do faster."""
        from batchserve.draft.forest import DraftForest  # imported here: it is made of what stands above

        return DraftForest.of(self.propose(queries.each()))

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The argmax behind each node of the last tree that was not verified, in the order of its nodes."""
        return None

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None: ...

    def accept_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """The tokens of several requests, by request id: what an engine calls, and a drafter may do faster."""
        for request_id, tokens in token_ids.items():
            self.accept(request_id, tokens)

    def catch_up(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """accept_all() of requests whose drafter was not asked for some steps: it may make less of their tokens."""
        self.accept_all(token_ids)

    def window_tokens(self, request_id: str) -> int:
        """Of the tokens of the last accept(): how many drafts only nodes that nobody verified had found before."""
        return 0

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Published tokens; a drafter that shares nothing ignores them."""
        return None

    def share_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        """The published tokens of several requests, by request id: what an engine calls."""
        for request_id, tokens in token_ids.items():
            self.share(request_id, tokens)

    def end(self, request_id: str) -> None: ...

    def clear_scope(self, scope: DraftScope) -> None:
        """Forget everything that the scope's requests have shared; those in flight go on with their own text."""
        return None

    def use_threads(self, team: Team) -> None:
        """What it may share its work with, in the thread that makes all calls. Drafts do not depend on it."""
        return None

    def memory_bytes(self) -> int:
        """What the drafter's state takes, of requests and shared."""
        return 0

    def close(self) -> None:
        """End what is still being prepared. Nothing is called afterwards."""
        return None


class NullDrafter(Drafter):
    """Never drafts: plain decoding."""

    name = "none"

    def start(self, request: DraftRequest) -> None:
        """Nothing to keep."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [DraftTree() for _ in queries]

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Nothing to learn."""

    def end(self, request_id: str) -> None:
        """Nothing to free."""
