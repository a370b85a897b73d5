"""What a value is: what stands behind its moves and conversions, what it is broadcast of, who reduces it."""

import re
from collections.abc import Collection

from fp8lens.hlo.parse import Instruction

NAMES = ("bitcast", "reshape", "copy")


def operand(i: Instruction, index: int) -> Instruction:
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
    found, todo = {}, [i]
    while todo:
        i = look_through(todo.pop())
        if i.opcode not in ("multiply", "add", "subtract", "divide", "broadcast"):
            return None
        if i not in found:
            found[i] = operand(i, 0)
            todo += [operand(i, n) for n in (1, 0) if i.opcode != "broadcast"]
    return max(
        (part for i, part in found.items() if i.opcode == "broadcast"),
        key=lambda part: part.shape.size,
    )


def is_transpose(i: Instruction) -> bool:
    """Whether dimensions change their order, by a kernel or in name alone: what is laid out by
    columns, called rows.
    """
    before = i.computation[i.operands[0]].shape
    rows = [",".join(map(str, reversed(range(len(s.dims))))) for s in (before, i.shape)]
    return (
        i.opcode == "transpose"
        or i.opcode == "bitcast"
        and ((before.layout or rows[0]) != rows[0]) != ((i.shape.layout or rows[1]) != rows[1])
    )


def is_zero(i: Instruction | None) -> bool:
    return (
        i is not None
        and i.opcode == "constant"
        and bool(re.fullmatch(r"-?0(\.0*)?", i.literal or ""))
    )


def is_mask(i: Instruction, value: Instruction) -> bool:
    """Whether an instruction puts zeros in the place of some elements of a value."""
    others = [i.computation[name] for name in i.operands[1:] if name != value.name]
    return (
        i.opcode == "select" and len(others) == 1 and is_zero(broadcast_of(others[0]) or others[0])
    )


def since(start: Instruction, end: Instruction) -> set[Instruction]:
    """`end`, and what it is computed from, as far as that stands behind `start`."""
    found, todo = set(), [end]
    while todo:
        i = todo.pop()
        if i.index > start.index and i not in found:
            found.add(i)
            todo += [i.computation[name] for name in i.operands]
    return found


def depends(i: Instruction, on: Instruction) -> bool:
    """Whether a value is, or is computed from, another of its computation."""
    return i is on or any(on.name in j.operands for j in since(on, i))


def reducer(reduce: Instruction) -> str:
    """The opcode by which a reduction combines two elements; "" where the text has none."""
    by = reduce.computation.module.computations.get(reduce.callee("to_apply"))
    return by.root.opcode if by else ""
