"""Random steps of tree attention over paged K/V, made so that a wrong mask shows whatever the context's length."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch

from batchserve.attention.base import AttentionParams
from batchserve.attention.mask import ancestor_mask
from batchserve.attention.torch_paged import TorchKernel
from batchserve.attention.tree_metadata import TreeMetadata, ancestor_bits

# Of a 16-bit kernel: inputs, probabilities and outputs are rounded; values are of the order of 1.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 4e-2}
TANH_ERROR = 2.0**-11  # relative, of the processor's own (PTX: tanh.approx.f32), by which FlashInfer caps logits
FAR = 6  # a row's parent is one of the last so many rows


@dataclass(frozen=True, slots=True)
class Case:
    """contexts and rows by request; a negative number of rows is a chain, such as a prompt.

    page_size: slots that lie behind each other; what of a request's last page is not its own must not be seen.
    """

    name: str
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    softcap: float | None = None
    page_size: int = 1

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.head_dim**-0.5, self.window, self.softcap)


@dataclass(slots=True)
class Step:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: TreeMetadata


def random_parents(rng: random.Random, count: int) -> list[int]:
    """A tree, or several from the context; rows that belong to one path stand apart."""
    return [rng.randint(max(-1, i - FAR), i - 1) for i in range(count)]


def make_step(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Step:
    """The step's tensors. Keys that a mask is about weigh as much as the whole context: the tree's, and those at the
    context's ends and the window's edges. A row that sees one too many or too few is then far off."""
    rng = random.Random(f"{case.name} {seed}")
    generator = torch.Generator(device).manual_seed(seed)
    parents = [list(range(-1, -n - 1)) if n < 0 else random_parents(rng, n) for n in case.rows]
    metadata = make_metadata(parents, case.contexts, device, generator, case.page_size)
    num_slots = (int(metadata.kv_indices.max()) // case.page_size + 2) * case.page_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    query = normal(metadata.num_rows, case.heads, case.head_dim)
    keys, values = (normal(num_slots, case.kv_heads, case.head_dim) for _ in range(2))
    query[..., 0] = 4.0
    keys[..., 0] = math.log(int(metadata.kv_lens_cpu.max()) + 2) / (4.0 * case.params.scaling)  # nobody's are seen, too
    keys[metadata.kv_indices.long(), :, 0] = 0.0
    kv = metadata.kv_indptr_cpu.tolist()
    for i, context in enumerate(case.contexts):
        slots = metadata.kv_indices[kv[i] : kv[i + 1]].long()
        places = {0, context - 1, *range(context, len(slots))}
        if case.window is not None:
            # A row at depth d sees the context from context + d - window + 1 on.
            places |= {context - case.window + d for d in range(-1, 4)}
        chosen = torch.tensor(sorted(place for place in places if 0 <= place < len(slots)), device=device)
        keys[slots[chosen], :, 0] = math.log(max(len(slots), 2)) / (4.0 * case.params.scaling)
    return Step(query.to(dtype), keys.to(dtype), values.to(dtype), metadata)


def make_metadata(
    parents: list[list[int]],
    contexts: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator,
    page_size: int = 1,
) -> TreeMetadata:
    counts = [len(rows) for rows in parents]
    kv_lens = [context + count for context, count in zip(contexts, counts, strict=True)]
    qo_indptr, kv_indptr = (np.cumsum([0, *numbers], dtype=np.int32) for numbers in (counts, kv_lens))
    flat = [np.array(rows, dtype=np.int32) for rows in parents]
    bits, is_causal = ancestor_bits(np.concatenate(flat), qo_indptr)
    depths = [ancestor_mask(rows).sum(1) - 1 for rows in flat]
    positions = np.concatenate([c + depth for c, depth in zip(contexts, depths, strict=True)])
    slots = _slots(kv_lens, page_size, device, generator)
    last = [slots[end - count : end] for end, count in zip(kv_indptr[1:].tolist(), counts, strict=True)]
    return TreeMetadata(
        qo_indptr=torch.from_numpy(qo_indptr).to(device),
        kv_indptr=torch.from_numpy(kv_indptr).to(device),
        kv_indices=slots,
        ancestors=torch.from_numpy(bits).to(device),
        positions=torch.from_numpy(positions.astype(np.int32)).to(device),
        slot_mapping=torch.cat(last).long(),
        qo_indptr_cpu=torch.from_numpy(qo_indptr),
        kv_indptr_cpu=torch.from_numpy(kv_indptr),
        kv_lens_cpu=torch.tensor(kv_lens, dtype=torch.int32),
        max_rows=max(counts),
        is_causal=is_causal,
    )


def _slots(kv_lens: list[int], page_size: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """int32 [sum of kv_lens]: every request's, in pages anywhere; page 0 is nobody's."""
    counts = [-(-length // page_size) for length in kv_lens]
    pages = torch.randperm(sum(counts), generator=generator, device=device).int() + 1
    slots = pages[:, None] * page_size + torch.arange(page_size, dtype=torch.int32, device=device)
    each = slots.split(counts)
    return torch.cat([mine.flatten()[:length] for mine, length in zip(each, kv_lens, strict=True)])


def reference(step: Step, params: AttentionParams) -> torch.Tensor:
    """The exact answer: the same 16-bit inputs, everything else in fp32. [num_rows, num_heads, head_dim]"""
    kernel = TorchKernel()
    return kernel.run(step.query.float(), step.key_cache.float(), step.value_cache.float(), step.metadata, params)


def compare(
    out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, softcap: float | None = None
) -> dict[str, object]:
    """The largest and the mean error, and whether the largest is one of rounding."""
    errors = (out.float() - exact).abs()
    largest = float(errors.max())
    of_tanh = 0.0 if softcap is None or dtype == torch.float32 else softcap * TANH_ERROR
    is_right = bool(torch.isfinite(out).all()) and largest <= TOLERANCE[dtype] + of_tanh
    return {"is_right": is_right, "max_error": round(largest, 6), "mean_error": round(float(errors.mean()), 7)}
