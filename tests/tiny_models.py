"""Tiny random models of every supported family, saved to folders like real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

VOCAB_SIZE = 128
WINDOW = 24
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_BASE, "num_key_value_heads": 2}
_MOE = {**_GQA, "num_experts_per_tok": 2}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "eos_token_id": 2}
_WINDOWED = {"sliding_window": WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32}

_MLA = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

# name -> (model type, config)
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA),
    "mistral": ("mistral", {**_GQA, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", _GQA),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 32}),
    "gemma2": ("gemma2", {**_GQA, **_WINDOWED}),
    "gemma3_text": ("gemma3_text", {**_GQA, **_WINDOWED}),
    "phi3": ("phi3", _GQA),
    "gpt2": ("gpt2", {**_GPT2, "bos_token_id": 1}),
    "opt": ("opt", _OPT),
    "gpt_neox": ("gpt_neox", _BASE),
    "olmo2": ("olmo2", _GQA),
    "mixtral": ("mixtral", {**_MOE, "num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_MOE, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "olmoe": ("olmoe", {**_MOE, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "glm4": ("glm4", {**_GQA, "head_dim": 32}),
    # attention sinks, which SDPA has not
    "gpt_oss": ("gpt_oss", {**_MOE, "head_dim": 32, "num_local_experts": 4, "sliding_window": WINDOW}),
    # rotary factors that depend on the longest position of a batch; here all contexts have the short ones
    "phi3_longrope": (
        "phi3",
        {
            **_GQA,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 512,
                "attention_factor": 1.2,
            },
        },
    ),
    # K and V of different sizes
    "deepseek_v3": ("deepseek_v3", _MLA),
}
_BLOOM = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}
_CODEGEN = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", _BLOOM),
    "mpt": ("mpt", {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "codegen": ("codegen", _CODEGEN),
    "llama4_text": (
        "llama4_text",
        {**_GQA, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 16},
    ),
    # nothing but full attention, but queries scaled by their place in the batch, beyond floor_scale tokens
    "llama4_full": (
        "llama4_text",
        {
            **_GQA,
            "head_dim": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "layer_types": ["full_attention"] * 3,
            "no_rope_layers": [1, 0, 0],
        },
    ),
    # positions that start behind the padding's number, which is one of the vocabulary
    "roberta": ("roberta", {**_BASE, "is_decoder": True}),
    # a convolution over q and k, inside of each attention layer
    "zaya": ("zaya", {**_GQA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}),
    # keys are pooled and chosen, by masks, beyond contexts longer than the probe's
    "deepseek_v4": (
        "deepseek_v4",
        {
            **_GQA,
            "head_dim": 16,
            "q_lora_rank": 32,
            "o_lora_rank": 32,
            "o_groups": 2,
            "qk_rope_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "heavily_compressed_attention", "heavily_compressed_attention"],
        },
    ),
    "minimax_m3_vl_text": (
        "minimax_m3_vl_text",
        {
            **_MOE,
            "head_dim": 16,
            "num_local_experts": 4,
            "index_block_size": 64,
            "index_topk_blocks": 1,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        },
    ),
}


_TEXT = {**_GQA, "head_dim": 16}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
_QWEN_IDS = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# A text model beside towers for images or sound. name (the model type) -> config
COMPOSITE: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 16},
        "image_token_index": 10,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_GQA, **_WINDOWED},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "mm_tokens_per_image": 4,
        "image_token_index": 10,
        "boi_token_index": 11,
        "eoi_token_index": 12,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 28},
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **_QWEN_IDS,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 16,
            "layer_types": ["full_attention"] * 3,
            "no_rope_layers": [1, 1, 1],
            "attn_temperature_tuning": False,
        },
        "vision_config": {
            **_VISION,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        "image_token_index": 10,
    },
    "voxtral": {
        "text_config": {"model_type": "llama", **_TEXT},
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "num_mel_bins": 16,
            "max_source_positions": 20,
        },
        "audio_token_id": 10,
    },
}


def save_tiny_model(name: str, folder: Path, **overrides: Any) -> Path:
    """A seeded fp32 model in `folder`, without a tokenizer; returns the folder."""
    model_type, options = {**SUPPORTED, **REFUSED}[name]
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(model_type, **{**options, **overrides})
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)


def save_tiny_composite(name: str, folder: Path) -> Path:
    """The same with towers; saved in the layout of the checkpoints that are published."""
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(name, **COMPOSITE[name])
    return _save(AutoModelForMultimodalLM.from_config(config, dtype=torch.float32), folder)


def _save(model: PreTrainedModel, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.ndim >= 2:  # larger than at initialisation: attention is far from uniform
                parameter.normal_(0, 0.15)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return folder
