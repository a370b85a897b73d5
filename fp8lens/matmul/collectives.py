"""What a sharded program sends between devices: each collective, the type on the wire, its bytes,
over which axis of the mesh, whether kernels run beside it, and the matmul that it feeds. All of it
is read from one device's HLO.
"""

import dataclasses
import enum
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fp8lens.formats import CUBLASLT, is_fp8
from fp8lens.hlo.dataflow import Graph, Value
from fp8lens.hlo.ops import CONTROL, DOTS
from fp8lens.hlo.origin import op_name, source_line
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module, visible
from fp8lens.hlo.program import executions, setting
from fp8lens.hlo.replica_groups import SUMS, axis_of, device_counts, groups
from fp8lens.hlo.text import columns, counted, listed, wrapped
from fp8lens.hlo.text import size as _size
from fp8lens.hlo.values import changes_layout, operand, reducer
from fp8lens.matmul.kernels import is_opaque, launches
from fp8lens.matmul.roles import clamp_bounds
from fp8lens.matmul.rows import is_known, matmuls

# Bytes that each of n devices sends, by the bytes of its operand: the factors of nccl-tests'
# doc/PERFORMANCE.md, which takes the whole array for an all-gather's size. There, a broadcast's
# bytes are the root's.
_SENT: Mapping[str, Callable[[int, int], int]] = {
    "all-gather": lambda size, n: size * (n - 1),
    "all-reduce": lambda size, n: 2 * size * (n - 1) // n,
    "reduce-scatter": lambda size, n: size * (n - 1) // n,
    "all-to-all": lambda size, n: size * (n - 1) // n,
    "collective-permute": lambda size, n: size,
    "collective-broadcast": lambda size, n: size,
    "ragged-all-to-all": lambda size, n: size,
}
KINDS = tuple(_SENT)
# Attributes that say which devices take part.
_DEVICES = (
    "replica_groups",
    "device_ids",
    "source_target_pairs",
    "channel_id",
    "frontend_attributes",
)
MOVES = tuple(kind for kind in KINDS if kind not in SUMS)  # which add nothing
_WIDE = ("bf16", "f16", "f32", "f64")
_WRAPS = ("async-start", "fusion", "fusion-start")


class Problem(enum.StrEnum):
    """What a collective sends that it would not have to, or what is done after it for its sake: of
    each, a rule of fp8lens.rules.wire tells.
    """

    GATHERED_WIDE = "gathered wide"
    READ_WIDE = "gathered wide, read wide"  # by others besides
    DEQUANTIZED = "dequantized, then gathered"
    TWICE = "gathered twice"
    TRANSPOSED = "transposed after gathering"

    def of(self, kind: str) -> str:
        """What to call it of a collective of this kind."""
        return str(self) if kind == "all-gather" else _OF_OTHERS.get(self, str(self))


# Of collectives that gather nothing
_OF_OTHERS = {
    Problem.GATHERED_WIDE: "sent wide",
    Problem.DEQUANTIZED: "dequantized, then sent",
}
SENT_WIDE = (Problem.GATHERED_WIDE, Problem.READ_WIDE, Problem.DEQUANTIZED)


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the arrays that a collective sends, and that could be sent in FP8: its type, its shape
    as each device gives it, the bytes that each device sends of it, and those that it would send.
    """

    problem: Problem
    dtype: str
    shape: str
    sent: int
    would: int


class _Judged(NamedTuple):
    """What is wrong with one of the arrays that are sent, who else reads it in its wide type, the
    kernels that transpose it, and those of which it is not known what they make of it.
    """

    problem: Problem | None = None
    readers: Sequence[str] = ()
    transposed_by: Sequence[str] = ()
    unknown: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one device's program.

    `kind` is one of KINDS; "collective-permute" also of a send that XLA made of one, which is not
    followed to its receive: it feeds nothing, and `unknown` says so. `dtype` is the type on the
    wire, named as in HLO; of several arrays sent at once, the distinct types, with commas; `shapes`
    are those that each device gives. `bytes_sent`: bytes that leave each device in one run, as
    nccl-tests counts them for its bus bandwidth: (n-1) times the operand for an all-gather, (n-1)/n
    of it for reduce-scatter and all-to-all, twice that for an all-reduce, all of it for a permute,
    of each device that sends, and for a broadcast, of the root; of a ragged-all-to-all, whose sizes
    are data, all of it, the most there can be. A switch that adds or copies (NVLink SHARP) makes an
    all-reduce less.

    `group_size`: how many devices take part together. `axis`: the mesh's axes, as "data" or "data,
    model"; where groups are no whole axes or their names are not known, as "4 of 8", with the
    distance of two neighbours where it is not 1: "2 of 8, stride 4". `asynchronous`: it is started,
    and waited for later; then `overlaps` names the kernels (and loops) that the schedule has
    between the two; none where it ends in another computation.

    `feeds`: the nearest matmuls that read what it gives: past views, moves, rows taken or put by
    index, conversions, elementwise operations with no other large array, further collectives, and
    through loops. A kernel that is not looked into and that reads FP8 codes counts as an FP8
    matmul. Matmuls that XLA spelled out as products and sums are not seen. `count`: how often it
    runs; None where that is not known.

    `problems`: what it sends that it would not have to. `readers`: who else reads it in its wide
    type. `transposed_by`: kernels that transpose the whole of a gathered FP8 array before an FP8
    matmul reads it. `unknown`: kernels that are not looked into and that read it in its wide type:
    whether they quantize it is not known. `parts`: of arrays sent together, those that could be
    FP8.
    """

    name: str
    kind: str
    dtype: str
    shapes: tuple[str, ...]
    bytes_sent: int
    group_size: int
    axis: str
    asynchronous: bool
    overlaps: tuple[str, ...]
    feeds: tuple[str, ...]
    feeds_fp8: bool
    count: int | None
    source: str
    op_name: str
    problems: tuple[Problem, ...] = ()
    readers: tuple[str, ...] = ()
    transposed_by: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    parts: tuple[Part, ...] = dataclasses.field(default=(), repr=False)
    instruction: Instruction | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def is_fp8(self) -> bool:
        """Whether all that it sends is 8-bit floats."""
        return all(is_fp8(dtype) for dtype in self.dtype.split(", "))

    @property
    def where(self) -> str:
        """Where it comes from: the line of the source, or else what JAX calls it, as an argument
        of the program that is gathered; "" where XLA kept neither.
        """
        return self.source or self.op_name

    @property
    def title(self) -> str:
        """Its name, with where it comes from."""
        return f"{self.name} ({self.where})" if self.where else self.name

    @property
    def is_summed_wide(self) -> bool:
        """Whether it is a sum that is then quantized for an FP8 matmul."""
        return self.kind == "all-reduce" and self.feeds_fp8 and not self.is_fp8

    def in_words(self, problem: Problem | None = None) -> dict[str, str]:
        """What sentences about it name: its type, its sizes, who reads it; of what it sends wide,
        only the arrays that have this problem.
        """
        words = {
            "dtype": self.dtype,
            "kind": self.kind,
            "shapes": listed(self.shapes),
            "feeds": listed(self.feeds),
            "readers": listed(self.readers),
            "kernels": listed(self.transposed_by),
        }
        if parts := [part for part in self.parts if part.problem == problem]:
            words |= {
                "dtype": ", ".join(dict.fromkeys(part.dtype for part in parts)),
                "shapes": listed(part.shape for part in parts),
                "sent": _size(sum(part.sent for part in parts)),
                "would": _size(sum(part.would for part in parts)),
            }
        return words


# Where values come from and go to -----------------------------------------------------------------


class _Sent:
    """What the collectives of one module send between: which devices, and which matmuls."""

    def __init__(self, module: HloModule, mesh_shape: Mapping[str, int] | None):
        self._mesh_shape = mesh_shape
        self._axes: dict[tuple[str | None, ...], tuple[int, str]] = {}
        # Where collectives are very many, what is far from one is not looked at: the time is to
        # grow with the text.
        count = sum(1 for i in module if kind(i))
        self.graph = Graph(module, _is_end, max(16, len(module.text) // max(1, 3 * count)))

    def axis(self, i: Instruction) -> tuple[int, str]:
        """How many devices take part together, and along which axes of the mesh."""
        key = (kind(i), *map(i.attributes.get, _DEVICES))
        if key not in self._axes:
            self._axes[key] = axis_of(i, groups(i), self._mesh_shape)
        return self._axes[key]

    def feeds(self, collective: Instruction, results: list[Value]) -> list[Instruction]:
        """The kernels of the nearest matmuls that multiply what a collective gives; through further
        collectives only where there is none before.
        """

        def at_the_next(i: Instruction) -> bool:
            return _is_end(i) or (bool(kind(i)) and i is not collective)

        for stop in (at_the_next, _is_end):
            reached = self.graph.walk(results, self.graph.after, stop)
            kernels = [self.graph.launcher(v.instruction) for v in reached if _multiplies(v)]
            if kernels:
                return [*dict.fromkeys(kernels)]
        return []

    def judged(self, collective: Instruction, sent: Instruction, result: Value) -> _Judged:
        """What is wrong with an array that a collective sends, if anything."""
        gathers = kind(collective) == "all-gather"
        if collective.opcode == "send":  # no step goes from it to its receive
            return _Judged(unknown=["its receive"] if _is_wide(sent) else [])
        if gathers and _is_fp8(sent):
            kernels = self._transposed_by(result)
            return _Judged(Problem.TRANSPOSED if kernels else None, transposed_by=kernels)
        if kind(collective) in SUMS or not _is_wide(sent):
            return _Judged()
        graph = self.graph
        behind = graph.walk([Value(sent, 0)], graph.before, lambda i: _was_fp8(i) or _is_end(i))
        if any(_is_fp8(value.instruction) for value in behind):
            return _Judged(Problem.DEQUANTIZED)
        wide = graph.walk([result], graph.after, lambda i: _is_fp8(i) or _is_end(i))
        unknown = [graph.launcher(v.instruction).name for v in wide if _may_quantize(v)]
        if not self._are_multiplied(wide):
            # A clamp alone remains of a quantization whose FP8 array nothing reads. Where the
            # conversion to FP8 is behind the collective, the clamp is that quantization's own.
            was_fp8 = any(_was_fp8(value.instruction) for value in behind)
            return _Judged(Problem.DEQUANTIZED if was_fp8 else None, unknown=unknown)
        readers = [self._reader(value) for value in wide if _reads_wide(value)]
        if not readers:
            return _Judged(Problem.GATHERED_WIDE)
        # Where a wide array goes on to a device that reads it, it has to travel so: only what is
        # gathered is read by others that may need their own part alone.
        return _Judged(Problem.READ_WIDE if gathers else None, readers, unknown=unknown)

    def _are_multiplied(self, values: Iterable[Value]) -> bool:
        """Whether an FP8 matmul reads those of some values that are FP8."""
        # What is FP8 as the collective gives it is no wide value.
        quantized = [value for value in values if _is_fp8(value.instruction)]
        narrow = self.graph.walk(quantized, self.graph.after, _is_end)
        return any(map(self.is_fp8_operand, narrow))

    def _reader(self, value: Value) -> str:
        """Who reads a value in a wide type, in words."""
        i, index = value
        if i.computation.is_entry and i.is_root and index is None:
            return "the program's result"
        name = self.graph.launcher(i).name
        return f"the addition in {name}" if is_matmul(i) and not _reads_as_matrix(value) else name

    def _transposed_by(self, gathered: Value) -> list[str]:
        """The kernels that transpose a gathered FP8 array before an FP8 matmul reads it."""
        reached = self.graph.walk([gathered], self.graph.after, _is_end)
        names = []
        for value in reached:
            if self.is_fp8_operand(value):
                before = reached[value]
                while before is not None:
                    if changes_layout(before.instruction):
                        names.append(self.graph.launcher(before.instruction).name)
                    before = reached[before]
        return names

    def is_fp8_operand(self, value: Value) -> bool:
        """Whether a matmul in FP8, or a kernel that is not looked into, reads FP8 codes."""
        if _reads_codes(value):
            return True
        return _reads_as_matrix(value) and _multiplies_fp8(self.graph.launcher(value.instruction))


def kind(i: Instruction) -> str:
    """The kind of a collective, "" of any other instruction."""
    name = i.opcode.removesuffix("-start")
    if name == "send" and i.attributes.get("is_host_transfer") != "true":
        return "collective-permute"
    return name if name in _SENT else ""


def is_matmul(i: Instruction) -> bool:
    """Whether an instruction is a dot, or calls a library's matmul."""
    return i.opcode in DOTS or (i.opcode.startswith("custom-call") and is_known(i))


def _reads_as_matrix(value: Value) -> bool:
    """Whether a matmul multiplies a value: its further operands are scales, a bias, a matrix to
    add.
    """
    i, index = value
    matrices = 3 if "fmha" in (i.custom_call_target or "") else 2
    return index is not None and is_matmul(i) and index < matrices


def _is_end(i: Instruction) -> bool:
    """Whether a value is followed no further: a matmul, or a kernel that is not looked into."""
    return is_matmul(i) or is_opaque(i)


def _read(value: Value) -> Instruction | None:
    """What a kernel that is not looked into reads, where a walk forwards arrived at it."""
    i, index = value
    if index is None or not is_opaque(i) or is_matmul(i):
        return None
    return operand(i, index)


def _reads_codes(value: Value) -> bool:
    """Whether a kernel that is not looked into reads FP8 codes: as a matmul by hand does."""
    read = _read(value)
    return read is not None and _is_fp8(read)


def _may_quantize(value: Value) -> bool:
    """Whether a kernel that is not looked into reads a wide array, and is none of XLA's for
    choosing among numbers, as a router does.
    """
    read = _read(value)
    target = value.instruction.custom_call_target or ""
    return read is not None and _is_wide(read) and not target.startswith("__gpu$TopK")


def _multiplies(value: Value) -> bool:
    """Whether a matmul multiplies a value, or a kernel that is not looked into reads its codes."""
    return _reads_as_matrix(value) or _reads_codes(value)


def _reads_wide(value: Value) -> bool:
    """Whether a wide value, where a walk forwards arrived, is read as it is."""
    i, index = value
    return (index is None and not _is_amax(i)) or _is_end(i)


def _is_fp8(i: Instruction) -> bool:
    return is_fp8(i.shape.dtype) and i.shape.size > 1


def _is_wide(i: Instruction) -> bool:
    return i.shape.dtype in _WIDE and i.shape.size > 1


def _multiplies_fp8(kernel: Instruction) -> bool:
    return any(row.is_fp8 for row in matmuls(kernel))


def _is_amax(i: Instruction) -> bool:
    """A maximum of gathered values is that of the parts' maxima: it needs no wide array."""
    return i.opcode == "reduce" and reducer(i) in ("maximum", "minimum")


def _was_fp8(i: Instruction) -> bool:
    """FP8, or clamped to the range of it: where nothing reads the FP8 array itself, XLA turns f32
    to FP8 to bf16 into f32 to bf16 (its simplify-fp-conversions), and the clamp is what remains of
    the quantization.
    """
    if i.opcode != "clamp":
        return _is_fp8(i)
    return _is_fp8(i) or clamp_bounds(i) in [[f"-{of.limit}", of.limit] for of in CUBLASLT.values()]


# Collectives --------------------------------------------------------------------------------------


def _within(at: Instruction) -> list[Instruction]:
    """The collectives that an instruction runs: itself, or what an asynchronous start or a fusion
    wraps.
    """
    if kind(at):
        return [at]
    if at.opcode not in _WRAPS:
        return []
    computations = at.computation.module.computations
    return [i for name in at.called for i in computations[name] if kind(i)]


def _beside(start: Instruction) -> tuple[str, ...]:
    """Kernels and loops that are scheduled between the start of something asynchronous and its
    end.
    """
    users, end = start.computation.users, start
    while not end.opcode.endswith("-done"):
        onward = (u for u in users.get(end.name, ()) if u.opcode.endswith(("-done", "-update")))
        if not (following := next(onward, None)):
            return ()
        end = following
    if start.computation.module.attributes.get("is_scheduled") != "true":
        return ()
    between = start.computation.instructions[start.index + 1 : end.index]
    return tuple(i.name for i in between if (launches(i) or i.opcode in CONTROL) and not _within(i))


def _collective(at: Instruction, i: Instruction, around: _Sent, count: int | None) -> Collective:
    """The collective `i`, that `at` runs: itself, or what `at` wraps."""
    # A ragged-all-to-all's further operands say where its parts begin, and how long they are; that
    # of a send is a token.
    has_one = kind(i) == "ragged-all-to-all" or i.opcode == "send"
    names = i.operands[:1] if has_one else i.operands
    sent = [i.computation[name] for name in names]
    size, axis = around.axis(i)
    results = [Value(i, n) for n in range(len(sent))]
    feeds = around.feeds(i, results)
    is_start = at.opcode.endswith("-start") or at.opcode == "send"
    asynchronous = is_start and not (_waits(at) or _waits(i))

    judged = [around.judged(i, *each) for each in zip(sent, results, strict=True)]
    parts = []
    for s, found in zip(sent, judged, strict=True):
        if found.problem in SENT_WIDE:
            sizes = [_SENT[kind(i)](n, size) for n in (s.shape.nbytes, s.shape.size)]
            parts.append(Part(found.problem, s.shape.dtype, s.shape.brief, *sizes))
    problems = [found.problem for found in judged if found.problem]
    if kind(i) == "all-gather" and len({*sent}) < len(sent):
        problems.append(Problem.TWICE)
    return Collective(
        name=at.name,
        kind=kind(i),
        dtype=", ".join(dict.fromkeys(s.shape.dtype for s in sent)),
        shapes=tuple(s.shape.brief for s in sent),
        bytes_sent=sum(_SENT[kind(i)](s.shape.nbytes, size) for s in sent),
        group_size=size,
        axis=axis,
        asynchronous=asynchronous,
        overlaps=_beside(at) if asynchronous else (),
        feeds=tuple(k.name for k in feeds),
        feeds_fp8=any(_multiplies_fp8(k) or not is_known(k) for k in feeds),
        count=count,
        source=source_line(i) or source_line(at),
        op_name=op_name(i if i.metadata else at),
        instruction=i,
        problems=tuple(dict.fromkeys(problems)),
        readers=_distinct(found.readers for found in judged),
        transposed_by=_distinct(found.transposed_by for found in judged),
        unknown=_distinct(found.unknown for found in judged),
        parts=tuple(parts),
    )


def _distinct[Item](several: Iterable[Iterable[Item]]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(several)))


def _waits(i: Instruction) -> bool:
    """Whether XLA noted that nothing runs beside a collective: its start is its end."""
    keys = (("is_sync",), ("collective_backend_config", "is_sync"))
    return any(setting(i, *key) is True for key in keys)


def collectives(x: Any, mesh_shape: Mapping[str, int] | None = None) -> "Collectives":
    """Every collective of a program, as one device runs it, ENTRY's first.

    `x` is what `parse_hlo_module` takes; a GPU's optimized HLO, for `overlaps` and types to be what
    runs. `mesh_shape` gives the mesh's axes, as in {"data": 2, "model": 4}: devices are numbered
    along the last first, as JAX numbers those of a mesh. Raises ValueError where it has another
    number of devices than the program; HloParseError for text that is not HLO. A send that XLA
    made of a permute, for a pipeline, counts as one.
    """
    module = parse_hlo_module(x)
    devices = prod(device_counts(module))
    if mesh_shape is not None and prod(mesh_shape.values()) != devices:
        raise ValueError(
            f"mesh_shape has {prod(mesh_shape.values())} devices, {dict(mesh_shape)}; the program"
            f" {devices}."
        )
    around, found = _Sent(module, mesh_shape), []
    # Their collectives are counted where they are started.
    wrapped = {name for i in module if i.opcode == "async-start" for name in i.called}
    for name, count in executions(module).items():
        if name in wrapped:
            continue
        for at in module.computations[name]:
            try:
                found += [_collective(at, i, around, count) for i in _within(at)]
            except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
                raise at.error(
                    "the instructions around this collective contradict each other"
                ) from error
    return Collectives(found)


def of_kinds(
    found: Iterable[Collective], kinds: Collection[str] = KINDS, min_bytes: float = 0
) -> list[Collective]:
    """Those of these kinds, and so many bytes, that do not send FP8 alone."""
    return [c for c in found if c.bytes_sent >= min_bytes and not c.is_fp8 and c.kind in kinds]


# As text ------------------------------------------------------------------------------------------

HEADER = ("runs", "kind", "sent by each", "type", "over", "overlaps", "feeds", "source")


class Collectives(tuple[Collective, ...]):
    """The collectives of a program, in its order. Prints as a table, those that send most first."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave each device, loops as often as they run where that is known and else
        once.
        """
        return sum(c.bytes_sent * (1 if c.count is None else c.count) for c in self)

    def rows(self) -> list[tuple[Collective, tuple[str, ...], list[str]]]:
        """(collective, cells, further lines), those alike in all but their names taken together;
        those that send most first.
        """
        alike: dict[tuple, list[Collective]] = defaultdict(list)
        for c in self:
            how = (c.kind, c.dtype, c.shapes, c.axis, c.asynchronous, len(c.overlaps))
            alike[*how, c.where, c.problems, c.count is None].append(c)
        rows = []
        for same in sorted(alike.values(), key=lambda same: -Collectives(same).bytes_sent):
            further = [problem.of(same[0].kind) for problem in same[0].problems]
            rows.append((same[0], _cells(same), further))
        return rows

    def totals(self) -> str:
        """What is sent in all, as one sentence."""
        sent: dict[str, int] = defaultdict(int)
        for c in self:
            sent[c.dtype] += Collectives((c,)).bytes_sent
        largest_first = sorted(sent.items(), key=lambda item: -item[1])
        types = ", ".join(f"{_size(n)} in {dtype}" for dtype, n in largest_first)
        asynchronous = sum(c.asynchronous for c in self)
        text = (
            f"{counted(len(self), 'collective')}, {asynchronous} asynchronous; "
            f"{_size(self.bytes_sent)} sent by each device ({types})"
        )
        if any(c.count is None for c in self):
            text += "; loops of unknown length counted once"
        return text

    def __str__(self) -> str:
        if not self:
            return "no collectives"
        rows = self.rows()
        table = [HEADER, *(cells for _, cells, _ in rows)]
        shown = [*range(len(HEADER))]
        if all(cells[0] == "1" for cells in table[1:]):
            shown.remove(0)
        may_go = map(HEADER.index, ("source", "feeds"))  # each to a line of its own
        lines, left_out = columns(table, shown, (0, 2), may_go)
        text = lines[:1]
        for line, (_, cells, further) in zip(lines[1:], rows, strict=True):
            text.append(line)
            hidden = [_labelled(n, cells[n]) for n in left_out if cells[n]]
            below = [", ".join(hidden), *further] if hidden else further
            for more in below:
                text += [f"    {part}" for part in wrapped(more, 0, 2)]
        return "\n".join([*text, *wrapped(self.totals(), 0, 2)])

    __repr__ = __str__


def _cells(same: Sequence[Collective]) -> tuple[str, ...]:
    """A row of the table, for collectives that are alike."""
    c, counts = same[0], [other.count for other in same]
    runs = "?" if None in counts else str(sum(count or 0 for count in counts))
    beside = counted(len(c.overlaps), "kernel") if c.asynchronous else "sync"
    feeds = [*dict.fromkeys(name for other in same for name in other.feeds)]
    fed = feeds[0] if feeds else ""
    if len(feeds) > 1:
        fed += f" +{len(feeds) - 1}"
    return (
        runs,
        c.kind,
        _size(c.bytes_sent),
        c.dtype,
        visible(c.axis),
        beside,
        fed,
        visible(c.where),
    )


def _labelled(column: int, cell: str) -> str:
    """A cell on a line of its own."""
    name = HEADER[column]
    return f"at {cell}" if name == "source" else f"{name} {cell}"
