"""Inner loops of Lookahead Decoding over flat arrays: the n-gram pool, the window of Jacobi iterations, draft trees.

A pool is a ring of n-grams, `grams` int32 [capacity, N], numbered in the order of their arrival. Number s is in row
s % capacity until number s + capacity overwrites it. `newest` int32 [power of two] has the newest number of each hash
bucket, and `older` int32 [capacity] links each row to the next older number. So a token's n-grams are visited newest
first, and an overwritten n-gram ends the chain. `counter` int64 [1] is the next number. `are_found` bool [capacity]
marks n-grams that are in no text and come from the window alone.

A window is `tokens` int32 [N - 1, W + N - 2]. Row l is level l, and column j holds the trajectory whose tokens are
j + l positions after the request's last token, which is (0, 0) itself. `is_true` marks tokens that the model gave; the
others are fillers. `shape` int64 [3] is (levels in use, columns whose next tokens are known, fillers drawn).
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.native.jit import njit

HEIGHT, COMPUTED, DRAWN = range(3)
# Measured on the bundled model: how much less often each older n-gram is right, and how often each further token is.
RECENCY = 0.65
HIT = 0.8


@njit(cache=True, nogil=True)
def _bucket(token, num_buckets):  # type: ignore[no-untyped-def]
    mixed = np.uint64(token) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(mixed >> np.uint64(32)) & (num_buckets - 1)


@njit(cache=True, nogil=True)
def insert_gram(pool, guesses, gram, is_found):  # type: ignore[no-untyped-def]
    """Makes gram [N] the newest that begins with its first token, and drops the oldest beyond `guesses` of these."""
    grams, older, newest, counter, are_found = pool
    capacity, number = grams.shape[0], counter[0]
    bucket = _bucket(gram[0], newest.shape[0])
    # Row number % capacity is about to be overwritten, so its n-gram no longer counts.
    oldest = max(0, number - capacity + 1)
    before, count, seq = -1, 0, newest[bucket]
    while seq >= oldest:
        row = seq % capacity
        if grams[row, 0] == gram[0]:
            is_same = True
            for i in range(1, gram.shape[0]):
                is_same = is_same and grams[row, i] == gram[i]
            count += 1
            if is_same or count == guesses:
                is_found = is_found and (are_found[row] or not is_same)
                if before < 0:
                    newest[bucket] = older[row]
                else:
                    older[before] = older[row]
                break
        before, seq = row, older[row]
    row = number % capacity
    grams[row] = gram
    are_found[row] = is_found
    older[row] = newest[bucket]
    newest[bucket] = number
    counter[0] = number + 1


@njit(cache=True, nogil=True)
def insert_text(pool, guesses, token_ids):  # type: ignore[no-untyped-def]
    """Inserts all n-grams of a text, in order. Those that the ring would overwrite again are skipped."""
    capacity, ngram = pool[0].shape
    count = token_ids.shape[0] - ngram + 1
    for i in range(max(0, count - capacity), count):
        insert_gram(pool, guesses, token_ids[i : i + ngram], False)


@njit(cache=True, nogil=True)
def _draw(recent, shape):  # type: ignore[no-untyped-def]
    """Returns the next of a fixed sequence of pseudo-random tokens of the text."""
    shape[DRAWN] += 1
    mixed = np.uint64(shape[DRAWN]) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    return recent[np.int64(mixed >> np.uint64(1)) % recent.shape[0]]


@njit(cache=True, nogil=True)
def open_window(window, recent):  # type: ignore[no-untyped-def]
    """Fills level 0: the last token, then random tokens of `recent`, in as many columns as all levels will use up."""
    tokens, is_true, shape = window
    shape[HEIGHT], shape[COMPUTED] = 1, 0
    for j in range(tokens.shape[1]):
        tokens[0, j] = _draw(recent, shape)
        is_true[0, j] = False
    tokens[0, 0] = recent[-1]


@njit(cache=True, nogil=True)
def _collect(pool, guesses, window, following):  # type: ignore[no-untyped-def]
    """Adds the finished trajectories to the pool, the nearest last, because a nearer one had a better context."""
    tokens, is_true, shape = window
    levels = tokens.shape[0]
    gram = np.empty(levels + 1, np.int32)
    for j in range(shape[COMPUTED] - 1, -1, -1):
        is_trajectory = following[j] >= 0
        for level in range(1, levels):
            is_trajectory = is_trajectory and is_true[level, j]
        if is_trajectory:
            gram[:levels] = tokens[:, j]
            gram[levels] = following[j]
            insert_gram(pool, guesses, gram, True)


@njit(cache=True, nogil=True)
def roll_window(pool, guesses, window, following, recent, accepted):  # type: ignore[no-untyped-def]
    """Moves the window past the `accepted` tokens [m], m >= 1, and extends its trajectories.

    following int32 [columns] is the model's next token of the first shape[COMPUTED] trajectories; -1 is unknown. Once
    there are N - 1 levels, the completed n-grams are collected and the oldest level is dropped. Before that, a level is
    added and a column given up. Every token keeps its position in the text, so all columns move left by m - 1 or m.
    Columns left empty on the right get random tokens, which are never collected except as the first token of an n-gram.
    """
    tokens, is_true, shape = window
    levels, height, computed = tokens.shape[0], shape[HEIGHT], shape[COMPUTED]
    max_columns = tokens.shape[1] + 1
    width = max_columns - height
    is_full = height == levels
    if is_full:
        _collect(pool, guesses, window, following)
    drop = 1 if is_full else 0
    grown = height if is_full or computed == 0 else height + 1
    # Every source is right of or below its target, so this works in place.
    for j in range(max_columns - grown):
        at, old = j + accepted.shape[0] - drop, j + accepted.shape[0]
        for level in range(grown):
            if at < computed and level + drop == height:
                tokens[level, j], is_true[level, j] = following[at], True
            elif at < computed:
                tokens[level, j], is_true[level, j] = tokens[level + drop, at], is_true[level + drop, at]
            elif old < width and level < height:  # not computed in this step, so it only moves
                tokens[level, j], is_true[level, j] = tokens[level, old], is_true[level, old]
            else:
                tokens[level, j], is_true[level, j] = _draw(recent, shape), False
    tokens[0, 0] = accepted[-1]
    shape[HEIGHT], shape[COMPUTED] = grown, 0


@njit(cache=True, nogil=True)
def _merge(pool, guesses, last, max_depth, nodes, weights):  # type: ignore[no-untyped-def]
    """Merges token `last`'s n-grams by prefix into nodes [token, parent, whether found]; returns their number.

    A node's weight is its path probability: the sum over its n-grams, where newer ones count more and deeper tokens
    less. A child weighs less than its parent. A node counts as found (by the window alone) if all of its n-grams do.
    """
    grams, older, newest, counter, are_found = pool
    capacity, num_nodes, weight, total = grams.shape[0], 0, 1.0, 0.0
    oldest = max(0, counter[0] - capacity)
    seq, count = newest[_bucket(last, newest.shape[0])], 0
    while seq >= oldest and count < guesses:
        row = seq % capacity
        if grams[row, 0] == last:
            parent, share = -1, weight
            for level in range(1, min(grams.shape[1], max_depth + 1)):
                share *= HIT
                node = 0
                while node < num_nodes and (nodes[0, node] != grams[row, level] or nodes[1, node] != parent):
                    node += 1
                if node == num_nodes:
                    nodes[0, node], nodes[1, node], nodes[2, node], weights[node] = grams[row, level], parent, 1, 0.0
                    num_nodes += 1
                weights[node] += share
                nodes[2, node] &= are_found[row]
                parent = node
            total += weight
            weight *= RECENCY
            count += 1
        seq = older[row]
    for node in range(num_nodes):
        weights[node] /= total
    return num_nodes


@njit(cache=True, nogil=True)
def _write_candidates(num_nodes, most, nodes, weights, tree):  # type: ignore[no-untyped-def]
    """Writes the `most` likeliest nodes in depth-first order, likelier siblings first; returns their number."""
    token_ids, parents, probs, are_found = tree
    order, first, following = nodes[3], nodes[4], nodes[5]
    for i in range(num_nodes):  # by descending weight, so parents come before children
        at = i
        while at > 0 and weights[order[at - 1]] < weights[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    kept = min(num_nodes, most)
    first[: num_nodes + 1] = -1  # first[i + 1]: node i's first child
    for i in range(kept - 1, -1, -1):
        node = order[i]
        following[node] = first[nodes[1, node] + 1]
        first[nodes[1, node] + 1] = node
    place = order  # `order` is not needed any more
    count, node = 0, first[0]
    while node >= 0:
        place[node] = count
        token_ids[count], probs[count], are_found[count] = nodes[0, node], weights[node], nodes[2, node]
        parents[count] = place[nodes[1, node]] if nodes[1, node] >= 0 else -1
        count += 1
        if first[node + 1] >= 0:
            node = first[node + 1]
            continue
        while node >= 0 and following[node] < 0:
            node = nodes[1, node]
        node = following[node] if node >= 0 else -1
    return count


@njit(cache=True, nogil=True)
def draft(pool, guesses, window, max_tokens, max_depth, max_row_depth, nodes, weights, tree):  # type: ignore[no-untyped-def]
    """Writes a tree: the candidates, then as many whole columns of the window as fit.

    tree is (token_ids, parents, probs, are_found), arrays that are long enough for both; are_found is filled for
    candidates only. Returns the numbers of candidate nodes, of all nodes and of columns.
    """
    tokens, _, shape = window
    token_ids, parents, probs, _ = tree
    height = shape[HEIGHT]
    num_nodes = _merge(pool, guesses, tokens[0, 0], max_depth, nodes, weights)
    num_verified = _write_candidates(num_nodes, max_tokens, nodes, weights, tree)
    # Token (0, 0) is the request's last token, which already has a row.
    columns = min(tokens.shape[1] + 1 - height, (max_tokens - num_verified + 1) // height, max_row_depth - height + 2)
    if columns * height <= 1:
        return num_verified, num_verified, 0
    count = num_verified
    for level in range(height):
        for j in range(columns):
            if level == 0 and j == 0:
                continue
            if level == 0:
                parent = count - 1 if j > 1 else -1
            elif level == 1:
                parent = num_verified + j - 1 if j > 0 else -1
            else:
                parent = count - columns
            token_ids[count], parents[count], probs[count] = tokens[level, j], parent, 0.0
            count += 1
    return num_verified, count, columns
