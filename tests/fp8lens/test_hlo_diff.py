import html
import json
import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp8lens.hlo.diff import HloDiff, diff_hlo
from helpers import HloParseError, aot_compile, parse_hlo_module

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
SHAPES = (
    jax.ShapeDtypeStruct((64, 128), e4m3),
    jax.ShapeDtypeStruct((256, 128), e4m3),
    *[jax.ShapeDtypeStruct((), f32)] * 2,
)


def scaled(x, w, x_scale, w_scale, relu=False, clamp=True, twice=False):
    d = (x.astype(f32) * x_scale) @ (w.astype(f32) * w_scale).T
    d = jax.nn.relu(d) if relu else d
    d = d + d if twice else d
    return (
        (jnp.clip(d, -448, 448) if clamp else d).astype(e4m3),
        jnp.max(jnp.abs(d)),
        jnp.sort(d, 0),
    )


def variant(**how):
    def f(x, w, x_scale, w_scale):
        return scaled(x, w, x_scale, w_scale, **how)

    return f


@pytest.fixture(scope="module")
def plain():
    return aot_compile(scaled, *SHAPES).as_text()


def renamed(text: str, seed: int = 0) -> str:
    """The same program: every name new, numbered at random, independent instructions in another
    order, scratch of another size, without metadata.
    """
    shuffle = random.Random(seed)
    header, _, body = text.partition("\n\n%")
    body = re.sub(r", metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*\}", "", f"%{body}")
    names = list(dict.fromkeys(re.findall(r"%([\w.\-]+)", body)))
    numbers = shuffle.sample(range(1000, 1000 + len(names)), len(names))
    new = {name: f"n.{number}" for name, number in zip(names, numbers, strict=True)}
    body = re.sub(r"%([\w.\-]+)", lambda m: "%" + new[m[1]], body).replace(
        "s8[4194304]", "s8[33554432]"
    )
    body = re.sub(r'"autotune_workspace_size":"\d+"', '"autotune_workspace_size":"7"', body)

    def reorder(m: re.Match) -> str:
        waiting, placed, out = m[2].strip("\n").split("\n"), set(), []
        while waiting:
            ready = [
                line
                for line in waiting
                if set(re.findall(r"%([\w.\-]+)", line.partition("), ")[0].partition(" = ")[2]))
                <= placed
            ]
            line = shuffle.choice(ready)
            waiting.remove(line)
            placed.add(re.search(r"%([\w.\-]+) = ", line)[1])
            out.append(line)
        return m[1] + "\n" + "\n".join(out) + "\n}"

    body = re.sub(r"^((?:ENTRY )?%[^\n]*\{)\n(.*?)\n\}", reorder, body, flags=re.M | re.S)
    return f"{header.partition(chr(10))[0].replace('jit_', 'other_')}\n\n{body}"


@pytest.mark.parametrize("gemm", ["cublaslt", "triton"])
def test_names_and_order_make_no_difference(gemm):
    text = aot_compile(variant(relu=True), *SHAPES, gemm=gemm).as_text()
    for seed in range(3):
        other = renamed(text, seed)
        assert other != text and parse_hlo_module(other)
        diff = diff_hlo(text, other)
        assert diff.same and not diff and str(diff) == "no difference", str(diff)
        assert "no difference" in diff._repr_html_()


def test_epilogue_shows_in_two_lines(plain):
    diff = diff_hlo(plain, plain.replace('"epilogue":"DEFAULT"', '"epilogue":"RELU"'))
    removed = [line for line in str(diff).splitlines() if line.startswith("-")]
    added = [line for line in str(diff).splitlines() if line.startswith("+")]
    assert bool(diff) and not diff.same
    assert len(removed) == len(added) == 2  # one instruction, wrapped
    assert '"epilogue": "DEFAULT"' in removed[1] and '"epilogue": "RELU"' in added[1]
    assert diff != diff_hlo(plain, plain) == HloDiff(())


@pytest.mark.parametrize(
    "key, old, new",
    [
        ("alpha_real", "1", "0.5"),
        ("beta", "0", "1"),
        ("damax_output", "false", "true"),
        ("operand_precision", '["DEFAULT","DEFAULT"]', '["HIGHEST","HIGHEST"]'),
    ],
)
def test_settings_of_a_matmul_show(plain, key, old, new):
    assert f'"{key}":{old}' in plain
    text = str(diff_hlo(plain, renamed(plain.replace(f'"{key}":{old}', f'"{key}":{new}'))))
    assert f'"{key}": {json.dumps(json.loads(new))}' in re.sub(r"\n[+-]\s+", " ", text)
    assert text.count("custom-call(") == 2


@pytest.mark.parametrize(
    "key, value",
    [
        ("selected_algorithm", '"3"'),
        ("lhs_stride", '"1"'),
        ("operation_queue_id", '"2"'),
        ("force_earliest_schedule", "true"),
    ],
)
def test_bookkeeping_of_a_matmul_does_not(plain, key, value):
    other = re.sub(rf'"{key}":("\w+"|\w+)', f'"{key}":{value}', plain)
    assert other != plain and diff_hlo(plain, other).same


def test_a_constant_deep_in_a_fusion_shows_alone(plain):
    diff = diff_hlo(plain, renamed(plain.replace("constant(448)", "constant(240)")))
    ((heading, rows),) = diff.sections
    assert heading.startswith("%fused")
    changed = [row for row in rows if row.changed]
    assert len(changed) == 1 and "constant(448)" in changed[0].a and "constant(240)" in changed[0].b


def test_a_layout_that_is_not_row_major_shows(plain):
    call = re.search(r"f8e4m3fn\[256,128\]\{1,0\} parameter\(1\)", plain)[0]
    assert "{0,1}" in str(diff_hlo(plain, plain.replace(call, call.replace("{1,0}", "{0,1}"))))


def test_one_instruction_more_shows_as_one():
    before, after = (jax.jit(variant(twice=twice)).lower(*SHAPES) for twice in (False, True))
    text = str(diff_hlo(before, after, context=0))
    added = [line for line in text.splitlines() if line.startswith("+")]
    assert sum("add(" in line for line in added) == 1
    assert " dot(" not in text


def test_swapped_operands_show():
    one, two = (
        jax.jit(f).lower(*[jax.ShapeDtypeStruct((8,), f32)] * 2)
        for f in (lambda x, y: x - y, lambda x, y: y - x)
    )
    diff = diff_hlo(one, two)
    assert diff and str(diff).count("subtract(") == 2


def test_context_is_limited(plain):
    changed = plain.replace('"epilogue":"DEFAULT"', '"epilogue":"RELU"')
    lengths = [len(diff_hlo(plain, changed, context=n).sections[0][1]) for n in (0, 1, 2)]
    assert lengths == sorted(set(lengths))
    rows = diff_hlo(plain, changed, context=0).sections[0][1]
    assert [row.changed for row in rows].count(True) == 1 and all(
        row.a is None for row in rows if not row.changed
    )


def test_fused_and_not(plain):
    lines = str(diff_hlo(plain, aot_compile(variant(clamp=False), *SHAPES))).splitlines()
    assert [line[0] for line in lines if "clamp(" in line] == ["-"]


def test_around_keeps_the_places_that_match(plain):
    other = plain.replace('"epilogue":"DEFAULT"', '"epilogue":"RELU"').replace(
        "constant(448)", "constant(240)"
    )
    diff = diff_hlo(plain, other)
    assert "240" in str(diff) and "RELU" in str(diff)
    assert "240" not in str(diff.around("custom-call")) and "RELU" in str(
        diff.around("custom-call")
    )
    assert diff.around("no such line").same


def test_html_has_both_sides(plain):
    page = diff_hlo(plain, plain.replace('"epilogue":"DEFAULT"', '"epilogue":"RELU"'))._repr_html_()
    assert page.count("<tr") == page.count("</tr>") and page.count("<td") == page.count("</td>")
    words = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert '"epilogue": "DEFAULT"' in words and '"epilogue": "RELU"' in words
    assert "color:black" not in page and "background:white" not in page


def test_donated_arguments_show():
    x = jax.ShapeDtypeStruct((64, 64), f32)
    one, two = (aot_compile(jax.jit(lambda x: x * 2, donate_argnums=d), x) for d in ((), (0,)))
    assert "input_output_alias" in str(diff_hlo(one, two))


def test_old_dumps_agree_with_themselves():
    for path in Path(__file__).parent.glob("hlo/*.txt"):
        text = path.read_text()
        assert diff_hlo(text, text).same and diff_hlo(text, format_again(text)).same


def format_again(text: str) -> str:
    from helpers import format_hlo_module

    return format_hlo_module(text, backend_cfg=True)


def test_dump_abbreviates_tuple_elements(tmp_path):
    def f(x):
        y, i = jax.lax.top_k(x, 4)
        return (
            jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, y))[1] @ y.T,
            i,
            jnp.sort(x),
        )

    compiled = aot_compile(
        f,
        jax.ShapeDtypeStruct((64, 64), f32),
        compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True},
    )
    dump = next(tmp_path.glob("*gpu_after_optimizations.txt")).read_text()
    assert diff_hlo(dump, compiled).same
    if "#0" in dump:  # JAX 0.12; releases before write the lines that the parser puts in
        with pytest.raises(HloParseError, match="has no element 9"):
            parse_hlo_module(dump.replace("#0", "#9"))
        with pytest.raises(HloParseError, match="is not an instruction"):
            parse_hlo_module(re.sub(r"%[\w.\-]+#0", "%nobody#0", dump))


def test_what_is_not_hlo_is_refused(plain):
    with pytest.raises(HloParseError):
        diff_hlo(plain, "module {}")
    with pytest.raises(TypeError, match="pass HLO text"):
        diff_hlo(plain, 3)
