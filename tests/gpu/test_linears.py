"""Products of few rows: their kernels in Triton's interpreter and compiled for GPUs, and which of them is chosen.

The interpreter is chosen by the environment when Triton is imported: this module, run as a program, is its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

from batchserve.gpu import choose
from batchserve.gpu.choose import choose_products
from batchserve.gpu.linears import BY_MATRICES, BY_VECTORS, ROW_COUNTS, Choices, Shape, Variant, multiply, variants
from batchserve.gpu.norms import rms_norm
from tests.attention.test_triton import (  # noqa: F401  (two are fixtures)
    FakeGPU,
    compiled_before,
    gpu,
    spilled_bytes,
    touched_early,
)

# (rows, out_features, in_features, block_n, block_k, by_vectors, has_bias, has_residual)
CASES = [
    (1, 8, 64, 4, 32, True, False, False),
    (1, 7, 100, 4, 32, True, True, True),  # neither size is a multiple of its block
    (1, 5, 16, 2, 16, True, False, True),
    (2, 8, 64, 4, 32, True, False, False),
    (3, 7, 100, 4, 32, True, True, True),
    (4, 6, 96, 4, 32, True, False, True),
    (2, 32, 64, 16, 32, False, False, False),
    (16, 20, 32, 16, 32, False, True, False),
    (17, 48, 64, 16, 16, False, False, True),
    (5, 16, 96, 16, 32, False, True, True),
    (40, 33, 64, 16, 32, False, True, True),
    (64, 33, 32, 16, 32, False, False, True),
]
NORMS = [(1, 64), (5, 100), (2, 1)]  # rows, dim


def product(*case: Any) -> list[float]:
    """How far the kernel is off, and how much there is; runs in the interpreter's process."""
    rows, out_features, in_features, block_n, block_k, by_vectors, has_bias, has_residual = case
    generator = torch.Generator().manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    x, weight = noise(rows, 2 * in_features)[:, :in_features], noise(out_features, in_features)  # rows of x lie apart
    bias = noise(out_features) if has_bias else None
    residual = noise(rows, out_features) if has_residual else None
    found = multiply(Variant(block_n, block_k, 4, 2, by_vectors), x, weight, bias, residual)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    exact = exact if residual is None else exact + residual.double()
    assert found.shape == exact.shape
    return [float((found.double() - exact).abs().max()), float(exact.abs().max())]


def norm(rows: int, dim: int) -> list[float]:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(1, rows, 2 * dim, generator=generator) * 3).half()[..., :dim]
    scale = torch.randn(dim, generator=generator)
    exact = functional.rms_norm(x.double(), (dim,), scale.double(), 1e-5)
    return [float((rms_norm(x, scale, 1e-5, False).double() - exact).abs().max()), float(exact.abs().max())]


def test_kernels_in_the_interpreter() -> None:
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    for case, (error, most) in zip([*CASES, *NORMS], found, strict=True):
        assert error < 2e-3 * most, case
        assert most > 0.5, case


@pytest.mark.parametrize("gpu", [80, 90], indirect=True)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_variants_compile_for_a_gpu(gpu: FakeGPU, rows: int) -> None:  # noqa: F811
    """All of them for a GPU like those that they were chosen on; on an older one some need more memory than it has."""
    from batchserve.gpu import kernels

    both = (kernels.multiply_few, kernels.multiply_rows)
    for kernel in both:
        kernel.device_caches.clear()
    shape = Shape(256, 11264, torch.bfloat16)
    x, residual = (torch.empty(rows, n, dtype=shape.dtype, device="meta") for n in (shape.in_features, 256))
    weight = torch.empty(shape.out_features, shape.in_features, dtype=shape.dtype, device="meta")
    wanted, refused = variants(shape, rows, overlaps=gpu.arch >= 90), []
    matrices = [each for each in BY_MATRICES if gpu.arch >= 90 or not each.is_fetched]
    assert wanted == [*(BY_VECTORS if rows <= 4 else ()), *(matrices if rows > 1 else ())]
    for variant in wanted:
        try:
            out = multiply(variant, x, weight, None, residual, overlaps=gpu.arch >= 90)
            assert out.shape == (rows, shape.out_features)
        except Exception as error:
            refused.append(str(error))
    assert all("out of resource: shared memory" in each for each in refused)
    assert len(refused) <= (0 if rows == 1 else 1 if gpu.arch >= 90 else 3)
    assert len(gpu.launches) == len(wanted) - len(refused)
    for kernel in both:
        for each in kernel.device_caches[gpu.arch][0].values():
            assert ("mma.sync" in each.asm["ptx"] or "wgmma" in each.asm["ptx"]) == (kernel is kernels.multiply_rows)
            if gpu.arch >= 90:
                assert touched_early(each, (0, 2, 3, 4)) == []  # x, bias, residual, out
                assert bool(touched_early(each, (1,))) == (kernel is kernels.multiply_few)  # its first weights
            else:
                assert "griddepcontrol" not in each.asm["ptx"]
            assert spilled_bytes(each) <= 64


@pytest.mark.parametrize("gpu", [80, 90], indirect=True)
def test_norms_compile_for_a_gpu(gpu: FakeGPU) -> None:  # noqa: F811
    from batchserve.gpu import kernels

    kernels.normalise.device_caches.clear()
    x = torch.empty(1, 3, 4096, dtype=torch.bfloat16, device="meta")
    assert rms_norm(x, torch.empty(4096, device="meta"), 1e-5, gpu.arch >= 90).shape == x.shape
    assert gpu.launches == [("normalise", (3, 1, 1))]
    (kernel,) = kernels.normalise.device_caches[gpu.arch][0].values()
    assert gpu.arch < 90 or touched_early(kernel, (0, 2)) == []


def test_what_can_multiply_follows_from_the_shape() -> None:
    def blocks(in_features: int, count: int, dtype: torch.dtype = torch.bfloat16) -> set[int]:
        return {each.block_k for each in variants(Shape(64, in_features, dtype), count, overlaps=False)}

    assert blocks(4096, 1, torch.float32) == set()
    assert blocks(600, 1, torch.float16) == {512}
    assert blocks(100, 4) == set()
    assert blocks(11008, 16) == {64, 128, 256}
    assert blocks(896, 64) == {64, 128}
    fetched = [each.is_fetched for each in variants(Shape(64, 4096, torch.bfloat16), 16, overlaps=True)]
    assert set(fetched) == {False, True}
    assert not any(each.is_fetched for each in variants(Shape(64, 4096, torch.bfloat16), 16, overlaps=False))


class PretendedKernels:
    """Kernels that torch stands in for, and how long each takes.

    Those of `wrong` give something else in the last row, those of `forgetful` where something is added.
    """

    def __init__(
        self,
        seconds: dict[Variant | None, float],
        wrong: Sequence[Variant] = (),
        forgetful: Sequence[Variant] = (),
    ) -> None:
        self.seconds, self.wrong, self.forgetful = seconds, wrong, forgetful
        self.ran: Variant | None = None

    def run(
        self,
        variant: Variant,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: None = None,
        residual: torch.Tensor | None = None,
        *,
        overlaps: bool,
    ) -> torch.Tensor:
        if variant not in self.seconds:
            raise RuntimeError("out of resource: shared memory")
        self.ran = variant
        out = functional.linear(x, weight)
        out[-1] *= 1.02 if variant in self.wrong else 1.0
        return out if residual is None else out + residual * (2.0 if variant in self.forgetful else 1.0)

    def time(self, product: choose.Product, weights: Sequence[torch.Tensor]) -> float:
        self.ran = None
        product(weights[0])
        return self.seconds[self.ran]


@pytest.mark.parametrize("hidden_size", [8, 1024])
def test_the_fastest_that_is_right_is_chosen(hidden_size: int) -> None:
    shape = Shape(8, 1024, torch.bfloat16)
    slow, fast, faster, *_ = BY_MATRICES
    kernels = PretendedKernels({None: 1.0, BY_VECTORS[1]: 0.99, slow: 0.9, fast: 0.8, faster: 0.7}, wrong=[faster])
    choices, said = Choices(), list[str]()
    weights = [torch.randn(8, 1024).bfloat16()]
    choose_products({shape: weights}, hidden_size, choices, kernels.time, said.append, kernels.run)
    assert choices.variant(shape, 1) is None  # hardly faster than torch's
    assert {choices.variant(shape, rows) for rows in (2, 16, 17, 33, 64)} == {fast}
    assert choices.variant(shape, 65) is choices.variant(shape, 0) is None
    assert choices.variant(Shape(8, 128, torch.bfloat16), 2) is None
    assert said == ["products of 8 x 1024: our own kernel for up to 4, 16, 32, 64 rows"]


@pytest.mark.parametrize("hidden_size", [8, 1024])
def test_what_adds_wrongly_is_not_chosen(hidden_size: int) -> None:
    shape = Shape(8, 1024, torch.bfloat16)
    fast, *_ = BY_MATRICES
    kernels = PretendedKernels({None: 1.0, fast: 0.5}, forgetful=[fast])
    choices = Choices()
    weights = [torch.randn(8, 1024).bfloat16()]
    choose_products({shape: weights}, hidden_size, choices, kernels.time, print, kernels.run)
    assert {choices.variant(shape, rows) for rows in (1, 2, 16, 64)} == {None}


@pytest.mark.parametrize(("hidden_size", "is_added_to"), [(8, True), (1024, False), (None, False)])
def test_what_gives_the_hidden_state_is_timed_with_an_addition(hidden_size: int | None, is_added_to: bool) -> None:
    shape, variant = Shape(8, 1024, torch.bfloat16), BY_MATRICES[0]
    kernels, seen = PretendedKernels({None: 1.0, variant: 0.5}), []

    def time(product: choose.Product, weights: Sequence[torch.Tensor]) -> float:
        seconds = kernels.time(product, weights)
        seen.append((kernels.ran, bool(product(torch.zeros_like(weights[0])).any())))
        return seconds

    weights = [torch.randn(8, 1024).bfloat16()]
    choose_products({shape: weights}, hidden_size, Choices(), time, print, kernels.run)
    assert set(seen) == {(None, is_added_to), (variant, is_added_to)}


class FakeEvent:
    """Of a device that has gone idle behind the first so many records of a beginning."""

    idle = 0
    recorded: ClassVar[list[FakeEvent]] = []

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return len(self.recorded) // 2 <= FakeEvent.idle

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.recorded[-2:] == [self, end]
        return 40.0 if len(self.recorded) == 8 else 10.0  # ms: once something came between


@pytest.mark.parametrize("idle", [0, 2, 100])
def test_a_product_is_timed_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch, idle: int) -> None:
    fillers, normed = [], []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "recorded", [])
    monkeypatch.setattr(FakeEvent, "idle", idle)
    monkeypatch.setattr(torch, "mm", lambda *_, out: fillers.append(out))
    monkeypatch.setattr(choose, "rms_norm", lambda *_: normed.append(1))
    timer = choose.CudaTimer(torch.device("cpu"), torch.bfloat16, overlaps=False)
    weights = [torch.ones(1)] * 4
    assert timer(lambda weight: weight, weights) == pytest.approx(10e-3 / 4)
    tries = len(FakeEvent.recorded) // 2
    assert tries == choose.TIMINGS + (3 if idle == 100 else idle)
    assert len(normed) == 1 + 4 * tries
    first = choose.FILL_PRODUCTS
    assert len(fillers) == {0: 3 * first, 2: (1 + 2 + 3 * 4) * first, 100: (1 + 2 + 4 + 3 * 8) * first}[idle]


def test_a_fault_of_the_device_is_not_taken_for_a_kernel_that_cannot_be() -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        choose_products(
            {Shape(8, 256, torch.bfloat16): [torch.ones(8, 256).bfloat16()]}, 8, Choices(), lambda *_: 1.0, print, fails
        )


if __name__ == "__main__":
    print(json.dumps([*(product(*case) for case in CASES), *(norm(*case) for case in NORMS)]))
