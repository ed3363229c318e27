"""Families beyond tests/tiny_models.py: what is native of them, and what torch computes between native parts.

Loading compares each program with the model's own forward.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from batchserve.config import EngineConfig
from batchserve.program import instructions as at
from batchserve.program.instructions import Op, Routing, assemble
from batchserve.program.operations import operation
from batchserve.program.tape import Call, UnsuitableModelError
from batchserve.program.torch_calls import check_row_by_row
from batchserve.runner.loader import load_model
from batchserve.runner.native_runner import NativeRunner
from tests.equivalence.harness import build
from tests.program.test_model import answer, ids
from tests.tiny_models import save_tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "cohere": (SIZES, set()),
    "ernie4_5": (SIZES, set()),
    "gemma": ({**SIZES, "head_dim": 16}, set()),
    "granite": ({**SIZES, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}, set()),
    "granitemoe": ({**EXPERTS, "num_local_experts": 4}, set()),
    "hunyuan_v1_dense": ({**SIZES, "head_dim": 16}, set()),
    "olmo": (SIZES, set()),
    "olmo3": ({**SIZES, "sliding_window": 16}, set()),
    "phi": (SIZES, set()),
    "smollm3": ({**SIZES, "no_rope_layer_interval": 2}, set()),
    "starcoder2": ({**SIZES, "sliding_window": None}, set()),
    "arcee": (SIZES, {"square"}),
    "qwen2_moe": ({**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}, {"mul"}),
}


def save(family: str, options: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(len(family))
    config = AutoConfig.for_model(family, **options, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_native_but_for_named_operators(family: str, tmp_path: Path) -> None:
    options, operators = FAMILIES[family]
    loaded = load_model(EngineConfig(str(save(family, options, tmp_path)), dtype="float32"))
    assert loaded.native is not None
    assert set(loaded.native.image.torch_operators) == operators


def test_what_torch_computes_is_right_in_steps_of_any_size(tmp_path: Path) -> None:
    runner, tokens = build(save("arcee", SIZES, tmp_path), dtype="float32", num_threads=1).core.executor, ids()
    assert isinstance(runner, NativeRunner)
    whole = answer(runner, tokens, [len(tokens)])
    for sizes in ([1] * len(tokens), [7, 16, 22]):
        torch.testing.assert_close(answer(runner, tokens, sizes), whole, rtol=1e-4, atol=1e-4)


def test_experts_with_more_rows_than_a_tile_have(tmp_path: Path) -> None:
    """Of 300 rows and two of four experts each has some 150."""
    runner = build(save_tiny_model("mixtral", tmp_path / "model"), dtype="float32", num_threads=1).core.executor
    tokens = torch.randint(3, 128, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    assert isinstance(runner, NativeRunner)
    whole = answer(runner, tokens, [300])
    assert whole.isfinite().all()
    for sizes in ([70, 1, 229], [150, 150]):
        assert torch.equal(answer(runner, tokens, sizes), whole)


@pytest.mark.parametrize(
    ("function", "is_mixing"), [(torch.square, False), (lambda x: x.cumsum(0), True), (lambda x: x.cumsum(1), False),
                                (lambda x: x - x.mean(), True), (lambda x: x + torch.ones(37, 1), True)],
)  # fmt: skip
def test_operators_that_mix_rows_are_found(function: Any, is_mixing: bool) -> None:
    x = torch.randn(37, 8)
    call = Call("some", function, (x,), {}, (function(x),))
    if is_mixing:
        with pytest.raises(UnsuitableModelError, match=r"some (mixes rows|cannot be computed)"):
            check_row_by_row(call, [x])
    else:
        check_row_by_row(call, [x])


def test_numbers_of_experts_that_are_no_numbers_go_to_one_that_there_is() -> None:
    given, weights = np.array([[np.nan, 2.0], [-1.0, 7.0]], np.float32), np.ones((2, 2), np.float32)
    out, scratch = np.zeros((2, 4), np.int32), np.zeros(64, np.uint8)
    fields = {at.COLUMNS: 4, at.GROUPS: 2, at.FUNCTION: Routing.GIVEN, at.X: given.ctypes.data, at.BY_X: 8,
              at.Y: weights.ctypes.data, at.BY_Y: 8, at.OUT: out.ctypes.data, at.BY_OUT: 16}  # fmt: skip
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(operation(Op.ROUTE))
    function(assemble([fields]).ctypes.data, 0, 2, 0, scratch.ctypes.data)
    assert out[:, 2:].tolist() == [[0, 2], [0, 0]]


def test_code_that_asks_for_a_linears_type_is_served_by_its_modules(tmp_path: Path) -> None:
    options = {**SIZES, "head_dim": 16, "num_experts": 4, "moe_topk": [2, 2], "use_mixed_mlp_moe": False}
    folder = save("hunyuan_v1_moe", options, tmp_path)
    loaded = load_model(EngineConfig(str(folder), dtype="float32", custom_kernels=False))
    assert loaded.native is None
    assert loaded.has_packed_linears


def test_a_branch_on_a_value_is_not_taken_for_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LlamaMLP.forward

    def branching(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return right(self, x) if bool(x.isfinite().all()) else torch.zeros_like(x)

    monkeypatch.setattr(LlamaMLP, "forward", branching)
    loaded = load_model(EngineConfig(str(save_tiny_model("llama", tmp_path / "model")), dtype="float32"))
    assert loaded.native is None
