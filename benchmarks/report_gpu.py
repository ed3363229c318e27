"""The tables of docs/gpu.md, from benchmarks/results/gpu/RUN/*.json, which benchmarks/gpu/run.py has written."""

from __future__ import annotations

from typing import Any

from benchmarks.report_drafting import read, table

FLASHINFER, COMPILED, LAST = "1_flashinfer", "2_compiled", "3_small_tiles"
SHAPES = {"llama-2-7b": "7B", "llama-3-8b": "8B"}
STEPS = ((1, 1), (1, 16), (1, 64), (4, 4), (4, 64), (16, 16), (16, 64), (16, 256), (32, 32))  # requests, rows


def cells(run: str, part: str) -> dict[str, Any]:
    found: dict[str, Any] = read(f"gpu/{run}/{part}")["cells"]
    return {name: cell for name, cell in found.items() if "error" not in cell and "skipped" not in cell}


def step_table() -> str:
    """Milliseconds of whole steps behind 1,024 tokens, by what the engine was at the time."""
    runs = {run: cells(run, "step_time") for run in (FLASHINFER, COMPILED, LAST)}
    ways = [
        ("FlashInfer", FLASHINFER, "default"),
        ("Triton", COMPILED, "uncompiled"),
        ("Triton, compiled", COMPILED, "default"),
        ("small tiles", LAST, "default"),
    ]
    rows = []
    for shape, short in SHAPES.items():
        for requests, num_rows in STEPS:
            found = [runs[run].get(f"{shape}/{mode}/b{requests}/c1024") for _, run, mode in ways]
            last = next(each for each in reversed(found) if each is not None)
            if num_rows not in last["rows"]:
                continue
            times = [_of_rows(each, num_rows) for each in found]
            best = [each for each in times if each != "-"][-1]
            rows.append([short, requests, num_rows, *times, f"{float(best) / last['roofline_ms']:.2f}"])
    head = ["shape", "requests", "rows", *(name for name, _, _ in ways), "the last over the roofline"]
    return table(head, [list(map(str, row)) for row in rows])


def _of_rows(cell: dict[str, Any] | None, num_rows: int) -> str:
    if cell is None or num_rows not in cell["rows"]:
        return "-"
    return f"{cell['ms'][cell['rows'].index(num_rows)]:.2f}"


def attention_table() -> str:
    """Microseconds of one layer's attention, trees and chains, and what trees take over chains."""
    rows = []
    for name, cell in cells(COMPILED, "step_time").items():
        if not name.startswith("attention/b"):
            continue
        for kernel, kinds in cell.items():
            tree, causal = kinds["tree"], kinds["causal"]
            ratio = max(tree[each] / causal[each] for each in tree)
            times = [f"{tree[each] * 1e3:.0f}" for each in tree]
            rows.append([name.removeprefix("attention/b"), f"`{kernel}`", *times, f"{ratio:.2f}"])
    return table(
        ["requests", "kernel", *(f"{n} rows us" for n in ("1", "4", "8", "16", "32", "64")), "over chains"], rows
    )


def tile_table() -> str:
    """Microseconds of a layer in a graph of FlashInfer's, by its query tile."""
    rows = []
    for name, cell in cells(FLASHINFER, "step_time").items():
        if not name.startswith("small_q/") or "/b16/" not in name:
            continue
        shape = SHAPES[name.split("/")[1]]
        for number in ("4", "8"):
            us, tile = cell["us"], cell["tile"]
            rows.append(
                [shape, number, f"{cell['copy_us']:.0f}"]
                + [
                    f"{us[f'flashinfer_tree, {way}'][number]:.0f} ({tile[f'flashinfer_tree, {way}'][number]})"
                    for way in ("graph", "graph, tile of one row")
                ]
                + [f"{us['triton, graph'][number]:.0f}", f"{us['flashinfer causal, eager'][number]:.0f}"]
            )
    head = [
        "shape",
        "rows each",
        "a copy us",
        "max_num_seqs requests (tile)",
        "as many as rows (tile)",
        "Triton, graph",
    ]
    return table([*head, "FlashInfer causal"], rows)


def replay_table() -> str:
    """Recorded answers forced through the engine, beside transformers' generate()."""
    baseline = cells(LAST, "transformers")
    rows = []
    for name, cell in cells(LAST, "replay").items():
        size = name.rsplit("/b", 1)[1]
        for contender, found in cell["contenders"].items():
            plain = baseline.get(f"generate/b{size}")
            rows.append(
                [
                    size,
                    contender if contender in ("off", "adaptive") else f"{contender} tokens",
                    f"{found['tokens_per_s']:.0f}",
                    f"{found['acceptance_length']:.2f}",
                    f"{found['draft_rows_per_step']:.1f}",
                    f"{found['forward_ms']:.2f}",
                    f"{found['over_off']['median']:.2f}",
                    f"{found['over_off']['median'] / found['acceptance_over_cost']:.2f}",
                    "-" if plain is None else f"{found['tokens_per_s'] / plain['tokens_per_s']:.1f}",
                ]
            )
    head = ["requests", "drafts", "tokens/s", "acceptance length", "draft rows", "forward ms", "over off"]
    return table([*head, "of acceptance over cost", "over generate()"], rows)


def short_replay_table() -> str:
    """Tokens/s of recorded answers: off and on, and of transformers' generate() where it was reached."""
    baseline, rows = cells(LAST, "transformers"), []
    for name, cell in cells(LAST, "replay").items():
        size, (off, on) = name.rsplit("/b", 1)[1], (cell["contenders"][each] for each in ("off", "adaptive"))
        plain = baseline.get(f"generate/b{size}")
        rows.append(
            [
                size,
                "-" if plain is None else f"{plain['tokens_per_s']:.0f}",
                *(f"{each['tokens_per_s']:.0f}" for each in (off, on)),
                f"{on['acceptance_length']:.2f}",
                f"{on['over_off']['median']:.2f}",
                "-" if plain is None else f"{on['tokens_per_s'] / plain['tokens_per_s']:.1f}",
            ]
        )
    head = ["requests", "transformers tokens/s", "off", "on", "acceptance length", "on / off", "on / transformers"]
    return table(head, rows)


def profile_table() -> str:
    """Where a step's time goes, microseconds."""
    kinds = {
        "matrix products": ("nvjet", "splitKreduce", "cutlass"),
        "attention": ("attend_tiles", "merge_splits"),
        "K and V stored": ("index_copy", "store_states"),
        "compiled": ("triton_",),
    }
    rows = []
    for run in (COMPILED, LAST):
        for name, cell in cells(run, "step_time").items():
            if "by_kernel" not in cell:
                continue
            shape, _, requests, num_rows = name.split("/")
            sums = [
                sum(each["us"] for each in cell["by_kernel"] if any(word in each["name"] for word in words))
                for words in kinds.values()
            ]
            host = cell["host_us"]
            rows.append(
                [
                    SHAPES[shape] + (", small tiles" if run == LAST else ""),
                    f"{requests[1:]} x {num_rows[1:]}",
                    f"{host['step']:.0f}",
                    f"{host['launch']:.0f}",
                    f"{host['replay']:.0f}",
                    str(cell["kernels"]),
                    f"{cell['kernels_us']:.0f}",
                    *(f"{us:.0f}" for us in sums),
                ]
            )
    return table(["shape", "requests x rows", "step", "launch", "of which replay", "kernels", "take", *kinds], rows)


def gap_table() -> str:
    rows = []
    for run, what in ((FLASHINFER, "FlashInfer, tables in front of graphs"), (LAST, "Triton, tables in graphs")):
        for name, cell in cells(run, "gap").items():
            stages = [f"{cell['stages_ms'][each]['median']:.2f}" for each in ("commit", "schedule", "build")]
            times = [f"{cell[each]['median']:.2f}" for each in ("gap_ms", "launch_ms", "wait_ms")]
            rows.append([what, name.split("/")[1], *times, *stages])
    head = ["engine", "requests", "commit to launch", "launch", "wait", "of the first: commit", "schedule", "build"]
    return table(head, rows)


TABLES = {
    "gpu steps": step_table,
    "gpu attention": attention_table,
    "gpu tiles": tile_table,
    "gpu replay": replay_table,
    "gpu replay short": short_replay_table,
    "gpu profile": profile_table,
    "gpu gap": gap_table,
}
