"""Swapped modules compute what the originals do, and give a row the same bits in any batch of at least two."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from batchserve.attention.cpu import has_matrix_instructions
from batchserve.runner.packed import (
    SAME_ORDER_ROWS,
    FusedRMSNorm,
    PackedLinear,
    can_pack,
    compile_for,
    pack_modules,
    piece_sizes,
    split_linears,
)

DTYPES = [d for d in (torch.float32, torch.bfloat16) if can_pack(d)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def rows(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (64, 96), (257, 33), (1, 7)])
def test_a_packed_linear_is_the_linear(out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = rows(out_features, in_features, dtype) / in_features**0.5
    bias = rows(1, out_features, dtype, 1)[0] if has_bias else None
    packed = PackedLinear(weight, bias)
    for count in (1, 2, 5, 40):
        x = rows(count, in_features, dtype, 2)
        torch.testing.assert_close(packed(x), F.linear(x, weight, bias), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(packed(x[None])[0], packed(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (640, 256), (4096, 256), (256, 640), (768, 3072)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    """From two rows on: what lossless speculation rests on. (One row takes another kernel; steps are padded.)

    Beside AMX it takes pieces, and without them it holds for up to SAME_ORDER_ROWS.
    """
    packed = PackedLinear(rows(out_features, in_features, dtype), None)
    x = rows(130, in_features, dtype, 3)
    has_amx = has_matrix_instructions(dtype)
    few = packed(x[:SAME_ORDER_ROWS])
    for start, count in ((0, 2), (1, 3), (5, 4), (0, 7), (3, 16), (0, 31)):
        assert torch.equal(packed(x[start : start + count]), few[start : start + count]), (start, count)
    for is_split in (False, True):
        if is_split:
            split_linears(packed)
        whole = packed(x)
        for start, count in ((0, 2), (1, 3), (5, 4), (0, 7), (60, 16), (3, 33), (64, 64), (0, 129)):
            found, expected = packed(x[start : start + count]), whole[start : start + count]
            torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            assert torch.equal(found, expected) or (has_amx and not is_split), (start, count)
    assert torch.equal(packed(x[None])[0], whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_up_to_32_rows_have_the_same_bits_on_any_number_of_threads(num_threads: int, dtype: torch.dtype) -> None:
    packed, x = PackedLinear(rows(512, 2048, dtype), None), rows(64, 2048, dtype, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        expected = torch.cat([packed(piece) for piece in x.split(2)])
        for count in (4, 8, 16, 31, SAME_ORDER_ROWS):
            found = torch.cat([packed(piece) for piece in x[: 2 * count].split(count)])
            assert torch.equal(found, expected[: 2 * count]), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [33, 34, 63, 64, 65, 96, 97, 512])
def test_pieces_are_all_of_the_rows_and_none_is_a_single_row(num_rows: int) -> None:
    sizes = piece_sizes(num_rows)
    assert sum(sizes) == num_rows
    assert all(2 <= size <= SAME_ORDER_ROWS for size in sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", [LlamaRMSNorm, Gemma2RMSNorm])  # weight, and 1 + weight
def test_the_fused_norm_is_chosen_by_what_the_norm_does(norm_type: type, dtype: torch.dtype) -> None:
    norm = norm_type(48, eps=1e-5)
    torch.nn.init.normal_(norm.weight, 0.5, 0.3)
    model = torch.nn.ModuleList([norm.to(dtype)])
    x = rows(9, 48, dtype, 4) * 3
    expected = norm(x)
    assert pack_modules(model) == (0, 1)
    assert isinstance(model[0], FusedRMSNorm)
    torch.testing.assert_close(model[0](x), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def num_compiled(capfd: pytest.CaptureFixture[str], multiply: Callable[[], object]) -> int:
    """How many products oneDNN compiles meanwhile, by what it says itself."""
    capfd.readouterr()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        multiply()
    return capfd.readouterr().out.count("cache_miss")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_rows_that_were_compiled_for_are_compiled_once(
    dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    """Shapes that no other test has: what oneDNN compiles it keeps for the whole process."""
    bias = rows(1, 91, dtype)[0]
    layers = [(PackedLinear(rows(91, 53, dtype), bias), PackedLinear(rows(53, 91, dtype), None)) for _ in range(2)]
    model = torch.nn.Sequential(*layers[0], *layers[1])

    def run(count: int) -> Callable[[], object]:
        return lambda: model(rows(count, 53, dtype))

    assert num_compiled(capfd, run(7)) > 0
    assert compile_for(model, range(4, 10), 60.0) == 9
    assert [num_compiled(capfd, run(count)) for count in range(4, 10)] == [0] * 6
    assert min(num_compiled(capfd, run(count)) for count in (10, 11)) > 0


def test_nothing_is_compiled_beyond_the_time_for_it() -> None:
    model = torch.nn.Sequential(PackedLinear(rows(8, 8, DTYPES[0]), None))
    assert compile_for(model, range(4, 10), 0.0) == 0
    assert compile_for(torch.nn.Linear(8, 8), range(4, 10), 60.0) == 0


class OddRMSNorm(LlamaRMSNorm):
    """Looks like the others, and does something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + 0.25


class MeanlessRMSNorm(torch.nn.Module):
    """No weight at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


@pytest.mark.parametrize(
    "norm", [OddRMSNorm(32), MeanlessRMSNorm(), torch.nn.LayerNorm(32)], ids=lambda n: type(n).__name__
)
def test_norms_of_another_function_are_left_alone(norm: torch.nn.Module) -> None:
    model = torch.nn.ModuleList([copy.deepcopy(norm)])
    assert pack_modules(model) == (0, 0)
    assert type(model[0]) is type(norm)


def test_linears_and_conv1d_are_swapped_and_subclasses_are_not() -> None:
    class Special(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = torch.nn.Sequential(torch.nn.Linear(16, 24), Conv1D(8, 24), Special(8, 8)).eval()
    x = rows(6, 16, torch.float32)
    with torch.inference_mode():
        expected = model(x)
        assert pack_modules(model) == (2, 0)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert type(model[2]) is Special
