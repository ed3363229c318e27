"""The replay counts what a real model would have emitted, and tells the drafter what an engine would."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.bench.replay import MAX_STREAMS, SCOPE, ReplayRecord, count_accepted, preload, simulate
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree, NullDrafter
from batchserve.errors import ConfigError
from tests.drafters import HostileDrafter, OracleDrafter, RandomTreeDrafter
from tests.factories import examples, random_tree

VOCAB = 5


def make_records(rng: random.Random, count: int, longest: int = 30) -> list[ReplayRecord]:
    """Prompts that differ, so that a drafter which knows the future finds it by the prompt."""
    return [
        ReplayRecord([100 + i], [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))], [[i, i]])
        for i in range(count)
    ]


class TruthDrafter(Drafter):
    """Drafts a chain of the true continuation, as long as it may be; keeps a log of all calls."""

    name = "truth"

    def __init__(self, records: Sequence[ReplayRecord]) -> None:
        self.responses = {record.prompt_token_ids[0]: record.response_token_ids for record in records}
        self.left: dict[str, list[int]] = {}
        self.shared: dict[str, list[int]] = {}
        self.accepted: dict[str, list[int]] = {}
        self.requests: list[DraftRequest] = []
        self.batches: list[int] = []

    def start(self, request: DraftRequest) -> None:
        assert request.request_id not in self.accepted, "an id used twice"
        self.requests.append(request)
        self.left[request.request_id] = list(self.responses[request.prompt_token_ids[0]])
        self.shared[request.request_id] = []
        self.accepted[request.request_id] = []

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        assert self.left[request_id][: len(token_ids)] == list(token_ids)
        del self.left[request_id][: len(token_ids)]
        self.accepted[request_id] += token_ids

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        assert request_id in self.left
        self.shared[request_id] += token_ids
        assert self.shared[request_id] == self.accepted[request_id], "shared right after it was accepted"

    def end(self, request_id: str) -> None:
        del self.left[request_id]

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        assert {query.request_id for query in queries} <= set(self.left)
        self.batches.append(len(queries))
        return [self.chain(query) for query in queries]

    def chain(self, query: DraftQuery) -> DraftTree:
        tree = DraftTree()
        for token_id in self.left[query.request_id][: min(query.max_tokens, query.max_depth)]:
            tree.add(token_id, len(tree) - 1)
        return tree


@examples(100)
@given(st.integers(0, 2**32), st.integers(0, 25), st.integers(0, 12))
def test_accepted_is_the_longest_path_of_the_tree_that_the_response_takes(seed: int, num_nodes: int, start: int):
    rng = random.Random(seed)
    tree = random_tree(rng, num_nodes, 3)
    response = [rng.randrange(3) for _ in range(rng.randint(start, 20))]
    paths: list[list[int]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token_id])
    taken = [len(path) for path in paths if response[start : start + len(path)] == path]
    assert count_accepted(tree, response, start) == max(taken, default=0)


@examples(60)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 6), st.integers(1, 8))
def test_a_drafter_that_is_always_right(seed: int, max_draft_tokens: int, streams: int, count: int):
    """K accepted and the bonus token each step; the first token is nobody's step; the last is a bonus token."""
    records = make_records(random.Random(seed), count)
    drafter = TruthDrafter(records)
    stats = simulate(records, drafter, max_draft_tokens, streams)
    lengths = [len(record.response_token_ids) for record in records]
    assert stats.num_tokens == sum(lengths) - count
    assert stats.num_steps == sum(-(-(length - 1) // (max_draft_tokens + 1)) for length in lengths)
    assert stats.num_draft_tokens == stats.num_tokens - stats.num_steps
    assert stats.num_calls == len(drafter.batches)
    assert not drafter.left, "every request ended"
    assert list(drafter.accepted.values()) == [record.response_token_ids for record in records]
    assert list(drafter.shared.values()) == [record.response_token_ids for record in records]
    assert [request.prompt_token_ids for request in drafter.requests] == [r.prompt_token_ids for r in records]
    assert [request.references for request in drafter.requests] == [record.references for record in records]
    assert {request.scope for request in drafter.requests} == {SCOPE}


@examples(40)
@given(st.integers(0, 2**32), st.sampled_from([RandomTreeDrafter, HostileDrafter, OracleDrafter]), st.integers(1, 5))
def test_right_or_wrong_every_token_is_emitted_once(seed: int, make: type, streams: int):
    records = make_records(random.Random(seed), 6)
    continuations = {tuple(record.prompt_token_ids): record.response_token_ids for record in records}
    stats = simulate(records, make(VOCAB, seed, continuations), 7, streams)
    assert stats.num_tokens == sum(len(record.response_token_ids) - 1 for record in records)
    assert stats.num_steps <= stats.num_tokens
    assert stats.num_draft_tokens <= 7 * stats.num_steps
    if make is HostileDrafter:
        assert stats.num_steps == stats.num_tokens


def test_all_running_requests_are_asked_for_in_one_call_and_the_next_fills_a_free_place():
    records = [ReplayRecord([i], [1] * length, []) for i, length in enumerate([3, 9, 3, 9, 3])]
    drafter = TruthDrafter(records)
    simulate(records, drafter, 1, streams=2)
    # 3 tokens: the prefill's, then a step of two. 9 tokens: the prefill's, then four such steps.
    assert drafter.batches == [2, 2, 2, 2, 2, 1]


def test_without_drafts_every_step_is_one_token():
    stats = simulate(make_records(random.Random(1), 5), NullDrafter(), 4)
    assert stats.acceptance_length == 1.0
    assert stats.draft_tokens_per_step == 0.0
    assert stats.num_steps == stats.num_tokens > 0


def test_a_response_of_one_token_is_no_step():
    stats = simulate([ReplayRecord([1], [2], [])], NullDrafter(), 4)
    assert (stats.num_steps, stats.num_tokens, stats.num_calls) == (0, 0, 0)
    assert (stats.acceptance_length, stats.draft_tokens_per_step) == (0.0, 0.0)
    assert (stats.retrieve_us, stats.update_us) == (0.0, 0.0)


def test_means_are_over_calls_and_tokens():
    records = [ReplayRecord([i], [1] * 9, []) for i in range(4)]
    stats = simulate(records, TruthDrafter(records), 3, streams=4)
    assert (stats.num_calls, stats.num_steps, stats.num_tokens) == (2, 8, 32)
    assert stats.acceptance_length == 4.0
    assert stats.draft_tokens_per_step == 3.0
    stats.propose_s, stats.update_s = 3e-6, 64e-6
    assert stats.retrieve_us == pytest.approx(1.5)
    assert stats.update_us == pytest.approx(2.0)


def test_preloading_tells_all_and_asks_nothing():
    records = make_records(random.Random(3), 7)
    drafter = TruthDrafter(records)
    done: list[int] = []
    preload(records, drafter, lambda: done.append(len(drafter.left)))
    assert done == [0] * 7
    assert drafter.batches == []
    assert list(drafter.shared.values()) == [record.response_token_ids for record in records]
    simulate(records, drafter, 4)  # ids of both are apart
    assert len(drafter.requests) == 14


def test_progress_counts_every_request_once_it_has_ended():
    records = make_records(random.Random(4), 9)
    done: list[int] = []
    simulate(records, NullDrafter(), 2, 4, lambda: done.append(1))
    assert len(done) == 9


class _Fixed(NullDrafter):
    """Proposes the same tree to everybody."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self.tree for _ in queries]


def test_a_drafter_that_needs_a_model_is_refused():
    tree = DraftTree()
    tree.add(1, -1, is_verified=False)
    with pytest.raises(ConfigError, match=r"drafter = 'none': its nodes need a model"):
        simulate([ReplayRecord([1], [1, 2, 3], [])], _Fixed(tree), 4)


def test_a_tree_that_breaks_the_contract_is_not_counted():
    twins = DraftTree([1, 1], [-1, -1], [0.5, 0.5])
    with pytest.raises(ValueError, match="two children with token 1"):
        simulate([ReplayRecord([1], [1, 2, 3], [])], _Fixed(twins), 4)
    too_deep = DraftTree([1, 2], [-1, 0], [0.5, 0.5])
    with pytest.raises(ValueError, match="depth 2: at most 1"):  # two tokens to come, the second is the bonus
        simulate([ReplayRecord([1], [5, 1, 2], [])], _Fixed(too_deep), 4)


@pytest.mark.parametrize(
    ("max_draft_tokens", "streams", "message"),
    [
        (0, 1, r"max_draft_tokens = 0: must be in 1\.\.1024"),
        (1025, 1, r"max_draft_tokens = 1025: must be in 1\.\.1024"),
        (4, 0, r"streams = 0: must be in 1\.\."),
        (4, MAX_STREAMS + 1, r"streams = \d+: must be in 1\.\."),
    ],
)
def test_bounds(max_draft_tokens: int, streams: int, message: str):
    with pytest.raises(ConfigError, match=message):
        simulate([ReplayRecord([1], [1, 2], [])], NullDrafter(), max_draft_tokens, streams)
