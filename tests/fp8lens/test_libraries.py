"""The inspector on programs as the users of other libraries write them, and its fixes in those
libraries' terms.

With NIGHTLY=1 in the environment, and the group of dependencies `libraries` installed:

    .tools/bin/uv sync --group libraries
    NIGHTLY=1 .venv/bin/python -m pytest tests/fp8lens/test_libraries.py
"""

import functools
import importlib.metadata
import re
from collections.abc import Iterator

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
from tests.programs.random_programs import Line, Module, launched, size
from tools.recorders import census

NAMES = ("bitcast", "get-tuple-element", "reshape")
FREE = frozenset("parameter constant bitcast broadcast reshape tuple get-tuple-element".split())
MOVING = FREE | {"transpose", "copy", "convert"}
POINTWISE = MOVING | frozenset(
    "add subtract multiply divide maximum minimum clamp abs negate tanh logistic exponential "
    "select compare erf power "
    "and or is-finite".split()
)


@functools.cache
def seen(name: str) -> Inspection:
    fn, args = PROGRAMS[name]()
    return inspect(fn, *args)


@functools.cache
def module(name: str) -> Module:
    return Module(seen(name).compiled.as_text())


# Rows and kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_flop_is_lost(name):
    fn, args = PROGRAMS[name]()
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    # A custom gradient multiplies for the first layer's input too, and nobody reads that.
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found, written = seen(name).report.flops, written_flops(used)
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


# Reasons, by the kernels around each call as a few regular expressions see them -----------------


class Neighborhood:
    """What stands around one library call."""

    def __init__(self, of: Module, name: str):
        self.module = of
        computation, self.call = of.find(name)
        self.lines = of.computations[computation]

    def look_through(self, name: str) -> Line:
        while self.lines[name].opcode in NAMES:
            name = self.lines[name].operands[0]
        return self.lines[name]

    def makers(self, line: Line, *which: int) -> Iterator[Line]:
        """The fusions that make its operands, those of `which` or all."""
        for number, operand in enumerate(line.operands):
            maker = self.look_through(operand)
            if maker.opcode == "fusion" and (not which or number in which):
                yield maker

    def readers(self, line: Line) -> Iterator[Line]:
        for other in self.lines.values():
            if line.name in other.operands:
                yield from self.readers(other) if other.opcode in NAMES else [other]

    def opcodes(self, line: Line) -> set[str]:
        return {inner.opcode for inner in self.inside(line)}

    def inside(self, line: Line) -> list[Line]:
        return list(self.module.computations.get(line.has(r"calls=%([\w.\-]+)"), {}).values())

    def moves(self, line: Line) -> bool:
        return self.opcodes(line) <= MOVING and bool(self.opcodes(line) & {"transpose", "copy"})

    @property
    def left(self) -> Iterator[set[str]]:
        """What a reason must name, of each alternatives: nobody but the call's user has these
        kernels run.
        """
        for maker in self.makers(self.call, 0, 1):
            if self.moves(maker):
                yield {"transpose"}
            elif "f8e" in maker.type:  # it quantizes
                for further in self.makers(maker):
                    if (
                        self.moves(further)
                        and len({line.name for line in self.readers(further)}) == 1
                    ):
                        yield {"transpose"}
        for maker in self.makers(self.call, *range(2, len(self.call.operands))):
            if (
                self.opcodes(maker) <= FREE | {"convert", "multiply", "divide"}
                and "(" not in maker.type
                and (self.opcodes(maker) - FREE)
            ):
                yield {"bias", "scale"}
        for reader in self.readers(self.call):
            others = [
                self.lines[o]
                for o in reader.operands
                if self.look_through(o).name != self.call.name
            ]
            if (
                reader.opcode == "fusion"
                and self.opcodes(reader) <= POINTWISE
                and "(" not in reader.type
                and all(16 * size(other.type) < size(reader.type) for other in others)
            ):
                yield {"output", "epilogue", "bias", "scale", "amax", "transpose"}

    def bears(self, reason: Reason) -> bool:
        """Whether the text has what the reason speaks of."""
        if reason.lost == "fp8":
            return "matmul$f8" not in self.call.rest
        rest = range(2, len(self.call.operands))
        readers = [line for line in self.readers(self.call) if line.opcode == "fusion"]
        readers += [
            line for reader in readers for line in self.readers(reader) if line.opcode == "fusion"
        ]
        after = {opcode for reader in readers for opcode in self.opcodes(reader)}
        prepared = {
            opcode for maker in self.makers(self.call, *rest) for opcode in self.opcodes(maker)
        }
        makers = list(self.makers(self.call, 0, 1))
        makers += [further for maker in makers for further in self.makers(maker)]
        match reason.lost:
            case "transpose":
                return (
                    any(map(self.moves, makers))
                    or "operand" not in reason.reason
                    and any(map(self.moves, readers))
                )
            case "bias":
                return bool(prepared & {"convert", "multiply"}) or bool(after & {"add", "subtract"})
            case "scale":
                return bool((prepared | after) & {"convert", "multiply", "divide"})
            case "output":
                return bool(after & {"convert", "clamp"})
            case "amax":
                return "reduce" in after and '"damax_output":true' not in self.call.rest
        return reason.lost == "epilogue" and bool(after - MOVING)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_reason_is_borne_out_by_the_text(name):
    for reason in seen(name).reasons:
        assert not reason.reason.startswith("unknown"), reason
        around = Neighborhood(module(name), reason.matmul.split()[0])
        assert around.bears(reason), reason


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_is_left_without_a_reason(name):
    for row in seen(name).report.fp8_rows:
        named = {r.lost for r in seen(name).reasons if r.matmul.split()[0] == row.name}
        for kinds in Neighborhood(module(name), row.name).left:
            assert named & kinds, f"{row.title} {row.path}: {kinds}, named {named}"


# Fixes in a library's own terms -----------------------------------------------------------------

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
    ("qwix/_src/providers/ptq.py", "amax-along"): ("qwix: PTQ", "qwix: PTQ, static"),
    ("qwix/_src/providers/qt.py", "not-quantized"): (
        "qwix: QT, trained",
        "qwix: QT, E5M2 gradients",
    ),
    ("qwix/_src/providers/qt.py", "both-e5m2-bare"): (
        "qwix: QT, all E5M2",
        "qwix: QT, E5M2 gradients",
    ),
    ("qwix/_src/providers/qt.py", "vector-scale"): ("qwix: QT", "qwix: QT, one scale"),
    ("qwix/_src/providers/qt.py", "amax-along"): ("qwix: QT", "qwix: QT, one scale"),
    ("qwix/_src/providers/qt.py", "scales-one-by-one"): ("qwix: QT, one scale", "qwix: QT, fixed"),
    ("qwix/_src/providers/qt.py", "amax-scaled"): ("qwix: QT, one scale", "qwix: QT, fixed"),
    ("qwix/_src/core/dot.py", "vector-scale"): ("qwix: QArrays, by channel", "qwix: QArrays"),
    ("aqt/jax/v2/", "not-quantized"): ("aqt: trained", "aqt: trained, E5M2 gradients"),
    ("aqt/jax/v2/", "both-e5m2-bare"): ("aqt: E5M2", "aqt: trained, E5M2 gradients"),
    ("aqt/jax/v2/", "another-type"): ("aqt: forward", "aqt: forward, bf16 dots"),
    ("aqt/jax/v2/", "vector-scale"): (
        "aqt: forward, bf16 dots",
        "aqt: forward, bf16 dots, one scale",
    ),
    ("aqt/jax/v2/", "amax-along"): (
        "aqt: forward, bf16 dots",
        "aqt: forward, bf16 dots, one scale",
    ),
    ("aqt/jax/v2/", "scales-one-by-one"): (
        "aqt: forward, bf16 dots, one scale",
        "aqt: forward, bf16 dots, constant",
    ),
    ("aqt/jax/v2/", "amax-scaled"): (
        "aqt: forward, bf16 dots, one scale",
        "aqt: forward, bf16 dots, constant",
    ),
    ("keras/src/layers/core/", "operand-layout"): (
        "keras: EinsumDense",
        "keras: EinsumDense, by rows",
    ),
    ("keras/src/layers/core/", "prepared-bias"): ("keras: Dense", "keras: Dense, bf16"),
    ("keras/src/layers/core/", "other-activation"): (
        "keras: EinsumDense",
        "keras: EinsumDense, by rows",
    ),
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
    assert named and all(r.fix.endswith(f"In {library}: {fix}") for r in named), seen(
        before
    ).reasons
    assert ("no setting" in fix) == (after is None)
    assert after is None or not broken(after, rule), seen(after).reasons


def test_tiles_take_their_residuals_in_fp8_too():
    before, after = (seen(f"qwix: QT, tiles, E5M2 gradients{more}") for more in ("", ", residuals"))
    assert broken("qwix: QT, tiles, E5M2 gradients", "not-quantized")
    assert len(before.report.fp8_rows) < len(before.report.rows)
    assert len(after.report.fp8_rows) == len(after.report.rows)


def test_a_library_s_fix_is_not_given_to_others():
    for name in PROGRAMS:
        library = name.partition(":")[0]
        said = {
            found.lower() for r in seen(name).reasons for found in re.findall(r"In (\w+): ", r.fix)
        }
        assert said <= {library, "flax"}, name


# Fixes in general terms, in the user's own code -------------------------------------------------


@pytest.mark.parametrize(
    "rule, before, after",
    [
        ("reshaped-first", "flax: Dense, gelu, a batch", "flax: Dense, gelu, flat"),
        ("activation-and-reader", "flax: Dense, trained", "flax: Dense, another relu, trained"),
    ],
)
def test_the_general_fix_fixes(rule, before, after):
    assert broken(before, rule) and not broken(after, rule)


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
