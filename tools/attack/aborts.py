"""Attack the compiler: programs, options, tiles, chips and meshes made to end or fill the process.

    python -m tools.attack.aborts          all of them, for half an hour; or those with a part of
                                           a name: "tile " mesh "amax of rows"

Each is compiled in a worker process, which goes on until something ends it. It is answered by a
compiled program, or refused by an error. What ends the worker, takes more than SECONDS or MEMORY is
tried again with isolate: then only the compile's own process may die, and an error has to say so.
Whatever else happens is lost, and must not.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8lens import TARGETS, aot_compile
from fp8lens.targets import GEMM_OPTIONS

SECONDS, MEMORY = 60, 4 << 30  # for each, as the time it takes and the memory it adds
e4m3, e5m2, f32, bf16, f16 = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
)
S = jax.ShapeDtypeStruct
SCALAR = S((), f32)


# Programs --------------------------------------------------------------------------------------


def amax(d, axis=None, **options):
    """The largest magnitude."""
    return jnp.max(jnp.abs(d), axis, **options)


def by_row(d):
    """The largest magnitude of each row, whatever the other axes are."""
    return amax(d.reshape(d.shape[0], -1), -1)


AMAXES = {
    "of all": amax,
    "of rows": lambda d: amax(d, -1),
    "of columns": lambda d: amax(d, 0),
    "of rows, kept": lambda d: amax(d, -1, keepdims=True),
    "of rows, converted": lambda d: amax(d, -1).astype(f32),
    "of rows, scattered": lambda d: jnp.zeros(8).at[jnp.arange(d.shape[0]) % 8].max(by_row(d)),
    "of rows, into a history": lambda d: jnp.zeros((16, d.shape[0])).at[3].set(by_row(d)),
    "of rows, of all": lambda d: amax(amax(d, -1)),
    "of rows without abs": lambda d: jnp.max(d, -1),
    "of tiles": lambda d: amax(d.reshape(-1, 16, 16), (1, 2)),
    "of a half": lambda d: amax(d[:16]),
    "of a half's rows": lambda d: amax(d[:16], -1),
    "of windows": lambda d: lax.reduce_window(
        jnp.abs(d), -jnp.inf, lax.max, (8,) * d.ndim, (8,) * d.ndim, "VALID"
    ),
    "running": lambda d: lax.cummax(jnp.abs(d), 0),
    "least of rows": lambda d: jnp.min(jnp.abs(d), -1),
    "by segment": lambda d: jax.ops.segment_max(jnp.abs(d), jnp.arange(d.shape[0]) // 4, 16),
    "from 1 on": lambda d: amax(d, -1, initial=1.0),
}
AFTER = {
    "": lambda d: d,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "bias": lambda d: d + jnp.ones(d.shape[-1], d.dtype),
    "barrier": lax.optimization_barrier,
}
PRODUCTS = {
    "": ("mk,nk->mn", (64, 128), (256, 128)),
    "batched": ("bmk,bnk->bmn", (4, 64, 128), (4, 256, 128)),
    "of three axes": ("bmk,nk->bmn", (4, 64, 128), (256, 128)),
    "square": ("mk,kn->mn", (64, 64), (64, 64)),
    "odd": ("mk,nk->mn", (63, 127), (255, 127)),
}


def with_amax(
    of: str, after: str = "", product: str = "", dtype=f32, to=e4m3
) -> tuple[Callable, tuple]:
    """A matmul's FP8 result, and beside it an amax."""

    def fn(a, b, x, y, z):
        d = AFTER[after](
            jnp.einsum(
                PRODUCTS[product][0],
                a.astype(dtype) * x.astype(dtype),
                b.astype(dtype) * y.astype(dtype),
            )
        )
        top = float(jnp.finfo(to).max)
        return jnp.clip(d * z.astype(dtype), -top, top).astype(to), AMAXES[of](d)

    return fn, (*(S(shape, e4m3) for shape in PRODUCTS[product][1:]), SCALAR, SCALAR, SCALAR)


def _gradient(a, b):
    return jax.grad(lambda a: amax((a @ b.T).astype(f32)))(a)


def _in_loop(fn: Callable) -> Callable:
    return lambda *args: lax.scan(lambda c, _: (c, fn(*args)), 0, length=3)[1]


def _jitted_again(fn: Callable) -> Callable:
    inner = jax.jit(fn)
    return jax.jit(lambda *args: jax.jit(inner)(*args))


def _deep(n: int) -> Callable:
    def fn(x):
        for _ in range(n):
            x = jax.jit(lambda x: jnp.sin(x) @ x)(x)
        return x

    return fn


ODD_DTYPES = (
    "int2 int4 uint4 int8 uint32 int64 bool float16 float64 complex64 complex128 "
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn"
).split()
SIZES = (
    (0, 16, 16),
    (16, 0, 16),
    (16, 16, 0),
    (1, 1, 1),
    (1, 16, 1),
    (2**20, 2**20, 16),
    (2**31, 1, 1),
    (2**31, 16, 16),
    (2**40, 1, 2**20),
    (2**62, 1, 4),
    (2**16, 2**16, 2**16),
    (7, 5, 3),
    (2**31 - 1, 2, 2**31 - 1),
)


Programs = Iterator[tuple[str, Callable, tuple, dict]]


def with_amaxes() -> Programs:
    """An amax of each kind, of each product."""
    for of, after in itertools.product(AMAXES, AFTER):
        yield f"amax {of}, {after}", *with_amax(of, after), {}
    for of, product in itertools.product(AMAXES, ("batched", "of three axes", "odd")):
        yield f"amax {of}, {product}", *with_amax(of, "", product), {}
    for of, dtype in itertools.product(list(AMAXES)[:6], (bf16, f16)):
        yield f"amax {of} in {jnp.dtype(dtype).name}", *with_amax(of, "", "", dtype), {}
        yield (
            f"amax {of} in {jnp.dtype(dtype).name}, to E5M2",
            *with_amax(of, "", "", dtype, e5m2),
            {},
        )
    for target, of, product in itertools.product(
        ("A100", "L40S", "H200", "B200"), ("of all", "of rows", "of tiles"), ("", "batched")
    ):
        yield f"amax {of}, {product}, {target}", *with_amax(of, "", product), {"target": target}
    for gemm, of in itertools.product(GEMM_OPTIONS, list(AMAXES)[:4]):
        yield f"amax {of}, {gemm}", *with_amax(of), {"gemm": gemm}


def with_amaxes_around() -> Programs:
    """An amax on a mesh, in a loop, in further jits, vmapped, of a gradient."""
    for axes in itertools.product((None, "x"), repeat=2):
        for of in ("of all", "of rows", "of columns"):
            fn, args = with_amax(of)
            yield (
                f"amax {of}, sharded {axes}",
                fn,
                args,
                {"mesh_shape": (8,), "in_specs": (P(axes[0]), P(axes[1]), None, None, None)},
            )
    for of in ("of all", "of rows"):
        fn, args = with_amax(of)
        yield f"amax {of}, in a loop", _in_loop(fn), args, {}
        yield f"amax {of}, jitted", _jitted_again(fn), args, {}
        yield (
            f"amax {of}, vmapped",
            jax.vmap(fn, (0, None, None, None, None)),
            (S((4, 64, 128), e4m3), *args[1:]),
            {},
        )
        yield (
            f"amax {of}, vmapped scales",
            jax.vmap(fn),
            tuple(S((4, *a.shape), a.dtype) for a in args),
            {},
        )
    yield "gradient of an amax", _gradient, (S((64, 64), bf16), S((64, 64), bf16)), {}


def of_odd_types() -> Programs:
    """Odd sizes, odd types, every algorithm."""
    for m, n, k in SIZES:
        for dtype in (e4m3, bf16):
            yield (
                f"{m} x {n} x {k} in {jnp.dtype(dtype).name}",
                jnp.matmul,
                (S((m, k), dtype), S((k, n), dtype)),
                {},
            )
    for name in ODD_DTYPES:
        dtype = getattr(jnp, name)
        for gemm in GEMM_OPTIONS:
            yield (
                f"{name}, {gemm}",
                lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))),
                (S((64, 64), dtype),) * 2,
                {"gemm": gemm},
            )
        yield (
            f"{name} of float8_e4m3fn",
            lambda a, b: a.astype(f32) @ b.astype(f32),
            (S((64, 64), dtype), S((64, 64), e4m3)),
            {},
        )
        yield (
            f"{name}, converted",
            lambda a: a.astype(f32).astype(e4m3).astype(a.dtype),
            (S((64, 64), dtype),),
            {},
        )
    algorithms = [
        name for name in dir(lax.DotAlgorithmPreset) if name[0] in "ABFT" and name.isupper()
    ]
    for name, dtype in itertools.product(algorithms, (e4m3, f32)):
        yield (
            f"algorithm {name} of {jnp.dtype(dtype).name}",
            functools.partial(
                lax.dot, precision=lax.DotAlgorithmPreset[name], preferred_element_type=f32
            ),
            (S((64, 64), dtype),) * 2,
            {},
        )


def odd() -> Programs:
    """Deep, endless, large; and what is no matmul."""
    square = S((64, 64), f32)
    yield "300 jits deep", _deep(300), (square,), {}
    yield (
        "a loop without end",
        lambda x: lax.while_loop(lambda x: True, lambda x: x @ x, x),
        (square,),
        {},
    )
    yield (
        "a loop of constants",
        lambda: lax.fori_loop(0, 10**9, lambda i, x: x @ x, jnp.ones((8, 8))),
        (),
        {},
    )
    yield (
        "a large constant",
        lambda x: x @ jnp.asarray(range(4096), f32).reshape(64, 64),
        (square,),
        {},
    )
    yield "a constant to fold", lambda: jnp.ones((8192, 8192)) @ jnp.ones((8192, 8192)), (), {}
    yield "a product to fold", lambda: jnp.cumsum(jnp.ones((2**22,), f32)), (), {}
    yield "64 axes", lambda x: x.reshape((1,) * 64).sum(), (S((1,), f32),), {}
    yield (
        "a transpose of 20 axes",
        lambda x: x.reshape((2,) * 20).transpose(range(19, -1, -1)),
        (S((2**20,), f32),),
        {},
    )
    for name in ("cholesky", "svd", "eigh", "qr", "inv", "det"):
        yield name, getattr(jnp.linalg, name), (square,), {}
    yield "fft", jnp.fft.fft2, (square,), {}
    yield (
        "attention",
        lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn"),
        (S((2, 64, 4, 64), bf16),),
        {},
    )
    yield "a print", lambda x: jax.debug.print("{}", x), (square,), {}
    yield "sort", lambda x: jnp.sort(x.astype(f32), axis=0), (S((64, 64), e4m3),), {}
    yield "top_k", lambda x: lax.top_k(x, 4), (S((64, 64), e4m3),), {}


def of_libraries() -> Programs:
    """What XLA hands to a library, and calls of what may not be there."""
    square, image = S((64, 64), f32), S((2, 16, 16, 32), e4m3)
    for dtype in (e4m3, f32):
        yield (
            f"convolution of {jnp.dtype(dtype).name}",
            lambda x, w: lax.conv_general_dilated(
                x,
                w,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                preferred_element_type=f32,
            ),
            (S(image.shape, dtype), S((3, 3, 32, 64), dtype)),
            {},
        )
        yield (
            f"ragged dot of {jnp.dtype(dtype).name}",
            lambda a, b, n: lax.ragged_dot(a, b, n, preferred_element_type=f32),
            (S((64, 32), dtype), S((4, 32, 64), dtype), S((4,), jnp.int32)),
            {},
        )
    for target, (m, k) in itertools.product(TARGETS, ((64, 128), (128, 256))):
        operands = *[S((1, m, k), e4m3)] * 2, *[S((1, m, k // 32), jnp.float8_e8m0fnu)] * 2
        yield (
            f"block scaled {m} x {k}, {target}",
            lambda a, b, x, y: jax.nn.scaled_matmul(a, b, x, y),
            operands,
            {"target": target},
        )
    yield (
        "a call of nothing",
        lambda x: jax.ffi.ffi_call("no_such_call", S((4,), f32))(x),
        (S((4,), f32),),
        {},
    )
    for target in (
        "__cublas$lt$matmul$f8",
        "__cublas$gemm",
        "__cudnn$convForward",
        "__triton",
        "cu_threefry2x32_ffi",
    ):
        yield (
            f"a call of {target}",
            lambda x, target=target: jax.ffi.ffi_call(target, S((64, 64), f32))(x, x),
            (square,),
            {},
        )


def programs() -> Programs:
    """A name, a function, its arguments, and options."""
    for group in (with_amaxes, with_amaxes_around, of_odd_types, odd, of_libraries):
        yield from group()


# What it is compiled with ----------------------------------------------------------------------

TILE = "block_m: 64 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"
FLAGS = ["maybe", "1", "2", "True", "t", "true", ""]
SPLITS = ["abc", "0", "1", "3", "08", "9" * 20, "0x10", "-1", "1.0"]
BLOCKS = [
    *("08", "0100", "9" * 20, str(2**31), str(2**32), str(2**30), "65536", "-64", "1", "2"),
    *("64.0", "6_4", "٦٤", "²", "0x40", "many", "63", ""),
]
TILES = [
    *("", " ", ",,,", ":", "{}", "tile", "block_m", "block_m:", TILE, f"{TILE} ,,,", f",{TILE}"),
    *(TILE.upper(), "a" * 100_000, TILE + " " * 100_000),
    *(f"{TILE} num_stages: 3", f"{TILE} # a comment", f"{TILE} split_k: 1 split_k: 1"),
    *(f"{TILE} is_tma_allowed: {value}" for value in FLAGS),
    *(f"{TILE} split_k: {value}" for value in SPLITS),
    *(TILE.replace("64", size) for size in BLOCKS),
    *(TILE.replace("warps: 4", f"warps: {n}") for n in (3, 32, 1024, 2**31)),
    *(TILE.replace("ctas: 1", f"ctas: {n}") for n in (0, 2, 64)),
    *(TILE.replace("stages: 3", f"stages: {n}") for n in (0, 1, 1000, 2**31 - 1, 2**32)),
    *(TILE.replace(": ", ":"), TILE.replace(" ", "\n"), TILE.replace(" ", "\0")),
    *(TILE.replace(" ", ", "), TILE.replace(" block", "; block")),
]
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    "-1",
    "--x",
    2**31 - 1,
    2**31,
    2**63,
    2**70,
    1.5,
    float("nan"),
    "",
    "abc",
    "true",
    "9" * 20,
    [],
    ["a"],
    {},
    {"a": 1},
    b"x",
    object(),
)
OPTIONS = """
xla_gpu_enable_triton_gemm xla_gpu_autotune_level xla_gpu_enable_command_buffer
xla_gpu_graph_min_graph_size xla_dump_hlo_pass_re xla_dump_to xla_disable_hlo_passes
xla_enable_hlo_passes_only xla_gpu_force_compilation_parallelism
xla_gpu_override_gemm_autotuner xla_gpu_per_fusion_autotune_cache_dir
xla_gpu_load_autotune_results_from
xla_gpu_dump_autotune_results_to xla_backend_optimization_level xla_gpu_redzone_padding_bytes
xla_gpu_all_reduce_combine_threshold_bytes xla_gpu_memory_limit_slop_factor xla_gpu_cuda_data_dir
xla_gpu_shape_checks xla_gpu_ptx_file xla_gpu_llvm_ir_file xla_backend_extra_options
xla_gpu_kernel_cache_file
xla_gpu_experimental_autotune_backends xla_gpu_triton_gemm_any xla_hlo_evaluator_use_fast_path
xla_no_such_option xla_gpu_analytical_latency_estimator_options
xla_gpu_pgle_profile_file_or_directory_path xla_flags_reset xla_gpu_target_config_filename
xla_dump_max_hlo_modules xla_gpu_nccl_termination_timeout_seconds fdo_profile
xla_gpu_command_buffer_update_mode xla_gpu_experimental_parallel_collective_overlap_limit
xla_gpu_ptx_compiler_extra_flags optimization_level memory_fitting_level
individually_defined_output_indices
""".split()
NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    10**9,
    2**40,
    -(2**62),
    1e300,
    float("nan"),
    float("inf"),
    True,
    "8",
    None,
    [],
    "",
)
PAIRS = (
    (-1, 0),
    (9, -1),
    (2**40, 0),
    (99, 9),
    (9, 9),
    (8, 1),
    (7, 5),
    (9, 0.5),
    (9,),
    "90",
    None,
    (12, 0),
    (2**31, 2**31),
)
MESHES: tuple[Any, ...] = (
    {"d": 10**9},
    {"d": 10**12},
    {"d": -1},
    {"d": 0},
    {"d": 2**20},
    {"d": 100_000},
    {"d": 2**63},
    {"d": 4096},
    {"d": 3},
    {"d": 1.5},
    {"d": True},
    {"d": "8"},
    {"d": None},
    {5: 8},
    {None: 2},
    {"": 2},
    {("a", "b"): 2},
    (10**9,),
    (1024,) * 3,
    "8",
    b"8",
    8,
    (),
    {},
    [[8]],
    object(),
    {"a": 2, "b": 3, "c": 5, "d": 7},
    {f"a{n}": 1 for n in range(100)},
    {f"a{n}": 2 for n in range(20)},
)
SPECS: tuple[Any, ...] = (
    (P("x"), None),
    (P("q"), None),
    (P(("x", "x")), None),
    (P(None, None, "x"), None),
    (P("x", "x"), None),
    (5, None),
    ("x", "x"),
    P("x"),
    None,
    [],
    ((P("x"),), None),
    (P(-1), None),
    (P(P.UNCONSTRAINED), None),
)
CHOICES = (
    'version: 3\nresults {\n  device: "%s"\n  hlo: "%s"\n  result {\n%s  }\n  version: %s\n}\n'
)
CHIP = (
    "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 3352 GB/s, L2 cache: 50 MB, "
    "DNN version: 9.10.0"
)
TILED = "    triton {\n      block_m: 99999999999\n    }\n"


def _dot(a, b):
    return (a @ b.T).astype(bf16)


MATRIX = S((64, 128), e4m3)
one = functools.partial(aot_compile, _dot, MATRIX, MATRIX)
Compiles = Iterator[tuple[str, Callable]]


ODD_OPTIONS: tuple[Any, ...]
ODD_OPTIONS = (None, [], "abc", 5, {5: 5}, {"": ""}, {None: 1}, {b"xla_dump_to": b"x"}, [("a", 1)])
ODD_GEMMS: tuple[Any, ...] = ("", None, 5, [], "CUBLASLT", ("triton",), {})


def compiles() -> Compiles:
    """A name, and a compile."""
    for name, fn, args, options in programs():
        yield name, functools.partial(aot_compile, fn, *args, **options)
    for number, tile in enumerate(TILES):
        yield (
            f"tile {number}: {tile[:110]!r}",
            functools.partial(
                one, gemm="triton", compiler_options={"xla_gpu_override_gemm_autotuner": tile}
            ),
        )
    for option, value in itertools.product(OPTIONS, VALUES):
        shown = re.sub(r" at 0x\w+", "", repr(value))
        yield f"option {option} {shown}", functools.partial(one, compiler_options={option: value})
    for odd_options in ODD_OPTIONS:
        yield f"options {odd_options}", functools.partial(one, compiler_options=odd_options)
    yield from of_chips()
    yield from of_arguments()


def of_chips() -> Compiles:
    """A chip of which one figure is odd."""
    h100 = TARGETS["H100"]
    for field in dataclasses.fields(h100):
        values = {
            "device": ("", "\n", '"', "x" * 10**6, 5, None, "NVIDIA\0", "{}"),
            "name": ("", None, 5, "local"),
            "peak_flops": (None, {}, 5, {"f8e4m3fn": "x"}, {5: 5}),
            "source": ("", None),
        }.get(field.name)
        for value in values or (PAIRS if isinstance(getattr(h100, field.name), tuple) else NUMBERS):
            yield (
                f"chip {field.name}={str(value)[:40]}",
                lambda field=field, value=value, **o: one(
                    target=dataclasses.replace(h100, **{field.name: value}), **o
                ),
            )


def of_arguments() -> Compiles:
    """Odd meshes, specs, names of chips and libraries, recorded choices."""
    for number, shape in enumerate(MESHES):
        yield (
            f"mesh {number}: {re.sub(' at 0x.*', '', str(shape))[:60]}",
            functools.partial(one, mesh_shape=shape),
        )
    for specs in SPECS:
        yield f"specs {specs}", functools.partial(one, mesh_shape=(8,), in_specs=specs)
    for target in ("", "H1000", None, 5, b"H100", "local", object, TARGETS):
        yield f"target {str(target)[:20]}", functools.partial(one, target=target)
    for gemm in ODD_GEMMS:
        yield f"gemm {gemm!r}", functools.partial(one, gemm=gemm)
    for number, filled in enumerate(
        (
            ("", "", "", ""),
            (CHIP, "", "", "1"),
            (CHIP, "\\777", "", "1"),
            (CHIP, "\\", "", "1"),
            (CHIP, "x", TILED, "28"),
            (CHIP, "x" * 10**6, "", "9" * 30),
            (CHIP.replace("132", "132" * 9), "x", "", "1"),
        )
    ):
        yield f"autotune {number}", functools.partial(one, gemm="auto", autotune=CHOICES % filled)


# Workers ---------------------------------------------------------------------------------------


def work() -> None:
    """Compile what is named, line by line, and tell of each in a line of JSON."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (2 * MEMORY,) * 2)
    named = dict(compiles())

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    for line in sys.stdin:
        name, options = json.loads(line)
        Path("/proc/self/clear_refs").write_text("5")  # else it is the peak of all before
        before = peak()
        try:
            named[name](**options)
            said = "answered", ""
        except Exception as error:
            said = "refused", f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = "lost", f"{type(error).__name__}: {error}"
        taken = peak() - before
        out.write(json.dumps(said if taken < MEMORY else ("lost", f"{taken / 1e9:.1f} GB")) + "\n")


class Worker:
    """A process that compiles, and a new one where something has ended it."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.folder = tempfile.TemporaryDirectory()  # some options have XLA write where it stands

    def ask(self, name: str, **options: Any) -> tuple[str, str]:
        """What came of it, and what was said."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--worker"],
                cwd=self.folder.name,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        questions, answers = self.process.stdin, self.process.stdout
        assert questions is not None and answers is not None  # both are pipes
        questions.write(json.dumps([name, options]).encode() + b"\n")
        questions.flush()
        ready, _, _ = select.select([answers], [], [], SECONDS * (2 if options else 1))
        if ready and (line := answers.readline()):
            said, why = json.loads(line)
            return said, why
        status = self.end()
        return "lost", f"more than {SECONDS} s" if not ready else (
            signal.Signals(-status).name if status < 0 else f"exit status {status}"
        )

    def end(self) -> int:
        """Its status; where it still runs, it is ended."""
        process, self.process = self.process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()  # it ends at the end of its names
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            process.stdout.close()


def run(names: Iterable[str], listed: bool = False) -> dict[str, tuple[str, str]]:
    """What came of each: answered, refused, isolated or lost, and what was said. Lost ones are
    printed, or all."""
    found, worker = {}, Worker()
    try:
        for name in names:
            said, why = worker.ask(name)
            if said == "lost":
                again = worker.ask(name, isolate={"seconds": SECONDS, "gigabytes": MEMORY / 1e9})
                said, why = (
                    "lost" if again[0] == "lost" else "isolated",
                    f"{why}; with isolate {again}",
                )
            if listed or said in ("isolated", "lost"):
                print(f"{said}: {name}: {why[:200]!r}", flush=True)
            found[name] = said, why
    finally:
        worker.end()
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command: prints what it tried and what was lost; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", help="of a name: those alone")
    parser.add_argument("--list", action="store_true", help="what was said of each, too")
    options = parser.parse_args(arguments)
    names = [
        name
        for name, _ in compiles()
        if not options.part or any(part in name for part in options.part)
    ]
    found = run(names, options.list)
    counted = collections.Counter(said for said, _ in found.values())
    print(
        f"{len(found)} tried: {counted['answered']} answered, {counted['refused']} refused, "
        f"{counted['isolated']} ended the process and are answered with isolate, "
        f"{counted['lost']} lost"
    )
    return int(bool(counted["lost"]))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work()
    else:
        sys.exit(main())
