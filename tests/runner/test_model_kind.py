"""Models that are no causal language models, and quantised ones: refused by the name of what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from batchserve.config import EngineConfig
from batchserve.errors import UnsupportedModelError
from batchserve.runner.loader import load_model
from tests.tiny_models import VOCAB_SIZE, save_tiny_composite, save_tiny_model

pytestmark = pytest.mark.faults
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96}
_TEXT = {**_LAYERS, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "pad_token_id": 0}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
_SEQ2SEQ = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "pad_token_id": 0,
} | _HEADS
_CONV = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}
# class -> (model type, config, what the refusal says)
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BertForMaskedLM": ("bert", _TEXT, "made for masked lm"),
    "RobertaForMaskedLM": ("roberta", _TEXT, "made for masked lm"),
    "BertModel": ("bert", _TEXT, "without a language-model head, as embedding models are"),
    "LlamaModel": ("llama", {**_TEXT, "tie_word_embeddings": True}, "without a language-model head"),
    "LlamaForSequenceClassification": ("llama", _TEXT, "made for sequence classification"),
    "Qwen2ForTokenClassification": ("qwen2", _TEXT, "made for token classification"),
    "BertForQuestionAnswering": ("bert", _TEXT, "made for question answering"),
    "T5ForConditionalGeneration": (
        "t5",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4},
        "is an encoder-decoder model",
    ),
    "BartForConditionalGeneration": ("bart", _SEQ2SEQ, "is an encoder-decoder model"),
    "WhisperForConditionalGeneration": (
        "whisper",
        _SEQ2SEQ | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        "is an encoder-decoder model, made for speech seq 2 seq",
    ),
    "Wav2Vec2ForCTC": ("wav2vec2", {**_LAYERS, **_CONV, "num_conv_pos_embedding_groups": 4}, "made for ctc"),
    "ViTForImageClassification": ("vit", _LAYERS, "made for image classification"),
}


def refusal_of(folder: Path) -> str:
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model(EngineConfig(str(folder)))
    said = str(refusal.value)
    assert "\n" not in said
    assert len(said) < 500
    return said


def change(folder: Path, **entries: object) -> Path:
    file = folder / "config.json"
    described = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: value for name, value in described.items() if value is not None}))
    return folder


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_model_of_another_kind_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    model_type, options, message = OTHERS[name]
    getattr(transformers, name)(AutoConfig.for_model(model_type, **options)).save_pretrained(tmp_path)
    said = refusal_of(tmp_path)
    assert name in said
    assert message in said


@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification"])
def test_where_no_architecture_is_named_the_type_of_model_decides(tmp_path: Path, name: str) -> None:
    model_type, options, _ = OTHERS[name]
    getattr(transformers, name)(AutoConfig.for_model(model_type, **options)).save_pretrained(tmp_path)
    assert f"a model of type {model_type}" in refusal_of(change(tmp_path, architectures=None))


def test_a_language_model_that_names_no_architecture_is_served(tmp_path: Path) -> None:
    loaded = load_model(EngineConfig(str(change(save_tiny_model("llama", tmp_path), architectures=None))))
    assert type(loaded.model).__name__ == "LlamaForCausalLM"


def test_an_embedding_model_that_is_a_language_model_by_name_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path, tie_word_embeddings=True)
    types = ["Transformer", "Pooling", "Normalize"]
    modules = [{"idx": place, "type": f"sentence_transformers.models.{name}"} for place, name in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "is an embedding model (modules.json has a pooling layer)" in refusal_of(folder)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("bert", {"architectures": ["BertLMHeadModel"], "is_decoder": False}),
    ],
)
def test_a_model_that_looks_at_later_tokens_is_found_by_what_it_does(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    if family == "bert":
        transformers.BertLMHeadModel(transformers.BertConfig(**_TEXT)).save_pretrained(tmp_path)
        change(tmp_path, **options)
    else:
        save_tiny_model(family, tmp_path, **options)
    assert "is not causal" in refusal_of(tmp_path)


def test_a_composite_model_that_transformers_cannot_run_on_text_is_refused(tmp_path: Path) -> None:
    towers = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    text = {"model_type": "opt", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64}
    described = AutoConfig.for_model(
        "blip-2",
        text_config={**text, "num_hidden_layers": 1, "num_attention_heads": 4},
        vision_config={**towers, "image_size": 28},
        qformer_config={**towers, "encoder_hidden_size": 32},
    )
    transformers.Blip2ForConditionalGeneration(described).save_pretrained(tmp_path)
    assert "as a text model alone, without its towers" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "compressed-tens",
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "FP8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "unheard_of"}}, "unheard_of"),
        ({"quantization_config": {"bits": 4}}, "an unnamed method"),
        ({"quantization_config": {}}, "an unnamed method"),
        ({"compression_config": {"format": "float-quantized"}}, "compressed-tensors"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "MLX"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "AWQ"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_its_format(tmp_path: Path, described: dict[str, Any], name: str) -> None:
    said = refusal_of(change(save_tiny_model("llama", tmp_path), **described))
    assert f"its weights are quantised: {name}" in said
    assert "use the checkpoint that is not quantised" in said


@pytest.mark.parametrize("file", ["quantize_config.json", "hf_quant_config.json", "quant_config.json"])
def test_a_file_beside_the_configuration_may_say_that_weights_are_quantised(tmp_path: Path, file: str) -> None:
    (save_tiny_model("llama", tmp_path) / file).write_text("{}")
    assert f"(by {file})" in refusal_of(tmp_path)


def test_a_quantised_composite_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = change(save_tiny_composite("mistral3", tmp_path), quantization_config={"quant_method": "fp8"})
    (folder / "model.safetensors").unlink()
    assert "quantised: FP8" in refusal_of(folder)


def test_no_quantisation_may_be_written_down(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": None}
    (folder / "config.json").write_text(json.dumps(described))
    assert load_model(EngineConfig(str(folder))).vocab_size == described["vocab_size"]
