"""(f) From commit to launch with 16 live gRPC streams: most of the time in which the device has nothing to do.

The gap begins when wait() returns and ends when launch() is called. The device waits longer: for wait()'s own end, in
which the host makes answers of what came back, and for launch(), which plans, and with the custom mask makes masks,
before the step. Until launch() returns is given as idle_ms, with a verdict of its own. The
server is the real one where its packages are installed, otherwise a plain one over the same engine (see `server`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from batchserve.config import EngineConfig
from batchserve.engine.async_engine import AsyncEngine
from batchserve.startup.build import BuiltEngine
from batchserve.types import Delta, SamplingParams, SpeculationParams, Started
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.models import backend_options, build_for, check_graphs, engine_on, random_llama, shape_names
from benchmarks.gpu.summary import BUDGET_MS

STREAMS = 16
PROMPT, METHOD = "def compute(values):\n    total = 0\n    for value in values:\n", "StreamGenerate"


def run(kit: Kit, report: Report) -> None:
    models = kit.pick((shape_names(kit)[0], "bundled"), ("bundled",))
    report.about(compiles=list(models))
    for model in models:
        cells = {f"{model}/{name}": is_enabled for name, is_enabled in (("drafts", True), ("no drafts", False))}
        head_dim = 64 if model == "bundled" else 128
        bench = build_for(kit, report, model, cells, partial(GapBench, model=model), head_dim)
        if bench is None:
            continue
        for name, is_enabled in cells.items():
            report.cell(name, partial(bench.measure, is_enabled))
        bench.close()
        del bench
        kit.free()


class GapBench:
    """One engine and its loop, for requests that draft and for those that do not."""

    def __init__(self, kit: Kit, model: str) -> None:
        self._kit = kit
        built = build(kit, model)
        self._attention = built.info.attention_backend
        self._probe = Probe(built, kit.pick(STREAMS, 2))
        self._loop = asyncio.Runner()
        self._engine = self._loop.run(_start(built))

    def measure(self, is_enabled: bool) -> dict[str, Any]:
        try:
            return self._loop.run(self._measure(is_enabled))
        except Exception:
            self._kit.sync()  # a fault of the device reaches streams as "the engine failed": here it says what it is
            raise

    async def _measure(self, is_enabled: bool) -> dict[str, Any]:
        self._probe.clear()
        server, requests, kind = serve(self._engine, self._kit, is_enabled)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        task = {"address": f"127.0.0.1:{port}", "method": f"/batchserve.v1.GenerationService/{METHOD}"}
        try:
            said = await _clients({**task, "requests": [request.hex() for request in requests]})
        finally:  # the engine goes on: what is left of these requests must not
            await server.stop(1.0)
        if said["errors"]:
            raise RuntimeError(f"{len(said['errors'])} streams failed: {said['errors'][0]}")
        facts = {"attention": self._attention, "server": kind, "messages": said["messages"]}
        return {**facts, **self._probe.figures()}

    def close(self) -> None:
        self._loop.run(self._engine.shutdown())
        self._loop.close()


async def _start(built: BuiltEngine) -> AsyncEngine:
    return AsyncEngine(built, EngineConfig(max_num_seqs=STREAMS))


def build(kit: Kit, model: str) -> BuiltEngine:
    options = {"max_num_seqs": STREAMS, "max_model_len": 1024, "drafter": "mixture"}
    if model != "bundled":
        # The bundled tokenizer, so that there is text to be made beside the steps.
        llama = random_llama(kit, model, vocab_size=4096)
        return engine_on(kit, llama, f"{model}-text", with_tokenizer=True, **options)
    from batchserve.startup.build import build_engine

    memory, dtype = kit.pick(1024, 64) << 20, kit.pick("bfloat16", "float32")
    more = {"kv_cache_memory": memory, "dtype": dtype, "cache_dir": str(kit.scratch / "cache")}
    config = EngineConfig(**{**backend_options(kit, 64), **options, **more})
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        kit.beat()

    built = build_engine(config, say)
    check_graphs(built, config.enforce_eager, said)
    return built


def serve(engine: AsyncEngine, kit: Kit, is_enabled: bool) -> tuple[Any, list[bytes], str]:
    """A server that is not started yet, the requests of all clients as bytes, and what kind of server it is."""
    count, tokens = kit.pick(STREAMS, 2), kit.pick(400, 96)
    prompts = [f"{PROMPT}        total += value * {i}\n" for i in range(count)]
    server = grpc.aio.server()
    try:
        from batchserve.engine.backpressure import BackpressureLimits
        from batchserve.server.grpc.convert import to_generate_request
        from batchserve.server.grpc.servicer import GenerationServicer
        from batchserve.server.keys import Caller, KeyStore
        from batchserve.server.open_calls import OpenCalls
        from batchserve.v1 import generation_pb2_grpc
    except Exception as error:  # a package is missing, or older than the stubs, which say so in exceptions of their own
        handler = grpc.method_handlers_generic_handler(
            "batchserve.v1.GenerationService", {METHOD: grpc.unary_stream_rpc_method_handler(_plainly(engine))}
        )
        server.add_generic_rpc_handlers((handler,))
        texts = [{"prompt": prompt, "max_tokens": tokens, "is_enabled": is_enabled} for prompt in prompts]
        return server, [json.dumps(text).encode() for text in texts], f"plain ({error})"
    calls = OpenCalls(BackpressureLimits(1024, 60.0), KeyStore(None, Caller()))
    calls.open(engine)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer("gpu-kit", calls), server)
    params, speculation = _params(tokens), SpeculationParams(is_enabled)
    messages = [to_generate_request(prompt, params, speculation) for prompt in prompts]
    return server, [message.SerializeToString() for message in messages], "GenerationServicer"


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def _plainly(engine: AsyncEngine) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
    """A handler over bytes: the same engine calls as the servicer's, JSON instead of the messages."""

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked = json.loads(request)
        events = engine.stream(
            asked["prompt"], _params(asked["max_tokens"]), speculation=SpeculationParams(asked["is_enabled"])
        )
        async for event in events:
            yield json.dumps(_as_json(event)).encode()

    return stream


def _as_json(event: Started | Delta) -> dict[str, Any]:
    if isinstance(event, Started):
        return {"request_id": event.request_id}
    return {"text": event.text, "token_ids": event.token_ids, "is_last": event.finish_reason is not None}


async def _clients(task: dict[str, Any]) -> dict[str, Any]:
    program = str(Path(__file__).parent / "stream_client.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", program, stdin=pipe, stdout=pipe)
    out, _ = await process.communicate(json.dumps(task).encode() + b"\n")
    said: dict[str, Any] = json.loads(out)
    return said


class Probe:
    """Wraps a core's calls with clocks. A gap counts where all streams were decoding in both of its steps."""

    STAGES = (("scheduler", "schedule"), ("drafts", "propose"), (None, "_build"), (None, "_commit"))

    def __init__(self, engine: BuiltEngine, streams: int) -> None:
        self._streams = streams
        self._gaps: list[float] = []
        self._launches: list[float] = []
        self._idle: list[float] = []  # gaps, and the launches behind them
        self._waits: list[float] = []
        self._stages: dict[str, list[float]] = {}
        self._ended_s: float | None = None  # of a step in which all streams decoded
        self._launch = engine.core.executor.launch
        engine.core.executor.launch = self._timed_launch  # type: ignore[method-assign]
        for owner_name, name in self.STAGES:
            owner = engine.core if owner_name is None else getattr(engine.core, owner_name)
            if hasattr(owner, name):  # the core's own stages are private, and may be called otherwise one day
                self._watch(owner, name)

    def clear(self) -> None:
        """Forget all samples; to be called while nothing runs."""
        for samples in (self._gaps, self._launches, self._idle, self._waits, *self._stages.values()):
            samples.clear()
        self._ended_s = None

    def _watch(self, owner: Any, name: str) -> None:
        call, samples = getattr(owner, name), self._stages.setdefault(name.strip("_"), [])

        def timed(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            found = call(*arguments, **options)
            samples.append(time.perf_counter() - began_s)
            return found

        setattr(owner, name, timed)

    def _timed_launch(self, batch: Any) -> Any:
        began_s = time.perf_counter()
        ended_s, is_full = (
            self._ended_s,
            len(batch.request_ids) == self._streams and bool((batch.num_pending == 1).all()),
        )
        handle = self._launch(batch)
        launched_s = time.perf_counter()
        if is_full and ended_s is not None:
            self._launches.append(launched_s - began_s)
            self._gaps.append(began_s - ended_s)
            self._idle.append(launched_s - ended_s)
        return _TimedHandle(handle, self, is_full)

    def ended(self, waited_s: float, is_full: bool) -> None:
        self._ended_s = time.perf_counter() if is_full else None
        if is_full:
            self._waits.append(waited_s)

    def figures(self) -> dict[str, Any]:
        if not self._gaps:
            raise RuntimeError(f"{self._streams} streams never decoded together in two steps on end")
        gap = _quantiles(self._gaps)
        return {
            "streams": self._streams,
            "gap_ms": gap,
            "is_within_budget": gap["median"] <= BUDGET_MS,
            "launch_ms": _quantiles(self._launches),
            "idle_ms": _quantiles(self._idle),  # the device may wait for most of the launch, too
            "wait_ms": _quantiles(self._waits),
            "stages_ms": {name: _quantiles(samples) for name, samples in self._stages.items() if samples},
        }


class _TimedHandle:
    def __init__(self, handle: Any, probe: Probe, is_full: bool) -> None:
        self._handle, self._probe, self._is_full = handle, probe, is_full

    def wait(self) -> Any:
        began_s = time.perf_counter()
        found = self._handle.wait()
        self._probe.ended(time.perf_counter() - began_s, self._is_full)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    places = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: round(ordered[int(share * (len(ordered) - 1))] * 1e3, 4) for name, share in places.items()}
    return {**found, "count": len(ordered)}
