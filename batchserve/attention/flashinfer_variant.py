"""Our variant of FlashInfer's FA2 prefill kernel: a key is visible if it is context or an ancestor of the row.

The stock custom mask has a bit for every row and key, is built anew in every step and is read for every key. Here a row
has a few words, however long its context is. This module only holds source text and imports nothing of FlashInfer.

With a custom mask, FlashInfer's kernel asks the variant about every key. Without one it asks only about the keys at two
edges: where a window begins, and where a chunk ends. A step's own rows become such an edge in front of their context.
The variant claims a window that begins at the second key for the last row of each query tile, so the kernel asks about
the first block of keys, and skips none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionParams
    from batchserve.attention.tree_metadata import TreeMetadata

REVISION = 4  # part of a compiled module's name: increase it with every change of the source
TENSORS = {"ancestors": "int32_t", "positions": "int32_t"}  # fields of TreeMetadata, in the order of run()'s arguments
SCALARS = {"sm_scale": "double", "softcap": "double", "ancestor_words": "int64_t", "window": "int64_t"}
FRONT_SCALARS = {**SCALARS, "query_tile": "int64_t"}  # (row, head) pairs per program

# Row and key indices count inside the request; the tensors begin with the batch's first row.
SOURCE = r"""
struct TreeAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr bool has_softcap = HAS_SOFTCAP;
  static constexpr bool rows_first = ROWS_FIRST;  // the step's own, among a request's keys
  uint32_t qo_len, kv_len, window_left;  // what the kernel goes by
  uint32_t rows, words, seen_by_all;
  int32_t window;
  float sm_scale_log2, before_tanh;
  const uint32_t* ancestors;
  const int32_t* positions;

  template <typename Params>
  __device__ __host__ TreeAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    rows = qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;  // the kernel's own window counts rows: it must skip nothing
    if constexpr (rows_first) {
      // A tile is told its own end for the request's: a window counts from there, and can be as long as the keys then.
      // It must be: the kernel goes by it, too, for how many chunks of them there are, and the plan knows of no window.
      const uint32_t group = static_cast<uint32_t>(params.group_size);
      const uint32_t end = (params.qo_tile_indices[blockIdx.x] + 1) * static_cast<uint32_t>(params.query_tile);
      qo_len = min(rows, (end + group - 1) / group);
      window_left = kv_len - 1;
    }
    words = static_cast<uint32_t>(params.ancestor_words);
    window = static_cast<int32_t>(params.window);
    seen_by_all = window > 0 ? 0u : kv_len - rows;  // so many keys of the context
    const float scale = static_cast<float>(params.sm_scale), cap = static_cast<float>(params.softcap);
    before_tanh = has_softcap ? scale / cap : 1.f;
    sm_scale_log2 = (has_softcap ? cap : scale) * math::log2e;
    const size_t first_row = params.q_indptr[batch_idx];
    ancestors = reinterpret_cast<const uint32_t*>(params.ancestors) + first_row * words;
    positions = params.positions + first_row;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (has_softcap) {
      return static_cast<T>(math::tanh(static_cast<float>(logits) * before_tanh));
    }
    return logits;
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t context_begin = rows_first ? rows : 0u;
    // First, as the kernel may ask for every key of the context.
    if (kv_idx - context_begin < seen_by_all) return true;
    if (qo_idx >= rows || kv_idx >= kv_len) return false;
    const uint32_t rows_begin = rows_first ? 0u : kv_len - rows;
    const uint32_t row = kv_idx - rows_begin;
    int32_t key_position = static_cast<int32_t>(kv_idx - context_begin);
    if (row < rows) {
      const uint32_t word = __ldg(ancestors + static_cast<size_t>(qo_idx) * words + (row >> 5));
      if (((word >> (row & 31u)) & 1u) == 0u) return false;
      if (window > 0) key_position = __ldg(positions + row);
    }
    return window <= 0 || key_position > __ldg(positions + qo_idx) - window;
  })
};
"""


def variant_arguments(
    key_dim: int, value_dim: int, dtype: torch.dtype, has_softcap: bool, *, rows_first: bool = False
) -> list[Any]:
    """Returns the wrapper's jit_args: those of gen_customize_batch_prefill_module() after its backend, in order.

    There is one module per head_dim, dtype, soft cap or none, and order of keys (a step's own rows before the context
    or after it). Its name says which, and is the name of the file in which a prebuilt module is looked for.
    """
    scalars = FRONT_SCALARS if rows_first else SCALARS
    kind = f"{str(dtype).removeprefix('torch.')}_d{key_dim}" + ("_softcap" if has_softcap else "")
    return [
        f"batchserve_{'front' if rows_first else 'tree'}_{kind}_v{REVISION}",
        *(dtype, dtype, dtype),  # of q, of K and V, of the output
        torch.int32,
        key_dim,
        value_dim,
        list(TENSORS),
        list(TENSORS.values()),
        list(scalars),
        list(scalars.values()),
        "TreeAttention",
        SOURCE.replace("HAS_SOFTCAP", _literal(has_softcap)).replace("ROWS_FIRST", _literal(rows_first)),
    ]


def _literal(flag: bool) -> str:
    return "true" if flag else "false"


def variant_run_arguments(metadata: TreeMetadata, params: AttentionParams) -> tuple[Any, ...]:
    """Returns run()'s arguments after q and the caches: TENSORS, then SCALARS. The caller adds FRONT_SCALARS' own."""
    return (
        metadata.ancestors,
        metadata.positions,
        params.scaling,
        params.softcap or 0.0,
        metadata.ancestors.shape[1],
        params.sliding_window or 0,
    )
