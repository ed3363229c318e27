"""/live: figures and pictures of steps as they happen, for the page at /."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchserve.engine.watchers import MAX_WATCHERS
from batchserve.server.http.errors import HttpRefusal

if TYPE_CHECKING:
    from batchserve.engine.step_watch import RequestStep, SeenStep
    from batchserve.metrics import MetricsReading
    from batchserve.server.http.call import HttpCall
    from batchserve.server.http.front import Front
    from batchserve.server.keys import Caller

FIGURES_S = 1.0  # between two events with figures
MAX_TREE_NODES = 128  # of a tree that is shown; a larger one is cut
SHOWN_TOKENS = 24


async def live(front: Front, call: HttpCall) -> None:
    """Streams until the client goes away or the server ends. A key sees its tenant's requests, an admin's key all.

    Without a key, where other machines may call, nobody's requests are shown.
    """
    engine = front.engine
    if engine.watchers.is_full:
        raise HttpRefusal(429, "TOO_MANY_WATCHERS", f"{MAX_WATCHERS} are looking already", {"retry-after": "10"})
    next_s = 0.0
    async with aclosing(engine.watchers.steps(FIGURES_S / 4)) as steps:
        async for step in steps:
            if step is not None and (event := _step(front, call.caller, step)):
                await call.event(event)
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + FIGURES_S
                _ = front.engine  # raises once the server drains
                await call.event(await _figures(front, call.caller))


async def _figures(front: Front, caller: Caller) -> dict[str, Any]:
    """Returns totals, of which the page shows how they grow: the engine's, or a tenant's own."""
    found: dict[str, Any] = {"kind": "figures", "at_s": time.monotonic(), "model": front.engine.info.name}
    if caller.sees_figures:
        reading = await asyncio.to_thread(front.engine.metrics.reading)
        return {**found, **_of_engine(reading)}
    tenant = front.calls.tenants.by_name.get(caller.tenant)
    if tenant is not None:
        values = {"completion_tokens_total": tenant.counts.completion_tokens}
        found |= {"values": values, "load": {"requests_running": tenant.num_in_flight}}
    return found


def _of_engine(reading: MetricsReading) -> dict[str, Any]:
    histograms = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    return {
        "values": reading.values,
        "load": reading.load,
        "gauges": reading.gauges,
        "acceptance": {
            name: {"tested": sum(each.tested), "accepted": sum(each.accepted)}
            for name, each in reading.acceptance.items()
        },
        "histograms": {
            name: {"bounds": [*reading.histograms[name].bounds], "counts": reading.histograms[name].counts}
            for name in histograms
        },
    }


def _step(front: Front, caller: Caller, step: SeenStep) -> dict[str, Any] | None:
    """Returns what a caller may see of a step; None if that is nothing."""
    shown = [_request(front, caller, each) for each in step.requests if _is_visible(caller, each.request_id)]
    return {"kind": "step", "step_s": step.step_s, "requests": shown} if shown else None


def _is_visible(caller: Caller, request_id: str) -> bool:
    return caller.is_admin or bool(caller.tenant and request_id.startswith(f"{caller.tenant}/"))


def _request(front: Front, caller: Caller, one: RequestStep) -> dict[str, Any]:
    name = one.request_id.partition("\0")[0]
    if not caller.is_admin:
        name = name.removeprefix(f"{caller.tenant}/")
    count = min(len(one.token_ids), MAX_TREE_NODES)
    return {
        **asdict(one),
        "request_id": name,
        "sample": one.request_id.partition("\0")[2],
        "texts": [_text(front, token_id) for token_id in one.token_ids[:count]],
        "parents": one.parents[:count],
        "accepted": [node for node in one.accepted if node < count],
        "new": [_text(front, token_id) for token_id in one.new_token_ids[-SHOWN_TOKENS:]],
    }


def _text(front: Front, token_id: int) -> str:
    return front.token_bytes[token_id].decode(errors="replace")
