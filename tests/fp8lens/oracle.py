"""What a program is, found by other means than those of `fp8lens`, whose `aot_compile` alone is
used: its matmuls by the jaxpr, its memory by XLA's plan of the buffers, its kernels by the thunks
that XLA would run, its types by a few regular expressions over HLO and PTX.
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


def flops(fn: Callable, *args: Any) -> int:
    """Of all matmuls: two for each product of real numbers, eight for one of complex ones; a loop
    of unknown length counts once.
    """
    total = 0
    for eqn, runs in _equations(jax.make_jaxpr(fn)(*args).jaxpr, 1):
        if eqn.primitive.name == "dot_general" and _dot(eqn).k > 1:
            is_complex = jax.numpy.iscomplexobj(eqn.outvars[0].aval)
            total += math.prod(_dot(eqn)) * (8 if is_complex else 2) * (runs or 1)
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
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)(?:,|$)", re.M)
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
# Who reads or changes parts of an array, or runs something else.
_IN_PART = re.compile(r" (?:dynamic-.*|slice|gather|scatter|while|conditional|\S+-start)\(")
_NO_KERNEL = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
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

    def moved(self) -> int | None:
        """Bytes that the kernels read and write: each operand, and each result but a library's
        workspace; None for a program that takes arrays apart, or loops.
        """
        if _IN_PART.search(self.hlo):
            return None
        sizes: dict[str, list[int]] = {}
        total = 0
        _, _, entry = self.hlo.partition("\nENTRY ")
        for name, shape, opcode, operands in _INSTRUCTION.findall(entry):
            sizes[name] = [_nbytes(*array) for array in _ARRAY.findall(shape)]
            if opcode == "custom-call" or "gemm_fusion" in name:
                sizes[name] = sizes[name][: -1 if shape.startswith("(") else None]
            if opcode not in _NO_KERNEL:
                total += sum(sizes[name])
                total += sum(sum(sizes[operand]) for operand in re.findall(r"%([^,\s]+)", operands))
        return total

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


def _nbytes(kind: str, bits: str, dims: str) -> int:
    """Of an array of HLO's."""
    width = 8 if kind == "pred" else int(bits)
    return math.prod(int(d) for d in dims.split(",") if d) * width // 8
