"""Runs everything that needs a GPU, the most important first, in the minutes given.

    python benchmarks/gpu/run.py --minutes 9 --out DIR [--replay DIR]
    python benchmarks/gpu/run.py --dry-run --out DIR        # on a CPU: that all of it runs, not what it measures

Every part is a process of its own: one that fails, hangs or loses the device leaves the others alone. Its results are
in DIR/PART.json as soon as they are there, DIR/summary.txt is what they come to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.kit import Kit

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# A program's own folder is in the path; its modules must not be found under their short names.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks" / "gpu"]
# Whether there is a GPU is then asked without CUDA, which would be of no use in the parts' processes afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from batchserve.native.threads import apply_thread_policy  # noqa: E402
from benchmarks.gpu.arguments import PARTS, parse  # noqa: E402

apply_thread_policy()

MODULES = {"transformers": "baseline"}  # where the file has another name than the part
COMPILE_SHARE = 0.4  # of the time
MAX_STARTS = 6  # of one part: each start after a fault of the device skips the cell at fault
HANG_S = 40.0  # without a sign of life of a cell: engines give one for each graph that they capture, cells for each run
MAX_HANGS = 2  # of one part, whose time is given to it again, out of all that is left
POLL_S = 0.5
KILL_S = 20.0  # until a process that was killed is given up: the driver may never let it go
DEVICE_LOST = 77
PRELOAD = ("torch", "transformers", "transformers.models.llama.modeling_llama", "batchserve.llm", "numba")

# Modules whose kernels all parts call.
KERNELS = ("runner.row_layout", "attention.slot_kernels", "sampling.argmax_kernel", "sampling.draw_kernel",
           "sampling.device_columns", "scheduler.standing", "scheduler.time_kernels", "draft.mixture")  # fmt: skip
PRODUCT_COMPILERS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments, __doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    end_s = started_s + 60 * args.minutes
    if not args.compile:  # a module that does not load would be compiled instead, for minutes
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    compilers = _begin_kernels(is_dry=args.dry_run)
    for name in PRELOAD:
        importlib.import_module(name)
    if args.dry_run:  # what steps take is of no use then
        importlib.import_module("batchserve.startup.measure_steps").MAX_SECONDS = 0.0
    _end_kernels(compilers, COMPILE_SHARE * (end_s - time.monotonic()))
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as scratch:
        from benchmarks.gpu.kit import Kit

        kit = Kit(
            args.dry_run,
            Path(scratch),
            args.replay,
            args.backend,
            args.compile,
            is_eager=args.eager,
            cells=args.cells,
            most_rows=args.most_rows,
        )
        start = _way_to_start(kit)
        if start is None:
            _say("no process could use the device; nothing was measured")
            return 1
        if args.compile and not args.dry_run:
            _compile_modules(start, COMPILE_SHARE * (end_s - time.monotonic()))
        for place, name in enumerate(args.parts):
            left = end_s - time.monotonic()
            limit_s = left * PARTS[name] / sum(PARTS[part] for part in args.parts[place:])
            _say(f"{name}: at most {limit_s:.0f} s")
            path = args.out / f"{name}.json"
            _begin(path, is_resumed=args.resume)
            _run_part(start, name, kit, path, limit_s, min(left, limit_s + MAX_HANGS * HANG_S))
            _summarise(args.out)
    _say(f"{time.monotonic() - started_s:.0f} s; {args.out}/summary.txt:\n{(args.out / 'summary.txt').read_text()}")
    return 0


def _begin_kernels(*, is_dry: bool) -> list[subprocess.Popen[bytes]]:
    """Compile the host's kernels side by side, each module in a process of its own, and our products' on the device,
    into caches on disk.
    """
    if (os.cpu_count() or 1) < len(KERNELS):
        return []  # they are compiled one after the other just as fast
    program = "import sys; from importlib import import_module; import_module(sys.argv[1]).compile_kernels()"
    commands = [["-c", program, f"batchserve.{name}"] for name in KERNELS]
    if not is_dry:
        commands += [
            ["-m", "benchmarks.gpu.products", str(i), str(PRODUCT_COMPILERS)] for i in range(PRODUCT_COMPILERS)
        ]
    return [subprocess.Popen([sys.executable, *command], cwd=ROOT) for command in commands]


def _end_kernels(compilers: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Load them, and compile what is not there: processes that are forked have them from the start.

    Whoever is not done after limit_s, on the device or not, is given up: the parts compile what is missing.
    """
    begun_s = time.monotonic()
    for process in compilers:
        try:
            process.wait(max(0.0, begun_s + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            _say(f"given up: {' '.join(map(str, process.args[1:]))}")  # type: ignore[index]
    for name in KERNELS:
        importlib.import_module(f"batchserve.{name}").compile_kernels()
    _say(f"waited {time.monotonic() - begun_s:.0f} s for kernels")


def _compile_modules(context: Any, limit_s: float) -> None:
    """FlashInfer's that engines run on, side by side, before the clock of any cell that needs one runs."""
    from benchmarks.gpu.modules import NEEDED, OF_ENGINES, is_installed

    if not is_installed():
        return
    begun_s = time.monotonic()
    _say(f"compiling modules: at most {limit_s:.0f} s")
    processes = [context.Process(target=_compile_module, args=(module,)) for module in NEEDED[:OF_ENGINES]]
    try:
        for process in processes:
            _start(process)
        for process in processes:
            process.join(max(0.1, limit_s - (time.monotonic() - begun_s)))
        states = [process.exitcode for process in processes]
    finally:
        for process in processes:
            _kill(process)
    words = {0: "ready", None: "not done in time"}
    for module, state in zip(NEEDED, states, strict=False):
        _say(f"{module}: {words.get(state, 'failed')}")


def _compile_module(module: Any) -> None:
    from batchserve.attention.cuda_toolkit import name_toolkit

    os.setsid()
    name_toolkit()  # nvcc on the path may be a script, whose folder is not the toolkit's
    spec = module.spec()
    if spec.try_load() is None:
        spec.build(verbose=False)


def _way_to_start(kit: Any) -> Any:
    """The context that processes are started by: a fork has everything imported already, if CUDA lets it live."""
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        process = context.Process(target=_touch, args=(kit,))
        _start(process)
        process.join(60)
        if process.exitcode == 0:
            return context
        _say(f"a process made by {method} cannot use the device (exit status {process.exitcode})")
        process.kill()
    return None


def _touch(kit: Any) -> None:
    import torch

    torch.zeros(1, device=kit.device).item()


def _start(process: Any) -> None:
    with warnings.catch_warnings():
        # NumPy's threads are there already. They wait for work and hold no lock that a fork could need.
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        process.start()


def _fit(kit: Kit, name: str, out: Path) -> Kit:
    """The kit without the kernels that `correctness` has found wrong or another part has hung on, in this run or before
    into the same folder; without graphs where those of all kernels are wrong.
    """
    from benchmarks.gpu.verdict import has_no_graphs, hung, unfit

    data = {part: json.loads(path.read_text()) for part in PARTS if (path := out / f"{part}.json").exists()}
    if name == "correctness" or not data:
        return kit
    checked = data.pop("correctness", {"cells": {}})
    is_eager = kit.is_eager or has_no_graphs(checked)
    found = {kernel: f"{cell} in correctness.json" for kernel, cell in unfit(checked, is_eager=is_eager).items()}
    for part, of_part in data.items():
        found |= {kernel: f"{cell} in {part}.json" for kernel, cell in hung(of_part).items()}
    if is_eager:
        _say(f"{name}: all steps are eager")
    for kernel, where in found.items():
        _say(f"{name}: without {kernel}, because of {where}")
    return dataclasses.replace(kit, unfit=frozenset(found), is_eager=is_eager)


def _begin(path: Path, *, is_resumed: bool) -> None:
    """Nothing is left of an earlier call, but where this one goes on all that the end of its time did not cut off.

    It may have been killed itself: that is no fault of the cell that was under way.
    """
    from benchmarks.gpu.kit import partial_path

    partial_path(path).unlink(missing_ok=True)
    if not is_resumed:
        path.unlink(missing_ok=True)
    elif path.exists():
        data = json.loads(path.read_text())
        under_way = data.pop("under_way", None)
        data["cells"] = {
            name: cell for name, cell in data["cells"].items() if name != under_way and not cell.get("is_cut")
        }
        path.write_text(json.dumps(data, indent=1) + "\n")


def _run_part(context: Any, name: str, kit: Any, path: Path, limit_s: float, max_s: float) -> None:
    """Start it until it is through, at most for limit_s; the time that it hung is given to it again, up to max_s."""
    from benchmarks.gpu.kit import SOFT_SHARE

    begun_s = time.monotonic()
    for _ in range(MAX_STARTS):
        left = limit_s - (time.monotonic() - begun_s)
        fit = _fit(kit, name, path.parent)
        process = context.Process(target=_part, args=(name, fit, path, time.monotonic() + SOFT_SHARE * left))
        _start(process)
        try:
            is_hung = _hangs(process, path, kit.beat_path, left)
            status = process.exitcode
        finally:  # Ctrl-C too: it is not in our process group
            _kill(process, path)
        if status is None and not is_hung:
            _note_end(path, f"stopped after {limit_s:.0f} s")
            return
        if status == 0:
            return
        if is_hung:
            _note_hang(path, f"hung: no sign of life for {HANG_S:.0f} s")
            limit_s = min(limit_s + HANG_S, max_s)
        _say(f"{name}: {'it hung' if is_hung else f'exit status {status}'}")
        if status == 1 or time.monotonic() - begun_s > SOFT_SHARE * limit_s:
            return  # an error of the part itself, which is in its file
    _note_end(path, f"the device failed {MAX_STARTS} times")


def _hangs(process: Any, path: Path, beat: Path, left_s: float) -> bool:
    """Wait for the process's end, at most so long; True as soon as a cell hangs that has nothing to compile."""
    end_s = time.monotonic() + left_s
    seen, heard_s = None, time.monotonic()
    while process.exitcode is None and time.monotonic() < end_s:
        process.join(min(POLL_S, max(0.0, end_s - time.monotonic())))
        signs = [each.stat().st_mtime_ns if each.exists() else 0 for each in (path, beat)]
        if signs != seen:
            seen, heard_s = signs, time.monotonic()
        elif process.exitcode is None and time.monotonic() - heard_s > HANG_S and _is_in_a_cell(path):
            return True
    return False


def _is_in_a_cell(path: Path) -> bool:
    data = json.loads(path.read_text()) if path.exists() else {}
    return "under_way" in data and data["under_way"] not in data["about"].get("compiles", ())


def _kill(process: Any, path: Path | None = None) -> None:
    """The part and whatever it has started, as it leads a process group of its own; and what of its file is half."""
    from benchmarks.gpu.kit import partial_path

    with contextlib.suppress(ProcessLookupError):  # none that has only begun, or that left nothing behind
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(KILL_S)
    if process.exitcode is None:
        _say(f"process {process.pid} does not end; what it has of the device is not free again")
    if path is not None:
        partial_path(path).unlink(missing_ok=True)


def _note_end(path: Path, why: str) -> None:
    """Write into a part's file why it ended, in place of the part that no longer can."""
    _note(path, {"error": why}, {"error": why, "is_cut": True})


def _note_hang(path: Path, why: str) -> None:
    """The part goes on behind the cell."""
    _note(path, {}, {"error": why, "is_fault": True})


def _note(path: Path, of_part: dict[str, Any], of_cell: dict[str, Any]) -> None:
    data: dict[str, Any] = {"part": path.stem, "cells": {}, "left_out": []}
    if path.exists():
        data = json.loads(path.read_text())
    data |= of_part
    under_way, kernel = data.pop("under_way", None), data.pop("on", None)
    if under_way is not None:
        kept = data["cells"].get(under_way, {})
        data["cells"][under_way] = {**kept, **of_cell, **({"hung_on": kernel} if "is_fault" in of_cell else {})}
    path.write_text(json.dumps(data, indent=1) + "\n")


def _part(name: str, kit: Any, path: Path, deadline_s: float) -> None:
    """The whole life of a part's process."""
    os.setsid()
    from benchmarks.gpu.kit import DeviceFaultError, Report, environment

    try:
        report = Report(path, deadline_s, kit.cells)
        report.about(environment=environment(kit))
        importlib.import_module(f"benchmarks.gpu.{MODULES.get(name, name)}").run(kit, report)
    except DeviceFaultError as error:
        _say(f"{name}: {error}")
        status = DEVICE_LOST
    except Exception:
        _note_end(path, traceback.format_exc()[-2000:])
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a device that was lost, or a thread that was left, must not hold up the end


def _summarise(out: Path) -> None:
    from benchmarks.gpu.summary import summary

    try:
        text = summary(out)
    except Exception as error:  # the parts behind it are worth more than a page about those before
        text = f"the summary failed: {error!r}\n"
    (out / "summary.txt").write_text(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_status = main()
    if multiprocessing.active_children():  # that do not end: the usual way out would wait for them
        os._exit(exit_status)
    sys.exit(exit_status)
