"""Compile a JAX function for a GPU that is not here.

XLA's CUDA compiler needs a description of the chip, not the chip. JAX reaches it through a compile-only topology: what
comes back is the same `jax.stages.Compiled` as on the GPU, with the same optimized HLO, except that it cannot be run.
"""

import base64
import ctypes.util
import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from helpers.targets import TARGETS, Target, attached_gpu, resolve

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


# With no GPU to use, JAX's start-up of the CUDA plugin prints a traceback into the first output, and loses the
# compile-only topology with it. So the choice is made here, before the first array. With a GPU, JAX is left alone.
if not jax.config.jax_platforms and not gpu_available():
    jax.config.update("jax_platforms", "cpu")


@functools.lru_cache(maxsize=32)
def _mesh(target: Target, mesh_shape: tuple[tuple[str, int], ...], cudnn_patch: int = 0) -> jax.sharding.Mesh:
    from jax.experimental import topologies

    sizes = [size for _, size in mesh_shape]
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=target.text_proto(cudnn_patch),
        topology=f"1x1x{int(np.prod(sizes))}",
    )
    have_compiler = _installed("jax-cuda13-plugin") and _installed("jax-cuda13-pjrt")
    try:
        try:
            topology = describe()
        except RuntimeError as error:
            if not have_compiler or "not implemented" not in str(error):
                raise
            # JAX was used before this module was imported, and its CUDA plugin gave up for want of a GPU. Now that the
            # platform is set, it starts.
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


_TILE_FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_ctas", "num_stages")


def _check_tile(text: str) -> None:
    """Refuse a forced Triton tile that would abort the process: XLA checks it with a fatal assertion."""
    pairs = re.findall(r"(\w+)\s*:\s*(\w+)", text)
    fields = dict(pairs)
    good = re.fullmatch(r"\s*(\w+\s*:\s*\w+[\s,]*)*", text) and len(fields) == len(pairs)
    good = good and set(_TILE_FIELDS) <= set(fields) <= {*_TILE_FIELDS, "split_k", "is_tma_allowed"}
    numbers = [int(fields[f]) if fields[f].isdigit() else 0 for f in _TILE_FIELDS] if good else [0]
    if not all(n > 0 for n in numbers) or any(n & (n - 1) for n in numbers[:5]):
        raise ValueError(
            f"xla_gpu_override_gemm_autotuner: XLA would abort on {text!r}. Give each of {', '.join(_TILE_FIELDS)} "
            "once, all but num_stages powers of two, as in "
            "'block_m: 64 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3'."
        )


# A choice as XLA writes it. Since JAX 0.11 XLA has another format by default, which holds only the hash of what a
# choice is looked up by, and whose choices of cuBLASLt count for one CUDA version only; an option keeps this one.
_CHOICE = re.compile(
    r'^results {\n  device: "(.*)"\n  hlo: "(.*)"\n  result {\n((?:    .*\n)*)  }\n  version: (\d+)\n}\n', re.M
)
_AS_TEXT = {"xla_gpu_use_new_autotune_cache_format": False} if jax.__version_info__ >= (0, 11) else {}


def recording(path: str | os.PathLike) -> dict[str, Any]:
    """Compiler options with which the attached GPU's compiler writes what it chose to `path`, for `autotune`.

    For `target="local"`: where XLA has nothing to time, it writes no file. The file holds every choice that the process
    has made with these options. Raises ValueError for a name that XLA would not fill with text.
    """
    if Path(path).suffix not in (".txt", ".textproto", ".pbtxt"):
        raise ValueError(f"XLA writes text only to a name that ends in .txt, .textproto or .pbtxt; got {str(path)!r}.")
    return {**_AS_TEXT, "xla_gpu_dump_autotune_results_to": os.path.abspath(path)}


def _choices(autotune: str | os.PathLike, target: Target) -> tuple[int, dict[str, str]]:
    """The recorded choices as files of a folder that XLA looks in, and the cuDNN patch release they are filed under.

    Once found, a choice stays with XLA for the whole process, under the chip, cuDNN's version and the instructions. The
    patch release is one that no cuDNN has, and no other text: so only the compiles that ask for a text see its choices.
    """
    text = str(autotune)
    if "\n" not in text:
        text = Path(text).read_text(encoding="utf-8", errors="replace")
    choices, rest = _CHOICE.findall(text), re.sub("^#.*", "", _CHOICE.sub("", text), flags=re.M).strip()
    if rest != "version: 3" or not choices:
        raise ValueError(
            f"autotune: these are not XLA's autotuning results in text: {rest[:60]!r}. Record them with the options of "
            "recording(path); each is then results { device hlo result version }, after a line 'version: 3'."
        )
    patch = 1 + int(hashlib.sha256(text.encode()).hexdigest()[:5], 16)
    (major, minor), bandwidth = target.compute_capability, target.memory_bandwidth / 1e9
    chip = f"CUDA: {major}.{minor}, Cores: {target.sms}"
    key = f"{chip}, GPU clock: {target.clock_ghz:g} GHz, Memory bandwidth: {bandwidth:.0f} GB/s, L2 cache: "
    key += f"{target.l2_bytes / 2**20:g} MB, DNN version: {target.cudnn[0]}.{target.cudnn[1]}.{patch}"
    files = {}
    for device, hlo, result, version in choices:
        # What tells chips apart. A driver gives slightly other clocks, bandwidths and caches than the data sheet.
        theirs = re.match(r"(.*), GPU clock: .* Memory bandwidth: (\d+) GB/s", device)
        if not theirs or theirs[1] != chip or not 0.8 < int(theirs[2]) / bandwidth < 1.25:
            raise ValueError(f"autotune: recorded on {device!r}, and {target.name} is another chip: {key!r}.")
        hlo = hlo.encode().decode("unicode_escape").encode("latin-1")
        name = f"<key model='{key}', hlo='".encode() + hlo + f"', version={version}>".encode()
        files[base64.urlsafe_b64encode(hashlib.sha256(name).digest()).decode().strip("=") + ".textproto"] = result
    return patch, files


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
        _require_gpu()
    else:
        target = resolve(target)
    if gemm not in GEMM_OPTIONS:
        raise ValueError(f"gemm must be one of {', '.join(map(repr, GEMM_OPTIONS))}; got {gemm!r}.")
    if not callable(fn):
        raise TypeError(f"the first argument must be a function, got {fn!r}.")
    options = {**GEMM_OPTIONS[gemm], **(compiler_options or {})}
    patch, files = _choices(autotune, target) if autotune is not None and not local else (0, {})
    if options.get("xla_gpu_override_gemm_autotuner"):
        _check_tile(options["xla_gpu_override_gemm_autotuner"])
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
            options = {"xla_gpu_require_complete_aot_autotune_results": True, **_AS_TEXT, **options}
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


def _require_gpu() -> None:
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
