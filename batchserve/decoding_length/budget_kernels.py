"""The compiled part of the adaptive decoding length: what nodes are worth, and which prefix of them to buy."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import math

import numpy as np

from batchserve.decoding_length import time_kernels
from batchserve.decoding_length.time_kernels import ATTENDED, LOG_FACTOR, NUM_SLOPES, seconds_at
from batchserve.draft.forest import FORCED
from batchserve.native.jit import njit

MIN_PROB, MAX_PROB = 1e-4, 0.995  # nothing that a drafter claims is certain
CERTAIN = 1.0  # the edge to a forced node, which says nothing of its drafter
PRIOR, REQUEST_PRIOR = 2.0, 6.0  # edges, of a drafter's claim, and of a request
CHANCE = 0.5  # what is so many variances off what was expected is half believed
MEMORY, REQUEST_MEMORY = 1000.0, 64.0  # edges that are remembered of a drafter's claim, and of a request
TALLY_MEMORY = 100_000.0  # of a drafter in all: how well it is calibrated lately, not since the start
CLOSED = -2  # of a tree that the truth has left
# Whoever is less behind than so many steps without drafts counts as even. Everybody is new once, and in a large batch
# there is always one who has not been drafted well yet: all others would wait for him.
EVEN_STEPS = 4.0
MIN_ROW_COST = 0.0003  # of a step without drafts: no row is quite free, whatever a flat table says
SPAN = 16  # draft rows whose mean is what one costs


@njit(cache=True, nogil=True)
def log_odds(prob):  # type: ignore[no-untyped-def]
    bounded = min(MAX_PROB, max(MIN_PROB, prob))
    return math.log(bounded / (1.0 - bounded))


@njit(cache=True, nogil=True)
def evident(count, prob, hits):  # type: ignore[no-untyped-def]
    """How much of the difference between `hits` of `count` edges and what was expected of them is not chance, 0 to 1.

    A drafter that knows its odds is not corrected by noise, and one that does not is found out in a few edges.
    """
    squared = (hits - count * prob) ** 2
    return squared / (squared + CHANCE * count * prob * (1.0 - prob))


@njit(cache=True, nogil=True)
def _correct(sums, shifts, is_stale):  # type: ignore[no-untyped-def]
    """Fill shifts [num_drafters, num depth bins, num claim bins]: how far the truth's log odds are off the claims'.

    sums [num_drafters, 3, num places]: see score_trees. Only where is_stale [num_drafters, num claim bins], which ends.

    In log odds, because a factor that doubles small probabilities would make certainties of large ones. What is
    believed of a depth before it is known is what the depth above it has shown: a chain whose first token is always
    wrong never lets its second be tried.
    """
    for drafter in range(shifts.shape[0]):
        for i in range(shifts.shape[2]):
            if not is_stale[drafter, i]:
                continue
            is_stale[drafter, i] = False
            above = 0.0
            for depth in range(shifts.shape[1]):
                counted, claimed, hits = sums[drafter, :, depth * shifts.shape[2] + i]
                if counted > 0.0:
                    claim = log_odds(claimed / counted)
                    expected = 1.0 / (1.0 + math.exp(-(claim + above)))
                    found = log_odds((hits + PRIOR * expected) / (counted + PRIOR)) - claim
                    above += evident(counted, expected, hits) * (found - above)
                shifts[drafter, depth, i] = above


@njit(cache=True, nogil=True)
def own_shift(record):  # type: ignore[no-untyped-def]
    """By how much one request's truth differs in log odds from what was expected of it.

    record [3]: edges counted, the sum of their calibrated probabilities, how many came true.
    """
    count, expected, hits = record[0], record[1], record[2]
    if count == 0.0:
        return 0.0
    mean = min(MAX_PROB, max(MIN_PROB, expected / count))
    shift = log_odds((hits + REQUEST_PRIOR * mean) / (count + REQUEST_PRIOR)) - log_odds(mean)
    return evident(count, mean, hits) * shift


@njit(cache=True, nogil=True)
def weigh_nodes(starts, parents, probs, bins, books, who, links, results, trees):  # type: ignore[no-untyped-def]
    """Calibrate all trees of a step; tree i has the nodes from starts[i] to starts[i + 1].

    parents: inside the tree, -1 for its root; probs: path probabilities as claimed, or FORCED. bins: the depth bin of
    each depth (the last for all beyond), and the bounds of the bins of claims. books: sums, shifts and is_stale of
    _correct. who: the slots of all requests of the step, the place of each tree's among them, and by slot drafter_of
    and records [num_slots, 3] (see own_shift).

    Fills links [3, num_nodes]: columns (depth bin * num claim bins + claim bin), owners (places), ones; results [3,
    num_nodes]: claims and edges (of a node given its parent, as claimed and calibrated), paths (calibrated); trees [2,
    num_trees]: slots, and what is reached (see score_trees). Returns -1, or a node whose parent does not come before.
    """
    depth_bins, prob_bounds = bins
    sums, shifts, is_stale = books
    slots, places, drafter_of, records = who
    _correct(sums, shifts, is_stale)
    claims, edges, paths = results[0], results[1], results[2]
    num_probs = len(prob_bounds) + 1
    depths, claimed = np.empty(len(parents), np.int64), np.empty(len(parents))
    for i in range(len(places)):
        start, slot = starts[i], slots[places[i]]
        drafter, own = drafter_of[slot], own_shift(records[slot])
        trees[0, i], trees[1, i] = slot, -1 if start < starts[i + 1] else CLOSED
        for node in range(start, starts[i + 1]):
            if not -1 <= parents[node] < node - start:
                return node - start
            parent = parents[node] + start if parents[node] >= 0 else -1
            depths[node] = depths[parent] + 1 if parent >= 0 else 1
            above = claimed[parent] if parent >= 0 else 1.0
            claimed[node] = above if probs[node] == FORCED else probs[node]
            claim = min(1.0, max(0.0, claimed[node] / max(above, 1e-12)))
            depth_bin = depth_bins[min(depths[node], len(depth_bins) - 1)]
            prob_bin = np.searchsorted(prob_bounds, claim)
            odds = log_odds(claim) + shifts[drafter, depth_bin, prob_bin] + own
            edge = CERTAIN if probs[node] == FORCED else 1.0 / (1.0 + math.exp(-odds))
            links[0, node], links[1, node], links[2, node] = depth_bin * num_probs + prob_bin, places[i], 1
            claims[node], edges[node] = claim, edge
            paths[node] = edge * (paths[parent] if parent >= 0 else 1.0)
    return -1


@njit(cache=True, nogil=True)
def score_trees(  # type: ignore[no-untyped-def]
    trees, starts, token_ids, parents, links, results, given, token_starts, tokens, drafter_of, records, books
):
    """Walk every open tree on along the tokens that its request was given; returns how many trees are open still.

    The first six are what was offered in one step: see weigh_nodes. trees[1] is the node (inside the tree) that the
    truth has come to: -1 its root, CLOSED when there is nothing more to come. given [num_requests]: the slots that were
    given tokens, those from token_starts[i] to token_starts[i + 1]. Every child of a node on the way counts into the
    books: sums [num_drafters, 3, num columns] (edges, their claims, hits), tallies [num_drafters, 3, 10] (the same by
    tenths of calibrated probability) and tested [num_drafters, 2, num depth bins]; and into records. What sums have
    changed is marked in is_stale [num_drafters, num claim bins].
    """
    sums, tallies, tested, is_stale = books
    slots, reached, columns = trees[0], trees[1], links[0]
    num_probs, own = is_stale.shape[1], records.reshape(len(records), 3, 1)
    where = np.full(len(records), -1)
    for i in range(len(given)):
        if given[i] < len(where):  # the others were never drafted
            where[given[i]] = i
    num_open = 0
    for tree in range(len(slots)):
        at, slot, start, end = reached[tree], slots[tree], starts[tree], starts[tree + 1]
        place = where[slot]
        if at != CLOSED and place >= 0:
            drafter = drafter_of[slot]
            for k in range(token_starts[place], token_starts[place + 1]):
                above, at, has_children = at, CLOSED, False
                for node in range(start + above + 1, end):
                    if parents[node] != above:
                        has_children = has_children or (at != CLOSED and parents[node] == at)
                        continue
                    is_hit = token_ids[node] == tokens[k]
                    column, edge = columns[node], results[1, node]
                    if is_hit:
                        at = node - start
                    if edge == CERTAIN:
                        continue
                    is_stale[drafter, column % num_probs] = True
                    _count(sums, drafter, column, results[0, node], is_hit, MEMORY)
                    _count(own, slot, 0, edge, is_hit, REQUEST_MEMORY)
                    _count(tallies, drafter, min(9, int(edge * 10)), edge, is_hit, np.inf)
                    tested[drafter, 0, column // num_probs] += 1
                    tested[drafter, 1, column // num_probs] += is_hit
                if not has_children:
                    at = CLOSED
                    break
        reached[tree] = at
        num_open += at != CLOSED
    for drafter in range(len(tallies)):
        if tallies[drafter, 0].sum() > TALLY_MEMORY:  # all tenths at once: they weigh what they have of the edges
            tallies[drafter] *= 0.5
    return num_open


@njit(cache=True, nogil=True, inline="always")
def _count(books, book, column, prob, is_hit, memory):  # type: ignore[no-untyped-def]
    """One more edge in a book of books [num_books, 3, num columns]: edges, their probabilities, hits.

    What is old counts less.
    """
    books[book, 0, column] += 1.0
    books[book, 1, column] += prob
    books[book, 2, column] += is_hit
    if books[book, 0, column] > memory:
        for i in range(3):
            books[book, i, column] *= 0.5


@njit(cache=True, nogil=True)
def price_step(table, load, alone):  # type: ignore[no-untyped-def]
    """Seconds of a step without drafts, of its decoding rows alone, and of one more row: draft_budget.Market.open."""
    without_s, alone_s = seconds_at(table, load, 0.0, 0.0), seconds_at(table, alone, 0.0, 0.0)
    num_rows, num_logit_rows, num_requests, context, attended = load
    more = (num_rows + SPAN, num_logit_rows + SPAN, num_requests, context, attended)
    min_row_s = MIN_ROW_COST * alone_s
    return without_s, alone_s, max((seconds_at(table, more, 0.0, 0.0) - without_s) / SPAN, min_row_s), min_row_s


@njit(cache=True, nogil=True)
def buy(offer, bidders, table, load, market, chosen):  # type: ignore[no-untyped-def]
    """Mark in `chosen`, all False, the items to buy.

    offer: draft_budget.DraftOffer as a plain tuple. bidders, the decoding requests by place: contexts int64
    [num_requests], K/V entries that a row of each attends to, and bids float64 [3, num_requests]: urgency, what one of
    its tokens counts; how many seconds drafts have gained it so far; and its grace, how many it may fall behind for the
    sake of others. table: StepTimeModel.arrays; load: StepLoad as a plain tuple; market: Market.terms.

    Items are ordered by urgency x gain over cost, and of all prefixes of at most max_rows rows that one is taken which
    maximises sum(urgency x gain) - price x time, among those that keep the step within its bounds and leave nobody
    further behind than his grace: of whoever is behind already, even if his own drafts bring nothing. A bundle that
    would break one of these bounds where its turn comes is left out if that brings more. Nodes that are sure to be
    accepted are always fair: a later step is spared their rows.
    """
    (owners, gains, rows), (contexts, bids) = offer, bidders
    if not len(owners) or market[3] < 1:
        return
    row_s = market[1]
    attended_s = table[3][ATTENDED] * math.exp(table[3][LOG_FACTOR])
    num_items = len(owners)
    values = np.empty(num_items)
    order_by = np.empty(num_items)
    for i in range(num_items):
        values[i] = gains[i] * bids[0, owners[i]]
        order_by[i] = -values[i] / (rows[i] * (row_s + attended_s * contexts[owners[i]]))
    order = np.argsort(order_by, kind="mergesort")  # stable: a child that is as good as its parent stays behind it
    what = (order, owners, gains, rows, values)
    is_left_out = np.zeros(num_items, np.bool_)
    worth, best = _best_prefix(what, bidders, table, load, market, False, is_left_out)
    if rows.max() > 1:
        # Bundles may be fair only together, or one of them may stand in the way of all that is behind it.
        without = np.zeros(num_items, np.bool_)
        other_worth, other_best = _best_prefix(what, bidders, table, load, market, True, without)
        if other_worth > worth:
            best, is_left_out = other_best, without
    for k in range(best):
        chosen[order[k]] = not is_left_out[order[k]]


@njit(cache=True, nogil=True)
def _best_prefix(what, bidders, table, load, market, is_leaving_out, is_left_out):  # type: ignore[no-untyped-def]
    """What the best prefix of the order is worth, and its length.

    Marks what is left out of it: bundles that there are too many rows or too little time for, and where is_leaving_out
    also those that somebody would pay for where their turn comes.
    """
    order, owners, gains, rows, values = what
    contexts, bids = bidders
    ahead_s, grace_s = bids[1], bids[2]
    price, _, min_row_s, max_rows, prompts_s, longest_s, never_longer_s = market
    num_requests = len(contexts)
    without_s = seconds_at(table, load, 0.0, 0.0)
    given = np.ones(num_requests)
    worth, best_worth, best, num_rows, attended, is_certain = 0.0, 0.0, 0, 0, 0.0, True
    for k in range(len(order)):
        item = order[k]
        owner = owners[item]
        if num_rows + rows[item] > max_rows:
            if rows[item] == 1:
                break
            is_left_out[item] = True
            continue
        num_rows += rows[item]
        attended += rows[item] * contexts[owner]
        given[owner] += gains[item]
        worth += values[item]
        is_certain = is_certain and gains[item] == CERTAIN
        # Where the table is flat a row still costs a little.
        step_s = max(seconds_at(table, load, num_rows, attended), without_s + min_row_s * num_rows)
        # Prompts make no draft unfair: what counts is what the step would take without them.
        decode_s, alone_s = step_s - prompts_s, without_s - prompts_s
        is_fair, is_good_for_all = True, True
        for i in range(num_requests):
            # Whoever is given g tokens in a step of t seconds would have needed g x alone_s for them. He gains in this
            # step, or is even or ahead behind it.
            gain = given[i] * alone_s - decode_s
            ahead = ahead_s[i] + gain
            is_good_for_all = is_good_for_all and max(gain, ahead + EVEN_STEPS * alone_s) >= 0.0
            # Whoever is behind already is not held to gains that may not come.
            sure = ahead if ahead_s[i] >= 0.0 else ahead_s[i] + alone_s - decode_s
            is_fair = is_fair and sure + grace_s[i] >= 0.0
        is_in_time = step_s <= never_longer_s
        is_allowed = (is_fair or is_certain) and is_in_time and (decode_s <= longest_s or is_good_for_all)
        profit = worth - price * (step_s - without_s)
        if is_allowed and profit > best_worth:
            best_worth, best = profit, k + 1
        elif rows[item] > 1 and (not is_in_time or (is_leaving_out and not is_allowed)):
            is_left_out[item] = True
            num_rows -= rows[item]
            attended -= rows[item] * contexts[owner]
            given[owner] -= gains[item]
            worth -= values[item]
    return best_worth, best


def compile_kernels() -> None:
    """Compile every kernel, those of the step times too, or load them from the cache on disk."""
    time_kernels.compile_kernels()
    one, zeros = np.ones(1), np.zeros(1)
    indices = np.zeros(1, np.int64)
    shifts, results, records = np.zeros((1, 1, 2)), np.zeros((3, 1)), np.zeros((1, 3))
    links = np.zeros((3, 1), np.int64)
    starts, trees, is_stale = np.array([0, 1]), np.zeros((2, 1), np.int64), np.zeros((1, 2), np.bool_)
    who = (indices, indices, indices, records)
    weigh_nodes(
        starts, indices - 1, one, (indices, one), (np.zeros((1, 3, 2)), shifts, is_stale), who, links, results, trees
    )
    books = np.zeros((1, 3, 2)), np.zeros((1, 3, 10)), np.zeros((1, 2, 1), np.int64), is_stale
    offered = (trees, starts, indices, indices - 1, links, results)
    score_trees(*offered, indices, starts, indices, indices, records, books)
    table, load = (one, one, zeros, np.zeros(NUM_SLOPES)), (1, 1, 1, 0, 0)
    price_step(table, load, load)
    offer, bidders, market = (indices, one, starts[1:]), (indices, np.ones((3, 1))), (1.0, 1.0, 1.0, 1, 0.0, 1.0, 1.0)
    buy(offer, bidders, table, load, market, np.zeros(1, np.bool_))
