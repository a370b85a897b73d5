"""What the inspector does with HLO in which something is broken, made by Hypothesis, or that is
nested deeper than any program.

The examples are the same on every run. HYPOTHESIS_SCALE=100 tries a hundred times as many, other
ones each time.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8lens import HloParseError, Inspection, diff_hlo, inspect, parse_hlo_module, report_gemms
from fp8lens.hlo.parse import parse_shape, visible
from fp8lens.hlo.text import format_hlo_module

# A loop, a call, a fusion of two results, collectives and matmuls in few lines.
WHOLE = (Path(__file__).parent / "hlo/every_form.txt").read_text()
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


FOREVER = """%forever {
  %state = f32[8] parameter(0)
  ROOT %go = pred[] constant(true)
}"""


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
    + ["calls=%layer", "body=%layer", "backend_config={}", "metadata={}", "(" * 300]
)
TOKEN = re.compile(r"[\w.\-]+|\s+|.", re.S)


@st.composite
def broken(draw: Callable) -> str:
    """A module's text after a few edits: tokens and lines lost, repeated, exchanged, or junk."""
    text = WHOLE
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
        lambda seen: diff_hlo(seen.module, parse_hlo_module(LEAST)),
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


LEAST = "HloModule m\n\nENTRY %e {\n  ROOT %p = f32[8] parameter(0)\n}\n"


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
