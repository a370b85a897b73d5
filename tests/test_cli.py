import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fp8lens.compile
from fp8lens import aot_compile, report_gemms, targets
from fp8lens.cli import main, parse_shapes

ROOT = Path(__file__).resolve().parent.parent
LAYERS = """
import jax
import jax.numpy as jnp
from {beside} import MAX

def scaled(x, w, x_scale, w_scale):
    d = (x.astype(jnp.float32) * x_scale) @ (w.astype(jnp.float32) * w_scale).T
    return jnp.clip(d, -MAX, MAX).astype(jnp.float8_e4m3fn)

def plain(x, w):
    return x @ w

@jax.jit
def layer(params, x):
    return scaled(x, params["w"], params["x_scale"], params["w_scale"])

def layer_args():
    s = jax.ShapeDtypeStruct
    params = {{"w": s((256, 128), jnp.float8_e4m3fn), "x_scale": s((), jnp.float32), "w_scale": s((), jnp.float32)}}
    return params, s((64, 128), jnp.float8_e4m3fn)

def bare(x, w):
    return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

def constant():
    return jnp.ones((16, 16)) @ jnp.tril(jnp.ones((16, 16)))

def no_tuple():
    return [1]

def broken():
    raise RuntimeError("out of cheese\\nand crackers")
"""
SHAPES = "f8e4m3fn[64,128] float8_e4m3fn[256,128] f32[] float32[]"


@pytest.fixture
def file(tmp_path) -> str:
    """A file of functions, and one that it imports; named anew each time, as Python keeps what it imports."""
    beside = re.sub(r"\W", "_", f"beside_{tmp_path.name}")
    (tmp_path / f"{beside}.py").write_text("MAX = 448\n")
    (tmp_path / f"layers_{beside}.py").write_text(LAYERS.format(beside=beside))
    (tmp_path / "broken_import.py").write_text("import no_such_module_anywhere\n")
    return str(tmp_path / f"layers_{beside}.py")


SCRIPT = shutil.which("fp8lens", path=str(Path(sys.executable).parent)) or "fp8lens"


def command(*arguments: str, folder: Path = ROOT, program: tuple[str, ...] = (SCRIPT,)) -> subprocess.CompletedProcess:
    return subprocess.run([*program, *arguments], cwd=folder, text=True, capture_output=True)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    """What XLA saves of one program in bf16, compiled for a GPU; in "cpu", for the CPU."""
    folder = tmp_path_factory.mktemp("dumps")
    shapes, options = parse_shapes("bf16[64,128] bf16[128,256]"), {"xla_dump_hlo_as_text": True}
    aot_compile(lambda x, w: x @ w, *shapes, compiler_options=options | {"xla_dump_to": str(folder)})
    with jax.default_device(jax.devices("cpu")[0]):
        jax.jit(lambda x, w: x @ w).lower(*shapes).compile(
            compiler_options=options | {"xla_dump_to": str(folder / "cpu")})
    return folder


def test_fp8_from_another_folder(file):
    done = command(f"{Path(file).name}:scaled", "--shapes", *SHAPES.split(), "--require-fp8", folder=Path(file).parent)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "64 x 256 x 128" in done.stdout and "cublasLt" in done.stdout and "1 in FP8" in done.stdout


def test_lost_fp8_says_why(file):
    done = command(f"{file}:plain", "--shapes", "bf16[64,128] bf16[128,256]", "--require-fp8")
    assert (done.returncode, done.stderr) == (1, "")
    assert "mend:" in done.stdout and done.stdout.endswith("\n1 of 1 matmul not in FP8\n")


def test_beside_a_reader_s_own_helpers(file):
    folder = Path(file).parent
    (folder / "helpers.py").write_text("print('mine')\n")
    shapes = [f"{Path(file).name}:plain", "--shapes", "bf16[64,128] bf16[128,256]", "--require-fp8"]
    for program in ((sys.executable, "-m", "fp8lens"), (SCRIPT,)):
        done = command(*shapes, folder=folder, program=program)
        assert done.returncode == 1 and "mine" not in done.stdout and "mend:" in done.stdout


def test_as_a_module_too(file):
    done = command(f"{file}:scaled", "--shapes", SHAPES, program=(sys.executable, "-m", "fp8lens"))
    assert (done.returncode, done.stderr) == (0, "") and "1 in FP8" in done.stdout


def test_imports_from_here_as_from_beside(file):
    folder = Path(file).parent
    name = f"package_{Path(file).stem}"
    (folder / name).mkdir()
    (folder / name / "model.py").write_text(f"from {name} import parts\nfn = parts.fn\n")
    (folder / name / "parts.py").write_text("def fn(x):\n    return x @ x\n")
    done = command(f"{name}/model.py:fn", "--shapes", "bf16[32,32]", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistake_in_one_line(file):
    done = command(f"{file}:plane", "--shapes", "bf16[64,128] bf16[128,256]")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: \S+ has no function 'plane'; nearest: plain, layer\.\n", done.stderr)


def test_json(file, capsys):
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--json", "--reasons"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    row, = answer["rows"]
    assert err == "" and answer["reasons"] == []
    assert (row["m"], row["n"], row["k"]) == (64, 256, 128) and row["lhs_dtype"] == row["math_dtype"] == "f8e4m3fn"
    assert row["is_fp8"] and row["path"] == "" and row["outside"] == [] and "instruction" not in row
    assert row["source"].startswith("layers_")
    assert answer["totals"].items() >= {"kernels": 1, "flops": 2 * 64 * 256 * 128, "fp8_flops_share": 1.0}.items()
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer | {"reasons": None}


def test_json_stays_json_where_fp8_is_required(file, dumps, capsys):
    shapes = ["--shapes", "bf16[64,128]", "bf16[128,256]"]
    assert main([f"{file}:plain", *shapes, "--json", "--require-fp8"]) == 1
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["rows"][0]["math_dtype"] == "bf16" and err == "\n1 of 1 matmul not in FP8\n"
    assert [(r["lost"], r["source"]) for r in answer["reasons"]] == [("fp8", answer["rows"][0]["source"])]
    Path(file).write_text("def no_matmul(x):\n    return x + 1\n")
    assert main([f"{file}:no_matmul", "--shapes", "f32[4]", "--json", "--require-fp8"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] == json.loads(out)["reasons"] == [] and "there is no matmul" in err
    assert main([str(next(dumps.glob("*before_optimizations.txt"))), "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["rows"]) == 1 and "has not optimized yet" in err


def test_pytrees_from_a_function(file, capsys):
    assert main([f"{file}:layer", "--args", "layer_args", "--require-fp8", "--reasons"]) == 0
    alone = capsys.readouterr().out
    assert main([f"{file}:layer", "--args", f"{file}:layer_args", "--require-fp8", "--reasons"]) == 0
    assert capsys.readouterr().out == alone and "nothing was left outside" in alone


def test_reasons_only_where_asked_or_needed(file, capsys):
    argv = [f"{file}:plain", "--shapes", "bf16[64,128] bf16[128,256]"]
    assert main(argv) == 0 and "mend:" not in capsys.readouterr().out
    assert main([*argv, "--reasons"]) == 0 and "mend:" in capsys.readouterr().out


def test_target_gemm_and_mma(file, capsys):
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--target", "A100", "--require-fp8"]) == 1
    assert "0 in FP8" in capsys.readouterr().out
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--gemm", "triton"]) == 0
    assert "triton" in capsys.readouterr().out


def test_triton_is_judged_by_its_instructions(file, capsys):
    """The dot is of FP8 arrays, and the kernel multiplies in a wider type."""
    assert main([f"{file}:bare", "--shapes", "f8e4m3fn[64,128] f8e4m3fn[256,128]", "--gemm", "triton", "--json"]) == 0
    row, = json.loads(capsys.readouterr().out)["rows"]
    fn = lambda x, w: jnp.dot(x, w.T, preferred_element_type=jnp.float32)
    shapes = parse_shapes("f8e4m3fn[64,128] f8e4m3fn[256,128]")
    said, = report_gemms(aot_compile(fn, *shapes, gemm="triton")).rows
    run, = report_gemms(fn, *shapes, gemm="triton").rows
    assert said.is_fp8 and not run.is_fp8 and row["math_dtype"] == run.math_dtype
    assert main([f"{file}:bare", "--shapes", "f8e4m3fn[64,128] f8e4m3fn[256,128]", "--gemm", "triton",
                 "--require-fp8"]) == 1
    assert "with a tile of" in " ".join(capsys.readouterr().out.split())


def test_the_sample_in_the_readme(tmp_path):
    sample, = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "my_file.py").write_text(
        "import jax, jax.numpy as jnp\n\ndef my_layer(x, w, x_scale, w_scale):\n"
        "    x, w = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32) * w_scale\n"
        "    return jax.nn.relu(x @ w.T).astype(jnp.bfloat16)\n")
    assert command("my_file.py:my_layer", "--shapes", "f8e4m3fn[64,256] f8e4m3fn[128,256] f32[] f32[]", "--reasons",
                   folder=tmp_path).stdout == sample


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and "is imported" in out and "exit status: 0; 1 where" in out
    examples = re.findall(r"fp8lens (\S+:\S+) (--shapes \"[^\"]+\" --require-fp8)", out)
    assert examples and "NVIDIA's library (cublaslt, the default)" in out and "without a GPU" in out


def test_no_arguments_and_no_matmul(file, capsys):
    assert main([f"{file}:layer_args"]) == 2  # it returns no array
    assert "layer_args failed" in capsys.readouterr().err
    assert main([f"{file}:constant"]) == 0
    capsys.readouterr()
    assert main([f"{file}:no_matmul", "--require-fp8"]) == 2
    Path(file).write_text("def no_matmul(x):\n    return x + 1\n")
    assert main([f"{file}:no_matmul", "--shapes", "f32[4]"]) == 0
    capsys.readouterr()
    assert main([f"{file}:no_matmul", "--shapes", "f32[4]", "--require-fp8"]) == 1
    out = capsys.readouterr().out
    assert "there is no matmul in it" in out and "is FP8" not in out
    assert main([f"{file}:no_matmul", "--shapes", "f32[4]", "--reasons"]) == 0
    assert "is FP8" not in capsys.readouterr().out


def test_saved_program(dumps, capsys):
    path = str(next(dumps.glob("*gpu_after_optimizations.txt")))
    assert main([path]) == 0
    plain = capsys.readouterr().out
    assert "64 x 256 x 128" in plain and "mend" not in plain and "has not" not in plain
    assert main([path, "--require-fp8"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"\nnot in FP8: \S+ \[64 x 256 x 128\] \(\S*test_cli\.py:\d+\)\n1 of 1 matmul not in FP8\n$",
                     out)


@pytest.mark.parametrize("kind, message", [("before_optimizations", "a program that XLA has not optimized yet"),
                                           ("cpu/*cpu_after_optimizations", "a program that XLA compiled for a CPU")])
@pytest.mark.parametrize("renamed", [False, True])
def test_saved_programs_that_are_not_a_gpus(dumps, tmp_path, capsys, kind, message, renamed):
    path = next(dumps.glob(f"*{kind}.txt" if "/" not in kind else f"{kind}.txt"))
    path = shutil.copy(path, tmp_path / "step.txt") if renamed else path
    assert main([str(path)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path} is {message}; ") and "64 x 256 x 128" in "".join(rest)
    assert main([str(path), "--require-fp8"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f" is {message}, " in err and "take the file ending in gpu_after_optimizations.txt" in err


def test_saved_programs_of_old_releases_are_judged_too(capsys):
    for name, status in (("jax_0_4_32_bf16_scaled", 1), ("jax_0_4_14_ffi", 2)):  # the second before optimizations
        assert main([str(ROOT / "tests" / "hlo" / f"{name}.txt"), "--require-fp8"]) == status
    assert "XLA has not optimized yet" in capsys.readouterr().err


def test_a_folder_of_saved_programs(dumps, capsys):
    assert main([str(dumps)]) == 2
    program, = dumps.glob("*gpu_after_optimizations.txt")
    assert f"is a folder: give one of the programs in it, such as the largest: {program}.\n" in capsys.readouterr().err


def test_saved_program_of_a_whole_process(tmp_path):
    code = ("import jax, jax.numpy as jnp; from helpers import aot_compile; s = jax.ShapeDtypeStruct;"
            "x, y = s((64, 128), jnp.float8_e4m3fn), s((256, 128), jnp.float8_e4m3fn);"
            "aot_compile(lambda x, y: x.astype(jnp.float32) @ y.astype(jnp.float32).T, x, y)")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True,
                   env={**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"})
    after, = tmp_path.glob("*gpu_after_optimizations.txt")
    assert main([str(after), "--require-fp8"]) == 0


_SAVED = "tests/hlo/jax_0_4_31_plain.txt"


@pytest.mark.parametrize("arguments, message", [
    (["{file}:plain", "--shapes", "bf16[64,128]"], "plain(x, w) cannot be called with the 1 argument of --shapes: "),
    (["{file}:plain"], "plain(x, w) cannot be called with the 0 arguments of --shapes: give"),
    (["{file}:plain", "--shapes", "bf16[64,128] bf16(128)"], "--shapes: 'bf16(128)' is no shape: write dtype[dims]"),
    (["{file}:plain", "--shapes", "bf16[64,-1]"], "--shapes: 'bf16[64,-1]' is no shape"),
    (["{file}:plain", "--shapes", "bf17[64]"], "'bf17' is no dtype: write it as HLO or numpy does"),
    (["{file}:plain", "--shapes", "f8e9m9[64]"], "'f8e9m9' is no dtype"),
    (["{file}:plain", "--shapes", "f32[8,4] f32[8,4]"], "plain failed (TypeError: dot_general requires"),
    (["{file}:plain", "--shapes", "f32[8,4] f32[4,8]", "--target", "H10"], "unknown chip 'H10'; known are A100"),
    (["{file}:plain", "--shapes", "f32[8,4]", "--target", "h100 "], "--target: unknown chip 'h100 '; known are"),
    (["{file}:plain", "--shapes", "f32[8]", "--args", "x"], "--shapes and --args both give the arguments"),
    (["{file}:layer", "--args", "no_tuple"], "no_tuple() returned a list: return a tuple"),
    (["{file}:layer", "--args", "broken"], "broken failed (RuntimeError: out of cheese): "),
    (["{file}:layer", "--args", "layer_arg"], "has no function 'layer_arg'; nearest: layer_args"),
    (["{file}"], "name the function too"),
    (["{folder}/broken_import.py:f"], "broken_import.py could not be imported (ModuleNotFoundError: No module named"),
    (["{folder}/broken_imports.py:f"], "or a saved HLO text; nearest: broken_import.py"),
    (["{folder}"], "is a folder: give a .py file"),
    (["{folder}/no/where.txt"], "there is no folder"),
    (["README.md"], "README.md is not one whole HLO module (line 1, column 1: expected HLO text"),
    ([_SAVED, "--shapes", "f32[]"], "--shapes is for a function"),
    ([_SAVED, "--args", "f"], "--args is for a function, and 'tests/hlo/jax_0_4_31_plain.txt' is a saved program"),
    ([_SAVED, "--target", "H100"], "a saved program, which is compiled already: leave it out, or give path/to"),
    ([_SAVED, "--gemm", "cublaslt"], "--gemm is for a function"),
    ([_SAVED, "--reasons"], "which says no more what XLA's rewriter was given: leave it out, or give path/to"),
])
def test_mistakes_are_answered_in_one_sentence(file, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    assert main([*(a.format(file=file, folder=Path(file).parent) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert err.startswith("error: ") and err.endswith((".\n", "?\n")) and err.count("\n") == 1


def test_local_without_a_gpu(file, capsys, monkeypatch):
    monkeypatch.setattr(targets, "attached_gpu", lambda: None)
    monkeypatch.setattr(fp8lens.compile, "gpu_available", lambda: False)
    assert main([f"{file}:plain", "--shapes", "f32[8,4] f32[4,8]", "--target", "local"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith('error: --target: target "local" needs an NVIDIA GPU') and err.count("\n") == 1


def test_a_saved_triton_kernel_does_not_pass_by_its_dot(tmp_path, capsys):
    compiled = aot_compile(lambda x, w: jnp.dot(x, w.T, preferred_element_type=jnp.float32),
                           *parse_shapes("f8e4m3fn[64,128] f8e4m3fn[256,128]"), gemm="triton")
    assert report_gemms(compiled).rows[0].is_fp8
    (tmp_path / "step.txt").write_text(compiled.as_text())
    assert main([str(tmp_path / "step.txt"), "--require-fp8"]) == 1
    out = capsys.readouterr().out
    assert "(only its PTX tells of a Triton kernel: give the function): gemm_fusion" in out
    assert out.endswith("\n1 of 1 matmul not known to be in FP8\n")


def test_truncated_dump(dumps, tmp_path, capsys):
    text = next(dumps.glob("*gpu_after_optimizations.txt")).read_text()
    (tmp_path / "cut.txt").write_text(text[:-40])
    assert main([str(tmp_path / "cut.txt")]) == 2
    assert re.search(r"line \d+, column \d+", capsys.readouterr().err)


def test_options_that_argparse_refuses(capsys):
    for argv in ([], ["x", "--gemm", "best"], ["x", "y"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    assert re.search("choose from '?cublaslt'?, '?triton'?, '?auto'?", capsys.readouterr().err)


def test_shapes_in_every_spelling():
    shapes = parse_shapes("  f8e5m2[4, 8];pred[], bfloat16[3]\ns32[2] u8[1] int4[6] bool[] i64[2] f16[1]")
    assert [(s.shape, s.dtype.name) for s in shapes] == [
        ((4, 8), "float8_e5m2"), ((), "bool"), ((3,), "bfloat16"), ((2,), "int32"), ((1,), "uint8"), ((6,), "int4"),
        ((), "bool"), ((2,), "int64"), ((1,), "float16")]
    assert parse_shapes("") == ()
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e8m0fnu, jnp.float4_e2m1fn, jnp.complex64):
        name = jnp.dtype(dtype).name
        spelled = {name, name.replace("float", "f").replace("_", "")} if name[0] == "f" else {name}
        assert {s.dtype.name for n in spelled for s in parse_shapes(f"{n}[1]")} == {name}
    assert all(isinstance(s, jax.ShapeDtypeStruct) for s in shapes)
