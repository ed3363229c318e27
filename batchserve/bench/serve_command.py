"""`batchserve bench serve`: sends requests to a running server and shows what its clients get."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchserve.bench.arrivals import Extent, WallClock, arrival_times_s, run_closed_loop, run_open_loop
from batchserve.bench.load_clients import Asked, LoadClient, make_client
from batchserve.bench.load_prompts import LoadPrompts, load_prompts
from batchserve.bench.load_records import RequestRecord, summarise
from batchserve.bench.load_report import Measurement, as_json, show_report
from batchserve.files import writing
from batchserve.interrupts import run_until_interrupted
from batchserve.progress import progress, progress_bar

if TYPE_CHECKING:
    from batchserve.bench.arrivals import Clock, Send
    from batchserve.bench.serve_options import ServeBenchOptions
    from batchserve.server.grpc.tls import ClientTls


def run_serve_bench(
    options: ServeBenchOptions, key: str | None = None, tls: ClientTls | None = None, *, allow_failures: bool = False
) -> int:
    """Measures, shows, writes. Returns the exit status. Raises BatchserveError if the server cannot be reached."""
    prompts = load_prompts(options)
    measured = asyncio.run(measure(options, prompts, make_client(options, key, tls)))
    show_report(options, prompts, measured)
    if options.json_file is not None:
        with writing(options.json_file) as path:
            path.write_text(json.dumps(as_json(options, prompts, measured)) + "\n")
    if measured.is_interrupted:
        return 128 + signal.SIGINT
    return 1 if measured.summary.num_failed and not allow_failures else 0


async def measure(options: ServeBenchOptions, prompts: LoadPrompts, client: LoadClient) -> Measurement:
    """Warms up, then measures. SIGINT ends the measurement, which then has the requests that had ended.

    Raises BatchserveError if the server does not tell its model's name.
    """
    async with client:
        model = await client.model()
        await _warm_up(options, prompts, client)
        with without_collections():
            return await _measure(options, prompts, client, model)


async def _measure(options: ServeBenchOptions, prompts: LoadPrompts, client: LoadClient, model: str) -> Measurement:
    records: list[RequestRecord] = []
    num_sent, cpu_s = 0, time.process_time()
    with progress_bar("measuring", options.num_requests) as on_done:
        clock = WallClock()
        asked = Asked(client, options.timeout_s, clock.now)

        async def send(number: int, due_s: float) -> None:
            nonlocal num_sent
            num_sent += 1
            record = RequestRecord(number, due_s)
            await asked.ask(prompts.at(options.warmup + number), record)
            records.append(record)
            on_done()

        is_interrupted = await run_until_interrupted(_loop(options, clock, send))
        duration_s = clock.now()
    if not is_interrupted and records:
        duration_s = max(record.ended_s for record in records)
    summary = summarise(records, duration_s, options.slo, num_sent - len(records))
    client_cpu = (time.process_time() - cpu_s) / max(duration_s, 1e-9)
    return Measurement(model, records, summary, client_cpu, is_interrupted, options.warmup)


async def _warm_up(options: ServeBenchOptions, prompts: LoadPrompts, client: LoadClient) -> None:
    """Asks for answers that are not measured. A failure is told, and is none of the measurement's."""
    if not options.warmup:
        return
    clock, failures = WallClock(), set()
    asked = Asked(client, options.timeout_s, clock.now)

    async def send(number: int, due_s: float) -> None:
        record = RequestRecord(number, due_s)
        await asked.ask(prompts.at(number), record)
        if record.failure:
            failures.add(record.failure)

    await run_closed_loop(options.concurrency or 1, Extent(options.warmup), clock, send)
    for failure in sorted(failures):
        progress(f"warm-up: a request failed: {failure}")


async def _loop(options: ServeBenchOptions, clock: Clock, send: Send) -> None:
    extent = Extent(options.num_requests, options.duration_s)
    if options.rate is not None:
        times_s = arrival_times_s(options.rate, options.burstiness or 1.0, options.seed)
        await run_open_loop(times_s, extent, clock, send)
    else:
        await run_closed_loop(options.concurrency or 1, extent, clock, send)


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps the garbage collector from what exists already: collecting it again would delay the notes of arrivals."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
