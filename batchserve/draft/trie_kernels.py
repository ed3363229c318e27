"""Kernels of the trie drafter: a trie of branches over flat arrays, with insertion and incremental pruning.

A trie is three arrays: int32 nodes [rows, 8], int32 buckets [rows] and int32 header [6]. Row 0 is the root. A child is
found by (parent, token) in a chained hash table that has as many buckets as rows were ever used. It grows by one bucket
at a time (linear hashing), so no step has to rebuild it. Siblings form a doubly linked list. The root's children, the
tops, each stand for one tree: all branches that begin with one token, as in Lookahead's own implementation.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.native.jit import njit

# Columns of a node. Tops have no count and no birth; these columns hold their tree's size and clock hand instead.
TOKEN, COUNT, PARENT, CHILD, NEXT, PREV, LINK, BIRTH = range(8)
SIZE, HAND = COUNT, BIRTH
NODE_WIDTH = 8
FREED, NEVER = -1, -(1 << 31)  # the parent and the birth of a free row
MAX_COUNT = (1 << 31) - 1
# Fields of a header: rows ever used, the first free row, the table's mask, the number of nodes, the tree to sweep next,
# and the last birth. Births count down to the lowest and start at -1 again, so none is mistaken for a token.
USED, FREE, MASK, NUM_NODES, SWEPT, LAST_BIRTH = range(6)
EMPTY_HEADER = (1, 0, 1, 0, 0, 0)

# Most nodes to visit when making room for one more. Every visit halves a count, so later sweeps will succeed.
TREE_VISITS = 64
SCOPE_VISITS = 256


@njit(cache=True, nogil=True)
def hash_child(parent, token):  # type: ignore[no-untyped-def]
    mixed = np.uint64(np.int64(parent) << np.int64(32) | np.int64(token)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(mixed >> np.uint64(24))


@njit(cache=True, nogil=True)
def _bucket(header, parent, token):  # type: ignore[no-untyped-def]
    """Returns a child's bucket by linear hashing: an unused bucket is still part of the bucket half a table earlier."""
    mixed, mask = hash_child(parent, token), header[MASK]
    bucket = mixed & mask
    return bucket if bucket < header[USED] else bucket & (mask >> 1)


@njit(cache=True, nogil=True)
def find_child(nodes, buckets, header, parent, token):  # type: ignore[no-untyped-def]
    """Returns the row of this child, or 0 if there is none."""
    node = buckets[_bucket(header, parent, token)]
    while node != 0 and (nodes[node, PARENT] != parent or nodes[node, TOKEN] != token):
        node = nodes[node, LINK]
    return node


@njit(cache=True, nogil=True)
def _take_row(nodes, buckets, header):  # type: ignore[no-untyped-def]
    """Returns a free row. A row that was never used adds a bucket, which takes over half of an older one."""
    if header[FREE] != 0:
        row = header[FREE]
        header[FREE] = nodes[row, NEXT]
        return row
    row = header[USED]
    if row > header[MASK]:
        header[MASK] = 2 * header[MASK] + 1
    old = row - (header[MASK] + 1) // 2
    node, buckets[old] = buckets[old], 0
    while node != 0:
        after = nodes[node, LINK]
        bucket = row if hash_child(nodes[node, PARENT], nodes[node, TOKEN]) & header[MASK] == row else old
        nodes[node, LINK], buckets[bucket] = buckets[bucket], node
        node = after
    header[USED] += 1
    return row


@njit(cache=True, nogil=True)
def _remove(nodes, buckets, header, top, node):  # type: ignore[no-untyped-def]
    """Frees a node without children."""
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    if before != 0:
        nodes[before, NEXT] = after
    else:
        nodes[parent, CHILD] = after
    if after != 0:
        nodes[after, PREV] = before
    bucket = _bucket(header, parent, nodes[node, TOKEN])
    if buckets[bucket] == node:
        buckets[bucket] = nodes[node, LINK]
    else:
        other = buckets[bucket]
        while nodes[other, LINK] != node:
            other = nodes[other, LINK]
        nodes[other, LINK] = nodes[node, LINK]
    if node != top:
        nodes[top, SIZE] -= 1
    nodes[node, PARENT], nodes[node, BIRTH], nodes[node, NEXT] = FREED, NEVER, header[FREE]
    header[FREE] = node
    header[NUM_NODES] -= 1


@njit(cache=True, nogil=True)
def _first_leaf(nodes, node):  # type: ignore[no-untyped-def]
    while nodes[node, CHILD] != 0:
        node = nodes[node, CHILD]
    return node


@njit(cache=True, nogil=True)
def _stamp(nodes, row):  # type: ignore[no-untyped-def]
    """Returns a value that distinguishes a node from earlier and later ones in the same row."""
    return nodes[row, TOKEN] if nodes[row, PARENT] == 0 else nodes[row, BIRTH]


@njit(cache=True, nogil=True)
def _is_open(cursors, row):  # type: ignore[no-untyped-def]
    """True if an open window has reached this row: the current insertion will continue from it."""
    for window in range(cursors.shape[0]):  # noqa: SIM110 - any() of a generator does not compile
        if cursors[window, 0] == row:
            return True
    return False


@njit(cache=True, nogil=True)
def _sweep(nodes, buckets, header, top, cursors, visits):  # type: ignore[no-untyped-def]
    """Moves a tree's clock hand until a leaf is freed or the round ends; returns the number of visits.

    The hand moves in post-order. It halves the count of every node that it passes, and frees a leaf that is down to one
    and not open. This is decay by frequency (section 4.2), a few nodes at a time. A round ends with the hand at 0.
    """
    node = nodes[top, HAND]
    if node == 0:
        node = _first_leaf(nodes, top)
    for visit in range(visits):
        if node == top:
            nodes[top, HAND] = 0
            return visit
        after = nodes[node, NEXT]
        after = _first_leaf(nodes, after) if after != 0 else nodes[node, PARENT]
        if nodes[node, CHILD] == 0 and nodes[node, COUNT] <= 1 and not _is_open(cursors, node):
            _remove(nodes, buckets, header, top, node)
            nodes[top, HAND] = after if after != top else 0
            return visit + 1
        nodes[node, COUNT] = max(1, nodes[node, COUNT] >> 1)
        node = after
    nodes[top, HAND] = node if node != top else 0
    return visits


@njit(cache=True, nogil=True)
def _has_room(nodes, buckets, header, top, cursors, capacity, max_rows):  # type: ignore[no-untyped-def]
    """Sweeps until the tree (top 0: a new one) has room for a node and the trie for a row. False if that fails."""
    visits = TREE_VISITS
    while top != 0 and nodes[top, SIZE] >= capacity:
        if visits <= 0:
            return False
        visits -= 1 + _sweep(nodes, buckets, header, top, cursors, visits)
    visits = SCOPE_VISITS
    while header[FREE] == 0 and header[USED] >= max_rows:
        # A tree is swept for a whole round before the next one, so that all shrink in proportion.
        swept = header[SWEPT] if header[SWEPT] != 0 else nodes[0, CHILD]
        if visits <= 0 or swept == 0:
            return False
        visits -= 1 + _sweep(nodes, buckets, header, swept, cursors, visits)
        if nodes[swept, HAND] == 0:
            header[SWEPT] = nodes[swept, NEXT]
            if nodes[swept, CHILD] == 0 and not _is_open(cursors, swept):
                _remove(nodes, buckets, header, swept, swept)
    return True


@njit(cache=True, nogil=True)
def _add(nodes, buckets, header, top, parent, token, cursors, capacity, max_rows):  # type: ignore[no-untyped-def]
    """Adds a child with a count of one, as the first of its siblings. Returns its row, or 0 if there is no room."""
    if not _has_room(nodes, buckets, header, top, cursors, capacity, max_rows):
        return 0
    node = _take_row(nodes, buckets, header)
    bucket, sibling = _bucket(header, parent, token), nodes[parent, CHILD]
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, CHILD] = token, parent, 0
    nodes[node, NEXT], nodes[node, PREV], nodes[node, LINK] = sibling, 0, buckets[bucket]
    if parent == 0:
        nodes[node, SIZE], nodes[node, HAND] = 0, 0
    else:
        header[LAST_BIRTH] = header[LAST_BIRTH] - 1 if header[LAST_BIRTH] > NEVER + 1 else -1
        nodes[node, COUNT], nodes[node, BIRTH] = 1, header[LAST_BIRTH]
    if sibling != 0:
        nodes[sibling, PREV] = node
    nodes[parent, CHILD] = node
    buckets[bucket] = node
    if top != 0:
        nodes[top, SIZE] += 1
    header[NUM_NODES] += 1
    return node


@njit(cache=True, nogil=True)
def insert_branches(nodes, buckets, header, cursors, num_before, token_ids, capacity, max_rows):  # type: ignore[no-untyped-def]
    """Inserts every window of up to `depth` tokens that ends in token_ids (int32), the next tokens of one text.

    cursors int32 [depth, 3], zero at first: the rows that the text's open windows have reached. The window that began
    with token i is at i % depth, as (row, stamp, top). A window that pruning cuts off is given up. num_before: the
    number of earlier tokens of the text. capacity: the most nodes of one tree. max_rows: the most rows of all trees.
    """
    depth = cursors.shape[0]
    for window in range(depth):
        row = cursors[window, 0]
        if row != 0 and _stamp(nodes, row) != cursors[window, 1]:
            cursors[window, 0] = 0
    for i in range(token_ids.shape[0]):
        token, newest = token_ids[i], (num_before + i) % depth
        for window in range(depth):
            node, top = cursors[window, 0], cursors[window, 2]
            if node == 0 or window == newest:  # the newest window takes the place of a complete one
                continue
            child = find_child(nodes, buckets, header, node, token)
            if child != 0:
                nodes[child, COUNT] += nodes[child, COUNT] < MAX_COUNT
            else:
                child = _add(nodes, buckets, header, top, node, token, cursors, capacity, max_rows)
            cursors[window, 0] = child
        cursors[newest, 0] = 0
        top = find_child(nodes, buckets, header, 0, token)
        if top == 0:
            top = _add(nodes, buckets, header, 0, 0, token, cursors, capacity, max_rows)
        cursors[newest, 0], cursors[newest, 2] = top, top
    for window in range(depth):
        cursors[window, 1] = _stamp(nodes, cursors[window, 0])
