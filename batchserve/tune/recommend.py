"""Picks the setting to serve with, of those that cannot be told apart from the best, and builds its command line."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.config import EngineConfig
from batchserve.tune.compare import MIN_ROUNDS, equals_of
from batchserve.tune.sweep import Setting, by_setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.tune.options import TuneOptions
    from batchserve.tune.sweep import Measured, Repeated

PERCENTILE = "p99 time per output token"  # over requests
COMPARED = ("tokens_per_s", "p99_tpot_s")  # the figures that settings are compared by
ORDER = "drafts, then fewer requests at once, then fewer threads"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One measured setting, the reason for it, and the command line that serves with it.

    figure: what settings were compared by. best: the setting with the best median of it, which may be another one than
    `measured`. equals: the settings that cannot be told apart from the best, with itself.
    """

    measured: Repeated
    meets_target: bool | None  # None: there is no target, or no TPOT is known
    reason: str
    command: str
    figure: str
    best: Repeated
    equals: tuple[Repeated, ...]


def recommend(options: TuneOptions, measured: Sequence[Measured], kv_cache_bytes: Mapping[int, int]) -> Recommendation:
    """Recommends the setting with the highest throughput among those whose p99 TPOT met the target in every run.

    If none did, it is the setting with the lowest p99 TPOT. If no answer has a second token, only throughput counts.
    Of settings that cannot be told apart from the best one (compare.py), the default is kept, if it is among them.
    kv_cache_bytes: the KV cache memory of the measurement, by number of threads.
    """
    settings = by_setting(measured)
    known = [each for each in settings if not math.isnan(each.median("p99_tpot_s"))]
    target_ms = options.tpot_target_ms
    meeting = known if target_ms is None else [each for each in known if each.range("p99_tpot_s")[1] * 1e3 <= target_ms]
    figure = "tokens_per_s" if meeting or not known else "p99_tpot_s"
    candidates = meeting or known or settings
    best = (max if figure == "tokens_per_s" else min)(candidates, key=lambda each: each.median(figure))
    equals = equals_of(best, candidates, figure)
    chosen, why = _choice(best, equals, default_setting(options), is_all=len(equals) == len(candidates))
    if not known:
        what = "no answer has a second token, so there is no time per output token; the highest throughput: "
        what += f"{_range(best, 'tokens_per_s')} tokens/s ({best.setting})"
    elif meeting:
        bound = "no target was given" if target_ms is None else f"{PERCENTILE} <= {target_ms:g} ms"
        what = f"the highest throughput ({bound}): {_figures(best)}"
    else:
        what = f"no setting has a {PERCENTILE} <= {target_ms:g} ms; the lowest: {_figures(best)}"
    command = serve_command(options, chosen.setting, kv_cache_bytes[chosen.setting.num_threads])
    meets_target = None if target_ms is None or not known else bool(meeting)
    return Recommendation(chosen, meets_target, f"{what}; {why}", command, figure, best, tuple(equals))


def default_setting(options: TuneOptions) -> Setting:
    """Returns the setting that a server has without options, or comes nearest to it: its threads may change by step."""
    return Setting(max(options.thread_counts), EngineConfig().max_num_seqs, options.config.drafter != "none")


def _choice(best: Repeated, equals: Sequence[Repeated], default: Setting, *, is_all: bool) -> tuple[Repeated, str]:
    """Returns the setting to take, and why it is that one. is_all: nothing can be told apart from the best."""
    kept = next((each for each in equals if each.setting == default), None)
    num_rounds = len(best.runs)
    if num_rounds < MIN_ROUNDS:
        rounds = "once" if num_rounds == 1 else f"{num_rounds} times"
        why = f"measured {rounds}; fewer than {MIN_ROUNDS} rounds cannot tell settings apart (--repeats {MIN_ROUNDS})"
        if kept is None or kept is best:
            return best, why
        return kept, f"{why}: the default is kept ({default})"
    others = ", ".join(f"({each.setting})" for each in equals if each is not best)
    if not others:
        return best, "no other setting is as good" + (": it is the default" if kept is best else "")
    which = f"none of {len(equals) - 1} others can be told apart from it" if is_all and len(equals) > 2 else ""
    why = f"in {num_rounds} rounds {which or f'these cannot be told apart from it: {others}'}"
    if kept is not None:
        return kept, f"{why}; the default is kept ({default})"
    chosen = min(equals, key=_rank)
    return chosen, f"{why}; {ORDER} decide for ({chosen.setting})"


def _rank(each: Repeated) -> tuple[bool, int, int]:
    return not each.setting.is_adaptive, each.setting.max_num_seqs, each.setting.num_threads


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
