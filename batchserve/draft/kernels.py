"""Prepares the compiled parts of drafters without stalling requests.

A module with compiled parts that drafting needs has a function `compile_kernels()`. It compiles them, or loads them
from Numba's cache on disk, and does nothing when called again. Compiling takes many seconds, and Numba holds the GIL
for most of them, so a server lets a child process fill the cache and then loads from it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

from batchserve.errors import ConfigError
from batchserve.interpreter import available_cores, python
from batchserve.native.jit import NOT_KEPT, has_all_kernels, note_all_kernels

logger = logging.getLogger(__name__)
CHILD = "from batchserve.draft.kernels import main; main()"
CHILD_NICENESS = 5  # a running step is worth more than having drafts a second earlier


class KernelLoader:
    """Prepares the kernels of modules and tracks which are ready. All calls come from one thread.

    With in_background=False, a module is prepared when it is first asked for, and ConfigError is raised if that fails.
    Otherwise asking never waits, and a module that cannot be prepared is logged and stays unready.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._is_ready: dict[str, bool] = {}
        self._jobs: dict[str, _Job] = {}
        self._begun: list[_Job] = []
        self._announced: set[str] = set()

    def begin(self, modules: Sequence[str]) -> None:
        """Starts a child process that compiles the modules that were never compiled on this machine."""
        wanted = [module for module in modules if _find_compile(module) is not None and not _is_kept(module)]
        if wanted and available_cores() > 1:
            job = _Job(*wanted)
            self._begun.append(job)
            self._jobs.update((module, job) for module in wanted)

    def wait_for_begun(self) -> None:
        """Waits until everything that `begin` started has ended."""
        for job in self._begun:
            job.join()

    def is_ready(self, module: str) -> bool:
        """True if the module's kernels can be called. The first call starts to prepare them."""
        if self._is_ready.get(module, False):
            return True
        if not self._in_background or _find_compile(module) is None:
            self.prepare(module)
        elif module not in self._jobs:
            self._jobs[module] = _Job(module)
        else:
            self._is_ready[module] = self._jobs[module].is_done
        return self._is_ready.get(module, False)

    def announce(self, drafter: str, modules: Sequence[str]) -> None:
        """Logs, once per drafter, when all of its modules that are prepared in the background are ready."""
        jobs = [self._jobs[module] for module in modules if module in self._jobs]
        if jobs and drafter not in self._announced:
            self._announced.add(drafter)
            threading.Thread(target=_announce, args=(drafter, jobs), name="announce drafts", daemon=True).start()

    def prepare(self, module: str) -> None:
        """Prepares a module in the calling thread. Raises ConfigError."""
        if module in self._jobs:
            self._jobs[module].join()
        compile_kernels = _find_compile(module)
        if compile_kernels is not None:
            try:
                compile_all([module])
            except Exception as error:
                raise ConfigError(f"the kernels of {module} cannot be compiled: {error}") from error
        self._is_ready[module] = True

    def close(self) -> None:
        """Stops what is being prepared in the background."""
        for job in self._jobs.values():
            job.close()


class _Job:
    """A thread that prepares modules, after a child process has done the slow part."""

    def __init__(self, *modules: str) -> None:
        self._modules, self._name = modules, ", ".join(modules)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._is_closed = False
        self.is_done = False
        self._thread = threading.Thread(target=self._run, name=f"compile {self._name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.terminate()
        self.join()

    def _run(self) -> None:
        try:
            is_filled = all(map(_is_kept, self._modules)) or self._fill_cache()
            if self._is_closed:
                return
            if not is_filled and getrlimit(RLIMIT_AS)[0] != RLIM_INFINITY:
                # LLVM aborts a process that runs out of memory. Without a limit, compiling only slows the server down.
                logger.warning("%s: not compiled in a server with limited address space (ulimit -v), so requests are "
                               "answered without its drafts", self._name)  # fmt: skip
                return
            compile_all(self._modules)
            self.is_done = True
        except Exception:
            logger.exception("%s: no kernels, so requests are answered without its drafts", self._name)

    def _fill_cache(self) -> bool:
        """Compiles the modules in a child process. Returns True if their kernels can then be loaded."""
        with self._lock:
            if self._is_closed:
                return False
            self._child = subprocess.Popen(
                python(CHILD, *self._modules),
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends, however that happens
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C must reach only the server, which ends its child itself
            )
        with self._child:
            said = (self._child.stderr.read() if self._child.stderr is not None else "").strip().splitlines()
        if self._child.returncode != 0 and not self._is_closed:
            last = (said or ["no reason given"])[-1]
            logger.warning("%s: cannot be compiled beside the server (%s)", self._name, last)
        elif self._child.returncode == 0:  # warnings about kernels that were damaged or cannot be cached
            for line in said:
                logger.warning("%s", line)
        return self._child.returncode == 0 and not any(NOT_KEPT in line for line in said)


def _announce(drafter: str, jobs: Sequence[_Job]) -> None:
    began_s = time.monotonic()
    for job in jobs:
        job.join()
    if all(job.is_done for job in jobs):
        logger.info("drafter %s is ready after %.0f s: drafts are on", drafter, time.monotonic() - began_s)


def _find_compile(module: str) -> Callable[[], None] | None:
    """Returns the module's compile_kernels, or None if it has no compiled parts."""
    found: Callable[[], None] | None = getattr(import_module(module), "compile_kernels", None)
    return found


def _is_kept(module: str) -> bool:
    """True if an earlier start has compiled the kernels of the module as it is now."""
    file = import_module(module).__file__
    return file is not None and has_all_kernels(Path(file))


def compile_all(modules: Sequence[str]) -> None:
    """Compiles the kernels of the modules, or loads them."""
    for module in modules:
        compile_kernels = _find_compile(module)
        if compile_kernels is not None:
            compile_kernels()
            if (file := import_module(module).__file__) is not None:
                note_all_kernels(Path(file))


def end_with_parent() -> None:
    """Ends this process as soon as standard input closes: when the one that started it has ended."""

    def wait() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock the interpreter takes when it shuts down
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Runs the child process: compiles the modules that its command line names."""
    with suppress(OSError):
        os.nice(CHILD_NICENESS)
    end_with_parent()
    compile_all(sys.argv[1:])
