"""The suite runs over both backends that a CPU has: its own, and the GPU path with torch in its kernel's place."""

from __future__ import annotations

import pytest

from tests.equivalence import harness

# These over the GPU path, too, in every run; all others under `slow`.
ALWAYS = (
    "test_every_family_under_every_drafter[torch-gemma2]",
    "test_every_family_under_every_drafter[torch-gpt_oss]",
    "test_every_family_under_every_drafter[torch-deepseek_v3]",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption[torch-mistral]",
    "test_one_after_the_other_each_hits_the_longest_beginning_there_is[torch-7-llama]",
    "test_coverage_of_the_suite[torch-5]",
    "test_seeded_faults_turn_it_red[torch-",
    "test_tokens_are_the_same_whatever_is_chosen[torch-llama-mixed]",
    "test_tiny_models[torch-llama-torch.bfloat16]",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("cpu_backend") is None:
        metafunc.parametrize("backend", ["cpu", "torch"], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        if backend == "torch" and not item.name.startswith(ALWAYS):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The attention backend of every engine that harness.build makes."""
    name = getattr(request, "param", "cpu")
    monkeypatch.setitem(harness.BACKEND, "attention_backend", name)
    return name
