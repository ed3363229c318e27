"""Compiled part of the mixture drafter that grows a draft tree, best-first by path probability."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.draft.mixture_kernels import (
    BYTES,
    MAX_OCCURRENCES,
    MIN_VISITS,
    OWN,
    PATH,
    SCOPE,
    add_common,
    begin,
    clear,
    find_at_root,
    find_followers,
    occurrence,
    read_recent,
    spread,
    weigh,
)
from batchserve.draft.mixture_noise import tilt
from batchserve.draft.text_index import ANSWER, MAX_MATCH, NEWEST
from batchserve.native.jit import njit
from batchserve.sampling.draw_kernel import stream_key

MIN_PROB = 1e-4  # a less likely node is not worth its row on any machine
# Numbers of occurrences to look at. The root gets many, once per tree, because it decides most. Other nodes get fewer,
# as their latest occurrences say more, and as they take most of the time.
MAX_VISITS, MIN_NODE_VISITS, MAX_NODE_VISITS = 256, 16, 64
CUT, NOISY_CUT = 0.4, 0.02  # experts are asked until they leave less than this part of the probability a node needs
CANDIDATE = np.dtype([("prob", np.float64), ("parent", np.int64), ("token", np.int64)])


@njit(cache=True, nogil=True, inline="always")
def root_visits(max_tokens):  # type: ignore[no-untyped-def]
    """Returns how many occurrences of each context to look at for the root of a tree of max_tokens nodes."""
    return min(MAX_VISITS, max(MIN_VISITS, 8 * max_tokens))


@njit(cache=True, nogil=True)
def _go_on(source, s, token, parent, node):  # type: ignore[no-untyped-def]
    """Gives a node those of its parent's occurrences in source s that continue with its `token`, in their order."""
    text, _, _, meta = source
    capacity, newest, count = text.shape[0], meta[NEWEST], 0
    at, above = node.at[s], parent.at[s]
    for i in range(parent.num[s]):
        known = occurrence(above, i)
        if known.follower != token or known.slot == newest:
            continue
        behind = known.slot + 1 if known.slot + 1 < capacity else 0
        if text[behind] >= 0 and behind != meta[ANSWER]:
            each = occurrence(at, count)
            each.slot, each.follower, each.length = behind, text[behind], min(known.length + 1, MAX_MATCH)
            count += 1
    node.num[s] = count


@njit(cache=True, nogil=True)
def _insert(frontier, size, most, prob, parent, token):  # type: ignore[no-untyped-def]
    """Inserts a candidate into frontier, which keeps the best `most`, likeliest first. Returns its new size."""
    if size == most:
        if prob <= frontier[size - 1].prob:
            return size
        size -= 1
    i = size
    while i > 0 and frontier[i - 1].prob < prob:
        frontier[i] = frontier[i - 1]
        i -= 1
    frontier[i].prob, frontier[i].parent, frontier[i].token = prob, parent, token
    return size + 1


@njit(cache=True, nogil=True)
def _expand_root(own, scope, visits, weights, cut, node, work):  # type: ignore[no-untyped-def]
    """Asks the experts at the end of the request's text."""
    node.path[:] = work.recent[:, :PATH]
    find_at_root(own, visits, node, OWN, work)
    find_at_root(scope, visits, node, SCOPE, work)
    weigh(node, work, weights, cut, -1)


@njit(cache=True, nogil=True)
def _expand_node(own, scope, node, parent, token, visits, weights, cut, work, room):  # type: ignore[no-untyped-def]
    """Asks the experts of the path that ends with `token`: the parent's occurrences that continue with it. If these
    leave enough probability, other occurrences of the token alone, which the parent could not know, are asked, too.

    Stores the occurrences at address `room`, and returns the address after them.
    """
    node.path[:, 0] = token
    node.path[:, 1:] = parent.path[:, :-1]
    node.at[OWN] = room
    _go_on(own, OWN, token, parent, node)
    node.at[SCOPE] = room + BYTES * min(node.num[OWN] + visits, MAX_OCCURRENCES)
    _go_on(scope, SCOPE, token, parent, node)
    weigh(node, work, weights, cut, -1)
    if work.left >= cut:
        find_followers(own, node.path[OWN], 0, 2, visits, node, OWN)
        find_followers(scope, node.path[SCOPE], 0, 2, visits, node, SCOPE)
        weigh(node, work, weights, cut, -1)
    return node.at[SCOPE] + BYTES * node.num[SCOPE]


@njit(cache=True, nogil=True)
def grow(own, scope, common, num_output, noise, bounds, weights, root, nodes, scratch, links, tree_probs):  # type: ignore[no-untyped-def]
    """Grows one tree best-first into links [3, max_tokens] (token ids, parents, depths) and tree_probs [max_tokens].

    Returns the number of nodes.

    noise: see mixture_noise.py. bounds: (most nodes, greatest depth, least path probability). What is found for the end
    of the text goes into root, NODE [1]. Work memory: nodes NODE [most nodes]; scratch SCRATCH [1], zeros at first.
    """
    noise_bin, seed, position = noise
    is_noisy = noise_bin >= 0
    max_tokens, max_depth, min_prob = bounds
    min_prob = max(MIN_PROB, min_prob)
    frontier, work = np.empty(max_tokens + 1, CANDIDATE), scratch[0]
    room = work.room
    tree_tokens, tree_parents, tree_depths = links[0], links[1], links[2]
    visits = root_visits(max_tokens)
    node_visits = min(MAX_NODE_VISITS, max(MIN_NODE_VISITS, max_tokens))
    count, num_waiting, node, path_prob, depth = 0, 0, -1, 1.0, 0
    read_recent(own, num_output, work.recent)
    while True:
        if depth < max_depth:
            # When the frontier is full, only what is likelier than its last candidate is worth looking for.
            is_full = num_waiting == max_tokens - count
            least = max(min_prob, frontier[num_waiting - 1].prob if is_full else 0.0) / path_prob
            # The cut is below `least`: several experts may name a token, and the noise may raise it.
            cut = least * (NOISY_CUT if is_noisy else CUT)
            here = root[0] if node < 0 else nodes[node]
            begin(work)
            if node < 0:
                _expand_root(own, scope, visits, weights, cut, here, work)
            else:
                above = root[0] if tree_parents[node] < 0 else nodes[tree_parents[node]]
                token = tree_tokens[node]
                room = _expand_node(own, scope, here, above, token, node_visits, weights, cut, work, room)
            clear(work)  # the probabilities from another node's experts
            spread(here, work)
            if work.left >= cut and common[2][1] > 0:
                add_common(common, work, cut)
            if is_noisy:
                tilt(work, stream_key(seed, position + depth), weights[noise_bin])
            for i in range(work.size):
                if work.probs[i] >= least:
                    prob = path_prob * work.probs[i]
                    num_waiting = _insert(frontier, num_waiting, max_tokens - count, prob, node, work.tokens[i])
        if num_waiting == 0 or count == max_tokens:
            return count
        node = count
        path_prob = tree_probs[node] = frontier[0].prob
        tree_parents[node], tree_tokens[node] = frontier[0].parent, frontier[0].token
        depth = 1 if tree_parents[node] < 0 else tree_depths[tree_parents[node]] + 1
        tree_depths[node] = depth
        num_waiting -= 1
        for i in range(num_waiting):
            frontier[i] = frontier[i + 1]
        count += 1
        if count == max_tokens:
            return count
