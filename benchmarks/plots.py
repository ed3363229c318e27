"""Draws docs/images/*.svg from benchmarks/results/*.json: `python -m benchmarks.plots`. Needs matplotlib.

benchmarks.report makes the tables of the same figures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import peers_models
from benchmarks.report_drafting import read

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
MODELS = {"bundled": "bundled model", "90m": "88M, random", "smollm2": "SmolLM2-135M", "430m": "434M, random"}
OURS, PEERS = ("#7db3d8", "#1f5f99"), {"openvino": "#e0a030", "vllm": "#9a6fb0", "llamacpp": "#7a9a60"}
NAMES = {"openvino": "OpenVINO GenAI", "vllm": "vLLM (CPU)", "llamacpp": "llama.cpp"}


def peers(figure: Any) -> None:
    """Tokens per second beside the peers; of each peer the better of with and without its drafts."""
    models = peers_models()
    figure.set_size_inches(3.6 * len(models), 3.4)
    for axes, (model, found) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True):
        cells = found["cells"]
        bars = {"batchserve, no drafts": (OURS[0], [_best(cell, "batchserve", "off") for cell in cells])}
        bars["batchserve"] = OURS[1], [_best(cell, "batchserve", "on") for cell in cells]
        for peer, color in PEERS.items():
            heights = [max(_best(cell, peer, "off"), _best(cell, peer, "on")) for cell in cells]
            if any(heights):
                bars[NAMES[peer]] = color, heights
        for place, (label, (color, heights)) in enumerate(bars.items()):
            at = [number + (place - len(bars) / 2 + 0.5) * 0.16 for number in range(len(cells))]
            axes.bar(at, heights, 0.15, color=color, label=label)
        axes.set_xticks(range(len(cells)), [str(cell["requests"]) for cell in cells])
        axes.set(title=MODELS[model], xlabel="requests at once")
    figure.axes[0].set_ylabel("tokens per second")
    figure.axes[0].legend(fontsize=7, frameon=False)


def _best(cell: dict[str, Any], engine: str, drafts: str) -> float:
    """The engine's rate, in process if it was measured there, otherwise served; 0 if neither was."""
    for way in ("in process", "served"):
        found = cell["contenders"].get(f"{engine} {way}, drafts {drafts}")
        if found is not None:
            return float(found["tokens_per_s"]["median"])
    return 0.0


def program(figure: Any) -> None:
    """Milliseconds of a decoding step by rows: the native program beside the modules that it is made from."""
    kinds = {key: cells for key, cells in read("program")["cells"].items() if key.endswith("bfloat16")}
    figure.set_size_inches(3.6 * len(kinds), 3.2)
    for axes, (key, cells) in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds.items(), strict=True):
        rows = [label for label in cells if label.endswith(" rows")]
        for way, color in (("modules", PEERS["openvino"]), ("program", OURS[1])):
            times = [cells[label][way]["median"] for label in rows]
            axes.plot([int(label.split()[0]) for label in rows], times, marker="o", color=color, label=way)
        axes.set(title=key, xlabel="rows of a step", xscale="log", yscale="log")
        axes.set_xticks([int(label.split()[0]) for label in rows], [label.split()[0] for label in rows])
    figure.axes[0].set_ylabel("milliseconds")
    figure.axes[0].legend(frameon=False)


PLOTS: dict[str, Callable[[Any], None]] = {"peers": peers, "program": program}


def draw(folder: Path) -> list[Path]:
    """Draws all plots into a folder; returns their files. The same results give the same files."""
    import matplotlib
    from matplotlib.figure import Figure

    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "batchserve", "svg.fonttype": "none", "font.size": 9}):
        for name, plot in PLOTS.items():
            figure = Figure(layout="constrained")
            plot(figure)
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths


if __name__ == "__main__":
    for path in draw(IMAGES):
        print(path)
