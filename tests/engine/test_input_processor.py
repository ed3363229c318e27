"""The door: every bad input has an error of its own that names field, value and bound; defaults are the model's."""

from __future__ import annotations

import dataclasses
import enum
import math
from array import array
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from batchserve.config import EngineConfig
from batchserve.draft.factory import draft_limits
from batchserve.engine.input_processor import InputProcessor, ModelFacts
from batchserve.engine.prompt_tokenizer import HEAD_CHARS
from batchserve.errors import ConfigError, InvalidRequestError
from batchserve.request import TENANT, DraftScope, Request, ResolvedSpeculation
from batchserve.runner.model_folder import resolve_model
from batchserve.sampling_params import MAX_SEED, SamplingParams
from batchserve.types import SpeculationParams

VOCAB_SIZE, MAX_MODEL_LEN = 4096, 64


def make_processor(*, has_tokenizer: bool = True, config: EngineConfig | None = None, **changes: Any) -> InputProcessor:
    facts = ModelFacts(
        name="bundled",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(1, 3),
        defaults={},
        tokenizer=AutoTokenizer.from_pretrained(resolve_model("bundled")) if has_tokenizer else None,
    )
    config = config or EngineConfig()
    return InputProcessor(dataclasses.replace(facts, **changes), MAX_MODEL_LEN, config, draft_limits(config, 0))


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    return make_processor()


def submit(processor: InputProcessor, prompt: Any = (5, 6, 7), request_id: str = "r", **params: Any) -> Request:
    """The whole way through the door."""
    names = {field.name for field in dataclasses.fields(SpeculationParams)}
    speculation = {name: params.pop(name) for name in names & set(params)}
    priority = params.pop("priority", 0)
    token_ids = processor.tokenize(prompt)
    sampling = SamplingParams(**params)
    return processor.make_request(
        request_id, token_ids, sampling, SpeculationParams(**speculation), 0.0, priority=priority
    )


@pytest.mark.parametrize(
    ("options", "reason", "field", "bound"),
    [
        ({"prompt": ""}, "EMPTY_PROMPT", "prompt", "at least one"),
        ({"prompt": []}, "EMPTY_PROMPT", "prompt", "at least one"),
        ({"prompt": [5, VOCAB_SIZE]}, "TOKEN_ID_OUT_OF_RANGE", "prompt[1]", "0..4095"),
        ({"prompt": [5.7, 6]}, "INVALID_TOKEN_IDS", "prompt", "integers"),
        ({"prompt": [5, "6"]}, "INVALID_TOKEN_IDS", "prompt", "integers"),
        ({"prompt": [None]}, "INVALID_TOKEN_IDS", "prompt", "integers"),
        ({"prompt": b"ab"}, "INVALID_TOKEN_IDS", "prompt", "integers"),
        ({"prompt": iter([5, 6])}, "INVALID_TOKEN_IDS", "prompt", "integers"),
        ({"prompt": {5: 6}}, "INVALID_TOKEN_IDS", "prompt", "integers"),
        ({"prompt": [True, False]}, "INVALID_TOKEN_IDS", "prompt", "integers"),
        ({"prompt": [-1]}, "TOKEN_ID_OUT_OF_RANGE", "prompt[0]", "0..4095"),
        ({"prompt": [2**70]}, "TOKEN_ID_OUT_OF_RANGE", "prompt[0]", "0..4095"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "PROMPT_TOO_LONG", "prompt", "at most 63 tokens"),
        ({"prompt": "word " * 300}, "PROMPT_TOO_LONG", "prompt", "at most 63 tokens"),
        ({"prompt": "x" * 5_000_000}, "PROMPT_TOO_LONG", "prompt", "at most 63 tokens"),
        ({"prompt": [5] * 60, "max_tokens": 5}, "CONTEXT_EXCEEDED", "max_tokens", "at most 4"),
        ({"max_tokens": 0}, "INVALID_MAX_TOKENS", "max_tokens", ">= 1"),
        ({"max_tokens": -3}, "INVALID_MAX_TOKENS", "max_tokens", ">= 1"),
        ({"temperature": -1.0}, "INVALID_TEMPERATURE", "temperature", ">= 0"),
        ({"temperature": math.nan}, "INVALID_TEMPERATURE", "temperature", "finite"),
        ({"temperature": math.inf}, "INVALID_TEMPERATURE", "temperature", "finite"),
        ({"top_p": 2.0}, "INVALID_TOP_P", "top_p", "(0, 1]"),
        ({"top_p": 0.0}, "INVALID_TOP_P", "top_p", "(0, 1]"),
        ({"top_p": math.nan}, "INVALID_TOP_P", "top_p", "(0, 1]"),
        ({"top_k": -1}, "INVALID_TOP_K", "top_k", ">= 0"),
        ({"top_k": VOCAB_SIZE + 1}, "INVALID_TOP_K", "top_k", "at most 4096"),
        ({"seed": -1}, "INVALID_SEED", "seed", "0.."),
        ({"seed": MAX_SEED + 1}, "INVALID_SEED", "seed", "0.."),
        ({"stop": ("ok", "")}, "INVALID_STOP_STRING", "stop[1]", "1..1024"),
        ({"stop": ("x" * 1025,)}, "INVALID_STOP_STRING", "stop[0]", "1..1024"),
        ({"stop": ("x",) * 65}, "TOO_MANY_STOP_STRINGS", "stop", "at most 64"),
        ({"stop_token_ids": (1, 9999)}, "TOKEN_ID_OUT_OF_RANGE", "stop_token_ids[1]", "0..4095"),
        ({"request_id": "x" * 257}, "INVALID_REQUEST_ID", "request_id", "256"),
        ({"drafter": "oracle"}, "UNKNOWN_DRAFTER", "drafter", "mixture, trie"),
        ({"drafter": ["trie"]}, "UNKNOWN_DRAFTER", "drafter", "mixture, trie"),
        ({"max_draft_tokens": -1}, "INVALID_MAX_DRAFT_TOKENS", "max_draft_tokens", ">= 0"),
        ({"branch_length": 0}, "INVALID_BRANCH_LENGTH", "branch_length", ">= 1"),
        ({"branch_length": 1.5}, "INVALID_BRANCH_LENGTH", "branch_length", "an integer"),
        ({"tpot_target_ms": 0.0}, "INVALID_TPOT_TARGET_MS", "tpot_target_ms", "finite and > 0"),
        ({"tpot_target_ms": -1.0}, "INVALID_TPOT_TARGET_MS", "tpot_target_ms", "finite and > 0"),
        ({"tpot_target_ms": math.inf}, "INVALID_TPOT_TARGET_MS", "tpot_target_ms", "finite and > 0"),
        ({"tpot_target_ms": math.nan}, "INVALID_TPOT_TARGET_MS", "tpot_target_ms", "finite and > 0"),
        ({"tpot_target_ms": "20"}, "INVALID_TPOT_TARGET_MS", "tpot_target_ms", "a number"),
        ({"tpot_target_ms": True}, "INVALID_TPOT_TARGET_MS", "tpot_target_ms", "a number"),
        *[
            ({"priority": value}, "INVALID_PRIORITY", "priority", "an integer in -1000..1000")
            for value in (1001, -1001, 10**30, 1.0, "1", True, None)
        ],
        ({"draft_scope": "x" * 257}, "INVALID_DRAFT_SCOPE", "draft_scope", "1..256 characters"),
        ({"draft_scope": "\ud800"}, "INVALID_DRAFT_SCOPE", "draft_scope", "1..256 characters"),
        ({"draft_scope": 7}, "INVALID_DRAFT_SCOPE", "draft_scope", "1..256 characters"),
        ({"references": 7}, "INVALID_REFERENCES", "references", "a list"),
        ({"references": b"text"}, "INVALID_REFERENCES", "references", "a list"),
        ({"references": [None]}, "INVALID_REFERENCES", "references[0]", "a text or token ids"),
        ({"references": [5, 6]}, "INVALID_TOKEN_IDS", "references[0]", "a list"),
        ({"references": ["x"] * 65}, "TOO_MANY_REFERENCES", "references", "at most 64"),
        ({"references": ["x", [5, "6"]]}, "INVALID_TOKEN_IDS", "references[1][1]", "an integer"),
        ({"references": ["x", [5, -1]]}, "TOKEN_ID_OUT_OF_RANGE", "references[1][1]", "0..4095"),
        ({"references": [[VOCAB_SIZE]]}, "TOKEN_ID_OUT_OF_RANGE", "references[0][0]", "0..4095"),
        ({"references": ["\ud800"]}, "INVALID_TEXT", "references[0]", "UTF-8"),
        ({"references": [[5] * 100_000] * 2}, "REFERENCES_TOO_LONG", "references", "at most 131072 tokens"),
        ({"references": ["x" * 600_000] * 2}, "REFERENCES_TOO_LONG", "references", "at most 1048576 characters"),
        # More tokens than characters over eight: only the tokenizer can tell.
        ({"references": ["a b" * 100_000]}, "REFERENCES_TOO_LONG", "references", "at most 131072 tokens"),
    ],
    ids=lambda value: repr(value)[:40].split(" at 0x")[0],  # an address differs from process to process
)
def test_bad_input_names_field_value_and_bound(
    processor: InputProcessor, options: dict[str, Any], reason: str, field: str, bound: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        submit(processor, **options)
    error = caught.value
    assert (error.reason, error.field) == (reason, field)
    assert bound in error.bound
    assert field in str(error)
    assert error.bound in str(error)
    assert len(str(error)) < 400, "a message does not repeat megabytes of input"


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": [0]},
        {"prompt": [VOCAB_SIZE - 1]},
        {"prompt": [5] * (MAX_MODEL_LEN - 1), "max_tokens": 1},
        {"prompt": [5] * 60, "max_tokens": 4},
        {"temperature": 0.0, "top_p": 1.0, "top_k": VOCAB_SIZE, "seed": MAX_SEED},
        {"temperature": 1e-300, "top_p": 1e-300, "top_k": 0, "seed": 0},
        {"stop": ("x" * 1024,) * 64, "stop_token_ids": (0, VOCAB_SIZE - 1)},
        {"request_id": "x" * 256},
        {"priority": 1000},
        {"priority": np.int64(-1000)},
        {"prompt": " "},
        {"prompt": "\n"},
        {"draft_scope": "x" * 256, "branch_length": 1, "max_draft_tokens": 0},
        {"references": ["x"] * 64},
        {"references": [[VOCAB_SIZE - 1] * 131_071, [0]]},
        {"references": ["", []]},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_bounds_themselves_are_inside(processor: InputProcessor, options: dict[str, Any]) -> None:
    request = submit(processor, **options)
    assert request.num_prompt_tokens + request.sampling.max_tokens <= MAX_MODEL_LEN


def test_token_ids_of_numpy_become_plain_integers(processor: InputProcessor) -> None:
    token_ids = processor.tokenize(np.array([5, 6, 7]))  # type: ignore[arg-type]
    assert token_ids == [5, 6, 7]
    assert all(type(token_id) is int for token_id in token_ids)


def test_a_text_of_which_the_tokenizer_makes_nothing_is_an_empty_prompt() -> None:
    class Stripping:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [5] * len(text.strip())}

        def get_vocab(self) -> dict[str, int]:
            return {"a": 5}

    processor = make_processor(tokenizer=Stripping())
    assert processor.tokenize(" a ") == [5]
    with pytest.raises(InvalidRequestError) as caught:
        processor.tokenize("   ")
    assert (caught.value.reason, caught.value.field) == ("EMPTY_PROMPT", "prompt")


def test_speculation_is_the_servers_where_the_request_says_nothing(processor: InputProcessor) -> None:
    config = EngineConfig(drafter="reference", default_draft_scope="team")
    resolved = submit(make_processor(config=config)).speculation
    assert resolved == ResolvedSpeculation("reference", 16, 16, DraftScope(TENANT, "team"), ())
    other = make_processor(config=dataclasses.replace(config, decoding_length=5, branch_length=3))
    assert submit(other).speculation == ResolvedSpeculation("reference", 5, 3, DraftScope(TENANT, "team"), ())
    assert submit(other, drafter="jacobi", draft_scope="mine").speculation == ResolvedSpeculation(
        "jacobi", 5, 3, DraftScope(TENANT, "mine")
    )


def test_caps_of_a_request_hold_under_the_servers_bounds() -> None:
    processor = make_processor(config=EngineConfig(drafter="trie", decoding_length=6, branch_length=4))
    smaller = submit(processor, max_draft_tokens=2, branch_length=1).speculation
    assert (smaller.max_draft_tokens, smaller.branch_length) == (2, 1)
    larger = submit(processor, max_draft_tokens=99, branch_length=99).speculation
    assert (larger.max_draft_tokens, larger.branch_length) == (6, 4)
    assert submit(processor, max_draft_tokens=0).speculation.max_draft_tokens == 0


@pytest.mark.parametrize(
    ("server_ms", "asked_ms", "target_s"),
    [(None, None, None), (40.0, None, 0.04), (40.0, 25, 0.025), (None, np.float32(8), 0.008), (40.0, 100.0, 0.1)],
)
def test_a_latency_target_is_the_requests_or_the_servers(
    server_ms: float | None, asked_ms: float | None, target_s: float | None
) -> None:
    processor = make_processor(config=EngineConfig(drafter="trie", tpot_target_ms=server_ms))
    assert submit(processor, tpot_target_ms=asked_ms).speculation.tpot_target_s == target_s


@pytest.mark.parametrize("options", [{"adaptive": False}, {"decoding_length": 4}])
def test_a_target_that_nothing_could_reach_for_is_refused(options: dict[str, Any]) -> None:
    processor = make_processor(config=EngineConfig(drafter="trie", **options))
    with pytest.raises(InvalidRequestError, match=r"tpot_target_ms = 20.*no adaptive decoding length"):
        submit(processor, tpot_target_ms=20)
    with pytest.raises(ConfigError, match=r"tpot_target_ms = 20.*adaptive decoding length"):
        EngineConfig(tpot_target_ms=20.0, **options)


@pytest.mark.parametrize("options", [{"is_enabled": False}, {"drafter": "none"}, {"max_draft_tokens": 0}])
def test_a_target_of_a_request_without_drafts_is_refused(options: dict[str, Any]) -> None:
    processor = make_processor(config=EngineConfig(drafter="trie", tpot_target_ms=40.0))
    assert submit(processor, **options).speculation.tpot_target_s is None, "the server's is for those who have drafts"
    with pytest.raises(InvalidRequestError, match=r"tpot_target_ms = 20.*no drafts"):
        submit(processor, tpot_target_ms=20, **options)


@pytest.mark.parametrize(
    ("options", "wishes"),
    [
        ({}, {"is_enabled": False, "drafter": "trie"}),
        ({}, {"drafter": "none"}),
        ({"drafter": "none"}, {}),
        ({"decoding_length": 0}, {"drafter": "trie", "max_draft_tokens": 4}),
    ],
    ids=str,
)
def test_speculation_that_is_off_is_off_for_good(options: dict[str, Any], wishes: dict[str, Any]) -> None:
    request = submit(make_processor(config=EngineConfig(**options)), references=["x"], **wishes)
    assert request.speculation == ResolvedSpeculation()
    assert request.speculation.max_draft_tokens == 0


def test_a_request_may_choose_a_drafter_where_the_server_has_none() -> None:
    processor = make_processor(config=EngineConfig(drafter="none", decoding_length=8))
    assert submit(processor, drafter="trie").speculation.max_draft_tokens == 8


@pytest.mark.parametrize(
    ("default", "asked", "scope"),
    [("default", "", "default"), ("default", "mine", "mine"), ("default", "request", None), ("request", "", None)],
)
def test_scopes(default: str, asked: str, scope: str | None) -> None:
    processor = make_processor(config=EngineConfig(default_draft_scope=default))
    expected = None if scope is None else DraftScope(TENANT, scope)
    assert submit(processor, draft_scope=asked).speculation.draft_scope == expected


@pytest.mark.parametrize(
    ("has_cache", "draft_scope", "scope"), [(True, "", "team"), (True, "request", None), (False, "", None)]
)
def test_prefixes_are_the_scopes_where_there_is_a_cache(has_cache: bool, draft_scope: str, scope: str | None) -> None:
    config = EngineConfig(default_draft_scope="team", prefix_cache=has_cache)
    expected = None if scope is None else DraftScope(TENANT, scope)
    assert submit(make_processor(config=config), draft_scope=draft_scope).prefix_scope == expected


def test_references_are_tokenised_without_special_tokens_and_kept_small(processor: InputProcessor) -> None:
    references = submit(processor, references=["hello", (7, 8), "", np.array([9])]).speculation.references
    hello = processor.tokenize("hello")[1:]  # without the BOS
    assert [list(reference) for reference in references] == [hello, [7, 8], [9]]  # nothing can be quoted from nothing
    assert all(isinstance(reference, array) and reference.itemsize == 4 for reference in references)
    assert [list(reference) for reference in submit(processor, references="hello").speculation.references] == [hello]


def test_references_are_checked_where_nobody_reads_them(processor: InputProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="references"):
        submit(processor, is_enabled=False, references=[[VOCAB_SIZE]])


def test_a_vocabulary_has_one_fingerprint_and_no_other_has_it() -> None:
    tokenizer = make_processor().facts.tokenizer
    changed = AutoTokenizer.from_pretrained(resolve_model("bundled"))
    changed.add_tokens(["one more"])
    processors = [
        make_processor(),
        make_processor(name="elsewhere"),  # the vocabulary, not the folder
        make_processor(tokenizer=changed),
        make_processor(vocab_size=VOCAB_SIZE - 1),
        make_processor(has_tokenizer=False),
        make_processor(has_tokenizer=False, name="elsewhere"),
    ]
    assert tokenizer is not None
    prints = [processor.vocabulary_fingerprint() for processor in processors]
    assert prints[0] == prints[1]
    assert len(set(prints)) == len(prints) - 1


def test_megabytes_are_refused_without_tokenising_them(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor()
    longest = processor._prompts._longest_token_chars
    with monkeypatch.context() as patch:
        patch.setattr(type(processor.facts.tokenizer), "__call__", lambda *args, **kwargs: pytest.fail("tokenised"))
        with pytest.raises(InvalidRequestError, match="at least"):
            processor.tokenize("x" * (longest * (MAX_MODEL_LEN + 1)))


def test_only_the_head_of_megabytes_is_tokenised_where_a_token_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, seen = make_processor(), []
    monkeypatch.setattr(processor._prompts, "_longest_token_chars", 1 << 20)
    tokenize = processor._prompts._tokenize_text
    monkeypatch.setattr(
        processor._prompts, "_tokenize_text", lambda field, text: seen.append(len(text)) or tokenize(field, text)
    )
    with pytest.raises(InvalidRequestError, match="this is at least"):
        processor.tokenize("word " * 1_000_000)
    assert seen == [HEAD_CHARS * MAX_MODEL_LEN]


def test_a_text_is_never_refused_that_could_fit() -> None:
    """The quick look at its length must allow for the longest token of the vocabulary, 63 times."""
    processor = make_processor()
    tokenizer = processor.facts.tokenizer
    assert tokenizer is not None
    longest = max((tokenizer.decode([i]) for i in range(10, VOCAB_SIZE)), key=len)
    text = longest * (MAX_MODEL_LEN - 2)
    if len(tokenizer(text)["input_ids"]) <= MAX_MODEL_LEN - 1:
        assert len(processor.tokenize(text)) <= MAX_MODEL_LEN - 1


def test_text_is_tokenised_as_the_model_was_trained(processor: InputProcessor) -> None:
    """With the BOS, and special tokens in the text recognised (the chat template is text)."""
    assert processor.tokenize("<|user|>hello")[:2] == [0, 2]


def test_unset_parameters_are_the_models_own() -> None:
    sampled = make_processor(defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    sampling = submit(sampled).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
    assert sampling.max_tokens == MAX_MODEL_LEN - 3  # to the end of the context
    assert sampling.end_token_ids == {1, 3}
    explicit = submit(sampled, temperature=0.0, top_k=0, top_p=1.0).sampling
    assert (explicit.temperature, explicit.top_k, explicit.top_p) == (0.0, 0, 1.0)  # zero is not "unset"


def test_the_models_defaults_can_be_switched_off() -> None:
    defaults = {"temperature": 0.6, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    assert submit(make_processor(defaults=defaults)).sampling.changes_logits
    plain = submit(make_processor(defaults=defaults, config=EngineConfig(generation_config="off"))).sampling
    assert (plain.temperature, plain.repetition_penalty, plain.no_repeat_ngram_size) == (0.0, 1.0, 0)


def test_unset_seeds_are_drawn_and_set_ones_kept(processor: InputProcessor) -> None:
    seeds = {submit(processor).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert submit(processor, seed=0).sampling.seed == 0


def test_stop_tokens_join_the_eos_and_ignore_eos_leaves_them(processor: InputProcessor) -> None:
    assert submit(processor, stop_token_ids=(9,)).sampling.end_token_ids == {1, 3, 9}
    assert submit(processor, stop_token_ids=(9,), ignore_eos=True).sampling.end_token_ids == {9}


def test_a_model_without_a_tokenizer_takes_ids_and_neither_text_nor_stop_strings() -> None:
    bare = make_processor(has_tokenizer=False)
    assert submit(bare).token_ids == [5, 6, 7]
    assert len(submit(bare, references=[[5, 6]]).speculation.references) == 1
    for options, field in (
        ({"prompt": "hello"}, "prompt"),
        ({"stop": ("x",)}, "stop"),
        ({"references": [[5], "x"]}, "references[1]"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            submit(bare, **options)
        assert (caught.value.reason, caught.value.field) == ("NO_TOKENIZER", field)


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_texts_of_an_enumeration_are_what_they_are_worth(processor: InputProcessor) -> None:
    class End(str, enum.Enum):  # noqa: UP042  # str() of a StrEnum would be its value
        HASHES = "###"

    request = submit(processor, stop=(End.HASHES, "x"))
    assert request.sampling.stop == ("###", "x")
    assert [type(each) for each in request.sampling.stop] == [str, str]
