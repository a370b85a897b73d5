"""What `make gpu` does, rehearsed on the CPU: every part goes all its way, and what it writes satisfies the schema."""
import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import outputs
import pytest
from test_results import problems

from helpers.cost import kernels
from helpers.targets import attached_gpu

ROOT = Path(__file__).resolve().parent.parent
GPU = ROOT / "tests" / "gpu"
sys.path.insert(0, str(GPU))  # as `python tests/gpu` has it

import numerics  # noqa: E402
import programs  # noqa: E402
import record  # noqa: E402
import speed  # noqa: E402

PARTS = ("agreement", "numerics", "speed", "autotune", "notebooks", "train")
needs_compiler = pytest.mark.skipif(sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only")


def run(*arguments: str, script: Path = GPU, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, script, *map(str, arguments)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=os.environ | environment)


# The whole, rehearsed -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> Path:
    """The folder with what a rehearsal of every part wrote."""
    folder = tmp_path_factory.mktemp("rehearsed")
    made = run(*PARTS, "--rehearse", "--minutes", "20", "--results", folder)
    assert made.returncode == 0, made.stdout
    return folder / "cpu"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@needs_compiler
@pytest.mark.parametrize("part", PARTS)
def test_a_rehearsal_writes_what_the_schema_asks_for(rehearsed, part):
    data = read(rehearsed / f"{part}.json")
    assert problems(data) == []
    assert data["provenance"]["rehearsal"] and set(data["cases"]) == set(importlib.import_module(part).cases(True))


@needs_compiler
def test_two_compiles_without_a_gpu_agree_and_run(rehearsed):
    cases = read(rehearsed / "agreement.json")["cases"]
    assert len(cases) > 20 and {case["gemm"] for case in cases.values()} == {"cublaslt", "auto"}
    for name, case in cases.items():
        assert case["agree"] and case["same_kernels"], name
        assert case["ran"] != ("error" in case["on_gpu"]), name


@needs_compiler
def test_the_cpu_is_right_on_every_kind_of_input(rehearsed):
    cases = read(rehearsed / "numerics.json")["cases"]
    assert len(cases) > 15 and all(case["right"] for case in cases.values() if not case["refused"])
    assert all(set(case["inputs"]) == set(programs.KINDS) for case in cases.values())


@needs_compiler
def test_every_form_was_timed(rehearsed):
    for name, case in read(rehearsed / "speed.json")["cases"].items():
        for form, row in case["forms"].items():
            assert "error" not in row and row["wall_seconds"] > 0, (name, form)


@needs_compiler
def test_the_chapter_shows_what_is_recorded(rehearsed, monkeypatch):
    monkeypatch.setenv("FP8_RESULTS", str(rehearsed.parent))
    chapter = outputs.NOTEBOOKS / "09_performance.ipynb"
    notebook, _, failure = outputs.fresh_run([chapter])[chapter.stem]
    assert failure is None, failure
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "REHEARSAL" in said and "not measured yet: `" not in said
    assert re.search(r"^FP8 scaled, FP8 out, amax .* µs .* µs", said, re.M)
    assert re.search(r"training step in FP8, over bf16's, on cpu: wanted at most 0.65; \d", said)


@needs_compiler
def test_a_second_run_measures_only_what_is_missing(rehearsed, tmp_path):
    shutil.copytree(rehearsed, tmp_path / "cpu")
    path = tmp_path / "cpu" / "speed.json"
    before = read(path)
    missing = list(before["cases"])[1]
    del before["cases"][missing]
    path.write_text(json.dumps(before))
    again = run("speed", "--rehearse", "--results", tmp_path)
    after = read(path)
    assert again.returncode == 0 and again.stdout.count("done (") == 1 and f"{missing}: done" in again.stdout
    assert {name: case for name, case in after["cases"].items() if name != missing} == before["cases"]
    before["provenance"]["jax"] = "0.1"  # another JAX's figures may not stand beside this one's
    path.write_text(json.dumps(before))
    out_of_time = run("speed", "--rehearse", "--results", tmp_path, "--minutes", "0.0001")
    assert out_of_time.returncode == 1 and re.search("[89] left", out_of_time.stdout)
    assert "goes on with them" in out_of_time.stdout


# A part that fails ----------------------------------------------------------------------------------------------------

def with_parts(folder: Path, **sources: str) -> Path:
    """A copy of the runner whose cases have two seconds more when time is up, with other parts."""
    copy = folder / "tests" / "gpu"
    shutil.copytree(GPU, copy, ignore=shutil.ignore_patterns("__pycache__"))
    main = (copy / "__main__.py").read_text()
    (copy / "__main__.py").write_text(main.replace("GRACE = 60", "GRACE = 2"))
    for part, source in sources.items():
        (copy / f"{part}.py").write_text(source)
    return copy


def test_a_case_that_ends_its_process_is_recorded_and_the_rest_goes_on(tmp_path):
    copy = with_parts(tmp_path, speed=(
        "import os\n"
        "def refused(): raise RuntimeError('no algorithm in /somewhere/on/this/machine.cc')\n"
        "def cases(rehearse):\n"
        "    return {'one': lambda: {'n': 1}, 'aborts': os.abort, 'refused': refused, 'last': lambda: {'n': 2}}\n"))
    made = run("speed", "--rehearse", "--results", tmp_path / "out", script=copy,
               PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert made.returncode == 0, made.stdout
    cases = read(tmp_path / "out" / "cpu" / "speed.json")["cases"]
    assert cases["one"]["n"] == 1 and cases["last"]["n"] == 2
    assert cases["aborts"]["error"] == "the process ended with signal SIGABRT"
    assert cases["refused"]["error"] == "RuntimeError: no algorithm in <path>"
    assert not list((tmp_path / "out").glob("*/*.running"))


def test_a_case_that_runs_out_of_time_is_left_for_the_next_run(tmp_path):
    copy = with_parts(tmp_path, speed=(
        "import time\n"
        "def cases(rehearse):\n"
        "    return {'one': lambda: {'n': 1}, 'long': lambda: time.sleep(60), 'last': lambda: {'n': 2}}\n"))
    made = run("speed", "--rehearse", "--results", tmp_path / "out", "--minutes", "0.15", script=copy,
               PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert made.returncode == 1 and "2 left" in made.stdout, made.stdout
    assert list(read(tmp_path / "out" / "cpu" / "speed.json")["cases"]) == ["one"]
    assert not list((tmp_path / "out").glob("*/*.running"))


def test_threads_left_at_the_end_and_a_part_that_cannot_start_keep_no_other_part(tmp_path):
    threads = (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "def one():\n"
        "    ThreadPoolExecutor(1).submit(time.sleep, 60)\n"
        "    return {'n': 1}\n"
        "def cases(rehearse):\n"
        "    return {'one': one, 'wait': lambda: time.sleep(20), 'last': lambda: {'n': 2}}\n")
    copy = with_parts(tmp_path, speed=threads, numerics="import a_package_that_is_not_here\n",
                      agreement="def cases(rehearse):\n    return {'only': lambda: {'n': 3}}\n")
    made = run("speed", "numerics", "agreement", "--rehearse", "--results", tmp_path / "out", "--minutes", "0.5",
               script=copy, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert made.returncode == 1 and "did not start" not in made.stdout, made.stdout
    assert "cannot start: No module named 'a_package_that_is_not_here'" in made.stdout
    assert list(read(tmp_path / "out" / "cpu" / "speed.json")["cases"]) == ["one"]
    assert list(read(tmp_path / "out" / "cpu" / "agreement.json")["cases"]) == ["only"]


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path):
    refused = run("--results", tmp_path)
    assert refused.returncode == 2 and "JAX finds none here" in refused.stdout and "--rehearse" in refused.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong, said", [
    (["speeds"], "parts are agreement"), (["--minutes", "0"], "above 0"), (["--rehearse", "--commit", "abc"], "40 hex"),
])
def test_wrong_arguments_are_answered(wrong, said):
    answer = run(*wrong)
    assert answer.returncode != 0 and said in answer.stdout and "Traceback" not in answer.stdout


def test_a_commit_is_named_and_a_copy_without_git_must_say_it(tmp_path, monkeypatch):
    assert record.commit("0123456789" * 4) == ("0123456789" * 4, False)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="--commit"):
        record.commit(None)


def test_what_json_has_not_got_is_null(tmp_path):
    record.write(tmp_path / "x.json", "train", {}, {"step": {"losses": [1.0, float("nan")], "n": float("inf")}})
    assert read(tmp_path / "x.json")["cases"] == {"step": {"losses": [1.0, None], "n": None}}


def test_messages_name_no_path():
    assert record.clean("at /home/user/x.py:3, see https://x.org/a/b") == "at <path>:3, see https://x.org/a/b"


# The float64 reference ------------------------------------------------------------------------------------------------

def errors_of(fn, wrong, kind: str = "random") -> list[dict]:
    """What `numerics` says of `wrong`'s results where `fn` is asked for."""
    args = programs.arguments(programs.programs(16)["bias + relu + amax"].args, kind)
    results = jax.tree.leaves(wrong(*map(jnp.asarray, args)))
    return [numerics.errors(*pair) for pair in zip(results, numerics.reference(fn, args), strict=True)]


def test_the_reference_is_the_function_in_float64():
    a, b = (np.random.default_rng(seed).normal(size=(24, 40)).astype(jnp.float8_e4m3fn) for seed in (0, 1))
    fn = lambda a, b: jax.nn.gelu(jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)) * 3
    d = a.astype(np.float64) @ b.astype(np.float64).T
    expected = 1.5 * d * (1 + np.tanh(np.sqrt(2 / np.pi) * (d + 0.044715 * d**3)))
    (value,) = numerics.reference(fn, [a, b])
    assert value.dtype == np.float64
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-9)  # gelu's constants are float32's
    (rounded,) = numerics.reference(lambda x: x.astype(jnp.float8_e4m3fn), [np.float32([1.07, 464, 465, 1e-9])])
    np.testing.assert_array_equal(rounded, [1.125, 448, np.nan, 0])  # to nearest, and NaN beyond the range


@pytest.mark.parametrize("kind", programs.KINDS[:-1])
def test_a_right_program_is_right(kind):
    fn = programs.programs(16)["bias + relu + amax"].fn
    assert all(map(numerics.is_right, errors_of(fn, fn, kind)))


@pytest.mark.parametrize("wrong", [
    lambda a, b, x, y, z, c: (a, b, x * 1.1, y, z, c),  # a scale
    lambda a, b, x, y, z, c: (a, b, x, y, z, c * 0),  # no bias
    lambda a, b, x, y, z, c: (a, b, x, y, -z, c),  # the wrong sign
    lambda a, b, x, y, z, c: (a.at[0, 0].set(jnp.nan), b, x, y, z, c),  # one NaN
])
def test_a_wrong_program_is_not(wrong):
    fn = programs.programs(16)["bias + relu + amax"].fn
    assert not all(map(numerics.is_right, errors_of(fn, lambda *args: fn(*wrong(*args)))))


def test_inputs_are_of_their_kind():
    program = programs.programs(16)["E5M2 times E4M3, E5M2 result"]
    for kind, holds in {
        "random": lambda x: np.isfinite(x).all() and x.std() > 0.5,
        "largest": lambda x: (np.abs(x) == np.abs(x).max()).all() and np.abs(x).max() in (448, 57344),
        "subnormal": lambda x: (x != 0).all() and np.abs(x).max() < 2.0**-6, "zero": lambda x: not x.any(),
        "not finite": lambda x: np.isnan(x).sum() == 1,
    }.items():
        for array in programs.arguments(program.args, kind)[:2]:
            assert holds(array.astype(np.float64)), kind


# What is timed --------------------------------------------------------------------------------------------------------

@needs_compiler
def test_fused_and_unfused_are_the_same_work_in_one_kernel_and_in_more():
    found = speed.forms(64, 96, 128)["what is fused"]
    for name in [name for name in found if name.startswith("+")] + ["FP8 scaled, FP8 out"]:
        other = found["unfused: " + ("FP8 out" if name == "FP8 scaled, FP8 out" else name)]
        args = speed.inputs(found[name].args, 0)
        for one, two in zip(jax.tree.leaves(found[name].fn(*args)), jax.tree.leaves(other.fn(*args)), strict=True):
            first, second = (np.asarray(d).astype(np.float64) for d in (one, two))
            assert one.dtype == two.dtype
            assert np.linalg.norm(first - second) < 0.03 * np.linalg.norm(first), name
        one, more = (len(kernels(programs.own_compile(f.fn, *f.args, rehearse=True))) for f in (found[name], other))
        assert one == 1 < more, name


@needs_compiler
def test_forms_are_what_their_names_say():
    groups = speed.forms(256, 512, 384)
    forms = groups["main"] | groups["details"]
    rows = {name: speed.report_gemms(programs.own_compile(form.fn, *form.args, rehearse=True)).rows
            for name, form in forms.items()}
    assert rows["accumulated in f32"][0].precision == "HIGHEST" != rows["FP8 scaled, FP8 out"][0].precision
    assert rows["FP8 scaled, FP8 out, amax"][0].amax and not rows["FP8 scaled, FP8 out"][0].amax
    assert "".join(rows["no scales"][0].scales) == "" and rows["B stored [K, N]"][0].outside
    assert {rows[name][0].out_dtype for name in ("bf16 out", "f32 out")} == {"bf16", "f32"}
    assert rows["FP8 from bf16 by amax"][0].is_fp8 and rows["quantize A"] == ()


def test_inputs_walk_through_more_than_the_cache():
    assert speed.sets_of(2 * 1024**2) * 2 * 1024**2 > 100e6  # twice the L2 of an H100
    assert speed.sets_of(2 * 16384**2) == 1
    call = speed.walked(lambda x: float(x[0, 0]), (jax.ShapeDtypeStruct((4, 4), jnp.float32),), True)
    first, second, third = call(), call(), call()
    assert first == third != second


def test_the_readme_and_the_chapter_name_the_shapes_that_are_timed():
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"at {len(speed.SHAPES)} shapes" in readme and len(speed.EVERYTHING) == 3 and "at three of them" in readme
    chapter = (ROOT / "notebooks" / "09_performance.md").read_text()
    listed = ast.literal_eval(re.search(r"^SHAPES = (\{.*?^\})", chapter, re.M | re.S)[1])
    assert listed == {name: sizes for name, sizes in speed.SHAPES.items() if not name.startswith("N = ")}
