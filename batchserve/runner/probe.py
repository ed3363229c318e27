"""Proves at load that a model calls our attention as assumed. A model that fails is refused with the reason."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from batchserve.attention.interface import ATTENTION_NAME, STEP_ARGUMENT, ShapeProbe
from batchserve.errors import UnsupportedModelError
from batchserve.runner.loading_report import suppress_warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from batchserve.attention.base import LayerShape

PROBE_TOKENS = 48  # fewer if the model has fewer positions
SMALL_WINDOW = 12  # replaces windows and chunks that are longer than the probe
WINDOW_ATTRIBUTES = ("sliding_window", "attention_window_size", "local_attention", "window_size")
# Other kinds (chunked, indexed, compressed, hybrid) hide keys by a mask that our function does not get, or keep a state
# besides K/V; often only with more tokens than the probe has.
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
# Bound of the difference in logits, in standard deviations of all logits. In float32 it is for the largest difference.
# In 16-bit types, rounding adds up over the layers, and some logit of a large vocabulary is always far off. There it is
# for the median row's root mean square, and OF_ANY_ROW times as much for any row: trained models round a few rows worse
# than the others, and a row that is entirely wrong is off by 1.4. With experts a single row says nothing, because a
# rounding error can send a token to another expert.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
CAUSAL_TOLERANCE = 2e-3  # for rows before the tokens that differ
TOLERANT_LAYERS = 32  # for up to this many; above, it grows with the square root of the number, as rounding does
OF_ANY_ROW = 8
EXPERT_MODULES = ("expert", "moe", "router")  # parts of their class names


class ModelProbe:
    """Holds a model's own eager logits for a short prompt, and compares ours with them.

    The prompt is longer than any attention window, as longer windows are shrunk during the probe. max_model_len: the
    longest request that is served, in tokens. Every check raises UnsupportedModelError.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self._model, self._name, self._max_model_len = model, type(model).__name__, max_model_len
        num_tokens = min(PROBE_TOKENS, max_model_len)
        text_model = _text_model(model)
        is_compatible = getattr(text_model, "is_backend_compatible", None)
        if is_compatible is None or not is_compatible():
            raise UnsupportedModelError(f"{self._name} does not go through transformers' AttentionInterface")
        if unknown := sorted(
            {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - KNOWN_LAYER_TYPES
        ):
            raise UnsupportedModelError(
                f"{self._name} has layers of type {', '.join(unknown)}: only full and sliding attention are known here"
            )
        if getattr(model.config.get_text_config(), "attn_temperature_tuning", None):
            # llama4 scales only beyond more tokens than the probe has, and counts rows of the batch.
            raise UnsupportedModelError(
                f"{self._name} scales queries by their place in a batch (attn_temperature_tuning), not by position_ids"
            )
        generator = torch.Generator().manual_seed(0)
        # check_attention sets both.
        self.num_heads, self.has_sinks = 0, False  # query heads, the most of any layer
        self.vocab_size, self.dtype = _vocab_size(model), model.dtype
        self._ids = torch.randint(0, _vocab_size(model), (1, num_tokens), generator=generator).to(model.device)
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        if isinstance(padding, int):  # some models count positions from it
            self._ids[self._ids == padding] = (padding + 1) % _vocab_size(model)
        self._positions = torch.arange(num_tokens, device=model.device).unsqueeze(0)
        self._alone = "by itself" if text_model is model else "as a text model alone, without its towers"
        with self._probing(self._alone):
            model.set_attn_implementation("eager")
            self._expected = model(input_ids=self._ids, use_cache=False).logits[0].float()
        if not self._expected.isfinite().all():
            raise UnsupportedModelError(
                f"{self._name} gives logits that are NaN or infinite, by itself: its weights are damaged, or "
                f"{str(model.dtype).removeprefix('torch.')} is too narrow for its numbers"
            )
        self._check_causal()
        with suppress_warnings():  # about the configurations of towers that are left out
            model.set_attn_implementation(ATTENTION_NAME)

    def _check_causal(self) -> None:
        """Checks that later tokens do not change the model's own logits for earlier ones."""
        num_kept = max(1, self._ids.shape[1] // 2)
        ids = self._ids.clone()
        ids[:, num_kept:] = (ids[:, num_kept:] + 1) % _vocab_size(self._model)
        with self._probing(self._alone):
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :num_kept].float()
        # Rounding is the same, unless other rows go to the same experts.
        bound = TOLERANCE[self._model.dtype] if _has_experts(self._model) else CAUSAL_TOLERANCE
        scale = self._expected.std().clamp_min(1e-6)
        difference = ((logits - self._expected[:num_kept]) / scale).square().mean(-1).sqrt().max().item()
        if not difference <= bound:
            raise UnsupportedModelError(
                f"{self._name} is not causal: with other tokens after them, the logits of the same tokens differ by "
                f"{difference:.2g} standard deviations, bound {bound:.2g}; encoders and embedding models do so"
            )

    def check_attention(self) -> list[LayerShape]:
        """Checks that the registered function runs once per layer, with the eager logits. Returns the K/V shapes."""
        probe = ShapeProbe()
        with self._probing("through a registered attention function"):
            logits = self._logits(self._ids, self._positions, probe)
        _check_calls(self._model, probe)
        self.num_heads, self.has_sinks = probe.num_heads, probe.has_sinks
        self._compare(logits, "through a registered attention function", "a mask that it is not told of")
        return [probe.shapes[i] for i in range(len(probe.shapes))]

    def check_swapped(self) -> None:
        """Checks that the swapped modules give the eager logits."""
        with self._probing("with other modules, as linears whose weights are packed and cannot be read"):
            logits = self._logits(self._ids, self._positions, ShapeProbe())
        self._compare(logits, "with other modules", "a module that was swapped wrongly")

    def check_mixed_batch(self) -> None:
        """Checks the prompt's rows next to rows of another request, which are at the end of the context.

        Every fourth row is the other request's, including the first and the last. This finds models that count rows
        instead of reading position_ids, that mix rows outside of attention (neighbours in convolutions and recurrent
        states, or all rows, as in a maximum), whose rotary factors depend on the longest position, or that do not run
        the head on the rows asked for.
        """
        places = torch.arange(self._ids.shape[1], device=self._model.device)
        rows = places // 3 * 4 + places % 3 + 1
        is_own = torch.zeros(int(rows[-1]) + 2, dtype=torch.bool, device=rows.device)
        is_own[rows] = True
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, _vocab_size(self._model), (1, len(is_own)), generator=generator).to(rows.device)
        positions = torch.full_like(ids, self._max_model_len - 1)
        ids[:, is_own], positions[:, is_own] = self._ids, self._positions
        with self._probing("beside rows at a far position"):
            logits = self._logits(ids, positions, ShapeProbe(is_own), logits_to_keep=is_own.nonzero()[:, 0])
        if logits.shape != self._expected.shape:
            raise UnsupportedModelError(
                f"{self._name} gives logits of shape {list(logits.shape)} where {list(self._expected.shape)} were "
                "asked for: its head does not run on chosen rows"
            )
        self._compare(logits, "beside rows at a far position", "rows of one request that change another's")

    @torch.inference_mode()
    def check_program(self, answers: Callable[[Sequence[int], int], torch.Tensor]) -> None:
        """Checks that a native program gives the eager logits. answers: takes the prompt's ids and a position, and
        returns float32 [num_tokens, vocab_size] from steps that also have another request's row at that position.
        """
        logits = answers(self._ids[0].tolist(), self._max_model_len - 1)
        self._compare(logits, "as a native program", "an operation that was taken for another")

    def run_tracked(self) -> None:
        """Runs the prompt again outside of inference mode, where tensors count their in-place changes."""
        with torch.inference_mode(False), torch.no_grad(), self._probing("where changes in place are counted"):
            self._forward(self._ids.clone(), self._positions.clone(), ShapeProbe())  # inference tensors count nothing

    @torch.inference_mode()
    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, probe: ShapeProbe, **more: Any) -> torch.Tensor:
        return self._forward(ids, positions, probe, **more)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, probe: ShapeProbe, **more: Any) -> torch.Tensor:
        step: dict[str, Any] = {STEP_ARGUMENT: probe}
        output = self._model(input_ids=ids, position_ids=positions, use_cache=False, **step, **more)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _compare(self, actual: torch.Tensor, where: str, suspect: str) -> None:
        compare_logits(self._model, actual, self._expected, where, suspect)

    @contextmanager
    def _probing(self, how: str) -> Iterator[None]:
        """Shrinks windows, widens sums, and turns any failure into an UnsupportedModelError."""
        try:
            with _small_windows(self._model), _wide_sums():
                yield
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"{self._name} fails in the probe at load, {how}: {error!r}") from error


def compare_logits(
    model: PreTrainedModel, actual: torch.Tensor, expected: torch.Tensor, where: str, suspect: str
) -> None:
    """Raises UnsupportedModelError if float32 logits [rows, vocab_size] differ by more than rounding."""
    difference = (actual - expected) / expected.std().clamp_min(1e-6)
    depth = int(model.config.get_text_config().num_hidden_layers) / TOLERANT_LAYERS
    tolerance = TOLERANCE[model.dtype] * max(1.0, math.sqrt(depth))
    rows = difference.square().mean(-1).sqrt()
    worst, of = (difference.abs().max() if model.dtype == torch.float32 else rows.median()).item(), ""
    if worst <= tolerance and rows.max() > OF_ANY_ROW * tolerance and not _has_experts(model):
        worst, tolerance, of = rows.max().item(), OF_ANY_ROW * tolerance, " of one row"
    if not worst <= tolerance:  # true for NaN, too
        raise UnsupportedModelError(
            f"{type(model).__name__} answers differently {where}: logits{of} differ by {worst:.2g} standard "
            f"deviations, bound {tolerance:.2g}; suspect {suspect}"
        )


def _has_experts(model: PreTrainedModel) -> bool:
    names = {type(module).__name__.lower() for module in model.modules()}
    return any(part in name for name in names for part in EXPERT_MODULES)


def _text_model(model: PreTrainedModel) -> Any:
    """Returns the decoder of a composite model, or else the model. A composite class may be older than its decoder."""
    is_composite = hasattr(model, "config") and model.config.get_text_config() is not model.config
    return model.get_decoder() if is_composite else model


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def _check_calls(model: PreTrainedModel, probe: ShapeProbe) -> None:
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    if num_layers < 1:
        raise UnsupportedModelError(f"{type(model).__name__}: num_hidden_layers = {num_layers}: must be at least 1")
    if sorted(probe.calls) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers but called the registered attention for layers "
            f"{sorted(probe.calls)}: it must call it exactly once a layer"
        )


@contextmanager
def _wide_sums() -> Iterator[None]:
    """Makes CUDA matrix products accumulate in fp32 however many parts they are split into. The parts' rounding in 16
    bits would be as large as the differences that the probe looks for.
    """
    matmul = torch.backends.cuda.matmul
    saved = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = saved


@contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shrinks windows and chunks beyond SMALL_WINDOW, on the config and on every module that holds one."""
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
