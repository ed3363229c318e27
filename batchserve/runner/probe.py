"""The proof, at load, that a model calls our attention as we assume. A model that fails is refused with the reason."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from batchserve.attention.interface import ATTENTION_NAME, STEP_ARGUMENT, ShapeProbe, ValueProbe
from batchserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from batchserve.attention.base import LayerShape

PROBE_TOKENS = 48
SMALL_WINDOW = 12  # stands in for windows and chunks that are longer than the probe
WINDOW_ATTRIBUTES = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")
# Largest difference of logits, in standard deviations of the logits, by bits of the dtype's mantissa.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


@torch.inference_mode()
def probe_attention(model: PreTrainedModel) -> list[LayerShape]:
    """The K/V shape of every layer; leaves the model switched to our attention.

    The model's own eager forward is compared with one through the registered function, over a prompt longer than any
    window or chunk: where those are longer than the probe they are shrunk for as long as it takes.
    Raises UnsupportedModelError.
    """
    name = type(model).__name__
    is_compatible = getattr(model, "is_backend_compatible", None)
    if is_compatible is None or not is_compatible():
        raise UnsupportedModelError(f"{name} does not go through transformers' AttentionInterface")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _vocab_size(model), (1, PROBE_TOKENS), generator=generator)
    positions = torch.arange(PROBE_TOKENS).unsqueeze(0)
    probe = ShapeProbe()
    with _small_windows(model):
        try:
            model.set_attn_implementation("eager")
            expected = model(input_ids=ids, use_cache=False).logits[0].float()
            model.set_attn_implementation(ATTENTION_NAME)
            output = model(input_ids=ids, position_ids=positions, use_cache=False, **{STEP_ARGUMENT: probe})
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"{name} fails with a registered attention function: {error!r}") from error
    _check_calls(model, probe)
    _check_logits(name, output.logits[0].float(), expected, TOLERANCE[model.dtype])
    return [probe.shapes[i] for i in range(len(probe.shapes))]


@torch.inference_mode()
def is_row_invariant(model: PreTrainedModel) -> bool:
    """Whether rows come out bit-identical in batches of 4 to 48 rows, attention aside (a row sees itself only)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, _vocab_size(model), (1, PROBE_TOKENS), generator=generator)
    positions = torch.arange(PROBE_TOKENS).unsqueeze(0)

    def logits(start: int, count: int) -> torch.Tensor:
        rows = slice(start, start + count)
        step: dict[str, Any] = {STEP_ARGUMENT: ValueProbe()}
        output = model(input_ids=ids[:, rows], position_ids=positions[:, rows], use_cache=False, **step)
        result: torch.Tensor = output.logits[0]
        return result

    whole = logits(0, PROBE_TOKENS)
    return all(torch.equal(whole[at : at + n], logits(at, n)) for at, n in ((0, 4), (3, 7), (20, 16), (40, 8)))


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def _check_calls(model: PreTrainedModel, probe: ShapeProbe) -> None:
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    if sorted(probe.calls) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers but called the registered attention for layers "
            f"{sorted(probe.calls)}: it must call it exactly once a layer"
        )


def _check_logits(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    deviation = expected.std().clamp_min(1e-6)
    worst = ((actual - expected).abs().max() / deviation).item()
    if not worst <= tolerance:  # NaN fails, too
        raise UnsupportedModelError(
            f"{name} answers differently through a registered attention function: logits differ by {worst:.2g} "
            f"standard deviations, bound {tolerance}. Its masks must do something that the function is not told of"
        )


@contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shrink windows and chunks beyond SMALL_WINDOW, on the config and on every module that holds one."""
    holders: list[Any] = [model.config, model.config.get_text_config()]
    holders += model.modules()
    holders += [module.config for module in model.modules() if hasattr(module, "config")]
    saved: list[tuple[Any, str, int]] = []
    for holder in holders:
        for attribute in WINDOW_ATTRIBUTES:
            value = getattr(holder, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > SMALL_WINDOW:
                saved.append((holder, attribute, value))
                setattr(holder, attribute, SMALL_WINDOW)
    try:
        yield
    finally:
        for holder, attribute, value in saved:
            setattr(holder, attribute, value)
