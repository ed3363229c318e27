"""Hub ids: one bounded look-up, whatever is at the other end, and the copy in the cache where there is one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from batchserve.errors import ConfigError
from batchserve.runner import hub
from batchserve.runner.hub import local_snapshot

pytestmark = pytest.mark.faults

MODEL, COMMIT = "someone/something", "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "original/model.safetensors": b"twice"}
LOOK_UP = """
import logging, sys
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.runner.hub import with_local_model
logging.basicConfig(level=logging.INFO)
try:
    config = with_local_model(EngineConfig(model=sys.argv[1]))
    print(config.model, config.served_model_name)
except ConfigError as error:
    print("refused:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as downloading a model takes."""

    def do_GET(self) -> None:
        names = list(FILES)
        if self.path.startswith(f"/api/models/{MODEL}/tree/"):
            tree = [
                {"type": "file", "oid": name.encode().hex(), "size": len(FILES[name]), "path": name} for name in names
            ]
            self._answer(json.dumps(tree).encode())
        elif self.path.startswith(f"/api/models/{MODEL}"):
            siblings = [{"rfilename": name} for name in names]
            self._answer(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self._answer(FILES[self.path.split(COMMIT + "/")[1]])

    do_HEAD = do_GET

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{self.path.encode().hex()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def refusing(status: int, error_code: str = "", content: bytes = b"no") -> type[BaseHTTPRequestHandler]:
    class Refusing(Hub):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if error_code:
                self.send_header("X-Error-Code", error_code)
            self.end_headers()
            self.wfile.write(content)

    return Refusing


class Dripping(Hub):
    """A byte at a time, so that no wait for the next one is ever long."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(60):
            self.wfile.write(b" ")
            time.sleep(0.5)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def silence(*, wanted: bool = True) -> Iterator[str]:
    """Something listens, and never answers; in the end, whether anybody has called is as wanted."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.setblocking(False)
        try:
            listening.accept()[0].close()
            is_called = True
        except BlockingIOError:
            is_called = False
    assert is_called == wanted


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def look_up(home: Path, endpoint: str, model: str = MODEL, **more: str) -> tuple[str, list[str], float]:
    """What was found, what was said beside it, and the seconds that it took."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    start = time.monotonic()
    command = [sys.executable, "-c", LOOK_UP, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip(), done.stderr.strip().splitlines(), time.monotonic() - start


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Why a model that is not in the cache is refused, in this process."""

    def asked(endpoint: str, model: str = MODEL) -> str:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        with pytest.raises(ConfigError) as caught:
            local_snapshot(model)
        return str(caught.value)

    return asked


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cache that holds the model."""
    snapshot = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return tmp_path


def test_a_hub_that_cannot_be_reached_is_one_line_within_seconds(tmp_path: Path) -> None:
    """The command line as a user has it, before anything heavy is imported."""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": nobody()}
    command = [sys.executable, "-m", "batchserve", "generate", "--model", MODEL, "--prompt", "x"]
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert time.monotonic() - start < 30
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"batchserve: model = '{MODEL}': is not a local folder, nor in the cache")
    assert "the hub cannot be reached" in line


@pytest.mark.parametrize(
    ("status", "error_code", "content", "reason"),
    [
        (401, "", b"no", "HTTP status 401; is HF_TOKEN right?"),
        (403, "GatedRepo", b"no", "terms accepted"),
        (403, "", b"no", "HTTP status 403; is HF_TOKEN right?"),
        (404, "RepoNotFound", b"no", "no such model"),
        (500, "", b"no", "HTTP status 500"),
        (200, "", b"<html>a login page\nof a proxy</html>", "cannot be reached"),
    ],
)
def test_what_answers_in_place_of_the_model_is_refused_in_one_line(
    refusal: Callable[..., str], status: int, error_code: str, content: bytes, reason: str
) -> None:
    with serving(refusing(status, error_code, content)) as endpoint:
        said = refusal(endpoint)
    assert said.startswith(f"model = '{MODEL}': is not a local folder, nor in the cache")
    assert reason in said
    assert "\n" not in said


def test_a_hub_that_does_not_answer_is_not_waited_for(refusal: Callable[..., str]) -> None:
    for at_the_other_end in (silence, lambda: serving(Dripping)):
        start = time.monotonic()
        with at_the_other_end() as endpoint:
            assert "the hub cannot be reached" in refusal(endpoint)
        assert time.monotonic() - start < 4 * hub.LOOKUP_S


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_means_that_nobody_is_called(home: Path, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    with silence(wanted=False) as endpoint:
        found, _, _ = look_up(home, endpoint, **{name: "1"})
        assert found == f"{next(home.rglob(COMMIT))} {MODEL}"
        refused, _, _ = look_up(tmp_path_factory.mktemp("empty"), endpoint, **{name: "1"})
        assert "OFFLINE is set" in refused


def test_a_copy_in_the_cache_is_used_where_the_hub_cannot_be_asked(home: Path) -> None:
    with silence() as hanging, serving(refusing(500)) as broken:
        for endpoint in (nobody(), hanging, broken):
            found, said, took_s = look_up(home, endpoint)
            assert found == f"{next(home.rglob(COMMIT))} {MODEL}"
            assert sum("the copy in the cache is used" in line for line in said) == 1
            assert took_s < 20


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_damaged_cache_is_as_good_as_none(home: Path, content: bytes) -> None:
    (ref,) = home.rglob("refs/main")
    ref.write_bytes(content)
    assert look_up(home, nobody())[0].startswith(f"refused: model = '{MODEL}'")


def test_a_download_is_whole_and_of_one_format_and_its_rest_is_used_offline(tmp_path: Path) -> None:
    with serving(Hub) as endpoint:
        found, _, _ = look_up(tmp_path, endpoint)
    folder = Path(found.split()[0])
    assert {str(file.relative_to(folder)) for file in folder.rglob("*.*")} == {"config.json", "model.safetensors"}
    (folder / "model.safetensors").unlink()
    assert look_up(tmp_path, nobody())[0] == found, "whoever loads it says what is missing"


@pytest.mark.parametrize("model", ["a/b/c", "with space", "-", "a--b", "x" * 200])
def test_what_can_be_no_hub_id_is_refused_without_a_call(refusal: Callable[..., str], model: str) -> None:
    with silence(wanted=False) as endpoint:
        assert refusal(endpoint, model).endswith("must be a folder that exists, a hub id or 'bundled'")
