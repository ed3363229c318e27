"""Modules that are swapped on a GPU, here on a CPU: which, what a compiler makes of them, and that they answer alike.

Linears have no kernel of ours here: the operator takes torch's product, as it does where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from batchserve.gpu import norms
from batchserve.gpu.graph_pass import CannotOverlapError, GraphPass, check_overlap
from batchserve.gpu.linears import Choices, RowLinear, Shape
from batchserve.gpu.norms import RowNorm
from batchserve.runner.gpu_modules import swap_for_gpu

HIDDEN = 64


@pytest.fixture(autouse=True)
def torch_norms() -> Iterator[None]:
    """The norm's kernel needs a GPU: torch computes what it would."""

    def forward(norm: RowNorm, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], norm.scale, norm.eps).to(x.dtype)

    with mock.patch.object(norms.RowNorm, "forward", forward):
        yield
    torch._dynamo.reset()


def test_modules_are_swapped_where_they_can_be() -> None:
    class Odd(torch.nn.Linear):
        pass

    tied = torch.nn.Linear(HIDDEN, 8, bias=False).bfloat16()
    hooked = torch.nn.Linear(HIDDEN, 8).bfloat16()
    hooked.register_forward_hook(lambda *_: None)
    model = torch.nn.ModuleDict(
        {
            "inner": torch.nn.Sequential(torch.nn.Linear(HIDDEN, 8).half(), torch.nn.Linear(HIDDEN, 8)),
            "odd": Odd(HIDDEN, 8).bfloat16(),
            "head": tied,
            "hooked": hooked,
            "norm": LlamaRMSNorm(HIDDEN).bfloat16(),
            "norm of heads": LlamaRMSNorm(HIDDEN // 2).bfloat16(),
            "exact norm": LlamaRMSNorm(HIDDEN),
            "other norm": torch.nn.LayerNorm(HIDDEN).bfloat16(),
        }
    )
    choices = Choices()
    shapes = swap_for_gpu(model, HIDDEN, choices)
    swapped = {name for name, each in model.named_modules() if isinstance(each, (RowLinear, RowNorm))}
    assert swapped == {"inner.0", "head", "norm"}
    assert set(shapes) == {Shape(8, HIDDEN, torch.float16), Shape(8, HIDDEN, torch.bfloat16)}
    assert shapes[Shape(8, HIDDEN, torch.bfloat16)][0] is tied.weight
    x = torch.randn(1, 5, HIDDEN).bfloat16()
    assert torch.equal(model["head"](x), tied(x))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_norm_is_scaled_as_before(kind: type[torch.nn.Module]) -> None:
    norm = kind(HIDDEN, eps=1e-3).bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
    model = torch.nn.Sequential(norm)
    x = torch.randn(3, HIDDEN).bfloat16()
    with torch.inference_mode():
        expected = model(x)
        swap_for_gpu(model, HIDDEN, Choices())
        assert isinstance(model[0], RowNorm)
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)


class Block(torch.nn.Module):
    """Two residuals, one of them added from the left; products that two want, or one twice, or of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.second = torch.nn.Linear(HIDDEN, HIDDEN)
        self.wanted_twice = torch.nn.Linear(HIDDEN, HIDDEN)
        self.doubled = torch.nn.Linear(HIDDEN, HIDDEN)
        self.narrow = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(functional.silu(x))
        x = self.second(functional.silu(x)) + x
        twice = self.wanted_twice(x)
        doubled = self.doubled(x)
        return functional.silu(twice) * (x + twice) + self.narrow(x) + functional.silu(doubled + doubled)


def test_what_is_added_to_a_linear_is_added_by_it() -> None:
    torch.manual_seed(0)
    model, x = Block().bfloat16(), torch.randn(1, 5, HIDDEN).bfloat16()
    counted: list[int] = []

    def count(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        """As torch's compiler does it, which would need a C++ compiler here."""
        GraphPass(overlaps=True)(module.graph)
        products = module.graph.find_nodes(op="call_function", target=torch.ops.batchserve.row_product.default)
        counted.append(sum(node.args[3] is not None for node in products))
        module.graph.lint()
        module.recompile()
        return make_boxed_func(module.forward)

    with torch.inference_mode():
        expected = model(x)
        choices = Choices()
        swap_for_gpu(model, HIDDEN, choices)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=count))
        for rows in (5, 3, 2):
            torch.testing.assert_close(compiled(x[:, :rows]), expected[:, :rows], rtol=2e-2, atol=2e-2)
    assert counted
    assert set(counted) == {2}


def test_a_graph_in_which_something_is_made_of_nothing_must_not_overlap() -> None:
    def fills(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(8, 8).index_add(0, torch.arange(len(x)), x)

    refused: list[str] = []

    def check(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        with pytest.raises(CannotOverlapError, match="loads nothing") as error:
            check_overlap(module.graph)
        refused.append(str(error.value))
        return make_boxed_func(module.forward)

    with torch.inference_mode():
        torch.compile(fills, fullgraph=True, backend=aot_autograd(fw_compiler=check))(torch.ones(3, 8))
    assert refused
