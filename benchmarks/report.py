"""Puts the tables of benchmarks/results/*.json into README.md and docs/: `python -m benchmarks.report`.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is between is replaced. So no figure of these
tables was typed by hand.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks import report_adaptive, report_drafting, report_gpu
from benchmarks.report_drafting import read, table

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("float32", "bfloat16")
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "program.md",
    ROOT / "docs" / "drafting.md",
    ROOT / "docs" / "adaptive.md",
    ROOT / "docs" / "gpu.md",
)


def middle(cell: dict[str, float], digits: int = 0) -> str:
    return f"{cell['median']:.{digits}f}"


def between(cell: dict[str, float]) -> str:
    """A ratio with its quartiles."""
    return f"{cell['median']:.2f} ({cell['q1']:.2f} to {cell['q3']:.2f})"


def batch_table(model: str) -> str:
    measured = read(f"batch_{model}")
    rows = []
    for size, cell in measured["sizes"].items():
        by = cell["contenders"]
        kinds = (by["transformers"], by["off"], by["on"])
        rows.append(
            [
                size,
                *(middle(kind["tokens_per_s"]) for kind in kinds),
                f"{kinds[2]['acceptance_length']:.2f}",
                between(cell["off_over_transformers"]),
                between(cell["on_over_off"]),
                f"{between(cell['on_over_best_length'])} [{cell['best_length']}]",
            ]
        )
    head = ["requests", "transformers tokens/s", "off", "on", "acceptance length"]
    return table([*head, "off / transformers", "on / off", "on / best length [it]"], rows)


def machines(*names: str) -> str:
    """What these results were measured on; they are not all of the same day."""
    measured: dict[str, list[str]] = {}
    for name in names:
        found = read(name)["environment"]
        on = f"{found['cpu']} ({found['cpu_capability']}), {found['cores']} cores; Python {found['python']}"
        about = f"{on}, torch {found['torch']}, transformers {found['transformers']}"
        measured.setdefault(about, []).append(name.rsplit("/", 1)[-1])
    return "\n".join(f"- {', '.join(of)}: {about}." for about, of in measured.items())


def same_bits_table() -> str:
    results = read("same_bits")
    rows = [
        [model, kind, way, str(cell["compared"]), str(cell["differ"])]
        for model, found in results["models"].items()
        for kind, ways in found["kinds"].items()
        for way, cell in list(ways.items())[1:]
    ]
    return table(["model", "sampling", "served", "answers", "differ"], rows)


def program_table(name: str = "program") -> str:
    """Milliseconds of the program, and how many times as long the modules take."""
    cells = read(name)["cells"]
    steps = [name for name in next(iter(cells.values())) if name != "plain read"]
    rows = [
        [model, middle(of["plain read"]["ms"], 1)]
        + [f"{middle(of[step]['program'], 1)} ({middle(of[step]['modules over program'], 2)} x)" for step in steps]
        for model, of in cells.items()
    ]
    return table(["model", "plain read", *steps], rows)


def peers_models() -> dict[str, Any]:
    """Returns the models of all runs. The large one has its own, which takes most of an hour."""
    return {**read("peers")["models"], **read("peers_430m")["models"]}


def peers_table() -> str:
    rows = [
        [model, str(cell["requests"]), name, middle(found["tokens_per_s"], 0),
         times(cell["batchserve_over"].get(name)), f"{found['same_answers']:.0%}"]
        for model, part in peers_models().items()
        for cell in part["cells"]
        for name, found in cell["contenders"].items()
    ]  # fmt: skip
    return table(["model", "requests", "engine", "tokens/s", "batchserve over it", "same answers"], rows)


def peers_memory_table() -> str:
    models = peers_models()
    engines = list(dict.fromkeys(name for part in models.values() for name in part["resident_mb"]))
    rows = [[name, *(_megabytes(part["resident_mb"].get(name)) for part in models.values())] for name in engines]
    return table(["resident, MB", *models], rows)


def _megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size:.0f}"


def times(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def attention_table(name: str, kinds: dict[str, str]) -> str:
    """kinds: what the columns of microseconds are called, by what results call them."""
    rows = [
        [
            case["shape"],
            f"{case['requests']} x {case['rows_each']}",
            str(case["context"]),
            str(case["work_each"]),
            *(middle(case[f"{kind}_us"]) for kind in kinds),
        ]
        for case in read(name)["cases"]
    ]
    return table(["heads of", "requests x rows", "context", "work each", *kinds.values()], rows)


def load_table() -> str:
    def shown(cell: dict[str, float]) -> str:
        return f"{cell['p50']:.1f} / {cell['p99']:.0f}"

    stages = sorted(read("load")["stages"], key=lambda stage: (stage["users"], stage["speculation"] == "on"))
    rows = [
        [
            str(stage["users"]),
            stage["speculation"],
            f"{stage['tokens_per_s']:.0f}",
            *(shown(stage[name]) for name in ("ttft_ms", "inter_token_ms", "end_to_end_ms")),
            f"{stage['acceptance_length']:.2f}",
            f"{stage['failures']} of {stage['requests']}",
        ]
        for stage in stages
    ]
    head = ["users", "speculation", "tokens/s", "TTFT ms p50 / p99", "inter-token", "end to end"]
    return table([*head, "acceptance length", "failed"], rows)


def sampling_table() -> str:
    rows = [
        [
            *(vocab_size, setting, middle(cell["plain_ms"], 2), middle(cell["ours_ms"], 2)),
            *(between(cell["ratio"]), middle(cell["shared_ms"], 2)),
        ]
        for vocab_size, settings in read("sampling")["vocabularies"].items()
        for setting, cell in settings.items()
    ]
    threads = read("sampling")["threads"]
    head = ["vocabulary", "sampling", "40 rows by NumPy, ms", "ours", "ours / NumPy's", f"ours on {threads} threads"]
    return table(head, rows)


def sampled_table() -> str:
    engine = read("sampling")["engine"]

    def shown(cell: dict[str, Any]) -> str:
        return f"{middle(cell['tokens_per_s'], 0)}, {between(cell['over_greedy'])}"

    rows = [[setting, *(shown(engine[drafts][setting]) for drafts in engine)] for setting in engine["off"]]
    return table(["sampling", *(f"{drafts}: tokens/s, of greedy's" for drafts in engine)], rows)


def serving_table() -> str:
    rows = []
    for model, part in read("serving")["models"].items():
        for cell in part["cells"]:
            by = (cell["thread"], cell["process"])
            gaps = [middle(each["inter_token_ms"], 1) if cell["asked"] == "stream" else "" for each in by]
            ratio = report_adaptive.interval(cell["process_over_thread"])
            asked = [str(cell["requests"]), cell["asked"], cell["speculation"]]
            rows.append([model, *asked, *(middle(each["tokens_per_s"]) for each in by), ratio, *gaps])
    head = ["model", "requests", "asked", "drafts", "thread: tokens/s", "process", "process x"]
    return table([*head, "thread: inter-token ms", "process"], rows)


PERFORMANCE = (
    "batch_bundled",
    "batch_90m",
    "same_bits",
    "attention",
    "attention_amx",
    "sampling",
    "serving",
    "waiting",
)
DRAFTING = ("draft_cost", "drafters", "jacobi")
ADAPTIVE = (
    "regret",
    "breadth",
    "gain",
    "lengths",
    "ceiling",
    "never_slower",
    "row_price",
    "overhead",
    "budget",
    "prefill",
    "prompt_load",
    "prefix",
)
ADAPTIVE_AMX = ("regret", "gain")
TABLES = {
    "load": load_table,
    "serving": serving_table,
    "sampling": sampling_table,
    "sampled": sampled_table,
    "machines": lambda: machines(*PERFORMANCE),
    "drafting machines": lambda: machines(*DRAFTING),
    "adaptive machines": lambda: machines(*(f"adaptive/{name}" for name in ADAPTIVE)),
    "adaptive amx machines": lambda: machines(*(f"adaptive_amx/{name}" for name in ADAPTIVE_AMX)),
    "batch bundled": lambda: batch_table("bundled"),
    "batch 90m": lambda: batch_table("90m"),
    "same bits": same_bits_table,
    "program": program_table,
    "program machine": lambda: machines("program"),
    "program_bf16": lambda: program_table("program_bf16"),
    "program_bf16 machine": lambda: machines("program_bf16"),
    "peers": peers_table,
    "peers memory": peers_memory_table,
    "peers machine": lambda: machines("peers"),
    "attention": lambda: attention_table("attention", {"sdpa": "SDPA us", "kernel": "vectors us"}),
    "attention amx": lambda: attention_table(
        "attention_amx", {"sdpa": "SDPA us", "kernel": "vectors us", "matrices": "matrices us"}
    ),
    **report_drafting.TABLES,
    **report_adaptive.TABLES,
    **report_gpu.TABLES,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    for page in PAGES:
        text = page.read_text()
        for name, make in TABLES.items():
            pattern = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
            if pattern.search(text):
                text = pattern.sub(make().replace("\\", r"\\") + "\n", text)
        page.write_text(text)
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
