"""The tables of docs/drafting.md, from benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SETS = ("llma_rag", "selfrefine_yelp", "mbpp_gpt4", "gsm_qwen2_7b", "crux_qwen25_7b", "gsm8k_gpt3_175b")
ABLATED = ("gsm_qwen2_7b", "crux_qwen25_7b")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def replay_table(kind: str) -> str:
    """Acceptance length, and draft tokens a step, of every drafter on every set."""
    columns = [("mixture", 16), ("mixture", 32), ("mixture", 64), ("trie", 16), ("trie", 64), ("reference", 16)]
    rows = []
    for name in SETS:
        results = {(r["drafter"], r["max_draft_tokens"]): r for r in read(f"replay/{name}_{kind}")["results"]}
        cells = [results[column] for column in columns]
        rows.append([name, *(f"{c['acceptance_length']:.2f} ({c['draft_tokens_per_step']:.0f})" for c in cells)])
    return table(["set", *(f"{drafter} {nodes}" for drafter, nodes in columns)], rows)


def engine_table() -> str:
    measured = read("drafters")
    rows = []
    for size, cells in measured["sizes"].items():
        for name, cell in cells.items():
            over = cell["over_none"]
            rows.append(
                [
                    size,
                    name,
                    f"{cell['tokens_per_s']['median']:.0f}",
                    f"{over['median']:.2f} ({over['min']:.2f} to {over['max']:.2f})",
                    f"{cell['acceptance_length']:.2f}",
                    f"{cell['draft_tokens_per_step']:.1f}",
                    str(cell["other_answers"]),
                ]
            )
    head = [
        "requests",
        "drafter",
        "tokens/s",
        "over none",
        "acceptance length",
        "drafted a step",
        "answers that differ",
    ]
    return table(head, rows)


def cost_table() -> str:
    rows = [
        [
            name,
            f"{found['cost']['propose_16x16_ms_median']:.2f}",
            f"{found['cost']['update_us_median']:.1f}",
            f"{found['cost']['prompt_s'] * 1e3:.0f}",
        ]
        for name, found in read("draft_cost").items()
        if name != "environment"
    ]
    return table(["drafter", "16 requests x 16 nodes, ms", "update, us a token", "100,000-token prompt, ms"], rows)


def stream_table() -> str:
    rows = [
        [
            name,
            f"{run['scope_mib']} MiB",
            f"{run['most_bytes'] / 2**20:.1f} MiB",
            f"{run['acceptance_length_of_the_last_tenth']:.3f}",
        ]
        for name, found in read("draft_cost").items()
        if name != "environment"
        for run in found["stream"]
    ]
    return table(["drafter", "bound", "most that was used", "acceptance length"], rows)


def noise_table() -> str:
    rows = [
        [temperature, f"{cell['without_noise']:.3f}", f"{cell['with_noise']:.3f}"]
        for temperature, cell in read("drafters")["noise"].items()
    ]
    return table(["temperature", "drafted as if greedy", "with the noise"], rows)


def jacobi_table(name: str) -> str:
    rows = [
        [
            f"{r['window']}/{r['ngram']}/{r['guesses']}",
            "yes" if r["prompt_ngrams"] else "no",
            str(r["most_rows"]),
            f"{r['mean_rows']:.1f}",
            f"{r['tokens_per_step']:.2f}",
        ]
        for r in read("jacobi")[name]
    ]
    return table(["W/N/G", "prompt n-grams", "(W+G)(N-1)", "rows a step", "tokens a step (S)"], rows)


def _paired(path: str, key: Callable[[dict[str, Any]], str], head: str) -> str:
    """Acceptance lengths of the trie on both ablated sets, side by side."""
    columns = [{key(r): r for r in read(f"ablation/trie_{name}")[path]} for name in ABLATED]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    rows = [
        [label, *(f"{c[label]['acceptance_length']:.2f}" if label in c else "-" for c in columns)] for label in labels
    ]
    return table([head, *ABLATED], rows)


def modes_table() -> str:
    return _paired(
        "lengths_and_modes",
        lambda r: f"{r['mode']}, {r['decoding_length']} tokens, branches of {r['branch_length']}",
        "draft",
    )


def copy_table() -> str:
    rows = []
    grids = [read(f"ablation/reference_{name}")["figures_3_and_4"] for name in ABLATED]
    for cells in zip(*grids, strict=True):
        rows.append(
            [
                str(cells[0]["n"]),
                str(cells[0]["k"]),
                *(f"{c['triggers']} / {c['accepted_tokens']} / {c['steps']}" for c in cells),
                *(f"{c['acceptance_length']:.2f}" for c in cells),
            ]
        )
    head = ["n", "k", *(f"{name}: triggers / accepted / steps" for name in ABLATED), *ABLATED]
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "replay cold": lambda: replay_table("cold"),
    "replay warm": lambda: replay_table("warm"),
    "drafters": engine_table,
    "draft cost": cost_table,
    "draft stream": stream_table,
    "noise": noise_table,
    "jacobi settings": lambda: jacobi_table("table_3"),
    "jacobi rows": lambda: jacobi_table("figure_4"),
    "trie parts": lambda: _paired("parts", lambda r: r["name"], "trie (64 tokens, branches of 12)"),
    "trie capacity": lambda: _paired("capacities", lambda r: str(r["capacity"]), "capacity"),
    "trie warm-up": lambda: _paired("warm_ups", lambda r: str(r["warm_up_responses"]), "responses seen before"),
    "trie modes": modes_table,
    "reference": copy_table,
}
