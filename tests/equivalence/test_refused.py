"""Models that would be answered wrongly are refused at load, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchserve.errors import UnsupportedModelError
from tests.equivalence.harness import build
from tests.tiny_models import REFUSED

NOT_ATTENTION_INTERFACE = "does not go through transformers' AttentionInterface"
REASONS = {
    "bloom": NOT_ATTENTION_INTERFACE,
    "codegen": NOT_ATTENTION_INTERFACE,
    "mpt": NOT_ATTENTION_INTERFACE,
    "deepseek_v4": "heavily_compressed_attention: only full and sliding attention are known",
    "llama4_text": "chunked_attention: only full and sliding attention are known",
    "llama4_full": "scales queries by their place in a batch",
    "minimax_m3_vl_text": "minimax_m3_sparse: only full and sliding attention are known",
    "roberta": "answers differently through a registered attention function",
    "zaya": "hybrid: only full and sliding attention are known",
}


@pytest.mark.cpu_backend
@pytest.mark.parametrize("family", sorted(REFUSED))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refused_with_a_reason(family: str, dtype: str, tiny_model: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=REASONS[family]):
        build(tiny_model[family], dtype=dtype)
