"""The demo as a user runs it, and its judgement of differences."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from typing import Any

import pytest

from batchserve import demo
from batchserve.demo import prompts
from batchserve.demo.measure import Answer, Round
from batchserve.demo.server_process import ServerProcessError, running_server
from batchserve.errors import ConfigError
from batchserve.server.grpc.client import RemoteError
from batchserve.types import FinishReason

TIMEOUT_S = 120


async def _start(*flags: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batchserve.cli", "demo", *flags), stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )


async def test_the_demo_shows_all_answers_and_one_table():
    process = await _start("--max-tokens", "6", "--repeats", "1", "--dtype", "float32")
    async with asyncio.timeout(TIMEOUT_S):
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    for i, prompt in enumerate(prompts.PROMPTS):
        assert f"[{i + 1} {prompt.title}]" in output
    for row in ("tokens/s", "TTFT", "inter-token latency, mean", "inter-token latency, p99", "acceptance length"):
        assert row in output
    assert re.search(r"outputs identical\W+\d of 8", output)
    assert await _is_closed(output)


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"repeats": 0}], ids=str)
def test_bad_numbers_are_refused_before_a_server_is_started(options: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "running_server", lambda *arguments: pytest.fail("started"))
    with pytest.raises(ConfigError, match=r"(max_tokens|repeats) = 0: must be at least 1"):
        demo.run_demo(**options)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_an_interrupted_demo_ends_its_server(number: signal.Signals):
    process = await _start("--max-tokens", "200", "--repeats", "50")
    assert process.stdout is not None
    output = ""
    async with asyncio.timeout(TIMEOUT_S):
        while "is serving" not in output:
            line = (await process.stdout.readline()).decode()
            assert line, output
            output += line
        process.send_signal(number)
        output += (await process.communicate())[0].decode()
    assert process.returncode == 128 + number
    assert "Traceback" not in output
    assert await _is_closed(output)


async def _is_closed(output: str) -> bool:
    """Whether nothing listens any more where the demo's server did."""
    match = re.search(r"([\d.]+):(\d+) is serving", output)
    assert match is not None, output
    try:
        _, writer = await asyncio.open_connection(match[1], int(match[2]))
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_a_server_that_does_not_start_is_reported_with_its_log():
    news: list[str] = []
    with pytest.raises(ServerProcessError, match="max_num_seqs = 0: must be at least 1"):
        async with running_server(["--max-num-seqs", "0"], news.append):
            pass
    assert any("max_num_seqs" in line for line in news)


async def test_the_reason_of_a_failed_round_is_one_error():
    class Gone:
        async def stream(self, request: Any, timeout_s: float) -> Any:
            raise RemoteError("UNAVAILABLE", "", "gone")
            yield

    with pytest.raises(RemoteError, match="gone"):
        await demo._round(Gone(), prompts.questions_for("bundled"), 8, True)  # type: ignore[arg-type]


def _runs(plain: list[int], drafted: list[int], reason: FinishReason) -> Any:
    def answers(token_ids: list[int]) -> Round:
        same = [Answer(0.0, token_ids=[5], finish_reason=FinishReason.LENGTH) for _ in prompts.PROMPTS[1:]]
        return Round([Answer(0.0, token_ids=token_ids, finish_reason=reason), *same], 1.0)

    runs = demo._Runs()
    runs.shown = {False: answers(plain), True: answers(drafted)}
    return runs


def test_a_wrong_token_is_not_a_near_tie():
    """What the model says greedily, against the same with one token changed."""
    questions = prompts.questions_for("bundled")
    judge = demo._make_judge("bundled", "float32")
    text = prompts.PROMPTS[0].text
    ids = judge._tokenizer(text, return_tensors="pt")["input_ids"]
    said = judge._model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert demo._differences(_runs(said, said, FinishReason.LENGTH), questions, "float32") == ([], 0, 0)
    assert judge.judge(text, said, 0, is_ended=False).is_near_tie
    wrong = [*said[:4], (said[4] + 1) % 4096, *said[5:]]
    (line,), num_near_ties, num_wrong = demo._differences(_runs(said, wrong, FinishReason.LENGTH), questions, "float32")
    assert (num_near_ties, num_wrong) == (0, 1)
    assert "part at token 4" in line
    assert line.endswith("WRONG")
    _, _, num_wrong = demo._differences(_runs(said, said[:4], FinishReason.STOP), questions, "float32")
    assert num_wrong == 1, "an EOS that the model does not say"


def test_another_model_is_asked_in_its_chat_template():
    from batchserve.runner.model_folder import resolve_model

    questions = prompts.questions_for(str(resolve_model("bundled")))
    assert questions.titles == tuple(each.title for each in prompts.CHAT_PROMPTS)
    tokenizer = demo._make_judge("bundled", "float32")._tokenizer
    for ids, prompt in zip(questions.prompts, prompts.CHAT_PROMPTS, strict=True):
        assert prompt.message in tokenizer.decode(ids)
    with pytest.raises(ConfigError, match="nowhere"):
        prompts.questions_for("./nowhere")
