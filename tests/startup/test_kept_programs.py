"""Kept programs: later starts need no torch, answer the same, and survive whatever happens to the files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve import array_files
from batchserve.array_files import BLOCK, ArrayFile, write_arrays
from batchserve.cli import main
from batchserve.config import EngineConfig
from batchserve.llm import LLM
from batchserve.runner.native_runner import NativeRunner
from batchserve.sealed_files import UntrustedFileError
from batchserve.startup import kept_programs
from batchserve.startup.build import build_engine
from batchserve.startup.kept_programs import KeptPrograms, make_room, programs_folder
from batchserve.types import SamplingParams
from tests.equivalence.harness import build
from tests.tiny_models import save_tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12] * 3, [20, 21, 22]]
PARAMS = [SamplingParams(0.0, max_tokens=24, ignore_eos=True), SamplingParams(0.8, seed=3, max_tokens=24, top_p=0.9)]
BLOCKER = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not wanted here")
sys.meta_path.insert(0, Refuse())
"""
LOOP = f"""
import json, sys
from batchserve import LLM, SamplingParams
llm = LLM(sys.argv[1], cache_dir=sys.argv[2], drafter="mixture", max_num_seqs=2)
params = [SamplingParams(0.0, max_tokens=24, ignore_eos=True),
          SamplingParams(0.8, seed=3, max_tokens=24, top_p=0.9)]
found = [[each.token_ids for each in llm.generate({PROMPTS!r}, params, show_progress=False)] for _ in range(2)]
print(json.dumps([found, sorted({{"torch", "transformers"}} & set(sys.modules))]))
"""


def settled() -> None:
    """Waits for the threads that keep programs."""
    for thread in threading.enumerate():
        if thread.name == "keep program":
            thread.join()


def config_of(folder: Path, cache: Path, **options: Any) -> EngineConfig:
    return EngineConfig(str(folder), cache_dir=str(cache), drafter="none", max_num_seqs=2, **options)


def answers(folder: Path, cache: Path, **options: Any) -> list[list[int]]:
    """Of a new engine, which keeps its program."""
    llm = LLM(str(folder), cache_dir=str(cache), drafter="none", max_num_seqs=2, **options)
    settled()
    return [each.token_ids for each in llm.generate(PROMPTS, PARAMS, show_progress=False)]


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "programs").glob("*.program"))


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of processes in which neither torch nor transformers can be imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKER)
    root = Path(__file__).parent.parent.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(root)])}


def test_a_later_start_imports_neither_torch_nor_transformers(tmp_path: Path, without_torch: dict[str, str]) -> None:
    """LLM, with drafts, sampling and cached prefixes."""

    def run(environment: dict[str, str]) -> Any:
        command = [sys.executable, "-c", LOOP, "bundled", str(tmp_path / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first, modules = run({**without_torch, "PYTHONPATH": without_torch["PYTHONPATH"].split(os.pathsep)[1]})
    assert modules == ["torch", "transformers"]
    assert run(without_torch) == [first, []]


def test_a_server_and_the_command_line_run_without_torch(tmp_path: Path, without_torch: dict[str, str]) -> None:
    without_torch["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    asking = ("--prompt", "What is two plus two?", "--chat", "--max-tokens", "20")
    sampled = (*asking, "--temperature", "0.7", "--seed", "4")

    def run(*arguments: str, environment: dict[str, str] = without_torch) -> str:
        command = [sys.executable, "-m", "batchserve", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    plain = {**without_torch, "PYTHONPATH": without_torch["PYTHONPATH"].split(os.pathsep)[1]}
    first = [run("generate", *each, environment=plain) for each in (asking, sampled)]
    assert [run("generate", *each) for each in (asking, sampled)] == first
    command = [sys.executable, "-m", "batchserve", "serve", "--port", "0", "--http-port", "0"]
    server = subprocess.Popen(command, env=without_torch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip().removeprefix("listening on ")
        flags = ("--server", address)
        assert [run("generate", *flags, *each) for each in (asking, sampled)] == first
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 0
    assert "Traceback" not in said


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2", "phi3_longrope"])
def test_a_kept_program_answers_as_before(family: str, tiny_model: dict[str, Path], tmp_path: Path) -> None:
    first = answers(tiny_model[family], tmp_path)
    assert len(kept(tmp_path)) == 1
    stamp = kept(tmp_path)[0].stat().st_mtime_ns
    assert answers(tiny_model[family], tmp_path) == first
    assert answers(tiny_model[family], tmp_path, share_weights=True) == first
    assert len(kept(tmp_path)) == 1
    assert kept(tmp_path)[0].stat().st_mtime_ns >= stamp


def test_bits_are_the_same_after_a_warm_start(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    from tests.program.test_model import answer, ids

    found = []
    for _ in range(2):
        built = build(tiny_model["qwen3"], cache_dir=str(tmp_path), dtype="bfloat16")
        settled()
        runner = built.core.executor
        assert isinstance(runner, NativeRunner)
        found.append(answer(runner, ids(), [20, 25]))
    assert found[0].equal(found[1])


def test_warnings_about_a_model_are_repeated(
    tiny_model: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model["llama"], folder)
    (folder / "generation_config.json").write_text('{"diversity_penalty": 1.3}')
    for _ in range(2):
        caplog.clear()
        answers(folder, tmp_path / "cache")
        assert "diversity_penalty = 1.3" in caplog.text


def test_what_a_program_was_made_of_finds_it(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(tiny_model["llama"], folder)
    answers(folder, cache)
    for number, change in enumerate(
        [{"dtype": "float32"}, {"max_model_len": 100}, {"tokenizer_end_tokens": False}], start=2
    ):
        answers(folder, cache, **change)
        assert len(kept(cache)) == number
    os.utime(folder / "model.safetensors")
    answers(folder, cache)
    assert len(kept(cache)) == 5
    answers(folder, tmp_path / "none", max_kept_bytes=0)
    assert not kept(tmp_path / "none")


def test_tables_of_another_length_are_not_used(tmp_path: Path) -> None:
    """LongRoPE's factors depend on the longest context that is served, which depends on the memory."""
    folder, said = save_tiny_model("phi3_longrope", tmp_path / "model"), []
    for memory in (1 << 22, 1 << 17):
        config = config_of(folder, tmp_path / "cache", kv_cache_memory=memory)
        build_engine(config, said.append)
        settled()
    assert any("the model is prepared again, for" in line for line in said)


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def truncated(path: Path, size: int) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:size])


def swapped(path: Path, _: int) -> None:
    other = path.with_name(f"other{path.name}")
    answers_folder = next(each for each in path.parent.glob("*.program") if each != path)
    shutil.copy(answers_folder, other)
    path.unlink()
    other.rename(path)


def linked(path: Path, _: int) -> None:
    moved = path.with_suffix(".moved")
    path.rename(moved)
    path.symlink_to(moved)


def piped(path: Path, _: int) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (flipped, 30), (flipped, 200), (flipped, -5000), (truncated, 0), (truncated, 40), (truncated, 5000),
        (truncated, -4096), (swapped, 0), (linked, 0), (piped, 0), (lambda path, _: path.chmod(0o666), 0),
    ],
)  # fmt: skip
def test_damaged_files_are_not_used(
    damage: Callable[[Path, int], None],
    place: int,
    tiny_model: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says so, the answers are the same, and the file is written again."""
    right = answers(tiny_model["llama"], tmp_path)
    (path,) = kept(tmp_path)
    answers(tiny_model["gpt2"], tmp_path)
    damage(path, place)
    for share in (False, True):
        caplog.clear()
        assert answers(tiny_model["llama"], tmp_path, share_weights=share) == right
        if share:
            assert not caplog.records
        else:
            assert len([record for record in caplog.records if "prepared again" in record.message]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_is_not_used(
    tiny_model: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers(tiny_model["llama"], tmp_path)
    os.chown(kept(tmp_path)[0], 4711, 4711)
    answers(tiny_model["llama"], tmp_path)
    assert "belongs to another user (4711)" in caplog.text


def test_a_full_disk_keeps_nothing_and_serves(
    tiny_model: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(kept_programs.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    answers(tiny_model["llama"], tmp_path)
    assert "not kept for the next start" in caplog.text

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_programs.shutil, "disk_usage", lambda path: usage._replace(free=1 << 50))
    monkeypatch.setattr(kept_programs, "write_arrays", full)
    caplog.clear()
    answers(tiny_model["llama"], tmp_path)
    assert "No space left on device" in caplog.text
    assert not kept(tmp_path)


ARRAYS = [np.arange(5000, dtype=np.int64), np.zeros((0, 3), np.float32), np.full((1000, 2000), 7, np.int32)]


def check(path: Path) -> None:
    file = ArrayFile(path)
    assert file.description == {"name": "x"}
    for found in (file.read(2), file.map(1)):
        assert [np.array_equal(a, b) for a, b in zip(found, ARRAYS, strict=True)] == [True] * 3
        assert not any(each.flags.writeable for each in found)
    file.verify()
    file.close()


def test_arrays_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_files, "BLOCK", 1 << 16)
    write_arrays(tmp_path / "file", {"name": "x"}, ARRAYS)
    check(tmp_path / "file")
    write_arrays(tmp_path / "empty", {"name": "y"}, [])
    with closing(ArrayFile(tmp_path / "empty")) as file:
        assert file.read(1) == file.map(1) == []


KILLED = """
import os, sys
from pathlib import Path
from batchserve import array_files
import numpy as np
ARRAYS = [np.arange(5000, dtype=np.int64), np.zeros((0, 3), np.float32), np.full((1000, 2000), 7, np.int32)]
left = int(sys.argv[2])
class Dying:
    def __init__(self, file): self._file = file
    def __getattr__(self, name):
        global left
        if name in ("write", "seek", "flush", "fileno"):
            left -= 1
            if left < 0:
                self._file.flush()
                os._exit(9)
        return getattr(self._file, name)
replacing = array_files.replacing
from contextlib import contextmanager
@contextmanager
def dying(path):
    with replacing(path) as file:
        yield Dying(file)
array_files.replacing, array_files.BLOCK = dying, 1 << 20
array_files.write_arrays(Path(sys.argv[1]), {"name": "x"}, ARRAYS)
"""


def test_a_writer_that_is_killed_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of its calls."""
    path, number = tmp_path / "a.program", 0
    monkeypatch.setattr(array_files, "BLOCK", 1 << 20)
    while not path.exists():
        command = [sys.executable, "-c", KILLED, str(path), str(number)]
        status = subprocess.run(command, timeout=60, check=False).returncode
        assert path.exists() == (status == 0)
        number += 4
    assert number > 12
    check(path)
    partial = [*tmp_path.glob("*.partial")]
    assert partial
    for each in partial:
        os.utime(each, (time.time() - 7200,) * 2)
    make_room(tmp_path, 1 << 40)
    assert [*tmp_path.iterdir()] == [path]


def test_the_programs_used_least_recently_go_first(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.program").write_bytes(bytes(1000))
        os.utime(tmp_path / f"{number}.program", (number, number))
    make_room(tmp_path, 2500)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["2.program", "3.program"]


def test_engines_that_start_at_once_share_a_cache(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOOP, str(tiny_model["llama"]), str(tmp_path)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    several = [start() for _ in range(3)]
    said = [json.loads(each.communicate(timeout=300)[0])[0] for each in several]
    assert said[0] == said[1] == said[2]
    assert len(kept(tmp_path)) == 1
    assert [each.name for each in (tmp_path / "programs").iterdir()] == [kept(tmp_path)[0].name]


def test_the_cache_command(tiny_model: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model["llama"], folder)
    answers(folder, tmp_path)
    where = ("--cache-dir", str(tmp_path))
    assert main(["cache", "list", *where]) == 0
    assert "LlamaForCausalLM in " in capsys.readouterr().out
    assert main(["cache", "verify", *where]) == 0
    assert "the model's weights are those that it was made from" in capsys.readouterr().out
    flipped(folder / "model.safetensors", -1)
    assert main(["cache", "verify", *where]) == 0
    assert "model.safetensors has changed since" in capsys.readouterr().out
    flipped(kept(tmp_path)[0], -5000)
    assert main(["cache", "verify", *where]) == 1
    assert "is damaged (the checksum of block" in capsys.readouterr().out
    assert main(["cache", "clear", *where]) == 0
    assert not kept(tmp_path)
    assert main(["cache", "verify", *where]) == 0


def test_a_file_is_never_larger_than_its_bound(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    answers(tiny_model["llama"], tmp_path, max_kept_bytes=1000)
    assert not kept(tmp_path)


def test_the_key_names_what_it_is_made_of(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(tiny_model["llama"], tmp_path)
    assert programs_folder(config) == tmp_path / "programs"
    assert KeptPrograms(config, tiny_model["llama"]).open(1) is None
    assert BLOCK % 4096 == 0


def test_a_damaged_description_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"something else, and long enough to hold a head" * 10)
    with pytest.raises(UntrustedFileError, match="its head is missing"):
        ArrayFile(tmp_path / "x")
