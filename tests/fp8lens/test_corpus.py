"""The parser, the printer, the cost, the report and the ledger on programs that nobody made for
them.
"""

import math
import re

import jax
import pytest

from fp8lens import inspect, report_gemms
from fp8lens.hlo.ops import DOTS
from fp8lens.hlo.program import fused
from fp8lens.hlo.text import format_hlo_module
from fp8lens.matmul.kernels import bytes_moved, kernels
from fp8lens.matmul.ledger import CLASSES
from helpers import parse_hlo_module
from tests.fp8lens.test_hlo_parse import assert_agrees, ours
from tests.programs.corpus import PROGRAMS, corpus, inspection
from tests.programs.renamed import figures, under_other_names

CORPUS = corpus()
LIBRARIES = {"cublasLt", "cublas", "triton", "cudnn", "kernel"}
DTYPE = re.compile(r"pred|[su](2|4|8|16|32|64)|bf16|f(16|32|64)|f8e\w+|f4e\w+|c64|c128")
ABSOLUTE = re.compile(r"(?<![\w<.])/\w+/\w")


@pytest.mark.parametrize("name", CORPUS)
def test_is_read_as_xla_reads_it(name):
    module = parse_hlo_module(CORPUS[name]())
    assert_agrees(module)
    for i in module:
        assert str(i.shape) == re.sub(r"/\*.*?\*/", "", i.shape_text)
        assert isinstance(i.attributes.get("backend_config", ""), str) and i.backend_config != ""
        assert set(i.called) <= module.computations.keys() and (i.metadata is None) == (
            "metadata=" not in i.cmd
        )


@pytest.mark.parametrize("name", CORPUS)
def test_what_is_printed_is_read_again(name):
    module = parse_hlo_module(CORPUS[name]())
    for settings in ({}, {"metadata": True, "backend_cfg": True}):
        printed = format_hlo_module(module, **settings)
        assert ours(parse_hlo_module(printed)) == ours(module)
        assert format_hlo_module(parse_hlo_module(printed), **settings) == printed
        assert not ABSOLUTE.search(re.sub(r'op_name="[^"]*"', "", printed))


def written_flops(jaxpr, unknown: bool = False) -> int:
    """2*M*N*K of a jaxpr's dot_generals: a scan's as often as it runs, a branch's as if taken, and
    once whatever is in a loop of unknown length. Knows nothing of HLO.
    """
    total = 0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            (contracting, _), _ = params["dimension_numbers"]
            lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
            total += 2 * out.size * math.prod(lhs.shape[d] for d in contracting)
        if name == "pallas_call":
            continue  # a kernel of its own, that HLO does not look into
        times = params["length"] if name == "scan" and not unknown else 1
        times *= params["mesh"].size if name == "shard_map" else 1

        def is_jaxpr(p):
            return hasattr(p, "eqns") or hasattr(p, "jaxpr")

        for inner in filter(is_jaxpr, jax.tree.leaves(list(params.values()), is_leaf=is_jaxpr)):
            total += times * written_flops(
                getattr(inner, "jaxpr", inner), unknown or name == "while"
            )
    return total


@pytest.mark.parametrize(
    "name", [name for name, program in PROGRAMS.items() if program.flops is not None]
)
def test_no_flop_is_lost(name):
    """The sum over the report's rows is that of the program as written, before any HLO; sharded, on
    all chips.
    """
    program = PROGRAMS[name]
    written = written_flops(program.jaxpr()) if program.flops == "jaxpr" else program.flops
    assert report_gemms(CORPUS[name]()).flops * math.prod(program.mesh_shape.values()) == written


@pytest.mark.parametrize("name", CORPUS)
def test_every_library_call_and_dot_is_one_row(name):
    """Counted in the text, with no parser: XLA makes one computation for each use of one."""
    text, rows = CORPUS[name](), report_gemms(CORPUS[name]()).rows
    called = re.findall(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)', text)
    assert sum(row.library in ("cublasLt", "cublas") for row in rows) == len(called)
    assert sum(row.library == "cublasLt" and row.is_fp8 for row in rows) == text.count(
        '"__cublas$lt$matmul$f8"'
    )
    assert sum(row.library == "cudnn" for row in rows) == text.count('"__cudnn$blockScaledDot"')
    dots = len(re.findall(r" dot\(", text))
    assert (
        sum(row.library == "triton" for row in rows)
        <= dots
        <= sum(row.library in ("triton", "kernel") for row in rows)
    )


@pytest.mark.parametrize("name", CORPUS)
def test_rows_are_well_formed(name):
    module = parse_hlo_module(CORPUS[name]())
    report = report_gemms(module)
    computations = module.computations.values()
    for row in report.rows:
        assert (
            min(row.m, row.n, row.k, row.batch) >= 0
            and row.flops == 2 * row.m * row.n * row.k * row.batch
        )
        assert row.library in LIBRARIES and (row.count is None or row.count > 0)
        assert all(DTYPE.fullmatch(d) for d in (row.lhs_dtype, row.rhs_dtype, row.out_dtype)), row
        assert row.math_dtype == "tf32" or DTYPE.fullmatch(row.math_dtype)
        assert row.is_fp8 <= any(d.startswith(("f8", "f4")) for d in (row.lhs_dtype, row.rhs_dtype))
        assert isinstance(row.outside, tuple) and len(set(row.outside)) == len(row.outside)
        names = {i.name for c in computations for i in c}
        assert row.name in names and names.issuperset(
            row.outside
        )  # a loop's result may be read after the loop
        assert row.name not in row.outside
        assert re.fullmatch(r"(?!/)[\w./\-]+\.py:\d+|", row.source) and isinstance(row.op_name, str)
    assert 0 <= report.fp8_flops_share <= 1 and report.fp8_flops <= report.flops
    assert report.kernels >= len({row.name for row in report.rows})


@pytest.mark.parametrize("name", CORPUS)
def test_reports_show_no_path_and_repeat(name):
    text = CORPUS[name]()
    report = report_gemms(text)
    shown, html = str(report), report._repr_html_()
    assert (
        shown
        and html.count("<tr") == html.count("</tr>")
        and html.count("<td") == html.count("</td>")
    )
    assert not ABSOLUTE.search(shown) and not ABSOLUTE.search(html)
    again = report_gemms(text)
    assert again == report and (str(again), again._repr_html_()) == (shown, html)


@pytest.mark.parametrize("name", CORPUS)
def test_kernels_are_instructions_that_move_bytes(name):
    module = parse_hlo_module(CORPUS[name]())
    launched = kernels(module)
    assert launched and all(
        k.instruction.computation.get(k.name) is k.instruction for k in launched
    )
    assert all(
        k.bytes_moved >= 0 and k.flops >= 0 and (k.math_dtype is None) == (not k.flops)
        for k in launched
    )


@pytest.mark.parametrize("name", CORPUS)
def test_the_ledgers_lines_add_up_to_the_program(name):
    seen = inspect(CORPUS[name]())
    ledger, one_by_one = seen.ledger, kernels(seen.module)
    assert [line.kernel.instruction for line in ledger] == [k.instruction for k in one_by_one]
    assert ledger.kernels == seen.report.kernels == sum(k.runs for k in one_by_one)
    assert ledger.bytes_moved == seen.report.bytes_moved == bytes_moved(seen.module)
    assert sum(ledger.of(what).kernels for what in CLASSES) == ledger.kernels
    matmuls = {row.name for row in seen.report.rows}
    assert {line.name for line in ledger.of("matmul")} == matmuls
    assert all(matmuls.issuperset(line.serves) for line in ledger)
    text = str(ledger)
    lines = text.splitlines()
    assert (
        max(map(len, lines)) <= 100
        and len([line for line in lines[1:] if line[0] != " "]) == len(ledger) + 1
    )
    assert all(line.serves[0] in text for line in ledger if line.serves)
    assert seen.ledger._repr_html_().count("<tr>") == len(ledger) + 1


@pytest.mark.parametrize("name", CORPUS)
def test_no_figure_and_no_reason_is_of_a_name(name):
    """Scopes, functions, arguments, instructions and computations may have any name."""
    seen = inspection(name)
    other, names = under_other_names(seen)
    assert names.instructions and names.scopes
    assert figures(other, names) == figures(seen)
    saved, saved_other = inspect(seen.module), inspect(other.module)
    assert figures(saved_other, names) == figures(saved)


@pytest.mark.parametrize("name", CORPUS)
def test_no_figure_is_of_an_op_name(name):
    """Not even of JAX's own words in it, except where XLA spelled a dot out as a product: what that
    was, only JAX's name of the primitive tells.
    """
    seen = inspection(name)
    other, names = under_other_names(seen, keep_primitives=False)
    rows = [row for row in seen.report.rows if not spelled_out(row.instruction)]
    assert [what(row) for row in other.report.rows] == [what(row) for row in rows]
    if len(rows) == len(seen.report.rows):
        assert figures(other, names, reasons=False) == figures(seen, reasons=False)


def spelled_out(i):
    """Whether a kernel multiplies matrices by products and sums: it has no dot in it, and calls no
    library.
    """
    return i.opcode == "fusion" and not any(j.opcode in DOTS | {"custom-call"} for j in fused(i))


def what(row):
    """What a row says of a multiplication itself."""
    return row.m, row.n, row.k, row.batch, row.count, row.lhs_dtype, row.rhs_dtype, row.math_dtype
