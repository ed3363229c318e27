"""The tables of docs/gpu.md, from benchmarks/results/gpu/RUN/*.json, which benchmarks/gpu/run.py has written."""

from __future__ import annotations

from typing import Any

from benchmarks.report_drafting import read, table

# On an H200; then on an H100.
FLASHINFER, COMPILED, TILES, FEW_ROWS, LAST = (
    "1_flashinfer",
    "2_compiled",
    "3_small_tiles",
    "4_few_rows",
    "5_own_kernels",
)
H100, H100_LAST = "6_h100", "7_residuals_timed"
SHAPES = {"llama-2-7b": "7B", "llama-3-8b": "8B"}
RAG, OTHER_SETS = "llma_rag", {"gsm_qwen2_7b": "arithmetic, Qwen2-7B", "mbpp_gpt4": "Python, GPT-4"}
# Requests, and rows of all.
STEPS = ((1, 1), (1, 4), (1, 16), (1, 64), (4, 4), (4, 16), (4, 64), (16, 16), (16, 64), (16, 256), (32, 32))


def cells(run: str, part: str) -> dict[str, Any]:
    found: dict[str, Any] = read(f"gpu/{run}/{part}")["cells"]
    return {name: cell for name, cell in found.items() if "error" not in cell and "skipped" not in cell}


def step_table() -> str:
    """Milliseconds of whole steps behind 1,024 tokens, by what the engine was at the time."""
    runs = {run: cells(run, "step_time") for run in (FLASHINFER, COMPILED, TILES, FEW_ROWS, LAST)}
    ways = [
        ("FlashInfer", FLASHINFER, "default"),
        ("Triton", COMPILED, "uncompiled"),
        ("Triton, compiled", COMPILED, "default"),
        ("small tiles", TILES, "default"),
        ("products, overlap", FEW_ROWS, "default"),
        ("norms, residuals", LAST, "default"),
    ]
    rows = []
    for shape, short in SHAPES.items():
        for requests, num_rows in STEPS:
            found = [runs[run].get(f"{shape}/{mode}/b{requests}/c1024") for _, run, mode in ways]
            times = [_of_rows(each, num_rows) for each in found]
            last, best = [(cell, ms) for cell, ms in zip(found, times, strict=True) if cell and ms != "-"][-1]
            rows.append([short, requests, num_rows, *times, f"{float(best) / last['roofline_ms']:.2f}"])
    head = ["shape", "requests", "rows", *(name for name, _, _ in ways), "the last over the roofline"]
    return table(head, [list(map(str, row)) for row in rows])


def _of_rows(cell: dict[str, Any] | None, num_rows: int) -> str:
    if cell is None or num_rows not in cell["rows"]:
        return "-"
    return f"{cell['ms'][cell['rows'].index(num_rows)]:.2f}"


def overlap_table() -> str:
    """Milliseconds of a step behind its launch, with and without one of the ways that make few rows faster."""
    ways = {"both": "default", "kernels one by one": "one_by_one", "torch's products": "torch_products"}
    found = cells(FEW_ROWS, "step_time")
    rows = []
    for requests in (1, 16):
        of_ways = [found[f"llama-2-7b/{mode}/b{requests}/c1024"] for mode in ways.values()]
        for place, num_rows in enumerate(of_ways[0]["rows"]):
            times = [f"{each['ms'][place] - each['launch_ms'][place]:.2f}" for each in of_ways]
            rows.append([str(requests), str(num_rows), *times])
    return table(["requests", "rows", *ways], rows)


def roofline_table() -> str:
    """Whole steps on an H100, by rows of all requests together, over the roofline."""
    counts, rows = (1, 2, 4, 8, 16, 24, 32, 48, 64), []
    for name, cell in cells(H100_LAST, "step_time").items():
        if "roofline_ms" not in cell:
            continue
        shape, _, requests, context = name.split("/")
        over = dict(zip(cell["rows"], cell["over_roofline"], strict=True))
        ratios = [f"{over[count]:.2f}" if count in over else "" for count in counts]
        rows.append([SHAPES[shape], requests[1:], context[1:], f"{cell['roofline_ms']:.2f}", *ratios])
    return table(["shape", "requests", "context", "roofline ms", *(f"{count} rows" for count in counts)], rows)


def memory_table() -> str:
    """GiB of the device at most, by decoding length (Lookahead, table 5)."""
    found = {name.rsplit("/b", 1)[1]: cell["lengths"] for name, cell in cells(LAST, "memory").items()}
    lengths = [*next(iter(found.values()))]
    rows = [[size, *(f"{cell[each]['device_mib'] / 1024:.2f}" for each in lengths)] for size, cell in found.items()]
    return table(["requests", *lengths], rows)


def attention_table() -> str:
    """Microseconds of one layer's attention, trees and chains, and what trees take over chains."""
    rows = []
    for name, cell in cells(H100, "step_time").items():
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


def replays(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Of a set of recorded answers: requests, and what was measured with them."""
    found = {int(cell.rsplit("/b", 1)[1]): of for cell, of in cells(LAST, "replay").items() if f"/{name}/" in cell}
    return [(str(size), found[size]) for size in sorted(found)]


def replay_table() -> str:
    """Recorded answers forced through the engine, beside transformers' generate()."""
    baseline = cells(LAST, "transformers")
    rows = []
    for size, cell in replays(RAG):
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
    for size, cell in replays(RAG):
        off, on = (cell["contenders"][each] for each in ("off", "adaptive"))
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


def other_sets_table() -> str:
    """Tokens/s of other recorded answers, off and adaptive."""
    rows = []
    for name, what in OTHER_SETS.items():
        for size, cell in replays(name):
            off, on = (cell["contenders"][each] for each in ("off", "adaptive"))
            over_off = on["over_off"]["median"]
            figures = [
                f"{on['acceptance_length']:.2f}",
                f"{over_off:.2f}",
                f"{over_off / on['acceptance_over_cost']:.2f}",
            ]
            rows.append([what, size, *(f"{each['tokens_per_s']:.0f}" for each in (off, on)), *figures])
    head = ["answers", "requests", "off tokens/s", "adaptive", "acceptance length", "over off"]
    return table([*head, "of acceptance over cost"], rows)


def profile_table() -> str:
    """Where a step's time goes, microseconds."""
    kinds = {
        "matrix products": ("nvjet", "splitKreduce", "cutlass", "multiply_"),
        "attention": ("attend_tiles", "merge_splits"),
        "K and V stored": ("index_copy", "store_states"),
        "compiled": ("triton_",),
    }
    rows = []
    for run in (COMPILED, TILES):
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
                    SHAPES[shape] + (", small tiles" if run == TILES else ""),
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
    runs = {
        FLASHINFER: "FlashInfer, tables in front of graphs",
        TILES: "Triton, tables in graphs",
        LAST: "Triton, own products and norms",
    }
    for run, what in runs.items():
        for name, cell in cells(run, "gap").items():
            stages = [f"{cell['stages_ms'][each]['median']:.2f}" for each in ("commit", "schedule", "build")]
            times = [f"{cell[each]['median']:.2f}" for each in ("gap_ms", "launch_ms", "wait_ms")]
            rows.append([what, name.split("/")[1], *times, *stages])
    head = ["engine", "requests", "commit to launch", "launch", "wait", "of the first: commit", "schedule", "build"]
    return table(head, rows)


TABLES = {
    "gpu steps": step_table,
    "gpu overlap": overlap_table,
    "gpu roofline": roofline_table,
    "gpu memory": memory_table,
    "gpu attention": attention_table,
    "gpu tiles": tile_table,
    "gpu replay": replay_table,
    "gpu other sets": other_sets_table,
    "gpu replay short": short_replay_table,
    "gpu profile": profile_table,
    "gpu gap": gap_table,
}
