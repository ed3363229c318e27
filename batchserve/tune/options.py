"""The options of `batchserve tune`, checked before anything is measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.interpreter import available_cores

REQUESTS_PER_SEQ = 4


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of a sweep. `batchserve tune --help` explains each. Raises ConfigError.

    config: the server's configuration, without the options that the sweep decides. serve_flags: `config` as
    command-line flags. out: a folder for tune.json. html: the file of the report. None writes neither.
    """

    config: EngineConfig
    workload: Path
    max_num_seqs: tuple[int, ...] = (2, 4, 8, 16)
    threads: tuple[int, ...] | None = None
    tpot_target_ms: float | None = None
    num_requests: int | None = None
    num_repeats: int = 3
    out: Path | None = None
    html: Path | None = None
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

    @property
    def thread_counts(self) -> tuple[int, ...]:
        return self.threads or ()

    @property
    def max_requests(self) -> int:
        return self.num_requests or REQUESTS_PER_SEQ * max(self.max_num_seqs)

    @property
    def num_settings(self) -> int:
        """The number of settings. Without a drafter the only mode is speculation off."""
        num_modes = 1 if self.config.drafter == "none" else 2
        return len(self.thread_counts) * len(self.max_num_seqs) * num_modes

    @property
    def num_runs(self) -> int:
        return self.num_settings * self.num_repeats

    def engine_config(self, num_threads: int) -> EngineConfig:
        """Returns the configuration of the engine for all settings with this thread count. Raises ConfigError."""
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
    """Returns the default thread counts. With a GPU there is only one, because the threads only make drafts."""
    from batchserve.runner.loader import resolve_device  # imports torch

    is_on_cpu = resolve_device(config).type == "cpu"
    return tuple(sorted({n for n in (cores // 4, cores // 2, cores) if n})) if is_on_cpu else (cores,)
