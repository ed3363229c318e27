"""Models and engines of the kit: random weights of a named shape, made where they are to run."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batchserve.attention.paged import PagedBackend
from batchserve.config import EngineConfig
from batchserve.draft.base import NullDrafter
from batchserve.errors import UnsupportedModelError
from batchserve.runner import loader, probe
from batchserve.runner.model_folder import resolve_model
from batchserve.startup.build import BuiltEngine, build_engine
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.modules import is_ready, stock, variant

T = TypeVar("T")
DIFFERENCE = re.compile(r"differ by (\S+) standard deviations")
BEFORE_TRITON = ", FlashInfer"  # behind the names of cells that failed, and are tried again
# A few tokens take nearly all probability, as where a model was trained. Untouched (1.3) a nucleus has half of the
# vocabulary, more than is sorted on the device, and every row with top_p would be the host's.
LOGITS_STD = 5.0
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
    with torch.no_grad():
        model.lm_head.weight.mul_(LOGITS_STD / (config.initializer_range * math.sqrt(config.hidden_size)))
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
        kit.beat()
        print(text, flush=True)
        said.append(text)

    probed = kit.probes[name] = {}
    began_s = time.monotonic()
    with mock.patch.object(loader, "_load_weights", return_value=model), past_probe(probed):
        config = EngineConfig(model=str(folder), dtype=kit.pick("bfloat16", "float32"), **{**defaults, **options})
        drafter = NullDrafter() if config.drafter == "none" else None
        engine = build_engine(config, say, drafter=drafter, clock=clock)
    probed["start_s"] = round(time.monotonic() - began_s, 1)
    check_graphs(engine, config.enforce_eager, said)
    return engine


@contextmanager
def past_probe(found: dict[str, Any]) -> Iterator[None]:
    """Note what the probe at load finds, and go past its bound: in `found`, with why it would have refused the model.

    Its bound in 16 bits was chosen on smaller models. Of random weights nobody reads the answers, and without these
    engines hardly anything would be measured; whether kernels are right is seen elsewhere.
    """
    compare = probe.ModelProbe._compare

    def noted(self: probe.ModelProbe, actual: torch.Tensor, where: str, suspect: str) -> None:
        told = None
        with mock.patch.dict(probe.TOLERANCE, dict.fromkeys(probe.TOLERANCE, -1.0)):
            try:  # it tells the difference where there is too much
                compare(self, actual, where, suspect)
            except UnsupportedModelError as error:
                told = DIFFERENCE.search(str(error))
        found[where] = float(told[1]) if told else math.nan
        try:
            compare(self, actual, where, suspect)
        except UnsupportedModelError as error:
            if not math.isfinite(found[where]):
                raise
            found["gone_past"] = str(error)

    with mock.patch.object(probe.ModelProbe, "_compare", noted):
        yield


def num_graphs(engine: BuiltEngine) -> int:
    """Buckets that were captured; 0: all steps are eager."""
    graphs = engine.core.executor.graphs
    return 0 if graphs is None else len(graphs.buckets)


def check_graphs(engine: BuiltEngine, is_eager: bool, said: Sequence[str] = ()) -> None:
    """Raises RuntimeError where there are no graphs though there should be: eager steps must not pass for them.

    said: what the engine said at its start, which has the reason.
    """
    backend = engine.core.executor.backend
    can_be = isinstance(backend, PagedBackend) and backend.device.type == "cuda" and backend.kernel.can_be_captured
    if can_be and not is_eager and not num_graphs(engine):
        reasons = [text for text in said if text.startswith("all steps are eager")]
        raise RuntimeError("; ".join(reasons) or "the engine's steps are eager, and no graphs")


def backend_options(kit: Kit, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """device, attention_backend and flashinfer_mask: the best that the kit's backend stands for."""
    if kit.is_dry:
        # The fewer rows a step may have, the sooner all sizes of steps have been timed at start.
        return {"device": "cpu", "attention_backend": "torch", "max_num_batched_tokens": 40}
    for options in all_backends(kit, head_dim, dtype).values():
        if kit.backend in ("auto", options["attention_backend"]):
            return options
    return {"device": "cuda", "attention_backend": kit.backend, "enforce_eager": kit.is_eager}


def all_backends(kit: Kit, head_dim: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """By name, the options of every backend that can run now and is not known to be wrong, the fastest first.

    Triton's where nothing is left.
    """
    if kit.is_dry:
        return {"torch": backend_options(kit, head_dim)}
    names = ["triton"]
    if is_ready(kit, stock(head_dim, dtype)):
        names += ["flashinfer_tree"] if is_ready(kit, variant(head_dim, dtype)) else []
        names.append("flashinfer_custom")
        names += ["flashinfer_front"] if is_ready(kit, variant(head_dim, dtype, rows_first=True)) else []
    names = [name for name in names if name not in kit.unfit] or ["triton"]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        backend, _, mask = name.partition("_")
        found[name] = {"device": "cuda", "attention_backend": backend, "enforce_eager": kit.is_eager}
        if mask:
            found[name]["flashinfer_mask"] = mask
    return found


def kernel_of(options: Mapping[str, Any]) -> str:
    """The name of what an engine with these options runs on, as in correctness.json."""
    backend, mask = options["attention_backend"], options.get("flashinfer_mask")
    return f"flashinfer_{mask}" if backend == "flashinfer" and mask else str(backend)


def build_for(
    kit: Kit,
    report: Report,
    place: str,
    cells: Collection[str],
    make: Callable[[Kit], T],
    head_dim: int = 128,
    options: Mapping[str, Any] | None = None,
) -> T | None:
    """What make(kit) gives, an engine, for cells that are still to be run; None: nothing is to be measured.

    Where "auto" means FlashInfer and that fails, in the making or by ending a process in one of the cells, this engine
    is tried once more with Triton, and the part's later ones have Triton from the start. FlashInfer's errors are kept
    under names of their own. options: those that make() has of its own.
    """
    attempts = [kit]
    for name in report.faults(place, *cells):
        if report.cells[name].get("hung_on") in kit.unfit:  # another kernel has its place now, whatever is left of them
            report.rename(name, name + BEFORE_TRITON)
    if kit.backend == "auto" and backend_options(kit, head_dim)["attention_backend"] == "flashinfer":
        attempts.append(dataclasses.replace(kit, backend="triton"))
        if not any(name.endswith(BEFORE_TRITON) for name in report.cells):
            for name in report.faults(place, *cells):
                report.rename(name, name + BEFORE_TRITON)
        if any(name.endswith(BEFORE_TRITON) for name in report.cells):
            del attempts[0]
    while attempts and report.wants(*cells):
        attempt = attempts.pop(0)
        report.on(kernel_of({**backend_options(attempt, head_dim), **(options or {})}), place, *cells)
        made = report.build(place, partial(make, attempt))
        report.about(probes=kit.probes)
        if made is not None:
            return made
        kit.free()  # of what its making got hold of
        if attempts:
            report.rename(place, place + BEFORE_TRITON)
    return None


def graph_modes(kit: Kit) -> dict[str, dict[str, Any]]:
    """The engine as it is, and without or with one of the ways to be faster; a CPU has none of them."""
    known = set() if kit.is_dry or kit.is_eager else {field.name for field in dataclasses.fields(EngineConfig)}
    modes = {
        "eager": {"enforce_eager": True},
        "uncompiled": {"compile_model": "off"},
        "torch_kernels": {"custom_kernels": False},
        "one_by_one": {"kernel_overlap": False},
        "whole": {"compile_model": "whole"},
    }
    return {"default": {}, **{name: options for name, options in modes.items() if known >= options.keys()}}
