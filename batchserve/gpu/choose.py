"""Chooses the kernels that multiply by a model's weights: at startup all candidates are timed, torch's included."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from batchserve.gpu.linears import ROW_COUNTS, Choices, Shape, Variant, multiply, variants
from batchserve.gpu.norms import rms_norm

logger = logging.getLogger(__name__)

MAX_WEIGHTS = 16  # of one shape, to time a product over; in a large model they exceed the caches together
TIMINGS = 3
ENOUGH_FASTER = 0.98  # of torch's time; otherwise torch's product stays
MAX_ERROR = 1e-2  # relative to the norm of a row of torch's product; rounding to bfloat16 is about 3e-3 of it
# Square products that keep the device busy until all timed work is queued: their size, initial and maximum number.
FILL_FEATURES, FILL_PRODUCTS, MAX_FILLERS = 4096, 10, 80

Product = Callable[[torch.Tensor], torch.Tensor]  # takes the weights
Timer = Callable[[Product, Sequence[torch.Tensor]], float]


class CudaTimer:
    """Times a norm and a product per weight, launched back to back. Returns the seconds of one such pair.

    In a model, too, small kernels run between products. A product that overlaps with them is worth more than its own
    time shows.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, overlaps: bool) -> None:
        self._filler = torch.zeros(FILL_FEATURES, FILL_FEATURES, dtype=dtype, device=device)
        self._filled = torch.empty_like(self._filler)
        self._scale = torch.ones(FILL_FEATURES, device=device)
        self._overlaps, self._num_fillers = overlaps, FILL_PRODUCTS
        rms_norm(self._filler[0], self._scale, 1.0, overlaps)  # compiled here, not during timing

    def __call__(self, product: Product, weights: Sequence[torch.Tensor]) -> float:
        found: list[float] = []
        while len(found) < TIMINGS:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(self._num_fillers):
                torch.mm(self._filler, self._filler, out=self._filled)
            begin.record()
            for weight in weights:
                rms_norm(self._filler[0], self._scale, 1.0, self._overlaps)
                product(weight)
            end.record()
            if begin.query() and self._num_fillers < MAX_FILLERS:  # the device was idle, and idle time was measured
                self._num_fillers *= 2
                continue
            end.synchronize()
            found.append(float(begin.elapsed_time(end)) / 1e3 / len(weights))
        return statistics.median(found)


@torch.inference_mode()
def choose_products(
    shapes: dict[Shape, list[torch.Tensor]],
    added_to: int | None,
    choices: Choices,
    timer: Timer,
    say: Callable[[str], None],
    run: Callable[..., torch.Tensor] = multiply,
) -> None:
    """Sets the choices for these weights. Raises torch.AcceleratorError if the device has failed.

    Products with `added_to` output features (the hidden size) are timed with the addition of a residual. Most models
    add one after them, which torch's product would leave to a separate kernel. None: no residual is added, as when no
    compiler joins the two.
    A variant that cannot be compiled, or whose result differs from torch's, is not chosen.
    """
    for shape, weights in shapes.items():
        chosen = []
        for count in ROW_COUNTS:
            x, residual = (
                torch.randn(count, features, device=weights[0].device).to(shape.dtype)
                for features in (shape.in_features, shape.out_features)
            )
            trial = _Trial(x, weights[:MAX_WEIGHTS], residual, shape.out_features == added_to, timer)
            candidates = variants(shape, count, overlaps=choices.overlaps)
            chosen.append(trial.best(candidates, partial(run, overlaps=choices.overlaps)))
        choices.set(shape, tuple(chosen))
        own = ", ".join(f"{count}" for count, variant in zip(ROW_COUNTS, chosen, strict=True) if variant is not None)
        say(f"products of {shape.out_features} x {shape.in_features}: our own kernel for up to {own or 'no'} rows")
        logger.info("%s: %s", shape, chosen)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial of one shape and number of rows: x [rows, in_features], residual [rows, out_features]."""

    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    residual: torch.Tensor
    is_added_to: bool  # whether the timed product adds the residual
    timer: Timer

    def best(self, candidates: Sequence[Variant], run: Callable[..., torch.Tensor]) -> Variant | None:
        """Returns the fastest candidate, as timed by run(variant, x, weight, bias, residual); None: torch's product."""
        added, best = self.residual if self.is_added_to else None, None
        min_s = self.timer(lambda weight: self._torch_product(weight, added), self.weights)
        timed, min_s = {"torch": min_s}, ENOUGH_FASTER * min_s
        for variant in candidates:

            def product(weight: torch.Tensor, variant: Variant = variant) -> torch.Tensor:
                return run(variant, self.x, weight, None, added)

            try:
                is_right = self._is_right(product(self.weights[0]), added)
            except torch.AcceleratorError:
                raise
            except Exception as error:  # Triton's compiler raises many kinds of errors, most for too much shared memory
                logger.info("%s cannot multiply %d rows: %s", variant, len(self.x), error)
                continue
            if not is_right:
                continue
            took_s = timed[str(variant)] = self.timer(product, self.weights)
            if took_s < min_s:
                min_s, best = took_s, variant
        logger.info("%d rows, us: %s", len(self.x), {name: round(1e6 * took_s, 1) for name, took_s in timed.items()})
        if best is None:
            return None
        other = None if self.is_added_to else self.residual
        return best if self._is_right(run(best, self.x, self.weights[0], None, other), other) else None

    def _torch_product(self, weight: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        out = functional.linear(self.x, weight)
        return out if added is None else out.add_(added)

    def _is_right(self, found: torch.Tensor, added: torch.Tensor | None) -> bool:
        """Returns whether every row of the product by the first weights is correct up to rounding."""
        expected = self._torch_product(self.weights[0], added).float()
        return bool(((found.float() - expected).norm(dim=1) <= MAX_ERROR * expected.norm(dim=1)).all())
