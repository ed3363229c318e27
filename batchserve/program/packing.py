"""Packs a product's weights in the order in which its kernel reads them: front to back, once per step.

The layout is [blocks of 16 output columns][words of K][16 columns] of 32-bit words. A word is one float32, or two
bfloat16 of neighbouring k, the lower one first. On every processor, 64 consecutive bytes are a column block's next
words. A run of 16 words of K is a tile of matrix instructions.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 16  # columns
PACKED_AT_ONCE = 64  # blocks; packing all at once would hold a large weight in memory a third time
HUGE_PAGE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A float32 or bfloat16 weight [num_columns, num_inputs] in words int32 [num_blocks, num_words, BLOCK]. The blocks
    of experts follow each other.

    Columns and inputs that pad the last block and word are zero. Words of bfloat16 are padded to whole tiles.
    """

    words: np.ndarray
    num_columns: int
    num_inputs: int
    dtype: torch.dtype

    @property
    def expert_bytes(self) -> int:
        """Bytes from one expert's first block to the next expert's."""
        return -(-self.num_columns // BLOCK) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return int(self.words.strides[0])

    @property
    def num_words(self) -> int:
        """Words of K in a block, including padding."""
        return int(self.words.shape[1])

    @property
    def num_words_used(self) -> int:
        """Words of K in a block that hold an input's weight."""
        return -(-self.num_inputs // (4 // self.dtype.itemsize))


def pack(weight: torch.Tensor) -> PackedWeight:
    """Packs a float32 or bfloat16 weight [num_columns, num_inputs], or experts' weights [num_experts, ...]."""
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
    """Allocates in huge pages if the system has them: a step reads all weights and looks up each of their pages."""
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
