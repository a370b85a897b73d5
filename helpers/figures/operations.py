"""A program's instructions as a reader of JAX would name them: one each, or those of one function
together, as clip or gelu.
"""

import collections
import re
from collections.abc import Iterable

import jax

from fp8lens.hlo.ops import DOTS, ELEMENTWISE, MOVES
from fp8lens.hlo.parse import Instruction
from fp8lens.matmul.attribution import VIEWS, Where, converts_scale, written_at

# What jax.nn.gelu is made of: other functions leave their name in each operation, gelu does not.
GELU = collections.Counter({"integer_pow": 2, "mul": 4, "add": 2, "tanh": 1})

Group = tuple[str, list[Instruction]]
"""Instructions that are drawn as one node, and its name."""


def is_passed(i: Instruction) -> bool:
    """Whether an instruction is not drawn: edges lead through it."""
    return i.opcode in VIEWS or converts_scale(i)


def sources(i: Instruction) -> list[Instruction]:
    """What an instruction reads, through those that are not drawn."""
    found = []
    for name in i.operands:
        read = i.computation[name]
        found += sources(read) if is_passed(read) else [read]
    return found


def grouped(shown: list[Instruction], where: Where) -> list[Group]:
    """Instructions in the program's order, each with a name: one each, or together those of one
    function that the same kernels do.
    """
    function = _functions(shown)
    found: list[Group] = []
    for some in _joined(shown, function, where):
        for name, part in _parts(some, function[some[0]]):
            if _can_be_one_node(part, shown):
                found.append((name, part))
            else:
                found += [(_operation(i), [i]) for i in part]
    return sorted(found, key=lambda group: group[1][0].index)


def _operation(i: Instruction) -> str:
    """What JAX calls an operation. One that XLA put there has the name of what it was put there
    for: then its opcode.
    """
    op_name = i.metadata.op_name if i.metadata else None
    name = (op_name or "").rpartition("/")[2]
    return name if name and i.opcode not in MOVES | {"convert"} else i.opcode


def _functions(shown: Iterable[Instruction]) -> dict[Instruction, str]:
    """For each instruction the function of jax.nn or jax.numpy that it is of; "" where there is
    none.
    """
    scopes: dict[Instruction, list[str]] = {}
    own = set()  # functions that hold a dot are drawn operation by operation
    for i in shown:
        op_name = i.metadata.op_name if i.metadata else None
        scopes[i] = re.findall(r"jit\(([^()]*)\)/", op_name or "")[1:]  # the first is the program
        if i.opcode in DOTS:
            own.update(scopes[i])

    def is_drawn_as_one(name: str) -> bool:
        return name not in own and (hasattr(jax.nn, name) or hasattr(jax.numpy, name))

    return {i: next(filter(is_drawn_as_one, names), "") for i, names in scopes.items()}


def _joined(
    shown: list[Instruction], function: dict[Instruction, str], where: Where
) -> list[list[Instruction]]:
    """Instructions, together where one reads the other and both are of one function, on one line,
    done by the same kernels.
    """

    def origin(i: Instruction) -> tuple:
        return written_at(i), function[i], where.get(i)

    group = {i: [i] for i in shown}
    for i in shown:
        for j in sources(i):
            if j not in group or group[j] is group[i]:
                continue
            if i.opcode in ELEMENTWISE and j.opcode in ELEMENTWISE and origin(i) == origin(j):
                joined = sorted(group[j] + group[i], key=lambda k: k.index)
                group |= dict.fromkeys(joined, joined)
    distinct = {id(some): some for some in group.values()}
    return list(distinct.values())


def _parts(some: list[Instruction], function: str) -> list[Group]:
    """Joined instructions by the functions that they are of."""
    if function:
        return [(function, some)]
    gelu = _find_gelu(some)
    parts = [("gelu", gelu)] if gelu else []
    for i in some:
        if i in gelu:
            continue
        # A function that XLA writes out, as erf, has one name and many opcodes.
        alike = [j for j in some if _operation(j) == _operation(i) and j not in gelu]
        is_written_out = len({j.opcode for j in alike}) > 1
        if not is_written_out:
            parts.append((_operation(i), [i]))
        elif alike[0] is i:
            parts.append((_operation(i), alike))
    return parts


def _find_gelu(some: list[Instruction]) -> list[Instruction]:
    """The first instructions that follow one another and make up a gelu; empty without one."""
    for start in range(len(some)):
        window = some[start : start + GELU.total()]
        if collections.Counter(map(_operation, window)) == GELU:
            return window
    return []


def _can_be_one_node(part: list[Instruction], shown: list[Instruction]) -> bool:
    """Whether nothing in a part is computed from the part by way of something outside: the graph
    would have a cycle.
    """
    beside: set[Instruction] = set()  # computed from the part, and not in it
    for i in shown:
        if i not in part and any(j in beside or j in part for j in sources(i)):
            beside.add(i)
    return not any(j in beside for i in part for j in sources(i))
