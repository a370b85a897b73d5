"""Matmuls that a program writes without a dot: it multiplies what is broadcast along columns by
what is broadcast along rows, and adds up, in one kernel or over the iterations of a loop.
"""

import itertools
import math
import re
from typing import NamedTuple

from fp8lens.hlo.ops import ELEMENTWISE
from fp8lens.hlo.origin import op_name, primitive
from fp8lens.hlo.parse import Computation, HloModule, Instruction, Shape
from fp8lens.hlo.program import fusion_body
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import dimensions, look_through, minor_to_major, operand, reducer

_MOST_FACTORS = 8  # of a product: two matrices, and scales
_SAME_PLACES = frozenset("convert copy negate".split())


class SumOfProducts(NamedTuple):
    """A matmul as a multiplication and a sum: of `lhs` and `rhs`, which are factors of `product`. M
    and N are more than 1; K is 1 where each iteration of a loop adds one outer product.
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
        product = _product(operand(total, 0), {*dimensions(total)})
        if product is None or _is_of_dot(product[0]):
            continue
        if one := _largest(*product):
            found.append(one)
    return tuple(found)


def added_by_loop(fusion: Instruction) -> tuple[SumOfProducts, ...]:
    """The outer products that a fusion adds to what its loop carries, or subtracts from it, if
    nothing else in the loop reads that: all iterations together are one matmul. Those that XLA has
    made of a dot, and those of which a factor is the same in each iteration, are not among them.
    """
    if not _is_loop_body(fusion.computation):
        return ()
    found = []
    for carried in fusion_body(fusion).parameters:
        total, added = _summed(carried)
        if not added or not _carries(fusion, carried, total):
            continue
        for part in added:
            product = look_through(part, _SAME_PLACES)
            if not _is_product(product) or _is_of_dot(product):
                continue
            one = _largest(product, set(), least_k=1)
            if one and _changes(fusion, one.lhs) and _changes(fusion, one.rhs):
                found.append(one)
    return tuple(found)


def _summed(carried: Instruction) -> tuple[Instruction, list[Instruction]]:
    """What a parameter becomes by sums and differences, each of which alone reads the one before;
    and what they add or subtract.
    """
    added: list[Instruction] = []
    total, users = carried, carried.computation.users
    while len(reading := users.get(total.name, [])) == 1:
        (after,) = reading
        if after.opcode in ("add", "subtract") and operand(after, 0) is total:
            added.append(operand(after, 1))
        elif after.opcode == "add":
            added.append(operand(after, 0))
        elif after.opcode not in _SAME_PLACES:
            break
        total = after
    return total, added


def _carries(fusion: Instruction, carried: Instruction, total: Instruction) -> bool:
    """Whether a fusion's parameter is what its loop carries, the total takes its place in the next
    iteration, and nothing else reads either.
    """
    number = carried.parameter_number
    inside, body = total.computation, fusion.computation
    if number is None:
        return False
    before = body[fusion.operands[number]]
    if before.opcode != "get-tuple-element" or body.users[before.name] != [fusion]:
        return False
    after = _element(body.root, before.element)
    if inside.users.get(total.name, [inside.root]) != [inside.root]:
        return False
    if body.users.get(after.name) != [body.root]:
        return False
    if inside.root is total:
        return after is fusion
    is_of_fusion = after.opcode == "get-tuple-element" and operand(after, 0) is fusion
    return is_of_fusion and _element(inside.root, after.element) is total


def _changes(fusion: Instruction, factor: Instruction) -> bool:
    """Whether a factor may be another in each iteration of the loop."""
    todo, seen = [factor], {factor.name}
    while todo:
        i = todo.pop()
        number = i.parameter_number
        if number is not None and not _is_kept(fusion.computation[fusion.operands[number]]):
            return True
        before = [operand(i, n) for n in range(len(i.operands))]
        todo += [one for one in before if one.name not in seen]
        seen |= {one.name for one in before}
    return False


def _is_kept(i: Instruction) -> bool:
    """Whether a loop's body passes on to the next iteration what it got."""
    if i.opcode == "constant":
        return True
    if i.opcode != "get-tuple-element":
        return False
    passed_on = _element(i.computation.root, i.element)
    return passed_on.opcode == i.opcode and (
        passed_on.element == i.element and passed_on.operands == i.operands
    )


def _element(made: Instruction, index: int) -> Instruction:
    """What a tuple has at an index; the instruction itself where it is no such tuple."""
    if made.opcode != "tuple" or index >= len(made.operands):
        return made
    return operand(made, index)


@remembered
def _loop_bodies(module: HloModule) -> frozenset[str]:
    loops = (i for i in module if i.opcode == "while")
    return frozenset(loop.callee("body") for loop in loops)


def _is_loop_body(computation: Computation) -> bool:
    return computation.name in _loop_bodies(computation.module)


def _is_product(i: Instruction) -> bool:
    return i.opcode == "multiply" and re.match(r"b?f\d", i.shape.dtype) is not None


def _is_of_dot(product: Instruction) -> bool:
    """Whether XLA has made a product of the program's dot."""
    return primitive(op_name(product)).endswith("dot_general")


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
    return (i, along) if along is not None and _is_product(i) else None


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
        while _size(old) != _size(new):
            rest, group = (given, old) if _size(old) < _size(new) else (made, new)
            if not rest:
                return None
            group.append(rest.pop(0))
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


def _largest(product: Instruction, summed: set[int], least_k: int = 2) -> SumOfProducts | None:
    """The matmul of two factors of a product, the largest; None where it is none of matrices."""
    varies = _varies(product.computation)
    factors = _factors(product)
    found = []
    for lhs, rhs in itertools.combinations(factors, 2):
        rows, columns = varies[lhs.name], varies[rhs.name]
        both = rows & columns
        parts = (rows - both - summed, columns - both - summed, both & summed, both - summed)
        m, n, k, batch = (math.prod(product.shape.dims[d] for d in part) for part in parts)
        others = [varies[i.name] for i in factors if i is not lhs and i is not rhs]
        is_matmul = not any(_mixes(other, *parts[:3]) for other in others)
        if is_matmul and min(m, n) > 1 and k >= least_k:
            found.append(SumOfProducts(product, lhs, rhs, (m, n, k, batch)))
    return max(found, key=lambda one: math.prod(one.sizes), default=None)


def _mixes(varies: set[int], rows: set[int], columns: set[int], summed: set[int]) -> bool:
    """Whether a further factor is another for each element of the product: it belongs to neither
    matrix, and not to the result. In a loop nothing tells whether it is another each time.
    """
    return (
        not varies.isdisjoint(rows)
        and not varies.isdisjoint(columns)
        and (not summed or not varies.isdisjoint(summed))
    )


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
            to = dimensions(i)
            before = varies[i.operands[0]]
            found &= {d for n, d in enumerate(to) if n in before}
        elif i.opcode == "copy" or i.opcode in ELEMENTWISE:
            found = set().union(*(varies[name] for name in i.operands))
        varies[i.name] = found
    return varies
