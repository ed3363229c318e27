"""The configuration of a server: where and how it listens, whom it answers, and what it tells of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchserve.config import MiB
from batchserve.errors import ConfigError
from batchserve.option_checks import at_least, check_tls, expanded_path, number, one_of, path_text

TOOL_CALL_PARSERS = ("auto", "hermes", "llama3", "mistral", "pythonic")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MAX_RECEIVE_BYTES = (1 << 31) - 1  # gRPC stores it in an int
URL = re.compile(r"https?://[^/]")
FLAGS = (
    *("has_http", "has_reflection", "has_engine_process", "allow_unauthenticated"),
    *("has_tenant_metrics", "has_prompt_logs"),
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how the server listens.

    has_engine_process: the engine runs in its own process (docs/performance.md, "The engine's own process").
    stall_timeout_s: health reports NOT_SERVING while a step takes longer than this.
    unread_timeout_s, max_unread_deltas: how long a message waits for its client to take it, and how many deltas may
    wait after it, before the call ends with RESOURCE_EXHAUSTED. All streams together may leave 64 times as many unread.
    keys: a file of callers' keys (server/keys.py). allow_unauthenticated: other machines may call without.
    has_http, http_port: OpenAI's HTTP beside gRPC. tool_call_parser: the format in which the model writes tool calls.
    has_prompt_logs: log lines of requests have prompts and answers. otlp_endpoint: the URL that traces are sent to.
    log_level, log_format: the lowest level that the process logs, and the format of each line.
    tls_certificate, tls_key: PEM files with which gRPC and HTTP are encrypted. tls_client_ca: clients must show a
    certificate that one of these has signed.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    has_http: bool = True
    http_port: int = 8000
    tool_call_parser: str = "auto"
    keys: str | None = None
    allow_unauthenticated: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    max_receive_bytes: int = 16 * MiB
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 600.0
    unread_timeout_s: float = 60.0
    max_unread_deltas: int = 1024
    has_reflection: bool = True
    metrics_port: int | None = None
    has_tenant_metrics: bool = False
    has_engine_process: bool = True
    log_level: str = "info"
    log_format: str = "text"
    has_prompt_logs: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        host = path_text("host", self.host)
        if host.startswith("[") and host.endswith("]"):  # as in IPv6 addresses that are followed by a port
            object.__setattr__(self, "host", host[1:-1])
        self._check_ports()
        if self.otlp_endpoint is not None and not re.match(
            r"https?://[^/]", path_text("otlp_endpoint", self.otlp_endpoint)
        ):
            raise ConfigError(
                f"otlp_endpoint = {self.otlp_endpoint!r}: must be a URL, such as http://HOST:4318/v1/traces"
            )
        if self.keys is not None:
            object.__setattr__(self, "keys", expanded_path("keys", self.keys))
        check_tls(self, "tls_client_ca", "tls_certificate", "tls_key")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError(f"tls_client_ca = {self.tls_client_ca!r}: must be with tls_certificate and tls_key")
        at_least("max_receive_bytes", self.max_receive_bytes, 1024, MAX_RECEIVE_BYTES)
        for name in (
            "has_reflection",
            "has_engine_process",
            "has_http",
            "allow_unauthenticated",
            "has_tenant_metrics",
            "has_prompt_logs",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be True or False")
        number("drain_timeout_s", self.drain_timeout_s, 0.0)
        number("stall_timeout_s", self.stall_timeout_s, 1.0)
        number("unread_timeout_s", self.unread_timeout_s, 0.1)
        at_least("max_unread_deltas", self.max_unread_deltas, 1)
        one_of("log_level", self.log_level, LOG_LEVELS)
        one_of("log_format", self.log_format, LOG_FORMATS)
        one_of("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)

    def _check_ports(self) -> None:
        taken: dict[int, str] = {}
        for name in ("port", "http_port", "metrics_port"):
            port = getattr(self, name)
            if name == "metrics_port" and port is None:
                continue
            if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
                raise ConfigError(f"{name} = {port!r}: must be an integer in 0..65535 (0 picks a free one)")
            if name == "http_port" and not self.has_http:
                continue
            if port and taken.setdefault(port, name) != name:
                raise ConfigError(f"{name} = {port}: must be another one than {taken[port]}")
