"""The compiled part of the adaptive decoding length: what nodes are worth, and which prefix of them to buy."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import math

import numpy as np
from numba import njit

LEAST_PROB, MOST_PROB = 1e-4, 0.995  # nothing is certain
LEAST_ROW_COST = 0.01  # of a step without drafts, over its requests: no row is quite free, whatever a flat table says


@njit(cache=True, nogil=True)
def log_odds(prob):  # type: ignore[no-untyped-def]
    bounded = min(MOST_PROB, max(LEAST_PROB, prob))
    return math.log(bounded / (1.0 - bounded))


@njit(cache=True, nogil=True)
def correct(sums, prior, shifts):  # type: ignore[no-untyped-def]
    """Fill shifts [num depth bins, num claim bins]: by how much the truth's log odds differ from the claims'.

    sums [3, num depth bins, num claim bins]: edges counted, the sum of what was claimed of them, how many came true.
    """
    for depth in range(shifts.shape[0]):
        for i in range(shifts.shape[1]):
            above = shifts[depth - 1, i] if depth > 0 else 0.0
            count = sums[0, depth, i]
            if count == 0.0:
                shifts[depth, i] = above
                continue
            claim = log_odds(sums[1, depth, i] / count)
            expected = 1.0 / (1.0 + math.exp(-(claim + above)))
            shifts[depth, i] = log_odds((sums[2, depth, i] + prior * expected) / (count + prior)) - claim


@njit(cache=True, nogil=True)
def weigh_nodes(starts, parents, probs, depth_bins, prob_bounds, shifts, which, own, places, claims, edges, paths):  # type: ignore[no-untyped-def]
    """Calibrate all trees of a step; tree i has the nodes from starts[i] to starts[i + 1], and the owner i.

    parents: inside the tree, -1 for its root; probs: path probabilities as claimed; depth_bins: the bin of each depth
    (the last for all beyond); prob_bounds: of the bins of claims; shifts [num_drafters, num depth bins, num claim bins]
    and own [num_requests]: corrections in log odds; which [num_requests]: each one's drafter. Fills, all [num_nodes]:
    places (depth bin * num claim bins + claim bin), claims and edges (of a node given its parent, as claimed and
    calibrated), paths (calibrated). Returns -1, or a node whose parent does not come before it.
    """
    num_probs = len(prob_bounds) + 1
    depths = np.empty(len(parents), np.int64)
    for i in range(len(starts) - 1):
        start = starts[i]
        for node in range(start, starts[i + 1]):
            if not -1 <= parents[node] < node - start:
                return node - start
            parent = parents[node] + start if parents[node] >= 0 else -1
            depths[node] = depths[parent] + 1 if parent >= 0 else 1
            above = probs[parent] if parent >= 0 else 1.0
            claim = min(1.0, max(0.0, probs[node] / max(above, 1e-12)))
            depth_bin = depth_bins[min(depths[node], len(depth_bins) - 1)]
            prob_bin = np.searchsorted(prob_bounds, claim)
            odds = log_odds(claim) + shifts[which[i], depth_bin, prob_bin] + own[i]
            edge = 1.0 / (1.0 + math.exp(-odds))
            places[node] = depth_bin * num_probs + prob_bin
            claims[node], edges[node] = claim, edge
            paths[node] = edge * (paths[parent] if parent >= 0 else 1.0)
    return -1


@njit(cache=True, nogil=True)
def seconds_at(table, load, more_rows, more_attended):  # type: ignore[no-untyped-def]
    """Seconds of a step that has so many more sampled rows and attended pairs; see step_time.py for both tuples.

    Python runs it, too (py_func, with lists for arrays): there is one formula, and no step waits for a compiler.
    """
    knots, seconds, shape, per_request, per_logit_row, per_context, per_attended, log_factor = table
    num_rows, num_logit_rows, num_requests, context, attended = load
    rows = num_rows + more_rows
    last = len(knots) - 1
    high = min(1, last)
    while high < last and knots[high] < rows:
        high += 1
    low = max(0, high - 1)
    if last == 0:
        share, rise, bend = rows / knots[0] - 1.0, seconds[0], 0.0
    else:
        share = (rows - knots[low]) / (knots[high] - knots[low])
        rise, bend = seconds[high] - seconds[low], shape[high] - shape[low]
    share = max(0.0, share)
    base = max(seconds[low] + share * rise - per_logit_row * (num_rows - num_logit_rows), seconds[0])
    fixed = per_request * max(0.0, num_requests - 1.0) + per_context * context
    total = base + fixed + per_attended * (attended + more_attended)
    return total * math.exp(log_factor + shape[low] + min(1.0, share) * bend)


@njit(cache=True, nogil=True)
def buy(owners, gains, rows, bidders, table, load, market, chosen):  # type: ignore[no-untyped-def]
    """Mark in `chosen` the items to buy; see draft_budget.choose_drafts, whose arguments these are, as tuples."""
    contexts, urgency, ahead_s, grace_s = bidders
    price, row_s, attended_s, max_rows, longest_s, never_longer_s = market
    num_items, num_requests = len(owners), len(contexts)
    values = np.empty(num_items)
    order_by = np.empty(num_items)
    for i in range(num_items):
        values[i] = gains[i] * urgency[owners[i]]
        order_by[i] = -values[i] / (rows[i] * (row_s + attended_s * contexts[owners[i]]))
    order = np.argsort(order_by, kind="mergesort")  # stable: a child that is as good as its parent stays behind it
    without_s = seconds_at(table, load, 0.0, 0.0)
    given = np.ones(num_requests)
    worth, best_worth, best, num_rows, attended = 0.0, 0.0, 0, 0, 0.0
    for k in range(num_items):
        item = order[k]
        owner = owners[item]
        num_rows += rows[item]
        if num_rows > max_rows:
            break
        attended += rows[item] * contexts[owner]
        given[owner] += gains[item]
        worth += values[item]
        # Where the table is flat a row still costs a little: its sampling, its mask, its K/V.
        step_s = seconds_at(table, load, num_rows, attended)
        step_s = max(step_s, without_s * (1.0 + LEAST_ROW_COST * num_rows / num_requests))
        is_fair, is_everybody_ahead = True, True
        for i in range(num_requests):
            # Whoever is given g tokens in a step of t seconds would have needed g x without_s for them.
            ahead = ahead_s[i] + given[i] * without_s - step_s
            is_everybody_ahead = is_everybody_ahead and ahead >= 0.0
            is_fair = is_fair and ahead + grace_s[i] >= 0.0
        is_short = step_s <= longest_s or (is_everybody_ahead and step_s <= never_longer_s)
        profit = worth - price * (step_s - without_s)
        if is_fair and is_short and profit > best_worth:
            best_worth, best = profit, k + 1
    for k in range(best):
        chosen[order[k]] = True


def compile_kernels() -> None:
    """Compile every kernel, or load it from the cache on disk."""
    one, zeros = np.ones(1), np.zeros(1)
    indices = np.zeros(1, np.int64)
    shifts, places, results = np.zeros((1, 1, 2)), indices.copy(), np.zeros((3, 1))
    correct(np.zeros((3, 1, 2)), 1.0, shifts[0])
    starts = np.array([0, 1])
    weigh_nodes(starts, indices - 1, one, indices, one, shifts, indices, zeros, places, *results)
    table = (one, one, zeros, 0.0, 0.0, 0.0, 0.0, 0.0)
    load, market = (1.0, 1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 0.0, 1, 1.0, 1.0)
    buy(indices, one, np.ones(1, np.int64), (zeros, one, zeros, one), table, load, market, np.zeros(1, np.bool_))
