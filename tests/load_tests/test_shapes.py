"""Shapes of load: how many users there are when. In a process of their own, as importing Locust patches the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from types import SimpleNamespace
from locust.exception import LocustError
from load_tests.shapes import SHAPES
from load_tests.targets import grpc_address, http_target, protocol_of

DEFAULTS = dict(num_users=8, spawn_rate=2, run_time=None,
                step_users=2, step_seconds=10, spike_users=16, spike_seconds=5, spike_every=30)

def ticks(name, times, **options):
    try:
        shape = SHAPES[name](SimpleNamespace(**DEFAULTS | options))
    except LocustError as error:
        return str(error)
    found = []
    for time in times:
        shape.get_run_time = lambda: time
        found.append(shape.tick())
    return found

def tried(function, *arguments):
    try:
        found = function(*arguments)
    except LocustError as error:
        return str(error)
    return found if isinstance(found, str) else [found.host, found.port, found.is_tls]

known = {"ticks": ticks, "grpc_address": grpc_address, "http_target": http_target, "protocol_of": protocol_of}
answers = []
for name, arguments, options in json.load(sys.stdin):
    function = known[name]
    answers.append(ticks(*arguments, **options) if name == "ticks" else tried(function, *arguments))
print(json.dumps(answers))
"""
NO_ADDRESS = "must be the server's HOST:PORT, such as 127.0.0.1:50051, or for HTTP http://127.0.0.1:8000"
CASES = [
    ("ticks", ["constant", [0, 1e6]], {}, [[8, 2], [8, 2]]),
    ("ticks", ["constant", [0, 9.9, 10]], {"run_time": 10}, [[8, 2], [8, 2], None]),
    ("ticks", ["constant", [0]], {"num_users": None, "spawn_rate": None}, [[1, 1]]),
    ("ticks", ["steps", [0, 9.9, 10, 25, 39.9, 40]], {}, [[2, 2], [2, 2], [4, 2], [6, 2], [8, 2], None]),
    ("ticks", ["steps", [0, 10, 20, 30]], {"step_users": 3}, [[3, 2], [6, 2], [8, 2], None]),
    ("ticks", ["steps", [14, 15]], {"run_time": 15}, [[4, 2], None]),
    ("ticks", ["spikes", [0, 24.9, 25, 29.9, 30, 55]], {}, [[8, 16], [8, 16], [24, 16], [24, 16], [8, 16], [24, 16]]),
    ("ticks", ["spikes", [0, 61]], {"run_time": 60}, [[8, 16], None]),
    ("ticks", ["soak", [0, 3599, 3600]], {"num_users": 120}, [[120, 2], [120, 2], None]),
    ("ticks", ["soak", [5000]], {"run_time": 7200}, [[8, 8 / 60]]),
    ("ticks", ["steps", [0]], {"step_users": 0}, "--step-users = 0: must be at least 1"),
    ("ticks", ["spikes", [0]], {"spike_every": 5}, "--spike-seconds = 5: must be below --spike-every = 5"),
    ("protocol_of", ["http://h:1", "auto"], {}, "http"),
    ("protocol_of", ["https://h", "auto"], {}, "http"),
    ("protocol_of", ["h:1", "auto"], {}, "grpc"),
    ("protocol_of", ["grpc://h:1", "auto"], {}, "grpc"),
    ("protocol_of", ["http://h:1", "grpc"], {}, "grpc"),
    ("protocol_of", ["h:1", "http"], {}, "http"),
    ("grpc_address", ["http://[::1]:5/"], {}, "[::1]:5"),
    ("grpc_address", ["h"], {}, f"host = 'h': {NO_ADDRESS}"),
    ("http_target", ["http://h:8000/", False], {}, ["h", 8000, False]),
    ("http_target", ["http://[::1]:8000", False], {}, ["::1", 8000, False]),
    ("http_target", ["https://h", True], {}, ["h", None, True]),
    ("http_target", ["h:8000", False], {}, ["h", 8000, False]),
    ("http_target", ["h:8000", True], {}, ["h", 8000, True]),
    ("http_target", ["http://h/v1", False], {}, f"host = 'http://h/v1': {NO_ADDRESS}"),
    ("http_target", ["http://u:p@h", False], {}, f"host = 'http://u:p@h': {NO_ADDRESS}"),
    ("http_target", ["http://h:99999", False], {}, f"host = 'http://h:99999': {NO_ADDRESS}"),
    ("http_target", ["http://h", True], {}, "host = 'http://h': must be https:// with --server-tls and the options of"),
]


@pytest.fixture(scope="module")
def answers() -> list[object]:
    asked = json.dumps([case[:3] for case in CASES])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=asked, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{name}{args}{options}" for name, args, options, _ in CASES]
)
def test_the_answer(answers, number):
    expected = CASES[number][3]
    if isinstance(expected, str):
        assert str(answers[number]).startswith(expected)
    else:
        assert answers[number] == expected
