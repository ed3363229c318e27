"""Compiled part of the mixture drafter: contexts as experts, and their blend. mixture_growth.py grows trees with it.

There are two sources: a request's own text, and the answers of its scope. For every length l that makes a difference,
the latest occurrences in one source that match at least l tokens are an expert: it says how often each token followed.
Experts are asked from the longest match down. Each takes a share of the probability that the ones before it left, and
the scope's commonest tokens come last. The shares are learned online (mixture_learning.py), in bins of source, match
length, number of occurrences and number of distinct followers. This is a variable-order Markov model with mixing
weights (as in context-tree weighting; Willems et al., 1995), over the texts that Lookahead (KDD'24, section 4.2) drafts
from.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools

import numpy as np
from numba import carray

from batchserve.draft.mixture_noise import NUM_NOISE_BINS
from batchserve.draft.text_index import (
    FILLED,
    MAX_MATCH,
    NEWEST,
    NUM_ORDERS,
    ORDERS,
    RUN,
    SEPARATOR,
    START,
    find_occurrences,
)
from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit

OWN, SCOPE = 0, 1
MAX_OCCURRENCES = 640  # of one source at one node
LONGEST_LEVELS = 4  # experts per source and node: this many of the longest, and those of one and two tokens
MAX_EXPERTS = 2 * (LONGEST_LEVELS + 2)
MAX_FOLLOWERS = 2048  # a power of two, at least 2 * MAX_OCCURRENCES
AT, DISTINCT, FIRST, SECOND, HITS, TAKEN = range(6)  # weigh's state for each source
LENGTH_BINS, COUNT_BINS, FOLLOWER_BINS = 10, 6, 3
WEIGHTS_SHAPE = (2, LENGTH_BINS, COUNT_BINS, FOLLOWER_BINS)  # followed by the weights of the noise
COMMON_SHARE = 0.5  # of what the experts leave; a larger share helps on chat, a smaller one on arithmetic
NUM_COMMON, NUM_PROPOSED = 256, 64  # tokens whose frequency is tracked; those of them that may be proposed
MIN_VISITS = 64  # latest occurrences of a short context that are looked at
LONG_VISITS = 24  # the same for the longest contexts that have a chain
MIN_SHARE, MAX_SHARE = 0.005, 0.995
PATH = 2  # last tokens of a node's path to keep: enough to tell a context of one token from a longer one

# Work memory is arrays of records, not tuples of arrays. Numba counts references to each array of a tuple wherever the
# tuple is passed on, which took a third of a draft's time. It does not count references to records, so a kernel's
# caller must own their array: one that is made in a kernel may be freed while a record of it is still in use.
OCCURRENCE = np.dtype(  # of a path: the slot of the token after it, that token, and the length of the match
    [("slot", np.int32), ("follower", np.int32), ("length", np.int32)]
)
# A node of a tree; its fields are [source, ...]. Most nodes have few occurrences, and those of all nodes are stored one
# after another, so a tree stays in the fastest caches.
NODE = np.dtype(
    [
        ("at", np.int64, (2,)),  # address of its occurrences, longest first; at most MAX_OCCURRENCES
        ("num", np.int64, (2,)),
        ("path", np.int32, (2, PATH)),  # the last tokens, newest first
    ],
    align=True,
)
BYTES = OCCURRENCE.itemsize
ROOM = 2 * MAX_OCCURRENCES  # most occurrences of one node
SCRATCH = np.dtype(
    [
        ("room", np.int64),  # address of ROOM occurrences for each node of the largest tree
        ("recent", np.int32, (2, MAX_MATCH)),
        ("spare", np.int32, (2, MAX_OCCURRENCES)),
        # The experts of a node (see weigh), and the probability that they leave.
        ("state", np.int64, (2, 6)),
        ("num_experts", np.int64),
        ("left", np.float64),
        ("spans", np.int64, (MAX_EXPERTS, 2)),
        ("shares", np.float64, (MAX_EXPERTS,)),
        ("bins", np.int64, (MAX_EXPERTS,)),
        ("target_probs", np.float64, (MAX_EXPERTS,)),
        ("below", np.float64, (MAX_EXPERTS,)),
        # The probabilities of tokens: `size` entries, and a hash table of 1 + entry with linear probing to find them.
        ("size", np.int64),
        ("tokens", np.int32, (MAX_FOLLOWERS,)),
        ("probs", np.float64, (MAX_FOLLOWERS,)),
        ("at", np.int32, (MAX_FOLLOWERS,)),
        ("places", np.int32, (2 * MAX_FOLLOWERS,)),
        ("read", np.int64),  # a sum of what was prefetched: reads whose result is unused are optimised away
    ],
    align=True,
)


@njit(cache=True, nogil=True, inline="always")
def _length_bin(length):  # type: ignore[no-untyped-def]
    if length <= 4:
        return length
    if length <= 6:
        return 5
    if length <= 9:
        return 6
    if length <= 14:
        return 7
    return 8 if length <= 22 else 9


@njit(cache=True, nogil=True, inline="always")
def _count_bin(count):  # type: ignore[no-untyped-def]
    if count <= 2:
        return count - 1
    if count <= 4:
        return 2
    if count <= 9:
        return 3
    return 4 if count <= 29 else 5


@njit(cache=True, nogil=True, inline="always")
def occurrence(at, i):  # type: ignore[no-untyped-def]
    """Returns the i-th of the occurrences that are stored at address `at`."""
    return carray(as_pointer(at + BYTES * i), 1, OCCURRENCE)[0]


@njit(cache=True, nogil=True)
def _sort_by_length(slots, lengths, count, spare):  # type: ignore[no-untyped-def]
    """Sorts matches by length, longest first. The sort is stable."""
    is_sorted = True
    for i in range(1, count):
        if lengths[i] > lengths[i - 1]:
            is_sorted = False
            break
    if is_sorted:
        return
    starts = np.zeros(MAX_MATCH + 2, dtype=np.int64)
    for i in range(count):
        starts[MAX_MATCH - lengths[i] + 1] += 1
    for b in range(1, MAX_MATCH + 2):
        starts[b] += starts[b - 1]
    for i in range(count):
        b = MAX_MATCH - lengths[i]
        spare[0, starts[b]], spare[1, starts[b]] = slots[i], lengths[i]
        starts[b] += 1
    slots[:count] = spare[0, :count]
    lengths[:count] = spare[1, :count]


@njit(cache=True, nogil=True)
def find_followers(source, recent, order, longest, visits, node, s):  # type: ignore[no-untyped-def]
    """Adds what find_occurrences finds in source s to a node, with the next tokens, which are read repeatedly."""
    text, prev, head, meta = source
    known, at = node.num[s], node.at[s]
    found = carray(as_pointer(at), MAX_OCCURRENCES, OCCURRENCE)
    count = find_occurrences(text, prev, head, meta, recent, order, longest, visits, found.slot, found.length, known)
    for i in range(known, count):
        each = occurrence(at, i)
        each.follower = text[each.slot]
    node.num[s] = count


@njit(cache=True, nogil=True)
def find_at_root(source, visits, node, s, work):  # type: ignore[no-untyped-def]
    """Finds the occurrences of the text's end (work.recent) in source s, longest first. SCOPE's come after OWN's."""
    text, prev, head, meta = source
    if s == SCOPE:
        node.at[SCOPE] = node.at[OWN] + BYTES * node.num[OWN]
    at, recent = node.at[s], work.recent[s]
    found = carray(as_pointer(at), MAX_OCCURRENCES, OCCURRENCE)
    count, longest = 0, MAX_MATCH + 1
    for o in range(NUM_ORDERS - 1, -1, -1):
        most = visits if o < NUM_ORDERS - 1 else LONG_VISITS
        count = find_occurrences(text, prev, head, meta, recent, o, longest, most, found.slot, found.length, count)
        longest = ORDERS[o]
    _sort_by_length(found.slot, found.length, count, work.spare)
    for i in range(count):
        each = occurrence(at, i)
        each.follower = text[each.slot]
    node.num[s] = count


@njit(cache=True, nogil=True)
def add_prob(work, token, prob):  # type: ignore[no-untyped-def]
    """Adds `prob` to the probability of `token`."""
    last = 2 * MAX_FOLLOWERS - 1
    place = ((token * 40503) >> 4) & last
    while work.places[place] > 0 and work.tokens[work.places[place] - 1] != token:
        place = (place + 1) & last
    index = work.places[place] - 1
    if index >= 0:
        work.probs[index] += prob
    elif work.size < MAX_FOLLOWERS:
        index = work.size
        work.size = index + 1
        work.places[place] = index + 1
        work.tokens[index], work.probs[index], work.at[index] = token, prob, place


@njit(cache=True, nogil=True)
def clear(work):  # type: ignore[no-untyped-def]
    """Clears the probabilities of all tokens."""
    for i in range(work.size):
        work.places[work.at[i]] = 0
    work.size = 0


@njit(cache=True, nogil=True)
def weigh(node, work, weights, least, target):  # type: ignore[no-untyped-def]
    """Asks experts, longest match first, until they leave less than `least` of the probability or there are no more.

    Continues from this node's last call; `begin` starts a node. Of each expert it stores the source, the end of its
    occurrences, its share for each of these, the bin of its weight, and the probability that it gives `target`.
    """
    state = work.state
    while work.left >= least and (state[OWN, AT] < node.num[OWN] or state[SCOPE, AT] < node.num[SCOPE]):
        s = OWN
        if state[OWN, AT] >= node.num[OWN] or (
            state[SCOPE, AT] < node.num[SCOPE]
            and occurrence(node.at[SCOPE], state[SCOPE, AT]).length > occurrence(node.at[OWN], state[OWN, AT]).length
        ):
            s = SCOPE
        at, begin, num = state[s, AT], node.at[s], node.num[s]
        length = occurrence(begin, at).length
        while at < num and occurrence(begin, at).length == length:
            token = occurrence(begin, at).follower
            # All numbers of distinct followers above two share a bin.
            if state[s, DISTINCT] == 0 or (state[s, DISTINCT] == 1 and token != state[s, FIRST]):
                state[s, SECOND if state[s, DISTINCT] else FIRST] = token
                state[s, DISTINCT] += 1
            elif state[s, DISTINCT] == 2 and token != state[s, FIRST] and token != state[s, SECOND]:
                state[s, DISTINCT] = 3
            state[s, HITS] += token == target
            at += 1
        state[s, AT] = at
        if state[s, TAKEN] >= LONGEST_LEVELS and length > 2:
            continue
        state[s, TAKEN] += 1
        row = ((s * LENGTH_BINS + _length_bin(length)) * COUNT_BINS + _count_bin(at)) * FOLLOWER_BINS
        i = work.num_experts
        work.num_experts = i + 1
        work.bins[i] = row + state[s, DISTINCT] - 1
        work.spans[i, 0], work.spans[i, 1] = s, at
        work.shares[i] = work.left * weights[work.bins[i]] / at
        work.target_probs[i] = state[s, HITS] / at
        work.left *= 1.0 - weights[work.bins[i]]


@njit(cache=True, nogil=True)
def spread(node, work):  # type: ignore[no-untyped-def]
    """Gives every follower its part of the experts' shares, in one pass over the occurrences, weakest expert first."""
    for s in range(2):
        share, end, at = 0.0, 0, node.at[s]
        for i in range(work.num_experts - 1, -1, -1):
            if work.spans[i, 0] != s:
                continue
            for j in range(work.spans[i, 1], end):
                add_prob(work, occurrence(at, j).follower, share)
            share += work.shares[i]
            end = work.spans[i, 1]
        for j in range(end):
            add_prob(work, occurrence(at, j).follower, share)


@njit(cache=True, nogil=True)
def begin(work):  # type: ignore[no-untyped-def]
    """Starts a node: none of its experts has been asked yet."""
    work.state[:] = 0
    work.num_experts = 0
    work.left = 1.0


@njit(cache=True, nogil=True)
def add_common(common, work, least):  # type: ignore[no-untyped-def]
    """Gives the commonest tokens their part of the probability that the experts left, down to `least`."""
    tokens, counts, size = common
    for j in range(min(NUM_PROPOSED, size[0])):
        prob = counts[j] / size[1]
        if work.left * prob < least:
            break
        add_prob(work, tokens[j], COMMON_SHARE * work.left * prob)


@njit(cache=True, nogil=True)
def count_common(common, token_ids):  # type: ignore[no-untyped-def]
    """Tracks the commonest tokens, sorted by count (Space-Saving; Metwally et al., ICDT 2005).

    common: (tokens, counts [NUM_COMMON], (entries in use, tokens counted)).
    """
    tokens, counts, size = common
    for token in token_ids:
        if token < 0:
            continue
        size[1] += 1
        i = 0
        while i < size[0] and tokens[i] != token:
            i += 1
        if i == size[0]:
            if size[0] < NUM_COMMON:
                size[0] += 1
                counts[i] = 0
            else:
                i -= 1
        count = counts[i] + 1
        while i > 0 and counts[i - 1] < count:
            tokens[i], counts[i] = tokens[i - 1], counts[i - 1]
            i -= 1
        tokens[i], counts[i] = token, count


@njit(cache=True, nogil=True)
def read_recent(own, num_output, recent):  # type: ignore[no-untyped-def]
    """Fills recent [2, MAX_MATCH] with the context to look up in each source, newest token first, then SEPARATOR.

    The scope holds only answers, so its context begins where the answer does.
    """
    text, _, _, meta = own
    recent[:] = SEPARATOR
    slot = meta[NEWEST]
    for i in range(min(meta[RUN], meta[FILLED], MAX_MATCH)):
        recent[OWN, i] = text[slot]
        if i < num_output:
            recent[SCOPE, i] = text[slot]
        slot = slot - 1 if slot > 0 else text.shape[0] - 1
    if num_output < MAX_MATCH:
        recent[SCOPE, num_output] = START


@functools.cache
def _first_weights() -> np.ndarray:
    """Returns initial weights that trust long and frequent contexts with a single follower most. The log odds are a
    rounded fit to what was learned on recorded answers (GSM8K, CRUXEval).
    """
    lengths, counts = np.arange(LENGTH_BINS)[:, None, None], np.arange(COUNT_BINS)[None, :, None]
    beyond = np.maximum(0, lengths - 5)
    weights = np.empty(WEIGHTS_SHAPE)
    weights[OWN] = -0.1 - 0.1 * lengths + 0.5 * beyond + 0.4 * counts - np.array([0.0, 1.2, 1.8])
    weights[SCOPE] = -1.2 - 0.1 * lengths + 0.7 * beyond + 0.8 * counts - np.array([0.0, 1.3, 2.6])
    noise = np.full(NUM_NOISE_BINS, -1.0)
    flat: np.ndarray = 1.0 / (1.0 + np.exp(-np.concatenate((weights.reshape(-1), noise))))
    return flat


def initial_weights() -> np.ndarray:
    """Returns a new copy of the initial shares, float64, flat."""
    return _first_weights().copy()


def make_common() -> tuple[np.ndarray, ...]:
    """Returns empty counts for count_common."""
    return np.zeros(NUM_COMMON, np.int64), np.zeros(NUM_COMMON, np.int64), np.zeros(2, np.int64)
