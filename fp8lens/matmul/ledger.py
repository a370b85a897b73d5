"""Where a program's kernels and bytes go: each kernel in exactly one line, by what it does for the
matmuls.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from fp8lens.hlo.ops import COLLECTIVES, MOVES, SOURCES
from fp8lens.hlo.origin import is_backward, layer, op_name, source_line
from fp8lens.hlo.parse import HloModule, Instruction, visible
from fp8lens.hlo.program import executions, results
from fp8lens.hlo.text import columns, html_table, size, wrapped
from fp8lens.hlo.values import reducer
from fp8lens.matmul.kernels import Kernel, kernel, launches
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import Neighborhood, UnfusedKernel, inside, is_plain

# What a kernel does, in the order in which a ledger shows it.
CLASSES = {
    "matmul": "a matrix multiplication, with all that is fused into it",
    "quantize": "makes FP8",
    "scale": "amax and scales",
    "dequantize": "widens FP8 in front of a matmul",
    "move": "transposes, pads or copies",
    "after": "works on a matmul's result: scale, bias, activation, conversion",
    "collective": "between devices",
    "opaque": "not looked into: a library's or somebody's own kernel",
    "rest": "everything else",
}
_ON_THE_WAY = frozenset(("quantize", "scale", "dequantize", "move", "after"))
_UNDOES = frozenset(
    ("transpose", "pad", "scale", "fp8")
)  # work around a matmul that FP8 alone asks for

_HEADER = ("", "runs", "bytes", "kernel", "work", "for", "source")
_OPAQUE = frozenset("custom-call convolution fft cholesky triangular-solve scan".split())
_FAR = 300  # kernels: whoever is further away is not served
_MOVES_ALONE = frozenset("copy slice dynamic-slice dynamic-update-slice".split())


@dataclasses.dataclass(frozen=True)
class Line:
    """One kernel. `what` is one of CLASSES; `work` what of it a matmul's call could have done
    ("bias", "transpose", ...; see GemmRow.outside); `avoidable` whether the kernel would then not
    run. `serves` names the matmuls whose operand it makes, for whom it does it, or whose result it
    works on. `layer` is as GemmRow.path has it.
    """

    kernel: Kernel
    what: str
    work: tuple[str, ...] = ()
    avoidable: bool = False
    serves: tuple[str, ...] = ()
    layer: str = ""
    backward: bool = False
    source: str = ""

    @property
    def name(self) -> str:
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
        return sum(line.nbytes for line in self)

    def of(self, *what: str) -> "Ledger":
        """The lines of these classes. ValueError for a name that is none of CLASSES."""
        if unknown := [name for name in what if name not in CLASSES]:
            raise ValueError(f"no class {unknown[0]!r}: one of {', '.join(CLASSES)}.")
        return Ledger(line for line in self if line.what in what)

    @property
    def for_fp8(self) -> "Ledger":
        """What it costs to make FP8 and undo it, around the matmuls."""
        return Ledger(
            line
            for line in self
            if line.what in ("quantize", "scale", "dequantize")
            or line.avoidable
            and (
                "f8e" in line.kernel.result
                or "epilogue" not in line.work
                and not _UNDOES.isdisjoint(line.work)
            )
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        order = list(CLASSES)
        for line in sorted(self, key=lambda line: (order.index(line.what), -line.nbytes)):
            serves = ", ".join(line.serves[:2]) + f" and {len(line.serves) - 2} more" * (
                len(line.serves) > 2
            )
            yield (
                line.what,
                "?" if line.kernel.count is None else str(line.runs),
                size(line.nbytes),
                line.name,
                *((", ".join(line.work), serves) if line.what != "matmul" else ("", "")),
                visible(line.source),
            )

    def totals(self) -> list[str]:
        """A sentence for each class."""
        return [f"{what}: {_kernels(part)}" for what in CLASSES if (part := self.of(what))]

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        shown = [
            c
            for c in range(len(_HEADER))
            if any(row[c] not in ("", "1") for row in rows[1:]) or c in (0, 2, 3)
        ]
        lines, below = columns(rows, shown, (1, 2), range(len(_HEADER) - 1, 3, -1))
        text = lines[:1]
        for line, row in zip(lines[1:], rows[1:]):
            more = (
                f"at {row[c]}" if _HEADER[c] == "source" else f"{_HEADER[c]} {row[c]}"
                for c in below
                if row[c]
            )
            text += [line, *wrapped(" ".join(more), 6, 6)]
        return "\n".join([*text, f"{_kernels(self)} in all"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return (
            html_table(_HEADER, ((row, "", ()) for row in self._rows()))
            + f"<p>{_kernels(self)} in all</p>"
        )


def _kernels(lines: Sequence[Line]) -> str:
    count = sum(line.runs for line in lines)
    return f"{count} kernel{'s' * (count != 1)}, {size(sum(line.nbytes for line in lines))}"


def make_ledger(
    module: HloModule,
    found: Sequence[tuple[GemmRow, Sequence[UnfusedKernel]]],
    around: Neighborhood,
) -> Ledger:
    """The ledger of a module, from its rows, each with the kernels around it."""
    near: dict[Instruction, list[tuple[GemmRow, UnfusedKernel]]] = {}
    for row, outside in found:
        for o in outside:
            near.setdefault(o.instruction, []).append((row, o))
    multiply = {row.instruction for row, _ in found}
    counts = {
        i: count
        for name, count in executions(module).items()
        for i in filter(launches, module.computations[name])
    }
    mine = {i: [o for row, o in near.get(i, ()) if row.is_fp8 or "fp8" in o.work] for i in counts}
    classes = {i: "matmul" if i in multiply else _class(i, mine[i]) for i in counts}
    for i in reversed(
        classes
    ):  # one number, for nobody but who makes FP8 of it, or a scale: of an amax's history
        if classes[i] == "rest" and is_plain(i) and all(s.size == 1 for s in results(i)):
            readers = {classes.get(reader) for reader, _ in around.users(i)}
            classes[i] = "scale" if readers and readers <= {"quantize", "scale"} else "rest"

    def line(i: Instruction) -> Line:
        return Line(
            kernel(i, counts[i]),
            classes[i],
            tuple(dict.fromkeys(w for o in mine[i] for w in o.work)),
            any(o.avoidable for o in mine[i]),
            tuple(dict.fromkeys(row.name for row, _ in near.get(i, ())))
            or _served(i, classes, around),
            layer(op_name(i)),
            is_backward(op_name(i)),
            source_line(i),
        )

    return Ledger(map(line, counts))


def _served(
    i: Instruction, classes: dict[Instruction, str], around: Neighborhood
) -> tuple[str, ...]:
    """The matmuls that a kernel makes something for, through others that make FP8 and scales."""
    if classes[i] not in _ON_THE_WAY:
        return (i.name,) if classes[i] == "matmul" else ()
    found, seen, todo = [], {i}, [i]
    for at in todo:
        for reader in around.next.get(at, ()) if len(todo) < _FAR else ():
            if classes.get(reader) == "matmul":
                found.append(reader.name)
            elif classes.get(reader) in _ON_THE_WAY and reader not in seen:
                seen.add(reader)
                todo.append(reader)
    return tuple(dict.fromkeys(found))


def _is_opaque(i: Instruction) -> bool:
    sorts = (i.custom_call_target or "").startswith(
        "__cub$"
    )  # and sums up: CUB multiplies no matrices
    return i.opcode.removesuffix("-start") in _OPAQUE and not sorts


def _class(i: Instruction, near: Sequence[UnfusedKernel]) -> str:
    opcode = i.opcode.removesuffix("-start")
    if opcode.startswith(COLLECTIVES):
        return "collective"
    if not is_plain(i):
        if opcode in _MOVES_ALONE:
            return "move"
        return "opaque" if _is_opaque(i) else "rest"
    if any(
        map(_is_opaque, inside(i))
    ):  # a fusion may hold a library's kernel, with the slices that it reads
        return "opaque"
    avoidable = [o for o in near if o.avoidable]
    if any("fp8" in o.work for o in avoidable):
        return "dequantize"
    after = {work for o in avoidable if o.after for work in o.work}
    if after and not after <= {"transpose", "pad", "amax"}:
        return "after"
    parts = inside(i)
    opcodes = {j.opcode for j in parts}
    if opcodes <= MOVES | SOURCES:
        return "move"
    written = results(i)
    if any(s.dtype.startswith("f8") and s.size > 1 for s in written) and any(
        j.opcode == "convert" and j.shape.dtype.startswith("f8") for j in parts
    ):
        return "quantize"
    maxima = [j for j in parts if j.opcode == "reduce" and reducer(j) in ("maximum", "minimum")]
    scales = any(o.work == ("scale",) and not o.after or o.own == "computes a scale" for o in near)
    if (
        scales
        or after == {"amax"}
        or maxima
        and any(j.opcode == "abs" for j in parts)
        and all(s.size == 1 for s in written)
    ):
        return "scale"
    return "move" if after or any("transpose" in o.work for o in avoidable) else "rest"
