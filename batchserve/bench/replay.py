"""Target-guided replay: what a drafter would be worth to a model whose answers were recorded, without the model.

After LLMA (section 3.2, algorithm 2): the recorded response says which token the model puts behind every accepted one,
so every accept decision is the one that the real model would have led to.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.forest import DraftQueries
from batchserve.errors import ConfigError
from batchserve.request import DraftScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

SCOPE = DraftScope("replay", "default")
WARM_PIECE = 4  # tokens that a preloaded response is accepted by; about what a step emits
MAX_DRAFT_TOKENS = 1024
MAX_STREAMS = 4096


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """A recorded request, tokenised. The references are part of the prompt too if the recorded model read them."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    references: list[list[int]]


@dataclass(slots=True)
class ReplayStats:
    """What one replay counted; durations in seconds.

    A response's first token comes from prefill: it is accepted by the drafter, and neither counted as a token nor as
    a step.
    """

    num_steps: int = 0  # of one request each: a step of 16 requests counts 16
    num_tokens: int = 0  # emitted by them: the accepted ones and the bonus token
    num_draft_tokens: int = 0
    num_calls: int = 0
    propose_s: float = 0.0
    update_s: float = 0.0
    memory_bytes: int = 0  # of the drafter at the end, when no request is left

    @property
    def acceptance_length(self) -> float:
        """Tokens per step; 1 without any draft."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def draft_tokens_per_step(self) -> float:
        return self.num_draft_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def retrieve_us(self) -> float:
        """Microseconds of one propose call, which asks for all requests of a step; the mean."""
        return self.propose_s / self.num_calls * 1e6 if self.num_calls else 0.0

    @property
    def update_us(self) -> float:
        """Microseconds of accepting and sharing one token, with its part of what the end of its request costs."""
        return self.update_s / self.num_tokens * 1e6 if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One drafter with one number of draft tokens; the fields of the JSON, in its order."""

    drafter: str
    max_draft_tokens: int
    acceptance_length: float
    draft_tokens_per_step: float
    retrieve_us: float
    update_us: float
    memory_bytes: int
    steps: int
    tokens: int


def preload(records: Iterable[ReplayRecord], drafter: Drafter, on_record: Callable[[], None] | None = None) -> None:
    """Let a drafter see earlier requests of the same scope from start to end, without drafting any."""
    for i, record in enumerate(records):
        request_id = f"warm-{i}"
        drafter.start(_draft_request(request_id, record))
        for at in range(0, len(record.response_token_ids), WARM_PIECE):
            piece = record.response_token_ids[at : at + WARM_PIECE]
            drafter.accept(request_id, piece)
            drafter.share(request_id, piece)
        drafter.end(request_id)
        if on_record is not None:
            on_record()


def simulate(
    records: Sequence[ReplayRecord],
    drafter: Drafter,
    max_draft_tokens: int,
    streams: int = 1,
    on_record: Callable[[], None] | None = None,
) -> ReplayStats:
    """Replay all records in order, `streams` at a time, all in one draft scope; what was drafted before is kept.

    A step asks once for the drafts of all running requests and walks each tree along its recorded response: accepted
    nodes and the token behind them are emitted. A tree is no deeper than the tokens that could still be given, less
    the bonus token (the scheduler's rule, with max_tokens = the response's length). The end of a response is no token.
    Raises ValueError if a tree breaks the drafting contract, ConfigError if it has unverified nodes.
    """
    check_bounds(max_draft_tokens, streams)
    stats = ReplayStats()
    waiting = iter(enumerate(records))
    running: list[_Run] = []
    while True:
        while len(running) < streams and (item := next(waiting, None)) is not None:
            running.append(_Run(f"replay-{item[0]}", item[1], drafter))
        if not running:
            break
        _step([run for run in running if run.num_left], drafter, max_draft_tokens, stats)
        for run in running:
            if run.num_left:
                continue
            started_s = time.perf_counter()
            drafter.end(run.request_id)
            stats.update_s += time.perf_counter() - started_s
            if on_record is not None:
                on_record()
        running = [run for run in running if run.num_left]
    stats.memory_bytes = drafter.memory_bytes()
    return stats


def check_bounds(max_draft_tokens: int, streams: int) -> None:
    """Raises ConfigError."""
    bounds = (("max_draft_tokens", max_draft_tokens, MAX_DRAFT_TOKENS), ("streams", streams, MAX_STREAMS))
    for name, value, bound in bounds:
        if not 1 <= value <= bound:
            raise ConfigError(f"{name} = {value}: must be in 1..{bound}")


class _Run:
    """One request under way. Its first token came with the prefill, which nobody measures here."""

    def __init__(self, request_id: str, record: ReplayRecord, drafter: Drafter) -> None:
        self.request_id = request_id
        self.response = record.response_token_ids
        self.num_emitted = 0
        drafter.start(_draft_request(request_id, record))
        _tell(drafter, {request_id: self.emit(1)})

    @property
    def num_left(self) -> int:
        return len(self.response) - self.num_emitted

    def emit(self, count: int) -> list[int]:
        """The next tokens of the response."""
        token_ids = self.response[self.num_emitted : self.num_emitted + count]
        self.num_emitted += len(token_ids)
        return token_ids


def _tell(drafter: Drafter, token_ids: Mapping[str, Sequence[int]]) -> None:
    """Tokens by request id: told to the requests, and then, as if published at once, to their scope."""
    drafter.accept_all(token_ids)
    for request_id, tokens in token_ids.items():
        drafter.share(request_id, tokens)


def _draft_request(request_id: str, record: ReplayRecord) -> DraftRequest:
    return DraftRequest(request_id, record.prompt_token_ids, references=record.references, scope=SCOPE)


def _step(runs: list[_Run], drafter: Drafter, max_draft_tokens: int, stats: ReplayStats) -> None:
    """One token, and the drafts that were accepted before it, for each of the runs."""
    # The last token is nobody's draft, it is the bonus: without a second one there is nothing to ask for.
    wanted = [DraftQuery(run.request_id, max_draft_tokens, run.num_left - 1) for run in runs if run.num_left > 1]
    trees: dict[str, DraftTree] = {}
    if wanted:
        queries = DraftQueries.of(wanted)
        started_s = time.perf_counter()
        forest = drafter.propose_all(queries)
        stats.propose_s += time.perf_counter() - started_s
        stats.num_calls += 1
        forest.check(queries)
        if not forest.is_verified.all():
            raise ConfigError(f"drafter = {drafter.name!r}: its nodes need a model, so it cannot be replayed")
        trees = dict(zip(queries.request_ids, forest.trees(), strict=True))
    given: dict[str, list[int]] = {}
    for run in runs:
        tree = trees.get(run.request_id, DraftTree())
        emitted = 1 + count_accepted(tree, run.response, run.num_emitted)
        stats.num_steps += 1
        stats.num_tokens += emitted
        stats.num_draft_tokens += len(tree)
        given[run.request_id] = run.emit(emitted)
    started_s = time.perf_counter()
    _tell(drafter, given)
    stats.update_s += time.perf_counter() - started_s


def count_accepted(tree: DraftTree, response: Sequence[int], start: int) -> int:
    """The depth to which the tree holds response[start:]: what verification would accept of it."""
    node, depth = -1, 0
    # Parents come before children, so one pass meets the nodes of the path in order.
    for i, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if parent == node and start + depth < len(response) and token_id == response[start + depth]:
            node, depth = i, depth + 1
    return depth
