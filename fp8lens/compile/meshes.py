"""Which devices a program is compiled for: a mesh of chips that are not here, or a caller's own."""

import functools
import importlib
import importlib.metadata
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from fp8lens.compile.bugs import ASSEMBLER
from fp8lens.compile.call import Call, is_for_compiling
from fp8lens.compile.process import check_process, choose_platform, installed
from fp8lens.targets import Target, resolve


@functools.lru_cache(maxsize=32)
def make_mesh(target: Target, mesh_shape: tuple[tuple[str, int], ...], cudnn_patch: int) -> Mesh:
    """A mesh of `target`s with these axes, (name, devices) each; the same for the same arguments.
    `cudnn_patch` is as for `Target.text_proto`. Raises RuntimeError where XLA's CUDA compiler is
    not installed, or does not take the description.
    """
    from jax.experimental import topologies

    choose_platform()
    sizes = [size for _, size in mesh_shape]
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=target.text_proto(cudnn_patch),
        topology=f"1x1x{math.prod(sizes)}",
    )
    if not installed("jax-cuda13-plugin") or not installed("jax-cuda13-pjrt"):
        needs = f"compiling for {target.name} needs XLA's CUDA compiler, which "
        if sys.platform != "linux":
            needs += "has no wheels for this system: use a Linux container, Google Colab, or WSL."
        else:
            needs += f"is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt {ASSEMBLER}"
        raise RuntimeError(needs)
    try:
        topology = describe()
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        # JAX was used before, and its CUDA plugin gave up for want of a GPU. Now that the CPU is
        # chosen, it starts.
        importlib.import_module("jax_plugins.xla_cuda13").initialize()
        topology = describe()
    return topologies.make_mesh(topology, tuple(sizes), tuple(name for name, _ in mesh_shape))


def mesh(
    target: str | Target = "H100", shape: Mapping[str, int] | Sequence[int] | None = None
) -> Mesh:
    """A mesh of chips that this machine does not have, for functions with their own mesh or
    shardings.

    `shape` is as `aot_compile`'s `mesh_shape`: {"data": 4, "model": 2}; without it, one device. The
    axes are Auto. The same arguments give the same mesh. Use it in the places where the real
    program uses the mesh of `jax.make_mesh`: in a NamedSharding, in `jax.shard_map`, in
    `jax.set_mesh`. Nothing can be computed or stored on it.

    Raises KeyError for an unknown chip, TypeError or ValueError for anything that is not a target
    or a shape, and RuntimeError if no CUDA compiler is installed.

    Example:

        >>> from fp8lens import mesh
        >>> dict(mesh("H100", {"data": 4, "model": 2}).shape)
        {'data': 4, 'model': 2}
    """
    if getattr(target, "name", target) == "local":
        raise ValueError(
            'a mesh of the attached GPU is jax.make_mesh\'s; here name a chip, as in target="H100".'
        )
    check_process()
    return make_mesh(resolve(target), axes(shape), 0)


def callers_mesh(call: Call, chip: Target) -> Mesh | None:
    """The compile-only mesh that the arguments are on, or that jax.set_mesh has set."""
    leaves = jax.tree.leaves((call.args, call.kwargs))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    for mesh in (*meshes, jax.sharding.get_mesh()):
        if not is_for_compiling(mesh) or not mesh.axis_names:
            continue
        device = mesh.devices.flat[0]
        if device.device_kind != chip.device:
            raise elsewhere(device.device_kind, chip, "")
        return mesh
    return None


def axes_of(compiled: Any) -> dict[str, int] | None:
    """The axes of the mesh that a `jax.stages.Compiled` is for, as its arguments and results name
    them, with the devices of each. None where they name none, or meshes with other axes or in
    another order of the devices: then nobody knows which one a collective is of.
    """
    if not hasattr(compiled, "input_shardings"):  # compiled in another process
        return None
    found = set()
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            mesh = sharding.mesh
            devices = tuple(device.id for device in mesh.devices.flat)
            found.add((tuple(mesh.shape.items()), devices))
    if len(found) != 1:
        return None
    ((named, _),) = found
    return dict(named)


def check_devices(compiled: Any, chip: Target, doubt: ValueError) -> None:
    """Raise ValueError where a `jax.stages.Compiled` is for other devices than `chip`; `doubt` is
    what JAX said when it was lowered.
    """
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    kinds = {device.device_kind for sharding in shardings for device in sharding.device_set}
    if kinds - {chip.device}:
        raise elsewhere(", ".join(sorted(kinds)), chip, doubt) from doubt


def elsewhere(devices: str, chip: Target, said: Any) -> ValueError:
    """The error for a mesh of other `devices` than `chip`; with what JAX `said`, if it did."""
    message = (
        f"a mesh or sharding is on {devices}, and the program is for {chip.name}: {chip.device}. "
        f'Make the mesh with fp8lens.mesh({chip.name!r}, {{"data": 8}}), which needs no devices.'
    )
    return ValueError(f"{message} JAX said: {said}" if said else message)


def axes(mesh_shape: Mapping[str, int] | Sequence[int] | None) -> tuple[tuple[str, int], ...]:
    """(name, devices) of each axis of `aot_compile`'s `mesh_shape`; one device without it. Raises
    ValueError for what is no shape.
    """
    if mesh_shape is None:
        return (("x", 1),)
    # Of more than three device counts some are lost here, which is refused below.
    named = (
        mesh_shape
        if isinstance(mesh_shape, Mapping)
        else dict(zip("xyz", mesh_shape, strict=False))
    )
    are_counts = all(isinstance(n, int) and n > 0 for n in named.values())
    if not are_counts or not 0 < len(named) == len(mesh_shape):
        raise ValueError(
            "mesh_shape must be {axis name: devices} or up to three device counts, "
            f'such as {{"data": 8}} or (8,); got {mesh_shape!r}.'
        )
    return tuple(named.items())
