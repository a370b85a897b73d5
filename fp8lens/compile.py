"""Compile a JAX function for a GPU that is not here.

XLA's CUDA compiler needs a description of the chip, not the chip. JAX reaches it through a compile-only topology: what
comes back is the same `jax.stages.Compiled` as on the GPU, with the same optimized HLO, except that it cannot be run.
"""

import ctypes.util
import functools
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fp8lens.autotune import AS_TEXT, check_tile, choices
from fp8lens.targets import TARGETS, Target, attached_gpu, resolve

GEMM_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cublaslt": {"xla_gpu_enable_triton_gemm": False},
    "triton": {"xla_gpu_enable_triton_gemm": True, "xla_gpu_cublas_fallback": False},
    "auto": {},
}
# Errors of XLA's own making, and the way around them.
_COMPILER_BUGS = {
    "A cycle is detected": "XLA fused an amax into the matmul whose own FP8 conversion waits for it. Put the result "
                           "through jax.lax.optimization_barrier before taking its amax, or use an earlier step's.",
    "Failed to serialize StableHLO": "JAX 0.12 cannot hand a dot's ANY_F8 algorithm to XLA: leave the precision out.",
    "has_aux_output": "XLA's FP8 call cannot also return the input of a fused gelu. Put that input through "
                      "jax.lax.optimization_barrier before gelu, and gelu stays outside.",
}
_ASSEMBLER = "nvidia-nvjitlink nvidia-nvvm nvidia-cuda-runtime"


def _installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def gpu_available() -> bool:
    """Whether functions can run on an attached GPU: a driver for CUDA 13, a GPU, and CUDA's libraries."""
    platforms = os.environ.get("JAX_PLATFORMS", "") or (jax.config.jax_platforms or "")
    if platforms not in ("", "cuda", "gpu") or attached_gpu() is None:
        return False
    # Only asked where there is a GPU: to look for a library starts other programs.
    return _installed("nvidia-cublas") or ctypes.util.find_library("cublasLt") is not None


def choose_platform() -> None:
    """Have JAX compute on the CPU where there is no GPU to use and nobody has chosen.

    Else JAX's start-up of the CUDA plugin prints a traceback, and loses the compile-only topology with it. With a GPU,
    JAX is left alone.
    """
    if not jax.config.jax_platforms and not gpu_available():
        jax.config.update("jax_platforms", "cpu")


@functools.lru_cache(maxsize=32)
def _mesh(target: Target, mesh_shape: tuple[tuple[str, int], ...], cudnn_patch: int = 0) -> jax.sharding.Mesh:
    from jax.experimental import topologies

    choose_platform()
    sizes = [size for _, size in mesh_shape]
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=target.text_proto(cudnn_patch),
        topology=f"1x1x{prod(sizes)}",
    )
    have_compiler = _installed("jax-cuda13-plugin") and _installed("jax-cuda13-pjrt")
    try:
        try:
            topology = describe()
        except RuntimeError as error:
            if not have_compiler or "not implemented" not in str(error):
                raise
            # JAX was used before, and its CUDA plugin gave up for want of a GPU. Now that the CPU is chosen, it starts.
            importlib.import_module("jax_plugins.xla_cuda13").initialize()
            topology = describe()
    except (RuntimeError, ValueError) as error:
        if have_compiler:
            raise RuntimeError(f"XLA did not take the description of {target.name!r}: {error}") from error
        needs = f"compiling for {target.name} needs XLA's CUDA compiler, which "
        if sys.platform != "linux":
            needs += "has no wheels for this system: use a Linux container, Google Colab, or WSL."
        else:
            needs += f"is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt {_ASSEMBLER}"
        raise RuntimeError(needs) from error
    return topologies.make_mesh(topology, tuple(sizes), tuple(name for name, _ in mesh_shape))


def _shapes(args: Sequence[Any], in_specs: Any, mesh: jax.sharding.Mesh | None) -> tuple:
    """The arguments as ShapeDtypeStructs, placed on `mesh` where there is one."""

    def convert(path, leaf, spec):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])} is {leaf!r}, a {type(leaf).__name__}, which "
                "is neither an array nor a jax.ShapeDtypeStruct. Give jnp.asarray(value, dtype) or "
                "jax.ShapeDtypeStruct(shape, dtype); bind what is not traced with functools.partial."
            )
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        own = getattr(leaf, "sharding", None)
        if spec is None:
            spec = own.spec if isinstance(own, NamedSharding) and own.mesh.axis_names else PartitionSpec()
        unknown = {axis for axis in jax.tree.leaves(tuple(spec))} - set(mesh.axis_names) if mesh else ()
        if unknown:
            raise ValueError(
                f"argument {path[0].idx} is sharded over {sorted(unknown)}, but the mesh has the axes "
                f'{mesh.axis_names}; name them in mesh_shape, as in mesh_shape={{"data": 8}}.'
            )
        sharding = NamedSharding(mesh, spec) if mesh else None
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))

    leaves, treedef = jax.tree_util.tree_flatten_with_path(args)
    if in_specs is None:
        specs = [None] * len(leaves)
    else:
        is_spec = lambda s: s is None or isinstance(s, PartitionSpec)
        tree = jax.tree.map(lambda s, a: jax.tree.map(lambda _: s, a), tuple(in_specs), args, is_leaf=is_spec)
        specs = jax.tree.leaves(tree, is_leaf=is_spec)
    return jax.tree.unflatten(treedef, [convert(p, leaf, s) for (p, leaf), s in zip(leaves, specs, strict=True)])


def aot_compile(
    fn: Callable,
    *args: Any,
    target: str | Target = "H100",
    gemm: str = "cublaslt",
    mesh_shape: Mapping[str, int] | Sequence[int] | None = None,
    in_specs: Sequence[Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    autotune: str | os.PathLike | None = None,
) -> jax.stages.Compiled:
    """Compile `fn(*args)` for `target`, whether or not such a chip is here.

    `args` are arrays or `jax.ShapeDtypeStruct`s, or pytrees of them; only shapes and dtypes are read. `target` is a
    name in `TARGETS`, a `Target`, or "local", the attached GPU: then the result can also be called.

    `gemm` is who may run the matmuls: "cublaslt" (NVIDIA's library, with the FP8 epilogues), "triton" (kernels XLA
    generates), or "auto" (XLA's default: it times both on the chip. With no chip to time on, it takes the first Triton
    tile that compiles, which is not what a GPU would choose). `compiler_options` are XLA debug options, merged over
    those of `gemm`.

    `autotune` is what XLA chose on a GPU like `target`: the path of a file that `recording` had it write, or its text.
    Then the program is the one that GPU chose. XLA reads only what the same JAX release wrote. A program with a kernel
    that is not in there is a LookupError, unless the options set xla_gpu_require_complete_aot_autotune_results False.

    `mesh_shape` asks for a sharded program on that many compile-only devices: {"data": 4, "model": 2}, or (8,), whose
    axes are named "x", "y", "z". `in_specs` has a PartitionSpec for each argument (or for each of its leaves; None is
    replicated); without it, arguments keep the spec of their own NamedSharding.

    Raises KeyError for an unknown chip, TypeError or ValueError for arguments or options XLA cannot take, and
    RuntimeError where no CUDA compiler is installed, each naming the mend.
    """
    local = getattr(target, "name", target) == "local"
    if local:
        require_gpu()
    else:
        target = resolve(target)
    if gemm not in GEMM_OPTIONS:
        raise ValueError(f"gemm must be one of {', '.join(map(repr, GEMM_OPTIONS))}; got {gemm!r}.")
    if not callable(fn):
        raise TypeError(f"the first argument must be a function, got {fn!r}.")
    options = {**GEMM_OPTIONS[gemm], **(compiler_options or {})}
    patch, files = choices(autotune, target) if autotune is not None and not local else (0, {})
    if options.get("xla_gpu_override_gemm_autotuner"):
        check_tile(options["xla_gpu_override_gemm_autotuner"])
    if in_specs is not None and len(in_specs) != len(args):
        raise ValueError(f"in_specs has {len(in_specs)} entries for {len(args)} arguments; give one for each.")

    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    if local:
        if mesh_shape is not None:
            raise ValueError('a mesh_shape is for compile-only devices; name a chip, as in target="H100".')
        if autotune is not None:
            raise ValueError('the attached GPU chooses for itself: autotune is for a named chip, as in target="H100".')
        return jitted.lower(*_shapes(args, None, None)).compile(compiler_options=options)
    mesh = _mesh(target, _axes(mesh_shape), patch)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        lowered = jitted.lower(*_shapes(args, in_specs, mesh))
        for name, result in files.items():
            Path(folder, name).write_text(result)
        if files:
            options = {"xla_gpu_require_complete_aot_autotune_results": True, **AS_TEXT, **options}
            options["xla_gpu_per_fusion_autotune_cache_dir"] = folder
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if files and (kernel := re.search("No cached config found for HLO instr: (.*?), kind", str(error))):
                raise LookupError(
                    f"autotune: of the {len(files)} recorded choices XLA can use none for {kernel[1]}. It looks one up "
                    "by its own release, the chip and the kernel's instructions: record this function with these "
                    f"shapes and options on {target.device} with JAX {jax.__version__}."
                ) from error
            for sign, note in _COMPILER_BUGS.items():
                if sign in str(error):
                    error.add_note(note)
            if not any(sign in str(error) for sign in ("No PTX compilation provider", "libdevice", "nvvm")):
                raise
            raise RuntimeError(
                f"XLA made PTX for a kernel but found nothing to assemble it with: pip install {_ASSEMBLER}, or put a "
                f"CUDA 13 toolkit's ptxas on PATH. XLA said: {error}"
            ) from error


def require_gpu() -> None:
    if not gpu_available():
        TARGETS["local"]  # raises where no GPU is attached
        raise RuntimeError(
            f"a GPU is attached ({attached_gpu()[0]}), but JAX runs on the CPU here. Install CUDA's libraries with "
            "pip install 'jax[cuda13]', unset JAX_PLATFORMS, and start Python again."
        )


def _axes(mesh_shape: Mapping[str, int] | Sequence[int] | None) -> tuple[tuple[str, int], ...]:
    if mesh_shape is None:
        return (("x", 1),)
    named = isinstance(mesh_shape, Mapping)
    axes = tuple(mesh_shape.items()) if named else tuple(zip("xyz", mesh_shape))
    if not 0 < len(axes) == len(mesh_shape) or not all(isinstance(n, int) and n > 0 for _, n in axes):
        raise ValueError(
            f'mesh_shape must be {{axis name: devices}} or up to three device counts, such as {{"data": 8}} or (8,); '
            f"got {mesh_shape!r}."
        )
    return axes


def run(fn: Callable, *args: Any, gemm: str = "cublaslt") -> Any:
    """`fn(*args)` for its numbers, compiled: on the attached GPU where there is one, else on the CPU.

    On the CPU XLA has no FP8 matmul: it computes the same expression in wider types, so the numbers are those of the
    program as written, not of a tensor core.
    """
    if gpu_available():
        return aot_compile(fn, *args, target="local", gemm=gemm)(*args)
    return jax.jit(fn)(*args)
