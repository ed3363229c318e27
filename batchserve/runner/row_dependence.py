"""What of a model's forward gives a row other bits among other rows, attention aside: `batch_invariant` has none of it.

A matrix product that is not packed sums in an order that depends on the number of rows, but few elements show it: so it
is found by its name. What is computed element by element shows it in many places, at the ends of vectors: it is tried.
"""

from __future__ import annotations

from itertools import count
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchserve.attention.interface import STEP_ARGUMENT, ValueProbe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

NUM_ROWS = 199  # odd, so that the parts of no number of threads end with the rows
FEW_ROWS = ((0, 4), (3, 5), (20, 7), (40, 13))  # (first, count)
SHARED_ELEMENTS = 1 << 15  # of fewer, ATen lets one thread compute a function
# Where the factors are among the arguments: what a product sums over is the last dimension of the first one.
FIRST_FACTOR = {
    "linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "dot": 0, "_grouped_mm": 0, "_scaled_mm": 0, "_int_mm": 0,
    "addmm": 1, "addmv": 1, "addbmm": 1, "baddbmm": 1,
}  # fmt: skip


def find_row_dependence(model: PreTrainedModel, max_model_len: int) -> str:
    """Names what makes a row's bits depend on the rows beside it; empty where nothing was found."""
    generator = torch.Generator().manual_seed(1)
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocab_size, (1, NUM_ROWS), generator=generator)
    positions = (torch.arange(NUM_ROWS) % max_model_len).unsqueeze(0)

    @torch.inference_mode()
    def logits(start: int, num_rows: int) -> torch.Tensor:
        rows = slice(start, start + num_rows)
        step: dict[str, Any] = {STEP_ARGUMENT: ValueProbe()}  # a row sees itself only
        output = model(input_ids=ids[:, rows], position_ids=positions[:, rows], use_cache=False, **step)
        result: torch.Tensor = output.logits[0]
        return result

    with _Watch() as watch:
        whole = logits(0, NUM_ROWS)
    if watch.products:
        return f"matrix products that are not packed, as of experts: {', '.join(sorted(watch.products))}"
    if watch.elementwise:
        return f"functions that come out otherwise among few rows: {', '.join(sorted(watch.elementwise))}"
    # All rows among few others, too: where the order of a sum depends on their number, few elements show it.
    sixteens = [(at, 16) for at in range(0, NUM_ROWS - 16, 16)]
    parts = [*sixteens, (0, 4), (3, 7), (20, 16), (40, 8), (1, 65), (100, 97), (2, 131)]
    is_same = all(torch.equal(whole[at : at + n], logits(at, n)) for at, n in parts)
    return "" if is_same else "as its logits show"


class _Watch(TorchDispatchMode):
    """Notes the names of operators that are called: products, and elementwise functions that differ among few rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: set[str] = set()
        self.elementwise: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if _sums(name, args):
            self.products.add(name)
            return func(*args, **kwargs)
        with self:  # what is put together from other operators calls them in sight
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        if torch.Tag.pointwise not in func.tags:
            return func(*args, **kwargs)
        # Their arguments are copied in front of the call, which may work in place.
        trials = [_Trial(args, kwargs, rows) for rows in (*FEW_ROWS, None)]
        out = func(*args, **kwargs)
        is_of_rows = isinstance(out, torch.Tensor) and out.is_floating_point() and _row_dim(out) is not None
        if is_of_rows and not all(trial.agrees(func, out) for trial in trials):
            self.elementwise.add(name)
        return out


class _Trial:
    """The arguments of an elementwise call for some (first, count) of its rows; None: for so many copies of all rows
    that all threads share them.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: tuple[int, int] | None) -> None:
        self._rows = rows
        widest = max([1, *(each.numel() for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))])
        self._num_copies = _copies_to_share(widest, torch.get_num_threads())
        self._args = [self._of(each) for each in args]
        self._kwargs = {name: self._of(each) for name, each in kwargs.items()}

    def agrees(self, func: Any, out: torch.Tensor) -> bool:
        """Whether the rows come out as they did among all."""
        return torch.equal(func(*self._args, **self._kwargs), self._of(out))

    def _of(self, value: Any) -> Any:
        """Those rows of a tensor, in memory of their own; anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        dim = _row_dim(value)
        if dim is None:
            return value.clone()
        if self._rows is None:
            return torch.cat([value] * self._num_copies, dim)
        return value.narrow(dim, *self._rows).contiguous().clone()


def _copies_to_share(num_elements: int, num_threads: int) -> int:
    """How many copies of so many elements all threads share, whose parts do not end with a copy's rows either."""
    least = num_threads * SHARED_ELEMENTS // num_elements + 1
    return next(copies for copies in count(least) if gcd(copies, num_threads) == 1)


def _sums(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator adds up products, of more than one each."""
    if name == "einsum":
        inputs, _, output = str(args[0]).replace(" ", "").partition("->")
        return bool(set(inputs) - set(output) - {",", "."})
    if name.startswith("convolution"):
        return True
    if name not in FIRST_FACTOR:
        return False
    place = FIRST_FACTOR[name]
    return place >= len(args) or args[place].shape[-1] > 1  # who knows what is given by name


def _row_dim(tensor: torch.Tensor) -> int | None:
    """Counted from the end; None where there is no dimension of NUM_ROWS."""
    dims = [d for d in range(-tensor.ndim, 0) if tensor.shape[d] == NUM_ROWS]
    return dims[0] if dims else None
