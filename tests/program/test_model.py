"""Whole models as native programs: which can be, that they answer as the models do, and the same bits in any steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from batchserve.attention.interface import ShapeProbe
from batchserve.config import EngineConfig
from batchserve.request import GREEDY
from batchserve.runner import native
from batchserve.runner.forward import logits_of
from batchserve.runner.loader import load_model
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from tests.equivalence.harness import build
from tests.tiny_models import save_tiny_model

NATIVE = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "gpt_neox", "olmo2", "glm4",
)  # fmt: skip
NUM_TOKENS = 45


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of bfloat16 also where modules would be faster."""
    monkeypatch.setattr(native, "multiplies_halves", lambda: False)


def ids() -> list[int]:
    return torch.randint(3, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def answer(runner: ModelRunner, tokens: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens, by steps of such numbers of rows."""
    found, context, allocator = [], 0, runner.backend.allocator
    for count in sizes:
        assert allocator.reserve("one", count)
        rows = RequestRows("one", context, list(tokens[context : context + count]), [*range(-1, count - 1)], 1, GREEDY)
        found.append(runner.forward(build_batch([rows])))
        allocator.commit("one", range(count))
        context += count
    allocator.release("one")
    return torch.cat(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", NATIVE)
def test_a_family_is_native_and_right_and_has_the_same_bits_in_any_steps(
    family: str, dtype: str, tiny_model: dict[str, Path]
) -> None:
    built = build(tiny_model[family], dtype=dtype, num_threads=1)
    runner, tokens = built.core.runner, ids()
    whole = answer(runner, tokens, [NUM_TOKENS])
    for sizes in ([1] * NUM_TOKENS, [7, 16, 22], [17, 3, 25]):
        assert torch.equal(answer(runner, tokens, sizes), whole)
    plain = load_model(EngineConfig(str(tiny_model[family]), dtype="float32", custom_kernels=False))
    with torch.inference_mode():
        places = torch.arange(NUM_TOKENS)
        expected = logits_of(plain.model, ShapeProbe(), torch.tensor(tokens), places, places).float()
    error = (whole - expected).square().mean().sqrt() / expected.std()
    assert error < (1e-5 if dtype == "float32" else 0.05)


def test_two_threads_give_the_bits_of_one(tiny_model: dict[str, Path]) -> None:
    tokens = ids()
    one, two = (build(tiny_model["qwen3"], dtype="bfloat16", num_threads=count).core.runner for count in (1, 2))
    for sizes in ([NUM_TOKENS], [5, 1, 1, 16, 22]):
        assert torch.equal(answer(one, tokens, sizes), answer(two, tokens, sizes))


@pytest.mark.parametrize(
    "options",
    [
        {"intermediate_size": 100, "vocab_size": 131},
        {"hidden_size": 52, "head_dim": 14, "intermediate_size": 34},
        {"head_dim": 80, "num_key_value_heads": 1},
        {"head_dim": 256, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_act": "gelu"},
        {"hidden_act": "quick_gelu"},
    ],
)
def test_odd_models(options: dict[str, object], tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "odd", **options)
    loaded = load_model(EngineConfig(str(folder), dtype="float32"))  # which compares with the model itself
    assert loaded.native is not None


def test_a_model_that_cannot_be_a_program_is_served_by_its_modules(tiny_model: dict[str, Path]) -> None:
    loaded = load_model(EngineConfig(str(tiny_model["mixtral"]), dtype="float32"))
    assert loaded.native is None
    assert loaded.has_packed_linears


def test_modules_multiply_bfloat16_where_the_processor_does(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies_halves", lambda: True)
    loaded = {
        dtype: load_model(EngineConfig(str(tiny_model["llama"]), dtype=dtype)) for dtype in ("bfloat16", "float32")
    }
    assert loaded["bfloat16"].native is None
    assert loaded["float32"].native is not None


def test_weights_are_kept_once(tmp_path: Path) -> None:
    """Packed; what is tied to the embeddings is looked up in the head's."""
    folder = save_tiny_model("llama", tmp_path / "tied", tie_word_embeddings=True)
    loaded = load_model(EngineConfig(str(folder), dtype="float32"))
    assert loaded.native is not None
    kept = sum(parameter.numel() for parameter in loaded.model.parameters() if parameter.ndim > 1)
    assert kept == 0
