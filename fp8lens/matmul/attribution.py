"""Which kernels do each instruction of the program that XLA's gemm rewriter was given.

Nothing is guessed. XLA keeps an instruction's name and metadata where it moves it into a kernel of
its own. What the rewriter took away around a dot belongs to that dot's call as far as the call's
configuration accounts for it, if the call then reads and writes what this part of the program reads
and writes. All else is attributed to no kernel.
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from fp8lens.formats import is_fp8
from fp8lens.hlo.dataflow import Flow
from fp8lens.hlo.ops import ELEMENTWISE, MOVES, padded
from fp8lens.hlo.parse import HloModule, Instruction, Shape
from fp8lens.hlo.program import results
from fp8lens.hlo.walk import walk
from fp8lens.matmul.kernels import launches
from fp8lens.matmul.match import match
from fp8lens.matmul.roles import Role, step_of
from fp8lens.matmul.rows import GemmRow, matmuls
from fp8lens.matmul.unfused import inside

# Opcodes that only give another name or shape to a value.
VIEWS = frozenset("broadcast reshape bitcast copy get-tuple-element".split())

# The passes of XLA's before which a program is as the rewriter is given it.
_REWRITERS = ("triton-gemm-rewriter", "cublas-gemm-rewriter")

Where = dict[Instruction, list[Instruction]]
"""For an instruction of the given program the kernels that do it, each once."""

# A kernel, or the number of one of the program's parameters.
_Source = Instruction | int


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call of the compiled program, and the dot of the given program that it was."""

    row: GemmRow
    instruction: Instruction
    dot: Instruction
    sources: set[_Source]  # what the call reads, through kernels that XLA added
    front: set[Instruction]  # what it does in front of its dot


def given_to_rewriter(stages: Sequence[Any]) -> Any:
    """Of a compile's stages the program that XLA's gemm rewriter was given; the first stage where
    it was given none.
    """
    return next((stage for stage in stages if stage.before in _REWRITERS), stages[0])


def attribute(
    given: HloModule, made: HloModule, module: HloModule, rows: Sequence[GemmRow]
) -> Where:
    """The kernels that do each instruction of the program that XLA's gemm rewriter was `given`.

    `made` is the same program after the last pass that is recorded: an instruction whose name is
    still there was not taken by the rewriter. `module` is the compiled program, and `rows` are its
    matmuls. Instructions that cannot be attributed for sure are not in the result.
    """
    call_rows = [row for row in rows if row.instruction.opcode == "custom-call"]
    call_instructions = {row.instruction for row in call_rows}
    others = (i for i in module.entry if launches(i) and i not in call_instructions)
    where = _in_kernels(given, others)
    known = call_instructions.union(*where.values())
    calls = _find_calls(given, module, call_rows, known)

    elsewhere = set(where)
    left = {i.name for i in made}
    gone = {i for i in given.entry if i not in where and i.name not in left}
    for call in calls:
        of_others: set[Instruction] = set()
        for other in calls:
            if other.dot is not call.dot:
                of_others |= other.front
        region = {call.dot}
        for some in (gone, gone | elsewhere):  # a call may do what another kernel does once more
            found = call.front | _behind(call.dot, call.row, some - of_others)
            if _reads_like(call, found, where, module) and _writes_like(call, found, elsewhere):
                region = found
                break
        for i in region:
            where.setdefault(i, []).append(call.instruction)
    return _with_what_is_between(given, where)


def converts_scale(i: Instruction) -> bool:
    """Whether an instruction only converts a scalar or a vector: scales, not data."""
    return i.opcode == "convert" and len(i.shape.dims) < 2


def written_at(i: Instruction) -> tuple[Hashable, ...]:
    """Where in the program an instruction was written: the innermost place that its metadata names,
    to the column.
    """
    module = i.computation.module
    frame: dict[str, int] = {}
    if i.stack_frame is not None:
        frame = module.stack_frames.get(i.stack_frame, {})
    location: dict[str, int] = {}
    if "file_location_id" in frame:
        location = module.file_locations.get(frame["file_location_id"], {})
    columns = (location.get(key) for key in ("column", "end_line", "end_column"))
    return i.frames[:1], *columns


# XLA's own kernels --------------------------------------------------------------------------------


def _likeness(i: Instruction) -> tuple[Hashable, ...]:
    """What XLA's copies of an instruction have in common with it."""
    return i.opcode, i.metadata and i.metadata.op_name, written_at(i)


def _in_kernels(given: HloModule, kernels: Iterable[Instruction]) -> Where:
    """What XLA's own kernels do.

    A copy of an instruction has the same metadata, and its name with one more number; if the name
    is another, there must be nothing else like it.
    """
    alike: dict[tuple, list[Instruction]] = collections.defaultdict(list)
    for i in given.entry:
        if i.opcode not in VIEWS | {"constant", "parameter"} and not converts_scale(i):
            alike[_likeness(i)].append(i)

    found: Where = collections.defaultdict(list)
    renamed: dict[tuple, list[Instruction]] = collections.defaultdict(list)
    for kernel in kernels:
        for part in inside(kernel):
            candidates = _same_size(part, alike.get(_likeness(part), ()))
            named = [i for i in candidates if f"{part.name}.".startswith(f"{i.name}.")]
            if named or len(candidates) == 1:
                original = max(named or candidates, key=lambda i: len(i.name))
                found[original].append(kernel)
            elif candidates:
                renamed[_likeness(part)].append(kernel)

    # One kernel has as many renamed parts as are left of their kind: then it does them all.
    for likeness, some in renamed.items():
        left = [i for i in alike[likeness] if i not in found]
        if len(left) == len(some) and len(set(some)) == 1:
            found |= {i: some for i in left}
    return {i: list(dict.fromkeys(some)) for i, some in found.items()}


def _same_size(part: Instruction, some: Iterable[Instruction]) -> list[Instruction]:
    """Those of some instructions that are as large as a part of a kernel. XLA reduces in two steps,
    so a reduction may have any size.
    """
    return [i for i in some if i.shape.size == part.shape.size or i.opcode == "reduce"]


# Calls --------------------------------------------------------------------------------------------


def _find_calls(
    given: HloModule, module: HloModule, rows: Sequence[GemmRow], known: set[Instruction]
) -> list[_Call]:
    """The calls whose dot is in the given program. `known` are the kernels that do something of
    that program.
    """
    dots = [row for i in given.entry for row in matmuls(i)]
    flow = Flow(module, launches)
    calls = []
    for row, dot in zip(rows, match(module, rows, given, dots, lambda row: ()), strict=True):
        if dot is None:
            continue
        sources, added = _sources(flow, row.instruction, known)
        moved = set()
        for kernel in added:
            moved |= {i.opcode for i in inside(kernel)}
        front = _in_front(dot.instruction, row, moved)
        calls.append(_Call(row, row.instruction, dot.instruction, sources, front))
    return calls


def _sources(
    flow: Flow, call: Instruction, known: set[Instruction]
) -> tuple[set[_Source], set[Instruction]]:
    """What a call reads through kernels that XLA added, and those kernels."""

    def made_of(source: _Source) -> Iterable[_Source]:
        if not isinstance(source, Instruction) or (source is not call and source in known):
            return ()
        producers = flow.of(frozenset().union(*flow.inputs[source]))
        return (p.element if p.instruction is None else p.instruction for p in producers)

    start: list[_Source] = [call]
    reached = walk(start, made_of).keys() - {call}
    sources = {s for s in reached if not isinstance(s, Instruction) or s in known}
    return sources, {s for s in reached - sources if isinstance(s, Instruction)}


def _in_front(dot: Instruction, row: GemmRow, moved: set[str]) -> set[Instruction]:
    """What of a program a call does in front of its dot.

    It widens and scales the FP8 arrays that it reads, and no more. `moved` are the opcodes of
    kernels that XLA added in front of it: from such a move on nothing is known, for XLA's kernel
    may have done it.
    """
    does = MOVES - moved | {"convert", "multiply", "divide"}

    def done(i: Instruction) -> list[Instruction]:
        operands = _operands(i)[:2] if i is dot else _operands(i)
        return [j for j in operands if j.opcode in does and not read(j)]

    def read(i: Instruction) -> bool:
        return len(i.shape.dims) < 2 or i.shape.dtype in (row.lhs_dtype, row.rhs_dtype)

    return walk([dot], done).keys() - {dot}


def _behind(dot: Instruction, row: GemmRow, some: set[Instruction]) -> set[Instruction]:
    """The dot, and those of some instructions behind it that the call's configuration accounts
    for.
    """
    found = {dot}
    for i in dot.computation.instructions[dot.index + 1 :]:
        read = [j for j in _operands(i) if j in found]
        if i in some and read and accounts_for(row, i, read[0]):
            found.add(i)
    return found


def accounts_for(row: GemmRow, i: Instruction, value: Instruction) -> bool:
    """Whether a call's configuration accounts for what an instruction does to a `value` that is
    made of its dot's result.
    """
    if i.opcode in MOVES | {"convert"}:
        return i.opcode != "tuple"
    if "GELU" in row.epilogue and i.opcode in ELEMENTWISE:
        return True
    if i.opcode in ("abs", "reduce"):
        return row.amax
    role = step_of(i, value).kind
    if role in (Role.BIAS, Role.MATRIX_BIAS):
        return "BIAS" in row.epilogue or row.beta != 0
    if role in (Role.SCALE, Role.ALPHA):
        return bool(row.scales) or row.alpha != 1
    if role is Role.RELU:
        return "RELU" in row.epilogue
    return role is Role.CLAMP and is_fp8(row.out_dtype)


def _reads_like(call: _Call, region: set[Instruction], where: Where, module: HloModule) -> bool:
    """Whether a part of the program reads what a call reads. The call may also be given scales that
    it has no use for.
    """

    def is_read(i: Instruction) -> bool:
        return i.parameter_number is not None or (i in where and i.opcode not in VIEWS)

    # Through views, and conversions of scales, that nobody does any more.
    given = walk(region, lambda i: () if is_read(i) and i not in region else _operands(i))
    found: set[_Source] = set()
    for i in filter(is_read, given.keys() - region):
        found |= {i.parameter_number} if i.parameter_number is not None else {*where[i]}
    scalars = {n for n, p in enumerate(module.entry.parameters) if p.shape.size == 1}
    return found <= call.sources <= found | scalars


def _writes_like(call: _Call, region: set[Instruction], elsewhere: set[Instruction]) -> bool:
    """Whether what others read of a part of the program is what a call writes, in type and size."""
    users = call.dot.computation.users
    read = []
    for i in region - elsewhere:
        has_reader = any(user not in region for user in users.get(i.name, ()))
        if i.opcode != "broadcast" and (i.is_root or has_reader):
            read.append(i.shape)
    return _types_and_sizes(read) == _types_and_sizes(results(call.instruction))


def _types_and_sizes(shapes: Iterable[Shape]) -> list[tuple[str, int]]:
    """What of some arrays stays the same where XLA pads them. Scalars do not count."""
    return sorted(
        (shape.dtype, math.prod(map(padded, shape.dims))) for shape in shapes if shape.size > 1
    )


def _operands(i: Instruction) -> list[Instruction]:
    return [i.computation[name] for name in i.operands]


# Between ------------------------------------------------------------------------------------------


def _with_what_is_between(given: HloModule, where: Where) -> Where:
    """Adds what is computed from a kernel's work, and what this kernel's work is computed from: it
    is in the kernel.
    """
    after: dict[Instruction, set[Instruction]] = {}  # kernels that an instruction is computed from
    before: dict[Instruction, set[Instruction]] = {}  # kernels that are computed from it

    def kernels_of(
        some: Iterable[Instruction], reached: dict[Instruction, set[Instruction]]
    ) -> set[Instruction]:
        return set().union(*(where[i] if i in where else reached[i] for i in some))

    unknown = [i for i in given.entry if i not in where]
    for i in unknown:
        after[i] = kernels_of(_operands(i), after)
    for i in reversed(unknown):
        before[i] = kernels_of(given.entry.users.get(i.name, ()), before)

    between: Where = {}
    for i in unknown:
        both = after[i] & before[i]
        if both and i.opcode not in VIEWS:
            between[i] = sorted(both, key=lambda kernel: kernel.index)
    return where | between
