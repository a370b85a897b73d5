"""Matmuls without a dot, as multiplications and sums: XLA makes them of dots with a vector, and
programs write them. And the sums by which a kernel adds up what another has multiplied, as where
XLA splits K.

What a sum adds up is followed back to what is multiplied, through kernels, by where its elements
lie in memory: views change an array's dimensions, and not this.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fp8lens.hlo.dataflow import callers
from fp8lens.hlo.ops import ELEMENTWISE
from fp8lens.hlo.origin import op_name, primitive
from fp8lens.hlo.parse import Computation, HloModule, Instruction, Shape
from fp8lens.hlo.program import fusion_body
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import dimensions, minor_to_major, operand, reducer

_FAR = 100  # instructions between a sum and what it adds up
_SAME_PLACES = frozenset("convert copy negate".split())

# A dimension in memory: how far apart its neighbours are, in elements, and that times its length.
# A dimension that a view makes of it lies within it, or it within that.
Span = tuple[int, int]


class Sum(NamedTuple):
    """What sums add up of an array, `spans`; `reduce` is the last of them."""

    reduce: Instruction
    spans: tuple[Span, ...]

    @property
    def is_xlas(self) -> bool:
        """Whether XLA has made it, of a dot: it has the dot's name, or none."""
        return not primitive(op_name(self.reduce)).startswith("reduce")

    def length(self, shape: Shape, dims: Iterable[int]) -> int:
        """How many elements are added up along some of the array's dimensions."""
        spans = _spans(shape)
        common = [_overlap(spans[d], summed) for d in dims for summed in self.spans]
        return math.prod(high // low for low, high in common if low < high)


class Product(NamedTuple):
    """A matmul as a multiplication and a sum: of `lhs` and `rhs`, which are factors of `multiply`.
    K is more than 1. `is_written`: the program has no dot for it.
    """

    multiply: Instruction
    lhs: Instruction
    rhs: Instruction
    sizes: tuple[int, int, int, int]  # M, N, K, batch
    is_written: bool


@remembered
def products(computation: Computation) -> tuple[Product, ...]:
    """The matmuls that a fused computation multiplies without a dot."""
    found = []
    for i in computation:
        total = sums(computation.module).get(i) if i.opcode == "multiply" else None
        if total is not None and (product := _product(i, total)):
            found.append(product)
    return tuple(found)


def _product(multiply: Instruction, total: Sum) -> Product | None:
    """The matmul of the two factors of a multiplication; None where it is none. Of a dot either
    may be a vector.
    """
    name = op_name(multiply)
    # XLA may give a dot the name of the transpose that it takes in.
    is_named = primitive(name).endswith("dot_general") or (
        primitive(name) == "transpose" and name == op_name(total.reduce)
    )
    is_of_dot = total.is_xlas and is_named
    lhs, rhs = operand(multiply, 0), operand(multiply, 1)
    shape, varies = multiply.shape, _varies(multiply.computation)
    rows, columns = varies[lhs.name], varies[rhs.name]
    both = rows & columns
    k = total.length(shape, both)
    batch = _length(shape, both) // k
    m, n = (_length(shape, d) // total.length(shape, d) for d in (rows - both, columns - both))
    is_written = min(m, n) > 1 and bool(re.match(r"b?f\d", shape.dtype))
    if k == 1 or not (is_of_dot or is_written):
        return None
    return Product(multiply, lhs, rhs, (m, n, k, batch), not is_of_dot)


def _length(shape: Shape, dims: Iterable[int]) -> int:
    return math.prod(shape.dims[d] for d in dims)


@remembered
def _varies(computation: Computation) -> dict[str, set[int]]:
    """Of each instruction, the dimensions along which it may vary: not those that it is broadcast
    along.
    """
    varies: dict[str, set[int]] = {}
    for i in computation:
        found = {d for d, size in enumerate(i.shape.dims) if size > 1}
        if i.opcode == "constant":
            found = set()
        elif i.opcode == "broadcast":
            found &= {d for n, d in enumerate(dimensions(i)) if n in varies[i.operands[0]]}
        elif i.opcode == "bitcast":
            given, made = _spans(operand(i, 0).shape), _spans(i.shape)
            kept = [given[d] for d in varies[i.operands[0]]]
            found = {d for d in found if any(_meet(made[d], span) for span in kept)}
        elif i.opcode == "copy" or i.opcode in ELEMENTWISE:
            found = set().union(*(varies[name] for name in i.operands))
        varies[i.name] = found
    return varies


# Sums ---------------------------------------------------------------------------------------------


@remembered
def sums(module: HloModule) -> dict[Instruction, Sum]:
    """What is added up, by the instruction that makes it, in whichever kernel. Where several sums
    add up one after the other, all of them together.
    """
    found: dict[Instruction, Sum] = {}
    for i in module:
        if not _adds_up(i):
            continue
        made: Instruction = i
        spans: tuple[Span, ...] = ()
        for _ in range(_FAR):
            before, spans = _behind(made, spans)
            if before is None:
                break
            made = before
        if made not in found or _size(found[made].spans) < _size(spans):
            found[made] = Sum(i, spans)
    return found


def _adds_up(i: Instruction) -> bool:
    return i.opcode == "reduce" and len(i.operands) == 2 and reducer(i) == "add"


def _size(spans: Iterable[Span]) -> int:
    return math.prod(high // low for low, high in spans)


def _behind(i: Instruction, spans: tuple[Span, ...]) -> tuple[Instruction | None, tuple[Span, ...]]:
    """What an instruction only moves, converts or adds up, and the spans of that; None for what it
    computes otherwise.
    """
    if i.opcode == "parameter":
        return _given(i), spans
    if i.opcode in ("fusion", "get-tuple-element"):
        return _result(i), spans
    if i.opcode not in (*_SAME_PLACES, "bitcast", "transpose") and not _adds_up(i):
        return None, spans
    before = operand(i, 0)
    if i.opcode == "bitcast":
        return before, spans
    if i.opcode == "transpose":
        return before, _carried(spans, i.shape, before.shape, dimensions(i))
    # Of what is converted none of the dimensions is summed.
    summed = dimensions(i) if i.opcode == "reduce" else []
    kept = [d for d in range(len(before.shape.dims)) if d not in summed]
    own = [span for d, span in enumerate(_spans(before.shape)) if d in summed]
    return before, (*own, *_carried(spans, i.shape, before.shape, kept))


def _given(parameter: Instruction) -> Instruction | None:
    """What a fusion is given."""
    computation, number = parameter.computation, parameter.parameter_number
    around = callers(computation.module).get(computation.name, [])
    if len(around) != 1 or around[0].opcode != "fusion" or number is None:
        return None
    return operand(around[0], number)


def _result(i: Instruction) -> Instruction | None:
    """What makes a fusion's result, or the first result of a library's call."""
    element = 0
    if i.opcode == "get-tuple-element":
        element, i = i.element or 0, operand(i, 0)
        if i.opcode == "custom-call":
            return i if element == 0 else None
    if i.opcode != "fusion":
        return None
    root = fusion_body(i).root
    return operand(root, element) if root.opcode == "tuple" else root


def _carried(
    spans: Iterable[Span], after: Shape, before: Shape, was: Sequence[int]
) -> tuple[Span, ...]:
    """Spans of an array as those of what it is made of; `was` has, for each of its dimensions,
    which that was before.
    """
    of_after, of_before = _spans(after), _spans(before)
    found = []
    for d, whole in enumerate(of_after):
        stride = of_before[was[d]][0]
        for low, high in (_overlap(whole, span) for span in spans):
            if low < high:
                found.append((low // whole[0] * stride, high // whole[0] * stride))
    return tuple(found)


def _spans(shape: Shape) -> list[Span]:
    """Each dimension of an array as it lies in memory."""
    found = [(1, 1)] * len(shape.dims)
    stride = 1
    for d in minor_to_major(shape):
        found[d] = (stride, stride * max(1, shape.dims[d]))
        stride = found[d][1]
    return found


def _overlap(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _meet(one: Span, other: Span) -> bool:
    low, high = _overlap(one, other)
    return low < high
