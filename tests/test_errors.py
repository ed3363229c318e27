"""Exceptions cross processes as they are."""

from __future__ import annotations

import pickle

import pytest

from batchserve import errors
from batchserve.errors import BatchserveError

MADE = [
    errors.ConfigError("model = 5: must be text"),
    errors.InvalidRequestError("TOO_LONG", "text", "x", "short"),
    errors.UnknownModelError("a", "b"),
    errors.DuplicateRequestError("a"),
    errors.QueueFullError(2, 3),
    errors.UnavailableError("draining"),
    errors.EngineFaultError("failed"),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_behind_a_pickle(error: BatchserveError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, again.reason, vars(again)) == (str(error), error.args, error.reason, vars(error))
