"""Fixes in other libraries' terms, on programs as their users write them.

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
from tests.fp8lens.test_corpus import written_flops
from tests.programs.library_programs import PROGRAMS
from tests.programs.random_programs import launched
from tools.recorders import census


@functools.cache
def seen(name: str) -> Inspection:
    fn, args = PROGRAMS[name]()
    return inspect(fn, *args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_flops_kernels_and_bytes_are_known(name):
    fn, args = PROGRAMS[name]()
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    # A custom gradient multiplies for the first layer's input too, and nobody reads that.
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    report = seen(name).report
    assert report.flops == written_flops(used)
    assert (report.kernels, report.bytes_moved) == launched(seen(name).module.text)


# For a file and rule of LIBRARIES: a program that breaks the rule there, and what it is with the
# fix; None where the library has no setting.
FIXED: dict[tuple[str, str], tuple[str, str | None]] = {
    ("qwix/_src/providers/ptq.py", "not-quantized"): ("qwix: PTQ, weights alone", "qwix: PTQ"),
    ("qwix/_src/providers/ptq.py", "array-of-scales"): (
        "qwix: PTQ, small tiles",
        "qwix: PTQ, tiles",
    ),
    ("qwix/_src/providers/ptq.py", "vector-scale"): ("qwix: PTQ", "qwix: PTQ, fixed"),
    ("qwix/_src/providers/ptq.py", "operand-layout"): ("qwix: PTQ", "qwix: PTQ, by rows"),
    ("qwix/_src/providers/qt.py", "not-quantized"): (
        "qwix: QT, trained",
        "qwix: QT, E5M2 gradients",
    ),
    ("qwix/_src/providers/qt.py", "both-e5m2"): (
        "qwix: QT, all E5M2",
        "qwix: QT, E5M2 gradients",
    ),
    ("qwix/_src/providers/qt.py", "vector-scale"): ("qwix: QT", "qwix: QT, one scale"),
    ("qwix/_src/providers/qt.py", "scale-too-many"): ("qwix: QT, one scale", "qwix: QT, fixed"),
    ("qwix/_src/core/dot.py", "vector-scale"): ("qwix: QArrays, by channel", "qwix: QArrays"),
    ("aqt/jax/v2/", "not-quantized"): ("aqt: trained", "aqt: trained, E5M2 gradients"),
    ("aqt/jax/v2/", "both-e5m2"): ("aqt: E5M2", "aqt: trained, E5M2 gradients"),
    ("aqt/jax/v2/", "another-type"): ("aqt: forward", "aqt: forward, bf16 dots"),
    ("aqt/jax/v2/", "vector-scale"): (
        "aqt: forward, bf16 dots",
        "aqt: forward, bf16 dots, one scale",
    ),
    ("aqt/jax/v2/", "scale-too-many"): (
        "aqt: forward, bf16 dots, one scale",
        "aqt: forward, bf16 dots, constant",
    ),
    ("keras/src/layers/core/", "operand-layout"): (
        "keras: EinsumDense",
        "keras: EinsumDense, by rows",
    ),
    ("keras/src/layers/core/", "prepared-bias"): ("keras: Dense", "keras: Dense, bf16"),
    ("keras/src/layers/core/", "divided-by-scale"): ("keras: Dense", None),
    ("flax/linen/fp8_ops.py", "operand-layout"): (
        "flax: Fp8Einsum, by columns",
        "flax: Fp8Einsum, by rows",
    ),
    ("flax/linen/fp8_ops.py", "product-of-scales"): ("flax: Dense, trained", None),
    ("flax/(linen|nnx/nn)/linear.py", "prepared-bias"): (
        "flax: Dense",
        "flax: Dense, bf16 parameters",
    ),
    ("flax/(linen|nnx/nn)/linear.py", "bias-in-f32"): (
        "flax: Dense, f32",
        "flax: Dense, f32, bf16 parameters",
    ),
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
    assert named and all(f"In {library}: {fix}" in r.fix for r in named), seen(before).reasons
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
    if way.url in (census.QWIX, census.AQT, census.MAXTEXT)
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
