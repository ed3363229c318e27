"""Which of the measured settings, and the command line that serves with it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.tune.options import TuneOptions
    from batchserve.tune.sweep import Measured

PERCENTILE = "p99 time per output token"  # over requests


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One measured setting, why it, and the command line that serves with it."""

    measured: Measured
    meets_target: bool | None  # None: there is no target, or nobody knows
    reason: str
    command: str


def recommend(options: TuneOptions, measured: Sequence[Measured], kv_cache_bytes: Mapping[int, int]) -> Recommendation:
    """The highest throughput whose p99 TPOT meets the target; where none does, the lowest p99 TPOT; and where no answer
    has a second token, the highest throughput.

    kv_cache_bytes: the K/V memory that was measured with, by the number of threads.
    """
    known = [each for each in measured if not math.isnan(each.p99_tpot_s)]
    target_ms = options.tpot_target_ms
    meeting = known if target_ms is None else [each for each in known if each.p99_tpot_s * 1e3 <= target_ms]
    if not known:
        best = max(measured, key=lambda each: each.tokens_per_s)
        reason = (
            "no answer has a second token, so there is no time per output token; the highest throughput: "
            f"{best.tokens_per_s:.0f} tokens/s ({best.setting})"
        )
    elif meeting:
        best = max(meeting, key=lambda each: each.tokens_per_s)
        bound = "no target was given" if target_ms is None else f"{PERCENTILE} <= {target_ms:g} ms"
        reason = f"the highest throughput ({bound}): {_figures(best)}"
    else:
        best = min(known, key=lambda each: each.p99_tpot_s)
        reason = f"no setting has a {PERCENTILE} <= {target_ms:g} ms; the lowest: {_figures(best)}"
    command = serve_command(options, best, kv_cache_bytes[best.setting.num_threads])
    return Recommendation(best, None if target_ms is None or not known else bool(meeting), reason, command)


def _figures(each: Measured) -> str:
    return f"{each.tokens_per_s:.0f} tokens/s, {PERCENTILE} {each.p99_tpot_s * 1e3:.1f} ms ({each.setting})"


def serve_command(options: TuneOptions, best: Measured, kv_cache_bytes: int) -> str:
    """The command line of a server with this setting, and with the K/V memory that it was measured with."""
    setting = best.setting
    flags = ["--max-num-seqs", str(setting.max_num_seqs), "--num-threads", str(setting.num_threads)]
    if options.config.kv_cache_memory is None and setting.max_num_seqs < max(options.max_num_seqs):
        flags += ["--kv-cache-memory", str(kv_cache_bytes)]  # fewer requests would be given less
    if not setting.is_adaptive:
        flags += ["--decoding-length", "0"]
    elif options.tpot_target_ms is not None:
        flags += ["--tpot-target-ms", f"{options.tpot_target_ms:g}"]
    return shlex.join(["batchserve", "serve", *options.serve_flags, *flags])
