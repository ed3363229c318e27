"""Configuration is checked once, when it is made, and never changes afterwards."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from batchserve.bench.tokenizer import load_encoder
from batchserve.cli import _add_warm_flags
from batchserve.config import MAX_BRANCH_LENGTH, MAX_MIN_MATCH, MAX_SCOPE_CHARS, MAX_THREADS, DraftConfig, EngineConfig
from batchserve.errors import ConfigError
from batchserve.files import parse_path
from batchserve.generate_command import _text_of_file
from batchserve.option_checks import MAX_TOKENS
from batchserve.server_config import ServerConfig


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_waiting": 0},
        {"branch_length": 0},
        {"decoding_length": -1},
        {"max_num_batched_tokens": 64, "decoding_length": 64},  # beside a request's own row
        {"prefill_chunk_size": 0},
        {"max_model_len": 0},
        {"kv_cache_memory": -1},
        {"drafter": "oracle"},
        {"default_draft_scope": ""},
        {"default_draft_scope": "x" * (MAX_SCOPE_CHARS + 1)},
        {"default_draft_scope": "\ud800"},  # could not be saved
        {"default_draft_scope": 5},
        {"dtype": "int8"},
        {"model": ""},
        {"model": None},
        {"model": 5},
        {"served_model_name": ""},
        {"served_model_name": 5},
        {"served_model_name": "m\udcff"},  # could not be sent
        {"cache_dir": None},
        {"cache_dir": "/tmp/x\0y"},
        {"device": "tpu"},
        {"attention_backend": "sdpa"},
        {"flashinfer_mask": "none"},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"device": "cpu", "attention_backend": "flashinfer"},
        {"device": "cpu", "attention_backend": "triton"},
        {"device": "cuda", "attention_backend": "cpu"},
        {"attention_backend": "torch", "batch_invariant": True},
        {"enforce_eager": 1},
        {"compile_model": "yes"},
        {"compile_model": True},
        {"max_graph_rows": 0},
        {"device": "cuda", "batch_invariant": True},
        {"adaptive": "no"},
        {"batch_invariant": "no"},
        {"prefix_cache": 1},
        {"num_threads": MAX_THREADS + 1},
        {"max_itl_ms": 10**400},
        {"draft": None},
        {"draft": {}},
        {"trust_remote_code": 0},
        {"wait_for_drafter": None},
        {"max_num_seqs": 64, "max_num_batched_tokens": 64},  # prefill would stand still while all decode
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    name = list(options)[-1]
    assert f"{name} = {options[name]!r}" in str(caught.value)


def test_a_folder_whose_name_cannot_be_sent_is_served_under_another() -> None:
    with pytest.raises(ConfigError, match=r"served_model_name = 'm\\udcff': must be text that is UTF-8"):
        EngineConfig(model="m\udcff")
    assert EngineConfig(model="m\udcff", served_model_name="m").model == "m\udcff"


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"reference_copy_length": 100}, {"reference_copy_length": 63}),
        ({"jacobi_window": 8}, {"jacobi_window": 7}),
        ({"jacobi_window": 8, "jacobi_guesses": 8}, {"jacobi_window": 8, "jacobi_guesses": 7}),
        ({"jacobi_guesses": 16}, {"jacobi_guesses": 15}),
        ({"jacobi_window": 3, "jacobi_ngram": 12}, {"jacobi_window": 3, "jacobi_ngram": 11}),
    ],
    ids=str,
)
def test_more_drafts_than_a_step_holds_are_refused_where_they_are_asked_for(
    options: dict[str, int], fits: dict[str, int]
) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f"{name} = {value}: must be for at most 63 draft tokens"):
        EngineConfig(max_num_batched_tokens=64, draft=DraftConfig(**options))
    EngineConfig(max_num_batched_tokens=64, draft=DraftConfig(**fits))
    EngineConfig(max_num_seqs=1, max_num_batched_tokens=2)  # nobody asked for more


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decoding_length": 0},
        {"branch_length": 1},
        {"default_draft_scope": "x" * MAX_SCOPE_CHARS},
        {"max_num_seqs": 1, "max_num_batched_tokens": 2},
        {"prefill_chunk_size": 1},
    ],
    ids=str,
)
def test_the_bounds_themselves_are_inside(options: dict[str, Any]) -> None:
    config = EngineConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    "options",
    [
        {"trie_mode": "flat"},
        {"trie_prompt_weight": True},
        {"trie_capacity": 0},
        {"trie_prompt_weight": 0.0},
        {"trie_prompt_weight": float("nan")},
        {"trie_prompt_weight": "much"},
        {"trie_prompt_weight": 10**400},
        {"trie_min_retrieved_tokens": 0},
        {"reference_min_match": 0},
        {"reference_min_match": MAX_MIN_MATCH + 1},
        {"reference_copy_length": 0},
        {"jacobi_window": 0},
        {"jacobi_ngram": 1},
        {"jacobi_guesses": 0},
        {"max_scope_bytes": 0},
        {"max_scope_bytes": 3, "max_draft_bytes": 2},
        {"draft_cache": 5},
        {"draft_cache": ""},
    ],
    ids=str,
)
def test_options_of_drafters_out_of_bounds_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftConfig(**options)
    name = list(options)[-1]
    assert f"{name} = {options[name]!r}" in str(caught.value)


def test_a_draft_cache_may_be_a_path() -> None:
    assert DraftConfig(draft_cache=Path("a") / "b").draft_cache == os.path.join("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [-1, 65536, 5.5, True, "5"])
@pytest.mark.parametrize("name", ["port", "http_port", "metrics_port"])
def test_ports_that_do_not_exist_are_refused(name: str, port: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = {port!r}: must be an integer in 0\.\.65535"):
        ServerConfig(**{name: port})


@pytest.mark.parametrize(
    ("name", "value"),
    [("drain_timeout_s", None), ("drain_timeout_s", "5"), ("drain_timeout_s", True), ("has_reflection", "no")],
)
def test_what_is_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = {value!r}: must be"):
        ServerConfig(**{name: value})


@pytest.mark.parametrize(("host", "meant"), [("[::1]", "::1"), ("::1", "::1"), ("localhost", "localhost")])
def test_an_ipv6_address_may_be_in_brackets(host: str, meant: str) -> None:
    assert ServerConfig(host=host).host == meant


def test_each_protocol_has_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match="http_port = 7: must be another one than port"):
        ServerConfig(port=7, http_port=7)
    assert ServerConfig(port=8000, has_http=False).port == 8000
    with pytest.raises(ConfigError, match="metrics_port = 7: must be another one than port"):
        ServerConfig(port=7, metrics_port=7)
    with pytest.raises(ConfigError, match="host = '': must not be empty"):
        ServerConfig(host="")
    assert ServerConfig(port=0, http_port=0, metrics_port=0).metrics_port == 0, "each picks a free one"


@pytest.mark.parametrize("size", [1023, 1 << 31])
def test_a_message_size_that_grpc_does_not_take_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"max_receive_bytes = {size}: must be at"):
        ServerConfig(max_receive_bytes=size)


def test_configurations_are_frozen() -> None:
    configs = (EngineConfig(), "max_num_seqs"), (ServerConfig(), "port"), (DraftConfig(), "trie_mode")
    for config, name in configs:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 5)


@pytest.mark.parametrize("name", ["prefill_chunk_size", "max_num_batched_tokens", "max_waiting", "max_model_len"])
@pytest.mark.parametrize("value", [MAX_TOKENS + 1, 1 << 63, 10**40])
def test_numbers_that_compiled_code_cannot_hold_are_refused(name: str, value: int):
    assert getattr(EngineConfig(**{name: MAX_TOKENS}), name) == MAX_TOKENS
    with pytest.raises(ConfigError, match=f"{name} = {value}: must be at most {MAX_TOKENS}"):
        EngineConfig(**{name: value})


def test_a_branch_is_no_longer_than_a_drafter_can_follow_for_each_token() -> None:
    assert EngineConfig(branch_length=MAX_BRANCH_LENGTH).branch_length == MAX_BRANCH_LENGTH
    with pytest.raises(ConfigError, match=f"branch_length = {MAX_BRANCH_LENGTH + 1}: must be at most"):
        EngineConfig(branch_length=MAX_BRANCH_LENGTH + 1)


@pytest.mark.parametrize("name", ["trie_capacity", "trie_min_retrieved_tokens", "jacobi_ngram", "max_scope_bytes"])
def test_so_are_those_of_drafts(name: str):
    with pytest.raises(ConfigError, match=f"{name} = {10**40}: must be at most"):
        DraftConfig(**{name: 10**40})


@pytest.mark.faults
def test_the_home_folder_is_expanded_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No shell does it in --option=~/file, and none is there for a program or a configuration file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text").write_text("some text")
    (tmp_path / "tokenizer.json").write_text("{}")
    home = f"{tmp_path}/text"
    config = EngineConfig(model="~/text", cache_dir="~/text", draft=DraftConfig(draft_cache="~/text"))
    assert (config.model, config.cache_dir, config.draft.draft_cache) == (home, home, home)
    assert config.draft.cache_path() == Path(home)
    assert EngineConfig(model="org/~name").model == "org/~name"
    assert parse_path("~/text") == Path(home)
    assert _text_of_file("reference", "~/text") == "some text"
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):  # and not: no such file
        load_encoder("~/tokenizer.json")
    parser = argparse.ArgumentParser()
    _add_warm_flags(parser)
    assert parser.parse_args(["~/text", "--draft-cache", "x"]).file == Path(home)
