"""Random programs as text, for what is known of any program without the inspector: that the order
of its results says nothing, that a move and a step of each element may change places, and which
kernels a compiled module launches.

Each is a function with the names of `fp8lens.rules.page.PRELUDE`, written as on a rule's page, so
that a test that fails prints it.
"""

import ast
import dataclasses
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fp8lens.rules.page import Program
from tests.programs.random_programs import Line, Module, call, size

M, N, K = 64, 128, 256
SHAPES = {
    "bias": f"bf16[{N}]",
    "keep": f"pred[{M}]",
    "mask": f"pred[{M},{N}]",
    "rows": "s32[32]",
    "cols": f"s32[{N}]",
    "all_rows": f"s32[{M}]",
    "n": "s32[]",
    "flag": "pred[]",
    "z": "f32[]",
    "r": f"f32[{M},1]",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A function: its arguments with their shapes, its lines, and what it returns, in order."""

    arguments: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    returns: tuple[str, ...]

    def __str__(self) -> str:
        return self.page.code

    @property
    def page(self) -> Program:
        """As on a rule's page. Lines and arguments that nothing reads are left out."""
        text = f"    return {', '.join(self.returns)}"
        for line in reversed(self.lines):
            made = re.match(r"(\w+) = ", line)
            if made is None or re.search(rf"\b{made[1]}\b", text):
                text = f"    {line}\n{text}"
        read = set(re.findall(r"\w+", text))
        given = ", ".join(f'{name}: "{shape}"' for name, shape in self.arguments if name in read)
        return Program(f"def program({given}):\n{text}")

    def returning(self, values: Sequence[str]) -> "Source":
        """The same, with other results."""
        return dataclasses.replace(self, returns=tuple(values))


def smaller(source: Source, fails: Callable[[Source], bool]) -> Source:
    """The source with as few results as still fail."""
    for n in range(len(source.returns)):
        if len(source.returns) > 1:
            fewer = source.returning(source.returns[:n] + source.returns[n + 1 :])
            if fails(fewer):
                return smaller(fewer, fails)
    return source


# Several results of a few matmuls -----------------------------------------------------------------

TAKEN = ("{v}", "{v}", "relu({v})", "gelu({v})", "{v} + bias.astype({v}.dtype)")
OF_EACH = (
    "relu({v})",
    "gelu({v})",
    "jax.nn.silu({v})",
    "{v} * z.astype({v}.dtype)",
    "{v} * 0.5",
    "{v} + bias.astype({v}.dtype)",
    "{v} + g.astype({v}.dtype)",
    "{v} - g.astype({v}.dtype)",
    "{v} * g.astype({v}.dtype)",
    "{v} * r.astype({v}.dtype)",
    "-{v}",
    "jnp.abs({v})",
    "jnp.tanh({v})",
    "{v} * {v}",
    "jnp.where(mask, {v}, 0)",
    "jnp.where(keep[:, None], {v}, 0)",
    "jnp.where({v} > 0, g.astype({v}.dtype), 0)",
    "{v} - {v}.mean(-1, keepdims=True)",
    "jax.nn.softmax({v})",
    "{v}[::-1]",
    "jnp.roll({v}, 3, 0)",
    "{v}[all_rows]",
    "{v} + {w}.astype({v}.dtype)",
    "{v} * {w}.astype({v}.dtype)",
    "jax.lax.optimization_barrier({v})",
)
LAST = (
    "{v}",
    "quantize({v}, z)",
    "quantize({v}, z)",
    "jnp.clip({v}, -448, 448).astype(e4m3)",
    "jnp.max(jnp.abs({v}))",
    "jnp.max(jnp.abs({v})).astype(f32)",
    "jnp.max({v})",
    "{v}.sum(-1)",
    "{v}.sum(0)",
    "{v} > 0",
    "{v}[:32]",
    "{v}[:, 64:]",
    "{v}.T",
    "{v}.reshape(64, 4, 32).transpose(1, 0, 2)",
    "{v}.astype(bf16)",
    "{v}.astype(f32)",
    "jnp.repeat({v}, 2, 0)",
    "jnp.concatenate([{v}, {w}.astype({v}.dtype)])",
    "jnp.split({v}, 2, 1)",
    "jnp.argmax({v}, -1)",
)
DOTS = (
    "scaled_dot({a}, {b}, a_scale, b_scale, {dt})",
    "scaled_dot({a}, {b}, a_scale, b_scale, {dt})",
    "scaled_dot({a}, {b}, a_scale, b_scale, {dt})",
    "jax.lax.dot({a}, {b}.T, preferred_element_type={dt})",
    "jax.lax.dot({a}.astype({dt}) * a_scale.astype({dt}), {b}.T.astype({dt}))",
)


def results(seed: int) -> Source:
    """A program that returns two to five values, made of the results of one to three matmuls."""
    r = random.Random(seed)
    arguments = {"a_scale": "f32[]", "b_scale": "f32[]", "g": f"f32[{M},{N}]", **SHAPES}
    lines, values = [], []
    for i in range(r.choice((1, 1, 1, 2, 2, 3))):
        a = "a0" if r.random() < 0.4 else f"a{i}"
        arguments |= {a: f"f8e4m3fn[{M},{K}]", f"b{i}": f"f8e4m3fn[{N},{K}]"}
        dot = r.choice(DOTS).format(a=a, b=f"b{i}", dt=r.choice(("f32", "f32", "bf16")))
        lines += [f"d{i} = {dot}", f"h{i} = {r.choice(TAKEN).format(v=f'd{i}')}"]
        values += [f"d{i}", f"h{i}", f"h{i}"]
    returned: dict[str, None] = {}
    for i in range(r.choice((2, 2, 3, 3, 4, 5))):
        value = r.choice(values)
        for step in range(r.choice((0, 1, 1, 2))):
            made = r.choice(OF_EACH).format(v=value, w=r.choice(values))
            value = f"v{i}{'abc'[step]}"
            lines.append(f"{value} = {made}")
        if r.random() < 0.4:
            values.append(value)
        returned[r.choice(LAST).format(v=value, w=r.choice(values))] = None
    return Source(tuple(arguments.items()), tuple(lines), tuple(returned))


# A move and steps, in either order ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Move:
    """What gives a result on at other places. `vector`: what then is added to each row, None where
    a bias does not commute. `{v}` stands for the value.
    """

    text: str
    vector: str | None = "{v}"


# What may stand behind any other of them: the shape stays [64, 128].
SAME_SHAPE = (
    Move("{v}[::-1]"),
    Move("{v}[:, ::-1]", "{v}[::-1]"),
    Move("{v}[all_rows]"),
    Move("{v}[:, cols]", "{v}[cols]"),
    Move("jnp.take({v}, all_rows, axis=0)"),
    Move("jnp.take({v}, all_rows, axis=0, mode='clip')"),
    Move("jnp.roll({v}, 3, 0)"),
    Move("jnp.roll({v}, 16, 1)", "jnp.roll({v}, 16)"),
    Move("jnp.where(keep[:, None], {v}, 0)", None),
    Move("jnp.where(mask, {v}, 0)", None),
    Move("jnp.tril({v})", None),
    Move("jax.lax.optimization_barrier({v})"),
    Move("jax.lax.cond(flag, lambda: {v}, lambda: jnp.zeros_like({v}))", None),
    Move("jax.lax.cond(flag, lambda: {v}, lambda: {v}[::-1])"),
    Move("jnp.zeros_like({v}).at[all_rows].set({v})", None),
    Move("jnp.concatenate([{v}[32:], {v}[:32]])"),
    Move("jnp.where(flag, {v}, {v}[::-1])"),
)
OTHER_SHAPE = (
    Move("{v}.T", "{v}[:, None]"),
    Move("{v}.reshape(32, 2, 128)"),
    Move("{v}.reshape(64, 4, 32)", "{v}.reshape(4, 32)"),
    Move("{v}.reshape(64, 4, 32).transpose(1, 0, 2)", "{v}.reshape(4, 1, 32)"),
    Move("{v}.reshape(4, 16, 128).transpose(1, 0, 2)"),
    Move("{v}.reshape(-1)", "jnp.tile({v}, 64)"),
    Move("{v}[:32]"),
    Move("{v}[16:48]"),
    Move("{v}[::2]"),
    Move("{v}[:, :64]", "{v}[:64]"),
    Move("{v}[:, 32:96]", "{v}[32:96]"),
    Move("{v}[5]"),
    Move("{v}[-1:]"),
    Move("{v}[rows]"),
    Move("jnp.take({v}, rows, axis=0)"),
    Move("jnp.repeat({v}, 2, 0)"),
    Move("jnp.repeat({v}, 2, 1)", "jnp.repeat({v}, 2)"),
    Move("jnp.tile({v}, (2, 1))"),
    Move("jnp.broadcast_to({v}, (2, 64, 128))"),
    Move("{v}[:, None, :]"),
    Move("jnp.pad({v}, ((0, 16), (0, 0)))", None),
    Move("jnp.pad({v}, ((3, 0), (0, 5)))", None),
    Move("jnp.concatenate([{v}, g.astype({v}.dtype)])"),
    Move("jnp.concatenate([{v}, g.astype({v}.dtype)], 1)", "jnp.tile({v}, 2)"),
    Move("jnp.concatenate([{v}, other.astype({v}.dtype)])"),
    Move("jnp.stack([{v}, other.astype({v}.dtype)])"),
    Move("jnp.stack([{v}, {v}])"),
    Move("jnp.concatenate(jnp.split({v}, 2, 1))", None),
    Move("jax.lax.dynamic_slice_in_dim({v}, n, 32)"),
    Move("jax.lax.dynamic_slice_in_dim({v}, n, 64, 1)", "jax.lax.dynamic_slice_in_dim({v}, n, 64)"),
    Move("jax.lax.dynamic_update_slice(cache.astype({v}.dtype), {v}, (n, 0))"),
    Move("jax.lax.dynamic_index_in_dim({v}, n, 0)"),
    Move("jnp.zeros((96, 128), {v}.dtype).at[all_rows].set({v})", None),
)
BIAS, MATRIX = "{v} + ({bias}).astype({v}.dtype)", "{v} + ({matrix}).astype({v}.dtype)"
CONVERSIONS = ("quantize({v}, z)", "jnp.clip({v}, -448, 448).astype(e4m3)")
STEPS = ("{v} * z.astype({v}.dtype)", "{v} * 0.5", BIAS, MATRIX, "relu({v})", "gelu({v})")


def _steps(r: random.Random, commutes: bool) -> list[str]:
    """Steps that treat each element alone, most often in the order in which a call takes them."""
    allowed = [step for step in STEPS if commutes or step not in (BIAS, MATRIX)]
    steps = r.sample(allowed, r.choice((0, 1, 1, 2)))
    if r.random() < 0.7:
        steps.sort(key=allowed.index)
    if not steps or r.random() < 0.5:
        steps.append(r.choice(CONVERSIONS))
    return steps


@dataclasses.dataclass
class Written:
    """Lines of a program that computes one value after the other."""

    lines: list[str]
    value: str
    count: int = 0

    def then(self, text: str, **fields: str) -> None:
        self.count += 1
        self.lines.append(f"v{self.count} = {text.format(v=self.value, **fields)}")
        self.value = f"v{self.count}"


def exchanged(seed: int) -> list[Source]:
    """Programs of the same steps and moves, with the moves in front of, between and behind the
    steps: from one to the next the moves are later.
    """
    r = random.Random(seed)
    if r.random() < 0.15:
        return _carried(r)
    if r.random() < 0.1:
        return _in_branches(r)
    moves = [r.choice(SAME_SHAPE) for _ in range(r.choice((0, 0, 1)))] + [
        r.choice(SAME_SHAPE + OTHER_SHAPE)
    ]
    steps = _steps(r, all(move.vector for move in moves))
    dt = r.choice(("f32", "f32", "bf16"))
    dot = r.choice(DOTS).format(a="a", b="b", dt=dt)
    given = {"a": f"f8e4m3fn[{M},{K}]", "b": f"f8e4m3fn[{N},{K}]", "c": f"f8e4m3fn[{M},{K}]"}
    given |= {"a_scale": "f32[]", "b_scale": "f32[]", "g": f"f32[{M},{N}]", **SHAPES}
    given |= {"matrix": f"{dt}[{M},{N}]", "cache": f"{dt}[256,{N}]"}
    if r.random() < 0.3:
        given["bias"] = f"f32[{N}]"
    return [
        Source(tuple(given.items()), *_moved_at(at, dot, dt, moves, steps))
        for at in range(len(steps) + 1)
    ]


def _moved_at(
    at: int, dot: str, dt: str, moves: list[Move], steps: list[str]
) -> tuple[tuple[str, ...], tuple[str]]:
    """The lines, and the result, of a program with the moves in front of step `at`."""
    lines = [f"d = {dot}"]
    if any("other" in move.text for move in moves):
        lines.append(f"other = scaled_dot(c, b, a_scale, b_scale, {dt})")
    written, vector, matrix = Written(lines, "d"), "bias", "matrix"
    for number, step in enumerate([*steps, None]):
        if number == at:
            for move in moves:
                written.then(move.text)
                vector = (move.vector or "{v}").format(v=vector)
                matrix = move.text.format(v=f"({matrix})")
        if step:
            written.then(step, bias=vector, matrix=matrix)
    return tuple(lines), (written.value,)


def _nested(value: str, steps: Sequence[str]) -> str:
    for step in steps:
        value = step.format(v=f"({value})", bias="bias", matrix="matrix")
    return value


def _carried(r: random.Random) -> list[Source]:
    """A loop of layers, whose iterations begin with the steps that the ones before did not do."""
    steps = [*_steps(r, True), CONVERSIONS[0]]
    steps = [step for step in steps if step not in CONVERSIONS] + [CONVERSIONS[0]]
    dt = r.choice(("f32", "bf16"))
    given = {"x": f"{dt}[{M},{N}]", "b": f"f8e4m3fn[3,{N},{N}]", "b0": f"f8e4m3fn[{N},{N}]"}
    given |= {"a_scale": "f32[]", "b_scale": "f32[]", "matrix": f"{dt}[{M},{N}]", **SHAPES}
    loop = r.choice(
        (
            "jax.lax.scan(lambda v, w: (layer(v, w), None), {x}, b)[0]",
            "jax.lax.fori_loop(0, 5, lambda _, v: layer(v, b0), {x})",
            "jax.lax.while_loop(lambda v: v[0, 0].astype(f32) < 3, lambda v: layer(v, b0), {x})",
            "jax.lax.scan(lambda v, w: (layer(v, w), v), {x}, b)[1]",
        )
    )
    found = []
    for at in range(len(steps) + 1):
        dot = f"scaled_dot({_nested('v', steps[at:])}, w, a_scale, b_scale, {dt})"
        lines = ("def layer(v, w):", f"    return {_nested(dot, steps[:at])}")
        first = "x" if at < len(steps) else _nested("x", steps[-1:])
        found.append(Source(tuple(given.items()), lines, (loop.format(x=first),)))
    return found


def _in_branches(r: random.Random) -> list[Source]:
    """A branch to which a result is handed, that does the steps that were not done in front."""
    steps = _steps(r, True)
    dt = r.choice(("f32", "bf16"))
    given = {"a": f"f8e4m3fn[{M},{K}]", "b": f"f8e4m3fn[{N},{K}]", "a_scale": "f32[]"}
    given |= {"b_scale": "f32[]", "matrix": f"{dt}[{M},{N}]", **SHAPES}
    branch = r.choice(
        (
            "jax.lax.cond(flag, lambda v: {rest}, lambda v: jnp.zeros_like({rest}), {first})",
            "jax.lax.switch(n, [lambda v: {rest}, lambda v: ({rest})[::-1]], {first})",
            "jax.lax.map(lambda v: {rest}, {first}.reshape(4, 16, 128))",
            "jax.vmap(lambda v: {rest})({first})",
        )
    )
    if "map" in branch:
        steps = [step for step in steps if step != MATRIX] or ["relu({v})"]
    found = []
    for at in range(len(steps) + 1):
        first = _nested(f"scaled_dot(a, b, a_scale, b_scale, {dt})", steps[:at])
        made = branch.format(rest=_nested("v", steps[at:]), first=f"({first})")
        found.append(Source(tuple(given.items()), ("scale = b_scale",), (made,)))
    return found


# What a compiled module's calls take, by a few regular expressions --------------------------------


def taken(text: str) -> Counter[str]:
    """What the library calls of a compiled module do besides multiplying."""
    found: Counter[str] = Counter()
    module = Module(text)
    for name, _ in module.runs():
        lines = module.computations[name]
        for line in lines.values():
            if "__cublas" in line.rest:
                found.update(_taken_by(line, lines))
    return found


def _taken_by(line: Line, lines: dict[str, Line]) -> Iterator[str]:
    kind, epilogue, alpha, beta, amax, dtype = call(line)
    scalars = sum(lines[name].type.startswith("f32[]") for name in line.operands)
    given = {
        "FP8": kind == "matmul$f8",
        "bias": "BIAS" in epilogue,
        "relu": "RELU" in epilogue,
        "gelu": "GELU" in epilogue,
        "alpha": alpha != "1",
        "matrix": beta not in ("", "0"),
        "amax": amax == "true",
        "FP8 result": dtype.startswith("f8"),
    }
    yield from (name for name, is_taken in given.items() if is_taken)
    yield from ["scale"] * scalars


# What the kernels behind a call do, by the same ---------------------------------------------------

#: What a kernel may do with a result, and some call could have done.
COULD_BE_FUSED = frozenset(("maximum", "abs", "add", "multiply", "convert", "clamp"))
_ON_THE_WAY = COULD_BE_FUSED | {"bitcast", "reshape", "copy", "transpose"}


@dataclasses.dataclass(frozen=True)
class Reader:
    """A kernel that reads the result of an FP8 call directly, and what it does."""

    kernel: str
    call: str
    does: frozenset[str]
    only: bool  # nothing but what some call could have done, in some order
    at_once: str  # what some call could have done with the result, before anything else is; or ""


def readers(module: Module) -> Iterator[Reader]:
    """The kernels that read an FP8 call's result in the same computation, each with the operations
    that it does with it.
    """
    for name, _ in module.runs():
        lines = module.computations[name]
        for line in lines.values():
            if line.opcode not in ("fusion", *COULD_BE_FUSED):
                continue
            for index, operand in enumerate(line.operands):
                made_by = _behind(lines, operand)
                if made_by is not None and "__cublas$lt$matmul$f8" in made_by.rest:
                    yield _reader(module, line, index, made_by)


def _behind(lines: dict[str, Line], name: str) -> Line | None:
    """The call whose matrix this is, behind bitcasts."""
    while lines[name].opcode in ("bitcast", "get-tuple-element"):
        line = lines[name]
        if line.opcode == "get-tuple-element" and "index=0" not in line.rest:
            return None
        name = line.operands[0]
    return lines[name]


def _reader(module: Module, line: Line, index: int, made_by: Line) -> Reader:
    if line.opcode != "fusion":
        others = [operand for n, operand in enumerate(line.operands) if n != index]
        return Reader(line.name, made_by.name, frozenset((line.opcode,)), not others, "")
    inside = module.computations[line.has(r"calls=%([\w.\-]+)")]
    parameter = next(
        inner
        for inner in inside.values()
        if inner.opcode == "parameter" and inner.rest.startswith(f"{index})")
    )
    elements = size(parameter.type) // size(one_of(parameter.type))
    of_it, does, only = {parameter.name}, set(), True
    untouched, at_once = {parameter.name}, ""
    for inner in inside.values():
        if of_it.isdisjoint(inner.operands):
            continue
        of_it.add(inner.name)
        does.add(inner.opcode)
        others = [inside[operand] for operand in inner.operands if operand not in of_it]
        spread = all(_is_spread(inside, other, elements) for other in others)
        only = only and inner.opcode in _ON_THE_WAY and spread
        if not untouched.isdisjoint(inner.operands):
            if inner.opcode == "bitcast":
                untouched.add(inner.name)
            elif _is_fusable(inside, inner, others, spread):
                at_once = inner.opcode
    return Reader(line.name, made_by.name, frozenset(does), only, at_once)


def _is_fusable(lines: dict[str, Line], line: Line, others: Sequence[Line], spread: bool) -> bool:
    """Whether some call could have done this: relu, a bias, a conversion to FP8."""
    if line.opcode == "convert":
        return line.type.startswith("f8")
    if line.opcode == "maximum" and len(others) == 1:
        return _origin(lines, others[0]).rest.startswith("0)")
    is_vector = bool(others) and size(_origin(lines, others[0]).type) > 4
    return line.opcode == "add" and len(others) == 1 and spread and is_vector


def one_of(type_: str) -> str:
    """The type of one element."""
    return type_.split("[")[0] + "[]"


def _origin(lines: dict[str, Line], line: Line) -> Line:
    """What an operand repeats."""
    while line.opcode in ("convert", "bitcast", "reshape", "broadcast") and line.operands:
        line = lines[line.operands[0]]
    return line


def _is_spread(lines: dict[str, Line], line: Line, elements: int) -> bool:
    """Whether an operand repeats less than a matrix."""
    origin = _origin(lines, line)
    return size(origin.type) // size(one_of(origin.type)) * 2 <= elements


def kernels_of(text: str) -> Counter[tuple]:
    """What the kernels of a compiled module are: opcode, what is fused into it, and its type."""
    module = Module(text)
    found: Counter[tuple] = Counter()
    for line, times, moved in module.kernels():
        fused = module.computations.get(line.has(r"calls=%([\w.\-]+)"), {})
        inside = sorted(inner.opcode for inner in fused.values())
        found[line.opcode, call(line)[:5], tuple(inside), times, moved] += 1
    return found


# Pages' programs, put together --------------------------------------------------------------------

#: What loses something in front of a matmul, by how an argument is given: its name, the shape that
#: it has instead, how it is handed on, and the rule that this breaks.
IN_FRONT = (
    ("b", f"f8e4m3fn[{K},{N}]", "{v}.T", "operand-layout"),
    ("a", f"f8e4m3fn[{K},{M}]", "{v}.T", "operand-layout"),
    ("a_scale", "bf16[]", "{v}.astype(f32)", "scale-not-f32"),
    ("b_scale", "f32[]", "1 / {v}", "divided-by-scale"),
)


def beside(first: Program, second: Program) -> Program:
    """Two programs as one, that share nothing but scalars and vectors."""
    parts, given, calls = [], {}, []
    for name, part in (("first", first), ("second", second)):
        parts.append(_factory(name, part.code))
        names = []
        for argument, shape in part.arguments.items():
            is_shared = not _is_matrix(shape) and given.get(argument, shape) == shape
            names.append(argument if is_shared else f"{argument}_{name}")
            given[names[-1]] = shape
        calls.append(f"{name}()({', '.join(names)})")
    return _program(parts, given, ", ".join(calls))


def given_otherwise(program: Program, argument: str, shape: str, how: str) -> Program:
    """A program that gets an argument in another shape or type."""
    given = program.arguments | {argument: shape}
    names = [how.format(v=name) if name == argument else name for name in program.arguments]
    return _program([_factory("layer", program.code)], given, f"layer()({', '.join(names)})")


def looped(program: Program, argument: str) -> Program:
    """A program that is run in a loop, for each of 8 arrays in place of one argument."""
    shape = program.arguments[argument]
    given = program.arguments | {argument: shape.replace("[", "[8,", 1)}
    call = f"layer()({', '.join(program.arguments)})"
    parts = [_factory("layer", program.code)]
    return _program(parts, given, f"jax.lax.map(lambda {argument}: {call}, {argument})")


def _factory(name: str, code: str) -> str:
    function = ast.parse(code).body[-1]
    assert isinstance(function, ast.FunctionDef)
    return f"def {name}():\n{textwrap.indent(code, '    ')}\n    return {function.name}\n"


def _program(parts: list[str], given: dict[str, str], result: str) -> Program:
    arguments = ", ".join(f'{name}: "{shape}"' for name, shape in given.items())
    return Program("\n\n".join([*parts, f"def program({arguments}):\n    return {result}"]))


def _is_matrix(shape: str) -> bool:
    return shape.count(",") > 0
