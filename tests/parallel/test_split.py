"""How the draft trees of a step are divided over ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from batchserve.parallel.split import Share, divide
from batchserve.request import GREEDY
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch


def random_batch(rng: random.Random) -> RaggedBatch:
    requests = []
    for i in range(rng.randint(1, 6)):
        num_pending = rng.choice([1, 1, 5])
        is_sampled = rng.random() < 0.8
        size = rng.choice([0, 1, 4, 30]) if is_sampled else 0
        parents = [*range(-1, num_pending - 1)]
        parents += [rng.randint(num_pending - 1, num_pending + k - 1) for k in range(size)]
        tokens = [rng.randrange(1000) for _ in parents]
        sampling = GREEDY if is_sampled else None
        verified = [rng.random() < 0.8 for _ in range(size)]
        requests.append(RequestRows(str(i), rng.randint(0, 50), tokens, parents, num_pending, sampling, verified))
    return build_batch(requests)


def paths(batch: RaggedBatch, place: int, share: Share | None = None) -> dict[int, list[int]]:
    """The tokens on the way to each row of a request's tree, by the row in the whole step."""
    rows, pending, found = batch.requests[place], int(batch.num_pending[place]), {}
    for row in range(pending, len(rows.token_ids)):
        way, at = [], row
        while at >= pending:
            way.append(rows.token_ids[at])
            at = rows.parents[at]
        assert at == pending - 1
        found[row if share is None else share.whole_row(place, row, pending)] = way
    return found


@pytest.mark.parametrize("seed", range(30))
def test_every_branch_is_on_one_rank_and_every_rank_has_all_pending_rows(seed: int):
    rng = random.Random(seed)
    batch, num_ranks = random_batch(rng), rng.choice([1, 2, 3, 8])
    undivided = {place for place in range(len(batch.request_ids)) if rng.random() < 0.2}
    shares = divide(batch, num_ranks, undivided)
    assert len(shares) == num_ranks
    for place, whole in enumerate(batch.requests):
        expected, found = paths(batch, place), {}
        for rank, share in enumerate(shares):
            own = share.batch.requests[place]
            assert own.context_len == whole.context_len
            assert own.token_ids[: own.num_pending] == whole.token_ids[: whole.num_pending]
            part = paths(share.batch, place, share)
            assert not part.keys() & found.keys()
            found |= part
            takes_part = share.batch.first_logit[place] >= 0
            if whole.sampling is None or (rank > 0 and not part):
                assert not takes_part
            assert (own.sampling is not None) == takes_part
            assert rank == 0 or place not in undivided or not part
        assert found == expected
        sampled = [share.batch.first_logit[place] >= 0 for share in shares]
        assert any(sampled) == (whole.sampling is not None)


def test_the_largest_branches_are_on_different_ranks():
    parents = [-1, 0, 1, 2, 3, 0, 5, 6, 7, 0, 0]  # two branches of four nodes, two of one
    batch = build_batch([RequestRows("a", 9, [*range(11)], parents, 1, GREEDY)])
    sizes = [int(np.diff(share.starts)[0]) for share in divide(batch, 2)]
    assert sizes == [5, 5]
