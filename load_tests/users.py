"""The users that load_tests/locustfile.py offers to Locust: one protocol each."""

from __future__ import annotations

import http.client
import json
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import gevent
import grpc
from locust import User, constant, task
from locust.exception import LocustError

from batchserve.v1 import generation_pb2_grpc
from load_tests import staged  # not its class: Locust would take that for the shape of every run
from load_tests.http_check import FailedInStreamError, consume_http, error_text
from load_tests.stream_check import StreamShapeError, consume
from load_tests.targets import GRPC, HTTP, grpc_address, grpc_credentials, has_tls, http_target, https_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from load_tests.locust_run import Run
    from load_tests.stages import Stage
    from load_tests.stream_check import StreamRecord
    from load_tests.workloads import Item

REQUEST_TIMEOUT_S = 30.0
AFTER_FAILURE_S = 0.1  # a server that is gone would be asked thousands of times a second
READ_BYTES, MAX_ERROR_BYTES = 1 << 16, 1 << 16
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for every user, as with real clients
]


class CallFailedError(LocustError):
    """The server refused a call or ended it with an error, or it could not be reached."""


class StreamUser(User):
    """One client with a connection of its own that streams one answer after the other."""

    abstract = True
    wait_time = constant(0)
    protocol: ClassVar[str]
    request_type: ClassVar[str]
    load: ClassVar[Run]  # this process's

    def on_start(self) -> None:
        self.options = self.environment.parsed_options
        self.connect()
        self.number = self.load.next_number()
        self.num_sent = 0

    @classmethod
    @abstractmethod
    def check_host(cls, host: str, options: Any) -> None:
        """Raises LocustError if users of this kind cannot be sent there."""

    @abstractmethod
    def connect(self) -> None:
        """Makes the connection. Raises LocustError."""

    @abstractmethod
    def name_of(self, item: Item) -> str:
        """Returns the name of a call in Locust's statistics."""

    @abstractmethod
    def call(self, item: Item, is_speculating: bool) -> StreamRecord:
        """Asks for one answer and reads it to its end. Raises CallFailedError, StreamShapeError."""

    @task
    def stream(self) -> None:
        shape, stage = self.environment.shape_class, None
        if isinstance(shape, staged.StagedShape):
            stage = shape.wait_for_stage(self.number)
            if stage is None:
                return
        is_speculating = self.options.speculation == "on" if stage is None else stage.is_speculating
        self.num_sent += 1
        # Not the same prompts in two stages: what one left in the shared drafts would flatter the other.
        seed = f"{self.load.seed} {stage.name if stage else ''} {self.number} {self.num_sent}"
        item = self.load.workload.item(seed)
        started_s, record, error = time.perf_counter(), None, None
        try:
            record = self.call(item, is_speculating)
        except (CallFailedError, StreamShapeError) as failed:
            error = failed
        self._report(item, stage, record, error, time.perf_counter() - started_s)
        if error is not None:
            gevent.sleep(AFTER_FAILURE_S)

    def _report(
        self, item: Item, stage: Stage | None, record: StreamRecord | None, error: Exception | None, seconds: float
    ) -> None:
        """One event for the call; stages keep samples of their own."""
        shape = self.environment.shape_class
        name = self.name_of(item) if stage is None else f"{stage.users:>2} users, speculation {stage.mode}"
        if stage is not None and isinstance(shape, staged.StagedShape):
            shape.add(stage, record)
        elif record is not None:
            self.load.add(record, name)
        self.environment.events.request.fire(
            request_type=self.request_type,
            name=name,
            response_time=(seconds if record is None else record.end_to_end_s) * 1e3,
            response_length=0 if record is None else record.usage.completion_tokens,
            exception=error,
            context={},
        )


class GrpcUser(StreamUser):
    """Streams over gRPC: StreamGenerate."""

    protocol, request_type = GRPC, "gRPC"

    @classmethod
    def check_host(cls, host: str, options: Any) -> None:
        grpc_address(host)

    def connect(self) -> None:
        address, credentials = grpc_address(self.environment.host or ""), grpc_credentials(self.options)
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self.channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.metadata = [("authorization", f"Bearer {self.options.api_key}")] if self.options.api_key else []

    def on_stop(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()

    def name_of(self, item: Item) -> str:
        return "StreamGenerate"

    def call(self, item: Item, is_speculating: bool) -> StreamRecord:
        request = item.grpc_request(is_speculating, self.options.max_tokens)
        sent_s = time.perf_counter()
        try:
            events = self.stub.StreamGenerate(request, timeout=REQUEST_TIMEOUT_S, metadata=self.metadata)
            return consume(request, events, time.perf_counter, sent_s)
        except grpc.RpcError as failed:  # its text differs from call to call, and Locust counts by text
            raise CallFailedError(f"{failed.code().name}: {failed.details()}") from None


class HttpUser(StreamUser):
    """Streams over HTTP as clients of the OpenAI API do: chats, and completions of prompts without messages."""

    protocol, request_type = HTTP, "POST"

    @classmethod
    def check_host(cls, host: str, options: Any) -> None:
        http_target(host, has_tls(options))

    def connect(self) -> None:
        target = http_target(self.environment.host or "", has_tls(self.options))
        if target.is_tls:
            self.connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                target.host, target.port, timeout=REQUEST_TIMEOUT_S, context=https_context(self.options)
            )
        else:
            self.connection = http.client.HTTPConnection(target.host, target.port, timeout=REQUEST_TIMEOUT_S)
        self.headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.options.api_key:
            self.headers["Authorization"] = f"Bearer {self.options.api_key}"

    def on_stop(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()

    def name_of(self, item: Item) -> str:
        return item.http_path

    def call(self, item: Item, is_speculating: bool) -> StreamRecord:
        body = item.http_body(is_speculating, self.options.max_tokens)
        data, is_complete = json.dumps(body).encode(), False
        late = TimeoutError(f"no whole answer within {REQUEST_TIMEOUT_S:g} s")
        sent_s = time.perf_counter()
        try:
            with gevent.Timeout(REQUEST_TIMEOUT_S, late):
                self.connection.request("POST", item.http_path, data, self.headers)
                response = self.connection.getresponse()
                _check_response(response)
                record = consume_http(body, _parts(response), time.perf_counter, sent_s)
            is_complete = True
            return record
        except (OSError, http.client.HTTPException, FailedInStreamError) as failed:
            raise CallFailedError(f"{type(failed).__name__}: {failed}") from None
        finally:
            if not is_complete:
                self.connection.close()  # the next call opens it again


def _check_response(response: http.client.HTTPResponse) -> None:
    """Raises CallFailedError, StreamShapeError."""
    if response.status != http.client.OK:
        body = response.read(MAX_ERROR_BYTES)
        try:
            text = error_text(json.loads(body))
        except ValueError:
            text = f"not JSON: {body[:80]!r}"
        raise CallFailedError(f"HTTP {response.status}: {text}")
    kind = response.headers.get_content_type()
    if kind != "text/event-stream":
        raise StreamShapeError(f"Content-Type is {kind}: must be text/event-stream")


def _parts(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while part := response.read1(READ_BYTES):
        yield part
