"""What `import fp8lens` loads and changes: Python alone reads HLO, and JAX comes with what
compiles.
"""

import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fp8lens

ROOT = Path(__file__).resolve().parent.parent.parent
DUMP = (ROOT / "tests" / "fp8lens" / "hlo" / "jax_0_4_32_bf16_scaled.txt").read_text()
COMPILE = {
    "aot_compile",
    "gpu_available",
    "mesh",
    "passes",
    "run",
}  # of fp8lens.__all__, what is nothing without JAX
HIDDEN = """
import sys
for name in ("jax", "jaxlib", "numpy", "ml_dtypes"):
    sys.modules[name] = None
"""


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_reads_text_works_without_jax():
    told = python(
        HIDDEN
        + """
import fp8lens
from fp8lens.matmul.kernels import print_kernels
assert set(dir(fp8lens)) == set(fp8lens.__all__)
for name in fp8lens.__all__:
    try:
        getattr(fp8lens, name)
    except ImportError as error:
        print(name, error, sep=": ")
for ask in (fp8lens.report_gemms, fp8lens.why_not_fp8, fp8lens.assert_fp8_gemms, fp8lens.inspect):
    try:
        ask(lambda x: x, None)
    except ImportError as error:
        assert "compiling needs JAX" in str(error)
text = open("tests/fp8lens/hlo/jax_0_4_32_bf16_scaled.txt").read()
module = fp8lens.parse_hlo_module(text)
assert isinstance(module, fp8lens.HloModule) and fp8lens.TARGETS["H100"].has_fp8
fp8lens.print_hlo_module(fp8lens.format_hlo_module(module, metadata=True), file=sys.stderr)
assert len(fp8lens.report_gemms(text).rows) == 1 and not fp8lens.diff_hlo(text, module)
print_kernels(text)
"""
    )
    *missing, kernels = told.split("\n", len(COMPILE))
    assert {line.partition(":")[0] for line in missing} == COMPILE and "3 kernels" in kernels
    for line in missing:
        name = line.partition(":")[0]
        assert line.startswith(f"{name}: compiling needs JAX (")
        assert line.endswith("): pip install 'path/to/the/checkout[jax]'")


def test_import_loads_nothing_compiled_and_changes_nothing_of_jax():
    loaded = python(
        "import fp8lens.cli, fp8lens.matmul.kernels, fp8lens.rules.find, fp8lens.testing, sys\n"
        "print(*sys.modules, sep='\\n')"
    ).split()
    assert not {name.partition(".")[0] for name in loaded} & {"jax", "jaxlib", "numpy", "ml_dtypes"}
    changed = """
import os, jax
before = dict(jax.config.values), dict(os.environ), list(sys.path)
import fp8lens
from fp8lens import *
assert report_gemms is fp8lens.report_gemms and aot_compile is fp8lens.aot_compile
assert (dict(jax.config.values), dict(os.environ), list(sys.path)) == before
assert jax.config.jax_platforms is None
"""
    python(f"import os, sys\nos.environ.pop('JAX_PLATFORMS', None)\n{changed}")


def test_everything_public_is_shown_and_found():
    everything: dict = {}
    exec("from fp8lens import *", everything)
    assert set(dir(fp8lens)) == set(fp8lens.__all__) == set(everything) - {"__builtins__"}
    with pytest.raises(AttributeError, match="module 'fp8lens' has no attribute 'report_gemm'"):
        fp8lens.report_gemm  # noqa: B018
    for name in set(fp8lens.__all__) - {"TARGETS"}:
        value = getattr(fp8lens, name)
        assert value.__doc__ and pickle.loads(pickle.dumps(value)) is value


def test_what_was_read_can_be_sent_to_another_process():
    report = fp8lens.report_gemms(DUMP)
    same = pickle.loads(pickle.dumps(report))
    assert same == report and str(same) == str(report)
    call = same.rows[0].instruction
    assert call.computation.module[call.name] is call
    with pytest.raises(fp8lens.HloParseError) as caught:
        fp8lens.parse_hlo_module("HloModule m\n\n  nothing")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (str(error), error.line, error.column) == (str(caught.value), 3, 3)


def test_no_public_name_hides_a_module():
    places = {module.name for module in pkgutil.iter_modules(fp8lens.__path__)}
    assert {"compile", "report", "hlo"} <= places and not places & set(fp8lens.__all__)
    assert fp8lens.__all__ == sorted(fp8lens.__all__)
