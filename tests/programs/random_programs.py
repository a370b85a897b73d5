"""Random programs with FP8 matmuls, and what a compiled module launches: both known without the
inspector.

A layer is a choice of operands, of what is done with the result, and of where it stands: in a loop,
in a branch, under vmap. `program(seed)` draws layers and puts them in a row, over eight devices or
in a gradient.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from helpers.numerics.recipes import scaled_dot, to_e4m3

e4m3, e5m2, f32, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16


# Layers -----------------------------------------------------------------------------------------


def wide(q, scale):
    return q.astype(bf16) * scale.astype(bf16)


# Of a layer's arguments, the product; XLA multiplies in FP8 ...
IN_FP8 = {
    "scaled": lambda g: scaled_dot(g.a, g.w, g.x, g.y),
    "scaled, in bf16": lambda g: scaled_dot(g.a, g.w, g.x, g.y, bf16),
    "E5M2 left": lambda g: scaled_dot(g.a5, g.w, g.x, g.y, bf16),
    "E5M2 right": lambda g: scaled_dot(g.a, g.w5, g.x, g.y),
    "no scales": lambda g: lax.dot(g.a, g.w.T, preferred_element_type=f32),
    "one scale": lambda g: lax.dot(wide(g.a, g.x), g.w.astype(bf16).T),
    "quantized here": lambda g: scaled_dot(to_e4m3(g.a16, g.x), g.w, g.x, g.y, bf16),
    "masked": lambda g: scaled_dot(jnp.where(g.a16 > 0, g.a, 0).astype(e4m3), g.w, g.x, g.y),
    "transposed": lambda g: scaled_dot(g.a, g.wt.T, g.x, g.y, bf16),
}
# ... and does not.
IN_MORE = {
    "not quantized": lambda g: lax.dot(g.a16, g.w16.T),
    "weight not quantized": lambda g: lax.dot(wide(g.a, g.x), g.w16.T),
    "both E5M2": lambda g: scaled_dot(g.a5, g.w5, g.x, g.y, bf16),
    "scale per row": lambda g: lax.dot(wide(g.a, g.rows), wide(g.w, g.y).T),
    "negated": lambda g: lax.dot(wide(g.a, g.x), -wide(g.w, g.y).T),
    "joined": lambda g: lax.dot(
        wide(g.a, g.x), jnp.concatenate([wide(g.w[:32], g.x), wide(g.w[32:], g.y)]).T
    ),
}
# Of the product and the layer's arguments, what the layer returns.
ENDS = {
    "": lambda h, g: h,
    "relu": lambda h, g: jax.nn.relu(h),
    "bias, gelu": lambda h, g: jax.nn.gelu(h + g.bias.astype(h.dtype)),
    "matrix": lambda h, g: h + g.matrix.astype(h.dtype),
    "silu": lambda h, g: jax.nn.silu(h),
    "rows": lambda h, g: h * g.rows.astype(h.dtype),
    "heads": lambda h, g: h.reshape(h.shape[0], 2, -1).transpose(1, 0, 2),
    "softmax": lambda h, g: jax.nn.softmax(h),
    "sums": lambda h, g: (h, h.sum(0)),
    "E4M3": lambda h, g: to_e4m3(h, g.z),
    "E4M3, amax": lambda h, g: (to_e4m3(h, g.z), jnp.max(jnp.abs(h)).astype(f32)),
    "relu, E4M3": lambda h, g: to_e4m3(jax.nn.relu(h), g.z),
    "no clamp": lambda h, g: (h * g.z.astype(h.dtype)).astype(e4m3),
}
# How often what stands there runs, and in which arguments each run has an element of its own.
INSIDE = {
    "": (1, ()),
    "jit": (1, ()),
    "checkpoint": (1, ()),
    "branch": (1, ()),
    "vmap": (2, ("a", "w")),
    "map": (2, ("a", "w")),
    "carry": (3, ("w",)),
}


@dataclass(frozen=True)
class Layer:
    """One matmul, M x N x K on each device, and how it is written."""

    operands: str
    end: str
    inside: str
    m: int
    n: int
    k: int

    @property
    def runs(self) -> int:
        return INSIDE[self.inside][0]

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.runs

    def arguments(self, devices: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of all that a layer may take; rows are divided over devices."""
        m, n, k = self.m * devices, self.n, self.k
        sizes = {
            "a": (e4m3, m, k),
            "a5": (e5m2, m, k),
            "a16": (bf16, m, k),
            "w": (e4m3, n, k),
            "w5": (e5m2, n, k),
            "w16": (bf16, n, k),
            "wt": (e4m3, k, n),
            "x": (f32,),
            "y": (f32,),
            "z": (f32,),
            "rows": (f32, m, 1),
            "bias": (bf16, n),
            "matrix": (bf16, m, n),
        }
        runs, each = INSIDE[self.inside]
        return {
            name: jax.ShapeDtypeStruct((runs, *dims) if name in each else dims, dtype)
            for name, (dtype, *dims) in sizes.items()
        }

    def once(self, given: dict[str, jax.Array]) -> Any:
        g = SimpleNamespace(**given)
        return ENDS[self.end]((IN_FP8 | IN_MORE)[self.operands](g), g)

    def __call__(self, given: dict[str, jax.Array]) -> Any:
        each = {name: given[name] for name in INSIDE[self.inside][1]}
        match self.inside:
            case "jit":
                return jax.jit(self.once)(given)
            case "checkpoint":
                return jax.checkpoint(self.once)(given)
            case "branch":
                zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(self.once, given))
                return lax.cond(given["x"] > 0, lambda: self.once(given), lambda: zeros)
            case "vmap":
                return jax.vmap(lambda each: self.once(given | each))(each)
            case "map":
                return lax.scan(lambda _, each: (None, self.once(given | each)), None, each)[1]
            case "carry":
                return lax.scan(
                    lambda a, each: (self.once(given | each | {"a": a}), None), given["a"], each
                )[0]
        return self.once(given)


# Programs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Layers, side by side or each multiplying the FP8 result of the one before; over eight
    devices; the gradient of all results by what is not FP8.
    """

    seed: int
    layers: tuple[Layer, ...]
    devices: int
    gradient: bool

    @property
    def args(self) -> tuple:
        return ([layer.arguments(self.devices) for layer in self.layers],)

    @property
    def options(self) -> dict[str, Any]:
        if self.devices == 1:
            return {}
        divided = ("a", "a5", "a16", "rows", "matrix")
        specs = [
            {name: P("x") if name in divided else P() for name in given} for given in self.args[0]
        ]
        return {"mesh_shape": {"x": self.devices}, "in_specs": (specs,)}

    def fn(self, given: list[dict[str, jax.Array]]) -> Any:
        if not self.gradient:
            return self.results(given)
        learnt = [{name: of[name] for name in ("x", "bias", "matrix", "a16")} for of in given]

        def total(learnt):
            whole = [of | new for of, new in zip(given, learnt, strict=True)]
            leaves = jax.tree.leaves(self.results(whole))
            return sum(jnp.sum(jnp.cos(leaf.astype(f32))) for leaf in leaves)

        return jax.value_and_grad(total)(learnt)

    def results(self, given: list[dict[str, jax.Array]]) -> list:
        found: list[Any] = []
        before = None
        for layer, its in zip(self.layers, given, strict=True):
            if before is not None and before.shape == its["a"].shape and before.dtype == e4m3:
                its = its | {"a": before}
            found.append(layer(its))
            before = jax.tree.leaves(found[-1])[0]
        return found


def program(seed: int) -> Program:
    """A program, always the same for a seed."""
    r = random.Random(seed)
    gradient = r.random() < 0.2
    devices = 8 if not gradient and r.random() < 0.2 else 1
    m = r.choice((32, 64, 96))
    layers = []
    k = r.choice((32, 64, 128))
    for _ in range(r.choice((1, 2, 3, 4))):
        operands = r.choice([*IN_FP8] * 2 + [*IN_MORE])
        inside = "" if gradient or devices > 1 or r.random() < 0.5 else r.choice([*INSIDE])
        n, end = r.choice((64, 96, 128)), r.choice([*ENDS])
        if inside == "carry":
            n, operands, end = k, r.choice(("scaled", "no scales", "one scale")), "relu, E4M3"
        layers.append(Layer(operands, end, inside, m, n, k))
        k = n
    return Program(seed, tuple(layers), devices, gradient)


# A compiled module, by a few regular expressions ------------------------------------------------

_LINE = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f8e8m0fnu": 1,
    "f8e4m3fnuz": 1,
    "f8e5m2fnuz": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
    "u64": 8,
}
_NOTHING = set(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "opt-barrier "
    "partition-id replica-id async-start async-done add-dependency".split()
)


class Line(NamedTuple):
    """An instruction of a module's text."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    rest: str

    def has(self, pattern: str) -> str:
        found = re.search(pattern, self.rest)
        return found[1] if found else ""


class Module:
    """A module's computations: for each its instructions, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Line]] = {}
        self.entry = ""
        for line in text.splitlines():
            if head := re.match(r"^(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                here = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif found := _LINE.match(line):
                operands = re.findall(r"%([\w.\-]+)", found[4].split(")")[0])
                here[found[1]] = Line(found[1], found[2], found[3], operands, found[4])

    def runs(self) -> Iterator[tuple[str, int]]:
        """Each computation that runs by itself, and how often. XLA's runtime does not compute the
        condition of a loop whose length it knows (xla/backends/gpu/runtime/while_thunk.cc).
        """
        todo = [(self.entry, 1)]
        while todo:
            name, times = todo.pop()
            yield name, times
            for line in self.computations[name].values():
                if line.opcode == "while":
                    trips = line.has(r'known_trip_count":\{"n":"(\d+)"')
                    todo.append((line.has(r"body=%([\w.\-]+)"), times * int(trips or 1)))
                    if not trips:
                        todo.append((line.has(r"condition=%([\w.\-]+)"), times))
                elif line.opcode == "conditional":
                    branches = re.findall(r"(?:true|false)_computation=%([\w.\-]+)", line.rest)
                    branches += re.findall(
                        r"%([\w.\-]+)", line.has(r"branch_computations=\{(.*?)\}")
                    )
                    todo += [(branch, times) for branch in branches]
                elif line.opcode in ("call", "async-start"):
                    todo.append((line.has(r"(?:to_apply|calls)=%([\w.\-]+)"), times))

    def kernels(self) -> Iterator[tuple[Line, int, int]]:
        """What is launched: the instruction, how often, and the bytes it reads and writes: each
        operand and each result once, whole, but for a library's scratch space.
        """
        for name, times in self.runs():
            lines = self.computations[name]
            for line in lines.values():
                if line.opcode in _NOTHING or line.opcode.endswith("-done"):
                    continue
                if '"AllocateBuffer"' in line.rest:
                    continue
                written = line.type
                if line.opcode.endswith("-start"):  # what its end gives
                    written = next(
                        other.type
                        for other in lines.values()
                        if line.name in other.operands and other.opcode.endswith("-done")
                    )
                elif "__cublas" in line.rest or '"te_' in line.rest:
                    written = re.sub(r"(?:, )?[su]8\[\d+\]\{0\}\)$", ")", written)
                yield line, times, self._traffic(line, lines, written)

    def _traffic(self, line: Line, lines: dict[str, Line], written: str) -> int:
        """The bytes that a kernel reads and writes: of what it only cuts out of an operand, or puts
        into one, no more than that.
        """
        read = [size(lines[operand].type) for operand in line.operands]
        opcode = line.opcode.removesuffix("-start")
        if opcode == "dynamic-update-slice":
            return 2 * read[1]
        if opcode == "scatter" and len(read) == 3:
            return read[1] + 3 * read[2]
        if opcode in _CUTS:
            return min(read[0], size(written)) + sum(read[1:]) + size(written)
        body = self.computations.get(line.has(r"calls=%([\w.\-]+)"))
        if body is None or opcode != "fusion":
            return size(written) + sum(read)
        given = {
            int(inner.rest.split(")")[0]): inner.name
            for inner in body.values()
            if inner.opcode == "parameter"
        }
        root = [*body.values()][-1]
        results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
        total = 0
        for n, whole in enumerate(read):
            total += int(min(whole, _used(body, given[n], root))) if n in given else whole
        if not any(_put(body, result) for result in results):
            return total + size(written)
        for result in results:
            total += size((_put(body, result) or result).type)
        return total


_CUTS = ("slice", "dynamic-slice", "gather")
_NAMES = ("bitcast", "reshape", "get-tuple-element")


def _behind(body: dict[str, Line], line: Line) -> Line:
    """What a view shows."""
    while line.opcode in _NAMES:
        line = body[line.operands[0]]
    return line


def _put(body: dict[str, Line], result: Line) -> Line | None:
    """What is put into an argument, where that is the result."""
    update = _behind(body, result)
    root = [*body.values()][-1]
    if update not in _in_place(body, root):
        return None
    into = _behind(body, body[update.operands[0]])
    put = update.operands[1 if update.opcode == "dynamic-update-slice" else 2]
    return body[put] if into.opcode == "parameter" else None


def _in_place(body: dict[str, Line], root: Line) -> list[Line]:
    """The updates of a part of an array that a fusion writes, where no other line reads what is
    updated.
    """
    results = root.operands if root.opcode == "tuple" else [root.name]
    found = []
    for name in results:
        names, line = [name], body[name]
        while line.opcode in _NAMES:
            line = body[line.operands[0]]
            names.append(line.name)
        # Each name is read by the one before it in this list, and the first by a tuple at most.
        readers = [sum(n in other.operands for other in body.values()) for n in names]
        alone = max(readers) <= 1
        is_scatter = line.opcode == "scatter" and len(line.operands) == 3
        if alone and (is_scatter or line.opcode == "dynamic-update-slice"):
            found.append(line)
    return found


def _used(body: dict[str, Line], name: str, root: Line) -> float:
    """The bytes that a fusion's computation needs of a value: infinitely many where of all."""
    if name == root.name:
        return math.inf
    used = 0.0
    for line in body.values():
        for position, operand in enumerate(line.operands):
            if operand != name:
                continue
            if line.opcode in _NAMES:
                used += _used(body, line.name, root)
            elif line.opcode in _CUTS and position == 0:
                used += size(line.type)
            elif position > 0 or line not in _in_place(body, root):
                used += math.inf
            elif line.opcode == "scatter":
                used += size(body[line.operands[2]].type)
    return used


def size(type_: str) -> int:
    """Bytes of a type as HLO writes it, a tuple's elements together."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_):
        count = 1
        for d in filter(None, dims.split(",")):
            count *= int(d)
        total += count * _BYTES[dtype]
    return total


def launched(text: str) -> tuple[int, int]:
    """Kernels that a module launches, and bytes that they move, loops as often as they run."""
    kernels = list(Module(text).kernels())
    return sum(times for _, times, _ in kernels), sum(times * moved for _, times, moved in kernels)
