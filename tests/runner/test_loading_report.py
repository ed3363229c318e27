"""Weights that a model's class has no place for, or that it would make up: refused by name, not left out silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from batchserve import LLM, SamplingParams
from batchserve.config import EngineConfig
from batchserve.errors import BatchserveError, ConfigError, UnsupportedModelError
from batchserve.runner.loader import load_model
from tests.tiny_models import COMPOSITE, save_tiny_composite, save_tiny_model

pytestmark = pytest.mark.faults
Weights = dict[str, torch.Tensor]
LAYER = "model.layers.0."


def edit(folder: Path, change: Callable[[Weights], object], **config: object) -> Path:
    """Changes what is in the files of a model, and its configuration."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    return folder


def load(folder: Path) -> object:
    return load_model(EngineConfig(str(folder), dtype="float32"))


def adding(name: str, *shape: int) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: torch.ones(shape)})


def copying(old: str, new: str) -> Callable[[Weights], object]:
    return lambda weights: weights.update({k.replace(old, new): v.clone() for k, v in weights.items() if old in k})


@pytest.mark.parametrize(
    ("family", "change", "name"),
    [
        ("llama", adding(LAYER + "self_attn.q_proj.bias", 64), "q_proj.bias"),
        ("llama", adding(LAYER + "mlp.down_proj.bias", 64), "down_proj.bias"),
        ("qwen2", adding(LAYER + "self_attn.q_norm.weight", 16), "q_norm.weight"),
        ("llama", adding("lm_head.bias", 128), "lm_head.bias"),
        ("mistral", adding("score.weight", 1, 64), "score.weight"),
        ("llama", adding("model.embed_positions.weight", 512, 64), "embed_positions"),
        ("llama", copying("layers.2", "layers.3"), "layers.3"),
        ("llama", adding("norm.weight", 64), "both norm.weight and model.norm.weight"),
        ("gpt2", adding("transformer.h.0.attn.rotary_emb.inv_freq", 8), "inv_freq"),  # it has no rotary embedding
        ("mixtral", copying("experts.3", "experts.4"), "experts"),
        # declared by default, but a layer without the tensors of a prediction layer is one of the model
        ("deepseek_v3", copying("layers.2", "layers.3"), "layers.3"),
    ],
)
def test_a_tensor_that_the_class_has_no_place_for_is_refused_by_name(
    tmp_path: Path, family: str, change: Callable[[Weights], object], name: str
) -> None:
    folder = edit(save_tiny_model(family, tmp_path), change)
    with pytest.raises(BatchserveError, match=name) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)


def removing(part: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in [*weights] if part in name]


@pytest.mark.parametrize(
    ("family", "part", "name"),
    [
        ("llama", "lm_head", "lm_head.weight"),  # it is not tied by the config
        ("llama", "layers.2", "layers.2"),
        ("qwen2", "q_proj.bias", "q_proj.bias"),
        ("qwen3", "k_norm", "k_norm"),
        ("mixtral", "experts.1", "experts.1"),  # stacked in order, the third would take its place
        ("mixtral", "experts.3", "experts"),
        ("mixtral", "experts.3.w1", "experts"),
        ("gpt_oss", "sinks", "sinks"),
    ],
)
def test_a_tensor_that_is_absent_is_not_made_up(tmp_path: Path, family: str, part: str, name: str) -> None:
    folder = edit(save_tiny_model(family, tmp_path), removing(part))
    with pytest.raises((ConfigError, UnsupportedModelError), match=name) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "change", "name"),
    [
        ("llama", adding(LAYER + "self_attn.rotary_emb.inv_freq", 8), "inv_freq"),
        ("llama", adding(LAYER + "self_attn.rotary_emb.cos_cached", 512, 16), "cos_cached"),
        ("gpt2", adding("transformer.h.0.attn.bias", 1, 1, 512, 512), "attn.bias"),
        ("deepseek_v3", adding("model.layers.3.eh_proj.weight", 64, 128), "eh_proj"),
    ],
)
def test_what_does_not_change_a_token_is_left_out_and_told_on_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, change: Callable[[Weights], object], name: str
) -> None:
    load(edit(save_tiny_model(family, tmp_path), change, num_nextn_predict_layers=1))
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1
    assert name in told[0]
    assert "\n" not in told[0]


def test_a_prediction_layer_must_be_declared(tmp_path: Path) -> None:
    folder = edit(save_tiny_model("llama", tmp_path), adding("model.layers.3.eh_proj.weight", 64, 128))
    with pytest.raises(UnsupportedModelError, match="eh_proj"):
        load(folder)


def test_nothing_is_told_where_nothing_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(save_tiny_model("gpt2", tmp_path))
    assert "left out" not in caplog.text


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_head_that_differs_from_the_embeddings_is_refused(tmp_path: Path, is_equal: bool) -> None:
    def add_head(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * (1.0 if is_equal else 1.5)

    folder = edit(save_tiny_model("llama", tmp_path, tie_word_embeddings=True), add_head)
    if is_equal:
        load(folder)
        return
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight .*tie_word_embeddings to false"):
        load(folder)
    load(edit(folder, lambda weights: None, tie_word_embeddings=False))


@pytest.mark.parametrize("name", sorted(COMPOSITE))
def test_the_text_model_of_a_composite_checkpoint_answers_as_the_whole_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = save_tiny_composite(name, tmp_path)
    whole = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    served = load_model(EngineConfig(str(folder), dtype="float32", custom_kernels=False)).model
    towers = {"vision_tower", "visual", "vision_model", "audio_tower"}
    assert not [module for path, module in served.named_modules() if path.rpartition(".")[2] in towers]
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1
    assert any(tower in told[0] for tower in towers)
    ids = torch.randint(14, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    served.set_attn_implementation("eager")
    with torch.inference_mode():
        torch.testing.assert_close(served(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-3, rtol=1e-3)


def test_a_composite_checkpoint_with_positions_of_three_parts_is_generated_from(tmp_path: Path) -> None:
    folder = save_tiny_composite("qwen2_5_vl", tmp_path)
    whole = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[20, 30, 40, 50], [60, 61]]
    llm = LLM(str(folder), dtype="float32", drafter="none", num_threads=1)
    outputs = llm.generate(prompts, SamplingParams(0.0, max_tokens=24, ignore_eos=True), show_progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = whole.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert prompt + output.token_ids == expected[0].tolist()


@pytest.mark.parametrize(("part", "is_served"), [("vision_tower", True), ("layers.1.mlp", False)])
def test_what_a_composite_checkpoint_lacks_must_be_of_its_towers(tmp_path: Path, part: str, is_served: bool) -> None:
    folder = edit(save_tiny_composite("mistral3", tmp_path), removing(part))
    if is_served:
        load(folder)
    else:
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp"):
            load(folder)


def test_code_of_the_folder_is_judged_alike(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit(folder, lambda weights: None, model_type="own", auto_map=code, architectures=["OwnForCausalLM"])
    trusting = EngineConfig(str(folder), dtype="float32", trust_remote_code=True)
    assert AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).config.model_type == "own"
    load_model(trusting)
    edit(folder, adding(LAYER + "self_attn.q_proj.bias", 64))
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias"):
        load_model(trusting)


def _older_buffers(weights: Weights) -> None:
    for layer in range(3):
        name = f"transformer.h.{layer}.attn"
        weights |= {f"{name}.masked_bias": torch.tensor(-1e4), f"{name}.bias": torch.ones(1, 1, 512, 512)}


def test_the_mask_that_older_checkpoints_hold_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(edit(save_tiny_model("gpt2", tmp_path), _older_buffers))
    assert "transformer.h.0.attn.bias and 5 more tensors" in caplog.text


@pytest.mark.parametrize("shape", [(64,), (1, 1, 8, 4)])
def test_a_bias_that_is_no_mask_is_not(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchserveError, match=r"attn\.bias"):
        load(edit(save_tiny_model("llama", tmp_path), adding(LAYER + "attn.bias", *shape)))


def test_a_layer_is_no_prediction_layer_for_one_odd_tensor(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        copying("layers.2", "layers.3")(weights)
        weights["model.layers.3.self_attn.o_proj.bias"] = torch.ones(64)

    with pytest.raises(BatchserveError, match=r"layers\.3"):
        load(edit(save_tiny_model("llama", tmp_path), change, num_nextn_predict_layers=1))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("lm_head.weight", torch.int64), ("model.norm.weight", torch.int8), (LAYER + "mlp.up_proj.weight", torch.bool)],
)
def test_integers_are_not_taken_for_weights(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = edit(save_tiny_model("llama", tmp_path), lambda weights: weights.update({name: weights[name].to(dtype)}))
    with pytest.raises(BatchserveError, match=f"its weights are quantised: .*{name}"):
        load(folder)


def test_double_precision_is_read(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        weights.update({name: tensor.double() for name, tensor in weights.items()})

    folder = save_tiny_model("llama", tmp_path)
    single = load_file(folder / "model.safetensors")
    config = EngineConfig(str(edit(folder, change)), dtype="float32", attention_backend="torch")
    served = load_model(config).model.state_dict()
    assert torch.equal(served["model.norm.weight"], single["model.norm.weight"])
    assert torch.equal(
        served["model.layers.0.self_attn.o_proj.weight"], single["model.layers.0.self_attn.o_proj.weight"]
    )
