"""What a value is: what stands behind its moves and conversions, what it is broadcast of, who
reduces it.
"""

import re
from collections.abc import Collection

from fp8lens.hlo.ops import ELEMENTWISE
from fp8lens.hlo.parse import Computation, Instruction, Shape
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.walk import walk

NAMES = ("bitcast", "reshape", "copy")


def operand(i: Instruction, index: int) -> Instruction:
    """An instruction's operand by its index. HloParseError where it has fewer."""
    if index >= len(i.operands):
        raise i.error("this has fewer operands than its opcode takes")
    return i.computation[i.operands[index]]


def look_through(i: Instruction, skip: Collection[str] = (*NAMES, "convert")) -> Instruction:
    """What an instruction names, moves or converts."""
    while i.opcode in skip and i.operands:
        i = operand(i, 0)
    return i


def broadcast_of(i: Instruction) -> Instruction | None:
    """What is broadcast, behind moves and conversions; of several, combined elementwise, the
    largest; None where something is not.
    """
    found: dict[Instruction, Instruction] = {}
    todo = [i]
    while todo:
        i = look_through(todo.pop())
        if i.opcode not in ("multiply", "add", "subtract", "divide", "broadcast"):
            return None
        if i not in found:
            found[i] = operand(i, 0)
            if i.opcode != "broadcast":
                todo += [operand(i, 1), operand(i, 0)]
    parts = [part for i, part in found.items() if i.opcode == "broadcast"]
    return max(parts, key=lambda part: part.shape.size)


def returned(computation: Computation) -> list[Instruction]:
    """What a computation returns, behind other names: the elements of its tuple, or its root."""
    root = computation.root
    made = map(computation.__getitem__, root.operands) if root.opcode == "tuple" else [root]
    return [look_through(i, ("bitcast", "reshape")) for i in made]


def minor_to_major(shape: Shape) -> list[int]:
    """An array's dimensions as they lie in memory, the one whose elements are neighbours first."""
    if shape.layout is None:
        return [*reversed(range(len(shape.dims)))]
    return [int(d[:18]) for d in re.findall(r"\d+", shape.layout.partition(":")[0])]


def dimensions(i: Instruction, attribute: str = "dimensions") -> list[int]:
    """The dimensions that an attribute lists, such as those that a reduce adds up; [] where the
    instruction has no such attribute. Raises ValueError where it lists something else.
    """
    listed = i.attributes.get(attribute, "{}").strip("{}").split(",")
    return [int(d.strip()[:18]) for d in listed if d.strip()]


def changes_layout(i: Instruction) -> bool:
    """Whether a transpose or copy writes its elements to memory in another order than it read them.

    What counts is the order in memory alone: a transpose whose result is laid out so that nothing
    moves changes none, and neither does a copy to another memory, or the place of a dimension of
    length 1. False for every other opcode. Raises HloParseError where the text does not list each
    dimension once.
    """
    if i.opcode not in ("transpose", "copy") or i.shape.is_tuple:
        return False
    before = operand(i, 0).shape
    all_of_them = [*range(len(before.dims))]
    # The dimension of the operand that each dimension of the result was.
    was = all_of_them
    if i.opcode == "transpose":
        was = [int(d[:18]) for d in re.findall(r"\d+", i.attributes.get("dimensions", ""))]
    read, written = minor_to_major(before), minor_to_major(i.shape)
    if any(sorted(listed) != all_of_them for listed in (was, read, written)):
        raise i.error("its dimensions, or the order of its layout, are not those of its operand")
    read = [d for d in read if before.dims[d] > 1]
    written = [was[d] for d in written if i.shape.dims[d] > 1]
    return written != read


def is_transpose(i: Instruction) -> bool:
    """Whether dimensions change their order, by a kernel or in name alone.

    In name alone: a bitcast that calls rows what was laid out by columns, or the reverse. Unlike
    `changes_layout`, this asks what the program says, whatever moves in memory.
    """
    if i.opcode != "bitcast":
        return i.opcode == "transpose"
    return _is_row_major(operand(i, 0).shape) != _is_row_major(i.shape)


def _is_row_major(shape: Shape) -> bool:
    return minor_to_major(shape) == [*reversed(range(len(shape.dims)))]


def is_zero(i: Instruction | None) -> bool:
    """Whether a value is the constant 0."""
    if i is None or i.opcode != "constant":
        return False
    return bool(re.fullmatch(r"-?0(\.0*)?", i.literal or ""))


def is_mask(i: Instruction, value: Instruction) -> bool:
    """Whether an instruction puts zeros in the place of some elements of a value."""
    others = [name for name in i.operands[1:] if name != value.name]
    if i.opcode != "select" or len(others) != 1:
        return False
    other = i.computation[others[0]]
    return is_zero(broadcast_of(other) or other)


def is_one_number(i: Instruction) -> bool:
    """Whether all elements of a value are alike: it is computed elementwise from single numbers."""
    return i.shape.size == 1 or i.name in _alike(i.computation)


@remembered
def _alike(computation: Computation) -> set[str]:
    """The names of the values that are one number, at one place or at many."""
    found: set[str] = set()
    for i in computation:
        keeps = i.opcode in _KEEP_ALIKE and found.issuperset(i.operands)
        if keeps or i.shape.size == 1:
            found.add(i.name)
    return found


_KEEP_ALIKE = ELEMENTWISE | {"broadcast", *NAMES}


def is_square(i: Instruction) -> bool:
    """Whether a value is multiplied by itself."""
    return i.opcode == "multiply" and i.operands[0] == i.operands[1]


def since(start: Instruction, end: Instruction) -> set[Instruction]:
    """`end`, and what it is computed from, as far as that stands behind `start`."""

    def behind(i: Instruction) -> list[Instruction]:
        made_of = map(i.computation.__getitem__, i.operands)
        return [j for j in made_of if j.index > start.index]

    return {*walk([end] if end.index > start.index else [], behind)}


def depends(i: Instruction, on: Instruction) -> bool:
    """Whether a value is, or is computed from, another of its computation."""
    return i is on or any(on.name in j.operands for j in since(on, i))


def reducer(reduce: Instruction) -> str:
    """The opcode by which a reduction combines two elements; "" where the text has none."""
    by = reduce.computation.module.computations.get(reduce.callee("to_apply"))
    return by.root.opcode if by else ""
