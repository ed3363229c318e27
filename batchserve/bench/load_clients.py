"""The clients of a measurement: one of our gRPC service, one of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from batchserve.bench.openai_stream import OpenAiStream, StreamError, code_of
from batchserve.client_options import https_context
from batchserve.errors import BatchserveError, ConfigError, one_line
from batchserve.http_client import HttpClient, HttpFailure, ServerUrl

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from batchserve.bench.load_prompts import LoadPrompt
    from batchserve.bench.load_records import RequestRecord
    from batchserve.bench.serve_options import ServeBenchOptions
    from batchserve.server.grpc.tls import ClientTls

MODEL_TIMEOUT_S = 30.0


class LoadClient(Protocol):
    """Sends requests to one server; an async context manager."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def model(self) -> str:
        """Returns the name of the server's model. Raises BatchserveError."""

    async def stream(self, prompt: LoadPrompt, record: RequestRecord, now: Callable[[], float]) -> None:
        """Streams one answer into the record. Raises BatchserveError, after which the record holds what came."""


class Asked:
    """Sends one request after another and notes what fails. Nothing but cancellation is raised."""

    def __init__(self, client: LoadClient, timeout_s: float, now: Callable[[], float]) -> None:
        self._client, self._timeout_s, self._now = client, timeout_s, now

    async def ask(self, prompt: LoadPrompt, record: RequestRecord) -> None:
        record.sent_s = self._now()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.stream(prompt, record, self._now)
        except TimeoutError:
            record.failure = f"no complete answer within {self._timeout_s:g} s"
        except BatchserveError as error:
            record.failure = str(error)
        if record.failure:
            record.ended_s = self._now()


def make_client(options: ServeBenchOptions, key: str | None, tls: ClientTls | None) -> LoadClient:
    """Returns the client that the options ask for. Raises ConfigError."""
    if options.grpc is not None:
        return GrpcLoadClient(options, options.grpc, key, tls)
    url = options.url or ""
    return HttpLoadClient(options, ServerUrl.parse(url), key, https_context(url, tls))


class HttpLoadClient:
    """Speaks the OpenAI API over HTTP."""

    def __init__(self, options: ServeBenchOptions, url: ServerUrl, key: str | None, tls: ssl.SSLContext | None) -> None:
        self._url = str(options.url).rstrip("/").removesuffix("/v1")
        self._http = HttpClient(url, key=key, tls=tls)
        self._model = options.model
        self._is_chat = options.endpoint == "chat"
        self._fields: dict[str, Any] = {"stream": True, "temperature": options.temperature}
        if options.usage != "none":
            self._fields["stream_options"] = {"include_usage": True}
            if options.usage == "each":
                self._fields["stream_options"]["continuous_usage_stats"] = True
        if options.ignore_eos:
            self._fields["ignore_eos"] = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def model(self) -> str:
        if self._model is None:
            self._model = await self._first_model()
        return self._model

    async def _first_model(self) -> str:
        where = f"{self._url}/v1/models"
        try:
            async with asyncio.timeout(MODEL_TIMEOUT_S):
                response = await self._http.request("GET", "/v1/models")
        except TimeoutError:
            raise HttpFailure(f"{where}: no response within {MODEL_TIMEOUT_S:g} s") from None
        except HttpFailure as error:
            raise HttpFailure(f"{where}: {error}") from error
        try:
            if not response.is_success:
                raise ValueError(f"HTTP {response.status}{_code(response.body)}")
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"model: must be given, as {where} names none ({one_line(error)})") from None

    async def stream(self, prompt: LoadPrompt, record: RequestRecord, now: Callable[[], float]) -> None:
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        content = {"messages" if self._is_chat else "prompt": prompt.content}
        body = {"model": self._model, **content, "max_tokens": prompt.max_tokens, **self._fields}
        stream = OpenAiStream(record, now)
        try:
            response = await self._http.request("POST", path, json.dumps(body).encode(), stream.feed)
        finally:
            stream.settle()
        if not response.is_success:
            raise HttpFailure(f"HTTP {response.status}{_code(response.body)}")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise StreamError("the response is not an event stream")
        stream.check_complete()


class GrpcLoadClient:
    """Speaks our own gRPC service."""

    def __init__(self, options: ServeBenchOptions, target: str, key: str | None, tls: ClientTls | None) -> None:
        self._options, self._target, self._key, self._tls = options, target, key, tls

    async def __aenter__(self) -> Self:
        from batchserve.server.grpc.client import GenerationClient

        self._client = GenerationClient(self._target, self._tls, self._key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def model(self) -> str:
        if self._options.model is not None:
            return self._options.model
        try:
            async with asyncio.timeout(MODEL_TIMEOUT_S):
                return (await self._client.model_info()).model
        except TimeoutError:
            raise HttpFailure(f"GetModelInfo: no response within {MODEL_TIMEOUT_S:g} s") from None

    async def stream(self, prompt: LoadPrompt, record: RequestRecord, now: Callable[[], float]) -> None:
        from batchserve.server.grpc.client import RemoteError

        try:
            async with aclosing(self._client.stream(self._request(prompt))) as messages:
                async for message in messages:
                    at_s = now()
                    if (count := len(message.delta.token_ids)) > 0:
                        record.deltas.append((at_s, count))
                    if message.HasField("started"):
                        record.prompt_tokens = message.started.prompt_tokens
                    else:
                        record.ended_s = at_s
                    if message.HasField("finished"):
                        record.output_tokens = message.finished.usage.completion_tokens
                        record.finish_reason = _finish_reason(message.finished)
        except RemoteError as error:
            raise StreamError(f"{error.code}{': ' if error.reason else ''}{error.reason}") from error
        if not record.finish_reason:
            raise StreamError("stream ended without a finish reason")

    def _request(self, prompt: LoadPrompt) -> Any:
        from batchserve.server.grpc.convert import to_generate_request
        from batchserve.types import Chat, SamplingParams, SpeculationParams

        options = self._options
        params = SamplingParams(
            temperature=options.temperature, max_tokens=prompt.max_tokens, ignore_eos=options.ignore_eos
        )
        content = prompt.content if isinstance(prompt.content, str) else Chat(prompt.content)
        request = to_generate_request(content, params, SpeculationParams())
        request.model = options.model or ""
        return request


def _finish_reason(finished: Any) -> str:
    from batchserve.v1 import generation_pb2 as pb

    return pb.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_").lower()


def _code(body: bytes) -> str:
    try:
        return code_of(json.loads(body))
    except (ValueError, RecursionError):
        return ""
