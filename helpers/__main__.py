"""The command line: `python -m helpers report path/to/file.py:function --shapes "f8e4m3fn[256,512] f32[]"`."""

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

from helpers.aot import GEMM_OPTIONS
from helpers.hlo import HloParseError
from helpers.reasons import why_not_fp8
from helpers.report import report_gemms
from helpers.targets import TARGETS

_EXAMPLE = '--shapes "f8e4m3fn[256,512] bf16[1024] f32[]"'
_SHAPE = re.compile(r"([A-Za-z]\w*)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\][\s;,]*")
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
    """The file, run as a module; what lies beside it can be imported, as when it is run itself."""
    path = _existing(path).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
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
        raise _Mistake(f"{name}({', '.join(map(str, parameters))}) cannot be called with the {len(args)} arguments of "
                       f"{source}: give a shape for each, as in {_EXAMPLE}, or --args with a function that returns the "
                       "tuple of arguments.") from None
    return args


def _call(fn: Callable, name: str, *args: Any, **how: Any) -> Any:
    try:
        return fn(*args, **how)
    except Exception as error:
        raise _Mistake(f"{name} failed ({_one_line(error)}): mend it, or the shapes.") from error


def _report(given: argparse.Namespace) -> int:
    python = re.fullmatch(r"(.+\.py)(?::(.*))?", given.what)
    how = {"target": given.target, "gemm": given.gemm}
    reasons = None
    if python:
        if given.target != "local":
            try:
                TARGETS[given.target]
            except KeyError as error:
                raise _Mistake(f"--target: {error.args[0]}") from None
        module = _load(Path(python[1]))
        name = python[2] or ""
        fn = _function(module, name)
        args = _arguments(module, fn, name, given.shapes and " ".join(given.shapes), given.args)
        report = _call(report_gemms, name, fn, *args, verify_mma=given.verify_mma, **how)
    else:
        if unused := [f"--{n.replace('_', '-')}" for n in ("shapes", "args", "reasons", "verify_mma") if
                      getattr(given, n)]:
            raise _Mistake(f"{unused[0]} is for a function, which can be compiled, and {given.what!r} is a saved "
                           "program: leave it out, or give path/to/file.py:function.")
        try:
            report = report_gemms(_existing(Path(given.what)).read_text(encoding="utf-8", errors="replace"))
        except HloParseError as error:
            raise _Mistake(f"{given.what} is not one whole HLO module ({error}): give the text that XLA dumps, such as "
                           "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt.") from error
    lost = [row for row in report.rows if not row.is_fp8]
    failed = given.require_fp8 and (bool(lost) or not report.rows)
    if given.json:
        print(json.dumps([{f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.repr}
                          for row in report.rows], indent=1))
    else:
        print(report)
    notes = sys.stderr if given.json else sys.stdout  # standard output stays JSON
    if python and (given.reasons or failed):
        reasons = _call(why_not_fp8, name, fn, *args, **how)
        lines = [str(reason) for reason in reasons] or ["nothing was lost"]
        print(*([] if given.json else [""]), *lines, sep="\n", file=notes)
    if failed:
        print(f"\n{len(lost)} of {len(report.rows)} matmuls not in FP8" if lost else "\nthere is no matmul in it",
              file=notes)
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status: 0, or 1 where --require-fp8 does not hold, or 2 for what cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m helpers", description="Judge the matmuls of a JAX program.")
    report = parser.add_subparsers(dest="command", required=True).add_parser(
        "report", help="one line for each matmul: what it multiplies, in which type, who runs it, what is left outside")
    report.add_argument("what", metavar="FILE.py:FUNCTION | DUMP.txt",
                        help="a function, compiled for --target, or a program saved by XLA_FLAGS=--xla_dump_to=FOLDER")
    report.add_argument("--shapes", nargs="+", metavar="SHAPE", help=f"of the function's arguments: {_EXAMPLE}")
    report.add_argument("--args", metavar="[FILE.py:]FUNCTION",
                        help="a function that returns the arguments: a tuple of arrays, ShapeDtypeStructs, or pytrees")
    report.add_argument("--target", default="H100", help=f"{', '.join(TARGETS)}, or local (default: %(default)s)")
    report.add_argument("--gemm", default="cublaslt", choices=list(GEMM_OPTIONS), help="who may run the matmuls")
    report.add_argument("--verify-mma", action="store_true", help="read a Triton kernel's type from its PTX")
    report.add_argument("--reasons", action="store_true", help="say why what was lost was lost, and the mend")
    report.add_argument("--require-fp8", action="store_true", help="exit with 1, and why, if a matmul is not FP8")
    report.add_argument("--json", action="store_true", help="the rows as JSON")
    given = parser.parse_args(argv)
    try:
        if given.shapes and given.args:
            raise _Mistake("--shapes and --args both give the arguments: leave one out.")
        return _report(given)
    except _Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
