"""Runs a model through torch.compile, around opaque attention: whole, or as one program for all layers of a kind.

Launched one by one, or in a CUDA graph, a layer's small operations take as long as its matrix products when there are
few rows. Compiled, they are a few kernels. One program serves any number of rows except one, which has another program.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from batchserve.attention.custom_op import LayerAttention, OpaqueAttention
from batchserve.runner.forward import logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from batchserve.attention.paged import PagedBackend

MAX_PROGRAMS = 128  # per function: each kind of layer needs some. torch's own limit, 8, is meant to stop runaways


class CompiledModel:
    """Runs the whole model as one program without graph breaks, in place of ModelRunner.run_model.

    More layers take longer to compile. compiler: a backend of torch.compile. overlaps: kernels start while the ones
    before them finish (kernel_overlap.py). Raises torch's RuntimeError if the model cannot be compiled like this.
    """

    def __init__(
        self, model: PreTrainedModel, backend: PagedBackend, compiler: str = "inductor", *, overlaps: bool = False
    ) -> None:
        attention = OpaqueAttention(backend)

        def forward(input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return logits_of(model, attention, input_ids, positions, keep)

        options = _options(compiler, overlaps=overlaps)
        self._forward = torch.compile(forward, fullgraph=True, dynamic=True, backend=compiler, options=options)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with _any_number_of_rows():
            return self._forward(input_ids, positions, keep)

    def undo(self) -> None:
        """Does nothing, as the model was not changed."""


class CompiledLayers:
    """Like CompiledModel, but each layer is a program, which layers of the same kind share.

    The layers are compiled in place, so every caller of the model runs the compiled layers until undo(). The few
    operations before the layers and the head after them are not compiled.
    """

    def __init__(
        self, model: PreTrainedModel, backend: PagedBackend, compiler: str = "inductor", *, overlaps: bool = False
    ) -> None:
        self._model, self._layers = model, repeated_layers(model)
        self._attention = LayerAttention(backend, model)
        options = _options(compiler, overlaps=overlaps)
        # Compiled at the first call. All layers need the same options object, or each would have a program of its own.
        for layer in self._layers:
            layer.compile(fullgraph=True, dynamic=True, backend=compiler, options=options)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with _any_number_of_rows():
            return logits_of(self._model, self._attention, input_ids, positions, keep)

    def undo(self) -> None:
        """Restores the layers."""
        for layer in self._layers:
            layer._compiled_call_impl = None


def repeated_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Returns the modules of the model's layers, one per layer. Raises RuntimeError if they cannot be identified."""
    count = int(model.config.get_text_config().num_hidden_layers)
    found = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == count
        and all(any(hasattr(each, "layer_idx") for each in layer.modules()) for layer in module)
    ]
    if len(found) != 1:
        raise RuntimeError(f"{type(model).__name__} has {len(found)} lists of {count} layers with attention")
    return list(found[0])


def _options(compiler: str, *, overlaps: bool) -> dict[str, Any] | None:
    if compiler != "inductor":
        return None
    from batchserve.gpu.inductor import inductor_options  # this also imports the compiler

    return inductor_options(overlaps=overlaps)


@contextmanager
def _any_number_of_rows() -> Iterator[None]:
    """Compiles for any number of rows: sizes that happen to be equal stay independent, and any of them may be 1."""
    symbols: Any = torch.fx.experimental._config
    with (
        symbols.patch(use_duck_shape=False, backed_size_oblivious=True),
        torch._dynamo.config.patch(recompile_limit=MAX_PROGRAMS),
    ):
        yield
