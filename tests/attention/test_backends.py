"""Backends against the reference, and the reference against attention written out row by row."""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchserve.attention import cpu, sdpa
from batchserve.attention.base import AttentionBackend, AttentionParams, LayerShape, Span, Spans
from batchserve.attention.compiled import kernel_supports
from batchserve.attention.cpu import CpuBackend
from batchserve.attention.paged import PagedBackend
from batchserve.attention.torch_paged import TorchKernel
from batchserve.kv.slab import SlabAllocator
from batchserve.kv.slots import SlotAllocator
from tests.attention.reference_backend import TorchReferenceBackend
from tests.attention.test_mask import ancestors, make_span, random_parents
from tests.factories import dtype_name, examples, tensor_planes

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
# The CPU backend with SDPA alone, with each kernel where it is faster, and with the compiled kernel alone; and the GPU
# path with the reference in the place of its kernel.
KINDS = ("sdpa", "mixed", "native", "paged")
DTYPES = [torch.float32, torch.bfloat16]
MATRICES = torch.bfloat16, 64  # for dims like this one whole matrices are multiplied, where a processor can


@dataclass
class Step:
    """One ragged batch: its spans, q, k and v by layer, and rows of padding behind."""

    spans: list[Span]
    layers: list[Tensors]


@dataclass
class Case:
    """A model shape and two steps: the contexts, and then trees, chains and plain rows behind them."""

    heads: int
    shapes: list[LayerShape]
    params: list[AttentionParams]
    dtype: torch.dtype
    context: Step
    step: Step


def make_backend(kind: str, shapes: list[LayerShape], heads: int, dtype: torch.dtype) -> AttentionBackend:
    if kind == "paged":
        slots = SlotAllocator(4096, max_requests=4, max_tokens=1024, bytes_per_token=1)
        return PagedBackend(shapes, dtype, torch.device("cpu"), TorchKernel(), slots)
    allocator = SlabAllocator(shapes, dtype_name(dtype), 4096)
    if kind == "reference":
        return TorchReferenceBackend(allocator)
    has_kernel = kind != "sdpa" and kernel_supports(shapes, dtype_name(dtype))
    return CpuBackend(allocator, heads, has_kernel=has_kernel, has_sinks=has_kernel and kind == "native")


def make_step(case_shapes: list[LayerShape], heads: int, spans: list[Span], padding: int, rng: random.Random) -> Step:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    rows = sum(span.num_rows for span in spans) + padding

    def noise(count: int, dim: int) -> torch.Tensor:
        return torch.randn(1, count, rows, dim, generator=generator) * 1.5

    layers = [
        (noise(heads, s.key_dim), noise(s.num_kv_heads, s.key_dim), noise(s.num_kv_heads, s.value_dim))
        for s in case_shapes
    ]
    return Step(spans, layers)


def make_spans(rng: random.Random, contexts: list[int], trees: list[list[int]]) -> list[Span]:
    spans, start = [], 0
    for i, (context_len, parents) in enumerate(zip(contexts, trees, strict=True)):
        spans.append(make_span(parents, context_len, row_start=start, request_id=f"r{i}"))
        start += len(parents)
    return spans


def random_case(seed: int, dtype: torch.dtype, *, longest: int = 200, dim: int | None = None) -> Case:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (8, 1), (6, 2), (1, 1), (20, 1)])
    key_dim, value_dim = rng.choice(
        [(16, 16), (8, 8), (16, 8), (24, 32), (64, 64), (80, 80), (96, 96), (128, 128), (7, 7)]
    )
    key_dim, value_dim = (key_dim, value_dim) if dim is None else (dim, dim)
    num_layers = rng.randint(1, 3)
    shapes = [LayerShape(kv_heads, key_dim, value_dim)] * num_layers
    params = []
    for _ in range(num_layers):  # windows, caps and sinks differ from layer to layer, as in gemma and gpt-oss
        sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed % 2**31))
        params.append(
            AttentionParams(
                scaling=key_dim**-0.5 * rng.choice([1, 0.5]),
                sliding_window=rng.choice([None, None, 1, 7, 24, 500]),
                softcap=rng.choice([None, None, 5.0]),
                sinks=rng.choice([None, None, sinks]),
            )
        )
    count = rng.randint(1, 4)
    contexts = [rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(count)]
    trees = [random_parents(rng, rng.choice([1, 1, rng.randint(2, 20)])) for _ in range(count)]
    if rng.random() < 0.5:  # a prefill chunk among them
        trees[0] = list(range(-1, rng.randint(1, 70)))
    chains = make_spans(rng, [0] * count, [list(range(-1, n - 1)) for n in contexts])
    context = make_step(shapes, heads, [s for s in chains if s.num_rows], 0, rng)
    step = make_step(shapes, heads, make_spans(rng, contexts, trees), rng.choice([0, 0, 3]), rng)
    return Case(heads, shapes, params, dtype, context, step)


def run_case(case: Case, kind: str) -> list[torch.Tensor]:
    """Outputs by layer of the case's second step, [num_tokens, num_heads, value_dim]."""
    backend = make_backend(kind, case.shapes, case.heads, case.dtype)
    if case.context.spans:
        attend(backend, case, case.context)
        for span in case.context.spans:
            backend.allocator.commit(span.request_id, range(span.num_rows))
    return attend(backend, case, case.step)


def attend(backend: AttentionBackend, case: Case, step: Step) -> list[torch.Tensor]:
    for span in step.spans:
        span.cache.clear()
        assert backend.allocator.reserve(span.request_id, span.num_rows)
    backend.begin(Spans.of(step.spans))
    outputs = []
    for layer, (tensors, params) in enumerate(zip(step.layers, case.params, strict=True)):
        query, key, value = (t.to(case.dtype) for t in tensors)
        outputs.append(backend.attend(layer, query, key, value, params)[0])
    return outputs


def literal_row(case: Case, layer: int, span: Span, context: Span | None, row: int) -> np.ndarray:
    """Softmax over the row's own path in float64, key by key and head by head: [num_heads, value_dim]."""
    params, shape = case.params[layer], case.shapes[layer]
    query, key, value = (t[0].double().numpy() for t in case.step.layers[layer])
    _, old_key, old_value = (t[0].double().numpy() for t in case.context.layers[layer])
    path = sorted(ancestors(span.parents.tolist(), row))
    keys = [key[:, span.row_start + r] for r in path]
    values = [value[:, span.row_start + r] for r in path]
    if context is not None:
        old = range(context.row_start, context.row_start + context.num_rows)
        keys = [*(old_key[:, r] for r in old), *keys]
        values = [*(old_value[:, r] for r in old), *values]
    if params.sliding_window is not None:  # the path's places are its positions, so the window is a slice
        keys, values = keys[-params.sliding_window :], values[-params.sliding_window :]
    out = np.zeros((case.heads, shape.value_dim))
    for head in range(case.heads):
        kv_head = head * shape.num_kv_heads // case.heads
        scores = np.array([query[head, span.row_start + row] @ k[kv_head] for k in keys]) * params.scaling
        if params.softcap is not None:
            scores = params.softcap * np.tanh(scores / params.softcap)
        sink = [float(params.sinks[head])] if params.sinks is not None else []
        weights = np.exp(np.concatenate([scores, sink]) - max([*scores, *sink]))
        weights /= weights.sum()
        out[head] = sum(w * v[kv_head] for w, v in zip(weights, values, strict=False))
    return out


@examples(20)
@given(st.integers(0, 2**32))
def test_the_reference_is_attention_along_every_rows_own_path(seed: int) -> None:
    case = random_case(seed, torch.float32, longest=40)
    outputs = run_case(case, "reference")
    contexts = {span.request_id: span for span in case.context.spans}
    rng = random.Random(seed)
    for layer, output in enumerate(outputs):
        for span in case.step.spans:
            for row in {0, span.num_rows - 1, rng.randrange(span.num_rows)}:
                expected = literal_row(case, layer, span, contexts.get(span.request_id), row)
                np.testing.assert_allclose(output[span.row_start + row].numpy(), expected, atol=1e-5, rtol=1e-5)


def check_against_reference(seed: int, dtype: torch.dtype, kinds: tuple[str, ...], dim: int | None = None) -> None:
    case = random_case(seed, dtype, dim=dim)
    covered = sum(span.num_rows for span in case.step.spans)
    expected = run_case(case, "reference")
    for kind in kinds:
        for actual, wanted in zip(run_case(case, kind), expected, strict=True):
            assert (actual.dtype, actual.shape) == (dtype, wanted.shape)
            torch.testing.assert_close(actual, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            assert not actual[covered:].any(), "a padding row is not zero"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    @examples(40)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        check_against_reference(seed, dtype, (kind,))

    check()


def test_matrices_equal_the_reference() -> None:
    @examples(60)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        check_against_reference(seed, MATRICES[0], ("native",), dim=MATRICES[1])

    check()


@pytest.mark.parametrize(("dtype", "dim"), [*((dtype, None) for dtype in DTYPES), MATRICES], ids=str)
def test_bits_do_not_depend_on_how_a_spans_rows_are_shared_out(dtype: torch.dtype, dim: int | None) -> None:
    for seed in range(12):
        case, outputs = random_case(seed, dtype, dim=dim), []
        if not kernel_supports(case.shapes, dtype_name(dtype)):
            continue
        for size in (1, 3, 8, 1000):
            with mock.patch.multiple(cpu, PART_ROWS=size, PART_QUERIES=size, TURNS=1000 // size, MAX_PARTS=100):
                outputs.append(run_case(case, "native"))
        assert all(torch.equal(a, b) for other in outputs[1:] for a, b in zip(outputs[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_backend_equals_the_reference_at_length(dtype: torch.dtype) -> None:
    for seed in range(400):
        check_against_reference(seed, dtype, KINDS)


class Sequence:
    """One request whose token t always has the same q, k and v, fed in whatever steps."""

    def __init__(
        self,
        kind: str,
        num_tokens: int,
        window: int | None,
        dtype: torch.dtype = torch.float32,
        dim: int = 8,
        softcap: float | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = [[torch.randn(1, h, 1, dim, generator=generator).to(dtype) for h in (4, 2, 2)]
                       for _ in range(num_tokens)]  # fmt: skip
        self.backend = make_backend(kind, [LayerShape(2, dim, dim)] * 2, 4, dtype)
        sinks = None if softcap is None else torch.randn(4, generator=generator)
        self.params = AttentionParams(dim**-0.5, window, softcap, sinks)
        self.length = 0

    def feed(self, parents: list[int], tokens: list[int], kept: list[int]) -> torch.Tensor:
        """Rows with these tokens behind what is committed; outputs of both layers, [num_rows, heads, 2 * dim]."""
        assert self.backend.allocator.reserve("r", len(parents))
        self.backend.begin(Spans.of([make_span(parents, self.length, request_id="r")]))
        query, key, value = (torch.cat([self.tokens[t][i] for t in tokens], dim=2) for i in range(3))
        outputs = [self.backend.attend(layer, query, key, value, self.params)[0] for layer in range(2)]
        self.backend.allocator.commit("r", kept)
        self.length += len(kept)
        return torch.cat(outputs, -1)

    def feed_chain(self, tokens: list[int]) -> torch.Tensor:
        return self.feed(list(range(-1, len(tokens) - 1)), tokens, list(range(len(tokens))))


CONTEXT, TREE, ACCEPTED = 70, [-1, 0, 0, 2, 1, 3, 3], [0, 2, 3, 6]
LAST = CONTEXT + len(TREE)
PATH = [CONTEXT + row for row in ACCEPTED]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_an_accepted_path_leaves_the_same_memory_as_plain_decoding(kind: str, window: int | None) -> None:
    """Draft a tree, accept a path through it, go on: the same as if the path's tokens had come one by one."""
    drafted, plain = Sequence(kind, LAST + 1, window), Sequence(kind, LAST + 1, window)
    drafted.feed_chain(list(range(CONTEXT)))
    tree_rows = drafted.feed(TREE, list(range(CONTEXT, LAST)), ACCEPTED)
    after = drafted.feed_chain([LAST])
    one_by_one = [plain.feed_chain([token])[0] for token in [*range(CONTEXT), *PATH, LAST]]
    torch.testing.assert_close(tree_rows[ACCEPTED], torch.stack(one_by_one[CONTEXT:-1]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after[0], one_by_one[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 8), (torch.bfloat16, 8), MATRICES], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "capped, with sinks"])
@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_invariant_kernel_gives_the_same_bits_however_a_sequence_is_cut(
    chunk: int, window: int | None, softcap: float | None, dtype: torch.dtype, dim: int
) -> None:
    """In chunks of any size and as rows of a tree: bit for bit what one long prefill gives."""
    tokens, what = [*range(CONTEXT), *PATH, LAST], (window, dtype, dim, softcap)
    whole = Sequence("native", LAST + 1, *what).feed_chain(tokens)
    cut = Sequence("native", LAST + 1, *what)
    rows = [cut.feed_chain(tokens[at : min(at + chunk, CONTEXT)]) for at in range(0, CONTEXT, chunk)]
    rows.append(cut.feed(TREE, list(range(CONTEXT, LAST)), ACCEPTED)[ACCEPTED])
    rows.append(cut.feed_chain([LAST]))
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize(
    ("kind", "dtype", "dim", "which"),
    [
        ("reference", torch.float32, 8, "K"),  # of V it multiplies by zero what a row does not see
        *(("native", dtype, dim, which) for which in "KV" for dtype, dim in ((torch.float32, 8), MATRICES)),
    ],
    ids=str,
)
def test_what_is_not_a_number_is_seen_by_those_rows_only_that_see_it(
    kind: str, dtype: torch.dtype, dim: int, which: str
) -> None:
    """The low bits of the second one are those that arithmetic on exponents would lose."""
    for nan in (float("nan"), torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32).item()):
        sequence = Sequence(kind, LAST + 1, None, dtype, dim)
        sequence.tokens[CONTEXT + 2]["QKV".index(which)][...] = nan  # of the third row of the tree
        sequence.feed_chain(list(range(CONTEXT)))
        rows = sequence.feed(TREE, list(range(CONTEXT, LAST)), ACCEPTED)
        seen = [row for row in range(len(TREE)) if 2 in ancestors(TREE, row)]
        assert 0 < len(seen) < len(TREE)
        assert [row for row in range(len(TREE)) if rows[row].isnan().all()] == seen
        assert [row for row in range(len(TREE)) if rows[row].isnan().any()] == seen


def test_a_window_that_hides_nothing_yet_changes_no_bit() -> None:
    tokens = list(range(LAST))
    plain, windowed = (Sequence("native", LAST + 1, window).feed_chain(tokens) for window in (None, LAST))
    assert torch.equal(plain, windowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_masks_are_not_written_for_every_head(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def outputs() -> list[torch.Tensor]:
        cases = [random_case(seed, dtype) for seed in range(12)]
        found = [tensor for case in cases for tensor in run_case(case, "sdpa")]
        assert not any(span.cache for case in cases for span in case.step.spans), "kept behind the last layer"
        return found

    folded = outputs()
    monkeypatch.setattr(sdpa, "MAX_FOLDED_BYTES", 0)
    for unfolded, other in zip(outputs(), folded, strict=True):
        torch.testing.assert_close(unfolded, other)


@pytest.mark.parametrize("kind", ["sdpa", "mixed", "native"])
def test_shapes_that_are_not_those_of_the_layer_are_refused_before_anything_is_written(kind: str) -> None:
    backend = make_backend(kind, [LayerShape(2, 16, 16)], 4, torch.float32)
    backend.allocator.reserve("r0", 3)
    backend.begin(Spans.of(make_spans(random.Random(0), [0], [[-1, 0, 1]])))
    right = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    assert backend.attend(0, *right, AttentionParams(0.25)).shape == (1, 3, 4, 16)
    planes = tensor_planes(backend.allocator, "r0", 0)
    before = [
        plane.view(torch.int32).clone() for plane in planes
    ]  # bits: unused memory may hold NaN, which equals nothing
    for place, shape in (
        (0, (1, 4, 2, 16)), (0, (1, 3, 3, 16)), (0, (1, 4, 3, 8)), (1, (1, 4, 3, 16)), (1, (1, 2, 3, 24)),
        (1, (1, 2, 2, 16)), (2, (1, 1, 3, 16)), (2, (1, 2, 3, 8)), (2, (1, 2, 4, 16)),
    ):  # fmt: skip
        wrong = [*right]
        wrong[place] = torch.randn(shape)
        with pytest.raises(ValueError, match=r"layer 0: q, k and v are .* not as at load"):
            backend.attend(0, wrong[0], wrong[1], wrong[2], AttentionParams(0.25))
    after = [plane.view(torch.int32) for plane in planes]
    assert all(torch.equal(*each) for each in zip(before, after, strict=True))
