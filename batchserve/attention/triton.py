"""Tree attention on a GPU by our own Triton kernel.

Triton is not imported until a kernel runs. Every grid follows from shapes and from the kernel's constructor arguments,
never from tensor contents, so one capture serves all ragged batches of its bucket. The number of parts that keys are
split into depends on the number of tiles of the step's requests, so results are not batch-invariant.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchserve.attention.base import AttentionParams, LayerShape
from batchserve.attention.tree_metadata import TreeKernel
from batchserve.errors import ConfigError
from batchserve.kernel_overlap import launch_options

if TYPE_CHECKING:
    from batchserve.attention.tree_metadata import TreeMetadata

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 512
# The fastest of twenty tiles on an H200, for steps of 1 to 64 rows after 1024 tokens (docs/gpu.md). A key is found
# through its slot, which is loaded first, so all but three of the stages are blocks of K and V in flight.
SMALL_BLOCK_BYTES, SMALL_STAGES = 8 * 1024, 6  # of K and V per block of keys, for tiles of 16 items run by one warp
BLOCK_BYTES, NUM_STAGES = 16 * 1024, 5
MAX_SPLITS = 16
GATHER_BLOCK = 1024  # slots that one program gathers
MIN_SPLIT = 64  # keys: fewer are not worth a program and a partial result of their own
PROGRAMS_PER_SM = 4  # keys are split until there are this many programs per multiprocessor
# Chains with more ancestor words than this (prompts) compare row numbers. Shorter ones share the variant of trees.
CAUSAL_WORDS = 2
LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share: block_m (row, head) items by blocks of block_n keys. Both are powers of two, at least 16."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tile(num_items: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Returns the tile for a bucket of num_items = rows * heads of a K/V head.

    Few items mean many requests with one row each, or few rows. They get small tiles, which waste little on unused
    items. Many items mean long requests. They get large tiles, which read K and V less often.
    """
    bytes_per_key = (padded(key_dim) + padded(value_dim)) * dtype.itemsize
    # Wide heads run out of registers in large tiles. fp32, which has no tensor cores, does so in all but the smallest.
    widest = 16 if dtype == torch.float32 or bytes_per_key > 1024 else 32 if bytes_per_key > 512 else 64
    block_m = min(16 if num_items <= 256 else 32 if num_items <= 512 else 64, widest)
    is_small = block_m == 16 and dtype != torch.float32 and bytes_per_key <= 512
    block_bytes, stages = (SMALL_BLOCK_BYTES, SMALL_STAGES) if is_small else (BLOCK_BYTES, NUM_STAGES)
    keys = max(1, block_bytes // bytes_per_key)  # not a power of two if K and V differ in size
    block_n = max(16, min(64, 1 << keys.bit_length() - 1))
    num_stages = stages if block_n * bytes_per_key <= 2 * block_bytes else 2
    return Tile(block_m, block_n, num_warps=1 if is_small else 4, num_stages=num_stages)


def choose_splits(num_programs: int, max_keys: int, num_sms: int) -> int:
    """Returns the number of parts that a tile's keys are split into, a power of two.

    num_programs: those without splits. max_keys: the most of any row. One part if the programs fill the GPU anyway.
    """
    wanted = min(PROGRAMS_PER_SM * num_sms // max(num_programs, 1), max_keys // MIN_SPLIT, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def max_programs(num_rows: int, group: int, num_requests: int, block_m: int, num_splits: int, max_work: int) -> int:
    """Returns the most programs per K/V head with work in any step of this many rows (with padding) and requests."""
    # Every request, and the padding, may fill only one item of its last tile.
    max_tiles = (num_rows * group + min(num_requests + 1, num_rows) * (block_m - 1)) // block_m
    if num_splits == 1:
        return max_tiles
    # All tiles together have at most max_work splits, or one each if they are more. Padding tiles are not split.
    return max(max_tiles, min(max_work, max_tiles * num_splits) + -(-num_rows * group // block_m))


def padded(dim: int) -> int:
    """Returns the power of two that the kernel pads a head_dim to: at least 16, the least that tensor cores take."""
    return max(16, 1 << (dim - 1).bit_length())


class TritonTreeKernel(TreeKernel):
    """The TreeKernel of this module, see attention/tree_metadata.py. Its only state between steps is a number of lanes.

    max_kv_len: the most keys of any request, drafts included. num_sms: multiprocessors of the GPU (default: those of
    the current device). tile and num_splits (a power of two, at most MAX_SPLITS) replace what would be chosen from the
    shapes.
    overlaps: kernels start while their predecessors finish (kernel_overlap.py).
    Raises ConfigError if Triton is not installed, or if the kernel does not support the layers or the dtype; ValueError
    if num_splits is too large.
    """

    name = "triton"
    can_be_captured = True

    def __init__(
        self,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        max_kv_len: int,
        *,
        num_sms: int | None = None,
        tile: Tile | None = None,
        num_splits: int | None = None,
        overlaps: bool = False,
    ) -> None:
        widest = max(max(layer.key_dim, layer.value_dim) for layer in layers)
        if widest > MAX_HEAD_DIM:
            raise ConfigError(f"head_dim = {widest}: must be at most {MAX_HEAD_DIM} for Triton attention")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype = {dtype}: must be one of {', '.join(map(str, DTYPES))} for Triton attention")
        if num_splits is not None and num_splits > MAX_SPLITS:
            raise ValueError(f"num_splits = {num_splits}: must be at most {MAX_SPLITS}")
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("attention = 'triton': the package triton is not installed (it comes with CUDA torch)")
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1
        self._max_kv_len = max_kv_len
        self._num_sms = num_sms
        self._tile = tile
        self._num_splits = num_splits
        self._launch = launch_options(overlaps=overlaps)
        self._lanes = 32

    def plan(self, metadata: TreeMetadata) -> None:
        """Does nothing: the programs find their tiles on the device."""

    def gather(
        self, table: torch.Tensor, kv_indptr: torch.Tensor, table_offsets: torch.Tensor, kv_indices: torch.Tensor
    ) -> None:
        """Launches one kernel with a program per request and GATHER_BLOCK of the keys that it can have."""
        from batchserve.attention import triton_kernels

        grid = len(table_offsets), -(-self._max_kv_len // GATHER_BLOCK)
        triton_kernels.gather_slots[grid](
            table, kv_indptr, table_offsets, kv_indices, BLOCK=GATHER_BLOCK, enable_fp_fusion=True, **self._launch
        )

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Launches one kernel; two index_copy_() would take three times as long. See TreeKernel.store."""
        from batchserve.attention import triton_kernels

        key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (key, value))
        num_rows, num_kv_heads, key_dim = key.shape
        if num_rows == 0:
            return
        triton_kernels.store_states[num_rows, num_kv_heads](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:2],
            *value_cache.stride()[:2],
            KEY_DIM=key_dim,
            VALUE_DIM=value.shape[2],
            KEY_BLOCK=padded(key_dim),
            VALUE_BLOCK=padded(value.shape[2]),
            num_warps=1,
            enable_fp_fusion=True,
            **self._launch,
        )

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: TreeMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attends over the paged cache. Rows after the last request's (padding) give zeros.

        query [num_rows, num_heads, key_dim], caches [num_slots, num_kv_heads, dim]; all of one dtype, the last
        dimension contiguous. Returns [num_rows, num_heads, value_dim].
        """
        from batchserve.attention import triton_kernels

        query = query if query.stride(-1) == 1 else query.contiguous()
        num_rows, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = value_cache.shape[1:]
        num_requests, num_words = metadata.qo_indptr.shape[0] - 1, metadata.ancestors.shape[1]
        group = num_heads // num_kv_heads
        out = query.new_empty(num_rows, num_heads, value_dim)
        if num_rows == 0:
            return out
        tile = self._tile or choose_tile(num_rows * group, key_dim, value_dim, query.dtype)
        num_splits = self._num_splits or self._splits(num_rows, group, num_kv_heads, tile, params.sliding_window)
        partial = partial_lse = out
        if num_splits > 1:
            partial = query.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
            partial_lse = query.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
        scale, softcap = params.scaling * LOG2E, 0.0
        if params.softcap is not None:
            scale, softcap = 2 * scale / params.softcap, params.softcap * LOG2E
        # At least num_requests + 1, a power of two. Never fewer than before, or a step would wait for a compiler.
        self._lanes = max(self._lanes, 1 << num_requests.bit_length())
        max_work = PROGRAMS_PER_SM * self._num_sms // num_kv_heads
        num_work = max_programs(num_rows, group, num_requests, tile.block_m, num_splits, max_work)
        triton_kernels.attend_tiles[num_work, num_kv_heads](
            query,
            key_cache,
            value_cache,
            out,
            partial,
            partial_lse,
            out if params.sinks is None else params.sinks,
            metadata.qo_indptr,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.ancestors,
            metadata.positions,
            num_rows,
            num_requests,
            num_words,
            params.sliding_window or 0,
            max_work,
            num_splits,
            scale,
            softcap,
            *query.stride()[:2],
            *key_cache.stride()[:2],
            *value_cache.stride()[:2],
            LANES=self._lanes,
            IS_SPLIT=num_splits > 1,
            **_constants(group, key_dim, value_dim, tile, params, metadata.is_causal and num_words > CAUSAL_WORDS),
            **self._launch,
        )
        if num_splits > 1:
            dims = {"VALUE_DIM": value_dim, "VALUE_BLOCK": padded(value_dim), "NUM_SPLITS": num_splits}
            triton_kernels.merge_splits[(num_rows * num_heads,)](
                partial, partial_lse, out, **dims, num_warps=2, enable_fp_fusion=True, **self._launch
            )
        return out

    def _splits(self, num_rows: int, group: int, num_kv_heads: int, tile: Tile, sliding_window: int | None) -> int:
        """Returns the splits for the batch that needs the most: all rows in one request, whose tiles are full."""
        max_keys = self._max_kv_len
        if sliding_window is not None:
            max_keys = min(max_keys, sliding_window + num_rows)
        return choose_splits(-(-num_rows * group // tile.block_m) * num_kv_heads, max_keys, self._num_sms)


def _constants(
    group: int, key_dim: int, value_dim: int, tile: Tile, params: AttentionParams, is_causal: bool
) -> dict[str, int | bool]:
    """Returns the compile-time constants and the launch options of attend_tiles."""
    return {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": padded(key_dim),
        "VALUE_BLOCK": padded(value_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "MIN_SPLIT": MIN_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
        # A tree has few keys, for which a deep pipeline would only cost registers. A prompt has many.
        "TAIL_STAGES": tile.num_stages if is_causal else min(tile.num_stages, 3),
        "IS_CAUSAL": is_causal,
        "HAS_WINDOW": params.sliding_window is not None,
        "HAS_SOFTCAP": params.softcap is not None,
        "HAS_SINKS": params.sinks is not None,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,  # explicit, because the default is about to change and Triton warns about it
    }
