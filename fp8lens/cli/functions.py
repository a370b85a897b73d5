"""A function of the user's file, compiled."""

import argparse
import contextlib
import importlib
import importlib.util
import inspect as signatures
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fp8lens.cli.mistakes import Mistake, answered, cannot_be_read, nearest, theirs
from fp8lens.cli.shapes import (
    EXAMPLE,
    EXAMPLE_MESH,
    Shape,
    arguments,
    read_mesh,
    read_shapes,
    specs,
)
from fp8lens.hlo.text import counted
from fp8lens.inspection import Inspection, inspect
from fp8lens.targets import attached_gpu, resolve

if TYPE_CHECKING:
    import jax

_FUNCTION = re.compile(r"(.+\.py)(?::(.*))?", re.S)


def named(what: str) -> tuple[str, str] | None:
    """The file and the function that "path/to/file.py:function" names; None where it names none."""
    match = _FUNCTION.fullmatch(what)
    return (match[1], match[2] or "") if match else None


def existing(path: Path) -> Path:
    """The path of a file; a Mistake where there is none."""
    if path.is_file():
        return path
    folder = path if path.is_dir() else path.parent
    beside = [p.name for p in folder.glob("*") if p.suffix in (".py", ".txt", ".hlo", ".gz")]
    kind = "no file: "
    if path.is_dir():
        kind = (
            "a folder without a program that XLA dumped: run yours with XLA_FLAGS=--xla_dump_to="
            "FOLDER, or "
        )
    raise Mistake(
        f"{str(path)!r} is {kind}give a .py file and a function in it, or a saved HLO text"
        f"{nearest(path.name, beside)}."
    )


def compiled(given: argparse.Namespace, what: str, gemm: str) -> Inspection:
    """The function that `what` names, compiled with the other options of the command."""
    file, name = named(what) or ("", "")
    # A mistake in these is told at once: JAX takes seconds.
    shapes = read_shapes(" ".join(given.shapes or ()))
    devices = read_mesh(given.mesh) if given.mesh is not None else None
    if devices is None and any(any(shape.axes) for shape in shapes):
        raise Mistake(f"--shapes: an argument is sharded: add the mesh, as in {EXAMPLE_MESH}.")
    # Not imported yet: the file imports it, and may first set what JAX reads.
    if importlib.util.find_spec("jax") is None:
        raise Mistake(
            "a function is compiled, which needs JAX: pip install 'path/to/the/checkout[jax]'."
        )
    target = given.target or "H100"
    with answered(KeyError, lambda error: f"--target: {error}"):
        resolve(target)
    if attached_gpu() is None:
        # Else the file's first array prints a traceback of JAX's CUDA plugin.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    module = _load(Path(file))
    fn = _function(module, name)
    mesh = _mesh(target, devices)
    args = _arguments(given, module, fn, shapes, mesh)
    how: dict[str, Any] = {"target": target, "gemm": gemm}
    if devices:
        how["mesh_shape"] = devices
        how["in_specs"] = specs(shapes) if given.args is None else None

    from fp8lens.compile.bugs import advice

    with theirs(f"{name} failed", "fix it, or the shapes", advice), _on(mesh):
        return inspect(fn, *args, **how)


# The file -----------------------------------------------------------------------------------------


def _load(path: Path) -> ModuleType:
    """The file, run as a module, of its package if its folder has an __init__.py. What lies beside
    it can be imported, as when it is run itself, and what lies here.
    """
    with cannot_be_read(path):
        path = existing(path).resolve()
    if path.suffix != ".py":
        raise Mistake(f"{path.name!r} is no .py file, which a function is in.")
    name, folder = path.stem, path.parent
    while (folder / "__init__.py").is_file():
        name, folder = f"{folder.name}.{name}", folder.parent
    sys.path[:0] = dict.fromkeys((str(folder), str(path.parent), str(Path.cwd())))
    found = importlib.util.find_spec("jax")
    if found and not found.submodule_search_locations:
        raise Mistake(f"{found.origin} hides JAX, which has its name: rename that file.")
    with theirs(f"{path.name} could not be imported", "it must run to its end when it is imported"):
        if "." in name:
            return importlib.import_module(name)
        # By its path: another module may have its name.
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec  # as it ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(name, module)
        # As it is now: Python's cache takes a file of the same size and second for the same file.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module


def _function(module: ModuleType, name: str) -> Callable:
    """The function of this name in a file; a Mistake where there is none."""
    file = Path(module.__file__ or "").name
    own = {n for n, value in vars(module).items() if _is_function(n, value)}
    if name in own:
        return getattr(module, name)
    missing = f"{file} has no function {name!r}"
    what = missing if name else f"name the function too, as in {file}:function"
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
    if given.args is None:
        args = arguments(shapes)
    else:
        file, _, maker = given.args.rpartition(":")
        make = _function(_load(Path(file)) if file else module, maker)
        args = _made(make, maker, mesh)
        if not isinstance(args, tuple):
            raise Mistake(
                f"--args: {maker}() returned a {type(args).__name__}: "
                "return a tuple, the function's arguments."
            )
    try:
        signature = signatures.signature(fn)
    except ValueError:  # there is none to read: JAX will say
        return args
    try:
        signature.bind(*args)
    except TypeError:
        raise Mistake(
            f"{getattr(fn, '__name__', 'it')}{signature} cannot be called with "
            f"{counted(len(args), 'argument')}: give a shape for each, as in {EXAMPLE}, "
            "or --args with a function that returns the tuple of arguments."
        ) from None
    return args


def _made(make: Callable, maker: str, mesh: "jax.sharding.Mesh | None") -> Any:
    """What the function of --args returns. It can name the mesh's axes in shardings."""
    fix = "fix it"
    if mesh is not None:
        fix += (
            "; the devices of --mesh are not here and hold no arrays: give shapes, "
            'jax.ShapeDtypeStruct(shape, dtype, sharding=jax.P("data"))'
        )
    with theirs(f"{maker} failed", fix):
        try:
            with _on(mesh):
                return make()
        except Exception:
            # It may make arrays, which JAX then tries to make on the mesh's devices.
            with contextlib.suppress(Exception):
                return make()
            raise


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
