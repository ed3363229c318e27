"""The batch_invariant level: speculation on against off, bit for bit, in any batch."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from batchserve.errors import ConfigError
from batchserve.runner import step_handle
from batchserve.runner.loader import resolve_dtype
from batchserve.runner.model_folder import resolve_model
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
    right = step_handle.verify_batch
    is_recording = True

    def observing(batch, logits, *others, **options):  # type: ignore[no-untyped-def]
        results = right(batch, logits, *others, **options)
        for rows, first, verified in zip(batch.requests, batch.first_logit, results, strict=True):
            if rows.request_id.startswith("measure-"):  # of the start: their contexts are whatever was in memory
                continue
            for depth, row in enumerate([rows.root, *verified.rows] if verified else []):
                slot = (rows.request_id, rows.context_len + rows.num_pending + depth)
                row_logits = logits[first + row - rows.root]
                if is_recording:
                    seen[slot] = row_logits
                elif slot in seen:
                    assert np.array_equal(seen[slot], row_logits), slot
        return results

    monkeypatch.setattr(step_handle, "verify_batch", observing)
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
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "mixtral", "phi3_longrope"])
def test_tiny_models(family: str, dtype: str, tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    check_bitwise(tiny_model[family], VOCAB_SIZE, dtype, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bundled_model(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bitwise(Path(resolve_model("bundled")), 4096, dtype, monkeypatch)


def test_a_width_that_vectors_do_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, fp32 activations as ATen computes them differ from row to row."""
    model = save_tiny_model("llama", tmp_path / "odd", intermediate_size=100)
    check_bitwise(model, VOCAB_SIZE, "float32", monkeypatch)


def test_a_model_without_a_native_program_is_refused(tiny_model: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant = True: .* has no native program"):
        build(tiny_model["gpt_oss"], dtype="float32", batch_invariant=True)


def test_operators_that_torch_computes_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model("llama", tmp_path / "squares", hidden_act="relu2")
    with pytest.raises(ConfigError, match=r"batch_invariant = True: .* torch computes, .*: square$"):
        build(model, dtype="float32", batch_invariant=True)
