"""The figures of a server as Prometheus reads them."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

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

logger = logging.getLogger(__name__)
ACCEPT_VERSION = re.compile(r"version=([^;,]*)")
SOUND_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}", re.ASCII)  # what prometheus_client can compare without an error
PLAIN_TEXT = "text/plain; charset=utf-8"


class MetricsText:
    """Before `show` the only metric is the number of failed calls by reason."""

    def __init__(self, failed_calls: Counter[str]) -> None:
        self._is_faulty = False
        self._registry = CollectorRegistry()
        self._registry.register(_FailedCallsCollector(failed_calls))

    def show(self, metrics: MetricsSource) -> None:
        """Adds the engine's metrics."""
        self._registry.register(_EngineCollector(metrics))

    def read(self, accept: str) -> tuple[int, str, bytes]:
        """Returns (status, content type, body) for an Accept header. May wait for the engine's process for seconds."""
        if not all(SOUND_VERSION.fullmatch(version.strip()) for version in ACCEPT_VERSION.findall(accept)):
            accept = ""  # falls back to the plain format
        encode, content_type = choose_encoder(accept)
        try:
            body = encode(self._registry)
        except Exception:
            # Only the first of several failures in a row is logged as an error: a scrape comes every few seconds.
            logger.log(logging.DEBUG if self._is_faulty else logging.ERROR, "metrics: cannot be read", exc_info=True)
            self._is_faulty = True
            return HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN_TEXT, b"the figures cannot be read\n"
        self._is_faulty = False
        return HTTPStatus.OK, content_type, body


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
    """Returns a counter family with one label."""
    ((name, text),) = described.items()
    family = CounterMetricFamily(PREFIX + name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns (upper bound, number of values up to it) for each bucket."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
