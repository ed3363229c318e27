"""The load-time probe: what it lets in, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchserve.config import EngineConfig
from batchserve.errors import ConfigError, UnsupportedModelError
from batchserve.runner import loader, packed
from batchserve.runner.loader import load_model, resolve_dtype
from batchserve.runner.probe import ModelProbe
from tests.tiny_models import SUPPORTED, save_tiny_model


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_every_family_loads_in_the_default_dtype(family: str, tiny_model: dict[str, Path]) -> None:
    loaded = load_model(EngineConfig(str(tiny_model[family])))
    assert loaded.dtype == resolve_dtype("auto")
    assert len(loaded.layers) == loaded.model.config.num_hidden_layers


def test_longrope_stays_within_its_short_factors(tiny_model: dict[str, Path]) -> None:
    loaded = load_model(EngineConfig(str(tiny_model["phi3_longrope"])))
    assert loaded.max_model_len == 448


def test_rows_that_depend_on_the_longest_position_are_found(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_model_limit", lambda config: 512)  # as if longrope were not known
    with pytest.raises(UnsupportedModelError, match="far position"):
        load_model(EngineConfig(str(tiny_model["phi3_longrope"]), dtype="float32"))


def test_a_wrong_swap_is_found(tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.PackedLinear.forward
    monkeypatch.setattr(packed.PackedLinear, "forward", lambda self, x: right(self, x) * 1.1)
    with pytest.raises(UnsupportedModelError, match="packed"):
        load_model(EngineConfig(str(tiny_model["llama"]), dtype="float32"))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="o_proj"):
        load_model(EngineConfig(str(folder)))


def test_generation_options_that_are_not_applied_are_told(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 1.3}))
    assert load_model(EngineConfig(str(folder))).unapplied_defaults == ("repetition_penalty = 1.3",)


def test_a_model_without_the_interface_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="AttentionInterface"):
        ModelProbe(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
