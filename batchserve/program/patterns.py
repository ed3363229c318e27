"""Finds groups of operations that one instruction computes, by their arithmetic and never by module names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.program.graph import Columns, Graph, Node, row_dim

if TYPE_CHECKING:
    from collections.abc import Callable


def simplify(graph: Graph, node: Node) -> Node | Columns | None:
    """Returns a node that computes the same in fewer steps, or existing columns that hold the result, or None."""
    for rule in RULES.get(node.op, ()):
        found = rule(graph, node)
        if found is not None:
            return found
    return None


def _is_binary(node: Node | None, function: str) -> bool:
    return node is not None and node.op == "binary" and node.facts["function"] == function


def _number(node: Node) -> float | None:
    constant = node.facts["constant"]
    return float(constant) if isinstance(constant, int | float) else None


def _nothing_changes(graph: Graph, node: Node) -> Columns | None:
    """Matches x * 1, x / 1, x + 0 and x - 0."""
    neutral = {"mul": 1.0, "div": 1.0, "add": 0.0, "sub": 0.0}[node.facts["function"]]
    is_neutral = _number(node) == neutral and len(node.inputs) == 1
    is_turned = node.facts["is_reversed"] and node.facts["function"] in ("sub", "div")
    return node.inputs[0] if is_neutral and not is_turned else None


def _root_mean_square(graph: Graph, node: Node) -> Node | None:
    """Matches x * rsqrt(mean(x * x) + epsilon) over the last dimension."""
    if not _is_binary(node, "mul") or len(node.inputs) != 2:
        return None
    for x, scale in (node.inputs, node.inputs[::-1]):
        root = scale.node()
        if root is None or root.op != "unary" or root.facts["function"] != "rsqrt":
            continue
        shifted = root.inputs[0].node()
        if not _is_binary(shifted, "add") or shifted is None or _number(shifted) is None:
            continue
        mean = shifted.inputs[0].node()
        squares = mean.inputs[0].node() if mean is not None and mean.op == "mean" else None
        if mean is None or squares is None or not _squares(squares).same(x):
            continue
        if mean.inputs[0].run() != (squares, 0) or mean.inputs[0].elements.size != squares.width:
            continue  # a mean of only some columns
        groups = scale.places().reshape(-1, x.shape[-1])
        if (groups != np.arange(len(groups))[:, None]).any():
            continue
        source = _uncentred(x)
        kind = "rms" if source is None else "layer"
        facts = {"epsilon": _number(shifted), "dim": x.shape[-1], "weight": None, "bias": None, "kind": kind}
        return Node("norm", node.width, (x if source is None else source,), facts)
    return None


def _uncentred(columns: Columns) -> Columns | None:
    """Returns x if the columns are x - mean(x)."""
    node = columns.node()
    if node is None or not _is_binary(node, "sub") or len(node.inputs) != 2 or columns.elements.size != node.width:
        return None
    x, mean = node.inputs[0], node.inputs[1].node()
    return x if mean is not None and mean.op == "mean" and mean.inputs[0].same(x) else None


def _squares(node: Node) -> Columns:
    """Returns x if the node is x * x, otherwise empty columns, which equal no others."""
    if node.op == "pow" and node.facts["exponent"] == 2.0:
        return node.inputs[0]
    if _is_binary(node, "mul") and len(node.inputs) == 2 and node.inputs[0].same(node.inputs[1]):
        return node.inputs[0]
    return node.inputs[0].pick(np.zeros(0, np.int64))


def _weighted_norm(graph: Graph, node: Node) -> Node | None:
    """Matches a norm times a constant that is the same for each group."""
    constant = node.facts["constant"]
    if not _is_binary(node, "mul") or not isinstance(constant, torch.Tensor):
        return None
    run = node.inputs[0].run()
    if run is None or run[0].op != "norm" or run[0].facts["weight"] is not None or run[0].width != node.width:
        return None
    norm = run[0]
    by_group = constant.reshape(-1, norm.facts["dim"])
    if not (by_group == by_group[0]).all():
        return None
    return Node("norm", node.width, norm.inputs, {**norm.facts, "weight": by_group[0].clone()})


def _scaled(graph: Graph, node: Node) -> Node | None:
    """Matches x * number, x / number and number * tanh(x / number)."""
    number, function = _number(node), node.facts["function"]
    if number is None or len(node.inputs) != 1:
        return None
    if function == "mul":
        capped = node.inputs[0].node()
        if capped is not None and capped.op == "unary" and capped.facts["function"] == "tanh":
            inner = capped.inputs[0].node()
            is_inverse = inner is not None and inner.op == "scale" and abs(inner.facts["factor"] * number - 1) < 1e-6
            if is_inverse and inner is not None and node.inputs[0].run() == (capped, 0):
                return Node("cap", node.width, inner.inputs, {"cap": number})
        return Node("scale", node.width, node.inputs, {"factor": number})
    if function == "div" and not node.facts["is_reversed"]:
        return Node("scale", node.width, node.inputs, {"factor": 1.0 / number})
    return None


def _written_gelu(graph: Graph, node: Node) -> Node | None:
    """Matches x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))."""
    if not _is_binary(node, "mul") or len(node.inputs) != 2:
        return None
    for half, one_more in (node.inputs, node.inputs[::-1]):
        halved = _scale_of(half)
        added = one_more.node()
        if halved is None or halved[1] != 0.5 or added is None or not _is_binary(added, "add") or _number(added) != 1.0:
            continue
        x, tanh = halved[0], added.inputs[0].node()
        scaled = None if tanh is None or tanh.facts.get("function") != "tanh" else _scale_of(tanh.inputs[0])
        if scaled is None or not math.isclose(scaled[1], math.sqrt(2 / math.pi), rel_tol=1e-4):
            continue
        inner = scaled[0].node()
        if inner is None or not _is_binary(inner, "add") or len(inner.inputs) != 2:
            continue
        for same, rest in (inner.inputs, inner.inputs[::-1]):
            cube = _scale_of(rest)
            power = None if cube is None else cube[0].node()
            if cube is None or power is None or power.op != "pow" or power.facts["exponent"] != 3.0:
                continue
            if math.isclose(cube[1], 0.044715, rel_tol=1e-4) and same.same(x) and power.inputs[0].same(x):
                return Node("unary", node.width, (x,), {"function": "gelu_tanh"})
    return None


def _scale_of(columns: Columns) -> tuple[Columns, float] | None:
    """Returns (x, factor) if the columns are x * factor."""
    run = columns.run()
    if run is None or run[0].op != "scale" or run[1] != 0 or run[0].width != columns.elements.size:
        return None
    return run[0].inputs[0], run[0].facts["factor"]


def _rotary(graph: Graph, node: Node) -> Node | None:
    """Matches x * cosine + rotated(x) * sine, where both factors depend on positions alone."""
    if not _is_binary(node, "add") or len(node.inputs) != 2:
        return None
    terms = [_times_position(each) for each in node.inputs]
    if terms[0] is None or terms[1] is None:
        return None
    for (x, cosine), (turned, sine) in (terms, terms[::-1]):  # type: ignore[misc]
        if len(x.shape) < 2:
            continue
        sources, signs = _signed(turned)
        style = _turn_style(x, sources, signs)
        if style is None:
            continue
        factors = [_half_of(each, style) for each in (cosine, sine)]
        if factors[0] is None or factors[1] is None:
            continue
        facts: dict[str, Any] = {"cosine": factors[0], "sine": factors[1], "style": style, "dim": x.shape[-1]}
        return Node("rotary", node.width, (x,), facts)
    return None


def _times_position(columns: Columns) -> tuple[Columns, Columns] | None:
    """Returns (x, factor) if the columns are x times a factor that depends on positions alone."""
    node = columns.node()
    run = columns.run()
    if node is None or run is None or run[1] != 0 or not _is_binary(node, "mul") or len(node.inputs) != 2:
        return None
    for x, factor in (node.inputs, node.inputs[::-1]):
        of = factor.node()
        if of is not None and of.op == "position":
            return x, factor
    return None


def _signed(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Returns (elements, signs); negated elements are replaced by those before the negation."""
    elements, signs = columns.elements.copy(), np.ones(columns.shape)
    for node in {columns.graph.node_of(int(each)) for each in np.unique(columns.numbers())}:
        is_negated = (node.op == "unary" and node.facts["function"] == "neg") or (
            node.op == "scale" and node.facts["factor"] == -1.0
        )
        if is_negated:
            mine = columns.numbers() == node.number
            elements[mine] = node.inputs[0].elements.reshape(-1)[columns.places()[mine]]
            signs[mine] = -1.0
    return elements, signs


def _turn_style(x: Columns, sources: np.ndarray, signs: np.ndarray) -> str | None:
    """Returns how x is rotated: "halves" for (-x2, x1) of its two halves, "pairs" for the same of neighbours."""
    dim = x.shape[-1]
    if dim % 2:
        return None
    own, others, signs = (each.reshape(-1, dim) for each in (x.elements, sources, signs))
    half, places = dim // 2, np.arange(dim)
    for style, turned, sign in (
        ("halves", (places + half) % dim, np.where(places < half, -1.0, 1.0)),
        ("pairs", places ^ 1, np.where(places % 2 == 0, -1.0, 1.0)),
    ):
        if (others == own[:, turned]).all() and (signs == sign).all():
            return style
    return None


def _half_of(factor: Columns, style: str) -> Columns | None:
    """Returns one factor column per pair of columns. Both columns of a pair and all groups must have equal factors."""
    dim = factor.shape[-1]
    by_group = factor.elements.reshape(-1, dim)
    node = factor.node()
    if node is None or (by_group != by_group[0]).any():
        return None
    one, other = (
        (slice(0, dim // 2), slice(dim // 2, dim)) if style == "halves" else (slice(0, dim, 2), slice(1, dim, 2))
    )
    columns = factor.pick(by_group[0])
    values = columns_of(node, columns.places())
    # A function of the same number may differ in its last bit between a loop's vector instructions and its remainder.
    is_same = (values[:, one] - values[:, other]).abs().max() <= 1e-6
    return columns.pick(by_group[0][one]) if is_same else None


def columns_of(node: Node, places: np.ndarray) -> torch.Tensor:
    """Returns the recorded values [NUM_ROWS, len(places)] of some columns of a node that depends on positions alone."""
    return rows_first(node.facts["tensor"])[:, torch.from_numpy(places.reshape(-1))].float()


def rows_first(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a value with one row dimension as [rows, columns]."""
    return tensor.movedim(row_dim(tensor), 0).reshape(tensor.shape[row_dim(tensor)], -1)


def _keep_earlier(graph: Graph, node: Node) -> Columns | None:
    """Replaces a selection of rows from a norm by a norm of the selected rows."""
    run = node.inputs[0].run()
    if run is None or run[0].op != "norm" or run[0].width != node.width:
        return None
    norm = run[0]
    kept = graph.add("keep", norm.inputs[0].shape, norm.inputs)
    return graph.add("norm", (node.width,), [kept], **norm.facts)


RULES: dict[str, tuple[Callable[[Graph, Node], Node | Columns | None], ...]] = {
    "binary": (_nothing_changes, _root_mean_square, _weighted_norm, _scaled, _written_gelu, _rotary),
    "keep": (_keep_earlier,),
}
