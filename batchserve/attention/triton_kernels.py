"""Tree attention as Triton kernels. Importing this module imports Triton: attention/triton.py defers it to first use.

A program computes one tile of a request's items against one split of its keys. An item is a (row, head) pair. The heads
that share a K/V head are adjacent, so a few rows still fill a tile of the tensor cores. The softmax is the online
softmax in base 2 (FlashAttention-2, section 3.1). A second kernel merges the splits (Flash-Decoding).

OVERLAPS: the kernel starts while the kernel before it finishes (kernel_overlap.py). What is read before gdc_wait() is
written by none of a step's kernels, or by its first.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

# Arguments that change from step to step. Kernels must not be specialised for their values.
VARYING = ("num_rows", "num_requests", "num_words", "window", "max_work", "num_splits")


@triton.jit
def gather_slots(table, kv_indptr, table_offsets, kv_indices, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Grid (requests, blocks of the table's longest row). Fills TreeMetadata.kv_indices, in a graph too."""
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    request = tl.program_id(0)
    begin, end = tl.load(kv_indptr + request), tl.load(kv_indptr + request + 1)
    place = begin + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(table + tl.load(table_offsets + request) + place, mask=place < end, other=0)
    tl.store(kv_indices + place, slot, mask=place < end)


@triton.jit
def store_states(
    key, value, key_cache, value_cache, slot_mapping,
    key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    key_stride, key_cache_head_stride, value_stride, value_cache_head_stride,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, num_kv_heads). Writes K and V of every row to its slot."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_mapping + row)
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    lane = tl.arange(0, KEY_BLOCK)
    states = tl.load(key + row * key_row_stride + head * key_head_stride + lane, mask=lane < KEY_DIM)
    tl.store(key_cache + slot * key_stride + head * key_cache_head_stride + lane, states, mask=lane < KEY_DIM)
    lane = tl.arange(0, VALUE_BLOCK)
    states = tl.load(value + row * value_row_stride + head * value_head_stride + lane, mask=lane < VALUE_DIM)
    tl.store(value_cache + slot * value_stride + head * value_cache_head_stride + lane, states, mask=lane < VALUE_DIM)


@triton.jit
def _find_work(
    qo_indptr, num_rows, num_requests, work, max_work, num_splits,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns (request, its first row, its rows, first item, split, splits); request > num_requests: there is no work.

    Every request's items have tiles of their own. Rows after the last request's count as a request without keys, so
    that padding is written, as zeros. Tiles with keys are split as long as there are at most max_work splits in all.
    This runs on the device and not on the host, so only qo_indptr changes between replays. Work is numbered
    consecutively, split by split: otherwise programs without work would take the place of programs with work.
    """
    lane = tl.arange(0, LANES)
    begin = tl.load(qo_indptr + lane, mask=lane <= num_requests, other=0)
    end = tl.load(qo_indptr + lane + 1, mask=lane < num_requests, other=0)
    rows = tl.where(lane < num_requests, end - begin, tl.where(lane == num_requests, num_rows - begin, 0))
    tiles = (rows * GROUP + BLOCK_M - 1) // BLOCK_M
    num_tiles = tl.sum(tl.where(lane < num_requests, tiles, 0), 0)
    splits = tl.minimum(tl.maximum(max_work // tl.maximum(num_tiles, 1), 1), num_splits)
    is_split = work < num_tiles * splits
    tile = tl.where(is_split, work // splits, num_tiles + work - num_tiles * splits)
    tile_end = tl.cumsum(tiles, 0)
    request = tl.sum((tile_end <= tile).to(tl.int32), 0)
    is_found = lane == request
    first_row = tl.sum(tl.where(is_found, begin, 0), 0)
    found_rows = tl.sum(tl.where(is_found, rows, 0), 0)
    first_tile = tl.sum(tl.where(is_found, tile_end - tiles, 0), 0)
    first_item = (tile - first_tile) * BLOCK_M
    split, splits = tl.where(is_split, work % splits, 0), tl.where(is_split, splits, 1)
    return request, first_row, found_rows, first_item, split, splits


@triton.jit
def _attend_block(
    query, highest, total, sums,
    keys, values, slots_of_request, ancestor_rows, positions_of_request,
    first, end, context_len, row, row_position, window,
    key_stride, value_stride, scale, softcap,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_TREE: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Runs online softmax over keys [first, first + BLOCK_N). Without HAS_TREE all are context, and before `end`."""
    KEY_BLOCK: tl.constexpr = query.shape[1]
    VALUE_BLOCK: tl.constexpr = sums.shape[1]
    column = first + tl.arange(0, BLOCK_N)
    key_lane = tl.arange(0, KEY_BLOCK)
    value_lane = tl.arange(0, VALUE_BLOCK)
    is_key = column < end
    if HAS_TREE:
        slot = tl.load(slots_of_request + column, mask=is_key, other=0).to(tl.int64)
    else:
        slot = tl.load(slots_of_request + column).to(tl.int64)
    # Masked elements must be loaded as zero: the dummy slot may hold anything, and 0 * inf is not 0.
    key_mask = (key_lane < KEY_DIM)[None, :]
    value_mask = (value_lane < VALUE_DIM)[None, :]
    if HAS_TREE:
        key_mask = key_mask & is_key[:, None]
        value_mask = value_mask & is_key[:, None]
    if HAS_TREE or KEY_BLOCK != KEY_DIM:
        key = tl.load(keys + (slot * key_stride)[:, None] + key_lane[None, :], mask=key_mask, other=0.0)
    else:
        key = tl.load(keys + (slot * key_stride)[:, None] + key_lane[None, :])
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), correct at both infinities
        score = softcap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    if HAS_TREE:
        tree_row = column - context_len  # the key's row; negative: context
        if IS_CAUSAL:
            is_visible = tree_row[None, :] <= row[:, None]
        else:
            in_tree = is_key & (tree_row >= 0)
            word = tl.load(ancestor_rows[:, None] + (tree_row // 32)[None, :], mask=in_tree[None, :], other=0)
            is_visible = (((word >> (tree_row & 31)[None, :]) & 1) != 0) | (tree_row < 0)[None, :]
        is_visible = is_visible & is_key[None, :]
        if HAS_WINDOW:
            tree_position = tl.load(positions_of_request + tree_row, mask=is_key & (tree_row >= 0), other=0)
            key_position = tl.where(tree_row < 0, column, tree_position)
            is_visible = is_visible & (key_position[None, :] > (row_position - window)[:, None])
        score = tl.where(is_visible, score, float("-inf"))
    elif HAS_WINDOW:
        score = tl.where(column[None, :] > (row_position - window)[:, None], score, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(score, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # no visible key yet: -inf - -inf is NaN
    weight = tl.exp2(score - base[:, None])
    decay = tl.exp2(highest - base)
    if HAS_TREE or VALUE_BLOCK != VALUE_DIM:
        value = tl.load(values + (slot * value_stride)[:, None] + value_lane[None, :], mask=value_mask, other=0.0)
    else:
        value = tl.load(values + (slot * value_stride)[:, None] + value_lane[None, :])
    sums = tl.dot(weight.to(value.dtype), value, sums * decay[:, None], input_precision="ieee")
    return new_highest, total * decay + tl.sum(weight, 1), sums


@triton.jit(do_not_specialize=VARYING)
def attend_tiles(
    query, key_cache, value_cache, out, partial, partial_lse, sinks,
    qo_indptr, kv_indptr, kv_indices, ancestors, positions,
    num_rows, num_requests, num_words, window, max_work, num_splits, scale, softcap,
    query_row_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LANES: tl.constexpr, IS_SPLIT: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles and their splits, num_kv_heads). Writes out, or the splits' results to partial and partial_lse.

    partial: float32 [num_rows, num_heads, num_splits, VALUE_DIM], each split normalised by itself. partial_lse: float32
    without the last dimension, base 2, -inf if a split had no visible key or does not exist. Scores are exponents of
    base 2: q.k * scale, or softcap * tanh(q.k * scale * ln(2) / 2). The caller folds that into scale and softcap. The
    function has more than 60 lines because a kernel has no callees that could keep its state.
    """
    kv_head = tl.program_id(1)
    request, first_row, rows, first_item, split, splits = _find_work(
        qo_indptr, num_rows, num_requests, tl.program_id(0), max_work, num_splits, GROUP, BLOCK_M, LANES
    )
    if request > num_requests:
        return  # the next kernel does not wait for programs that have exited
    kv_begin = tl.load(kv_indptr + request, mask=request < num_requests, other=0)
    kv_len = tl.load(kv_indptr + request + 1, mask=request < num_requests, other=0) - kv_begin
    context_len = kv_len - rows
    item = first_item + tl.arange(0, BLOCK_M)
    row, head = item // GROUP, kv_head * GROUP + item % GROUP
    is_item = row < rows
    row = tl.minimum(row, rows - 1)  # unused items of the tile repeat the last row, so that no load needs a mask
    token = first_row + row

    # Ancestors precede their row, so the keys of a tile end with its last row.
    stop = tl.minimum(context_len + (first_item + BLOCK_M - 1) // GROUP + 1, kv_len)
    start = 0
    row_position = row
    if HAS_WINDOW:
        row_position = tl.load(positions + token, mask=row < kv_len, other=0)  # padding rows have none
        start = tl.maximum(tl.minimum(tl.min(row_position, 0) - window + 1, context_len), 0)
    begin, end = start, stop
    if IS_SPLIT:
        share = (tl.maximum(stop - start, 0) + splits - 1) // splits
        share = tl.maximum((share + BLOCK_N - 1) // BLOCK_N * BLOCK_N, MIN_SPLIT)
        begin = start + split * share
        end = tl.minimum(begin + share, stop)

    key_lane = tl.arange(0, KEY_BLOCK)
    value_lane = tl.arange(0, VALUE_BLOCK)
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    tile_query = tl.load(
        query + (token * query_row_stride + head * query_head_stride)[:, None] + key_lane[None, :],
        mask=(key_lane < KEY_DIM)[None, :],
        other=0.0,
    )
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    if HAS_SINKS:  # one more logit without a value, in the first split only
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2(e)
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, 1.0, total)

    keys = key_cache + kv_head * key_head_stride
    values = value_cache + kv_head * value_head_stride
    slots_of_request = kv_indices + kv_begin
    ancestor_rows = ancestors + token * num_words
    positions_of_request = positions + first_row
    num_whole = tl.maximum(tl.minimum(end, context_len) - begin, 0) // BLOCK_N
    whole_end = begin + num_whole * BLOCK_N
    for first in range(begin, whole_end, BLOCK_N):
        highest, total, sums = _attend_block(
            tile_query, highest, total, sums,
            keys, values, slots_of_request, ancestor_rows, positions_of_request,
            first, end, context_len, row, row_position, window,
            key_stride, value_stride, scale, softcap,
            KEY_DIM, VALUE_DIM, BLOCK_N, False, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    for first in tl.range(whole_end, end, BLOCK_N, num_stages=TAIL_STAGES):
        highest, total, sums = _attend_block(
            tile_query, highest, total, sums,
            keys, values, slots_of_request, ancestor_rows, positions_of_request,
            first, end, context_len, row, row_position, window,
            key_stride, value_stride, scale, softcap,
            KEY_DIM, VALUE_DIM, BLOCK_N, True, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip

    place = token * (tl.num_programs(1) * GROUP) + head
    total = tl.where(total == 0.0, 1.0, total)  # no visible key: zeros, and highest is still -inf
    result = sums / total[:, None]
    value_mask = is_item[:, None] & (value_lane < VALUE_DIM)[None, :]
    if IS_SPLIT:
        place = place * num_splits
        # The first split marks the splits that no program computes as empty.
        other = tl.arange(0, MAX_SPLITS)[None, :]
        is_empty_split = is_item[:, None] & (other >= tl.where(split == 0, splits, num_splits)) & (other < num_splits)
        nothing = tl.full([BLOCK_M, MAX_SPLITS], float("-inf"), tl.float32)
        tl.store(partial_lse + place[:, None] + other, nothing, mask=is_empty_split)
        place += split
        has_keys = begin < end  # otherwise a sink does not count either: the merge reads no result of weight 0
        lse = tl.where(has_keys, highest + tl.log2(total), float("-inf"))
        tl.store(partial_lse + place, lse, mask=is_item)
        if has_keys:
            tl.store(partial + (place * VALUE_DIM)[:, None] + value_lane[None, :], result, mask=value_mask)
    else:
        result = result.to(out.dtype.element_ty)
        tl.store(out + (place * VALUE_DIM)[:, None] + value_lane[None, :], result, mask=value_mask)


@triton.jit
def merge_splits(
    partial, partial_lse, out,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows * num_heads,). Merges the splits, weighted by their sums of exponentials. Without keys: zeros."""
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    place = tl.program_id(0)
    split = tl.arange(0, NUM_SPLITS)
    value_lane = tl.arange(0, VALUE_BLOCK)
    lse = tl.load(partial_lse + place * NUM_SPLITS + split)
    highest = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    result = tl.load(
        partial + ((place * NUM_SPLITS + split) * VALUE_DIM)[:, None] + value_lane[None, :],
        mask=(weight > 0.0)[:, None] & (value_lane < VALUE_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(result * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * VALUE_DIM + value_lane, merged.to(out.dtype.element_ty), mask=value_lane < VALUE_DIM)
