"""The offline API over the bundled model, in fp32 so that texts may be compared exactly."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from batchserve import LLM, RequestOutput, SamplingParams, SpeculationParams, interrupts
from batchserve import llm as llm_module
from batchserve.config import DRAFTERS
from batchserve.demo.prompts import PROMPTS
from batchserve.errors import ConfigError, InvalidRequestError
from batchserve.request import DraftScope
from batchserve.types import FinishReason

TEXTS = [prompt.text for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
OFF = SpeculationParams(is_enabled=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # At a fixed length: how much adaptive drafts is up to the time that steps take.
    llm = LLM(dtype="float32", max_model_len=512, max_num_seqs=8, decoding_length=8)
    yield llm
    core = llm._core
    core.check_integrity()
    assert not core.has_work
    assert core.executor.allocator.free_tokens == core.executor.allocator.total_tokens


def generate(llm: LLM, prompts: object, params: object = GREEDY, **options: object) -> list[RequestOutput]:
    return llm.generate(prompts, params, show_progress=False, **options)  # type: ignore[arg-type]


def one(llm: LLM, params: SamplingParams, prompt: str = TEXTS[4]) -> RequestOutput:
    (output,) = generate(llm, prompt, params)
    return output


def check_usage(llm: LLM, output: RequestOutput) -> None:
    usage, timing = output.usage, output.timing
    assert usage.prompt_tokens == len(output.prompt_token_ids)
    assert usage.completion_tokens == len(output.token_ids)
    assert 0 <= usage.accepted_draft_tokens <= usage.draft_tokens
    assert 0 <= timing.queue_s <= timing.first_token_s <= timing.total_s
    assert not set(output.token_ids) & set(llm.info.eos_token_ids)


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[RequestOutput]:
    """All prompts at once, greedy, with speculation."""
    return generate(llm, TEXTS)


def test_a_ctrl_c_in_the_midst_of_a_step_ends_the_call_and_leaves_the_engine_whole(
    llm: LLM, answers: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, begun, ended = llm._core.step, [], []

    def interrupted() -> None:
        begun.append(None)
        if len(begun) == 3:
            signal.raise_signal(signal.SIGINT)
        step()
        ended.append(None)

    monkeypatch.setattr(llm._core, "step", interrupted)
    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        generate(llm, TEXTS)
    assert len(begun) == len(ended) == 3, "the step is not cut short, and the last one"
    monkeypatch.undo()
    assert [each.token_ids for each in generate(llm, TEXTS)] == [each.token_ids for each in answers]


def test_a_ctrl_c_whose_handler_only_takes_note_ends_nothing(
    llm: LLM, answers: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, noted = llm._core.step, list[int]()

    def interrupted() -> None:
        if not noted:
            signal.raise_signal(signal.SIGINT)
        step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with handled_by(lambda number, frame: noted.append(number)):
        assert [each.token_ids for each in generate(llm, TEXTS)] == [each.token_ids for each in answers]
    assert noted == [signal.SIGINT]


def test_a_second_ctrl_c_while_the_first_is_noted_waits_for_nothing(
    llm: LLM, answers: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes inside of the handler, wherever that is: here at every line of it."""
    step, file = llm._core.step, interrupts.__file__

    def again(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename == file and event == "line":
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
            sys.settrace(again)
        return again

    def interrupted() -> None:
        sys.settrace(again)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            sys.settrace(None)
        step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        generate(llm, TEXTS)
    monkeypatch.undo()
    assert [each.token_ids for each in generate(llm, TEXTS)] == [each.token_ids for each in answers]


def test_a_ctrl_c_does_not_cut_short_the_clearing_of_a_scope(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clear, cleared = llm._core.clear_draft_scope, list[DraftScope]()

    def interrupted(scope: DraftScope) -> None:
        signal.raise_signal(signal.SIGINT)
        clear(scope)
        cleared.append(scope)

    monkeypatch.setattr(llm._core, "clear_draft_scope", interrupted)
    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        llm.clear_draft_scope()
    assert len(cleared) == 1


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """A Ctrl-C meanwhile; the handler is still there at the end."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_texts_are_the_same_with_and_without_speculation(llm: LLM, answers: list[RequestOutput]) -> None:
    plain = generate(llm, TEXTS, speculation=OFF)
    for with_drafts, without in zip(answers, plain, strict=True):
        check_usage(llm, with_drafts)
        check_usage(llm, without)
        assert with_drafts.text == without.text
        assert with_drafts.token_ids == without.token_ids
        assert with_drafts.finish_reason is without.finish_reason
        assert without.usage.draft_tokens == 0
    assert sum(output.usage.accepted_draft_tokens for output in answers) > 30  # drafts are right for real reasons


def test_text_is_the_decoded_token_ids(llm: LLM, answers: list[RequestOutput]) -> None:
    tokenizer = llm._processor.facts.tokenizer
    assert tokenizer is not None
    for output in answers:
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_an_answer_is_the_same_alone_and_as_token_ids(llm: LLM, answers: list[RequestOutput]) -> None:
    """One string, one flat list of ids, lists of both: prompts in any form, answers in their order."""
    ids = [output.prompt_token_ids for output in answers]
    assert [o.token_ids for o in generate(llm, TEXTS[1])] == [answers[1].token_ids]
    assert [o.token_ids for o in generate(llm, ids[2])] == [answers[2].token_ids]
    mixed = generate(llm, [ids[3], TEXTS[0]])
    assert [o.token_ids for o in mixed] == [answers[3].token_ids, answers[0].token_ids]
    assert [o.prompt_token_ids for o in mixed] == [ids[3], ids[0]]
    assert generate(llm, []) == []


def test_every_prompt_may_have_its_own_speculation(llm: LLM, answers: list[RequestOutput]) -> None:
    """Off, every drafter, scopes, references, caps, all in one batch: nothing of it changes an answer."""
    references = [answers[i].token_ids for i in range(4)]
    mixed = generate(
        llm,
        [*TEXTS[:5], TEXTS[0], TEXTS[1], TEXTS[2]],
        speculation=[
            OFF,
            *(SpeculationParams(drafter=name, references=references, draft_scope="request") for name in DRAFTERS),
            SpeculationParams(drafter="trie", max_draft_tokens=1),
            SpeculationParams(max_draft_tokens=99, branch_length=2),
        ],
    )
    assert [o.token_ids for o in mixed] == [answers[i].token_ids for i in (0, 1, 2, 3, 4, 0, 1, 2)]
    has_drafts = [False, *(name != "none" for name in DRAFTERS), True, True]
    assert [o.usage.draft_tokens > 0 for o in mixed] == has_drafts


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
def test_an_answer_that_quotes_a_reference_is_drafted_from_it(
    llm: LLM, answers: list[RequestOutput], drafter: str
) -> None:
    def steps(**more: object) -> int:
        speculation = SpeculationParams(drafter=drafter, draft_scope="request", **more)  # type: ignore[arg-type]
        (output,) = generate(llm, TEXTS[0], speculation=speculation)
        assert output.token_ids == answers[0].token_ids
        return output.usage.completion_tokens - output.usage.accepted_draft_tokens

    assert steps(references=[answers[0].text]) < steps() - 5


def test_another_number_of_speculations_than_of_prompts_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="speculation = 2: must be one, or one for each of 3 prompts"):
        generate(llm, TEXTS[:3], speculation=[OFF, OFF])
    with pytest.raises(InvalidRequestError, match="speculation"):
        generate(llm, TEXTS[:1], speculation=["off"])


def test_every_prompt_may_have_its_own_priority(llm: LLM, answers: list[RequestOutput]) -> None:
    """More than fit at once: the later ones are let in first, the answers are in the order of the prompts."""
    prompts = [TEXTS[i % 4] for i in range(12)]
    outputs = generate(llm, prompts, priority=np.arange(12) - 6)
    assert [output.token_ids for output in outputs] == [answers[i % 4].token_ids for i in range(12)]
    starts = [output.timing.queue_s for output in outputs]
    assert max(starts[4:]) < min(starts[:4])  # eight seats
    assert len(generate(llm, prompts[:2], priority=np.int64(5))) == 2


@pytest.mark.parametrize("priority", ["high", 1.5, True, [0, 1001], [0, True], [1], [[1], [2]]], ids=str)
def test_what_is_no_priority_is_refused_by_name(llm: LLM, priority: object) -> None:
    with pytest.raises(InvalidRequestError, match="priority = "):
        generate(llm, TEXTS[:2], priority=priority)


def test_a_scope_that_was_cleared_drafts_no_more() -> None:
    """The second time a prompt is asked, its own answer is there to be drafted; in another scope it is not."""
    llm = LLM(dtype="float32", max_model_len=512, max_num_seqs=1, decoding_length=8)

    def accepted(scope: str) -> int:
        (output,) = generate(llm, TEXTS[0], speculation=SpeculationParams(draft_scope=scope))
        return output.usage.accepted_draft_tokens

    cold, warm = accepted("mine"), accepted("mine")
    assert warm > cold
    assert accepted("other") == cold
    llm.clear_draft_scope("mine")
    assert accepted("mine") < warm
    assert accepted("other") >= warm
    llm.clear_draft_scope("request")  # shares nothing: harmless
    with pytest.raises(InvalidRequestError, match="draft_scope"):
        llm.clear_draft_scope("x" * 300)


def test_callers_in_several_threads_take_turns(llm: LLM, answers: list[RequestOutput]) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: generate(llm, text), TEXTS))
    assert [output.token_ids for (output,) in found] == [output.token_ids for output in answers]


@pytest.mark.parametrize("path", ["", 5, None, "a\0b"])
def test_drafts_are_saved_to_nothing_but_a_path(llm: LLM, path: Any) -> None:
    with pytest.raises(ConfigError, match="path = "):
        llm.save_drafts(path)


@pytest.mark.timeout(60)
def test_prompts_may_be_made_by_the_same_llm_while_they_are_read(llm: LLM, answers: list[RequestOutput]) -> None:
    made: Any = (text for text in TEXTS if generate(llm, text))
    assert [output.token_ids for output in generate(llm, made)] == [output.token_ids for output in answers]


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_max_tokens_is_exact(llm: LLM, answers: list[RequestOutput], max_tokens: int) -> None:
    output = one(llm, dataclasses.replace(GREEDY, max_tokens=max_tokens))
    assert output.token_ids == answers[4].token_ids[:max_tokens]
    assert output.finish_reason is FinishReason.LENGTH


def test_unset_max_tokens_goes_to_the_end_of_the_context(llm: LLM) -> None:
    prompt = [7] * (llm.info.max_model_len - 5)
    (output,) = generate(llm, prompt, SamplingParams(temperature=0.0, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (5, FinishReason.LENGTH)


def test_stop_strings_cut_the_text_and_stop_ids_the_tokens(llm: LLM, answers: list[RequestOutput]) -> None:
    whole = answers[4]
    stop = whole.text[10:14]
    cut = one(llm, dataclasses.replace(GREEDY, stop=("\x00never", stop)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    check_usage(llm, cut)
    stop_id = whole.token_ids[5]
    ended = one(llm, dataclasses.replace(GREEDY, stop_token_ids=(stop_id,)))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(stop_id)]
    assert ended.finish_reason is FinishReason.STOP


def test_seeds_reproduce_and_differ_whatever_the_batch_and_the_drafts(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=4.0, top_p=0.95, top_k=50, seed=seed, max_tokens=16, ignore_eos=True)
        for seed in (1, 2, 3)
    ]
    together = generate(llm, [TEXTS[4]] * 3, params)
    alone = [one(llm, p) for p in params]
    plain = generate(llm, [TEXTS[4]] * 3, params, speculation=OFF)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone] == [o.token_ids for o in plain]
    assert len({tuple(o.token_ids) for o in together}) == 3


def test_every_prompt_may_have_parameters_of_its_own(llm: LLM, answers: list[RequestOutput]) -> None:
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (3, 5, 7)]
    outputs = generate(llm, TEXTS[:3], params)
    assert [len(o.token_ids) for o in outputs] == [3, 5, 7]
    for output, whole in zip(outputs, answers, strict=False):
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    with pytest.raises(InvalidRequestError, match="3 prompts"):
        generate(llm, TEXTS[:3], params[:2])


@pytest.mark.parametrize("bad", ["", [], [99_999], [5] * 512])
def test_one_invalid_prompt_among_valid_ones_runs_nothing(llm: LLM, bad: object) -> None:
    steps = llm._core.metrics.snapshot()["steps_total"]
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\](\[0\])? = "):
        generate(llm, [TEXTS[0], bad, TEXTS[1]])
    assert llm._core.metrics.snapshot()["steps_total"] == steps
    assert not llm._core.has_work


@pytest.mark.parametrize(
    "prompts", [None, 5, 1.5, b"text", [b"text"], {"prompt": "text"}, [None], [[5, [6]]], np.array(5), torch.tensor(5)]
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts"):
        generate(llm, prompts)


@pytest.mark.parametrize("wrong", [0, 5, "greedy", {"temperature": 0}, [None], [{"temperature": 0}]])
@pytest.mark.parametrize("field", ["sampling_params", "speculation"])
def test_what_are_no_parameters_is_refused_by_name(llm: LLM, field: str, wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        llm.generate(["a"], show_progress=False, **{field: wrong})  # type: ignore[arg-type]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"prompts": [5, 99_999]}, r"prompts\[1\]"),
        ({"prompts": [[5], [5, 99_999]]}, r"prompts\[1\]\[1\]"),
        ({"prompts": ["a", ""]}, r"prompts\[1\]"),
        ({"prompts": ""}, "prompts"),
        ({"sampling_params": {}}, "sampling_params"),
        ({"sampling_params": SamplingParams(max_tokens=5000)}, "max_tokens"),
        ({"prompts": ["a", "b"], "sampling_params": SamplingParams(top_k=10**6)}, r"prompts\[0\]: top_k"),
        ({"speculation": 5}, "speculation"),
        ({"speculation": SpeculationParams(references=["a", (5, 99_999)])}, r"references\[1\]\[1\]"),
        ({"priority": 1001}, "priority"),
    ],
)
def test_an_error_names_the_argument_that_the_caller_has(llm: LLM, arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{where} = "):
        llm.generate(**{"prompts": "a", "show_progress": False, **arguments})


@pytest.mark.faults
def test_a_progress_bar_that_fails_leaves_the_engine_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the terminal has gone."""

    @contextmanager
    def broken(total: int, is_shown: bool) -> Iterator[Any]:
        yield lambda delta: 1 // 0

    with monkeypatch.context() as patch:
        patch.setattr(llm_module, "_progress_bar", broken)
        with pytest.raises(ZeroDivisionError):
            llm.generate(TEXTS[:3], GREEDY)
    llm._core.check_integrity()
    assert not llm._core.has_work


def test_arrays_and_tensors_are_token_ids(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    expected = generate(llm, [[5, 6, 7]], params)[0].token_ids
    for prompts in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]]), [np.array([5, 6, 7])]):
        assert [output.token_ids for output in generate(llm, prompts, params)] == [expected]


def test_more_prompts_than_fit_at_once_are_all_answered(llm: LLM) -> None:
    outputs = generate(llm, [[5, 6, 7, i] for i in range(10, 40)], dataclasses.replace(GREEDY, max_tokens=3))
    assert len(outputs) == 30
    assert [o.prompt_token_ids[-1] for o in outputs] == list(range(10, 40))


@pytest.mark.parametrize("error", [RuntimeError("torn"), KeyboardInterrupt()], ids=["fault", "ctrl-c"])
def test_an_interrupted_call_leaves_nothing_for_the_next(
    llm: LLM, answers: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    runner = llm._core.executor
    right, calls = runner.forward, 0

    def failing(batch):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return right(batch)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", failing)
        with pytest.raises(type(error)):
            generate(llm, TEXTS[:3])
    assert not llm._core.has_work
    llm._core.check_integrity()
    assert one(llm, dataclasses.replace(GREEDY, max_tokens=8)).token_ids == answers[4].token_ids[:8]


def test_the_progress_bar_counts_prompts_on_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    short = dataclasses.replace(GREEDY, max_tokens=2)
    generate(llm, TEXTS[:2], short)
    assert capsys.readouterr() == ("", "")
    llm.generate(TEXTS[:2], short)
    shown = capsys.readouterr()
    assert shown.out == "", "it is the program's"
    assert "2/2" in shown.err


def test_a_model_without_a_tokenizer_answers_in_token_ids(tiny_model: dict[str, Path]) -> None:
    llm = LLM(str(tiny_model["llama"]), dtype="float32", drafter="none")
    (output,) = generate(llm, [5, 6, 7], dataclasses.replace(GREEDY, max_tokens=4))
    assert (output.text, len(output.token_ids)) == ("", 4)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        generate(llm, "hello")
