"""The programs that run on the GPU, those of tools/records/releases.py that are for Hopper, and
what to feed them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from helpers import TARGETS, Target, aot_compile
from tools.records import releases

FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
KINDS = ("random", "largest", "subnormal", "zero", "not finite")


def chip(rehearse: bool) -> Target:
    """The attached GPU's model, under a name that makes `aot_compile` compile without the GPU."""
    local = TARGETS["H200" if rehearse else "local"]
    return dataclasses.replace(local, name=local.device)


def own_compile(fn: Callable, *args: Any, rehearse: bool, **options: Any) -> jax.stages.Compiled:
    """The attached GPU's compile. A rehearsal has no GPU, and takes the compile without one in its
    place."""
    return aot_compile(fn, *args, target="H200" if rehearse else "local", **options)


def runnable(fn: Callable, compiled: jax.stages.Compiled, rehearse: bool) -> Callable:
    """What to call: the GPU's program, or in a rehearsal the CPU's."""
    return jax.jit(fn) if rehearse else compiled


def programs(divide: int = 1, every: int = 1, k: int = releases.K) -> dict[str, releases.Program]:
    """Every program for one Hopper by name, or only `every` so many, its M and N divided, its K
    this one.
    """
    return {
        name: program.of_size(releases.M // divide, releases.N // divide, k)
        for name, program in list(releases.programs().items())[::every]
        if program.target == "H100" and not program.specs
    }


@functools.lru_cache(maxsize=24)  # most programs multiply the same two shapes
def _operand(kind: str, shape: tuple[int, ...], dtype: np.dtype, *seed: int) -> np.ndarray:
    rng, finfo = np.random.default_rng(seed), ml_dtypes.finfo(dtype)
    signs = rng.choice([-1.0, 1.0], shape)
    values = {
        "random": lambda: rng.normal(size=shape),
        "largest": lambda: signs * float(finfo.max),
        "subnormal": lambda: (
            signs * rng.integers(1, 2**finfo.nmant, shape) * float(finfo.smallest_subnormal)
        ),
        "zero": lambda: np.zeros(shape),
        "not finite": lambda: rng.normal(size=shape),
    }[kind]()
    if kind == "not finite":
        values.reshape(-1)[values.size // 3] = np.nan
        if dtype == jnp.float8_e5m2:  # E4M3 has no infinity
            values.reshape(-1)[values.size // 2] = np.inf
    return values.astype(dtype)


def arguments(args: tuple, kind: str, seed: int = 0) -> list[np.ndarray]:
    """Arrays for a program's arguments. FP8 operands are as `kind` says: normally distributed, all
    of the largest magnitude, all subnormal, all zero, or normally distributed with a NaN (and in
    E5M2 an infinity) among them. Scalar scales go with it, so that the result is in reach of its
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
        elif dtype == jnp.float8_e8m0fnu:
            found.append((2.0 ** rng.integers(-2, 2, arg.shape)).astype(dtype))
        elif len(arg.shape) == 2 and arg.shape[1] == 1:  # a scale or a bias for each row
            found.append(rng.uniform(0.5, 1.5, arg.shape).astype(dtype))
        else:
            values = 8 * rng.normal(size=arg.shape)
            if kind == "not finite":
                values.reshape(-1)[values.size // 4] = np.inf
            found.append(values.astype(dtype))
    return found
