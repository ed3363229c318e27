"""Lowers a graph to a list of instructions over buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.program import instructions as at
from batchserve.program.experts import DOWN, UP
from batchserve.program.fusion import FUNCTIONS, PRODUCTS, Fusion, sources
from batchserve.program.graph import row_dim
from batchserve.program.heads import groups_of, turned
from batchserve.program.instructions import Binary, Function, Norm, Op
from batchserve.program.lower_experts import ExpertLowering
from batchserve.program.program import Attention, Buffer, Instruction, Program, assign_slots, place_barriers
from batchserve.program.tape import NUM_ROWS, UnsuitableModelError
from batchserve.program.torch_calls import Operand, TorchCall, check_row_by_row

if TYPE_CHECKING:
    from batchserve.program.graph import Columns, Graph, Node, Origin, Rows

BINARIES = {"add": Binary.ADD, "sub": Binary.SUBTRACT, "mul": Binary.MULTIPLY, "div": Binary.DIVIDE}


class Lowering:
    """Lowers a graph. is_bf16: attention is in bfloat16. has_bf16_product: bfloat16 weights multiply bfloat16 rows."""

    def __init__(self, graph: Graph, *, is_bf16: bool, has_bf16_product: bool) -> None:
        self._graph, self._is_half, self._multiplies_halves = graph, is_bf16, has_bf16_product
        self._fusion = Fusion(graph)
        self._users, self._fused = self._fusion.users, self._fusion.fused
        self._places: dict[int, tuple[Buffer, int]] = {}
        self._floats: dict[int, Buffer] = {}  # float32 copies of bfloat16 buffers, by node number
        self._halves: dict[tuple[Node, int, int], Buffer] = {}  # bfloat16 copies of multiplied columns
        self._kept: set[int] = set()
        self._by_torch: dict[int, Buffer] = {}  # by the id of the origin of nodes that torch computes
        self._per_row: dict[int, int] = {}  # pairs per row, of nodes that have a row for each pair
        self._experts = ExpertLowering(self)
        self.program = Program([], {}, [])

    def run(self) -> Program:
        """Returns the program. Raises UnsuitableModelError if a node can be computed neither natively nor by torch."""
        nodes = [self._graph.nodes[number] for number in sorted(self._fusion.reached)]
        for node in nodes:
            if node.op == "keep" or any(source.number in self._kept for source in sources(node)):
                self._kept.add(node.number)
            self._note_pairs(node)
            self._fusion.plan(node)
            if node.op == DOWN:
                self._fused.update((each.number, node) for each in self._experts.plan(node))
        for node in nodes:
            if node.number not in self._fused and node.op not in ("position", "rotary"):
                self._emit(node)
        last = self._graph.logits.run()
        if last is None or last[0].number not in self._places:
            raise UnsuitableModelError("its logits are not one node's")
        if last[0].number not in self._kept or last[1] != 0 or last[0].width != self._graph.logits.elements.size:
            raise UnsuitableModelError("its head does not run on chosen rows")
        self._places[last[0].number][0].is_logits = True
        assign_slots(self.program)
        place_barriers(self.program)
        return self.program

    def _emit(self, node: Node) -> None:
        """Adds a node's instructions. A node that has none is computed by torch."""
        try:
            getattr(self, f"_emit_{node.op}", self._refuse)(node)
        except UnsuitableModelError:
            if node.origin is None or node.number in self._per_row:
                raise
            self._compute_by_torch(node, node.origin)

    def _compute_by_torch(self, node: Node, origin: Origin) -> None:
        out = self._by_torch.get(id(origin))
        if out is None:
            check_row_by_row(origin.call, [each for each, _ in origin.operands])
            operands = {id(tensor): self._torch_operand(tensor, rows) for tensor, rows in origin.operands}
            last, start = origin.results[-1]
            out = self._by_torch[id(origin)] = self.buffer(node, start + last.numel() // NUM_ROWS)
            row_dims = tuple(row_dim(each) for each, _ in origin.results)
            self.add(Op.TORCH, node, out, torch_call=TorchCall(origin.call, operands, out, row_dims))
        self._places[node.number] = out, node.facts.get("start", 0)

    def _torch_operand(self, tensor: torch.Tensor, rows: Rows) -> Operand:
        elements, numbers, pieces = rows.columns.elements.reshape(-1), rows.columns.numbers().reshape(-1), []
        for number in np.unique(numbers):
            buffer, start = self.place(self._graph.columns_of(self._graph.nodes[int(number)]), "a value")
            chosen = np.flatnonzero(numbers == number)
            pieces.append((buffer, start + rows.columns.pick(elements[chosen]).places(), chosen))
        return Operand(tuple(pieces), rows.columns.shape, rows.row_dim, tensor.dtype)

    def _note_pairs(self, node: Node) -> None:
        if node.op == UP:
            self._per_row[node.number] = node.facts["per_row"]
        elif node.op != DOWN:
            found = {self._per_row[each.number] for each in sources(node) if each.number in self._per_row}
            if found:
                self._per_row[node.number] = found.pop()

    def _refuse(self, node: Node) -> None:
        raise UnsuitableModelError(f"{node.op} {node.facts.get('function', '')} stands alone")

    def buffer(self, node: Node, width: int | None = None, **kind: Any) -> Buffer:
        """Adds a buffer for a node's rows, or for its pairs if the node has a row for each pair."""
        kind.setdefault("per_row", self._per_row.get(node.number, 1))
        buffer = Buffer(width or node.width, is_kept=node.number in self._kept, **kind)
        self.program.buffers.append(buffer)
        return buffer

    def add(self, op: Op, node: Node, out: Buffer, **more: Any) -> Instruction:
        """Adds an instruction for a node."""
        kind = {at.IS_KEPT: int(node.number in self._kept), at.PER_ROW: self._per_row.get(node.number, 0)}
        fields = {at.OP: op, **kind, **more.pop("fields", {})}
        instruction = Instruction(op, out, fields=fields, **more)
        self.program.instructions.append(instruction)
        return instruction

    def place(self, columns: Columns, what: str) -> tuple[Buffer, int]:
        """Returns the place of consecutive columns, as float32."""
        run = columns.run()
        if run is None:
            raise UnsuitableModelError(f"{what} of columns that do not follow each other")
        node, first = run
        if node.op in ("position", "rotary") and node.number not in self._places:
            getattr(self, f"_emit_{node.op}")(node)
        buffer, start = self._places[node.number]
        if buffer.is_bf16:
            if node.number not in self._floats:
                copied = self._floats[node.number] = self.buffer(node, buffer.width, is_private=self._is_private(node))
                fields = {at.FUNCTION: Norm.COPY, at.COLUMNS: buffer.width, at.GROUPS: 1}
                self.add(Op.NORM, node, copied, x=(buffer, 0), fields=fields)
            buffer = self._floats[node.number]
        return buffer, start + first

    def factor(self, columns: Columns, weight: torch.Tensor) -> tuple[Buffer, int]:
        """Returns the place of columns that are multiplied by a weight, in the type that the weight's kernel takes."""
        run = columns.run()
        if run is None or not self._takes_halves(weight):
            place = self.place(columns, "a product")
            if weight.dtype == torch.bfloat16 and weight.shape[-1] % 2 and place[0].width != weight.shape[-1]:
                raise UnsuitableModelError("an odd number of columns is multiplied, of more")
            return place
        node, first = run
        size = columns.elements.size
        buffer = self._places[node.number][0] if node.number in self._places else None
        # A kernel reads the last cache line of each row to its end, so the rest of it must be zeros.
        if buffer is not None and buffer.is_bf16 and buffer.width == size and (size % 32 == 0 or not buffer.is_dense):
            return buffer, 0
        if (node, first, size) not in self._halves:
            place = self.place(columns, "a product")
            out = self.buffer(node, size, is_bf16=True, is_private=self._is_private(node))
            self._halves[node, first, size] = out
            fields = {at.FUNCTION: Norm.ROUND, at.COLUMNS: size, at.GROUPS: 1}
            self.add(Op.NORM, node, out, x=place, fields=fields)
        return self._halves[node, first, size], 0

    def _is_private(self, node: Node) -> bool:
        """True if each thread may compute its own copy when there are few rows, because only products read it."""
        is_shared = node.number in self._kept or node.number in self._per_row
        return not is_shared and all(user.op in PRODUCTS for user in self._users[node.number])

    def _takes_halves(self, weight: torch.Tensor) -> bool:
        return self._multiplies_halves and weight.dtype == torch.bfloat16

    def _is_multiplied(self, node: Node) -> bool:
        """True if only products that take bfloat16 use the node."""

        def multiplies_all(user: Node) -> bool:
            is_product = user.op in (*PRODUCTS, DOWN) and self._takes_halves(user.facts["weight"])
            return is_product and user.inputs[0].same_values(self._graph.columns_of(node))

        return node is not self._fusion.last() and all(map(multiplies_all, self._users[node.number]))

    def _emit_embedding(self, node: Node) -> None:
        self._embed(node, node, 1.0)

    def _embed(self, node: Node, source: Node, factor: float) -> None:
        out = self.buffer(node)
        fields = {at.COLUMNS: node.width, at.FACTORS: at.two_floats(factor)}
        self.add(Op.EMBED, node, out, weights=(_known(source.facts["weight"]),), fields=fields)
        self._places[node.number] = out, 0

    def _emit_position(self, node: Node) -> None:
        out = self.buffer(node)
        fields = {at.COLUMNS: node.width, at.FACTORS: at.two_floats(1.0), at.IN_WORD: 1}
        columns = self._graph.columns_of(node)
        self.add(Op.POSITION, node, out, tables=(columns,), fields=fields)
        self._places[node.number] = out, 0

    def _emit_rotary(self, node: Node) -> None:
        """Emits a rotation of heads by position, for users other than attention."""
        x = node.inputs[0]
        dim, groups = node.facts["dim"], groups_of(x.pick(x.elements.reshape(-1, x.shape[-1])))
        if groups is None:
            raise UnsuitableModelError("heads that do not lie evenly")
        source, first, by_group = groups
        buffer, start = self.place(self._graph.columns_of(source), "heads")
        out = self.buffer(node)
        self._rotate(node, (buffer, start + first), out, {at.COLUMNS: dim, at.BY_GROUP: by_group}, node)
        self._places[node.number] = out, 0

    def _rotate(
        self, node: Node, x: tuple[Buffer, int], out: Buffer, fields: dict[int, int], rotary: Node | None
    ) -> None:
        """Emits a copy of heads of COLUMNS each, BY_GROUP apart, whose first columns `rotary` rotates."""
        tables: tuple[Columns, ...] = ()
        if rotary is not None:
            fields |= {at.ROTATED: rotary.facts["dim"], at.IS_INTERLEAVED: int(rotary.facts["style"] == "pairs")}
            tables = rotary.facts["cosine"], rotary.facts["sine"]
        self.add(Op.ROTATE, node, out, x=x, tables=tables, fields=fields | {at.GROUPS: out.width // fields[at.COLUMNS]})

    def _emit_product(self, node: Node) -> None:
        users = self._users[node.number]
        is_operand = self._is_half and bool(users) and all(user.op == "attend" for user in users)
        out = self.buffer(node, is_bf16=is_operand)
        self._multiply(node, [node], out)
        self._places[node.number] = out, 0

    def _multiply(self, node: Node, chain: list[Node], out: Buffer, *, adds: bool = False) -> None:
        """Emits the product at the end of a chain, together with the operations applied to it."""
        product, factor, cap, function = chain[-1], 1.0, 0.0, Function.NONE
        for each in chain[:-1]:
            factor *= each.facts.get("factor", 1.0)
            cap = each.facts.get("cap", cap)
            if each.op == "unary":
                function = FUNCTIONS[each.facts["function"]]
        weight, bias = _known(product.facts["weight"]), product.facts["bias"]
        fields = {
            at.COLUMNS: weight.shape[-2],
            at.FACTORS: at.two_floats(factor, cap),
            at.FUNCTION: function,
            at.ADDS: int(adds),
        }
        operands = self._operands(product, weight)
        self.add(Op.PRODUCT, node, out, **operands, weights=(weight,), biases=(bias,), fields=fields)

    def _operands(self, product: Node, weight: torch.Tensor) -> dict[str, Any]:
        """Returns the operands of a product; for pairs, also their groups."""
        if product.op == "product":
            return {"x": self.factor(product.inputs[0], weight)}
        groups = self._experts.groups(product, product.inputs[1])
        if product.op == UP:
            return {"x": self._experts.rows_of_pairs(product), "y": (groups, 0)}
        return {"x": self.factor(product.inputs[0], weight), "y": (groups, 0)}

    def _emit_experts_up(self, node: Node) -> None:
        self._emit_product(node)

    def _emit_experts_down(self, node: Node) -> None:
        self._per_row[node.number] = node.facts["per_row"]
        pairs = self.buffer(node)
        self._multiply(node, [node], pairs)
        del self._per_row[node.number]
        self._places[node.number] = self._experts.combine(node, pairs), 0

    def _emit_fused(self, node: Node) -> bool:
        """Emits the chain whose last operation is the node. Returns False if there is no such chain."""
        chain = self._fusion.chain(node)
        if chain[-1].op not in (*PRODUCTS, "embedding") or len(chain) == 1:
            return False
        if chain[-1].op == "embedding":
            self._embed(node, chain[-1], node.facts["factor"])
            return True
        out = self.buffer(node, is_bf16=self._is_multiplied(node))
        self._multiply(node, chain, out)
        self._places[node.number] = out, 0
        return True

    def _emit_unary(self, node: Node) -> None:
        if self._emit_fused(node):
            return
        if node.facts["function"] not in FUNCTIONS:
            self._refuse(node)
        self._elementwise(node, FUNCTIONS[node.facts["function"]], Binary.NONE, 0.0)

    def _emit_scale(self, node: Node) -> None:
        if not self._emit_fused(node):
            self._elementwise(node, Function.NONE, Binary.MULTIPLY, node.facts["factor"])

    def _emit_cap(self, node: Node) -> None:
        if not self._emit_fused(node):
            self._refuse(node)

    def _emit_norm(self, node: Node) -> None:
        x = self.place(node.inputs[0], "a norm")
        out = self.buffer(node, is_private=self._is_private(node), is_bf16=self._is_multiplied(node))
        facts = node.facts
        dim = facts["dim"]
        weight = torch.ones(dim) if facts["weight"] is None else facts["weight"].detach().float()
        bias = torch.zeros(dim) if facts["bias"] is None else facts["bias"].detach().float()
        fields = {
            at.FUNCTION: Norm.LAYER if facts["kind"] == "layer" else Norm.RMS,
            at.COLUMNS: dim,
            at.GROUPS: node.width // dim,
            at.FACTORS: at.two_floats(facts["epsilon"]),
        }
        self.add(Op.NORM, node, out, x=x, constants={at.WEIGHT: weight, at.BIAS: bias}, fields=fields)
        self._places[node.number] = out, 0

    def _emit_keep(self, node: Node) -> None:
        x, out = self.place(node.inputs[0], "rows that are kept"), self.buffer(node)
        self.add(Op.KEEP, node, out, x=x, fields={at.COLUMNS: node.width})
        self._places[node.number] = out, 0

    def _emit_binary(self, node: Node) -> None:
        if "gate" in node.facts:
            self._gate(node)
        elif "sum" in node.facts:
            base, product = node.facts["sum"]
            out = self.place(self._graph.columns_of(base), "a sum")[0]
            self._multiply(node, self._fusion.chain(product), out, adds=True)
            self._places[node.number] = out, 0
        else:
            constant, is_reversed = node.facts["constant"], node.facts["is_reversed"]
            binary = BINARIES[node.facts["function"]]
            if is_reversed and binary in (Binary.SUBTRACT, Binary.DIVIDE):
                self._refuse(node)
            if isinstance(constant, float | int):
                if binary not in (Binary.ADD, Binary.SUBTRACT):
                    self._refuse(node)
                number = -float(constant) if binary == Binary.SUBTRACT else float(constant)
                self._elementwise(node, Function.NONE, Binary.ADD, number)
            else:
                self._elementwise(node, Function.NONE, binary, 0.0, constant)

    def _elementwise(
        self, node: Node, function: Function, binary: Binary, number: float, constant: torch.Tensor | None = None
    ) -> None:
        x = self.place(node.inputs[0], node.op)
        y = self.place(node.inputs[1], node.op) if len(node.inputs) > 1 else None
        out = self.buffer(node)
        constants = {} if constant is None else {at.Y: constant.reshape(-1).contiguous()}
        fields = {at.COLUMNS: node.width, at.FUNCTION: function, at.BINARY: binary,
                  at.FACTORS: at.two_floats(number)}  # fmt: skip
        self.add(Op.ELEMENTWISE, node, out, x=x, y=y, constants=constants, fields=fields)
        self._places[node.number] = out, 0

    def _gate(self, node: Node) -> None:
        (gate, first), (up, other), function = node.facts["gate"]
        rows = slice(first, first + node.width), slice(other, other + node.width)
        weights = tuple(_known(each.facts["weight"])[..., part, :] for each, part in zip((gate, up), rows, strict=True))
        biases = tuple(None if each.facts["bias"] is None else each.facts["bias"][..., part]
                       for each, part in zip((gate, up), rows, strict=True))  # fmt: skip
        fields = {
            at.COLUMNS: node.width,
            at.FACTORS: at.two_floats(1.0),
            at.FUNCTION: FUNCTIONS[function],
        }
        operands, out = self._operands(gate, weights[0]), self.buffer(node, is_bf16=self._is_multiplied(node))
        self.add(Op.PRODUCT, node, out, **operands, weights=weights, biases=biases, fields=fields)
        self._places[node.number] = out, 0

    def _emit_attend(self, node: Node) -> None:
        operands = tuple(self._operand(node, columns) for columns in node.inputs)
        (num_heads, dim), num_kv_heads = node.inputs[0].shape, node.inputs[1].shape[0]
        if node.inputs[1].shape != node.inputs[2].shape or node.inputs[1].shape[1] != dim:
            raise UnsuitableModelError("keys and values of different lengths")
        out, layer = self.buffer(node, is_bf16=self._is_half, is_dense=True), node.facts["layer"]
        attention = Attention(layer, node.facts["params"], operands, out, num_heads, num_kv_heads, dim)
        if layer in self.program.attention:
            raise UnsuitableModelError(f"layer {layer} attends twice")
        self.program.attention[layer] = attention
        self.add(Op.ATTEND, node, out, layer=layer)  # stores K and V of all rows, if that has to come first
        self.add(Op.ATTEND, node, out, layer=layer)
        self._places[node.number] = out, 0

    def _operand(self, node: Node, columns: Columns) -> tuple[Buffer, int]:
        """Returns the place of q, k or v [heads, dim], rotated by position, in attention's own type."""
        rotary, x = turned(self._graph, columns)
        groups = groups_of(x)
        if groups is None:
            raise UnsuitableModelError("heads that do not lie evenly")
        source, first, by_group = groups
        (num_heads, dim), buffer_place = columns.shape, self._places.get(source.number)
        if rotary is None and buffer_place is not None and by_group == dim and buffer_place[0].is_bf16 == self._is_half:
            return buffer_place[0], buffer_place[1] + first
        place = self.place(self._graph.columns_of(source), "heads")
        out = self.buffer(node, num_heads * dim, is_bf16=self._is_half)
        self._rotate(node, (place[0], place[1] + first), out, {at.COLUMNS: dim, at.BY_GROUP: by_group}, rotary)
        return out, 0


def _known(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight. Raises UnsuitableModelError if programs cannot read its type."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise UnsuitableModelError(f"weights in {weight.dtype}")
    return weight
