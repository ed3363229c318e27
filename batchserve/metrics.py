"""Every metric's name, in one place. The engine counts into EngineMetrics and imports no exporter."""

from __future__ import annotations

import threading
from bisect import bisect_left
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from batchserve.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.faults import Contained
    from batchserve.types import Timing

T = TypeVar("T")
PREFIX = "batchserve_"
COUNTERS = {
    "steps_total": "Engine steps.",
    "rows_total": "Rows run through the model, drafts and prefill included.",
    "draft_rows_total": "Rows of drafts, those of a Jacobi window included, which are not verified.",
    "decoding_requests_total": "Requests that decoded, summed over steps; draft rows over these is the mean K. A step "
    "of a request whose answer had already ended, by a stop string that was found meanwhile, is in neither.",
    "forward_seconds_total": "Time from the launch of forwards to their tokens; on a GPU answers are published in it.",
    "draft_tokens_total": "Draft tokens verified.",
    "accepted_draft_tokens_total": "Draft tokens accepted, before stop strings are searched for.",
    "verify_steps_total": "Verifications of one request in one step.",
    "prefix_queried_tokens_total": "Prompt tokens of requests that were begun and may share a prefix's K/V.",
    "prefix_hit_tokens_total": "Those of them whose K/V was cached.",
    "preemptions_total": "Requests preempted for want of K/V memory.",
    "requests_finished_total": "Requests that ended with a finish reason.",
    "requests_aborted_total": "Requests that ended because their client went away, or the server did.",
    "requests_expired_total": "Requests whose deadline passed, waiting or running.",
    "requests_failed_total": "Requests that ended in any other error of the engine.",
    "prompt_tokens_total": "Prompt tokens of requests that were begun, once each, those included whose K/V was cached.",
    "completion_tokens_total": "Tokens that clients were given.",
    "draft_pauses_total": "Times that a request went on without drafts for a while: the model's numbers for it were "
    "not finite in a step with drafts.",
}
FAULTS = {  # a counter by where they were, of the engine's
    "contained_faults_total": "Faults that cost no more than one request its answer, or its drafts, or that left out "
    "figures here; the log has the first of each kind.",
}
GAUGES = {  # of the last step that decoded; the price is the adaptive decoding length's, and absent without it
    "draft_rows_per_request": "K: mean draft rows of a decoding request.",
    "price_tokens_per_second": "Lambda, the price of time, of the last step that might have had drafts.",
    "predicted_step_seconds": "What a step was predicted to take, drafting included; the last that was learned from.",
    "actual_step_seconds": "What that step took, from its beginning to its commit.",
    "step_time_factor": "How many times as long as when they were measured forwards take: the fast correction.",
    "host_seconds": "What the host is known to take of a step, beside its forward and drafting.",
}
FAILED_CALLS = {  # a counter by reason, of the server's
    "failed_calls_total": "Calls answered with an error, by its ErrorInfo's reason: refused ones, and those that "
    "failed later. A call that its client has given up is none.",
}
AGE = {  # a gauge, where there is an engine
    "reading_age_seconds": "How old these figures are: more than a moment where the engine does not answer.",
}
TENANTS = {  # counters by tenant, of the server's, if they are asked for
    "tenant_requests_total": "Requests of a tenant that its limits let in; each sample of a prompt is one.",
    "tenant_refused_total": "Requests of a tenant that its limits refused.",
    "tenant_prompt_tokens_total": "Prompt tokens of a tenant's requests.",
    "tenant_completion_tokens_total": "Tokens that a tenant's callers were given.",
}
TENANT_LOAD = {  # a gauge by tenant
    "tenant_requests_in_flight": "Requests of a tenant in the engine, running or waiting.",
}
VLLM = {  # vLLM's names for figures with the same meaning
    "requests_running": "vllm:num_requests_running",
    "requests_waiting": "vllm:num_requests_waiting",
    "prompt_tokens_total": "vllm:prompt_tokens_total",
    "completion_tokens_total": "vllm:generation_tokens_total",
    "preemptions_total": "vllm:num_preemptions_total",
    "prefix_queried_tokens_total": "vllm:prefix_cache_queries_total",
    "prefix_hit_tokens_total": "vllm:prefix_cache_hits_total",
    "draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_draft_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "request_seconds": "vllm:e2e_request_latency_seconds",
    "request_queue_seconds": "vllm:request_queue_time_seconds",
}
VLLM_KV_USAGE = "vllm:kv_cache_usage_perc"  # used over total, in 0..1
LOAD = {  # gauges, read when they are asked for
    "requests_running": "Requests that have K/V memory.",
    "requests_waiting": "Requests that wait for a place or for K/V memory, those that were preempted included.",
    "kv_used_tokens": "Tokens that running requests have K/V memory for; cached prefixes give way to them.",
    "kv_total_tokens": "Tokens that there is K/V memory for.",
}
EDGES = {  # counters by drafter and depth
    "tested_edges_total": "Draft edges scored against the tokens that came, verified or not.",
    "accepted_edges_total": "Draft edges that came true.",
}
CALIBRATION = {  # a gauge by drafter
    "calibration_error": "Mean distance of an edge's probability and how often such edges come true, of late.",
}
# Upper bounds in seconds: of what a request takes, from a small model's first token to an answer of thousands behind a
# full queue; and of a token, from one of several that a short step gave to one that waited for a long prompt.
REQUEST_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKEN_BOUNDS = (
    *(0.00025, 0.0005, 0.001, 0.0015, 0.0025, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", REQUEST_BOUNDS),
    "time_per_output_token_seconds": (
        "First to last token over the tokens after the first, of finished requests.",
        TOKEN_BOUNDS,
    ),
    "inter_token_latency_seconds": (
        "Time since a request's step before; n tokens of one step count as n of an n-th each. Before stop strings are "
        "searched for: tokens after one count, too.",
        TOKEN_BOUNDS,
    ),
    "request_seconds": ("Arrival to last token, of finished requests.", REQUEST_BOUNDS),
    "request_queue_seconds": ("Arrival to first rows, of finished requests.", REQUEST_BOUNDS),
}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one drafter's edges came to: running totals by depth, and how well they were foretold of late."""

    depths: Sequence[str]
    tested: Sequence[float]
    accepted: Sequence[float]
    calibration_error: float


VERIFIED = np.dtype(  # one request's part of a step
    [
        ("num_drafted", np.int64),
        ("num_accepted", np.int64),
        ("num_given", np.int64),
        ("is_first", np.int64),  # the tokens are its first ones
        ("waited_s", np.float64),  # seconds since the tokens before these, or since its arrival
    ]
)
STEPS_AT_ONCE = 32  # whose verified requests are counted together: each by itself would find cold caches


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound; the last of `counts`, one more than the bounds, is of all that is larger."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_all(self, values: np.ndarray, weights: np.ndarray) -> None:
        """Adds values[i] weights[i] times."""
        found = np.bincount(np.searchsorted(self.bounds, values), weights, minlength=len(self.counts))
        self.counts = [count + int(more) for count, more in zip(self.counts, found.tolist(), strict=True)]
        self.total += float(values @ weights)


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """All figures of one moment, age_s ago; nobody writes to them any more."""

    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    gauges: dict[str, float] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=lambda: _histograms())
    faults: dict[str, int] = field(default_factory=dict)
    age_s: float = 0.0

    def numbers(self) -> dict[str, float]:
        """Counters, and gauges that have been set."""
        return {**self.values, **self.gauges, **self.load}


class MetricsSource(Protocol):
    """Whose figures can be read, from any thread."""

    def reading(self) -> MetricsReading:
        """Those of this moment."""


def _histograms() -> dict[str, Histogram]:
    return {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}


@dataclass(slots=True)
class EngineMetrics:
    """Figures of one engine, written by its thread, read by anyone who holds the lock.

    acceptance (by drafter), adaptive, load and draft_faults (by where) are functions, as what they return is asked for
    far less often than it changes. What one of them cannot tell is left out. faults: those of all but drafting.
    """

    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    gauges: dict[str, float] = field(default_factory=dict)
    acceptance: Callable[[], dict[str, Acceptance]] = dict
    adaptive: Callable[[], dict[str, float]] = dict
    load: Callable[[], dict[str, float]] = dict
    draft_faults: Callable[[], dict[str, int]] = dict
    faults: Faults = field(default_factory=Faults)
    histograms: dict[str, Histogram] = field(default_factory=_histograms)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _uncounted: list[np.ndarray] = field(default_factory=list)

    def reading(self) -> MetricsReading:
        """All of this moment's figures: the engine waits for nobody's socket."""
        with self.lock:
            with self.contained:
                self._count_verified()
            values, gauges, histograms = dict(self.values), dict(self.gauges), deepcopy(self.histograms)
        gauges |= self._told(self.adaptive)
        load, acceptance = self._told(self.load), self._told(self.acceptance)
        faults = {**self._told(self.draft_faults), **self.faults.counts}
        return MetricsReading(values, gauges, load, acceptance, histograms, faults)

    @property
    def contained(self) -> Contained:
        """A context in which counting may fail: figures are missing then, and nothing else."""
        return self.faults.contained("metrics", "figures are missing from the metrics")

    def _told(self, ask: Callable[[], dict[str, T]]) -> dict[str, T]:
        with self.contained:
            return ask()
        return {}

    def snapshot(self) -> dict[str, float]:
        """Counters, and gauges that have been set."""
        return self.reading().numbers()

    def _add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.values[name] += amount

    def step_done(
        self, num_rows: int, num_draft_rows: int, num_decoding: int, forward_s: float, verified: np.ndarray
    ) -> None:
        """A step ran so many rows, num_draft_rows of them drafts of num_decoding requests. verified: of VERIFIED."""
        with self.lock:
            values = self.values
            values["steps_total"] += 1
            values["rows_total"] += num_rows
            values["draft_rows_total"] += num_draft_rows
            values["decoding_requests_total"] += num_decoding
            values["forward_seconds_total"] += forward_s
            if num_decoding:
                self.gauges["draft_rows_per_request"] = num_draft_rows / num_decoding
            self._uncounted.append(verified)
            if len(self._uncounted) == STEPS_AT_ONCE:
                self._count_verified()

    def _count_verified(self) -> None:
        """Counts what was verified since the last call. The caller holds the lock."""
        if not self._uncounted:
            return
        verified, self._uncounted = np.concatenate(self._uncounted), []
        is_given, is_first = verified["num_given"] > 0, verified["is_first"] > 0
        first, later = verified[is_given & is_first], verified[is_given & ~is_first]
        counts = later["num_given"]
        self.histograms["time_to_first_token_seconds"].add_all(first["waited_s"], np.ones(len(first)))
        self.histograms["inter_token_latency_seconds"].add_all(later["waited_s"] / counts, counts)
        self._add(
            verify_steps_total=len(verified),
            draft_tokens_total=int(verified["num_drafted"].sum()),
            accepted_draft_tokens_total=int(verified["num_accepted"].sum()),
        )

    def begun(self, num_prompt_tokens: int, num_cached_tokens: int | None) -> None:
        """A request got its first rows; of its prompt so many tokens were cached, None: it was not looked for."""
        with self.lock:
            self._add(prompt_tokens_total=num_prompt_tokens)
            if num_cached_tokens is not None:
                self._add(prefix_queried_tokens_total=num_prompt_tokens, prefix_hit_tokens_total=num_cached_tokens)

    def drafts_paused(self) -> None:
        """A request goes on without drafts for a while, for numbers that were not finite."""
        with self.lock:
            self._add(draft_pauses_total=1)

    def preempted(self, num_requests: int) -> None:
        if num_requests:
            with self.lock:
                self._add(preemptions_total=num_requests)

    def given(self, num_tokens: int) -> None:
        """Clients were given so many tokens."""
        with self.lock:
            self.values["completion_tokens_total"] += num_tokens

    def finished(self, timing: Timing, num_tokens: int) -> None:
        """A request ended with a finish reason, after so many tokens."""
        tpot_s = timing.tpot_s(num_tokens)
        with self.lock:
            self._add(requests_finished_total=1)
            self.histograms["request_seconds"].add(timing.total_s)
            self.histograms["request_queue_seconds"].add(timing.queue_s)
            if tpot_s is not None:
                self.histograms["time_per_output_token_seconds"].add(tpot_s)

    def unfinished(self, *, num_aborted: int = 0, num_expired: int = 0, num_failed: int = 0) -> None:
        """Requests ended without a finish reason."""
        with self.lock:
            self._add(
                requests_aborted_total=num_aborted, requests_expired_total=num_expired, requests_failed_total=num_failed
            )
