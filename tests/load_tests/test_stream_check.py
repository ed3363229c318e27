"""Malformed streams and wrong counts are told from good ones; latencies are what the clock says."""

from __future__ import annotations

from itertools import count

import pytest

from batchserve.v1 import generation_pb2 as pb
from load_tests.stages import StageSamples, percentiles_ms, plan_stages, stage_at
from load_tests.stream_check import StreamShapeError, consume


def make_request(is_speculating=True, max_tokens=8):
    mode = pb.SpeculationOptions.MODE_AUTO if is_speculating else pb.SpeculationOptions.MODE_OFF
    return pb.GenerateRequest(
        text="x", stop=pb.StopConditions(max_tokens=max_tokens), speculation=pb.SpeculationOptions(mode=mode)
    )


def started(prompt_tokens=3):
    return pb.StreamGenerateResponse(started=pb.Started(request_id="r", prompt_tokens=prompt_tokens))


def delta(*token_ids):
    return pb.StreamGenerateResponse(delta=pb.TokenDelta(text="t", token_ids=token_ids))


def finished(completion_tokens, reason=pb.FINISH_REASON_STOP, prompt_tokens=3, drafted=0, accepted=0):
    usage = pb.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        draft_tokens=drafted,
        accepted_draft_tokens=accepted,
    )
    return pb.StreamGenerateResponse(finished=pb.Finished(finish_reason=reason, usage=usage))


def ticking():
    ticks = count(1)
    return lambda: float(next(ticks))


def consumed(request, events):
    return consume(request, events, ticking(), sent_s=0.0)


GOOD = [started(), delta(1), delta(2, 3), delta(), delta(4), finished(4, drafted=5, accepted=1)]


def test_a_good_stream_and_its_latencies():
    record = consumed(make_request(), iter(GOOD))
    assert record.ttft_s == 1.0
    assert record.inter_token_latencies_s() == [0.5, 0.5, 2.0]  # the delta without tokens is no arrival of any
    assert record.end_to_end_s == 5.0
    assert record.usage.accepted_draft_tokens == 1


def test_an_empty_answer_has_no_first_token():
    record = consumed(make_request(), iter([started(), finished(0)]))
    assert record.ttft_s is None
    assert record.inter_token_latencies_s() == []


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "ended with OK before started"),
        ([started(), delta(1)], "ended with OK before finished"),
        ([delta(1), started()], "delta before started"),
        ([finished(0)], "finished before started"),
        ([started(), started()], "a second started"),
        ([*GOOD, delta(5)], "delta after finished"),
        ([*GOOD, finished(4)], "finished after finished"),
        ([started(), pb.StreamGenerateResponse()], "an empty event"),
        ([started(), delta(1), finished(2)], "1 tokens delivered = completion_tokens 2"),
        ([started(), finished(0, prompt_tokens=4)], "prompt_tokens 3 = 4"),
        ([started(0), finished(0, prompt_tokens=0)], "prompt_tokens 0 > 0"),
        ([started(), finished(0, drafted=1, accepted=2)], "accepted 2 <= drafted 1"),
        ([started(), finished(0, reason=pb.FINISH_REASON_UNSPECIFIED)], "a finish reason"),
        ([started(), delta(*range(9)), finished(9)], "completion_tokens 9 <= max_tokens 8"),
        ([started(), delta(1), finished(1, reason=pb.FINISH_REASON_LENGTH)], "1 tokens = max_tokens 8"),
    ],
)
def test_a_bad_stream_is_refused_with_what_is_wrong(events, message):
    with pytest.raises(StreamShapeError, match=message):
        consumed(make_request(), iter(events))


def test_drafts_without_speculation_are_refused():
    with pytest.raises(StreamShapeError, match="drafted 5 = 0 without speculation"):
        consumed(make_request(is_speculating=False), iter(GOOD))


def test_stages_come_in_pairs_and_follow_each_other_without_a_gap():
    stages = plan_stages(2.0)
    assert [(s.users, s.is_speculating) for s in stages] == [
        (2, True),
        (2, False),
        (8, False),
        (8, True),
        (16, True),
        (16, False),
    ]
    assert [stage_at(stages, t + 0.1) for t in range(0, 12, 2)] == stages
    assert stage_at(stages, 12.0) is None


def test_only_requests_inside_the_measured_time_count():
    stage = plan_stages(100.0)[1]  # from 100 to 200, measured from 115
    for sent_s, is_counted in ((110.0, False), (150.0, True), (197.0, False)):
        samples = StageSamples(stage)
        record = consumed(make_request(), iter(GOOD))
        record.sent_s += 1000 + sent_s
        record.ended_s += 1000 + sent_s
        record.arrivals = [(1000 + sent_s + at_s, tokens) for at_s, tokens in record.arrivals]
        assert samples.add(record, run_start_s=1000) is is_counted
        assert samples.summary()["measured_requests"] == int(is_counted)
        assert samples.summary()["requests"] == 1
    assert samples.num_tokens == 3  # the fourth came at 201


def test_summary_of_a_stage():
    stage = plan_stages(100.0)[0]
    samples = StageSamples(stage)
    record = consumed(make_request(), iter(GOOD))
    record.sent_s, record.ended_s = 50.0, 55.0
    record.arrivals = [(50.0 + at_s, tokens) for at_s, tokens in record.arrivals]
    samples.add(record, run_start_s=0)
    summary = samples.summary()
    assert summary["acceptance_length"] == pytest.approx(4 / 3, abs=1e-3)
    assert summary["tokens_per_s"] == round(4 / 85, 1)
    assert summary["ttft_ms"] == {"mean": 1000.0, "p50": 1000.0, "p90": 1000.0, "p99": 1000.0}


def test_percentiles_are_by_nearest_rank():
    assert percentiles_ms([]) == {}
    values = percentiles_ms([i / 1e3 for i in range(1, 101)])
    assert values == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
