"""Picks the best measured setting and builds the command line that serves with it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.tune.sweep import by_setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.tune.options import TuneOptions
    from batchserve.tune.sweep import Measured, Repeated, Setting

PERCENTILE = "p99 time per output token"  # over requests
COMPARED = ("tokens_per_s", "p99_tpot_s")  # the figures that settings are compared by


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One measured setting, the reason for it, and the command line that serves with it."""

    measured: Repeated
    meets_target: bool | None  # None: there is no target, or no TPOT is known
    reason: str
    command: str


def recommend(options: TuneOptions, measured: Sequence[Measured], kv_cache_bytes: Mapping[int, int]) -> Recommendation:
    """Recommends the setting with the highest throughput among those whose p99 TPOT met the target in every run.

    If none did, it is the setting with the lowest p99 TPOT. If no answer has a second token, only throughput counts.
    Settings whose runs overlap with those of the best are ties, and noise must not decide between them. Adaptive drafts
    (the default) win a tie, then fewer concurrent requests, then fewer threads.
    kv_cache_bytes: the KV cache memory of the measurement, by number of threads.
    """
    settings = by_setting(measured)
    known = [each for each in settings if not math.isnan(each.median("p99_tpot_s"))]
    target_ms = options.tpot_target_ms
    meeting = known if target_ms is None else [each for each in known if each.range("p99_tpot_s")[1] * 1e3 <= target_ms]
    if not known:
        best, ties = _highest_throughput(settings)
        reason = (
            "no answer has a second token, so there is no time per output token; the highest throughput: "
            f"{_range(best, 'tokens_per_s')} tokens/s ({best.setting})"
        )
    elif meeting:
        best, ties = _highest_throughput(meeting)
        bound = "no target was given" if target_ms is None else f"{PERCENTILE} <= {target_ms:g} ms"
        reason = f"the highest throughput ({bound}): {_figures(best)}"
    else:
        fastest = min(known, key=lambda each: each.median("p99_tpot_s"))
        most = fastest.range("p99_tpot_s")[1]
        best, ties = _first([each for each in known if each.range("p99_tpot_s")[0] <= most])
        reason = f"no setting has a {PERCENTILE} <= {target_ms:g} ms; the lowest: {_figures(best)}"
    if ties:
        reason += "; within the spread of its runs as good: " + ", ".join(f"({each.setting})" for each in ties)
    elif len(best.runs) == 1:
        reason += "; measured once, so that it may be noise"
    command = serve_command(options, best.setting, kv_cache_bytes[best.setting.num_threads])
    return Recommendation(best, None if target_ms is None or not known else bool(meeting), reason, command)


def _highest_throughput(settings: Sequence[Repeated]) -> tuple[Repeated, list[Repeated]]:
    """Returns (the setting to take, those that are as good)."""
    best = max(settings, key=lambda each: each.median("tokens_per_s"))
    least = best.range("tokens_per_s")[0]
    return _first([each for each in settings if each.range("tokens_per_s")[1] >= least])


def _first(ties: Sequence[Repeated]) -> tuple[Repeated, list[Repeated]]:
    def rank(each: Repeated) -> tuple[bool, int, int]:
        return not each.setting.is_adaptive, each.setting.max_num_seqs, each.setting.num_threads

    first, *others = sorted(ties, key=rank)
    return first, others


def _figures(each: Repeated) -> str:
    p99 = _range(each, "p99_tpot_s", 1e3, 1)
    return f"{_range(each, 'tokens_per_s')} tokens/s, {PERCENTILE} {p99} ms ({each.setting})"


def _range(each: Repeated, figure: str, scale: float = 1.0, digits: int = 0) -> str:
    """Formats the median, and with several runs also the minimum and the maximum."""
    low, high = (f"{value * scale:.{digits}f}" for value in each.range(figure))
    median = f"{each.median(figure) * scale:.{digits}f}"
    return median if len(each.runs) == 1 else f"{median} ({low} to {high})"


def serve_command(options: TuneOptions, setting: Setting, kv_cache_bytes: int) -> str:
    """Returns the command line of a server with this setting and the KV cache memory of its measurement."""
    flags = ["--max-num-seqs", str(setting.max_num_seqs), "--num-threads", str(setting.num_threads)]
    if options.config.kv_cache_memory is None and setting.max_num_seqs < max(options.max_num_seqs):
        flags += ["--kv-cache-memory", str(kv_cache_bytes)]  # by default fewer requests get less memory
    if not setting.is_adaptive:
        flags += ["--decoding-length", "0"]
    elif options.tpot_target_ms is not None:
        flags += ["--tpot-target-ms", f"{options.tpot_target_ms:g}"]
    return shlex.join(["batchserve", "serve", *options.serve_flags, *flags])
