"""What the command takes, what it answers, and with which exit status:
`fp8lens path/to/file.py:function --shapes "f8e4m3fn[256,512] f32[]"`.

Python alone reads a saved program: JAX, and what needs it, is imported where a function is given.
"""

import argparse
import contextlib
import difflib
import importlib.machinery
import importlib.util
import inspect as signatures
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

from fp8lens.bill.bill import Bill, Comparison, compare
from fp8lens.dumps import (
    COMPILED,
    Kind,
    NoText,
    choose,
    files_beside,
    flags,
    not_of_a_gpu,
    text_of,
)
from fp8lens.guard import MAY_GROW, changes
from fp8lens.hlo.origin import left_out
from fp8lens.hlo.parse import (
    HloParseError,
    parse_hlo_module,
    uncollected,
    visible,
)
from fp8lens.hlo.text import (
    Ink,
    Style,
    counted,
    in_ansi_colours,
    page,
    shows_colours,
    source_path,
    wrapped,
)
from fp8lens.inspection import Inspection, inspect, of_dump
from fp8lens.matmul.collectives import MOVES, of_kinds
from fp8lens.matmul.rows import GemmRow
from fp8lens.records import entry_of, name_in, read_record, recorded, write_record
from fp8lens.report.gemms import UNSCALED
from fp8lens.rules.find import sent_wide
from fp8lens.rules.page import every_name, explain
from fp8lens.targets import GEMM_OPTIONS, TARGETS, attached_gpu, check_platforms, resolve

if TYPE_CHECKING:
    import jax

_PIPED = "-"  # for a saved program: it comes from standard input
_EXAMPLE = '--shapes "f8e4m3fn[256,512] bf16[1024] f32[]"'
_EXAMPLE_MESH = "--mesh data=8,model=4"
_FUNCTION = re.compile(r"(.+\.py)(?::(.*))?", re.S)  # a file, and a function in it
# A dimension, and the axes of the mesh that it is sharded over, as JAX writes them: 8@data.
_DIM = r"\d+(?:@(?:[A-Za-z]\w*|\([\w\s,]+\)))?"
_SHAPE = re.compile(rf"([A-Za-z]\w*)\[\s*((?:{_DIM}\s*(?:,\s*{_DIM}\s*)*+)?)\][\s;,]*")
_DIMS = re.compile(rf"\s*+(?:{_DIM}\s*+(?:,\s*+(?=\d)|(?!\d)))*+")  # a scalar has none
# How a shape's parts are matched, in the order of the text, and what is expected where one is not
# found.
_PARTS = (
    (re.compile(r"[A-Za-z]\w*").match, "a dtype"),
    (re.compile(r"\[").match, '"[" after the dtype'),
    (_DIMS.match, ""),
    (re.compile(r"\]").match, 'whole numbers with "," between them, then "]"'),
)
# The names in HLO that numpy spells otherwise than by the rule in `_long_name`.
_LONG = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
# JAX's dtypes as numpy names them, to be known before JAX is loaded. A test compares.
_DTYPES = frozenset(
    "bool int1 int2 int4 int8 int16 int32 int64 uint1 uint2 uint4 uint8 uint16 uint32 uint64 "
    "float4_e2m1fn float6_e2m3fn float6_e3m2fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "bfloat16 float16 float32 float64 complex64 complex128".split()
)
# Files of what is installed, and what is no file.
_NOT_THEIRS = re.compile(r"[/\\](site|dist)-packages[/\\]|^<")


_LIBRARY = str(Path(os.__file__).parent)  # Python's own


class _Mistake(Exception):
    """What the user gave cannot be used; the message is one sentence that names the fix."""


class _Shape(NamedTuple):
    """An argument as --shapes has it, its dtype as numpy names it, and for each dimension the axes
    that it is sharded over.
    """

    dtype: str
    dims: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]


def _long_name(name: str) -> str:
    """numpy's name of a dtype (float8_e4m3fn, int32, uint8, bool), which may be given as HLO has it
    (f8e4m3fn, s32, u8, pred).
    """
    if short := re.fullmatch(r"([fsiu])(\d+)(e\w+)?", name):
        kind = {"f": "float", "s": "int", "i": "int", "u": "uint"}[short[1]]
        return f"{kind}{short[2]}_{short[3]}" if short[3] else f"{kind}{short[2]}"
    return _LONG.get(name, name)


def _notes(shapes: "tuple[jax.ShapeDtypeStruct, ...]") -> Iterator[str]:
    """What somebody who wrote these dtypes may not have meant."""
    import jax

    for name, dtype in {shape.dtype.name: shape.dtype for shape in shapes}.items():
        # Not an error: what XLA makes of such a format can be asked. But whoever writes f8e4m3
        # mostly means f8e4m3fn.
        multiplied = ("float8_e4m3fn", "float8_e5m2")
        if re.match("float8_(e4m3|e5m2|e3m4)", name) and name not in multiplied:
            meant = "float8_e5m2" if "e5m2" in name else "float8_e4m3fn"
            yield (
                f"{name} is taken as written: "
                f"it is another format than {meant}, which tensor cores multiply."
            )
        if (taken := jax.dtypes.canonicalize_dtype(dtype).name) != name:
            yield f"JAX takes {name} as {taken} unless JAX_ENABLE_X64=1 is set."


def _read_shapes(text: str) -> list[_Shape]:
    """What --shapes says, read without JAX."""
    shapes, pos = [], len(text) - len(text.lstrip())
    while pos < len(text):
        if not (m := _SHAPE.match(text, pos)):
            wrong, expected = _place(text, pos)
            raise _Mistake(
                f"--shapes, character {wrong + 1}: {text[pos:].split()[0]!r} is no shape: "
                f"expected {expected}, as in {_EXAMPLE}."
            )
        dtype = _long_name(m[1])
        if dtype not in _DTYPES:
            raise _Mistake(
                f"--shapes, character {pos + 1}: {m[1]!r} is no dtype: write it as HLO or numpy "
                f"does, such as f8e4m3fn or float8_e4m3fn, bf16, f32, s32, pred, as in {_EXAMPLE}."
            )
        sizes, over = [], []
        for size, names in re.findall(r"(\d++)(?:@(\w++|\([\w\s,]++\)))?+", m[2]):
            sizes.append(int(size))
            over.append(tuple(re.findall(r"\w+", names)))
        shapes.append(_Shape(dtype, tuple(sizes), tuple(over)))
        pos = m.end()
    return shapes


def _place(text: str, pos: int) -> tuple[int, str]:
    """Where what begins at `pos` is no shape, and what is expected there."""
    for match, expected in _PARTS:
        if not (found := match(text, pos)):
            return pos, expected
        pos = found.end()
    raise ValueError(f"{text!r} has a shape before {pos}")


def _read_mesh(text: str) -> dict[str, int]:
    """What --mesh says: the devices of each axis."""
    if not text.strip():
        raise _Mistake(f"--mesh is empty: write {_EXAMPLE_MESH}, or leave it out for one device.")
    found = {}
    for part in text.split(","):
        axis = re.fullmatch(r"\s*+([A-Za-z]\w*+)\s*+=\s*+(\S++)\s*+", part)
        if not axis:
            raise _Mistake(
                f"--mesh: {part.strip()!r} is no axis and its devices: write {_EXAMPLE_MESH}."
            )
        if not re.fullmatch(r"[0-9]{1,9}", axis[2]):
            raise _Mistake(
                f"--mesh: the axis {axis[1]!r} has {axis[2]!r} devices: give a whole number, as in "
                f"{_EXAMPLE_MESH}."
            )
        if int(axis[2]) == 0:
            raise _Mistake(
                f"--mesh: the axis {axis[1]!r} has no devices: give 1 or more, as in "
                f"{_EXAMPLE_MESH}."
            )
        if axis[1] in found:
            raise _Mistake(f"--mesh names the axis {axis[1]!r} twice: leave one out.")
        found[axis[1]] = int(axis[2])
    return found


def _check_axes(shapes: list[_Shape], mesh: Mapping[str, int] | None) -> None:
    """A _Mistake where an argument is sharded over what the mesh does not have, or unevenly."""
    for shape in shapes:
        for size, names in zip(shape.dims, shape.axes, strict=True):
            if unknown := [name for name in names if name not in (mesh or {})]:
                has = f"which --mesh has not{_nearest(unknown[0], mesh or ())}"
                raise _Mistake(
                    f"--shapes: {size} is sharded over the axis {unknown[0]!r}, "
                    f"{has if mesh else f'and there is no --mesh: add {_EXAMPLE_MESH}'}."
                )
            devices = math.prod((mesh or {})[name] for name in names)
            if size % devices:
                raise _Mistake(
                    f"--shapes: {size} cannot be sharded over {devices} devices "
                    f"({', '.join(names)}): give a multiple of {devices}."
                )


def _specs(shapes: list[_Shape]) -> "tuple[jax.sharding.PartitionSpec, ...]":
    """Where the arguments of --shapes are."""
    from jax.sharding import PartitionSpec

    return tuple(PartitionSpec(*(names or None for names in shape.axes)) for shape in shapes)


def parse_shapes(text: str) -> "tuple[jax.ShapeDtypeStruct, ...]":
    """The arguments that "f8e4m3fn[256,512] bf16[1024] f32[]" stands for."""
    read = _read_shapes(text)
    import jax
    import jax.numpy as jnp

    def not_in_this_jax(error: TypeError) -> str:
        return f"--shapes: JAX {jax.__version__} lacks a dtype ({error}): give another, or update."

    with _answered(TypeError, not_in_this_jax):
        return tuple(jax.ShapeDtypeStruct(s.dims, jnp.dtype(s.dtype)) for s in read)


def _shown(what: str) -> str:
    """What was given, in words."""
    return "standard input" if what == _PIPED else what


def _named(what: str) -> str:
    """The same, quoted where it is a name."""
    return _shown(what) if what == _PIPED else repr(what)


def _nearest(name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    found = difflib.get_close_matches(name, known, cutoff=0.5) or known[:5]
    return f"; nearest: {', '.join(found)}" if found else ""


@contextlib.contextmanager
def _answered(kinds: Any, sentence: Callable[[Any], str]) -> Iterator[None]:
    """Errors of these kinds are the user's to fix."""
    try:
        yield
    except kinds as error:
        raise _Mistake(sentence(error)) from error


def _reading(path: Any) -> contextlib.AbstractContextManager:
    return _answered(OSError, lambda error: f"{str(path)!r} cannot be read ({error.strerror}).")


def _existing(path: Path) -> Path:
    if path.is_file():
        return path
    is_folder, folder = path.is_dir(), path.parent
    if is_folder:
        folder = path
    if not folder.is_dir():
        raise _Mistake(
            f"there is no folder {str(folder)!r}: "
            "give a path from here to a .py file or a saved HLO text."
        )
    kind = "a folder" if is_folder else "no file"
    names = (p.name for p in folder.iterdir() if p.suffix in (".py", ".txt", ".hlo", ".gz"))
    raise _Mistake(
        f"{str(path)!r} is {kind}: give a .py file and a function in it, or a saved HLO text"
        f"{_nearest(path.name, names)}."
    )


def _program_in(path: Path, notes: TextIO) -> Path:
    """The file to read: of a folder, the program that XLA compiled, which is said on `notes`."""
    if not path.is_dir():
        return _existing(path)
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    choice = choose(sizes)
    if not choice or choice.kind is Kind.OTHER:
        return _existing(path)  # raises, and names what may be meant
    print(visible(f"{path}: {choice}"), end="\n\n", file=notes)
    return path / choice.name


def _told(error: BaseException) -> str:
    """An error in one sentence: its type, which may tell most, the user's line, and its first
    line.
    """
    # A KeyError shows its message's repr.
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    first = text.splitlines()[0] if text else "no message"
    kind, where = type(error).__name__, _line(error)
    told = f"{kind} at {where}: {first}" if where else f"{kind}: {first}"
    return told.rstrip(".")


def _line(error: BaseException) -> str:
    """file:line of the innermost call that is neither in an installed package nor in Python's
    library or this one.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{source_path(error.filename)}:{error.lineno}"
    not_theirs = (_LIBRARY, *left_out())
    place = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not _NOT_THEIRS.search(file) and not file.startswith(not_theirs):
            place = f"{source_path(file)}:{number}"
    return place


@contextlib.contextmanager
def _theirs(
    what: str, fix: str, advice: Callable[[BaseException], str] = lambda error: ""
) -> Iterator[None]:
    """The user's code runs: what it raises, be it SystemExit, is a mistake; what it prints is no
    part of the report. `advice` on an error, if there is any, is given in place of `fix`.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, _Mistake):
        raise
    except BaseException as error:
        next_step = advice(error) or f"{fix}."
        raise _Mistake(f"{what} ({_told(error)}): {next_step}") from error


class _AsWritten(importlib.machinery.SourceFileLoader):
    """Compiles the file each time: Python reuses old bytecode if a file was changed within the same
    second and kept its size.
    """

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _load(path: Path) -> ModuleType:
    """The file, run as a module; what lies beside it can be imported, as when it is run itself, and
    what lies here.
    """
    with _reading(path):
        path = _existing(path).resolve()
    if path.suffix != ".py":
        raise _Mistake(f"{path.name!r} is no .py file, which a function is in.")
    beside = (str(path.parent), str(Path.cwd()))
    sys.path[:0] = [folder for folder in beside if folder not in sys.path]
    loader = _AsWritten(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec  # as there is a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    what, fix = "could not be imported", "it must run to its end when it is imported"
    with _theirs(f"{path.name} {what}", fix):
        loader.exec_module(module)
    return module


def _is_function(name: str, value: Any) -> bool:
    """Whether something in a module may be compiled."""
    return callable(value) and not name.startswith("__") and not signatures.isclass(value)


def _function(module: ModuleType, name: str) -> Callable:
    file = Path(module.__file__ or "").name
    own = {n for n, value in vars(module).items() if _is_function(n, value)}
    if name in own:
        return getattr(module, name)
    if not name:
        what = f"name the function too, as in {file}:function"
    elif name in vars(module):
        value = vars(module)[name]
        kind = "a class" if signatures.isclass(value) else f"of type {type(value).__name__}"
        what = f"{name!r} in {file} is {kind}, not a function"
    else:
        what = f"{file} has no function {name!r}"
    raise _Mistake(f"{what}{_nearest(name, own)}.")


def _made(make: Callable, maker: str, mesh: "jax.sharding.Mesh | None") -> Any:
    """What the function of --args returns. It can name the mesh's axes in shardings."""
    if mesh is None:
        with _theirs(f"{maker} failed", "fix it"):
            return make()
    import jax

    fix = (
        "fix it; the devices of --mesh are not here and hold no arrays: give shapes, "
        'jax.ShapeDtypeStruct(shape, dtype, sharding=jax.P("data"))'
    )
    with _theirs(f"{maker} failed", fix):
        try:
            with _on(mesh):
                return make()
        except Exception as error:
            # It may make arrays, which JAX then tries to make on the mesh's devices.
            on_mesh = error
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return make()
        except Exception:
            raise on_mesh from None


def _arguments(
    module: ModuleType,
    fn: Callable,
    name: str,
    shapes: str | None,
    factory: str | None,
    mesh: "jax.sharding.Mesh | None",
) -> tuple:
    """What the function is compiled with, of --shapes or --args."""
    if factory is not None:
        file, _, maker = factory.rpartition(":")
        make = _function(_load(Path(file)) if file else module, maker)
        args = _made(make, maker, mesh)
        if not isinstance(args, tuple):
            raise _Mistake(
                f"--args: {maker}() returned a {type(args).__name__}: "
                f"return a tuple, {name}'s arguments."
            )
    else:
        args = parse_shapes(shapes or "")
        for note in _notes(args):
            print(_style(sys.stderr)("note:", Ink.HEADING), f"--shapes: {note}", file=sys.stderr)
    try:
        signatures.signature(fn).bind(*args)
    except ValueError:  # no signature to read: JAX will say
        return args
    except TypeError:
        parameters = signatures.signature(fn).parameters.values()
        source = "--args" if factory is not None else "--shapes"
        what = f"with the {counted(len(args), 'argument')} of {source}"
        if factory is None and shapes is None:
            what = "without arguments, and there is neither --shapes nor --args"
        raise _Mistake(
            f"{name}({', '.join(map(str, parameters))}) cannot be called {what}: "
            f"give a shape for each, as in {_EXAMPLE}, "
            "or --args with a function that returns the tuple of arguments."
        ) from None
    return args


def _saved(given: argparse.Namespace) -> tuple[Inspection, str]:
    """A saved program, and what the program is where it is not one that XLA compiled for a GPU."""
    file, _, name = given.what.rpartition(":")
    if file and name.isidentifier() and not os.path.lexists(given.what):
        beside = (p.name for p in Path(file).parent.glob("*.py"))
        raise _Mistake(
            f"{file!r} is no .py file, which a function is in: give path/to/file.py:{name}"
            f"{_nearest(Path(file).name, beside)}."
        )
    for option in ("shapes", "args", "target", "gemm", "bill", "against"):
        if getattr(given, option):
            why = "is compiled already"
            if option in ("bill", "against"):
                why = "says no more how XLA planned its memory"
            raise _Mistake(
                f"--{option} is for a function, and {_named(given.what)} is a saved program, "
                f"which {why}: leave it out, or give path/to/file.py:function."
            )
    notes = sys.stderr if given.json else sys.stdout  # standard output stays JSON
    path = Path(given.what)
    further: dict[str, bytes] = {}
    with _reading(given.what):
        if given.what == _PIPED:
            data = _piped()
        else:
            path = _program_in(path, notes)
            data = path.read_bytes()
            names = files_beside(path.name, (file.name for file in path.parent.iterdir()))
            further = {name: (path.parent / name).read_bytes() for name in names}

    def not_text(error: NoText) -> str:
        return (
            f"{_named(given.what)} is {error}: "
            "give the text that XLA dumps with --xla_dump_hlo_as_text."
        )

    def not_a_module(error: HloParseError) -> str:
        return (
            f"{_shown(given.what)} is not one whole HLO module ({error}): "
            f"give the text that XLA dumps, such as module_0001.jit_f.sm_9.0a_{COMPILED}."
        )

    with _answered(NoText, not_text), _answered(HloParseError, not_a_module):
        module = parse_hlo_module(text_of(data))
        devices = _read_mesh(given.mesh) if given.mesh is not None else None
        texts = {name: text_of(one) for name, one in further.items()}
        seen = of_dump(module, path.name, texts, devices)
        if given.reasons and not seen.has_reasons:
            raise _Mistake(
                f"--reasons is for a function, and {_named(given.what)} is a saved program, "
                "which says no more what XLA's rewriter was given: leave it out, or give "
                "path/to/file.py:function, or the folder of a dump that was made with "
                f"{flags(module)} too."
            )
        _ = seen.has_reasons and (given.reasons or given.require_fp8) and seen.reasons
        # What cannot be read is said here.
        _ = seen.report, (given.json or given.require_fp8) and seen.collectives
        if devices:
            misfit = _answered(ValueError, lambda error: f"--mesh: {error}")
            with misfit, _answered(HloParseError, not_a_module):
                _ = seen.collectives
        return seen, not_of_a_gpu(path.name, module)


def _piped() -> bytes:
    """Standard input as it is."""
    if sys.stdin is None or sys.stdin.isatty():
        raise _Mistake(
            f"no program comes from standard input: write fp8lens {_PIPED} < module_0001.jit_f."
            f"sm_9.0a_{COMPILED}, or give the file's name."
        )
    return sys.stdin.buffer.read()


def _is_record(given: argparse.Namespace) -> bool:
    """Whether --against names a record, and not a function."""
    return bool(given.against) and not _FUNCTION.fullmatch(given.against)


def _check_guard(given: argparse.Namespace) -> None:
    """What is wrong with the options of a record is said before anything is compiled."""
    if _is_record(given):
        path = Path(given.against)
        if not path.is_file():
            raise _Mistake(
                f"--against: there is no record {given.against!r}: write it with --save, or give "
                "path/to/file.py:function."
            )
        with (
            _reading(path),
            _answered(ValueError, lambda error: f"--against: {error.args[0]}"),
        ):
            read_record(path)
        return
    for option in ("summary", "may_grow"):
        if getattr(given, option) is not None:
            raise _Mistake(
                f"--{option.replace('_', '-')} is for --against with a record: add --against "
                "fp8.json, or leave it out."
            )
    if given.name and not given.save:
        raise _Mistake("--name is for --save, or for --against with a record: leave it out.")


def _check_allowed(given: argparse.Namespace) -> None:
    """A _Mistake where --allow has nothing to allow."""
    if given.allow and not given.require_fp8:
        raise _Mistake("--allow is for --require-fp8: add it, or leave --allow out.")
    known = ("opaque", UNSCALED, *every_name())
    for name in given.allow or ():
        if name not in known:
            raise _Mistake(f"--allow: there is no rule {name!r}{_nearest(name, known)}.")


def _program(given: argparse.Namespace, record: str) -> str:
    """A program's name in a record."""
    if given.name:
        return given.name
    if function := _FUNCTION.fullmatch(given.what):
        return name_in(record, function[1], function[2] or "")
    return Path(given.what).name


def _guard(given: argparse.Namespace, seen: Inspection) -> str:
    """Compare with the record, and write it: the paragraph if something is worse, else "". A
    paragraph without anything worse is printed here.
    """
    notes = sys.stderr if given.json else sys.stdout
    worse = ""
    if _is_record(given):
        name = _program(given, given.against)
        may_grow = MAY_GROW if given.may_grow is None else given.may_grow
        with _answered((KeyError, ValueError), lambda error: f"--against: {error.args[0]}"):
            before = recorded(given.against, name, entry_of(seen))
            found = changes(before.entry, seen, may_grow, before.note)
        said = visible(f"{name}, against {given.against}: {found}")
        _summarize(given, said)
        if found.worse:
            worse = said
        else:
            print("", *wrapped(said, 0, 2), sep="\n", file=notes)
    if given.save and worse and os.path.realpath(given.save) == os.path.realpath(given.against):
        kept = "the record is not renewed, because something is worse: to renew it, leave out"
        print("", visible(f"{kept} --against {given.against}"), sep="\n", file=notes)
    elif given.save:
        with _answered((OSError, ValueError), lambda error: f"--save: {_told(error)}"):
            write_record(given.save, _program(given, given.save), entry_of(seen))
        print("", visible(f"recorded in {given.save}"), sep="\n", file=notes)
    return worse


def _summarize(given: argparse.Namespace, said: str) -> None:
    """Append to the file of --summary what is said of the program."""
    if given.summary:
        with (
            _answered(OSError, lambda error: f"--summary: {_told(error)}"),
            open(given.summary, "a", encoding="utf-8") as file,
        ):
            file.write(f"{visible(said)}\n\n")


def _against(given: argparse.Namespace) -> Inspection:
    """The function of --against, compiled as the other one is."""
    python = _FUNCTION.fullmatch(given.against)
    assert python  # else it names a record
    return _compiled(given, python[1], python[2] or "")


def _compiled(given: argparse.Namespace, file: str, name: str) -> Inspection:
    """A function, compiled."""
    shapes = None if given.shapes is None else " ".join(given.shapes)
    read = _read_shapes(shapes or "")  # a mistake in it is told at once: JAX takes seconds
    devices = _read_mesh(given.mesh) if given.mesh is not None else None
    _check_axes(read, devices)
    jax = None
    with contextlib.suppress(ImportError):
        # Not imported yet: the file imports it, and may first set what JAX reads.
        jax = importlib.util.find_spec("jax")
    if not jax:
        raise _Mistake(
            "a function is compiled, which needs JAX: pip install 'path/to/the/checkout[jax]'."
        )
    how: dict[str, Any] = {
        "target": given.target or "H100",
        "gemm": given.gemm or "cublaslt",
    }
    with _answered(RuntimeError, str):
        check_platforms(os.environ.get("JAX_PLATFORMS"))
    with _answered((KeyError, RuntimeError), lambda error: f"--target: {error}"):
        resolve(how["target"])
        if attached_gpu() is None:
            # Else the file's first array prints a traceback of JAX's CUDA plugin.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        module = _load(Path(file))
        if given.target == "local":
            from fp8lens.compile.process import require_gpu

            require_gpu()
    fn = _function(module, name)

    from fp8lens.compile.bugs import advice
    from fp8lens.compile.call import OtherMesh

    mesh = _mesh(how["target"], devices)
    args = _arguments(module, fn, name, shapes, given.args, mesh)
    if devices:
        how["mesh_shape"] = devices
        how["in_specs"] = _specs(read) if given.args is None else None

    def other_mesh(error: OtherMesh) -> str:
        own, ours = _axes(error.own), _axes(error.compiled_for)
        if not devices and math.prod(error.compiled_for.values()) == 1:
            return (
                f"{error.argument} is on the mesh {own}, which is not of {how['target']}: give "
                f"--mesh {own}."
            )
        if not devices:
            return (
                f"{error.argument} is on the mesh {own}, and one before it on {ours}: put all "
                "arguments on one mesh."
            )
        return (
            f"{error.argument} is on the mesh {own}, and --mesh is {ours}: give --mesh {own}, or "
            "arguments on the mesh of --mesh."
        )

    with (
        _on(mesh),
        _theirs(f"{name} failed", "fix it, or the shapes", advice),
        _answered(OtherMesh, other_mesh),
    ):
        return inspect(fn, *args, **how)


def _mesh(target: str, devices: Mapping[str, int] | None) -> "jax.sharding.Mesh | None":
    """The devices of --mesh."""
    if not devices:
        return None
    from fp8lens.compile.meshes import mesh

    with _answered((ValueError, RuntimeError), lambda error: f"--mesh: {error}"):
        return mesh(target, devices)


def _on(mesh: "jax.sharding.Mesh | None") -> contextlib.AbstractContextManager:
    """Within it the axes of --mesh can be named in shardings."""
    if mesh is None:
        return contextlib.nullcontext()
    import jax

    return jax.set_mesh(mesh)


def _axes(mesh: Mapping[str, int]) -> str:
    """A mesh as --mesh has it."""
    return ",".join(f"{name}={devices}" for name, devices in mesh.items())


def _report(given: argparse.Namespace) -> int:
    """Print the report; 1 where --require-fp8 does not hold, or something is worse than recorded,
    else 0.
    """
    _check_guard(given)
    _check_allowed(given)
    python = _FUNCTION.fullmatch(given.what)
    notes = sys.stderr if given.json else sys.stdout  # standard output stays JSON
    if python:
        seen = _compiled(given, python[1], python[2] or "")
    else:
        seen, other = _saved(given)
        if other:
            fix = (
                f"take the file ending in {COMPILED}, which XLA writes where it compiles for a GPU"
            )
            if given.require_fp8:
                raise _Mistake(
                    f"{_named(given.what)} is {other}, and FP8 is judged on a GPU's kernels: {fix}."
                )
            print(f"{visible(_shown(given.what))} is {other}; to judge FP8, {fix}.\n", file=notes)
    failures = _failures(seen, given.allow or ()) if given.require_fp8 else []
    _print(given, seen, seen.has_reasons and bool(given.reasons or failures))
    style = _style(notes)
    if failures:
        print("", *(style(line, Ink.LOST) for line in failures), sep="\n", file=notes)
    worse = _guard(given, seen)
    if worse:
        print("", *(style(line, Ink.LOST) for line in wrapped(worse, 0, 2)), sep="\n", file=notes)
    return 1 if failures or worse else 0


def _print(given: argparse.Namespace, seen: Inspection, reasons: bool) -> None:
    """Print what was asked for, with the reasons or without."""
    costs: Bill | Comparison | None = None
    if given.against and not _is_record(given):
        names = (given.against.rpartition(":")[2], given.what.rpartition(":")[2])
        costs = compare(_against(given), seen, names)
    elif given.bill:
        costs = seen.bill
    if given.json:
        print(costs.json() if costs else seen.json(reasons=reasons))
        return
    style = _style(sys.stdout)
    with page(_columns()):
        parts = [seen.report.text(style)]
        if given.ledger:
            parts.append(seen.ledger.text(style))
        if given.mesh or (seen.compiled and seen.devices > 1):
            mesh = f", mesh {_axes(seen.mesh)}" if seen.mesh else ""
            if seen.devices > 1:
                parts.append(style(f"compiled for {seen.devices:,} devices{mesh}", None))
            lines = str(seen.collectives).splitlines()
            parts.append("\n".join(style(line, None) for line in lines))
        if costs:
            parts.append(costs.text(style))
        if reasons and seen.report.rows:
            parts.append(seen.reasons.text(style))
    print("\n\n".join(parts))


def _columns() -> int:
    """How wide standard output is: a terminal may be of any width, and a file has none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _style(file: TextIO) -> Style:
    """How text is written there: in colours only on a terminal, and nowhere with what a terminal
    would obey.
    """
    return in_ansi_colours if shows_colours(file) else _readable


def _readable(part: str, ink: Ink | None) -> str:
    return visible(part)


def _failures(seen: Inspection, allowed: Collection[str]) -> list[str]:
    """What --require-fp8 does not find in order, in lines of which the last of the matmuls and of
    the collectives sum up; without fault, none.
    """
    return [*_of_matmuls(seen, allowed), *_on_the_wire(seen, allowed)]


def _on_the_wire(seen: Inspection, allowed: Collection[str]) -> list[str]:
    """The collectives that send wide what an FP8 matmul reads, or what was FP8."""
    asked = of_kinds(seen.collectives, MOVES)
    broken = [(c, reasons) for c in asked if (reasons := sent_wide(c, allowed))]
    lines = []
    fixes: dict[str, str] = {}  # each is said once
    for c, reasons in broken:
        rules = ", ".join(reason.rule for reason in reasons)
        lines.append(visible(f"not sent in FP8: {c.title}: {rules}"))
        fixes |= {reason.rule: reason.fix for reason in reasons}
    lines += [visible(f"fix of {rule}: {fix}") for rule, fix in fixes.items()]
    if broken:
        page = next(iter(fixes))
        lines.append(
            f"fp8lens explain {page} shows a program that does this, and the same one fixed"
        )
        lines.append(f"{len(broken)} of {counted(len(seen.collectives), 'collective')} not in FP8")
    unread = [(c, name) for c in asked for name in c.unknown if "opaque" not in allowed]
    doubts = [f"not known whether {name} quantizes what {c.name} sends" for c, name in unread]
    return [*map(visible, doubts), *lines]


def _of_matmuls(seen: Inspection, allowed: Collection[str]) -> list[str]:
    """The matmuls that are not in FP8, or are wrong, and the kernels that may be matmuls."""
    rows = seen.report.rows
    # Of a Triton kernel a saved program has the dot, not the PTX: it may multiply FP8 arrays in a
    # wider type.
    unsure = [row for row in rows if row.is_fp8 and row.library == "triton" and not seen.is_ours]
    wide = seen.wide_rows(allowed)
    lost = [row for row in rows if row in wide or row in unsure]
    lines = []
    if not seen.is_ours:  # else the reasons say so
        lines = [visible(_lost(row)) for row in lost]
    reasons = seen.reasons if seen.is_ours else ()
    wrong = [r for r in reasons if r.gives_wrong_numbers and r.rule not in allowed]
    lines += [visible(f"{reason.matmul}: {reason.reason}") for reason in wrong]
    # A kernel that was not looked into may multiply too.
    unread = [] if "opaque" in allowed else [name for name, _ in seen.unknown]
    lines += [visible(f"not known to multiply FP8 alone: {name}") for name in unread]
    unscaled = seen.report.unscaled and UNSCALED not in allowed
    if unscaled:
        lines.append(visible(f"{seen.report.of_gradients()[0]}; --allow {UNSCALED} accepts it"))
    if lost:
        known = "known to be in FP8" if unsure else "in FP8"
        lines.append(f"{len(lost)} of {counted(len(rows), 'matmul')} not {known}")
    elif wrong:
        lines.append("XLA compiled other numbers than were asked for")
    elif unread:
        lines.append("not every kernel was looked into")
    elif not rows:
        lines.append("there is no matmul in it")
    elif unscaled:
        lines.append("gradients may be lost")
    elif not seen.report.fp8_rows:
        lines.append("no matmul is in FP8")
    return lines


def _lost(row: GemmRow) -> str:
    """Of a saved program's matmul: that it is not in FP8, or why that is not known."""
    told = "not in FP8"
    if row.is_fp8:
        told = "not known to be in FP8 (only its PTX tells of a Triton kernel: give the function)"
    where = f" ({row.source})" if row.source else ""
    return f"{told}: {row.title}{where}"


def _answer(given: argparse.Namespace) -> int:
    """The report, or a sentence that says why there is none; an OSError is of writing either."""
    try:
        if given.shapes and given.args:
            raise _Mistake("--shapes and --args both give the arguments: leave one out.")
        # What is found out about a saved program stays until the answer.
        saved = not _FUNCTION.fullmatch(given.what)
        with uncollected() if saved else contextlib.nullcontext():
            return _report(given)
    except (KeyboardInterrupt, OSError):
        raise
    except BaseException as error:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            said = (
                f"there is not enough memory for {_named(given.what)}: "
                "give a smaller program, or the process more memory."
            )
        elif isinstance(error, _Mistake):
            said = str(error)
        else:
            told = _told(error)
            said = f"fp8lens itself failed ({told}): please report this with what --debug adds."
        if given.debug:
            print(visible(traceback.format_exc(), keep="\n"), file=sys.stderr)
        print(_error(said), file=sys.stderr)
        _summarize_error(given, said)
        return 2


def _summarize_error(given: argparse.Namespace, said: str) -> None:
    """Append to the file of --summary why there is no answer. Whoever reads it, as a pull request's
    comment, is not to miss it; where the file cannot be written, standard error has it.
    """
    with contextlib.suppress(_Mistake):
        _summarize(given, f"{_shown(given.what)}: {said}")


def _error(said: str) -> str:
    """A sentence for standard error."""
    return f"{_style(sys.stderr)('error:', Ink.LOST)} {visible(said)}"


_EPILOG = """examples:
  fp8lens layers.py:layer --shapes "f8e4m3fn[64,256] f8e4m3fn[128,256] f32[] f32[]" --require-fp8
  fp8lens layers.py:layer --shapes "bf16[4096,4096] bf16[4096,4096]" --against layers.py:in_bf16
  fp8lens train.py:step --shapes "bf16[512@data,64] f32[64@data,64]" --mesh data=8 --reasons
  fp8lens layers.py:layer --args sample --save fp8.json
  fp8lens layers.py:layer --args sample --against fp8.json
  fp8lens dumps/module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt
  fp8lens dumps/ --reasons
  unzip -p dumps.zip module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt | fp8lens -

FILE.py is imported: what it does at its top level, it does here too. The function is compiled and
not run.
exit status: 0; 1 where --require-fp8 does not hold, or where something is worse than the record of
--against; 2 for what cannot be used, and a sentence that says why; 3 where the file, or XLA's
compiler, ended the process before there was an answer.
On a terminal there are colours, unless NO_COLOR is set, and lines as wide as the terminal, but at
least 100 columns.
`python -m fp8lens` is the same command."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with 2 and the message, in which nothing can reach the terminal."""
        super().error(visible(message))  # it repeats what was given


class _Version(argparse.Action):
    """Print the installed version. It is looked up only when this option is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import importlib.metadata  # slow to import

        try:
            version = importlib.metadata.version("fp8lens")
        except importlib.metadata.PackageNotFoundError:
            version = "of a folder that is not installed"
        print(f"fp8lens {version}")
        parser.exit()


def _share(text: str) -> float:
    """A share, as of growth."""
    share = float(text)
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 0.02")
    return share


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "fp8lens",
        description=(
            "Judge the matmuls of a JAX program. For each: what it multiplies, in which type, "
            "who runs it, what is left outside."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        metavar="FILE.py:FUNCTION | DUMP | -",
        help=(
            "a function, compiled for --target, "
            "or a program saved by XLA_FLAGS=--xla_dump_to=FOLDER: its text, gzipped or not, or "
            "the folder, of which the largest compiled program is read; - reads standard input"
        ),
    )
    parser.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", help=f"of the function's arguments: {_EXAMPLE}"
    )
    parser.add_argument(
        "--args",
        metavar="[FILE.py:]FUNCTION",
        help=(
            "a function that returns the arguments: "
            "a tuple of arrays, ShapeDtypeStructs, or pytrees"
        ),
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=DEVICES,...",
        help=(
            "compile for several devices, as in data=8,model=4, and list what they send to each "
            'other; --shapes "bf16[64@data,32]" shards the 64 over data, and 64@(data,model) over '
            "both; the function of --args runs within jax.set_mesh; of a saved program, the "
            "names of its axes"
        ),
    )
    parser.add_argument(
        "--target", help=f"{', '.join(TARGETS)}, or local, the attached GPU (default: H100)"
    )
    parser.add_argument(
        "--gemm",
        choices=GEMM_OPTIONS,
        help=(
            "who may run the matmuls: NVIDIA's library (cublaslt, the default), "
            "kernels that XLA generates (triton), or who is faster, as XLA does unless told "
            "(auto: without a GPU to time them on, the first Triton kernel that compiles)"
        ),
    )
    parser.add_argument(
        "--ledger",
        action="store_true",
        help="list every kernel: what it does, for which matmul, and the bytes it moves",
    )
    parser.add_argument(
        "--reasons",
        action="store_true",
        help=(
            "say why what was lost was lost, and the fix; of a saved program, where its folder has "
            "what XLA's rewriter was given (--xla_dump_hlo_pass_re=gemm-rewriter)"
        ),
    )
    parser.add_argument(
        "--bill",
        action="store_true",
        help=(
            "what the program costs: memory, bytes moved, what FP8 alone needs, what runs again "
            "for jax.checkpoint, what is sent, and the time by the roofline"
        ),
    )
    parser.add_argument(
        "--against",
        metavar="FILE.py:FUNCTION or FILE.json",
        help=(
            "the same beside another function of the same arguments, such as the layer in bf16; or "
            "compare with the record in a JSON file, and exit with 1, and what is worse, if a "
            "matmul lost FP8, a kernel was added, or bytes or memory grew"
        ),
    )
    parser.add_argument(
        "--save",
        metavar="FILE.json",
        help=(
            "write what the program costs into a record, which keeps its other programs; not where "
            "--against names the same record, and something is worse"
        ),
    )
    parser.add_argument(
        "--name",
        help=(
            "the program's name in a record (default: its file, from the record's folder, and its "
            "function)"
        ),
    )
    parser.add_argument(
        "--summary",
        metavar="FILE",
        help=(
            "append what --against says of the record, or why there is no answer, to a file, as "
            "for a pull request's comment"
        ),
    )
    parser.add_argument(
        "--may-grow",
        metavar="SHARE",
        type=_share,
        help=(
            "by which share bytes and memory may grow over the record (default: "
            f"{MAY_GROW}, which is {MAY_GROW:.0%}%)"
        ),
    )
    parser.add_argument(
        "--require-fp8",
        action="store_true",
        help=(
            "exit with 1, and why, if a matmul is not FP8, or if a collective that moves values "
            "sends wide what an FP8 matmul reads, or what was FP8"
        ),
    )
    parser.add_argument(
        "--allow",
        metavar="RULE",
        action="append",
        help=(
            "what --require-fp8 accepts, and may be repeated: a rule of a matmul, such as "
            "not-quantized, which lets a matmul be wide if this is why, or of a collective, such "
            "as gathered-wide; opaque, kernels that cannot be looked into; unscaled, a gradient "
            "that becomes FP8 without a scale"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help=(
            "one JSON object: rows, totals, devices and their mesh, and reasons if asked for; or "
            "what --bill or --against says"
        ),
    )
    parser.add_argument(
        "--debug", action="store_true", help="before an error's sentence, Python's traceback"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; without `argv` the process's own, in another process where it imports a
    file.

    Exit status: 0 with a report; 1 where --require-fp8 does not hold; 2 for what cannot be used,
    and where this fails itself; 3 where that process ended without an answer; as of a shell's other
    commands, 130 when interrupted and 141 where nobody reads on.
    """
    if sys.stdout is None:  # closed: an answer that nobody can read is none
        return 2
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream]
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            # A name may have what the terminal's encoding has not.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            words = sys.argv[1:] if argv is None else list(argv)
            if words[:1] == ["explain"]:
                return _explain(words[1:])
            given = _parser().parse_args(argv)
            if argv is None and re.search(r"\.py(:|$)", given.what):
                return _apart(given)
            return _answer(given)
        finally:
            for stream in streams:
                stream.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _unwritten(error, streams)


def _explain(names: Sequence[str]) -> int:
    """Print the pages of rules, or the names of all where none is given."""
    if not names:
        print("\n".join(every_name()))
        return 0
    try:
        with page(_columns()):
            pages = [explain(name).text(_style(sys.stdout)) for name in names]
    except KeyError as error:
        print(_error(f"{error.args[0]} `fp8lens explain` lists all."), file=sys.stderr)
        return 2
    print("\n\n\n".join(pages))
    return 0


def _unwritten(error: OSError, streams: Iterable[TextIO]) -> int:
    """The exit status where reading or writing failed, and a sentence if somebody may read it."""
    unread = isinstance(error, BrokenPipeError)
    if not unread:
        said = f"reading or writing failed ({error.strerror})."
        with contextlib.suppress(OSError):
            print(_error(said), file=sys.stderr, flush=True)
    for stream in streams:  # else Python writes what is left when it ends, and fails again
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return 141 if unread else 2


def _apart(given: argparse.Namespace) -> int:
    """Run in a process of its own: whatever the file or XLA does, 0 is an answer's status alone."""
    with tempfile.TemporaryDirectory(prefix="fp8lens-") as folder:
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from fp8lens.cli import serve; serve({folder!r})"
        )
        child = subprocess.Popen([sys.executable, "-P", "-c", program, *sys.argv[1:]])
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            status = child.wait()
        except KeyboardInterrupt:  # the child's too
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                child.wait(timeout=5)
            child.kill()
            return 130
        with contextlib.suppress(OSError, ValueError):
            return int(Path(folder, str(child.pid)).read_text())
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    said = (
        f"the file, or XLA's compiler, ended the process ({how}) "
        "before there was an answer: fix the file; report what XLA said above, "
        "or give the process more memory where that was short."
    )
    print(_error(said), file=sys.stderr)
    _summarize_error(given, said)
    return 128 - status if -status in (signal.SIGTERM, signal.SIGINT) else 3


def serve(folder: str) -> None:
    """The process of its own. It leaves the exit status in a file with its number, as nothing that
    it forks does.
    """
    with contextlib.suppress(SystemExit, OSError):  # the file may have put its own print here
        status = main(sys.argv[1:])
        Path(folder, str(os.getpid())).write_text(str(status))
    os._exit(2)
