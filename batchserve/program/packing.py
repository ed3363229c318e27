"""Packs a product's weights in the order in which its kernel reads them: front to back, once per step.

The layout is [blocks of 16 output columns][words of K][16 columns] of 32-bit words. A word is one float32, or two
bfloat16 of neighbouring k, the lower one first. On every processor, 64 consecutive bytes are a column block's next
words. A run of 16 words of K is a tile of matrix instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from batchserve.array_files import huge_pages
from batchserve.native.dtypes import item_bytes
from batchserve.program.instructions import BLOCK, Kernel
from batchserve.program.product import kernel_of

PACKED_AT_ONCE = 64  # blocks; packing all at once would hold a large weight in memory a third time


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A float32 or bfloat16 weight [num_columns, num_inputs] in words int32 [num_blocks, num_words, BLOCK]. The blocks
    of experts follow each other.

    Columns and inputs that pad the last block and word are zero. Words of bfloat16 are padded to whole tiles.
    """

    words: np.ndarray
    num_columns: int
    num_inputs: int
    dtype: str

    @property
    def expert_bytes(self) -> int:
        """Bytes from one expert's first block to the next expert's."""
        return -(-self.num_columns // BLOCK) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return int(self.words.strides[0])

    @property
    def kernel(self) -> Kernel:
        """The kernel that multiplies by it on this machine."""
        return kernel_of(self.dtype)

    @property
    def num_words(self) -> int:
        """Words of K that the kernel multiplies: whole tiles, or only what holds an input's weight."""
        if self.kernel == Kernel.TILES:
            return int(self.words.shape[1])
        return -(-self.num_inputs // (4 // item_bytes(self.dtype)))


def pack(weight: torch.Tensor) -> PackedWeight:
    """Packs a float32 or bfloat16 weight [num_columns, num_inputs], or experts' weights [num_experts, ...]."""
    experts = weight if weight.ndim == 3 else weight[None]
    num_experts, num_columns, num_inputs = experts.shape
    in_word = 4 // weight.element_size()
    blocks, words = -(-num_columns // BLOCK), -(-num_inputs // in_word)
    if in_word == 2:
        words = -(-words // BLOCK) * BLOCK
    shape = num_experts * blocks, words, BLOCK
    packed = torch.from_numpy(huge_pages(4 * int(np.prod(shape))).view(np.int32).reshape(shape))
    places = ((number, first) for number in range(num_experts) for first in range(0, blocks, PACKED_AT_ONCE))
    for number, first in places:
        columns = experts[number, first * BLOCK : (first + PACKED_AT_ONCE) * BLOCK].detach()
        count = -(-columns.shape[0] // BLOCK)
        filled = columns.new_zeros(count * BLOCK, words * in_word)
        filled[: columns.shape[0], :num_inputs] = columns
        piece = filled.view(torch.int32).view(count, BLOCK, words)
        start = number * blocks + first
        packed[start : start + count] = piece.transpose(1, 2)
    return PackedWeight(packed.numpy(), num_columns, num_inputs, str(weight.dtype).removeprefix("torch."))
