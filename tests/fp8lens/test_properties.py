"""Properties of the inspector on HLO that Hypothesis makes up: valid modules from a small grammar,
and the same texts with something broken.

The examples are the same on every run. HYPOTHESIS_SCALE=100 tries a hundred times as many, other
ones each time.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8lens import HloParseError, Inspection, diff_hlo, inspect, parse_hlo_module, report_gemms
from fp8lens.hlo.parse import parse_shape, visible
from fp8lens.hlo.text import format_hlo_module
from tests.fp8lens.test_hlo_parse import assert_agrees

SCALE = int(os.environ.get("HYPOTHESIS_SCALE", 1))


def examples(number: int) -> settings:
    """So many examples, the same in every run."""
    return settings(
        max_examples=number * SCALE,
        derandomize=SCALE == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# A small grammar ----------------------------------------------------------------------------------

SIZES = st.integers(1, 300)
TYPES = st.sampled_from(["f32", "bf16", "f8e4m3fn", "f8e5m2"])
WORDS = st.text("ab {}()[],=%/*'.-<>$\x1b\u202e", max_size=12)
# Of one array, to an array of the same shape.
SAME_SHAPE = ["negate", "tanh", "exponential", "abs", "copy"]
GROUPS = ["{}", "{{0,1},{2,3}}", "[2,4]<=[8]", "[4,2]<=[2,2,2]T(2,1,0)", "mesh['a'=2,'b'=4] {'b'}"]
SUM = """%sum {
  %left = f32[] parameter(0)
  %right = f32[] parameter(1)
  ROOT %total = f32[] add(%left, %right)
}"""
FOREVER = """%forever {
  %state = f32[8] parameter(0)
  ROOT %go = pred[] constant(true)
}"""


@dataclass
class Written:
    """Lines of a module, and the matmuls that were written into it."""

    computations: list[tuple[str, list[str]]] = field(default_factory=list)
    # (m, n, k, left type, right type, result type, how often)
    matmuls: list[tuple] = field(default_factory=list)
    names: int = 0

    def name(self) -> str:
        self.names += 1
        return f"%i.{self.names}"

    @property
    def text(self) -> str:
        blocks = ["HloModule made_up, is_scheduled=true, num_partitions=8", SUM, FOREVER]
        for head, lines in self.computations:
            body = "\n".join(f"  {line}" for line in lines)
            blocks.append(f"{head} {{\n{body}\n}}")
        return "\n\n".join(blocks) + "\n"


def matmul(draw: Callable, made: Written, times: int | None, parameters: list[str]) -> list[str]:
    """A dot of two parameters, or the call of cuBLASLt that XLA makes of it."""
    m, n, k = draw(SIZES), draw(SIZES), draw(st.integers(2, 300))  # K = 1: no sum
    left, right = draw(TYPES), draw(TYPES)
    a, b, result = made.name(), made.name(), made.name()
    shapes = [f"{left}[{m},{k}]", f"{right}[{n},{k}]"]
    for name, shape in zip((a, b), shapes, strict=True):
        parameters.append(f"{name} = {shape} parameter({{number}})")
    made.matmuls.append((m, n, k, left, right, "f32", times))
    metadata = f'metadata={{op_name="jit(f)/{draw(WORDS)}/dot_general"}}'
    if draw(st.booleans()):
        dims = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"
        return [f"{result} = f32[{m},{n}] dot({a}, {b}), {dims}, {metadata}"]
    config = (
        '{"gemm_backend_config":{"alpha_real":1,"beta":0,"epilogue":"DEFAULT",'
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["1"]}}}'
    )
    target = 'custom_call_target="__cublas$lt$matmul"'
    call = f"{result} = (f32[{m},{n}], s8[64]) custom-call({a}, {b}), {target}, {metadata}"
    element = f"{made.name()} = f32[{m},{n}] get-tuple-element({result}), index=0"
    return [f"{call}, backend_config={config}", element]


def other_work(draw: Callable, made: Written, value: str) -> tuple[str, list[str]]:
    """Some work on an f32[8]; the name of an f32[8] that it makes."""
    name, inner = made.name(), made.name()
    match draw(st.sampled_from(["same", "both", "sum", "tuple", "moved", "sent"])):
        case "same":
            return name, [f"{name} = f32[8] {draw(st.sampled_from(SAME_SHAPE))}({value})"]
        case "both":
            return name, [f"{name} = f32[8] multiply({value}, {value})"]
        case "sum":
            zero = made.name()
            return name, [
                f"{zero} = f32[] constant(0)",
                f"{inner} = f32[] reduce({value}, {zero}), dimensions={{0}}, to_apply=%sum",
                f"{name} = f32[8] broadcast({inner}), dimensions={{}}",
            ]
        case "tuple":
            return name, [
                f"{inner} = (f32[8], f32[8]) tuple({value}, {value})",
                f"{name} = f32[8] get-tuple-element({inner}), index=1",
            ]
        case "moved":
            return name, [
                f"{inner} = f32[8] reverse({value}), dimensions={{0}}",
                f"{name} = f32[8] bitcast({inner})",
            ]
        case _:
            groups = draw(st.sampled_from(GROUPS))
            how = f"channel_id={made.names}, replica_groups={groups}, to_apply=%sum"
            return name, [f"{name} = f32[8] all-reduce({value}), {how}"]


@st.composite
def modules(draw: Callable) -> Written:
    """Computations of which each calls the one before it once, by a call or a loop."""
    made = Written()
    depth = draw(st.integers(1, 3))
    trips = [draw(st.none() | st.integers(1, 20)) for _ in range(depth - 1)]
    for level in range(depth):
        value = made.name()
        lines = [f"{value} = f32[8] parameter(0)"]
        # How often it runs: the trips of the loops around it, unknown where one of them is.
        around = trips[level:]
        times: int | None = 1
        for count in around:
            times = None if count is None or times is None else times * count
        for _ in range(draw(st.integers(0, 3))):
            value, more = other_work(draw, made, value)
            lines += more
        if level == depth - 1 or draw(st.booleans()):
            fused_parameters: list[str] = []
            # ENTRY may have further parameters; another's caller would have to hand them over.
            product = matmul(draw, made, times, fused_parameters)
            if level == depth - 1:
                numbered = enumerate(fused_parameters, 1)
                lines += [line.format(number=number) for number, line in numbered]
            else:
                lines += [
                    re.sub(r"parameter\(.*", f"broadcast({made.name()}), dimensions={{}}", line)
                    for line in fused_parameters
                ]
                zeros = re.findall(r"(\w+)\[\S+ broadcast\((\S+)\)", "\n".join(lines[-2:]))
                lines[-2:-2] = [f"{zero} = {dtype}[] constant(0)" for dtype, zero in zeros]
            lines += product
        if level:
            count, called = trips[level - 1], f"%level{level - 1}"
            name = made.name()
            if count == 1:
                lines.append(f"{name} = f32[8] call({value}), to_apply={called}")
            else:
                known = f'{{"known_trip_count":{{"n":"{count}"}}}}'
                config = "" if count is None else f", backend_config={known}"
                loop = f"while({value}), condition=%forever, body={called}"
                lines.append(f"{name} = f32[8] {loop}{config}")
            value = name
        lines.append(f"ROOT {made.name()} = f32[8] negate({value})")
        entry = "ENTRY " if level == depth - 1 else ""
        made.computations.append((f"{entry}%level{level}", lines))
    return made


# Valid modules ------------------------------------------------------------------------------------


@examples(80)
@given(modules())
def test_a_module_is_read_as_xla_reads_it_and_as_it_is_printed(made):
    module = parse_hlo_module(made.text)
    assert_agrees(module)

    def told(of):
        return [(i.name, i.opcode, i.operands, str(i.shape), i.called, i.is_root) for i in of]

    again = parse_hlo_module(format_hlo_module(module, metadata=True, backend_cfg=True))
    assert told(again) == told(module)
    assert [i.backend_config for i in again] == [i.backend_config for i in module]


@examples(80)
@given(modules())
def test_the_report_has_the_matmuls_that_were_written(made):
    report = report_gemms(made.text)
    rows = Counter(
        (r.m, r.n, r.k, r.lhs_dtype, r.rhs_dtype, r.out_dtype, r.count) for r in report.rows
    )
    assert rows == Counter(made.matmuls)
    flops = [2 * m * n * k * (times or 1) for m, n, k, *_, times in made.matmuls]
    assert report.flops == sum(flops)


@examples(200)
@given(st.text(alphabet="f32[](){},<=? 0189bspredtuke:TE/*", max_size=40))
def test_any_shape_is_printed_as_it_is_read(text):
    with contextlib.suppress(HloParseError):
        shape = parse_shape(text)
        assert parse_shape(str(shape)) == shape


# Broken ones --------------------------------------------------------------------------------------

JUNK = st.sampled_from(
    ["(", ")", "{", "}", "[", "]", '"', "\\", ",", "=", "%", "#0", "/*", "*/", "\n", "\0", "\x1b"]
    + ["\ud800", "-1", "9" * 30, "ROOT ", "f32[", "()", "while", "fusion", "token[]", "NaN"]
    + ["calls=%level0", "body=%level0", "backend_config={}", "metadata={}", "(" * 300]
)
TOKEN = re.compile(r"[\w.\-]+|\s+|.", re.S)


@st.composite
def broken(draw: Callable) -> str:
    """A module's text after a few edits: tokens and lines lost, repeated, exchanged, or junk."""
    text = draw(modules()).text
    for _ in range(draw(st.integers(1, 4))):
        parts = text.splitlines(keepends=True) if draw(st.booleans()) else TOKEN.findall(text)
        if not parts:
            break
        at, other = (draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        match draw(st.sampled_from(["lost", "exchanged", "twice", "junk", "end"])):
            case "lost":
                del parts[at]
            case "exchanged":
                parts[at], parts[other] = parts[other], parts[at]
            case "twice":
                parts.insert(at, parts[other])
            case "junk":
                parts[at] = draw(JUNK)
            case "end":
                del parts[at:]
        text = "".join(parts)
    return text


def ask_everything(text: str) -> None:
    """All that shows a text: it answers without control characters, or raises HloParseError."""
    views: list[Callable[[Inspection], object]] = [
        lambda seen: seen.report,
        lambda seen: seen.ledger,
        lambda seen: seen.collectives,
        lambda seen: seen.bill,
        lambda seen: seen.json(),
        lambda seen: diff_hlo(seen.module, parse_hlo_module(Written().text + LEAST)),
        lambda seen: format_hlo_module(seen.module),
    ]
    try:
        seen = inspect(text)
    except HloParseError as error:
        assert error.line >= 1 and error.column >= 1 and visible(str(error)) == str(error)
        return
    for view in views:
        with contextlib.suppress(HloParseError):
            shown = str(view(seen))
            assert visible(shown, "\n\t") == shown


LEAST = "ENTRY %e {\n  ROOT %p = f32[8] parameter(0)\n}\n"


@examples(200)
@given(broken())
def test_a_broken_text_is_answered_or_refused(text):
    ask_everything(text)


@pytest.mark.parametrize("place", ["%p = {}", "f32[8] negate({})", "f32[8] constant({})"])
@pytest.mark.parametrize("opening, closing", ["()", "{}", "[]", ("/*", "*/"), ('"', '"')])
def test_brackets_nest_deeper_than_python(place, opening, closing):
    line = place.format(opening * 5000 + closing * 5000)
    ask_everything(f"HloModule m\n\nENTRY %e {{\n  ROOT %r = {line}\n}}\n")


def called(line: str, depth: int, first: str = "ROOT %r = f32[8] negate(%p)") -> str:
    """Computations that each call the one before; @ in `line` is its name."""
    parts = ["HloModule m, is_scheduled=true", FOREVER]
    for level in range(depth):
        body = line.replace("@", f"%c{level - 1}") if level else first
        entry = "ENTRY " if level == depth - 1 else ""
        parts.append(f"{entry}%c{level} {{\n  %p = f32[8] parameter(0)\n  {body}\n}}")
    return "\n\n".join(parts) + "\n"


CALLS = {
    "call": "ROOT %r = f32[8] call(%p), to_apply=@",
    "while": "ROOT %r = f32[8] while(%p), condition=%forever, body=@",
    "conditional": "ROOT %r = f32[8] conditional(%p, %p, %p), branch_computations={@, @}",
    "fusion": "ROOT %r = f32[8] fusion(%p), kind=kLoop, calls=@",
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_nest_deeper_than_python_and_may_not_call_themselves(kind):
    ask_everything(called(CALLS[kind], 1020))
    with pytest.raises(HloParseError, match="calls itself"):
        report_gemms(called(CALLS[kind].replace("@", "%c1"), 3))


def test_what_is_called_twice_at_each_level_is_visited_once():
    twice = "%q = f32[8] call(%p), to_apply=@\n  ROOT %r = f32[8] call(%q), to_apply=@"
    dot = "dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    first = f"%d = f32[] {dot}\n  ROOT %r = f32[8] negate(%p)"
    (row,) = report_gemms(called(twice, 61, first)).rows
    assert row.count == 2**60
