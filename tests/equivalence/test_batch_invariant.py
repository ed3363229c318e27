"""The batch_invariant level: speculation on against off, bit for bit, in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import gcd
from pathlib import Path

import pytest
import torch

from batchserve.config import EngineConfig
from batchserve.engine import backend
from batchserve.errors import ConfigError
from batchserve.runner import model_runner
from batchserve.runner.loader import load_model, resolve_dtype
from batchserve.runner.model_folder import resolve_model
from batchserve.runner.packed import PackedLinear
from batchserve.runner.row_dependence import NUM_ROWS, SHARED_ELEMENTS, _copies_to_share, _Watch
from tests.drafters import OracleDrafter
from tests.equivalence.harness import Coverage, build, run
from tests.equivalence.test_sampled import sampled_jobs
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.cpu_backend
DTYPES = sorted({"float32", str(resolve_dtype("auto")).removeprefix("torch.")})


def check_bitwise(model: Path, vocab_size: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits behind every emitted token are compared, not only the tokens."""
    jobs = sampled_jobs(random.Random(8), 10, vocab_size)
    seen: dict[tuple[str, int], torch.Tensor] = {}
    right = model_runner.verify_batch
    is_recording = True

    def observing(batch, logits, forced):  # type: ignore[no-untyped-def]
        results = right(batch, logits, forced)
        for rows, first, verified in zip(batch.requests, batch.first_logit, results, strict=True):
            if rows.request_id.startswith("measure-"):  # of the start: their contexts are whatever was in memory
                continue
            for depth, row in enumerate([rows.root, *verified.rows] if verified else []):
                slot = (rows.request_id, rows.context_len + rows.num_pending + depth)
                row_logits = logits[first + row - rows.root]
                if is_recording:
                    seen[slot] = row_logits
                elif slot in seen:
                    assert torch.equal(seen[slot], row_logits), slot
        return results

    monkeypatch.setattr(model_runner, "verify_batch", observing)
    options = {"dtype": dtype, "batch_invariant": True, "max_model_len": 200}
    off = run(build(model, max_num_seqs=1, **options), jobs, Coverage(), speculate=False)
    is_recording = False
    truth = {tuple(job.prompt): off[i].token_ids for i, job in enumerate(jobs)}
    for drafter in (None, OracleDrafter(vocab_size, 8, truth)):
        coverage = Coverage()
        on = run(build(model, drafter, max_num_seqs=5, prefill_chunk_size=9, **options), jobs, coverage)
        assert {i: a.token_ids for i, a in on.items()} == {i: a.token_ids for i, a in off.items()}
    assert coverage.accepted > 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_tiny_models(family: str, dtype: str, tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    check_bitwise(tiny_model[family], VOCAB_SIZE, dtype, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bundled_model(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bitwise(Path(resolve_model("bundled")), 4096, dtype, monkeypatch)


def test_a_width_that_vectors_do_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, fp32 activations as ATen computes them differ from row to row."""
    model = save_tiny_model("llama", tmp_path / "odd", intermediate_size=100)
    check_bitwise(model, VOCAB_SIZE, "float32", monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_refused(family: str, dtype: str, tiny_model: dict[str, Path]) -> None:
    """Of some a probe of a few hundred rows shows no other bit; one row in a thousand has some all the same."""
    with pytest.raises(ConfigError, match=r"batch_invariant: .* \(matrix products that are not packed"):
        build(tiny_model[family], dtype=dtype, batch_invariant=True)


def test_activations_that_differ_at_the_ends_of_vectors_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "sigmoid", hidden_act="sigmoid", intermediate_size=100)
    with pytest.raises(ConfigError, match=r"come out otherwise among few rows: sigmoid\)"):
        build(model, dtype="float32", batch_invariant=True, custom_kernels=False)


def test_products_are_found_by_name_unless_nothing_is_added_up() -> None:
    x, y = torch.randn(NUM_ROWS, 4), torch.randn(4, 4)

    def found(function: Callable[[], torch.Tensor]) -> set[str]:
        with torch.inference_mode(), _Watch() as watch:
            function()
        return watch.products

    assert found(lambda: x @ y)
    assert found(lambda: torch.einsum("ij,jk->ik", x, y))
    assert found(lambda: torch.addmm(x, x, y))
    assert found(lambda: torch.tensordot(x, y, dims=1))
    assert found(lambda: torch.inner(x, y))
    assert found(lambda: torch.nn.functional.conv1d(x.T[None], torch.randn(2, 4, 3)))
    assert not found(lambda: x[:, :1] @ y[:1]), "as rotary angles are made"
    assert not found(lambda: torch.einsum("i,j->ij", x[:, 0], y[0]))
    assert not found(lambda: torch.exp(x).add_(1.0).mul_(x))


def test_elementwise_functions_are_tried_and_come_out_as_they_would() -> None:
    def found(function: Callable[[], object]) -> set[str]:
        with torch.inference_mode(), _Watch() as watch:
            function()
        return watch.elementwise

    x = torch.randn(NUM_ROWS, 100, generator=torch.Generator().manual_seed(0))
    assert found(lambda: torch.sigmoid(x)) == {"sigmoid"}
    assert found(lambda: torch.exp(x).add_(1.0).mul_(x)) == set()
    out = torch.empty_like(x)
    assert found(lambda: torch.add(x, x, out=out)) == set()
    assert torch.equal(out, x + x)


def test_copies_are_shared_by_all_threads_whose_parts_do_not_end_with_rows() -> None:
    for num_threads in range(1, 130):
        for num_elements in (1, NUM_ROWS, NUM_ROWS * 96, NUM_ROWS * 14336):
            copies = _copies_to_share(num_elements, num_threads)
            assert copies * num_elements > num_threads * SHARED_ELEMENTS
            assert gcd(copies * NUM_ROWS, num_threads) == 1


@pytest.mark.parametrize("has_matrices", [False, True])
def test_beside_amx_linears_multiply_few_rows_at_once(has_matrices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the probe would notice: few elements depend on the number of rows, and not in every batch."""
    monkeypatch.setattr(backend, "has_matrix_instructions", lambda dtype: has_matrices)
    loaded = load_model(EngineConfig(dtype="float32", custom_kernels=False))
    backend.check_batch_invariant(loaded, has_kernel=True)
    linears = [module for module in loaded.model.modules() if isinstance(module, PackedLinear)]
    assert linears
    assert all(linear.is_split == has_matrices for linear in linears)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_linear_of_the_bundled_model_gives_a_row_the_same_bits(dtype: str) -> None:
    loaded = load_model(EngineConfig(dtype=dtype, custom_kernels=False))
    backend.check_batch_invariant(loaded, has_kernel=True)
    for linear in (module for module in loaded.model.modules() if isinstance(module, PackedLinear)):
        x = torch.randn(384, linear.in_features, generator=torch.Generator().manual_seed(1)).to(loaded.dtype)
        expected = torch.cat([linear(piece) for piece in x.split(16)])
        for count in (33, 48, 65, 128, 384):
            assert torch.equal(linear(x[:count]), expected[:count]), (linear.in_features, count)
