"""The GPU path on a device that is not the CPU, without a GPU: torch's "meta", whose tensors have no contents.

An operator that is given tensors of both devices is an error there, and so is reading a value, for which the host would
have to wait: on a GPU that is slow, and impossible while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchserve.attention import interface
from batchserve.attention.base import AttentionParams, LayerShape
from batchserve.attention.flashinfer_mask import packed_mask
from batchserve.attention.paged import PagedBackend
from batchserve.attention.tree_metadata import TreeKernel, TreeMetadata
from batchserve.kv.slots import SlotAllocator
from batchserve.runner.cuda_graphs import Replay, StepGraphs
from batchserve.runner.fused_linears import fuse_linears, plain_product, watch_inputs
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.queued_step import QueuedStep
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from tests.factories import make_sampling
from tests.tiny_models import SUPPORTED

META = torch.device("meta")
ROWS = {"greedy": 5, "truncated": 4, "sampled": 3}
ON_HOST = ("qo_indptr_cpu", "kv_indptr_cpu", "kv_lens_cpu")
ON_DEVICE = ("qo_indptr", "kv_indptr", "kv_indices", "ancestors", "positions", "slot_mapping")


class EmptyKernel(TreeKernel):
    """A TreeKernel that makes the mask which FlashInfer's would read, and nothing else."""

    name = "empty"
    can_be_captured = True

    def plan(self, metadata: TreeMetadata) -> None:
        assert {getattr(metadata, name).device.type for name in ON_DEVICE} == {"meta"}
        assert {getattr(metadata, name).device.type for name in ON_HOST} == {"cpu"}
        for window in (None, 5):
            mask, begins = packed_mask(metadata, window)
            assert mask.device == begins.device == META

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: TreeMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        assert query.device == key_cache.device == value_cache.device
        return query.new_zeros(*query.shape[:2], value_cache.shape[-1])


class NoCapturer:
    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        return run(), lambda: None


def meta_runner(family: str) -> ModelRunner:
    model_type, options = SUPPORTED[family]
    config = AutoConfig.for_model(model_type, **options)
    interface.register()
    with META:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(interface.ATTENTION_NAME)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_dim, value_dim = getattr(config, "qk_head_dim", None) or dim, getattr(config, "v_head_dim", None) or dim
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layer = LayerShape(num_kv_heads, key_dim, value_dim)
    allocator = SlotAllocator(2000, max_requests=4, max_tokens=256, bytes_per_token=1)
    backend = PagedBackend([layer] * config.num_hidden_layers, torch.bfloat16, META, EmptyKernel(), allocator)
    ids = torch.zeros(1, 3, dtype=torch.int64, device=META)
    step: dict[str, Any] = {interface.STEP_ARGUMENT: interface.ShapeProbe()}
    with watch_inputs(model) as watch:
        model(input_ids=ids, position_ids=ids, use_cache=False, **step)
    fuse_linears(watch.siblings(model), plain_product)
    return ModelRunner(SimpleNamespace(model=model, device=META, num_parameters=0, native=None), backend)  # type: ignore[arg-type]


def step_of(runner: ModelRunner, *names: str) -> RaggedBatch:
    samplings = {
        "greedy": make_sampling(),
        "truncated": make_sampling(temperature=0.8, top_k=20, top_p=0.9),
        "sampled": make_sampling(temperature=0.7),
    }
    trees = {"greedy": [-1, 0, 1, 1, 2], "truncated": [-1, 0, 1, 2], "sampled": [-1, 0, 0]}
    pending = {"greedy": 2, "truncated": 4, "sampled": 1}
    for name in names:
        assert runner.allocator.reserve(name, ROWS[name])
    rows = [RequestRows(n, 0, [3] * ROWS[n], trees[n], pending[n], samplings[n]) for n in names]
    return build_batch(rows)


def check_on_device(step: Any) -> None:
    assert isinstance(step, QueuedStep)
    assert step._logits.device == META
    assert step._copy._host.device == META, "what comes back is still there: a GPU's would be on its way"


@pytest.mark.parametrize("family", SUPPORTED)
def test_nothing_of_a_step_stays_behind_on_the_host_or_waits(family: str) -> None:
    runner = meta_runner(family)
    check_on_device(runner.launch(step_of(runner, *ROWS)))
    for name in ROWS:
        runner.allocator.release(name)
    assert isinstance(runner.backend, PagedBackend)
    runner.graphs = StepGraphs(
        runner.backend,
        runner.run_model,
        NoCapturer(),
        max_rows=8,
        max_num_seqs=4,
        max_model_len=256,
        say=lambda text: None,
    )
    check_on_device(runner.launch(step_of(runner, "greedy")))
    check_on_device(runner.launch(step_of(runner, "truncated", "sampled")))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda tensor: tensor + torch.zeros(3), "not on the expected device"),
        (lambda tensor: torch.cat([tensor, torch.zeros(2)]), "not on the expected device"),
        (lambda tensor: tensor.index_copy_(0, torch.tensor([1]), torch.zeros(1)), "in the same device"),
        (lambda tensor: tensor.sum().item(), "cannot be called on meta tensors"),
        (lambda tensor: bool((tensor > 0).any()), "cannot be called on meta tensors"),
        (lambda tensor: torch.nonzero(tensor), "nonzero"),
    ],
    ids=["sum", "concatenation", "index", "item", "condition", "nonzero"],
)
def test_what_waits_or_mixes_is_seen(mistake: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        mistake(torch.zeros(3, device=META))
