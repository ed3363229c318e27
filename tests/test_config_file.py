"""Options from a file."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchserve.cli import _parser, main
from batchserve.config import EngineConfig
from batchserve.engine.async_engine import AsyncEngine
from batchserve.options import make_config
from batchserve.server import lifecycle
from batchserve.server_config import ServerConfig

pytestmark = pytest.mark.faults


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that `serve` would have started with."""
    configs: list[Any] = []

    async def start(config: EngineConfig, on_progress: Any, *, own_process: bool, launched: Any) -> None:
        configs.append(config)

    async def serve(config: ServerConfig, version: str, start_engine: Any, announce: Any) -> None:
        configs.append(config)
        await start_engine()

    monkeypatch.setattr(AsyncEngine, "start", start)
    monkeypatch.setattr(lifecycle, "serve", serve)
    return configs


def test_options_come_from_a_file_and_flags_take_precedence(served: list[Any], tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "port: 7001\nhttp: false\nmax_num_seqs: 8\nmax-waiting: 32\nkv-cache-memory: 64MiB\nadaptive: off\n"
        "drafter: trie\nmax-itl-ms: 12.5\nmax-scope-bytes: 1MiB\nengine-process: false\n"
    )
    assert main(["serve", "--config", str(path), "--max-waiting", "5"]) == 0
    server, engine = served
    assert (server.port, server.has_http) == (7001, False)
    assert (engine.max_num_seqs, engine.max_waiting, engine.kv_cache_memory) == (8, 5, 64 << 20)
    assert (engine.adaptive, engine.drafter, engine.max_itl_ms) == (False, "trie", 12.5)
    assert engine.draft.max_scope_bytes == 1 << 20
    path.write_text("")
    assert main(["serve", "--config", str(path)]) == 0
    assert served[2:] == [ServerConfig(), EngineConfig()]


def test_every_option_can_be_in_a_file():
    parser = _parser()
    serve = parser.parse_args(["serve"]).options_parser
    names = {name for name in serve._option_string_actions if name.startswith("--") and not name.startswith("--no-")}
    for config in (ServerConfig, EngineConfig):
        assert make_config(config, parser.parse_args(["serve"])) == config()
    assert {"--max-num-seqs", "--keys", "--jacobi-window", "--otlp-endpoint"} < names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "must be YAML"),
        ("- 1", "must be options and their values"),
        ("max-num-sequences: 8", "max-num-sequences: must be an option of serve"),
        ("no-http: true", "no-http: must be an option of serve"),
        ("config: other.yaml", "config: must be an option of serve"),
        ("max-num-seqs: many", "max-num-seqs = 'many': argument --max-num-seqs: invalid int value: 'many'"),
        ("drafter: oracle", "drafter = 'oracle': argument --drafter: invalid choice"),
        ("http: 1", "http = 1: must be true or false"),
        ("model: {a: 1}", "model = {'a': 1}: must be a text"),
        ("served-model-name: yes", "served-model-name = True: must be a text, in quotes if YAML takes it for"),
        ("served-model-name: 1.10", "served-model-name = 1.1: must be a text, in quotes if YAML takes it for"),
        ("default-draft-scope: [a, b]", "default-draft-scope = ['a', 'b']: must be a text"),
        ("port:", "port = None: must be a text or a number"),
        ("port: 1\nport: 2", "must be YAML (port is there twice)"),
        ("port: 99999", "port = 99999: must be an integer in 0..65535"),
    ],
    ids=range(16),
)
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "99999" in message or str(path) in said


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(capsys: pytest.CaptureFixture[str], shell: str):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--max-num-seqs" in script
    assert "warm-drafts" in script
    files = "_shtab_batchserve_serve___keys_COMPGEN=_shtab_compgen_files" if shell == "bash" else ":keys:_files"
    assert files in script
    if shell == "bash":
        done = subprocess.run(["bash", "-n"], input=script, text=True, check=False, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
