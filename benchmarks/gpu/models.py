"""Models and engines of the kit: random weights of a named shape, made where they are to run."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batchserve.attention.paged import PagedBackend
from batchserve.config import EngineConfig
from batchserve.draft.base import NullDrafter
from batchserve.engine.build import BuiltEngine, build_engine
from batchserve.runner import loader
from batchserve.runner.loader import resolve_model
from benchmarks.gpu.kit import Kit
from benchmarks.gpu.modules import is_ready, stock, variant

MAX_POSITIONS = 16_384  # beyond the models' own: how long a step takes does not depend on what the positions mean
SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 32},
    "llama-3-8b": {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 8},
    "dry-a": {"vocab_size": 32_000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2},
    "dry-b": {"vocab_size": 32_000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


def shape_names(kit: Kit) -> tuple[str, str]:
    """The two shapes: every head with K/V of its own, and grouped heads."""
    names: tuple[str, str] = kit.pick(("llama-2-7b", "llama-3-8b"), ("dry-a", "dry-b"))
    return names


def random_llama(kit: Kit, shape: str, attention: str = "eager", **changes: Any) -> LlamaForCausalLM:
    """Its answers mean nothing, its steps cost what the shape costs; bf16, fp32 in a dry run. It has no end token."""
    config = LlamaConfig(
        **{**SHAPES[shape], **changes},
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(kit.device):
        dtype = kit.pick(torch.bfloat16, torch.float32)
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    ready: LlamaForCausalLM = model.eval()
    return ready


def weight_bytes(model: torch.nn.Module) -> int:
    """What a step reads of the weights: all but the table that a few rows are taken from."""
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not table)


def engine_on(
    kit: Kit,
    model: LlamaForCausalLM,
    name: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    with_tokenizer: bool = False,
    **options: Any,
) -> BuiltEngine:
    """build_engine() on weights that exist already; no drafter, for a driver to give one, unless `options` has it."""
    folder = kit.scratch / name
    if not folder.exists():
        folder.mkdir()
        model.config.save_pretrained(folder)
        if with_tokenizer:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(Path(resolve_model("bundled")) / file, folder / file)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    defaults = {"cache_dir": str(kit.scratch / "cache"), "drafter": "none", **backend_options(kit, head_dim)}
    # The only way in: weights of this size have no business on a disk.
    said: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        said.append(text)

    with mock.patch.object(loader, "_load_weights", return_value=model):
        config = EngineConfig(model=str(folder), dtype=kit.pick("bfloat16", "float32"), **{**defaults, **options})
        drafter = NullDrafter() if config.drafter == "none" else None
        engine = build_engine(config, say, drafter=drafter, clock=clock)
    check_graphs(engine, config.enforce_eager, said)
    return engine


def num_graphs(engine: BuiltEngine) -> int:
    """Buckets that were captured; 0: all steps are eager."""
    graphs = engine.core.runner.graphs
    return 0 if graphs is None else len(graphs.buckets)


def check_graphs(engine: BuiltEngine, is_eager: bool, said: Sequence[str] = ()) -> None:
    """Raises RuntimeError where there are no graphs though there should be: eager steps must not pass for them.

    said: what the engine said at its start, which has the reason.
    """
    backend = engine.core.runner.backend
    can_be = isinstance(backend, PagedBackend) and backend.device.type == "cuda" and backend.kernel.can_be_captured
    if can_be and not is_eager and not num_graphs(engine):
        reasons = [text for text in said if text.startswith("all steps are eager")]
        raise RuntimeError("; ".join(reasons) or "the engine's steps are eager, and no graphs")


def backend_options(kit: Kit, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """device, attention_backend and flashinfer_mask: the fastest whose kernels need no minutes of compiling."""
    if kit.is_dry:
        # The fewer rows a step may have, the sooner all sizes of steps have been timed at start.
        return {"device": "cpu", "attention_backend": "torch", "max_num_batched_tokens": 40}
    options: dict[str, Any] = {"device": "cuda", "attention_backend": kit.backend}
    if kit.backend in ("auto", "flashinfer"):
        has_stock = is_ready(kit, stock(head_dim, dtype))
        if has_stock and is_ready(kit, variant(head_dim, dtype)):
            options["flashinfer_mask"] = "tree"
        if kit.backend == "auto":
            options["attention_backend"] = "flashinfer" if has_stock else "triton"
    return options


def all_backends(kit: Kit, head_dim: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """By name, the options of every backend that can run now."""
    if kit.is_dry:
        return {"torch": backend_options(kit, head_dim)}
    found: dict[str, dict[str, Any]] = {}
    if is_ready(kit, stock(head_dim, dtype)):
        found["flashinfer_custom"] = {"device": "cuda", "attention_backend": "flashinfer", "flashinfer_mask": "custom"}
        if is_ready(kit, variant(head_dim, dtype)):
            found["flashinfer_tree"] = {**found["flashinfer_custom"], "flashinfer_mask": "tree"}
    found["triton"] = {"device": "cuda", "attention_backend": "triton"}
    return found


def graph_modes(kit: Kit) -> dict[str, dict[str, Any]]:
    """The engine as it is, without graphs, and compiled, as far as it has these; a CPU has none of them."""
    known = set() if kit.is_dry else {field.name for field in dataclasses.fields(EngineConfig)}
    modes = {"eager": {"enforce_eager": True}, "compiled": {"compile_model": True}}
    return {"default": {}, **{name: options for name, options in modes.items() if known >= options.keys()}}
