"""Visibility masks of draft trees: a row sees the whole context, its ancestors and itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from batchserve.attention.base import Span


def ancestor_mask(parents: np.ndarray) -> np.ndarray:
    """Returns bool [n, n]: entry (i, j) is true if row j is row i or one of its ancestors. Parents precede children."""
    n = len(parents)
    mask = np.zeros((n, n), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] = mask[parent]
        mask[i, i] = True
    return mask


def key_positions(span: Span) -> np.ndarray:
    """Returns int64 [context_len + n]: the absolute position of each of the request's keys, the step's rows last."""
    return np.concatenate([np.arange(span.context_len), span.positions])


def visible_keys(span: Span, sliding_window: int | None) -> np.ndarray:
    """Returns bool [n, context_len + n]: the keys that each row of the span attends to."""
    n = span.num_rows
    tree = np.tri(n, dtype=bool) if span.is_chain else ancestor_mask(span.parents)
    mask = np.concatenate([np.ones((n, span.context_len), dtype=bool), tree], axis=1)
    if sliding_window is not None:
        mask &= key_positions(span)[None, :] > span.positions[:, None] - sliding_window
    return mask
