"""What correctness.json says of the kernels that engines may run on."""

from __future__ import annotations

from typing import Any

KERNELS = ("flashinfer_tree", "flashinfer_custom", "triton")
OF_ENGINES = ("graphs/", "bfloat16/")  # what bf16 engines need of a kernel; pages of several tokens they have not


def unfit(data: dict[str, Any]) -> dict[str, str]:
    """By kernel that is wrong or fails where an engine needs it: the first cell that says so."""
    found: dict[str, str] = {}
    for name, cell in data["cells"].items():
        kernel, _, rest = name.partition("/")
        is_of_engines = kernel in KERNELS and rest.startswith(OF_ENGINES) and "pages of" not in rest
        if is_of_engines and _is_against(kernel, cell):
            found.setdefault(kernel, name)
    return found


def _is_against(kernel: str, cell: dict[str, Any]) -> bool:
    """Of a skipped cell nothing is known. Triton may have been compiling when the part was stopped: FlashInfer hung."""
    if "error" in cell:
        return not (kernel == "triton" and cell["error"].startswith("stopped"))
    return not cell.get("is_right", True)
