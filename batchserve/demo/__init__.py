"""`batchserve demo`: compares speculation on and off on a real server, with eight concurrent gRPC requests."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchserve.config import PRIVATE_SCOPE
from batchserve.demo.measure import Answer, Round, first_difference
from batchserve.demo.prompts import BUNDLED, Questions, questions_for
from batchserve.demo.server_process import running_server
from batchserve.demo.view import View
from batchserve.errors import ConfigError
from batchserve.server.grpc.answers import from_stream_response
from batchserve.server.grpc.client import GenerationClient
from batchserve.server.grpc.convert import to_generate_request
from batchserve.types import FinishReason, SamplingParams, SpeculationParams, Started

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.demo.near_tie import NearTieJudge

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0


def run_demo(max_tokens: int = 200, repeats: int = 3, dtype: str = "auto", model: str = BUNDLED) -> int:
    """Runs the demo. Returns the exit status: 0 if speculation changed nothing but near-ties, 1 otherwise.

    The bundled model gets its own tasks. Other models get chat questions in their chat template. Raises BatchserveError
    if the server cannot be started or fails, ConfigError if there is no such model or it has no chat template.
    """
    for name, value in (("max_tokens", max_tokens), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1")
    try:
        return asyncio.run(_demo(questions_for(model), max_tokens, repeats, dtype))
    except asyncio.CancelledError:  # only SIGTERM cancels the demo
        return 128 + signal.SIGTERM


@dataclass(slots=True)
class _Runs:
    """All rounds. The shown rounds are the warm-up and are not measured."""

    shown: dict[bool, Round] = field(default_factory=dict)  # by is_speculative
    measured: dict[bool, list[Round]] = field(default_factory=lambda: {False: [], True: []})

    def answers(self, index: int) -> list[Answer]:
        """Returns every answer to one prompt. The first is without speculation."""
        rounds = [self.shown[False], *self.measured[False], self.shown[True], *self.measured[True]]
        return [done.answers[index] for done in rounds]


async def _demo(questions: Questions, max_tokens: int, repeats: int, dtype: str) -> int:
    # SIGTERM must not leave the server running. Ctrl-C already cancels the main task.
    main = asyncio.current_task()
    if main is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    view = View()
    # Earlier answers to the same prompts would make perfect drafts, so each request drafts only from itself.
    drafting = ("--default-draft-scope", PRIVATE_SCOPE, "--wait-for-drafter")
    size = ("--max-num-seqs", str(len(questions.prompts)))
    options = ("--model", questions.model, "--dtype", dtype, *size, *drafting)
    async with AsyncExitStack() as stack:
        with view.waiting(f"starting a server with {questions.described}") as news:
            async with asyncio.timeout(START_TIMEOUT_S):
                server = await stack.enter_async_context(running_server(options, news))
                address = server.address
                client = await stack.enter_async_context(GenerationClient(address))
                await client.wait_until_serving()
        info = await client.model_info()
        view.say(
            f"{address} is serving: {info.architecture} in {info.dtype}, attention {info.attention_backend}, "
            f"drafter {info.drafter}, decoding length {info.decoding_length}"
        )
        runs = await _run_all(client, view, questions, max_tokens, repeats)
    return _report(view, runs, questions, info.dtype)


async def _run_all(client: GenerationClient, view: View, questions: Questions, max_tokens: int, repeats: int) -> _Runs:
    runs = _Runs()
    for is_speculative in (True, False):
        heading = f"speculation {_name(is_speculative)} (shown, not measured)"
        with view.streaming(heading, questions.titles) as on_text:
            runs.shown[is_speculative] = await _round(client, questions, max_tokens, is_speculative, on_text)
    with view.waiting(f"measuring {repeats} rounds of each, interleaved") as news:
        for i in range(repeats):
            for is_speculative in (False, True) if i % 2 == 0 else (True, False):
                done = await _round(client, questions, max_tokens, is_speculative)
                runs.measured[is_speculative].append(done)
                news(
                    f"round {i + 1} of {repeats}, speculation {_name(is_speculative)}: {done.tokens_per_s:.0f} tokens/s"
                )
    return runs


def _name(is_speculative: bool) -> str:
    return "on" if is_speculative else "off"


async def _round(
    client: GenerationClient,
    questions: Questions,
    max_tokens: int,
    is_speculative: bool,
    on_text: Callable[[int, str], None] | None = None,
) -> Round:
    """Sends all prompts at once, with greedy sampling."""
    started_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_answer(client, i, prompt, max_tokens, is_speculative, on_text))
                for i, prompt in enumerate(questions.prompts)
            ]
    except ExceptionGroup as failed:  # one reason is enough: if the server dies, all have it
        raise failed.exceptions[0] from None
    return Round([task.result() for task in tasks], time.perf_counter() - started_s)


async def _answer(
    client: GenerationClient,
    index: int,
    prompt: str | list[int],
    max_tokens: int,
    is_speculative: bool,
    on_text: Callable[[int, str], None] | None,
) -> Answer:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request = to_generate_request(prompt, params, SpeculationParams(is_enabled=is_speculative))
    answer = Answer(sent_s=time.perf_counter())
    async with aclosing(client.stream(request, timeout_s=ANSWER_TIMEOUT_S)) as messages:
        async for message in messages:
            event = from_stream_response(message)
            if isinstance(event, Started):
                continue
            if event.token_ids:
                answer.arrivals.append((time.perf_counter(), len(event.token_ids)))
                answer.token_ids += event.token_ids
            answer.text += event.text
            answer.finish_reason = event.finish_reason
            if on_text is not None and event.text:
                on_text(index, event.text)
    return answer


def _report(view: View, runs: _Runs, questions: Questions, dtype: str) -> int:
    """Prints the table and the differences. Returns the exit status."""
    lines, num_near_ties, num_wrong = _differences(runs, questions, dtype)
    count = len(questions.prompts)
    identical = f"{count - num_near_ties - num_wrong} of {count}"
    view.table(runs.measured[False], runs.measured[True], identical)
    for line in lines:
        view.say(line)
    view.say(
        f"of {count} prompts, answered {2 + 2 * len(runs.measured[True])} times each: {identical} always the "
        f"same, {num_near_ties} with near-ties only (differences within rounding), {num_wrong} wrong"
    )
    return 1 if num_wrong else 0


def _differences(runs: _Runs, questions: Questions, dtype: str) -> tuple[list[str], int, int]:
    """Returns (a line per difference, number of prompts with only near-ties, number with any other difference)."""
    lines: list[str] = []
    num_near_ties = num_wrong = 0
    judge: NearTieJudge | None = None
    for i, (title, prompt) in enumerate(zip(questions.titles, questions.prompts, strict=True)):
        plain, *others = runs.answers(i)
        variants = {tuple(answer.token_ids): answer for answer in others if answer.token_ids != plain.token_ids}
        if not variants:
            continue
        judge = judge or _make_judge(questions.model, dtype)
        is_wrong = False
        for answer in variants.values():
            at = first_difference(plain.token_ids, answer.token_ids) or 0
            verdicts = [
                judge.judge(prompt, each.token_ids, at, is_ended=each.finish_reason is FinishReason.STOP)
                for each in (plain, answer)
            ]
            worst = max(verdicts, key=lambda verdict: verdict.loss - verdict.bound)
            is_wrong = is_wrong or not worst.is_near_tie
            lines.append(
                f"[{i + 1} {title}] answers part at token {at}; from there on token {worst.position} is the "
                f"worst: its logit is {worst.loss:.5f} below the best (bound {worst.bound:.5f}): "
                f"{'near-tie' if worst.is_near_tie else 'WRONG'}"
            )
        num_wrong += is_wrong
        num_near_ties += not is_wrong
    return lines, num_near_ties, num_wrong


def _make_judge(model: str, dtype: str) -> NearTieJudge:
    from batchserve.demo.near_tie import NearTieJudge

    return NearTieJudge(model, dtype)
