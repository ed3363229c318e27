"""The mixture's compiled part, continued: a draft tree, grown best-first by path probability."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
from numba import njit

from batchserve.draft.mixture_kernels import (
    FEWEST_VISITS,
    MAX_OCCURRENCES,
    OWN,
    accept_tokens,
    add_common,
    begin,
    clear,
    count_common,
    find_at_root,
    initial_weights,
    make_common,
    make_scratch,
    note_followers,
    read_recent,
    spread,
    weigh,
)
from batchserve.draft.mixture_noise import noise_bin_of, stream_key, tilt
from batchserve.draft.text_index import MAX_MATCH, NEWEST, TextIndex, find_occurrences

MIN_PROB = 1e-4  # a less likely node is not worth its row on any machine
MOST_VISITS = 256  # occurrences that are looked at for the largest trees
CUT, NOISY_CUT = 0.4, 0.02  # experts are asked until they have left less than this part of what a node must have
PATH = 2  # tokens at the end of a node's path that are kept: enough to tell a context of one token from a longer one


@njit(cache=True, nogil=True)
def _go_on(source, token, parent, parent_count, node):  # type: ignore[no-untyped-def]
    """The occurrences of a node's parent that go on with its `token`, in their order; returns how many."""
    text, _, _, meta = source
    parent_slots, parent_lengths, parent_followers = parent
    slots, lengths, followers = node
    capacity, newest, count = text.shape[0], meta[NEWEST], 0
    for i in range(parent_count):
        if parent_followers[i] != token or parent_slots[i] == newest:
            continue
        behind = parent_slots[i] + 1 if parent_slots[i] + 1 < capacity else 0
        if text[behind] >= 0:
            slots[count], followers[count] = behind, text[behind]
            lengths[count] = min(parent_lengths[i] + 1, MAX_MATCH)
            count += 1
    return count


@njit(cache=True, nogil=True)
def _insert(frontier, size, most, prob, parent, token):  # type: ignore[no-untyped-def]
    """Into frontier (probs, parents, tokens), the likeliest first, of which the best `most` are kept; the new size."""
    probs, parents, tokens = frontier
    if size == most:
        if prob <= probs[size - 1]:
            return size
        size -= 1
    i = size
    while i > 0 and probs[i - 1] < prob:
        probs[i], parents[i], tokens[i] = probs[i - 1], parents[i - 1], tokens[i - 1]
        i -= 1
    probs[i], parents[i], tokens[i] = prob, parent, token
    return size + 1


@njit(cache=True, nogil=True)
def _drop_first(frontier, size):  # type: ignore[no-untyped-def]
    probs, parents, tokens = frontier
    for i in range(size):
        probs[i], parents[i], tokens[i] = probs[i + 1], parents[i + 1], tokens[i + 1]


@njit(cache=True, nogil=True)
def _expand_root(sources, recent, visits, weights, cut, nodes, scratch):  # type: ignore[no-untyped-def]
    """Ask the experts of the request's end."""
    slots, lengths, followers, num, path, _ = nodes
    _, _, _, _, spare, state, experts, _, _ = scratch
    path[0] = recent[:, :PATH]
    for s in range(2):
        source = sources[0] if s == OWN else sources[1]
        num[0, s] = find_at_root(source, recent[s], visits, slots[0, s], lengths[0, s], followers[0, s], spare)
    weigh(lengths[0], followers[0], num[0], state, weights, cut, -1, experts)


@njit(cache=True, nogil=True)
def _expand_node(sources, here, above, token, visits, weights, cut, nodes, scratch):  # type: ignore[no-untyped-def]
    """Ask the experts of the path that ends with `token`: what went on from its parent's occurrences, and, if that
    leaves enough, other occurrences of the token alone, which the parent could not know of.
    """
    slots, lengths, followers, num, path, _ = nodes
    _, _, _, _, _, state, experts, _, _ = scratch
    path[here, :, 0] = token
    path[here, :, 1:] = path[above, :, :-1]
    for s in range(2):
        source = sources[0] if s == OWN else sources[1]
        num[here, s] = _go_on(
            source,
            token,
            (slots[above, s], lengths[above, s], followers[above, s]),
            num[above, s],
            (slots[here, s], lengths[here, s], followers[here, s]),
        )
    weigh(lengths[here], followers[here], num[here], state, weights, cut, -1, experts)
    if experts[1][0] < cut:
        return
    for s in range(2):
        text, prev, head, meta = sources[0] if s == OWN else sources[1]
        known = num[here, s]
        num[here, s] = find_occurrences(
            text, prev, head, meta, path[here, s], 0, 2, visits, slots[here, s], lengths[here, s], known
        )
        note_followers(text, slots[here, s], followers[here, s], known, num[here, s])
    weigh(lengths[here], followers[here], num[here], state, weights, cut, -1, experts)


@njit(cache=True, nogil=True)
def _make_nodes(max_tokens):  # type: ignore[no-untyped-def]
    """Occurrences and path of every node of one tree, the root's first, and the frontier."""
    shape = (max_tokens + 1, 2, MAX_OCCURRENCES)
    frontier = (np.empty(max_tokens + 1), np.empty(max_tokens + 1, np.int64), np.empty(max_tokens + 1, np.int64))
    return (
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty((max_tokens + 1, 2), np.int64),
        np.empty((max_tokens + 1, 2, PATH), np.int32),
        frontier,
    )


@njit(cache=True, nogil=True)
def grow(own, scope, common, num_output, noise, max_tokens, max_depth, weights, links, tree_probs):  # type: ignore[no-untyped-def]
    """Grow one tree best-first into links [3, max_tokens] (token ids, parents, depths) and tree_probs [max_tokens].

    Returns its number of nodes.

    noise: see mixture_noise.py.
    """
    noise_bin, seed, position = noise
    is_noisy = noise_bin >= 0
    recent, scratch, nodes = np.empty((2, MAX_MATCH), np.int32), make_scratch(), _make_nodes(max_tokens)
    _, _, _, _, _, state, experts, table, _ = scratch
    tokens, probs, _, _, size = table
    sources, frontier = (own, scope), nodes[5]
    tree_tokens, tree_parents, tree_depths = links[0], links[1], links[2]
    visits = min(MOST_VISITS, max(FEWEST_VISITS, 4 * max_tokens))
    node_visits = visits // 4
    count, num_waiting, node, path_prob, depth = 0, 0, -1, 1.0, 0
    read_recent(own, num_output, recent)
    while True:
        if depth < max_depth:
            # What is less likely than everything that waits for the last places need not be looked for.
            is_full = num_waiting == max_tokens - count
            least = max(MIN_PROB, frontier[0][num_waiting - 1] if is_full else 0.0) / path_prob
            # A token may be named by several experts, and lifted by the noise.
            cut = least * (NOISY_CUT if is_noisy else CUT)
            begin(state, experts)
            if node < 0:
                _expand_root(sources, recent, visits, weights, cut, nodes, scratch)
            else:
                above, token = tree_parents[node] + 1, tree_tokens[node]
                _expand_node(sources, node + 1, above, token, node_visits, weights, cut, nodes, scratch)
            spread(nodes[2][node + 1], experts, table)
            if experts[1][0] >= cut and common[2][1] > 0:
                add_common(common, cut, -1, experts, table)
            if is_noisy:
                tilt(table, stream_key(seed, position + depth), weights[noise_bin])
            for i in range(size[0]):
                if probs[i] >= least:
                    prob = path_prob * probs[i]
                    num_waiting = _insert(frontier, num_waiting, max_tokens - count, prob, node, tokens[i])
            clear(table)
        if num_waiting == 0 or count == max_tokens:
            return count
        node = count
        path_prob = tree_probs[node] = frontier[0][0]
        tree_parents[node], tree_tokens[node] = frontier[1][0], frontier[2][0]
        depth = 1 if tree_parents[node] < 0 else tree_depths[tree_parents[node]] + 1
        tree_depths[node] = depth
        num_waiting -= 1
        _drop_first(frontier, num_waiting)
        count += 1
        if count == max_tokens:
            return count


def compile_kernels() -> None:
    """Compile, or load from the cache on disk, everything that a drafter calls."""
    tokens = np.array([1, 2, 1, 2, 1], np.int32)
    index = TextIndex(8)
    index.append(tokens)
    source, common, weights = index.source, make_common(), initial_weights()
    noise = (noise_bin_of(1.0, len(weights)), np.uint64(0), 5)
    accept_tokens(source, source, common, tokens[:1], 0, noise, weights, np.zeros(weights.shape, np.int64))
    count_common(common, tokens)
    grow(source, source, common, 1, noise, 2, 2, weights, np.zeros((3, 2), np.int64), np.zeros(2))
