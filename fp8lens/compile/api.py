"""How a JAX function is compiled for a GPU that is not here: with which options, apart or not.

XLA's CUDA compiler needs a description of the chip, not the chip. JAX reaches it through a
compile-only topology: what comes back is the same `jax.stages.Compiled` as on the GPU, with the
same optimized HLO, except that it cannot be run.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from fp8lens.compile.autotune import AS_TEXT, check_tile, choices
from fp8lens.compile.bugs import COMPILER_BUGS, NEEDS_A_MESH, add_notes
from fp8lens.compile.call import Call, make_call
from fp8lens.compile.isolate import Isolated, compile_apart, may_abort
from fp8lens.compile.meshes import axes, callers_mesh, check_devices, make_mesh
from fp8lens.compile.process import USED_IN, check_process, gpu_available, require_gpu, with_cudnn
from fp8lens.targets import GEMM_OPTIONS, Target, resolve


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
    isolate: bool = False,
    **kwargs: Any,
) -> jax.stages.Compiled | Isolated:
    """Compile `fn(*args, **kwargs)` for `target`, whether or not such a chip is here.

    `args` and `kwargs` are arrays or `jax.ShapeDtypeStruct`s, or pytrees of them; only shapes and
    dtypes are read. Those that `static_argnums` or `static_argnames` name, as for `jax.jit`, may be
    anything, and the program depends on their values. An argument of `fn` with the name of an
    option here can be given by position or with functools.partial. `target` is a name in `TARGETS`,
    a `Target`, or "local", the attached GPU: then the result can also be called.

    `fn` may be jitted: by `jax.jit`, `nnx.jit` or `eqx.filter_jit`. Then it has its own static
    arguments, and gets an argument that is not an array as it is. Arrays inside a callable that is
    a pytree, such as a module, are arguments of the program. The result is always JAX's, without
    nnx's or Equinox's way of calling it.

    `gemm` says which library may run the matmuls: "cublaslt" (NVIDIA's library, with the FP8
    epilogues), "triton" (kernels that XLA generates), or "auto", XLA's default. With "auto" XLA
    times both on the chip. If there is no chip, it takes the first Triton tile that compiles, which
    is not what a GPU would choose. `compiler_options` are XLA debug options, merged over those of
    `gemm`.

    `autotune` is a record of what XLA chose on a GPU like `target`: the path of a file that was
    written with `recording`, or its text. Then the program has the choices of that GPU. XLA reads
    only records of the same JAX release. If the record lacks a kernel of the program, this raises a
    LookupError, unless the options set xla_gpu_require_complete_aot_autotune_results False.

    `mesh_shape` asks for a sharded program on that many compile-only devices: {"data": 4, "model":
    2}, or (8,), whose axes are named "x", "y", "z". `in_specs` has a PartitionSpec for each of
    `args` (or for each of its leaves; None is replicated); without it, arguments keep the spec of
    their own NamedSharding.

    A mesh of your own, from `fp8lens.mesh`, needs no `mesh_shape`: it may be in the shardings of
    arguments, in `jax.set_mesh`, or inside `fn`. Then JAX decides how an argument without a
    sharding is laid out.

    With some programs XLA ends the process. With `isolate` XLA compiles in a new process, which
    takes two seconds more, and the result has only `as_text`. If that process dies, this raises a
    CompilerDied.

    JAX's compilation cache is neither read nor written: it cannot hold programs for a chip that is
    not here.

    Raises KeyError for an unknown chip, TypeError or ValueError for arguments, meshes or options
    that XLA cannot take, and RuntimeError if no CUDA compiler is installed, if JAX_PLATFORMS asks
    for a GPU and there is none, or in a process forked from one that had used JAX; each message
    names the fix. Raises CompilerDied with `isolate`, and for programs with which XLA is known to
    abort; and what `fn` raises.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> def layer(x, w, x_scale, w_scale):
        ...     x, w = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32) * w_scale
        ...     return jax.nn.relu(x @ w.T)
        >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float8_e4m3fn)
        >>> scale = jax.ShapeDtypeStruct((), jnp.float32)
        >>> from fp8lens import aot_compile
        >>> compiled = aot_compile(layer, x, x, scale, scale, target="H100")
        >>> "__cublas$lt$matmul$f8" in compiled.as_text()
        True
    """
    check_process()
    chip = _chip(target, mesh_shape, autotune, isolate)
    options = _options(gemm, compiler_options)
    call = make_call(fn, args, kwargs, in_specs, static_argnums, static_argnames)
    if not USED_IN:
        USED_IN.append(os.getpid())
    if chip is None:
        return _compile(call.placed().lower(), options)
    patch, files = choices(autotune, chip) if autotune is not None else (0, {})
    with with_cudnn(chip.cudnn):
        lowered, doubt = _lower(call, chip, mesh_shape, patch)
    compiled = _compile(lowered, options, chip, files, patch, isolate)
    if doubt and not isinstance(compiled, Isolated):
        check_devices(compiled, chip, doubt)
    return compiled


def _chip(target: str | Target, mesh_shape: Any, autotune: Any, isolate: bool) -> Target | None:
    """None for the attached GPU, which need not be one whose rates are recorded here."""
    if getattr(target, "name", target) != "local":
        return resolve(target)
    require_gpu()
    if mesh_shape is not None or autotune is not None or isolate:
        raise ValueError(
            "mesh_shape, autotune and isolate are for a chip that is not here; name one, as in "
            'target="H100".'
        )
    return None


def _options(gemm: str, compiler_options: Mapping[str, Any] | None) -> dict[str, Any]:
    if gemm not in GEMM_OPTIONS:
        known = ", ".join(map(repr, GEMM_OPTIONS))
        raise ValueError(f"gemm must be one of {known}, or 'both' for inspect; got {gemm!r}.")
    options = {**GEMM_OPTIONS[gemm], **(compiler_options or {})}
    if tile := options.get("xla_gpu_override_gemm_autotuner"):
        check_tile(tile)
    return options


# What JAX speaks of where a function's mesh or shardings are not ours.
_MESHES = re.compile("mesh|device|sharding|memory kind", re.I)


def _lower(
    call: Call, chip: Target, mesh_shape: Mapping[str, int] | Sequence[int] | None, patch: int
) -> tuple[jax.stages.Lowered, ValueError | None]:
    """`call` for `chip`; and, where it was lowered for a mesh that the function has in it, what JAX
    said before: whether that mesh is of `chip` can only be read when it is compiled.
    """
    theirs = callers_mesh(call, chip) if mesh_shape is None else None
    if theirs is not None:
        if patch:
            raise ValueError(
                "autotune: recorded choices are for a mesh made here: "
                'mesh_shape, as in {"data": 8}.'
            )
        return call.placed(theirs).lower(theirs), None
    ours = make_mesh(chip, axes(mesh_shape), patch)
    placed = call.placed(ours, everywhere=True)
    try:
        return placed.lower(ours), None
    except ValueError as error:
        if patch or any(spec is not None for spec in call.specs) or not _MESHES.search(str(error)):
            raise
        try:
            # Only what the function says itself places anything.
            mesh = ours if mesh_shape is not None else None
            return call.placed(mesh).lower(mesh), error
        except Exception as again:
            if str(again) != str(error):  # else it is the function's own
                error.add_note(NEEDS_A_MESH)
            raise error from None


# From lowered to compiled: nothing from here on reads the function or the mesh again.
def _compile(
    lowered: jax.stages.Lowered,
    options: Mapping[str, Any],
    chip: Target | None = None,
    recorded: Mapping[str, str] = MappingProxyType({}),
    patch: int = 0,
    isolate: bool = False,
) -> jax.stages.Compiled | Isolated:
    """With what a GPU like `chip` chose where it was `recorded`, as files for XLA to look in."""
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
        if chip is not None and isolate:
            return compile_apart(lowered, options, chip, patch)
        likely = may_abort(lowered, options, chip) if chip is not None else None
        if chip is not None and likely is not None:
            # Once apart, to see whether it ends the process; what it dumps is wanted from here.
            tried = {k: v for k, v in options.items() if not k.startswith("xla_dump")}
            compile_apart(lowered, tried, chip, patch, likely)
        return lowered.compile(compiler_options=options)


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
        # A program is looked up by its options too, and nobody else has this one.
        yield {"xla_dump_emitter_re": "^$"}


@contextmanager
def _explained(chip: Target | None, recorded: Mapping[str, str]) -> Iterator[None]:
    """XLA's errors with what to do about them."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        _, _, missing = str(error).partition("No cached config found for HLO instr: ")
        if chip is not None and recorded and ", kind" in missing:
            kernel = missing.partition(", kind")[0]
            raise LookupError(
                f"autotune: of the {len(recorded)} recorded choices XLA can use none for {kernel}. "
                "It looks one up by its own release, the chip and the kernel's instructions: "
                "record this function with these shapes and options "
                f"on {chip.device} with JAX {jax.__version__}."
            ) from error
        add_notes(error, COMPILER_BUGS)
        raise


def run(fn: Callable, *args: Any, gemm: str = "cublaslt") -> Any:
    """Compile and run `fn(*args)`: on the attached GPU if there is one, else on the CPU.

    On the CPU XLA has no FP8 matmul: it computes the same expression in wider types, so the numbers
    are those of the program as written, not of a tensor core.

    Example:

        >>> import jax.numpy as jnp
        >>> from fp8lens import run
        >>> x = jnp.ones((32, 32), jnp.float8_e4m3fn)
        >>> float(run(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32).sum(), x))
        32768.0
    """
    check_process()
    if gpu_available():
        compiled: Any = aot_compile(fn, *args, target="local", gemm=gemm)
        return compiled(*args)
    return jax.jit(fn)(*args)
