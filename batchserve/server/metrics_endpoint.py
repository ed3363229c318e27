"""The engine's counters for Prometheus, over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from batchserve.errors import ConfigError
from batchserve.metrics import COUNTERS, PREFIX, EngineMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class MetricsEndpoint:
    """Serves /metrics from a thread of its own until closed; port 0 picks a free one. Raises ConfigError."""

    def __init__(self, host: str, port: int, metrics: EngineMetrics) -> None:
        registry = CollectorRegistry()
        registry.register(_EngineCollector(metrics))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:  # OverflowError: no port has that number
            raise ConfigError(f"metrics_port = {port}: cannot listen there ({error})") from error
        self.address = join_address(host, self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _EngineCollector(Collector):
    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, value in self._metrics.snapshot().items():
            yield CounterMetricFamily(PREFIX + name.removesuffix("_total"), COUNTERS[name], value=value)
