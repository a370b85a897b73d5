import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp8lens.hlo import HloParseError, Shape, parse_hlo_module, parse_shape
from helpers import aot_compile
from tools.bench import replicated, training_step

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
OLD = sorted(Path(__file__).parent.glob("hlo/*.txt"))


def scaled(a, b, a_scale, b_scale, d_scale):
    d = jax.nn.relu(jax.lax.dot(a.astype(f32) * a_scale, (b.astype(f32) * b_scale).T))
    return jnp.clip(d * d_scale, -448, 448).astype(e4m3), jnp.max(jnp.abs(d))


def control(x, w):
    def body(carry, _):
        carry = jnp.tanh(carry @ w)
        return carry, carry.sum()

    y, sums = jax.lax.scan(body, x, None, length=7)
    y = jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, y)
    y = jax.lax.cond(sums.sum() > 0, lambda y: y * 2, lambda y: y - 1, y)
    y = jax.lax.switch(jnp.int32(sums[0]), [jnp.sin, jnp.cos, jnp.exp], y)
    return (
        y,
        jax.random.normal(jax.random.key(0), (4, 5)),
        jnp.array([[1.5, 2], [3, 4]]) * y[:2, :2],
    )


def callback(x):
    return jax.pure_callback(lambda v: v, shape(3), x) + 3


def linalg(x):
    return (
        jnp.linalg.cholesky(x),
        jnp.linalg.svd(x),
        jnp.sort(x),
        jnp.argsort(x),
        jax.lax.top_k(x, 3),
        jnp.fft.fft(x),
    )


def shape(*dims, dtype=f32):
    return jax.ShapeDtypeStruct(dims, dtype)


SCALED = (shape(32, 64, dtype=e4m3), shape(128, 64, dtype=e4m3), *[shape()] * 3)
CONTROL = shape(32, 64), shape(64, 64)
STEP, SHAPES = training_step(layers=1)
PROGRAMS = {
    "scaled, cublaslt": lambda: aot_compile(scaled, *SCALED),
    "scaled, triton": lambda: aot_compile(scaled, *SCALED, gemm="triton"),
    "scaled, unoptimized": lambda: jax.jit(scaled).lower(*SCALED),
    "linalg, H100": lambda: aot_compile(linalg, shape(16, 16)),
    "linalg, CPU": lambda: jax.jit(linalg).lower(shape(16, 16)).compile(),
    "control flow, H100": lambda: aot_compile(control, *CONTROL),
    "control flow, CPU": lambda: jax.jit(control).lower(*CONTROL).compile(),
    "control flow, unoptimized": lambda: jax.jit(control).lower(*CONTROL),
    "callback, CPU": lambda: jax.jit(callback).lower(shape(3)).compile(),
    # Sharded, as that has all of the other's instructions, and collectives.
    "training step": lambda: aot_compile(
        STEP,
        *SHAPES,
        mesh_shape={"d": 8},
        in_specs=(None, None, jax.P("d")),
    ),
}


@pytest.fixture(scope="module")
def programs():
    return {name: make() for name, make in PROGRAMS.items()}


@pytest.fixture(scope="module")
def small(programs):
    return programs["scaled, cublaslt"].as_text()


def oracle(text):
    """What XLA's own parser finds: computation to [(instruction, opcode, operands)], in order."""
    from jaxlib import _hlo

    # XLA prints this attribute on asynchronous all-reduces, and does not read it back.
    text = re.sub(
        r"( all-reduce-start\(.*), output_to_operand_aliasing=\{\{1\}: \(0, \{\}\)\}", r"\1", text
    )
    opcode = re.compile(r" ([a-z][\w\-]*)\(")
    return {
        c.name: [
            (i.name, opcode.search(i.to_string())[1], tuple(o.name for o in i.operands()))
            for i in c.instructions()
        ]
        for c in _hlo.hlo_module_from_text(text).computations()
    }


def ours(module):
    return {
        name: [(i.name, i.opcode, i.operands) for i in c] for name, c in module.computations.items()
    }


def assert_agrees(module):
    found, expected = ours(module), oracle(module.text)
    # `fusion-start` is short for an async-start that wraps a computation of one fusion: XLA's
    # parser unfolds it.
    for name in expected.keys() - found.keys():
        assert f"%{name} (" not in module.text and [i[1] for i in expected[name][:-1]] == [
            "parameter"
        ] * (len(expected[name]) - 1)
        del expected[name]
    assert list(found) == list(expected)
    assert found == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees_with_xla(programs, name):
    module = parse_hlo_module(programs[name])
    assert_agrees(module)
    assert len(module) == sum(map(len, ours(module).values())) == len(list(module))
    assert module.entry.is_entry and re.search(
        rf"^ENTRY %?{re.escape(module.entry.name)} ", module.text, re.M
    )
    for i in module:  # whatever is parsed on demand can be
        assert i.cmd in module.text and f"{i.name} = {i.shape_text} {i.opcode}(" in i.cmd
        assert str(i.shape) == re.sub(r"/\*.*?\*/", "", i.shape_text)
        assert i.attributes.keys() >= {"backend_config"} or i.backend_config is None
        assert set(i.called) <= module.computations.keys()
        assert (i.literal is None) == (i.opcode != "constant")
        assert (i.metadata is None) == ("metadata" not in i.attributes)
    for c in module.computations.values():
        assert c.root is c[c.root.name] and [i for i in c if i.is_root] == [c.root]
        assert [p.parameter_number for p in c.parameters] == list(range(len(c.parameters)))


@pytest.mark.parametrize("path", OLD, ids=lambda p: p.stem)
def test_reads_what_older_jax_printed(path):
    assert_agrees(parse_hlo_module(path.read_text()))


def test_fields_of_an_fp8_matmul(programs):
    module = parse_hlo_module(programs["scaled, cublaslt"])
    (call,) = [i for i in module if i.opcode == "custom-call"]
    assert module.name == "jit_scaled" and module.attributes["is_scheduled"] == "true"
    assert (
        call.custom_call_target == "__cublas$lt$matmul$f8" and "__cublas$lt$matmul$f8" in call.cmd
    )
    assert call.backend_config["gemm_backend_config"]["epilogue"] == "RELU"
    assert [module[o].parameter_number for o in call.operands] == [0, 1, 2, 3, 4]
    assert call.shape.elements[0] == Shape("f8e4m3fn", (32, 128), "1,0")
    lines = Path(__file__).read_text().splitlines()
    assert Path(call.metadata.source_file).name == Path(__file__).name
    assert "def scaled" in lines[
        call.metadata.source_line - 3
    ] and call.metadata.op_name.startswith("jit(scaled)/")
    assert (
        module.file_names
        and module.function_names
        and module.file_locations
        and module.stack_frames
    )
    assert (
        module.entry.root is module.entry[module.entry.root.name]
        and module.entry.get("no such") is None
    )
    with pytest.raises(KeyError, match="no such"):
        module["no such"]


def test_called_computations_and_constants(programs):
    module = parse_hlo_module(programs["control flow, unoptimized"])
    loops = [i for i in module if i.opcode == "while"]
    assert loops and all(len(i.called) == 2 for i in loops)
    (switch,) = [i for i in module if i.opcode == "conditional" and len(i.called) == 3]
    assert {module.computations[name].root.opcode for name in switch.called} == {
        "sine",
        "cosine",
        "exponential",
    }
    assert "{ { 1.5, 2 }, { 3, 4 } }" in [i.literal for i in module]


def test_backend_config_in_every_form(programs):
    def configs(name):
        return [
            i.backend_config for i in parse_hlo_module(programs[name]) if i.opcode == "custom-call"
        ]

    assert {"lower": True} in configs("linalg, H100")  # MLIR
    assert {"index": 0} in configs("callback, CPU")  # MLIR, with a type
    old = parse_hlo_module(next(p for p in OLD if "ffi" in p.name).read_text())
    assert old["cholesky.8"].backend_config == {
        "uplo": {"lower": True},
        "name": 'a"b',
    }  # JSON in a string
    assert old["cholesky.8"].custom_call_target == 'lapack_"spotrf"{'
    metadata = old["cholesky.8"].metadata
    assert metadata.op_name == 'jit(f)/jit(main)/café {"(' and metadata.op_type == "cholesky"
    assert metadata.source_file == "/home/user/f.py" and metadata.source_line == 12
    assert old["custom-call.11"].backend_config == "plain, with {braces"
    assert old["constant.6"].literal == "(1, -0.5)" and old["broadcast.12"].backend_config is None
    mlir = (
        '{custom_call_config = {body = "a\\22}", f = 1.5e+00 : f32}, lower = true, '
        "x = -1 : i32, flag, "
        "dims = [1, 2 : i64], a = array<i64: 1, 2>}"
    )
    one = parse_hlo_module(
        f"HloModule m\nENTRY e {{\n  ROOT p = f32[] parameter(0), backend_config={mlir}\n}}"
    )["p"]
    assert one.backend_config == {
        "custom_call_config": {"body": 'a"}', "f": 1.5},
        "lower": True,
        "x": -1,
        "flag": True,
        "dims": [1, 2],
        "a": "array<i64: 1, 2>",
    }


def test_shapes():
    for text, nbytes in (
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("f4e2m1fn[3]{0:E(4)}", 2),
        ("u4[8]", 4),
        ("token[]", 0),
        ("f8e8m0fnu[4,8]{1,0}", 32),
        ("bf16[<=5,2]{1,0:T(8,128)(2,1)S(5)}", 20),
        ("c128[2]", 32),
        ("((f32[2]{0}, (s4[3,3], token[])), u32[])", 17),
        ("()", 0),
        ("opaque[]", 0),
    ):
        assert str(parse_shape(text)) == text and parse_shape(text).nbytes == nbytes
    dynamic = parse_shape("bf16[<=5,2]{1,0}")
    assert (
        dynamic.dims == (5, 2)
        and dynamic.dynamic == (0,)
        and dynamic.size == 10
        and not dynamic.is_tuple
    )
    assert parse_shape("(f32[2], /*index=5*/f32[3])").size == 5
    for text in (
        "",
        "f32",
        "f32[2",
        "f32[2]]",
        "f32[a]",
        "f32[2,]",
        "(f32[2]",
        "f32[2])",
        "f32[2],f32[2]",
        f"f32[{'9' * 5000}]",
        "(" * 5000 + ")" * 5000,
    ):
        with pytest.raises(HloParseError):
            parse_shape(text)


def test_truncation_is_found(small):
    text = small.rstrip()
    for end in [*range(0, len(text), 7), len(text) - 1]:
        with pytest.raises(HloParseError) as error:
            parse_hlo_module(text[:end])
        assert 1 <= error.value.line <= text.count("\n") + 1 and error.value.column >= 1


def test_every_lost_bracket_and_quote_is_found(programs):
    text = programs["scaled, unoptimized"].as_text(dialect="hlo")
    inside = [m.span() for m in re.finditer(r'"[^"]*"', text)]
    for n, c in enumerate(text):
        if c in '(){}[]"' and not any(start < n < end - 1 for start, end in inside):
            with pytest.raises(HloParseError):
                for i in parse_hlo_module(text[:n] + text[n + 1 :]):
                    dict(i.attributes)


BROKEN = {
    "empty": ("", 1, 1),
    "blank": (" \n\n", 3, 1),
    "garbage": ("lorem ipsum", 1, 1),
    "no entry": ("HloModule m\n\n%f {\n  ROOT %p = f32[] parameter(0)\n}\n", 6, 1),
    "no computation": ("HloModule m, a={b}", 1, 19),
    "header": ("HloModule m, a={b\n", 1, 16),
    "signature": (
        "HloModule m\nENTRY %e (p: f32[]) -> f{32[] {\n  ROOT %p = f32[] parameter(0)\n}",
        2,
        10,
    ),
    "no instructions": ("HloModule m\nENTRY %e {\n}\n", 2, 1),
    "operand": (
        "HloModule m\nENTRY %e {\n  %p = f32[] parameter(0)\n  ROOT %r = f32[] add(%p, %q)\n}",
        4,
        3,
    ),
    "twice": (
        "HloModule m\nENTRY %e {\n  %p = f32[] parameter(0)\n  %p = f32[] parameter(1)\n}",
        2,
        1,
    ),
    "two roots": (
        "HloModule m\nENTRY %e {\n  ROOT %p = f32[] parameter(0)\n"
        "  ROOT %q = f32[] parameter(1)\n}",
        2,
        1,
    ),
    "two entries": (
        "HloModule m\nENTRY %e {\n  ROOT %p = f32[] parameter(0)\n}\n"
        "ENTRY %f {\n  %p = f32[] parameter(0)\n}",
        5,
        1,
    ),
    "same computation": (
        "HloModule m\nENTRY %e {\n  %p = f32[] parameter(0)\n}\n%e {\n  %p = f32[] parameter(0)\n}",
        5,
        1,
    ),
    "quote": ('HloModule m\nENTRY %e {\n  ROOT %p = f32[] parameter(0), a="b\n}', 3, 35),
    "brace": ("HloModule m\nENTRY %e {\n  ROOT %p = f32[] parameter(0), a={b\n}", 4, 2),
    "bracket": ("HloModule m\nENTRY %e {\n  ROOT %p = f32[] parameter(0), a={b)\n}", 3, 37),
    "no shape": ("HloModule m\nENTRY %e {\n  ROOT %p = parameter(0)\n}", 3, 13),
    "no number": ("HloModule m\nENTRY %e {\n  ROOT %p = f32[] parameter(x)\n}", 3, 3),
    "line": ("HloModule m\nENTRY %e {\n  %p = f32[] parameter(0)\n  what is this\n}", 4, 3),
    "after": ("HloModule m\nENTRY %e {\n  %p = f32[] parameter(0)\n}\nmore", 5, 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_say_where(name):
    text, line, column = BROKEN[name]
    with pytest.raises(HloParseError, match=f"line {line}, column {column}: ") as error:
        parse_hlo_module(text)
    assert (error.value.line, error.value.column) == (line, column) and isinstance(
        error.value, ValueError
    )


def test_of_several_missing_operands_the_first_is_named():
    text = (
        "HloModule m\nENTRY %e {\n  %p = f32[] parameter(0)\n"
        "  ROOT %r = f32[] custom-call(%p, %a, %b, %c, %d)\n}"
    )
    with pytest.raises(HloParseError, match="operand a is not an instruction"):
        parse_hlo_module(text)


def test_lazy_errors_say_where():
    module = parse_hlo_module(
        "HloModule m\nENTRY %e {\n  %p = f32[] parameter(0), calls=%gone\n"
        "  ROOT %q = f32[] negate(%p), backend_config={what?}, nothing\n}"
    )
    for read in (
        lambda: module["p"].called,
        lambda: module["q"].attributes,
        lambda: module["q"].backend_config,
    ):
        with pytest.raises(HloParseError) as error:
            read()
        assert (
            error.value.line == (3 if "gone" in str(error.value) else 4) and error.value.column == 3
        )


def test_other_input_names_what_to_pass(programs):
    lowered = programs["scaled, unoptimized"]
    with pytest.raises(HloParseError, match=r"StableHLO.*pass jax.jit\(f\).lower"):
        parse_hlo_module(lowered.as_text())
    for wrong in (None, 3, b"HloModule m", jnp.ones(3), scaled, [lowered]):
        with pytest.raises(TypeError, match=r"pass HLO text, jax.jit\(f\).lower"):
            parse_hlo_module(wrong)
    module = parse_hlo_module(lowered)
    assert parse_hlo_module(module) is module


def test_unusual_but_whole():
    text = (
        '\r\nHloModule "m"\n\n// a comment\n  ENTRY %e (p: f32[2],\n'
        "      q: f32[2]) -> f32[2]{0} { \n\n"
        "    %p = f32[2]{0} parameter(0)  \n    %q = f32[2]{0} parameter(/*0*/ 1),\n"
        "        sharding={replicated}\n"
        "    %c = s32[2,2] constant({\n { 1, 2 },\n {3, 4}\n })\n"
        "    ROOT %r = f32[2]{0} add(f32[2]{0} %p ,%q) // end\n"
        '    , metadata={op_name="}\\"{"}\n  }, execution_thread="host"\n'
    )
    module = parse_hlo_module(text.replace(" // end\n    ,", ",\n"))
    assert [(i.name, i.operands) for i in module] == [
        ("p", ()),
        ("q", ()),
        ("c", ()),
        ("r", ("p", "q")),
    ]
    assert (
        module["q"].attributes == {"sharding": "{replicated}"}
        and module["r"].metadata.op_name == '}"{'
    )
    assert (
        re.findall(r"\d", module["c"].literal) == list("1234") and module.entry.root is module["r"]
    )


def test_names_shared_by_computations_prefer_entry():
    text = (
        "HloModule m\n%f {\n  ROOT %p = f32[1] parameter(0)\n}\n"
        "ENTRY %e {\n  ROOT %p = f32[2] parameter(0)\n}\n"
    )
    module = parse_hlo_module(text)
    assert module["p"].computation is module.entry and module.computations["f"]["p"].shape.dims == (
        1,
    )


def test_deep_and_large_texts_neither_crash_nor_hang():
    one = (
        "HloModule m\nENTRY %e {{\n  %p = f32[] parameter(0)\n"
        "  ROOT %r = f32[] negate(%p), a={}\n}}\n"
    )
    assert len(parse_hlo_module(one.format("{" * 150 + "}" * 150))["r"].attributes["a"]) == 300
    quoted = parse_hlo_module(
        one.format('1, backend_config="' + r"{\"a\":" * 50_000 + "1" + "}" * 50_000 + '"')
    )["r"]
    assert quoted.backend_config.startswith(
        '{"a":'
    )  # deeper than can be read: text, as any other string
    for text in (
        one.format("{" * 50_000 + "}" * 50_000),
        one.format("{" * 100_000),
        one.format('"' * 99_999),
        "(" * 100_000,
        "HloModule m, a=" + "{(" * 50_000,
        "HloModule m\nENTRY %e (" + "\n" * 100_000,
        "HloModule m\n" + "%f (\n" * 20_000,
        "/*" * 100_000,
        "HloModule m\nENTRY %e {\n" + "  %p = f32[] parameter(0)\n" * 20_000,
    ):
        with pytest.raises(HloParseError):
            parse_hlo_module(text)
    constant = (
        "HloModule m\nENTRY %e {\n  ROOT %c = f32[500000] constant({"
        + ", ".join("1" * 500_000)
        + "})\n}"
    )
    assert len(parse_hlo_module(constant)["c"].literal) == 1_500_000


def test_replicas_parse_to_as_many_instructions(programs):
    text = programs["training step"].as_text()
    module = parse_hlo_module(text)
    assert (
        len(parse_hlo_module(replicated(text, 3))) == 3 * len(module) + 2 > 1000
    )  # with two calls of the copies


def test_json_of_every_backend_config(programs):
    for i in parse_hlo_module(programs["training step"]):
        if raw := i.attributes.get("backend_config"):
            assert i.backend_config == json.loads(raw)
