"""Which kernel does which line: as it is known of programs, and as the compiled kernels say."""

from inspect import getsourcelines

import jax
import jax.numpy as jnp
import pytest

from fp8lens import inspect
from fp8lens.matmul.unfused import inside
from helpers.figures import source_lines
from helpers.figures.source_lines import Lines, show_lines
from helpers.numerics.recipes import scaled_dot, to_e4m3
from tests.programs.random_programs import program
from tools.site import sanitize

f32 = jnp.float32
MATRIX = jax.ShapeDtypeStruct((4096, 4096), jnp.float8_e4m3fn)
SCALE, ROWS = jax.ShapeDtypeStruct((), f32), jax.ShapeDtypeStruct((4096, 1), f32)
FIVE = (MATRIX, MATRIX, SCALE, SCALE, SCALE)


def in_one_call(a, b, a_scale, b_scale, d_scale):
    d = scaled_dot(a, b, a_scale, b_scale)
    # Nobody does a comment.
    d = jax.nn.relu(d)
    amax = jnp.max(jnp.abs(d))
    return to_e4m3(d, d_scale), amax


def unclamped(a, b, a_scale, b_scale, d_scale):
    d = scaled_dot(a, b, a_scale, b_scale)
    return (d * d_scale).astype(jnp.float8_e4m3fn)


def per_row(a, b, a_scales, b_scale):
    a = a.astype(f32) * a_scales
    b = b.astype(f32) * b_scale
    d = jax.lax.dot(a, b.T)
    return d.astype(jnp.bfloat16)


def stored_the_other_way(a, b, a_scale, b_scale):
    return scaled_dot(a, b.T, a_scale, b_scale)


def cut(a, b, a_scale, b_scale):
    a = (a.astype(f32) * a_scale)[::2]
    b = b.astype(f32) * b_scale
    return jax.lax.dot(a, b.T)


MARKS = {
    unclamped: (FIVE, ["", "1", "2"]),
    per_row: ((MATRIX, MATRIX, ROWS, SCALE), ["", "1", "2", "3", "4"]),
    stored_the_other_way: (FIVE[:4], ["", "2"]),  # XLA adds a kernel that transposes
}


@pytest.mark.parametrize("fn", MARKS, ids=lambda fn: fn.__name__)
def test_each_line_has_the_kernels_that_do_it(fn):
    arguments, marks = MARKS[fn]
    shown = show_lines(fn, *arguments)
    assert ["".join(some) for some in shown.marks] == marks
    assert len(shown.kernels) == shown.inspection.report.kernels
    is_added = ["of no line" in name for name in shown.names]
    assert is_added == [str(n + 1) not in marks for n in range(len(is_added))]


def test_what_is_not_attributed_is_said_to_be():
    marks = show_lines(cut, *FIVE[:4]).marks
    assert "?" in marks[1] and "?" not in marks[2] + marks[3]


def is_flat(layer):
    """Whether it stands in no loop and no branch, where nothing is attributed."""
    return layer.inside in ("", "jit", "checkpoint", "vmap")


@pytest.mark.parametrize(
    "seed", [seed for seed in range(12) if all(map(is_flat, program(seed).layers))]
)
def test_a_line_is_done_by_the_kernels_that_hold_its_operations(seed):
    """What XLA's own kernels hold has its line in the compiled program too."""
    asked = program(seed)
    seen = inspect(asked.fn, *asked.args, **asked.options)
    file, within = asked.fn.__code__.co_filename, range(1, 10_000)
    does = source_lines.kernels_of_lines(seen, file, within)
    assert does and set().union(*does.values()) <= {source_lines.UNKNOWN, *range(len(seen.ledger))}
    for n, line in enumerate(seen.ledger):
        if line.kernel.instruction.opcode == "custom-call":
            continue
        for i in inside(line.kernel.instruction):
            # XLA converts a call's amax, and cuts what it padded, under names of other operations.
            added = source_lines._NO_WORK | {"slice", "pad"}
            is_work = i.opcode not in added and i.shape.size > 1
            written = source_lines._line(i, file, within)
            if written and is_work:
                assert {n, source_lines.UNKNOWN} & does.get(written, set()), (i.name, line.name)


def test_text_and_page_show_every_line_once():
    shown = show_lines(in_one_call, *FIVE)
    source = getsourcelines(in_one_call)[0]
    text = repr(shown).splitlines()
    assert text[0] == "FP8: one kernel, 50.3 MB moved"
    assert [line[3:] for line in text[1:-1]] == [line.rstrip() for line in source]
    assert [line[0] for line in text[1:-1]] == [" ", "1", " ", "1", "1", "1"]
    assert text[-1] == "kernel 1, 50.3 MB: cuBLASLt, multiplies FP8: epilogue RELU, amax"
    assert not sanitize.html(shown._repr_html_())[1]


def test_a_program_that_does_not_compile_shows_its_code_and_why():
    shown = Lines(["def layer(a):", "    return <a>"], (), {"error": "XLA: <no>"})
    assert repr(shown).splitlines()[0] == "It does not compile: XLA: <no>"
    assert "&lt;a&gt;" in shown._repr_html_() and "XLA: &lt;no&gt;" in shown._repr_html_()
