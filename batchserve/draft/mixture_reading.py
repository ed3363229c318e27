"""The mixture's compiled part, continued: what the drafts of a step will read, fetched for all requests side by side.

A forward leaves little of a text in the caches, and whoever follows a chain waits for memory at every link. One chain's
links come one after the other, but those of many chains do not: a processor fetches a dozen at once.
"""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.draft.mixture_kernels import LONG_VISITS
from batchserve.draft.text_index import NUM_ORDERS, ORDERS, SEPARATOR, bucket_of, hash_step
from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit

CELL = 1 + NUM_ORDERS  # int32 of a token: itself, its links
# Of a chain: where the text's cells are, which links it goes by, where it stands, how many links may be followed.
CELLS, ORDER, END, LINKS = range(4)
_ORDERS = np.array(ORDERS, np.int64)


@njit(cache=True, nogil=True)
def open_chains(source, recent, visits, chains, count):  # type: ignore[no-untyped-def]
    """Add the chains of one source that find_at_root will follow for a text that ends with `recent`, newest first.

    chains int64 [any, 4]; returns how many there are now.
    """
    text, _, head, meta = source
    key, length = np.uint64(0), 0
    for order in range(NUM_ORDERS):
        if recent[_ORDERS[order] - 1] == SEPARATOR:
            break
        while length < _ORDERS[order]:
            key = hash_step(key, recent[length])
            length += 1
        end = head[bucket_of(key, head, meta), order] - 1
        if end >= 0:
            links = visits if order < NUM_ORDERS - 1 else LONG_VISITS
            chains[count, CELLS], chains[count, ORDER] = text.ctypes.data, order
            chains[count, END], chains[count, LINKS] = end, links
            count += 1
    return count


@njit(cache=True, nogil=True)
def follow_chains(chains, count):  # type: ignore[no-untyped-def]
    """Follow all chains, one link of each at a time. Returns a sum of what was read, for what nobody uses is not read.

    Links that were overwritten lead anywhere in the text; that is no matter here.
    """
    total = 0
    while count > 0:
        left = 0
        for i in range(count):
            cells, order, end, links = chains[i, CELLS], chains[i, ORDER], chains[i, END], chains[i, LINKS]
            before = max(0, end - 2)  # what came before is compared with
            cell = carray(as_pointer(cells + 4 * CELL * before), CELL * (end - before + 1), np.int32)
            total += cell[0]
            behind = cell[CELL * (end - before) + 1 + order] - 1
            if behind >= 0 and links > 1:
                chains[left, CELLS], chains[left, ORDER] = cells, order
                chains[left, END], chains[left, LINKS] = behind, links - 1
                left += 1
        count = left
    return total
