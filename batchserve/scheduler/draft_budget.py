"""Which draft nodes are worth their rows: the price of time decides, for all requests of a step at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from batchserve.scheduler.step_time import StepLoad, StepTimeModel

    FloatArray = np.ndarray[Any, np.dtype[np.float64]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

LEAST_ROW_COST = 0.01  # of the step without drafts: no row is quite free, whatever a flat table says


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """What may be bought in one step: single nodes, and bundles of rows that are only worth something together.

    All arrays [num_items]: the request that owns it (its place), the tokens that it is expected to give, and its rows.
    An item may not be worth more than the one that it hangs from, and comes behind it.
    """

    owners: IntArray
    gains: FloatArray
    rows: IntArray


@dataclass(frozen=True, slots=True)
class Bidders:
    """The decoding requests of the step, by place; all arrays [num_requests].

    contexts: K/V entries that a row of the request attends to. urgency: what one of its tokens counts. credit_s: how
    far ahead of decoding without drafts it is, in seconds: what it can lose to others in this step.
    """

    contexts: FloatArray
    urgency: FloatArray
    credit_s: FloatArray


def choose_drafts(
    offer: DraftOffer,
    bidders: Bidders,
    step_time: StepTimeModel,
    load: StepLoad,
    price: float,
    max_rows: int,
    longest_s: float,
    never_longer_s: float = math.inf,
) -> BoolArray:
    """Which items to buy: bool [num_items].

    `load` is the step without drafts; `price` (lambda) is in tokens per second: what a second brings otherwise. Items
    are ordered by urgency x gain over cost, and of all prefixes that one is taken which maximises
    sum(urgency x gain) - price x time, among those with at most max_rows rows that make the step no longer than
    longest_s (never_longer_s where everybody gains) and leave nobody behind his credit.
    """
    chosen = np.zeros(len(offer.owners), np.bool_)
    if not len(chosen) or max_rows < 1:
        return chosen
    without_s = step_time.predict(load)
    row_s = max(step_time.row_cost(load), LEAST_ROW_COST * without_s / max(1, len(bidders.contexts)))
    costs = offer.rows * (row_s + step_time.attended_cost() * bidders.contexts[offer.owners])
    values = offer.gains * bidders.urgency[offer.owners]
    order = np.argsort(-values / costs, kind="stable")
    rows = np.cumsum(offer.rows[order])
    order = order[: int(np.searchsorted(rows, max_rows, side="right"))]
    if not len(order):
        return chosen
    rows, owners = rows[: len(order)], offer.owners[order]
    attended = np.cumsum(offer.rows[order] * bidders.contexts[owners])
    seconds = step_time.predict_many(load, rows.astype(np.float64), attended)
    # Where the table is flat a row still costs a little: its sampling, its mask, its K/V.
    seconds = np.maximum(seconds, without_s * (1.0 + LEAST_ROW_COST * rows / max(1, len(bidders.contexts))))
    worth = np.cumsum(values[order]) - price * (seconds - without_s)
    ahead = _ahead(owners, offer.gains[order], len(bidders.contexts), seconds, without_s)
    is_fair = (ahead + bidders.credit_s[:, None] >= 0.0).all(axis=0)
    is_short = (seconds <= longest_s) | ((ahead >= 0.0).all(axis=0) & (seconds <= never_longer_s))
    is_free = seconds <= without_s * (1.0 + 1e-9)
    worth = np.where(is_free | (is_fair & is_short), worth, -np.inf)
    best = int(np.argmax(worth))
    if worth[best] > 0.0:
        chosen[order[: best + 1]] = True
    return chosen


def _ahead(owners: IntArray, gains: FloatArray, num_requests: int, seconds: FloatArray, without_s: float) -> FloatArray:
    """Seconds that each request gains by each prefix of the items: [num_requests, num_items].

    A request that is given 1 + g tokens in a step of t seconds would have needed (1 + g) x without_s for them.
    """
    shares = np.zeros((num_requests, len(owners)))
    shares[owners, np.arange(len(owners))] = gains
    ahead: FloatArray = (1.0 + np.cumsum(shares, axis=1)) * without_s - seconds
    return ahead
