"""Every drafter's defaults and bounds, and that the options reach it."""

from __future__ import annotations

import random
import sys

import pytest

from batchserve.config import DRAFTERS, MAX_MIN_MATCH, DraftConfig, EngineConfig, MiB
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, NullDrafter
from batchserve.draft.factory import SHARING, create_drafters, draft_limits, jacobi_shape
from batchserve.draft.kernels import KernelLoader
from batchserve.draft.mixture import MIN_SCOPE_BYTES
from batchserve.draft.router import RoutingDrafter
from batchserve.draft.text_index import MAX_MATCH
from batchserve.errors import ConfigError
from batchserve.option_checks import MAX_TOKENS
from batchserve.request import DraftScope


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


@pytest.mark.parametrize(("billions", "longest"), [(1, 35), (34, 74)])
def test_ngrams_too_long_for_a_step_are_refused(billions: int, longest: int) -> None:
    """Their window takes memory with the square of their length, for whichever drafter a server has."""

    def create(ngram: int) -> dict[str, Drafter]:
        return create_drafters(EngineConfig(draft=DraftConfig(jacobi_ngram=ngram)), billions * 10**9)

    assert create(longest)
    for ngram in (longest + 1, 10**6, MAX_TOKENS):
        with pytest.raises(ConfigError, match=f"jacobi_ngram = {ngram}: must be for at most 1023 draft tokens"):
            create(ngram)


def test_a_default_window_is_cut_to_what_a_step_holds() -> None:
    assert create_drafters(EngineConfig(max_num_seqs=2, max_num_batched_tokens=8), 0)


def test_limits_are_each_drafters_own_unless_they_are_configured() -> None:
    own = draft_limits(EngineConfig(draft=DraftConfig(reference_copy_length=11)), 0)
    assert own == {"mixture": (64, 64), "trie": (64, 12), "reference": (11, 11), "jacobi": (120, 4), "none": (0, 1)}
    fixed = draft_limits(EngineConfig(adaptive=False), 0)
    assert (fixed["mixture"], fixed["trie"]) == ((8, 64), (8, 12))
    configured = draft_limits(EngineConfig(decoding_length=3, branch_length=2), 0)
    assert configured == {**dict.fromkeys(DRAFTERS, (3, 2)), "none": (0, 1)}
    assert draft_limits(EngineConfig(decoding_length=20), 0)["reference"] == (20, 20)
    longer = draft_limits(EngineConfig(branch_length=20), 0)
    assert longer["trie"] == (64, 20)


def test_the_longest_match_that_may_be_asked_for_is_the_longest_that_is_compared() -> None:
    assert MAX_MIN_MATCH == MAX_MATCH
    assert create_drafters(EngineConfig(draft=DraftConfig(reference_min_match=MAX_MATCH)), 0)["reference"] is not None


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


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_a_request_is_drafted_the_same_whoever_else_is_asked(name: str) -> None:
    """A batch divides nobody's draft, and nothing of one draft is left for the next."""
    drafter, rng = create_drafters(EngineConfig(), 10**9)[name], random.Random(2)
    queries = [DraftQuery(str(i), 1 + 4 * i, 1 + i, 8) for i in range(16)]
    for query in queries:
        prompt = [rng.randrange(8) for _ in range(200)]
        drafter.start(DraftRequest(query.request_id, prompt, scope=DraftScope("default", "one")))
    together = drafter.propose(queries)
    assert together == [drafter.propose([query])[0] for query in reversed(queries)][::-1]
    assert len(together[-1]) > 10


@pytest.mark.parametrize("default", DRAFTERS)
def test_one_bound_holds_for_what_all_drafters_keep(default: str) -> None:
    """Every drafter is given more than its part, under many scopes."""
    config = EngineConfig(drafter=default, draft=DraftConfig(max_scope_bytes=MiB // 4, max_draft_bytes=MiB))
    drafters, rng = create_drafters(config, 0), random.Random(1)
    router = RoutingDrafter(default, drafters, KernelLoader(in_background=False))
    for i in range(30):
        for name in SHARING:
            request_id, text = f"{name}{i}", [rng.randrange(500) for _ in range(4000)]
            router.start(DraftRequest(request_id, [i], scope=DraftScope("default", str(i)), drafter=name))
            router.accept(request_id, text)
            router.share(request_id, text)
            router.end(request_id)
        assert router.memory_bytes() <= MiB
    assert all(drafters[name].memory_bytes() > 0.1 * MiB for name in SHARING)  # and none of them starves


def test_a_bound_that_leaves_no_room_for_a_scope_is_refused_by_the_options_name() -> None:
    config = EngineConfig(draft=DraftConfig(max_scope_bytes=MIN_SCOPE_BYTES, max_draft_bytes=2 * MIN_SCOPE_BYTES - 1))
    with pytest.raises(ConfigError, match=f"max_draft_bytes = .*: must be at least {2 * MIN_SCOPE_BYTES}"):
        create_drafters(config, 0)


def test_a_default_is_cut_to_what_a_step_holds() -> None:
    limits = draft_limits(EngineConfig(max_num_seqs=1, max_num_batched_tokens=12), 0)
    assert {name: limit.max_draft_tokens for name, limit in limits.items()} == {
        **dict.fromkeys(("mixture", "trie", "reference", "jacobi"), 11),
        "none": 0,
    }
