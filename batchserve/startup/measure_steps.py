"""Measures a model's step times on this machine, in a few seconds, or reads those measured before."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable, grid
from batchserve.kv.slab import EXTENT
from batchserve.native.cores import Neighbours
from batchserve.request import GREEDY
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.sealed_files import UntrustedFileError, read_sealed, write_sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batchserve.engine.executor import Executor

logger = logging.getLogger(__name__)
MAX_SECONDS = 2.0  # for all rounds together; a round that has begun is finished
MIN_ROUNDS, MAX_ROUNDS = 2, 9
SAID_EVERY_S = 2.0
LONG_STEP_S = 0.5  # longer steps are extrapolated; steps that may take twice as long are not tried
CONTEXT, SHORT_CONTEXT = 1024, 256
MOST_DRAFT = 64  # steps with more rows are mostly prefill
MANY_REQUESTS = 16
FEW_ROWS, MORE_ROWS = 1, 4  # per request; two steps at the same context separate reading K/V from attending to it
LOUD = 0.2  # cores that other processes kept busy: step times from then are measured again once it is quieter
QUIETER = 0.5  # times as many
LOOK_S = 0.1  # which takes so long
SEAL = "step times 11"  # includes the version of the stored format


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """One step to time: the rows of each request, its context, and whether it is a draft or a prefill chunk."""

    rows: tuple[int, ...]
    context: int = 0
    is_prefill: bool = False


def measured_table(
    runner: Executor,
    max_rows: int,
    max_requests: int,
    max_context: int,
    cache: Path,
    key: Sequence[str],
    say: Callable[[str], None] = lambda message: None,
) -> StepTimeTable:
    """Returns the table stored for `key`, or measures it now. Stores it in the folder `cache` if that is writable.

    Tables say how many cores others kept busy. One from a busy machine is replaced when the machine is quieter.
    """
    extent = _extent(runner, max_rows, max_requests, max_context)
    name = hashlib.sha256("\n".join([SEAL, str(extent), *key]).encode()).hexdigest()[:24]
    path = cache / "step_time" / f"{name}.table"
    known = _read(path)
    if known is not None and not (known.neighbours > LOUD and _neighbours_now() < QUIETER * known.neighbours):
        return known.table
    neighbours = Neighbours()
    table = measure(runner, max_rows, max_requests, max_context, say)
    _write(path, _Kept(table, neighbours.cores()))
    return table


class _Kept(NamedTuple):
    """A table, and the number of cores that other processes kept busy while it was measured."""

    table: StepTimeTable
    neighbours: float


def _neighbours_now() -> float:
    neighbours = Neighbours()
    time.sleep(LOOK_S)
    return neighbours.cores()


def measure(
    runner: Executor,
    max_rows: int,
    max_requests: int,
    max_context: int,
    say: Callable[[str], None] = lambda message: None,
) -> StepTimeTable:
    """Times steps of up to max_rows rows, max_requests requests and max_context K/V entries, as memory allows."""
    max_rows, requests, readers, context, max_context = _extent(runner, max_rows, max_requests, max_context)
    rows = rows_to_time(max_rows, runner.bucket_sizes)
    probes = [_Case((1,) * requests), _Case((min(MOST_DRAFT, max_rows, max_context),), is_prefill=True)]
    if context >= 64:
        probes += [_Case((rows_each,) * readers, context) for rows_each in (FEW_ROWS, MORE_ROWS)]
    sizes = [_Case(_split(n, max_context), is_prefill=n > MOST_DRAFT) for n in rows]
    with _requests(runner, probes[-1] if probes[-1].context else _Case(())) as names:
        seconds = _time_all(runner, sizes, probes, names, say)
    # If memory holds hardly more than one request needs, only a step of single rows is known.
    return _table([case for case in sizes if case in seconds] or probes[:1], probes, seconds)


class _Extent(NamedTuple):
    """The limits of a table: rows, requests, requests with a context, that context, and the rows of one request."""

    rows: int
    requests: int
    readers: int
    context: int
    request_rows: int


def _extent(runner: Executor, max_rows: int, max_requests: int, max_context: int) -> _Extent:
    # Half of the memory is for contexts, which stay while other cases come and go.
    free = runner.allocator.free_tokens // 2
    rows = max(1, min(max_rows, free, max_requests * max_context))
    requests = max(1, min(MANY_REQUESTS, max_requests, free // EXTENT))
    readers = max(1, min(requests, rows // MORE_ROWS))
    context = min(CONTEXT, max_context - MORE_ROWS, free // 2 // readers - MORE_ROWS - EXTENT)
    return _Extent(rows, requests, readers, context, min(max_context, rows))


def rows_to_time(max_rows: int, bucket_sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of rows to time, ascending, with both sides of each bucket's edge, where step time jumps."""
    edges = {size + side for size in bucket_sizes for side in (0, 1)}
    return sorted({*grid(max_rows), *(edge for edge in edges if edge <= max_rows)})


def time_decoding(runner: Executor, max_requests: int, max_context: int) -> float:
    """Returns the seconds of a decoding step after a short context, with as many requests as memory allows."""
    free = runner.allocator.free_tokens // 2
    requests = max(1, min(MANY_REQUESTS, max_requests, free // EXTENT))
    context = max(0, min(SHORT_CONTEXT, max_context, free // requests) - 1)
    case = _Case((1,) * requests, context)
    with _requests(runner, case) as names:
        return _time(runner, case, names)


def _reserved(case: _Case) -> int:
    """Returns the tokens of memory that the case's rows may take."""
    return sum(-(-(case.context + rows) // EXTENT) * EXTENT for rows in case.rows)


def _split(rows: int, most: int) -> tuple[int, ...]:
    """Splits rows over as few requests as possible, with at most `most` rows each."""
    full, rest = divmod(rows, most)
    return (most,) * full + ((rest,) if rest else ())


def _table(sizes: list[_Case], probes: list[_Case], seconds: dict[_Case, float]) -> StepTimeTable:
    many, prefill = probes[0], probes[1]
    drafts = [case for case in sizes if not case.is_prefill]
    table = StepTimeTable(tuple(sum(case.rows) for case in drafts), tuple(seconds[case] for case in drafts))
    model = StepTimeModel(table)

    def excess(case: _Case) -> float:
        """Returns the seconds beyond those of a draft with as many rows and no context."""
        return seconds[case] - model.predict(StepLoad(sum(case.rows), sum(case.rows), 1))

    per_request = max(0.0, excess(many) / (len(many.rows) - 1)) if len(many.rows) > 1 else 0.0
    per_logit_row = max(0.0, -excess(prefill) / (prefill.rows[0] - 1)) if prefill.rows[0] > 1 else 0.0
    per_attended = per_context = 0.0
    if len(probes) > 2:
        few, more = probes[2:]
        readers, num_rows = len(few.rows), sum(few.rows)
        per_attended = max(0.0, (excess(more) - excess(few)) / ((sum(more.rows) - num_rows) * few.context))
        of_contexts = (excess(few) - per_request * (readers - 1)) / few.context
        per_context = max(0.0, (of_contexts - num_rows * per_attended) / readers)
    # A prefill chunk runs the head only on its last row. The table is for steps that run it on all rows.
    heads = [per_logit_row * (sum(case.rows) - len(case.rows)) if case.is_prefill else 0.0 for case in sizes]
    return StepTimeTable(
        tuple(sum(case.rows) for case in sizes),
        tuple(seconds[case] + head for case, head in zip(sizes, heads, strict=True)),
        per_request,
        per_logit_row,
        per_context,
        per_attended,
    )


def _time_all(
    runner: Executor, sizes: list[_Case], probes: list[_Case], names: Sequence[str], say: Callable[[str], None]
) -> dict[_Case, float]:
    """Returns the seconds of each case, the minimum of several rounds: noise only ever adds time.

    names: requests with the context of those probes that have one.
    """
    started = said = time.perf_counter()
    num_timed = 0

    def sample(case: _Case) -> float:
        nonlocal said, num_timed
        num_timed, now = num_timed + 1, time.perf_counter()
        if now - said > SAID_EVERY_S:
            said = now
            say(f"step times: {num_timed} steps timed in {now - started:.0f} s")
        with nullcontext(names) if case.context else _requests(runner, case) as with_names:
            seconds = _time(runner, case, with_names)
            # In use, steps follow others of their kind. The first run finds the caches as a long prompt left them.
            is_enough = case.is_prefill or now - started > MAX_SECONDS
            return seconds if is_enough else min(seconds, _time(runner, case, with_names))

    samples = {case: [sample(case)] for case in probes}
    of_a_row_s = 0.0
    for case in sizes:
        if _reserved(case) > runner.allocator.free_tokens:
            break  # cases without room in memory are extrapolated, too
        if of_a_row_s * sum(case.rows) > 2 * LONG_STEP_S:
            break
        samples[case] = [sample(case)]
        if samples[case][0] > LONG_STEP_S:  # the first step of a size may have compiled something
            samples[case] = [sample(case)]
        if samples[case][0] > LONG_STEP_S:
            break
        of_a_row_s = samples[case][0] / sum(case.rows)
    for number in range(1, MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - started > MAX_SECONDS:
            break
        for case, times in samples.items():
            times.append(sample(case))
    return {case: min(times) for case, times in samples.items()}


@contextmanager
def _requests(runner: Executor, case: _Case) -> Iterator[list[str]]:
    """Reserves the case's requests, with its context and room for its rows. Yields their names."""
    names = [f"measure-{case.context}-{i}" for i in range(len(case.rows))]
    allocator = runner.allocator
    try:
        for name, rows in zip(names, case.rows, strict=True):
            if not allocator.reserve(name, case.context + rows):
                raise MemoryError(f"no K/V memory to measure a step of {case}")
            if not case.is_prefill:  # a prefill is the first to write to its memory
                allocator.touch(name)
            # The content of a context does not change how long it takes to read, so nothing is computed for it.
            allocator.commit(name, range(case.context))
        yield names
    finally:
        for name in names:
            allocator.release(name)


def _time(runner: Executor, case: _Case, names: Sequence[str]) -> float:
    batch = build_batch([_rows(name, rows, case) for name, rows in zip(names, case.rows, strict=True)])
    start = time.perf_counter()
    runner.launch(batch).wait()
    return time.perf_counter() - start


def _rows(name: str, rows: int, case: _Case) -> RequestRows:
    """Returns the rows of a prompt chunk, or of a last token and a draft tree in which each row has two children."""
    num_pending = rows if case.is_prefill else 1
    parents = [row - 1 if case.is_prefill else (row - 1) // 2 for row in range(rows)]
    return RequestRows(name, case.context, [0] * rows, parents, num_pending, GREEDY)


def _read(path: Path) -> _Kept | None:
    try:
        content = read_sealed(path, SEAL)
        if content is None:
            return None
        fields: dict[str, Any] = json.loads(content)
        neighbours = float(fields.pop("neighbours"))
        return _Kept(StepTimeTable(tuple(fields.pop("rows")), tuple(fields.pop("seconds")), **fields), neighbours)
    except UntrustedFileError as error:
        logger.warning("step times are measured again: %s %s", path, error)
        return None


def _write(path: Path, kept: _Kept) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, SEAL, json.dumps({"neighbours": kept.neighbours, **dataclasses.asdict(kept.table)}).encode())
    except OSError as error:
        logger.warning("step times are not kept for the next start: %s", error)
