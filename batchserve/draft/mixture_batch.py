"""The mixture's compiled part, at last: all requests of a step in one call.

Between two steps a forward has emptied the caches, so what a call costs beside its work (arguments, allocations, code
that has to be fetched again) is paid once, not once a request.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
from numba import carray, njit

from batchserve.addresses import as_pointer
from batchserve.draft.mixture_growth import grow, root_visits
from batchserve.draft.mixture_kernels import (
    NODE,
    NUM_COMMON,
    OCCURRENCE,
    OWN,
    ROOM,
    SCOPE,
    SCRATCH,
    count_common,
    initial_weights,
    make_common,
    read_recent,
)
from batchserve.draft.mixture_learning import accept_tokens
from batchserve.draft.mixture_noise import noise_bin_of
from batchserve.draft.mixture_reading import follow_chains, open_chains
from batchserve.draft.text_index import FILLED, MIN_CAPACITY, NUM_ORDERS, TextIndex, source_at

REQUEST = np.dtype(  # a request; own, scope and root are addresses: of TextIndex.address, a scope_card, a NODE
    [
        ("own", np.int64),
        ("scope", np.int64),
        ("root", np.int64),  # what the last draft has found for the text's end
        ("is_root_known", np.int64),  # ... which is still the end
        ("num_output", np.int64),
        ("next_position", np.int64),
        ("noise_bin", np.int64),
        ("seed", np.uint64),
    ],
    align=True,
)
NUM_WEIGHTS = len(initial_weights())


def scope_card(
    index: TextIndex, common: tuple[np.ndarray, ...], weights: np.ndarray, seen: np.ndarray
) -> tuple[int, ...]:
    """The addresses of a scope's arrays, as int64 [6] what REQUEST's `scope` leads to."""
    return tuple(array.ctypes.data for array in (index.address, *common, weights, seen))


@njit(cache=True, nogil=True)
def begin_request(table, slot, own, card, root, found, position, noise_bin, seed):  # type: ignore[no-untyped-def]
    """Fill a row of the table: of a request whose answer begins at `position`, and whose arrays these are.

    found: ROOM OCCURRENCEs, the root's.
    """
    request = table[slot]
    root[0].at[OWN] = found.ctypes.data
    request.own, request.scope, request.root = own.ctypes.data, card.ctypes.data, root.ctypes.data
    request.is_root_known, request.num_output, request.next_position = 0, 0, position
    request.noise_bin, request.seed = noise_bin, seed


@njit(cache=True, nogil=True, inline="always")
def _open(request):  # type: ignore[no-untyped-def]
    """(own source, the scope's source, common, weights, seen, root) of a row of the table."""
    card = carray(as_pointer(request.scope), 6, np.int64)
    common = (
        carray(as_pointer(card[1]), NUM_COMMON, np.int64),
        carray(as_pointer(card[2]), NUM_COMMON, np.int64),
        carray(as_pointer(card[3]), 2, np.int64),
    )
    weights = carray(as_pointer(card[4]), NUM_WEIGHTS, np.float64)
    seen = carray(as_pointer(card[5]), NUM_WEIGHTS, np.int64)
    root = carray(as_pointer(request.root), 1, NODE)
    return source_at(request.own), source_at(card[0]), common, weights, seen, root


@njit(cache=True, nogil=True)
def _read_ahead(table, slots, sizes, scratch):  # type: ignore[no-untyped-def]
    """Fetch what grow_all will look up for the ends of the requests' texts."""
    chains, recent = np.empty((2 * NUM_ORDERS * len(slots), 4), np.int64), scratch[0].recent
    count = 0
    for i in range(len(slots)):
        request = table[slots[i]]
        if sizes[i, 0] > 0 and sizes[i, 1] > 0:
            own, scope, _, _, _, _ = _open(request)
            read_recent(own, request.num_output, recent)
            visits = root_visits(sizes[i, 0])
            count = open_chains(own, recent[OWN], visits, chains, count)
            count = open_chains(scope, recent[SCOPE], visits, chains, count)
    scratch[0].read = follow_chains(chains, count)


@njit(cache=True, nogil=True)
def grow_all(table, slots, bounds, branch_length, nodes, scratch, starts, links, probs):  # type: ignore[no-untyped-def]
    """Grow the trees of the requests at `slots` of the table, node behind node; see mixture_growth.grow.

    bounds: those of DraftQueries and its min_probs. Fills starts [num_requests + 1], links [3, all nodes at most] and
    probs.
    """
    sizes, least = bounds
    _read_ahead(table, slots, sizes, scratch)
    end = 0
    for i in range(len(slots)):
        request = table[slots[i]]
        most, depth = sizes[i, 0], min(sizes[i, 1], branch_length)
        if most > 0 and depth > 0:
            own, scope, common, weights, _, root = _open(request)
            noise = (request.noise_bin, request.seed, request.next_position)
            mine, my_probs = links[:, end : end + most], probs[end : end + most]
            wanted = (most, depth, least[i])
            end += grow(
                own, scope, common, request.num_output, noise, wanted, weights, root, nodes, scratch, mine, my_probs
            )
            request.is_root_known = 1
        starts[i + 1] = end


@njit(cache=True, nogil=True)
def accept_all(table, slots, starts, token_ids, most_learned, first, nodes, scratch):  # type: ignore[no-untyped-def]
    """Learn, from request `first` on, the tokens of the requests at `slots`: those from starts[i] to starts[i + 1].

    Returns the first request whose text has no room for them, or the number of requests; see
    mixture_learning.accept_tokens.
    """
    for i in range(first, len(slots)):
        request = table[slots[i]]
        tokens = token_ids[starts[i] : starts[i + 1]]
        own, scope, common, weights, seen, root = _open(request)
        if own[3][FILLED] + len(tokens) > len(own[0]):
            return i
        noise = (request.noise_bin, request.seed, request.next_position)
        is_root_known = request.is_root_known != 0
        what = (own, scope, common, tokens, request.num_output, noise, weights, seen, root, is_root_known)
        accept_tokens(*what, nodes, scratch, most_learned)
        if len(tokens):
            request.is_root_known = 0
        request.num_output += len(tokens)
        request.next_position += len(tokens)
    return len(slots)


def compile_kernels() -> None:
    """Compile, or load from the cache on disk, everything that a drafter calls."""
    tokens = np.array([1, 2, 1, 2, 1], np.int32)
    index, common, weights = TextIndex(8), make_common(), initial_weights()
    seen = np.zeros(NUM_WEIGHTS, np.int64)  # owned here: compiled code knows addresses only
    index.append(tokens)
    TextIndex(4 * MIN_CAPACITY).reserve(MIN_CAPACITY + 1)  # a text that grows takes its chains apart
    count_common(common, tokens)
    root, nodes, scratch = np.zeros(1, NODE), np.zeros(2, NODE), np.zeros(1, SCRATCH)
    found, room = np.zeros(ROOM, OCCURRENCE), np.zeros(2 * ROOM, OCCURRENCE)
    scratch["room"] = room.ctypes.data
    card = np.array(scope_card(index, common, weights, seen))
    table, slots, starts = np.zeros(1, REQUEST), np.zeros(1, np.int64), np.array([0, 1])
    noise_bin, seed = noise_bin_of(1.0, NUM_WEIGHTS), np.uint64(0)
    begin_request(table, 0, index.address, card, root, found, 5, noise_bin, seed)
    accept_all(table, slots, starts, tokens[:1], 1, 0, nodes, scratch)
    links, probs = np.zeros((3, 2), np.int64), np.zeros(2)
    grow_all(table, slots, (np.array([[2, 2, 2]]), np.zeros(1)), 2, nodes, scratch, starts, links, probs)
