"""The command: what it answers, and that whatever is wrong is said in a sentence and by its status.

A text in `command/` has commands, and below each what it prints: standard output, standard error
with "! " before each line, and the exit status unless that is 0. After a change, REFRESH=1 writes
what is printed now.
"""

import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jax.nn import softmax

from fp8lens import aot_compile
from fp8lens.cli import main, parse_shapes

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "command"
DUMP = Path(__file__).parent / "hlo" / "jax_0_4_32_bf16_scaled.txt"
SCRIPT = shutil.which("fp8lens", path=str(Path(sys.executable).parent)) or "fp8lens"
BF16 = ["--shapes", "bf16[64,128] bf16[128,256]"]


def said(capsys, *words: str) -> str:
    """What a command prints, in this process."""
    status = main(words)
    out, err = capsys.readouterr()
    out += "".join(f"! {line}\n" for line in err.splitlines())
    return out + (f"exit status {status}\n" if status else "")


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("*.txt")))
def test_answers(name, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    text = Path(name).read_text()
    commands = re.findall(r"^\$ fp8lens (.*)$", text, re.M)
    found = "\n".join(f"$ fp8lens {one}\n{said(capsys, *shlex.split(one))}" for one in commands)
    if os.environ.get("REFRESH"):
        Path(name).write_text(found)
    assert commands and found == text


def test_every_mistake_is_one_sentence():
    text = (HERE / "mistakes.txt").read_text()
    for block in re.split(r"^\$ fp8lens .*\n", text, flags=re.M)[1:]:
        assert re.fullmatch(r"! error: .*[.?]\nexit status 2\n+", block), block


def test_shapes_are_written_as_hlo_or_numpy_writes_them():
    spelled = "  f8e5m2[4, 8];pred[], bfloat16[3]\ns32[2] u8[1] int4[6] f4e2m1fn[1] c64[1]"
    assert " ".join(f"{s.dtype.name}{[*s.shape]}" for s in parse_shapes(spelled)) == (
        "float8_e5m2[4, 8] bool[] bfloat16[3] int32[2] uint8[1] int4[6] "
        "float4_e2m1fn[1] complex64[1]"
    )


def command(*words: str, folder: Path = ROOT, **options) -> subprocess.CompletedProcess:
    """The installed command, in a process of its own."""
    options = {"text": True, "capture_output": True} | options
    return subprocess.run([SCRIPT, *map(str, words)], cwd=folder, **options)


@pytest.mark.parametrize(
    ("document", "before"),
    [("README.md", "it is not FP8:"), ("fp8lens/README.md", "`layer.py` is")],
)
def test_the_sample_in_the_readme(tmp_path, document, before):
    readme = (ROOT / document).read_text()
    blocks = before + r"\n\n```python\n(.*?)```.*?```text\n(.*?)```"
    layer, sample = re.search(blocks, readme, re.S).groups()
    (shapes,) = re.findall(r'fp8lens layer.py:layer --shapes "(.*?)"', readme)
    (tmp_path / "layer.py").write_text(layer)
    done = command("layer.py:layer", "--shapes", shapes, "--reasons", folder=tmp_path)
    assert done.stdout == sample


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


# The user's file ----------------------------------------------------------------------------------


def test_what_the_file_prints_in_any_way_is_no_part_of_the_answer(tmp_path):
    chats = """
import os, subprocess, threading

def chat():
    while True:
        print("by a thread", flush=True)

threading.Thread(target=chat, daemon=True).start()
os.write(1, b"by descriptor")

def plain(x, w):
    subprocess.run(["echo", "by a process"])
    print("by itself")
    return x @ w
"""
    (tmp_path / "chats.py").write_text(chats)
    done = command("chats.py:plain", *BF16, "--json", folder=tmp_path)
    assert done.returncode == 0 and len(json.loads(done.stdout)["rows"]) == 1
    for how in ("by a thread", "by descriptor", "by a process", "by itself"):
        assert how in done.stderr


def test_a_file_of_a_package_may_import_by_dots(tmp_path):
    inner = tmp_path / "model" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "model" / "parts.py").write_text("def plain(x, w):\n    return x @ w\n")
    (inner / "layers.py").write_text("from ..parts import plain\nfrom model import parts\n")
    (tmp_path / "helpers.py").write_text("print('mine')\n")  # not ours, which is not imported
    for package in (inner, inner.parent):
        (package / "__init__.py").touch()
    done = command("layers.py:plain", *BF16, "--require-fp8", folder=inner)
    assert done.returncode == 1 and "mine" not in done.stdout + done.stderr


def test_a_file_may_set_what_jax_reads(tmp_path):
    sets = "import os\nos.environ['JAX_ENABLE_X64'] = '1'\ndef fn(x):\n    return x @ x\n"
    (tmp_path / "sets.py").write_text(sets)
    done = command("sets.py:fn", "--shapes", "f64[16,16]", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and " f64 " in done.stdout


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import no_such_module", 2, r"imported \(ModuleNotFoundError at ends.py:1: No module"),
        ("def f(", 2, r"imported \(SyntaxError at ends.py:1: "),
        ("import sys; sys.exit(0)", 2, r"imported \(SystemExit at ends.py:1: 0\)"),
        ("import os; os._exit(0)", 3, r"ended the process \(exit status 0\)"),
        ("import os; os.abort()", 3, r"ended the process \(SIGABRT\)"),
        ("import atexit, os; atexit.register(os._exit, 0)", 2, "has no function 'f'"),
        ("import signal; signal.raise_signal(signal.SIGINT)", 130, ""),
    ],
)
def test_a_file_that_does_not_get_to_its_end_is_no_verdict(tmp_path, code, status, words):
    (tmp_path / "ends.py").write_text(f"{code}\n")
    done = command("ends.py:f", "--shapes", "f32[4]", "--require-fp8", folder=tmp_path)
    assert done.returncode == status and re.search(words, done.stderr), done.stderr


def test_a_file_that_hides_jax_is_named(tmp_path):
    (tmp_path / "jax.py").touch()
    done = command("jax.py:f", *BF16, folder=tmp_path)
    assert done.returncode == 2 and "jax.py hides JAX" in done.stderr


def is_running(process: int) -> bool:
    """Whether a process is there, and is not one that has ended and that nobody asks about."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(") ")[2][0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled elsewhere")
def test_a_killed_command_leaves_no_process(tmp_path):
    """Neither the one that has the file, nor the one that this compiles in."""
    compiles = """
import os, sys, time
from fp8lens.apart import python
import subprocess
child = subprocess.Popen(python("import time; time.sleep(600)"))
open("processes", "w").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""
    (tmp_path / "compiles.py").write_text(compiles)
    running = subprocess.Popen([SCRIPT, "compiles.py:f"], cwd=tmp_path)
    told = tmp_path / "processes"
    while not (told.exists() and told.read_text().endswith("\n")):
        time.sleep(0.1)
    running.kill()
    running.wait()
    processes = [int(number) for number in told.read_text().split()]
    for _ in range(100):
        if not any(map(is_running, processes)):
            return
        time.sleep(0.1)
    for process in filter(is_running, processes):
        os.kill(process, signal.SIGKILL)
    pytest.fail("a process is still there")


# Records ------------------------------------------------------------------------------------------


def test_a_record_is_written_where_it_is(tmp_path, capsys, monkeypatch):
    """Through a link, with its mode; no device is read; what is damaged can be begun anew."""
    monkeypatch.chdir(tmp_path)
    asked = [f"{HERE / 'layers.py'}:bare", "--shapes", "f8e4m3fn[64,64] f8e4m3fn[64,64]"]
    record, link = Path("fp8.json"), Path("link.json")
    link.symlink_to(record)
    assert main([*asked, "--save", "link.json", "--name", "a"]) == 0
    record.chmod(0o664)
    assert main([*asked, "--save", "link.json", "--name", "b"]) == 0
    assert link.is_symlink() and stat.S_IMODE(record.stat().st_mode) == 0o664
    assert [*json.loads(record.read_text())["programs"]] == ["a", "b"]
    record.write_text(record.read_text()[:-9])
    capsys.readouterr()
    assert main([*asked, "--save", "fp8.json"]) == 2
    assert "--save: fp8.json is " in capsys.readouterr().err
    assert main([*asked, "--save", "fp8.json", "--anew", "--name", "c"]) == 0
    assert [*json.loads(record.read_text())["programs"]] == ["c"]
    assert main([*asked, "--save", "no/such.json"]) == 2
    assert "no/such.json cannot be written (No such file" in capsys.readouterr().err


# Saved programs -----------------------------------------------------------------------------------


def dumped(folder: Path, gemm: str) -> Path:
    """What XLA dumps of one program, with what its rewriter was given. Triton has its softmax."""
    options = {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_pass_re": "gemm-rewriter",
    }
    how = {"gemm": gemm, "compiler_options": options}
    aot_compile(lambda x, w: softmax(x @ w), *parse_shapes(BF16[1]), **how)
    return folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    return dumped(tmp_path_factory.mktemp("dumps"), "cublaslt")


def test_ptx_is_asked_for_where_triton_multiplies(tmp_path, capsys):
    refused = said(capsys, str(dumped(tmp_path, "triton")), "--reasons")
    assert "multiplies, as with --xla_dump_emitter_re=ptx too: dump the program again" in refused


def test_of_a_folder_the_compiled_program_is_read_and_named(dumps, tmp_path, capsys):
    (program,) = dumps.glob("*gpu_after_optimizations.txt")
    assert "__triton" in program.read_text()  # which sums, and needs no PTX
    files = sum(path.is_file() for path in dumps.iterdir())
    what = f"{program.name}, the one program that XLA compiled for a GPU among {files} files."
    whole = said(capsys, str(dumps), "--reasons")
    assert whole.startswith(f"{dumps}: {what}\n\n") and "rule: not-quantized" in whole
    cut = tmp_path / "cut.txt"
    cut.write_text(program.read_text()[:-40])
    assert re.search(r"cut.txt is not one whole HLO module \(line \d+, col", said(capsys, str(cut)))


DAMAGES = {
    "cut": (lambda text: text[:-99], "before_cublas-gemm-rewriter.txt is not one whole HLO"),
    "scopes": (lambda text: text.replace("dot_general", "dot"), "is of another program"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_beside_a_program_is_named_and_left_out(dumps, tmp_path, capsys, damage):
    shutil.copytree(dumps, tmp_path / "d")
    change, why = DAMAGES[damage]
    for given in (tmp_path / "d").glob("*before_cublas-gemm-rewriter.txt"):
        given.write_text(change(given.read_text()))
    (program,) = (tmp_path / "d").glob("*gpu_after_optimizations.txt")
    plain = said(capsys, str(program), "--require-fp8")
    assert "64 x 256 x 128" in plain and why in plain and "exit status 1" in plain
    refused = said(capsys, str(program), "--reasons")
    assert why in refused and refused.endswith("exit status 2\n") and program.name not in refused


def piped(data: bytes) -> subprocess.CompletedProcess:
    return command("-", input=data, text=False)


def test_a_program_from_standard_input(monkeypatch, capsys):
    done, same = piped(DUMP.read_bytes()), command(DUMP)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, same.stdout, b"")
    done = piped(b"a\0")
    assert done.returncode == 2 and b"standard input is no text: give the text" in done.stderr
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "no program comes from standard input" in said(capsys, "-")


ALONE = """
import sys
for name in ("jax", "jaxlib", "numpy", "ml_dtypes"):
    sys.modules[name] = None
from fp8lens.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ([DUMP, "--require-fp8"], 1, "1 of 1 matmuls are not FP8"),
        ([HERE / "layers.py:bare", "--shapes", "bf16[64,"], 2, "'bf16[64,' is no shape"),
        ([HERE / "layers.py:bare", "--shapes", "bf16[64]"], 2, "which needs JAX: pip install"),
    ],
)
def test_python_alone_reads_a_saved_program(words, status, told):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, words)], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == status and told in done.stdout + done.stderr, done.stderr


# The terminal -------------------------------------------------------------------------------------

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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def crafted(tmp_path) -> Path:
    """A program with characters in every name that a terminal obeys, as XLA prints such strings."""
    evil = "".join(rf"\{byte:03o}" for byte in EVIL.encode())
    path = tmp_path / f"step{EVIL}.txt"
    names = {"op": f"a{evil}b", "file": f"layer{evil}.py", "epilogue": json.dumps(f"RELU{EVIL}")}
    path.write_text(CRAFTED.format(**names), newline="")
    return path


ANSI = re.compile(r"\x1b\[[\d;]*m")


def on_a_terminal(monkeypatch, *words: str, **settings: str) -> str:
    """What the command prints on a terminal of this width."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", **settings}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    main([*words])
    return terminal.getvalue()


def test_nothing_in_a_file_reaches_the_terminal_as_control(crafted, capsys, monkeypatch):
    for words in (["--ledger", "--require-fp8"], ["--reasons"]):
        text = said(capsys, str(crafted), *words)
        assert is_plain(text) and r"\x1b[2J" in text
    main([str(crafted), "--json"])
    assert json.loads(out := capsys.readouterr().out)["rows"][0]["epilogue"] == f"RELU{EVIL}"
    assert out.isascii() and is_plain(out)
    coloured = ANSI.sub("", on_a_terminal(monkeypatch, str(crafted), "--ledger"))
    assert is_plain(coloured) and r"\x1b[2J" in coloured
    monkeypatch.undo()
    crafted.write_text(crafted.read_text().replace("%d = f32", f"%d = {EVIL}f32"))
    for word in (str(crafted), f"no{EVIL}.txt", f"no{EVIL}.py:f"):
        text = said(capsys, word)
        assert is_plain(text) and text.startswith("! error: ") and r"\x1b[2J" in text


@pytest.mark.parametrize(
    "words", [(str(DUMP), "--ledger", "--require-fp8"), ("explain", "late-relu"), ("no.txt",)]
)
def test_colours_only_on_a_terminal_that_wants_them(monkeypatch, capsys, words):
    main([*words])
    plain = "".join(capsys.readouterr())
    assert "\x1b" not in plain
    coloured = on_a_terminal(monkeypatch, *words)
    assert ANSI.search(coloured) and ANSI.sub("", coloured) == plain
    assert on_a_terminal(monkeypatch, *words, NO_COLOR="1") == plain
    assert on_a_terminal(monkeypatch, *words, TERM="dumb") == plain


# How it ends --------------------------------------------------------------------------------------


def test_help_and_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0 and "exit status: 0; 1 where" in capsys.readouterr().out
    (version,) = re.findall('^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert said(capsys, "--version") == f"fp8lens {version}\n"


@pytest.mark.parametrize("words", [[DUMP], [DUMP, "--json"], [HERE / "layers.py:plain", *BF16]])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has pipes of another kind")
def test_nobody_reads_on(words):
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": writing, "stderr": subprocess.PIPE, "capture_output": False}
    done = command(*words, **streams)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_fault_of_its_own_is_no_verdict(monkeypatch, capsys):
    def fails(*_, **__):
        raise ZeroDivisionError("oh \x1b")

    monkeypatch.setattr("fp8lens.cli.saved.of_dump", fails)
    text = said(capsys, str(DUMP), "--require-fp8")
    sentence = r"fp8lens itself failed \(ZeroDivisionError at \S+:\d+: oh \\x1b\): please report"
    assert re.match(f"! error: {sentence}", text) and text.endswith("\nexit status 2\n")
    debug = said(capsys, str(DUMP), "--debug")
    assert debug.startswith("! Traceback") and is_plain(debug)
