"""Turns a tape into a graph over rows, which traces each column of each value to a node through all changes of shape.

A value with a row dimension is a table of elements, each of which is a column of a node. Views, slices, transposes and
concatenations only select columns, so they are run on column numbers instead of values. Casts between floating-point
types are dropped: a program computes in float32 and rounds when it stores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.program.experts import DOWN, UP
from batchserve.program.rotary import ROTARY
from batchserve.program.tape import ATTEND, NUM_ROWS, Call, Tape, UnsuitableModelError, mapped, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CASTS = {"to", "_to_copy", "type_as", "detach", "alias", "contiguous", "clone", "dropout", "lift_fresh"}
LAYOUTS = {
    "view", "reshape", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "chunk", "flatten", "unflatten", "narrow", "unbind", "cat", "stack", "t",
    "repeat_interleave", "expand_as", "view_as", "repeat",
}  # fmt: skip
UNARY = {
    "silu", "gelu", "relu", "sigmoid", "tanh", "neg", "rsqrt", "exp", "gelu_tanh",
}  # fmt: skip
BINARY = {"add", "sub", "mul", "div"}
IN_PLACE = {f"{name}_" for name in BINARY}
_NODE_SHIFT = 40  # an element is (node number << 40) + column


@dataclass(slots=True, eq=False)
class Node:
    """An operation on rows, with `width` columns. inputs: columns of other nodes. facts: its other parameters."""

    op: str
    width: int
    inputs: tuple[Columns, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    number: int = -1
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The call that computes a node, and its operands as rows. results: (recorded tensor, first column) of each."""

    call: Call
    operands: tuple[tuple[torch.Tensor, Rows], ...]
    results: tuple[tuple[torch.Tensor, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of a value, in the shape of its features: one int64 each, made of a node's number and a column."""

    graph: Graph
    elements: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    def node(self) -> Node | None:
        """Returns the node of all elements, or None if there are several."""
        numbers = self.numbers()
        first = int(numbers.flat[0])
        return self.graph.nodes[first] if (numbers == first).all() else None

    def numbers(self) -> np.ndarray:
        """Returns the node number of each element."""
        return self.elements >> _NODE_SHIFT

    def places(self) -> np.ndarray:
        """Returns the column of each element in its node."""
        return self.elements & ((1 << _NODE_SHIFT) - 1)

    def run(self) -> tuple[Node, int] | None:
        """Returns (node, first column) if the elements are consecutive columns of one node."""
        node, places = self.node(), self.places().reshape(-1)
        if node is None or (np.diff(places) != 1).any():
            return None
        return node, int(places[0])

    def same(self, other: Columns) -> bool:
        return self.shape == other.shape and bool((self.elements == other.elements).all())

    def same_values(self, other: Columns) -> bool:
        """True if both are the same values in the same order, whatever their shapes."""
        return np.array_equal(self.elements.reshape(-1), other.elements.reshape(-1))

    def pick(self, elements: np.ndarray) -> Columns:
        return Columns(self.graph, elements)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A tensor with a row dimension: its columns, and the row dimension, counted from the end."""

    columns: Columns
    row_dim: int


class Graph:
    """Nodes in the order of their computation, and the columns that are the logits.

    simplify is called for each node before it is added. It may return another node or existing columns instead.
    """

    def __init__(self, tape: Tape, simplify: Callable[[Graph, Node], Node | Columns | None]) -> None:
        self.nodes: list[Node] = []
        self._tape = tape
        self._found: dict[tuple[Any, ...], Node] = {}  # keyed by what they compute
        self._origin: Origin | None = None  # of the nodes being added
        self.position_calls: list[Call] = []
        self.positions = tape.positions
        self._simplify = simplify
        self._rows: dict[int, Rows] = {}  # by tensor id, which is unique while the tape lives
        self._made_by: dict[int, Call] = {}  # by the id of a tensor that depends on positions alone
        self._is_position = {id(tape.positions)}
        self._ids, self._keep = {id(tape.ids)}, {id(tape.keep)}
        for call in tape.calls:
            self._take(call)
        logits = self._rows.get(id(tape.logits))
        if logits is None:
            raise UnsuitableModelError("its logits do not come from its rows")
        self.logits = logits.columns

    def add(self, op: str, shape: tuple[int, ...], inputs: Iterable[Columns] = (), **facts: Any) -> Columns:
        """Adds a node and returns its columns in the given shape, or returns what the node simplifies to."""
        node = Node(op, math.prod(shape), tuple(inputs), facts, origin=self._origin)
        simpler = self._simplify(self, node)
        if isinstance(simpler, Columns):
            return simpler.pick(simpler.elements.reshape(shape))
        node = self._once(simpler or node)
        return Columns(self, (node.number << _NODE_SHIFT) + np.arange(node.width, dtype=np.int64).reshape(shape))

    def _once(self, node: Node) -> Node:
        """Numbers and returns the node, or returns an earlier one that computes the same."""
        key = None
        if all(isinstance(fact, str | int | float | None) for fact in node.facts.values()):
            operands = ((each.shape, each.elements.tobytes()) for each in node.inputs)
            key = node.op, node.width, *operands, *node.facts.items()
        if key is None or node.op == "other" or key not in self._found:
            node.number = len(self.nodes)
            self.nodes.append(node)
            if key is None:
                return node
            self._found[key] = node
        return self._found[key]

    def node_of(self, number: int) -> Node:
        return self.nodes[number]

    def columns_of(self, node: Node) -> Columns:
        """Returns all columns of a node."""
        return Columns(self, (node.number << _NODE_SHIFT) + np.arange(node.width, dtype=np.int64))

    def _take(self, call: Call) -> None:
        tensors = [*tensors_in(call.arguments), *tensors_in([*call.options.values()])]
        kinds, name = {self._kind(each) for each in tensors}, call.name
        if kinds <= {"constant"}:
            return
        if not call.results:
            if kinds & {"rows", "ids"} and not name.startswith("_assert"):
                raise UnsuitableModelError(f"{name} of a value, on which the model's code may depend")
            return
        result = call.results[0]
        if name == ATTEND:
            self._attend(call)
        elif name in (UP, DOWN):
            self._experts(call)
        elif name == ROTARY:
            self._depends_on_positions(call)
        elif call.function._schema.is_mutable and "rows" in kinds and self._is_alone(call.arguments[0]):
            self._compute(call)
            self._origin = None
        elif call.function._schema.is_mutable:
            raise UnsuitableModelError(f"{name} changes a value in place")
        elif name == "embedding" and id(call.arguments[1]) in self._ids:
            weight = call.arguments[0]
            self._set(result, self.add("embedding", (weight.shape[1],), weight=weight))
        elif kinds == {"ids"} and name in CASTS | LAYOUTS:
            self._ids.add(id(result))
        elif kinds == {"keep"} and name in CASTS:
            self._keep.add(id(result))
        elif kinds <= {"position", "constant"} and id(result) in self._is_position:
            return  # the call returned its input
        elif kinds <= {"position", "constant"}:
            self._depends_on_positions(call)
        elif name == "index" and kinds == {"rows", "keep"}:
            kept = self._of(call.arguments[0])
            self._set(result, self.add("keep", kept.columns.shape, [kept.columns]))
        elif kinds & {"ids", "keep"}:
            raise UnsuitableModelError(f"{name} of token ids or of the rows that are kept")
        elif name in CASTS:
            self._cast(call)
        elif name in LAYOUTS:
            self._layout(call)
        else:
            self._compute(call)
            self._origin = None

    def _depends_on_positions(self, call: Call) -> None:
        self.position_calls.append(call)
        self._is_position.update(id(each) for each in call.results)
        self._made_by.update((id(each), call) for each in call.results)

    def _kind(self, tensor: torch.Tensor) -> str:
        if id(tensor) in self._rows:
            return "rows"
        if id(tensor) in self._is_position:
            return "position"
        return "ids" if id(tensor) in self._ids else "keep" if id(tensor) in self._keep else "constant"

    def _set(self, tensor: torch.Tensor, columns: Columns) -> None:
        dim = row_dim(tensor)
        features = [size for place, size in enumerate(tensor.shape) if place != dim]
        self._rows[id(tensor)] = Rows(columns.pick(columns.elements.reshape(features)), dim - tensor.ndim)

    def _of(self, tensor: torch.Tensor) -> Rows:
        """Returns a tensor's rows. A tensor that depends on positions alone becomes a node when rows first need it."""
        if id(tensor) not in self._rows:
            call = self._made_by[id(tensor)]
            sources = tensors_in(call.arguments)
            if call.name in CASTS | LAYOUTS and all(each.is_floating_point() for each in sources):
                for each in sources:
                    self._of(each)
                (self._cast if call.name in CASTS else self._layout)(call)
            else:
                dim = row_dim(tensor)
                shape = tuple(size for place, size in enumerate(tensor.shape) if place != dim)
                self._set(tensor, self.add("position", shape, tensor=tensor))
        return self._rows[id(tensor)]

    def _cast(self, call: Call) -> None:
        source, result = call.arguments[0], call.results[0]
        if result.shape != source.shape or not result.is_floating_point():
            raise UnsuitableModelError(f"{call.name} to {result.dtype}")
        self._rows[id(result)] = self._of(source)

    def _layout(self, call: Call) -> None:
        """Runs the call on column numbers and on row numbers; the rows have to stay in one dimension."""

        def numbers(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = self._of(tensor)
            elements = torch.tensor(rows.columns.elements).unsqueeze(tensor.ndim + rows.row_dim)
            place = [1] * tensor.ndim
            place[rows.row_dim] = NUM_ROWS
            return elements.expand(tensor.shape), torch.arange(NUM_ROWS).view(place).expand(tensor.shape)

        def run(part: int) -> Any:
            return call.function(*mapped(call.arguments, lambda each: numbers(each)[part]), **call.options)

        found = [run(0), run(1)]
        columns, rows = (each if isinstance(each, tuple | list) else [each] for each in found)
        graph = Columns(self, np.zeros(0, np.int64))
        for result, chosen, of_row in zip(call.results, columns, rows, strict=True):
            dim = row_dim(result)
            place = [1] * result.ndim
            place[dim] = NUM_ROWS
            if not (of_row == torch.arange(NUM_ROWS).view(place)).all():
                raise UnsuitableModelError(f"{call.name} mixes rows")
            elements = chosen.select(dim, 0).contiguous().numpy()
            self._rows[id(result)] = Rows(graph.pick(elements), dim - result.ndim)

    def _attend(self, call: Call) -> None:
        layer, query, key, value, params = call.arguments
        operands = [self._of(each).columns for each in (query, key, value)]
        heads = [each.pick(each.elements.reshape(each.shape[-2:])) for each in operands]
        shape = (query.shape[1], value.shape[-1])
        self._set(call.results[0], self.add("attend", shape, heads, layer=layer, params=params))

    def _experts(self, call: Call) -> None:
        x, index, weight, bias, *weights = call.arguments
        operands = [self._of(each).columns for each in (x, index, *weights)]
        facts = {"weight": weight, "bias": bias, "per_row": index.shape[-1]}
        self._set(call.results[0], self.add(call.name, (weight.shape[1],), operands, **facts))

    def _is_alone(self, tensor: Any) -> bool:
        """True if no other value shares a tensor's memory, so that changing it in place only makes a new value."""
        start = tensor.untyped_storage().data_ptr()
        others = (each for call in self._tape.calls for each in call.results if each is not tensor)
        return all(each.untyped_storage().data_ptr() != start for each in others)

    def _compute(self, call: Call) -> None:
        """Adds a node for an operator that computes new values."""
        name, arguments, result = call.name, call.arguments, call.results[0]
        if name in IN_PLACE:
            name = name.removesuffix("_")
        operands = [each for each in tensors_in([*arguments, *call.options.values()]) if self._kind(each) != "constant"]
        starts = np.cumsum([0, *(each.numel() // NUM_ROWS for each in call.results)])
        self._origin = Origin(
            call,
            tuple((each, self._of(each)) for each in operands),
            tuple((each, int(start)) for each, start in zip(call.results, starts, strict=False)),
        )
        dim = row_dim(result)
        shape = tuple(size for place, size in enumerate(result.shape) if place != dim)
        if name in ("linear", "addmm", "mm", "matmul"):
            columns = self._product(name, arguments, shape)
        elif name in BINARY:
            columns = self._binary(call, shape, dim - result.ndim)
        elif name in UNARY:
            approximate = call.options.get("approximate", arguments[1] if len(arguments) > 1 else "none")
            function = "gelu_tanh" if name == "gelu" and approximate == "tanh" else name
            columns = self.add("unary", shape, [self._of(arguments[0]).columns], function=function)
        elif name == "pow" and isinstance(arguments[1], int | float):
            columns = self.add("pow", shape, [self._of(arguments[0]).columns], exponent=float(arguments[1]))
        elif name == "mean" and list(arguments[1]) in ([-1], [arguments[0].ndim - 1]) and True in arguments[2:]:
            columns = self.add("mean", shape, [self._of(arguments[0]).columns])
        elif name == "softmax" and arguments[1] in (-1, arguments[0].ndim - 1):
            columns = self.add("softmax", shape, [self._of(arguments[0]).columns])
        elif name == "sum" and list(arguments[1]) == [-1] and True in arguments[2:]:
            columns = self.add("sum", shape, [self._of(arguments[0]).columns])
        elif name == "topk" and len(shape) == 1 and (*arguments, -1)[2] in (-1, 1) and False not in arguments[3:4]:
            scores = [self._of(arguments[0]).columns]
            columns = self.add("topk_value", shape, scores)
            self._set(call.results[1], self.add("topk_index", shape, scores, start=columns.elements.size))
        elif name == "layer_norm":
            source, (dim_size,), weight, bias, epsilon = (*arguments, *(None, None, 1e-5)[len(arguments) - 2 :])[:5]
            facts = {"weight": weight, "bias": bias, "epsilon": epsilon, "dim": dim_size, "kind": "layer"}
            columns = self.add("norm", shape, [self._of(source).columns], **facts)
        else:
            self._other(call, int(starts[-1]))
            return
        self._set(result, columns)

    def _other(self, call: Call, width: int) -> None:
        """Adds a node for an operator that only torch can compute."""
        assert self._origin is not None
        columns = self.add("other", (width,), [rows.columns for _, rows in self._origin.operands])
        for result, start in self._origin.results:
            self._set(result, columns.pick(columns.elements[start : start + result.numel() // NUM_ROWS]))

    def _product(self, name: str, arguments: tuple[Any, ...], shape: tuple[int, ...]) -> Columns:
        if name == "linear":
            x, weight, bias = (*arguments, None)[:3]
        elif name == "addmm":
            bias, x, weight = arguments[0], arguments[1], arguments[2].t()
        else:
            x, weight, bias = arguments[0], arguments[1].t(), None
        if self._kind(weight) != "constant" or weight.ndim != 2:
            raise UnsuitableModelError(f"{name} of two values")
        return self.add("product", shape, [self._of(x).columns], weight=weight, bias=bias)

    def _binary(self, call: Call, shape: tuple[int, ...], rows_at: int) -> Columns:
        """Each operand is columns, broadcast to the result's shape, a constant of that shape, or a number."""
        if call.options.get("alpha", 1) != 1 or call.options.get("rounding_mode"):
            raise UnsuitableModelError(f"{call.name} with {dict(call.options)}")
        inputs: list[Columns] = []
        constant: torch.Tensor | float | None = None
        is_reversed = False
        for place, operand in enumerate(call.arguments[:2]):
            if isinstance(operand, torch.Tensor) and self._kind(operand) != "constant":
                rows = self._of(operand)
                if rows.row_dim != rows_at:
                    raise UnsuitableModelError(f"{call.name} of rows in two dimensions")
                inputs.append(rows.columns.pick(np.broadcast_to(rows.columns.elements, shape)))
                continue
            is_reversed = place == 0
            constant = operand if isinstance(operand, int | float) else _constant(operand, shape, rows_at, call.name)
        facts = {"function": call.name.removesuffix("_"), "constant": constant, "is_reversed": is_reversed}
        return self.add("binary", shape, inputs, **facts)


def row_dim(tensor: torch.Tensor) -> int:
    """Returns the only dimension of size NUM_ROWS."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size == NUM_ROWS]
    if len(dims) != 1:
        raise UnsuitableModelError(f"a value of shape {list(tensor.shape)} has not one dimension of rows")
    return dims[0]


def _constant(tensor: torch.Tensor, shape: tuple[int, ...], rows_at: int, name: str) -> torch.Tensor | float:
    """Returns a number, or a constant without its row dimension, broadcast to the shape of the features."""
    if tensor.numel() == 1:
        return float(tensor)
    if tensor.ndim >= -rows_at:
        if tensor.shape[rows_at] != 1:
            raise UnsuitableModelError(f"{name} with another constant for each row")
        tensor = tensor.squeeze(rows_at)
    return tensor.float().expand(shape)
