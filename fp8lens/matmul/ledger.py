"""Where a program's kernels and bytes go: each kernel in exactly one line, by what it does for the
matmuls.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8lens.formats import E8M0, is_narrow
from fp8lens.hlo.ops import COLLECTIVES, MOVES, SOURCES
from fp8lens.hlo.origin import is_backward, layer, op_name, source_line
from fp8lens.hlo.parse import HloModule, Instruction, visible
from fp8lens.hlo.program import executions, fused, results
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.text import Ink, Style, columns, counted, html_table, size, uncoloured, wrapped
from fp8lens.hlo.values import look_through, operand, reducer, returned
from fp8lens.hlo.walk import walk
from fp8lens.matmul.kernels import Kernel, is_opaque, kernel, launches, quantizes
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import (
    Makes,
    Neighborhood,
    UnfusedKernel,
    inside,
    is_plain,
    is_small,
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
    near: dict[Instruction, list[tuple[GemmRow, UnfusedKernel]]] = {}
    for row, outside in found:
        for kernel_near in outside:
            near.setdefault(kernel_near.instruction, []).append((row, kernel_near))
    counts = {
        i: count
        for name, count in executions(module).items()
        for i in module.computations[name]
        if launches(i)
    }
    # What a kernel does for FP8's sake, or for an FP8 matmul: the rest is not FP8's to explain.
    mine = {}
    for i in counts:
        mine[i] = [o for row, o in near.get(i, ()) if row.is_fp8 or "fp8" in o.work]
    rows = [row for row, _ in found]
    multiply = {row.instruction for row in rows if row.is_seen or row.is_fp8}
    classes = _classes(mine, multiply, _most_scales(rows), around)

    def line(i: Instruction) -> Line:
        serves = tuple(dict.fromkeys(row.name for row, _ in near.get(i, ())))
        work = dict.fromkeys(part for o in mine[i] for part in o.work)
        of_result = bool(mine[i]) and all(o.after for o in mine[i])
        return Line(
            kernel=kernel(i, counts[i]),
            what=classes[i],
            work=tuple(work),
            avoidable=any(o.avoidable for o in mine[i]),
            moves_result=of_result and [*work] == ["transpose"],
            serves=serves or _served(i, classes, around),
            layer=layer(op_name(i)),
            backward=is_backward(op_name(i)),
            source=source_line(i),
        )

    return Ledger(map(line, counts))


def _classes(
    near: Mapping[Instruction, Sequence[UnfusedKernel]],
    multiply: set[Instruction],
    most: int,
    around: Neighborhood,
) -> dict[Instruction, str]:
    """The class of each kernel, from what it does near the matmuls; `most`: as many elements may an
    array of scales or amaxes have.
    """
    classes = {i: "matmul" if i in multiply else _class(i, near[i]) for i in near}
    plain = [i for i in classes if is_plain(i)]
    magnitudes = {i for i in plain if _finds_magnitudes(i)}
    of_magnitudes = _made_of(magnitudes, plain, around)
    for i in reversed(plain):
        readers = around.readers(i)
        read_as = {classes.get(reader) for reader in readers}
        of_parts = i in magnitudes or i in of_magnitudes
        others = [reader for reader in readers if classes.get(reader) not in _READING_SCALES]
        if of_parts and not all(is_small(reader, 4 * most) for reader in others):
            # The maximum of a norm, x / max|x|: what is not FP8's scales a matrix by it.
            classes[i] = "rest" if classes[i] == "scale" else classes[i]
        elif classes[i] not in ("rest", "move"):
            continue
        elif i in of_magnitudes and _writes_scalars(i) and "maximum" in _reducers(i):
            classes[i] = "scale"  # an amax
        elif of_parts and read_as & _READING_SCALES and not others:
            classes[i] = "scale" if i in of_magnitudes or classes[i] == "rest" else "move"
        elif classes[i] == "rest" and _makes_a_number(i, read_as, around):
            classes[i] = "scale"
        elif read_as == {"dequantize"} and repeats(i):  # the scales of blocks, for each element
            classes[i] = "dequantize"
    _follow_scales(classes, plain, most, around)
    return classes


def _makes_a_number(i: Instruction, read_as: set[str | None], around: Neighborhood) -> bool:
    """Whether a kernel makes a scale, as of an amax's history; of a sum it is a norm's."""
    made_by = (i, *(producer for producer, _ in around.all_producers(i)))
    is_of_sum = any("add" in _reducers(j) for j in made_by)
    return (
        _writes_scalars(i) and bool(read_as) and read_as <= {"quantize", "scale"} and not is_of_sum
    )


def _follow_scales(
    classes: dict[Instruction, str], plain: Sequence[Instruction], most: int, around: Neighborhood
) -> None:
    """Also count as of scales what is done with scales and amaxes once they are found, and what is
    moved for that alone, as a history before an amax is put in.
    """
    for i in plain:
        if classes[i] in ("rest", "move") and _keeps_scales(i, classes, most, around):
            classes[i] = "scale"
    for i in reversed(plain):
        readers = {classes.get(reader) for reader in around.readers(i)}
        if classes[i] not in ("rest", "move") or readers != {"scale"} or not is_small(i, most):
            continue
        if classes[i] == "move" or _makes_a_number(i, {"scale"}, around):
            classes[i] = "scale"


def _most_scales(rows: Iterable[GemmRow]) -> int:
    """How many elements an array of scales or amaxes may have: far fewer than each matrix."""
    matrices = [size * row.k for row in rows for size in (row.m, row.n) if size > 1]
    return min(matrices, default=0) // 8


def _keeps_scales(
    i: Instruction, classes: Mapping[Instruction, str], most: int, around: Neighborhood
) -> bool:
    """Whether a kernel computes with a scale or an amax, also of a quantizer, and otherwise with
    few elements: stores it in a history, or makes the next step's scale of one.
    """
    if not is_small(i, most):
        return False
    for made_by, element in around.all_producers(i):
        is_amax = classes.get(made_by) == "quantize" and results(made_by)[element].size == 1
        if is_amax or classes.get(made_by) == "scale":
            return True
    return False


def _reducers(i: Instruction) -> set[str]:
    """The opcodes by which a kernel reduces."""
    return {reducer(j) for j in inside(i) if j.opcode == "reduce"}


def _made_of(
    magnitudes: set[Instruction], kernels: Iterable[Instruction], around: Neighborhood
) -> set[Instruction]:
    """The kernels that compute with the largest magnitudes of parts, and with nothing else that is
    larger than a number: as with those of blocks, to make scales. `kernels` in their order.
    """
    found: set[Instruction] = set()

    def is_of_them(made: tuple[Instruction, int]) -> bool:
        i, element = made
        shapes = results(i)
        is_array = element < len(shapes) and is_narrow(
            shapes[element].dtype
        )  # codes beside an amax
        return i in found or (i in magnitudes and not is_array) or _is_of_magnitudes(i, element)

    for i in kernels:
        if i in magnitudes:
            continue
        arrays = [n for n in range(len(i.operands)) if operand(i, n).shape.size > 1]
        made_of = [around.producers(i, n) for n in arrays]
        of_kernels = bool(made_of) and all(made_of)  # and of no argument
        if of_kernels and all(is_of_them(made) for makers in made_of for made in makers):
            found.add(i)
    return found


def _is_of_magnitudes(i: Instruction, element: int) -> bool:
    """Whether one of several results of a kernel is the largest magnitudes of parts, as beside the
    codes of what it quantizes.
    """
    computation = fused(i)
    made_of = returned(computation) if computation else []
    if element >= len(made_of):
        return False
    made = look_through(made_of[element])
    is_largest = made.opcode == "reduce" and reducer(made) == "maximum"
    return is_largest and look_through(operand(made, 0)).opcode == "abs"


@remembered
def _finds_magnitudes(i: Instruction) -> bool:
    """Whether a kernel reduces magnitudes to their largest, of parts of something."""
    parts = inside(i)
    maxima = any(j.opcode == "reduce" and reducer(j) in ("maximum", "minimum") for j in parts)
    read = sum(j.shape.size for j in parts if j.opcode == "parameter")
    written = sum(shape.size for shape in results(i))
    return maxima and any(j.opcode == "abs" for j in parts) and 2 * written <= read


def _writes_block_scales(i: Instruction) -> bool:
    """Whether a kernel writes nothing but E8M0, the scales of blocks."""
    shapes = results(i)
    return bool(shapes) and all(shape.dtype == E8M0.name for shape in shapes)


def _writes_scalars(i: Instruction) -> bool:
    return all(shape.size == 1 for shape in results(i))


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
        return [reader for reader in around.next.get(at, ()) if classes.get(reader) in onward]

    return tuple(at.name for at in walk([i], readers, _FAR) if classes.get(at) == "matmul")


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
        return "move" if opcode in _MOVES_ALONE else "quantize" if quantizes(i) else "rest"
    avoidable = [o for o in near if o.avoidable]
    if any("fp8" in o.work for o in avoidable):
        return "dequantize"
    after = {work for o in avoidable if o.after for work in o.work}
    if not after <= {"transpose", "pad", "amax"}:
        return "after"
    if {j.opcode for j in parts} <= MOVES | SOURCES:
        return "scale" if _writes_block_scales(i) else "move"
    if _quantizes(i):
        return "quantize"
    of_scales = (
        _writes_block_scales(i)
        or after == {"amax"}
        or _finds_amax(i)
        or any(o.makes is Makes.SCALE for o in near)
    )
    if of_scales:
        return "scale"
    return "move" if after or any("transpose" in o.work for o in avoidable) else "rest"


def _quantizes(i: Instruction) -> bool:
    """Whether a kernel converts an array to FP8, and writes it."""
    writes_fp8 = any(is_narrow(shape.dtype) and shape.size > 1 for shape in results(i))
    converts = any(j.opcode == "convert" and is_narrow(j.shape.dtype) for j in inside(i))
    return writes_fp8 and converts


def _finds_amax(i: Instruction) -> bool:
    """Whether a kernel writes nothing but the largest magnitude of something."""
    return _finds_magnitudes(i) and _writes_scalars(i)
