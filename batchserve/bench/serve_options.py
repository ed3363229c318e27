"""The options of `batchserve bench serve`, checked before anything is asked."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from batchserve.client_options import check_address
from batchserve.errors import ConfigError
from batchserve.files import check_writable
from batchserve.http_client import ServerUrl
from batchserve.option_checks import at_least, number, one_of

T = TypeVar("T")
ENDPOINTS = ("completions", "chat")
USAGES = ("each", "last", "none")
DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS, DEFAULT_INPUT_TOKENS, DEFAULT_MAX_TOKENS = 16, 100, 128, 128
MAX_CONCURRENCY = 4096


@dataclass(frozen=True, slots=True)
class Slo:
    """The most that a request may take, in milliseconds. None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses 'ttft:500,tpot:50'. Raises ConfigError."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (each.strip() for each in part.partition(":"))
            try:
                bound = float(value)
            except ValueError:
                bound = math.nan
            if name not in ("ttft", "tpot", "e2e") or not 0 < bound < math.inf:
                must = "must be a list of ttft:MS, tpot:MS and e2e:MS, with MS above 0, such as ttft:500,tpot:50"
                raise ConfigError(f"slo = {text!r}: {must}")
            if f"{name}_ms" in bounds:
                raise ConfigError(f"slo = {text!r}: must name {name} only once")
            bounds[f"{name}_ms"] = bound
        return cls(**bounds)

    def describe(self) -> str:
        """Returns the bounds in words: 'TTFT 500 ms, TPOT 50 ms'."""
        bounds = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "E2E": self.e2e_ms}
        return ", ".join(f"{name} {bound:g} ms" for name, bound in bounds.items() if bound is not None)


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    """The options of a measurement. `batchserve bench serve --help` explains each. Raises ConfigError.

    Exactly one of grpc and url is given. concurrency: of a closed loop; None if there is a rate. num_requests: None if
    there is a duration. After construction, what depends on other options has its default.
    """

    grpc: str | None = None
    url: str | None = None
    endpoint: str = "completions"
    usage: str | None = None
    model: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    prompts: Path | None = None
    input_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    slo: Slo | None = None
    json_file: Path | None = None

    def __post_init__(self) -> None:
        self._check_target()
        self._check_load()
        at_least("warmup", self.warmup, 0)
        if self.prompts is not None and self.input_tokens is not None:
            raise ConfigError("prompts, input_tokens: must not both be given")
        at_least("input_tokens", self._default("input_tokens", DEFAULT_INPUT_TOKENS), 1, 1 << 20)
        if self.max_tokens is not None:
            at_least("max_tokens", self.max_tokens, 1)
        number("temperature", self.temperature, 0.0)
        number("timeout_s", self.timeout_s, 0.001)
        if self.json_file is not None:
            check_writable(self.json_file, "json")
            if self.prompts is not None and os.path.realpath(self.prompts) == os.path.realpath(self.json_file):
                raise ConfigError(f"json = {str(self.json_file)!r}: must be a file of its own")

    def _check_target(self) -> None:
        if (self.grpc is None) == (self.url is None):
            raise ConfigError("grpc, url: exactly one of them must be given")
        one_of("endpoint", self.endpoint, ENDPOINTS)
        if self.grpc is not None:
            check_address("grpc", self.grpc)
            if self.usage is not None:
                raise ConfigError("usage: must be with --url; over gRPC every delta holds its tokens")
        elif self.url is not None:
            ServerUrl.parse(self.url)
            one_of("usage", self._default("usage", "each"), USAGES)

    def _check_load(self) -> None:
        if self.rate is None:
            if self.burstiness is not None:
                raise ConfigError(f"burstiness = {self.burstiness}: must be with --rate")
            at_least("concurrency", self._default("concurrency", DEFAULT_CONCURRENCY), 1, MAX_CONCURRENCY)
        else:
            if self.concurrency is not None:
                raise ConfigError("concurrency, rate: must not both be given")
            if not self.rate > 0:
                raise ConfigError(f"rate = {self.rate}: must be above 0, or inf")
            if not 0 < self._default("burstiness", 1.0) < math.inf:
                raise ConfigError(f"burstiness = {self.burstiness}: must be above 0 and finite")
        if self.duration_s is None:
            at_least("num_requests", self._default("num_requests", DEFAULT_NUM_REQUESTS), 1)
            return
        if self.num_requests is not None:
            raise ConfigError("num_requests, duration: must not both be given")
        number("duration", self.duration_s, 0.001)
        if self.rate == math.inf:
            raise ConfigError("duration: must not be given with --rate inf, which needs --num-requests")

    def _default(self, name: str, value: T) -> T:
        """Sets a field that is None, and returns what it then is."""
        given: T | None = getattr(self, name)
        if given is None:
            object.__setattr__(self, name, value)
            return value
        return given
