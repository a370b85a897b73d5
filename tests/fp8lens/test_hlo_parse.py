import json
import re
from pathlib import Path
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import pytest

from fp8lens.hlo import HloParseError, Shape, parse_hlo_module, parse_shape
from helpers import aot_compile
from tools.bench import training_step

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
OLD = sorted(Path(__file__).parent.glob("hlo/*.txt"))


def scaled(a, b, a_scale, b_scale):
    return jax.nn.relu(jax.lax.dot(a.astype(f32) * a_scale, (b.astype(f32) * b_scale).T))


def control(x, w):
    y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=7)
    y = jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, y)
    y = jax.lax.switch(jnp.int32(y[0, 0]), [jnp.sin, jnp.cos, jnp.exp], y)
    return y, jnp.array([[1.5, 2], [3, 4]]) * y[:2, :2]


def callback(x):
    return jax.pure_callback(lambda v: v, shape(3), x) + 3


def linalg(x):
    return jnp.linalg.cholesky(x), jnp.linalg.svd(x), jax.lax.top_k(x, 3), jnp.fft.fft(x)


def shape(*dims, dtype=f32):
    return jax.ShapeDtypeStruct(dims, dtype)


SCALED = (shape(32, 64, dtype=e4m3), shape(128, 64, dtype=e4m3), *[shape()] * 2)
CONTROL = shape(32, 64), shape(64, 64)
STEP, SHAPES = training_step(layers=1)
PROGRAMS = {
    "scaled, cublaslt": lambda: aot_compile(scaled, *SCALED),
    "scaled, triton": lambda: aot_compile(scaled, *SCALED, gemm="triton"),
    "scaled, unoptimized": lambda: jax.jit(scaled).lower(*SCALED),
    "linalg, H100": lambda: aot_compile(linalg, shape(16, 16)),
    "control flow, H100": lambda: aot_compile(control, *CONTROL),
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
    for i in module:  # whatever is parsed on demand can be
        assert f"{i.name} = {i.shape_text} {i.opcode}(" in i.cmd and i.cmd in module.text
        assert str(i.shape) == re.sub(r"/\*.*?\*/", "", i.shape_text)
        assert set(i.called) <= module.computations.keys()
        assert (i.literal is None) == (i.opcode != "constant")
        assert (i.metadata is None) == ("metadata" not in i.attributes)
        raw = i.attributes.get("backend_config")
        assert i.backend_config == (json.loads(raw) if name == "training step" and raw else ANY)
    for c in module.computations.values():
        assert [i for i in c if i.is_root] == [c.root]
        assert [p.parameter_number for p in c.parameters] == list(range(len(c.parameters)))


@pytest.mark.parametrize("path", OLD, ids=lambda p: p.stem)
def test_reads_what_older_jax_printed(path):
    assert_agrees(parse_hlo_module(path.read_text()))


def test_fields_of_an_fp8_matmul(programs):
    module = parse_hlo_module(programs["scaled, cublaslt"])
    (call,) = [i for i in module if i.opcode == "custom-call"]
    assert module.name == "jit_scaled" and module.attributes["is_scheduled"] == "true"
    assert call.custom_call_target == "__cublas$lt$matmul$f8"
    assert call.backend_config["gemm_backend_config"]["epilogue"] == "RELU"
    assert [module[o].parameter_number for o in call.operands][:4] == [0, 1, 2, 3]
    assert call.shape.elements[0] == Shape("f32", (32, 128), "1,0")
    line = Path(__file__).read_text().splitlines()[call.metadata.source_line - 1]
    assert "jax.nn.relu" in line and call.metadata.op_name.startswith("jit(scaled)/")
    assert call.frames[0] == (__file__, call.metadata.source_line)
    with pytest.raises(KeyError, match="no such"):
        module["no such"]


def test_called_computations_and_constants(programs):
    module = parse_hlo_module(programs["control flow, unoptimized"])
    (switch,) = [i for i in module if i.opcode == "conditional"]
    roots = [module.computations[name].root.opcode for name in switch.called]
    assert roots == ["sine", "cosine", "exponential"]
    assert "{ { 1.5, 2 }, { 3, 4 } }" in [i.literal for i in module]


def test_what_older_jax_quoted(programs):
    old = parse_hlo_module(next(p for p in OLD if "ffi" in p.name).read_text())
    call = old["cholesky.8"]
    assert call.backend_config == {"uplo": {"lower": True}, "name": 'a"b'}  # JSON in a string
    assert call.custom_call_target == 'lapack_"spotrf"{'
    metadata = call.metadata
    assert metadata.op_name == 'jit(f)/jit(main)/café {"('
    assert metadata.source_file == "/home/user/f.py" and metadata.source_line == 12
    assert old["custom-call.11"].backend_config == "plain, with {braces"
    assert old["constant.6"].literal == "(1, -0.5)" and old["broadcast.12"].backend_config is None


def test_shapes():
    for text, nbytes in (
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("f4e2m1fn[3]{0:E(4)}", 2),
        ("u4[8]", 4),
        ("token[]", 0),
        ("f8e8m0fnu[4,8]{1,0}", 32),
        ("bf16[5,2]{1,0:T(8,128)(2,1)S(5)}", 20),
        ("c128[2]", 32),
        ("((f32[2]{0}, (s4[3,3], token[])), u32[])", 17),
        ("()", 0),
        ("opaque[]", 0),
    ):
        assert str(parse_shape(text)) == text and parse_shape(text).nbytes == nbytes
    assert parse_shape("bf16[<=5,2]{1,0}").dims == (5, 2)
    assert parse_shape("(f32[2], /*index=5*/f32[3])").size == 5
    for text in ("", "f32", "f32[2", "f32[2]]", "f32[a]", "f32[2,]", "(f32[2]", "f32[2],f32[2]"):
        with pytest.raises(HloParseError):
            parse_shape(text)
    for text in (f"f32[{'9' * 5000}]", "(" * 5000 + ")" * 5000):
        with pytest.raises(HloParseError):
            parse_shape(text)


def test_truncation_is_found(small):
    text = small.rstrip()
    for end in [*range(0, len(text), 31), len(text) - 1]:
        with pytest.raises(HloParseError) as error:
            parse_hlo_module(text[:end])
        assert 1 <= error.value.line <= text.count("\n") + 1


def test_every_lost_bracket_and_quote_of_an_instruction_is_found(small):
    start = small.index("\nENTRY")
    body = small.index("{\n", small.index(" -> ", start)) + 1
    inside = [m.span() for m in re.finditer(r'"[^"]*"', small)]
    for n in range(body, len(small)):
        if small[n] in '(){}[]"' and not any(first < n < end - 1 for first, end in inside):
            with pytest.raises(HloParseError):
                for i in parse_hlo_module(small[:n] + small[n + 1 :]):
                    assert i.shape and dict(i.attributes)


ONE = "HloModule m\nENTRY %e {\n  %p = f32[] parameter(0)\n"
# The error is at the first @, or before it at the same line's start.
BROKEN = {
    "empty": "@",
    "blank": " \n\n@",
    "garbage": "@lorem ipsum",
    "no entry": "HloModule m\n\n%f {\n  ROOT %p = f32[] parameter(0)\n}\n@",
    "no computation": "HloModule m, a={b}@",
    "header": "HloModule m, a=@{b\n",
    "no instructions": "HloModule m\n@ENTRY %e {\n}\n",
    "operand": ONE + "  @ROOT %r = f32[] add(%p, %q)\n}",
    "operand behind": ONE + "  @%r = f32[] negate(%s)\n  ROOT %s = f32[] negate(%p)\n}",
    "too few operands": ONE + "  @ROOT %r = f32[] add(%p)\n}",
    "two entries": ONE + "}\n@ENTRY %f {\n  %p = f32[] parameter(0)\n}",
    "same computation": ONE + "}\n@%e {\n  %p = f32[] parameter(0)\n}",
    "no shape": ONE + "  @ROOT %r = negate(%p)\n}",
    "no number": ONE + "  @%q = f32[] parameter(x)\n}",
    "line": ONE + "  @what is this\n}",
    "after": ONE + "}\n@more",
    "truncated": ONE + "@",
    "element": ONE + "@  %t = (f32[]) tuple(%p)\n  ROOT %r = f32[] negate(%t#1)\n}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_say_where(name):
    before, _, after = BROKEN[name].partition("@")
    with pytest.raises(HloParseError) as error:
        parse_hlo_module(before + after)
    line, column = before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1
    assert f"line {line}, column {column}: " in str(error.value)
    assert (error.value.line, error.value.column) == (line, column)


@pytest.mark.parametrize("again", ["%p = f32[] parameter(1)", "ROOT %q = f32[] parameter(1)"])
def test_names_and_roots_are_single(again):
    with pytest.raises(HloParseError, match="two instructions of one name, or two ROOTs"):
        parse_hlo_module(ONE.replace("%p", "ROOT %p") + f"  {again}\n}}")


@pytest.mark.parametrize(
    "rest, what", [("calls=%gone", "called"), ('a="b', "attributes"), ("a={b)", "attributes")]
)
def test_what_is_read_later_says_where_it_is_wrong(rest, what):
    module = parse_hlo_module(f"{ONE}  ROOT %q = f32[] negate(%p), {rest}\n}}")
    with pytest.raises(HloParseError, match="line 4, column 3: "):
        getattr(module["q"], what)


def test_other_input_names_what_to_pass(programs):
    lowered = programs["scaled, unoptimized"]
    with pytest.raises(HloParseError, match=r"StableHLO.*pass jax.jit\(f\).lower"):
        parse_hlo_module(lowered.as_text())
    for wrong in (None, b"HloModule m", jnp.ones(3), scaled):
        with pytest.raises(TypeError, match=r"pass HLO text, jax.jit\(f\).lower"):
            parse_hlo_module(wrong)
    module = parse_hlo_module(lowered)
    assert parse_hlo_module(module) is module


def test_unusual_but_whole():
    text = (
        '\r\nHloModule "m"\n\n  ENTRY %e (p: f32[2],\n'
        "      q: f32[2]) -> f32[2]{0} { \n\n"
        "    %p = f32[2]{0} parameter(0)  \n    %q = f32[2]{0} parameter(1),\n"
        "        sharding={replicated}\n"
        "    %c = s32[2,2] constant({\n { 1, 2 },\n {3, 4}\n })\n"
        "    ROOT %r = f32[2]{0} add(f32[2]{0} %p ,%q),\n"
        ' metadata={op_name="}\\"{"}\n}, execution_thread="host"\n'
    )
    module = parse_hlo_module(text)
    assert {i.name: i.operands for i in module} == {"p": (), "q": (), "c": (), "r": ("p", "q")}
    assert module["q"].attributes == {"sharding": "{replicated}"}
    assert module["r"].metadata.op_name == '}"{' and module.entry.root is module["r"]
    assert re.findall(r"\d", module["c"].literal) == list("1234")


def test_names_shared_by_computations_prefer_entry():
    text = f"HloModule m\n%f {{\n  ROOT %p = f32[] parameter(0)\n}}{ONE[11:]}}}"
    module = parse_hlo_module(text)
    assert module["p"].computation is module.entry is not module.computations["f"]["p"].computation


DEEP = (
    f"{ONE}  ROOT %r = f32[] negate(%p), a={'{' * 50_000}{'}' * 50_000}\n}}",
    f"{ONE}  ROOT %r = f32[] negate(%p), a={'{' * 100_000}\n}}",
    f"{ONE}  ROOT %r = f32[] negate(%p), a={'"' * 99_999}\n}}",
    "(" * 100_000,
    "HloModule m, a=" + "{(" * 50_000,
    "HloModule m\nENTRY %e (" + "\n" * 100_000,
    "HloModule m\n" + "%f (\n" * 20_000,
    "/*" * 100_000,
    ONE + "  %p = f32[] parameter(0)\n" * 20_000,
)


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
def test_deep_and_large_texts_neither_crash_nor_hang(text):
    with pytest.raises(HloParseError):
        [i.attributes for i in parse_hlo_module(text)]


def test_deep_and_large_values_are_text():
    quoted = '"' + r"{\"a\":" * 50_000 + "1" + "}" * 50_000 + '"'
    module = parse_hlo_module(f"{ONE}  ROOT %r = f32[] negate(%p), backend_config={quoted}\n}}")
    assert module["r"].backend_config.startswith('{"a":')
    numbers = ", ".join("1" * 500_000)
    module = parse_hlo_module(f"{ONE}  ROOT %c = f32[500000] constant({{{numbers}}})\n}}")
    assert len(module["c"].literal) == 1_500_000
