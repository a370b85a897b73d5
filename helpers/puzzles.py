"""`check` for the puzzles: compiles the reader's answer for Hopper and says what is missing."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8lens.compile.api import aot_compile, run
from fp8lens.hlo import parse_hlo_module
from fp8lens.hlo.text import counted
from fp8lens.matmul.kernels import Kernel, kernels
from fp8lens.matmul.rows import FP8_CALL, gemm_config

# How many roundings of a 16-bit type may add up in one element of a right answer, of the eight
# that `tolerance` counts: of two scales, of the dot, and of the sum with a bias.
# Those of the dequantized operands cancel in a sum over K; the last two are the result's own.
ROUNDINGS = 4
# Of a stub.
NOTHING = "it returns nothing yet: write its body and run this cell again"


def check(
    fn: Callable,
    *args: Any,
    like: Callable | None = None,
    kernels_wanted: int = 1,
    epilogue: str | None = None,
    amax: bool | None = None,
    beta: float | None = None,
    alpha: float | None = None,
    most_beside: int | None = None,
    target: str = "H100",
    quiet: bool = False,
) -> bool:
    """Whether `fn(*args)` solves the puzzle; prints what holds and what does not, unless it is to
    be `quiet`.

    `args` are arrays. `like` is a function with the right numbers: results must have its dtypes and
    shapes and lie within a few roundings of its values, also where each of the scalars is another
    number. An answer that computes in bfloat16 or float16 may be off by roundings of that type.
    The program compiled for `target` must hold one FP8 call, launch at most
    `kernels_wanted` kernels, and the call must have the `epilogue`, `amax`, `beta` and `alpha` that
    are given. The other kernels may move `most_beside` bytes together.
    """
    name = getattr(fn, "__name__", "your function")
    try:
        shapes = jax.eval_shape(fn, *args)
    # whatever the reader's code raises is news for the reader, not a crash of the chapter
    except Exception as error:
        return _verdict(name, [(False, f"it does not trace: {raised(error)}")], quiet)
    if not jax.tree.leaves(shapes):
        return _verdict(name, [(False, NOTHING)], quiet)

    lines = []
    try:
        if like is not None:
            lines.append(same_results(fn, like, args))
        module = parse_hlo_module(aot_compile(fn, *args, target=target))
    except Exception as error:
        lines.append((False, f"it does not compile or run: {raised(error)}"))
        return _verdict(name, lines, quiet)
    launched = kernels(module)
    calls = [k for k in launched if k.kind == FP8_CALL]
    lines.append((len(calls) == 1, f"{counted(len(calls), 'FP8 matmul call')} (wanted 1)"))
    others = [k for k in launched if k not in calls]
    count = f"{counted(len(launched), 'kernel')} in all (at most {kernels_wanted})"
    if others:
        count += f"; outside the call: {', '.join(f'{k.name} -> {k.result}' for k in others)}"
    lines.append((len(launched) <= kernels_wanted, count))
    if most_beside is not None:
        beside = sum(k.bytes_moved for k in others)
        said = f"{beside} bytes moved outside the call (at most {most_beside})"
        lines.append((beside <= most_beside, said))
    if calls:
        wanted = {"epilogue": epilogue, "amax": amax, "beta": beta, "alpha": alpha}
        lines += _configured(calls[0], wanted)
        # A gap in cuBLASLt's table of FP8 types, which XLA does not check:
        # https://docs.nvidia.com/cuda/cublas/#cublasltmatmul
        types = [module[name].shape.dtype for name in calls[0].instruction.operands[:2]]
        if "f8e5m2[" in calls[0].result and "f8e5m2" not in types:
            lines.append((False, "cuBLASLt has no kernel for two E4M3 operands and an E5M2 result"))
    return _verdict(name, lines, quiet)


def _configured(call: Kernel, wanted: dict[str, Any]) -> list[tuple[bool, str]]:
    """Whether the call has each field that is wanted; those that are None may be anything."""
    config = gemm_config(call.instruction)
    has = {
        "epilogue": config["epilogue"],
        "amax": config["damax_output"],
        "beta": config["beta"],
        "alpha": config["alpha_real"],
    }
    return [
        (has[key] == want, f"the call's {key} is {has[key]} (wanted {want})")
        for key, want in wanted.items()
        if want is not None
    ]


def raised(error: Exception) -> str:
    """What the reader's code raised, in one line: its type and, if it has a message, the first line
    of that.
    """
    first = next(iter(str(error).splitlines()), "")
    name = type(error).__name__
    return f"{name}: {first}" if first else name


def as_number(value: Any) -> float | None:
    """The value as a float; None unless it is one finite number, of Python, NumPy or JAX."""
    try:
        return float(value) if np.ndim(value) == 0 and math.isfinite(value) else None
    except (TypeError, ValueError):
        return None


def types_of(tree: Any) -> str:
    """The types of a function's results: "f32[2,3], bf16[]" in JAX's own names."""
    found = []
    for leaf in jax.tree.leaves(tree):
        sizes = ",".join(map(str, leaf.shape))
        found.append(f"{leaf.dtype}[{sizes}]")
    return ", ".join(found)


def alike(tree: Any, wanted: Any) -> bool:
    """Whether two results have the same structure, and their arrays the same shapes and types."""
    one, other = (jax.tree.map(lambda v: (v.shape, v.dtype), result) for result in (tree, wanted))
    return one == other


def same_results(fn: Callable, like: Callable, args: Sequence) -> tuple[bool, str]:
    """Whether `fn(*args)` has the types and the numbers of `like(*args)`, also where each of the
    scalars is another number; and that in words.

    Raises what `fn` raises.
    """
    returned, wanted = (types_of(jax.eval_shape(f, *args)) for f in (fn, like))
    if not returned:
        return False, NOTHING
    if returned != wanted:
        return False, f"it returns {returned} (wanted {wanted})"
    slack = _slack(fn, args)
    scalars = [n for n, x in enumerate(args) if jnp.ndim(x) == 0]
    others = [x / (1.5 + n / 8) if n in scalars else x for n, x in enumerate(args)]
    for given, where in ((args, ""), (others, "with other scales ")):
        if differ := _differ(fn, like, given, slack):
            return False, where + differ
    return True, "its numbers are right"


def _slack(fn: Callable, args: Sequence) -> float:
    """How far a right answer may be off, as a part of the largest result: one rounding of bfloat16,
    or several of the 16-bit type that `fn` computes in.
    """
    units = [float(jnp.finfo(jnp.bfloat16).eps) / 2]
    for dtype in _computed_in(jax.make_jaxpr(fn)(*args).jaxpr):
        if dtype in (jnp.bfloat16, jnp.float16):
            units.append(ROUNDINGS * float(jnp.finfo(dtype).eps) / 2)
    return max(units)


def _computed_in(jaxpr: Any) -> set:
    """The types of everything that a program computes, also in the programs that it calls."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {getattr(variable.aval, "dtype", None) for variable in equation.outvars}
        for value in jax.tree.leaves(equation.params):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= _computed_in(inner)
    return found


def _differ(fn: Callable, like: Callable, args: Sequence, slack: float) -> str:
    """How the numbers of two functions differ by more than `slack` times the largest; nothing where
    they do not.
    """
    # The right numbers come from the CPU even where a GPU is attached: XLA rewrites nothing to FP8
    # there.
    on_cpu = jax.jit(like)(*jax.device_put(tuple(args), jax.devices("cpu")[0]))
    results, wanted = jax.tree.leaves(run(fn, *args)), jax.tree.leaves(on_cpu)
    for number, (got, want) in enumerate(zip(results, wanted, strict=True), 1):
        if apart := _apart(got, want, slack):
            whose = f"the numbers of result {number}" if len(wanted) > 1 else "its numbers"
            return f"{whose} differ: {apart}"
    return ""


def _apart(got: Any, want: Any, slack: float) -> str:
    """How far one result is from the right one; nothing where it is right."""
    eps = float(jnp.finfo(want.dtype).eps)
    got, want = (np.asarray(v).astype(np.float64) for v in (got, want))
    # Right answers may dequantize in another type and round in another order, which shows most
    # where large terms cancel; a missing scale, bias or activation is off by far more than this.
    allowed = 2 * eps * np.abs(want) + np.nanmax(np.abs(want), initial=0) * slack
    both = np.isfinite(got) & np.isfinite(want)
    squares = max(np.sum(want[both] ** 2), np.finfo(np.float64).tiny)
    ratio = np.sum(got[both] * want[both]) / squares
    if want[both].any() and abs(ratio - 1) > max(0.01, slack):
        return f"they are {ratio:.4g} times the right ones"
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    excess = np.where(same, 0, np.abs(got - want) / allowed)
    excess = np.where(np.isnan(excess), np.inf, excess)
    if excess.max() > 1:
        worst = np.unravel_index(np.argmax(excess), got.shape)
        return f"{got[worst]:.6g} where {want[worst]:.6g} is right"
    return ""


def _verdict(name: str, lines: list[tuple[bool, str]], quiet: bool) -> bool:
    solved = all(ok for ok, _ in lines)
    if not quiet:
        state = "solved" if solved else "not yet"
        print(f"{name}: {state}")
        for ok, text in lines:
            mark = "✓" if ok else "✗"
            print(f"  {mark} {text}")
    return solved
