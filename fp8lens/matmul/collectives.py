"""What a sharded program sends between devices: each collective, the type on the wire, its bytes,
over which axis of the mesh, whether kernels run beside it, and the matmul that it feeds. All of it
is read from one device's HLO.
"""

import dataclasses
import enum
import html
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fp8lens.formats import CUBLASLT, is_fp8
from fp8lens.hlo.dataflow import Graph, Value, is_of_the_host, other_ends
from fp8lens.hlo.ops import CONTROL, DOTS
from fp8lens.hlo.origin import op_name, source_line
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module, visible
from fp8lens.hlo.program import executions, fusion_body, setting
from fp8lens.hlo.replica_groups import MOST, SUMS, axis_of, device_counts, groups
from fp8lens.hlo.text import LOST, columns, counted, html_table, wrapped
from fp8lens.hlo.text import size as _size
from fp8lens.hlo.values import changes_layout, is_zero, operand, reducer
from fp8lens.hlo.walk import walk
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
MOVES = tuple(kind for kind in KINDS if kind not in SUMS)  # which add nothing
_WIDE = ("bf16", "f16", "f32", "f64")
_BITS = tuple(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))


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


class Doubt(enum.StrEnum):
    """Why it is not known whether a collective could send FP8, where an FP8 matmul alone reads in
    the end what it gives.
    """

    COMBINED = "combined with other arrays, and then quantized"
    PLACED = "a sum that may only move values, which are then quantized"

    @property
    def allowed_by(self) -> str:
        """The word that accepts it."""
        return self.name.lower()

    @property
    def advice(self) -> str:
        """What it says of a collective, and what to do about it."""
        return _ADVICE[self]


_ADVICE = {
    Doubt.COMBINED: (
        "what it gives is combined with other arrays before an FP8 matmul reads it quantized. If "
        "each device can combine its part before it is sent, do that, quantize, and send the codes"
    ),
    Doubt.PLACED: (
        "it adds arrays that are zero where the device's number says so, as XLA does to take rows "
        "by index from an array that is divided. If it only moves them, quantize first, and take "
        "the rows of the codes"
    ),
}


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


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one device's program.

    `kind` is one of KINDS; "collective-permute" also of a send that XLA made of one. `dtype` is the
    type on the wire, named as in HLO; of several arrays sent at once, the distinct types, with
    commas; `shapes` are those that each device gives. `bytes_sent`: bytes that leave each device in
    one run, as nccl-tests counts them for its bus bandwidth: (n-1) times the operand for an
    all-gather, (n-1)/n of it for reduce-scatter and all-to-all, twice that for an all-reduce, all
    of it for a permute, of each device that sends, and for a broadcast, of the root; of a
    ragged-all-to-all, whose sizes are data, all of it, the most there can be. A switch that adds or
    copies (NVLink SHARP) makes an all-reduce less.

    `group_size`: how many devices take part together. `axis`: the mesh's axes, as "data" or "data,
    model"; where groups are no whole axes or their names are not known, as "4 of 8", with the
    distance of two neighbours where it is not 1: "2 of 8, stride 4". `asynchronous`: it is started,
    and waited for later; then `overlaps` names the kernels (and loops) that the schedule has
    between the two; none where it ends in another computation.

    `feeds` and `fed_by`: the nearest matmuls that read what it gives, and that made what it sends:
    past views, moves, rows taken or put by index, conversions, elementwise operations with no other
    large array, further collectives, and through loops. A kernel that is not looked into and that
    reads FP8 codes counts as an FP8 matmul. Matmuls that XLA spelled out as products and sums are
    not seen. `count`: how often it runs; None where that is not known.

    `problems`: what it sends that it would not have to. `readers`: who else
    reads it in its wide type. `transposed_by`: kernels that transpose the whole of a gathered FP8
    array before an FP8 matmul reads it. `unknown`: kernels that are not looked into and that read
    it in its wide type: whether they quantize it is not known. `doubts`: why else it is not known
    whether it could send FP8. `parts`: of arrays sent together, those that could be FP8.
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
    fed_by: tuple[str, ...]
    feeds_fp8: bool
    count: int | None
    source: str
    op_name: str
    problems: tuple[Problem, ...] = ()
    readers: tuple[str, ...] = ()
    transposed_by: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
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
        is_sum = self.kind == "all-reduce" and Doubt.PLACED not in self.doubts
        return is_sum and self.feeds_fp8 and not self.is_fp8

    def in_words(self, problem: Problem | None = None) -> dict[str, str]:
        """What sentences about it name: its type, its sizes, who reads it; of what it sends wide,
        only the arrays that have this problem.
        """
        words = {
            "dtype": self.dtype,
            "kind": self.kind,
            "shapes": _listed(self.shapes),
            "feeds": _listed(self.feeds),
            "readers": _listed(self.readers),
            "kernels": _listed(self.transposed_by),
        }
        if parts := [part for part in self.parts if part.problem == problem]:
            words |= {
                "dtype": ", ".join(dict.fromkeys(part.dtype for part in parts)),
                "shapes": _listed(part.shape for part in parts),
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
        # How many devices may yet be looked at: the time is to grow with the text.
        self._spare = MOST + len(module.text)
        # Where collectives are very many, what is far from one is not looked at, for the same
        # reason.
        count = sum(1 for i in module if kind(i))
        most = max(16, len(module.text) // max(1, 3 * count))
        self.graph = Graph(module, _is_end, most)
        self._mixed = Graph(module, _is_end, most, mixes=True)
        self._most = most

    def axis(self, i: Instruction) -> tuple[int, str]:
        """How many devices take part together, and along which axes of the mesh."""
        names = ["replica_groups", "device_ids", "source_target_pairs", "channel_id"]
        names += ["frontend_attributes"] if i.opcode == "send" else []
        key = (i.opcode, *map(i.attributes.get, names))
        if key not in self._axes:
            together = groups(i)
            self._spare -= sum(map(len, together))
            if self._spare < 0:
                raise i.error("the collectives name more devices than a program's")
            self._axes[key] = axis_of(i, together, self._mesh_shape)
        return self._axes[key]

    def feeds(self, collective: Instruction, results: list[Value]) -> list[Instruction]:
        """The kernels of the nearest matmuls that multiply what a collective gives."""
        return self._nearest(collective, results, self.graph.after, _multiplies)

    def fed_by(self, collective: Instruction, sent: list[Value]) -> list[Instruction]:
        """The kernels of the nearest matmuls that made what a collective sends."""
        return self._nearest(
            collective, sent, self.graph.before, lambda value: is_matmul(value.instruction)
        )

    def _nearest(
        self,
        collective: Instruction,
        start: list[Value],
        step: Callable[[Value], Iterable[Value]],
        wanted: Callable[[Value], bool],
    ) -> list[Instruction]:
        """The kernels of the matmuls that are reached; through further collectives only where there
        is none before.
        """

        def at_the_next(i: Instruction) -> bool:
            return _is_end(i) or (bool(kind(i)) and i is not collective)

        for stop in (at_the_next, _is_end):
            reached = self.graph.walk(start, step, stop)
            kernels = [self.graph.launcher(v.instruction) for v in reached if wanted(v)]
            if kernels:
                return [*dict.fromkeys(kernels)]
        return []

    def sent_wide(self, kind: str, result: Value, sent: Instruction) -> "_Wide":
        """What is wrong with a collective of this kind that sends a wide type, if anything."""
        graph = self.graph
        behind = graph.walk([Value(sent, 0)], graph.before, lambda i: _was_fp8(i) or _is_end(i))
        if any(_is_fp8(value.instruction) for value in behind):
            return _Wide(Problem.DEQUANTIZED)
        wide = graph.walk([result], graph.after, lambda i: _is_fp8(i) or _is_end(i))
        unknown = [graph.launcher(v.instruction).name for v in wide if _may_quantize(v)]
        if not self._are_multiplied(wide):
            # A clamp alone remains of a quantization whose FP8 array nothing reads. Where the
            # conversion to FP8 is behind the collective, the clamp is that quantization's own.
            was_fp8 = any(_was_fp8(value.instruction) for value in behind)
            return _Wide(Problem.DEQUANTIZED if was_fp8 else None, unknown=unknown)
        readers = [self._reader(value) for value in wide if _reads_wide(value)]
        if not readers:
            return _Wide(Problem.GATHERED_WIDE)
        # Where a wide array goes on to a device that reads it, it has to travel so: only what is
        # gathered is read by others that may need their own part alone.
        return _Wide(Problem.READ_WIDE if kind == "all-gather" else None, readers, unknown)

    def is_combined(self, kind: str, result: Value) -> bool:
        """Whether what is quantized of a value, for FP8 matmuls alone, is computed from it and
        other large arrays. What goes on to another device and is added there is a sum, as in a
        ring: that is known to need its digits.
        """
        reached = self._quantized_alone(result)
        if kind == "all-gather" or not reached:
            return bool(reached)
        return not any(
            value.instruction.opcode in ("add", "subtract")
            and value not in self.graph.after(before)
            for value, before in reached.items()
            if before
        )

    def is_placed(self, kind: str, result: Value, sent: Instruction) -> bool:
        """Whether a sum may add nothing, as where XLA takes rows by index from an array that is
        divided: each device sends zeros for what others have. And FP8 matmuls alone read it.
        """
        if kind not in SUMS:
            return False
        behind = self.graph.walk(
            [Value(sent, 0)], self.graph.before, lambda i: _is_end(i) or self._may_place(i)
        )
        places = [value.instruction for value in behind if self._may_place(value.instruction)]
        return any(map(self._places, places)) and bool(self._quantized_alone(result))

    @staticmethod
    def _may_place(i: Instruction) -> bool:
        return i.opcode in ("select", "dynamic-update-slice") and i.shape.dtype in _WIDE

    def _places(self, i: Instruction) -> bool:
        """Whether an instruction has zeros where the device's number says so."""
        if i.opcode == "select":
            has_zeros = any(map(self._is_zero, (operand(i, 1), operand(i, 2))))
            return has_zeros and self._knows_place(operand(i, 0))
        starts = map(i.computation.__getitem__, i.operands[2:])
        return self._is_zero(operand(i, 0)) and any(map(self._knows_place, starts))

    def _is_zero(self, i: Instruction) -> bool:
        """Whether an array is zero everywhere."""
        reached = self.graph.walk([Value(i, 0)], self.graph.before, _is_end)
        ends = [value.instruction for value in reached if not self.graph.before(value)]
        return bool(ends) and all(map(is_zero, ends))

    def _knows_place(self, i: Instruction) -> bool:
        """Whether a value is computed from the device's number."""
        made_of = walk([i], self._all_before, self._most)
        return any(j.opcode in ("partition-id", "replica-id") for j in made_of)

    def _all_before(self, i: Instruction) -> Iterator[Instruction]:
        """All that an instruction is computed from, one step back."""
        if i.opcode == "parameter" or i.called:
            yield from (value.instruction for value in self.graph.before(Value(i, 0)))
        yield from map(i.computation.__getitem__, i.operands)

    def _quantized_alone(self, result: Value) -> Mapping[Value, Value | None]:
        """What is computed of a value, with other arrays too, until it is quantized, with the one
        before each; nothing if no FP8 matmul reads it then, or anything reads it in a wide type.
        """
        graph = self._mixed
        wide = graph.walk([result], graph.after, lambda i: _is_fp8(i) or _is_end(i))
        is_alone = self._are_multiplied(wide) and not any(map(_reads_wide, wide))
        return wide if is_alone else {}

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

    def transposed_by(self, gathered: Value) -> list[str]:
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


class _Wide(NamedTuple):
    """What is wrong with an array that is sent in a wide type, who else reads it so, and the
    kernels of which it is not known what they make of it.
    """

    problem: Problem | None
    readers: Sequence[str] = ()
    unknown: Sequence[str] = ()


def kind(i: Instruction) -> str:
    """The kind of a collective, "" of any other instruction."""
    name = i.opcode.removesuffix("-start")
    if name == "send":
        return "" if is_of_the_host(i) else "collective-permute"
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
    if read is None or (value.instruction.custom_call_target or "").startswith("__gpu$TopK"):
        return False
    return read.shape.dtype in _WIDE and read.shape.size > 1


def _multiplies(value: Value) -> bool:
    """Whether a matmul multiplies a value, or a kernel that is not looked into reads its codes."""
    return _reads_as_matrix(value) or _reads_codes(value)


def _reads_wide(value: Value) -> bool:
    """Whether a wide value, where a walk forwards arrived, is read as it is."""
    i, index = value
    return (index is None and not _is_amax(i)) or _is_end(i)


def _is_fp8(i: Instruction) -> bool:
    return is_fp8(i.shape.dtype) and i.shape.size > 1


def _multiplies_fp8(kernel: Instruction) -> bool:
    return any(row.is_fp8 for row in matmuls(kernel))


def _floats(sent: Instruction, graph: Graph) -> int | None:
    """How many floats of a wide type an array has, or integers that are their bits; None of an
    array of anything else.
    """
    shape = sent.shape
    if shape.dtype in _WIDE:
        return shape.size
    if shape.dtype not in _BITS:
        return None
    behind = graph.walk([Value(sent, 0)], graph.before, lambda i: _is_fp8(i) or _is_end(i))
    for i, _ in behind:
        if i.opcode in ("bitcast", "bitcast-convert") and i.shape.dtype in _BITS:
            floats = operand(i, 0).shape
            if floats.dtype in _WIDE:
                return shape.nbytes * 8 // floats.bits
    return None


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
    if at.opcode not in ("async-start", "fusion", "fusion-start"):
        return []
    inside = [fusion_body(at)]
    if at.opcode == "async-start":
        inside = [at.computation.module.computations[name] for name in at.called]
    return [i for computation in inside for j in computation for i in _within(j)]


def _beside(start: Instruction) -> tuple[str, ...]:
    """Kernels and loops that are scheduled between the start of something asynchronous and its
    end.
    """
    users = start.computation.users
    end: Instruction | None = start
    while end is not None and not end.opcode.endswith("-done"):
        readers = users.get(end.name, ())
        end = next((u for u in readers if u.opcode.endswith(("-done", "-update"))), None)
    if end is None or start.computation.module.attributes.get("is_scheduled") != "true":
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
    if i.opcode == "send":
        results = [Value(received, 0) for received in other_ends(i)]
    feeds = around.feeds(i, results)
    fed_by = around.fed_by(i, [Value(s, 0) for s in sent])
    found = _problems(i, sent, results, around, size)
    is_start = at.opcode.endswith("-start") or at.opcode == "send"
    asynchronous = is_start and not (_waits(at) or _waits(i))
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
        fed_by=tuple(k.name for k in fed_by),
        feeds_fp8=any(_multiplies_fp8(k) or not is_known(k) for k in feeds),
        count=count,
        source=source_line(i) or source_line(at),
        op_name=op_name(i if i.metadata else at),
        problems=tuple(dict.fromkeys(found.problems)),
        readers=tuple(dict.fromkeys(found.readers)),
        transposed_by=tuple(dict.fromkeys(found.transposed)),
        unknown=tuple(dict.fromkeys(found.unknown)),
        doubts=tuple(dict.fromkeys(found.doubts)),
        parts=tuple(found.parts),
        instruction=i,
    )


@dataclasses.dataclass
class _Problems:
    """What is wrong with a collective: see the fields of Collective."""

    problems: list[Problem] = dataclasses.field(default_factory=list)
    parts: list[Part] = dataclasses.field(default_factory=list)
    readers: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    doubts: list[Doubt] = dataclasses.field(default_factory=list)
    transposed: list[str] = dataclasses.field(default_factory=list)


def _problems(
    i: Instruction, sent: list[Instruction], results: list[Value], around: _Sent, devices: int
) -> _Problems:
    """What is wrong with a collective among so many devices."""
    found = _Problems()
    for s, result in zip(sent, results, strict=False):
        floats = None if kind(i) in SUMS else _floats(s, around.graph)
        if floats is not None and floats > 1:
            wide = around.sent_wide(kind(i), result, s)
            found.readers += wide.readers
            found.unknown += wide.unknown
            if wide.problem:
                sizes = [_SENT[kind(i)](nbytes, devices) for nbytes in (s.shape.nbytes, floats)]
                found.problems.append(wide.problem)
                found.parts.append(Part(wide.problem, s.shape.dtype, s.shape.brief, *sizes))
            elif not (wide.readers or wide.unknown) and around.is_combined(kind(i), result):
                found.doubts.append(Doubt.COMBINED)
        elif around.is_placed(kind(i), result, s):
            found.doubts.append(Doubt.PLACED)
        elif _is_fp8(s) and kind(i) == "all-gather":
            found.transposed += around.transposed_by(result)
    if found.transposed:
        found.problems.append(Problem.TRANSPOSED)
    if kind(i) == "all-gather" and len({*sent}) < len(sent):
        found.problems.append(Problem.TWICE)
    return found


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
    if not any(name in module.text for name in (*KINDS, "send(")):
        return Collectives()
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
    """Those of these kinds, and so many bytes, that do not send FP8 alone; with kinds that move
    values, also sums that may move them.
    """
    asks_for_moves = not set(MOVES).isdisjoint(kinds)
    return [
        c
        for c in found
        if c.bytes_sent >= min_bytes
        and not c.is_fp8
        and (c.kind in kinds or (asks_for_moves and Doubt.PLACED in c.doubts))
    ]


def not_judged(
    found: Iterable[Collective], allowed: Collection[str]
) -> Iterator[tuple[Doubt, str]]:
    """What is not known of these, but for doubts that are allowed by their words; each with a
    sentence, without the full stop.
    """
    for c in found:
        for doubt in c.doubts:
            if doubt.allowed_by not in allowed:
                said = f"not known whether {c.title} has to send {c.dtype}: {doubt.advice}"
                yield doubt, said


# As text ------------------------------------------------------------------------------------------

HEADER = ("runs", "kind", "sent by each", "type", "over", "overlaps", "feeds", "source")


def _listed(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


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
        alike: dict[tuple, list[Collective]] = {}
        for c in self:
            key = (
                c.kind,
                c.dtype,
                c.shapes,
                c.axis,
                c.asynchronous,
                len(c.overlaps),
                c.where,
                c.problems,
                c.doubts,
                c.count is None,
            )
            alike.setdefault(key, []).append(c)
        groups = sorted(alike.values(), key=lambda same: -Collectives(same).bytes_sent)
        return [
            (
                same[0],
                _cells(same),
                [*(p.of(same[0].kind) for p in same[0].problems), *_doubted(same[0])],
            )
            for same in groups
        ]

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

    def _repr_html_(self) -> str:
        total = f"<p>{html.escape(self.totals())}</p>"
        if not self:
            return total
        rows = []
        for _, cells, further in self.rows():
            background = LOST if further else ""
            below = [(line, "") for line in further]
            rows.append((cells, background, below))
        return html_table(HEADER, rows) + total


def _doubted(c: Collective) -> list[str]:
    return [f"not judged: {doubt}" for doubt in c.doubts]


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
