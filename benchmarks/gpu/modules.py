"""FlashInfer's compiled modules: which ones the kit needs, what they are called, whether they are there.

Nothing here imports FlashInfer before it is known to be installed in the version that is wanted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from batchserve.attention.flashinfer import DTYPES, HEAD_DIMS, VERSIONS
from batchserve.attention.flashinfer_variant import variant_arguments
from benchmarks.gpu.kit import Kit


@dataclass(frozen=True, slots=True)
class Module:
    """A stock prefill module (causal and custom masks), one of our variants of it ("tree", "front"), or a stock decode
    module.
    """

    kind: str
    head_dim: int
    dtype: torch.dtype
    has_softcap: bool = False
    has_window: bool = False  # of the stock module's causal mode; the variant has it anyway

    def spec(self) -> Any:
        """FlashInfer's JitSpec: its name, its build(), and where it is looked for ready-made."""
        from flashinfer.jit.attention import (
            gen_batch_decode_module,
            gen_batch_prefill_module,
            gen_customize_batch_prefill_module,
        )

        if self.kind in ("tree", "front"):
            of_heads = self.head_dim, self.head_dim, self.dtype, self.has_softcap
            arguments = variant_arguments(*of_heads, rows_first=self.kind == "front")
            return gen_customize_batch_prefill_module("fa2", *arguments)
        types = (self.dtype, self.dtype, self.dtype, torch.int32)
        dims, no_positions = (self.head_dim, self.head_dim), 0
        masks = no_positions, self.has_window, self.has_softcap
        if self.kind == "decode":
            return gen_batch_decode_module(*types, *dims, *masks)
        return gen_batch_prefill_module("fa2", *types, *dims, *masks, use_fp16_qk_reduction=False)


def stock(head_dim: int, dtype: torch.dtype, *, has_softcap: bool = False, has_window: bool = False) -> Module:
    return Module("stock", head_dim, dtype, has_softcap, has_window)


def variant(head_dim: int, dtype: torch.dtype, *, has_softcap: bool = False, rows_first: bool = False) -> Module:
    return Module("front" if rows_first else "tree", head_dim, dtype, has_softcap)


def decode(head_dim: int, dtype: torch.dtype) -> Module:
    return Module("decode", head_dim, dtype)


# In the order in which they are worth their minutes: the shapes that are timed, the bundled model (these are what
# engines need), what attention of one row is compared with, the tiny models, the rest.
OF_ENGINES = 4
NEEDED = [
    stock(128, torch.bfloat16),
    variant(128, torch.bfloat16),
    stock(64, torch.bfloat16),
    variant(64, torch.bfloat16),
    variant(128, torch.bfloat16, rows_first=True),
    variant(64, torch.bfloat16, rows_first=True),
    decode(128, torch.bfloat16),
    stock(64, torch.bfloat16, has_softcap=True),
    variant(64, torch.bfloat16, has_softcap=True),
    stock(64, torch.bfloat16, has_softcap=True, has_window=True),
    stock(64, torch.bfloat16, has_window=True),
    stock(256, torch.bfloat16),
    variant(256, torch.bfloat16),
    stock(128, torch.float16),
    variant(128, torch.float16),
    stock(128, torch.bfloat16, has_softcap=True),
    variant(128, torch.bfloat16, has_softcap=True),
    variant(64, torch.bfloat16, has_softcap=True, rows_first=True),
    variant(256, torch.bfloat16, rows_first=True),
    variant(128, torch.float16, rows_first=True),
    variant(128, torch.bfloat16, has_softcap=True, rows_first=True),
]


def is_installed() -> bool:
    try:
        return all(metadata.version(name) == version for name, version in VERSIONS.items())
    except metadata.PackageNotFoundError:
        return False


def is_ready(kit: Kit, module: Module) -> bool:
    """Whether it can be used now: it lies compiled where FlashInfer looks, and loads, or it was compiled here.

    Only correctness.py has FlashInfer compile what is missing, in its last cells.
    """
    if module.head_dim not in HEAD_DIMS or module.dtype not in DTYPES or not is_installed():
        return False
    try:
        spec = module.spec()
        return spec.try_load() is not None or (kit.can_compile and spec.jit_library_path.exists())
    except (ImportError, OSError, RuntimeError) as error:  # a package that it needs is missing, or the GPU is unknown
        print(f"FlashInfer cannot be imported: {error}", file=sys.stderr, flush=True)
        return False
