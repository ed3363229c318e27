"""The service over a real engine: shapes, bounds, deadlines, cancellation. The model is a tiny random one."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from typing import Any

import grpc
import pytest

from batchserve.config import MiB
from batchserve.v1 import generation_pb2 as pb
from tests.server.conftest import Serve
from tests.server.harness import Client, Served, ask, core_of, failure_of, tokens_of, unpack, until

OFF = pb.SpeculationOptions(mode=pb.SpeculationOptions.MODE_OFF)


async def test_stream_and_whole_answer_agree(tiny: Served):
    request = ask(max_tokens=60)
    whole = await tiny.client.generate(request)
    messages = await tiny.client.stream(request)
    finished = messages[-1].finished
    assert tokens_of(messages) == list(whole.token_ids)
    assert len(whole.token_ids) == whole.usage.completion_tokens == 60
    assert whole.finish_reason == finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.prompt_tokens == messages[0].started.prompt_tokens == 3
    assert messages[0].started.request_id
    queue, first, total = (getattr(finished.timing, name).ToNanoseconds() for name in ("queue", "first_token", "total"))
    assert 0 <= queue <= first <= total


async def test_speculation_off_drafts_nothing_and_changes_nothing(tiny: Served):
    on, off = await asyncio.gather(
        tiny.client.stream(ask(max_tokens=120)), tiny.client.stream(ask(max_tokens=120, speculation=OFF))
    )
    assert tokens_of(on) == tokens_of(off)
    assert off[-1].finished.usage.draft_tokens == 0
    assert on[-1].finished.usage.draft_tokens > 0
    deltas = [message.delta for message in off if message.WhichOneof("event") == "delta"]
    assert all(len(delta.token_ids) == 1 for delta in deltas)


async def test_seeded_sampling_repeats(tiny: Served):
    sampled = ask(
        max_tokens=40, sampling_params=pb.SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=2**64 - 1)
    )
    first, second = await asyncio.gather(tiny.client.generate(sampled), tiny.client.generate(sampled))
    assert first.token_ids == second.token_ids
    sampled.sampling_params.seed = 1
    assert (await tiny.client.generate(sampled)).token_ids != first.token_ids


async def test_stop_token_ends_an_answer_and_is_not_part_of_it(tiny: Served):
    plain = list((await tiny.client.generate(ask(max_tokens=30))).token_ids)
    stopped = await tiny.client.generate(ask(max_tokens=30, stop=pb.StopConditions(stop_token_ids=[plain[10]])))
    assert list(stopped.token_ids) == plain[: plain.index(plain[10])]
    assert stopped.finish_reason == pb.FINISH_REASON_STOP
    assert stopped.stop_reason.stop_token_id == plain[10]


async def test_log_probabilities_come_with_their_tokens(tiny: Served):
    request = ask(max_tokens=40, output=pb.OutputOptions(logprobs=3))
    whole, messages = await asyncio.gather(tiny.client.generate(request), tiny.client.stream(request))
    deltas = [message.delta for message in messages if message.WhichOneof("event") == "delta"]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert [each for delta in deltas for each in delta.logprobs] == list(whole.logprobs)
    assert len(whole.logprobs) == len(whole.token_ids) == 40
    for token_id, each in zip(whole.token_ids, whole.logprobs, strict=True):
        assert (each.rank, each.top_token_ids[0], each.top_logprobs[0]) == (1, token_id, each.logprob)
        assert list(each.top_logprobs) == sorted(each.top_logprobs, reverse=True)
    assert not (await tiny.client.generate(ask())).logprobs
    request = ask(*range(5, 45), max_tokens=3, output=pb.OutputOptions(prompt_logprobs=1))
    whole, messages = await asyncio.gather(tiny.client.generate(request), tiny.client.stream(request))
    assert list(messages[1].delta.prompt_logprobs) == list(whole.prompt_logprobs)
    assert len(whole.prompt_logprobs) == 39
    assert whole.usage.cached_tokens == 0


async def test_penalties_and_bans_hold_with_drafts_and_without(tiny: Served):
    plain = list((await tiny.client.generate(ask(max_tokens=60))).token_ids)
    sampling = pb.SamplingParams(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias=pb.LogitBias(token_ids=plain[:1], biases=[-100.0]),
        no_repeat_ngram_size=2,
    )
    on, off = await asyncio.gather(
        tiny.client.generate(ask(max_tokens=60, sampling_params=sampling)),
        tiny.client.generate(ask(max_tokens=60, sampling_params=sampling, speculation=OFF)),
    )
    assert list(on.token_ids) == list(off.token_ids) != plain
    assert plain[0] not in on.token_ids
    pairs = [*zip(on.token_ids, on.token_ids[1:], strict=False)]
    assert len(set(pairs)) == len(pairs)


async def test_samples_of_one_prompt_have_an_index(tiny: Served):
    sampling = pb.SamplingParams(temperature=1.0, seed=5, n=3)
    request = ask(*range(5, 45), max_tokens=20, sampling_params=sampling, draft_scope="request")
    whole, messages = await asyncio.gather(tiny.client.generate(request), tiny.client.stream(request))
    tokens: dict[int, list[int]] = {}
    for message in messages:
        if message.WhichOneof("event") == "delta":
            tokens.setdefault(message.delta.index, []).extend(message.delta.token_ids)
    each = [whole, *whole.other_samples]
    assert [tokens[index] for index in range(3)] == [list(sample.token_ids) for sample in each]
    ended = [message.finished for message in messages if message.WhichOneof("event") == "finished"]
    assert sorted(finished.index for finished in ended) == [0, 1, 2]
    assert [sample.usage.cached_tokens for sample in each] == [0, 39, 39]


async def test_200_requests_against_a_queue_of_32(serve_tiny: Serve):
    async with serve_tiny(max_num_seqs=8, max_waiting=32) as served:
        request = ask(max_tokens=20)
        wanted = (await served.client.generate(request)).token_ids
        step, all_refused, failures = core_of(served.engine).step, threading.Event(), []

        def step_once_all_are_refused() -> None:
            assert all_refused.wait(60)
            step()

        async def send() -> pb.GenerateResponse | None:
            try:
                return await served.client.generate(request)
            except grpc.aio.AioRpcError as error:
                failures.append(unpack(error))
                if len(failures) == 160:
                    all_refused.set()
                return None

        core_of(served.engine).step = step_once_all_are_refused
        results = await asyncio.gather(*(send() for _ in range(200)))
        answers = [answer for answer in results if answer is not None]
        assert (len(answers), len(failures)) == (40, 160)  # what runs and what waits is answered
        assert all(answer.token_ids == wanted for answer in answers)
        for failed in failures:
            assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert failed.retry_after_s is not None
            assert "32" in failed.message
        assert (await served.client.generate(request)).token_ids == wanted


async def test_deadline_while_running(serve_tiny: Serve):
    async with serve_tiny(step_s=0.005, max_num_seqs=1) as served:
        kinds = []

        async def read() -> None:
            async for message in served.client.stub.StreamGenerate(ask(max_tokens=500, speculation=OFF), timeout=1.0):
                kinds.append(message.WhichOneof("event"))

        assert (await failure_of(read())).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert kinds[:2] == ["started", "delta"]
        assert "finished" not in kinds
        await served.settle()
        # The only place is free again, at once.
        assert len((await served.client.generate(ask(), timeout=5)).token_ids) == 8


async def test_deadline_while_queued(serve_tiny: Serve):
    async with serve_tiny(step_s=0.005, max_num_seqs=1) as served:
        running = aiter(served.client.stub.StreamGenerate(ask(max_tokens=200, speculation=OFF)))
        await anext(running)
        queued = await asyncio.gather(
            *(failure_of(served.client.generate(ask(), timeout=0.2)) for _ in range(5)),
            *(failure_of(served.client.stream(ask(), timeout=0.2)) for _ in range(5)),
        )
        assert {failed.code for failed in queued} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        rest = [message async for message in running]
        assert len(tokens_of(rest)) == 200


async def test_deadlines_while_being_told_of_them_are_no_error_of_the_servers(serve_tiny: Serve, caplog: Any):
    rng = random.Random(0)
    async with serve_tiny(step_s=0.002, max_num_seqs=4, max_waiting=1000) as served:
        send = served.client.generate, served.client.stream
        for _ in range(20):
            calls = (send[i % 2](ask(max_tokens=30), timeout=rng.uniform(0.005, 0.2)) for i in range(60))
            results = await asyncio.gather(*calls, return_exceptions=True)
            kinds = {error.code() for error in results if isinstance(error, grpc.aio.AioRpcError)}
            assert kinds <= {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("seed", "memory"),
    [(0, 32 * MiB), (1, MiB // 2), *(pytest.param(seed, MiB // 2, marks=pytest.mark.slow) for seed in range(2, 22))],
)
async def test_cancel_storm(serve_tiny: Serve, seed: int, memory: int):
    """Clients leave at every point: before the server has the call, while queued, in prefill, between any two deltas,
    and by closing the whole connection. With little memory, requests are preempted meanwhile."""
    rng = random.Random(seed)
    small = {"max_num_batched_tokens": 64, "prefill_chunk_size": 16, "max_model_len": 448}
    async with serve_tiny(max_num_seqs=6, max_waiting=200, kv_cache_memory=memory, **small) as served:
        prompts = [[rng.randrange(3, 128) for _ in range(rng.randint(1, 100))] for _ in range(5)]
        wanted = [(await served.client.generate(ask(*prompt, max_tokens=120))).token_ids for prompt in prompts]
        storm = [_leave_early(served, prompts[i % 5], rng.random(), i % 4) for i in range(80)]
        stay = [served.client.generate(ask(*prompt, max_tokens=120)) for prompt in prompts * 3]
        results = await asyncio.gather(*storm, *stay)
        assert [answer.token_ids for answer in results[80:]] == wanted * 3
        await served.settle()
        assert (await served.client.generate(ask(*prompts[0], max_tokens=120))).token_ids == wanted[0]
        if memory < MiB:
            assert served.engine.metrics.snapshot()["preemptions_total"] > 0


async def _leave_early(served: Served, prompt: list[int], when: float, how: int) -> None:
    request = ask(*prompt, max_tokens=300)
    await asyncio.sleep(when * 0.2)  # arrivals are spread over the storm
    if how == 0:  # at once, or nearly
        call: Any = served.client.stub.Generate(request)
        for _ in range(int(when * 20)):
            await asyncio.sleep(0)
        call.cancel()
    elif how == 1:  # while waiting for the whole answer
        answer = served.client.generate(request, timeout=0.01 + when * 0.3)  # which may be enough
        (came,) = await asyncio.gather(answer, return_exceptions=True)
        if isinstance(came, BaseException):
            assert isinstance(came, grpc.aio.AioRpcError)
            assert came.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    elif how == 2:  # after some deltas
        call = served.client.stub.StreamGenerate(request)
        messages = aiter(call)
        for _ in range(int(when * 12)):
            await anext(messages)
        call.cancel()
    else:  # with the connection
        client = Client(served.address)
        messages = aiter(client.stub.StreamGenerate(request))
        for _ in range(1 + int(when * 6)):
            await anext(messages)
        await client.channel.close(None)


async def test_a_slow_reader_holds_nobody_up(tiny: Served):
    """One client reads nothing; the others' answers come all the same."""
    unread = tiny.client.stub.StreamGenerate(ask(max_tokens=400))
    answers = await asyncio.gather(*(tiny.client.generate(ask(max_tokens=20)) for _ in range(4)))
    assert all(len(answer.token_ids) == 20 for answer in answers)
    assert len(tokens_of([message async for message in unread])) == 400


async def test_drain_finishes_what_is_in_flight(serve_tiny: Serve):
    async with serve_tiny(step_s=0.01) as served:
        calls = [asyncio.create_task(served.client.stream(ask(max_tokens=200))) for _ in range(4)]
        await until(lambda: served.engine.num_in_flight == 4)
        assert await served.server.drain()
        assert [len(tokens_of(messages)) for messages in await asyncio.gather(*calls)] == [200] * 4


async def test_drain_out_of_time_ends_every_request_once(serve_tiny: Serve):
    async with serve_tiny(step_s=0.02) as served:
        calls = [failure_of(served.client.stream(ask(max_tokens=500))) for _ in range(20)]
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: served.engine.num_in_flight == 20)
        hurry = asyncio.Event()
        hurry.set()
        assert await served.server.drain(hurry) is False
        assert {failed.code for failed in await asyncio.gather(*tasks)} == {grpc.StatusCode.UNAVAILABLE}
