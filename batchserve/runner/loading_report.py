"""Refuses models with weights that transformers skipped or made up. Skipped weights that change no token are logged."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from batchserve.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchserve.runner.checkpoint import TensorInfo

logger = logging.getLogger(__name__)
COLOUR = re.compile(r"\x1b\[\d*m")
ROTARY_BUFFER = re.compile(r"rotary_emb\.\w*(inv_freq|cos|sin)\w*$")
MASK_BUFFER = re.compile(r"\.(attn|attention)\.(masked_)?bias$")
ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # by transformers, whatever a class declares
LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)\.(.*)")
PREDICTION_MODULE = re.compile(r"(^|\.)mtp\w*\.")
PREDICTION_PART = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head|embed_tokens|mtp\w*)(\.|$)")
NUM_PREDICTION_LAYERS = re.compile(r"num\w*(nextn|mtp)|(nextn|mtp)\w*num")


@contextmanager
def suppress_warnings() -> Iterator[list[str]]:
    """Holds back the long warnings that transformers logs while loading, and yields them as a list."""
    held: list[str] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(" ".join(COLOUR.sub("", record.getMessage()).split()))
        return record.levelno >= logging.ERROR

    source = logging.getLogger("transformers.modeling_utils")
    source.addFilter(hold)
    try:
        yield held
    finally:
        source.removeFilter(hold)


def left_out_modules(model: PreTrainedModel) -> list[str]:
    """Returns the paths of a composite model's modules outside its text model and head: towers and connectors."""
    if model.config.get_text_config() is model.config:
        return []
    head: Any = model.get_output_embeddings()
    kept = [name for name, module in model.named_modules() if module is model.get_decoder() or module is head]
    found: list[str] = []
    for name, _ in model.named_modules():
        is_kept = any(_is_within(path, name) or _is_within(name, path) for path in kept)
        if name and not is_kept and not any(_is_within(name, other) for other in found):
            found.append(name)
    return found


def check_report(
    model: PreTrainedModel, report: dict[str, Any], config: dict[str, Any], tensors: dict[str, TensorInfo], named: str
) -> list[str]:
    """Returns the names of the tensors that may be left out. tensors: those of the files.

    Raises ConfigError or UnsupportedModelError if weights would be made up, or if other tensors would be left out.
    """
    for name in sorted(tensors):
        if (other := f"{model.base_model_prefix}.{name}") in tensors:
            raise UnsupportedModelError(f"{named}: its files hold both {name} and {other}, which are one weight")
    towers = left_out_modules(model)

    def is_read(name: str) -> bool:
        return not any(_is_within(name, tower) for tower in towers)

    if missing := sorted(filter(is_read, report["missing_keys"])):
        raise ConfigError(f"{named}: its files lack {len(missing)} weights, {missing[0]} among them")
    if mismatched := sorted(each for each in report["mismatched_keys"] if is_read(each[0])):
        name, found, wanted = mismatched[0]
        raise ConfigError(f"{named}: {name} has shape {list(found)} in the files, {list(wanted)} by its config")
    unexpected = sorted(filter(is_read, report["unexpected_keys"]))
    allowed = _rotary_buffers(model, unexpected) | _prediction_layers(model, unexpected, config)
    allowed |= {name for name in unexpected if name in tensors and _is_mask(name, tensors[name])}
    if unknown := [name for name in unexpected if name not in allowed]:
        raise UnsupportedModelError(
            f"{named}: {type(model).__name__} with this config ({_sizes(model)}) has no place for {len(unknown)} "
            f"tensors of its files, {unknown[0]} among them, and would answer differently without them"
        )
    _check_tied(model, is_read, named)
    return sorted(allowed)


def log_skipped_weights(model: PreTrainedModel, left_out: list[str], names: Collection[str]) -> None:
    """Logs what is not loaded, in one line. names: the files' tensors, as far as they are known."""
    declared = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *ALWAYS_IGNORED)
    loaded = set(model.state_dict())
    ignored = {
        name
        for name in names
        if any(re.search(pattern, name) for pattern in declared) and not _is_loaded(name, loaded, model)
    }
    told = [f"{tower} (the text model alone is served)" for tower in (", ".join(left_out_modules(model)),) if tower]
    if tensors := sorted(ignored.union(left_out)):
        rest = f" and {len(tensors) - 1} more tensors" if len(tensors) > 1 else ""
        told.append(f"{tensors[0]}{rest} ({type(model).__name__} answers without)")
    if told:
        logger.warning("left out of the model's files: %s", "; ".join(told))


def drop_towers(model: PreTrainedModel) -> None:
    """Frees the towers, which are then not packed or compiled. The text model may read its connectors, so they stay."""
    for path in left_out_modules(model):
        if isinstance(model.get_submodule(path), PreTrainedModel):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, None)


def _is_within(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(path + ".")


def _is_loaded(name: str, loaded: set[str], model: PreTrainedModel) -> bool:
    prefix = model.base_model_prefix
    return bool({name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")} & loaded)


def _sizes(model: PreTrainedModel) -> str:
    return f"num_hidden_layers = {model.config.get_text_config().num_hidden_layers}"


def _rotary_buffers(model: PreTrainedModel, names: list[str]) -> set[str]:
    """Returns the rotary buffers that older checkpoints hold. A model computes them from its config."""
    is_rotary = any("rotary_emb" in name for name, _ in model.named_modules())
    return {name for name in names if is_rotary and ROTARY_BUFFER.search(name)}


def _is_mask(name: str, tensor: TensorInfo) -> bool:
    """True if the tensor is a causal mask or masking value, which older checkpoints of the GPT-2 family hold."""
    is_square = len(tensor.shape) == 4 and tensor.shape[:2] == (1, 1) and tensor.shape[2] == tensor.shape[3]
    return MASK_BUFFER.search(name) is not None and (is_square or tensor.shape in ((), (1,)))


def _prediction_layers(model: PreTrainedModel, names: list[str], config: dict[str, Any]) -> set[str]:
    """Returns the tensors of layers after the last that predict further tokens, as many as config.json declares.

    Such a layer has parts that join it to the one before. A layer without them is a layer of the model.
    """
    declared = _num_prediction_layers(config)
    if not declared:
        return set()
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    after: dict[int, set[str]] = {}
    for name in names:
        if (match := LAYER.match(name)) and num_layers <= int(match[1]) < num_layers + declared:
            after.setdefault(int(match[1]), set()).add(name)
    layers = [found for found in after.values() if any(map(PREDICTION_PART.search, found))]
    return set().union(*layers) | {name for name in names if PREDICTION_MODULE.search(name)}


def _num_prediction_layers(config: dict[str, Any]) -> int:
    parts = (config, *(value for value in config.values() if isinstance(value, dict)))
    numbers = [value for part in parts for key, value in part.items() if NUM_PREDICTION_LAYERS.search(key)]
    return max((value for value in numbers if isinstance(value, int)), default=0)


def _check_tied(model: PreTrainedModel, is_read: Any, named: str) -> None:
    """Raises UnsupportedModelError if the config says that two weights are one, but the files hold two.

    transformers would then use both, and other servers only one. It is impossible to tell which one is meant.
    """
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    for target, source in declared.items():
        if is_read(target) and model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source):
            raise UnsupportedModelError(
                f"{named}: by its config (tie_word_embeddings) {target} is {source}, but its files hold another "
                "tensor for each; set tie_word_embeddings to false in config.json, or remove the one that is not meant"
            )
