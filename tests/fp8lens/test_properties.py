"""Properties of the parser, the printer, the costs and the report, on HLO that is made up, deep or
huge. Whether any text is answered or refused, and how soon: tests/tools/test_fuzz.py.

The examples are the same on every run. To look further: HYPOTHESIS_SCALE=100 make test
ARGS="-k properties" tries a hundred times as many, other ones each time.
"""

import signal
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lens import HloParseError, parse_hlo_module, report_gemms
from fp8lens.hlo.parse import parse_shape
from fp8lens.hlo.text import format_hlo_module
from fp8lens.matmul.kernels import bytes_moved, kernels
from tests.fp8lens.test_hlo_parse import assert_agrees
from tests.programs.hlo_baits import CALLS, GROWING, PLAIN, SMALL, called, module, twice
from tests.programs.hlo_grammar import SCALE, examples, modules
from tools.attack import fuzz


@pytest.fixture(autouse=True)
def no_hang(monkeypatch):
    """A test that hangs would hold up all others: far beyond what the slowest takes, it fails."""

    def stop(*_):
        pytest.fail("hangs")

    monkeypatch.setattr(fuzz, "SECONDS", 6.0)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, stop)
        signal.alarm(300 * SCALE)
    yield
    if hasattr(signal, "SIGALRM"):
        signal.alarm(0)


def use_all_of(text: str) -> None:
    """Whatever a reader can ask of a text gives an answer or HloParseError."""
    fuzz.seen.cache_clear()
    finds = [said for _, said, _ in fuzz.attacks(text, PLAIN) if said not in ("answer", "refused")]
    assert finds == []


# Wrong uses -----------------------------------------------------------------------------------

AFTER_A_DOT = (
    "HloModule m\n\n%f {{\n  %a = f32[8,8] parameter(0)\n  %b = f32[] parameter(1)\n"
    "  %s = f32[8,8] broadcast(%b), dimensions={{}}\n"
    "  ROOT %m = f32[8,8] multiply(%a, %s)\n}}\n"
    "ENTRY %e {{\n  %p = f32[8,8] parameter(0)\n  %z = f32[] constant(0)\n"
    "  %d = {dot} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"
    "  ROOT %r = f32[8,8] {last}\n}}\n"
)


@pytest.mark.parametrize(
    "dot, last",
    [
        # fewer operands than the fusion has parameters
        ("f32[8,8]", "fusion(%d), kind=kLoop, calls=%f"),
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


@pytest.mark.parametrize("kernel", ["a kernel", "a fusion"])
def test_a_kernel_before_a_matmul_that_gives_nothing_is_refused(kernel):
    with pytest.raises(HloParseError, match="its shape is a tuple of nothing"):
        report_gemms(SMALL[f"{kernel} before a matmul gives nothing"])


@examples(200)
@given(st.text(alphabet="f32[](){},<=? 0189bspredtuke:TE/*", max_size=40))
def test_any_shape(text):
    try:
        shape = parse_shape(text)
    except HloParseError:
        return
    assert parse_shape(str(shape)) == shape
    assert shape.size is not None and shape.nbytes is not None


# Whole modules, made up -----------------------------------------------------------------------


def same(again, before) -> None:
    """Two modules that say the same."""

    def plain(i):
        return i.name, i.opcode, i.operands, i.literal, i.parameter_number, i.called, i.is_root

    assert list(map(plain, again)) == list(map(plain, before))
    assert [i.shape.dims for i in again] == [i.shape.dims for i in before]


@examples(80)
@given(modules())
def test_made_up_modules_are_read_as_written(written):
    module = parse_hlo_module(written.text)
    assert_agrees(module)  # so what is made up is HLO
    found = {
        name: [(i.name, i.opcode, i.operands, i.shape_text) for i in c]
        for name, c in module.computations.items()
    }
    assert found == written.instructions and module.entry.name == "c0"
    same(parse_hlo_module(format_hlo_module(module)), module)
    again = parse_hlo_module(format_hlo_module(module, metadata=True, backend_cfg=True))
    same(again, module)
    assert [i.backend_config for i in again] == [i.backend_config for i in module]

    def op_names(module):
        return [(i.metadata and i.metadata.op_name) or "" for i in module]

    assert op_names(again) == op_names(module)


@examples(80)
@given(modules())
def test_the_report_finds_the_matmuls_that_were_written(written):
    report = report_gemms(written.text)
    rows = [
        (r.m, r.n, r.k, r.batch, r.lhs_dtype, r.rhs_dtype, r.out_dtype, r.count, r.library)
        for r in report.rows
    ]
    assert sorted(map(str, rows)) == sorted(map(str, written.gemms))
    flops = 0
    for m, n, k, batch, *_, count, _ in written.gemms:
        flops += 2 * m * n * k * batch * (1 if count is None else count)
    assert report.flops == flops
    assert 0 <= report.fp8_flops_share <= 1
    assert bytes_moved(written.text) >= 0 and len(kernels(written.text)) >= len(rows)


# Deep, cyclic, huge ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["call", "while", "conditional"])
def test_a_computation_called_twice_at_each_of_many_levels_is_visited_once(kind):
    text = twice(60, kind)
    use_all_of(text)
    assert len(kernels(text)) == 2 and len(report_gemms(text).rows) == 1
    if kind == "call":
        assert report_gemms(text).rows[0].count == 2**60


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("target", ["c0", "c1", "main"])
def test_a_computation_that_calls_itself_is_no_endless_loop(kind, target):
    text = called(CALLS[kind], 3, CALLS[kind].replace("%c@", f"%{target}"))
    use_all_of(text)
    if kind in ("call", "while", "conditional", "fusion"):
        with pytest.raises(HloParseError, match="calls itself"):
            report_gemms(text)


LARGE = {name: GROWING[name] for name in GROWING if not name.startswith("very many of")}


def peak_memory(text: str) -> int:
    fuzz.seen.cache_clear()
    parse_shape.cache_clear()
    tracemalloc.start()
    try:
        for entry in ("parse", "all of it", "report", "json"):
            assert fuzz.attack(entry, text, PLAIN) == "answer"
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", LARGE)
def test_memory_grows_no_faster_than_the_text(kind):
    small, large = LARGE[kind](30), LARGE[kind](90)
    use_all_of(LARGE[kind](5))  # modules are imported, regular expressions compiled
    grown = peak_memory(large) / peak_memory(small)
    assert grown < 1.5 * len(large) / len(small)


@pytest.mark.parametrize(
    "opening, closing", ["()", "{}", "[]", ("/*", "*/"), ('"', '"'), ("({", "})"), ("<", ">")]
)
@pytest.mark.parametrize("depth", [100, 5_000])
def test_brackets_nest_or_are_refused(opening, closing, depth):
    nested = opening * depth + closing * depth
    for place in (
        "ROOT %n = f32[8] negate(%p), a=",
        "ROOT %n = f32[8] negate(%p), backend_config={",
        "ROOT %n = f32[8] negate(",
        "ROOT %n = ",
        "ROOT %n = f32[8] constant(",
        "%",
        "",
    ):
        use_all_of(module(place + nested))
    use_all_of(PLAIN.replace("HloModule m", f"HloModule m, a={nested}"))
    use_all_of(PLAIN.replace("%main", f"%main {nested}"))
    use_all_of(PLAIN.replace("f32[8]", nested))


def test_tuples_of_tuples():
    shape = "f32[2]"
    for _ in range(150):
        shape = f"({shape}, {'s32[]'})"
    module = parse_hlo_module(f"HloModule m\n\nENTRY %e {{\n  ROOT %p = {shape} parameter(0)\n}}\n")
    assert str(module["p"].shape) == shape and module["p"].shape.size == 152
