"""Elements as float32 and back, against torch's own conversions."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from batchserve.native.elements import narrow, widen


@njit
def widen_all(elements, out):  # type: ignore[no-untyped-def]
    for i in range(len(elements)):
        out[i] = widen(elements[i])


@njit
def narrow_all(numbers, out):  # type: ignore[no-untyped-def]
    for i in range(len(numbers)):
        out[i] = narrow(numbers[i], out[i])


def test_every_bfloat16_is_widened_exactly() -> None:
    bits, found = np.arange(1 << 16).astype(np.uint16), np.zeros(1 << 16, np.float32)
    widen_all(bits, found)
    expected = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()


def test_numbers_are_narrowed_to_the_nearest_and_of_two_to_the_even_one() -> None:
    rng = np.random.default_rng(0)
    # Any bits at all, and what lies on and beside the middle of two neighbours.
    words = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    upper = rng.integers(0, 1 << 16, 60_000, dtype=np.uint64).astype(np.uint32) << np.uint32(16)
    middles = (upper + np.array([[0x7FFF], [0x8000], [0x8001]], np.uint32)).reshape(-1)
    special = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4028235e38], np.float32).view(np.uint32)
    numbers = np.concatenate([words, middles, special]).view(np.float32)
    found = np.zeros(len(numbers), np.uint16)
    narrow_all(numbers, found)
    expected = torch.from_numpy(numbers.copy()).to(torch.bfloat16)
    is_nan = np.isnan(numbers)
    assert (found == expected.view(torch.uint16).numpy())[~is_nan].all()
    assert torch.from_numpy(found).view(torch.bfloat16).isnan().numpy()[is_nan].all()


def test_float32_stays_as_it_is() -> None:
    numbers = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    wide, narrowed = np.zeros(100, np.float32), np.zeros(100, np.float32)
    widen_all(numbers, wide)
    narrow_all(numbers, narrowed)
    assert (wide == numbers).all()
    assert (narrowed == numbers).all()
