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

# How far a right answer may be off, as a part of the largest result: four roundings of bfloat16, of
# two scales, of the dot, and of the sum with a bias. Those of dequantized operands cancel in a sum
# over K. A missing scale, bias or activation is off by far more.
SLACK = 4 * float(jnp.finfo(jnp.bfloat16).eps) / 2
# Of a stub.
NOTHING = "it returns nothing yet: write its body and run this cell again"


def check(
    fn: Callable,
    *args: Any,
    like: Callable | None = None,
    calls_wanted: int = 1,
    kernels_wanted: int | None = 1,
    epilogue: str | None = None,
    amax: bool | None = None,
    alpha: float | None = None,
    most_beside: int | None = None,
    quiet: bool = False,
) -> bool:
    """Whether `fn(*args)` solves the puzzle; prints what holds and what does not, unless it is to
    be `quiet`.

    `args` are arrays. `like` is a function with the right numbers: results must have its dtypes and
    shapes and lie within a few roundings of its values, also where each of the scalars is another
    number. The program compiled for an H100 must hold `calls_wanted` FP8 calls, and launch at
    most `kernels_wanted` kernels, with None any number. The first call must have the `epilogue`,
    `amax` and `alpha` that are given. The other kernels may move `most_beside` bytes together.
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
        module = parse_hlo_module(aot_compile(fn, *args, target="H100"))
    except Exception as error:
        lines.append((False, f"it does not compile or run: {raised(error)}"))
        return _verdict(name, lines, quiet)
    launched = kernels(module)
    calls = [k for k in launched if k.kind == FP8_CALL]
    count = f"{counted(len(calls), 'FP8 matmul call')} (wanted {calls_wanted})"
    lines.append((len(calls) == calls_wanted, count))
    others = [k for k in launched if k not in calls]
    if kernels_wanted is not None:
        count = f"{counted(len(launched), 'kernel')} in all (at most {kernels_wanted})"
        if others:
            count += f"; outside the call: {', '.join(f'{k.name} -> {k.result}' for k in others)}"
        lines.append((len(launched) <= kernels_wanted, count))
    if most_beside is not None:
        beside = sum(k.bytes_moved for k in others)
        said = f"{beside} bytes moved outside the call (at most {most_beside})"
        lines.append((beside <= most_beside, said))
    if calls:
        lines += _configured(calls[0], epilogue=epilogue, amax=amax, alpha=alpha)
        # A gap in cuBLASLt's table of FP8 types, which XLA does not check:
        # https://docs.nvidia.com/cuda/cublas/#cublasltmatmul
        types = [module[name].shape.dtype for name in calls[0].instruction.operands[:2]]
        if "f8e5m2[" in calls[0].result and "f8e5m2" not in types:
            lines.append((False, "cuBLASLt has no kernel for two E4M3 operands and an E5M2 result"))
    return _verdict(name, lines, quiet)


def _configured(call: Kernel, **wanted: Any) -> list[tuple[bool, str]]:
    """Whether the call has each field that is wanted; those that are None may be anything."""
    config = gemm_config(call.instruction)
    fields = {"epilogue": "epilogue", "amax": "damax_output", "alpha": "alpha_real"}
    lines = []
    for key, want in wanted.items():
        has = config[fields[key]]
        if want is not None:
            lines.append((has == want, f"the call's {key} is {has} (wanted {want})"))
    return lines


def raised(error: Exception) -> str:
    """What the reader's code raised, in one line: its type and, if it has a message, the first line
    of that.
    """
    first = next(iter(str(error).splitlines()), "")
    name = type(error).__name__
    return f"{name}: {first}" if first else name


def judged(what_is_wrong: Callable[[Any], str], answer: Any) -> bool:
    """Whether nothing is wrong with an answer, and prints that. `what_is_wrong` says it in words;
    what it raises is wrong, too.
    """
    try:
        wrong = what_is_wrong(answer)
    except Exception as error:
        wrong = raised(error)
    print(f"not yet: {wrong}" if wrong else "solved")
    return not wrong


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
    scalars = [n for n, x in enumerate(args) if jnp.ndim(x) == 0]
    others = [x / (1.5 + n / 8) if n in scalars else x for n, x in enumerate(args)]
    for given, where in ((args, ""), (others, "with other scales ")):
        if differ := _differ(fn, like, given):
            return False, where + differ
    return True, "its numbers are right"


def _differ(fn: Callable, like: Callable, args: Sequence) -> str:
    """How the numbers of two functions differ; nothing where they do not."""
    # The right numbers come from the CPU even where a GPU is attached: XLA rewrites nothing to FP8
    # there.
    on_cpu = jax.jit(like)(*jax.device_put(tuple(args), jax.devices("cpu")[0]))
    results, wanted = jax.tree.leaves(run(fn, *args)), jax.tree.leaves(on_cpu)
    for number, (got, want) in enumerate(zip(results, wanted, strict=True), 1):
        if apart := _apart(got, want):
            whose = f"the numbers of result {number}" if len(wanted) > 1 else "its numbers"
            return f"{whose} differ: {apart}"
    return ""


def _apart(got: Any, want: Any) -> str:
    """How far one result is from the right one; nothing where it is right."""
    eps = float(jnp.finfo(want.dtype).eps)
    got, want = (np.asarray(v).astype(np.float64) for v in (got, want))
    finite = np.isfinite(got) & np.isfinite(want)
    if want[finite].any():
        ratio = np.sum(got[finite] * want[finite]) / np.sum(want[finite] ** 2)
        if abs(ratio - 1) > SLACK:
            return f"they are {ratio:.4g} times the right ones"
    largest = np.max(np.abs(want), initial=0, where=np.isfinite(want))
    close = np.isclose(got, want, rtol=2 * eps, atol=SLACK * largest, equal_nan=True)
    if not close.all():
        first = tuple(np.argwhere(~close)[0])
        return f"{got[first]:.6g} where {want[first]:.6g} is right"
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
