"""What reads HLO needs Python alone: in Pyodide, Python compiled to WebAssembly as a browser runs
it, it says the same.

Pyodide comes from npm's registry into _build/, once: no other request is made, and nothing is added
to it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.explorers import program
from tools.site.pyodide import NotFetched, fetched, unpacked

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import contextlib, os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, os.getcwd())
import fp8lens
from fp8lens.cli import main
from fp8lens.matmul.kernels import print_kernels

dump = "tests/fp8lens/hlo/jax_0_4_32_bf16_scaled.txt"
text = open(dump).read()
module = fp8lens.parse_hlo_module(text)
print(len(module), module.entry.root.shape)
fp8lens.print_hlo_module(module, metadata=True, backend_cfg=True)
print(fp8lens.report_gemms(text))
print(fp8lens.diff_hlo(text, text.replace("448", "240")))
print_kernels(text)
with contextlib.redirect_stderr(sys.stdout):
    for arguments in ([dump], [dump, "--json"], [dump, "--require-fp8"], [dump, "--reasons"],
                      ["README.md"], ["layers.py:layer", "--shapes", "f32[]"]):
        print(f"fp8lens {' '.join(arguments)} gives {main(arguments)}")
try:
    fp8lens.aot_compile
except ImportError as error:
    print(error)
assert not set(sys.modules) & {"jax", "jaxlib", "numpy", "ml_dtypes"}
print("on", sys.platform, file=sys.stderr)
"""
NODE = """
const { loadPyodide } = await import(process.argv[2]);
const pyodide = await loadPyodide();
pyodide.mountNodeFS("/project", process.argv[3]);
pyodide.FS.chdir("/project");
try {
    pyodide.runPython(process.argv[4]);
} catch (error) {
    console.error(error.message);
    process.exit(1);
}
"""


@pytest.fixture(scope="module")
def pyodide() -> Path:
    try:
        return fetched()
    except NotFetched as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


def test_pyodide_says_what_python_says(pyodide, tmp_path):
    (tmp_path / "run.mjs").write_text(NODE)
    there = subprocess.run(
        [program("node"), tmp_path / "run.mjs", (pyodide / "pyodide.mjs").as_uri(), ROOT, PROGRAM],
        capture_output=True,
        text=True,
    )
    assert there.returncode == 0, there.stderr[-3000:]
    here = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True
    )
    assert here.returncode == 0, here.stderr
    assert (there.stderr, here.stderr) == ("on emscripten\n", f"on {sys.platform}\n")
    assert there.stdout == here.stdout
    for told in (
        "32 x 128 x 64  bf16",
        "-448",
        "-240",
        " --json gives 0",
        " --require-fp8 gives 1",
        "README.md gives 2",
        "pip install 'path/to/the/checkout[jax]'",
    ):
        assert told in there.stdout
    printed = there.stdout.partition("gives 0\n")[2].partition("\nfp8lens ")[0]
    assert json.loads(printed)["totals"]["kernels"] == 3


def test_another_package_than_the_pinned_is_refused(tmp_path):
    (tmp_path / "pyodide.tgz").write_bytes(b"anything")
    with pytest.raises(ValueError, match="pyodide.tgz is not the package that was pinned"):
        unpacked(tmp_path / "pyodide.tgz", tmp_path)
