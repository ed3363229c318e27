"""Configuration is checked once, when it is made, and never changes afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from batchserve.config import EngineConfig, ServerConfig
from batchserve.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_waiting": 0},
        {"branch_length": 0},
        {"decoding_length": -1},
        {"prefill_chunk_size": 0},
        {"max_model_len": 0},
        {"kv_cache_memory": -1},
        {"drafter": "oracle"},
        {"dtype": "int8"},
        {"max_num_seqs": 64, "max_num_batched_tokens": 64},  # prefill would stand still while all decode
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    name = list(options)[-1]
    assert f"{name} = {options[name]!r}" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{}, {"decoding_length": 0}, {"max_num_seqs": 1, "max_num_batched_tokens": 2}, {"prefill_chunk_size": 1}],
    ids=str,
)
def test_the_bounds_themselves_are_inside(options: dict[str, Any]) -> None:
    config = EngineConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_do_not_exist_are_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=str(port)):
        ServerConfig(port=port)


def test_configurations_are_frozen() -> None:
    for config, name in ((EngineConfig(), "max_num_seqs"), (ServerConfig(), "port")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 5)
