"""Compiled parts are prepared once, without anybody waiting for them, and no process is left behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from resource import RLIM_INFINITY
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from batchserve.draft import kernels
from batchserve.draft.kernels import CHILD, KernelLoader
from batchserve.errors import ConfigError
from batchserve.interpreter import python
from batchserve.native import jit as native
from batchserve.native.jit import NOT_KEPT

WAIT_S = 60.0


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a module of this process with such a compile_kernels and returns its name."""
    names: list[str] = []

    def make(compile_kernels: Callable[[], None]) -> str:
        names.append(f"compiled_{len(names)}")
        made: Any = ModuleType(names[-1])
        made.__file__ = None  # nothing is kept of it
        made.compile_kernels = compile_kernels
        monkeypatch.setitem(sys.modules, names[-1], made)
        return names[-1]

    return make


def wait_for(loader: KernelLoader, module: str) -> None:
    """Until its thread has ended, whatever came of it."""
    loader._jobs[module]._thread.join(WAIT_S)
    assert not loader._jobs[module]._thread.is_alive()


class FakeChild:
    """Stands for the child process: ends when the test says so, or when it is told to."""

    def __init__(self, status: int = 0) -> None:
        self.says = ""
        self.may_end = threading.Event()
        self.returncode = status
        self.is_terminated = False
        self.command: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> FakeChild:
        self.command = command
        return self

    def __enter__(self) -> None:
        self.stderr = self

    def __exit__(self, *error: object) -> None:
        assert self.may_end.is_set()

    def read(self) -> str:
        assert self.may_end.wait(WAIT_S)
        return "Traceback ...\nOSError: no room\n" if self.returncode else self.says

    def terminate(self) -> None:
        self.is_terminated = True
        self.returncode = -15
        self.may_end.set()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    fake = FakeChild()
    popen = SimpleNamespace(Popen=fake, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(kernels, "subprocess", popen)
    return fake


def test_in_the_foreground_kernels_are_ready_when_first_asked_for_and_compiled_once(module) -> None:
    calls: list[int] = []
    name, loader = module(lambda: calls.append(1)), KernelLoader(in_background=False)
    assert [loader.is_ready(name) for _ in range(3)] == [True] * 3
    assert len(calls) == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_a_module_without_compiled_parts_is_ready_at_once(in_background: bool) -> None:
    loader = KernelLoader(in_background)
    assert loader.is_ready("batchserve.draft.base")
    assert not loader._jobs


def test_in_the_background_nobody_waits_and_a_child_process_comes_first(module, child: FakeChild) -> None:
    calls: list[str] = []
    name = module(lambda: calls.append(threading.current_thread().name))
    loader = KernelLoader(in_background=True)
    assert [loader.is_ready(name) for _ in range(3)] == [False] * 3
    assert calls == []  # the child is still compiling
    child.may_end.set()
    wait_for(loader, name)
    assert loader.is_ready(name)
    assert child.command == python(CHILD, name)
    assert calls == [f"compile {name}"]
    loader.close()


def test_when_the_child_fails_this_process_compiles(module, child: FakeChild, caplog: pytest.LogCaptureFixture) -> None:
    child.returncode = 1
    child.may_end.set()
    name, loader = module(lambda: None), KernelLoader(in_background=True)
    loader.is_ready(name)
    wait_for(loader, name)
    assert loader.is_ready(name)
    assert "OSError: no room" in caplog.text


@pytest.mark.parametrize(("limit", "is_compiled"), [(RLIM_INFINITY, True), (4 << 30, False)])
@pytest.mark.parametrize("status", [0, -6])
def test_kernels_that_are_not_kept_are_not_compiled_where_memory_is_limited(
    module,
    child: FakeChild,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit,
    is_compiled,
    status,
) -> None:
    monkeypatch.setattr(kernels, "getrlimit", lambda which: (limit, RLIM_INFINITY))
    child.returncode, child.says = status, f"{NOT_KEPT}: no space left\n"
    child.may_end.set()
    name, loader = module(lambda: None), KernelLoader(in_background=True)
    loader.is_ready(name)
    wait_for(loader, name)
    assert loader.is_ready(name) == is_compiled
    assert ("limited address space (ulimit -v)" in caplog.text) != is_compiled


def failing() -> None:
    raise RuntimeError("no such instruction")


def test_kernels_that_cannot_be_compiled_are_an_error_in_the_foreground(module) -> None:
    name = module(failing)
    with pytest.raises(ConfigError, match=f"{name} cannot be compiled: no such instruction"):
        KernelLoader(in_background=False).is_ready(name)


def test_kernels_that_cannot_be_compiled_are_logged_in_the_background_and_never_ready(
    module, child: FakeChild, caplog: pytest.LogCaptureFixture
) -> None:
    child.may_end.set()
    name, loader = module(failing), KernelLoader(in_background=True)
    loader.is_ready(name)
    wait_for(loader, name)
    assert not loader.is_ready(name)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "no such instruction" in caplog.text


def test_closing_ends_the_child_and_compiles_nothing(module, child: FakeChild) -> None:
    calls: list[int] = []
    name, loader = module(lambda: calls.append(1)), KernelLoader(in_background=True)
    loader.is_ready(name)
    loader.close()
    assert not loader._jobs[name]._thread.is_alive()
    assert child.is_terminated or not child.command
    assert calls == []
    assert not loader.is_ready(name)


def test_a_real_child_process_runs_the_modules_compile_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The child of a real loader leaves a trace that this process then finds."""
    trace = tmp_path / "trace"
    body = f"with open({str(trace)!r}, 'a') as file: file.write(f'{{os.getpid()}} ')"
    code = f"import os\ndef compile_kernels():\n    {body}\n"
    (tmp_path / "compiled_for_real.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "random.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path / "here")
    loader = KernelLoader(in_background=True)
    loader.is_ready("compiled_for_real")
    wait_for(loader, "compiled_for_real")
    assert loader.is_ready("compiled_for_real")
    loader.close()
    first, second = trace.read_text().split()
    assert int(second) == os.getpid() != int(first)
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "the child failed"


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compiled_for_ever.py").write_text("import time\ndef compile_kernels():\n    time.sleep(3600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    child = subprocess.Popen(python(CHILD, "compiled_for_ever"), stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.close()  # as the system does for a process that is gone
    assert child.wait(WAIT_S) == 1


@pytest.mark.faults
def test_a_drafter_of_several_modules_is_announced_once_and_when_all_are_ready(
    module, child: FakeChild, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    may_end = threading.Event()
    quick, slow = module(lambda: None), module(lambda: may_end.wait(WAIT_S))
    child.may_end.set()
    loader = KernelLoader(in_background=True)
    for _ in range(3):
        for name in (quick, slow):
            loader.is_ready(name)
        loader.announce("mixture", [quick, slow])
    wait_for(loader, quick)
    assert "ready" not in caplog.text
    may_end.set()
    wait_for(loader, slow)
    for thread in threading.enumerate():
        if thread.name == "announce drafts":
            thread.join(WAIT_S)
    assert [record.getMessage() for record in caplog.records] == ["drafter mixture is ready after 0 s: drafts are on"]


def test_what_is_begun_is_compiled_by_one_child_and_then_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, names = tmp_path / "trace", ["begun_one", "begun_other"]
    for name in names:
        body = f"with open({str(trace)!r}, 'a') as file: file.write(f'{name}:{{os.getpid()}} ')"
        (tmp_path / f"{name}.py").write_text(f"import os\ndef compile_kernels():\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "available_cores", lambda: 2)
    loader = KernelLoader(in_background=False)
    loader.begin([*names, "batchserve.draft.base"])
    loader.wait_for_begun()
    done = [each.split(":") for each in trace.read_text().split()]
    assert [name for name, _ in done] == names * 2
    assert len({pid for _, pid in done[:2]}) == 1
    assert [int(pid) for _, pid in done[2:]] == [os.getpid()] * 2
    assert loader.is_ready("begun_one")
    loader.close()


@pytest.mark.parametrize(("is_kept", "cores"), [(True, 2), (False, 1)])
def test_nothing_is_begun_that_an_earlier_start_has_kept_or_without_a_core_for_it(
    is_kept: bool, cores: int, module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_is_kept", lambda name: is_kept)
    monkeypatch.setattr(kernels, "available_cores", lambda: cores)
    loader = KernelLoader(in_background=False)
    loader.begin([module(lambda: None)])
    assert not loader._jobs


def test_kernels_of_a_module_that_has_changed_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.numba.config, "CACHE_DIR", "")
    source = tmp_path / "some_kernels.py"
    source.write_text("A = 1\n")
    assert not native.has_all_kernels(source)
    native.note_all_kernels(source)
    native.note_all_kernels(source, "others")
    assert native.has_all_kernels(source)
    assert native.has_all_kernels(source, "others")
    assert not native.has_all_kernels(source, "yet others")
    source.write_text("A = 2\n")
    native.sources_digest.cache_clear()
    native._content.cache_clear()
    native._imports.cache_clear()
    assert not native.has_all_kernels(source)
    native.note_all_kernels(source)
    assert len([*(tmp_path / "__pycache__").iterdir()]) == 1, "what stands for other sources is deleted"


@pytest.mark.parametrize("drafter", ["mixture", "trie", "reference", "jacobi"])
def test_a_drafter_that_has_been_compiled_is_not_begun_again(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"batchserve.draft.{drafter}"
    monkeypatch.setattr(kernels, "available_cores", lambda: 2)
    KernelLoader(in_background=False).prepare(module)
    loader = KernelLoader(in_background=False)
    loader.begin([module])
    assert not loader._jobs
