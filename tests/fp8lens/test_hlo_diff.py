import functools
import json
import random
import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens.hlo.diff import HloDiff, diff_hlo
from helpers import aot_compile, parse_hlo_module
from tests.programs.renamed import Names, renamed

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
SHAPES = (
    jax.ShapeDtypeStruct((64, 128), e4m3),
    jax.ShapeDtypeStruct((256, 128), e4m3),
    *[jax.ShapeDtypeStruct((), f32)] * 2,
)


def scaled(x, w, x_scale, w_scale, clamp=True, twice=False):
    d = (x.astype(f32) * x_scale) @ (w.astype(f32) * w_scale).T
    d = d + d if twice else d
    result = (jnp.clip(d, -448, 448) if clamp else d).astype(e4m3)
    return result, jnp.max(jnp.abs(d)), jnp.sort(d, 0)


@pytest.fixture(scope="module")
def plain():
    return aot_compile(scaled, *SHAPES).as_text()


def shuffled(text: str, seed: int) -> str:
    """The same program: every name new, independent instructions in another order."""
    shuffle = random.Random(seed)
    lines = ["HloModule other, is_scheduled=true"]
    for c in parse_hlo_module(text).computations.values():
        lines.append(f"\n{'ENTRY ' * c.is_entry}%{c.name} {{")
        waiting, placed = [*c], set()
        while waiting:
            i = shuffle.choice([i for i in waiting if placed.issuperset(i.operands)])
            waiting.remove(i)
            placed.add(i.name)
            lines.append(i.cmd)
        lines.append("}")
    return renamed("\n".join(lines), Names({}, {}, {}))


@pytest.mark.parametrize("gemm", ["cublaslt", "triton"])
@pytest.mark.parametrize("seed", range(3))
def test_names_and_order_make_no_difference(gemm, seed):
    text = aot_compile(scaled, *SHAPES, gemm=gemm).as_text()
    diff = diff_hlo(text, shuffled(text, seed))
    assert diff.same and not diff and str(diff) == "no difference", str(diff)


@pytest.mark.parametrize(
    "key, old, new",
    [
        ("epilogue", '"DEFAULT"', '"RELU"'),
        ("alpha_real", "1", "0.5"),
        ("damax_output", "false", "true"),
        ("operand_precision", '["DEFAULT","DEFAULT"]', '["HIGHEST","HIGHEST"]'),
    ],
)
def test_settings_of_a_matmul_show(plain, key, old, new):
    diff = diff_hlo(plain, shuffled(plain.replace(f'"{key}":{old}', f'"{key}":{new}'), 0))
    text = re.sub(r"\n[+-] {4,}", " ", str(diff))  # what is wrapped in one line
    changed = [line for line in text.splitlines() if line[0] in "+-"]
    assert [line[0] for line in changed] == ["-", "+"]
    for line, value in zip(changed, (old, new), strict=True):
        assert f'"{key}": {json.dumps(json.loads(value))}' in line
    assert diff != diff_hlo(plain, plain) == HloDiff(())


@pytest.mark.parametrize(
    "key, value",
    [("selected_algorithm", '"3"'), ("lhs_stride", '"1"'), ("autotune_workspace_size", '"7"')],
)
def test_bookkeeping_of_a_matmul_does_not(plain, key, value):
    other = re.sub(rf'"{key}":("\w+"|\w+)', f'"{key}":{value}', plain)
    assert other != plain
    assert diff_hlo(plain, other.replace("s8[4194304]", "s8[33554432]")).same


def test_a_constant_deep_in_a_fusion_shows_alone(plain):
    diff = diff_hlo(plain, shuffled(plain.replace("constant(448)", "constant(240)"), 0))
    ((heading, rows),) = diff.sections
    (changed,) = [row for row in rows if row.changed]
    assert heading.startswith("%fused")
    assert "constant(448)" in changed.a and "constant(240)" in changed.b


def test_one_instruction_more_shows_as_one():
    twice = functools.partial(scaled, twice=True)
    before, after = (jax.jit(fn).lower(*SHAPES) for fn in (scaled, twice))
    text = str(diff_hlo(before, after))
    added = [line for line in text.splitlines() if line.startswith("+")]
    assert sum("add(" in line for line in added) == 1 and " dot(" not in text


def test_around_keeps_the_places_that_match(plain):
    other = plain.replace('"epilogue":"DEFAULT"', '"epilogue":"RELU"')
    diff = diff_hlo(plain, other.replace("constant(448)", "constant(240)"))
    assert "240" in str(diff) and "RELU" in str(diff)
    around = diff.around("custom-call")
    assert "240" not in str(around) and "RELU" in str(around)
    assert diff.around("no such line").same
