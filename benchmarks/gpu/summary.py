"""What a run came to, as text, from the parts' files alone: `python -m benchmarks.gpu.summary DIR`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.verdict import has_no_graphs, unfit

Data = dict[str, Any]
# What issue and design ask for; each line of a summary that has a bound says whether it was kept.
MAX_OVER_ROOFLINE, MIN_GRAPHS_OVER_EAGER, MAX_TREE_OVER_CAUSAL = 1.25, 1.5, 1.15
MIN_OVER_GENERATE = {"1": 5.36, "2": 4.20, "4": 3.40}
MIN_SHARE_OF_BOUND, MIN_OVER_OFF = 0.9, {"32": 1.0}
BUDGET_MS = 0.3  # from commit to launch


def summary(folder: Path) -> str:
    """One block a part that has begun; parts without a file are named at the end."""
    tell: dict[str, Callable[[Data], list[str]]] = {
        "correctness": lambda data: _verdicts(data) + _unfit(data),
        "equivalence": _verdicts,
        "step_time": _step_time,
        "replay": lambda data: _replay(data, _read(folder / "transformers.json")),
        "transformers": _transformers,
        "memory": _memory,
        "gap": _gap,
    }
    lines: list[str] = []
    missing = []
    for name, tell_part in tell.items():
        data = _read(folder / f"{name}.json")
        if data is None:
            missing.append(name)
            continue
        lines += _head(name, data)
        lines += _tell_of(tell_part, data)
        lines += _probes(data)
        lines += _failures(data)
    if missing:
        lines.append(f"not run: {', '.join(missing)}")
    return "\n".join(lines) + "\n"


def _tell_of(tell_part: Callable[[Data], list[str]], data: Data) -> list[str]:
    """A dry run keeps and misses nothing."""
    try:
        lines = tell_part(data)
    except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:  # the other parts are to be read
        lines = [f"cannot be summed up: {type(error).__name__}: {error}"]
    if _is_dry(data):
        lines = [re.sub(r" \((kept|MISSED)\)", "", line) for line in lines]
    return [f"  {line}" for line in lines]


def _is_dry(data: Data) -> bool:
    return bool(data.get("about", {}).get("environment", {}).get("dry"))


def _read(path: Path) -> Data | None:
    if not path.exists():
        return None
    data: Data = json.loads(path.read_text())
    return data


def _head(name: str, data: Data) -> list[str]:
    facts = data.get("about", {}).get("environment", {})
    where = "dry run on a CPU, its figures mean nothing" if _is_dry(data) else facts.get("device", "unknown device")
    return [f"{name}: {len(data['cells'])} cells in {data.get('took_s', 0)} s ({where})"]


def _probes(data: Data) -> list[str]:
    found = data.get("about", {}).get("probes", {})
    return [
        f"  {name}: went past the probe at load: {of['gone_past']}" for name, of in found.items() if "gone_past" in of
    ]


def _failures(data: Data) -> list[str]:
    lines = []
    for name, cell in data["cells"].items():
        if "error" in cell:
            lines.append(f"  FAILED {name}: {cell['error'].strip().splitlines()[-1][:200]}")
        lines += [f"  FAILED {name}, {each}: {str(why)[:200]}" for each, why in cell.get("failed", {}).items()]
    skipped = [name for name, cell in data["cells"].items() if "skipped" in cell]
    if skipped:
        lines.append(f"  skipped {len(skipped)}: {skipped[0]}: {data['cells'][skipped[0]]['skipped'][:120]}")
    if data.get("left_out"):
        lines.append(f"  no time for {len(data['left_out'])}: {', '.join(data['left_out'][:6])}")
    if data.get("error"):
        lines.append(f"  THE PART FAILED: {data['error'].strip().splitlines()[-1][:200]}")
    return lines


def _measured(data: Data) -> dict[str, Data]:
    """Also what is there of cells that were not finished."""
    cells = {name: cell for name, cell in data["cells"].items() if "skipped" not in cell}
    return {name: cell for name, cell in cells.items() if "error" not in cell or cell.get("is_partial")}


def _mark(is_kept: bool) -> str:
    return "kept" if is_kept else "MISSED"


def _verdicts(data: Data) -> list[str]:
    cells = _measured(data)
    wrong = [name for name, cell in cells.items() if not cell["is_right"]]
    lines = [f"{len(cells) - len(wrong)} of {len(cells)} right"]
    lines += [f"WRONG {name}: {_short(cells[name])}" for name in wrong]
    left = [name for name, cell in cells.items() if not cell.get("is_judged", True)]
    if left:
        lines.append(f"not judged, experts in bf16: {', '.join(left)}")
    ties = [cell["greedy"] for cell in cells.values() if "greedy" in cell]
    if ties:
        lines.append(f"whole engines with {', '.join(sorted({name.split('/')[2] for name in cells}))}")
        tokens, near = sum(t["tokens"] for t in ties), sum(t["near_ties"][0] for t in ties)
        loud = sum(t.get("near_ties_of_loud_rows", [0])[0] for t in ties)
        lines.append(f"greedy: {near} near-ties in {tokens} tokens, {loud} of them beyond the stated bound")
    return lines


def _unfit(data: Data) -> list[str]:
    is_eager = has_no_graphs(data)
    lines = ["engines do without graphs from here on: no kernel's are right"] if is_eager else []
    found = unfit(data, is_eager=is_eager)
    return lines + [f"engines do without {kernel} from here on, because of {cell}" for kernel, cell in found.items()]


def _on(cell: Data) -> str:
    """Which kernel an engine's figures are of."""
    return f" on {cell['attention']}" if "attention" in cell else ""


def _short(cell: Data) -> str:
    return str({key: value for key, value in cell.items() if key != "is_right"})[:160]


def _step_time(data: Data) -> list[str]:
    about, cells = data["about"], _measured(data)
    lines = [f"copy bandwidth {about.get('copy_gb_per_s')} GB/s"]
    for name, facts in about.items():
        if isinstance(facts, dict) and "critical_length" in facts:
            lines.append(f"{name}: {facts['attention']}, critical decoding length {facts['critical_length']} rows")
    for name, cell in cells.items():
        if "roofline_ms" not in cell:
            continue
        few = [ratio for rows, ratio in zip(cell["rows"], cell["over_roofline"], strict=True) if rows <= 16]
        text = f"{name}{_on(cell)}: {cell['ms'][0]} ms at {cell['rows'][0]} rows, {cell['critical_rows']} rows in 1.25x"
        if few:
            is_kept = max(few) <= MAX_OVER_ROOFLINE
            text += f"; to 16 rows {max(few)}x the roofline of {cell['roofline_ms']} ms ({_mark(is_kept)})"
        lines.append(text)
    return (
        lines
        + _sampling(cells)
        + _graphs(cells)
        + _stages(cells)
        + _profiles(cells)
        + _small_q(cells)
        + _buckets(about, cells)
        + _tree_over_causal(cells)
    )


def _stages(cells: dict[str, Data]) -> list[str]:
    """The host's part of a step."""
    lines = []
    for name, cell in cells.items():
        if "host_us" in cell:
            host = cell["host_us"]
            parts = ", ".join(f"{part} {us}" for part, us in host.items() if part not in ("step", "launch"))
            lines.append(f"{name}{_on(cell)}: a step of {host['step']} us, its launch {host['launch']}: {parts}")
    return lines


def _profiles(cells: dict[str, Data]) -> list[str]:
    """The largest of a step's kernels."""
    lines = []
    for name, cell in cells.items():
        for step, found in cell.get("steps", {}).items():
            most = ", ".join(f"{each['count']:.0f} {each['name'][:40]} {each['us']}" for each in found["by_kernel"][:4])
            lines.append(f"{name}/{step}{_on(cell)}: {found['kernels']} kernels take {found['kernels_us']} us: {most}")
    return lines


def _sampling(cells: dict[str, Data]) -> list[str]:
    """How much longer a step takes that samples."""
    lines = []
    for name, cell in cells.items():
        if "/sampling/" not in name or "ms" not in cell:
            continue
        greedy = cell["ms"]["greedy"]
        for kind in ("sampled", "top_p"):
            ratios = [f"{ms / least:.2f}" for ms, least in zip(cell["ms"][kind], greedy, strict=True)]
            text = f"{name}{_on(cell)}, {kind}: {', '.join(ratios)}x a greedy step of {cell['rows']} rows"
            lines.append(f"{text}, of which the host decided {cell['host_rows'][kind]}")
    return lines


def _graphs(cells: dict[str, Data]) -> list[str]:
    lines = []
    for name, cell in cells.items():
        if "roofline_ms" not in cell:
            continue
        mode = name.split("/")[1]
        other = cells.get(name.replace(f"/{mode}/", "/default/"))
        if other is not None and _on(other) != _on(cell):  # it would be kernels that are compared
            other = None
        if mode in ("uncompiled", "whole") and other is not None:
            ratios = [ms / least for ms, least in zip(cell["ms"], other["ms"], strict=False)]
            lines.append(f"{name}: {min(ratios):.2f} to {max(ratios):.2f}x the time of steps with compiled layers")
        if mode == "eager" and other is not None:
            ratio = cell["ms"][0] / other["ms"][0]
            text = f"{name}: graphs are {ratio:.2f}x as fast at {cell['rows'][0]} rows"
            lines.append(f"{text} ({_mark(ratio >= MIN_GRAPHS_OVER_EAGER)})" if cell["rows"][0] == 1 else text)
    return lines


def _small_q(cells: dict[str, Data]) -> list[str]:
    """By kernel, what its graph takes over its eager plan, with the rows where that is most; and the best of all."""
    lines = []
    for name, cell in cells.items():
        if not name.startswith("small_q/"):
            continue
        us, tiles, parts = cell["us"], cell["tile"], []
        for each in us:
            kernel, _, way = each.partition(", ")
            if way != "graph":
                continue
            eager_us = us.get(f"{kernel}, eager", {})
            ratios = [(us[each][rows] / eager, rows) for rows, eager in eager_us.items() if rows in us[each]]
            if not ratios:
                continue
            ratio, rows = max(ratios)
            text = f"{kernel} as a graph at most {ratio:.2f}x eager ({rows} rows each"
            pair = [tiles.get(f"{kernel}, {kind}", {}).get(rows) for kind in ("graph", "eager")]
            parts.append(text + (f", tile {pair[0]} for {pair[1]})" if all(pair) else ")"))
        if not cell["over_copy"]:
            continue
        least, which = min((min(by_rows.values()), each) for each, by_rows in cell["over_copy"].items())
        lines.append(f"{name}: {'; '.join(parts)}; least {least:.2f}x a copy of the K/V ({which})")
    return lines


def _buckets(about: Data, cells: dict[str, Data]) -> list[str]:
    """Graphs with all requests, and with as many as there are rows, over those with the requests that there are."""
    lines = []
    for name, facts in about.items():
        if name.startswith("buckets/"):
            more = facts.get("more_device_mib", facts.get("more_process_peak_mib"))
            lines.append(f"{name}: {facts['graphs']} graphs in {facts['capture_s']} s, {more} MiB")
    for name, cell in cells.items():
        for way, ratios in cell.get("over_fitting", {}).items():
            steps = zip(ratios, cell["rows_each"], strict=True)
            text = ", ".join(f"{ratio:.3f}x at {rows} rows each" for ratio, rows in steps)
            lines.append(f"{name}{_on(cell)}: graphs of `{way}` requests over those of fitting ones: {text}")
    return lines


def _tree_over_causal(cells: dict[str, Data]) -> list[str]:
    lines = []
    for name, cell in cells.items():
        if not name.startswith("attention/"):
            continue
        for kernel, kinds in cell.items():
            if not {"tree", "causal"} <= kinds.keys():
                continue
            ratios = {rows: ms / kinds["causal"][rows] for rows, ms in kinds["tree"].items() if rows in kinds["causal"]}
            if not ratios:
                continue
            most = max(ratios.values())
            # Of what has failed in part nothing is kept.
            is_kept = most <= MAX_TREE_OVER_CAUSAL and kernel not in cell.get("failed", {})
            lines.append(f"{name}, {kernel}: trees at most {most:.2f}x causal ({_mark(is_kept)})")
    return lines


def _replay(data: Data, baseline: Data | None) -> list[str]:
    lines = []
    for name, cell in _measured(data).items():
        size = name.rsplit("/b", 1)[-1]
        for each, found in cell["contenders"].items():
            ratio = found["over_off"]["median"]
            text = (
                f"{name}{_on(cell)} {each}: {found['tokens_per_s']} tokens/s, acceptance {found['acceptance_length']}, "
            )
            text += f"K {found['draft_rows_per_step']}, {ratio:.2f}x off"
            if each == "adaptive":
                share = ratio / found["acceptance_over_cost"]
                text += f", {share:.0%} of acceptance over cost ({_mark(share >= MIN_SHARE_OF_BOUND)})"
                if size in MIN_OVER_OFF:
                    text += f", never below off ({_mark(ratio >= MIN_OVER_OFF[size])})"
                if "llma_rag" in name:
                    text += _over_generate(found["tokens_per_s"], size, baseline)
            lines.append(text)
    return lines


def _over_generate(tokens_per_s: float, size: str, baseline: Data | None) -> str:
    """Against plain generate(), and its faster ways where they were measured."""
    text = ""
    for kind in ("generate", "generate, static and compiled"):
        cell = (baseline or {"cells": {}})["cells"].get(f"{kind}/b{size}", {})
        if "tokens_per_s" not in cell:
            continue
        ratio = tokens_per_s / cell["tokens_per_s"]
        text += f", {ratio:.2f}x {kind}"
        if kind == "generate" and size in MIN_OVER_GENERATE:
            text += f" ({_mark(ratio >= MIN_OVER_GENERATE[size])})"
    return text


def _transformers(data: Data) -> list[str]:
    return [f"{name}: {cell['tokens_per_s']} tokens/s" for name, cell in _measured(data).items()]


def _memory(data: Data) -> list[str]:
    lines = []
    for name, cell in _measured(data).items():
        for length, found in cell["lengths"].items():
            peak = found.get("peak_mib", found.get("process_peak_mib"))
            lines.append(
                f"{name}{_on(cell)}, decoding length {length}: {peak} MiB at most, drafter {found['drafter_mib']} MiB"
            )
    return lines


def _gap(data: Data) -> list[str]:
    lines = []
    for name, cell in _measured(data).items():
        gap, idle = cell["gap_ms"], cell["idle_ms"]["median"]
        kept, with_launch = _mark(cell["is_within_budget"]), _mark(idle <= BUDGET_MS)
        text = f"{name}{_on(cell)}: {gap['median']} ms from commit to launch, p99 {gap['p99']} ms ({kept}); with the "
        lines.append(f"{text}launch {idle} ms ({with_launch}); {cell['streams']} streams, {cell['server'][:60]}")
    return lines


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])), end="")
