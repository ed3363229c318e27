"""Compiles a native program's kernels in other processes at a machine's first start, while torch and the model load."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
from typing import TYPE_CHECKING

from batchserve.interpreter import available_cores, python
from batchserve.native.jit import has_all_kernels, note_all_kernels
from batchserve.program.instructions import Kernel, Op

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
CHILD = "from batchserve.startup.compile_ahead import main; main()"
# What programs of dense models need; other kinds of instructions are compiled where a model has them.
DENSE = (Op.EMBED, Op.NORM, Op.ROTATE, Op.KEEP, Op.ELEMENTWISE, Op.PRODUCT)
# A module whose sources stand for those of a part.
MODULES = {
    "program": "batchserve.program.interpreter",
    "attention": "batchserve.attention.path_kernel",
    "core": "batchserve.scheduler.plan",
}


class CompileAhead:
    """The processes that compile. They end when this process does. Call wait() or close()."""

    def __init__(self, dtype: str, *, is_needed: bool) -> None:
        """dtype: that of the model. is_needed: whether it may become a native program."""
        self._children: list[subprocess.Popen[str]] = []
        # Under a limit of address space, compiling in several processes is no help.
        if is_needed and available_cores() > 1 and getrlimit(RLIMIT_AS)[0] == RLIM_INFINITY:
            wanted = [part for part in MODULES if not has_all_kernels(_source(part), f"{part} {dtype}")]
            self._children = [_start(part, dtype) for part in wanted]

    def wait(self) -> None:
        """Waits until all is compiled. What has failed is compiled where it is needed, which reports the error."""
        for child in self._children:
            with child:  # which closes standard input only at the end
                said = "" if child.stderr is None else child.stderr.read().strip()
            if child.returncode != 0:
                logger.warning("kernels cannot be compiled ahead: %s", (said.splitlines() or ["no reason"])[-1])
        self._children = []

    def close(self) -> None:
        """Ends what still compiles."""
        for child in self._children:
            with child:
                child.kill()
        self._children = []


def _source(part: str) -> Path:
    return Path(import_module(MODULES[part]).__file__ or "")


def _start(part: str, dtype: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        python(CHILD, part, dtype),
        stdin=subprocess.PIPE,  # never written to: it closes when this process ends, however that happens
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _program(dtype: str) -> None:
    from batchserve.program import interpreter
    from batchserve.program.operations import compile_operations
    from batchserve.program.product import kernel_of

    interpreter.compile_kernels()
    compile_operations((op, kernel_of(dtype) if op == Op.PRODUCT else Kernel.FLOATS) for op in DENSE)


def _attention(dtype: str) -> None:
    from batchserve.attention.compiled import ELEMENTS, attend_loop
    from batchserve.attention.matrix_code import can_use_amx
    from batchserve.attention.span_job import compile_kernels

    compile_kernels(ELEMENTS[dtype])
    attend_loop(dtype, has_tiles=dtype == "bfloat16" and can_use_amx())


def _core(dtype: str) -> None:
    from batchserve.startup.kernels import CPU_PARTS

    for part in CPU_PARTS:
        part.compile_kernels()


PARTS: dict[str, Callable[[str], None]] = {"program": _program, "attention": _attention, "core": _core}


def main() -> None:
    """Compiles one part. Ends with the process that started it."""
    from batchserve.draft.kernels import end_with_parent

    end_with_parent()
    part, dtype = sys.argv[1:3]
    PARTS[part](dtype)
    note_all_kernels(_source(part), f"{part} {dtype}")
