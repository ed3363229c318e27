"""The command line: flags, defaults, and what each command does."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchserve import cli, generate_command
from batchserve.cli import main
from batchserve.client_options import check_address
from batchserve.config import DraftConfig, EngineConfig, MiB, UnchosenScope
from batchserve.engine.async_engine import AsyncEngine
from batchserve.engine.input_processor import InputProcessor
from batchserve.options import (
    DRAFT_OPTIONS,
    ENGINE_OPTIONS,
    SERVER_OPTIONS,
    Option,
    add_options,
    flag_of,
    make_config,
    parse_size,
)
from batchserve.runner.model_folder import resolve_model
from batchserve.server import lifecycle
from batchserve.server_config import ServerConfig
from tests.server.harness import serving


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("2GiB", 2 << 30),
        ("512 mib", 512 << 20),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("1TiB", 1 << 40),
        ("9" * 400 + "TiB", (10**400 - 1) << 40),  # more than a float can be
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2GB", "-1", "1e9", "2 G", "nan", "٣GiB"])
def test_not_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("config", "options"),
    [(EngineConfig, ENGINE_OPTIONS), (DraftConfig, DRAFT_OPTIONS), (ServerConfig, SERVER_OPTIONS)],
)
class TestOptions:
    """Every option of a configuration is a flag."""

    def test_every_field_has_a_flag_and_a_help_text(self, config, options):
        assert set(options) == {field.name for field in dataclasses.fields(config)} - {"draft"}
        assert all(option.help for option in options.values())

    def test_without_flags_the_dataclass_decides(self, config, options):
        parser = argparse.ArgumentParser()
        add_options(parser, config, options)
        assert make_config(config, parser.parse_args([])) == config()

    def test_every_flag_sets_its_field(self, config, options):
        parser = argparse.ArgumentParser()
        add_options(parser, config, options)
        for field in (field for field in dataclasses.fields(config) if field.name in options):
            value: Any = _other_value(field.name, field.default, options[field.name])
            flag = flag_of(field.name)
            if options[field.name].is_on_off:
                arguments = [flag, "on" if value else "off"]
            elif isinstance(field.default, bool):
                arguments = [flag if value else flag.replace("--", "--no-", 1)]
            else:
                arguments = [flag, str(value)]
            others = dict.fromkeys(COMPANIONS.get(field.name, ()), "other")
            arguments += [word for name, text in others.items() for word in (flag_of(name), text)]
            changed = make_config(config, parser.parse_args(arguments))
            assert changed == dataclasses.replace(config(), **{field.name: value}, **others)


# Options that are refused without others.
COMPANIONS = {
    "tls_certificate": ["tls_key"],
    "tls_key": ["tls_certificate"],
    "tls_client_ca": ["tls_certificate", "tls_key"],
}


def _other_value(name: str, default: Any, option: Option) -> Any:
    if isinstance(default, bool):
        return not default
    if option.choices is not None:
        return option.choices[-1]
    if name in (
        "model",
        "host",
        "served_model_name",
        "default_draft_scope",
        "draft_cache",
        "cache_dir",
        "keys",
        *COMPANIONS,
    ):
        return "other"
    if name == "otlp_endpoint":
        return "http://other:4318"
    if name == "gpu_memory_utilization":
        return 0.5
    if name == "num_threads":  # bounded by the processors that there are
        return 2
    return 1000 if default is None else default + 1


def test_options_of_drafters_become_part_of_the_engines():
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig, ENGINE_OPTIONS)
    add_options(parser, DraftConfig, DRAFT_OPTIONS)
    flags = ["--drafter", "trie", "--trie-mode", "single", "--max-scope-bytes", "1MiB", "--draft-cache", "drafts"]
    draft = DraftConfig(trie_mode="single", max_scope_bytes=1 << 20, draft_cache="drafts")
    assert make_config(EngineConfig, parser.parse_args(flags)) == EngineConfig(drafter="trie", draft=draft)


def test_flags_are_kebab_case_without_is_and_has():
    assert flag_of("kv_cache_memory") == "--kv-cache-memory"
    assert flag_of("has_reflection") == "--reflection"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configurations that `serve` would have started an engine with."""
    configs: list[EngineConfig] = []

    async def start(config: EngineConfig, on_progress: Any, *, own_process: bool, launched: Any) -> None:
        configs.append(config)

    async def serve(config: ServerConfig, version: str, start_engine: Any, announce: Any) -> None:
        await start_engine()

    monkeypatch.setattr(AsyncEngine, "start", start)
    monkeypatch.setattr(lifecycle, "serve", serve)
    return configs


@pytest.mark.parametrize(
    ("flags", "scope"),
    [
        ([], "default"),
        (["--default-draft-scope", "request"], "request"),
        (["--default-draft-scope", "default"], "default"),
    ],
)
def test_a_chosen_scope_is_known_from_the_default_one(served, flags, scope):
    """So that the server can isolate callers of other machines unless a scope was chosen."""
    assert main(["serve", "--host", "0.0.0.0", *flags]) == 0
    assert served[0].default_draft_scope == scope
    assert isinstance(served[0].default_draft_scope, UnchosenScope) == (not flags)


def test_bad_options_name_field_value_and_bound(capsys):
    assert main(["serve", "--max-num-seqs", "0"]) == 2
    assert "max_num_seqs = 0: must be at least 1" in capsys.readouterr().err
    assert main(["serve", "--jacobi-ngram", "1"]) == 2
    assert "jacobi_ngram = 1: must be at least 2" in capsys.readouterr().err
    assert main(["generate", "--prompt", "x", "--top-p", "2"]) == 2
    assert "top_p = 2.0" in capsys.readouterr().err


def test_a_chat_with_a_model_that_is_not_there_is_refused(own_signals, capsys, tmp_path):
    assert main(["generate", "--prompt", "x", "--chat", "--model", str(tmp_path / "none")]) == 2
    assert "must be a folder that exists" in capsys.readouterr().err
    shutil.copytree(resolve_model("bundled"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert main(["generate", "--prompt", "x", "--chat", "--model", str(tmp_path / "model")]) == 2
    assert "the model has no chat template; put the model's chat_template.jinja" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dtype", "float32"], "--dtype"),
        (["--drafter", "trie", "--trie-mode", "single"], "--drafter, --trie-mode"),
        (["--model", "other"], "--model"),
        (["--model", "other", "--chat", "--max-num-seqs", "3"], "--model, --max-num-seqs"),
    ],
)
def test_options_of_an_engine_are_not_ignored_with_a_server(own_signals, capsys, flags, named):
    assert main(["generate", "--prompt", "x", "--server", "127.0.0.1:1", *flags]) == 2
    assert f"batchserve: {named}: must not be given with --server" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "127.0.0.1",
        ":50051",
        "host:",
        "host:x",
        "host:0",
        "host:65536",
        "host:00655379",
        "::1:50051",
        "http://host:50051",
    ],
)
def test_an_address_without_its_port_is_refused(own_signals, capsys, address):
    assert main(["generate", "--prompt", "x", "--server", address]) == 2
    assert f"batchserve: server = {address!r}: must be HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "[::1]:50051"])
def test_addresses(address):
    check_address("server", address)


def test_a_server_that_is_not_there_is_an_error_with_a_reason(own_signals, capsys):
    for chat in ([], ["--chat"]):
        assert main(["generate", "--prompt", "x", "--server", "127.0.0.1:1", *chat]) == 1
        assert "batchserve: UNAVAILABLE: failed to connect to all addresses" in capsys.readouterr().err


async def test_a_chat_is_put_into_the_template_of_the_servers_model(own_signals, monkeypatch, tmp_path):
    other, asked = tmp_path / "other", []
    shutil.copytree(resolve_model("bundled"), other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }} and so on")
    tokenize = InputProcessor.tokenize

    def recording(self, prompt):
        asked.append(tokenize(self, prompt))
        return asked[-1]

    monkeypatch.setattr(InputProcessor, "tokenize", recording)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "kv_cache_memory": 16 * MiB, "num_threads": 1}
    chat = ["generate", "--prompt", "hello", "--max-tokens", "1", "--chat", "--server"]
    for model in (str(other), "bundled"):
        engine = EngineConfig(model, dtype="float32", drafter="none", served_model_name="a-name-of-its-own", **sizes)
        async with serving(await AsyncEngine.start(engine)) as served:
            assert await asyncio.to_thread(main, [*chat, served.address]) == 0
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled"))
    assert [tokenizer.decode(ids) for ids in asked] == ["hello and so on", "<s><|user|>hello<|assistant|>"]


def test_a_prompt_from_standard_input_keeps_its_line_ends(monkeypatch):
    arguments = argparse.Namespace(prompt=None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\r\nb\rc\n"), encoding="utf-8"))
    assert generate_command._prompt_text(arguments) == "a\r\nb\rc\n"


def test_bytes_that_are_no_text_are_refused(own_signals, monkeypatch, capsys):
    assert main(["generate", "--server", "127.0.0.1:1", "--prompt", "\udcff"]) == 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["generate", "--server", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.count("prompt = '<bytes>': must be UTF-8 text") == 2
    assert main(["generate", "--server", "127.0.0.1:1", "--prompt", "x", "--stop", "\udcff"]) == 2
    assert "stop[0] = '\\udcff'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "a file to read"), (b"\xff\xfe", "a file of UTF-8 text"), ("", "a file to read")]
)
def test_references_that_cannot_be_read_are_refused_by_name(own_signals, capsys, tmp_path, content, reason):
    path = tmp_path / "reference.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "":
        path.mkdir()
    assert main(["generate", "--server", "127.0.0.1:1", "--prompt", "x", "--reference", str(path)]) == 2
    log = capsys.readouterr().err
    assert f"reference = {str(path)!r}"[:60] in log
    assert f"must be {reason}" in log


@pytest.mark.parametrize("template", ["{{ raise_exception('a system message is missing') }}", "{% if %}"])
def test_a_chat_template_that_fails_is_an_error_with_a_reason(own_signals, capsys, tmp_path, template):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("bundled"), folder)
    (folder / "chat_template.jinja").write_text(template)
    assert main(["generate", "--prompt", "x", "--chat", "--model", str(folder)]) == 2
    assert "its chat template cannot be applied: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flags", "said"), [("stdin", [], "--prompt: must be given"), ("stdout", ["--prompt", "x"], "must be open")]
)
def test_streams_that_are_closed_are_an_error_with_a_reason(own_signals, monkeypatch, capsys, name, flags, said):
    monkeypatch.setattr(sys, name, None)
    assert main(["generate", "--server", "127.0.0.1:1", *flags]) == 2
    assert said in capsys.readouterr().err


def test_what_the_terminal_has_no_letters_for_is_shown_by_number(monkeypatch, tmp_path):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(cli, "_parser", lambda: argparse.ArgumentParser())
    with pytest.raises(AttributeError, match="run"):
        cli.main([])
    sys.stdout.write("ä")
    sys.stdout.flush()
    assert written.getvalue() == b"\\xe4"


def test_references_without_drafts_are_refused(own_signals, capsys):
    assert main(["generate", "--prompt", "x", "--reference", "any.txt", "--no-speculation"]) == 2
    assert "--reference: must not be given with --no-speculation" in capsys.readouterr().err
    for flags in (["--drafter", "none"], ["--decoding-length", "0"]):
        assert main(["generate", "--prompt", "x", "--reference", "any.txt", *flags]) == 2
        assert f"--reference: must not be given with {' '.join(flags)}" in capsys.readouterr().err


@pytest.mark.faults
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt", ""), "prompt = '': must be at least one character"),
        (("--prompt", "", "--server", "127.0.0.1:1"), "prompt = '': must be at least one character"),
        (("--prompt", "x", "--max-tokens", "64", "--max-model-len", "64"), "max_tokens = 64: must be at most 63"),
        (("--prompt", "x", "--max-tokens", "0"), "max_tokens = 0: must be >= 1"),
        (("--prompt", "x", "--stop", ""), "stop"),
        (("--prompt", "x", "--reference", "/no/such"), "reference = '/no/such': must be a file to read"),
    ],
    ids=str,
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(own_signals, monkeypatch, capsys, flags, message):
    async def start(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("batchserve.engine.async_engine.AsyncEngine.start", start)
    assert main(["generate", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.faults
def test_drafts_are_not_compiled_for_a_file_that_is_not_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("batchserve.startup.warm_drafts.create_drafter", None)
    flags = ["--model", "bundled", "--draft-cache", str(tmp_path / "drafts")]
    assert main(["warm-drafts", str(tmp_path / "missing.jsonl"), *flags]) == 2
    assert "missing.jsonl: cannot be read: No such file or directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_priority_out_of_its_bounds_is_refused(own_signals, capsys):
    assert main(["generate", "--server", "127.0.0.1:1", "--prompt", "x", "--priority", "1001"]) == 2
    assert "priority = 1001: must be an integer in -1000..1000" in capsys.readouterr().err


def test_help_says_that_without_keys_all_callers_are_one_tenant(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "Without --keys all callers are one tenant" in words


def test_a_model_that_is_not_there_is_an_error_with_a_reason(own_signals, capsys, tmp_path):
    assert main(["serve", "--port", "0", "--model", str(tmp_path / "nowhere")]) == 2
    log = capsys.readouterr().err
    assert "nowhere" in log
    assert "Traceback" not in log


@pytest.fixture
def own_signals(monkeypatch):
    """Commands may set the process's signal handlers; the test's process keeps its own."""
    monkeypatch.setattr(generate_command.signal, "signal", lambda number, handler: None)


def _to_a_full_disk(*arguments: str) -> tuple[int, str] | None:
    """The exit status and the log; None where the system has no such file."""
    if not Path("/dev/full").exists():
        return None
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "batchserve.cli", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


async def test_generate_prints_what_a_local_engine_or_a_server_answers(own_signals, monkeypatch, capsys, tmp_path):
    quoted, asked = tmp_path / "quoted.txt", []
    quoted.write_text("zwei Zeilen:\r\näöü", encoding="utf-8", newline="")
    new_request = InputProcessor.new_request

    def recording(*arguments, **options):
        request = new_request(*arguments, **options)
        asked.append((request.priority, [list(reference) for reference in request.speculation.references]))
        return request

    monkeypatch.setattr(InputProcessor, "new_request", recording)
    message = "Convert this record to JSON.\nname: alpha\ncount: 7"
    flags = ["--max-tokens", "12", "--temperature", "0"]
    here = ["--dtype", "float32"]
    prompt = ["--prompt", f"<|user|>{message}<|assistant|>"]

    async def output_of(*arguments: str, status: int = 0) -> tuple[str, str]:
        assert await asyncio.to_thread(main, ["generate", *flags, *arguments]) == status
        return capsys.readouterr()

    local, _ = await output_of(*prompt, *here)
    monkeypatch.setattr(sys, "stdin", io.StringIO(message))
    chat, log = await output_of("--chat", "--no-speculation", *here)
    assert "0 of 0 draft tokens accepted" in log
    async with serving(await AsyncEngine.start(EngineConfig(dtype="float32", kv_cache_memory=64 * MiB))) as served:
        remote, _ = await output_of(*prompt, "--server", served.address)
        _, log = await output_of(*prompt, "--server", served.address, "--max-tokens", "100000", status=1)
        full = await asyncio.to_thread(_to_a_full_disk, "generate", *flags, *prompt, "--server", served.address)
        given = ["--priority", "3", "--reference", str(quoted), "--reference", str(quoted)]
        assert (await output_of(*prompt, *given, "--server", served.address))[0] == local
        assert (await output_of(*prompt, *given, *here))[0] == local
    assert full in (None, (1, "batchserve: standard output: cannot be written: No space left on device\n"))
    assert "INVALID_ARGUMENT: stop.max_tokens = 100000" in log
    assert len(local) > 10
    assert local == chat == remote
    assert asked[0] == (0, [])
    assert asked[-1] == asked[-2]
    priority, (reference, again) = asked[-1]
    assert (priority, reference) == (3, again)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled"))
    assert tokenizer.decode(reference) == "zwei Zeilen:\r\näöü"


def test_flags_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--max-num-se", "3"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_torch_is_not_imported_before_the_thread_policy_is_set():
    code = (
        "import sys, batchserve.cli, batchserve.server.lifecycle, batchserve.server.grpc.client, batchserve.demo\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
