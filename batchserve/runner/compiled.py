"""The model as torch.compile makes it, around opaque attention: whole, or one program for all of its layers.

Launched one by one, or in a CUDA graph, a layer's small operations take as long as its matrix products at few rows;
compiled, they are a few kernels. A program serves steps of any number of rows but one, of which there is another.
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

MOST_PROGRAMS = 128  # of one function: layers of several kinds have some each. torch's own bound, 8, is for runaways


class CompiledModel:
    """ModelRunner.run_model, whole: one program without a break, the longer in the making the more layers there are.

    compiler: a backend of torch.compile. overlaps: kernels begin while those before them end (kernel_overlap.py). A
    model that cannot be compiled so raises torch's error, a RuntimeError.
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
        """Nothing: the model is as it was."""


class CompiledLayers:
    """As CompiledModel, but each layer is a program, which those of the same kind share.

    The model's layers are compiled in place, and called so also by whoever else runs the model, until undo(). What is
    outside of them, a few operations in front and the head behind, is not compiled.
    """

    def __init__(
        self, model: PreTrainedModel, backend: PagedBackend, compiler: str = "inductor", *, overlaps: bool = False
    ) -> None:
        self._model, self._layers = model, repeated_layers(model)
        self._attention = LayerAttention(backend, model)
        options = _options(compiler, overlaps=overlaps)
        # The first call compiles; this only says so. The very same options for all: else each has a program of its own.
        for layer in self._layers:
            layer.compile(fullgraph=True, dynamic=True, backend=compiler, options=options)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with _any_number_of_rows():
            return logits_of(self._model, self._attention, input_ids, positions, keep)

    def undo(self) -> None:
        """The layers are as they were."""
        for layer in self._layers:
            layer._compiled_call_impl = None


def repeated_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that a model has one of for each of its layers. Raises RuntimeError where they are not to be told."""
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
    from batchserve.gpu.inductor import inductor_options  # and with it the compiler

    return inductor_options(overlaps=overlaps)


@contextmanager
def _any_number_of_rows() -> Iterator[None]:
    """No two sizes that happen to be equal are taken for the same, and none for never being 1, in what is compiled."""
    symbols: Any = torch.fx.experimental._config
    with (
        symbols.patch(use_duck_shape=False, backed_size_oblivious=True),
        torch._dynamo.config.patch(recompile_limit=MOST_PROGRAMS),
    ):
        yield
