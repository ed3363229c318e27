"""The figures of a server as Prometheus reads them."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Any

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
    TENANT_LOAD,
    TENANTS,
    VLLM,
    VLLM_KV_USAGE,
    Histogram,
    MetricsReading,
    MetricsSource,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Mapping

    from batchserve.server.tenants import Tenants

logger = logging.getLogger(__name__)
ACCEPT_VERSION = re.compile(r"version=([^;,]*)")
SOUND_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}", re.ASCII)  # what prometheus_client can compare without an error
PLAIN_TEXT = "text/plain; charset=utf-8"


class MetricsText:
    """Before `show` the only metrics are the server's own: failed calls by reason, and tenants if they are given."""

    def __init__(self, failed_calls: Counter[str], tenants: Tenants | None = None) -> None:
        self._is_faulty = False
        self._registry = CollectorRegistry()
        self._registry.register(_FailedCallsCollector(failed_calls))
        if tenants is not None:
            self._registry.register(_TenantCollector(tenants))

    def show(self, metrics: MetricsSource, model: str) -> None:
        """Adds the engine's metrics, also under vLLM's names, which have the model as a label."""
        self._registry.register(_EngineCollector(metrics, model))

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


class _TenantCollector(Collector):
    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        by_name = dict(self._tenants.by_name)
        for name, text in TENANTS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=("tenant",))
            for tenant, found in by_name.items():
                count = getattr(found.counts, name.removeprefix("tenant_").removesuffix("_total"))
                family.add_metric((tenant,), count)
            yield family
        ((name, text),) = TENANT_LOAD.items()
        load = GaugeMetricFamily(PREFIX + name, text, labels=("tenant",))
        for tenant, found in by_name.items():
            load.add_metric((tenant,), found.num_in_flight)
        yield load


class _EngineCollector(Collector):
    def __init__(self, metrics: MetricsSource, model: str) -> None:
        self._metrics, self._model = metrics, model

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
        yield from self._for_vllm(read)

    def _for_vllm(self, read: MetricsReading) -> Iterator[Metric]:
        """Yields figures under the names that dashboards for vLLM ask for."""
        labels, model = ("model_name",), (self._model,)
        for name, alias in VLLM.items():
            same = f"The same as {PREFIX}{name}."
            if name in HISTOGRAMS:
                family: Any = HistogramMetricFamily(alias, same, labels=labels)
                histogram = read.histograms[name]
                family.add_metric(model, _buckets(histogram), histogram.total)
            elif name in LOAD:
                family = GaugeMetricFamily(alias, same, labels=labels)
                family.add_metric(model, read.load.get(name, 0.0))
            else:
                family = CounterMetricFamily(alias, same, labels=labels)
                family.add_metric(model, read.values[name])
            yield family
        usage = GaugeMetricFamily(VLLM_KV_USAGE, f"{PREFIX}kv_used_tokens over {PREFIX}kv_total_tokens.", labels=labels)
        usage.add_metric(model, read.load.get("kv_used_tokens", 0.0) / (read.load.get("kv_total_tokens") or 1.0))
        yield usage


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
