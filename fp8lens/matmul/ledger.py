"""Where a program's kernels and bytes go: each kernel in exactly one line, by what it does for the
matmuls.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from fp8lens.formats import E8M0, is_narrow
from fp8lens.hlo.ops import COLLECTIVES, MOVES, SOURCES
from fp8lens.hlo.origin import is_backward, layer, op_name, source_line
from fp8lens.hlo.parse import HloModule, Instruction, visible
from fp8lens.hlo.program import executions, results
from fp8lens.hlo.text import Ink, Style, columns, counted, html_table, size, uncoloured, wrapped
from fp8lens.hlo.values import operand, reducer
from fp8lens.hlo.walk import walk
from fp8lens.matmul.kernels import Kernel, is_opaque, kernel, launches, quantizes
from fp8lens.matmul.rows import ENGINE, GemmRow
from fp8lens.matmul.unfused import (
    Makes,
    Neighborhood,
    UnfusedKernel,
    inside,
    is_plain,
    is_small,
    part_for,
    repeats,
)

# What a kernel does, in the order in which a ledger shows it.
CLASSES = {
    "matmul": "a matrix multiplication, with all that is fused into it",
    "quantize": "makes FP8",
    "scale": "amax and scales",
    "dequantize": "widens FP8 before a matmul",
    "move": "transposes, pads or copies",
    "after": "works on a matmul's result: scale, bias, activation, conversion",
    "collective": "between devices",
    "opaque": "not looked into: a library's or somebody's own kernel",
    "rest": "everything else",
}
_ON_THE_WAY = frozenset(("quantize", "scale", "dequantize", "move", "after"))
_FOR_FP8 = frozenset(("quantize", "scale", "dequantize"))
_READING_SCALES = _FOR_FP8 | {"move", "matmul", "after"}
# Work around a matmul that FP8 alone asks for.
_UNDOES = frozenset(("transpose", "pad", "scale", "fp8"))

HEADER = ("", "runs", "bytes", "kernel", "work", "for", "source")
_FAR = 300  # kernels: whoever is further away is not served
_MOVES_ALONE = frozenset("copy slice dynamic-slice dynamic-update-slice".split())


@dataclasses.dataclass(frozen=True)
class Line:
    """One kernel. `what` is one of CLASSES; `work` what of it a matmul's call could have done
    ("bias", "transpose", ...; see GemmRow.outside); `avoidable` whether the kernel would then not
    run. `moves_result`: it only transposes a matmul's result, for whoever reads it. `serves` names
    the matmuls whose operand it makes, for whom it does it, or whose result it works on. `layer` is
    as GemmRow.path has it.
    """

    kernel: Kernel
    what: str
    work: tuple[str, ...] = ()
    avoidable: bool = False
    moves_result: bool = False
    serves: tuple[str, ...] = ()
    layer: str = ""
    backward: bool = False
    source: str = ""

    @property
    def name(self) -> str:
        """The kernel's instruction."""
        return self.kernel.name

    @property
    def runs(self) -> int:
        """How often the kernel runs; 1 where that is not known."""
        return self.kernel.runs

    @property
    def nbytes(self) -> int:
        """Bytes read and written in all runs."""
        return self.kernel.bytes_moved * self.runs


class Ledger(tuple[Line, ...]):
    """Every kernel of a program, in the order of the program. Prints a line for each, the largest
    first.
    """

    @property
    def kernels(self) -> int:
        """Launches, loops as often as they run."""
        return sum(line.runs for line in self)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all kernels read and write, loops as often as they run."""
        return sum(line.nbytes for line in self)

    def of(self, *what: str) -> "Ledger":
        """The lines of these classes. ValueError for a name that is none of CLASSES."""
        if unknown := [name for name in what if name not in CLASSES]:
            raise ValueError(f"no class {unknown[0]!r}: one of {', '.join(CLASSES)}.")
        return Ledger(line for line in self if line.what in what)

    @property
    def for_fp8(self) -> "Ledger":
        """What it costs to make FP8 and undo it, around the matmuls."""
        return Ledger(filter(_is_for_fp8, self))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        order = list(CLASSES)
        for line in sorted(self, key=lambda line: (order.index(line.what), -line.nbytes)):
            yield cells(line)

    def totals(self) -> list[str]:
        """A sentence for each class."""
        return [f"{what}: {_kernels(part)}" for what in CLASSES if (part := self.of(what))]

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, each line in this style."""
        rows = [*self._rows()]
        always = (HEADER.index("bytes"), HEADER.index("kernel"), 0)
        shown = []
        for c in range(len(HEADER)):
            says_something = any(row[c] not in ("", "1") for row in rows)
            if c in always or says_something:
                shown.append(c)
        # From the last column on, each goes to a line of its own while a line is too wide.
        may_go = range(len(HEADER) - 1, HEADER.index("kernel"), -1)
        lines, below = columns([HEADER, *rows], shown, (1, 2), may_go)
        text = [style(lines[0], Ink.HEADING)]
        for line, row in zip(lines[1:], rows, strict=True):
            more = [_labelled(c, row[c]) for c in below if row[c]]
            text += [style(part, None) for part in (line, *wrapped(" ".join(more), 6, 6))]
        return "\n".join([*text, style(f"{_kernels(self)} in all", None)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = html_table(HEADER, ((row, "", ()) for row in self._rows()))
        return f"{table}<p>{_kernels(self)} in all</p>"


def cells(line: Line) -> tuple[str, ...]:
    """What a table shows of a kernel, as HEADER names it."""
    work = serves = ""
    if line.what != "matmul":
        work, serves = ", ".join(line.work), ", ".join(line.serves[:2])
        if len(line.serves) > 2:
            serves += f" and {len(line.serves) - 2} more"
    return (
        line.what,
        "?" if line.kernel.count is None else str(line.runs),
        size(line.nbytes),
        line.name,
        work,
        serves,
        visible(line.source),
    )


def _is_for_fp8(line: Line) -> bool:
    """Whether a kernel makes FP8, or undoes it, around the matmuls. A result that is transposed for
    its reader, and an operand that is repeated, joined or chosen, are so in any type.
    """
    if line.what in _FOR_FP8:
        return True
    if not line.avoidable or line.moves_result:
        return False
    undoes = "epilogue" not in line.work and not _UNDOES.isdisjoint(line.work)
    return undoes or "f8e" in line.kernel.result


def _labelled(column: int, cell: str) -> str:
    """A cell on a line of its own."""
    name = HEADER[column]
    return f"at {cell}" if name == "source" else f"{name} {cell}"


def _kernels(lines: Sequence[Line]) -> str:
    """How many launches, and how many bytes."""
    count = counted(sum(line.runs for line in lines), "kernel")
    return f"{count}, {size(sum(line.nbytes for line in lines))}"


def make_ledger(
    module: HloModule,
    found: Sequence[tuple[GemmRow, Sequence[UnfusedKernel]]],
    around: Neighborhood,
) -> Ledger:
    """The ledger of a module, from its rows, each with the kernels around it."""
    near: dict[Instruction, list[tuple[GemmRow, UnfusedKernel]]] = defaultdict(list)
    for row, outside in found:
        for kernel_near in outside:
            near[kernel_near.instruction].append((row, kernel_near))
    counts = {
        i: count
        for name, count in executions(module).items()
        for i in module.computations[name]
        if launches(i)
    }
    # What a kernel does for FP8's sake, or for an FP8 matmul: the rest is not FP8's to explain.
    mine = {}
    for i in counts:
        mine[i] = [o for row, o in near[i] if row.is_fp8 or "fp8" in o.work]
    classes = _Classes([row for row, _ in found], mine, around).found

    multiplied = {row.name: row.math_dtype for row, _ in found}

    def line(i: Instruction) -> Line:
        launched = kernel(i, counts[i])
        if launched.math_dtype == "unknown":  # by HLO; its instructions may tell
            launched = dataclasses.replace(launched, math_dtype=multiplied.get(i.name, "unknown"))
        serves = tuple(dict.fromkeys(row.name for row, _ in near[i]))
        work = tuple(dict.fromkeys(part for o in mine[i] for part in o.work))
        return Line(
            kernel=launched,
            what=classes[i],
            work=work,
            avoidable=any(o.avoidable for o in mine[i]),
            moves_result=work == ("transpose",) and all(o.after for o in mine[i]),
            serves=serves or _served(i, classes, around),
            layer=layer(op_name(i)),
            backward=is_backward(op_name(i)),
            source=source_line(i),
        )

    return Ledger(map(line, counts))


def _served(
    i: Instruction, classes: dict[Instruction, str], around: Neighborhood
) -> tuple[str, ...]:
    """The matmuls that a kernel makes something for, through others that make FP8 and scales."""
    if classes[i] not in _ON_THE_WAY:
        return (i.name,) if classes[i] == "matmul" else ()

    def readers(at: Instruction) -> list[Instruction]:
        if classes.get(at) == "matmul":
            return []
        onward = _ON_THE_WAY | {"matmul"}
        return [reader for reader in around.readers(at) if classes.get(reader) in onward]

    return tuple(at.name for at in walk([i], readers, _FAR) if classes.get(at) == "matmul")


class _Classes:
    """The class of each kernel, `found`, from what it does `near` the matmuls. First each kernel by
    itself; then what amaxes and scales are by who reads them, and what is done with them.
    """

    def __init__(
        self,
        rows: Sequence[GemmRow],
        near: Mapping[Instruction, Sequence[UnfusedKernel]],
        around: Neighborhood,
    ):
        self._around = around
        # As many elements an array of scales or amaxes may have: far fewer than each matrix.
        matrices = [size * row.k for row in rows for size in (row.m, row.n) if size > 1]
        self._most = min(matrices, default=0) // 8
        multiply = {row.instruction for row in rows if row.is_told or row.is_fp8}
        self.found = {i: "matmul" if i in multiply else _class(i, near[i]) for i in near}
        plain = [i for i in self.found if is_plain(i)]
        self._maxima: set[tuple[Instruction, int]] = set()
        for i in plain:
            self._find_maxima(i)
        for i in reversed(plain):
            self._by_readers(i)
        for i in plain:
            if self.found[i] in ("rest", "move") and self._keeps_scales(i):
                self.found[i] = "scale"
        for i in reversed(plain):
            # What is moved for scales alone, as a history before an amax is put in.
            if self._read_as(i) == {"scale"} and is_small(i, self._most):
                if self.found[i] == "move" or self._makes_a_number(i):
                    self.found[i] = "scale"

    def _find_maxima(self, i: Instruction) -> None:
        """Add those results of a kernel that are the largest magnitudes of parts of something, or
        computed from nothing else that is larger than a number, as scales are.
        """
        sizes = [operand(i, n).shape.size for n in range(len(i.operands))]
        makers = [self._around.producers(i, n) for n, size in enumerate(sizes) if size > 1]
        is_of_them = bool(makers) and all(makers) and self._maxima.issuperset(chain(*makers))
        for n, shape in enumerate(results(i)):
            of_parts = 2 * shape.size <= max(sizes, default=0)
            if is_of_them or (of_parts and _finds_magnitudes(i, n)):
                self._maxima.add((i, n))

    def _by_readers(self, i: Instruction) -> None:
        """Say what a kernel is by who reads it."""
        found, read_as = self.found, self._read_as(i)
        if found[i] not in ("rest", "move", "scale"):
            return
        others = [r for r in self._around.readers(i) if found.get(r) not in _READING_SCALES]
        if all((i, n) in self._maxima for n in range(len(results(i)))):
            if not all(is_small(reader, 4 * self._most) for reader in others):
                # The maximum of a norm, x / max|x|: what is not FP8's scales a matrix by it.
                found[i] = "rest" if found[i] == "scale" else found[i]
            elif (read_as and not others) or _is_an_amax(i):
                found[i] = "scale"
        elif found[i] == "rest" and self._makes_a_number(i):
            found[i] = "scale"
        elif read_as == {"dequantize"} and repeats(i):  # the scales of blocks, for each element
            found[i] = "dequantize"

    def _read_as(self, i: Instruction) -> set[str | None]:
        """The classes of who reads a kernel's results."""
        return {self.found.get(reader) for reader in self._around.readers(i)}

    def _makes_a_number(self, i: Instruction) -> bool:
        """Whether a kernel makes a scale, as of an amax's history; of a sum it is a norm's."""
        read_as = self._read_as(i)
        made_by = (i, *(producer for producer, _ in self._around.all_producers(i)))
        is_read = bool(read_as) and read_as <= {"quantize", "scale"}
        is_scalar = all(shape.size == 1 for shape in results(i))
        return is_read and is_scalar and not any("add" in _reducers(j) for j in made_by)

    def _keeps_scales(self, i: Instruction) -> bool:
        """Whether a kernel computes with a scale or an amax, also of a quantizer, and otherwise
        with few elements: stores it in a history, or makes the next step's scale of one.
        """
        if not is_small(i, self._most):
            return False
        for made_by, element in self._around.all_producers(i):
            is_amax = self.found.get(made_by) == "quantize" and results(made_by)[element].size == 1
            if is_amax or self.found.get(made_by) == "scale":
                return True
        return False


def _class(i: Instruction, near: Sequence[UnfusedKernel]) -> str:
    """The class of a kernel that is no matmul, from what it does near the matmuls."""
    opcode = i.opcode.removesuffix("-start")
    if opcode.startswith(COLLECTIVES):
        return "collective"
    parts = inside(i)
    # A fusion may hold a library's kernel, with the slices that it reads.
    if any(map(is_opaque, parts)):
        return "opaque"
    if not is_plain(i):
        return _class_of_call(i, opcode)
    avoidable = [o for o in near if o.avoidable]
    if any("fp8" in o.work for o in avoidable):
        return "dequantize"
    after = {work for o in avoidable if o.after for work in o.work}
    if not after <= {"transpose", "pad", "amax"}:
        return "after"
    written = results(i)
    makes_scales = all(shape.dtype == E8M0.name for shape in written)
    if {j.opcode for j in parts} <= MOVES | SOURCES:
        return "scale" if makes_scales else "move"
    converts = any(j.opcode == "convert" and is_narrow(j.shape.dtype) for j in parts)
    if converts and any(is_narrow(shape.dtype) and shape.size > 1 for shape in written):
        return "quantize"
    is_amax = _is_an_amax(i) and any(j.opcode == "abs" for j in parts)
    makes_scales |= is_amax or after == {"amax"} or any(o.makes is Makes.SCALE for o in near)
    if makes_scales:
        return "scale"
    return "move" if any("transpose" in o.work for o in avoidable) else "rest"


def _class_of_call(i: Instruction, opcode: str) -> str:
    """The class of a kernel of one instruction, or of a library's call that multiplies nothing."""
    if opcode in _MOVES_ALONE:
        return "move"
    if quantizes(i):
        return "quantize"
    numbers = all(shape.size == 1 for shape in results(i))
    is_engines_amax = (i.custom_call_target or "").startswith(ENGINE) and numbers
    return "scale" if is_engines_amax else "rest"


def _is_an_amax(i: Instruction) -> bool:
    """Whether a kernel writes nothing but numbers, and finds a maximum."""
    return all(shape.size == 1 for shape in results(i)) and "maximum" in _reducers(i)


def _reducers(i: Instruction) -> set[str]:
    """The opcodes by which a kernel reduces."""
    return {reducer(j) for j in inside(i) if j.opcode == "reduce"}


def _finds_magnitudes(i: Instruction, element: int) -> bool:
    """Whether one of a kernel's results is computed from the largest magnitudes of something."""
    part = part_for(i, element)
    maxima = any(j.opcode == "reduce" and reducer(j) in ("maximum", "minimum") for j in part)
    return maxima and any(j.opcode == "abs" for j in part)
