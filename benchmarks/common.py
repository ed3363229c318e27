"""What every benchmark needs: the machine, prompts, statistics, and results as JSON."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchserve.native.threads import apply_thread_policy

apply_thread_policy()

import torch  # noqa: E402
import transformers  # noqa: E402

import batchserve  # noqa: E402
from batchserve.errors import ConfigError  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "batchserve": batchserve.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def commit() -> str | None:
    """The checkout's short commit, with "+changes" where tracked files but results differ from it; None without git."""
    if not (ROOT / ".git").exists():
        return None
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def refusing_bad_input() -> Iterator[None]:
    """What the input lacks ends a program as a wrong argument does: one line on standard error, exit status 2."""
    try:
        yield
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def find_sets(folder: Path, names: Sequence[str] = ()) -> dict[str, Path]:
    """A folder's recorded sets by name (gsm_qwen2_7b of gsm_qwen2_7b.dev.jsonl): these, or all. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: must be a folder of recorded sets, one JSONL each")
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.jsonl")):
        found.setdefault(path.name.partition(".")[0], path)
    missing = [name for name in names if name not in found]
    if missing or not found:
        has = f"has the sets {', '.join(found)}" if found else "has no sets"
        raise ConfigError(f"{folder}: {has}; must have {', '.join(missing) or 'one'} (a JSONL each)")
    return {name: found[name] for name in names or found}


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {
        "median": statistics.median(ordered),
        "q1": quartiles[0],
        "q3": quartiles[2],
        "min": ordered[0],
        "max": ordered[-1],
        "runs": len(ordered),
    }


def chat_prompts(count: int, seed: int) -> list[str]:
    """Held-out prompts of the bundled model's tasks, in its chat format."""
    from training.corpus import build_corpora, read_sources
    from training.tasks import sample_example

    _, held_out = build_corpora(read_sources())
    rng = random.Random(seed)
    return [f"<|user|>{sample_example(held_out, rng).prompt}<|assistant|>" for _ in range(count)]


def write_results(name: str, payload: dict[str, Any]) -> Path:
    """With what a reader needs to judge them."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **payload}, indent=1) + "\n")
    return path
