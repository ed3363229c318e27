"""Compiled kernels are kept, and only what was kept whole, by us and of these sources is loaded."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchserve.native import jit as native
from batchserve.native.jit import KernelFiles, sources_digest

NUM_KERNELS = 20
KERNEL = """
from numba import types
from batchserve.native.jit import {decorator_name}
@{decorator}
def kernel(x):
    return 3 * x + {number}
"""
RUN = """
import logging, sys
from importlib import import_module
logging.basicConfig(level=logging.INFO, format="%(message)s")
sys.path.insert(0, sys.argv[1])
found = []
for number in range(int(sys.argv[2])):
    kernel = import_module(f"kernel_{number}").kernel
    found.append(kernel.ctypes(number) if hasattr(kernel, "ctypes") else kernel(number))
print(found == [4 * number for number in range(int(sys.argv[2]))])
"""
REAL = """
import logging
import numpy as np
logging.basicConfig(level=logging.INFO, format="%(message)s")
from batchserve.draft.text_index import TextIndex
index = TextIndex(1000)
index.append(np.arange(50, dtype=np.int32) % 7)
print(index.tokens().tolist()[:50] == [i % 7 for i in range(50)])
"""
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
AGAIN = "compiled again"

pytestmark = pytest.mark.faults


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A folder of modules with one kernel each; every fourth is a callback."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(NUM_KERNELS):
        name = "cfunc" if number % 4 == 0 else "njit"
        decorator = "cfunc(types.int64(types.int64), cache=True)" if name == "cfunc" else "njit(cache=True)"
        source = KERNEL.format(decorator_name=name, decorator=decorator, number=number)
        (folder / f"kernel_{number}.py").write_text(source)
    return folder


def run(code: str, cache: Path, *arguments: object) -> str:
    """What it said on standard error; its answers must be right."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    return done.stderr


def flip(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def test_damaged_kernels_are_compiled_again_with_a_note(kernels: Path, tmp_path: Path) -> None:
    cache, chance = tmp_path / "cache", random.Random(14)
    assert run(RUN, cache, kernels, NUM_KERNELS) == ""
    files = sorted(cache.rglob("*.nbc"))
    assert len(files) == NUM_KERNELS
    before = {file: file.read_bytes() for file in files}
    assert run(RUN, cache, kernels, NUM_KERNELS) == ""
    assert {file: file.read_bytes() for file in files} == before, "loaded, and not compiled again"
    for file in files[8:]:
        flip(file, chance)
    files[0].write_bytes(b"")
    files[1].write_bytes(before[files[1]][:-100])
    files[2].write_bytes(before[files[3]])
    files[4].chmod(0o666)
    for file, other in ((files[5], files[6]), (files[7], Path("/dev/zero"))):
        file.unlink()
        file.symlink_to(other)
    said = run(RUN, cache, kernels, NUM_KERNELS).splitlines()
    assert 1 <= len(said) <= 3, "once for each reason"
    assert all(AGAIN in line for line in said)
    assert run(RUN, cache, kernels, NUM_KERNELS) == "", "and kept"
    assert before[files[6]] == files[6].read_bytes(), "what a link led to is as it was"
    assert not any(file.is_symlink() for file in files)


def test_the_same_of_our_own_kernels(tmp_path: Path) -> None:
    assert run(REAL, tmp_path) == ""
    chance = random.Random(41)
    for file in tmp_path.rglob("*.nbc"):
        flip(file, chance)
    assert AGAIN in run(REAL, tmp_path)
    assert run(REAL, tmp_path) == ""


@pytest.mark.parametrize("place", ["full", "file", "read-only"])
def test_where_nothing_can_be_kept_kernels_work_all_the_same(
    kernels: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    if place == "file":  # in the folder's place; Numba goes on to the user's
        cache.write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        (kernels / "__pycache__").write_text("")
    elif place == "read-only" and os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    elif place == "read-only":
        cache.mkdir(mode=0o500)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        kernels.chmod(0o500)
    (line,) = run(LIMITED + RUN if place == "full" else RUN, cache, kernels, 3).splitlines()
    assert "compiled kernels are not kept for the next start" in line
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".nbc", ".partial")]


def test_processes_may_begin_at_the_same_time(kernels: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", RUN, str(kernels), "8"]
    all_started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(3)
    ]
    assert [process.communicate(timeout=300)[0] for process in all_started] == [b"True\n"] * 3
    assert run(RUN, tmp_path / "cache", kernels, 8) == ""


def test_what_was_compiled_from_other_sources_is_replaced(tmp_path: Path) -> None:
    old, new = KernelFiles(tmp_path, "f-1.py311", "a" * 64), KernelFiles(tmp_path, "f-1.py311", "b" * 64)
    for key in ("int64", "float64"):
        old.save(key, f"of {key}")
    assert (old.load("int64"), old.load("float64"), old.load("bool")) == ("of int64", "of float64", None)
    assert new.load("int64") is None
    new.save("int64", "newer")
    assert new.load("int64") == "newer"
    assert len(list(tmp_path.iterdir())) == 1
    new.flush()
    assert list(tmp_path.iterdir()) == []


def test_sources_are_all_that_a_module_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "batchserve"
    (package / "inner").mkdir(parents=True)
    sources = {
        "__init__": "import batchserve.far",
        "top": "from batchserve.inner import (\n    one,\n    two,\n)\nfrom batchserve.far import WIDTH",
        "far": "import batchserve.inner.three\nWIDTH = 8",
        "inner/one": "",
        "inner/two": "def f():\n    from batchserve.top import g",
        "inner/three": "",
        "inner/unused": "",
    }
    for name, content in sources.items():
        (package / f"{name}.py").write_text(content)
    monkeypatch.setattr(native, "PACKAGE", package)

    def digest() -> str:
        for function in (sources_digest, native._imports, native._content):
            function.cache_clear()
        return sources_digest(package / "top.py")

    last = digest()
    for name in sources:
        (package / f"{name}.py").write_text(sources[name] + "\n")
        assert (digest() != last) == (name not in ("__init__", "inner/unused")), name
        last = digest()


def test_every_kernel_is_kept_in_this_way() -> None:
    numbas = re.compile(r"from numba\S* import .*\b(?:jit|njit|cfunc|vectorize|guvectorize)\b|numba\.(?:n?jit|cfunc)\(")
    sources = [file for file in native.PACKAGE.rglob("*.py") if file.name != "jit.py"]
    assert [file for file in sources if numbas.search(file.read_text())] == []
