"""What a program is, found by other means than those of `fp8lens`, whose `aot_compile` alone is
used: its matmuls by the jaxpr, its memory by XLA's plan of the buffers, its kernels by the thunks
that XLA would run, and with their bytes by the text, its types by a few regular expressions over
HLO and PTX.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fp8lens import aot_compile


class Dot(NamedTuple):
    """A matmul's sizes; [M, K] x [K, N] and its transpose are the same, so M is at most N."""

    batch: int
    m: int
    n: int
    k: int


class Memory(NamedTuple):
    """Bytes, as `jax.stages.Compiled.memory_analysis` and XLA's plan of the buffers have them."""

    arguments: int
    results: int
    aliased: int
    temporaries: int
    total: int
    peak: int


# The jaxpr ----------------------------------------------------------------------------------------


def dots(fn: Callable, *args: Any) -> dict[Dot, int | None]:
    """How often each matmul of a function runs, None where a loop's trips are not known. A product
    with K = 1 is none: it is elementwise work.
    """
    found: dict[Dot, int | None] = {}
    for eqn, runs in _equations(jax.make_jaxpr(fn)(*args).jaxpr, 1):
        if eqn.primitive.name == "dot_general":
            dot = _dot(eqn)
            known = found.get(dot, 0)
            found[dot] = None if known is None or runs is None else known + runs
    return {dot: runs for dot, runs in found.items() if dot.k > 1}


def flops(jaxpr: Any) -> int:
    """Of all matmuls, on all devices: two for each product of real numbers, eight for one of
    complex ones; a loop of unknown length counts once. A product of two vectors is no matmul, in
    whichever order.
    """
    total = 0
    for eqn, runs in _equations(jaxpr, 1):
        if eqn.primitive.name != "dot_general":
            continue
        dot = _dot(eqn)
        if dot.k > 1 and dot.m * dot.n > 1:
            is_complex = jax.numpy.iscomplexobj(eqn.outvars[0].aval)
            total += math.prod(dot) * (8 if is_complex else 2) * (runs or 1)
    return total


def _dot(eqn: Any) -> Dot:
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in eqn.invars)
    m = math.prod(s for d, s in enumerate(lhs) if d not in (*lhs_k, *lhs_batch))
    n = math.prod(s for d, s in enumerate(rhs) if d not in (*rhs_k, *rhs_batch))
    batch = math.prod(lhs[d] for d in lhs_batch)
    return Dot(batch, min(m, n), max(m, n), math.prod(lhs[d] for d in lhs_k))


def _equations(jaxpr: Any, runs: int | None) -> Iterator[tuple[Any, int | None]]:
    """Each equation of a jaxpr, and of those in it, with how often it runs; each branch once."""
    for eqn in jaxpr.eqns:
        yield eqn, runs
        inside = runs
        if eqn.primitive.name == "pallas_call":
            continue  # a kernel of its own, that HLO does not look into
        if eqn.primitive.name == "shard_map" and runs is not None:
            inside = runs * eqn.params["mesh"].size
        if eqn.primitive.name == "scan" and runs is not None:
            inside = runs * eqn.params["length"]
        if eqn.primitive.name == "while":
            inside = None
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(getattr(value, "jaxpr", value), inside)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


# What XLA writes while it compiles ----------------------------------------------------------------

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.M)
# Depth, number and kind of a thunk; or the name of that part of a loop or branch that follows.
_THUNK = re.compile(r"^( *)(?:(\d+): k(\w+)|(\w+):$)", re.M)
_HOLDS_OTHERS = {"Conditional", "AsyncStart", "AsyncDone", "DynamicSliceFusion"}
_THUNK_NAME = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_TRIPS = re.compile(r'^ *(?:ROOT )?%(\S+) = .* while\(.*"known_trip_count":\{"n":"(\d+)"', re.M)
_TYPE = re.compile(r"^ *(?:ROOT )?%(\S+) = \(?(\w+)\[", re.M)
_CALL = re.compile(r'custom-call\(%([^,]+), %([^,)]+).*target="__cublas.*$', re.M)
_ENTRY = re.compile(r"\.entry (\w+)\(")
_MULTIPLY = re.compile(r"\b(?:wgmma|mma|tcgen05)\.mma?[.\w:]*|\bmma\.sync[.\w:]*")
_PTX_TYPES = {
    "e4m3": "f8e4m3fn",
    "e5m2": "f8e5m2",
    "bf16": "bf16",
    "f16": "f16",
    "tf32": "tf32",
    "s8": "s8",
}


class Seen:
    """A function that XLA compiled, and what XLA wrote into `folder` meanwhile."""

    def __init__(self, fn: Callable, args: tuple, folder: Path, **options: Any):
        dump = {
            "xla_dump_to": str(folder),
            "xla_dump_hlo_as_text": True,
            "xla_dump_emitter_re": "^ptx$",
        }
        self.compiled = aot_compile(fn, *args, compiler_options=dump, **options)
        self.hlo = self.compiled.as_text()
        self._folder = folder

    def _read(self, ending: str) -> str:
        (path,) = self._folder.glob(f"*{ending}")
        return path.read_text()

    def memory(self) -> Memory:
        """Bytes on one device."""
        said = self.compiled.memory_analysis()
        sizes: Counter[str] = Counter()
        for size, about in _ALLOCATION.findall(self._read("optimizations-buffer-assignment.txt")):
            if "thread-local" in about:
                continue
            is_argument, is_result = "parameter" in about, "maybe-live-out" in about
            sizes["total"] += int(size)
            sizes["arguments"] += int(size) * is_argument
            sizes["results"] += int(size) * is_result
            sizes["aliased"] += int(size) * (is_argument and is_result)
            sizes["temporaries"] += int(size) * ("preallocated-temp" in about)
        assert sizes["arguments"] == said.argument_size_in_bytes
        assert sizes["temporaries"] == said.temp_size_in_bytes
        of_plan = {name: sizes[name] for name in Memory._fields[:-1]}
        return Memory(**of_plan, peak=said.peak_memory_in_bytes)

    def kernels(self) -> int:
        """What is launched: the thunks that hold no others. A loop's condition runs on the device
        only where its trips are not known, and then both count once; so does each branch.
        """
        trips = {name: int(n) for name, n in _TRIPS.findall(self.hlo)}
        names = {int(n): name for name, n in _THUNK_NAME.findall(self._read("metadata.txt"))}
        launched = 0
        within = [(-1, 1)]  # the depth of what is open, and how often what it holds runs
        loop: int | None = None  # the trips of the last loop
        for indent, number, kind, part in _THUNK.findall(self._read("thunk_sequence.txt")):
            if part == "condition":  # written without its depth, and right behind its loop
                depth, runs = within[-1]
                within.append((depth + 2, runs if loop is None else 0))
                continue
            depth = len(indent)
            while within[-1][0] >= depth:
                within.pop()
            runs = within[-1][1]
            if kind == "While":
                loop = trips.get(names[int(number)])
                within.append((depth, runs * (1 if loop is None else loop)))
            elif kind in _HOLDS_OTHERS:
                within.append((depth, runs))
            elif kind:
                launched += runs
        return launched

    def cublas_types(self) -> Counter[tuple[str, str]]:
        """The types of the two operands of each call of cuBLAS, as often as the text has it."""
        types = dict(_TYPE.findall(self.hlo))
        return Counter((types[a], types[b]) for a, b in _CALL.findall(self.hlo))

    def multiplied(self) -> dict[str, set[str]]:
        """The types of the multiply instructions of each kernel whose PTX has some, as HLO names
        them, by the kernel's name.
        """
        found: dict[str, set[str]] = {}
        for path in self._folder.glob("*.ptx"):
            text = path.read_text()
            said = " ".join(_MULTIPLY.findall(text))
            types = {hlo for ptx, hlo in _PTX_TYPES.items() if re.search(rf"\b{ptx}\b", said)}
            if said:
                found |= {name: types for name in _ENTRY.findall(text)}
        return found


# The text of a compiled module --------------------------------------------------------------------

_COMPUTATION = re.compile(r"^(?:(ENTRY) )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_NO_KERNEL = set(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "opt-barrier partition-id replica-id async-start async-done add-dependency".split()
)
_SCRATCH = re.compile(r"(?:, )?[su]8\[\d+\]\{0\}\)?$")  # a library's, last in its results
_CUTS = ("slice", "dynamic-slice", "gather")
_VIEWS = ("bitcast", "reshape", "get-tuple-element")


class Line(NamedTuple):
    """An instruction of a module's text."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    rest: str

    @property
    def updates(self) -> str:
        """The operand that it puts into its first; "" where it puts none."""
        if self.opcode == "dynamic-update-slice":
            return self.operands[1]
        return self.operands[2] if self.opcode == "scatter" and len(self.operands) == 3 else ""


Lines = dict[str, Line]  # of a computation, by their names


def launched(hlo: str) -> tuple[int, int]:
    """Kernels that a compiled module launches, and the bytes that they read and write, loops as
    often as they run.
    """
    computations: dict[str, Lines] = {}
    for text in hlo.splitlines():
        if head := _COMPUTATION.match(text):
            here = computations.setdefault(head[1] or head[2], {})
        elif found := _INSTRUCTION.match(text):
            operands = re.findall(r"%([\w.\-]+)", found[4].split(")")[0])
            here[found[1]] = Line(found[1], found[2], found[3], operands, found[4])
    kernels = moved = 0
    for name, times in _runs(computations, "ENTRY", 1):
        lines = computations[name]
        for line in lines.values():
            is_end = line.opcode in _NO_KERNEL or line.opcode.endswith("-done")
            if not is_end and '"AllocateBuffer"' not in line.rest:
                kernels += times
                moved += times * _traffic(line, lines, computations)
    return kernels, moved


def _runs(computations: dict[str, Lines], name: str, times: int) -> Iterator[tuple[str, int]]:
    """Each computation that runs by itself, and how often. XLA's runtime does not compute the
    condition of a loop whose length it knows (xla/backends/gpu/runtime/while_thunk.cc).
    """
    yield name, times
    for line in computations[name].values():
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line.rest)
        runs = times * int(trips[1]) if trips else times
        called = ""
        if line.opcode == "while":
            called = r"body" if trips else r"body|condition"
        elif line.opcode in ("call", "async-start"):
            called = r"to_apply|calls"
        elif line.opcode == "conditional":
            called = r"(?:true|false)_computation|branch_computations"
        for names in re.findall(rf"\b(?:{called})=(\{{.*?\}}|%\S+)", line.rest) if called else ():
            for inner in re.findall(r"%([\w.\-]+)", names):
                yield from _runs(computations, inner, runs)


def _traffic(line: Line, lines: Lines, computations: dict[str, Lines]) -> int:
    """The bytes that a kernel reads and writes: each operand and each result once, whole, but for a
    library's scratch space, and once what is both factors of a product; of what it only cuts out of
    an operand, or puts into one, no more than that.
    """
    read = [_nbytes(lines[operand].type) for operand in line.operands]
    written = line.type
    opcode = line.opcode.removesuffix("-start")
    if opcode != line.opcode:  # what its end gives
        ends = (other for other in lines.values() if other.opcode == f"{opcode}-done")
        written = next(other.type for other in ends if line.name in other.operands)
    elif "__cublas" in line.rest or '"te_' in line.rest:
        written = _SCRATCH.sub("", written)
    if opcode == "dynamic-update-slice":
        return 2 * read[1]
    if opcode == "scatter" and line.updates:
        return read[1] + 3 * read[2]
    if opcode in _CUTS:
        return min(read[0], _nbytes(written)) + sum(read[1:]) + _nbytes(written)
    called = re.search(r"calls=%([\w.\-]+)", line.rest)
    if opcode == "fusion" and called:
        return _traffic_of_fusion(read, computations[called[1]])
    is_product = opcode in ("dot", "scaled-dot", "custom-call")
    is_square = is_product and line.operands[:1] == line.operands[1:2]
    return sum(read[is_square:]) + _nbytes(written)


def _traffic_of_fusion(read: list[int], body: Lines) -> int:
    in_place = _in_place(body)
    total = 0
    for inner in body.values():
        if inner.opcode == "parameter":
            whole = read[int(inner.rest.split(")")[0])]
            total += int(min(whole, _used(body, inner.name, in_place)))
    is_library = any("__cublas" in line.rest for line in body.values())
    for result in _results(body):
        put = body[result]
        if result in in_place and _behind(body, in_place[result].operands[0]).opcode == "parameter":
            put = body[in_place[result].updates]
        total += _nbytes(_SCRATCH.sub("", put.type) if is_library else put.type)
    return total


def _results(body: Lines) -> list[str]:
    root = [*body.values()][-1]
    return root.operands if root.opcode == "tuple" else [root.name]


def _behind(body: Lines, name: str) -> Line:
    """What a view shows."""
    line = body[name]
    while line.opcode in _VIEWS:
        line = body[line.operands[0]]
    return line


def _in_place(body: Lines) -> Lines:
    """The updates of a part of an array that a fusion writes, by their results' names, where no
    other line reads what is updated.
    """
    found = {}
    for result in _results(body):
        names = [result]
        while body[names[-1]].opcode in _VIEWS:
            names.append(body[names[-1]].operands[0])
        # Each name is read by the one before it in this list, and the first by a tuple at most.
        readers = [sum(n in line.operands for line in body.values()) for n in names]
        if max(readers) <= 1 and body[names[-1]].updates:
            found[result] = body[names[-1]]
    return found


def _used(body: Lines, name: str, in_place: Lines) -> float:
    """The bytes that a fusion's computation needs of a value: infinitely many where of all."""
    if name == [*body][-1]:
        return math.inf
    used = 0.0
    for line in body.values():
        for position, operand in enumerate(line.operands):
            if operand != name:
                continue
            if line.opcode in _VIEWS:
                used += _used(body, line.name, in_place)
            elif line.opcode in _CUTS and position == 0:
                used += _nbytes(line.type)
            elif position > 0 or line not in in_place.values():
                used += math.inf
            elif line.opcode == "scatter":
                used += _nbytes(body[line.updates].type)
    return used


def _nbytes(type_: str) -> int:
    """Bytes of a type as HLO writes it, a tuple's elements together."""
    total = 0
    for kind, bits, dims in _ARRAY.findall(type_):
        width = 8 if kind == "pred" else int(bits)
        total += math.prod(int(d) for d in dims.split(",") if d) * width // 8
    return total
