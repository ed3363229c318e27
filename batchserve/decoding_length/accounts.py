"""How each request stands with its drafts: what is asked of its drafter, which rows it gets, what they have gained it.

A row of a table for every request, so that a step is noted for all of them in one call of compiled code.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import math

import numpy as np

from batchserve.decoding_length import budget_kernels
from batchserve.decoding_length.budget_kernels import buy, own_shift
from batchserve.decoding_length.time_kernels import NUM_SLOPES
from batchserve.native.jit import njit

# What is asked for: some nodes, and a multiple of what is bought lately. Where rows are cheap, worth running at a lower
# probability than CHEAP_ROW, that is more from the start, and rises at once: most answers are short. Where they are
# dear whoever believes a long chain that is wrong takes rows from all others.
FEW_NODES, GROWTH, MAX_NODES = 8, 3.0, 1 << 20
MORE_NODES, CHEAP_ROW = 16, 0.1
CHOSEN_RATE = 0.2
MIN_GAIN = 0.1  # expected tokens: fewer are not worth asking for, let alone their rows
MAX_URGENCY, URGENCY_UP, URGENCY_DOWN = 16.0, 1.05, 0.98
TPOT_RATE = 0.1
# What a request may lose to the drafts of others: so much of its steps, and so many steps. Less than the second costs
# everybody some of what drafts gain, as every request is new once.
MAX_LOSS, GRACE_STEPS = 0.04, 8.0
# Whoever is as far behind as he may be has his tokens counted so many times more: what holds up all others is worth it.
CATCHING_UP = 4.0

ACCOUNT = np.dtype(
    [
        ("tpot_target_s", np.float64),  # infinite: none
        ("urgency", np.float64),  # what one of its tokens counts
        ("step_s", np.float64),  # smoothed, as what its steps give; apart, for a mean of ratios is no mean time
        ("step_tokens", np.float64),
        ("num_steps", np.int64),
        ("num_chosen", np.float64),  # nodes, smoothed
        ("most_chosen", np.float64),  # the same, but rises at once
        ("ahead", np.float64),  # steps without drafts that it is ahead of decoding without any
        ("has_window", np.int64),  # of a drafter that has one
    ],
    align=True,
)
NEW_ACCOUNT = np.array((np.inf, 1.0, 0.0, 0.0, 0, 0.0, 0.0, 0.0, 0), ACCOUNT)


def grown(table: np.ndarray, size: int) -> np.ndarray:
    """The table with room for `size` requests, of which nothing is known where it is new."""
    return np.concatenate((table, np.full(max(0, size - len(table)), NEW_ACCOUNT)))


@njit(cache=True, nogil=True, inline="always")
def _grace(request):  # type: ignore[no-untyped-def]
    """How many steps without drafts it may fall behind."""
    return GRACE_STEPS + MAX_LOSS * request.num_steps


@njit(cache=True, nogil=True, inline="always")
def _weight(request):  # type: ignore[no-untyped-def]
    """What one of its tokens counts in this step."""
    behind = min(1.0, max(0.0, -request.ahead / _grace(request)))
    return request.urgency * (1.0 + CATCHING_UP * behind)


@njit(cache=True, nogil=True)
def bound_queries(table, records, slots, worth, bounds, min_probs):  # type: ignore[no-untyped-def]
    """Lower bounds[:, 0], the most nodes to ask for, and fill the least path probability, as it is claimed.

    For the requests at `slots`; records: see budget_kernels.own_shift; worth: the calibrated probability that is worth
    a row, and the most rows that the step can take: what is found beyond takes time for nothing.
    """
    (least, max_rows), asked = worth, 0
    for i in range(len(slots)):
        request, shift = table[slots[i]], own_shift(records[slots[i]])
        most = int(FEW_NODES + GROWTH * request.num_chosen)
        if least < CHEAP_ROW:
            most = int(MORE_NODES + GROWTH * request.most_chosen)
        if request.has_window:
            most = MAX_NODES
        bounds[i, 0] = min(bounds[i, 0], most)
        if request.has_window:
            max_rows -= bounds[i, 0]
        else:
            asked += bounds[i, 0]
        min_probs[i] = min(0.5, least / _weight(request) * math.exp(-max(0.0, shift)))
    share = max(0.0, max_rows) / max(1, asked)
    for i in range(len(slots)):
        if share < 1.0 and not table[slots[i]].has_window:
            bounds[i, 0] = min(bounds[i, 0], max(FEW_NODES, int(share * bounds[i, 0])))


@njit(cache=True, nogil=True)
def make_bids(table, slots, alone_s, spent_s, bids):  # type: ignore[no-untyped-def]
    """Fill bids [3, num_requests] as budget_kernels.buy takes them, for the requests at `slots`.

    alone_s: of the step without drafts; spent_s: what drafting has taken of it, which nobody has any more. A request
    with a target that it misses is urgent beside others only: where all are, or there is but one, what is best for all
    is best for each, and rows hardly ever right would slow everybody.
    """
    mean = 0.0
    for i in range(len(slots)):
        mean += table[slots[i]].urgency / len(slots)
    for i in range(len(slots)):
        request = table[slots[i]]
        bids[0, i] = _weight(request) / mean
        bids[1, i] = request.ahead * alone_s - spent_s
        bids[2, i] = _grace(request) * alone_s


@njit(cache=True, nogil=True)
def drop_unprofitable(table, slots, places, offer, bounds, chosen, is_paying):  # type: ignore[no-untyped-def]
    """Give back what is chosen for requests that gain too little by all of it.

    table, slots, places, offer: see choose_drafts. bounds: the tokens that a request must gain by more than, those that
    a row must bring, and the rows that the step has room for. Fills is_paying [num_bidders], and notes how many rows
    were chosen. Of a full step, the drafter of whoever would gain enough by rows that bring enough pays, and that few
    of them were chosen says nothing.
    """
    (owners, gains, rows), (min_gain, worth_a_row, room) = offer, bounds
    expected, count, wanted = np.zeros(len(slots)), np.zeros(len(slots)), np.zeros(len(slots))
    for i in range(len(owners)):
        if chosen[i]:
            expected[owners[i]] += gains[i]
            count[owners[i]] += rows[i]
    if count.sum() + 1 > room:
        for i in range(len(owners)):
            if gains[i] > worth_a_row * rows[i]:
                wanted[owners[i]] += gains[i]
    for place in places:
        request = table[slots[place]]
        is_paying[place] = expected[place] > min_gain
        bought = count[place] if is_paying[place] else 0.0
        if wanted[place] > min_gain:
            is_paying[place], bought = True, max(count[place], request.num_chosen)
        request.num_chosen += CHOSEN_RATE * (bought - request.num_chosen)
        request.most_chosen = max(bought, request.most_chosen + CHOSEN_RATE * (bought - request.most_chosen))
    for i in range(len(owners)):
        chosen[i] = chosen[i] and is_paying[owners[i]]


@njit(cache=True, nogil=True)
def choose_drafts(table, slots, places, contexts, offer, step_time, prices, chosen, is_paying):  # type: ignore[no-untyped-def]
    """Which items to run: marks them in `chosen`, all False, and in is_paying [num_bidders] whose drafter paid.

    The bidders are at `slots` of the table, those that were drafted are at `places` among them; contexts, offer and
    step_time: see budget_kernels.buy. prices: the step's load and market, as there; and the seconds of its decoding
    rows alone, and those that drafting has taken.
    """
    load, market, (alone_s, draft_s) = prices
    price, row_s, _, max_rows, prompts_s, _, never_longer_s = market
    bids = np.empty((3, len(slots)))
    make_bids(table, slots, alone_s, draft_s, bids)
    buy(offer, (contexts, bids), step_time, load, market, chosen)
    # Where one row more would have been too many, whoever has drafts that are worth theirs is not to blame.
    room = min(float(max_rows), (never_longer_s - (alone_s + prompts_s)) / row_s)
    bounds = max(MIN_GAIN, price * draft_s / len(places)), price * row_s, room
    drop_unprofitable(table, slots, places, offer, bounds, chosen, is_paying)


@njit(cache=True, nogil=True)
def note_steps(table, slots, token_starts, step_s, stretch):  # type: ignore[no-untyped-def]
    """Note steps of step_s seconds, `stretch` times as long as without drafts.

    The request at slots[i] was given as many tokens as token_starts [len(slots) + 1] rises, in one of the steps.
    """
    for i in range(len(slots)):
        request, num_tokens = table[slots[i]], token_starts[i + 1] - token_starts[i]
        rate = 1.0 if request.num_steps == 0 else TPOT_RATE
        request.num_steps += 1
        request.ahead += num_tokens - stretch
        request.step_s += rate * (step_s - request.step_s)
        request.step_tokens += rate * (num_tokens - request.step_tokens)
        if request.tpot_target_s < np.inf:
            is_late = request.step_s > request.tpot_target_s * max(1.0, request.step_tokens)
            change = URGENCY_UP if is_late else URGENCY_DOWN
            request.urgency = max(1.0, min(MAX_URGENCY, request.urgency * change))


def compile_kernels() -> None:
    """Compile every kernel of the adaptive choice, those of budget_kernels too, or load them from the cache on disk."""
    budget_kernels.compile_kernels()
    table, slots, one = grown(np.zeros(0, ACCOUNT), 1), np.zeros(1, np.int64), np.ones(1)
    bound_queries(table, np.zeros((1, 3)), slots, (0.5, 1.0), np.ones((1, 3), np.int64), one.copy())
    flag, step_time = np.zeros(1, np.bool_), (one, one, np.zeros(1), np.zeros(NUM_SLOPES))
    prices = (1, 1, 1, 0, 0), (1.0, 1.0, 1.0, 1, 0.0, 1.0, 1.0), (1.0, 0.0)
    choose_drafts(table, slots, slots, slots, (slots, one, slots + 1), step_time, prices, flag, flag.copy())
    note_steps(table, slots, np.array([0, 1]), 1.0, 1.0)
