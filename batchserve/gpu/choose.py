"""Which kernel multiplies how many rows by a model's weights: at start all that can are timed, torch's among them."""

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

MOST_WEIGHTS = 16  # of one shape, that products are timed over: together more than caches hold, in a large model
TIMINGS = 3
ENOUGH_FASTER = 0.98  # of torch's time; else its own stays
MOST_ERROR = 1e-2  # of the norm of a row of what torch's product gives: rounding to bfloat16 is some 3e-3 of it
# Square products that keep the device busy until all that is timed is queued: their size, and how many at first.
FILL_FEATURES, FILL_PRODUCTS, MOST_FILLERS = 4096, 10, 80

Product = Callable[[torch.Tensor], torch.Tensor]  # of the weights
Timer = Callable[[Product, Sequence[torch.Tensor]], float]


class CudaTimer:
    """Seconds of a product a weight and of a norm before it, launched one behind the other without a gap.

    In a model, too, small kernels stand between products: one that overlaps with them is worth more than its own time
    says.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, overlaps: bool) -> None:
        self._filler = torch.zeros(FILL_FEATURES, FILL_FEATURES, dtype=dtype, device=device)
        self._filled = torch.empty_like(self._filler)
        self._scale = torch.ones(FILL_FEATURES, device=device)
        self._overlaps, self._num_fillers = overlaps, FILL_PRODUCTS
        rms_norm(self._filler[0], self._scale, 1.0, overlaps)  # compiled here, not while others are timed

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
            if begin.query() and self._num_fillers < MOST_FILLERS:  # the device was waiting, and its waiting was timed
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
    """Set the choices for these weights. Raises torch.AcceleratorError where the device has failed.

    What gives `added_to` features, a hidden state, is timed with the addition of a residual: most models have one
    behind it, which torch's product would leave to a kernel of its own. None: nothing is, as where no compiler joins
    the two.
    A variant that cannot be compiled, or gives something else than torch's product, is not chosen.
    """
    for shape, weights in shapes.items():
        chosen = []
        for count in ROW_COUNTS:
            x, residual = (
                torch.randn(count, features, device=weights[0].device).to(shape.dtype)
                for features in (shape.in_features, shape.out_features)
            )
            trial = _Trial(x, weights[:MOST_WEIGHTS], residual, shape.out_features == added_to, timer)
            candidates = variants(shape, count, overlaps=choices.overlaps)
            chosen.append(trial.best(candidates, partial(run, overlaps=choices.overlaps)))
        choices.set(shape, tuple(chosen))
        own = ", ".join(f"{count}" for count, variant in zip(ROW_COUNTS, chosen, strict=True) if variant is not None)
        say(f"products of {shape.out_features} x {shape.in_features}: our own kernel for up to {own or 'no'} rows")
        logger.info("%s: %s", shape, chosen)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Of one shape and number of rows: x [rows, in_features], residual [rows, out_features]."""

    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    residual: torch.Tensor
    is_added_to: bool  # whether the residual is, in what is timed
    timer: Timer

    def best(self, candidates: Sequence[Variant], run: Callable[..., torch.Tensor]) -> Variant | None:
        """The fastest of them, run(variant, x, weight, bias, residual); None: torch's product."""
        added, best = self.residual if self.is_added_to else None, None
        least_s = self.timer(lambda weight: self._torch_product(weight, added), self.weights)
        timed, least_s = {"torch": least_s}, ENOUGH_FASTER * least_s
        for variant in candidates:

            def product(weight: torch.Tensor, variant: Variant = variant) -> torch.Tensor:
                return run(variant, self.x, weight, None, added)

            try:
                is_right = self._is_right(product(self.weights[0]), added)
            except torch.AcceleratorError:
                raise
            except Exception as error:  # Triton's compiler has errors of many kinds: too much shared memory, the most
                logger.info("%s cannot multiply %d rows: %s", variant, len(self.x), error)
                continue
            if not is_right:
                continue
            took_s = timed[str(variant)] = self.timer(product, self.weights)
            if took_s < least_s:
                least_s, best = took_s, variant
        logger.info("%d rows, us: %s", len(self.x), {name: round(1e6 * took_s, 1) for name, took_s in timed.items()})
        if best is None:
            return None
        other = None if self.is_added_to else self.residual
        return best if self._is_right(run(best, self.x, self.weights[0], None, other), other) else None

    def _torch_product(self, weight: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        out = functional.linear(self.x, weight)
        return out if added is None else out.add_(added)

    def _is_right(self, found: torch.Tensor, added: torch.Tensor | None) -> bool:
        """Whether every row of the product by the first weights is, but for rounding."""
        expected = self._torch_product(self.weights[0], added).float()
        return bool(((found.float() - expected).norm(dim=1) <= MOST_ERROR * expected.norm(dim=1)).all())
