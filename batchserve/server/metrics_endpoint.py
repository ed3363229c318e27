"""The engine's metrics for Prometheus, over HTTP."""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from batchserve.errors import ConfigError
from batchserve.metrics import (
    AGE,
    CALIBRATION,
    COUNTERS,
    EDGES,
    FAILED_CALLS,
    FAULTS,
    GAUGES,
    HISTOGRAMS,
    LOAD,
    PREFIX,
    Histogram,
    MetricsSource,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Mapping

BACKLOG = 128
REQUEST_TIMEOUT_S = 30.0


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class MetricsEndpoint:
    """Serves /metrics from a thread of its own until closed; port 0 picks a free one. Raises ConfigError.

    Before `show` there are only the calls that failed, by reason.
    """

    def __init__(self, host: str, port: int, failed_calls: Counter[str]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_FailedCallsCollector(failed_calls))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except (OSError, OverflowError) as error:  # OverflowError: no port has that number
            raise ConfigError(
                f"host:metrics_port = {join_address(host, port)}: cannot listen there ({error})"
            ) from error
        self._server.socket.listen(BACKLOG)  # by default five: the sixth that comes at once waits for a second
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (_Timely, handler), {})
        self.address = join_address(host, self._server.server_port)

    def show(self, metrics: MetricsSource) -> None:
        """From now on these, of the one engine."""
        self._registry.register(_EngineCollector(metrics))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Timely:
    """Of a request handler of http.server: each has a thread, and would wait for ever for who sends nothing."""

    timeout = REQUEST_TIMEOUT_S

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()  # type: ignore[misc]  # of the class that is mixed in


class _FailedCallsCollector(Collector):
    def __init__(self, failed_calls: Counter[str]) -> None:
        self._failed_calls = failed_calls

    def collect(self) -> Iterator[Metric]:
        yield _counter(FAILED_CALLS, "reason", dict(self._failed_calls))


class _EngineCollector(Collector):
    def __init__(self, metrics: MetricsSource) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        read = self._metrics.reading()
        for name, value in read.values.items():
            yield CounterMetricFamily(PREFIX + name, COUNTERS[name], value=value)
        for name, value in read.gauges.items():
            yield GaugeMetricFamily(PREFIX + name, GAUGES[name], value=value)
        for name, value in read.load.items():
            yield GaugeMetricFamily(PREFIX + name, LOAD[name], value=value)
        ((name, text),) = AGE.items()
        yield GaugeMetricFamily(PREFIX + name, text, value=read.age_s)
        tested, accepted = (
            CounterMetricFamily(PREFIX + name, text, labels=("drafter", "depth")) for name, text in EDGES.items()
        )
        (error,) = (GaugeMetricFamily(PREFIX + name, text, labels=("drafter",)) for name, text in CALIBRATION.items())
        for drafter, scored in read.acceptance.items():
            for depth, num_tested, num_accepted in zip(scored.depths, scored.tested, scored.accepted, strict=True):
                tested.add_metric((drafter, depth), num_tested)
                accepted.add_metric((drafter, depth), num_accepted)
            error.add_metric((drafter,), scored.calibration_error)
        yield from (tested, accepted, error, _counter(FAULTS, "where", read.faults))
        for name, (text, _) in HISTOGRAMS.items():
            histogram = read.histograms[name]
            yield HistogramMetricFamily(PREFIX + name, text, buckets=_buckets(histogram), sum_value=histogram.total)


def _counter(described: Mapping[str, str], label: str, counts: Mapping[str, int]) -> Metric:
    """One counter by one label."""
    ((name, text),) = described.items()
    family = CounterMetricFamily(PREFIX + name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, how many are not above it)."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
