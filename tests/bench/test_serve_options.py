"""The options and prompts of `batchserve bench serve`, and those that are refused before anything is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchserve.bench.load_prompts import load_prompts
from batchserve.bench.serve_options import ServeBenchOptions, Slo
from batchserve.cli import main
from batchserve.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "rate = 0.0: must be above 0, or inf"),
        (["--rate", "nan"], "rate = nan: must be above 0, or inf"),
        (["--rate", "1", "--concurrency", "2"], "concurrency, rate: must not both be given"),
        (["--concurrency", "0"], "concurrency = 0: must be at least 1"),
        (["--burstiness", "1"], "burstiness = 1.0: must be with --rate"),
        (["--rate", "1", "--burstiness", "0"], "burstiness = 0.0: must be above 0 and finite"),
        (["--duration", "1", "--num-requests", "2"], "num_requests, duration: must not both be given"),
        (["--duration", "1", "--rate", "inf"], "duration: must not be given with --rate inf"),
        (["--duration", "-1"], "duration = -1.0: must be finite and at least 0.001"),
        (["--num-requests", "0"], "num_requests = 0: must be at least 1"),
        (["--warmup", "-1"], "warmup = -1: must be at least 0"),
        (["--max-tokens", "0"], "max_tokens = 0: must be at least 1"),
        (["--temperature", "-1"], "temperature = -1.0: must be finite and at least 0"),
        (["--input-tokens", "0"], "input_tokens = 0: must be at least 1"),
        (["--input-tokens", "1", "--prompts", "x"], "prompts, input_tokens: must not both be given"),
        (["--prompts", "/nowhere.jsonl"], "prompts = '/nowhere.jsonl': cannot be read"),
        (["--endpoint", "images"], "endpoint = 'images': must be one of completions, chat"),
        (["--usage", "x"], "usage = 'x': must be one of each, last, none"),
        (["--slo", "ttft:0"], "slo = 'ttft:0': must be a list of ttft:MS"),
        (["--slo", "itl:1"], "slo = 'itl:1': must be a list of ttft:MS"),
        (["--slo", "ttft:1,ttft:2"], "slo = 'ttft:1,ttft:2': must name ttft only once"),
        (["--timeout-s", "0"], "timeout_s = 0.0: must be finite and at least 0.001"),
        (["--json", "/nowhere/x"], "json = '/nowhere/x': must be a file in a folder that exists"),
        (["--api-key", "a\nb"], "api_key: must be printable ASCII characters"),
        (["--tls"], "url = 'http://127.0.0.1:1': must begin with https:// for TLS"),
    ],
)
def test_options_that_are_refused(flags: list[str], message: str, capsys: Any):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grpc", "127.0.0.1"], "grpc = '127.0.0.1': must be HOST:PORT"),
        (["--grpc", "127.0.0.1:1", "--usage", "last"], "usage: must be with --url"),
        (["--url", "127.0.0.1:1"], "url = '127.0.0.1:1': must be http://HOST:PORT"),
    ],
)
def test_targets_that_are_refused(flags: list[str], message: str, capsys: Any):
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: is not JSON"),
        ("{}", "line 1: field 'prompt' is missing"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: field 'max_tokens' must be an integer of at least 1"),
        ('{"messages": []}', "line 1: field 'messages' must be a list of objects"),
        ('{"messages": [{}], "prompt": "a"}', "line 1: fields 'messages' and 'prompt' must not both be given"),
        ('{"messages": [{"role": "user"}]}', "prompt 1: messages[0].content = None: must be a text"),
        ("", "holds no prompts"),
    ],
)
def test_prompts_that_are_refused(line: str, message: str, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError) as refused:
        load_prompts(ServeBenchOptions(grpc="127.0.0.1:1", endpoint="chat", prompts=file))
    assert message in str(refused.value)


def test_messages_need_the_chat_endpoint(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(ConfigError, match="line 1: field 'messages' must be with --endpoint chat"):
        load_prompts(ServeBenchOptions(url="http://127.0.0.1:1", prompts=file))


def test_random_words_are_the_same_for_a_seed_and_differ_otherwise():
    def words(number: int, seed: int = 0) -> Any:
        return load_prompts(ServeBenchOptions(url="http://127.0.0.1:1", input_tokens=9, seed=seed)).at(number).content

    assert words(3) == words(3)
    assert len({words(3), words(4), words(3, seed=1)}) == 3
    assert len(words(3).split()) == 9


def test_objectives():
    assert Slo.parse("tpot:50, ttft:500") == Slo(ttft_ms=500, tpot_ms=50)
    assert Slo.parse("e2e:0.5").describe() == "E2E 0.5 ms"
