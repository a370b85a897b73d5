"""A function of the user's file, compiled."""

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect as signatures
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from fp8lens.cli.mistakes import Mistake, answered, cannot_be_read, nearest, theirs
from fp8lens.cli.shapes import (
    EXAMPLE,
    Shape,
    check_axes,
    notes,
    parse_shapes,
    read_mesh,
    read_shapes,
    specs,
)
from fp8lens.hlo.text import counted
from fp8lens.inspection import Inspection, inspect
from fp8lens.targets import attached_gpu, check_platforms, resolve

if TYPE_CHECKING:
    import jax

_FUNCTION = re.compile(r"(.+\.py)(?::(.*))?", re.S)
_BY_DOTS = re.compile(r"^\s*from\s+\.", re.M)


def named(what: str) -> tuple[str, str] | None:
    """The file and the function that "path/to/file.py:function" names; None where it names none."""
    match = _FUNCTION.fullmatch(what)
    return (match[1], match[2] or "") if match else None


def existing(path: Path) -> Path:
    """The path of a file; a Mistake where there is none."""
    if path.is_file():
        return path
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise Mistake(
            f"there is no folder {str(folder)!r}: "
            "give a path from here to a .py file or a saved HLO text."
        )
    kind = "a folder" if path.is_dir() else "no file"
    beside = (p.name for p in folder.iterdir() if p.suffix in (".py", ".txt", ".hlo", ".gz"))
    raise Mistake(
        f"{str(path)!r} is {kind}: give a .py file and a function in it, or a saved HLO text"
        f"{nearest(path.name, beside)}."
    )


def compiled(given: argparse.Namespace, what: str, gemm: str) -> Inspection:
    """The function that `what` names, compiled with the other options of the command."""
    file, name = named(what) or ("", "")
    # A mistake in these is told at once: JAX takes seconds.
    shapes = read_shapes(" ".join(given.shapes or ()))
    devices = read_mesh(given.mesh) if given.mesh is not None else None
    check_axes(shapes, devices)
    target = given.target or "H100"
    jax = None
    with contextlib.suppress(ImportError):
        # Not imported yet: the file imports it, and may first set what JAX reads.
        jax = importlib.util.find_spec("jax")
    if not jax:
        raise Mistake(
            "a function is compiled, which needs JAX: pip install 'path/to/the/checkout[jax]'."
        )
    with answered(RuntimeError, str):
        check_platforms(os.environ.get("JAX_PLATFORMS"))
    with answered((KeyError, RuntimeError), lambda error: f"--target: {error}"):
        resolve(target)
        if attached_gpu() is None:
            # Else the file's first array prints a traceback of JAX's CUDA plugin.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        module = _load(Path(file))
        if target == "local":
            from fp8lens.compile.process import require_gpu

            require_gpu()
    fn = _function(module, name)

    from fp8lens.compile.bugs import advice

    mesh = _mesh(target, devices)
    args = _arguments(given, module, fn, shapes, mesh)
    how: dict[str, Any] = {"target": target, "gemm": gemm}
    if devices:
        how["mesh_shape"] = devices
        how["in_specs"] = specs(shapes) if given.args is None else None
    with (
        _on(mesh),
        theirs(f"{name} failed", "fix it, or the shapes", advice),
    ):
        return inspect(fn, *args, **how)


# The file -----------------------------------------------------------------------------------------


class _AsWritten(importlib.machinery.SourceFileLoader):
    """Compiles the file each time: Python reuses old bytecode if a file was changed within the same
    second and kept its size.
    """

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _load(path: Path) -> ModuleType:
    """The file, run as a module, of its package if it is in one. What lies beside it can be
    imported, as when it is run itself, and what lies here.
    """
    with cannot_be_read(path):
        path = existing(path).resolve()
        if path.suffix != ".py":
            raise Mistake(f"{path.name!r} is no .py file, which a function is in.")
        packages, folder = _packages(path)
    beside = (str(folder), str(path.parent), str(Path.cwd()))
    sys.path[:0] = [one for one in dict.fromkeys(beside) if one not in sys.path]
    with theirs(f"{path.name} could not be imported", "it must run to its end when it is imported"):
        if packages:
            return importlib.import_module(".".join([*packages, path.stem]))
        loader = _AsWritten(path.stem, str(path))
        spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
        assert spec  # as there is a loader
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        loader.exec_module(module)
    return module


def _packages(path: Path) -> tuple[tuple[str, ...], Path]:
    """The packages that a file is in, the outermost first, and the folder of that: folders that
    have an __init__.py; or for a file that imports by dots, those on the way to it from here.
    """
    names: tuple[str, ...] = ()
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names = (folder.name, *names)
        folder = folder.parent
    here = Path.cwd().resolve()
    by_dots = _BY_DOTS.search(path.read_text(encoding="utf-8", errors="replace"))
    if not names and by_dots and path.is_relative_to(here):
        return path.parent.relative_to(here).parts, here
    return names, folder


def _function(module: ModuleType, name: str) -> Callable:
    file = Path(module.__file__ or "").name
    own = {n for n, value in vars(module).items() if _is_function(n, value)}
    if name in own:
        return getattr(module, name)
    if not name:
        what = f"name the function too, as in {file}:function"
    elif name in vars(module):
        what = f"{name!r} in {file} is no function, but {type(vars(module)[name]).__name__!r}"
    else:
        what = f"{file} has no function {name!r}"
    raise Mistake(f"{what}{nearest(name, own)}.")


def _is_function(name: str, value: Any) -> bool:
    """Whether something in a module may be compiled."""
    return callable(value) and not name.startswith("__") and not signatures.isclass(value)


# Its arguments ------------------------------------------------------------------------------------


def _arguments(
    given: argparse.Namespace,
    module: ModuleType,
    fn: Callable,
    shapes: list[Shape],
    mesh: "jax.sharding.Mesh | None",
) -> tuple:
    """What the function is compiled with, of --shapes or --args."""
    if given.args is not None:
        file, _, maker = given.args.rpartition(":")
        make = _function(_load(Path(file)) if file else module, maker)
        args = _made(make, maker, mesh)
        if not isinstance(args, tuple):
            raise Mistake(
                f"--args: {maker}() returned a {type(args).__name__}: "
                "return a tuple, the function's arguments."
            )
    else:
        for note in notes(shapes):
            print(f"note: --shapes: {note}", file=sys.stderr)
        args = parse_shapes(" ".join(given.shapes or ()))
    try:
        signature = signatures.signature(fn)
    except ValueError:  # there is none to read: JAX will say
        return args
    try:
        signature.bind(*args)
    except TypeError:
        what = f"with {counted(len(args), 'argument')}"
        if given.args is None and given.shapes is None:
            what = "without arguments, and there is neither --shapes nor --args"
        raise Mistake(
            f"{getattr(fn, '__name__', 'it')}{signature} cannot be called {what}: "
            f"give a shape for each, as in {EXAMPLE}, "
            "or --args with a function that returns the tuple of arguments."
        ) from None
    return args


def _made(make: Callable, maker: str, mesh: "jax.sharding.Mesh | None") -> Any:
    """What the function of --args returns. It can name the mesh's axes in shardings."""
    if mesh is None:
        with theirs(f"{maker} failed", "fix it"):
            return make()
    import jax

    fix = (
        "fix it; the devices of --mesh are not here and hold no arrays: give shapes, "
        'jax.ShapeDtypeStruct(shape, dtype, sharding=jax.P("data"))'
    )
    with theirs(f"{maker} failed", fix):
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


# The mesh -----------------------------------------------------------------------------------------


def _mesh(target: str, devices: Mapping[str, int] | None) -> "jax.sharding.Mesh | None":
    """The devices of --mesh."""
    if not devices:
        return None
    from fp8lens.compile.meshes import mesh

    with answered((ValueError, RuntimeError), lambda error: f"--mesh: {error}"):
        return mesh(target, devices)


def _on(mesh: "jax.sharding.Mesh | None") -> contextlib.AbstractContextManager:
    """Within it the axes of --mesh can be named in shardings."""
    if mesh is None:
        return contextlib.nullcontext()
    import jax

    return jax.set_mesh(mesh)


def as_option(mesh: Mapping[str, int]) -> str:
    """A mesh as --mesh has it."""
    return ",".join(f"{name}={devices}" for name, devices in mesh.items())
