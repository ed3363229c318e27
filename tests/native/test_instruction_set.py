"""A lower instruction set than the processor's, for all kernels of a process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.native.instruction_set import FEATURES, LEVELS, choose_instruction_set, level_of
from batchserve.native.vector_code import features, kernel_level
from batchserve.startup.build import build_engine

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of another kind of processor")
WIDTHS = {"sse": 4, "avx2": 8, "avx512": 16, "avx512_bf16": 16, "amx": 16}
THERE = LEVELS[: LEVELS.index(kernel_level()) + 1] if kernel_level() else ()
PROBE = """
import sys
from batchserve import choose_instruction_set
choose_instruction_set(sys.argv[1])
from batchserve.native.vector_code import WIDTH, kernel_level
print(WIDTH, kernel_level())
"""


def fresh(*command: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """A process whose kernels nobody has chosen yet."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_a_level_needs_all_features_of_those_below_it() -> None:
    everything = [name for names in FEATURES.values() for name in names]
    assert level_of([]) == "sse"
    assert level_of(everything) == "amx"
    assert level_of(set(everything) - {"fma"}) == "sse"
    assert level_of(set(everything) - {"avx512bf16"}) == "avx512"


@pytest.mark.parametrize("level", THERE)
def test_kernels_are_compiled_for_the_level_that_was_chosen(level: str) -> None:
    assert fresh("-c", PROBE, level).stdout.split() == [str(WIDTHS[level]), level]


def test_what_the_processor_lacks_is_refused_with_what_it_has() -> None:
    if THERE == LEVELS:
        pytest.skip("this processor has them all")
    done = fresh("-m", "batchserve", "generate", "--instruction-set", LEVELS[len(THERE)], "--prompt", "a")
    assert done.returncode == 2
    bound = f"must be one of auto, {', '.join(THERE)} on this processor"
    assert done.stderr.strip() == f"batchserve: instruction_set = '{LEVELS[len(THERE)]}': {bound}"


def test_it_is_too_late_once_kernels_are_loaded() -> None:
    assert features()
    with pytest.raises(ConfigError, match=r"instruction_set = 'sse': must be chosen before kernels are loaded"):
        choose_instruction_set("sse")
    with pytest.raises(ConfigError, match=r"instruction_set = 'sse': must be chosen before"):
        build_engine(EngineConfig(instruction_set="sse"))
    with pytest.raises(ConfigError, match=r"instruction_set = 'mmx': must be one of"):
        EngineConfig(instruction_set="mmx")


@pytest.mark.slow
@pytest.mark.parametrize("level", THERE[:-1])
def test_programs_are_right_and_have_the_same_bits_at_each_level(level: str, tmp_path: Path) -> None:
    """Compiles every kernel: minutes."""
    run = (
        f"import sys, pytest; from batchserve import choose_instruction_set; choose_instruction_set({level!r}); "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    tests = ["tests/program", "tests/equivalence", "-k", "family or shapes or bits or batch", "--timeout", "3000"]
    done = fresh("-c", run, *tests, "-q", "-x", "-p", "no:cacheprovider", "--basetemp", str(tmp_path), timeout=3400)
    assert done.returncode == 0, done.stdout[-4000:]
