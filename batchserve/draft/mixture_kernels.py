"""The mixture's compiled part: contexts as experts, their blend, and the growth of a draft tree by path probability.

There are two sources: a request's own text, and the answers of its scope. For every length l that makes a difference,
the latest occurrences in one source that match at least l tokens are an expert: it says how often which token followed.
Experts are asked from the longest match down, and each takes a share of the probability that those before it have left;
behind them all stand the scope's commonest tokens. The shares are learned online, one step of expectation-maximisation
for every token, in bins of source, match length, number of occurrences and number of distinct followers. This is a
variable-order Markov model with mixing weights (as in context-tree weighting; Willems et al., 1995), over the texts
that Lookahead (KDD'24, section 4.2) drafts from.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
from numba import njit

from batchserve.draft.mixture_noise import NUM_NOISE_BINS, merit_of_noise, stream_key
from batchserve.draft.text_index import (
    FILLED,
    MAX_MATCH,
    NEWEST,
    NUM_ORDERS,
    ORDERS,
    RUN,
    SEPARATOR,
    START,
    append_tokens,
    find_occurrences,
)

OWN, SCOPE = 0, 1
MAX_OCCURRENCES = 640  # of one source at one node
LONGEST_LEVELS = 4  # experts of one source at one node: this many of the longest, and those of one and two tokens
MAX_EXPERTS = 2 * (LONGEST_LEVELS + 2) + 1
MAX_FOLLOWERS = 2048  # a power of two, at least 2 * MAX_OCCURRENCES
AT, DISTINCT, FIRST, SECOND, HITS, TAKEN = range(6)  # what weigh keeps of a source
LENGTH_BINS, COUNT_BINS, FOLLOWER_BINS = 10, 6, 3
WEIGHTS_SHAPE = (2, LENGTH_BINS, COUNT_BINS, FOLLOWER_BINS)  # and behind them the weights of the noise
COMMONEST_BIN = (SCOPE * LENGTH_BINS * COUNT_BINS + COUNT_BINS) * FOLLOWER_BINS - 1  # the scope's matches of length 0
COMMON_SHARE = 0.5  # of what the others leave; more pays on chat and less on arithmetic
NUM_COMMON, NUM_PROPOSED = 256, 64  # tokens whose frequency is tracked; those of them that are ever proposed
FEWEST_VISITS = 64  # occurrences of a short context that are looked at; the latest ones count
LONG_VISITS = 24  # of the longest contexts that have a chain
MIN_SHARE, MAX_SHARE = 0.005, 0.995
SLOWEST_RATE, FIRST_RATE = 0.006, 12.0


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


@njit(cache=True, nogil=True)
def _sort_by_length(slots, lengths, count, spare):  # type: ignore[no-untyped-def]
    """Stable, longest first."""
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
def note_followers(text, slots, followers, start, count):  # type: ignore[no-untyped-def]
    """Keep the tokens behind occurrences next to each other: they are looked at several times."""
    for i in range(start, count):
        followers[i] = text[slots[i]]


@njit(cache=True, nogil=True)
def find_at_root(source, recent, visits, slots, lengths, followers, spare):  # type: ignore[no-untyped-def]
    """The occurrences of the text's end in one source, longest first; returns how many."""
    text, prev, head, meta = source
    count, longest = 0, MAX_MATCH + 1
    for o in range(NUM_ORDERS - 1, -1, -1):
        most = visits if o < NUM_ORDERS - 1 else LONG_VISITS
        count = find_occurrences(text, prev, head, meta, recent, o, longest, most, slots, lengths, count)
        longest = ORDERS[o]
    _sort_by_length(slots, lengths, count, spare)
    note_followers(text, slots, followers, 0, count)
    return count


@njit(cache=True, nogil=True)
def add_prob(table, token, prob):  # type: ignore[no-untyped-def]
    """Add to what the experts give `token`."""
    tokens, probs, places, at, size = table
    place = ((token * 40503) >> 4) & (places.shape[0] - 1)
    while places[place] >= 0 and tokens[places[place]] != token:
        place = (place + 1) & (places.shape[0] - 1)
    index = places[place]
    if index >= 0:
        probs[index] += prob
    elif size[0] < tokens.shape[0]:
        places[place] = index = size[0]
        tokens[index], probs[index], at[index] = token, prob, place
        size[0] += 1


@njit(cache=True, nogil=True)
def clear(table):  # type: ignore[no-untyped-def]
    _, _, places, at, size = table
    for i in range(size[0]):
        places[at[i]] = -1
    size[0] = 0


@njit(cache=True, nogil=True)
def weigh(lengths, followers, num, state, weights, least, target, experts):  # type: ignore[no-untyped-def]
    """Ask experts, strongest first, until they have left less than `least` of the probability or there are no more.

    lengths, followers [2, MAX_OCCURRENCES], longest first; num [2]. state [2, 6] and experts go on from the last call
    of this node. An expert is entered with its source, the end of its occurrences, its share for each of these, the
    bin of its weight and what it gives `target`.
    """
    counts, left, spans, shares, bins, target_probs = experts
    while left[0] >= least and (state[OWN, AT] < num[OWN] or state[SCOPE, AT] < num[SCOPE]):
        s = OWN
        if state[OWN, AT] >= num[OWN] or (
            state[SCOPE, AT] < num[SCOPE] and lengths[SCOPE, state[SCOPE, AT]] > lengths[OWN, state[OWN, AT]]
        ):
            s = SCOPE
        at = state[s, AT]
        length = lengths[s, at]
        while at < num[s] and lengths[s, at] == length:
            token = followers[s, at]
            # More than two distinct followers are all the same to the bins.
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
        i = counts[0]
        counts[0] += 1
        bins[i] = row + state[s, DISTINCT] - 1
        spans[i, 0], spans[i, 1] = s, at
        shares[i] = left[0] * weights[bins[i]] / at
        target_probs[i] = state[s, HITS] / at
        left[0] *= 1.0 - weights[bins[i]]


@njit(cache=True, nogil=True)
def spread(followers, experts, table):  # type: ignore[no-untyped-def]
    """Give every follower its part of the experts' shares: one pass over the occurrences, the weakest expert first."""
    counts, _, spans, shares, _, _ = experts
    for s in range(2):
        share, end = 0.0, 0
        for i in range(counts[0] - 1, -1, -1):
            if spans[i, 0] != s:
                continue
            for j in range(spans[i, 1], end):
                add_prob(table, followers[s, j], share)
            share += shares[i]
            end = spans[i, 1]
        for j in range(end):
            add_prob(table, followers[s, j], share)


@njit(cache=True, nogil=True)
def begin(state, experts):  # type: ignore[no-untyped-def]
    state[:] = 0
    experts[0][0] = 0
    experts[1][0] = 1.0


@njit(cache=True, nogil=True)
def add_common(common, least, target, experts, table):  # type: ignore[no-untyped-def]
    """The last expert: how frequent tokens are at all."""
    common_tokens, common_counts, common_size = common
    counts, left, spans, _, bins, target_probs = experts
    i = counts[0]
    counts[0] += 1
    spans[i, 0], bins[i], target_probs[i] = -1, COMMONEST_BIN, 0.0
    for j in range(min(NUM_PROPOSED, common_size[0])):
        prob = common_counts[j] / common_size[1]
        if common_tokens[j] == target:
            target_probs[i] = prob
        if left[0] * prob < least:
            break
        add_prob(table, common_tokens[j], COMMON_SHARE * left[0] * prob)


@njit(cache=True, nogil=True)
def count_common(common, token_ids):  # type: ignore[no-untyped-def]
    """Track the commonest tokens, commonest first (Space-Saving; Metwally et al., ICDT 2005).

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
    """The context that each source is asked for, newest token first, into recent [2, MAX_MATCH]; the rest is SEPARATOR.

    The scope holds answers only: its context begins where the answer does.
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


@njit(cache=True, nogil=True)
def accept_tokens(own, scope, common, token_ids, num_output, noise, weights, seen):  # type: ignore[no-untyped-def]
    """Learn from token_ids (int32), and append them to the own text, whose last num_output tokens are the answer."""
    noise_bin, seed, position = noise
    recent, scratch = np.empty((2, MAX_MATCH), np.int32), make_scratch()
    for i in range(token_ids.shape[0]):
        read_recent(own, num_output + i, recent)
        _learn((own, scope), common, recent, token_ids[i], weights, seen, scratch)
        if noise_bin >= 0:
            key = stream_key(seed, position + i)
            _learn_noise(noise_bin, key, token_ids[i], weights, seen, scratch)
        append_tokens(own[0], own[1], own[2], own[3], token_ids[i : i + 1], 0)


@njit(cache=True, nogil=True)
def _learn(sources, common, recent, target, weights, seen, scratch):  # type: ignore[no-untyped-def]
    """One step of expectation-maximisation: how much of the probability of `target` was each expert's merit?"""
    slots, lengths, followers, num, spare, state, experts, table, below = scratch
    num[OWN] = find_at_root(sources[0], recent[OWN], FEWEST_VISITS, slots[OWN], lengths[OWN], followers[OWN], spare)
    num[SCOPE] = find_at_root(
        sources[1], recent[SCOPE], FEWEST_VISITS, slots[SCOPE], lengths[SCOPE], followers[SCOPE], spare
    )
    begin(state, experts)
    weigh(lengths, followers, num, state, weights, 0.0, target, experts)
    if common[2][1] > 0:
        add_common(common, 1.0, target, experts, table)
    counts, _, _, _, bins, target_probs = experts
    prob = 1e-5  # of a token that no expert knows
    for i in range(counts[0] - 1, -1, -1):
        below[i] = prob
        prob = weights[bins[i]] * target_probs[i] + (1.0 - weights[bins[i]]) * prob
    left = 1.0
    for i in range(counts[0]):
        share = weights[bins[i]]
        merit = share * target_probs[i] / (share * target_probs[i] + (1.0 - share) * below[i])
        seen[bins[i]] += 1
        rate = max(SLOWEST_RATE, 1.0 / (seen[bins[i]] + FIRST_RATE - 1.0))
        weights[bins[i]] = min(MAX_SHARE, max(MIN_SHARE, share + rate * left * (merit - share)))
        left *= 1.0 - merit
        if left < 1e-3:
            break


@njit(cache=True, nogil=True)
def _learn_noise(noise_bin, key, target, weights, seen, scratch):  # type: ignore[no-untyped-def]
    """The same for the weight of the noise, from the experts that _learn has just asked."""
    _, _, followers, _, _, _, experts, table, _ = scratch
    clear(table)
    spread(followers, experts, table)
    merit = merit_of_noise(table, key, weights[noise_bin], target)
    clear(table)
    if merit >= 0.0:
        seen[noise_bin] += 1
        rate = max(SLOWEST_RATE, 1.0 / (seen[noise_bin] + FIRST_RATE - 1.0))
        weights[noise_bin] = min(MAX_SHARE, max(MIN_SHARE, weights[noise_bin] + rate * (merit - weights[noise_bin])))


def initial_weights() -> np.ndarray:
    """Shares before anything was learned, float64, flat.

    Long and often seen contexts with one follower are trusted most. The log odds are a fit, rounded, to what was
    learned on recorded answers (GSM8K, CRUXEval).
    """
    lengths, counts = np.arange(LENGTH_BINS)[:, None, None], np.arange(COUNT_BINS)[None, :, None]
    beyond = np.maximum(0, lengths - 5)
    weights = np.empty(WEIGHTS_SHAPE)
    weights[OWN] = -0.1 - 0.1 * lengths + 0.5 * beyond + 0.4 * counts - np.array([0.0, 1.2, 1.8])
    weights[SCOPE] = -1.2 - 0.1 * lengths + 0.7 * beyond + 0.8 * counts - np.array([0.0, 1.3, 2.6])
    flat: np.ndarray = weights.reshape(-1)
    flat[COMMONEST_BIN] = -1.1
    noise = np.full(NUM_NOISE_BINS, -1.0)
    flat = 1.0 / (1.0 + np.exp(-np.concatenate((flat, noise))))
    return flat


@njit(cache=True, nogil=True)
def make_scratch():  # type: ignore[no-untyped-def]
    """Work memory. Made anew in every call: that is cheaper than taking so many arrays across from Python."""
    shape = (2, MAX_OCCURRENCES)
    experts = (
        np.zeros(1, np.int64),
        np.zeros(1),
        np.empty((MAX_EXPERTS, 2), np.int64),
        np.empty(MAX_EXPERTS),
        np.empty(MAX_EXPERTS, np.int64),
        np.empty(MAX_EXPERTS),
    )
    table = (
        np.empty(MAX_FOLLOWERS, np.int32),
        np.empty(MAX_FOLLOWERS),
        np.full(2 * MAX_FOLLOWERS, np.int32(-1), np.int32),
        np.empty(MAX_FOLLOWERS, np.int32),
        np.zeros(1, np.int64),
    )
    return (
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.zeros(2, np.int64),
        np.empty(shape, np.int32),
        np.zeros((2, 6), np.int64),
        experts,
        table,
        np.empty(MAX_EXPERTS),
    )


def make_common() -> tuple[np.ndarray, ...]:
    """What count_common tracks: nothing yet."""
    return np.zeros(NUM_COMMON, np.int64), np.zeros(NUM_COMMON, np.int64), np.zeros(2, np.int64)
