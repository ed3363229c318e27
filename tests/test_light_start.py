"""What needs no model needs nothing heavy: the command line answers while torch and its like cannot be imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from batchserve.server.lifecycle import GenerationServer
from batchserve.server_config import ServerConfig
from tests.server.fakes import FakeEngine

WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numba", "llvmlite", "numpy"):
            raise ImportError(f"{name} is not wanted here")
sys.meta_path.insert(0, Refuse())
from batchserve.cli import main
sys.exit(main())
"""

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--version"], ["--help"], ["serve", "--help"], ["generate", "--help"], ["tune", "--help"]),
        *(["bench", "--help"], ["bench", "serve", "--help"], ["run-batch", "--help"]),
    ],
    ids=" ".join,
)
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "batchserve" in done.stdout


async def test_a_servers_answer_is_shown_without_anything_heavy() -> None:
    engine: Any = FakeEngine()
    engine.go_on.set()
    server = GenerationServer(ServerConfig(port=0, http_port=0), "0")
    address = await server.bind()
    try:
        await server.open(engine)
        command = [sys.executable, "-c", WITHOUT, "generate", "--server", address, "--prompt", "x"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        shown, said = await process.communicate()
    finally:
        await server.drain()
    assert process.returncode == 0, said
    assert shown == b"ab\n"
    assert engine.arguments["prompt"] == "x"
