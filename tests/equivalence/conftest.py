"""The suite runs over what a CPU has: its own backend, and the GPU path with torch in its kernel's place.

The GPU path twice: eager, and as graphs, which run again what was captured instead of replaying it. Some of it over the
FlashInfer kernel as well, with every mask, of which only FlashInfer's own wrapper is replaced by torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchserve.attention import flashinfer
from batchserve.attention.flashinfer import FlashInferKernel
from batchserve.startup import backend as backends
from batchserve.startup import modules
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
    "test_every_family_under_every_drafter[torch-deepseek_v3]",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption[torch-mistral]",
    "test_one_after_the_other_each_hits_the_longest_beginning_there_is[torch-7-llama]",
    "test_who_begins_like_one_that_is_running_takes_over_what_it_has_computed[torch-7-llama]",
    "test_who_begins_like_one_that_is_running_takes_over_what_it_has_computed[graphs-None-llama]",
    "test_coverage_of_the_suite[torch-5]",
    "test_seeded_faults_turn_it_red[torch-",
    "test_tokens_are_the_same_whatever_is_chosen[torch-llama-mixed]",
    "test_tiny_models[torch-llama-torch.bfloat16]",
    "test_every_family_under_every_drafter[flashinfer_tree_graphs-qwen2]",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption[flashinfer_tree-mistral]",
    "test_seeded_faults_turn_it_red[flashinfer_custom-wrong_parent]",
    "test_every_family_under_every_drafter[lookahead-mistral]",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption[lookahead-llama]",
    "test_coverage_of_the_suite[lookahead-5]",
    "test_seeded_faults_turn_it_red[lookahead-accepted_kv_not_kept]",
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


# By two processes that divide every draft tree.
OVER_RANKS = (
    "test_every_family_under_every_drafter",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption",
    "test_one_after_the_other_each_hits_the_longest_beginning_there_is",
    "test_who_begins_like_one_that_is_running_takes_over_what_it_has_computed",
    "test_coverage_of_the_suite",
    "test_seeded_faults_turn_it_red",
    "test_tokens_are_the_same_whatever_is_chosen",
    "test_tiny_models",
    "test_greedy_in_any_batch",
)

OVER_FLASHINFER = (
    "test_every_family_under_every_drafter",
    "test_many_at_once_under_every_drafter_in_scopes_and_with_preemption",
    "test_seeded_faults_turn_it_red",
)
FLASHINFER = [f"flashinfer_{mask}{graphs}" for mask in ("custom", "tree", "front") for graphs in ("", "_graphs")]
NOT_OVER_FLASHINFER = ("gpt_oss", "deepseek_v3")  # sinks; K and V of different widths


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("cpu_backend") is None:
        graphs = ["graphs"] if metafunc.definition.originalname in AS_GRAPHS else []
        kernels = FLASHINFER if metafunc.definition.originalname in OVER_FLASHINFER else []
        ranks = ["lookahead"] if metafunc.definition.originalname in OVER_RANKS else []
        metafunc.parametrize("backend", ["cpu", "torch", *graphs, *kernels, *ranks], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not ("[flashinfer_" in item.name and item.name.endswith(_REFUSED))]
    for item in items:
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        if backend not in (None, "cpu") and not item.name.startswith(ALWAYS):
            item.add_marker(pytest.mark.slow)


_REFUSED = tuple(f"-{family}]" for family in NOT_OVER_FLASHINFER)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The attention backend of every engine that harness.build makes."""
    name: str = getattr(request, "param", "cpu")
    is_on_cpu = name in ("cpu", "lookahead")
    monkeypatch.setitem(harness.BACKEND, "attention_backend", "cpu" if is_on_cpu else "torch")
    if name == "lookahead":
        monkeypatch.setitem(harness.BACKEND, "lookahead_parallel_size", 2)
    if name.endswith("graphs"):
        monkeypatch.setattr(modules, "choose_capturer", lambda config, device, kernel: RerunCapturer())
    if name.startswith("flashinfer"):
        _use_flashinfer(monkeypatch, tmp_path, mask=name.split("_")[1])
    return name


def _use_flashinfer(monkeypatch: pytest.MonkeyPatch, folder: Path, mask: str) -> None:
    """Engines take the FlashInfer kernel, whose wrappers are the test's; these also take fp32, and narrow heads."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Real

    from tests.attention.test_flashinfer import FakeGraphWrapper, FakeWrapper

    def make_wrapper(jit_args: list[Any] | None, workspace: torch.Tensor, **graph: Any) -> FakeWrapper:
        return FakeGraphWrapper(Real, jit_args, workspace, **graph) if graph else FakeWrapper(Real, jit_args, workspace)

    def make_kernel(name: str, config: Any, loaded: Any) -> FlashInferKernel:
        what = loaded.layers, loaded.num_heads, loaded.torch_dtype, loaded.device
        return FlashInferKernel(*what, mask=mask, make_wrapper=make_wrapper)

    monkeypatch.setattr(backends, "_make_kernel", make_kernel)
    monkeypatch.setattr(flashinfer, "DTYPES", (*flashinfer.DTYPES, torch.float32))
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", (16, 32, *flashinfer.HEAD_DIMS))
