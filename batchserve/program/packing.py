"""Weights of a product as its kernel reads them: front to back, once a step.

[blocks of 16 output columns][words of K][16 columns] of 32-bit words. A word is one float32, or two bfloat16 of
neighbouring k, the lower one first: half a cache line is a column block's next words on every processor, and a run of
16 of them is a tile of matrix instructions.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 16  # columns
PACKED_AT_ONCE = 64  # blocks, so that a large weight is not in memory a third time
HUGE_PAGE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """words int32 [num_blocks, num_words, BLOCK]: of weight [num_columns, num_inputs], float32 or bfloat16; of experts
    those of one after those of the other.

    Columns and inputs that fill up the last block and word are zero. Words of bfloat16 fill up whole tiles.
    """

    words: np.ndarray
    num_columns: int
    num_inputs: int
    dtype: torch.dtype

    @property
    def expert_bytes(self) -> int:
        """From one expert's first block to the next one's."""
        return -(-self.num_columns // BLOCK) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return int(self.words.strides[0])

    @property
    def num_words(self) -> int:
        """All that there are in a block."""
        return int(self.words.shape[1])

    @property
    def num_words_used(self) -> int:
        """Those that have an input's weight."""
        return -(-self.num_inputs // (4 // self.dtype.itemsize))


def pack(weight: torch.Tensor) -> PackedWeight:
    """Pack a weight [num_columns, num_inputs], or of experts [num_experts, ...], float32 or bfloat16."""
    experts = weight if weight.ndim == 3 else weight[None]
    num_experts, num_columns, num_inputs = experts.shape
    in_word = 4 // weight.element_size()
    blocks, words = -(-num_columns // BLOCK), -(-num_inputs // in_word)
    if in_word == 2:
        words = -(-words // BLOCK) * BLOCK
    packed = torch.from_numpy(_aligned((num_experts * blocks, words, BLOCK)))
    places = ((number, first) for number in range(num_experts) for first in range(0, blocks, PACKED_AT_ONCE))
    for number, first in places:
        columns = experts[number, first * BLOCK : (first + PACKED_AT_ONCE) * BLOCK].detach()
        count = -(-columns.shape[0] // BLOCK)
        filled = columns.new_zeros(count * BLOCK, words * in_word)
        filled[: columns.shape[0], :num_inputs] = columns
        piece = filled.view(torch.int32).view(count, BLOCK, words)
        start = number * blocks + first
        packed[start : start + count] = piece.transpose(1, 2)
    return PackedWeight(packed.numpy(), num_columns, num_inputs, weight.dtype)


def _aligned(shape: tuple[int, int, int]) -> np.ndarray:
    """In huge pages where the system has them: a step reads all weights, and looks up each of their pages."""
    size = int(np.prod(shape)) * 4
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of packed weights: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + size].view(np.int32).reshape(shape)
