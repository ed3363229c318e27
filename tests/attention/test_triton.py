"""The Triton kernel: its arithmetic in Triton's interpreter, and its compilation for real GPUs without one.

The interpreter is chosen by the environment when Triton is imported, so it has a process of its own: this module, run
as a program, reads cases as lines of JSON and answers each with what came out.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchserve.attention.base import AttentionParams, LayerShape
from batchserve.attention.tree_metadata import TreeMetadata, ancestor_bits
from batchserve.attention.triton import Tile, TritonTreeKernel, choose_splits, choose_tile, max_programs
from batchserve.errors import ConfigError
from tests.attention.test_mask import ancestors, random_parents
from tests.factories import examples

TOLERANCE = {"float32": 2e-6, "float16": 2e-3}


@dataclass(frozen=True)
class Case:
    """contexts and rows are by request; a negative number of rows is a chain, which else is a random tree."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    num_padding: int = 0
    block_m: int = 16
    block_n: int = 16
    num_splits: int = 1
    scaling: float = 0.3
    seed: int = 0

    @property
    def params(self) -> AttentionParams:
        generator = torch.Generator().manual_seed(self.seed)
        sinks = torch.randn(self.heads, generator=generator) + 5 if self.has_sinks else None  # as heavy as 100 keys
        return AttentionParams(self.scaling, self.window, self.softcap, sinks)


@dataclass
class Step:
    """The tensors of a case. Slots that no request owns hold no numbers."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: TreeMetadata
    parents: list[list[int]]


def make_step(case: Case) -> Step:
    rng = random.Random(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    parents = [list(range(-1, -n - 1)) if n < 0 else random_parents(rng, n) for n in case.rows]
    counts = [len(p) for p in parents]
    kv_lens = [c + n for c, n in zip(case.contexts, counts, strict=True)]
    qo_indptr, kv_indptr = (np.cumsum([0, *n], dtype=np.int32) for n in (counts, kv_lens))
    positions = [
        c + len(ancestors(p, i)) - 1 for c, p in zip(case.contexts, parents, strict=True) for i in range(len(p))
    ]
    bits, is_causal = ancestor_bits(np.array([p for request in parents for p in request], dtype=np.int32), qo_indptr)
    num_slots = sum(kv_lens) + 9
    slots = torch.randperm(num_slots - 1, generator=generator)[: sum(kv_lens)] + 1
    dtype = getattr(torch, case.dtype)
    num_rows = sum(counts) + case.num_padding

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    caches = []
    for dim in (case.key_dim, case.value_dim):
        cache = torch.full((num_slots, case.kv_heads, dim), float("nan"), dtype=dtype)
        cache[slots] = noise(len(slots), case.kv_heads, dim)
        caches.append(cache)
    # As the model leaves it: heads before tokens.
    query = noise(case.heads, num_rows, case.key_dim).transpose(0, 1)
    metadata = TreeMetadata(
        qo_indptr=torch.from_numpy(qo_indptr),
        kv_indptr=torch.from_numpy(kv_indptr),
        kv_indices=slots.int(),
        ancestors=torch.from_numpy(bits),
        positions=torch.tensor(positions, dtype=torch.int32),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64),
        qo_indptr_cpu=torch.from_numpy(qo_indptr),
        kv_indptr_cpu=torch.from_numpy(kv_indptr),
        kv_lens_cpu=torch.tensor(kv_lens, dtype=torch.int32),
        max_rows=max(counts),
        is_causal=is_causal,
    )
    return Step(query, *caches, metadata, parents)


def expected(case: Case, step: Step) -> np.ndarray:
    """Softmax over each row's own path, in float64, from the parents: [num_rows, num_heads, value_dim]."""
    query, keys, values = (t.double().numpy() for t in (step.query, step.key_cache, step.value_cache))
    sinks = None if case.params.sinks is None else case.params.sinks.double().numpy()
    out = np.zeros((*query.shape[:2], case.value_dim))
    group = case.heads // case.kv_heads
    row = 0
    for context_len, parents, begin in zip(case.contexts, step.parents, step.metadata.kv_indptr.tolist(), strict=False):
        for i in range(len(parents)):
            path = [*range(context_len), *(context_len + r for r in reversed(ancestors(parents, i)))]
            path = path[-case.window :] if case.window is not None else path
            slots = step.metadata.kv_indices[begin:][path].numpy()
            for head in range(case.heads):
                scores = keys[slots, head // group] @ query[row, head] * case.scaling
                if case.softcap is not None:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores - scores.max())
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
                out[row, head] = weights @ values[slots, head // group] / total
            row += 1
    return out


def store_again(kernel: TritonTreeKernel, step: Any) -> dict[str, bool]:
    """Take this step's keys and values out of the caches, and store them; whether they are as they were."""
    metadata, caches = step.metadata, (step.key_cache, step.value_cache)
    ends, counts = metadata.kv_indptr[1:].tolist(), metadata.qo_indptr.diff().tolist()
    own = [metadata.kv_indices[end - count : end] for end, count in zip(ends, counts, strict=True)]
    places = torch.cat(own).long()
    before = [cache.clone() for cache in caches]
    states = [cache[places].transpose(0, 1).contiguous() for cache in caches]
    for cache in caches:
        cache[places] = 7.0
    kernel.store(*(each.transpose(0, 1) for each in states), *caches, places)
    is_stored = all(torch.equal(*map(torch.nan_to_num, each)) for each in zip(caches, before, strict=True))
    return {"is_stored": is_stored, "is_gathered": is_gathered(step.metadata)}


def is_gathered(metadata: TreeMetadata) -> bool:
    """Whether slots come out of a table of all requests as they are in kv_indices."""
    from batchserve.attention.triton_kernels import gather_slots

    starts, count = metadata.kv_indptr.long(), metadata.num_requests
    columns = int(metadata.kv_lens_cpu.max()) + 3
    table = torch.full((2 * count, columns), -1, dtype=torch.int32)
    for i in range(count):
        table[2 * i + 1, : starts[i + 1] - starts[i]] = metadata.kv_indices[starts[i] : starts[i + 1]]
    offsets = (2 * torch.arange(count) + 1) * columns - starts[:-1]
    found = torch.full_like(metadata.kv_indices, -2)
    gather_slots[count, -(-columns // 16)](table.view(-1), metadata.kv_indptr, offsets, found, BLOCK=16, OVERLAPS=False)
    return torch.equal(found, metadata.kv_indices)


def outcome(case: Case) -> dict[str, Any]:
    """What the kernel gives, against what it must give; runs in the interpreter's process."""
    step = make_step(case)
    kernel = TritonTreeKernel(
        [LayerShape(case.kv_heads, case.key_dim, case.value_dim)],
        step.query.dtype,
        4096,
        tile=Tile(case.block_m, case.block_n, num_warps=4, num_stages=2),
        num_splits=case.num_splits,
        num_sms=(1, 3, 1000)[case.seed % 3],  # too few programs for any splits, for some, or enough for all
    )
    kernel.plan(step.metadata)
    where = store_again(kernel, step)
    new_empty = torch.Tensor.new_empty

    def full_of_nothing(tensor: torch.Tensor, *shape: int, **options: Any) -> torch.Tensor:
        found = new_empty(tensor, *shape, **options)
        return found.fill_(float("nan")) if found.is_floating_point() else found  # what is not written is seen

    with np.errstate(over="ignore"), mock.patch.object(torch.Tensor, "new_empty", full_of_nothing):
        # exp2 of a large score under a soft cap is infinite, and right
        out = kernel.run(step.query, step.key_cache, step.value_cache, step.metadata, case.params)
    num_rows = step.metadata.num_rows
    error = np.abs(out.double().numpy() - expected(case, step))
    return {
        "shape": list(out.shape),
        "dtype": str(out.dtype),
        "is_causal": step.metadata.is_causal,
        "error": float(np.max(error[:num_rows], initial=0)),
        "padding": float(np.max(error[num_rows:], initial=0)),
        **where,
    }


def serve() -> None:
    print(json.dumps("batchserve.attention.triton_kernels" in sys.modules), flush=True)
    for line in sys.stdin:
        try:
            answer = outcome(Case(**json.loads(line)))
        except Exception:
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[[Case], dict[str, Any]]]:
    """Runs a case in the interpreter's process."""
    worker = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", __name__],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(case: Case) -> dict[str, Any]:
        worker.stdin.write(json.dumps(asdict(case)) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        assert line, "the interpreter's process has ended"
        answer = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer

    with worker:
        assert worker.stdout.readline() == "false\n", "Triton is imported before a kernel runs"
        yield run
        worker.stdin.close()


CASES = {
    "one row": Case((0,), (1,)),
    "ragged": Case((0, 1, 37, 300), (1, 12, 5, 3)),
    "one head each": Case((20, 5), (3, 6), heads=4, kv_heads=4),
    "groups of four": Case((33, 0), (7, 14), heads=8, kv_heads=2),
    "groups of eight": Case((150, 2), (1, 9), heads=8, kv_heads=1),
    "groups of three": Case((33, 20), (7, 11), heads=6, kv_heads=2),
    "groups larger than a tile": Case((33,), (3,), heads=20, kv_heads=1),
    "requests without rows": Case((0, 20, 0, 33, 0), (0, 4, 0, 1, 0), num_padding=3),
    "padding alone": Case((0, 0), (0, 0), num_padding=9, window=5, has_sinks=True),
    "more requests than a vector of lanes": Case((0, 5, 20) * 11, (1,) * 33, heads=1, kv_heads=1),
    "several words": Case((40, 5), (70, 3), heads=2, kv_heads=1),
    "larger tiles": Case((40, 100), (21, 10), block_m=32, block_n=32),
    "chains": Case((40, 0, 3), (-9, -1, -30), heads=2, kv_heads=1),
    "prompt": Case((40, 0), (-66, -1), heads=2, kv_heads=2),
    "prompt under a window": Case((40,), (-66,), heads=1, kv_heads=1, window=20),
    "window": Case((300, 90, 0), (5, 6, 12), heads=2, kv_heads=1, window=150),
    "window of one": Case((20, 0), (9, 3), window=1),
    "window over everything": Case((20, 3), (9, 6), window=1000),
    "soft cap": Case((60, 3), (5, 6), softcap=1.0),
    "soft cap, large scores": Case((60, 3), (5, 6), softcap=2.0, scaling=60.0),
    "large scores": Case((60, 3), (5, 6), scaling=60.0),
    "sinks": Case((200, 0), (3, 6), heads=2, kv_heads=1, has_sinks=True),
    "dimensions of no power of two": Case((30, 3), (5, 6), key_dim=24, value_dim=40),
    "everything": Case((150, 0, 7), (11, 0, 4), 6, 2, 24, 8, window=20, softcap=3.0, has_sinks=True, num_padding=2),
    "head_dim 64": Case((130,), (6,), key_dim=64, value_dim=64),
    "head_dim 128": Case((70,), (6,), heads=4, kv_heads=1, key_dim=128, value_dim=128),
    "head_dim 256": Case((70,), (6,), heads=4, kv_heads=1, key_dim=256, value_dim=256, scaling=256**-0.5),
    "many splits": Case((1100, 1), (2, 5), heads=2, kv_heads=1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "num_splits"), [("float32", 1), ("float16", 2)])
def test_every_row_sees_its_path(
    interpreter: Callable[[Case], dict[str, Any]], name: str, dtype: str, num_splits: int
) -> None:
    num_splits = 16 if name == "many splits" and num_splits > 1 else num_splits
    case = replace(CASES[name], dtype=dtype, num_splits=num_splits, seed=len(name))
    answer = interpreter(case)
    num_rows = sum(map(abs, case.rows)) + case.num_padding
    assert answer["shape"] == [num_rows, case.heads, case.value_dim]
    assert answer["dtype"] == f"torch.{dtype}"
    assert answer["is_causal"] or max(case.rows) > 1  # what is meant to be chains is known to be
    assert answer["padding"] == 0
    # The weights of the values have the values' dtype, too.
    assert answer["error"] < TOLERANCE[dtype]
    assert answer["is_stored"]
    assert answer["is_gathered"]


class FakeGPU:
    """What Triton asks of a driver, without a device: kernels are compiled, and launches are noted."""

    def __init__(self, arch: int) -> None:
        # On Ampere and Hopper a program may have 163 and 227 KiB.
        limits = {"max_shared_mem": {80: 163, 90: 227}[arch] * 1024}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: limits, load_binary=lambda *_: (None, 0, 0, 0, 1024)
        )
        self.arch = arch
        self.launches: list[tuple[str, tuple[int, ...]]] = []

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # by which Triton keeps what it compiled

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((metadata.name, arguments[:3]))

    def run(self, kernel: TritonTreeKernel, layer: LayerShape, heads: int, dtype: torch.dtype, **step: Any) -> None:
        """Attend over tensors that have no contents: whatever waits for a value raises."""
        params = step.pop("params", AttentionParams(0.1))
        num_rows, metadata = meta_step(**step)
        query = torch.empty(num_rows, heads, layer.key_dim, dtype=dtype, device="meta")
        keys, values = (
            torch.empty(512, layer.num_kv_heads, dim, dtype=dtype, device="meta")
            for dim in (layer.key_dim, layer.value_dim)
        )
        out = kernel.run(query, keys, values, metadata, params)
        assert (out.shape, out.dtype) == ((num_rows, heads, layer.value_dim), dtype)


def meta_step(num_rows: int, num_requests: int = 16, words: int = 1, is_causal: bool = False) -> tuple[int, Any]:
    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    return num_rows, SimpleNamespace(
        qo_indptr=integers(num_requests + 1),
        kv_indptr=integers(num_requests + 1),
        kv_indices=integers(1000),
        ancestors=integers(num_rows, words),
        positions=integers(num_rows),
        is_causal=is_causal,
    )


@pytest.fixture(scope="module")
def compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache, of all tests here: some need the same kernels."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, compiled_before: Path) -> FakeGPU:
    from triton.runtime import driver

    from batchserve.attention import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled_before))
    fake = FakeGPU(getattr(request, "param", 80))
    monkeypatch.setattr(driver, "_active", fake)
    for kernel in (triton_kernels.attend_tiles, triton_kernels.merge_splits):
        kernel.device_caches.clear()
    return fake


def compiled(gpu: FakeGPU) -> list[Any]:
    from batchserve.attention import triton_kernels

    return list(triton_kernels.attend_tiles.device_caches[gpu.arch][0].values())


EVERYTHING = AttentionParams(0.1, sliding_window=64, softcap=30.0, sinks=torch.empty(8, device="meta"))


@pytest.mark.parametrize("gpu", [80, 90], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "step"),
    [
        (torch.bfloat16, 128, {"num_rows": 8}),
        (torch.bfloat16, 128, {"num_rows": 512, "words": 16}),
        (torch.bfloat16, 256, {"num_rows": 64}),
        (torch.bfloat16, 64, {"num_rows": 512, "words": 16, "is_causal": True}),
        (torch.float16, 128, {"num_rows": 8, "params": EVERYTHING}),
        (torch.float32, 128, {"num_rows": 8}),
    ],
)
def test_kernels_compile_for_a_gpu(gpu: FakeGPU, dtype: torch.dtype, head_dim: int, step: dict[str, Any]) -> None:
    layer = LayerShape(2, head_dim, head_dim)
    overlaps = gpu.arch >= 90
    gpu.run(TritonTreeKernel([layer], dtype, 8192, num_sms=132, overlaps=overlaps), layer, 8, dtype, **step)
    (kernel,) = compiled(gpu)
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == overlaps
    # As much as the generation's smaller GPUs have; Triton itself refuses what exceeds max_shared_mem.
    assert 0 < kernel.metadata.shared <= 99 * 1024
    ptx = kernel.asm["ptx"]
    assert f".target sm_{gpu.arch}" in ptx
    assert ("mma.sync" in ptx or "wgmma" in ptx) == (dtype != torch.float32)
    assert "cp.async" in ptx  # K and V are on their way while others are attended to
    assert spilled_bytes(kernel) <= 64


def spilled_bytes(kernel: Any) -> int:
    """Bytes of a thread's stack in the compiled kernel: what did not fit into registers."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"STACK:(\d+)", listing.stdout))


def touched_early(kernel: Any, parameters: Collection[int]) -> list[str]:
    """Instructions that access memory through one of these parameters before the kernel has waited."""
    before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    known, found = set(), []
    for line in before.splitlines():
        registers = re.findall(r"%rd\d+", line)
        parameter = re.search(r"ld\.param\S*\s+(%rd\d+), \[\w+_param_(\d+)\]", line)
        if parameter and int(parameter[2]) in parameters:
            known.add(parameter[1])
        elif known.intersection(registers[1:]):
            known.add(registers[0])
        if re.search(r"(ld|st|atom|red)\.global|cp\.async\.c", line) and known.intersection(registers):
            found.append(line.strip())
    return found


@pytest.mark.parametrize("gpu", [90], indirect=True)
@pytest.mark.parametrize("step", [{"num_rows": 8}, {"num_rows": 512, "words": 16}, {"num_rows": 1, "num_requests": 1}])
def test_what_a_step_computes_is_touched_behind_the_wait_only(gpu: FakeGPU, step: dict[str, Any]) -> None:
    """LLVM knows nothing of what the wait is for, and might move loads across it."""
    from batchserve.attention import triton_kernels

    layer = LayerShape(2, 128, 128)
    kernel = TritonTreeKernel([layer], torch.bfloat16, 8192, num_sms=132, overlaps=True)
    gpu.run(kernel, layer, 8, torch.bfloat16, **step)
    (attend,) = compiled(gpu)
    assert touched_early(attend, range(7)) == []  # query, caches, out, partial results, sinks
    merged = triton_kernels.merge_splits.device_caches[gpu.arch][0].values()
    for merge in merged:
        assert touched_early(merge, range(3)) == []
    assert touched_early(attend, range(7, 12))  # positions and the like, which are there before


def test_a_step_is_launched_as_its_shapes_say(gpu: FakeGPU) -> None:
    """One bucket is one compiled kernel and one grid; nothing reads a tensor on the way (they have no contents)."""
    layer = LayerShape(2, 64, 64)
    kernel = TritonTreeKernel([layer], torch.bfloat16, 8192, num_sms=132)
    for num_rows, num_requests in ((16, 16), (16, 16), (16, 12), (15, 16), (1, 1)):
        gpu.run(kernel, layer, 8, torch.bfloat16, num_rows=num_rows, num_requests=num_requests)
    # Together as many splits as fill the GPU, and 4 tiles of padding.
    assert gpu.launches[0] == ("attend_tiles", (4 * 132 // 2 + 4, 2, 1))
    assert gpu.launches[1] == ("merge_splits", (16 * 8, 1, 1))
    assert gpu.launches[2:4] == gpu.launches[:2]
    assert len(compiled(gpu)) == 1


def test_steps_of_fewer_requests_than_there_were_compile_nothing(gpu: FakeGPU) -> None:
    """Graphs are captured for all that there can be; an eager step of some must not wait for a compiler."""
    layer = LayerShape(2, 64, 64)
    kernel = TritonTreeKernel([layer], torch.bfloat16, 8192, num_sms=132)
    for num_requests in (40, 16, 31, 32):
        gpu.run(kernel, layer, 8, torch.bfloat16, num_rows=40, num_requests=num_requests)
    assert len(compiled(gpu)) == 1


@examples(300)
@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    num_padding=st.integers(0, 40),
    group=st.integers(1, 8),
    block_m=st.sampled_from([16, 32, 64]),
    num_splits=st.sampled_from([1, 2, 4, 16]),
    max_work=st.integers(1, 80),
)
def test_there_are_programs_for_all_work(
    rows: list[int], num_padding: int, group: int, block_m: int, num_splits: int, max_work: int
) -> None:
    tiles, padding = sum(-(-n * group // block_m) for n in rows), -(-num_padding * group // block_m)
    # The most splits of each tile that are max_work together, if there are that few tiles.
    splits = max(n for n in range(1, num_splits + 1) if n == 1 or n * tiles <= max_work)
    enough = max_programs(sum(rows) + num_padding, group, len(rows), block_m, num_splits, max_work)
    assert tiles * splits + padding <= enough
    assert num_splits > 1 or enough <= tiles + padding + min(len(rows) + 1, sum(rows) + num_padding)


def test_hardly_any_program_has_nothing_to_do() -> None:
    """Of steps of 16 rows, of 16 requests or of one, of a model with 32 K/V heads on a GPU of 132 multiprocessors."""
    assert max_programs(16, 1, 16, 16, 16, 4 * 132 // 32) == 17


def test_rows_alone_choose_tile_and_splits() -> None:
    bf16 = torch.bfloat16
    assert [choose_tile(n, 128, 128, bf16).block_m for n in (1, 256, 257, 512, 513)] == [16, 16, 32, 32, 64]
    assert [choose_tile(n, 128, 128, bf16).num_warps for n in (1, 513)] == [1, 4]
    assert choose_tile(4096, 256, 256, bf16).block_m == 32
    assert choose_tile(4096, 64, 64, torch.float32).block_m == 16
    assert [choose_tile(1, d, d, bf16).block_n for d in (16, 64, 100, 256, 512)] == [64, 32, 16, 16, 16]
    assert [choose_tile(513, d, d, bf16).block_n for d in (16, 64, 100, 256, 512)] == [64, 64, 32, 16, 16]
    uneven = (192, 128), (96, 64), (128, 64), (8192, 4096)
    assert [choose_tile(513, *dims, bf16).block_n for dims in uneven] == [16, 32, 32, 16]
    # One row of a model with 8 K/V heads leaves most of the GPU idle; many rows fill it; few keys stay together.
    assert choose_splits(8, 8192, 132) == 16
    assert choose_splits(256, 8192, 132) == 2
    assert choose_splits(4096, 8192, 132) == 1
    assert choose_splits(8, 300, 132) == 4
    assert choose_splits(8, 60, 132) == 1


def test_what_the_kernel_does_not_serve_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="head_dim = 576: must be at most 512"):
        TritonTreeKernel([LayerShape(2, 64, 64), LayerShape(1, 576, 512)], torch.bfloat16, 100)
    with pytest.raises(ConfigError, match=r"dtype = torch.float64: must be one of torch.float16"):
        TritonTreeKernel([LayerShape(2, 64, 64)], torch.float64, 100)
    with pytest.raises(ValueError, match="num_splits = 32: must be at most 16"):
        TritonTreeKernel([LayerShape(2, 64, 64)], torch.bfloat16, 100, num_splits=32)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="triton is not installed"):
        TritonTreeKernel([LayerShape(2, 64, 64)], torch.bfloat16, 100)


if __name__ == "__main__":
    serve()
