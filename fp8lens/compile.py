"""Compile a JAX function for a GPU that is not here.

XLA's CUDA compiler needs a description of the chip, not the chip. JAX reaches it through a
compile-only topology: what comes back is the same `jax.stages.Compiled` as on the GPU, with the
same optimized HLO, except that it cannot be run.
"""

import copy
import ctypes.util
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import io
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

try:
    import jax
except ModuleNotFoundError as error:
    raise ImportError(
        f"compiling needs JAX ({error}): pip install 'path/to/the/checkout[jax]'"
    ) from error
import numpy as np
from jax._src import xla_bridge
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8lens.autotune import AS_TEXT, check_tile, choices
from fp8lens.rules import COMPILER_BUGS, FATAL_BUT
from fp8lens.targets import GEMM_OPTIONS, TARGETS, Target, attached_gpu, check_platforms, resolve

_DEVICES = 1 << 16  # more than any machine has: each takes memory here
_ASSEMBLER = "nvidia-nvjitlink nvidia-nvvm nvidia-cuda-runtime"


# The process that was the first to use JAX, as far as is known here: it, or one that it was forked
# from.
_USED_IN: list[int] = []


def _before_fork() -> None:
    if not _USED_IN and xla_bridge.backends_are_initialized():
        _USED_IN.append(os.getpid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
    if (
        xla_bridge.backends_are_initialized()
        and os.path.isdir("/proc/self/task")
        and (len(os.listdir("/proc/self/task")) == threading.active_count())
    ):
        _USED_IN.append(
            0
        )  # no process's number: JAX has begun, and has no threads but Python's own


def _check_process() -> None:
    """Refuse what would hang, or fail obscurely, before anything is traced or lowered."""
    if _USED_IN and _USED_IN[0] != os.getpid():
        raise RuntimeError(
            "this process was forked from one that had used JAX, whose threads it lacks: it would"
            ' wait for them without end. Start it with multiprocessing.get_context("spawn").'
        )
    check_platforms(jax.config.jax_platforms)


class CompilerDied(RuntimeError):
    """XLA's compiler ended its process, or went over a limit: what ended it, its last words, and
    the mend.
    """


@dataclass(frozen=True)
class Isolated:
    """A program that another process compiled: its optimized HLO, for whatever here takes a
    Compiled.
    """

    text: str = field(repr=False)

    def as_text(self) -> str:
        return self.text


def _installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def gpu_available() -> bool:
    """Whether functions can run on an attached GPU: a driver for CUDA 13, a GPU, and CUDA's
    libraries.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "") or (jax.config.jax_platforms or "")
    if platforms not in ("", "cuda", "gpu") or attached_gpu() is None:
        return False
    # Only asked where there is a GPU: to look for a library starts other programs.
    return _installed("nvidia-cublas") or ctypes.util.find_library("cublasLt") is not None


def choose_platform() -> None:
    """Have JAX compute on the CPU where there is no GPU to use and nobody has chosen.

    Else JAX's start-up of the CUDA plugin prints a traceback, and loses the compile-only topology
    with it. With a GPU, JAX is left alone.
    """
    if not jax.config.jax_platforms and not gpu_available():
        jax.config.update("jax_platforms", "cpu")


@functools.lru_cache(maxsize=32)
def _mesh(target: Target, mesh_shape: tuple[tuple[str, int], ...], cudnn_patch: int) -> Mesh:
    from jax.experimental import topologies

    choose_platform()
    sizes = [size for _, size in mesh_shape]
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=target.text_proto(cudnn_patch),
        topology=f"1x1x{math.prod(sizes)}",
    )
    have_compiler = _installed("jax-cuda13-plugin") and _installed("jax-cuda13-pjrt")
    try:
        try:
            topology = describe()
        except RuntimeError as error:
            if not have_compiler or "not implemented" not in str(error):
                raise
            # JAX was used before, and its CUDA plugin gave up for want of a GPU. Now that the CPU
            # is chosen, it starts.
            importlib.import_module("jax_plugins.xla_cuda13").initialize()
            topology = describe()
    except (RuntimeError, ValueError) as error:
        if have_compiler:
            raise RuntimeError(
                f"XLA did not take the description of {target.name!r}: {error}"
            ) from error
        needs = f"compiling for {target.name} needs XLA's CUDA compiler, which "
        if sys.platform != "linux":
            needs += "has no wheels for this system: use a Linux container, Google Colab, or WSL."
        else:
            needs += f"is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt {_ASSEMBLER}"
        raise RuntimeError(needs) from error
    return topologies.make_mesh(topology, tuple(sizes), tuple(name for name, _ in mesh_shape))


def mesh(
    target: str | Target = "H100", shape: Mapping[str, int] | Sequence[int] | None = None
) -> Mesh:
    """A mesh of `target`s that are not here, for functions with a mesh or shardings of their own.

    `shape` is as `aot_compile`'s `mesh_shape`: {"data": 4, "model": 2}; without it, one device. The
    axes are Auto. Asked again for the same, it is the same mesh. Use it where the real program has
    `jax.make_mesh`'s: in a NamedSharding, in `jax.shard_map`, in `jax.set_mesh`. Nothing can be
    computed or stored on it.

    Raises KeyError for an unknown chip, TypeError or ValueError for what is no target or shape, and
    RuntimeError where no CUDA compiler is installed.
    """
    if getattr(target, "name", target) == "local":
        raise ValueError(
            'a mesh of the attached GPU is jax.make_mesh\'s; here name a chip, as in target="H100".'
        )
    _check_process()
    return _mesh(resolve(target), _axes(shape), 0)


def aot_compile(
    fn: Callable,
    *args: Any,
    target: str | Target = "H100",
    gemm: str = "cublaslt",
    mesh_shape: Mapping[str, int] | Sequence[int] | None = None,
    in_specs: Sequence[Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    autotune: str | os.PathLike | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    isolate: bool | Mapping[str, float] = False,
    **kwargs: Any,
) -> jax.stages.Compiled | Isolated:
    """Compile `fn(*args, **kwargs)` for `target`, whether or not such a chip is here.

    `args` and `kwargs` are arrays or `jax.ShapeDtypeStruct`s, or pytrees of them; only shapes and
    dtypes are read. Those that `static_argnums` or `static_argnames` name, as for `jax.jit`, may be
    anything, and the program depends on their values. An argument of `fn` with the name of an
    option here can be given by position or with functools.partial. `target` is a name in `TARGETS`,
    a `Target`, or "local", the attached GPU: then the result can also be called.

    `fn` may be jitted: by `jax.jit`, `nnx.jit` or `eqx.filter_jit`. Then it has static arguments of
    its own, and what is no array is given to it as it is. Arrays inside a callable that is a
    pytree, such as a module, are arguments of the program. The result is always JAX's, without
    nnx's or Equinox's way of calling it.

    `gemm` is who may run the matmuls: "cublaslt" (NVIDIA's library, with the FP8 epilogues),
    "triton" (kernels XLA generates), or "auto" (XLA's default: it times both on the chip. With no
    chip to time on, it takes the first Triton tile that compiles, which is not what a GPU would
    choose). `compiler_options` are XLA debug options, merged over those of `gemm`.

    `autotune` is what XLA chose on a GPU like `target`: the path of a file that `recording` had it
    write, or its text. Then the program is the one that GPU chose. XLA reads only what the same JAX
    release wrote. A program with a kernel that is not in there is a LookupError, unless the options
    set xla_gpu_require_complete_aot_autotune_results False.

    `mesh_shape` asks for a sharded program on that many compile-only devices: {"data": 4, "model":
    2}, or (8,), whose axes are named "x", "y", "z". `in_specs` has a PartitionSpec for each of
    `args` (or for each of its leaves; None is replicated); without it, arguments keep the spec of
    their own NamedSharding.

    A mesh of your own, from `fp8lens.mesh`, needs no `mesh_shape`: it may be in the shardings of
    arguments, in `jax.set_mesh`, or inside `fn`. Then JAX alone says how an argument without a
    sharding is laid out.

    XLA ends the process where it meets what it did not expect. With `isolate` it compiles in a
    fresh one, two seconds later: what ends that is a CompilerDied here, and the result has
    `as_text` alone. {"seconds": 60, "gigabytes": 4} are limits, of time and of memory; either may
    be left out.

    JAX's compilation cache is neither read nor written: it cannot hold programs for a chip that is
    not here.

    Raises KeyError for an unknown chip, TypeError or ValueError for arguments, meshes or options
    that XLA cannot take, and RuntimeError where no CUDA compiler is installed, where JAX_PLATFORMS
    asks for a GPU and there is none, or in a process forked from one that had used JAX, each naming
    the mend; CompilerDied, with `isolate` and where XLA is known to abort; and what `fn` raises.
    """
    _check_process()
    chip = _chip(target, mesh_shape, autotune)
    limits = _limits(isolate, chip)
    options = _options(gemm, compiler_options)
    call = _call(fn, args, kwargs, in_specs, static_argnums, static_argnames)
    if not _USED_IN:
        _USED_IN.append(os.getpid())
    if chip is None:
        return _compile(call.placed().lower(), options)
    patch, files = choices(autotune, chip) if autotune is not None else (0, {})
    lowered, doubt = _lower(call, chip, mesh_shape, patch)
    compiled = _compile(lowered, options, chip, files, patch, limits)
    if doubt and limits is None:
        _check_devices(compiled, chip, doubt)
    return compiled


def _chip(target: str | Target, mesh_shape: Any, autotune: Any) -> Target | None:
    """None for the attached GPU, which need not be one whose rates are recorded here."""
    if getattr(target, "name", target) != "local":
        return resolve(target)
    require_gpu()
    if mesh_shape is not None:
        raise ValueError(
            'a mesh_shape is for compile-only devices; name a chip, as in target="H100".'
        )
    if autotune is not None:
        raise ValueError(
            "the attached GPU chooses for itself: autotune is for a named chip, as in"
            ' target="H100".'
        )
    return None


def _limits(isolate: bool | Mapping[str, float], chip: Target | None) -> dict[str, float] | None:
    """None where nothing is isolated."""
    limits = dict(isolate) if isinstance(isolate, Mapping) else {}
    if (
        not (isolate in (True, False) or limits)
        or not set(limits) <= {"seconds", "gigabytes"}
        or not all(isinstance(n, (int, float)) and n > 0 for n in limits.values())
    ):
        raise ValueError(
            'isolate must be True, or limits such as {"seconds": 60, "gigabytes": 4}; got'
            f" {isolate!r}."
        )
    if isolate and chip is None:
        raise ValueError(
            'isolate: the attached GPU compiles in this process; name a chip, as in target="H100".'
        )
    return limits if isolate else None


def _options(gemm: str, compiler_options: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(gemm, str) or gemm not in GEMM_OPTIONS:
        raise ValueError(f"gemm must be one of {', '.join(map(repr, GEMM_OPTIONS))}; got {gemm!r}.")
    if not isinstance(compiler_options or {}, Mapping):
        raise TypeError(
            "compiler_options must be a mapping of XLA's options to values, got"
            f" {compiler_options!r}."
        )
    options = {**GEMM_OPTIONS[gemm], **(compiler_options or {})}
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, (str, bool, int, float, bytes)):
            raise TypeError(
                f"compiler_options: {name!r} is {value!r}; XLA takes a name, and a string, bool or"
                " number."
            )
        good = FATAL_BUT.get(name)
        if good and re.fullmatch(r"\s*[+-]?\d+\s*", str(value)) and int(value) not in good:
            raise ValueError(
                f"compiler_options: {name} is {value!r}, and XLA aborts: give {good[0]} to"
                f" {good[-1]}."
            )
    if options.get("xla_gpu_override_gemm_autotuner"):
        check_tile(options["xla_gpu_override_gemm_autotuner"])
    return options


# What to lower: a function that has `lower`, and its arguments.


class _Call(NamedTuple):
    """A jitted function and what to lower it with: `specs` has for each of `args` None, a
    PartitionSpec, or a tree of them; `static` the positions and names of arguments that are left as
    they are.
    """

    jitted: Any
    args: tuple
    kwargs: dict[str, Any]
    specs: tuple
    static: frozenset = frozenset()

    def placed(self, mesh: Mesh | None = None, everywhere: bool = False) -> "_Call":
        """With shapes for arrays. What has a spec is placed on `mesh`; with `everywhere` the rest
        too, replicated.
        """
        place = functools.partial(_placed, mesh=mesh, everywhere=everywhere)
        if type(self.jitted).__module__.startswith("flax.") and self.specs == (None,) * len(
            self.specs
        ):
            from flax import (
                nnx,
            )  # whose modules may share weights, which a map over them as pytrees would part

            graph, state = nnx.split((self.args, self.kwargs))
            args, kwargs = nnx.merge(graph, jax.tree.map(functools.partial(place, None, ""), state))
        else:
            args = tuple(
                a if at in self.static else _placed_tree(place, at, a, spec)
                for at, (a, spec) in enumerate(zip(self.args, self.specs, strict=True))
            )
            kwargs = {
                name: a if name in self.static else _placed_tree(place, name, a, None)
                for name, a in self.kwargs.items()
            }
        return self._replace(args=args, kwargs=kwargs)

    def lower(self, mesh: Mesh | None = None) -> jax.stages.Lowered:
        with jax.set_mesh(mesh) if mesh is not None else nullcontext():
            try:
                lowered = self.jitted.lower(*self.args, **self.kwargs)
            except RuntimeError as error:
                if "Unknown backend: 'gpu'" in str(error):
                    error.add_note(
                        "The function calls Python back (jax.debug.print, jax.pure_callback,"
                        " io_callback), for which JAX asks for a GPU: leave that out to compile"
                        " without one."
                    )
                raise
        while not isinstance(lowered, jax.stages.Lowered):
            lowered = lowered.lowered  # nnx.jit wraps it
        return lowered


def _call(
    fn: Any, args: tuple, kwargs: dict[str, Any], in_specs: Sequence[Any] | None,
    static_argnums: int | Sequence[int] | None, static_argnames: str | Iterable[str] | None,
) -> _Call:  # fmt: skip
    if not callable(fn):
        raise TypeError(f"the first argument must be a function, got {fn!r}.")
    if in_specs is not None and len(in_specs) != len(args):
        raise ValueError(
            f"in_specs has {len(in_specs)} entries for {len(args)} arguments; give one for each."
        )
    fn, bound, kwargs = _unbound(fn, kwargs)
    args, specs = (*bound, *args), (*(None for _ in bound), *(in_specs or (None for _ in args)))
    static = _static(fn, len(args), static_argnums, static_argnames)
    if hasattr(fn, "lower") and static:
        raise TypeError(
            "static_argnums, static_argnames: the function is jitted already; name its static"
            " arguments there, as in jax.jit(fn, static_argnums=1)."
        )
    if isinstance(fn, jax.stages.Wrapped):
        return _Call(fn, args, kwargs, specs)
    if not hasattr(fn, "lower"):
        _check_arrays(args, kwargs, static)
    if hasattr(fn, "lower") or any(map(_is_array, jax.tree.leaves(fn))):
        return _opened(fn, args, kwargs, specs)
    jitted = jax.jit(fn, static_argnums=static_argnums, static_argnames=static_argnames)
    return _Call(jitted, args, kwargs, specs, static)


def _unbound(fn: Any, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """Of a jitted function that was bound, to an object or by functools.partial: the function, and
    what it is bound to. What was bound would else be constants of the program; and a bound method's
    `lower` forgets its object.
    """
    if inspect.ismethod(fn) and hasattr(fn.__func__, "lower"):
        return fn.__func__, (fn.__self__,), kwargs
    if isinstance(fn, functools.partial) and (
        inspect.ismethod(fn.func) or hasattr(fn.func, "lower")
    ):
        inner, bound, kwargs = _unbound(fn.func, {**fn.keywords, **kwargs})
        if hasattr(inner, "lower"):
            return inner, (*bound, *fn.args), kwargs
    return fn, (), kwargs


def _static(fn: Any, count: int, argnums: Any, argnames: Any) -> frozenset:
    """Positions and names of static arguments. Each follows from the other, as in jax.jit."""
    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
    if not nums and not names:
        return frozenset()
    try:
        known = [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # a built-in has no signature
        known = []
    nums = {n + count if n < 0 else n for n in nums}
    return frozenset(
        {
            *nums,
            *names,
            *(known.index(name) for name in names if name in known),
            *(known[n] for n in nums if 0 <= n < len(known)),
        }
    )


def _is_array(leaf: Any) -> bool:
    """Whether it is traced by its shape and dtype. Not a type, such as np.float32, nor NumPy's
    scalars: those may be static arguments of a jitted function, and where they are not JAX traces
    them too.
    """
    return (
        hasattr(leaf, "shape")
        and hasattr(leaf, "dtype")
        and not isinstance(leaf, (type, np.generic))
    )


def _check_arrays(args: tuple, kwargs: dict[str, Any], static: frozenset) -> None:
    for name, argument in (*enumerate(args), *kwargs.items()):
        for path, leaf in (
            jax.tree_util.tree_leaves_with_path(argument) if name not in static else ()
        ):
            if not _is_array(leaf) and not isinstance(leaf, np.generic):
                options = [
                    *inspect.signature(aot_compile).parameters,
                    "fused",
                    "allow",
                    "count",
                    "min_flops_share",
                ]
                close = difflib.get_close_matches(name, options, 1) if isinstance(name, str) else []
                meant = f"did you mean the option {close[0]}? The " if close else ""
                raise TypeError(
                    f"{meant}argument {name}{jax.tree_util.keystr(path)} is {leaf!r}, a"
                    f" {type(leaf).__name__}, which is neither an array nor a jax.ShapeDtypeStruct."
                    " Give jnp.asarray(value, dtype) or jax.ShapeDtypeStruct(shape, dtype); name"
                    " what is not traced in static_argnums or static_argnames; of a module with"
                    " functions in it, give eqx.filter_jit(fn)."
                )


def _opened(fn: Any, args: tuple, kwargs: dict[str, Any], specs: tuple) -> _Call:
    """A function of the arrays alone that are in `fn` and its arguments; all else stays inside.

    For a callable that is a pytree, whose weights jax.jit would make constants of the program. And
    for `eqx.filter_jit`'s, whose own `lower` takes a ShapeDtypeStruct for a static argument, but
    here meets arrays.
    """
    leaves, tree = jax.tree.flatten((fn, args, kwargs))
    arrays = {at: leaf for at, leaf in enumerate(leaves) if _is_array(leaf)}

    def call(arrays):
        fn, args, kwargs = jax.tree.unflatten(
            tree, [arrays.get(at, leaf) for at, leaf in enumerate(leaves)]
        )
        return [leaf for leaf in jax.tree.leaves(fn(*args, **kwargs)) if _is_array(leaf)]

    name = getattr(fn, "__name__", None)  # no string where Equinox wraps a module
    call.__name__ = name if isinstance(name, str) else type(fn).__name__
    each = [
        *_specs(fn, None),
        *(s for a, spec in zip(args, specs) for s in _specs(a, spec)),
        *_specs(kwargs, None),
    ]
    given = {at: each[at] for at in arrays} if any(spec is not None for spec in each) else None
    return _Call(jax.jit(call), (arrays,), {}, (given,))


def _specs(argument: Any, specs: Any) -> list[PartitionSpec | None]:
    """One for each leaf, from one, or a tree of them, for an argument."""
    found: list[PartitionSpec | None] = []
    jax.tree.map(
        lambda s, a: found.extend([s] * len(jax.tree.leaves(a))),
        specs,
        argument,
        is_leaf=lambda s: s is None or isinstance(s, PartitionSpec),
    )
    return found


def _placed_tree(place: Callable, name: int | str, argument: Any, specs: Any) -> Any:
    leaves, tree = jax.tree.flatten(argument)
    return jax.tree.unflatten(
        tree,
        [
            place(spec, name, leaf)
            for leaf, spec in zip(leaves, _specs(argument, specs), strict=True)
        ],
    )


def _placed(
    spec: PartitionSpec | None, name: int | str, leaf: Any, mesh: Mesh | None, everywhere: bool
) -> Any:
    """An array as a ShapeDtypeStruct, on `mesh` where there is a spec for it; anything else as it
    is.
    """
    if not _is_array(leaf):
        return leaf
    own = getattr(leaf, "sharding", None)
    if spec is None and isinstance(own, NamedSharding) and own.mesh.axis_names:
        spec = own.spec
    if spec is None and everywhere:
        spec = PartitionSpec()
    placed = mesh is not None and spec is not None
    unknown = (
        {axis for axis in jax.tree.leaves(tuple(spec))} - set(mesh.axis_names) if placed else ()
    )
    if unknown:
        raise ValueError(
            f"argument {name} is sharded over {sorted(unknown)}, but the mesh has the axes "
            f'{mesh.axis_names}; name them in mesh_shape, as in mesh_shape={{"data": 8}}.'
        )
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(
        leaf.shape,
        dtype,
        sharding=NamedSharding(mesh, spec) if placed else None,
        weak_type=getattr(leaf, "weak_type", False),
    )


# Where: on a mesh of ours, or of the caller's. What JAX says of a function whose mesh or shardings
# are not ours:
_MESHES = re.compile("mesh|device|sharding|memory kind", re.I)


def _lower(
    call: _Call, chip: Target, mesh_shape: Mapping[str, int] | Sequence[int] | None, patch: int
) -> tuple[jax.stages.Lowered, ValueError | None]:
    """`call` for `chip`; and, where it was lowered for a mesh that the function has in it, what JAX
    said before: whether that mesh is of `chip` can only be read when it is compiled.
    """
    theirs = _callers_mesh(call, chip) if mesh_shape is None else None
    if theirs is not None:
        if patch:
            raise ValueError(
                "autotune: recorded choices are for a mesh made here: mesh_shape, as in"
                ' {"data": 8}.'
            )
        return call.placed(theirs).lower(theirs), None
    ours = _mesh(chip, _axes(mesh_shape), patch)
    placed = call.placed(ours, everywhere=True)
    try:
        return placed.lower(ours), None
    except ValueError as error:
        if patch or any(spec is not None for spec in call.specs) or not _MESHES.search(str(error)):
            raise
        again = _lowered_or_why_not(call, ours if mesh_shape is not None else None)
        if isinstance(again, Exception):
            if str(again) == str(error):
                raise  # the function's own
            raise ValueError(
                f"the function needs another mesh than it is compiled for, {dict(ours.shape)} of"
                f" {chip.name}. Give "
                f'mesh_shape, as in {{"data": 8}}; a mesh of its own must be '
                f'fp8lens.mesh({chip.name!r}, {{"data": 8}}). JAX said: {error}'
            ) from error
        return again, error


def _lowered_or_why_not(call: _Call, mesh: Mesh | None) -> jax.stages.Lowered | Exception:
    """Where only what the function says itself places anything."""
    try:
        return call.placed(mesh).lower(mesh)
    except Exception as error:
        return error


def _callers_mesh(call: _Call, chip: Target) -> Mesh | None:
    """The compile-only mesh that the arguments are on, or that jax.set_mesh has set."""
    shardings = [
        getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((call.args, call.kwargs))
    ]
    for mesh in (
        *(s.mesh for s in shardings if isinstance(s, NamedSharding)),
        jax.sharding.get_mesh(),
    ):
        device = (
            mesh.devices.flat[0]
            if isinstance(mesh, Mesh) and mesh.size and mesh.axis_names
            else None
        )
        if device is not None and device.client.runtime_type == "compile_only_runtime":
            if device.device_kind != chip.device:
                raise _elsewhere(device.device_kind, chip, "")
            return mesh
    return None


def _check_devices(compiled: jax.stages.Compiled, chip: Target, doubt: ValueError) -> None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    kinds = {device.device_kind for sharding in shardings for device in sharding.device_set}
    if kinds - {chip.device}:
        raise _elsewhere(", ".join(sorted(kinds)), chip, doubt) from doubt


def _elsewhere(devices: str, chip: Target, said: Any) -> ValueError:
    return ValueError(
        f"a mesh or sharding is on {devices}, and the program is for {chip.name}: {chip.device}."
        " Make the mesh with "
        f'fp8lens.mesh({chip.name!r}, {{"data": 8}}), which needs no devices.'
        + f" JAX said: {said}"
        * bool(said)
    )


def _axes(mesh_shape: Mapping[str, int] | Sequence[int] | None) -> tuple[tuple[str, int], ...]:
    if mesh_shape is None:
        return (("x", 1),)
    if isinstance(mesh_shape, Mapping):
        axes = tuple(mesh_shape.items())
    else:
        axes = tuple(zip("xyz", mesh_shape)) if isinstance(mesh_shape, (list, tuple)) else ()
    if not 0 < len(axes) == len(mesh_shape) or not all(
        isinstance(name, str) and isinstance(n, int) and n > 0 for name, n in axes
    ):
        raise ValueError(
            "mesh_shape must be {axis name: devices} or up to three device counts, such as"
            f' {{"data": 8}} or (8,); got {mesh_shape!r}.'
        )
    if math.prod(n for _, n in axes) > _DEVICES or len(axes) > 32:
        raise ValueError(
            f"mesh_shape has {math.prod(n for _, n in axes):,} devices on {len(axes)} axes: the"
            f" limit is {_DEVICES:,} on 32."
        )
    return axes


# From lowered to compiled. Nothing here reads the function or the mesh again.


def _compile(
    lowered: jax.stages.Lowered,
    options: Mapping[str, Any],
    chip: Target | None = None,
    recorded: Mapping[str, str] = MappingProxyType({}),
    patch: int = 0,
    limits: Mapping[str, float] | None = None,
) -> jax.stages.Compiled | Isolated:
    """With what a GPU like `chip` chose where it was `recorded`, as files for XLA to look in; with
    `limits`, apart.
    """
    with (
        _explained(chip, recorded),
        _cache_left_alone() as never,
        tempfile.TemporaryDirectory() as folder,
    ):
        for name, result in recorded.items():
            Path(folder, name).write_text(result)
        if recorded:
            options = {
                "xla_gpu_require_complete_aot_autotune_results": True,
                **AS_TEXT,
                **options,
                "xla_gpu_per_fusion_autotune_cache_dir": folder,
            }
        options = {**never, **options}
        if limits is not None:
            return _apart(lowered, options, chip, patch, **limits)
        if chip is not None and _may_abort(lowered, options):
            _apart(
                lowered,
                {k: v for k, v in options.items() if not k.startswith("xla_dump")},
                chip,
                patch,
            )
        return lowered.compile(compiler_options=options)


# Apart: in a fresh process, as XLA ends the one that it fails in.

_THROUGH = set(
    "abs add multiply maximum minimum clamp convert reshape transpose call select broadcast_in_dim "
    "dot_general".split()
)


def _may_abort(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> bool:
    """Whether it has something at which XLA was seen to abort: flags of the assembler's, a size of
    ten digits, a call of a kernel of XLA's own; or where there is FP8, an amax of a matmul's rows,
    columns or tiles, which XLA may take for the whole result's.
    """
    text = lowered.compiler_ir("stablehlo").operation.get_asm(large_elements_limit=16)
    if "xla_gpu_ptx_compiler_extra_flags" in options or re.search(
        r"[<x]\d{10}|custom_call @__cu", text
    ):
        return True
    functions = {}
    for function in text.split("func.func ")[1:] if "xf8E" in text else ():
        head, _, rest = function.partition("(")
        functions[head.rpartition("@")[2]] = rest.partition("\n  }")[0]
    for body in functions.values():
        if "stablehlo.maximum across" not in body:
            continue
        made = {
            name: (op, rest)
            for name, op, rest in re.findall(
                r"^ *(%\w+)(?::\d+)? = (?:stablehlo\.|func\.)?(\w+)(.*)", body, re.M
            )
        }
        for first in re.findall(
            r"^ *%\w+ = stablehlo\.reduce\((%\w+) init: .* applies stablehlo\.maximum .*->"
            r" tensor<\d",
            body,
            re.M,
        ):
            todo, seen, ops = [first], set(), set()
            while todo:
                op, rest = made.get(name := todo.pop(), ("", ""))
                if name not in seen and op in _THROUGH:
                    callee = re.match(r" @([\w.]+)", rest)
                    ops |= (
                        {op, "dot_general"}
                        if callee and "dot_general" in functions.get(callee[1], "")
                        else {op}
                    )
                    todo += re.findall(r"%\w+", rest) if op != "dot_general" else []
                seen.add(name)
            if "dot_general" in ops and ops & {"abs", "maximum", "call"}:
                return True
    return False


class _Taken(Exception):
    """What JAX would have handed to XLA."""


class _Taker:
    """A backend that compiles nothing."""

    def __init__(self, backend: Any):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def compile(
        self, module: Any, executable_devices: Any = None, compile_options: Any = None, **_: Any
    ) -> None:
        raise _Taken(module, list(executable_devices), compile_options)

    compile_and_load = compile


def _apart(
    lowered: jax.stages.Lowered,
    options: Mapping[str, Any],
    chip: Target,
    patch: int,
    seconds: float | None = None,
    gigabytes: float | None = None,
) -> Isolated:
    lowering = copy.copy(lowered._lowering)
    lowering.compile_args = {
        **lowering.compile_args,
        "backend": _Taker(lowering.compile_args["backend"]),
    }
    try:
        lowering.compile(compiler_options=options)
    except _Taken as taken:
        module, devices, build = taken.args
    if (kinds := {device.device_kind for device in devices}) != {chip.device}:
        raise _elsewhere(", ".join(sorted(kinds)), chip, "")
    module.operation.write_bytecode(file=(code := io.BytesIO()))
    asked = (
        chip,
        patch,
        devices[0].client.device_count(),
        [device.id for device in devices],
        code.getvalue(),
        build.SerializeAsString(),
        gigabytes,
    )
    program = f"import sys; sys.path[:] = {sys.path!r}; from fp8lens.compile import serve; serve()"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            input=pickle.dumps(asked),
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise CompilerDied(
            f"XLA's compiler did not end within {seconds:g} s, and was ended."
        ) from None
    if done.returncode or not done.stdout:
        raise CompilerDied(
            _last_words(done.returncode, done.stderr.decode(errors="replace"), gigabytes)
        )
    text, error = pickle.loads(done.stdout)
    if error:
        raise jax.errors.JaxRuntimeError(error)
    return Isolated(text)


def _last_words(status: int, log: str, gigabytes: float | None) -> str:
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    fatal = re.search(r"^F\d{4} \S+ +\d+ (.*)", log, re.M)
    said = (
        fatal[1]
        if fatal
        else next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "nothing")
    )
    mend = next((note for sign, note in COMPILER_BUGS.items() if sign in said), "")
    short = status == -signal.SIGKILL or re.search(
        "bad_alloc|MemoryError|out of memory|Cannot allocate|pthread_create", log
    )
    if short or gigabytes and said == "nothing":  # where its memory ends it may die without a word
        mend = (
            f"It {'needs' if short else 'may need'} more memory than "
            f"{f'{gigabytes:g} GB' if gigabytes else 'there is'}: give smaller shapes."
        )
    return f"XLA's compiler died ({how}). Its last words: {said[:400]}. " + (
        mend
        or "It is a bug of XLA's: report it with this program at https://github.com/openxla/xla/issues."
    )


def serve() -> None:
    """In a process of its own: compile what `_apart` asks for on standard input, and answer on
    standard output.
    """
    import resource

    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    out = os.dup(1)
    os.dup2(2, 1)
    chip, patch, count, numbers, code, build, gigabytes = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    devices = {device.id: device for device in _mesh(chip, (("x", count),), patch).devices.flat}
    if gigabytes:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9),) * 2)
    try:
        with mlir.make_ir_context():
            made = devices[numbers[0]].client.compile(
                ir.Module.parse(code),
                executable_devices=xla_client.DeviceList(tuple(devices[n] for n in numbers)),
                compile_options=xla_client.CompileOptions.ParseFromString(build),
            )
        answer = "\n\n".join(module.to_string() for module in made.hlo_modules()), ""
    except jax.errors.JaxRuntimeError as error:
        answer = "", str(error)
    with os.fdopen(out, "wb") as stream:
        pickle.dump(answer, stream)
    os._exit(0)  # what XLA does when Python ends is of no interest


@contextmanager
def _cache_left_alone() -> Iterator[dict[str, Any]]:
    """JAX's cache on disk would keep a program for a chip that is not here, and fail to read it the
    next time. Within, nothing is written; with the options that this gives, nothing is found.

    JAX asks only once whether its cache is on: turned off here and there, it stays on, or off, for
    the whole process. The bound on what is kept counts for each compile, and by this name for this
    thread alone.
    """
    if not jax.config.jax_compilation_cache_dir:
        yield {}
        return
    from jax._src import config

    with config.persistent_cache_min_compile_time_secs(math.inf):
        yield {
            "xla_dump_emitter_re": "^$"
        }  # part of what a program is looked up by, and nobody else's


@contextmanager
def _explained(chip: Target | None, recorded: Mapping[str, str]) -> Iterator[None]:
    """XLA's errors with what to do about them."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        _, _, missing = str(error).partition("No cached config found for HLO instr: ")
        if recorded and ", kind" in missing:
            raise LookupError(
                f"autotune: of the {len(recorded)} recorded choices XLA can use none for"
                f" {missing.partition(', kind')[0]}. It looks one up by its own release, the chip"
                " and the kernel's instructions: record this function with these shapes and"
                f" options on {chip.device} with JAX {jax.__version__}."
            ) from error
        for sign, note in COMPILER_BUGS.items():
            if sign in str(error):
                error.add_note(note)
        if not any(
            sign in str(error) for sign in ("No PTX compilation provider", "libdevice", "nvvm")
        ):
            raise
        raise RuntimeError(
            "XLA made PTX for a kernel but found nothing to assemble it with: pip install"
            f" {_ASSEMBLER}, or put a CUDA 13 toolkit's ptxas on PATH. XLA said: {error}"
        ) from error


def require_gpu() -> None:
    if not gpu_available():
        TARGETS["local"]  # raises where no GPU is attached
        raise RuntimeError(
            f"a GPU is attached ({attached_gpu()[0]}), but JAX runs on the CPU here. Install CUDA's"
            " libraries with pip install 'jax[cuda13]', unset JAX_PLATFORMS, and start Python"
            " again."
        )


def run(fn: Callable, *args: Any, gemm: str = "cublaslt") -> Any:
    """`fn(*args)` for its numbers, compiled: on the attached GPU where there is one, else on the
    CPU.

    On the CPU XLA has no FP8 matmul: it computes the same expression in wider types, so the numbers
    are those of the program as written, not of a tensor core.
    """
    _check_process()
    if gpu_available():
        return aot_compile(fn, *args, target="local", gemm=gemm)(*args)
    return jax.jit(fn)(*args)
