"""Loading: safetensors only, clear refusals, the model left as it was found but for what is swapped on purpose."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from batchserve.attention.base import AttentionParams, LayerShape
from batchserve.attention.interface import ShapeProbe, register
from batchserve.config import EngineConfig
from batchserve.errors import BatchserveError, ConfigError, UnsupportedModelError
from batchserve.runner import probe
from batchserve.runner.loader import load_model, resolve_dtype
from batchserve.runner.model_folder import resolve_model
from batchserve.runner.native_linear import NativeLinear
from batchserve.runner.tokenizer import load_tokenizer
from batchserve.startup.build import build_engine
from tests.tiny_models import SUPPORTED, VOCAB_SIZE, WINDOW, save_tiny_model


def config(model: Path | str, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), **{"dtype": "float32", **options})


def test_a_folder_without_a_tokenizer_loads_and_takes_ids_only(tiny_model: dict[str, Path]) -> None:
    loaded = load_model(config(tiny_model["llama"]))
    assert loaded.tokenizer is None
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.max_model_len == 512
    assert loaded.eos_token_ids == (2,)
    assert loaded.layers == [LayerShape(2, 16, 16)] * 3
    assert not loaded.model.training


@pytest.mark.faults
@pytest.mark.parametrize("is_used", [False, True])
def test_a_cuda_build_without_a_gpu_is_said_with_what_to_type(
    tiny_model: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: is_used)
    load_model(config(tiny_model["llama"], device="cpu"))
    said = [record.getMessage() for record in caplog.records if "built for CUDA" in record.getMessage()]
    assert len(said) == (0 if is_used else 1)
    assert all("PyTorch's CPU build" in line and "\n" not in line for line in said)


def test_a_text_that_only_drafters_read_may_be_longer_than_the_model_without_a_word(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = load_tokenizer(resolve_model("bundled"), EngineConfig())
    assert tokenizer is not None
    assert len(tokenizer("some words of a reference " * 3000)["input_ids"]) > 4096
    assert not caplog.records


def test_the_bundled_model_comes_with_its_tokenizer() -> None:
    loaded = load_model(config("bundled"))
    assert loaded.name == "bundled"
    assert loaded.tokenizer is not None
    assert len(loaded.tokenizer) <= loaded.vocab_size
    assert loaded.tokenizer.eos_token_id in loaded.eos_token_ids


@pytest.mark.parametrize("content", [None, "empty"])
def test_a_missing_or_empty_folder_is_a_configuration_error(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "nothing"
    if content is not None:
        folder.mkdir()
    with pytest.raises(ConfigError, match="nothing"):
        load_model(config(folder))


def test_pickled_weights_are_refused(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    """Even where a pickle is all that there is: unpickling runs whatever is written in it."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model["llama"], folder)
    (folder / "model.safetensors").unlink()
    torch.save({"w": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(BatchserveError, match="safetensors"):
        load_model(config(folder))


def test_code_in_the_folder_is_not_run(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    folder, trap = tmp_path / "remote", tmp_path / "was_run"
    shutil.copytree(tiny_model["llama"], folder)
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": "custom", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "custom.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    with pytest.raises(BatchserveError):
        load_model(config(folder))
    assert not trap.exists()


def test_broken_weights_are_refused(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny_model["llama"], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BatchserveError):
        load_model(config(folder))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"num_attention_heads": 0}, "cannot be loaded: ZeroDivisionError"),
        ("config.json", {"pad_token_id": 1 << 20}, "cannot be loaded: AssertionError"),
        ("config.json", {"id2label": "x"}, "cannot be loaded: AttributeError"),
        ("config.json", {"max_position_embeddings": 1 << 70}, r"longest context is \d+, must be in 2\.\."),
        ("config.json", {"max_position_embeddings": 1}, r"longest context is 1, must be in 2\.\."),
        ("tokenizer.json", {"pre_tokenizer": {"type": "OfANewerLibrary"}}, "tokenizer cannot be loaded: Exception"),
        ("tokenizer_config.json", {"tokenizer_class": "XLMTokenizer"}, "tokenizer cannot be loaded: .*sacremoses"),
    ],
)
def test_a_file_that_nobody_can_make_sense_of_is_refused_with_a_reason(
    tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(resolve_model("bundled"), folder)
    described = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(described | changes))
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        load_model(config(folder))


def test_a_model_that_would_answer_in_tuples_answers_by_name(tiny_model: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "tuples"
    shutil.copytree(tiny_model["llama"], folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"return_dict": False}))
    assert load_model(config(folder)).vocab_size == described["vocab_size"]


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Of the configuration and of every module that has one of its own."""
    holders = [model.config, *(m for m in model.modules() if hasattr(m, "sliding_window"))]
    return [holder.sliding_window for holder in holders]


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text"])
def test_windows_are_as_they_were_after_the_probe_also_when_it_refuses(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, is_failing: bool
) -> None:
    """The probe shrinks windows that are longer than its prompt; the model must not keep them."""
    register()
    model = AutoModelForCausalLM.from_pretrained(tiny_model[name], attn_implementation="eager").eval()
    before = windows_of(model)
    assert WINDOW in before
    if is_failing:
        monkeypatch.setattr(probe, "TOLERANCE", {torch.float32: -1.0})
        with pytest.raises(UnsupportedModelError, match="standard deviations"):
            probe.ModelProbe(model, 512).check_attention()
    else:
        probe.ModelProbe(model, 512).check_attention()
    assert windows_of(model) == before


@pytest.mark.parametrize(("num_wrong", "is_refused"), [(1, True), (0, False)])
def test_a_single_row_that_is_wrong_altogether_is_found_in_16_bits(
    tiny_model: dict[str, Path], num_wrong: int, is_refused: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model["llama"], dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    expected, other = torch.randn((2, 48, VOCAB_SIZE), generator=generator)
    actual = expected + 0.08 * torch.randn(expected.shape, generator=generator)  # rounding
    actual[5 : 5 + num_wrong] = other[5 : 5 + num_wrong]
    with pytest.raises(UnsupportedModelError, match="suspect") if is_refused else nullcontext():
        probe.compare_logits(model, actual, expected, "here", "something")
    model.add_module("router", type("Router", (torch.nn.Identity,), {})())  # rounding may choose another expert
    probe.compare_logits(model, actual, expected, "here", "something")


def test_the_probe_has_no_padding_among_its_tokens(tiny_model: dict[str, Path]) -> None:
    """Some models count their positions from it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model["llama"])
    model.config.pad_token_id = None
    any_token = int(probe.ModelProbe(model, 512)._ids[0, 7])
    model.config.pad_token_id = any_token
    assert any_token not in probe.ModelProbe(model, 512)._ids


def test_a_configuration_with_heads_of_each_layer_does_not_keep_a_model_from_being_served(tmp_path: Path) -> None:
    """Whoever asks it for the number of all layers gets an error."""
    register()
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    options = SUPPORTED["deepseek_v3"][1] | {"use_dsa": False, "layer_types": layer_types, "sliding_window": WINDOW}
    described = AutoConfig.for_model("dots3_note_text", **options)
    AutoModelForCausalLM.from_config(described).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="num_attention_heads"):
        _ = described.num_attention_heads
    built = build_engine(config(tmp_path, kv_cache_memory=8 << 20, decoding_length=0))
    assert built.info.architecture == "Dots3NoteForCausalLM"


def test_of_layers_with_different_heads_the_most_are_known() -> None:
    seen = ShapeProbe()
    for layer, num_heads in enumerate((4, 8, 2)):
        query, key = torch.randn(1, num_heads, 3, 8), torch.randn(1, 2, 3, 8)
        seen.attend(layer, query, key, key, AttentionParams(1.0, None, None, None))
    assert seen.num_heads == 8


def test_cuda_adds_up_in_fp32_while_the_probe_looks_and_as_before_behind_it(tiny_model: dict[str, Path]) -> None:
    def sums() -> tuple[bool, bool]:
        matmul = torch.backends.cuda.matmul
        return matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction

    register()
    model = AutoModelForCausalLM.from_pretrained(tiny_model["llama"], attn_implementation="eager").eval()
    before, seen = sums(), []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(sums()))
    probe.ModelProbe(model, 512).check_attention()
    assert set(seen) == {(False, False)}
    assert sums() == before


@torch.inference_mode()
def test_a_model_whose_attention_is_called_twice_is_refused(tiny_model: dict[str, Path]) -> None:
    register()
    model = AutoModelForCausalLM.from_pretrained(tiny_model["llama"], attn_implementation="eager").eval()
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match="once a layer"):
        probe.ModelProbe(model, 512).check_attention()


def test_linears_are_packed_the_head_too(tiny_model: dict[str, Path]) -> None:
    loaded = load_model(config(tiny_model["llama"]))
    if loaded.has_packed_linears:
        assert isinstance(loaded.model.lm_head, NativeLinear)
        assert not any(type(module) is torch.nn.Linear for module in loaded.model.modules())


def test_auto_is_a_dtype_that_this_cpu_multiplies() -> None:
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)
    assert resolve_dtype("float16") is torch.float16


def test_a_model_is_a_folder_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "org" / "name").mkdir(parents=True)
    for model in ("org/name", "./org/name", str(tmp_path)):
        assert resolve_model(model) == model
    for model in ("file", "./org/other", "../none", "~/none", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=f"model = '{model}': must be a folder that exists, a hub id"):
            resolve_model(model)


def test_sampling_defaults_are_the_models_where_it_samples(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "sampling")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1, "eos_token_id": [2, 7]})
    )
    loaded = load_model(config(folder))
    assert {"temperature": 0.6, "top_k": 20, "min_p": 0.1}.items() <= loaded.defaults.items()
    assert loaded.eos_token_ids == (2, 7)
    greedy = load_model(config(save_tiny_model("llama", tmp_path / "greedy")))
    assert "temperature" not in greedy.defaults
    folder = save_tiny_model("llama", tmp_path / "penalties")
    options = {"temperature": 0.6, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    (folder / "generation_config.json").write_text(json.dumps(options))
    assert load_model(config(folder)).defaults == {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}


@pytest.mark.parametrize(("given", "kept"), [(-1, ()), ([2, 99999, -1], (2,)), (None, (2,)), (0, (0,))])
def test_an_end_token_of_no_vocabulary_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: object, kept: tuple[int, ...]
) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({} if given is None else {"eos_token_id": given}))
    assert load_model(config(folder)).eos_token_ids == kept
    assert ("eos_token_id" in caplog.text) == (given not in (None, 0))


@pytest.mark.parametrize("given", ["x", [2, 1.5], [[1]], True])
def test_what_is_no_end_token_is_refused_by_name(tmp_path: Path, given: object) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(ConfigError, match="eos_token_id = "):
        load_model(config(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "limit is 512"),
        ({"kv_cache_memory": 1000}, "kv_cache_memory = 1000"),
        ({"kv_cache_memory": 200_000, "max_model_len": 500}, "max_model_len"),
    ],
)
def test_memory_that_cannot_hold_what_was_asked_for_is_a_configuration_error(
    tiny_model: dict[str, Path], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(config(tiny_model["llama"], **options))


def test_the_context_shrinks_to_the_memory_where_nobody_said_how_long_it_must_be(tiny_model: dict[str, Path]) -> None:
    """So that no admitted request can fail for lack of memory."""
    built = build_engine(config(tiny_model["llama"], kv_cache_memory=200 * 768))
    assert built.info.max_model_len == built.core.executor.allocator.total_tokens == 192
