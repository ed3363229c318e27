"""Writes Grafana's dashboard, deploy/grafana/dashboards/batchserve.json.

    python -m tools.dashboard            # after a change here; --check says whether the file is current

The panels are a table here because their JSON is long and mostly the same for each.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "batchserve.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. queries: pairs of an expression and its legend. kind: timeseries or stat."""

    title: str
    queries: tuple[tuple[str, str], ...]
    text: str
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    height: int = HEIGHT
    most: float | None = None  # of the axis


def m(name: str, labels: str = "") -> str:
    """Returns a metric of the chosen instances."""
    return f'batchserve_{name}{{instance=~"$instance"{", " + labels if labels else ""}}}'


def rate(name: str, labels: str = "") -> str:
    return f"rate({m(name, labels)}[$__rate_interval])"


def total_rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({rate(name)})"


def over(part: str, whole: str, by: str = "") -> str:
    """Returns the ratio of two rates, and nothing where nothing happened: 0 over 0 would be NaN."""
    return f"{total_rate(part, by)} / ({total_rate(whole, by)} > 0)"


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    rates = f"sum by (le) ({rate(f'{histogram}_bucket')})"
    return tuple((f"histogram_quantile({q}, {rates})", f"p{q * 100:g}") for q in QUANTILES)


def stat(title: str, query: str, text: str, unit: str = "short") -> Panel:
    return Panel(title, ((query, ""),), text, unit, width=4, kind="stat", height=4)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        stat("Running", f"sum({m('requests_running')})", "Requests that have K/V memory."),
        stat("Waiting", f"sum({m('requests_waiting')})", "Requests that wait for a place or for K/V memory."),
        stat("Tokens a second", total_rate("completion_tokens_total"), "Tokens that clients are given."),
        stat(
            "First token, p90",
            f"histogram_quantile(0.9, sum by (le) ({rate('time_to_first_token_seconds_bucket')}))",
            "Arrival to first token.",
            "s",
        ),
        stat(
            "Acceptance length",
            "1 + " + over("accepted_draft_tokens_total", "decoding_requests_total"),
            "Tokens that a request gets of a step: accepted draft tokens, and one of the model's own.",
        ),
        stat(
            "Age of these figures",
            f"max({m('reading_age_seconds')})",
            "More than a moment if an engine does not answer.",
            "s",
        ),
    ),
    "Load": (
        Panel(
            "Requests",
            ((f"sum({m('requests_running')})", "running"), (f"sum({m('requests_waiting')})", "waiting")),
            "Waiting requests that do not go away need a larger --max-num-seqs, more memory or another server.",
        ),
        Panel(
            "Tokens",
            ((total_rate("completion_tokens_total"), "out"), (total_rate("prompt_tokens_total"), "in")),
            "Tokens a second: those that clients are given, and those of prompts, cached ones included.",
        ),
        Panel(
            "Ends of requests",
            tuple((total_rate(f"requests_{how}_total"), how) for how in ("finished", "aborted", "expired", "failed")),
            "A second. Aborted: the client went away. Expired: the deadline passed.",
            "reqps",
        ),
        Panel(
            "K/V memory in use",
            ((f"{m('kv_used_tokens')} / ({m('kv_total_tokens')} > 0)", "{{instance}}"),),
            "Of running requests; cached prefixes give way to them.",
            "percentunit",
            most=1.0,
        ),
        Panel(
            "Preemptions",
            ((total_rate("preemptions_total"), "a second"),),
            "Requests that lost their K/V memory to others, and are computed again later.",
        ),
        Panel("Time in the queue", quantiles("request_queue_seconds"), "Arrival to first rows.", "s"),
    ),
    "Latency": (
        Panel("Time to first token", quantiles("time_to_first_token_seconds"), "Arrival to first token.", "s", 12),
        Panel(
            "Time per output token",
            quantiles("time_per_output_token_seconds"),
            "First to last token over the tokens after the first, of finished requests.",
            "s",
            12,
        ),
        Panel(
            "Inter-token latency",
            quantiles("inter_token_latency_seconds"),
            "Since a request's step before; n tokens of a step count as n of an n-th each.",
            "s",
            12,
        ),
        Panel("Whole requests", quantiles("request_seconds"), "Arrival to last token.", "s", 12),
    ),
    "Speculation": (
        Panel(
            "Edges that came true, by drafter",
            ((over("accepted_edges_total", "tested_edges_total", "drafter"), "{{drafter}}"),),
            "Accepted over tested edges of draft trees.",
            "percentunit",
            most=1.0,
        ),
        Panel(
            "Edges that came true, by depth",
            ((over("accepted_edges_total", "tested_edges_total", "drafter, depth"), "{{drafter}} {{depth}}"),),
            "Depth 1 is the first token after the last one that is known.",
            "percentunit",
            most=1.0,
        ),
        Panel(
            "Tokens per request and step",
            (
                ("1 + " + over("accepted_draft_tokens_total", "decoding_requests_total"), "acceptance length"),
                (over("draft_rows_total", "decoding_requests_total"), "draft rows"),
            ),
            "What drafts cost in rows, and what they bring.",
        ),
        Panel(
            "Edges tested, by drafter",
            ((total_rate("tested_edges_total", "drafter"), "{{drafter}}"),),
            "A second: how much each ratio above rests on.",
        ),
        Panel(
            "Error of drafters' odds",
            ((f"max by (drafter) ({m('calibration_error')})", "{{drafter}}"),),
            "Mean distance of an edge's probability from how often such edges come true, of late.",
            "percentunit",
        ),
        Panel(
            "Pauses of drafts",
            ((total_rate("draft_pauses_total"), "a second"),),
            "A request goes on without drafts for a while: the model's numbers were not finite.",
        ),
    ),
    "Steps": (
        Panel(
            "Step time",
            (
                (m("predicted_step_seconds"), "predicted {{instance}}"),
                (m("actual_step_seconds"), "actual {{instance}}"),
            ),
            "Of the last step that was learned from.",
            "s",
        ),
        Panel(
            "Step time over that measured at start",
            ((m("step_time_factor"), "{{instance}}"),),
            "Well above 1: other processes use the cores, or the machine runs slower than when it was measured.",
        ),
        Panel(
            "Price of time",
            ((m("price_tokens_per_second"), "{{instance}}"),),
            "Tokens a second that a draft's row has to bring.",
        ),
        Panel(
            "Steps",
            ((total_rate("steps_total"), "steps"), (total_rate("rows_total"), "rows")),
            "A second; rows are those of prompts, drafts and last tokens together.",
        ),
        Panel(
            "Time in forwards",
            ((rate("forward_seconds_total"), "{{instance}}"),),
            "The share of the time in which the model runs.",
            "percentunit",
        ),
        Panel(
            "Time of the host",
            ((m("host_seconds"), "{{instance}}"),),
            "What a step takes beside its forward and drafting.",
            "s",
        ),
    ),
    "Prefix cache": (
        Panel(
            "Hit rate",
            ((over("prefix_hit_tokens_total", "prefix_queried_tokens_total"), "of tokens"),),
            "Prompt tokens whose K/V was cached, of those that were looked up.",
            "percentunit",
            12,
            most=1.0,
        ),
        Panel(
            "Prompt tokens",
            (
                (total_rate("prefix_queried_tokens_total"), "looked up"),
                (total_rate("prefix_hit_tokens_total"), "found"),
            ),
            "A second.",
            width=12,
        ),
    ),
    "Failures": (
        Panel(
            "Failed calls, by reason",
            ((total_rate("failed_calls_total", "reason"), "{{reason}}"),),
            "A second; docs/operations.md says what to do about each reason.",
            "reqps",
            12,
        ),
        Panel(
            "Contained faults, by place",
            ((f"sum by (where) ({m('contained_faults_total')})", "{{where}}"),),
            "Since the start. A fault that cost at most one request its answer or its drafts; the log has a traceback.",
            width=12,
        ),
    ),
    "Tenants (with --tenant-metrics)": (
        Panel(
            "Requests",
            ((total_rate("tenant_requests_total", "tenant"), "{{tenant}}"),),
            "A second; each sample of a prompt is one.",
            "reqps",
            6,
        ),
        Panel(
            "Tokens",
            (
                (total_rate("tenant_completion_tokens_total", "tenant"), "{{tenant}} out"),
                (total_rate("tenant_prompt_tokens_total", "tenant"), "{{tenant}} in"),
            ),
            "A second.",
            width=6,
        ),
        Panel(
            "In flight",
            ((f"sum by (tenant) ({m('tenant_requests_in_flight')})", "{{tenant}}"),),
            "Requests in the engine, running or waiting.",
            width=6,
        ),
        Panel(
            "Refused by limits",
            ((total_rate("tenant_refused_total", "tenant"), "{{tenant}}"),),
            "A second: QUOTA_EXCEEDED.",
            "reqps",
            6,
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_frame(len(panels) + 1, title, "row", 0, y, COLUMNS, 1) | {"collapsed": False, "panels": []})
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            panels.append(_panel(len(panels) + 1, panel, x, y))
            x += panel.width
        y += row[-1].height
    return {
        "uid": "batchserve",
        "title": "batchserve",
        "tags": ["batchserve"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _instance_variable()]},
        "panels": panels,
    }


def _frame(number: int, title: str, kind: str, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"id": number, "title": title, "type": kind, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    bounds = {"min": 0} | ({} if panel.most is None else {"max": panel.most})
    return _frame(number, panel.title, panel.kind, x, y, panel.width, panel.height) | {
        "description": panel.text,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **bounds}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _instance_variable() -> dict[str, Any]:
    query = "label_values(batchserve_steps_total, instance)"
    return {
        **{"name": "instance", "label": "Server", "type": "query", "datasource": DATASOURCE},
        **{"definition": query, "query": {"query": query, "refId": "instances"}, "refresh": 2, "sort": 1},
        **{"multi": True, "includeAll": True, "allValue": ".*"},
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes Grafana's dashboard.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is not current")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().check:
        return int(FILE.read_text() != text)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
