"""What stands around a matmul: the operations between an FP8 array and the dot, those behind the
dot and which of them are in the call, and the kernels beside it. A listing of facts, no judgment.
"""

import itertools
from collections.abc import Iterable

from fp8lens.hlo.ops import COLLECTIVES, CONTROL, DOTS, MOVES
from fp8lens.hlo.origin import source_line
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.text import counted, listed, size
from fp8lens.hlo.values import NAMES, broadcast_of, look_through
from fp8lens.matmul.kernels import moved
from fp8lens.matmul.operands import Operand
from fp8lens.matmul.roles import Role, Step, is_tanh_gelu, telling
from fp8lens.matmul.unfused import UnfusedKernel, operations
from fp8lens.rules.facts import Matmul

# Where a value comes from, for whoever reads a chain.
_ENDS = frozenset("parameter constant iota reduce custom-call fusion get-tuple-element".split())
_SILENT = frozenset((*NAMES, "broadcast", "tuple", "parameter", "constant", "get-tuple-element"))
_MOST = 3  # kernels in a short chain, and operations of one kernel
_FAR = 8  # operations in a short chain


def chain_of(m: Matmul, whole: bool = False) -> tuple[str, ...]:
    """The lines for one matmul. Short: of a wide one its operands, of an FP8 call what follows it,
    and the largest kernels; `whole`: all of it, and all kernels.
    """
    lines = []
    if whole or not m.row.is_fp8:
        lines += [f"{side.side}: {_operand(side, whole)}" for side in m.sides]
    if m.dot is not None and (whole or m.row.is_fp8) and (after := _after(m)):
        lines.append(f"after: {after}")
    near = [o for o in m.near if o.work or (whole and o.own)]
    near.sort(key=lambda o: -moved(o.instruction))
    shown = near if whole else near[:_MOST]
    lines += [_kernel(o, whole) for o in shown]
    if further := len(near) - len(shown):
        lines.append(f"and {counted(further, 'more kernel')}")
    return tuple(lines)


def _operand(side: Operand, whole: bool) -> str:
    """The way of an operand to the dot."""
    path = side.path or _way_back(side.operand)
    start = look_through(path[0], (*NAMES, "transpose"))
    name = start.metadata.op_name if start.opcode == "parameter" and start.metadata else ""
    first = f"{path[0].shape.brief} {name}".rstrip()
    if start.opcode not in ("parameter", "get-tuple-element"):
        first += f" of {_named(start.opcode, start)}"
    told = [(at, _told(at, before)) for before, at in itertools.pairwise(path)]
    told = [(at, text) for at, text in told if text and (whole or at.opcode not in _SILENT)]
    if not whole and len(told) > _FAR:
        told = told[-_FAR:]
        first += " -> ..."
    end = side.at or side.blocked
    parts = [first]
    for at, text in told:
        ended = "  <- XLA stops here" if at is end else ""
        parts.append(_named(text, at) + ended)
    return " -> ".join(parts)


def _way_back(i: Instruction) -> list[Instruction]:
    """From where a value comes from, through its largest operands, to it."""
    path = [i]
    stops = _ENDS | DOTS | CONTROL
    while path[0].operands and not path[0].opcode.startswith(COLLECTIVES):
        if path[0].opcode in stops or len(path) > 100:
            break
        read = [path[0].computation[name] for name in path[0].operands]
        path.insert(0, max(read, key=lambda j: j.shape.size))
    return path


def _step(step: Step) -> str:
    """What is done with a result, in words."""
    if step.kind is not Role.ACTIVATION:
        return _told(step.at, step.value)
    return "gelu" if is_tanh_gelu(step) else telling(step).opcode


def _told(at: Instruction, before: Instruction) -> str:
    """One operation in words: what it does to `before`, and with what."""
    if at.opcode == "convert":
        return f"convert to {at.shape.dtype}"
    if at.opcode in MOVES:
        return f"{at.opcode} to {at.shape.brief}"
    others = [at.computation[name] for name in at.operands if name != before.name]
    if len(others) != 1:
        return at.opcode
    other = look_through(broadcast_of(others[0]) or others[0])
    what = other.literal if other.opcode == "constant" and other.literal else other.shape.brief
    return f"{at.opcode} by {what}"


def _named(text: str, i: Instruction) -> str:
    line = source_line(i)
    return f"{text} ({line})" if line else text


def _after(m: Matmul) -> str:
    """What is done with the result, in the call or outside."""
    left = {step.at for step in m.left}
    told = [
        (_where(step, left), _named(_step(step), step.at))
        for step in m.steps
        if step.kind is not Role.MOVE or step.at.opcode not in NAMES
    ]
    groups = [
        ", ".join(text for _, text in group) + where
        for where, group in itertools.groupby(told, key=lambda pair: pair[0])
    ]
    if readers := [_named(i.opcode, i) for _, i in m.result.readers]:
        groups.append(f"also read by {_listed(readers)}")
    elif m.result.ends:
        groups.append(f"then {_listed(_named(i.opcode, i) for i in m.result.ends)}")
    return "; ".join(groups)


def _where(step: Step, left: set[Instruction]) -> str:
    """Who does a step; "" of a move, which either may do."""
    if step.kind is Role.MOVE:
        return ""
    return " (outside)" if step.at in left else " (in the call)"


def _kernel(o: UnfusedKernel, whole: bool) -> str:
    i = o.instruction
    parts = operations(i)
    opcodes = [j.opcode for j in parts if j.opcode not in _SILENT] or [parts[-1].opcode]
    lines = filter(None, map(source_line, parts))
    place = "after" if o.after else "before"
    where = _listed(lines, None if whole else 1)
    does = _listed(opcodes, None if whole else _MOST)
    at = f" ({where})" if where else ""
    return f"kernel {i.name} {place} it, {size(moved(i))}: {does}{at}"


def _listed(names: Iterable[str], most: int | None = _MOST) -> str:
    """Each name once, and no more than `most` of them."""
    each = list(dict.fromkeys(names))
    return listed(each, len(each) if most is None else most)
