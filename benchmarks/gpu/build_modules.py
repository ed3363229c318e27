"""Compiles the FlashInfer modules that the kit needs, on a machine with nvcc and no GPU, ready to be copied.

    python benchmarks/gpu/build_modules.py --out DIR [--first N]

Afterwards DIR/NAME/NAME.so goes to SITE_PACKAGES/flashinfer/data/aot/NAME/NAME.so of the machine with the GPU, which
then needs no compiler. A module takes about a minute and a half on two cores.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks" / "gpu")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="9.0a", help="compute capability (default: 9.0a, H100 and H200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--first", type=int, metavar="N", help="only the N most important modules")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as stub:
        _prepare(args.arch, args.jobs, Path(stub))
        from benchmarks.gpu.modules import NEEDED, VERSIONS, is_installed

        if not is_installed():
            raise SystemExit(f"needs {', '.join(f'{name}=={version}' for name, version in VERSIONS.items())}")
        for module in NEEDED[: args.first]:
            spec = module.spec()
            target = args.out / spec.name / f"{spec.name}.so"
            if target.exists():
                print(f"{spec.name}: is there", flush=True)
                continue
            started_s = time.monotonic()
            spec.build(verbose=False)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(spec.jit_library_path, target)
            size = target.stat().st_size / (1 << 20)
            print(f"{spec.name}: {time.monotonic() - started_s:.0f} s, {size:.1f} MiB", flush=True)


def _prepare(arch: str, jobs: int, stub: Path) -> None:
    """The environment that FlashInfer's import and its linker read; the caller's own settings are left alone."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", arch)
    os.environ.setdefault("MAX_JOBS", str(jobs))
    from batchserve.attention.cuda_toolkit import name_toolkit

    name_toolkit()
    if not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        raise SystemExit("CUDA_HOME: no nvcc on the path with a libcudart.so beside it; set it")
    if ctypes.util.find_library("cuda") is None:
        # Modules are linked against the driver's library, which only a machine with a GPU has.
        named = "-Wl,-soname,libcuda.so.1"  # as drivers name it: some machines have no other
        command = ["g++", "-shared", named, "-x", "c++", "-o", str(stub / "libcuda.so"), os.devnull]
        subprocess.run(command, check=True)
        flags = os.environ.get("FLASHINFER_EXTRA_LDFLAGS", "")
        os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"{flags} -L{stub}".strip()


if __name__ == "__main__":
    main()
