"""The options of `batchserve bench replay`, checked before anything is measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from batchserve.bench.replay import check_bounds
from batchserve.config import DRAFTERS
from batchserve.errors import ConfigError
from batchserve.files import check_writable


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of a replay. `batchserve bench replay --help` explains each."""

    file: Path
    tokenizer: str
    drafters: tuple[str, ...]
    max_draft_tokens: tuple[int, ...] = (16,)
    warm_file: Path | None = None
    warm_share: float | None = None
    streams: int = 1
    limit: int | None = None
    json_file: Path | None = None
    plot_file: Path | None = None

    def __post_init__(self) -> None:
        for drafter in self.drafters:
            if drafter == "jacobi":
                raise ConfigError("drafter = 'jacobi': drafts from the model's own output, so it cannot be replayed")
            if drafter not in DRAFTERS:
                names = ", ".join(name for name in DRAFTERS if name != "jacobi")
                raise ConfigError(f"drafter = {drafter!r}: must be one of {names}")
        for name, values in (("drafter", self.drafters), ("max_draft_tokens", self.max_draft_tokens)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} = {', '.join(map(str, values))}: must name each only once")
        for max_draft_tokens in self.max_draft_tokens:
            check_bounds(max_draft_tokens, self.streams)
        if self.warm_file is not None and self.warm_share is not None:
            raise ConfigError("warm_file, warm_share: must not both be given")
        for name, path in (("json", self.json_file), ("plot", self.plot_file)):
            if path is not None:
                check_writable(path, name)
        others = [os.path.realpath(path) for path in (self.file, self.warm_file, self.plot_file) if path is not None]
        if self.json_file is not None and os.path.realpath(self.json_file) in others:
            raise ConfigError(f"json = {str(self.json_file)!r}: must be a file of its own")
        if self.plot_file is not None and self.plot_file.suffix.lower() != ".png":
            raise ConfigError(f"plot = {str(self.plot_file)!r}: must be called NAME.png, which it will be")
