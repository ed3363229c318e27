"""Every drafter's defaults and bounds, and that the options reach it."""

from __future__ import annotations

import sys

import pytest

from batchserve.config import DRAFTERS, DraftConfig, EngineConfig
from batchserve.draft.base import NullDrafter
from batchserve.draft.factory import create_drafters, draft_limits, jacobi_shape


@pytest.mark.parametrize(
    ("billions", "shape"), [(0.03, (15, 5, 15)), (7, (15, 5, 15)), (13, (10, 5, 10)), (34, (7, 5, 7)), (70, (7, 5, 7))]
)
def test_jacobi_goes_by_the_models_size(billions: float, shape: tuple[int, int, int]) -> None:
    assert jacobi_shape(DraftConfig(), int(billions * 1e9)) == shape


def test_what_is_configured_of_jacobi_is_taken() -> None:
    config = DraftConfig(jacobi_window=4, jacobi_ngram=3, jacobi_guesses=2)
    assert jacobi_shape(config, 7 * 10**9) == (4, 3, 2)
    assert jacobi_shape(DraftConfig(jacobi_window=4), 7 * 10**9) == (4, 5, 4)  # G = W
    assert draft_limits(EngineConfig(draft=config), 0)["jacobi"] == ((4 + 2) * 2, 2)


def test_limits_are_each_drafters_own_unless_they_are_configured() -> None:
    own = draft_limits(EngineConfig(draft=DraftConfig(reference_copy_length=11)), 0)
    assert own == {"mixture": (8, 32), "trie": (8, 12), "reference": (11, 11), "jacobi": (120, 4), "none": (0, 1)}
    configured = draft_limits(EngineConfig(decoding_length=3, branch_length=2), 0)
    assert configured == {**dict.fromkeys(DRAFTERS, (3, 2)), "none": (0, 1)}
    longer = draft_limits(EngineConfig(branch_length=20), 0)
    assert longer["trie"] == (8, 20)


def test_every_name_has_a_drafter() -> None:
    drafters = create_drafters(EngineConfig(), 0)
    assert set(drafters) == set(DRAFTERS)
    assert {name: drafter.name for name, drafter in drafters.items()} == {name: name for name in DRAFTERS}


def test_every_compiled_drafter_can_be_prepared_before_it_is_needed() -> None:
    """Or its first proposal would compile, and everybody would wait."""
    drafters = create_drafters(EngineConfig(), 0)
    modules = {name: sys.modules[type(drafter).__module__] for name, drafter in drafters.items()}
    assert [name for name, module in modules.items() if not hasattr(module, "compile_kernels")] == ["none"]


def test_a_decoding_length_of_zero_is_no_speculation_for_anybody() -> None:
    drafters = create_drafters(EngineConfig(decoding_length=0), 0)
    assert all(isinstance(drafter, NullDrafter) for drafter in drafters.values())
