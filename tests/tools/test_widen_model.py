"""A deepened model is deeper, costs real work, and answers bit for bit the same."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from tools.widen_model import SHAPES, decoder_layers, deepen, deepen_folder, random_model

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **IDS),
    "llama_tied": LlamaConfig(**SIZES, **IDS, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, **IDS, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, **IDS, head_dim=16),
    "gemma2": Gemma2Config(**SIZES, **IDS, head_dim=16, query_pre_attn_scalar=16, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128, **IDS),
}


def make_model(family, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough for the logits to depend on every layer; norms and biases away from their neutral values.
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1) * 0.5)
    return model


@pytest.fixture
def prompts():
    return torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(1))


def test_a_model_whose_layers_know_their_number_is_refused():
    """GPT-2 can divide a layer's scores by its index: moving the layer would change its answers."""
    config = GPT2Config(**{**CONFIGS["gpt2"].to_dict(), "scale_attn_by_inverse_layer_idx": True})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    with pytest.raises(ValueError, match="other logits"):
        deepen(model, factor=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_bit_identical(family, dtype, prompts):
    model = make_model(family, dtype)
    deeper = deepen(model, factor=3)
    deeper.set_attn_implementation("eager")
    assert len(decoder_layers(deeper)) == 9
    with torch.inference_mode():
        assert torch.equal(model(prompts).logits, deeper(prompts).logits)


@pytest.mark.parametrize("family", CONFIGS)
def test_inserted_layers_do_real_work(family, prompts):
    deeper = deepen(make_model(family, torch.float32), factor=2)
    inputs = []
    layer = decoder_layers(deeper)[1]
    end = layer.mlp.c_proj if family == "gpt2" else layer.mlp.down_proj
    end.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.inference_mode():
        deeper(prompts)
    assert inputs[0].abs().mean() > 0
    assert end.weight.abs().max() == 0


def test_the_bit_identity_test_can_fail(prompts):
    model = make_model("llama", torch.float32)
    deeper = deepen(model, factor=2)
    with torch.no_grad():
        decoder_layers(deeper)[1].mlp.down_proj.weight[0, 0] = 1e-3
    with torch.inference_mode():
        assert not torch.equal(model(prompts).logits, deeper(prompts).logits)


def test_layer_types_follow_the_layers_that_they_came_from():
    model = make_model("gemma2", torch.float32)
    deeper = deepen(model, factor=2)
    assert deeper.config.layer_types[::2] == model.config.layer_types


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_folder_keeps_outputs_dtype_and_generation_config(tmp_path, dtype, prompts):
    model = make_model("llama_tied", dtype)
    model.generation_config.eos_token_id = 7
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    deepen_folder(tmp_path / "model", tmp_path / "deeper", factor=2)
    deeper = AutoModelForCausalLM.from_pretrained(tmp_path / "deeper", attn_implementation="eager")
    assert deeper.dtype == dtype
    assert deeper.generation_config.eos_token_id == 7
    assert (tmp_path / "deeper" / "tokenizer.json").read_text() == "{}"
    assert str(tmp_path) not in (tmp_path / "deeper" / "config.json").read_text()
    with torch.inference_mode():
        assert torch.equal(model(prompts).logits, deeper(prompts).logits)


def test_other_families_and_factors_are_refused():
    opt = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        **IDS,
    )
    with pytest.raises(ValueError, match=r"model_type = 'opt': must be one of llama"):
        deepen(AutoModelForCausalLM.from_config(opt), factor=2)
    with pytest.raises(ValueError, match=r"factor = 0: must be at least 1"):
        deepen(make_model("llama", torch.float32), factor=0)


@pytest.mark.parametrize(("shape", "millions"), [("90m", (75, 105)), ("430m", (380, 480)), ("1b", (900, 1200))])
def test_shapes_have_the_size_of_their_name(shape, millions, tmp_path):
    config = LlamaConfig(**SHAPES[shape], vocab_size=8192, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert millions[0] < sum(p.numel() for p in model.parameters()) / 1e6 < millions[1]


def test_a_random_model_is_loadable_and_reproducible(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "90m", {**SHAPES["90m"], "num_hidden_layers": 1})
    model = random_model("90m", vocab_size=64, seed=3)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.max_position_embeddings) == (64, 4096)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    again = random_model("90m", vocab_size=64, seed=3)
    assert torch.equal(loaded.lm_head.weight, again.lm_head.weight)
