"""Kernels of the trie drafter that turn matches into a draft tree: retrieval, weighing and best-first growth."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.draft.text_index import NEWEST, NUM_ORDERS, ORDERS, RUN, SEPARATOR, find_occurrences
from batchserve.draft.trie_kernels import CHILD, COUNT, NEXT, PARENT, TOKEN, find_child, hash_child
from batchserve.native.jit import njit

MAX_MATCH = 8  # longest suffix that is looked up, at least the longest of ORDERS
MAX_VISITS = 32  # latest occurrences of one suffix that are read from the request's own text
MAX_CHILDREN = 4096  # most next tokens of one draft node that are weighed, those of longer matches first
NUM_SLOTS = 4 * MAX_CHILDREN
MAX_ROOT_PLACES = NUM_ORDERS * MAX_VISITS + MAX_MATCH
# Chosen on the replay sets at 64 and at 8 nodes. None of them is sensitive.
ESCAPE = 3.0  # count given to unseen tokens for each distinct token seen, after a match of one token
LONG_MATCH = 8  # a longer match is not trusted more
MIN_LEFT = 0.02  # probability left below which shorter matches would hardly add to it
MIN_PATH_PROB = 0.002  # a node that is less likely is not drafted

HIERARCHICAL, PARALLEL, SINGLE = range(3)


@njit(cache=True, nogil=True)
def _subtree_size(nodes, root, at_most):  # type: ignore[no-untyped-def]
    """Returns the number of nodes below root, counted up to at_most."""
    size, node = 0, nodes[root, CHILD]
    while node != 0 and size < at_most:
        size += 1
        if nodes[node, CHILD] != 0:
            node = nodes[node, CHILD]
            continue
        while node != root and nodes[node, NEXT] == 0:
            node = nodes[node, PARENT]
        node = nodes[node, NEXT] if node != root else 0
    return size


@njit(cache=True, nogil=True)
def _retrieve(own, limit, shared, depth, min_retrieved, places, matches):  # type: ignore[no-untyped-def]
    """Multi-stage retrieval (section 4.3): finds where branches continue, longest match first; returns how many places.

    A place is the slot of a next token in the own text, or -1 - the row of a shared node. Shorter matches are added to
    the longer ones, never put in their place, until the branches have min_retrieved tokens.
    """
    text, prev, head, meta = own
    nodes, buckets, header = shared
    longest = min(MAX_MATCH, meta[RUN])
    recent = np.full(MAX_MATCH, SEPARATOR, np.int32)
    for i in range(longest):
        recent[i] = text[meta[NEWEST] - i]
    found, lengths = np.empty(MAX_ROOT_PLACES, np.int64), np.empty(MAX_ROOT_PLACES, np.int64)
    num_found, upper = 0, MAX_MATCH + 1
    for order in range(NUM_ORDERS - 1, -1, -1):
        num_found = find_occurrences(
            text, prev, head, meta, recent, order, upper, MAX_VISITS, found, lengths, num_found
        )
        upper = ORDERS[order]
    count, retrieved = 0, 0
    for match in range(longest, 0, -1):
        for i in range(num_found):
            if lengths[i] == match and found[i] < limit:
                places[count], matches[count] = found[i], match
                count += 1
                retrieved += min(depth, limit - found[i])
        node = 0
        for i in range(match - 1, -1, -1):
            node = find_child(nodes, buckets, header, node, recent[i])
            if node == 0:
                break
        if node != 0 and nodes[node, CHILD] != 0:
            places[count], matches[count] = -1 - node, match
            count += 1
            retrieved += _subtree_size(nodes, node, min_retrieved)
        if retrieved >= min_retrieved:
            break
    return count


@njit(cache=True, nogil=True)
def _tally(slots, tokens, weights, probs, count, token, weight):  # type: ignore[no-untyped-def]
    """Adds `weight` to a next token's weight. Returns the number of distinct next tokens."""
    slot = hash_child(0, token) & (NUM_SLOTS - 1)
    while slots[slot] != 0 and tokens[slots[slot] - 1] != token:
        slot = (slot + 1) & (NUM_SLOTS - 1)
    if slots[slot] != 0:
        weights[slots[slot] - 1] += weight
    elif count < MAX_CHILDREN:
        tokens[count], weights[count], probs[count] = token, weight, 0.0
        count += 1
        slots[slot] = count
    return count


@njit(cache=True, nogil=True)
def _weigh(text, nodes, places, matches, first, last, depth, own_weight, slots, children):  # type: ignore[no-untyped-def]
    """Writes the next tokens at places[first:last] and their probabilities to children; returns how many.

    The places after matches of one length pool their frequencies; those of the own text count own_weight times. The
    longest match comes first, and the probability that it leaves to tokens it has not seen goes to the next one (PPM's
    escape, Cleary and Witten 1984). slots is zero before and after.
    """
    tokens, weights, probs = children
    count, at, left = 0, first, 1.0
    while at < last and left > MIN_LEFT:
        match, seen, pruned = matches[at], 0, 0
        while at < last and matches[at] == match:
            place = places[at]
            at += 1
            if place >= 0:
                count = _tally(slots, tokens, weights, probs, count, text[place], own_weight)
                seen += 1
                continue
            below, node = 0, nodes[-1 - place, CHILD]
            while node != 0:
                count = _tally(slots, tokens, weights, probs, count, nodes[node, TOKEN], nodes[node, COUNT])
                below += nodes[node, COUNT]
                node = nodes[node, NEXT]
            seen += below
            if nodes[-1 - place, PARENT] != 0:
                # Counts that its children lack belong to pruned tokens, which must not look impossible.
                pruned += max(0, nodes[-1 - place, COUNT] - below)
        total, kinds = 0.0, 0
        for child in range(count):
            total += weights[child]
            kinds += weights[child] > 0
        if kinds == 0:  # there was no room for any of them
            break
        trust = left * seen / (seen + pruned + kinds * ESCAPE / min(match + depth, LONG_MATCH))
        for child in range(count):
            probs[child] += trust * weights[child] / total
            weights[child] = 0.0
        left -= trust
    for child in range(count - 1, -1, -1):  # newest first, so linear probing still finds every token
        slot = hash_child(0, tokens[child]) & (NUM_SLOTS - 1)
        while slots[slot] != child + 1:
            slot = (slot + 1) & (NUM_SLOTS - 1)
        slots[slot] = 0
    return count


@njit(cache=True, nogil=True)
def _push(heap, size, prob, token, parent):  # type: ignore[no-untyped-def]
    """Pushes a candidate onto a heap whose likeliest is first; returns the heap's new size."""
    probs, tokens, parents = heap
    at = size
    while at > 0 and probs[(at - 1) >> 1] < prob:
        above = (at - 1) >> 1
        probs[at], tokens[at], parents[at] = probs[above], tokens[above], parents[above]
        at = above
    probs[at], tokens[at], parents[at] = prob, token, parent
    return size + 1


@njit(cache=True, nogil=True)
def _drop_first(heap, size):  # type: ignore[no-untyped-def]
    """Removes the likeliest candidate; returns the heap's new size."""
    probs, tokens, parents = heap
    size -= 1
    prob, token, parent, at = probs[size], tokens[size], parents[size], 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and probs[below + 1] > probs[below]:
            below += 1
        if probs[below] <= prob:
            break
        probs[at], tokens[at], parents[at] = probs[below], tokens[below], parents[below]
        at = below
    probs[at], tokens[at], parents[at] = prob, token, parent
    return size


@njit(cache=True, nogil=True)
def _push_children(heap, size, children, count, node, path_prob, is_best_only):  # type: ignore[no-untyped-def]
    tokens, _, probs = children
    first = 0
    if is_best_only:
        for child in range(1, count):
            if probs[child] > probs[first]:
                first = child
        count = min(count, first + 1)
    for child in range(first, count):
        if path_prob * probs[child] >= MIN_PATH_PROB:
            size = _push(heap, size, path_prob * probs[child], tokens[child], node)
    return size


@njit(cache=True, nogil=True)
def _follow(text, limit, shared, places, matches, first, last, token, end):  # type: ignore[no-untyped-def]
    """Writes where places[first:last] continue after `token` to places[end:]; returns the new end."""
    nodes, buckets, header = shared
    for i in range(first, last):
        place = places[i]
        if place < 0:
            row = find_child(nodes, buckets, header, -1 - place, token)
            if row == 0 or nodes[row, CHILD] == 0:
                continue
            place = -1 - row
        elif text[place] == token and place + 1 < limit and text[place + 1] >= 0:
            place += 1
        else:
            continue
        places[end], matches[end] = place, matches[i]
        end += 1
    return end


@njit(cache=True, nogil=True)
def _write_depth_first(grown, count, out):  # type: ignore[no-untyped-def]
    """Writes nodes that are in order of growth (parents first, likelier siblings first) in depth-first order."""
    tokens, parents, probs = grown
    first_child, last_child = np.full(count + 1, -1, np.int32), np.full(count + 1, -1, np.int32)
    next_sibling, place = np.full(count, -1, np.int32), np.empty(count + 1, np.int32)
    place[0] = -1
    for node in range(count):  # entry 0 is the root, i + 1 is node i
        above = parents[node] + 1
        if first_child[above] < 0:
            first_child[above] = node
        else:
            next_sibling[last_child[above]] = node
        last_child[above] = node
    node = first_child[0]
    for written in range(count):
        place[node + 1] = written
        out[0][written], out[2][written] = tokens[node], probs[node]
        out[1][written] = place[parents[node] + 1]
        if first_child[node + 1] >= 0:
            node = first_child[node + 1]
            continue
        while node >= 0 and next_sibling[node] < 0:
            node = parents[node]
        if node >= 0:
            node = next_sibling[node]


@njit(cache=True, nogil=True)
def grow_draft(own, limit, shared, max_tokens, max_depth, min_retrieved, own_weight, mode, slots, out):  # type: ignore[no-untyped-def]
    """Drafts one request: grows a tree from what is retrieved, always along the likeliest path; returns its size.

    own: (text, prev, head, meta) of a TextIndex that has never wrapped, read before slot `limit`. shared: (nodes,
    buckets, header). mode: HIERARCHICAL merges branches by prefix, PARALLEL keeps the best chain after every first
    token, SINGLE keeps the best chain. slots: int32 [NUM_SLOTS], zero. out: (token ids, parents, path probabilities),
    int32, int32 and float64 [at least max_tokens], in depth-first order.
    """
    text, nodes = own[0], shared[0]
    # A root place in the own text leads to at most one place per depth, and a shared one to at most one per node.
    places = np.empty((max_depth + 1) * MAX_ROOT_PLACES + max_tokens * MAX_MATCH, np.int32)
    matches = np.empty(places.shape[0], np.int32)
    num_roots = _retrieve(own, limit, shared, max_depth, min_retrieved, places, matches)
    if num_roots == 0:
        return 0
    # Candidates at one depth exclude each other, so at most 1 / MIN_PATH_PROB of them are likely enough.
    most = int(max_depth / MIN_PATH_PROB) + 1
    heap = (np.empty(most, np.float64), np.empty(most, np.int32), np.empty(most, np.int32))
    children = (
        np.empty(MAX_CHILDREN, np.int32),
        np.empty(MAX_CHILDREN, np.float64),
        np.empty(MAX_CHILDREN, np.float64),
    )
    grown = (np.empty(max_tokens, np.int32), np.empty(max_tokens, np.int32), np.empty(max_tokens, np.float64))
    depths, ends = np.empty(max_tokens, np.int32), np.empty((max_tokens, 2), np.int32)
    size, count, node, depth, path_prob, first, end = 0, 0, -1, 0, 1.0, 0, num_roots
    while True:
        if depth < max_depth and end > first:
            num_children = _weigh(text, nodes, places, matches, first, end, depth, own_weight, slots, children)
            is_best_only = mode == SINGLE or (mode == PARALLEL and depth > 0)
            size = _push_children(heap, size, children, num_children, node, path_prob, is_best_only)
        if size == 0:
            break
        path_prob, token, parent = heap[0][0], heap[1][0], heap[2][0]
        size = _drop_first(heap, size)
        node, depth, first = count, 1 if parent < 0 else depths[parent] + 1, end
        grown[0][node], grown[1][node], grown[2][node], depths[node] = token, parent, path_prob, depth
        count += 1
        if count == max_tokens:
            break
        above_first, above_last = (0, num_roots) if parent < 0 else (ends[parent, 0], ends[parent, 1])
        end = _follow(text, limit, shared, places, matches, above_first, above_last, token, end)
        ends[node, 0], ends[node, 1] = first, end
    _write_depth_first(grown, count, out)
    return count
