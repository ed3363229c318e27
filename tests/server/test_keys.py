"""Keys, tenants and their limits, over both protocols."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from batchserve.cli import main
from batchserve.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    QuotaExceededError,
    UnavailableError,
)
from batchserve.server import lifecycle
from batchserve.server.keys import Caller, KeyStore, add_key, hash_of
from batchserve.server.lifecycle import GenerationServer
from batchserve.server.tenants import Tenants
from batchserve.server_config import ServerConfig
from batchserve.v1 import generation_pb2 as pb
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.harness import ask, failure_of, serving, until
from tests.server.http.raw import post, request

pytestmark = pytest.mark.faults
SECRET = [*range(20, 84)]  # a prompt, and what it continues with, that others must not learn of


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Keys by name, and the path of their file under "file"."""
    path = tmp_path / "keys.yaml"
    made = {
        "a": add_key(path, tenant="a"),
        "b": add_key(path, tenant="b", max_priority=5),
        "again": add_key(path, tenant="a"),
        "few": add_key(path, tenant="few", max_in_flight=1, max_queued=1),
        "poor": add_key(path, tenant="poor", tokens_per_minute=10),
        "admin": add_key(path, tenant="house", is_admin=True),
    }
    return {**made, "file": str(path)}


def content(keys: dict[str, str], new: str | None = None) -> str:
    """What is in the file; first writes it anew."""
    path = Path(keys["file"])
    if new is not None:
        path.write_text(new)
    return path.read_text()


def config(keys: dict[str, str], **more: Any) -> ServerConfig:
    return ServerConfig(port=0, http_port=0, drain_timeout_s=10.0, keys=keys["file"], **more)


async def test_calls_need_a_key(keys: dict[str, str], caplog: pytest.LogCaptureFixture):
    engine: Any = FakeEngine()
    engine.go_on.set()
    caplog.set_level(logging.INFO, "batchserve")
    async with serving(engine, config(keys)) as served:
        stub = served.client.stub
        for metadata in ((), bearer("bs-nothing"), (("authorization", keys["a"]),), bearer(keys["a"] + "x")):
            failed = await failure_of(stub.Generate(ask(), metadata=metadata))
            assert (failed.code, failed.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
            headers = {"Authorization": dict(metadata).get("authorization", "")}
            answer = await post(served.url, "/v1/completions", {"prompt": [1]}, **headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            assert (await request(served.url, path)).status == 401
        for path in ("/health", "/ready"):
            assert (await request(served.url, path)).status == 200
        assert await served.client.health_of() == "SERVING"
        assert (await stub.Generate(ask(), metadata=bearer(keys["a"]))).text == "ab"
        assert engine.arguments["tenant"] == "a"
        answer = await post(served.url, "/v1/completions", {"prompt": [1]}, Authorization=f"Bearer {keys['b']}")
        assert (answer.status, engine.arguments["tenant"]) == (200, "b")
    logged = [record for record in caplog.records if record.message == "request"]
    assert {getattr(record, "tenant", None) for record in logged} >= {"a", "b"}
    assert not any(key in caplog.text for name, key in keys.items() if name != "file")
    assert not any(key in content(keys) for name, key in keys.items() if name != "file")


async def test_only_admins_see_all_and_drain(keys: dict[str, str]):
    engine: Any = FakeEngine()
    async with serving(engine, config(keys, metrics_port=0)) as served:
        stub = served.client.stub
        for call, message in ((stub.GetStats, pb.GetStatsRequest()), (stub.Drain, pb.DrainRequest())):
            failed = await failure_of(call(message, metadata=bearer(keys["a"])))
            assert (failed.code, failed.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
        refused = await request(served.url, "/metrics", Authorization=f"Bearer {keys['a']}")
        assert (refused.status, refused.error["code"]) == (403, "permission_denied")
        assert (await request(served.url, "/metrics", Authorization=f"Bearer {keys['admin']}")).status == 200
        await served.client.stub.GetStats(pb.GetStatsRequest(), metadata=bearer(keys["admin"]))
        endpoint = served.server._endpoint
        assert endpoint is not None
        for key, status in (("a", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {keys[key]}"}
            assert (await request(f"http://{endpoint.address}", "/metrics", **headers)).status == status
        assert (await request(f"http://{endpoint.address}", "/metrics")).status == 401
        assert (await request(f"http://{endpoint.address}", "/healthz")).status == 200
        assert not served.server.stop_asked.is_set()
        await served.client.stub.Drain(pb.DrainRequest(), metadata=bearer(keys["admin"]))
        assert served.server.stop_asked.is_set()
        high = ask(priority=6)
        failed = await failure_of(served.client.stub.Generate(high, metadata=bearer(keys["b"])))
        assert (failed.reason, failed.field, failed.bound) == (
            *("INVALID_PRIORITY", "priority"),
            "at most 5, the max_priority of the key",
        )
        answer = await post(
            served.url, "/v1/completions", {"prompt": [1], "priority": -6}, Authorization=f"Bearer {keys['b']}"
        )
        assert (answer.status, answer.error["param"]) == (400, "priority")


async def test_tenants_learn_nothing_of_each_other(serve_tiny: Serve, keys: dict[str, str]):
    """One plants a secret, the other asks for just that: it gets the same answer, no draft and no cached token of it,
    and the engine computes as many rows for it as if nobody had been there.
    """
    planted = ask(*SECRET, max_tokens=60, draft_scope="team")
    costs: dict[str, list[tuple[list[int], int, int, int]]] = {}
    for planting in ((), ("a",), ("a", "a", "again")):
        async with serve_tiny(server=config(keys), decoding_length=8) as served:

            async def cost(key: str, message: pb.GenerateRequest = planted) -> tuple[list[int], int, int, int]:
                before = served.engine.metrics.reading().values["rows_total"]
                answer = await served.client.stub.Generate(message, metadata=bearer(keys[key]))
                rows = served.engine.metrics.reading().values["rows_total"] - before
                usage = answer.usage
                return list(answer.token_ids), usage.cached_tokens, usage.accepted_draft_tokens, int(rows)

            for key in planting:
                await cost(key)
            costs.setdefault("b", []).append(await cost("b"))
            body = {"prompt": SECRET, "max_tokens": 60, "ignore_eos": True, "draft_scope": "team", "temperature": 0}
            answer = await post(served.url, "/v1/completions", body, Authorization=f"Bearer {keys['admin']}")
            assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            if planting:
                costs.setdefault("again", []).append(await cost("again"))
                # It can be forgotten, and only by its own tenant.
                for key in ("b", "a"):
                    asked = pb.ClearDraftScopeRequest(draft_scope="team")
                    await served.client.stub.ClearDraftScope(asked, metadata=bearer(keys[key]))
                    costs.setdefault(f"cleared by {key}", []).append(await cost("again"))
    assert costs["b"][0] == costs["b"][1] == costs["b"][2]
    assert costs["b"][0][1] == 0
    for tokens, cached, accepted, rows in costs["again"]:  # a tenant's own keys do share
        assert tokens == costs["b"][0][0]
        assert cached > 0
        assert accepted > costs["b"][0][2]
        assert rows < costs["b"][0][3]
    assert all(cached > 0 for _, cached, _, _ in costs["cleared by b"])
    assert costs["cleared by a"][0][1:3] == costs["b"][0][1:3]


async def test_request_ids_and_forks_are_a_tenants_own(serve_tiny: Serve, keys: dict[str, str]):
    async with serve_tiny(server=config(keys), step_s=0.005) as served:
        endless = ask(max_tokens=200, request_id="same")
        running = served.client.stub.StreamGenerate(endless, metadata=bearer(keys["a"]))
        assert (await anext(aiter(running))).started.request_id == "same"
        failed = await failure_of(served.client.stub.Generate(endless, metadata=bearer(keys["again"])))
        assert failed.code is grpc.StatusCode.ALREADY_EXISTS
        assert "'same'" in failed.message
        other = await served.client.stub.Generate(ask(request_id="same"), metadata=bearer(keys["b"]))
        assert other.request_id == "same"
        several = ask(max_tokens=5, request_id="n", sampling_params=pb.SamplingParams(temperature=1.0, n=3, seed=1))
        one, two = await asyncio.gather(
            *(served.client.stub.Generate(several, metadata=bearer(keys[key])) for key in ("a", "b"))
        )
        assert [sample.request_id for sample in (one, *one.other_samples)] == ["n"] * 3
        assert [each.token_ids for each in one.other_samples] == [each.token_ids for each in two.other_samples]
        running.cancel()


async def test_limits_of_a_tenant(keys: dict[str, str]):
    engine: Any = FakeEngine()
    async with serving(engine, config(keys, has_tenant_metrics=True)) as served:

        def call(key: str, timeout: float | None = None) -> Awaitable[Any]:
            return asyncio.ensure_future(
                served.client.stub.Generate(ask(), metadata=bearer(keys[key]), timeout=timeout)
            )

        first = call("few")
        await until(lambda: engine.num_in_flight == 1)
        tenant = served.server._calls.tenants.by_name["few"]
        second = call("few")
        await until(lambda: len(tenant.waiting) == 1)
        failed = await failure_of(call("few"))
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
        assert failed.retry_after_s
        answer = await post(served.url, "/v1/completions", {"prompt": [1]}, Authorization=f"Bearer {keys['few']}")
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "quota_exceeded", "1")
        several = {"prompt": [1], "n": 2, "temperature": 1}
        answer = await post(served.url, "/v1/completions", several, Authorization=f"Bearer {keys['few']}")
        assert (answer.status, answer.error["param"]) == (400, "n")
        others = call("a")  # who do not wait for it
        await until(lambda: engine.num_in_flight == 2)
        engine.go_on.set()
        assert [(await each).text for each in (first, second, others)] == ["ab"] * 3
        assert (tenant.num_in_flight, len(tenant.waiting), tenant.counts.refused) == (0, 0, 2)
        figures = (await request(served.url, "/metrics", Authorization=f"Bearer {keys['admin']}")).body.decode()
        assert 'batchserve_tenant_requests_total{tenant="few"} 2.0' in figures
        assert 'batchserve_tenant_refused_total{tenant="few"} 2.0' in figures
        assert 'batchserve_tenant_requests_in_flight{tenant="a"} 0.0' in figures
        # An answer takes five tokens with its prompt: the third one takes more than there are.
        assert [(await call("poor")).text for _ in range(3)] == ["ab"] * 3
        failed = await failure_of(call("poor"))
        assert failed.reason == "QUOTA_EXCEEDED"
        assert failed.retry_after_s is not None
        assert 0 < failed.retry_after_s <= 60


async def test_who_waits_keeps_the_order_and_may_give_up():
    tenants = Tenants()
    caller = Caller("t", max_in_flight=2)
    entered: list[int] = []
    ends = [asyncio.Event() for _ in range(6)]

    async def one(i: int, count: int = 1, timeout_s: float | None = None) -> None:
        async with tenants.admitted(caller, count, timeout_s):
            entered.append(i)
            await ends[i].wait()

    async def turn() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(0)), asyncio.create_task(one(1))]
    await turn()
    tasks += [asyncio.create_task(one(2, 2)), asyncio.create_task(one(3)), asyncio.create_task(one(4, 1, 0.01))]
    await turn()
    assert entered == [0, 1]
    with pytest.raises(DeadlineExceededError):
        await tasks[4]
    ends[0].set()
    await turn()
    assert entered == [0, 1]  # the next one wants two places, and nobody overtakes it
    assert len(tenants.by_name["t"].waiting) == 2  # the one that gave up is none of them
    tasks[2].cancel()
    await turn()
    assert entered == [0, 1, 3]
    with pytest.raises(InvalidRequestError, match="n = 3: must be at most 2"):
        await one(5, 3)
    for end in ends:
        end.set()
    await asyncio.gather(*tasks[:2], tasks[3])
    tenant = tenants.by_name["t"]
    assert (tenant.num_in_flight, len(tenant.waiting)) == (0, 0)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_those_who_are_cancelled_together_give_all_places_back(is_refused: bool):
    tenants, caller, end = Tenants(), Caller("t", max_in_flight=2), asyncio.Event()
    tasks = [asyncio.create_task(_hold(tenants, caller, end)) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks:  # those in flight leave before those that wait have run again
        task.cancel()
    if is_refused:
        tenants.refuse_waiting(UnavailableError("the server is draining"))
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
    )
    tenant = tenants.by_name["t"]
    assert (tenant.num_in_flight, len(tenant.waiting)) == (0, 0)
    assert await asyncio.wait_for(_hold(tenants, caller), 1) == 1


async def _hold(tenants: Tenants, caller: Caller, end: asyncio.Event | None = None) -> int:
    async with tenants.admitted(caller, 1, None) as tenant:
        await (asyncio.sleep(0) if end is None else end.wait())
        tenant.use(50, 40)
    return 1


async def test_tokens_come_back_with_time():
    now_s = [100.0]
    tenants = Tenants(lambda: now_s[0])
    caller = Caller("t", tokens_per_minute=60)
    async with tenants.admitted(caller, 1, None) as tenant:
        tenant.use(50, 40)  # more than there were: what an answer takes is known at its end
    with pytest.raises(QuotaExceededError) as refused:
        async with tenants.admitted(caller, 1, None):
            pass
    assert refused.value.retry_after_s == 31
    waiting = [
        asyncio.create_task(_hold(tenants, Caller("u", max_in_flight=1, tokens_per_minute=60))) for _ in range(9)
    ]
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in done] == [int] + [QuotaExceededError] * 8  # whose turn came after they were used up
    stopped = asyncio.create_task(_hold(tenants, Caller("v", max_in_flight=1), asyncio.Event()))
    late = asyncio.create_task(_hold(tenants, Caller("v", max_in_flight=1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tenants.refuse_waiting(UnavailableError("draining"))
    with pytest.raises(UnavailableError):
        await late
    stopped.cancel()
    now_s[0] += 31
    async with tenants.admitted(caller, 1, None):
        pass
    now_s[0] += 10_000
    async with tenants.admitted(caller, 1, None) as tenant:
        assert tenant.tokens == 60  # no more than those of a minute
    assert (tenant.counts.requests, tenant.counts.refused) == (3, 1)


async def test_the_file_is_read_again(keys: dict[str, str], caplog: pytest.LogCaptureFixture):
    engine: Any = FakeEngine()
    engine.go_on.set()

    async def start_engine() -> Any:
        return engine

    announced: asyncio.Queue[str] = asyncio.Queue()
    running = asyncio.create_task(lifecycle.serve(config(keys), "test", start_engine, announced.put_nowait))
    await announced.get()
    url = (await announced.get()).removeprefix("HTTP on ")

    async def status(key: str) -> int:
        return (await request(url, "/v1/models", Authorization=f"Bearer {key}")).status

    sound = content(keys)
    new = add_key(Path(keys["file"]), tenant="new")
    assert (await status(keys["a"]), await status(new)) == (200, 401)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.05)
    assert (await status(keys["a"]), await status(new)) == (200, 200)
    content(keys, "keys: [1]")
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.05)
    assert "keys[0]: must have sha256 and tenant" in caplog.text
    assert await status(new) == 200
    content(keys, sound)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.05)
    assert (await status(keys["a"]), await status(new)) == (200, 401)
    os.kill(os.getpid(), signal.SIGTERM)
    await running


SOUND = {"sha256": hash_of("x"), "tenant": "a"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "must be YAML"),
        ("[]", "must be a list under 'keys'"),
        ({"keys": [], "more": 1}, "must be a list under 'keys', and nothing else"),
        ({"keys": [{**SOUND, "sha256": "abc"}]}, r"keys\[0\].sha256: must be 64 hexadecimal digits"),
        ({"keys": [{**SOUND, "tenant": "a/b"}]}, r"keys\[0\].tenant = 'a/b': must be 1 to 64 letters"),
        ({"keys": [{**SOUND, "is_admin": "yes"}]}, r"keys\[0\].is_admin = 'yes': must be true or false"),
        ({"keys": [SOUND, SOUND]}, r"keys\[1\].sha256: must not be there twice"),
        ({"keys": [{**SOUND, "max_in_flight": 0}]}, r"max_in_flight = 0: must be an integer, at least 1"),
        ({"keys": [{**SOUND, "max_priority": 1001}]}, r"max_priority = 1001: must be an integer, -1000..1000"),
        ({"keys": [{**SOUND, "tokens_per_minute": 1.5}]}, r"tokens_per_minute = 1.5: must be an integer"),
        ({"keys": [{**SOUND, "quota": 1}]}, r"keys\[0\].quota: must be one of sha256"),
    ],
    ids=range(12),
)
def test_a_file_that_is_not_sound(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=message):
        KeyStore(str(path), Caller())


H = "0" * 64
FORMS = {
    "indented": f"# mine\nkeys:\n  - sha256: '{H}'\n    tenant: x\n",
    "in one line": f"keys: [{{sha256: '{H}', tenant: x}}]\n",
    "json": json.dumps({"keys": [{"sha256": H, "tenant": "x"}]}),
    "empty": "",
    "comment": "# mine\n",
    "no keys": "keys:\n",
    "empty list": "keys: []\n",
    "empty json": '{"keys": []}',
}


@pytest.mark.parametrize("form", FORMS)
def test_a_key_is_added_to_a_file_of_any_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(FORMS[form])
    link = tmp_path / "link"
    link.symlink_to(path)
    keys = [add_key(link, tenant="y"), add_key(link, tenant="z", max_queued=0)]
    assert link.is_symlink()
    store = KeyStore(str(path), Caller())
    assert [store.caller(f"Bearer {key}").tenant for key in keys] == ["y", "z"]
    assert (H in path.read_text()) == ("x" in FORMS[form])
    assert ("# mine" in path.read_text()) == ("# mine" in FORMS[form])
    assert path.read_text().startswith("{") == ("json" in form)
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_keys_that_are_made_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with ThreadPoolExecutor(8) as threads:
        keys = [*threads.map(lambda i: add_key(path, tenant=f"t{i}"), range(24))]
    store = KeyStore(str(path), Caller())
    assert [store.caller(f"Bearer {key}").tenant for key in keys] == [f"t{i}" for i in range(24)]


def test_the_command_makes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    assert main(["keys", str(path), "--tenant", "acme", "--max-in-flight", "4", "--admin"]) == 0
    first = capsys.readouterr().out.strip()
    path.write_text(f"# ours\n{path.read_text()}")
    assert main(["keys", str(path), "--tenant", "other"]) == 0
    second = capsys.readouterr().out.strip()
    store = KeyStore(str(path), Caller())
    assert store.caller(f"Bearer {first}") == Caller("acme", max_in_flight=4, is_admin=True)
    assert store.caller(f"bearer {second}") == Caller("other")
    assert path.read_text().startswith("# ours\n")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    assert main(["keys", str(path), "--tenant", "third"]) == 0
    capsys.readouterr()
    assert path.stat().st_mode & 0o777 == 0o640
    before = path.read_text()
    assert main(["keys", str(path), "--tenant", "a b"]) == 2
    assert "tenant = 'a b': must be" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_other_machines_need_keys_unless_they_need_not(host: str, keys: dict[str, str]):
    with pytest.raises(ConfigError, match=r"host = .*: must be loopback without keys; --keys FILE names callers"):
        await GenerationServer(ServerConfig(host=host, port=0, http_port=0), "test").bind()
    engine: Any = FakeEngine()
    async with serving(engine, ServerConfig(host=host, port=0, http_port=0, allow_unauthenticated=True)) as served:
        failed = await failure_of(served.client.stub.Drain(pb.DrainRequest()))
        assert failed.code is grpc.StatusCode.PERMISSION_DENIED
        await served.client.stub.GetStats(pb.GetStatsRequest())
        url = served.url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        assert (await request(url, "/metrics")).status == 200
        assert not engine.shares_by_default
    engine = FakeEngine()
    async with serving(engine, ServerConfig(host=host, port=0, http_port=0, keys=keys["file"])):
        assert engine.shares_by_default  # within a tenant


async def test_generate_sends_a_key(
    keys: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("BATCHSERVE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it makes Ctrl-C end the process
    engine: Any = FakeEngine()
    engine.go_on.set()
    async with serving(engine, config(keys)) as served:
        command = ["generate", "--server", served.address, "--prompt", "x"]
        assert await asyncio.to_thread(main, command) == 1
        assert "UNAUTHENTICATED: a key is needed" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*command, "--api-key", keys["b"]]) == 0
        assert capsys.readouterr().out == "ab\n"
        assert engine.arguments["tenant"] == "b"
    assert main(["generate", "--prompt", "x", "--api-key", "y"]) == 2
    assert "--api-key: must be with --server" in capsys.readouterr().err
