"""The engine in a process of its own: it answers as a thread does, and its end, or its front's, is everybody's."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from enum import IntEnum, StrEnum
from pathlib import Path

import pytest

from batchserve.config import DraftConfig, EngineConfig, MiB
from batchserve.engine.async_engine import AsyncEngine
from batchserve.engine.engine_process import EngineProcess, RemoteMetrics
from batchserve.errors import ConfigError, DeadlineExceededError, EngineFaultError, UnavailableError
from batchserve.llm import LLM
from batchserve.metrics import MetricsReading
from batchserve.server.metrics_text import MetricsText
from batchserve.types import SamplingParams, SpeculationParams, Started

PROMPTS = [[5, 7, 9], [5, 7, 9, 11], [8] * 30, [3, 4, 3, 4, 3, 4]]
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
LLM_OPTIONS = {"dtype": "float32", "kv_cache_memory": 32 * MiB, "num_threads": 1}
OPTIONS = {**LLM_OPTIONS, "wait_for_drafter": True}


def make_config(tiny_model: dict[str, Path], **changes: object) -> EngineConfig:
    return EngineConfig(**{"model": str(tiny_model["llama"]), **OPTIONS, **changes})  # type: ignore[arg-type]


def process_of(engine: AsyncEngine) -> EngineProcess:
    assert isinstance(engine._host, EngineProcess)
    return engine._host


def assert_signals_are_caught(pid: int) -> None:
    """And not ignored: what it starts, to compile drafters, would ignore them, too, and never end."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    for number in (signal.SIGTERM, signal.SIGINT):
        bit = 1 << (number - 1)
        assert not int(status["SigIgn"], 16) & bit
        assert int(status["SigCgt"], 16) & bit


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_it_answers_and_counts_as_in_this_process(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    # A fixed length: how much adaptive drafts is up to the time that steps take.
    config = make_config(tiny_model, draft=DraftConfig(draft_cache=str(tmp_path / "drafts")), decoding_length=8)
    messages: list[str] = []
    engine = await AsyncEngine.start(config, messages.append, own_process=True)
    here = LLM(**{name: getattr(config, name) for name in ("model", "decoding_length", *LLM_OPTIONS)})
    assert engine.info == here.info
    assert any("LlamaForCausalLM" in message for message in messages)

    # Several at once, with drafts; whole and as streams.
    expected = [each.token_ids for each in here.generate(PROMPTS, LONG, show_progress=False)]
    outputs = await asyncio.gather(
        *(engine.generate(prompt, LONG, request_id=f"r{i}") for i, prompt in enumerate(PROMPTS))
    )
    assert [output.token_ids for output in outputs] == expected
    assert [output.request_id for output in outputs] == ["r0", "r1", "r2", "r3"]
    again = await engine.generate(PROMPTS[0], LONG)
    assert again.usage.accepted_draft_tokens > 20, "it drafts from what it has given before"

    # What clients leave behind is freed, under an id that is in use again at once.
    async with aclosing(
        engine.stream([6, 7], SamplingParams(max_tokens=250, ignore_eos=True), request_id="a")
    ) as events:
        assert isinstance(await anext(events), Started)
        await anext(events)
    assert (await engine.generate(PROMPTS[1], LONG, request_id="a")).token_ids == expected[1]
    with pytest.raises(DeadlineExceededError):
        await engine.generate(PROMPTS[0], SamplingParams(max_tokens=250, ignore_eos=True), deadline_s=0.01)

    # Figures come from there.
    numbers = engine.metrics.reading().numbers()
    assert numbers["requests_finished_total"] == len(PROMPTS) + 2
    assert numbers["requests_running"] == numbers["requests_waiting"] == numbers["kv_used_tokens"] == 0
    assert engine.metrics.reading().acceptance["mixture"].tested[0] > 0
    text = MetricsText(Counter())
    text.show(engine.metrics, "tiny")
    page = (await asyncio.to_thread(text.read, ""))[2].decode()
    assert "batchserve_requests_finished_total 6.0" in page
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in page
    assert 'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0' in page
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} ' in page
    assert 'batchserve_tested_edges_total{depth="1",drafter="mixture"}' in page

    # Scopes are cleared there, and it can be asked whether it is alive.
    await engine.ping()
    await engine.clear_draft_scope()
    cold = await engine.generate(PROMPTS[0], LONG, speculation=SpeculationParams(draft_scope="other"))
    assert cold.token_ids == expected[0]
    fresh = await engine.generate(PROMPTS[0], LONG)
    assert max(fresh.usage.accepted_draft_tokens, cold.usage.accepted_draft_tokens) < 20

    pid = process_of(engine)._process.pid
    assert_signals_are_caught(pid)
    async with aclosing(engine.stream([6, 7], SamplingParams(max_tokens=250, ignore_eos=True))) as events:
        await anext(events)
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(UnavailableError):
            _ = [event async for event in events]
    assert process_of(engine)._process.returncode == 0
    # Nobody had asked for figures since, but the end of those in flight is in them.
    end = engine.metrics.reading().numbers()
    assert end["requests_aborted_total"] == numbers["requests_aborted_total"] + 1
    assert end["requests_finished_total"] == numbers["requests_finished_total"] + 2
    assert end["requests_running"] == 0
    assert is_gone(pid)
    assert (tmp_path / "drafts").stat().st_size > 0
    assert not engine._has_failed.is_set()


async def test_what_cannot_be_built_is_refused_by_the_same_error(tiny_model: dict[str, Path]) -> None:
    """As what is found at once, of which another test has an example."""
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        await AsyncEngine.start(make_config(tiny_model, kv_cache_memory=1), own_process=True)


async def test_its_death_ends_everyone_and_refuses_the_next(tiny_model: dict[str, Path]) -> None:
    engine = await AsyncEngine.start(make_config(tiny_model, decoding_length=0), own_process=True)
    answer = engine.stream([5, 6], SamplingParams(max_tokens=250, ignore_eos=True))
    await anext(answer)
    clearing = asyncio.create_task(engine.clear_draft_scope())
    os.kill(process_of(engine)._process.pid, signal.SIGKILL)
    with pytest.raises(EngineFaultError, match="killed by signal 9"):
        async for _ in answer:
            pass
    async with asyncio.timeout(5):
        await engine.wait_failed()
        await asyncio.gather(clearing, return_exceptions=True)
    with pytest.raises(EngineFaultError, match="restart the server"):
        await engine.generate([5, 6], LONG)
    assert engine.num_in_flight == 0
    started_s = time.monotonic()
    assert isinstance(engine.metrics.reading(), MetricsReading)
    await engine.shutdown()
    assert time.monotonic() - started_s < 4, "nobody waits for an answer from the dead"


FRONT = """
import sys, time
from batchserve.config import EngineConfig
from batchserve.engine import engine_process

class Telling(engine_process.LaunchedProcess):
    def __init__(self):
        super().__init__()
        print(self.process.pid, flush=True)

engine_process.LaunchedProcess = Telling
engine_process.EngineProcess(EngineConfig(model=sys.argv[1], kv_cache_memory=1 << 25, dtype="float32"))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("is_ready", [False, True])
def test_it_does_not_outlive_its_front(tiny_model: dict[str, Path], is_ready: bool) -> None:
    """Killed before it could say anything, while the engine starts or serves."""
    command = [sys.executable, "-c", FRONT, str(tiny_model["llama"])]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    if is_ready:
        assert front.stdout.readline() == "ready\n"
    front.kill()
    front.communicate()
    until_s = time.monotonic() + 20
    while not is_gone(pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert is_gone(pid)


def test_metrics_that_do_not_come_are_those_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchserve.engine.engine_process.READING_TIMEOUT_S", 0.01)
    answer = MetricsReading(load={"requests_running": 3.0})
    answers = [answer]

    def ask() -> None:
        if answers:
            metrics.take(answers.pop())

    metrics = RemoteMetrics(ask)
    readings = [metrics.reading() for _ in range(3)]
    assert [reading.load for reading in readings] == [answer.load] * 3, "two of them late"
    ages_s = [reading.age_s for reading in readings]
    assert 0 <= ages_s[0] < ages_s[1] < ages_s[2]
    assert ages_s[2] >= 0.02, "two answers were waited for in vain since"


def test_who_reads_at_the_same_time_waits_for_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for one after the other: a scrape would have to wait for all those before it."""
    num_asked, all_wait = 0, threading.Barrier(4)

    def ask() -> None:
        nonlocal num_asked
        num_asked += 1

    metrics = RemoteMetrics(ask)
    right = metrics._has_come.wait

    def wait(timeout_s: float) -> bool:
        all_wait.wait(10)
        return right(timeout_s)

    monkeypatch.setattr(metrics._has_come, "wait", wait)
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(metrics.reading) for _ in range(3)]
        all_wait.wait(10)
        metrics.take(MetricsReading(load={"requests_running": 3.0}))
        assert [each.result(10).load for each in reading] == [{"requests_running": 3.0}] * 3
    assert num_asked == 1


def test_a_reading_under_way_does_not_outwait_the_engines_end() -> None:
    metrics = RemoteMetrics(lambda: metrics.end())
    started_s = time.monotonic()
    assert metrics.reading().values == metrics.reading().values == MetricsReading().values
    assert time.monotonic() - started_s < 4


class Tenant(StrEnum):
    """Of this module, which the engine's process cannot import."""

    A = "tenant"


class Token(IntEnum):
    """The same of a number."""

    A = PROMPTS[0][0]


async def check_own_types_do_not_cross(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's, which are sent as what they are made from."""
    monkeypatch.setattr(Tenant, "__module__", "nowhere")
    monkeypatch.setattr(Token, "__module__", "nowhere")
    named = SpeculationParams(draft_scope=Tenant.A)
    prompt = [Token.A, *PROMPTS[0][1:]]
    async with asyncio.timeout(60):
        output = await engine.generate(prompt, LONG, request_id=Tenant.A, speculation=named, priority=Token.A)
        await engine.clear_draft_scope(Tenant.A)
        assert (await engine.generate(PROMPTS[0], LONG)).token_ids == output.token_ids


async def check_who_does_not_read_holds_nobody_up(engine: AsyncEngine) -> None:
    process = process_of(engine)._process
    os.kill(process.pid, signal.SIGSTOP)
    long = [5] * 200
    for _ in range(400):  # far more than the pipe holds
        async with aclosing(engine.stream(long, LONG)) as events:
            assert isinstance(await anext(events), Started)
    assert engine.num_in_flight == 0
    os.kill(process.pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        assert len((await engine.generate(PROMPTS[0], LONG)).token_ids) == 60


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
async def test_it_logs_from_the_fronts_level_on(
    tiny_model: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    level: int,
) -> None:
    (tmp_path / "file").touch()
    caplog.set_level(level, "batchserve")
    config = make_config(tiny_model, cache_dir=str(tmp_path / "file"), decoding_length=0, max_num_batched_tokens=17)
    engine = await AsyncEngine.start(config, own_process=True)
    await engine.shutdown()
    assert ("step times are not kept" in capfd.readouterr().err) is (level == logging.WARNING)


async def test_it_is_the_fronts_own_package_whatever_the_folder_holds_and_serves_in_odd_circumstances(
    tiny_model: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine, for all that needs none of its own."""
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    engine = await AsyncEngine.start(make_config(tiny_model), own_process=True)
    assert len((await engine.generate(PROMPTS[0], LONG)).token_ids) == 60
    await check_own_types_do_not_cross(engine, monkeypatch)
    await check_who_does_not_read_holds_nobody_up(engine)
    await engine.shutdown()
    assert process_of(engine)._process.returncode == 0
    with pytest.raises(ConfigError, match="'/nowhere'"):
        await AsyncEngine.start(make_config(tiny_model, model="/nowhere"), own_process=True)
