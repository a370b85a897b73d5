"""What a sharded program sends between devices: each collective, the type on the wire, its bytes,
over which axis of the mesh, whether kernels run beside it, and the matmul that it feeds. All of it
is read from one device's HLO.
"""

import dataclasses
import enum
import html
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from fp8lens.formats import CUBLASLT, is_fp8
from fp8lens.hlo.dataflow import Graph, Value
from fp8lens.hlo.ops import CONTROL, DOTS
from fp8lens.hlo.origin import op_name, source_line
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module, parse_shape, visible
from fp8lens.hlo.program import executions, fusion_body, setting
from fp8lens.hlo.replica_groups import MOST, SUMS, axis_of, device_counts, groups
from fp8lens.hlo.text import LOST, columns, counted, html_table, wrapped
from fp8lens.hlo.text import size as _size
from fp8lens.hlo.values import changes_layout, reducer
from fp8lens.matmul.kernels import launches
from fp8lens.matmul.roles import clamp_bounds
from fp8lens.matmul.rows import matmuls

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
MOVES = tuple(kind for kind in KINDS if kind not in ("all-reduce", "reduce-scatter"))  # add nothing
_WIDE = ("bf16", "f16", "f32", "f64")


class Problem(enum.StrEnum):
    """What a collective sends that it would not have to, or what is done after it for its sake: of
    each, a rule of fp8lens.rules.wire tells.
    """

    GATHERED_WIDE = "gathered wide"
    READ_WIDE = "gathered wide, read wide"  # by others besides
    DEQUANTIZED = "dequantized, then gathered"
    TWICE = "gathered twice"
    TRANSPOSED = "transposed after gathering"


_SENT_WIDE = {Problem.GATHERED_WIDE, Problem.READ_WIDE, Problem.DEQUANTIZED}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one device's program.

    `kind` is one of KINDS. `dtype` is the type on the wire, named as in HLO; of several arrays sent
    at once, the distinct types, with commas; `shapes` are those that each device gives.
    `bytes_sent`: bytes that leave each device in one run, as nccl-tests counts them for its bus
    bandwidth: (n-1) times the operand for an all-gather, (n-1)/n of it for reduce-scatter and
    all-to-all, twice that for an all-reduce, all of it for a permute, of each device that sends,
    and for a broadcast, of the root; of a ragged-all-to-all, whose sizes are data, all of it, the
    most there can be. A switch that adds or copies (NVLink SHARP) makes an all-reduce less.

    `group_size`: how many devices take part together. `axis`: the mesh's axes, as "data" or "data,
    model"; where groups are no whole axes or their names are not known, as "4 of 8", with the
    distance of two neighbours where it is not 1: "2 of 8, stride 4". `asynchronous`: it is started,
    and waited for later; then `overlaps` names the kernels (and loops) that the schedule has
    between the two; none where it ends in another computation.

    `feeds` and `fed_by`: the nearest matmuls that read what it gives, and that made what it sends:
    past views, moves, conversions, elementwise operations with no other large array, further
    collectives, and through loops. Matmuls that XLA spelled out as products and sums are not seen.
    `count`: how often it runs; None where that is not known.

    `problems`: what it sends that it would not have to. `readers`: who else
    reads it in its wide type. `transposed_by`: kernels that transpose the whole of a gathered FP8
    array before an FP8 matmul reads it.
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
    instruction: Instruction | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def is_fp8(self) -> bool:
        """Whether all that it sends is 8-bit floats."""
        return all(is_fp8(dtype) for dtype in self.dtype.split(", "))

    @property
    def is_summed_wide(self) -> bool:
        """Whether it is a sum that is then quantized for an FP8 matmul."""
        return self.kind == "all-reduce" and self.feeds_fp8 and not self.is_fp8

    @property
    def in_words(self) -> dict[str, str]:
        """What sentences about it name: its type, its sizes, who reads it."""
        narrow = (parse_shape(text).size for text in self.shapes)
        return {
            "dtype": self.dtype,
            "kind": self.kind,
            "shapes": _listed(self.shapes),
            "feeds": _listed(self.feeds),
            "readers": _listed(self.readers),
            "kernels": _listed(self.transposed_by),
            "sent": _size(self.bytes_sent),
            "would": _size(sum(_SENT[self.kind](n, self.group_size) for n in narrow)),
        }


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
        self.graph = Graph(module, is_matmul, max(16, len(module.text) // max(1, 3 * count)))

    def axis(self, i: Instruction) -> tuple[int, str]:
        """How many devices take part together, and along which axes of the mesh."""
        names = ("replica_groups", "device_ids", "source_target_pairs", "channel_id")
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
        return self._nearest(collective, results, self.graph.after, _reads_as_matrix)

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
            return is_matmul(i) or (bool(kind(i)) and i is not collective)

        for stop in (at_the_next, is_matmul):
            reached = self.graph.walk(start, step, stop)
            kernels = [self.graph.launcher(v.instruction) for v in reached if wanted(v)]
            if kernels:
                return [*dict.fromkeys(kernels)]
        return []

    def sent_wide(self, result: Value, sent: Instruction) -> tuple[Problem | None, list[str]]:
        """What is wrong with a collective that sends a wide type, if anything, and who else reads
        its result so.
        """
        graph = self.graph
        behind = graph.walk([Value(sent, 0)], graph.before, lambda i: _was_fp8(i) or is_matmul(i))
        if any(_is_fp8(value.instruction) for value in behind):
            return Problem.DEQUANTIZED, []
        wide = graph.walk([result], graph.after, lambda i: _is_fp8(i) or is_matmul(i))
        quantized = [value for value in wide if _is_fp8(value.instruction)]
        narrow = graph.walk(quantized, graph.after, is_matmul)
        if not any(map(self.is_fp8_operand, narrow)):
            # A clamp alone remains of a quantization whose FP8 array nothing reads. Where the
            # conversion to FP8 is behind the collective, the clamp is that quantization's own.
            was_fp8 = any(_was_fp8(value.instruction) for value in behind)
            return (Problem.DEQUANTIZED if was_fp8 else None), []
        names = []
        for i, element in wide:
            if (element is None and not _is_amax(i)) or is_matmul(i):
                is_result = i.computation.is_entry and i.is_root
                names.append("the program's result" if is_result else graph.launcher(i).name)
        return Problem.READ_WIDE if names else Problem.GATHERED_WIDE, names

    def transposed_by(self, gathered: Value) -> list[str]:
        """The kernels that transpose a gathered FP8 array before an FP8 matmul reads it."""
        reached = self.graph.walk([gathered], self.graph.after, is_matmul)
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
        """Whether a matmul in FP8 multiplies a value."""
        return _reads_as_matrix(value) and _multiplies_fp8(self.graph.launcher(value.instruction))


def kind(i: Instruction) -> str:
    """The kind of a collective, "" of any other instruction."""
    name = i.opcode.removesuffix("-start")
    return name if name in _SENT else ""


def is_matmul(i: Instruction) -> bool:
    """Whether an instruction is a dot, or calls a library's matmul."""
    return i.opcode in DOTS or (i.opcode.startswith("custom-call") and bool(matmuls(i)))


def _reads_as_matrix(value: Value) -> bool:
    """Whether a matmul multiplies a value: its further operands are scales, a bias, a matrix to
    add.
    """
    i, index = value
    matrices = 3 if "fmha" in (i.custom_call_target or "") else 2
    return index is not None and is_matmul(i) and index < matrices


def _is_fp8(i: Instruction) -> bool:
    return is_fp8(i.shape.dtype) and i.shape.size > 1


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
    # A ragged-all-to-all's further operands say where its parts begin, and how long they are.
    names = i.operands[:1] if kind(i) == "ragged-all-to-all" else i.operands
    sent = [i.computation[name] for name in names]
    size, axis = around.axis(i)
    feeds = around.feeds(i, [Value(i, n) for n in range(len(sent))])
    fed_by = around.fed_by(i, [Value(s, 0) for s in sent])
    problems, readers, transposed = _problems(i, sent, around)
    asynchronous = at.opcode.endswith("-start") and not (_waits(at) or _waits(i))
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
        feeds_fp8=any(map(_multiplies_fp8, feeds)),
        count=count,
        source=source_line(i) or source_line(at),
        op_name=op_name(i if i.metadata else at),
        problems=tuple(dict.fromkeys(problems)),
        readers=tuple(dict.fromkeys(readers)),
        transposed_by=tuple(dict.fromkeys(transposed)),
        instruction=i,
    )


def _problems(
    i: Instruction, sent: list[Instruction], around: _Sent
) -> tuple[list[Problem], list[str], list[str]]:
    """What is wrong with a collective, who else reads its result in a wide type, and the kernels
    that transpose it.
    """
    problems, readers, transposed = [], [], []
    for n, s in enumerate(sent):
        if s.shape.dtype in _WIDE and s.shape.size > 1 and kind(i) not in SUMS:
            rule, others = around.sent_wide(Value(i, n), s)
            if rule:
                problems.append(rule)
            readers += others
        elif _is_fp8(s) and kind(i) == "all-gather":
            transposed += around.transposed_by(Value(i, n))
    if transposed:
        problems.append(Problem.TRANSPOSED)
    if kind(i) == "all-gather" and len({*sent}) < len(sent):
        problems.append(Problem.TWICE)
    return problems, readers, transposed


def _waits(i: Instruction) -> bool:
    """Whether XLA noted that nothing runs beside a collective: its start is its end."""
    keys = (("is_sync",), ("collective_backend_config", "is_sync"))
    return any(setting(i, *key) is True for key in keys)


def collectives(x: Any, mesh_shape: Mapping[str, int] | None = None) -> "Collectives":
    """Every collective of a program, as one device runs it, ENTRY's first.

    `x` is what `parse_hlo_module` takes; a GPU's optimized HLO, for `overlaps` and types to be what
    runs. `mesh_shape` gives the mesh's axes, as in {"data": 2, "model": 4}: devices are numbered
    along the last first, as JAX numbers those of a mesh. Raises ValueError where it has another
    number of devices than the program; HloParseError for text that is not HLO. Sends and receives
    that XLA made of a permute for its pipelines are not counted.
    """
    module = parse_hlo_module(x)
    if not any(name in module.text for name in KINDS):
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


def sends_wide(
    found: Iterable[Collective], kinds: Collection[str] = KINDS, min_bytes: int = 0
) -> list[Collective]:
    """Those of these kinds, and so many bytes, that could have sent FP8 for an FP8 matmul, or sent
    what was FP8.
    """
    asked = [c for c in found if c.kind in kinds and c.bytes_sent >= min_bytes and not c.is_fp8]
    return [c for c in asked if not _SENT_WIDE.isdisjoint(c.problems) or c.is_summed_wide]


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
                c.source,
                c.problems,
                c.count is None,
            )
            alike.setdefault(key, []).append(c)
        groups = sorted(alike.values(), key=lambda same: -Collectives(same).bytes_sent)
        return [(same[0], _cells(same), [*same[0].problems]) for same in groups]

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
        visible(c.source),
    )


def _labelled(column: int, cell: str) -> str:
    """A cell on a line of its own."""
    name = HEADER[column]
    return f"at {cell}" if name == "source" else f"{name} {cell}"
