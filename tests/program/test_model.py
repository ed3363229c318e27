"""Whole models as native programs: which can be, that they answer as the models do, and the same bits in any steps."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from batchserve.attention.cpu import CpuBackend
from batchserve.attention.interface import ShapeProbe
from batchserve.config import EngineConfig
from batchserve.kv.slab import SlabAllocator
from batchserve.program.link import LinkedModel
from batchserve.program.model import NativeModel
from batchserve.request import GREEDY
from batchserve.runner import native
from batchserve.runner.forward import logits_of
from batchserve.runner.loader import LoadedModel, load_model
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.native_runner import NativeRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from tests.equivalence.harness import build
from tests.tiny_models import save_tiny_model

NATIVE = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "gpt_neox", "olmo2", "glm4",
    "mixtral", "qwen3_moe", "olmoe",
)  # fmt: skip
NUM_TOKENS = 45


def ids() -> list[int]:
    return torch.randint(3, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def answer(runner: NativeRunner | ModelRunner, tokens: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens, by steps of such numbers of rows."""
    found, context, allocator = [], 0, runner.allocator
    for count in sizes:
        assert allocator.reserve("one", count)
        rows = RequestRows("one", context, list(tokens[context : context + count]), [*range(-1, count - 1)], 1, GREEDY)
        found.append(runner.forward(build_batch([rows])))
        best, is_finite = runner.find_best(found[-1])  # which the head has noted
        assert best.tolist() == found[-1].argmax(axis=1).tolist()
        assert is_finite.all()
        allocator.commit("one", range(count))
        context += count
    allocator.release("one")
    return torch.from_numpy(np.concatenate(found))


def logits_of_modules(path: Path, dtype: str, tokens: list[int]) -> torch.Tensor:
    """Logits of all tokens by the model's own modules."""
    plain, places = load_model(EngineConfig(str(path), dtype=dtype, custom_kernels=False)), torch.arange(len(tokens))
    with torch.inference_mode():
        return logits_of(plain.model, ShapeProbe(), torch.tensor(tokens), places, places).float()


def error_of(exact: torch.Tensor, found: torch.Tensor) -> float:
    """The root of the mean square of all differences, in standard deviations."""
    return float((found - exact).square().mean().sqrt() / exact.std())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", NATIVE)
def test_a_family_is_native_and_right_and_has_the_same_bits_in_any_steps(
    family: str, dtype: str, tiny_model: dict[str, Path]
) -> None:
    built = build(tiny_model[family], dtype=dtype, num_threads=1)
    runner, tokens = built.core.executor, ids()
    assert isinstance(runner, NativeRunner)
    whole = answer(runner, tokens, [NUM_TOKENS])
    for sizes in ([1] * NUM_TOKENS, [7, 16, 22], [17, 3, 25]):
        assert torch.equal(answer(runner, tokens, sizes), whole)
    exact = logits_of_modules(tiny_model[family], "float32", tokens)
    # In bfloat16, rounding sends some tokens to other experts, in the modules too.
    rounding = 0.0 if dtype == "float32" else error_of(exact, logits_of_modules(tiny_model[family], dtype, tokens))
    assert error_of(exact, whole) < 1e-5 + 1.1 * rounding


def test_of_likeliest_tokens_the_first_counts_and_none_where_logits_are_no_numbers(
    tiny_model: dict[str, Path],
) -> None:
    runner, tokens = build(tiny_model["llama"], dtype="float32", num_threads=1).core.executor, ids()
    assert isinstance(runner, NativeRunner)
    native = runner._native
    assert runner.allocator.reserve("one", NUM_TOKENS)
    right = runner.forward(build_batch([RequestRows("one", 0, tokens, [*range(-1, NUM_TOKENS - 1)], 1, GREEDY)]))
    for row, changes in enumerate([{5: 99.0, 100: 99.0}, {100: float("nan"), 120: 99.0}, {127: float("inf")}, {}]):
        for column, value in changes.items():
            right[row, column] = value
    width = native._greatest.shape[0]
    parts = [part.max(axis=1) for part in np.array_split(right, range(48, 128, 48), axis=1)]
    native._greatest = np.stack(parts)
    assert width == len(parts)
    best, is_finite = runner.find_best(right)
    assert best.tolist() == right.argmax(axis=1).tolist()
    assert is_finite.tolist() == [True, False, False] + [True] * (NUM_TOKENS - 3)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_two_threads_give_the_bits_of_one(family: str, tiny_model: dict[str, Path]) -> None:
    tokens = ids()
    one, two = (build(tiny_model[family], dtype="bfloat16", num_threads=count).core.executor for count in (1, 2))
    for sizes in ([NUM_TOKENS], [5, 1, 1, 16, 22]):
        assert torch.equal(answer(one, tokens, sizes), answer(two, tokens, sizes))


@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_bits_stay_while_the_number_of_threads_changes(family: str, tiny_model: dict[str, Path]) -> None:
    """From step to step, as beside neighbours that come and go."""
    rng, tokens = random.Random(0), ids()
    runner = build(tiny_model[family], dtype="bfloat16", num_threads=4).core.executor
    assert isinstance(runner, NativeRunner)
    whole, used = answer(runner, tokens, [NUM_TOKENS]), []
    runner.choice.pick = lambda num_rows: (used.append(rng.choice([1, 2, 3, 4])), used[-1])[1]  # type: ignore
    for sizes in ([1] * NUM_TOKENS, [7, 16, 22], [17, 3, 25]):
        assert torch.equal(answer(runner, tokens, sizes), whole)
    assert set(used) == {1, 2, 3, 4}


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
    loaded = load_model(EngineConfig(str(tiny_model["gpt_oss"]), dtype="float32"))
    assert loaded.native is None
    assert loaded.has_packed_linears


def matrices(model: torch.nn.Module) -> dict[int, int]:
    """Bytes of the model's matrices, by their addresses."""
    return {each.data_ptr(): each.nbytes for each in model.parameters() if each.ndim > 1}


@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("llama", False), ("phi3", False), ("gpt2", True)])
def test_weights_are_kept_once(family: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed. An embedding is looked up in the packed head where these are tied, and otherwise in its own table."""
    loaded_at: dict[int, int] = {}
    release = LinkedModel.release_weights

    def noting(self: LinkedModel, model: PreTrainedModel) -> None:
        loaded_at.update(matrices(model))
        release(self, model)

    monkeypatch.setattr(LinkedModel, "release_weights", noting)
    folder = save_tiny_model(family, tmp_path / "model", tie_word_embeddings=is_tied)
    loaded = load_model(EngineConfig(str(folder), dtype="float32"))
    assert loaded.native is not None
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    alive = {each.untyped_storage().data_ptr() for each in tensors}
    kept = sum(size for address, size in loaded_at.items() if address in alive)
    row = 4 * loaded.model.config.hidden_size
    assert kept == (0 if is_tied else loaded.vocab_size * row) + (512 * row if family == "gpt2" else 0)


def test_a_program_that_answers_wrongly_is_not_used(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = NativeModel.run
    monkeypatch.setattr(NativeModel, "run", lambda self, *arguments: right(self, *arguments) * 1.1)
    loaded = load_model(EngineConfig(str(tiny_model["llama"]), dtype="float32"))
    assert loaded.native is None
    assert "a native program of it fails" in caplog.text
    assert "answers differently as a native program" in caplog.text
    check_modules(loaded)


def test_a_model_whose_tracing_fails_is_served_by_its_modules(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*arguments: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("batchserve.program.link.record", failing)
    loaded = load_model(EngineConfig(str(tiny_model["llama"]), dtype="float32"))
    assert loaded.native is None
    assert "KeyError('surprise')" in caplog.text
    check_modules(loaded)


def test_want_of_memory_is_said_as_such(tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise MemoryError("1 bytes of packed weights")

    monkeypatch.setattr("batchserve.program.link.pack", failing)
    with pytest.raises(MemoryError, match="packed weights"):
        load_model(EngineConfig(str(tiny_model["llama"]), dtype="float32"))


def test_modules_run_where_packed_weights_do_not_fit_beside_the_models_own(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "free_memory_bytes", lambda: 1000)
    caplog.set_level(logging.INFO)
    loaded = load_model(EngineConfig(str(tiny_model["llama"]), dtype="float32"))
    assert loaded.native is None
    assert "packed weights take" in caplog.text
    check_modules(loaded)


def check_modules(loaded: LoadedModel) -> None:
    """The model's own modules still have their weights."""
    runner = ModelRunner(loaded, CpuBackend(SlabAllocator(loaded.layers, loaded.dtype, 256), loaded.num_heads))
    assert answer(runner, ids(), [NUM_TOKENS]).isfinite().all()
