"""What correctness.json says of the kernels that engines may run on."""

from __future__ import annotations

from typing import Any

KERNELS = ("flashinfer_tree", "flashinfer_front", "flashinfer_custom", "triton")
OF_ENGINES = ("graphs/", "bfloat16/")  # what bf16 engines need of a kernel
NOT_OF_ENGINES = ("pages of", "softcap", "d256")  # what none of the kit's has


def has_no_graphs(data: dict[str, Any]) -> bool:
    """Whether Triton, the last resort, and all that were tried beside it fail in graphs, or before: eager steps are
    left.
    """
    tried = {name.partition("/")[0] for name in data["cells"]}.intersection(KERNELS)
    return "triton" in tried and tried == unfit(data).keys()


def unfit(data: dict[str, Any], *, is_eager: bool = False) -> dict[str, str]:
    """By kernel that is wrong or fails where an engine (whose steps are all eager) needs it: the first cell that says
    so.
    """
    found: dict[str, str] = {}
    compiles = data.get("about", {}).get("compiles", ())
    for name, cell in data["cells"].items():
        kernel, _, rest = name.partition("/")
        is_of_engines = kernel in KERNELS and rest.startswith(OF_ENGINES[is_eager:])
        is_of_engines = is_of_engines and not any(what in rest for what in NOT_OF_ENGINES)
        if is_of_engines and _is_against(cell, may_compile=kernel == "triton" or name in compiles):
            found.setdefault(kernel, name)
    return found


def hung(data: dict[str, Any]) -> dict[str, str]:
    """By kernel that hung in a part, the cell in which it did."""
    return {cell["hung_on"]: name for name, cell in data["cells"].items() if cell.get("hung_on") in KERNELS}


def _is_against(cell: dict[str, Any], *, may_compile: bool) -> bool:
    """Of a skipped cell nothing is known. A kernel may have been compiling when the part was stopped, or else hung."""
    if "error" in cell:
        return not (may_compile and cell["error"].startswith("stopped"))
    return not cell.get("is_right", True)
