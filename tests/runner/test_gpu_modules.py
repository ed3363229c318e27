"""Modules that are swapped on a GPU, here on a CPU: which, what a compiler makes of them, and that they answer alike.

Linears have no kernel of ours here: the operator takes torch's product, as it does where that is faster.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from batchserve.gpu import norms
from batchserve.gpu.inductor import AddResiduals
from batchserve.gpu.linears import Choices, RowLinear, Shape
from batchserve.gpu.norms import RowNorm
from batchserve.runner.gpu_modules import SwappedModules

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
    patched = torch.nn.Linear(HIDDEN, 8).bfloat16()
    patched.forward = lambda x: x
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
            "patched": patched,
        }
    )
    swapping = SwappedModules(model, Choices())
    shapes = swapping.swap(HIDDEN)
    swapped = {name for name, each in model.named_modules() if isinstance(each, (RowLinear, RowNorm))}
    assert swapped == {"inner.0", "head", "norm"}
    assert set(shapes) == {Shape(8, HIDDEN, torch.float16), Shape(8, HIDDEN, torch.bfloat16)}
    assert shapes[Shape(8, HIDDEN, torch.bfloat16)][0] is tied.weight
    x = torch.randn(1, 5, HIDDEN).bfloat16()
    assert torch.equal(model["head"](x), tied(x))
    assert len(swapping) == len(swapped)
    swapping.undo()
    assert model["head"] is tied
    assert not any(isinstance(each, (RowLinear, RowNorm)) for each in model.modules())


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_norm_is_scaled_as_before(kind: type[torch.nn.Module]) -> None:
    norm = kind(HIDDEN, eps=1e-3).bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
    model = torch.nn.Sequential(norm)
    x = torch.randn(3, HIDDEN).bfloat16()
    with torch.inference_mode():
        expected = model(x)
        SwappedModules(model, Choices()).swap(HIDDEN)
        assert isinstance(model[0], RowNorm)
        assert model[0].weight is norm.weight
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)


class Block(torch.nn.Module):
    """Two residuals, one of them added from the left; products that two want, or one twice, or with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.second = torch.nn.Linear(HIDDEN, HIDDEN)
        self.wanted_twice = torch.nn.Linear(HIDDEN, HIDDEN)
        self.doubled = torch.nn.Linear(HIDDEN, HIDDEN)
        self.sized = torch.nn.Linear(HIDDEN, HIDDEN)
        self.narrow = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(functional.silu(x))
        x = self.second(functional.silu(x)) + x
        twice = self.wanted_twice(x)
        doubled = self.doubled(x)
        sized = self.sized(x) + x.shape[1]
        return functional.silu(twice) * (x + twice) + self.narrow(x) + functional.silu(doubled + doubled) * sized


def test_what_is_added_to_a_linear_is_added_by_it() -> None:
    torch.manual_seed(0)
    model, x = Block().bfloat16(), torch.randn(1, 5, HIDDEN).bfloat16()
    counted: list[int] = []

    def count(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        """As torch's compiler does it, which would need a C++ compiler here."""
        AddResiduals()(module.graph)
        products = module.graph.find_nodes(op="call_function", target=torch.ops.batchserve.row_product.default)
        counted.append(sum(node.args[3] is not None for node in products))
        module.graph.lint()
        module.recompile()
        return make_boxed_func(module.forward)

    with torch.inference_mode():
        expected = {rows: model(x[:, :rows]) for rows in (5, 3, 2)}
        SwappedModules(model, Choices()).swap(HIDDEN)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=count))
        for rows, logits in expected.items():
            torch.testing.assert_close(compiled(x[:, :rows]), logits, rtol=2e-2, atol=2e-2)
    assert counted
    assert set(counted) == {2}


# Code for a GPU is generated, not compiled: in a process of its own, as Inductor has to take the CPU for one.
GENERATE = """
import sys
import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.graph import GraphLowering
from triton.runtime import driver
from batchserve.gpu.inductor import inductor_options
from tests.attention.test_triton import FakeGPU

driver._active = FakeGPU(90)
config.cpu_backend, config.force_disable_caches = "triton", True
TritonKernel._enable_pdl_codegen = staticmethod(lambda: True)


class Generated(Exception):
    pass


def stop(graph, *_, **__):
    code, _ = graph.codegen()
    print(code.value)
    raise Generated


GraphLowering.compile_to_module = stop


def router(x, places):
    mask = torch.zeros_like(x)
    mask.scatter_(1, places, 1.0)
    choice = x.sigmoid() * (1.0 - mask)
    total = choice.sum(-1, keepdim=True)
    return torch.topk(choice / total, 2, dim=-1)[1], torch.full_like(x, 3.0)


options = inductor_options(overlaps=True)
assert options["triton.enable_pdl"]
with torch.inference_mode():
    try:
        torch.compile(router, dynamic=True, options=options)(torch.randn(8, 2048), torch.zeros(8, 3, dtype=torch.long))
    except Exception as error:
        if "Generated" not in repr(error):
            raise
"""


def test_kernels_of_torchs_compiler_wait_before_they_touch_anything(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GENERATE],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    kernels = [each for each in re.split(r"(?m)^def (?=triton_)", process.stdout)[1:] if "tl.store" in each]
    assert len(kernels) > 2
    for kernel in kernels:
        first = re.search(r"gdc_wait|tl\.load\(|tl\.store\(|tl\.atomic", kernel)
        assert first is not None
        assert first[0] == "gdc_wait", kernel
