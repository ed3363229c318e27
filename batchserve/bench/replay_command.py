"""`batchserve bench replay`: measures every drafter with every number of draft tokens and shows one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchserve.bench.records import load_records, split_warm
from batchserve.bench.replay import ReplayRecord, ReplayResult, preload, simulate
from batchserve.bench.tokenizer import load_encoder
from batchserve.bench.view import plot_results, require_matplotlib, show_results
from batchserve.config import EngineConfig
from batchserve.draft.base import Drafter
from batchserve.draft.factory import create_drafter
from batchserve.draft.kernels import KernelLoader
from batchserve.errors import ConfigError
from batchserve.files import writing
from batchserve.interrupts import interrupts_end_the_process
from batchserve.progress import progress_bar

if TYPE_CHECKING:
    from batchserve.bench.options import ReplayOptions


def run_replay(options: ReplayOptions) -> int:
    """Measures, shows, writes. Returns the exit status. Raises ConfigError before anything is measured."""
    if options.plot_file is not None:
        require_matplotlib()
    warm, measured = read_requests(options)
    total = len(options.drafters) * len(options.max_draft_tokens) * (len(warm) + len(measured))
    with progress_bar("replaying", total) as on_record:
        results = measure(options, warm, measured, on_record)
    show_results(options, results, len(warm), len(measured))
    if options.json_file is not None:
        with writing(options.json_file) as path:
            path.write_text(json.dumps(as_json(options, results), indent=1) + "\n")
    if options.plot_file is not None:
        with writing(options.plot_file) as path:
            plot_results(path, options, results)
    return 0


def read_requests(options: ReplayOptions) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
    """Returns (the requests that warm up the drafters, those that are measured). Raises ConfigError."""
    encode = load_encoder(options.tokenizer)
    records = load_records(options.file, encode, options.limit)
    warm = load_records(options.warm_file, encode) if options.warm_file is not None else []
    if options.warm_share is not None:
        warm, records = split_warm(records, options.warm_share)
    if all(len(record.response_token_ids) < 2 for record in records):
        raise ConfigError(f"{options.file}: no response has a second token, so there is nothing to measure")
    return warm, records


def measure(
    options: ReplayOptions,
    warm: Sequence[ReplayRecord],
    records: Sequence[ReplayRecord],
    on_record: Callable[[], None] | None = None,
) -> list[ReplayResult]:
    """Measures every drafter with every number of draft tokens, from an empty state. on_record: called per request."""
    results = []
    for name in options.drafters:
        for max_draft_tokens in options.max_draft_tokens:
            # A first run, because compiling, loading and caching at first use must not count as a request's cost.
            with closing(_ready_drafter(name, max_draft_tokens)) as throw_away:
                simulate(records[:1], throw_away, max_draft_tokens)
            with closing(_ready_drafter(name, max_draft_tokens)) as drafter:
                preload(warm, drafter, on_record)
                stats = simulate(records, drafter, max_draft_tokens, options.streams, on_record)
            results.append(
                ReplayResult(
                    drafter=name,
                    max_draft_tokens=max_draft_tokens,
                    acceptance_length=round(stats.acceptance_length, 4),
                    draft_tokens_per_step=round(stats.draft_tokens_per_step, 3),
                    retrieve_us=round(stats.retrieve_us, 2),
                    update_us=round(stats.update_us, 3),
                    memory_bytes=stats.memory_bytes,
                    steps=stats.num_steps,
                    tokens=stats.num_tokens,
                )
            )
    return results


def as_json(options: ReplayOptions, results: Sequence[ReplayResult]) -> dict[str, Any]:
    """Returns the results as JSON data. warm: null, a file's name, or the share of `file` that drafters saw first."""
    return {
        "file": options.file.name,
        "warm": options.warm_file.name if options.warm_file is not None else options.warm_share,
        "streams": options.streams,
        "results": [asdict(result) for result in results],
    }


def _ready_drafter(name: str, max_draft_tokens: int) -> Drafter:
    """Returns a new drafter with its kernels compiled. Raises ConfigError."""
    config = EngineConfig(decoding_length=max_draft_tokens, max_num_seqs=1, max_num_batched_tokens=max_draft_tokens + 1)
    drafter = create_drafter(name, config, num_parameters=0)
    with interrupts_end_the_process():
        KernelLoader(in_background=False).prepare(type(drafter).__module__)
    return drafter
