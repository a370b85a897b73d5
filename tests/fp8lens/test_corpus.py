"""The parser, the printer, the report and the ledger on real programs, and on programs of odd
shapes and operations: what is said of them is held to their text, and to their jaxpr.
"""

import functools
import math
import re
import tempfile

import jax
import pytest

from fp8lens import Inspection
from fp8lens.hlo.text import format_hlo_module
from fp8lens.matmul.ledger import CLASSES
from helpers import parse_hlo_module
from tests.fp8lens.test_hlo_parse import assert_agrees, ours
from tests.programs import real
from tests.programs.corpus import PROGRAMS, inspection
from tests.programs.random_programs import launched
from tests.programs.renamed import figures, under_other_names

NAMES = [*PROGRAMS, *real.NAMES]
LIBRARIES = {"cublasLt", "cublas", "triton", "cudnn", "kernel"}
ABSOLUTE = re.compile(r"(?<![\w<.])/\w+/\w")


@functools.cache
def seen(name: str) -> Inspection:
    if name in PROGRAMS:
        return inspection(name)
    with tempfile.TemporaryDirectory() as folder:
        return real.inspected(real.unpacked(name, folder))


@pytest.mark.parametrize("name", NAMES)
def test_is_read_as_xla_reads_it_and_as_it_is_printed(name):
    module = parse_hlo_module(seen(name).module.text)
    # XLA's parser names these by what they wrap.
    if not re.search(r" (?:fusion|async)-start\(", module.text):
        assert_agrees(module)
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


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_flop_is_lost(name):
    """The sum over the report's rows is that of the program as written, before any HLO; sharded, on
    all chips.
    """
    program = PROGRAMS[name]
    written = written_flops(program.jaxpr()) if program.flops == "jaxpr" else program.flops
    assert seen(name).report.flops * math.prod(program.mesh_shape.values()) == written


@pytest.mark.parametrize("name", NAMES)
def test_every_library_call_and_dot_is_one_row(name):
    """Counted in the text, with no parser: XLA makes one computation for each use of one."""
    text, rows = seen(name).module.text, seen(name).report.rows
    called = re.findall(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)', text)
    assert sum(row.library in ("cublasLt", "cublas") for row in rows) == len(called)
    in_fp8 = [row for row in rows if row.library == "cublasLt" and row.is_fp8]
    assert len(in_fp8) == text.count('"__cublas$lt$matmul$f8"')
    dots = len(re.findall(r" dot\(", text))
    assert dots <= sum(row.library in ("triton", "kernel") for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_kernels_are_those_of_the_text(name):
    report, ledger, module = seen(name).report, seen(name).ledger, seen(name).module
    names = {i.name for i in module}
    for row in report.rows:
        assert {row.name, *row.outside} <= names and row.name not in row.outside
        assert row.flops == 2 * row.m * row.n * row.k * row.batch
        assert row.is_fp8 <= any(d.startswith(("f8", "f4")) for d in (row.lhs_dtype, row.rhs_dtype))
    matmuls = {row.name for row in report.rows}
    assert {line.name for line in ledger.of("matmul")} == matmuls
    assert all(matmuls.issuperset(line.serves) for line in ledger)
    assert sum(ledger.of(what).kernels for what in CLASSES) == ledger.kernels
    if name in real.NAMES:  # of odd operations only what is read here is known
        for of in (report, ledger):
            assert (of.kernels, of.bytes_moved) == launched(module.text)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_is_narrow_and_has_no_path(name):
    report, ledger = str(seen(name).report), str(seen(name).ledger)
    assert not ABSOLUTE.search(report + ledger)
    assert max(map(len, ledger.splitlines())) <= 100


@pytest.mark.parametrize("name", ["branches", "odd dots", "ring matmul", "FP8 scan"])
def test_no_figure_and_no_reason_is_of_a_name(name):
    """Scopes, functions, arguments, instructions and computations may have any name."""
    other, names = under_other_names(seen(name))
    assert names.instructions and names.scopes
    assert figures(other, names) == figures(seen(name))
