"""FlashInfer's FA2 paged prefill kernels over slots (pages of one token): causal, custom mask, and a tree variant.

FlashInfer is imported only when a kernel is made: its import asks the GPU for its architecture, after which a process
must not fork. Its version is pinned because two private names are used (`_mask_indptr_buf`, and the variant's module),
and because the layout of its arguments may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import metadata as packages
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from batchserve.attention.cuda_toolkit import name_toolkit
from batchserve.attention.flashinfer_front import min_key_block, new_rows_first
from batchserve.attention.flashinfer_mask import packed_mask
from batchserve.attention.flashinfer_variant import variant_arguments, variant_run_arguments
from batchserve.attention.step_buffer import BufferRing
from batchserve.attention.tree_metadata import TreeKernel
from batchserve.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionParams, LayerShape
    from batchserve.attention.tree_metadata import TreeMetadata

VERSIONS = {"flashinfer-python": "0.6.18.post1", "apache-tvm-ffi": "0.1.15.post2"}
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 128 << 20  # initial size; it grows to what a step needs
PAGE_SIZE = 1
# A graph's query tile is fixed by the most rows of a single request. FlashInfer takes them to be all rows minus one for
# each other request, so the tile is smallest with as many requests as rows. Trees of 4 to 8 rows take half to a third
# of the time with it (docs/gpu.md). Prompts, which larger graphs are for, want larger tiles.
MAX_SMALL_TILES = 256
QUERY_TILE = 3  # index of cta_tile_q in the result of a plan, FlashInfer's PrefillPlanInfo

# jit_args (None: a stock module), float workspace, options of CUDA graphs -> BatchPrefillWithPagedKVCacheWrapper
WrapperFactory = Callable[..., Any]


class _Kind(NamedTuple):
    """The layers that one plan serves. In the tree variant scaling and window are arguments of run(), and None here."""

    is_causal: bool
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    is_asked_all: bool  # the tree variant is asked about every key


class FlashInferKernel(TreeKernel):
    """TreeKernel. Steps in which every request is a chain go to the stock causal kernel, all others to `mask`.

    mask: "custom" is FlashInfer's own custom mask, a bit for every row and key, with the window in it. "tree" is our
    variant of the kernel, which reads only the rows' ancestor bits and, for windows, their positions. "front" is the
    same over keys that begin with the step's own rows. The kernel then asks only about a first block of keys
    (flashinfer_variant.py), if no request has more rows than a block and there is no window.

    Each kind of layer has one wrapper, planned once per step. All share one float workspace, so steps must be on one
    stream. Each bucket of CUDA graphs has its own wrappers, and no causal ones. Raises ConfigError if FlashInfer is
    missing, has another version, or has no kernel for the model.
    """

    can_be_captured = True
    most_rows_as_requests = MAX_SMALL_TILES

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        mask: str = "tree",
        make_wrapper: WrapperFactory | None = None,
    ) -> None:
        _check_model(layers, num_heads, dtype)
        self.name = f"flashinfer_{mask}"
        self._has_variant = mask in ("tree", "front")
        self._has_rows_first = mask == "front"
        blocks = [min_key_block(layer.key_dim, device) for layer in layers] if self._has_rows_first else [0]
        self._max_front_rows = min(blocks)  # per request; with more, the variant is asked about every key
        self._dtype = dtype
        self._device = device
        self._make_wrapper = make_wrapper or load_wrapper()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, _Wrapper] = {}
        self._planned: set[_Kind] = set()
        # Keyed by the bucket's metadata, whose tensors all its steps use, because numbers of rows may not be unique.
        # Weak, because the wrappers of graphs that are gone would keep their memory.
        self._graph_wrappers: WeakKeyDictionary[TreeMetadata, dict[_Kind, _GraphWrapper]] = WeakKeyDictionary()
        # Passing a mask, even this one, makes the kernel ask the variant about every key.
        self._no_mask = torch.zeros(16, dtype=torch.uint8, device=device)

    def plan(self, metadata: TreeMetadata) -> None:
        self._planned.clear()
        if metadata.bucket is not None:
            for wrapper in self._graph_wrappers.get(metadata, {}).values():
                wrapper.plan(metadata)

    def order(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> None:
        if self._has_rows_first:
            kv_indices.copy_(new_rows_first(qo_indptr, kv_indptr, kv_indices))

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: TreeMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        if params.sinks is not None:
            raise UnsupportedModelError("FlashInfer attention has no sinks: attention_backend must be triton or torch")
        is_variant = self._has_variant and not metadata.is_causal
        kind = _Kind(
            is_causal=metadata.is_causal,
            num_heads=query.shape[1],
            num_kv_heads=key_cache.shape[1],
            key_dim=key_cache.shape[2],
            value_dim=value_cache.shape[2],
            scaling=None if is_variant else params.scaling,
            sliding_window=None if is_variant else params.sliding_window,
            softcap=params.softcap,
            is_asked_all=is_variant and (params.sliding_window is not None or metadata.max_rows > self._max_front_rows),
        )
        if metadata.bucket is not None:
            wrapper = self._graph_wrapper(metadata.bucket, kind, metadata, is_variant)
        else:
            if kind not in self._planned:
                self._plan(kind, metadata, is_variant)
                self._planned.add(kind)
            wrapper = self._wrappers[kind].wrapper
        more = variant_run_arguments(metadata, params) if is_variant else ()
        if is_variant and self._has_rows_first:
            more = (*more, wrapper._plan_info[QUERY_TILE])
        caches = self._in_pages(key_cache), self._in_pages(value_cache)
        out: torch.Tensor = wrapper.run(query.contiguous(), caches, *more)
        return out

    def _plan(self, kind: _Kind, metadata: TreeMetadata, is_variant: bool) -> None:
        if kind not in self._wrappers:
            wrapper = self._make_wrapper(self._jit_arguments(kind, is_variant), self._workspace)
            self._wrappers[kind] = _Wrapper(wrapper, self._device)
        target = self._wrappers[kind]
        packed: torch.Tensor | None = None
        offsets: torch.Tensor | None = None
        if kind.is_asked_all:
            packed = self._no_mask
        elif not (kind.is_causal or is_variant):
            packed, offsets = packed_mask(metadata, kind.sliding_window)
        if is_variant and self._has_rows_first:
            ordered = new_rows_first(metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices)
            metadata = dataclasses.replace(metadata, kv_indices=ordered)
        arguments_of_plan = self._plan_arguments(kind, metadata, packed)
        target.wait_for_copy()
        self._fit_workspace(target.wrapper, arguments_of_plan)
        # Except for slots and mask all tensors are on the CPU: plan() would have to wait for tensors on the device.
        target.wrapper.plan(**arguments_of_plan)
        if offsets is not None:
            # plan() leaves the requests' offsets in bits, but its kernel expects bytes.
            target.wrapper._mask_indptr_buf = offsets
        target.mark_copy()

    def _jit_arguments(self, kind: _Kind, is_variant: bool) -> list[Any] | None:
        if not is_variant:
            return None
        has_softcap = kind.softcap is not None
        return variant_arguments(
            kind.key_dim, kind.value_dim, self._dtype, has_softcap, rows_first=self._has_rows_first
        )

    def _graph_wrapper(self, bucket: int, kind: _Kind, metadata: TreeMetadata, is_variant: bool) -> Any:
        """Returns the wrapper for a bucket's layers of this kind; made in the bucket's first step, before capture."""
        wrappers = self._graph_wrappers.setdefault(metadata, {})
        if kind not in wrappers:
            mask = None if is_variant else _MaskBuffers(metadata, kind.sliding_window)
            masks: dict[str, torch.Tensor] = {}
            if mask is not None:
                masks = {"custom_mask_buf": mask.bits, "mask_indptr_buf": mask.offsets}
            elif kind.is_asked_all:
                masks = {"custom_mask_buf": self._no_mask, "mask_indptr_buf": torch.zeros_like(metadata.qo_indptr)}
            wrapper = self._make_wrapper(
                self._jit_arguments(kind, is_variant),
                self._workspace,
                use_cuda_graph=True,
                qo_indptr_buf=metadata.qo_indptr,
                paged_kv_indptr_buf=metadata.kv_indptr,
                paged_kv_indices_buf=metadata.kv_indices,
                paged_kv_last_page_len_buf=torch.ones(metadata.num_requests, dtype=torch.int32, device=self._device),
                **masks,
            )
            # The graph keeps the result of the first plan, which must therefore be for the largest possible step.
            largest = worst_case(metadata)
            arguments = self._plan_arguments(kind, largest, None)
            num_bytes, num_int_bytes = wrapper.workspace_size(**arguments)
            self._grow_workspace(num_bytes)
            # FlashInfer's own is 8 MiB, and several times that in pinned memory. Doubled: no step may run out of it.
            ints = torch.empty(2 * num_int_bytes, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, ints)
            # plan() overwrites the step's buffers with those of the largest step, so they are restored.
            buffers = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices)
            kept = [buffer.clone() for buffer in buffers]
            wrapper.plan(**arguments)
            for buffer, values in zip(buffers, kept, strict=True):
                buffer.copy_(values)
            wrappers[kind] = _GraphWrapper(wrapper, kind, bucket, mask, self._device)
            wrappers[kind].plan(metadata)
        return wrappers[kind].wrapper

    def _plan_arguments(self, kind: _Kind, metadata: TreeMetadata, packed: torch.Tensor | None) -> dict[str, Any]:
        # The tree's own window must not be passed: FlashInfer would count it in rows, not in positions.
        window_left = kind.sliding_window - 1 if kind.is_causal and kind.sliding_window is not None else -1
        return {
            "qo_indptr": metadata.qo_indptr_cpu,
            **self._pages(metadata),
            "num_qo_heads": kind.num_heads,
            "num_kv_heads": kind.num_kv_heads,
            "head_dim_qk": kind.key_dim,
            "head_dim_vo": kind.value_dim,
            "packed_custom_mask": packed,
            "causal": kind.is_causal,
            "sm_scale": kind.scaling,
            "window_left": window_left,
            "logits_soft_cap": kind.softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
            "seq_lens": metadata.kv_lens_cpu,
            "max_token_per_sequence": metadata.max_rows,
        }

    def _pages(self, metadata: TreeMetadata) -> dict[str, Any]:
        """Returns plan()'s arguments for the location of each request's pages."""
        return {
            "paged_kv_indptr": metadata.kv_indptr_cpu,
            "paged_kv_indices": metadata.kv_indices,
            "paged_kv_last_page_len": torch.ones(metadata.num_requests, dtype=torch.int32),
            "page_size": PAGE_SIZE,
        }

    def _in_pages(self, cache: torch.Tensor) -> torch.Tensor:
        """[slots, num_kv_heads, dim] -> [pages, page_size, num_kv_heads, dim]"""
        return cache.unsqueeze(1)

    def _fit_workspace(self, wrapper: Any, arguments: dict[str, Any]) -> None:
        """Gives the wrapper a float workspace that fits this plan; the documented 128 MB are not always enough."""
        num_bytes, num_int_bytes = wrapper.workspace_size(**arguments)
        self._grow_workspace(num_bytes)
        if num_int_bytes > len(wrapper._int_workspace_buffer) or wrapper._float_workspace_buffer is not self._workspace:
            num_int_bytes = max(num_int_bytes, len(wrapper._int_workspace_buffer))
            ints = torch.empty(num_int_bytes, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, ints)

    def _grow_workspace(self, num_bytes: int) -> None:
        """Grows the workspace. Graphs keep the one they were captured with, so the largest graph is captured first."""
        if num_bytes > len(self._workspace):
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _Wrapper:
    """A wrapper that tracks when its pinned buffer may be rewritten: plan() copies from it without waiting."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait_for_copy(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def mark_copy(self) -> None:
        if self._event is not None:
            self._event.record()


class _MaskBuffers:
    """A custom mask at a fixed address, large enough for any step of the bucket."""

    def __init__(self, metadata: TreeMetadata, sliding_window: int | None) -> None:
        num_bytes = -(-metadata.num_rows * metadata.max_kv_len // 8) + metadata.num_requests
        self._sliding_window = sliding_window
        self.bits = torch.zeros(num_bytes, dtype=torch.uint8, device=metadata.qo_indptr.device)
        self.offsets = torch.zeros_like(metadata.qo_indptr)

    def fill(self, metadata: TreeMetadata) -> None:
        packed, offsets = packed_mask(metadata, self._sliding_window)
        self.bits[: len(packed)] = packed
        self.offsets.copy_(offsets)


class _GraphWrapper:
    """A wrapper that a graph replays, planned for the largest step. plan() then plans the later steps.

    It bypasses the wrapper's plan(), which takes ten times as long, and calls the module's with positional arguments.
    That fills one of several pinned buffers and copies it to where the graph's kernels read it.
    """

    def __init__(self, wrapper: Any, kind: _Kind, bucket: int, mask: _MaskBuffers | None, device: torch.device) -> None:
        self.wrapper = wrapper
        self._kind = kind
        self._bucket = bucket
        self._mask = mask
        self._info = list(wrapper._plan_info)
        self._ring = BufferRing(len(wrapper._int_workspace_buffer), device)

    def plan(self, metadata: TreeMetadata) -> None:
        """Plans a step. Raises RuntimeError if the step would need other launches than were captured."""
        if self._mask is not None:
            self._mask.fill(metadata)
        kind = self._kind
        info = self.wrapper._cached_module.plan(
            self.wrapper._float_workspace_buffer,
            self.wrapper._int_workspace_buffer,
            self._ring.take(),
            metadata.qo_indptr_cpu,
            metadata.kv_indptr_cpu,
            metadata.kv_lens_cpu,
            self._bucket,
            metadata.num_requests,
            kind.num_heads,
            kind.num_kv_heads,
            PAGE_SIZE,
            True,  # for a CUDA graph
            kind.key_dim,
            kind.value_dim,
            False,  # causal
            -1,  # window_left
            -1,  # fixed_split_size
            False,  # disable_split_kv
            0,  # num_colocated_ctas
            0,  # uniform_q_len
        )
        self._ring.sent()
        if list(info) != self._info:
            raise RuntimeError(f"FlashInfer plans a step otherwise than its graph: {list(info)}, not {self._info}")


def worst_case(metadata: TreeMetadata) -> TreeMetadata:
    """Returns the step of the bucket with the most work items: all rows are in its first request."""
    rows, indptr = metadata.num_rows, torch.full_like(metadata.qo_indptr_cpu, metadata.num_rows)
    indptr[0] = 0
    kv_lens = torch.zeros_like(metadata.kv_lens_cpu)
    kv_lens[0] = rows
    return dataclasses.replace(
        metadata,
        kv_indices=metadata.kv_indices[:rows],
        qo_indptr_cpu=indptr,
        kv_indptr_cpu=indptr,
        kv_lens_cpu=kv_lens,
    )


def load_wrapper() -> WrapperFactory:
    """Imports FlashInfer and returns its wrapper factory. Raises ConfigError if it is missing or another version."""
    installed = {}
    for name in VERSIONS:
        try:
            installed[name] = packages.version(name)
        except packages.PackageNotFoundError:
            installed[name] = "missing"
    if installed != VERSIONS:
        needed = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
        found = ", ".join(f"{name} {version}" for name, version in installed.items())
        raise ConfigError(f"FlashInfer attention needs {needed} (pip install 'batchserve[cuda]'); installed: {found}")
    name_toolkit()
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except (ImportError, OSError, RuntimeError) as error:  # a missing library, an unknown GPU
        raise ConfigError(f"FlashInfer cannot be imported: {error}") from error

    def make(jit_args: list[Any] | None, workspace: torch.Tensor, **graph_options: Any) -> Any:
        # The variant needs an explicit backend. The stock kernels use the same generation, so that they agree.
        return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", jit_args=jit_args, **graph_options)

    return make


def _check_model(layers: Sequence[LayerShape], num_heads: int, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {str(dtype).removeprefix('torch.')}: must be bfloat16 or float16 for FlashInfer")
    for layer in layers:
        if layer.key_dim != layer.value_dim or layer.key_dim not in HEAD_DIMS:
            raise ConfigError(
                f"head_dim = {layer.key_dim} (K), {layer.value_dim} (V): must be one of "
                f"{', '.join(map(str, HEAD_DIMS))} and the same for FlashInfer"
            )
        if num_heads % layer.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads = {num_heads}: must be a multiple of {layer.num_kv_heads} K/V heads"
            )
