"""Our variant of FlashInfer's FA2 prefill kernel: a key is visible if it is context, or an ancestor of the row.

The stock custom mask is a bit for every row and key, made anew in every step and read for every key; here a row has a
few words, whatever the length of its context. This module only holds text and imports nothing of FlashInfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionParams
    from batchserve.attention.tree_metadata import TreeMetadata

REVISION = 2  # part of a compiled module's name: raise it with every change of the source
TENSORS = {"ancestors": "int32_t", "positions": "int32_t"}  # of TreeMetadata, in the order of the run's arguments
SCALARS = {"sm_scale": "double", "softcap": "double", "ancestor_words": "int64_t", "window": "int64_t"}

# Row and key indices are those inside of the request; the tensors begin with the batch's first row.
SOURCE = r"""
struct TreeAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr bool has_softcap = HAS_SOFTCAP;
  uint32_t qo_len, kv_len, window_left, words, seen_by_all;
  int32_t window;
  float sm_scale_log2, before_tanh;
  const uint32_t* ancestors;
  const int32_t* positions;

  template <typename Params>
  __device__ __host__ TreeAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;  // the kernel's own window counts rows: it must skip nothing
    words = static_cast<uint32_t>(params.ancestor_words);
    window = static_cast<int32_t>(params.window);
    seen_by_all = window > 0 ? 0u : kv_len - qo_len;
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
    if (kv_idx < seen_by_all) return true;  // first: the kernel asks for every key of the context
    if (qo_idx >= qo_len || kv_idx >= kv_len) return false;
    const uint32_t context_len = kv_len - qo_len;
    int32_t key_position = static_cast<int32_t>(kv_idx);
    if (kv_idx >= context_len) {
      const uint32_t row = kv_idx - context_len;
      const uint32_t word = __ldg(ancestors + static_cast<size_t>(qo_idx) * words + (row >> 5));
      if (((word >> (row & 31u)) & 1u) == 0u) return false;
      if (window > 0) key_position = __ldg(positions + row);
    }
    return window <= 0 || key_position > __ldg(positions + qo_idx) - window;
  })
};
"""


def variant_arguments(key_dim: int, value_dim: int, dtype: torch.dtype, has_softcap: bool) -> list[Any]:
    """jit_args of the wrapper, in the order of gen_customize_batch_prefill_module() after its backend.

    One module for each head_dim, dtype and whether there is a soft cap; its name says which, and is that of the file
    where it is looked for ready-made.
    """
    kind = f"{str(dtype).removeprefix('torch.')}_d{key_dim}" + ("_softcap" if has_softcap else "")
    return [
        f"batchserve_tree_{kind}_v{REVISION}",
        *(dtype, dtype, dtype),  # of q, of K and V, of the output
        torch.int32,
        key_dim,
        value_dim,
        list(TENSORS),
        list(TENSORS.values()),
        list(SCALARS),
        list(SCALARS.values()),
        "TreeAttention",
        SOURCE.replace("HAS_SOFTCAP", "true" if has_softcap else "false"),
    ]


def variant_run_arguments(metadata: TreeMetadata, params: AttentionParams) -> tuple[Any, ...]:
    """What the wrapper's run() takes behind q and the caches: TENSORS and then SCALARS."""
    return (
        metadata.ancestors,
        metadata.positions,
        params.scaling,
        params.softcap or 0.0,
        metadata.ancestors.shape[1],
        params.sliding_window or 0,
    )
