"""The proof, at load, that a model calls our attention as we assume. A model that fails is refused with the reason."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from batchserve.attention.interface import ATTENTION_NAME, STEP_ARGUMENT, ShapeProbe
from batchserve.errors import UnsupportedModelError
from batchserve.runner.loading_report import warnings_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from batchserve.attention.base import LayerShape

PROBE_TOKENS = 48  # or as many as the model has positions for
SMALL_WINDOW = 12  # stands in for windows and chunks that are longer than the probe
WINDOW_ATTRIBUTES = ("sliding_window", "attention_window_size", "local_attention", "window_size")
# Other kinds (chunked, indexed, compressed, hybrid) hide keys by a mask that our function is not told of, or keep a
# state beside K/V; often only beyond more tokens than the probe has.
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
# Difference of a row's logits, in standard deviations of all logits: the largest one of all rows. In 16-bit types
# rounding adds up over the layers, and in a large vocabulary some logit is always far off; so there it is the median
# row's mean (square), and of any row several times as much: trained models round a few rows worse than the others, and
# a row that is wrong altogether is off by 1.4. A rounding error can send a token to another expert, so where there are
# experts a single row says nothing.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
CAUSAL_TOLERANCE = 2e-3  # of the same rows, before other tokens
TOLERANT_LAYERS = 32  # of so many; of more it grows with their root, as rounding does
OF_ANY_ROW = 8
EXPERT_MODULES = ("expert", "moe", "router")  # in the names of their classes


class ModelProbe:
    """Holds a model's own eager answer to a short prompt, and compares ours with it.

    The prompt is longer than any window: where one is longer it is shrunk for as long as it takes.
    max_model_len: the longest request that is served, in tokens. Every check raises UnsupportedModelError.
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
            # Beyond more tokens than the probe has: it counts rows of the batch (llama4).
            raise UnsupportedModelError(
                f"{self._name} scales queries by their place in a batch (attn_temperature_tuning), not by position_ids"
            )
        generator = torch.Generator().manual_seed(0)
        # Both are known after check_attention.
        self.num_heads, self.has_sinks = 0, False  # heads of queries, the most of any layer
        self.vocab_size, self.dtype = _vocab_size(model), model.dtype
        self._ids = torch.randint(0, _vocab_size(model), (1, num_tokens), generator=generator).to(model.device)
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        if isinstance(padding, int):  # some models count their positions from it
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
        with warnings_held():  # of the configurations of towers that are left out
            model.set_attn_implementation(ATTENTION_NAME)

    def _check_causal(self) -> None:
        """Later tokens do not change what a model answers, by itself, to those before."""
        num_kept = max(1, self._ids.shape[1] // 2)
        ids = self._ids.clone()
        ids[:, num_kept:] = (ids[:, num_kept:] + 1) % _vocab_size(self._model)
        with self._probing(self._alone):
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :num_kept].float()
        # Nothing is rounded differently, but where other rows are given to the same experts.
        bound = TOLERANCE[self._model.dtype] if _has_experts(self._model) else CAUSAL_TOLERANCE
        scale = self._expected.std().clamp_min(1e-6)
        difference = ((logits - self._expected[:num_kept]) / scale).square().mean(-1).sqrt().max().item()
        if not difference <= bound:
            raise UnsupportedModelError(
                f"{self._name} is not causal: with other tokens after them, the logits of the same tokens differ by "
                f"{difference:.2g} standard deviations, bound {bound:.2g}; encoders and embedding models do so"
            )

    def check_attention(self) -> list[LayerShape]:
        """The registered function is called once a layer and gives the eager answer; returns the layers' K/V shapes."""
        probe = ShapeProbe()
        with self._probing("through a registered attention function"):
            logits = self._logits(self._ids, self._positions, probe)
        _check_calls(self._model, probe)
        self.num_heads, self.has_sinks = probe.num_heads, probe.has_sinks
        self._compare(logits, "through a registered attention function", "a mask that it is not told of")
        return [probe.shapes[i] for i in range(len(probe.shapes))]

    def check_swapped(self) -> None:
        """The modules that were swapped in give the eager answer, too."""
        with self._probing("with other modules, as linears whose weights are packed and cannot be read"):
            logits = self._logits(self._ids, self._positions, ShapeProbe())
        self._compare(logits, "with other modules", "a module that was swapped wrongly")

    def check_beside_others(self) -> None:
        """The prompt's rows answer alike in a step where every fourth row, the first and the last included, is another
        request's, at the context's end.

        A model that counts rows instead of reading position_ids, that mixes rows outside of attention (neighbouring
        ones in convolutions and recurrent states, or all, as by a maximum over them), whose rotary factors follow the
        longest position, or that runs its head on other rows than it is told to, is found here.
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
        """A native program gives the eager answer. answers: float32 logits [num_tokens, vocab_size] of the prompt's
        ids, by steps that have a row of another request at the given position, too.
        """
        logits = answers(self._ids[0].tolist(), self._max_model_len - 1)
        self._compare(logits, "as a native program", "an operation that was taken for another")

    def run_tracked(self) -> None:
        """The prompt once more, where tensors count how often they were changed in place."""
        with torch.inference_mode(False), torch.no_grad(), self._probing("where changes in place are counted"):
            self._forward(self._ids.clone(), self._positions.clone(), ShapeProbe())  # tensors of inference mode do not

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
        """Windows are small, sums wide, and whatever fails means that the model cannot be served."""
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
    """Raises UnsupportedModelError where logits, float32 [rows, vocab_size], differ by more than rounding."""
    difference = (actual - expected) / expected.std().clamp_min(1e-6)
    depth = int(model.config.get_text_config().num_hidden_layers) / TOLERANT_LAYERS
    tolerance = TOLERANCE[model.dtype] * max(1.0, math.sqrt(depth))
    rows = difference.square().mean(-1).sqrt()
    worst, of = (difference.abs().max() if model.dtype == torch.float32 else rows.median()).item(), ""
    if worst <= tolerance and rows.max() > OF_ANY_ROW * tolerance and not _has_experts(model):
        worst, tolerance, of = rows.max().item(), OF_ANY_ROW * tolerance, " of one row"
    if not worst <= tolerance:  # NaN fails, too
        raise UnsupportedModelError(
            f"{type(model).__name__} answers differently {where}: logits{of} differ by {worst:.2g} standard "
            f"deviations, bound {tolerance:.2g}; suspect {suspect}"
        )


def _has_experts(model: PreTrainedModel) -> bool:
    names = {type(module).__name__.lower() for module in model.modules()}
    return any(part in name for name in names for part in EXPERT_MODULES)


def _text_model(model: PreTrainedModel) -> Any:
    """Of a composite model the part that is run; its class may be older than the text model's."""
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
    """CUDA's matrix products add up in fp32, however many parts they are split into: in 16 bits the parts' own rounding
    would be as large as what is looked for.
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
