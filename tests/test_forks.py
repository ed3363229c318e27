"""Engines in forked processes: called there they say so at once, where they would have waited for ever."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchserve import LLM, SamplingParams
from batchserve.config import EngineConfig, MiB
from batchserve.engine.async_engine import AsyncEngine
from batchserve.errors import BatchserveError, ForkedProcessError

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]
CHILD_TIMEOUT_S = 60
SHORT = SamplingParams(temperature=0.0, max_tokens=3)


def config(tiny_model: dict[str, Path]) -> dict[str, object]:
    return {"model": str(tiny_model["llama"]), "dtype": "float32", "kv_cache_memory": 8 * MiB, "drafter": "none"}


def in_fork(call: Callable[[], object]) -> str:
    """What the call raises in a forked child, which must come to its end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(CHILD_TIMEOUT_S)
            call()
            said = "nothing"
        except BatchserveError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"untyped {error!r}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it hung"
    return said


def test_an_llm_says_so(tiny_model: dict[str, Path]) -> None:
    llm = LLM(**config(tiny_model))  # type: ignore[arg-type]
    (before,) = llm.generate([[5, 6, 7]], SHORT, show_progress=False)
    calls = (
        lambda: llm.generate([[5, 6, 7]], SHORT, show_progress=False),
        llm.clear_draft_scope,
        lambda: llm.save_drafts("drafts"),
        lambda: LLM(**config(tiny_model)),  # type: ignore[arg-type]  # which would use the same compute threads
    )
    with llm._turn:  # as where another thread is in the midst of a call
        for call in calls:
            said = in_fork(call)
            assert re.match(rf"ForkedProcessError: (LLM|engine): made in process {os.getpid()}, called in ", said)
            assert "'spawn'" in said
    (after,) = llm.generate([[5, 6, 7]], SHORT, show_progress=False)
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize("own_process", [False, True])
async def test_an_async_engine_says_so_and_the_maker_goes_on(tiny_model: dict[str, Path], own_process: bool) -> None:
    """Also on the loop that the child has a copy of; nothing that the child does reaches the engine's process."""
    engine = await AsyncEngine.start(EngineConfig(**config(tiny_model)), own_process=own_process)  # type: ignore[arg-type]
    before = await engine.generate([5, 6, 7], SHORT)

    def step(coroutine: object) -> None:
        coroutine.send(None)  # type: ignore[attr-defined]  # on a copy of this very loop

    calls: list[Callable[[], object]] = [
        lambda: step(engine.generate([5])),
        lambda: step(engine.clear_draft_scope()),
        lambda: step(engine.ping()),
        lambda: step(engine.drain(1.0)),
        lambda: step(engine.wait_failed()),
        lambda: step(engine.shutdown()),
        engine.kill,
    ]
    for call in calls:
        assert in_fork(call).startswith("ForkedProcessError: AsyncEngine: made in process ")
    after = await engine.generate([5, 6, 7], SHORT)
    assert after.token_ids == before.token_ids
    await engine.shutdown()


def test_the_error_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ForkedProcessError("LLM", 1, 2)))
    assert isinstance(error, ForkedProcessError)
    assert error.reason == "FORKED_PROCESS"


PROGRAM = textwrap.dedent("""
    import asyncio, os, sys, threading
    from batchserve.config import DraftConfig, EngineConfig
    from batchserve.startup import measure_steps
    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.types import SamplingParams

    measure_steps.MAX_SECONDS = 0.0

    def main():
        model, cache, how, own_process = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "True"
        config = EngineConfig(model=model, dtype="float32", kv_cache_memory=8 << 20, decoding_length=8,
                              wait_for_drafter=True, draft=DraftConfig(draft_cache=cache))

        async def run():
            engine = await AsyncEngine.start(config, own_process=own_process)
            await engine.generate(list(range(5, 20)), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
            if own_process:
                print(engine._host._process.pid, flush=True)
            if how == "killed":
                os.kill(os.getpid(), 9)
            raise ZeroDivisionError(how)

        asyncio.run(run())

    main()
""")


@pytest.mark.parametrize(("how", "own_process"), [("raises", False), ("killed", True)])
def test_drafts_are_saved_by_a_program_that_ends_without_shutdown(
    tiny_model: dict[str, Path], tmp_path: Path, how: str, own_process: bool
) -> None:
    cache = tmp_path / "drafts"
    arguments = [sys.executable, "-c", PROGRAM, str(tiny_model["llama"]), str(cache), how, str(own_process)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 1), ended.stderr
    if own_process:
        wait_for_end(int(ended.stdout.split()[-1]))
    assert cache.stat().st_size > 0


def wait_for_end(pid: int) -> None:
    """Of an engine's process that its front has left."""
    for _ in range(300):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    raise AssertionError("the engine's process has outlived its front")
