"""Properties of the parser, the printer, the costs and the report, on HLO that is made up, broken, deep or huge.

The examples are the same on every run. To look further: HYPOTHESIS_SCALE=100 make test ARGS="-k properties" tries a
hundred times as many, other ones each time.
"""

import json
import os
import re
import signal
import string
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8lens import inspect, report_gemms
from fp8lens.cost import bytes_moved, kernels
from fp8lens.hlo.parse import parse_shape, read_attributes
from fp8lens.hlo.text import format_hlo_module
from helpers import HloParseError, aot_compile, parse_hlo_module
from tests.fp8lens.test_hlo_parse import assert_agrees

SCALE = int(os.environ.get("HYPOTHESIS_SCALE", 1))
LAZY = (
    "shape",
    "attributes",
    "backend_config",
    "metadata",
    "frames",
    "custom_call_target",
    "called",
    "literal",
    "parameter_number",
    "is_root",
    "cmd",
)
OLD = sorted(Path(__file__).parent.glob("hlo/*.txt"))


def examples(number: int):
    return settings(
        max_examples=number * SCALE,
        derandomize=SCALE == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def no_hang():
    """A test that hangs would hold up all others: far beyond what the slowest takes, it fails instead."""

    def stop(*_):
        pytest.fail("hangs")

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, stop)
        signal.alarm(300 * SCALE)
    yield
    if hasattr(signal, "SIGALRM"):
        signal.alarm(0)


# Broken text ----------------------------------------------------------------------------------------------------------


def or_parse_error(function: Callable, *args):
    """What the function returns, None if it raises HloParseError. Any other exception passes."""
    try:
        return function(*args)
    except HloParseError as error:
        assert (
            error.line >= 1
            and error.column >= 1
            and f"line {error.line}, column {error.column}: " in str(error)
        )
        return None


def use_all_of(text: str) -> None:
    """Whatever a reader can ask of a text gives an answer or HloParseError."""
    module = or_parse_error(parse_hlo_module, text)
    if module is None:
        return
    assert module.entry and len(module) == len(list(module)) > 0
    for i in module:
        for name in LAZY:
            or_parse_error(getattr, i, name)
    for computation in module.computations.values():
        assert computation.root in computation.instructions and len(computation.lines) >= len(
            computation
        )
        or_parse_error(getattr, computation, "parameters")
    or_parse_error(format_hlo_module, module, True, True)
    or_parse_error(kernels, module)
    if report := or_parse_error(report_gemms, module):
        assert str(report) and report._repr_html_() and 0 <= report.fp8_flops_share <= 1
    or_parse_error(inspect(module).json)


def scaled(a, b, a_scale, b_scale, x):
    d = jax.lax.dot(a.astype(jnp.float32) * a_scale, (b.astype(jnp.float32) * b_scale).T)
    d = jax.lax.fori_loop(0, 3, lambda _, d: jnp.tanh(d @ x), d)
    return jnp.clip(d, -448, 448).astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(d))


@pytest.fixture(scope="module")
def real() -> list[str]:
    """A few modules with a bit of everything: fusions, calls, loops, tuples, collectives, tables of source lines."""
    f8, s = jax.ShapeDtypeStruct((32, 32), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((), jnp.float32)
    args = f8, f8, s, s, jax.ShapeDtypeStruct((32, 32), jnp.float32)
    compiled = [aot_compile(scaled, *args, gemm=gemm).as_text() for gemm in ("cublaslt", "triton")]
    rows = jax.sharding.PartitionSpec("x")
    compiled.append(
        aot_compile(sharded, f8, f8, s, mesh_shape=(4,), in_specs=(rows, rows, None)).as_text()
    )
    return [
        *compiled,
        jax.jit(scaled).lower(*args).as_text(dialect="hlo"),
        *(path.read_text() for path in OLD),
    ]


def sharded(a, b, scale):
    d = (
        jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        * scale
    )
    return jax.lax.fori_loop(0, 3, lambda _, d: jnp.tanh(d) - d.max(0), d), d.sum()


SPLIT = re.compile(r"[\w.\-]+|\s+|.")
JUNK = st.one_of(
    st.sampled_from(
        [
            "(",
            ")",
            "{",
            "}",
            '"',
            "\\",
            ",",
            "=",
            "%",
            "/*",
            "*/",
            "//",
            "\n",
            "\0",
            "\r",
            "é",
            "\ud800",
            "-1",
            "9" * 30,
            "{...}",
            "ENTRY ",
            "ROOT ",
            "f32[",
            "f8e4m3fn[-1]{9}",
            "while",
            "fusion",
            "dot",
            "custom-call",
            "__cublas$lt$matmul$f8",
            "calls=%main",
            "body=%main",
            "to_apply=%main",
            "backend_config={}",
            'backend_config={"a":[1]}',
            "metadata={}",
        ]
    ),
    st.text(max_size=8),
)


@st.composite
def mutated(draw, text: str) -> str:
    """The text after some damage: bytes, tokens, lines, or all that follows a point."""
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(
                ["flip", "cut", "junk", "line", "swap", "repeat", "token", "argument", "end"]
            )
        )
        at = draw(st.integers(0, max(len(text) - 1, 0)))
        if kind == "flip":
            data = bytearray(text.encode(errors="replace"))
            if data:
                data[at % len(data)] ^= 1 << draw(st.integers(0, 7))
            text = data.decode(errors="replace")
        elif kind == "end":
            text = text[:at]
        elif kind == "cut":
            text = text[:at] + text[at + draw(st.integers(1, 40)) :]
        elif kind == "junk":
            text = text[:at] + draw(JUNK) + text[at:]
        elif kind in ("line", "swap", "repeat"):
            lines = text.split("\n")
            a, b = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            if kind == "line":
                del lines[a]
            elif kind == "swap":
                lines[a], lines[b] = lines[b], lines[a]
            else:
                lines.insert(a, lines[b])
            text = "\n".join(lines)
        else:
            start = text.rfind("\n", 0, at) + 1
            found = list(
                SPLIT.finditer(text, start, at + 400)
            )  # of this line and a few that follow
            if found:
                token = draw(st.sampled_from(found))
                other = draw(st.sampled_from(found))[0] if kind == "token" else draw(JUNK)
                text = text[: token.start()] + other + text[token.end() :]
    return text


@examples(400)
@given(st.data())
def test_damaged_text_gives_answers_or_parse_errors(real, data):
    use_all_of(data.draw(mutated(data.draw(st.sampled_from(real)))))


# What may stand for what without breaking the text: a number for a number, JSON for JSON, a name for a name, ...
VALUES = {
    r"(?<![\w.])\d+(?![\w.])": ["0", "1", "2", "3", "31", "32", "99", "4294967296", str(10**17)],
    r'(?<=":)("[^"]*"|\d+|true|false|\[[^][{}]*\]|\{\})': [
        "0",
        "-1",
        "1e999",
        '""',
        '"9"',
        "null",
        "true",
        "[]",
        "{}",
        "[[]]",
        '["7"]',
        '["x"]',
        '[{"a":1}]',
        '{"0":[]}',
        "NaN",
    ],
    r"(?<=\{)[\d, ]*(?=\})": ["", "0", "1", "0,1", "1,0", "2,1,0", "9", "x", "0,0", "?", "-1"],
    r"(?<=\[)[\d,]*(?=\])": [
        "",
        "0",
        "1",
        "32",
        "32,32",
        "32,32,32",
        "0,32",
        "<=4,4",
        "?,2",
        "1,1,1,1",
    ],
    r"\b(?:f32|f8e4m3fn|s8|bf16|s32|pred)(?=\[)": [
        "f32",
        "f8e5m2",
        "f8e4m3fn",
        "token",
        "opaque",
        "u4",
        "c128",
        "weird",
        "f8",
    ],
    r"(?<= )[a-z][a-z\-]+(?=\()": [
        "dot",
        "fusion",
        "custom-call",
        "while",
        "call",
        "reduce",
        "broadcast",
        "tuple",
        "multiply",
        "copy",
        "constant",
        "get-tuple-element",
        "all-gather",
        "dot-start",
        "fusion-start",
        "async-start",
        "conditional",
        "all-reduce-start",
    ],
    r'"[^"\n]*"(?!:)': [
        '""',
        '"__cublas$lt$matmul$f8"',
        '"__cublas$gemm"',
        '"__cudnn$fmhaSoftmax"',
        '"\\\\303"',
        '"__cudnn$blockScaledDot"',
        '"__op$block_scaled_dot"',
        '"__cudnn$fmhaSoftmaxBackward"',
    ],
    r"(?<==)%[\w.\-]+": [],
    r"(?<=[( ])%[\w.\-]+(?=[,)])": [],
    r"\w+(?==)": ["to_apply", "body", "calls", "metadata"],
}


@st.composite
def with_wrong_values(draw, text: str) -> str:
    """The text with a few values in the place of others, so that most of it can still be read."""
    for _ in range(draw(st.integers(1, 3))):
        pattern = draw(st.sampled_from(sorted(VALUES)))
        places = list(re.finditer(pattern, text))
        if places:
            place = draw(st.sampled_from(places))
            value = draw(st.sampled_from(VALUES[pattern] or sorted({m[0] for m in places})))
            text = text[: place.start()] + value + text[place.end() :]
    return text


@examples(400)
@given(st.data())
def test_wrong_values_give_answers_or_parse_errors(real, data):
    use_all_of(data.draw(with_wrong_values(data.draw(st.sampled_from(real)))))


AFTER_A_DOT = (
    "HloModule m\n\n%f {{\n  %a = f32[8,8] parameter(0)\n  %b = f32[] parameter(1)\n"
    "  %s = f32[8,8] broadcast(%b), dimensions={{}}\n  ROOT %m = f32[8,8] multiply(%a, %s)\n}}\n"
    "ENTRY %e {{\n  %p = f32[8,8] parameter(0)\n  %z = f32[] constant(0)\n  %d = {dot} dot(%p, %p), "
    "lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n  ROOT %r = f32[8,8] {last}\n}}\n"
)


@pytest.mark.parametrize(
    "dot, last",
    [
        (
            "f32[8,8]",
            "fusion(%d), kind=kLoop, calls=%f",
        ),  # fewer operands than the fusion has parameters
        ("f32[8,8]", "reduce(%d, %z), dimensions={0}"),  # by no computation
        ("f32[8,8]", "reduce(%d, %z), dimensions={0}, to_apply=%e"),
        ("f32[8,8]", "fusion(%d, %z), kind=kLoop"),
        ("f32[8,8]", "get-tuple-element(%d)"),
        ("f32[8,8]", "get-tuple-element(%d), index=9"),
        ("f32[8,8]", "get-tuple-element(%d), index=''"),
        ("f32[8,8]", "negate(%r)"),
        ("token[]", "negate(%d)"),
        ("(f32[8,8], s8[8])", "negate(%d)"),
        ("()", "negate(%d)"),
        ("f32[?,8]", "negate(%d)"),
        ("f32[8,8]", "dot(%d, %z), lhs_contracting_dims={7}"),
        ("f32[8,8]", "dot(%d)"),
        ("f32[8,8]", "dot(%d, %z)"),
    ],
)
def test_wrong_uses_of_a_matmul(dot, last):
    use_all_of(AFTER_A_DOT.format(dot=dot, last=last))


@pytest.mark.parametrize("dims", ["?,8", "8,?", "?,?", "<=8,8", "0,8", "8,0"])
def test_matmuls_of_dynamic_and_empty_dimensions(dims):
    text = AFTER_A_DOT.format(dot="f32[8,8]", last="negate(%d)").replace(
        "%p = f32[8,8]", f"%p = f8e4m3fn[{dims}]"
    )
    use_all_of(text)
    report = report_gemms(text)
    assert len(report.rows) == 1 and report.flops >= 0 and bytes_moved(text) >= 0


@examples(200)
@given(
    st.text(alphabet=string.printable + "é\ud800", max_size=200),
    st.sampled_from(
        [
            "{}",
            "HloModule m{}",
            "HloModule m\n\nENTRY %e {} {{\n  ROOT %p = f32[] parameter(0)\n}}\n",
            "HloModule m\n\nENTRY %e {{\n  ROOT %p = f32[] parameter(0){}\n}}\n",
            "HloModule m\n\nENTRY %e {{\n  %p = f32[8,8] parameter(0)\n  ROOT %d = f32[8,8] dot(%p, %p), {}\n}}\n",
            "HloModule m\n\nENTRY %e {{\n  %p = f32[8,8] parameter(0)\n  ROOT %d = f32[8,8] custom-call(%p, %p), "
            'custom_call_target="__cublas$lt$matmul$f8", backend_config={{{}}}\n}}\n',
            "HloModule m\n\nFileNames\n1 {}\n\nENTRY %e {{\n  ROOT %p = f32[] parameter(0), "
            "metadata={{stack_frame_id=1}}\n}}\n",
        ]
    ),
)
def test_any_text_in_any_place(text, around):
    use_all_of(around.format(text))


@examples(200)
@given(st.text(alphabet="f32[](){},<=? 0189bspredtuke:TE/*", max_size=40))
def test_any_shape(text):
    shape = or_parse_error(parse_shape, text)
    if shape is not None:
        assert (
            parse_shape(str(shape)) == shape and shape.size is not None and shape.nbytes is not None
        )


# Whole modules, made up -----------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-z][a-z0-9_\-]{0,6}", fullmatch=True)
DTYPES = st.sampled_from(["f32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "s8", "s32", "c64", "f64"])
FLOATS = st.sampled_from(["f32", "bf16", "f16", "f8e4m3fn", "f8e5m2"])
SIZES = st.integers(1, 300)
STRINGS = st.text(alphabet=string.ascii_letters + string.digits + " {}()[],=%/*'é.-", max_size=20)


@dataclass
class Written:
    """A module as text, with what is known of it because it was written so."""

    text: str = ""
    instructions: dict[str, list[tuple]] = field(
        default_factory=dict
    )  # computation to (name, opcode, operands, shape)
    gemms: list[tuple] = field(
        default_factory=list
    )  # m, n, k, batch, lhs, rhs, out, count, library
    style: dict = field(default_factory=dict)
    names: int = 0


def shape_text(dtype: str, dims: tuple[int, ...], layout: bool) -> str:
    order = ",".join(str(d) for d in reversed(range(len(dims))))
    return f"{dtype}[{','.join(map(str, dims))}]" + f"{{{order}}}" * (layout and bool(dims))


class Writer:
    """Writes one computation, line by line."""

    def __init__(self, draw, module: Written, count: int | None):
        self.draw, self.module, self.count = draw, module, count
        self.lines, self.made, self.shapes = [], [], {}

    def new(self) -> str:
        self.module.names += 1  # in all of the module: XLA's parser renames what is there already
        return f"{self.draw(NAMES)}.{self.module.names}"

    def add(
        self,
        shape: str,
        opcode: str,
        operands: tuple[str, ...] = (),
        attributes: str = "",
        inside: str = "",
    ) -> str:
        name, percent = self.new(), "%" * self.module.style["percent"]
        typed = self.module.style["typed"]
        inside = inside or ", ".join(f"{self.shapes[o]} " * typed + percent + o for o in operands)
        metadata = self.draw(st.none() | STRINGS)
        attributes += f', metadata={{op_name="{metadata}"}}' if metadata is not None else ""
        self.lines.append(f"{percent}{name} = {shape} {opcode}({inside}){attributes}")
        self.shapes[name] = shape
        self.made.append((name, opcode, operands, shape))
        return name

    def array(self) -> str:
        """An array of the program: a parameter, a constant, or what is computed from others."""
        dims = tuple(self.draw(st.lists(SIZES, max_size=3)))
        dtype, layout = self.draw(DTYPES), self.module.style["layout"]
        shape = shape_text(dtype, dims, layout)
        if not dims and dtype in ("f32", "s32") and self.draw(st.booleans()):
            return self.add(shape, "constant", inside=str(self.draw(st.integers(0, 9))))
        return self.parameter(shape)

    def parameter(self, shape: str) -> str:
        number = sum(opcode == "parameter" for _, opcode, *_ in self.made)
        return self.add(shape, "parameter", inside=str(number))

    def gemm(self) -> None:
        """A dot, or the call of cuBLASLt that it becomes, its batch dimension first or absent; or a fusion of it, as
        XLA makes them around a Triton kernel or around a call that reads a slice."""
        draw, layout = self.draw, self.module.style["layout"]
        m, n, k, batch = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.integers(1, 5))
        lhs, rhs, out = draw(FLOATS), draw(FLOATS), draw(st.sampled_from(["f32", "bf16"]))
        lead = (batch,) * (batch > 1)
        left, right, is_dot, fused = (
            draw(st.booleans()) for _ in range(4)
        )  # the first two: K last?
        shapes = [
            shape_text(dtype, lead + dims[:: 1 if last else -1], layout)
            for dtype, dims, last in ((lhs, (m, k), left), (rhs, (n, k), right))
        ]
        result = shape_text(out, (*lead, m, n), layout)
        contracting = len(lead) + left, len(lead) + right
        self.module.gemms.append(
            (m, n, k, batch, lhs, rhs, out, self.count, "kernel" if is_dot else "cublasLt")
        )
        writer = Writer(draw, self.module, self.count) if fused else self
        operands = tuple(map(writer.parameter, shapes))
        if is_dot:
            text = "".join(f", {side}_batch_dims={{0}}" for side in ("lhs", "rhs") if lead)
            text += "".join(
                f", {side}_contracting_dims={{{d}}}" for side, d in zip(("lhs", "rhs"), contracting)
            )
            writer.add(result, "dot", operands, text)
        else:
            numbers = {
                f"{side}_{what}_dimensions": list(map(str, dims))
                for side, d in zip(("lhs", "rhs"), contracting)
                for what, dims in (("contracting", [d]), ("batch", [0] * len(lead)))
            }
            config = {
                "gemm_backend_config": {
                    "beta": 0,
                    "epilogue": "DEFAULT",
                    "dot_dimension_numbers": numbers,
                }
            }
            result = f"({result}, {shape_text('s8', (4194304,), layout)})"
            writer.add(
                result,
                "custom-call",
                operands,
                f', custom_call_target="__cublas$lt$matmul", backend_config={json.dumps(config)}',
            )
        if fused:
            name = f"fused{self.module.names}"
            writer.write(name)
            self.add(
                result,
                "fusion",
                tuple(map(self.parameter, shapes)),
                f", kind=kCustom, calls={'%' * self.module.style['percent']}{name}",
            )

    def write(self, name: str, entry: bool = False) -> None:
        """End with the last instruction as the ROOT."""
        self.lines[-1] = "ROOT " + self.lines[-1]
        body = "\n".join("  " + line for line in self.lines)
        self.module.text += (
            f"{'ENTRY ' * entry}{'%' * self.module.style['percent']}{name} {{\n{body}\n}}\n\n"
        )
        self.module.instructions[name] = self.made

    def finish(self, name: str, entry: bool = False) -> None:
        """End with a tuple of some of it."""
        chosen = tuple(
            dict.fromkeys(
                self.draw(st.lists(st.sampled_from([i[0] for i in self.made]), max_size=7))
            )
        )
        shape = ", ".join("/*index=5*/" * (n == 5) + self.shapes[o] for n, o in enumerate(chosen))
        self.add(f"({shape})", "tuple", chosen)
        self.write(name, entry)


@st.composite
def modules(draw) -> Written:
    """Computations that ENTRY, or each other, calls once: a `call`, a `while` (its length told or not), a branch."""
    module = Written(style={key: draw(st.booleans()) for key in ("percent", "typed", "layout")})
    module.text = "HloModule made_up, is_scheduled=true\n\n"
    percent = "%" * module.style["percent"]
    callers: list[list[tuple]] = [
        []
    ]  # who is called from where, outermost first: (kind, trips, callees)
    counts: list[int | None] = [1]
    for index in range(1, draw(st.integers(1, 5))):
        caller = draw(st.integers(0, index - 1))
        kind = draw(st.sampled_from(["call", "while", "conditional"]))
        trips = draw(st.none() | st.integers(1, 20)) if kind == "while" else 1
        callers.append([])
        callers[caller].append((kind, trips, index))
        counts.append(None if None in (trips, counts[caller]) else trips * counts[caller])
    for index in reversed(range(len(callers))):  # what is called comes first in the text
        writer = Writer(draw, module, counts[index])
        for _ in range(draw(st.integers(1, 3))):
            array = writer.array()
            if draw(st.booleans()):
                writer.add(
                    writer.shapes[array],
                    draw(st.sampled_from(["negate", "copy", "exponential"])),
                    (array,),
                )
        for _ in range(draw(st.integers(0, 2))):
            writer.gemm()
        for kind, trips, inner in callers[index]:
            state = writer.add(f"({writer.shapes[array]})", "tuple", (array,))
            body, other = f"{percent}c{inner}", f"{percent}other{inner}"
            if kind in ("while", "conditional"):
                helper = Writer(draw, module, None)
                helper.parameter(writer.shapes[state])
                helper.finish(f"other{inner}")
            if kind == "while":
                known = (
                    f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
                    if trips is not None
                    else ""
                )
                writer.add(
                    writer.shapes[state],
                    "while",
                    (state,),
                    f", condition={other}, body={body}{known}",
                )
            elif kind == "conditional":
                choice = writer.add(
                    "s32[]", "parameter", inside=str(sum(i[1] == "parameter" for i in writer.made))
                )
                writer.add(
                    writer.shapes[state],
                    "conditional",
                    (choice, state, state),
                    f", branch_computations={{{body}, {other}}}",
                )
            else:
                writer.add(writer.shapes[state], "call", (state,), f", to_apply={body}")
        writer.finish(f"c{index}", entry=index == 0)
    return module


@examples(100)
@given(modules())
def test_made_up_modules_are_read_as_written(written):
    module = parse_hlo_module(written.text)
    assert_agrees(module)  # so what is made up is HLO
    found = {
        name: [(i.name, i.opcode, i.operands, i.shape_text) for i in c]
        for name, c in module.computations.items()
    }
    assert found == written.instructions and module.entry.name == "c0"
    for settings_ in ({}, {"metadata": True, "backend_cfg": True}):
        again = parse_hlo_module(format_hlo_module(module, **settings_))
        plain = lambda m: [
            (i.name, i.opcode, i.operands, i.literal, i.parameter_number, i.called, i.is_root)
            for i in m
        ]
        assert plain(again) == plain(module)
        assert [i.shape.dims for i in again] == [i.shape.dims for i in module]
        if settings_:
            assert [i.backend_config for i in again] == [i.backend_config for i in module]
            op_names = [
                [(i.metadata and i.metadata.op_name) or "" for i in m] for m in (again, module)
            ]
            assert op_names[0] == op_names[1]


@examples(100)
@given(modules())
def test_the_report_finds_the_matmuls_that_were_written(written):
    report = report_gemms(written.text)
    rows = [
        (r.m, r.n, r.k, r.batch, r.lhs_dtype, r.rhs_dtype, r.out_dtype, r.count, r.library)
        for r in report.rows
    ]
    key = lambda row: tuple(map(str, row))
    assert sorted(rows, key=key) == sorted(written.gemms, key=key)
    assert report.flops == sum(
        2 * m * n * k * b * (1 if c is None else c) for m, n, k, b, *_, c, _ in written.gemms
    )
    assert bytes_moved(written.text) >= 0 and len(kernels(written.text)) >= len(rows)


# Deep, cyclic, huge ---------------------------------------------------------------------------------------------------


def chain(length: int, instruction: str, last: str = "  ROOT %n = f32[] negate(%p)") -> str:
    """Computations of which each calls the one before it."""
    first = f"%c0 {{\n  %p = f32[] parameter(0)\n{last}\n}}\n"
    rest = "".join(
        f"%c{n} {{\n  %p = f32[] parameter(0)\n  {instruction.format(n - 1)}\n}}\n"
        for n in range(1, length)
    )
    entry = f"ENTRY %e {{\n  %p = f32[] parameter(0)\n  {instruction.format(length - 1)}\n}}\n"
    return f"HloModule m\n\n{first}{rest}{entry}"


CALLS = {
    "call": "ROOT %r = f32[] call(%p), to_apply=%c{0}",
    "while": "ROOT %r = f32[] while(%p), condition=%c{0}, body=%c{0}",
    "conditional": "ROOT %r = f32[] conditional(%p, %p, %p), branch_computations={{%c{0}, %c{0}}}",
    "fusion": "ROOT %r = f32[] fusion(%p), kind=kLoop, calls=%c{0}",
    "async": "%s = ((f32[]), f32[], u32[]) async-start(%p), calls=%c{0}\n  ROOT %r = f32[] async-done(%s)",
    "reduce": "ROOT %r = f32[] reduce(%p, %p), dimensions={{}}, to_apply=%c{0}",
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_nest_thousands_deep(kind):
    text = chain(3000, CALLS[kind])
    use_all_of(text)
    assert len(parse_hlo_module(text).computations) == 3001


@pytest.mark.parametrize("kind", ["call", "while", "conditional"])
def test_a_computation_called_twice_at_each_of_many_levels_is_visited_once(kind):
    double = CALLS[kind].replace("ROOT %r", "%q") + "\n  " + CALLS[kind]
    text = chain(60, double, "  %n = f32[] negate(%p)\n  ROOT %d = f32[] dot(%n, %n)")
    use_all_of(text)
    assert len(kernels(text)) == 2 and len(report_gemms(text).rows) == 1
    if kind == "call":
        assert report_gemms(text).rows[0].count == 2**60


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("target", ["c0", "c1", "e"])
def test_a_computation_that_calls_itself_is_no_endless_loop(kind, target):
    body = "  " + CALLS[kind].replace("%c{0}", f"%{target}").format()
    text = chain(3, CALLS[kind], body)
    use_all_of(text)
    if kind in ("call", "while", "conditional", "fusion"):
        with pytest.raises(HloParseError, match="calls itself"):
            report_gemms(text)


ENTRY = "HloModule m\n\nENTRY %e {{\n  %p = f32[8,8] parameter(0)\n{}\n}}\n"
LARGE: dict[str, Callable[[int], str]] = {
    "instructions": lambda n: ENTRY.format(
        "\n".join(f'  %i.{k} = f32[8,8] negate(%p), metadata={{op_name="{k}"}}' for k in range(n))
    ),
    "a chain after a matmul": lambda n: ENTRY.format(
        "  %i.0 = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        + "\n".join(f"  %i.{k} = f32[8,8] add(%i.{k - 1}, %p)" for k in range(1, n))
    ),
    "matmuls of one operand": lambda n: ENTRY.format(
        "\n".join(
            f"  %i.{k} = f32[8,8] dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
            for k in range(n)
        )
    ),
    "operands": lambda n: ENTRY.format(
        f"  ROOT %t = f32[] custom-call({', '.join(['%p'] * 10 * n)})"
    ),
    "a tuple's elements": lambda n: ENTRY.format(
        f"  ROOT %t = ({', '.join(['f32[8,8]'] * 10 * n)}) tuple({', '.join(['%p'] * 10 * n)})"
    ),
    "a literal": lambda n: ENTRY.format(
        f"  ROOT %t = f32[{100 * n}] constant({{{', '.join('1' * (100 * n))}}})"
    ),
    "a literal over lines": lambda n: ENTRY.format(
        f"  ROOT %t = f32[{10 * n},2] constant({{\n"
        + ",\n".join(["  { 1, 2 }"] * (10 * n))
        + "\n  })"
    ),
    "an attribute": lambda n: ENTRY.format(
        f"  ROOT %n = f32[8,8] negate(%p), a={{{'1, ' * 100 * n}1}}"
    ),
    "a string": lambda n: ENTRY.format(
        f'  ROOT %n = f32[8,8] negate(%p), metadata={{op_name="{"é(" * 100 * n}"}}'
    ),
    "JSON": lambda n: ENTRY.format(
        f'  ROOT %n = f32[8,8] negate(%p), backend_config={{"a":[{"1, " * 30 * n}1]}}'
    ),
    "computations": lambda n: chain(n // 2, CALLS["call"]),
    "comments": lambda n: ENTRY.format(f"  /*{'*' * 100 * n}*/ ROOT %n = f32[8,8] negate(%p)"),
    "blank lines": lambda n: ENTRY.format("\n" * 100 * n + "  ROOT %n = f32[8,8] negate(%p)"),
    "source lines": lambda n: (
        "HloModule m\n\nFileNames\n"
        + "".join(f'{k} "f{k}.py"\n' for k in range(1, n))
        + "\nStackFrames\n"
        + "".join(f"{k} {{file_location_id={k} parent_frame_id={k - 1}}}\n" for k in range(1, n))
        + f"\n\nENTRY %e {{\n  ROOT %p = f32[] parameter(0), metadata={{stack_frame_id={n - 1}}}\n}}\n"
    ),
}


def peak_memory(text: str) -> int:
    for cached in (read_attributes, parse_shape):
        cached.cache_clear()
    tracemalloc.start()
    try:
        use_all_of(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", LARGE)
def test_memory_grows_no_faster_than_the_text(kind):
    small, large = LARGE[kind](300), LARGE[kind](1200)
    assert parse_hlo_module(large).entry  # none is refused
    use_all_of(LARGE[kind](10))  # modules are imported, regular expressions compiled
    assert peak_memory(large) / peak_memory(small) < 1.5 * len(large) / len(small)


@pytest.mark.parametrize(
    "opening, closing", ["()", "{}", "[]", ("/*", "*/"), ('"', '"'), ("({", "})"), ("<", ">")]
)
@pytest.mark.parametrize("depth", [100, 100_000])
def test_brackets_nest_or_are_refused(opening, closing, depth):
    nested = opening * depth + closing * depth
    for place in (
        "  ROOT %n = f32[8,8] negate(%p), a=",
        "  ROOT %n = f32[8,8] negate(%p), backend_config={",
        "  ROOT %n = f32[8,8] negate(",
        "  ROOT %n = ",
        "  ROOT %n = f32[8,8] constant(",
        "%",
        "",
    ):
        use_all_of(ENTRY.format((place + nested).replace("{", "{{").replace("}", "}}").format()))
        use_all_of(
            f"HloModule m, a={nested}\n\nENTRY %e {nested} {{\n  ROOT %p = f32[] parameter(0)\n}}\n"
        )
        use_all_of(ENTRY.format("").replace("f32[8,8]", nested))


def test_tuples_of_tuples():
    shape = "f32[2]"
    for _ in range(150):
        shape = f"({shape}, {'s32[]'})"
    module = parse_hlo_module(f"HloModule m\n\nENTRY %e {{\n  ROOT %p = {shape} parameter(0)\n}}\n")
    assert str(module["p"].shape) == shape and module["p"].shape.size == 152
