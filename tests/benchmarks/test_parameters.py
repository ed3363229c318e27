"""How large results say that a model is."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from batchserve.runner.loader import count_parameters

VOCAB, HIDDEN, INNER = 48, 32, 64


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_weight_that_layers_share_counts_once(is_tied: bool, has_bias: bool) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": has_bias}
    config = AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_config(config)
    attention, mlp, norms = 4 * (HIDDEN * HIDDEN + has_bias * HIDDEN), 3 * HIDDEN * INNER, 3 * HIDDEN
    expected = (1 if is_tied else 2) * VOCAB * HIDDEN + attention + mlp + norms
    assert count_parameters(model) == expected
