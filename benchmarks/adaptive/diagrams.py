"""Draws what docs/adaptive.md shows: the reliability diagram, and t(rows) with the critical decoding length.

    python -m benchmarks.adaptive.diagrams

From benchmarks/results/adaptive/regret.json; needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.report_adaptive import pooled_tenths

DOCS = Path(__file__).resolve().parents[2] / "docs"
FEWEST = 20  # edges of a tenth that is drawn
MAX_ROWS = 256


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    import matplotlib as mpl

    mpl.use("Agg")
    models = json.loads((RESULTS / "adaptive" / "regret.json").read_text())["models"]
    _save(_reliability, models, "reliability.png")
    _save(_step_time, models, "step_time.png")


def _save(draw: Any, models: dict[str, Any], name: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    draw(axes, models)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(DOCS / name, dpi=90)
    print(DOCS / name)


def _reliability(axes: Any, models: dict[str, Any]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="as often as it said")
    for model, found in models.items():
        for text, cell in found["workloads"].items():
            tenths = pooled_tenths(cell["table"]["sizes"])
            points = [(e / n, h / n) for n, e, h in tenths if n >= FEWEST]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=f"{model}, {text}")
    axes.set_xlabel("calibrated probability of an edge")
    axes.set_ylabel("how often it came true")


def _step_time(axes: Any, models: dict[str, Any]) -> None:
    for model, found in models.items():
        rows, seconds = found["table"]["rows"], found["table"]["seconds"]
        shown = [(r, s * 1e3) for r, s in zip(rows, seconds, strict=True) if r <= MAX_ROWS]
        (line,) = axes.plot(*zip(*shown, strict=True), marker="o", markersize=3, linewidth=1, label=model)
        axes.axvline(found["critical_length"], color=line.get_color(), linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows of a step (dotted: the critical decoding length)")
    axes.set_ylabel("ms")


if __name__ == "__main__":
    main()
