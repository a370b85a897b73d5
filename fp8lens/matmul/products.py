"""Matmuls that a program writes without a dot: it multiplies what is broadcast along columns by
what is broadcast along rows, and adds up.
"""

import itertools
import math
import re
from typing import NamedTuple

from fp8lens.hlo.ops import ELEMENTWISE
from fp8lens.hlo.origin import op_name, primitive
from fp8lens.hlo.parse import Computation, Instruction, Shape
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import minor_to_major, operand, reducer

_MOST_FACTORS = 8  # of a product: two matrices, and scales
_SAME_PLACES = frozenset("convert copy negate".split())


class SumOfProducts(NamedTuple):
    """A matmul as a multiplication and a sum, in one kernel: of `lhs` and `rhs`, which are factors
    of `product`. M, N and K are more than 1.
    """

    product: Instruction
    lhs: Instruction
    rhs: Instruction
    sizes: tuple[int, int, int, int]  # M, N, K, batch


@remembered
def sums_of_products(computation: Computation) -> tuple[SumOfProducts, ...]:
    """The matmuls of a fused computation that are written as a multiplication and a sum. Those that
    XLA has made of a dot are not among them.
    """
    found = []
    for total in computation:
        if total.opcode != "reduce" or len(total.operands) != 2 or reducer(total) != "add":
            continue
        summed = _dims(total.attributes.get("dimensions", "{}"))
        product = _product(operand(total, 0), summed)
        if product is None or primitive(op_name(product[0])).endswith("dot_general"):
            continue
        if one := _largest(*product):
            found.append(one)
    return tuple(found)


def _product(i: Instruction, summed: set[int]) -> tuple[Instruction, set[int]] | None:
    """The multiplication of floats that a sum adds up, and the dimensions along which it does; None
    where it adds up something else.
    """
    along: set[int] | None = summed
    while along is not None:
        if i.opcode in _SAME_PLACES:
            i = operand(i, 0)
        elif i.opcode in ("bitcast", "reshape"):
            before = operand(i, 0)
            along = _before_reshape(before.shape, i.shape, along)
            i = before
        elif i.opcode == "select" and (kept := _masked(i, along)) is not None:
            i = kept
        else:
            break
    is_product = i.opcode == "multiply" and re.match(r"b?f\d", i.shape.dtype)
    return (i, along) if is_product and along is not None else None


def _masked(select: Instruction, summed: set[int]) -> Instruction | None:
    """What a mask keeps, where it masks elements of the sum and puts one number in their place."""
    varies = _varies(select.computation)
    mask, *values = select.operands
    kept = [name for name in values if varies[name]]
    if len(kept) != 1 or varies[mask] & summed:
        return None
    return select.computation[kept[0]]


def _before_reshape(before: Shape, after: Shape, summed: set[int]) -> set[int] | None:
    """The dimensions in front of a reshape that are those after it; None where these are parts of
    dimensions, or where it is a transpose in name.
    """
    if not (_is_row_major(before) and _is_row_major(after)):
        return None
    along: set[int] = set()
    given, made = [*enumerate(before.dims)], [*enumerate(after.dims)]
    while given and made:
        old, new = [given.pop(0)], [made.pop(0)]
        while (sizes := (_size(old), _size(new)))[0] != sizes[1]:
            behind, group = (given, old) if sizes[0] < sizes[1] else (made, new)
            if not behind:
                return None
            group.append(behind.pop(0))
        of_sum = {d in summed for d, size in new if size > 1}
        if len(of_sum) > 1:
            return None
        if True in of_sum:
            along |= {d for d, _ in old}
    return along


def _size(dims: list[tuple[int, int]]) -> int:
    return math.prod(size for _, size in dims)


def _is_row_major(shape: Shape) -> bool:
    return minor_to_major(shape) == [*reversed(range(len(shape.dims)))]


def _largest(product: Instruction, summed: set[int]) -> SumOfProducts | None:
    """The matmul of two factors of a product, the largest; None where it is none of matrices."""
    varies = _varies(product.computation)
    found = []
    for lhs, rhs in itertools.combinations(_factors(product), 2):
        rows, columns = varies[lhs.name], varies[rhs.name]
        both = rows & columns
        dims = (rows - both - summed, columns - both - summed, both & summed, both - summed)
        m, n, k, batch = (math.prod(product.shape.dims[d] for d in part) for part in dims)
        if min(m, n, k) > 1:
            found.append(SumOfProducts(product, lhs, rhs, (m, n, k, batch)))
    return max(found, key=lambda one: math.prod(one.sizes), default=None)


def _factors(product: Instruction) -> list[Instruction]:
    """What a product of several factors multiplies."""
    found: list[Instruction] = []
    todo = [product]
    while todo:
        i = todo.pop()
        if i.opcode in _SAME_PLACES:
            todo.append(operand(i, 0))
        elif i.opcode == "multiply" and len(found) + len(todo) < _MOST_FACTORS:
            todo += [operand(i, 1), operand(i, 0)]
        else:
            found.append(i)
    return found


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
            to = _in_order(i.attributes.get("dimensions", "{}"))
            before = varies[i.operands[0]]
            found &= {d for n, d in enumerate(to) if n in before}
        elif i.opcode in ELEMENTWISE | {"copy"}:
            found = set().union(*(varies[name] for name in i.operands))
        varies[i.name] = found
    return varies


def _dims(text: str) -> set[int]:
    return {*_in_order(text)}


def _in_order(text: str) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", text)]
