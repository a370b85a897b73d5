import gzip
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fp8lens.cli
import fp8lens.compile.process
from fp8lens import aot_compile, parse_hlo_module, print_hlo_module, report_gemms, targets
from fp8lens.cli import main, parse_shapes

ROOT = Path(__file__).resolve().parent.parent.parent
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
    s, scale = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((), jnp.float32)
    params = {{"w": s((256, 128), jnp.float8_e4m3fn), "x_scale": scale, "w_scale": scale}}
    return params, s((64, 128), jnp.float8_e4m3fn)

def bare(x, w):
    return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

def constant():
    return jnp.ones((16, 16)) @ jnp.tril(jnp.ones((16, 16)))

def no_tuple():
    return [1]

def broken():
    raise RuntimeError("out of cheese\\nand crackers")

def stops(x):
    raise SystemExit(0)

def interrupted(x):
    raise KeyboardInterrupt

class Model:
    def __call__(self, x, w):
        return x @ w

model = Model()

def gathered(x, w):
    w = jax.lax.with_sharding_constraint(w, jax.P())
    return bare(x, jnp.clip(w.astype(jnp.float32), -MAX, MAX).astype(jnp.float8_e4m3fn))

def on_mesh():
    S = jax.ShapeDtypeStruct
    x = S((512, 128), jnp.float8_e4m3fn, sharding=jax.P("data"))
    return x, S((256, 128), jnp.bfloat16, sharding=jax.P(("data", "model")))
"""
SHAPES = "f8e4m3fn[64,128] float8_e4m3fn[256,128] f32[] float32[]"


@pytest.fixture
def file(tmp_path) -> str:
    """A file of functions, and one that it imports; named anew each time, as Python keeps what it
    imports.
    """
    beside = re.sub(r"\W", "_", f"beside_{tmp_path.name}")
    (tmp_path / f"{beside}.py").write_text("MAX = 448\n")
    (tmp_path / f"layers_{beside}.py").write_text(LAYERS.format(beside=beside))
    (tmp_path / "broken_import.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "broken_syntax.py").write_text("def f():\n    return (\n")
    (tmp_path / "exit.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "outcome.py").write_text(
        "import pytest\n\npytest.skip('not here', allow_module_level=True)\n"
    )
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "program.pb").write_bytes(b"\x0a\x05jit_f\0\1")
    return str(tmp_path / f"layers_{beside}.py")


SCRIPT = shutil.which("fp8lens", path=str(Path(sys.executable).parent)) or "fp8lens"


def command(
    *arguments: str, folder: Path = ROOT, program: tuple[str, ...] = (SCRIPT,)
) -> subprocess.CompletedProcess:
    return subprocess.run([*program, *arguments], cwd=folder, text=True, capture_output=True)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    """What XLA saves of one program in bf16, compiled for a GPU; in "cpu", for the CPU."""
    folder = tmp_path_factory.mktemp("dumps")
    shapes, options = parse_shapes("bf16[64,128] bf16[128,256]"), {"xla_dump_hlo_as_text": True}
    aot_compile(
        lambda x, w: x @ w, *shapes, compiler_options=options | {"xla_dump_to": str(folder)}
    )
    with jax.default_device(jax.devices("cpu")[0]):
        jax.jit(lambda x, w: x @ w).lower(*shapes).compile(
            compiler_options=options | {"xla_dump_to": str(folder / "cpu")}
        )
    return folder


def test_fp8_from_another_folder(file):
    done = command(
        f"{Path(file).name}:scaled",
        "--shapes",
        *SHAPES.split(),
        "--require-fp8",
        folder=Path(file).parent,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (
        "64 x 256 x 128" in done.stdout and "cublasLt" in done.stdout and "1 in FP8" in done.stdout
    )


def test_lost_fp8_says_why(file):
    done = command(f"{file}:plain", "--shapes", "bf16[64,128] bf16[128,256]", "--require-fp8")
    assert (done.returncode, done.stderr) == (1, "")
    assert "fix:" in done.stdout and done.stdout.endswith("\n1 of 1 matmul not in FP8\n")


def test_beside_a_reader_s_own_helpers(file):
    folder = Path(file).parent
    (folder / "helpers.py").write_text("print('mine')\n")
    shapes = [f"{Path(file).name}:plain", "--shapes", "bf16[64,128] bf16[128,256]", "--require-fp8"]
    for program in ((sys.executable, "-m", "fp8lens"), (SCRIPT,)):
        done = command(*shapes, folder=folder, program=program)
        assert done.returncode == 1 and "mine" not in done.stdout and "fix:" in done.stdout


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
    assert re.fullmatch(
        r"error: \S+ has no function 'plane'; nearest: plain, layer\.\n", done.stderr
    )


def test_json(file, capsys):
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--json", "--reasons"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    (row,) = answer["rows"]
    assert err == "" and answer["reasons"] == []
    assert (row["m"], row["n"], row["k"]) == (64, 256, 128) and row["lhs_dtype"] == row[
        "math_dtype"
    ] == "f8e4m3fn"
    assert row["is_fp8"] and row["path"] == "" and row["outside"] == [] and "instruction" not in row
    assert row["source"].startswith("layers_")
    assert (
        answer["totals"].items()
        >= {"kernels": 1, "flops": 2 * 64 * 256 * 128, "fp8_flops_share": 1.0}.items()
    )
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer | {"reasons": None}


def test_json_stays_json_where_fp8_is_required(file, dumps, capsys):
    shapes = ["--shapes", "bf16[64,128]", "bf16[128,256]"]
    assert main([f"{file}:plain", *shapes, "--json", "--require-fp8"]) == 1
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["rows"][0]["math_dtype"] == "bf16" and err == "\n1 of 1 matmul not in FP8\n"
    assert [(r["lost"], r["source"]) for r in answer["reasons"]] == [
        ("fp8", answer["rows"][0]["source"])
    ]
    Path(file).write_text("def no_matmul(x):\n    return x + 1\n")
    assert main([f"{file}:no_matmul", "--shapes", "f32[4]", "--json", "--require-fp8"]) == 1
    out, err = capsys.readouterr()
    assert (
        json.loads(out)["rows"] == json.loads(out)["reasons"] == [] and "there is no matmul" in err
    )
    assert main([str(next(dumps.glob("*before_optimizations.txt"))), "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["rows"]) == 1 and "has not optimized yet" in err


def test_pytrees_from_a_function(file, capsys):
    assert main([f"{file}:layer", "--args", "layer_args", "--require-fp8", "--reasons"]) == 0
    alone = capsys.readouterr().out
    assert (
        main([f"{file}:layer", "--args", f"{file}:layer_args", "--require-fp8", "--reasons"]) == 0
    )
    assert capsys.readouterr().out == alone and "was left outside" in alone


def test_reasons_only_where_asked_or_needed(file, capsys):
    argv = [f"{file}:plain", "--shapes", "bf16[64,128] bf16[128,256]"]
    assert main(argv) == 0 and "fix:" not in capsys.readouterr().out
    assert main([*argv, "--reasons"]) == 0 and "fix:" in capsys.readouterr().out


def test_target_gemm_and_mma(file, capsys):
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--target", "A100", "--require-fp8"]) == 1
    assert "0 in FP8" in capsys.readouterr().out
    assert main([f"{file}:scaled", "--shapes", SHAPES, "--gemm", "triton"]) == 0
    assert "triton" in capsys.readouterr().out


def test_triton_is_judged_by_its_instructions(file, capsys):
    """The dot is of FP8 arrays, and the kernel multiplies in a wider type."""
    assert (
        main(
            [
                f"{file}:bare",
                "--shapes",
                "f8e4m3fn[64,128] f8e4m3fn[256,128]",
                "--gemm",
                "triton",
                "--json",
            ]
        )
        == 0
    )
    (row,) = json.loads(capsys.readouterr().out)["rows"]

    def fn(x, w):
        return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

    shapes = parse_shapes("f8e4m3fn[64,128] f8e4m3fn[256,128]")
    (said,) = report_gemms(aot_compile(fn, *shapes, gemm="triton")).rows
    (run,) = report_gemms(fn, *shapes, gemm="triton").rows
    assert said.is_fp8 and not run.is_fp8 and row["math_dtype"] == run.math_dtype
    assert (
        main(
            [
                f"{file}:bare",
                "--shapes",
                "f8e4m3fn[64,128] f8e4m3fn[256,128]",
                "--gemm",
                "triton",
                "--require-fp8",
            ]
        )
        == 1
    )
    assert "with a tile of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("document", "before"),
    [("README.md", "it is not FP8:"), ("fp8lens/README.md", "`layer.py` is")],
)
def test_the_sample_in_the_readme(tmp_path, document, before):
    readme = (ROOT / document).read_text()
    layer, sample = re.search(
        before + r"\n\n```python\n(.*?)```.*?```text\n(.*?)```", readme, re.S
    ).groups()
    (shapes,) = re.findall(r'fp8lens layer.py:layer --shapes "(.*?)"', readme)
    (tmp_path / "layer.py").write_text(layer)
    assert (
        command("layer.py:layer", "--shapes", shapes, "--reasons", folder=tmp_path).stdout == sample
    )


def test_the_comparisons_in_the_readme(tmp_path):
    section = (ROOT / "README.md").read_text().partition("## Ask whether FP8 pays\n")[2]
    program, *pairs = re.findall(r"```\w+\n(.*?)```", section.partition("\n## ")[0], re.S)
    (tmp_path / "mlp.py").write_text(program)
    ratios = []
    for asked, table in zip(pairs[::2], pairs[1::2], strict=True):
        _, *words = shlex.split(asked.replace("\\\n", ""))
        printed = iter(command(*words, folder=tmp_path).stdout.splitlines())
        # the README leaves lines out, and changes none
        assert all(line in printed for line in table.splitlines()), table
        ratios.append(float(table.split()[-1]))
    many, few = ratios
    assert many < 1 < few


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
    assert "64 x 256 x 128" in plain and "fix" not in plain and "has not" not in plain
    assert main([path, "--require-fp8"]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"\nnot in FP8: \S+ \[64 x 256 x 128\] \(\S*test_cli\.py:\d+\)\n1 of 1 matmul not in "
        r"FP8\n$",
        out,
    )


@pytest.mark.parametrize(
    "kind, message",
    [
        ("before_optimizations", "a program that XLA has not optimized yet"),
        ("cpu/*cpu_after_optimizations", "a program that XLA compiled for a CPU"),
    ],
)
@pytest.mark.parametrize("renamed", [False, True])
def test_saved_programs_that_are_not_a_gpus(dumps, tmp_path, capsys, kind, message, renamed):
    path = next(dumps.glob(f"*{kind}.txt" if "/" not in kind else f"{kind}.txt"))
    if renamed:
        path = shutil.copy(path, tmp_path / "step.txt")
        if "CPU" in message:  # its name alone says the chip
            message = "a program in which nothing says that XLA compiled it for a GPU"
    assert main([str(path)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path} is {message}; ") and "64 x 256 x 128" in "".join(rest)
    assert main([str(path), "--require-fp8"]) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and f" is {message}, " in err
        and "take the file ending in gpu_after_optimizations.txt" in err
    )


def test_saved_programs_of_old_releases_are_judged_too(capsys):
    for name, status in (
        ("jax_0_4_32_bf16_scaled", 1),
        ("jax_0_4_14_ffi", 2),
    ):  # the second before optimizations
        assert (
            main([str(ROOT / "tests" / "fp8lens" / "hlo" / f"{name}.txt"), "--require-fp8"])
            == status
        )
    assert "XLA has not optimized yet" in capsys.readouterr().err


def test_of_a_folder_the_compiled_program_is_read_and_named(dumps, capsys):
    assert main([str(dumps)]) == 0
    (program,) = dumps.glob("*gpu_after_optimizations.txt")
    first, _, report = capsys.readouterr().out.partition("\n\n")
    files = sum(path.is_file() for path in dumps.iterdir())
    assert first == (
        f"{dumps}: {program.name}, the one program that XLA compiled for a GPU among {files} files."
    )
    assert main([str(program)]) == 0 and capsys.readouterr().out == report
    assert main([str(dumps), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] and program.name in said.err


def test_a_gzipped_program_is_read_as_it_is(dumps, tmp_path, capsys):
    (program,) = dumps.glob("*gpu_after_optimizations.txt")
    packed = tmp_path / f"{program.name}.gz"
    packed.write_bytes(gzip.compress(program.read_bytes()))
    assert main([str(packed)]) == 0
    unpacked = capsys.readouterr().out
    said = subprocess.run(
        [SCRIPT, "-"], input=packed.read_bytes(), capture_output=True, check=True
    ).stdout.decode()
    assert main([str(program)]) == 0 and capsys.readouterr().out == said == unpacked
    packed.write_bytes(packed.read_bytes()[:-20])
    assert main([str(packed)]) == 2
    assert "is gzipped, and damaged: give the text" in capsys.readouterr().err


def test_saved_program_of_a_whole_process(tmp_path):
    code = (
        "import jax, jax.numpy as jnp; from helpers import aot_compile; s = jax.ShapeDtypeStruct;"
        "x, y = s((64, 128), jnp.float8_e4m3fn), s((256, 128), jnp.float8_e4m3fn);"
        "aot_compile(lambda x, y: x.astype(jnp.float32) @ y.astype(jnp.float32).T, x, y)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env={**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"},
    )
    (after,) = tmp_path.glob("*gpu_after_optimizations.txt")
    assert main([str(after), "--require-fp8"]) == 0


_SAVED = "tests/fp8lens/hlo/jax_0_4_31_plain.txt"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["{file}:plain", "--shapes", "bf16[64,128]"],
            "plain(x, w) cannot be called with the 1 argument of --shapes: ",
        ),
        (
            ["{file}:plain"],
            "plain(x, w) cannot be called without arguments, and there is neither --shapes nor",
        ),
        (
            ["{file}:plain", "--shapes", "bf16[64,128] bf16(128)"],
            "--shapes, character 18: 'bf16(128)' is no shape: expected \"[\" after the dtype, as "
            'in --shapes "f8e4m3fn[256,512] ',
        ),
        (
            ["{file}:plain", "--shapes", "bf16[64,-1]"],
            "character 8: 'bf16[64,-1]' is no shape: expected whole numbers",
        ),
        (["{file}:plain", "--shapes", "f32[]", "f32[8"], "character 12: 'f32[8' is no shape"),
        (["{file}:plain", "--shapes", "f32[] 8"], "character 7: '8' is no shape: expected a dtype"),
        (
            ["{file}:plain", "--shapes", "bf17[64]"],
            "--shapes, character 1: 'bf17' is no dtype: write it as HLO or numpy does",
        ),
        (["{file}:plain", "--shapes", "f8e9m9[64]"], "'f8e9m9' is no dtype"),
        (["{file}:plain", "--shapes", "str[8,4]"], "'str' is no dtype"),
        (
            ["{file}:plain", "--shapes", "f32[8,4] f32[8,4]"],
            "plain failed (TypeError at {name}:11: dot_general requires "
            "contracting dimensions to have the same shape, got (4,) and (8,)): fix it, or the "
            "shapes.",
        ),
        (
            ["{file}:MAX", "--shapes", "f32[8,4]"],
            "'MAX' in {name} is of type int, not a function; nearest: ",
        ),
        (
            ["{file}:Model", "--shapes", "f32[8,4]"],
            "'Model' in {name} is a class, not a function; nearest: model",
        ),
        (
            ["{file}:jnp", "--shapes", "f32[8,4]"],
            "'jnp' in {name} is of type module, not a function; nearest: ",
        ),
        (
            ["{file}:stops", "--shapes", "f32[8,4]", "--require-fp8"],
            "stops failed (SystemExit at {name}:35: 0)",
        ),
        (
            ["{file}:plain", "--args", "{folder}/exit.py:f", "--require-fp8"],
            "exit.py could not be imported (SystemEx",
        ),
        (
            ["{file}:plain", "--args", "README.md:f"],
            "'README.md' is no .py file, which a function is in",
        ),
        (
            ["{file}:plain", "--shapes", "f32[8,4] f32[4,8]", "--target", "H10"],
            "unknown chip 'H10'; known are A100",
        ),
        (
            ["{file}:plain", "--shapes", "f32[8,4]", "--target", "h100 "],
            "--target: unknown chip 'h100 '; known are",
        ),
        (
            ["{file}:plain", "--shapes", "f32[8]", "--args", "x"],
            "--shapes and --args both give the arguments",
        ),
        (["{file}:layer", "--args", "no_tuple"], "no_tuple() returned a list: return a tuple"),
        (
            ["{file}:layer", "--args", "broken"],
            "broken failed (RuntimeError at {name}:32: out of cheese): fix it.",
        ),
        (
            ["{file}:layer", "--args", "layer_arg"],
            "has no function 'layer_arg'; nearest: layer_args",
        ),
        (["{file}"], "name the function too"),
        (
            ["{folder}/broken_import.py:f"],
            "(ModuleNotFoundError at broken_import.py:1: No module named 'no_such_mod",
        ),
        (
            ["{folder}/broken_syntax.py:f"],
            "broken_syntax.py could not be imported (SyntaxError at broken_syntax.py:2: ",
        ),
        (
            ["{folder}/exit.py:f", "--require-fp8"],
            "exit.py could not be imported (SystemExit at exit.py:2: 0): it mu",
        ),
        (
            ["{folder}/outcome.py:f", "--require-fp8"],
            "outcome.py could not be imported (Skipped at outcome.py:3: not ",
        ),
        (["{folder}/broken_imports.py:f"], "or a saved HLO text; nearest: broken_import.py"),
        (["{folder}"], "is a folder: give a .py file"),
        (["{folder}/no/where.txt"], "there is no folder"),
        (["x" * 300], "cannot be read (File name too long)"),
        (["{folder}/empty.txt"], "is empty: give the text that XLA dumps"),
        (["{folder}/program.pb"], "is no text: give the text that XLA dumps"),
        (
            ["README.md:f"],
            "'README.md' is no .py file, which a function is in: give path/to/file.py:f",
        ),
        (
            ["{folder}/broken_imports:f"],
            ".py file, which a function is in: give path/to/file.py:f; nearest: broken_imp",
        ),
        (
            ["README.md"],
            "README.md is not one whole HLO module (line 1, column 1: expected HLO text",
        ),
        ([_SAVED, "--shapes", "f32[]"], "--shapes is for a function"),
        (
            [_SAVED, "--args", "f"],
            "--args is for a function, and 'tests/fp8lens/hlo/jax_0_4_31_plain.txt' is a saved "
            "program",
        ),
        (
            [_SAVED, "--target", "H100"],
            "a saved program, which is compiled already: leave it out, or give path/to",
        ),
        ([_SAVED, "--gemm", "cublaslt"], "--gemm is for a function"),
        (
            [_SAVED, "--reasons"],
            "which says no more what XLA's rewriter was given: leave it out, or give path/to",
        ),
    ],
)
def test_mistakes_are_answered_in_one_sentence(file, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    assert main([*(a.format(file=file, folder=Path(file).parent) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message.replace("{name}", Path(file).name) in err
    assert err.startswith("error: ") and err.endswith((".\n", "?\n")) and err.count("\n") == 1


def test_local_without_a_gpu(file, capsys, monkeypatch):
    monkeypatch.setattr(targets, "attached_gpu", lambda: None)
    monkeypatch.setattr(fp8lens.compile.process, "gpu_available", lambda: False)
    assert main([f"{file}:plain", "--shapes", "f32[8,4] f32[4,8]", "--target", "local"]) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err.startswith('error: --target: target "local" needs an NVIDIA GPU')
        and err.count("\n") == 1
    )


def test_a_saved_triton_kernel_does_not_pass_by_its_dot(tmp_path, capsys):
    compiled = aot_compile(
        lambda x, w: jnp.dot(x, w.T, preferred_element_type=jnp.float32),
        *parse_shapes("f8e4m3fn[64,128] f8e4m3fn[256,128]"),
        gemm="triton",
    )
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
    shapes = parse_shapes(
        "  f8e5m2[4, 8];pred[], bfloat16[3]\ns32[2] u8[1] int4[6] bool[] i64[2] f16[1]"
    )
    assert [(s.shape, s.dtype.name) for s in shapes] == [
        ((4, 8), "float8_e5m2"),
        ((), "bool"),
        ((3,), "bfloat16"),
        ((2,), "int32"),
        ((1,), "uint8"),
        ((6,), "int4"),
        ((), "bool"),
        ((2,), "int64"),
        ((1,), "float16"),
    ]
    assert parse_shapes("") == ()
    for dtype in (
        jnp.float8_e4m3fn,
        jnp.float8_e4m3fnuz,
        jnp.float8_e8m0fnu,
        jnp.float4_e2m1fn,
        jnp.complex64,
    ):
        name = jnp.dtype(dtype).name
        spelled = {name, name.replace("float", "f").replace("_", "")} if name[0] == "f" else {name}
        assert {s.dtype.name for n in spelled for s in parse_shapes(f"{n}[1]")} == {name}
    assert all(isinstance(s, jax.ShapeDtypeStruct) for s in shapes)


# What comes from a file ---------------------------------------------------------------------------

# clears, colours, turns, deletes, goes back and begins a line
EVIL = "\x1b[2J\x9b31m\u202e\x7f\r\n\t\u2028"
CRAFTED = """HloModule m, is_scheduled=true, frontend_attributes={{fingerprint_before_lhs="0"}}

ENTRY %e (x: f8e4m3fn[32,32], s: f32[]) -> (bf16[32,32], f32[32,32]) {{
  %x = f8e4m3fn[32,32]{{1,0}} parameter(0)
  %s = f32[] parameter(1)
  %call = (bf16[32,32]{{1,0}}, s8[64]{{0}}) custom-call(%x, %x, %s, %s), \
custom_call_target="__cublas$lt$matmul$f8", \
metadata={{op_name="jit(f)/{op}/dot_general" source_file="{file}" source_line=3}}, \
backend_config={{"gemm_backend_config":{{"epilogue":{epilogue},"dot_dimension_numbers":{{"lhs_contracting_dimensions":\
["1"],"rhs_contracting_dimensions":["1"]}}}}}}
  %y = bf16[32,32]{{1,0}} get-tuple-element(%call), index=0
  %d = f32[32,32]{{1,0}} dot(%y, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="{op}" source_file="{file}" source_line=4}}
  ROOT %t = (bf16[32,32]{{1,0}}, f32[32,32]{{1,0}}) tuple(%y, %d)
}}
""".replace("\\\n", "")


def octal(text: str) -> str:
    """As XLA prints a string that is not plain."""
    return "".join(rf"\{byte:03o}" for byte in text.encode())


@pytest.fixture(params=["octal", "as they are"])
def crafted(tmp_path, request) -> Path:
    evil = octal(EVIL) if request.param == "octal" else "".join(EVIL.split("\n"))
    path = tmp_path / f"step{EVIL}.txt"
    path.write_text(
        CRAFTED.format(op=f"a{evil}b", file=f"layer{evil}.py", epilogue=json.dumps(f"RELU{EVIL}")),
        newline="",
    )
    return path


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_nothing_in_a_file_reaches_the_terminal_as_control(crafted, capsys):
    assert main([str(crafted)]) == 0
    text = capsys.readouterr().out
    assert main([str(crafted), "--require-fp8"]) == 1
    assert main([str(crafted), "--reasons"]) == 2
    out, err = capsys.readouterr()
    assert is_plain(text) and is_plain(out) and is_plain(err)
    assert (
        text.count(r"layer\x1b[2J\x9b31m\u202e\x7f") == 2
        and r"RELU\x1b[2J\x9b31m\u202e\x7f\r\n\t" in text
    )
    assert (
        out.startswith(text)
        and "not in FP8: d [32 x 32 x 32] (layer\\x1b[2J" in out
        and "step\\x1b[2J" in err
    )
    assert len(text.splitlines()) == len(text.replace(EVIL, "").splitlines()) == 6


def test_a_crafted_name_of_a_file_is_shown_plainly(crafted, tmp_path, capsys):
    crafted.write_bytes(crafted.read_bytes().replace(b"is_scheduled=true, ", b""))
    assert main([str(crafted)]) == 0
    out = capsys.readouterr().out
    assert is_plain(out) and re.match(
        r"\S+step\\x1b\[2J\S+ is a program that XLA has not optimized yet; ", out
    )
    (tmp_path / f"layers{EVIL}.py").write_text("def fn(x):\n    return x @ x\n")
    assert (
        main([str(tmp_path / f"layers{EVIL}.py:fn"), "--shapes", "bf16[32,32]", "--require-fp8"])
        == 1
    )
    out, err = capsys.readouterr()
    assert is_plain(out) and out.count(r"layers\x1b[2J") == 2 and "fix: " in out and err == ""


def test_json_of_a_crafted_file_says_what_the_file_says(crafted, capsys):
    assert main([str(crafted), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii() and is_plain(out)
    assert (
        json.loads(out)["rows"][0]["epilogue"] == f"RELU{EVIL}"
        and "\x1b" in json.loads(out)["rows"][1]["source"]
    )


def test_errors_show_a_crafted_file_s_text_plainly(tmp_path, capsys):
    whole = CRAFTED.format(op="", file="", epilogue='""')
    broken = [
        f"{EVIL}HloModule",
        whole.replace("%y = ", f"%y = {EVIL}"),
        f"{whole}{EVIL}}}",
        whole.replace("%d = f32", f"%d = {EVIL}f32"),
    ]
    for name in ("cut.txt", f"{EVIL}.txt"):
        for text in broken:
            (tmp_path / name).write_text(text)
            assert main([str(tmp_path / name)]) == 2
            out, err = capsys.readouterr()
            assert out == "" and is_plain(err) and err.count("\n") == 1 and "\\x1b[2J" in err
    for argv in (
        [f"no{EVIL}.txt"],
        [f"no{EVIL}.py:f"],
        [f"{EVIL}/a.txt"],
        [f"README.md:{EVIL}"],
        [str(tmp_path)],
    ):
        assert main(argv) == 2
        assert is_plain(err := capsys.readouterr().err) and "\\x1b[2J" in err
    with pytest.raises(SystemExit):
        main(["a.txt", f"b{EVIL}.txt"])
    assert is_plain(err := capsys.readouterr().err) and "b\\x1b[2J" in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_printed_module_is_plain_on_a_terminal_and_whole_in_a_file(crafted, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    texts = []
    for file in (Terminal(), io.StringIO()):
        print_hlo_module(crafted.read_bytes().decode(), metadata=True, backend_cfg=True, file=file)
        texts.append(file.getvalue())
    assert (
        is_plain(texts[0].replace("\t", ""))
        and r"\x9b31m\u202e\x7f" in texts[0]
        and not is_plain(texts[1])
    )
    files = [
        {i.metadata.source_file for i in parse_hlo_module(text) if i.metadata}
        for text in (texts[1], crafted.read_bytes().decode())
    ]
    assert [name.replace("u001b", "\x1b") for name in files[0]] == list(
        files[1]
    )  # JSON's escape, which HLO lacks


def test_names_that_the_terminal_s_encoding_lacks(tmp_path):
    (tmp_path / "schön\udcff.txt").write_text(
        CRAFTED.format(op="", file="größe.py", epilogue='"RELU"')
    )
    done = subprocess.run(
        [sys.executable, "-m", "fp8lens", tmp_path / "schön\udcff.txt", "--require-fp8"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "") and "gr\\xf6\\xdfe.py:3" in done.stdout


# Dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, meant",
    [
        ("f8e4m3", "float8_e4m3fn"),
        ("float8_e4m3b11fnuz", "float8_e4m3fn"),
        ("f8e3m4", "float8_e4m3fn"),
        ("f8e4m3fnuz", "float8_e4m3fn"),
        ("f8e5m2fnuz", "float8_e5m2"),
    ],
)
def test_a_dtype_beside_the_one_meant_is_noted(file, capsys, dtype, meant):
    assert main([f"{file}:plain", "--shapes", f"{dtype}[64,128] {dtype}[128,256]", "--json"]) == 0
    out, err = capsys.readouterr()
    name = dtype.replace("f8", "float8_")
    assert err == (
        f"note: --shapes: {name} is taken as written: it is another format than {meant}, which "
        "tensor cores multiply.\n"
    )
    assert not json.loads(out)["rows"][0]["is_fp8"]


def test_dtypes_that_are_meant_are_not_noted(file, capsys):
    for dtype in ("f8e4m3fn", "float8_e5m2", "bf16", "f32"):
        assert main([f"{file}:plain", "--shapes", f"{dtype}[64,128] {dtype}[128,256]"]) == 0
        assert capsys.readouterr().err == ""
    assert main([f"{file}:plain", "--shapes", "f64[64,128] f32[128,256]"]) == 0
    assert (
        capsys.readouterr().err
        == "note: --shapes: JAX takes float64 as float32 unless JAX_ENABLE_X64=1 is set.\n"
    )


# How it ends --------------------------------------------------------------------------------------

DUMP = ROOT / "tests" / "fp8lens" / "hlo" / "jax_0_4_32_bf16_scaled.txt"


@pytest.mark.parametrize(
    "arguments", [[DUMP], [DUMP, "--json"], [DUMP, "--require-fp8"], ["--help"], ["nothing.txt"]]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has pipes of another kind")
def test_nobody_reads_on(arguments, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    both = arguments == ["nothing.txt"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fp8lens", *map(str, arguments)],
            cwd=ROOT,
            stdout=writing,
            stderr=writing if both else subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writing)
    assert not done.stderr
    assert (
        done.returncode == 128 + signal.SIGPIPE or done.returncode == 0 and arguments == ["--help"]
    )


def test_an_answer_that_nobody_can_read_is_none(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--help"]) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fp8lens", DUMP],
            cwd=ROOT,
            stdout=full,
            text=True,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert done.stderr == "error: reading or writing failed (No space left on device).\n"


def test_interrupted(file, capsys):
    Path(file).with_name("slow.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\n"
    )
    for argv in (
        [f"{Path(file).with_name('slow.py')}:f"],
        [f"{file}:interrupted", "--shapes", "f32[4]"],
        [f"{file}:plain", "--args", f"{Path(file).with_name('slow.py')}:f"],
    ):
        assert main([*argv, "--require-fp8"]) == 128 + signal.SIGINT
        assert capsys.readouterr() == ("", "")


def test_what_the_file_prints_is_no_part_of_the_report(file, capsys):
    Path(file).write_text("print('at import')\ndef fn(x):\n    print('traced')\n    return x @ x\n")
    assert main([f"{file}:fn", "--shapes", "f32[16,16]", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["rows"]) == 1 and err == "at import\ntraced\n"


def test_a_file_may_set_what_jax_reads(file):
    Path(file).write_text(
        "import os\nos.environ['JAX_ENABLE_X64'] = '1'\ndef fn(x):\n    return x @ x\n"
    )
    done = command(f"{file}:fn", "--shapes", "f64[16,16]")
    assert (done.returncode, done.stderr) == (0, "") and " f64 " in done.stdout


def test_a_fault_of_its_own_is_no_verdict(monkeypatch, capsys):
    for fault in (ZeroDivisionError, SystemExit):

        def fails(*_, fault=fault):
            raise fault("oh \x1b")

        monkeypatch.setattr(fp8lens.cli, "of_dump", fails)
        assert main([str(DUMP), "--require-fp8"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(
            rf"error: fp8lens itself failed \({fault.__name__} at \S+:\d+: oh \\x1b\): "
            r"please report this with what --debug adds\.\n",
            err,
        )
        assert main([str(DUMP), "--debug"]) == 2
        debug = capsys.readouterr().err
        assert debug.startswith("Traceback") and debug.endswith(f"\n{err}") and is_plain(debug)


def test_what_is_known_of_an_error_is_the_advice(tmp_path, capsys):
    text = "import jax\ndef f(x):\n    jax.debug.print('{}', x[0, 0])\n    return x @ x\n"
    (tmp_path / "prints.py").write_text(text)
    assert main([f"{tmp_path / 'prints.py'}:f", "--shapes", "f32[64,64]"]) == 2
    err = capsys.readouterr().err
    assert "The function calls Python back" in err and "fix it, or the shapes" not in err


def test_debug_shows_where_a_function_failed(file, capsys):
    assert main([f"{file}:plain", "--shapes", "f32[8,4] f32[8,4]", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "return x @ w" in err and err.endswith("fix it, or the shapes.\n")


P = "import os, sys, atexit, builtins, signal\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("os._exit(0)", 3),
        ("os.abort()", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 3),
        ("os.execv(sys.executable, ['x', '-V'])", 3),
        ("os.fork() and os._exit(0)", 3),
        ("builtins.print = lambda *a, **k: sys.exit(0)", 3),
        ("os._exit = len", 2),
        ("os.close(1), os.close(2)", 2),
        ("atexit.register(os._exit, 0)", 2),
        ("sys.exit = lambda *a: os._exit(0)", 2),
        ("sys.argv[1:] = ['--help']", 2),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os.kill(os.getppid(), signal.SIGTERM); signal.pause()", 143),
    ],
)
def test_a_file_that_ends_the_process_is_no_verdict(tmp_path, code, status):
    (tmp_path / "ends.py").write_text(f"{P}{code}\n")
    done = command("ends.py:f", "--shapes", "f32[4]", "--require-fp8", folder=tmp_path)
    assert done.returncode == status, done.stderr
    assert status == 2 or re.search(
        r"error: the file, or XLA's compiler, ended the process \(\w+", done.stderr
    )


def test_a_function_that_ends_the_process_is_no_verdict(file):
    Path(file).write_text(
        "import atexit, os\natexit.register(os._exit, 0)\ndef ends(x):\n    os._exit(0)\n"
        "def plain(x):\n    return x @ x\n"
    )
    done = [
        command(f"{file}:{name}", "--shapes", "f32[16,16]", "--require-fp8")
        for name in ("ends", "plain")
    ]
    assert [d.returncode for d in done] == [3, 1] and "exit status 0" in done[0].stderr, done


def test_python_alone_helps_and_reads_a_saved_program():
    code = (
        "import sys\nfrom fp8lens.cli import main\ntry:\n    print(main(sys.argv[1:]))\n"
        "except SystemExit as stopped:\n    print(stopped.code)\nfor name, module in "
        "sys.modules.items():\n"
        "    print('loaded', name, getattr(module, '__file__', ''))"
    )
    for arguments, status in (
        (["--help"], 0),
        ([DUMP], 0),
        ([DUMP, "--require-fp8"], 1),
        ([DUMP, "--json"], 0),
        ([ROOT / "README.md"], 2),
        (["no.txt"], 2),
    ):
        done = command("-c", code, *map(str, arguments), program=(sys.executable,))
        told, _, loaded = done.stdout.partition("\nloaded ")
        assert told.rstrip().rpartition("\n")[2] == str(status) and done.stderr.count("\n") == (
            status == 2
        )
        names = {line.split()[1].partition(".")[0] for line in f"loaded {loaded}".splitlines()}
        assert "fp8lens" in names and not names & {"jax", "jaxlib", "numpy", "ml_dtypes"}
        assert not [
            line
            for line in loaded.splitlines()
            if "-packages" in line and line.endswith(tuple(EXTENSION_SUFFIXES))
        ]


def test_a_function_without_jax(file):
    hide = "import sys; sys.modules['jax'] = None; "
    code = f"{hide}from fp8lens.cli import main; sys.exit(main(sys.argv[1:]))"
    done = command(
        "-c",
        code,
        f"{file}:plain",
        "--shapes",
        "f32[4]",
        "--require-fp8",
        program=(sys.executable,),
    )
    assert (done.returncode, done.stdout) == (2, "")
    fix = "pip install 'path/to/the/checkout[jax]'"
    assert done.stderr == f"error: a function is compiled, which needs JAX: {fix}.\n"


# Shapes, before JAX -------------------------------------------------------------------------------


def test_what_the_devices_of_a_mesh_send_and_why(file, capsys):
    """The same by --shapes, by --args, and of the saved program."""
    mesh = ["--mesh", "data=4,model=2"]
    shapes = ["--shapes", "f8e4m3fn[512@data,128] bf16[256@(data, model),128]"]
    for arguments in (shapes, ["--args", "on_mesh"]):
        assert main([f"{file}:gathered", *arguments, *mesh, "--reasons"]) == 0
        said = capsys.readouterr().out
        assert re.search(r"all-gather +57.3 kB +bf16 +data, model .*\n    gathered wide\n", said)
        assert "rule: gathered-wide" in said
    compiled = aot_compile(
        lambda x: x @ x.T,
        jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        mesh_shape={"a": 4, "b": 2},
        in_specs=(jax.P("b"),),
    )
    saved = Path(file).with_suffix(".txt")
    saved.write_text(compiled.as_text())
    assert main([str(saved), "--mesh", "a=4,b=2"]) == 0
    assert re.search(r"all-gather .* [ab]  ", capsys.readouterr().out)
    assert main([str(saved), "--mesh", "a=4"]) == 2
    assert "mesh_shape has 4 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mesh, shapes, said",
    [
        ("data", "bf16[64]", "'data' is no axis and its devices: write --mesh data=8,model=4"),
        ("data=0", "bf16[64]", "'data' has no devices: give 1 or more"),
        ("data=2.0", "bf16[64]", "'data' has '2.0' devices: give a whole number, as in --mesh"),
        ("data=-1", "bf16[64]", "'data' has '-1' devices: give a whole number"),
        ("", "bf16[64]", "--mesh is empty: write --mesh data=8,model=4, or leave it out"),
        ("  ", "bf16[64]", "--mesh is empty"),
        ("data=8,data=8", "bf16[64]", "the axis 'data' twice"),
        (None, "bf16[64@data]", "'data', and there is no --mesh"),
        ("data=8", "bf16[64@date]", "'date', which --mesh has not; nearest: data"),
        ("data=8", "bf16[12@data]", "12 cannot be sharded over 8 devices (data)"),
        ("data=8", "bf16[64@]", "character 8: 'bf16[64@]' is no shape: expected"),
        ("data=99999999", "bf16[64]", "--mesh: mesh_shape has 99,999,999 devices"),
    ],
)
def test_mistakes_in_a_mesh_are_answered(file, capsys, mesh, shapes, said):
    given = [] if mesh is None else ["--mesh", mesh]
    assert main([f"{file}:bare", "--shapes", shapes, *given]) == 2
    assert said in capsys.readouterr().err


MESHES = """
from fp8lens import mesh

def at(mesh, other=None):
    def shape(rows, dtype, mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
        return jax.ShapeDtypeStruct((rows, 128), dtype, sharding=sharding)
    return shape(512, jnp.float8_e4m3fn, mesh), shape(256, jnp.bfloat16, other or mesh)

def on_8x4():
    return at(mesh("H100", {"data": 8, "model": 4}))

def on_8_and_4():
    return at(mesh("H100", {"data": 8}), mesh("H100", {"data": 4}))

def abstract():
    return at(jax.sharding.AbstractMesh((8,), ("data",)))

def real():
    return jnp.ones((512, 128), jnp.float8_e4m3fn), jnp.ones((256, 128), jnp.bfloat16)

def real_and_sharded():
    return real()[0], on_mesh()[1]

def put():
    return jax.device_put(real()[0], jax.P("data")), real()[1]

def sends_codes(x, w):
    codes = jnp.clip(w.astype(jnp.float32), -MAX, MAX).astype(jnp.float8_e4m3fn)
    codes = jax.lax.with_sharding_constraint(codes, jax.P("data"))
    return bare(x, jax.lax.with_sharding_constraint(codes, jax.P()))
"""


@pytest.fixture
def meshes(file) -> str:
    """The same file, with arguments on meshes."""
    with open(file, "a") as opened:
        opened.write(MESHES)
    return file


def test_the_report_on_a_mesh_says_for_how_many_devices_and_has_the_collectives(meshes, capsys):
    """With --mesh, or where the arguments are sharded."""
    for given in ([], ["--mesh", "data=8,model=4"]):
        assert main([f"{meshes}:gathered", "--args", "on_8x4", *given]) == 0
        said = capsys.readouterr().out
        assert "\n\ncompiled for 32 devices, mesh data=8,model=4\n\n" in said
        assert re.search(r"all-gather +57.3 kB +bf16 +data .*\n    gathered wide\n", said)
    assert main([f"{meshes}:gathered", "--args", "on_8x4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["devices"], document["mesh"]) == (32, {"data": 8, "model": 4})
    assert main([f"{meshes}:bare", "--args", "real", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["devices"], document["mesh"]) == (1, None)


@pytest.mark.parametrize(
    "arguments, mesh, said",
    [
        ("on_8x4", "data=2", "0 is on the mesh data=8,model=4, and --mesh is data=2: give --mesh"),
        ("on_8x4", "model=4,data=8", "data=8,model=4, and --mesh is model=4,data=8: give --mesh"),
        ("abstract", "data=4", "0 is on the mesh data=8, and --mesh is data=4: give --mesh data=8"),
        ("abstract", None, "0 is on the mesh data=8, which is not of H100: give --mesh data=8."),
        ("on_8_and_4", None, "1 is on the mesh data=4, and one before it on data=8: put all"),
        ("on_8_and_4", "data=8", "argument 1 is on the mesh data=4, and --mesh is data=8: give"),
        ("put", "data=8", "are not here and hold no arrays: give shapes, jax.ShapeDtypeStruct("),
    ],
)
def test_meshes_that_contradict_are_answered(meshes, capsys, arguments, mesh, said):
    given = [] if mesh is None else ["--mesh", mesh]
    assert main([f"{meshes}:gathered", "--args", arguments, *given]) == 2
    assert said in capsys.readouterr().err


def test_real_arrays_count_by_their_shapes_on_a_mesh(meshes, capsys):
    assert main([f"{meshes}:gathered", "--args", "real", "--mesh", "data=4,model=2"]) == 0
    assert "512 x 256 x 128" in capsys.readouterr().out  # each device has all
    given = ["--args", "real_and_sharded", "--mesh", "data=4,model=2"]
    assert main([f"{meshes}:gathered", *given]) == 0
    assert re.search(r"all-gather +57.3 kB +bf16 +data, model ", capsys.readouterr().out)


def test_fp8_is_required_on_the_wire_too(meshes, capsys):
    """What is quantized behind a collective fails, of a function and of a saved program, unless its
    rule is allowed; a sum, and codes, do not.
    """
    required = ["--args", "on_8x4", "--require-fp8"]
    assert main([f"{meshes}:gathered", *required]) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"\nnot sent in FP8: all-gather\S* .*gathered-wide\nfix of gathered-wide: quantize", said
    )
    assert said.endswith("\n1 of 1 collective not in FP8\n") and "matmul not in FP8" not in said
    assert main([f"{meshes}:gathered", *required, "--allow", "gathered-wide"]) == 0
    assert main([f"{meshes}:gathered", *required, "--allow", "gathered-twice"]) == 1
    assert main([f"{meshes}:sends_codes", *required]) == 0
    capsys.readouterr()
    saved = Path(meshes).with_suffix(".txt")
    args = on_data(512, jnp.float8_e4m3fn), on_data(256, jnp.bfloat16)
    saved.write_text(aot_compile(gathered, *args, mesh_shape={"data": 8}).as_text())
    assert main([str(saved), "--require-fp8"]) == 1
    assert "\n1 of 1 collective not in FP8\n" in capsys.readouterr().out
    assert main([str(saved), "--require-fp8", "--allow", "gathered-wide"]) == 0


def on_data(rows, dtype):
    """An argument that is sharded over "data"."""
    mesh = fp8lens.mesh("H100", {"data": 8})
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    return jax.ShapeDtypeStruct((rows, 128), dtype, sharding=sharding)


def gathered(x, w):
    """A program whose weight is gathered in bf16, and quantized after that."""
    w = jax.lax.with_sharding_constraint(w, jax.P()).astype(jnp.float32)
    codes = jnp.clip(w, -448, 448).astype(jnp.float8_e4m3fn)
    return jnp.dot(x, codes.T, preferred_element_type=jnp.float32)


@pytest.mark.parametrize(
    "given, said",
    [
        (["--allow", "gathered-wide"], "--allow is for --require-fp8: add it, or leave --allow"),
        (["--require-fp8", "--allow", "gathered-wid"], "no rule 'gathered-wid'; nearest: gathered"),
    ],
)
def test_what_cannot_be_allowed_is_answered(file, capsys, given, said):
    assert main([f"{file}:bare", "--shapes", "bf16[64,64] bf16[64,64]", *given]) == 2
    assert said in capsys.readouterr().err


def test_opaque_kernels_can_be_allowed(file, capsys):
    with open(file, "a") as opened:
        opened.write(OPAQUE)
    given = [f"{file}:opaque", "--shapes", SHAPES_OPAQUE, "--require-fp8"]
    assert main(given) == 1
    assert "not every kernel was looked into" in capsys.readouterr().out
    assert main([*given, "--allow", "opaque"]) == 0


OPAQUE = """
def opaque(x, w):
    return bare(x, w), jnp.linalg.cholesky(jnp.eye(64) * x[0, 0].astype(jnp.float32))
"""
SHAPES_OPAQUE = "f8e4m3fn[64,128] f8e4m3fn[256,128]"


def test_without_arguments_it_is_said_what_to_give(file, capsys):
    assert main([f"{file}:bare"]) == 2
    said = capsys.readouterr().err
    assert "cannot be called without arguments, and there is neither --shapes nor --args" in said
    assert "give a shape for each, as in --shapes" in said
    assert main([f"{file}:bare", "--shapes", ""]) == 2
    assert "with the 0 arguments of --shapes" in capsys.readouterr().err


@pytest.mark.parametrize("shapes", ["bf16[64,", "bf17[64]", "bf16 64", "[64]"])
def test_mistakes_in_shapes_are_answered_before_jax_is_loaded(file, shapes):
    code = (
        "import sys\nfrom fp8lens.cli import main\nstatus = main(sys.argv[1:])\n"
        "assert not {'jax', 'numpy'} & sys.modules.keys()\nsys.exit(status)"
    )
    done = command("-c", code, f"{file}:plain", "--shapes", shapes, program=(sys.executable,))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"error: --shapes, character \d+: ", done.stderr), done.stderr
    assert 'as in --shapes "f8e4m3fn[256,512] bf16[1024] f32[]".\n' in done.stderr


def test_the_dtypes_known_without_jax_are_those_of_jax():
    scalars = [value for value in vars(jnp).values() if isinstance(value, type(jnp.float32))]
    named = {jnp.dtype(scalar).name for scalar in scalars}
    assert {"bool", "bfloat16", "float8_e4m3fn"} <= named <= fp8lens.cli._DTYPES
    for name in fp8lens.cli._DTYPES & named:
        assert parse_shapes(f"{name}[3]") == (jax.ShapeDtypeStruct((3,), name),)


# Its version, standard input, and terminals -------------------------------------------------------


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    (version,) = re.findall('^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"fp8lens {version}\n")


def piped(data: bytes, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([SCRIPT, "-", *options], input=data, cwd=ROOT, capture_output=True)


def test_a_program_from_standard_input():
    for options in ([], ["--json"], ["--ledger", "--require-fp8"]):
        done = piped(DUMP.read_bytes(), *options)
        same = command(str(DUMP), *options)
        assert (done.returncode, done.stdout.decode(), done.stderr) == (
            same.returncode,
            same.stdout,
            b"",
        )
    before = (ROOT / "tests" / "fp8lens" / "hlo" / "jax_0_4_14_ffi.txt").read_bytes()
    assert piped(before).stdout.startswith(b"standard input is a program that XLA has not")


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b"", [], "standard input is empty: give the text"),
        (b"a\0", [], "standard input is no text: give the text"),
        (b"nothing", [], "standard input is not one whole HLO module (line 1, column 1: "),
        (b"", ["--shapes", "f32[]"], "--shapes is for a function, and standard input is a saved"),
    ],
)
def test_mistakes_on_standard_input(data, options, message):
    done = piped(data, *options)
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_nobody_is_asked_to_type_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["-"]) == 2
    assert "no program comes from standard input: write fp8lens - < " in capsys.readouterr().err


ANSI = re.compile(r"\x1b\[[\d;]*m")


def on_a_terminal(monkeypatch, *arguments: str, columns: int = 80, **settings: str) -> str:
    """What the command prints on a terminal of this width."""
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), **settings}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    main([*arguments])
    return terminal.getvalue()


@pytest.mark.parametrize(
    "arguments", [(str(DUMP), "--ledger", "--require-fp8"), ("explain", "late-relu"), ("no.txt",)]
)
def test_colours_only_on_a_terminal_that_wants_them(monkeypatch, capsys, arguments):
    main([*arguments])
    plain = "".join(capsys.readouterr())
    assert "\x1b" not in plain
    coloured = on_a_terminal(monkeypatch, *arguments)
    assert ANSI.search(coloured) and ANSI.sub("", coloured) == plain
    assert on_a_terminal(monkeypatch, *arguments, NO_COLOR="1") == plain
    assert on_a_terminal(monkeypatch, *arguments, TERM="dumb") == plain
    assert "\x1b" in on_a_terminal(monkeypatch, *arguments, NO_COLOR="")  # empty: as if not set


def test_json_has_no_colours(monkeypatch):
    json.loads(on_a_terminal(monkeypatch, str(DUMP), "--json"))


def test_colours_let_nothing_of_a_crafted_file_reach_the_terminal(crafted, monkeypatch):
    text = on_a_terminal(monkeypatch, str(crafted), "--ledger", "--require-fp8")
    assert is_plain(ANSI.sub("", text)) and r"\x1b[2J" in text


def test_a_wide_terminal_is_used_and_a_narrow_one_changes_nothing(tmp_path, monkeypatch, capsys):
    where = "a_folder_with_a_long_name/" * 2 + "layer.py"
    dump = tmp_path / "step.txt"
    dump.write_text(CRAFTED.format(op="", file=where, epilogue='"RELU"'))
    arguments = (str(dump), "--ledger")
    main([*arguments])
    plain = capsys.readouterr().out
    assert f"at {where}" in plain, "the place is below the row where 100 columns are too few"
    for columns in (40, 100):
        found = on_a_terminal(monkeypatch, *arguments, columns=columns, NO_COLOR="1")
        assert found == plain
    wide = on_a_terminal(monkeypatch, *arguments, columns=240, NO_COLOR="1")
    assert f"at {where}" not in wide and where in wide
    assert wide.count("\n") < plain.count("\n")


def test_the_reasons_take_the_width_too(file, monkeypatch):
    arguments = (f"{file}:plain", "--shapes", "bf16[64,128] bf16[128,256]", "--reasons")
    texts = []
    for columns in (100, 300):
        text = on_a_terminal(monkeypatch, *arguments, columns=columns, NO_COLOR="1")
        texts.append(text.rpartition("\n\n")[2])  # what stands behind the table
    assert texts[0].split() == texts[1].split()
    assert max(map(len, texts[0].splitlines())) <= 100 < max(map(len, texts[1].splitlines())) <= 300
