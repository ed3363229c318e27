"""What `batchserve tune` is asked for, checked before anything is measured."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.interpreter import available_cores

REQUESTS_PER_SEQ = 4


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to sweep and on what; `batchserve tune --help` explains each option.

    config: of the server, whatever the sweep decides left out. serve_flags: what it is given as on the command line.
    out: None writes nothing. has_plots: None draws them into `out` if there is one and matplotlib is installed.
    Raises ConfigError.
    """

    config: EngineConfig
    workload: Path
    max_num_seqs: tuple[int, ...] = (2, 4, 8, 16)
    threads: tuple[int, ...] | None = None
    tpot_target_ms: float | None = None
    num_requests: int | None = None
    num_repeats: int = 3
    out: Path | None = None
    has_plots: bool | None = None
    serve_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        cores = available_cores()
        if self.threads is None:
            object.__setattr__(self, "threads", _default_threads(self.config, cores))
        for name, values in (("max_num_seqs", self.max_num_seqs), ("threads", self.thread_counts)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} = {', '.join(map(str, values))}: must name each only once")
            if min(values) < 1:
                raise ConfigError(f"{name} = {min(values)}: must be at least 1")
        if max(self.thread_counts) > cores:
            raise ConfigError(f"threads = {max(self.thread_counts)}: must be at most {cores}, this machine's cores")
        if self.num_requests is not None and self.num_requests < max(self.max_num_seqs):
            raise ConfigError(
                f"requests = {self.num_requests}: must be at least max_num_seqs = {max(self.max_num_seqs)}"
            )
        if self.num_repeats < 1:
            raise ConfigError(f"repeats = {self.num_repeats}: must be at least 1")
        for num_threads in self.thread_counts:
            self.engine_config(num_threads)
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"out = {str(self.out)!r}: must be a folder")
        if self.has_plots and self.out is None:
            raise ConfigError("plots: must be with --out DIR, where they are written")
        if self.has_plots is None:
            is_possible = self.out is not None and importlib.util.find_spec("matplotlib") is not None
            object.__setattr__(self, "has_plots", is_possible)

    @property
    def thread_counts(self) -> tuple[int, ...]:
        return self.threads or ()

    @property
    def most_requests(self) -> int:
        return self.num_requests or REQUESTS_PER_SEQ * max(self.max_num_seqs)

    @property
    def num_settings(self) -> int:
        """How many there are: without a drafter there is nothing but no speculation."""
        num_modes = 1 if self.config.drafter == "none" else 2
        return len(self.thread_counts) * len(self.max_num_seqs) * num_modes

    @property
    def num_runs(self) -> int:
        return self.num_settings * self.num_repeats

    def engine_config(self, num_threads: int) -> EngineConfig:
        """One engine for all that is measured with so many threads. Raises ConfigError."""
        return dataclasses.replace(
            self.config,
            num_threads=num_threads,
            max_num_seqs=max(self.max_num_seqs),
            tpot_target_ms=self.tpot_target_ms,
            adaptive=True,
            decoding_length=None,
            wait_for_drafter=True,
        )


def _default_threads(config: EngineConfig, cores: int) -> tuple[int, ...]:
    """Beside a GPU only drafts are made on threads: there is nothing to be found out."""
    from batchserve.runner.loader import resolve_device  # which imports torch

    is_on_cpu = resolve_device(config).type == "cpu"
    return tuple(sorted({n for n in (cores // 4, cores // 2, cores) if n})) if is_on_cpu else (cores,)
