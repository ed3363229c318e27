"""The suite runs over what a CPU has: its own backend, and the GPU path with torch in its kernel's place.

The GPU path twice: eager, and as graphs, which run again what was captured instead of replaying it.
"""

from __future__ import annotations

import pytest

from batchserve.engine import build
from tests.equivalence import harness
from tests.graphs import RerunCapturer

# These over the GPU path, too, in every run; all others under `slow`.
ALWAYS = (
    "test_every_family_under_every_drafter[graphs-gemma2]",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption[graphs-llama]",
    "test_coverage_of_the_suite[graphs-5]",
    "test_seeded_faults_turn_it_red[graphs-wrong_parent]",
    "test_a_prompt_that_overflows_harms_nobody_else[graphs-0.8]",
    "test_tiny_models[graphs-llama-torch.float32]",
    "test_greedy_in_any_batch[graphs-",
    "test_every_family_under_every_drafter[torch-gemma2]",
    "test_every_family_under_every_drafter[torch-gpt_oss]",
    "test_every_family_under_every_drafter[torch-deepseek_v3]",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption[torch-mistral]",
    "test_one_after_the_other_each_hits_the_longest_beginning_there_is[torch-7-llama]",
    "test_who_begins_like_one_that_is_running_takes_over_what_it_has_computed[torch-7-llama]",
    "test_who_begins_like_one_that_is_running_takes_over_what_it_has_computed[graphs-None-llama]",
    "test_coverage_of_the_suite[torch-5]",
    "test_seeded_faults_turn_it_red[torch-",
    "test_tokens_are_the_same_whatever_is_chosen[torch-llama-mixed]",
    "test_tiny_models[torch-llama-torch.bfloat16]",
)


# As graphs, too; what they change is how a step gets to the device, not what is in it.
AS_GRAPHS = (
    "test_every_family_under_every_drafter",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption",
    "test_who_begins_like_one_that_is_running_takes_over_what_it_has_computed",
    "test_coverage_of_the_suite",
    "test_seeded_faults_turn_it_red",
    "test_a_prompt_that_overflows_harms_nobody_else",
    "test_tiny_models",
    "test_greedy_in_any_batch",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("cpu_backend") is None:
        graphs = ["graphs"] if metafunc.definition.originalname in AS_GRAPHS else []
        metafunc.parametrize("backend", ["cpu", "torch", *graphs], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        if backend in ("torch", "graphs") and not item.name.startswith(ALWAYS):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The attention backend of every engine that harness.build makes."""
    name = getattr(request, "param", "cpu")
    monkeypatch.setitem(harness.BACKEND, "attention_backend", "torch" if name == "graphs" else name)
    if name == "graphs":
        monkeypatch.setattr(build, "choose_capturer", lambda config, device, kernel: RerunCapturer())
    return name
