"""Shared fixtures: tiny models, made once a session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchserve.native.threads import apply_thread_policy

apply_thread_policy()
# Where who runs the tests keeps what tools have fetched; workers of a parallel run inherit it.
os.environ.setdefault("BATCHSERVE_TESTS_CALLERS_CACHE", os.environ.get("XDG_CACHE_HOME", ""))
_cache = tempfile.TemporaryDirectory(prefix="batchserve-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # what the tests measure is nobody else's
# Tiny layers, and often a busy machine: barriers between threads would cost the most.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)


# Files whose tests take most of the time. A newcomer's `make test` leaves them out, `make test-all` and CI do not.
EXTENDED = (
    "attention/test_flashinfer.py attention/test_tiles.py attention/test_triton.py bench/test_command.py benchmarks "
    "demo equivalence/test_adaptive.py equivalence/test_batch_invariant.py equivalence/test_coverage.py "
    "equivalence/test_greedy.py equivalence/test_jacobi.py equivalence/test_prefix_cache.py "
    "equivalence/test_sampling_params.py gpu load_tests "
    "program/test_families.py program/test_product.py runner/test_compiled.py runner/test_cuda_graphs.py "
    "runner/test_gpu_modules.py runner/test_hub.py runner/test_other_device.py sampling/test_device.py "
    "server/test_process.py server/test_request_log.py startup/test_kept_programs.py test_load_smoke.py training tune"
).split()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(root)
        if any(path.is_relative_to(each) for each in EXTENDED):
            item.add_marker(pytest.mark.extended)


class _Folders(dict[str, Path]):
    """Makes a model when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        from tests.tiny_models import save_tiny_model  # and all of transformers, which some processes never need

        self[name] = save_tiny_model(name, self.root / name)
        return self[name]


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """An engine is started hundreds of times: what its steps take is measured in few rounds, not for seconds."""
    from batchserve.startup import measure_steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_steps, "MAX_SECONDS", 0.5)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a tiny random model by family name."""
    return _Folders(tmp_path_factory.mktemp("models"))
