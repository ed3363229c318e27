"""How long contexts may be by a config's rotary parameters, and factors that depend on the context's length."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from batchserve import LLM, SamplingParams
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.runner.loader import load_model
from batchserve.runner.rope import LONGEST_MODEL_LEN, context_limit
from batchserve.startup import measure_steps
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("_rough_step_times")]
ORIGINAL, LONGEST = 64, 128
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": ORIGINAL,
}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.4}
MODELS: dict[str, dict[str, Any]] = {
    "phi3_longrope": {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE},
    "llama": {"rope_parameters": LONGROPE},
}


@pytest.fixture
def _rough_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on them, and each start would measure for seconds."""
    monkeypatch.setattr(measure_steps, "MAX_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("rope", "positions", "limit"),
    [
        ({"rope_type": "default"}, 512, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840, 163840),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 4096}, 163840, 163840),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}, 163840, 163840),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
        ({"rope_type": "linear", "factor": 2.5, "original_max_position_embeddings": 100}, 128, 250),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 8192, 8192),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048, 2048),
        ({**LONGROPE, "factor": 32.0}, 128, 128),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}, 131072, 131072),
        (
            {
                "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
                "sliding_attention": {"rope_type": "default"},
            },
            8192,
            65536,
        ),
        (
            {"rope_type": "yarn", "factor": float("inf"), "original_max_position_embeddings": 8},
            8,
            LONGEST_MODEL_LEN + 1,
        ),
        (None, 512, 512),
    ],
)
def test_the_longest_context_is_what_the_scaling_extends_to(
    rope: dict[str, Any] | None, positions: int, limit: int
) -> None:
    assert context_limit(SimpleNamespace(max_position_embeddings=positions, rope_parameters=rope)) == limit


def test_yarn_as_a_model_card_describes_it_is_served_to_its_end(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path / "model", max_position_embeddings=80)
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]  # as in files of older releases, which the cards are for
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    config |= {"rope_theta": theta, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(str(folder), dtype="float32", decoding_length=0)
    assert llm.info.max_model_len == 4 * ORIGINAL
    prompt = [3 + i % 97 for i in range(4 * ORIGINAL - 10)]
    (output,) = llm.generate(prompt, SamplingParams(0.0, ignore_eos=True))
    assert len(output.token_ids) == 10
    assert output.token_ids == _continued(AutoModelForCausalLM.from_pretrained(folder), prompt, output.token_ids)
    with pytest.raises(ConfigError, match=f"max_model_len = {4 * ORIGINAL + 1}.* limit is {4 * ORIGINAL}"):
        LLM(str(folder), max_model_len=4 * ORIGINAL + 1)


def test_a_rotary_base_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 1e6
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] != 1e6
    with pytest.raises(ConfigError, match="move the fields of rope_scaling into rope_parameters"):
        load_model(EngineConfig(str(folder)))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("phimoe", {}),
        ("phi3_longrope", {}),
        ("phi3_longrope", {"max_model_len": ORIGINAL}),
        ("phi3_longrope", {"kv_cache_memory": ORIGINAL * 3 * 2 * 2 * 16 * 4}),  # for so many tokens
    ],
)
def test_factors_are_chosen_once_by_the_longest_request_that_is_served(
    tmp_path: Path, family: str, options: dict[str, int]
) -> None:
    """Without drafts, and beside others of all lengths: as transformers answers it alone with the same factors."""
    folder = _saved(family, tmp_path / "model")
    llm = LLM(str(folder), dtype="float32", prefix_cache=False, decoding_length=0, **options)  # type: ignore[arg-type]
    longest = LONGEST if not options else ORIGINAL
    assert llm.info.max_model_len == longest
    prompts = [[3 + (7 * i + size) % 97 for i in range(size)] for size in (1, 20, longest - 12)]
    outputs = llm.generate(prompts, SamplingParams(0.0, max_tokens=8, ignore_eos=True))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        filler = [5] * (longest - len(prompt) - 8)  # which the answer's rows do not see; the factors do
        assert output.token_ids == _continued(reference, prompt, output.token_ids, filler)


def _saved(family: str, folder: Path) -> Path:
    if family in MODELS:
        return save_tiny_model(family, folder, max_position_embeddings=LONGEST, **MODELS[family])
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "sliding_window": None},
        **{"max_position_embeddings": LONGEST, "rope_parameters": LONGROPE | MSCALES},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@torch.inference_mode()
def _continued(
    model: PreTrainedModel, prompt: list[int], answer: list[int], filler: list[int] | None = None
) -> list[int]:
    """The model's own tokens after the prompt and each token of the answer but the last."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer, *(filler or [])]])).logits[0]
    return logits[len(prompt) - 1 : len(prompt) + len(answer) - 1].argmax(-1).tolist()
