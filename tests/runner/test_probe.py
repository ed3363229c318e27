"""The load-time probe: what it lets in, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from batchserve import LLM, SamplingParams
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError, UnsupportedModelError
from batchserve.program import rotary
from batchserve.runner import rope as rope_module
from batchserve.runner.loader import load_model, resolve_dtype
from batchserve.runner.native_linear import NativeLinear
from batchserve.runner.probe import ModelProbe
from tests.tiny_models import SUPPORTED, save_tiny_model


def change(folder: Path, name: str, **entries: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_every_family_loads_in_the_default_dtype(family: str, tiny_model: dict[str, Path]) -> None:
    loaded = load_model(EngineConfig(str(tiny_model[family])))
    assert loaded.torch_dtype == resolve_dtype("auto")
    assert len(loaded.layers) == loaded.model.config.num_hidden_layers


@pytest.mark.parametrize(("family", "limit"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
@pytest.mark.parametrize("num_positions", [2, 13, 40, 47])
def test_a_model_of_fewer_positions_than_the_probe_has_tokens(
    family: str, limit: str, num_positions: int, tmp_path: Path
) -> None:
    folder = save_tiny_model(family, tmp_path / family, **{limit: num_positions})
    prompts, length = [[5, 6, 7][: num_positions - 1], [9]], num_positions - 1
    llm = LLM(str(folder), dtype="float32", decoding_length=4)
    assert llm.info.max_model_len == num_positions
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(0.0, ignore_eos=True)), strict=True):
        expected = model.generate(torch.tensor([prompt]), max_length=num_positions, do_sample=False, eos_token_id=None)
        assert prompt + output.token_ids == expected[0].tolist()
        assert len(output.token_ids) == length + 1 - len(prompt)


def test_rows_are_tried_for_batch_invariance_at_positions_that_there_are(tmp_path: Path) -> None:
    folder = save_tiny_model("gpt2", tmp_path / "gpt2", n_positions=40)
    llm = LLM(str(folder), dtype="float32", batch_invariant=True)
    assert len(llm.generate([5, 6, 7], SamplingParams(0.0, ignore_eos=True))[0].token_ids) == 37


def test_a_model_that_reads_the_weights_of_a_packed_linear_is_refused_with_what_failed(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)

    monkeypatch.setattr(LlamaMLP, "forward", reading)
    message = "fails in the probe at load, with other modules, as linears whose weights are packed and cannot be read"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(EngineConfig(str(tiny_model["llama"]), dtype="float32", custom_kernels=False))


def test_rows_that_depend_on_the_longest_position_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = SUPPORTED["phi3_longrope"][1]["rope_parameters"] | {"original_max_position_embeddings": 448}
    folder = save_tiny_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=448)
    for module in (rope_module, rotary):  # as if longrope were not known
        monkeypatch.setattr(module, "length_dependent", lambda model: [])
    with pytest.raises(UnsupportedModelError, match="far position"):
        load_model(EngineConfig(str(folder), dtype="float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ignored", ["position_ids", "logits_to_keep"])
def test_a_model_that_ignores_what_a_step_tells_it_is_found(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, ignored: str, dtype: str
) -> None:
    """Alone and from its first token on, a prompt is answered as it should be."""
    right = LlamaForCausalLM.forward

    def deaf(self, **arguments):  # type: ignore[no-untyped-def]
        arguments.pop(ignored, None)
        return right(self, **arguments)

    monkeypatch.setattr(LlamaForCausalLM, "forward", deaf)
    with pytest.raises(UnsupportedModelError, match="beside rows" if ignored == "position_ids" else "chosen rows"):
        load_model(EngineConfig(str(tiny_model["llama"]), dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_beside_attention_is_found(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A convolution over neighbouring rows: right for one whole prompt, wrong for rows of many requests."""
    right = LlamaMLP.forward

    def convolving(self, x):  # type: ignore[no-untyped-def]
        out = right(self, x)
        out[:, 1:] += 0.5 * x[:, :-1]
        return out

    monkeypatch.setattr(LlamaMLP, "forward", convolving)
    with pytest.raises(UnsupportedModelError, match="beside rows"):
        load_model(EngineConfig(str(tiny_model["llama"]), dtype=dtype))


@pytest.mark.parametrize(
    "mixed",
    [lambda x: x[:, :1], lambda x: x[:, -1:], lambda x: 0.5 * x.abs().amax(1, keepdim=True)],
    ids=["first", "last", "highest"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_one_row_or_all_of_a_step_say_to_each_is_found(
    tiny_model: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    mixed: Callable[[torch.Tensor], torch.Tensor],
    dtype: str,
) -> None:
    right = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: right(self, x) + mixed(x))
    with pytest.raises(UnsupportedModelError, match=r"beside rows|is not causal"):
        load_model(EngineConfig(str(tiny_model["llama"]), dtype=dtype))


def test_kinds_of_layers_that_are_not_known_are_refused_by_name(tiny_model: dict[str, Path]) -> None:
    """Their masks may begin to matter behind more tokens than the probe has."""
    with pytest.raises(UnsupportedModelError, match="heavily_compressed_attention"):
        load_model(EngineConfig(str(tiny_model["deepseek_v4"])))


def test_a_wrong_swap_is_found(tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeLinear.forward
    monkeypatch.setattr(NativeLinear, "forward", lambda self, x: right(self, x) * 1.1)
    with pytest.raises(UnsupportedModelError, match="a module that was swapped wrongly"):
        load_model(EngineConfig(str(tiny_model["llama"]), dtype="float32", custom_kernels=False))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="o_proj"):
        load_model(EngineConfig(str(folder)))


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    change(save_tiny_model("llama", tmp_path), "config.json", intermediate_size=100)
    with pytest.raises(ConfigError, match=r"down_proj\.weight has shape \[64, 96\] in the files, \[64, 100\]"):
        load_model(EngineConfig(str(tmp_path)))


def test_an_adapter_is_not_left_out_silently(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    with pytest.raises(ConfigError, match="adapter"):
        load_model(EngineConfig(str(folder)))


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Also where transformers does not know the method and would go on without it."""
    change(save_tiny_model("llama", tmp_path), "config.json", quantization_config={"quant_method": "unheard_of"})
    with pytest.raises(UnsupportedModelError, match="unheard_of"):
        load_model(EngineConfig(str(tmp_path)))


def test_generation_options_that_are_not_applied_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(save_tiny_model("llama", tmp_path), "generation_config.json", diversity_penalty=1.3)
    load_model(EngineConfig(str(tmp_path)))
    assert "not applied, though generation_config.json asks for it: diversity_penalty = 1.3" in caplog.text


@pytest.mark.parametrize(("length", "is_told"), [(8, True), (511, True), (512, False), (4096, False)])
def test_a_length_that_would_cut_answers_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int, is_told: bool
) -> None:
    change(save_tiny_model("llama", tmp_path), "generation_config.json", max_length=length)
    load_model(EngineConfig(str(tmp_path)))
    assert (f"max_length = {length}" in caplog.text) == is_told


@pytest.mark.parametrize("content", ['{"eos_token_id": [2, 160]', "[]", '"text"', "\xff"])
def test_generation_options_that_cannot_be_read_are_refused_by_their_file(tmp_path: Path, content: str) -> None:
    file = save_tiny_model("llama", tmp_path) / "generation_config.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=rf"{file}: (cannot be read|must hold an object)"):
        load_model(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "value"), [("max_position_embeddings", "x"), ("max_position_embeddings", None), ("num_hidden_layers", 0)]
)
def test_a_configuration_that_describes_no_model_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    change(save_tiny_model("llama", tmp_path), "config.json", **{name: value})
    with pytest.raises((ConfigError, UnsupportedModelError), match=name):
        load_model(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_as_such(tmp_path: Path, broken: float) -> None:
    folder = save_tiny_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = broken
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="NaN or infinite, by itself"):
        load_model(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("top_p", 3.0), ("top_k", -1)])
def test_sampling_defaults_have_the_bounds_of_requests(tmp_path: Path, name: str, value: float) -> None:
    change(save_tiny_model("llama", tmp_path), "generation_config.json", **{"do_sample": True, name: value})
    with pytest.raises(ConfigError, match=name):
        load_model(EngineConfig(str(tmp_path)))


def test_a_model_without_the_interface_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="AttentionInterface"):
        ModelProbe(torch.nn.Linear(2, 2), 512)  # type: ignore[arg-type]
