"""Are the numbers right? The programs of tools/recorders/releases.py on the GPU, beside the CPU;
and the sums of its tensor core, beside chapter 13's model of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from helpers.numerics.tensor_core import tensor_core_dot
from tools.gpu.errors import errors_of_all, is_right
from tools.gpu.lines import sentence
from tools.gpu.machine import Gpu
from tools.gpu.stage import Case, Ready
from tools.recorders import releases

FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
KINDS = ("random", "largest", "subnormal", "not finite")
DIVIDE = 8  # M and N of the programs by this: the CPU computes them too
# In eight layers the rounding of one grows until half of a result's codes are others: no bound
# tells that from an error. In two it stays in the bound of one.
LOOP, LAYERS = "8 layers in a loop", 2
# XLA's maximum on a CPU loses a NaN where YNNPACK, a library of CPU kernels, computes it.
NAN_KEPT = {"xla_cpu_experimental_ynn_fusion_type": ""}
SUMS = (32, 128, 1024, 4096)  # K of the sums


@functools.cache
def cpu() -> jax.Device:
    """Where references are computed: a GPU divides and rounds in its own way."""
    return jax.devices("cpu")[0]


# Agreement ----------------------------------------------------------------------------------------


def programs(gpu: Gpu) -> dict[str, releases.Program]:
    """Every program for one Hopper that cuBLASLt multiplies, by name, its M and N divided."""
    found = {
        name: program.of_size(releases.M // DIVIDE, releases.N // DIVIDE, releases.K)
        for name, program in releases.programs().items()
        if program.target == "H100" and not program.specs and program.gemm == "cublaslt"
    }
    x, w, *scales = found[LOOP].args
    w = jax.ShapeDtypeStruct((LAYERS, *w.shape[1:]), w.dtype)
    found[LOOP] = dataclasses.replace(found[LOOP], args=(x, w, *scales))
    return dict([*found.items()][::9]) if gpu.rehearsal else found


def agreement(gpu: Gpu) -> Iterator[Case]:
    """Does the GPU's own compiler make of the programs what is recorded of a compile without it,
    does the GPU run them, and are the numbers right? Each with random operands and adversarial
    ones."""
    forms = {name: functools.partial(agree, gpu, one) for name, one in programs(gpu).items()}
    yield Case("agreement", "programs", forms, looks=0, limit=30)


def agree(gpu: Gpu, program: releases.Program) -> Ready:
    """One program: its results beside the CPU's. What does not compile because no kernel of
    cuBLASLt's runs it when XLA times them is compiled once more without that: then it fails where
    it is called."""
    made: dict[str, Any] = {}
    try:
        compiled, call = gpu.compile(program.fn, *program.args, options=program.options)
    except Exception as error:
        options = {**(program.options or {}), "xla_gpu_autotune_level": 0}
        compiled, call = gpu.compile(program.fn, *program.args, options=options)
        made = {"untuned": sentence(error)}
    found = compared(program, call)
    finite = [one for kind in KINDS if kind != "not finite" for one in found[kind]]
    made |= {
        "errors": found,
        "right": all(map(is_right, finite)),
        "keeps_nan": all(one["other_kind"] == 0 for one in found["not finite"]),
    }
    return Ready(made, compiled=compiled)


def compared(program: releases.Program, call: Callable) -> dict[str, list[dict[str, Any]]]:
    """How far the GPU's results are from the CPU's, by the kind of operands."""

    fn = program.fn
    if isinstance(fn, functools.partial):  # a CPU has none of the FP8 algorithms, and needs none
        kept = {name: how for name, how in fn.keywords.items() if name != "precision"}
        fn = functools.partial(fn.func, **kept)

    def on_cpu(*args):
        return fn(*args)

    found = {}
    for seed, kind in enumerate(KINDS):
        args = arguments(program.args, kind, seed)
        got = jax.tree.map(np.asarray, call(*args))
        with jax.default_device(cpu()):
            reference = jax.jit(on_cpu, compiler_options=NAN_KEPT)
            expected = jax.tree.map(np.asarray, reference(*args))
        found[kind] = errors_of_all(got, expected)
    return found


@functools.lru_cache(maxsize=24)  # most programs multiply the same two shapes
def _operand(kind: str, shape: tuple[int, ...], dtype: np.dtype, *seed: int) -> np.ndarray:
    rng, finfo = np.random.default_rng(seed), ml_dtypes.finfo(dtype)
    signs = rng.choice([-1.0, 1.0], shape)
    if kind == "largest":
        return (signs * float(finfo.max)).astype(dtype)
    if kind == "subnormal":
        codes = rng.integers(1, 2**finfo.nmant, shape)
        return (signs * codes * float(finfo.smallest_subnormal)).astype(dtype)
    values = rng.normal(size=shape)
    if kind == "not finite":
        values.reshape(-1)[values.size // 3] = np.nan
        if dtype == jnp.float8_e5m2:  # E4M3 has no infinity
            values.reshape(-1)[values.size // 2] = np.inf
    return values.astype(dtype)


def arguments(args: tuple, kind: str, seed: int = 0) -> list[np.ndarray]:
    """Arrays for a program's arguments. FP8 operands are as `kind` says: normally distributed, all
    of the largest magnitude, all subnormal, or normally distributed with a NaN (and in E5M2 an
    infinity) among them. Scalar scales go with it, so that the result is in reach of its
    own format: some of it clipped, most not.
    """
    rng, scalars, found = np.random.default_rng(seed), 0, []
    for place, arg in enumerate(args):
        dtype = np.dtype(arg.dtype)
        if dtype in FP8:
            found.append(_operand(kind, arg.shape, dtype, seed, place))
        elif int(np.prod(arg.shape)) == 1:  # the scales: A's, B's, then D's
            fixed = {"largest": (2.0**-8, 2.0**-8, 4.0), "subnormal": (1.0, 1.0, 64.0)}.get(kind)
            value = fixed[min(scalars, 2)] if fixed else rng.uniform(0.5, 1.5)
            scalars += 1
            found.append(np.full(arg.shape, value, dtype))
        elif len(arg.shape) == 2 and arg.shape[1] == 1:  # a scale or a bias for each row
            found.append(rng.uniform(0.5, 1.5, arg.shape).astype(dtype))
        else:
            values = 8 * rng.normal(size=arg.shape)
            if kind == "not finite":
                values.reshape(-1)[values.size // 4] = np.inf
            found.append(values.astype(dtype))
    return found


# Sums ---------------------------------------------------------------------------------------------


def sums(gpu: Gpu) -> Iterator[Case]:
    """How many bits of a long sum are right, and are they those of the model?"""
    lengths, size = (SUMS[1:3], 64) if gpu.rehearsal else (SUMS, 512)
    forms = {f"K = {k}": functools.partial(sums_of, gpu, k, size) for k in lengths}
    yield Case("numerics", "sums", forms, looks=0, limit=30)


def sums_of(gpu: Gpu, k: int, size: int) -> Ready:
    """Relative errors of [size, K] times [size, K] in E4M3, f32 results, against float64: with fast
    accumulation, XLA's default, and without it; of operands of either sign, and of positive ones,
    whose sums grow. And what part of [64, 64] of them are to the bit those of the model, with sums
    kept up, and promoted each 128. The model runs on the CPU."""
    models: dict[str, Callable] = {"": tensor_core_dot}
    if k % 128 == 0:
        models[", promoted"] = functools.partial(tensor_core_dot, every=128)
    found: dict[str, Any] = {}
    same: dict[str, Any] = {}
    for what in ("either sign", "positive"):
        rng = np.random.default_rng(k)
        a, b = (rng.standard_normal((size, k), np.float32) for _ in range(2))
        if what == "positive":
            a, b = abs(a), abs(b)
        a, b = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)
        exact = a.astype(np.float64) @ b.astype(np.float64).T
        with jax.default_device(cpu()):
            expected = {how: np.asarray(model(a[:64], b[:64])) for how, model in models.items()}
        found[what], same[what] = {}, {}
        for name, precision in (("fast", None), ("careful", "highest")):

            def dot(a, b):
                return jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)

            with jax.default_matmul_precision(precision):
                got = np.asarray(gpu.compile(dot, a, b).call(a, b))
            gap = got.astype(np.float64) - exact
            found[what][name] = float(np.linalg.norm(gap) / np.linalg.norm(exact))
            for how, model in expected.items():
                same[what][name + how] = float(np.mean(got[:64, :64] == model))
    return Ready({"k": k, "sums": found, "same_as_model": same})
