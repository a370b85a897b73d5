"""The parser, the printer, the report and the ledger on real programs, on random ones, and on
programs of odd shapes and operations: what is said of them is held to their text and their jaxpr.
"""

import functools
import math
import re
import tempfile
from collections import Counter

import jax
import pytest

from fp8lens import Inspection, inspect
from fp8lens.hlo.text import format_hlo_module
from fp8lens.matmul.ledger import CLASSES
from helpers import parse_hlo_module
from tests.fp8lens.oracle import flops, launched
from tests.fp8lens.test_hlo_parse import assert_agrees, ours
from tests.programs import real
from tests.programs.corpus import PROGRAMS, inspection
from tests.programs.random_programs import IN_FP8, program
from tests.programs.renamed import figures, under_other_names
from tests.weekly import NIGHTLY

NAMES = [*PROGRAMS, *real.NAMES]
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


def flops_of(program) -> int:
    """Of a program as written, before any HLO; sharded, on all devices."""
    mesh = program.options.get("mesh_shape", {"x": 1})
    types = (jax.sharding.AxisType.Auto,) * len(mesh)
    abstract = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=types)
    with jax.sharding.use_abstract_mesh(abstract):
        return flops(jax.make_jaxpr(program.fn)(*program.args).jaxpr)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_flop_is_lost(name):
    devices = math.prod(PROGRAMS[name].mesh_shape.values())
    assert seen(name).report.flops * devices == flops_of(PROGRAMS[name])


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_kernels_are_those_of_the_text(name):
    """Counted with no parser: XLA makes one computation for each use of one."""
    report, ledger, module = seen(name).report, seen(name).ledger, seen(name).module
    called = re.findall(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)', module.text)
    libraries = Counter(row.library for row in report.rows)
    assert libraries["cublasLt"] + libraries["cublas"] == len(called)
    in_fp8 = [row for row in report.rows if row.library == "cublasLt" and row.is_fp8]
    assert len(in_fp8) == module.text.count('"__cublas$lt$matmul$f8"')
    assert len(re.findall(r" dot\(", module.text)) <= libraries["triton"] + libraries["kernel"]
    names, matmuls = {i.name for i in module}, {row.name for row in report.rows}
    for row in report.rows:
        assert {row.name, *row.outside} <= names and row.name not in row.outside
    assert {line.name for line in ledger.of("matmul")} == matmuls
    assert all(matmuls.issuperset(line.serves) for line in ledger)
    assert sum(ledger.of(what).kernels for what in CLASSES) == ledger.kernels
    for of in (report, ledger):
        assert (of.kernels, of.bytes_moved) == launched(module.text)


@pytest.mark.parametrize("seed", range(300 if NIGHTLY else 12))
def test_of_random_programs_every_flop_kernel_and_byte_is_counted(seed):
    """12 of them; with NIGHTLY=1 in the environment, 300."""
    asked = program(seed)
    found = inspect(asked.fn, *asked.args, **asked.options)
    in_fp8 = sum(layer.flops for layer in asked.layers if layer.operands in IN_FP8)
    if asked.gradient:
        # What a gradient reads in two forms, XLA may multiply twice; and none of it is FP8.
        assert found.report.flops >= flops_of(asked) and found.report.fp8_flops >= in_fp8
    else:
        assert found.report.flops * asked.devices == flops_of(asked)
        assert found.report.fp8_flops == in_fp8
    for of in (found.report, found.ledger):
        assert (of.kernels, of.bytes_moved) == launched(found.module.text)


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
