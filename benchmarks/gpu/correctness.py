"""(a) Every kernel against the torch reference, over random trees; captured and replayed raggedly where it can be."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from batchserve.attention.base import LayerShape
from batchserve.attention.flashinfer import VERSIONS, FlashInferKernel
from batchserve.attention.torch_paged import TorchKernel
from batchserve.attention.tree_metadata import TreeKernel
from batchserve.attention.triton import TritonTreeKernel
from batchserve.config import FLASHINFER_MASKS
from benchmarks.gpu.cases import Case, Step, compare, make_step, reference
from benchmarks.gpu.graph_replay import check_replays
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.modules import Module, is_installed, is_ready, stock, variant
from benchmarks.gpu.pages import PagedKernel

LONGEST = 16_384
SEEDS = 3
TREES = tuple(range(1, 33))
PAGE_SIZES = (16, 5)
GRAPHS = "graphs"  # in the names of cells, where others have their dtype
EARLY = 2  # eager cases before the graphs
USUAL_DIM = 128


def cases(kit: Kit) -> list[Case]:
    """The most telling first."""
    if kit.is_dry:
        small = {"heads": 4, "kv_heads": 2, "head_dim": 64}
        return [
            Case("mixed", (0, 5, 40, 17), (3, -4, 9, 1), **small),
            Case("window", (0, 30, 80), (7, 5, 12), window=16, **small),
            Case("softcap", (3, 20), (6, 4), softcap=30.0, **small),
            Case("pages of 16", (0, 5, 40, 17), (3, -4, 9, 1), page_size=16, **small),
        ]
    rng = random.Random(0)

    def mixed(count: int, low: int, high: int) -> dict[str, Any]:
        return {
            "contexts": tuple(rng.randint(low, high) for _ in range(count)),
            "rows": tuple(rng.choice(TREES) for _ in range(count)),
        }

    shapes = [
        Case("short", **mixed(4, 0, 300)),
        Case("long", **mixed(8, 1000, 8192)),
        Case("empty contexts", (0, 0, 1, 0), (1, 33, 7, 64)),
        Case("plain rows", tuple(range(100, 8192, 512)), (1,) * 16),
        Case("prompt beside trees", (0, 2000, 512, 8192), (-512, 16, -100, 31)),
        Case("many", **mixed(32, 0, 4000)),
        Case("wide trees", (700, 5000), (200, 130)),
        Case("one long tree", (8192,), (64,)),
    ]
    every = [*shapes, dataclasses.replace(shapes[0], name="window", window=128)]
    every += [
        dataclasses.replace(shapes[1], name="long window", window=1024),
        dataclasses.replace(shapes[0], name="softcap", softcap=30.0),
        dataclasses.replace(shapes[1], name="window and softcap", window=512, softcap=50.0),
        dataclasses.replace(shapes[1], name="no GQA", kv_heads=32),
        dataclasses.replace(shapes[1], name="one K/V head", heads=8, kv_heads=1),
        dataclasses.replace(shapes[1], name="28 heads over 4", heads=28, kv_heads=4),
    ]
    for page_size in PAGE_SIZES:
        paged = [every[i] for i in (0, 1, 2, 8)]  # short, long, empty contexts, window
        every += [dataclasses.replace(c, name=f"{c.name}, pages of {page_size}", page_size=page_size) for c in paged]
    for head_dim in (64, 256):
        every += [dataclasses.replace(case, name=f"{case.name}, d{head_dim}", head_dim=head_dim) for case in every[:2]]
    narrow = dataclasses.replace(shapes[0], name="window, d64", head_dim=64, window=128)
    return [*every, narrow, dataclasses.replace(shapes[0], name="softcap, d64", head_dim=64, softcap=30.0)]


def graph_cases(kit: Kit) -> list[Case]:
    """Contexts and rows of up to so many, and the models that 7B and 8B shapes stand for; then a narrower one."""
    if kit.is_dry:
        return [Case("plain", (60,), (24,), heads=4, kv_heads=2, head_dim=16)]
    plain = Case("plain", (8192,), (256,))
    return [
        plain,
        dataclasses.replace(plain, name="no GQA", kv_heads=32),
        dataclasses.replace(plain, name="window", window=128),
        dataclasses.replace(plain, name="d64", head_dim=64),
    ]


def kernels(kit: Kit) -> dict[str, Callable[[Case, torch.dtype], TreeKernel]]:
    """What makes each kernel that is there and fit, by name; FlashInfer's read a case's pages, the others slots."""

    def layers(case: Case) -> list[LayerShape]:
        return [LayerShape(case.kv_heads, case.head_dim, case.head_dim)]

    def flashinfer(mask: str) -> Callable[[Case, torch.dtype], TreeKernel]:
        def make(case: Case, dtype: torch.dtype) -> TreeKernel:
            of_model = (layers(case), case.heads, dtype, kit.device)
            if case.page_size > 1:
                return PagedKernel(*of_model, mask=mask, page_size=case.page_size)
            return FlashInferKernel(*of_model, mask=mask)

        return make

    if kit.is_dry:
        return {"torch": lambda case, dtype: TorchKernel()}
    found: dict[str, Callable[[Case, torch.dtype], TreeKernel]] = {}
    if is_installed():
        found |= {f"flashinfer_{mask}": flashinfer(mask) for mask in FLASHINFER_MASKS}
    found["triton"] = lambda case, dtype: TritonTreeKernel(layers(case), dtype, LONGEST)
    return {name: make for name, make in found.items() if name not in kit.unfit}


def missing_module(kit: Kit, kernel: str, case: Case, dtype: torch.dtype) -> str | None:
    """The FlashInfer module that this case would have to compile first; None: it can run."""
    module = module_of(kernel, case, dtype)
    return None if module is None or is_ready(kit, module) else str(module)


def module_of(kernel: str, case: Case, dtype: torch.dtype) -> Module | None:
    """The FlashInfer module that this case runs on."""
    if not kernel.startswith("flashinfer"):
        return None
    has_cap, is_causal = case.softcap is not None, all(rows < 0 or rows == 1 for rows in case.rows)
    if kernel == "flashinfer_custom" or is_causal:
        # The window of a tree is in its mask: only the causal kernel has one of its own.
        window = case.window is not None and is_causal
        return stock(case.head_dim, dtype, has_softcap=has_cap, has_window=window)
    return variant(case.head_dim, dtype, has_softcap=has_cap, rows_first=kernel == "flashinfer_front")


def run(kit: Kit, report: Report) -> None:
    makers = kernels(kit)
    report.about(kernels=list(makers))
    report.cell("control: chains instead of trees", partial(negative_control, kit))
    if not kit.is_dry and not is_installed():
        report.cell("flashinfer", lambda: {"skipped": f"it is not here in the versions {VERSIONS}"})
    plan = {f"{name}/{_kind(dtype)}/{case.name}": (name, dtype, case) for name, dtype, case in ordered(kit, [*makers])}
    report.about(compiles=[cell for cell, what in plan.items() if has_to_compile(kit, *what)])
    for cell, (name, dtype, case) in plan.items():
        report.on(name, cell)
        lost = _lost(report, name, dtype)
        if lost is not None:
            report.cell(cell, partial(dict, skipped=f"{lost} ended a process"))
        elif dtype is None:
            report.cell(cell, partial(graphs, kit, name, makers[name], case))
        else:
            report.cell(cell, partial(check, kit, name, makers[name], case, dtype))


def ordered(kit: Kit, names: Sequence[str]) -> Iterator[tuple[str, torch.dtype | None, Case]]:
    """(kernel, dtype of eager steps or None: graphs, case) of all cells, the most telling first.

    A word on each kernel's eager steps comes before any graph, which may end processes; Triton, which compiles
    something for almost every case, comes behind FlashInfer. Last come cases for which FlashInfer has to compile a
    module first: one may take all the time that the part has.
    """
    first, second = kit.pick((torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32))
    eager = cases(kit)
    ready_made = [name for name in names if name.startswith("flashinfer")]
    compiled = [name for name in names if name not in ready_made]
    plan: list[tuple[list[str], torch.dtype | None, list[Case]]] = []
    for some in (ready_made, compiled):
        plan += [(some, first, eager[:EARLY]), (some, None, graph_cases(kit)), (some, first, eager[EARLY:])]
    # FlashInfer has a module for every width, type and cap: of the second type only the usual ones are carried.
    usual = [case for case in eager if case.head_dim == USUAL_DIM and case.softcap is None]
    plan += [(ready_made, second, usual), (compiled, second, eager)]
    if not kit.is_dry:
        plan.append((compiled, torch.float32, eager[:4]))
    late = []
    for cell in ((name, dtype, case) for some, dtype, those in plan for name in some for case in those):
        if cell[0] == "flashinfer_front" and cell[2].page_size > 1:
            continue  # a step's own rows cannot be put first where they share a page with the context
        if has_to_compile(kit, *cell):
            late.append(cell)
        else:
            yield cell
    yield from late


def has_to_compile(kit: Kit, name: str, dtype: torch.dtype | None, case: Case) -> bool:
    """Whether FlashInfer would compile for this cell, and may."""
    return kit.can_compile and missing_module(kit, name, case, dtype or torch.bfloat16) is not None


def _lost(report: Report, name: str, dtype: torch.dtype | None) -> str | None:
    """The cell after which this kernel's eager steps (or its graphs, dtype None) are not tried again.

    The part may only begin anew so often: the other kernels are to be reached. Behind a fault of eager steps graphs
    are not tried, either.
    """
    for cell in report.faults(*report.cells):
        if cell.startswith(f"{name}/") and (dtype is None or not cell.startswith(f"{name}/{GRAPHS}/")):
            return cell
    return None


def check(
    kit: Kit, name: str, make: Callable[[Case, torch.dtype], TreeKernel], case: Case, dtype: torch.dtype
) -> dict[str, Any]:
    missing = missing_module(kit, name, case, dtype)
    if missing is not None and not kit.can_compile:
        return {"skipped": f"needs {missing}"}
    kernel, worst = make(case, dtype), None
    for seed in range(SEEDS):
        kit.beat()
        step = make_step(case, kit.device, dtype, seed)
        kernel.plan(step.metadata)
        out = kernel.run(step.query, step.key_cache, step.value_cache, step.metadata, case.params)
        found = compare(out, reference(step, case.params), dtype, case.softcap)
        if worst is None or (found["is_right"], -found["max_error"]) < (worst["is_right"], -worst["max_error"]):  # type: ignore[operator]
            worst = found
    assert worst is not None
    return {**worst, "seeds": SEEDS}


def graphs(kit: Kit, name: str, make: Callable[[Case, torch.dtype], TreeKernel], case: Case) -> dict[str, Any]:
    """The kernel in the engine's graphs."""
    dtype = kit.pick(torch.bfloat16, torch.float32)
    missing = missing_module(kit, name, case, dtype)
    if missing is not None and not kit.can_compile:
        return {"skipped": f"needs {missing}"}
    return check_replays(kit, make(case, dtype), case, dtype)


def negative_control(kit: Kit) -> dict[str, Any]:
    """That the comparison sees a wrong mask: trees attended to as if they were chains."""
    case = Case("control", (4000, 300), (24, 17))
    step = make_step(case, kit.device, torch.bfloat16)
    found = compare(as_chains(step, case), reference(step, case.params), torch.bfloat16)
    return {**found, "is_right": not found["is_right"], "expected": "wrong"}


def as_chains(step: Step, case: Case) -> torch.Tensor:
    """What a kernel gives that takes every row to see all rows before it."""
    bits = torch.zeros_like(step.metadata.ancestors)
    starts = step.metadata.qo_indptr_cpu.tolist()
    for start, end in pairwise(starts):
        for row in range(start, end):
            for seen in range(row - start + 1):
                bits[row, seen // 32] |= (1 << seen % 32) - (1 << 32 if seen % 32 == 31 else 0)
    return reference(
        dataclasses.replace(step, metadata=dataclasses.replace(step.metadata, ancestors=bits)), case.params
    )


def _kind(dtype: torch.dtype | None) -> str:
    return GRAPHS if dtype is None else str(dtype).removeprefix("torch.")
