import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp8lens import diff_hlo, format_hlo_module
from fp8lens.dumps import COMPILED
from fp8lens.hlo import HloParseError, Shape, parse_hlo_module, parse_shape
from helpers import aot_compile
from tests.programs.real import unpacked

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
OLD = sorted(Path(__file__).parent.glob("hlo/*.txt"))


def scaled(a, b, a_scale, b_scale):
    return jax.nn.relu(jax.lax.dot(a.astype(f32) * a_scale, (b.astype(f32) * b_scale).T))


def control(x, w):
    y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=7)
    y = jax.lax.switch(jnp.int32(y[0, 0]), [jnp.sin, jnp.cos, jnp.exp], y)
    return y, jnp.array([[1.5, 2], [3, 4]]) * y[:2, :2]


def shape(*dims, dtype=f32):
    return jax.ShapeDtypeStruct(dims, dtype)


SCALED = (shape(32, 64, dtype=e4m3), shape(128, 64, dtype=e4m3), *[shape()] * 2)
PROGRAMS = {
    "scaled, cublaslt": lambda: aot_compile(scaled, *SCALED).as_text(),
    "scaled, triton": lambda: aot_compile(scaled, *SCALED, gemm="triton").as_text(),
    "control flow, unoptimized": lambda: jax.jit(control).lower(shape(32, 64), shape(64, 64)),
    **{path.stem: path.read_text for path in OLD},
}
REAL = ("flax_scan_remat_step", "sharded_step")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    found = {name: make() for name, make in PROGRAMS.items()}
    for name in REAL:
        (path,) = unpacked(name, tmp_path_factory.mktemp(name)).glob(f"*{COMPILED}")
        found[name] = path.read_text(encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def small(programs):
    return programs["scaled, cublaslt"]


# An async-start is printed as the x-start of the one instruction that it wraps, or not.
UNFOLDED = re.compile(r"^[\w\-]+(?=-(?:start|done|update)$)")


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
            (
                i.name,
                UNFOLDED.sub("async", opcode.search(i.to_string())[1]),
                tuple(o.name for o in i.operands()),
            )
            for i in c.instructions()
        ]
        for c in _hlo.hlo_module_from_text(text).computations()
    }


def ours(module):
    return {
        name: [(i.name, UNFOLDED.sub("async", i.opcode), i.operands) for i in c]
        for name, c in module.computations.items()
    }


def assert_agrees(module):
    found, expected = ours(module), oracle(module.text)
    # `fusion-start` is short for an async-start that wraps a computation of one fusion: XLA's
    # parser unfolds it.
    for name in expected.keys() - found.keys():
        assert f"%{name} (" not in module.text
        assert {opcode for _, opcode, _ in expected.pop(name)[:-1]} <= {"parameter"}
    assert list(found) == list(expected)
    assert found == expected


@pytest.mark.parametrize("name", [*PROGRAMS, *REAL])
def test_agrees_with_xla_and_with_what_is_printed(programs, name):
    module = parse_hlo_module(programs[name])
    assert_agrees(module)
    text = format_hlo_module(module, metadata=True, backend_cfg=True)
    again = parse_hlo_module(text)
    assert format_hlo_module(again, metadata=True, backend_cfg=True) == text
    assert diff_hlo(module, again).same
    assert not re.search(r'"/|fingerprint|FileNames|StackFrames|/\*index|scheduling_name', text)
    for i, other in zip(module, again, strict=True):
        for of in (i, other):  # whatever is parsed on demand
            assert (of.name, of.opcode, of.operands) == (i.name, i.opcode, i.operands)
            assert (of.called, of.is_root, of.literal is None) == (
                i.called,
                i is i.computation.root,
                i.opcode != "constant",
            )
            assert (of.backend_config, of.shape.nbytes) == (i.backend_config, i.shape.nbytes)
            assert (of.metadata and of.metadata.op_name) == (i.metadata and i.metadata.op_name)
        assert str(i.shape) == re.sub(r"/\*.*?\*/", "", i.shape_text)
    for c in module.computations.values():
        assert [p.parameter_number for p in c.parameters] == list(range(len(c.parameters)))


def test_fields_of_an_fp8_matmul(small):
    module = parse_hlo_module(small)
    (call,) = [i for i in module if i.opcode == "custom-call"]
    assert call.backend_config["gemm_backend_config"]["epilogue"] == "RELU"
    assert [module[o].parameter_number for o in call.operands][:4] == [0, 1, 2, 3]
    assert call.shape.elements[0] == Shape("f32", (32, 128), "1,0")
    line = Path(__file__).read_text().splitlines()[call.metadata.source_line - 1]
    assert "jax.nn.relu" in line and call.frames[0] == (__file__, call.metadata.source_line)
    with pytest.raises(KeyError, match="no such"):
        module["no such"]


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


@pytest.mark.parametrize("text, nbytes", [
    ("f32[]", 4),
    ("pred[3]{0}", 3),
    ("f4e2m1fn[3]{0:E(4)}", 2),
    ("token[]", 0),
    ("bf16[5,2]{1,0:T(8,128)(2,1)S(5)}", 20),
    ("((f32[2]{0}, (s4[3,3], token[])), u32[])", 17),
    ("()", 0),
    *[(f"f32[{'9' * 5000}]", None), ("(" * 5000 + ")" * 5000, None)],
    *[(text, None) for text in ("", "f32", "f32[2", "f32[2]]", "f32[2,]", "f32[2],f32[2]")],
], ids=range(15))  # fmt: skip
def test_shapes(text, nbytes):
    if nbytes is None:
        with pytest.raises(HloParseError):
            parse_shape(text)
    else:
        assert str(parse_shape(text)) == text and parse_shape(text).nbytes == nbytes


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
    "one name": f"HloModule m\n@{ONE[12:]}  %p = f32[] parameter(1)\n}}",
    "two roots": "HloModule m\n@"
    + ONE[12:]
    + "  ROOT %q = f32[] parameter(1)\n  ROOT %r = f32[] sin(%q)\n}",
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


@pytest.mark.parametrize(
    "rest, what", [("calls=%gone", "called"), ('a="b', "attributes"), ("a={b)", "attributes")]
)
def test_what_is_read_later_says_where_it_is_wrong(rest, what):
    module = parse_hlo_module(f"{ONE}  ROOT %q = f32[] negate(%p), {rest}\n}}")
    with pytest.raises(HloParseError, match="line 4, column 3: "):
        getattr(module["q"], what)


def test_other_input_names_what_to_pass(programs):
    lowered = programs["control flow, unoptimized"]
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
