"""What a sharded program sends between devices: each collective, the type on the wire, its bytes,
over which axis of the mesh, whether kernels run beside it, and the matmul that it feeds. All of it
is read from one device's HLO.
"""

import dataclasses
import html
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from fp8lens.hlo.ops import CONTROL, DOTS, ELEMENTWISE
from fp8lens.hlo.origin import op_name, source_line
from fp8lens.hlo.parse import (
    Computation,
    HloModule,
    Instruction,
    Shape,
    parse_hlo_module,
    parse_shape,
    visible,
)
from fp8lens.hlo.program import executions, fused, setting
from fp8lens.hlo.replica_groups import MOST, SUMS, axis_of, device_counts, groups, numbers
from fp8lens.hlo.text import LOST, columns, html_table, wrapped
from fp8lens.hlo.text import size as _size
from fp8lens.matmul.epilogue import clamp_bounds
from fp8lens.matmul.kernels import launches
from fp8lens.matmul.operands import FP8_MAX
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
_WIDE = ("bf16", "f16", "f32", "f64")
_SENT_WIDE = {"gathered wide", "gathered wide, read wide", "dequantized, then gathered"}
_HANDED_ON = frozenset(
    "bitcast bitcast-convert reshape copy transpose slice dynamic-slice dynamic-update-slice pad "
    "concatenate gather reverse broadcast".split()
)
_CALLERS = CONTROL | {"fusion"}


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

    `problems` names the rules of fp8lens.rules.wire that it breaks. `readers`: who else
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
    problems: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    transposed_by: tuple[str, ...] = ()
    instruction: Instruction | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def is_fp8(self) -> bool:
        """Whether all that it sends is 8-bit floats."""
        return all(dtype.startswith("f8") for dtype in self.dtype.split(", "))

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

_Value = tuple[Instruction, int]  # an instruction, and which element where it gives a tuple


class _Flow:
    """Steps from a value to those that are the same, moved, converted, or computed elementwise from
    it and nothing else that is large: through tuples, fusions, loops, calls, branches, asynchronous
    pairs and collectives.
    """

    def __init__(self, module: HloModule):
        self._sources: dict[str, dict[str, frozenset[str]]] = {}
        self.callers: dict[str, list[Instruction]] = defaultdict(list)
        self._axes: dict[tuple, tuple[int, str]] = {}
        self._spare = MOST + len(module.text)  # devices that may yet be looked at
        self._near: dict[tuple, list] = {}
        for i in module:
            if i.opcode.removesuffix("-start") in _CALLERS:
                for name in i.called:
                    self.callers[name].append(i)
        # Where collectives are very many, what is far from one is not looked at: the time is to
        # grow with the text.
        self._far = max(16, len(module.text) // max(1, 3 * sum(map(bool, map(kind, module)))))

    def axis(self, i: Instruction, mesh_shape: Mapping[str, int] | None) -> tuple[int, str]:
        """How many devices take part together, and along which axes of the mesh."""
        key = (
            i.opcode,
            *map(
                i.attributes.get,
                ("replica_groups", "device_ids", "source_target_pairs", "channel_id"),
            ),
        )
        if key not in self._axes:
            together = groups(i)
            self._spare -= sum(map(len, together))
            if self._spare < 0:
                raise i.error("the collectives name more devices than a program's")
            self._axes[key] = axis_of(i, together, mesh_shape)
        return self._axes[key]

    def _large(self, computation: Computation) -> dict[str, frozenset[str]]:
        """Of each instruction, the arrays that it is computed from elementwise, scalars and
        broadcast vectors not counted.
        """
        if computation.name in self._sources:
            return self._sources[computation.name]
        self._sources[computation.name] = found = {}
        for i in computation:
            sources = frozenset().union(*(found.get(name, ()) for name in i.operands))
            if (
                i.opcode == "broadcast"
                and computation[i.operands[0]].shape.size < i.shape.size
                or i.opcode == "iota"
            ):
                sources = frozenset()
            elif i.opcode not in ELEMENTWISE | _HANDED_ON:
                sources = (
                    frozenset((i.name,))
                    if i.opcode != "constant" and i.shape.size > 1
                    else frozenset()
                )
            found[i.name] = sources
        return found

    def _passes(self, i: Instruction, n: int) -> bool:
        """Whether the instruction hands on its operand n."""
        large = self._large(i.computation)
        if i.opcode in _HANDED_ON:
            return (
                n == 0 or i.opcode == "concatenate" or i.opcode == "dynamic-update-slice" and n == 1
            )
        return i.opcode in ELEMENTWISE and len(large[i.name]) == 1 and bool(large[i.operands[n]])

    def _called(self, i: Instruction, n: int) -> list[Instruction]:
        """The parameters that get operand n of a call, loop, branch or fusion."""
        computations = [i.computation.module.computations[name] for name in i.called]
        if i.opcode == "conditional":
            return [*computations[n - 1].parameters] if n else []
        return [c.parameters[n] for c in computations if n < len(c.parameters)]

    def after(self, value: _Value) -> Iterator[tuple[Instruction, int | None]]:
        """Who reads a value: the values that follow, and (reader, None) for a reader that does not
        hand it on.
        """
        i, k = value
        for user in i.computation.users.get(i.name, ()):
            for n in (n for n, name in enumerate(user.operands) if name == i.name):
                if user.opcode == "get-tuple-element":
                    yield from [(user, 0)] * (user.element == k)
                elif user.opcode == "tuple":
                    yield user, n
                elif user.opcode.endswith(("-done", "-update")) or user.opcode == "opt-barrier":
                    yield user, k
                elif user.opcode.removesuffix("-start") in _CALLERS:
                    yield from ((parameter, k) for parameter in self._called(user, n))
                elif kind(user) or is_matmul(user):
                    yield user, n
                else:
                    yield user, 0 if self._passes(user, n) else None
        if i.is_root:
            for caller in self.callers.get(i.computation.name, ()):
                if i.computation in self._results(caller):
                    yield caller, k
                    yield from (
                        (parameter, k)
                        for parameter in self._called(caller, 0)
                        if caller.opcode == "while"
                    )
            if i.computation.is_entry:
                yield i, None

    def before(self, value: _Value) -> Iterator[_Value]:
        """What a value is made of."""
        i, k = value
        get = i.computation.__getitem__
        if i.opcode == "parameter":
            for caller in self.callers.get(i.computation.name, ()):
                branch = caller.opcode == "conditional"
                n = caller.called.index(i.computation.name) + 1 if branch else i.parameter_number
                yield caller.computation[caller.operands[n]], k
                yield from ((c.root, k) for c in self._results(caller) if caller.opcode == "while")
        elif i.opcode == "get-tuple-element":
            yield get(i.operands[0]), i.element
        elif i.opcode.removesuffix("-start") in _CALLERS:
            yield from ((c.root, k) for c in self._results(i))
        elif i.opcode.endswith(("-done", "-update")) or i.opcode == "opt-barrier":
            yield get(i.operands[0]), k
        elif i.opcode == "tuple" or kind(i):
            yield get(i.operands[min(k, len(i.operands) - 1)]), 0
        elif not is_matmul(i):
            yield from ((get(name), 0) for n, name in enumerate(i.operands) if self._passes(i, n))

    def _results(self, i: Instruction) -> list[Computation]:
        """The computations whose roots are what an instruction gives."""
        return [
            i.computation.module.computations[name]
            for name in i.called
            if i.opcode != "while" or name == i.callee("body")
        ]

    def walk(
        self, start: Iterable[_Value], step: Callable, stop: Callable
    ) -> dict[_Value, _Value | None]:
        """Every value that is reached, nearest first, with the one before it; nothing beyond where
        `stop` is true.
        """
        reached: dict[_Value, _Value | None] = dict.fromkeys(start)
        todo = list(reached)
        for value in todo:
            if value[1] is None or len(todo) > self._far or stop(value[0]):
                continue
            if (step, value) not in self._near:
                self._near[step, value] = list(step(value))
            for following in self._near[step, value]:
                if following not in reached:
                    reached[following] = value
                    todo.append(following)
        return reached

    def nearest(
        self, collective: Instruction, start: list[_Value], step: Callable, wanted: Callable
    ) -> list[Instruction]:
        """The kernels of the matmuls that are reached; through further collectives only where there
        is none before.
        """
        for stop in (lambda i: is_matmul(i) or bool(kind(i)) and i is not collective, is_matmul):
            if found := [
                *dict.fromkeys(self.kernel(v[0]) for v in self.walk(start, step, stop) if wanted(v))
            ]:
                return found
        return []

    def sent_wide(self, result: _Value, sent: Instruction) -> tuple[str, list[str]]:
        """The rule that a collective breaks which sends a wide type, or "", and who else reads its
        result so.
        """
        ends = lambda i: _was_fp8(i) or is_matmul(i)
        if any(_was_fp8(i) for i, _ in self.walk([(sent, 0)], self.before, ends)):
            return "dequantized, then gathered", []
        wide = self.walk([result], self.after, lambda i: _is_fp8(i) or is_matmul(i))
        narrow = self.walk([v for v in wide if _is_fp8(v[0])], self.after, is_matmul)
        if not any(_reads_as_matrix(v) and _multiplies_fp8(self.kernel(v[0])) for v in narrow):
            return "", []
        others = [i for i, k in wide if k is None and not _is_amax(i) or is_matmul(i)]
        names = [
            (
                self.kernel(i).name
                if not (i.computation.is_entry and i.is_root)
                else "the program's result"
            )
            for i in others
        ]
        return "gathered wide, read wide" if names else "gathered wide", names

    def kernel(self, i: Instruction) -> Instruction:
        """The instruction that launches what computes `i`."""
        for _ in self.callers:  # no more often: what ENTRY does not reach may call itself
            if not (callers := self.callers.get(i.computation.name)) or not callers[
                0
            ].opcode.startswith("fusion"):
                break
            i = callers[0]
        return i


def kind(i: Instruction) -> str:
    """The kind of a collective, "" of any other instruction."""
    name = i.opcode.removesuffix("-start")
    return name if name in _SENT else ""


def is_matmul(i: Instruction) -> bool:
    return i.opcode in DOTS or i.opcode.startswith("custom-call") and bool(matmuls(i))


def _reads_as_matrix(value: _Value) -> bool:
    """Whether a matmul multiplies operand k: the rest are scales, a bias, a matrix to add."""
    i, k = value
    attention = "fmha" in (i.custom_call_target or "")
    return k is not None and is_matmul(i) and k < 2 + attention


def _is_fp8(i: Instruction) -> bool:
    return i.shape.dtype.startswith("f8") and i.shape.size > 1


def _multiplies_fp8(kernel: Instruction) -> bool:
    return any(row.is_fp8 for row in matmuls(kernel))


def _transposes(i: Instruction) -> bool:
    """Whether a transpose or copy changes the order in memory."""

    def order(shape: Shape) -> list[int]:  # from minor to major
        n = len(shape.dims)
        return (
            numbers(shape.layout.partition(":")[0])
            if shape.layout is not None
            else [*reversed(range(n))]
        )

    if i.opcode not in ("transpose", "copy") or i.shape.is_tuple:
        return False
    before = i.computation[i.operands[0]].shape
    moved = (
        numbers(i.attributes["dimensions"])
        if i.opcode == "transpose"
        else [*range(len(before.dims))]
    )
    long = [d for d in order(before) if before.dims[d] > 1]
    return [moved[d] for d in order(i.shape) if i.shape.dims[d] > 1] != long


def _is_amax(i: Instruction) -> bool:
    """A maximum of gathered values is that of the parts' maxima: it needs no wide array."""
    root = i.computation.module.computations[i.called[0]].root if i.opcode == "reduce" else None
    return root is not None and root.opcode in ("maximum", "minimum")


def _was_fp8(i: Instruction) -> bool:
    """FP8, or clamped to the range of it: where nothing reads the FP8 array itself, XLA turns f32
    to FP8 to bf16 into f32 to bf16 (its simplify-fp-conversions), and the clamp is what remains of
    the quantization.
    """
    return (
        _is_fp8(i)
        or i.opcode == "clamp"
        and clamp_bounds(i) in [[f"-{best}", best] for best in FP8_MAX.values()]
    )


# Collectives --------------------------------------------------------------------------------------


def _within(at: Instruction) -> list[Instruction]:
    """The collectives that an instruction runs: itself, or what an asynchronous start or a fusion
    wraps.
    """
    if kind(at):
        return [at]
    if at.opcode not in ("async-start", "fusion", "fusion-start"):
        return []
    inside = (
        [fused(at)]
        if at.opcode != "async-start"
        else [at.computation.module.computations[n] for n in at.called]
    )
    return [i for computation in inside for j in computation for i in _within(j)]


def _beside(start: Instruction) -> tuple[str, ...]:
    """Kernels and loops that are scheduled between the start of something asynchronous and its end."""
    users, end = start.computation.users, start
    while end is not None and not end.opcode.endswith("-done"):
        end = next(
            (u for u in users.get(end.name, ()) if u.opcode.endswith(("-done", "-update"))), None
        )
    if end is None or start.computation.module.attributes.get("is_scheduled") != "true":
        return ()
    return tuple(
        i.name
        for i in start.computation.instructions[start.index + 1 : end.index]
        if (launches(i) or i.opcode in CONTROL) and not _within(i)
    )


def _collective(
    at: Instruction,
    i: Instruction,
    flow: _Flow,
    mesh_shape: Mapping[str, int] | None,
    count: int | None,
) -> Collective:
    sent = [
        i.computation[name]
        for name in (i.operands[:1] if kind(i) == "ragged-all-to-all" else i.operands)
    ]
    size, axis = flow.axis(i, mesh_shape)
    reached = flow.walk([(i, n) for n in range(len(sent))], flow.after, is_matmul)
    feeds = flow.nearest(i, [(i, n) for n in range(len(sent))], flow.after, _reads_as_matrix)
    fed_by = flow.nearest(i, [(s, 0) for s in sent], flow.before, lambda value: is_matmul(value[0]))
    problems, readers, transposed = [], [], []
    for n, s in enumerate(sent):
        if s.shape.dtype in _WIDE and s.shape.size > 1 and kind(i) not in SUMS:
            rule, others = flow.sent_wide((i, n), s)
            problems += [rule] * bool(rule)
            readers += others
        elif _is_fp8(s) and kind(i) == "all-gather":
            for value in flow.walk([(i, n)], flow.after, is_matmul):
                if _reads_as_matrix(value) and _multiplies_fp8(flow.kernel(value[0])):
                    while (value := reached[value]) is not None:
                        transposed += [flow.kernel(value[0]).name] if _transposes(value[0]) else []
    problems += ["transposed after gathering"] * bool(transposed)
    problems += ["gathered twice"] * (kind(i) == "all-gather" and len({*sent}) < len(sent))
    asynchronous = at.opcode.endswith("-start") and not (_waits(at) or _waits(i))
    return Collective(
        at.name,
        kind(i),
        ", ".join(dict.fromkeys(s.shape.dtype for s in sent)),
        tuple(s.shape.brief for s in sent),
        sum(_SENT[kind(i)](s.shape.nbytes, size) for s in sent),
        size,
        axis,
        asynchronous,
        _beside(at) if asynchronous else (),
        tuple(k.name for k in feeds),
        tuple(k.name for k in fed_by),
        any(map(_multiplies_fp8, feeds)),
        count,
        source_line(i) or source_line(at),
        op_name(i if i.metadata else at),
        tuple(dict.fromkeys(problems)),
        tuple(dict.fromkeys(readers)),
        tuple(dict.fromkeys(transposed)),
        i,
    )


def _waits(i: Instruction) -> bool:
    """Whether XLA noted that nothing runs beside a collective: its start is its end."""
    return (
        setting(i, "is_sync") is True or setting(i, "collective_backend_config", "is_sync") is True
    )


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
    if mesh_shape is not None and prod(mesh_shape.values()) != (
        devices := prod(device_counts(module))
    ):
        raise ValueError(
            f"mesh_shape has {prod(mesh_shape.values())} devices, {dict(mesh_shape)}; the program"
            f" {devices}."
        )
    flow, found = _Flow(module), []
    wrapped = {name for i in module if i.opcode == "async-start" for name in i.called}
    for name, count in executions(module).items():
        for at in module.computations[name] if name not in wrapped else ():
            try:
                found += [_collective(at, i, flow, mesh_shape, count) for i in _within(at)]
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
    return [
        c
        for c in found
        if c.kind in kinds
        and c.bytes_sent >= min_bytes
        and not c.is_fp8
        and ({*c.problems} & _SENT_WIDE or c.is_summed_wide)
    ]


# As text ------------------------------------------------------------------------------------------

_HEADER = ("runs", "kind", "sent by each", "type", "over", "overlaps", "feeds", "source")


def _listed(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


class Collectives(tuple[Collective, ...]):
    """The collectives of a program, in its order. Prints as a table, those that send most first."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave each device, loops as often as they run where that is known and else
        once.
        """
        return sum(c.bytes_sent * (1 if c.count is None else c.count) for c in self)

    def _rows(self) -> list[tuple[Collective, tuple[str, ...], list[str]]]:
        """(collective, cells, further lines), those alike in all but their names taken together."""
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
            )
            alike.setdefault((*key, c.count is None), []).append(c)
        rows = []
        for same in alike.values():
            c, counts = same[0], [c.count for c in same]
            total = c.bytes_sent * sum(1 if n is None else n for n in counts)
            beside = (
                f"{len(c.overlaps)} kernel{'s' * (len(c.overlaps) != 1)}"
                if c.asynchronous
                else "sync"
            )
            feeds = dict.fromkeys(name for other in same for name in other.feeds)
            cells = (
                "?" if None in counts else str(sum(counts)),
                c.kind,
                _size(c.bytes_sent),
                c.dtype,
                visible(c.axis),
                beside,
                next(iter(feeds), "") + f" +{len(feeds) - 1}" * (len(feeds) > 1),
                visible(c.source),
            )
            rows.append((total, c, cells, [*c.problems]))
        return [row[1:] for row in sorted(rows, key=lambda row: -row[0])]

    def _totals(self) -> str:
        runs = lambda cs: Collectives(cs).bytes_sent
        text = (
            f"{len(self)} collective{'s' * (len(self) != 1)},"
            f" {sum(c.asynchronous for c in self)} asynchronous; "
        )
        text += f"{_size(self.bytes_sent)} sent by each device"
        types = {
            dtype: runs(c for c in self if c.dtype == dtype)
            for dtype in dict.fromkeys(c.dtype for c in self)
        }
        text += f" ({', '.join(f'{_size(n)} in {dtype}' for dtype, n in sorted(types.items(), key=lambda t: -t[1]))})"
        return text + "; loops of unknown length counted once" * any(c.count is None for c in self)

    def __str__(self) -> str:
        if not self:
            return "no collectives"
        rows = [(None, _HEADER, []), *self._rows()]
        shown = [
            n for n in range(len(_HEADER)) if n or any(cells[0] != "1" for _, cells, _ in rows[1:])
        ]
        may_go = map(_HEADER.index, ("source", "feeds"))  # each to a line of its own
        lines, left_out = columns([cells for _, cells, _ in rows], shown, (0, 2), may_go)
        text = []
        for line, (c, cells, further) in zip(lines, rows):
            text.append(line)
            hidden = [
                f"{'at' if _HEADER[n] == 'source' else _HEADER[n]} {cells[n]}"
                for n in left_out
                if c and cells[n]
            ]
            for line in [", ".join(hidden)] * bool(hidden) + further:
                text += [f"    {part}" for part in wrapped(line, 0, 2)]
        return "\n".join([*text, *wrapped(self._totals(), 0, 2)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (cells, LOST * bool(further), [(line, "") for line in further])
            for _, cells, further in self._rows()
        ]
        return html_table(_HEADER, rows) * bool(self) + f"<p>{html.escape(self._totals())}</p>"
