"""The inspector on programs as the users of other libraries write them, and its fixes in those
libraries' terms.

With NIGHTLY=1 in the environment, and the group of dependencies `libraries` installed:

    .tools/bin/uv sync --group libraries
    NIGHTLY=1 .venv/bin/python -m pytest tests/fp8lens/test_libraries.py
"""

import functools
import importlib.metadata
import re

import jax
import pytest
from jax.interpreters import partial_eval

from tests.weekly import NIGHTLY

if not NIGHTLY:
    pytest.skip("NIGHTLY=1 tries other libraries", allow_module_level=True)

from fp8lens import Inspection, inspect
from fp8lens.rules.libraries import LIBRARIES
from fp8lens.rules.reason import Reason
from tests.fp8lens.oracle import flops, launched
from tests.programs.library_programs import PROGRAMS
from tools.recorders import census


@functools.cache
def seen(name: str) -> Inspection:
    fn, args = PROGRAMS[name]()
    return inspect(fn, *args)


# Rows and kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_flop_is_lost(name):
    fn, args = PROGRAMS[name]()
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    # A custom gradient multiplies for the first layer's input too, and nobody reads that.
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found, written = seen(name).report.flops, flops(used)
    assert found == written, f"{found} {written}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_rows_are_the_calls_of_the_text(name):
    report, text = seen(name).report, seen(name).compiled.as_text()
    assert len(report.fp8_rows) == text.count('"__cublas$lt$matmul$f8"')
    assert len(report.rows) == len(
        re.findall(r'target="__cublas\$(?:lt\$matmul|gemm)', text)
    ) + len(re.findall(r" dot\(", text))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_ledger_adds_up_to_the_text(name):
    report, ledger = seen(name).report, seen(name).ledger
    assert (report.kernels, report.bytes_moved) == launched(seen(name).compiled.as_text())
    assert (ledger.kernels, ledger.bytes_moved) == (report.kernels, report.bytes_moved)
    assert {line.name for line in ledger.of("matmul")} == {row.name for row in report.rows}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "trained" in name])
def test_no_gradient_of_a_library_is_suspected(name):
    """And each of its rows says of which pass it is."""
    report = seen(name).report
    assert not report.of_gradients()
    gradients = [row for row in report.rows if "transpose(jvp" in row.op_name]
    assert gradients and all("backward" in row.path for row in gradients)


# Fixes in a library's own terms -----------------------------------------------------------------

QWIX_PTQ, QWIX_QT = "qwix/_src/providers/ptq.py", "qwix/_src/providers/qt.py"
AQT, KERAS, FLAX = "aqt/jax/v2/", "keras/src/layers/core/", "flax/(linen|nnx/nn)/linear.py"
# For a file and rule of LIBRARIES: a program that breaks the rule there, and what it is with the
# fix; None where the library has no setting.
FIXED: dict[tuple[str, str], tuple[str, str | None]] = {
    (QWIX_PTQ, "not-quantized"): ("qwix: PTQ, weights alone", "qwix: PTQ"),
    (QWIX_PTQ, "array-of-scales"): ("qwix: PTQ, small tiles", "qwix: PTQ, tiles"),
    (QWIX_PTQ, "vector-scale"): ("qwix: PTQ", "qwix: PTQ, fixed"),
    (QWIX_PTQ, "operand-layout"): ("qwix: PTQ", "qwix: PTQ, by rows"),
    (QWIX_QT, "not-quantized"): ("qwix: QT, trained", "qwix: QT, E5M2 gradients"),
    (QWIX_QT, "both-e5m2"): ("qwix: QT, all E5M2", "qwix: QT, E5M2 gradients"),
    (QWIX_QT, "vector-scale"): ("qwix: QT", "qwix: QT, one scale"),
    (QWIX_QT, "scale-too-many"): ("qwix: QT, one scale", "qwix: QT, fixed"),
    ("qwix/_src/core/dot.py", "vector-scale"): ("qwix: QArrays, by channel", "qwix: QArrays"),
    (AQT, "not-quantized"): ("aqt: trained", "aqt: trained, E5M2 gradients"),
    (AQT, "both-e5m2"): ("aqt: E5M2", "aqt: trained, E5M2 gradients"),
    (AQT, "another-type"): ("aqt: forward", "aqt: forward, bf16 dots"),
    (AQT, "vector-scale"): ("aqt: forward, bf16 dots", "aqt: forward, bf16 dots, one scale"),
    (AQT, "scale-too-many"): (
        "aqt: forward, bf16 dots, one scale",
        "aqt: forward, bf16 dots, constant",
    ),
    (KERAS, "operand-layout"): ("keras: EinsumDense", "keras: EinsumDense, by rows"),
    (KERAS, "prepared-bias"): ("keras: Dense", "keras: Dense, bf16"),
    (KERAS, "divided-by-scale"): ("keras: Dense", None),
    ("flax/linen/fp8_ops.py", "operand-layout"): (
        "flax: Fp8Einsum, by columns",
        "flax: Fp8Einsum, by rows",
    ),
    ("flax/linen/fp8_ops.py", "product-of-scales"): ("flax: Dense, trained", None),
    (FLAX, "prepared-bias"): ("flax: Dense", "flax: Dense, bf16 parameters"),
    (FLAX, "bias-in-f32"): ("flax: Dense, f32", "flax: Dense, f32, bf16 parameters"),
    ("flax/nnx/nn/linear.py", "operand-layout"): ("flax: nnx.Linear, trained", None),
}


def broken(name: str, rule: str) -> list[Reason]:
    """The reasons of a program that name a rule."""
    return [r for r in seen(name).reasons if r.rule == rule]


def test_each_fix_is_tried():
    assert set(FIXED) == {
        (path, rule) for path, rules, *_ in LIBRARIES for rule in rules.split("|")
    }


@pytest.mark.parametrize("path, rule", FIXED)
def test_the_library_s_own_fix_fixes(path, rule):
    before, after = FIXED[path, rule]
    ((library, fix),) = {
        (row[2], row[3]) for row in LIBRARIES if row[0] == path and rule in row[1].split("|")
    }
    named = broken(before, rule)
    assert named and all(r.fix.endswith(f"In {library}: {fix}") for r in named), seen(
        before
    ).reasons
    assert ("no setting" in fix) == (after is None)
    assert after is None or not broken(after, rule), seen(after).reasons


def test_a_library_s_fix_is_not_given_to_others():
    for name in PROGRAMS:
        library = name.partition(":")[0]
        said = {
            found.lower() for r in seen(name).reasons for found in re.findall(r"In (\w+): ", r.fix)
        }
        assert said <= {library, "flax"}, name


# What the census quotes -------------------------------------------------------------------------

QUOTED = [
    name
    for name, way in census.ways().items()
    if way.url.startswith("https://github.com/") and not way.url.endswith(".md")
]


@pytest.mark.parametrize(
    "name", QUOTED
)  # the others' words are on their sites, not in their packages
def test_a_quotation_is_in_the_package(name):
    def flat(text):
        return re.sub(r"\s+", " ", re.sub("[`*#]", "", text)).lower()

    way = census.ways()[name]
    files = [
        file.locate()
        for file in importlib.metadata.files(way.package) or ()
        if file.suffix in (".py", ".yml") or file.name == "METADATA"
    ]
    assert any(flat(way.says) in flat(path.read_text(errors="replace")) for path in files)
