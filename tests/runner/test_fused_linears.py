"""Linears of the same input as one product: which they are, and that each gives what it gave."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from batchserve.config import EngineConfig
from batchserve.runner import loader
from batchserve.runner.fused_linears import FusedOutput, fuse_linears, plain_product, watch_inputs
from batchserve.runner.loader import load_model
from batchserve.runner.native_linear import DTYPES, NativeLinear, Workspace


class Block(nn.Module):
    """a, b and c read x; d reads what is computed from it; e and f read x, too, but e does so twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 96, bias=False), nn.Linear(64, 32, bias=False), nn.Linear(64, 80)
        self.d, self.e, self.f = nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, third = self.a(x)[..., :32], self.b(x), self.c(x)
        twice = self.e(x) + self.f(x) + self.e(x)
        return self.d(gate * up) + third[..., :64] + twice.repeat(1, 1, 4)


class Named(nn.Module):
    """Hands its input over by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(input=x) + self.b(input=x)


def siblings_of(model: nn.Module, x: torch.Tensor) -> list[tuple[nn.Module, list[str]]]:
    before = [dict(module._forward_pre_hooks) for module in model.modules()]
    with watch_inputs(model) as watch, torch.no_grad():
        model(x)
    assert [module._forward_pre_hooks for module in model.modules()] == before
    return watch.siblings(model)


def test_siblings_are_called_once_each_one_behind_the_other_with_the_same_tensor() -> None:
    block = Block()
    assert siblings_of(block, torch.randn(1, 3, 64)) == [(block, ["a", "b"])]  # c has a bias, they have none
    assert siblings_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(1, 2, 8)) == []
    assert siblings_of(Named(), torch.randn(1, 2, 8)) == []


def test_who_reads_what_was_changed_in_between_is_no_sibling_though_the_change_changed_nothing() -> None:
    class Clamping(Named):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate: torch.Tensor = self.a(x)
            x.clamp_(-1e9, 1e9)
            return gate * self.b(x)

    assert siblings_of(Clamping(), torch.randn(1, 2, 8)) == []


def test_who_has_a_hook_is_no_sibling() -> None:
    for is_before in (True, False):
        block = Block()
        if is_before:
            block.a.register_forward_pre_hook(lambda module, arguments: None)
        else:
            block.a.register_forward_hook(lambda module, arguments, output: output * 2)
        assert siblings_of(block, torch.randn(1, 3, 64)) == []


@pytest.mark.parametrize("product", [partial(NativeLinear, Workspace()), plain_product])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_gives_what_it_gave_alone_in_any_order(has_bias: bool, dtype: torch.dtype, product: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(64, size, bias=has_bias) for name, size in (("q", 96), ("k", 32), ("v", 7))})
    model = model.to(dtype)
    one, other = torch.randn(1, 5, 64).to(dtype), torch.randn(1, 9, 64).to(dtype)
    with torch.inference_mode():
        expected = {(name, len(x[0])): model[name](x) for name in model for x in (one, other)}
        fuse_linears([(model, ["q", "k", "v"])], product)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for x, name in ((one, "q"), (other, "q"), (one, "v"), (one, "k"), (one, "q"), (other, "k"), (other, "v")):
            given = model[name](x)
            torch.testing.assert_close(given, expected[name, len(x[0])], atol=tolerance, rtol=tolerance)
            given.zero_()  # whoever asks again is given what it was given first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_among_other_rows_and_nothing_is_kept_behind_the_last(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"gate": nn.Linear(64, 640, bias=False), "up": nn.Linear(64, 640, bias=False)}).to(dtype)
    fuse_linears([(model, ["gate", "up"])], partial(NativeLinear, Workspace()))
    x = torch.randn(1, 32, 64).to(dtype)
    with torch.inference_mode():
        whole = [model[name](x) for name in model]
        for start, count in ((0, 2), (5, 4), (3, 16)):
            rows = x[:, start : start + count]
            for name, among_all in zip(model, whole, strict=True):
                assert torch.equal(model[name](rows), among_all[:, start : start + count])
    shared = model["gate"].shared
    assert shared is model["up"].shared
    assert (shared._input, shared._outputs) == (None, [])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("name", "joined"),
    [("llama", {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}), ("qwen2", {"q_proj", "k_proj", "v_proj"}),
     ("gpt2", set())],
)  # fmt: skip
def test_models_are_loaded_with_joined_linears(
    tiny_model: dict[str, Path], name: str, joined: set[str], backend: str
) -> None:
    options = {"dtype": "float32", "device": "cpu", "attention_backend": backend, "custom_kernels": False}
    config = EngineConfig(model=str(tiny_model[name]), **options)
    found = {
        p.rsplit(".", 1)[-1] for p, module in load_model(config).model.named_modules() if type(module) is FusedOutput
    }
    assert joined <= found
    assert bool(found) == bool(joined)


def test_weights_are_given_up_as_they_are_joined(tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    first: list[weakref.ref[nn.Module]] = []

    def watching(siblings: Any, product: Any) -> None:
        first.extend(weakref.ref(getattr(parent, name)) for parent, names in siblings for name in names)
        fuse_linears(siblings, product)
        left.append(sum(linear() is not None for linear in first))

    monkeypatch.setattr(loader, "fuse_linears", watching)
    load_model(EngineConfig(model=str(tiny_model["llama"]), device="cpu", attention_backend="torch"))
    assert first
    assert left == [0]


def merging_rows(self: Any, x: torch.Tensor) -> Any:
    merged = self.up_proj(x).view(-1, 2)  # only where rows lie one behind the other
    return self.down_proj(self.act_fn(self.gate_proj(x)) * merged.view(*x.shape[:2], -1))


def reading_a_weight(self: Any, x: torch.Tensor) -> Any:
    x = x.to(self.gate_proj.weight.dtype)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("forward", [merging_rows, reading_a_weight])
def test_a_model_that_one_product_is_not_enough_for_is_left_as_it_is(
    forward: Any, tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    caplog.set_level("INFO")
    config = EngineConfig(model=str(tiny_model["llama"]), device="cpu", attention_backend="torch")
    model = load_model(config).model
    assert not any(type(module) is FusedOutput for module in model.modules())
    assert "linears of the same input stay apart" in caplog.text
