"""Loading: any causal LM that transformers can, and its tokenizer. Modelling code is never copied or patched."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from batchserve.attention import interface
from batchserve.config import is_model_path
from batchserve.errors import ConfigError, UnsupportedModelError
from batchserve.runner.generation_defaults import (
    check_readable,
    eos_token_ids,
    sampling_defaults,
    warn_of_unapplied,
)
from batchserve.runner.hub import local_snapshot
from batchserve.runner.packed import PackedLinear, can_pack, pack_modules
from batchserve.runner.probe import ModelProbe
from batchserve.runner.siblings import join_siblings, on_trial, plain_product, watch_inputs

if TYPE_CHECKING:
    from batchserve.attention.base import LayerShape
    from batchserve.config import EngineConfig
    from batchserve.runner.siblings import Siblings

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FALLBACK_MAX_MODEL_LEN = 2048
LONGEST_MODEL_LEN = 1 << 31


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed the probe, ready to run, and what the engine needs to know of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    dtype: torch.dtype
    layers: list[LayerShape]
    num_heads: int  # of queries, the most of any layer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float
    default_top_k: int
    default_top_p: float
    has_packed_linears: bool
    device: torch.device = CPU
    has_sinks: bool = False  # attention sinks, in some layer


def resolve_model(model: str) -> str:
    """The folder that a model is in: the bundled one for "bundled", for a hub id that of its local copy.

    Raises ConfigError where there is none.
    """
    if model == "bundled":
        return str(resources.files("batchserve") / "data" / "bundled")
    if not is_model_path(model):
        return local_snapshot(model)
    if not os.path.isdir(model):
        raise ConfigError(f"model = {model!r}: must be a folder that exists, a hub id or 'bundled'")
    return model


def resolve_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError where the device, or the one that the attention backend needs, is not there."""
    name, backend = config.device, config.attention_backend
    if name == "cpu" or backend == "cpu":
        return CPU
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda" or backend in ("flashinfer", "triton"):
        option = "device = 'cuda'" if name == "cuda" else f"attention_backend = {backend!r}"
        why = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
        raise ConfigError(f"{option}: must be on a machine with a CUDA device, and torch {torch.__version__} {why}")
    return CPU


def resolve_dtype(dtype: str, device: torch.device = CPU) -> torch.dtype:
    """What the user said, or bfloat16 where the device multiplies it natively; if not float32, on a GPU float16."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    capabilities = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else ""
    has_bf16 = "AVX512" in capabilities and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


@torch.inference_mode()
def load_model(config: EngineConfig) -> LoadedModel:
    """Load, probe and pack. Raises ConfigError (cannot be loaded) or UnsupportedModelError (would answer wrongly).

    Only for the CPU's own attention backend are modules packed: the GPU path runs them as they are, also on a CPU, but
    for linears of the same input, which are one product everywhere.
    Options of generation_config.json that no request gets are named in a warning.
    """
    interface.register()
    source = resolve_model(config.model)
    device = resolve_device(config)
    dtype = resolve_dtype(config.dtype, device)
    model = _load_weights(source, dtype, config)
    module: torch.nn.Module = model  # transformers' own to() is not annotated
    module.to(device)
    text_config = model.config.get_text_config()
    max_model_len = _model_limit(text_config)
    if not 2 <= max_model_len <= LONGEST_MODEL_LEN:  # a token of a prompt, and one of an answer
        raise ConfigError(
            f"model = {config.model!r}: its longest context is {max_model_len}, must be in 2..{LONGEST_MODEL_LEN}"
        )
    probe = ModelProbe(model, max_model_len)
    layers = probe.check_attention()
    is_packed = has_cpu_backend(config, device) and can_pack(dtype)
    join_siblings(_find_siblings(model, probe), PackedLinear if is_packed else plain_product)
    if is_packed:
        pack_modules(model)
    probe.check_swapped()
    probe.check_beside_others()
    sampling = sampling_defaults(model.generation_config)
    warn_of_unapplied(model.generation_config, max_model_len)
    return LoadedModel(
        model=model,
        tokenizer=load_tokenizer(source, config),
        name=config.served_model_name or config.model,
        dtype=dtype,
        layers=layers,
        num_heads=probe.num_heads,
        vocab_size=int(text_config.vocab_size),
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(model.generation_config.eos_token_id, text_config, text_config.vocab_size),
        default_temperature=0.0 if sampling.temperature is None else sampling.temperature,
        default_top_k=sampling.top_k or 0,
        default_top_p=1.0 if sampling.top_p is None else sampling.top_p,
        has_packed_linears=is_packed,
        device=device,
        has_sinks=probe.has_sinks,
    )


def _find_siblings(model: PreTrainedModel, probe: ModelProbe) -> Siblings:
    """Linears that can be one product: the model is tried with what it would be given, before weights are given up."""
    try:
        with watch_inputs(model) as watch:
            probe.run_tracked()
        siblings = watch.siblings(model)
        if not siblings:
            return []
        with on_trial(siblings):
            probe.check_swapped()
    except UnsupportedModelError as error:
        logger.info("linears of the same input stay apart: %s", error)
        return []
    return siblings


def has_cpu_backend(config: EngineConfig, device: torch.device) -> bool:
    """Whether attention is the CPU's own, not a kernel of the GPU path."""
    return device.type == "cpu" and config.attention_backend in ("auto", "cpu")


def _load_weights(source: str, dtype: torch.dtype, config: EngineConfig) -> PreTrainedModel:
    if (
        Path(source) / "adapter_config.json"
    ).exists():  # without peft, transformers would load the base and say nothing
        raise ConfigError(f"model = {config.model!r}: has an adapter; merge it into the weights first")
    check_readable(Path(source))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            output_loading_info=True,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are told apart below
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # files that somebody else has made end in anything
        known = _known_architecture(source, config)
        if known is not None:
            message = f"model = {config.model!r} ({known}): cannot be loaded: {described(error)}"
            raise UnsupportedModelError(message) from error
        raise ConfigError(f"model = {config.model!r}: cannot be loaded: {described(error)}") from error
    # transformers only warns and goes on with random weights.
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"model = {config.model!r}: its files lack {len(missing)} weights, {missing[0]} among them")
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise ConfigError(
            f"model = {config.model!r}: {name} has shape {list(found)} in the files, {list(wanted)} by its config"
        )
    for each in (model.config, model.config.get_text_config()):
        each.return_dict = True  # a model's own choice; its outputs are read by name here
    if quantization := getattr(model.config, "quantization_config", None):
        raise UnsupportedModelError(f"model = {config.model!r}: quantised weights are not supported: {quantization}")
    ready: PreTrainedModel = model.eval()
    return ready


def _known_architecture(source: str, config: EngineConfig) -> str | None:
    try:
        read = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except Exception:
        return None
    return str(getattr(read, "model_type", "unknown"))


def described(error: Exception) -> str:
    """What an error says; of those that say little without their kind, that too."""
    enough = OSError, ValueError, ImportError, RuntimeError, SafetensorError, StrictDataclassError
    return str(error) if isinstance(error, enough) else repr(error)


def load_tokenizer(source: str, config: EngineConfig) -> PreTrainedTokenizerBase | None:
    """None for a folder without a tokenizer: the model then takes token ids only. Raises ConfigError."""
    folder = Path(source)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        raise ConfigError(f"model = {config.model!r}: its tokenizer cannot be loaded: {described(error)}") from error
    loaded.model_max_length = sys.maxsize  # prompts are checked elsewhere, and references may be longer
    return loaded


def _model_limit(text_config: object) -> int:
    """Longest context. LongRoPE picks its factors by the longest request of a batch: it stays within the short ones."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if rope.get("rope_type") == "longrope":
        return int(rope.get("original_max_position_embeddings") or text_config.original_max_position_embeddings)  # type: ignore[attr-defined]
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return FALLBACK_MAX_MODEL_LEN
