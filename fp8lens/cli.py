"""The command line: `fp8lens path/to/file.py:function --shapes "f8e4m3fn[256,512] f32[]"`."""

import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from fp8lens.compile import GEMM_OPTIONS, require_gpu
from fp8lens.hlo.parse import HloModule, HloParseError, parse_hlo_module
from fp8lens.reasons import Reason, why_not_fp8
from fp8lens.report import GemmReport, report_gemms
from fp8lens.targets import TARGETS, resolve

_EXAMPLE = '--shapes "f8e4m3fn[256,512] bf16[1024] f32[]"'
_SHAPE = re.compile(r"([A-Za-z]\w*)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\][\s;,]*")
_DUMP = "gpu_after_optimizations.txt"  # how XLA ends the name of what it compiled for a GPU
# What XLA's GPU compiler, and no other, writes: in the header, from JAX 0.4.31 on, and beside its kernels and calls.
_OF_GPU = re.compile(r'fingerprint_before_lhs|"(?:operation_queue_id|fusion_backend_config|gemm_backend_config)"|"__cu')
_LONG = {"pred": "bool", "bf16": "bfloat16"}  # the names in HLO that numpy spells otherwise than by the rule below


class _Mistake(Exception):
    """What the user gave cannot be used; the message is one sentence that names the mend."""


def _dtype(name: str) -> jnp.dtype:
    """f8e4m3fn, s32, u8, pred as HLO has them, or float8_e4m3fn, int32, uint8, bool as numpy does."""
    short = re.fullmatch(r"([fsiu])(\d+)(e\w+)?", name)
    kind = {"f": "float", "s": "int", "i": "int", "u": "uint"}
    try:
        return jnp.dtype(f"{kind[short[1]]}{short[2]}{'_' * bool(short[3])}{short[3] or ''}" if short
                         else _LONG.get(name, name))
    except TypeError:
        raise _Mistake(f"{name!r} is no dtype: write it as HLO or numpy does, such as f8e4m3fn or float8_e4m3fn, "
                       "bf16, f32, s32, pred.") from None


def parse_shapes(text: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments that "f8e4m3fn[256,512] bf16[1024] f32[]" stands for."""
    shapes, pos = [], len(text) - len(text.lstrip())
    while pos < len(text):
        if not (m := _SHAPE.match(text, pos)):
            raise _Mistake(f"--shapes: {text[pos:].split()[0]!r} is no shape: write dtype[dims], as in {_EXAMPLE}.")
        shapes.append(jax.ShapeDtypeStruct(tuple(map(int, re.findall(r"\d+", m[2]))), _dtype(m[1])))
        pos = m.end()
    return tuple(shapes)


def _nearest(name: str, names: Iterable[str]) -> str:
    names = sorted(names)
    found = difflib.get_close_matches(name, names, cutoff=0.5) or names[:5]
    return f"; nearest: {', '.join(found)}" if found else ""


def _existing(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir() and (dumps := sorted(path.glob(f"*{_DUMP}"), key=lambda p: (-p.stat().st_size, p.name))):
        raise _Mistake(f"{str(path)!r} is a folder: give one of the programs in it, such as the largest: "
                       f"{', '.join(map(str, dumps[:3]))}.")
    folder = path.parent
    if not folder.is_dir():
        raise _Mistake(f"there is no folder {str(folder)!r}: give a path from here to a .py file or a saved HLO text.")
    kind = "a folder" if path.is_dir() else "no file"
    names = (p.name for p in (path if path.is_dir() else folder).iterdir() if p.suffix in (".py", ".txt", ".hlo"))
    raise _Mistake(f"{str(path)!r} is {kind}: give a .py file and a function in it, or a saved HLO text"
                   f"{_nearest(path.name, names)}.")


def _one_line(error: BaseException) -> str:
    """An error in one sentence: its first line, as its type may be what tells most."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}".rstrip(".")


def _load(path: Path) -> ModuleType:
    """The file, run as a module; what lies beside it can be imported, as when it is run itself, and what lies here."""
    path = _existing(path).resolve()
    sys.path[:0] = [folder for folder in (str(path.parent), str(Path.cwd())) if folder not in sys.path]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _Mistake(f"{path.name} could not be imported ({_one_line(error)}): run it alone to see where.") from error
    return module


def _function(module: ModuleType, name: str) -> Callable:
    file = Path(module.__file__).name
    own = {n for n, value in vars(module).items() if callable(value) and not n.startswith("__")
           and not inspect.isclass(value)}
    if name not in own:
        what = f"{file} has no function {name!r}" if name else f"name the function too, as in {file}:function"
        raise _Mistake(f"{what}{_nearest(name, own)}.")
    return getattr(module, name)


def _arguments(module: ModuleType, fn: Callable, name: str, shapes: str | None, factory: str | None) -> tuple:
    if factory is not None:
        file, _, maker = factory.rpartition(":")
        args = _call(_function(_load(Path(file)) if file else module, maker), maker)
        if not isinstance(args, tuple):
            raise _Mistake(f"--args: {maker}() returned a {type(args).__name__}: return a tuple, {name}'s arguments.")
    else:
        args = parse_shapes(shapes or "")
    try:
        inspect.signature(fn).bind(*args)
    except ValueError:  # no signature to read: JAX will say
        return args
    except TypeError:
        parameters = inspect.signature(fn).parameters.values()
        source = "--args" if factory is not None else "--shapes"
        raise _Mistake(f"{name}({', '.join(map(str, parameters))}) cannot be called with the {len(args)} "
                       f"argument{'s' * (len(args) != 1)} of {source}: give a shape for each, as in {_EXAMPLE}, or "
                       "--args with a function that returns the tuple of arguments.") from None
    return args


def _call(fn: Callable, name: str, *args: Any, **how: Any) -> Any:
    try:
        return fn(*args, **how)
    except Exception as error:
        raise _Mistake(f"{name} failed ({_one_line(error)}): mend it, or the shapes.") from error


def _saved(given: argparse.Namespace) -> tuple[GemmReport, str]:
    """The report of a saved program, and what the program is where it is not one that XLA compiled for a GPU."""
    path = _existing(Path(given.what))
    if unused := [name for name in ("shapes", "args", "target", "gemm", "reasons") if getattr(given, name)]:
        why = "says no more what XLA's rewriter was given" if unused[0] == "reasons" else "is compiled already"
        raise _Mistake(f"--{unused[0]} is for a function, and {given.what!r} is a saved program, which {why}: leave it "
                       "out, or give path/to/file.py:function.")
    try:
        module = parse_hlo_module(path.read_text(encoding="utf-8", errors="replace"))
        return report_gemms(module), _not_of_a_gpu(path, module)
    except HloParseError as error:
        raise _Mistake(f"{given.what} is not one whole HLO module ({error}): give the text that XLA dumps, such as "
                       f"module_0001.jit_f.sm_9.0a_{_DUMP}.") from error


def _not_of_a_gpu(path: Path, module: HloModule) -> str:
    if module.attributes.get("is_scheduled") != "true":  # the order of the kernels is the last that XLA settles
        return "a program that XLA has not optimized yet"
    return "" if path.name.endswith(_DUMP) or _OF_GPU.search(module.text) else "a program that XLA compiled for a CPU"


def _json(report: GemmReport, reasons: Sequence[Reason] | None) -> str:
    """One document; "reasons" is null where nobody asked for them."""
    rows = [{f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.repr} | {
        "path": row.path, "is_fp8": row.is_fp8} for row in report.rows]
    totals = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if f.name != "rows"}
    totals |= {name: getattr(report, name) for name in ("flops", "fp8_flops", "fp8_flops_share")}
    return json.dumps({"rows": rows, "totals": totals,
                       "reasons": None if reasons is None else [dataclasses.asdict(r) for r in reasons]}, indent=1)


def _report(given: argparse.Namespace) -> int:
    python = re.fullmatch(r"(.+\.py)(?::(.*))?", given.what)
    notes = sys.stderr if given.json else sys.stdout  # standard output stays JSON
    reasons = None
    if python:
        how = {"target": given.target or "H100", "gemm": given.gemm or "cublaslt"}
        try:
            require_gpu() if given.target == "local" else resolve(how["target"])
        except (KeyError, RuntimeError) as error:
            raise _Mistake(f"--target: {error}") from None
        module, name = _load(Path(python[1])), python[2] or ""
        fn = _function(module, name)
        args = _arguments(module, fn, name, given.shapes and " ".join(given.shapes), given.args)
        report = _call(report_gemms, name, fn, *args, **how)
    else:
        report, other = _saved(given)
        mend = f"take the file ending in {_DUMP}, which XLA writes where it compiles for a GPU"
        if other and given.require_fp8:
            raise _Mistake(f"{given.what!r} is {other}, and FP8 is judged on a GPU's kernels: {mend}.")
        if other:
            print(f"{given.what} is {other}; to judge FP8, {mend}.\n", file=notes)
    # Of a Triton kernel a saved program has the dot, not the PTX: it may multiply FP8 arrays in a wider type.
    lost = [row for row in report.rows if not row.is_fp8 or (row.library == "triton" and not python)]
    failed = given.require_fp8 and (bool(lost) or not report.rows)
    if python and (given.reasons or failed):
        reasons = _call(why_not_fp8, name, fn, *args, **how)
    print(_json(report, reasons) if given.json else report)
    if reasons is not None and report.rows and not given.json:
        print(f"\n{reasons}")
    if failed:
        unsure = "not known to be in FP8 (only its PTX tells of a Triton kernel: give the function)"
        lines = [f"{unsure if row.is_fp8 else 'not in FP8'}: {row.title}"
                 f"{row.source and f' ({row.source})'}" for row in lost if not python]
        known = "known to be " * any(row.is_fp8 for row in lost)
        lines.append(f"{len(lost)} of {len(report.rows)} matmul{'s' * (len(report.rows) != 1)} not {known}in FP8"
                     if lost else "there is no matmul in it")
        print("", *lines, sep="\n", file=notes)
    return int(failed)


_EPILOG = """examples:
  fp8lens layers.py:layer --shapes "f8e4m3fn[64,256] f8e4m3fn[128,256] f32[] f32[]" --require-fp8
  fp8lens dumps/module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt

FILE.py is imported: what it does at its top level, it does here too. The function is compiled and not run.
exit status: 0; 1 where --require-fp8 does not hold; 2 for what cannot be used, and a sentence that says why.
`python -m fp8lens` is the same command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status: 0, or 1 where --require-fp8 does not hold, or 2 for what cannot be used."""
    parser = argparse.ArgumentParser(
        "fp8lens", description="Judge the matmuls of a JAX program. For each: what it multiplies, in which type, "
        "who runs it, what is left outside.", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", metavar="FILE.py:FUNCTION | DUMP.txt",
                        help="a function, compiled for --target, or a program saved by XLA_FLAGS=--xla_dump_to=FOLDER")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help=f"of the function's arguments: {_EXAMPLE}")
    parser.add_argument("--args", metavar="[FILE.py:]FUNCTION",
                        help="a function that returns the arguments: a tuple of arrays, ShapeDtypeStructs, or pytrees")
    parser.add_argument("--target", help=f"{', '.join(TARGETS)}, or local, the attached GPU (default: H100)")
    parser.add_argument("--gemm", choices=list(GEMM_OPTIONS), help="who may run the matmuls: NVIDIA's library "
                        "(cublaslt, the default), kernels that XLA generates (triton), or who is faster, as XLA does "
                        "unless told (auto: without a GPU to time them on, the first Triton kernel that compiles)")
    parser.add_argument("--reasons", action="store_true", help="say why what was lost was lost, and the mend")
    parser.add_argument("--require-fp8", action="store_true", help="exit with 1, and why, if a matmul is not FP8")
    parser.add_argument("--json", action="store_true", help="one JSON object: rows, totals, and reasons if asked for")
    given = parser.parse_args(argv)
    try:
        if given.shapes and given.args:
            raise _Mistake("--shapes and --args both give the arguments: leave one out.")
        return _report(given)
    except _Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
