"""Compiled part of the mixture drafter that prefetches what a step's drafts will read, for all requests at once.

A forward pass leaves little of a text in the caches, and following a chain waits for memory at every link. The links of
one chain have to be read in turn, but different chains are independent: a processor fetches a dozen links at once.
"""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.draft.mixture_kernels import LONG_VISITS
from batchserve.draft.text_index import NUM_ORDERS, ORDERS, SEPARATOR, bucket_of, hash_step
from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit

CELL = 1 + NUM_ORDERS  # int32 values per token: itself and its links
# Fields of a chain: the address of the text's cells, the order of its links, its current slot, and how many are left.
CELLS, ORDER, END, LINKS = range(4)
_ORDERS = np.array(ORDERS, np.int64)


@njit(cache=True, nogil=True)
def open_chains(source, recent, visits, chains, count):  # type: ignore[no-untyped-def]
    """Adds the chains of one source that find_at_root will follow for a text that ends with `recent`, newest first.

    chains: int64 [any, 4]. Returns the new number of chains.
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
    """Follows all chains, one link of each at a time. Returns a sum of the values, as unused reads are optimised away.

    Overwritten links may lead anywhere in the text, which does not matter here.
    """
    total = 0
    while count > 0:
        left = 0
        for i in range(count):
            cells, order, end, links = chains[i, CELLS], chains[i, ORDER], chains[i, END], chains[i, LINKS]
            before = max(0, end - 2)  # the tokens before it will be compared
            cell = carray(as_pointer(cells + 4 * CELL * before), CELL * (end - before + 1), np.int32)
            total += cell[0]
            behind = cell[CELL * (end - before) + 1 + order] - 1
            if behind >= 0 and links > 1:
                chains[left, CELLS], chains[left, ORDER] = cells, order
                chains[left, END], chains[left, LINKS] = behind, links - 1
                left += 1
        count = left
    return total
