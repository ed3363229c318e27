"""`batchserve doctor`: prints the machine as an engine sees it and what it would choose, for questions and bug reports.

Neither torch nor a model is loaded, so it takes a second or two.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batchserve.config import EngineConfig, MiB
from batchserve.free_memory import free_memory_bytes
from batchserve.native.cores import cpu_quota, default_threads, physical_cores, processor_name, usable_cores
from batchserve.native.instruction_set import multiplies_bfloat16
from batchserve.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

LIBRARIES = (
    "numpy", "numba", "llvmlite", "grpcio", "tokenizers", "torch", "transformers", "triton", "flashinfer-python",
)  # fmt: skip
READ_BYTES, READS = 256 << 20, 3
PRODUCTS = {
    "FLOATS": "vectors of float32",
    "WIDENED": "vectors of float32, to which bfloat16 weights are widened",
    "PAIRS": "vectors of bfloat16 pairs",
    "TILES": "tiles of bfloat16 (AMX)",
}


def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints the report and returns the exit status."""
    config = EngineConfig(cache_dir=arguments.cache_dir)
    for name, line in report(config):
        print(f"{name + ':':14} {line}")
    return 0


def report(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yields (subject, what is known of it)."""
    yield "batchserve", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "libraries", ", ".join(f"{name} {version}" for name in LIBRARIES if (version := _version(name)))
    yield "processor", processor_name() or platform.machine()
    yield "instructions", _instructions()
    yield "cores", _cores()
    yield "memory", _memory()
    yield "caches", _caches(Path(config.cache_dir))
    yield "GPU", _gpu()
    yield "choices", _choices()


def _version(library: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(library)
    return ""


def _instructions() -> str:
    from batchserve.attention.matrix_code import can_use_amx, compiles_matrices
    from batchserve.native.vector_code import WIDTH, kernel_level
    from batchserve.program.product import BF16_KERNEL

    line = f"{kernel_level() or platform.machine()}, {WIDTH} floats at once; bfloat16 products in "
    line += PRODUCTS[BF16_KERNEL.name]
    if compiles_matrices() and not can_use_amx():
        line += "; the system does not let this process use the processor's tiles"
    return line


def _cores() -> str:
    quota = cpu_quota()
    line = f"{len(usable_cores())} of {os.cpu_count()} usable, {physical_cores()} physical"
    line += "" if quota is None else f", a quota of {quota:g} cores of CPU time"
    asked = os.environ.get("OMP_NUM_THREADS")
    line += "" if asked is None else f", OMP_NUM_THREADS = {asked}"
    return f"{line}; load {os.getloadavg()[0]:.1f}"


def _memory() -> str:
    free = free_memory_bytes()
    line = "free memory unknown" if free is None else f"{free / MiB:.0f} MiB can be had"
    with suppress(OSError):
        line += f"; huge pages {Path('/sys/kernel/mm/transparent_hugepage/enabled').read_text().strip()}"
    threads = default_threads()
    return f"{line}; {threads} threads read {read_speed(threads) / 1e9:.0f} GB/s"


def read_speed(threads: int) -> float:
    """Returns the bytes a second that so many threads read from memory together, as products read weights."""
    memory = np.ones(READ_BYTES // 8, np.int64)
    parts = np.array_split(memory, threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READS):
            began_s = time.perf_counter()
            list(pool.map(np.sum, parts))
            best_s = min(best_s, time.perf_counter() - began_s)
    return READ_BYTES / best_s


def _caches(folder: Path) -> str:
    from numba import config as numba_config

    programs = [*(folder / "programs").glob("*.program")]
    size = sum(path.stat().st_size for path in programs)
    tables = len([*(folder / "step_time").glob("*.table")])
    kernels_folder = Path(numba_config.CACHE_DIR) if numba_config.CACHE_DIR else Path(__file__).parent
    kernels = [*kernels_folder.rglob("*.nbc")]
    kernel_bytes = sum(path.stat().st_size for path in kernels)
    return (
        f"{len(programs)} programs ({size / MiB:.0f} MiB) and {tables} tables of step times in {folder}; "
        f"{len(kernels)} compiled kernels ({kernel_bytes / MiB:.0f} MiB) in {kernels_folder}"
    )


def _gpu() -> str:
    """Asks the driver, since importing torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver"
    count, name, version = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_int()
    if (status := driver.cuInit(0)) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return f"the CUDA driver reports error {status}"
    driver.cuDriverGetVersion(ctypes.byref(version))
    found = []
    for number in range(count.value):
        device = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), number) == 0:
            driver.cuDeviceGetName(name, len(name), device)
            found.append(name.value.decode(errors="replace"))
    return f"{', '.join(found) or 'none'} (CUDA {version.value // 1000}.{version.value % 1000 // 10})"


def _choices() -> str:
    dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    why = "the processor has AVX-512" if multiplies_bfloat16() else "the processor lacks AVX-512 (BW, DQ, VL)"
    return f"on a CPU {dtype} ({why}), on the number of threads up to {default_threads()} that measures fastest"
