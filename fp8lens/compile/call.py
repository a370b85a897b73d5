"""What is lowered of a call: which function, with which arguments, placed where."""

import functools
import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8lens.compile.bugs import WITHOUT_A_GPU, add_notes
from fp8lens.hlo.parse import is_exported, no_program_yet


class Call(NamedTuple):
    """A function and what to lower it with: `specs` has for each of `args` None, a PartitionSpec,
    or a tree of them. It is jitted, or else the first of `args` and `is_open`: then the program
    gets the arrays alone that are in it and in the other arguments.
    """

    jitted: Any
    args: tuple
    kwargs: dict[str, Any]
    specs: tuple
    is_open: bool = False

    def placed(self, mesh: Mesh | None = None, everywhere: bool = False) -> "Call":
        """With shapes for arrays. What has a spec is placed on `mesh`; with `everywhere` the rest
        too, replicated.
        """
        place = functools.partial(_placed, mesh=mesh, everywhere=everywhere)
        without_specs = all(spec is None for spec in self.specs)
        if without_specs and type(self.jitted).__module__.startswith("flax."):
            # nnx's modules may share weights, which a map over them as pytrees would part.
            from flax import nnx

            graph, state = nnx.split((self.args, self.kwargs))
            args, kwargs = nnx.merge(graph, jax.tree.map(functools.partial(place, None, ""), state))
            return self._replace(args=args, kwargs=kwargs)

        def each(spec: Any, name: int | str, argument: Any) -> Any:
            return jax.tree.map(functools.partial(place, spec, name), argument)

        args = tuple(
            jax.tree.map(
                lambda spec, part, at=at: each(spec, at, part),
                specs,
                argument,
                is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec),
            )
            for at, (argument, specs) in enumerate(
                zip(self.args, self.specs, strict=True), start=-1 if self.is_open else 0
            )
        )
        kwargs = {name: each(None, name, argument) for name, argument in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs)

    def lower(self, mesh: Mesh | None = None) -> jax.stages.Lowered:
        """Lower the function; with a mesh, as within jax.set_mesh(mesh)."""
        jitted, args, kwargs = self.jitted, self.args, self.kwargs
        if self.is_open:
            jitted, args, kwargs = _opened(*args, **kwargs)
        with jax.set_mesh(mesh) if mesh is not None else nullcontext():
            try:
                lowered = jitted.lower(*args, **kwargs)
            except RuntimeError as error:
                add_notes(error, WITHOUT_A_GPU)
                raise
        while not isinstance(lowered, jax.stages.Lowered):
            lowered = lowered.lowered  # nnx.jit wraps it
        return lowered


def make_call(
    fn: Any, args: tuple, kwargs: dict[str, Any], in_specs: Sequence[Any] | None,
    static_argnums: int | Sequence[int] | None, static_argnames: str | Iterable[str] | None,
) -> Call:  # fmt: skip
    """What `aot_compile` lowers for these arguments and options of its own.

    Raises TypeError for what is no function; ValueError where
    `in_specs` has not one entry for each of `args`.
    """
    if is_exported(fn):
        fn, args, kwargs = _of_exported(fn, args, kwargs)
    if fix := no_program_yet(fn):
        raise TypeError(f"got {type(fn).__name__}: {fix}")
    if not callable(fn) or hasattr(fn, "as_text"):
        raise TypeError(
            f"give a function and its arguments, to compile it; got {type(fn).__name__}."
        )
    if in_specs is not None and len(in_specs) != len(args):
        raise ValueError(
            f"in_specs has {len(in_specs)} entries for {len(args)} arguments; give one for each."
        )
    # What a jitted function was bound to would else be constants of the program; and a bound
    # method's `lower` forgets its object.
    bound: tuple = ()
    if isinstance(fn, functools.partial) and hasattr(fn.func, "lower"):
        fn, bound, kwargs = fn.func, fn.args, {**fn.keywords, **kwargs}
    if inspect.ismethod(fn) and hasattr(fn.__func__, "lower"):
        fn, bound = fn.__func__, (fn.__self__, *bound)
    specs = (*(None for _ in bound), *(in_specs or (None for _ in args)))
    args = (*bound, *args)
    if hasattr(fn, "lower") and (static_argnums is not None or static_argnames is not None):
        raise TypeError(
            "static_argnums, static_argnames: the function is jitted already; "
            "name its static arguments there, as in jax.jit(fn, static_argnums=1)."
        )
    if isinstance(fn, jax.stages.Wrapped):
        return Call(fn, args, kwargs, specs)
    if hasattr(fn, "lower") or any(map(_is_array, jax.tree.leaves(fn))):
        return Call(None, (fn, *args), kwargs, (None, *specs), is_open=True)
    jitted = jax.jit(fn, static_argnums=static_argnums, static_argnames=static_argnames)
    return Call(jitted, args, kwargs, specs)


def _of_exported(
    exported: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, tuple, dict[str, Any]]:
    """What compiles an exported function, and its arguments: where none are given, the shapes that
    it was exported with. TypeError where these are no numbers, or where it was exported for another
    platform.
    """
    if "cuda" not in exported.platforms:
        raise TypeError(
            f"got Exported for {' and '.join(exported.platforms)}, not for CUDA: export it with "
            'platforms=["cuda"].'
        )
    if args or kwargs:
        return exported.call, args, kwargs
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    if not all(isinstance(size, int) for shape in shapes for size in shape.shape):
        raise TypeError("got Exported with symbolic shapes: give its arguments too.")
    return exported.call, *jax.tree.unflatten(exported.in_tree, shapes)


def _is_array(leaf: Any) -> bool:
    """Whether it is traced by its shape and dtype. Not a type, such as np.float32, nor NumPy's
    scalars: those may be static arguments of a jitted function, and where they are not JAX traces
    them too.
    """
    if isinstance(leaf, (type, np.generic)):
        return False
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _opened(fn: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """A jitted function of the arrays alone that are in `fn` and its arguments, and these arrays;
    all else stays inside.

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
    return jax.jit(call), (arrays,), {}


def is_for_compiling(mesh: Any) -> TypeGuard[Mesh]:
    """Whether a mesh is of devices that are not here."""
    if not isinstance(mesh, Mesh) or not mesh.size:
        return False
    return mesh.devices.flat[0].client.runtime_type == "compile_only_runtime"


def _agree(own: NamedSharding, mesh: Mesh) -> bool:
    """Whether `mesh` has the axes of an argument's own mesh, and where that is made for compiling
    alone, its order of devices. One device says nothing of many, nor does an array that every
    device has.
    """
    theirs = own.mesh
    if theirs.size == 1 or all(axes is None for axes in own.spec):
        return True
    divided = [[axis for axis in of.shape.items() if axis[1] > 1] for of in (theirs, mesh)]
    if not is_for_compiling(theirs):
        return divided[0] == divided[1]
    numbers = [[device.id for device in of.devices.flat] for of in (theirs, mesh)]
    return divided[0] == divided[1] and numbers[0] == numbers[1]


def _placed(
    spec: PartitionSpec | None, name: int | str, leaf: Any, *, mesh: Mesh | None, everywhere: bool
) -> Any:
    """An array as a ShapeDtypeStruct, on `mesh` where there is a spec for it; anything else as it
    is.
    """
    if not _is_array(leaf):
        return leaf
    own = getattr(leaf, "sharding", None)
    if spec is None and isinstance(own, NamedSharding) and own.mesh.axis_names:
        if mesh is not None and not _agree(own, mesh):
            raise ValueError(
                f"argument {name} is on the mesh {dict(own.mesh.shape)}, and the program is "
                f"compiled for {dict(mesh.shape)}: put all arguments on one mesh, with one order "
                "of devices; mesh_shape, or --mesh, has its axes."
            )
        spec = own.spec
    if spec is None and everywhere:
        spec = PartitionSpec()
    sharding = None
    if mesh is not None and spec is not None:
        if unknown := set(jax.tree.leaves(tuple(spec))) - set(mesh.axis_names):
            raise ValueError(
                f"argument {name} is sharded over {sorted(unknown)}, but the mesh has the axes "
                f'{mesh.axis_names}; name them in mesh_shape, as in mesh_shape={{"data": 8}}.'
            )
        sharding = NamedSharding(mesh, spec)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    weak_type = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=weak_type)
