"""Target-guided replay: measures a drafter on a model's recorded answers, without the model.

After LLMA (section 3.2, algorithm 2). The recorded response gives the model's token after every accepted token, so
every accept decision is the one that the real model would have led to.
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
WARM_PIECE = 4  # tokens per accept() of a preloaded response; about what a step emits
MAX_DRAFT_TOKENS = 1024
MAX_STREAMS = 4096


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """A tokenised recorded request. The references are part of the prompt too if the recorded model read them."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    references: list[list[int]]


@dataclass(slots=True)
class ReplayStats:
    """The counts of one replay. Durations are in seconds.

    A response's first token comes from prefill. The drafter accepts it, but it counts neither as a token nor as a step.
    """

    num_steps: int = 0  # steps of single requests: a step of 16 requests counts 16
    num_tokens: int = 0  # emitted by these steps: accepted draft tokens and bonus tokens
    num_draft_tokens: int = 0
    num_calls: int = 0
    propose_s: float = 0.0
    update_s: float = 0.0
    memory_bytes: int = 0  # of the drafter after all requests have ended

    @property
    def acceptance_length(self) -> float:
        """Tokens per step; 1 without drafts."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def draft_tokens_per_step(self) -> float:
        return self.num_draft_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def retrieve_us(self) -> float:
        """Mean microseconds of one propose call, which covers all requests of a step."""
        return self.propose_s / self.num_calls * 1e6 if self.num_calls else 0.0

    @property
    def update_us(self) -> float:
        """Microseconds to accept and share one token, including its part of the cost of ending the request."""
        return self.update_s / self.num_tokens * 1e6 if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The figures of one drafter with one number of draft tokens: the fields of the JSON, in its order."""

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
    """Feeds earlier requests of the same scope to a drafter, from start to end, without asking for drafts."""
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
    """Replays all records in order, `streams` at a time, in one draft scope. The drafter keeps its earlier state.

    A step asks once for the drafts of all running requests and walks each tree along its recorded response. It emits
    the accepted nodes and the token after them. A tree is no deeper than the number of remaining tokens less the bonus
    token (the scheduler's rule, with max_tokens = the response's length). The end of a response is not a token.
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
    """Raises ConfigError for a value out of bounds."""
    bounds = (("max_draft_tokens", max_draft_tokens, MAX_DRAFT_TOKENS), ("streams", streams, MAX_STREAMS))
    for name, value, bound in bounds:
        if not 1 <= value <= bound:
            raise ConfigError(f"{name} = {value}: must be in 1..{bound}")


class _Run:
    """One running request. Its first token comes from the prefill, which is not measured here."""

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
        """Returns the next tokens of the response and counts them as emitted."""
        token_ids = self.response[self.num_emitted : self.num_emitted + count]
        self.num_emitted += len(token_ids)
        return token_ids


def _tell(drafter: Drafter, token_ids: Mapping[str, Sequence[int]]) -> None:
    """Passes new tokens, by request id, to the drafter and then shares them in the scope, as if published at once."""
    drafter.accept_all(token_ids)
    for request_id, tokens in token_ids.items():
        drafter.share(request_id, tokens)


def _draft_request(request_id: str, record: ReplayRecord) -> DraftRequest:
    return DraftRequest(request_id, record.prompt_token_ids, references=record.references, scope=SCOPE)


def _step(runs: list[_Run], drafter: Drafter, max_draft_tokens: int, stats: ReplayStats) -> None:
    """Emits the accepted draft tokens and one more token for each of the runs."""
    # The last token is always the bonus token, so with only one token left there is nothing to draft.
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
    """Returns the number of tokens of response[start:] that verification would accept from the tree."""
    node, depth = -1, 0
    # Parents come before children, so one pass visits the nodes of the path in order.
    for i, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if parent == node and start + depth < len(response) and token_id == response[start + depth]:
            node, depth = i, depth + 1
    return depth
