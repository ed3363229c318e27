"""Lookahead parallelism: ranks with the whole model each verify some branches of every draft tree.

Lookahead Decoding, section 3.4. After a forward only tokens and counts travel, and K and V of accepted drafts: these
are sent, not computed again, since a row in every rank's next step costs more than its bytes (docs/scaling.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchserve.parallel.messages import OutOfMemory, Step, StepResult
from batchserve.parallel.mirror import MirroredAllocator
from batchserve.parallel.paths import gather_paths
from batchserve.parallel.split import divide
from batchserve.sampling.sampler import NO_TOKEN
from batchserve.sampling.verify import NOT_SAMPLED, StepTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.engine.executor import StepHandle
    from batchserve.parallel.ranks import Ranks
    from batchserve.parallel.split import Share
    from batchserve.runner.native_runner import NativeRunner
    from batchserve.runner.ragged_batch import RaggedBatch


class LookaheadExecutor:
    """The Executor of rank 0, and of all ranks together."""

    bucket_sizes: Sequence[int] = ()

    def __init__(self, own: NativeRunner, ranks: Ranks) -> None:
        self.own, self.ranks = own, ranks
        self.allocator = MirroredAllocator(own.allocator, paths_in_place=True)
        self.forced = own.forced

    @property
    def num_threads(self) -> int:
        return self.own.num_threads

    @num_threads.setter
    def num_threads(self, count: int) -> None:
        self.own.num_threads = count

    @property
    def can_walk_sampled(self) -> Callable[[], bool]:
        return self.own.can_walk_sampled

    @can_walk_sampled.setter
    def can_walk_sampled(self, ask: Callable[[], bool]) -> None:
        self.own.can_walk_sampled = ask

    def bind_thread(self) -> None:
        self.own.bind_thread()

    def check_device(self) -> None:
        self.own.check_device()
        self.ranks.check()

    def launch(self, batch: RaggedBatch) -> StepHandle:
        # Who changes logits has its state on rank 0, and a recording its tokens.
        recorded = [place for place, name in enumerate(batch.request_ids) if name in self.forced]
        shares = divide(batch, len(self.ranks.each) + 1, {*batch.adjustments, *recorded})
        changes = self.allocator.take_changes()
        self.ranks.send([Step(changes, share.batch) for share in shares[1:]])
        return _DividedStep(self, batch, shares)


class _DividedStep:
    """StepHandle: rank 0's own part is computed in wait(), while the others compute theirs."""

    is_running = False

    def __init__(self, executor: LookaheadExecutor, batch: RaggedBatch, shares: Sequence[Share]) -> None:
        self._executor, self._batch, self._shares = executor, batch, shares
        self._own = executor.own.launch(shares[0].batch)

    @property
    def is_trial(self) -> bool:
        return self._own.is_trial

    def wait(self) -> StepTokens:
        executor, batch = self._executor, self._shares[0].batch
        try:
            tokens = self._own.wait()
        finally:
            answers = executor.ranks.receive()  # also if this rank has no memory: the others have done the step
        for answer in answers:
            if isinstance(answer, OutOfMemory):
                raise MemoryError(answer.error)
        paths = gather_paths(executor.allocator.own, batch, tokens)
        return self._merged([StepResult(tokens, paths), *answers])

    def _merged(self, results: Sequence[StepResult]) -> StepTokens:
        """Joins the tokens of all ranks, and gives every rank K and V of the longest path of each request."""
        batch, shares = self._batch, self._shares
        starts = batch.spans.rows[:, 0].copy()
        counts = np.full(len(starts), NOT_SAMPLED)
        token_ids, rows = np.zeros((2, batch.num_rows), np.int64)
        merged = StepTokens(counts, starts, token_ids, rows)
        first = results[0].tokens
        merged.prompt_logprobs, merged.errors = first.prompt_logprobs, first.errors
        for place, start in enumerate(starts.tolist()):
            rank = _longest(place, results)
            tokens = results[rank].tokens
            count, begin = int(tokens.num_accepted[place]), int(tokens.starts[place])
            counts[place] = count
            if count == NOT_SAMPLED:
                continue
            token_ids[start : start + count + 1] = tokens.token_ids[begin : begin + count + 1]
            pending = int(batch.num_pending[place])
            for i, row in enumerate(tokens.rows[begin : begin + count].tolist()):
                rows[start + i] = shares[rank].whole_row(place, row, pending)
            if place in tokens.logprobs:
                merged.logprobs[place] = tokens.logprobs[place]
            if count:
                self._spread(place, rank, results[rank].paths[place])
            if found := self._unverified(place, results):
                merged.unverified_token_ids[place] = found
        return merged

    def _spread(self, place: int, rank: int, path: bytes) -> None:
        name, pending = self._batch.request_ids[place], int(self._batch.num_pending[place])
        allocator = self._executor.allocator
        if rank != 0:
            allocator.own.write_rows(name, pending, path)
        allocator.note("write_rows", name, pending, path)

    def _unverified(self, place: int, results: Sequence[StepResult]) -> tuple[int, ...]:
        """Returns the tokens after rows that only the drafter wants to know of, in the order of the whole tree."""
        found: dict[int, int] = {}
        for share, result in zip(self._shares, results, strict=True):
            own = result.tokens.unverified_token_ids.get(place, ())
            if own:
                nodes = share.nodes[share.starts[place] : share.starts[place + 1]]
                _, _, is_verified = share.batch.tree(place)
                unverified = [node for node, verified in zip(nodes.tolist(), is_verified, strict=True) if not verified]
                found.update(zip(unverified, own, strict=True))
        return tuple(found[node] for node in sorted(found))


def _longest(place: int, results: Sequence[StepResult]) -> int:
    """Returns the rank that has accepted most of a request's drafts. One whose logits say nothing comes last."""

    def length(rank: int) -> tuple[bool, int]:
        tokens = results[rank].tokens
        count = int(tokens.num_accepted[place])
        is_sound = count != NOT_SAMPLED and int(tokens.token_ids[tokens.starts[place]]) != NO_TOKEN
        return is_sound, count

    return max(range(len(results)), key=length)
