"""Determines a model's kind from its configuration, and refuses anything but a causal language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto import modeling_auto

from batchserve.errors import UnsupportedModelError
from batchserve.runner.checkpoint import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from batchserve.runner.checkpoint import TensorInfo

QUANTIZATION_KEYS = {  # key of config.json: format if it names no quant_method
    "quantization_config": "an unnamed method",
    "compression_config": "compressed-tensors",
    "quantization": "MLX",
}
QUANTIZATION_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt"}
ABBREVIATIONS = frozenset({"awq", "fp8", "gptq", "hqq", "mxfp4"})
FLOATING_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
PACKED_DTYPES = ("I4", "U4", "I8", "U8", "I16", "U16", "I32", "U32")
WANTED = "; causal language models are served"
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
TASKS = {
    name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES").lower().replace("_", " "): mapping
    for name, mapping in vars(modeling_auto).items()
    if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES") and "PRETRAINING" not in name
}


def check_unquantised(config: dict[str, Any], folder: Path, named: str) -> None:
    """Raises UnsupportedModelError if quantised. transformers would ask for a package, or silently dequantise."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, default in QUANTIZATION_KEYS.items():
            if (described := part.get(key)) is not None and described is not False:
                method = _format_of(described, default) if isinstance(described, dict) else default
                raise _quantised(method, key, named)
    for file, method in QUANTIZATION_FILES.items():
        if (folder / file).exists():
            raise _quantised(method, file, named)


def check_dtypes(tensors: dict[str, TensorInfo], named: str) -> None:
    """Raises UnsupportedModelError for weights of 8 bits or fewer, or packed into integers."""
    for name, tensor in tensors.items():
        is_packed = tensor.dtype in PACKED_DTYPES and len(tensor.shape) > 1 and name.endswith("weight")
        if is_packed or tensor.dtype.startswith(("F8_", "F6_", "F4")):
            raise _quantised("FP8" if tensor.dtype.startswith("F8") else tensor.dtype, name, named)


def check_numbers(model: PreTrainedModel, tensors: dict[str, TensorInfo], named: str) -> None:
    """Raises UnsupportedModelError if integers, booleans or complex numbers were loaded as weights."""
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and name in tensors and tensors[name].dtype not in FLOATING_DTYPES:
            raise _quantised(tensors[name].dtype, name, named)


def _format_of(described: dict[str, Any], default: str) -> str:
    if any(key.startswith(("load_in_", "bnb_")) for key in described):
        default = "bitsandbytes"
    method = str(described.get("quant_method") or default)
    return method.upper() if method in ABBREVIATIONS else method


def _quantised(method: str, where: str, named: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{named}: its weights are quantised: {method} (by {where}), which is not supported; use the checkpoint that "
        "is not quantised, in bfloat16, float16 or float32"
    )


def auto_class(read: Any, folder: Path, trusts_code: bool, named: str) -> type:
    """Returns the transformers class that loads this configuration. Raises UnsupportedModelError, naming the kind.

    A composite checkpoint, which has a text model and towers for images or sound, is loaded by its own class: only that
    class knows where the weights of its text model are.
    """
    kind, names = str(read.model_type), _names(read.architectures)
    has_code = trusts_code and "AutoModelForCausalLM" in (getattr(read, "auto_map", None) or {})
    shown = f"{named}: {'/'.join(names) or f'a model of type {kind}'}"
    if getattr(read, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{shown} is an encoder-decoder model{_task_of(kind, names)}{WANTED}")
    if names and not has_code and not any(_is_language_model(name) for name in names):
        is_bare = any(name.endswith("Model") and "Head" not in name for name in names)
        what = "without a language-model head, as embedding models are" if is_bare else "with another head"
        raise UnsupportedModelError(f"{shown} is a model {what}{_task_of(kind, names)}{WANTED}")
    if not names and kind in TASKS["masked lm"] and not getattr(read, "is_decoder", False):
        raise UnsupportedModelError(f"{shown} is an encoder (is_decoder is not set){_task_of(kind, names)}{WANTED}")
    if _has_pooling(folder, named):
        raise UnsupportedModelError(f"{shown} is an embedding model (modules.json has a pooling layer){WANTED}")
    if has_code:
        return AutoModelForCausalLM
    if _is_composite(read) and type(read) in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    if type(read) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    raise UnsupportedModelError(f"{shown} has no text model that transformers can load{_task_of(kind, names)}{WANTED}")


def _names(architectures: object) -> list[str]:
    return [architectures] if isinstance(architectures, str) else [str(name) for name in architectures or ()]  # type: ignore[attr-defined]


def _is_composite(read: Any) -> bool:
    try:
        return read.get_text_config() is not read
    except ValueError:  # there are several
        return True


def _is_language_model(name: str) -> bool:
    known = [*TASKS["causal lm"].values(), *TASKS["multimodal lm"].values()]
    return name in known or name.lower().endswith(tuple(head.lower() for head in HEADS))


def _task_of(kind: str, names: list[str]) -> str:
    """Names the tasks that transformers knows these classes for, or this type of model if no class is named."""
    known = {
        task
        for task, mapping in TASKS.items()
        for each, classes in mapping.items()
        if (not names and each == kind) or {classes} & {*names}
    }
    return f", made for {', '.join(sorted(known))}" if known else ""


def _has_pooling(folder: Path, named: str) -> bool:
    """True if sentence-transformers would pool its hidden states: an embedding model can look like a language model."""
    file = folder / "modules.json"
    return file.exists() and "Pooling" in str(read_json(file, named))
