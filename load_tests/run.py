"""Load a real server with Locust, speculation on against off: `python -m load_tests.run [--smoke] [-- SERVER OPTIONS]`.

Starts the server on a free loopback port, runs the stages of load_tests/locustfile.py (about a minute), prints one
table, and writes a report with plots to HTML, and what it has measured to OUT if that is given. Exits non-zero when any
request failed, a stage answered none, or the server did not end well. `--smoke` takes 10 seconds and asks for shorter
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from rich.console import Console
from rich.table import Table

from batchserve.errors import ConfigError
from batchserve.files import check_writable
from batchserve.v1 import generation_pb2 as pb
from batchserve.v1 import generation_pb2_grpc
from load_tests.report import make_report
from load_tests.server import ServerError, running_server
from load_tests.stages import USER_COUNTS

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
STAGE_S, SMOKE_STAGE_S = 10.0, 10.0 / (2 * len(USER_COUNTS))
MAX_TOKENS, SMOKE_MAX_TOKENS = 128, 32  # short stages need short answers, or a slow machine would end none in time
STOP_TIMEOUT_S = 10.0  # for the streams that run when the last stage ends
LOCUST_SPARE_S = 60.0  # Locust's own start and end


def model_info(address: str) -> dict[str, Any]:
    """What the server serves, as plain data."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10.0)
    names = ("model", "architecture", "dtype", "attention_backend", "drafter", "decoding_length", "max_num_seqs")
    return {name: getattr(info, name) for name in names}


def run_locust(address: str, stage_s: float, max_tokens: int) -> tuple[int, list[dict[str, Any]]]:
    """Locust's exit status and what each stage measured."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.json"
        command = [
            *(sys.executable, "-m", "locust", "-f", str(ROOT / "load_tests" / "locustfile.py")),
            *("--headless", "--only-summary", "--host", address, "--stop-timeout", f"{STOP_TIMEOUT_S:.0f}"),
            *("--exit-code-on-error", "1", "--loglevel", "WARNING"),
            *("--stage-seconds", str(stage_s), "--max-tokens", str(max_tokens), "--samples-out", str(samples)),
            *("--seed", "0"),  # the server is a fresh one
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        timeout_s = 2 * len(USER_COUNTS) * stage_s + STOP_TIMEOUT_S + LOCUST_SPARE_S
        status = subprocess.run(command, env=environment, cwd=ROOT, timeout=timeout_s, check=False).returncode
        stages: list[dict[str, Any]] = json.loads(samples.read_text()) if samples.exists() else []
    return status, stages


def print_table(stages: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Latencies in ms, as the clients see them: p50 / p90 / p99")
    columns = ("users", "speculation", "requests", "failed", "tokens/s", "TTFT", "inter-token", "end-to-end", "length")
    for name in columns:
        table.add_column(name, justify="left" if name == "speculation" else "right")

    def latency(values: dict[str, float]) -> str:
        return (
            " / ".join(f"{values[name]:.{0 if values[name] >= 100 else 1}f}" for name in ("p50", "p90", "p99"))
            if values
            else "-"
        )

    for stage in sorted(stages, key=lambda row: (row["users"], row["speculation"])):
        table.add_row(
            str(stage["users"]),
            stage["speculation"],
            f"{stage['measured_requests']} of {stage['requests']}",
            str(stage["failures"]),
            f"{stage['tokens_per_s']:.0f}",
            *(latency(stage[name]) for name in ("ttft_ms", "inter_token_ms", "end_to_end_ms")),
            f"{stage['acceptance_length'] or 0:.2f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    console.print(
        "requests: those whose latencies count, as they lie wholly inside a stage's measured time, of all that were "
        "answered. length: tokens a verified step. Client and server share this machine's cores; a delta of n tokens "
        "that comes g after the one before counts as n tokens of g / n."
    )


def report_of(stages: Sequence[dict[str, Any]], info: dict[str, Any], options: Sequence[str]) -> dict[str, Any]:
    return {
        "server": info,
        "server_options": list(options),
        "machine": {
            "platform": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "stages": list(stages),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="10 seconds")
    parser.add_argument("--stage-seconds", type=float, help=f"of each of the stages (default: {STAGE_S:g})")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--html", type=Path, default=Path("load_report.html"), help="the report (default: %(default)s)")
    parser.add_argument("server_options", nargs="*", help="for batchserve serve, behind --")
    args = parser.parse_args(arguments)
    if args.stage_seconds is not None and not 0 < args.stage_seconds < float("inf"):
        parser.error(f"--stage-seconds = {args.stage_seconds}: must be finite and > 0")
    stage_s = args.stage_seconds or (SMOKE_STAGE_S if args.smoke else STAGE_S)
    for name, path in (("--out", args.out), ("--html", args.html)):
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                check_writable(path, name)
        except OSError as error:
            parser.error(f"{name} = {path}: must be a file in a folder that exists or can be made ({error.strerror})")
        except ConfigError as error:
            parser.error(str(error))
    # As an exception, so that the server is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print("load: starting the server", flush=True)
    try:
        with running_server(["--model", "bundled", "--wait-for-drafter", *args.server_options]) as address:
            print(f"load: serving on {address}", flush=True)
            info = model_info(address)
            status, stages = run_locust(address, stage_s, SMOKE_MAX_TOKENS if args.smoke else MAX_TOKENS)
    except (ServerError, subprocess.TimeoutExpired) as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print_table(stages)
    measured = report_of(stages, info, args.server_options)
    if args.out is not None:
        args.out.write_text(json.dumps(measured, indent=2) + "\n")
        print(f"load: written to {args.out}")
    args.html.write_text(make_report(measured))
    print(f"load: report written to {args.html}")
    failures = sum(stage["failures"] for stage in stages)
    unanswered = [stage for stage in stages if not stage["requests"]]
    if status or failures or unanswered or not stages:
        print(f"load: FAILED ({failures} failures, {len(unanswered)} stages without an answer)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
