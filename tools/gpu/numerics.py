"""Are the numbers right? Each program runs on the GPU and, in float64, on the host, over the same
inputs.

The reference is the function itself, its jaxpr evaluated with every float a float64 and every
rounding but those to FP8 left out. Inputs are random, and adversarial: of the largest magnitude,
subnormal, zero, with NaN and infinity. Each runs twice, with fast accumulation (XLA's default) and
without it (precision HIGHEST). And the sums themselves, with K from 32 to 65,536: how many bits of
a long sum are right, and are they those of chapter 12's model of a tensor core?
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from programs import FP8, KINDS, arguments, own_compile, programs, runnable
from record import Case

from helpers.numerics import blocks
from tools.records import releases

# Largest relative error, ||got - reference|| / ||reference||, of a result that counts as right. A
# wrong scale, a lost activation or bias gives over 1e-1; a sum of 1,024 products in 14 bits about
# 1e-3. An FP8 result is compared with the reference rounded to FP8 as well: what is left are values
# that a small error pushed over to the next code, a tenth of them in E4M3 where the function
# computes in bfloat16. Those hold for K = 1,024. Fast sums lose bits as they grow longer, so it may
# be more for a larger K, up to LIMIT.
LIMIT = 2.0**-4
RIGHT = {
    "float8_e4m3fn": 2.0**-5,
    "float8_e5m2": 2.0**-4,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-7,
    "float32": 2.0**-7,
}
ACCUMULATION = {"fast": None, "careful": "highest"}  # the name of a matmul precision
DIVIDE = 4  # M and N of the programs by this: the host's float64 is slow
LONGER = (4096, 16384)  # K of these as well:
AT_LENGTH = (
    "unscaled, f32 result",
    "scaled in f32",
    "scaled in bf16",
    "scales after the dot",
    "bias + relu + amax",
)
SUMS = (1024, 4096, 32, 64, 128, 256, 16384, 65536)  # K of the sums, of M = N = 512 results


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _convert(value: Any, dtype: Any) -> Any:
    """A conversion in the reference: to FP8 as it rounds and overflows, to a wider float exact."""
    if np.dtype(dtype) in FP8:
        with np.errstate(all="ignore"):
            return jnp.asarray(np.asarray(value, np.float64).astype(dtype).astype(np.float64))
    return jnp.asarray(value, jnp.float64 if _is_float(dtype) else dtype)


def _evaluate(jaxpr: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """A jaxpr's results with every float a float64."""
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        if not isinstance(atom, core.Literal):
            return values[atom]
        literal: Any = atom  # JAX's types do not say that its aval has a dtype
        dtype = literal.aval.dtype
        return _convert(literal.val, dtype) if _is_float(dtype) else literal.val

    values.update(zip(jaxpr.jaxpr.constvars, [wide(c) for c in jaxpr.consts], strict=True))
    values.update(zip(jaxpr.jaxpr.invars, args, strict=True))
    for equation in jaxpr.jaxpr.eqns:
        inputs, params = [read(atom) for atom in equation.invars], dict(equation.params)
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        if inner is not None:
            outputs = _evaluate(inner, inputs)
        elif equation.primitive.name == "convert_element_type":
            outputs = [_convert(inputs[0], params["new_dtype"])]
        elif equation.primitive.name == "reduce_precision":
            outputs = inputs
        else:
            if equation.primitive.name == "dot_general":
                params |= {"preferred_element_type": np.dtype(np.float64), "precision": None}
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            if equation.primitive.name == "dot_general":
                # Its own result may be narrower than its operands' products.
                result: Any = equation.outvars[0].aval
                outputs = [_convert(outputs[0], result.dtype)]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.jaxpr.outvars]


def wide(array: Any) -> Any:
    """An array as float64 where it is a float."""
    return (
        jnp.asarray(np.asarray(array).astype(np.float64))
        if _is_float(np.asarray(array).dtype)
        else array
    )


def reference(fn: Callable, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`fn(*args)` in float64 on the host: the leaves of its result. Raises whatever a primitive
    that has no float64 version does."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(leaf) for leaf in _evaluate(jaxpr, [wide(arg) for arg in args])]


def errors(got: Any, expected: np.ndarray) -> dict[str, Any]:
    """How far a result is from its reference: the relative error, the largest error, and in how
    many places NaN or an infinity stands in one and not in the other. Places that are not finite on
    either side count in no error."""
    got_wide = np.asarray(got).astype(np.float64)
    with np.errstate(
        all="ignore"
    ):  # the reference as the type can hold it, infinities where it overflows
        held = expected.astype(np.asarray(got).dtype).astype(np.float64)
        expected = (
            held if np.asarray(got).dtype in FP8 else np.where(np.isfinite(held), expected, held)
        )
    both = np.isfinite(got_wide) & np.isfinite(expected)
    same_kind = (np.isnan(got_wide) & np.isnan(expected)) | (got_wide == expected) | both
    gap, size = got_wide[both] - expected[both], expected[both]
    norm = float(np.linalg.norm(size))
    return {
        "dtype": str(np.asarray(got).dtype),
        "relative": float(np.linalg.norm(gap)) / (norm or 1.0),
        "largest": float(np.abs(gap).max(initial=0.0)),
        "of": float(np.abs(size).max(initial=0.0)),
        "not_equal": int(np.sum(gap != 0)),
        "elements": int(got_wide.size),
        "other_kind": int(np.sum(~same_kind)),
    }


def is_right(error: dict[str, Any], k: int = 1024, fast: bool = True) -> bool:
    """Whether a result is one that rounding explains, of sums of `k` products."""
    most = RIGHT[error["dtype"]]
    if fast:
        most = max(most, min(most * k / 1024, LIMIT))
    return error["other_kind"] == 0 and error["relative"] <= most


def judge(program: releases.Program, k: int, rehearse: bool, case: Case) -> dict[str, Any]:
    """Run one program over all kinds of inputs, with fast accumulation and without."""
    calls: dict[str, Any] = {}
    for name, precision in ACCUMULATION.items():

        def fn(
            *args,
        ):  # a function of its own: what has been traced with another precision is not taken again
            return program.fn(*args)

        with jax.default_matmul_precision(precision):
            try:
                compiled = own_compile(
                    fn,
                    *program.args,
                    rehearse=rehearse,
                    gemm="cublaslt",
                    compiler_options=program.options,
                )
                calls[name] = runnable(fn, compiled, rehearse)
            except Exception as error:
                calls[name] = case.refused(error)
    found: dict[str, Any] = {}
    for seed, kind in enumerate(KINDS):
        args = arguments(program.args, kind, seed)
        expected = reference(program.fn, args)
        for name, call in calls.items():
            if isinstance(call, str):
                found.setdefault(kind, {})[name] = call
                continue
            try:
                outputs = jax.tree.leaves(call(*args))
                found.setdefault(kind, {})[name] = [
                    errors(o, e) for o, e in zip(outputs, expected, strict=True)
                ]
            except Exception as error:  # what the library refuses
                found.setdefault(kind, {})[name] = case.refused(error)
    rows = {
        kind: {name: row for name, row in by_name.items() if not isinstance(row, str)}
        for kind, by_name in found.items()
    }
    return {
        "inputs": found,
        "refused": len(KINDS) * len(calls) - sum(map(len, rows.values())),
        "right": _all(
            is_right(error, k, name == "fast")
            for kind in KINDS[:-1]
            for name, row in rows[kind].items()
            for error in row
        ),
        "keeps_nan": _all(
            error["other_kind"] == 0 for row in rows[KINDS[-1]].values() for error in row
        ),
    }


def sums(k: int, size: int, rehearse: bool, case: Case) -> dict[str, Any]:
    """Relative errors of [size, K] times [size, K] in E4M3, f32 results, against float64: with fast
    accumulation and without, of operands of either sign and of positive ones, whose sums grow. And
    what part of [64, 64] of them are to the bit those of chapter 12's model: with sums kept up, and
    promoted each 128."""
    found: dict[str, dict[str, float]] = {}
    same: dict[str, dict[str, float]] = {}
    models: dict[str, Callable] = {"": blocks.hopper_sums}
    if k % blocks.B == 0:
        models[", promoted"] = blocks.promoted_sums
    for what, sign in (("either sign", lambda x: x), ("positive", abs)):
        rng = np.random.default_rng(k)
        a, b = (
            sign(rng.standard_normal((size, k), np.float32)).astype(jnp.float8_e4m3fn)
            for _ in range(2)
        )
        exact = a.astype(np.float64) @ b.astype(np.float64).T
        expected = {name: np.asarray(model(a[:64], b[:64])[-1]) for name, model in models.items()}
        for name, precision in ACCUMULATION.items():

            def dot(a, b):
                return jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)

            with jax.default_matmul_precision(precision):
                call = runnable(dot, own_compile(dot, a, b, rehearse=rehearse), rehearse)
            got = np.asarray(call(a, b))
            found.setdefault(what, {})[name] = errors(got, exact)["relative"]
            same.setdefault(what, {}).update(
                {
                    name + kind: float(np.mean(got[:64, :64] == sums))
                    for kind, sums in expected.items()
                }
            )
    return {"k": k, "sums": found, "same_as_model": same}


def _all(answers: Iterable[bool]) -> bool | None:
    """Whether all hold; None where nothing ran."""
    return all(answers) if (answers := list(answers)) else None


def cases(rehearse: bool) -> dict[str, Callable[[Case], dict[str, Any]]]:
    """The sums; then a case a program, without a loop and block scaling, which the reference does
    not evaluate."""

    def of(k: int) -> dict[str, releases.Program]:
        # The longer the sums, the fewer of them.
        found = (
            programs(divide=16, every=4, k=k)
            if rehearse
            else programs(DIVIDE if k == releases.K else 16, k=k)
        )
        return {
            name: program
            for name, program in found.items()
            if program.gemm == "cublaslt" and not ("loop" in name or "blocks" in name)
        }

    lengths, size = (SUMS[:2], 32) if rehearse else (SUMS, 512)
    made: dict[str, Callable[[Case], dict[str, Any]]]
    made = {f"sums, K = {k}": functools.partial(sums, k, size, rehearse) for k in lengths}
    made |= {
        name: functools.partial(judge, program, releases.K, rehearse)
        for name, program in of(releases.K).items()
    }
    for k in LONGER[:1] if rehearse else LONGER:
        made |= {
            f"{name}, K = {k}": functools.partial(judge, program, k, rehearse)
            for name, program in of(k).items()
            if name in AT_LENGTH
        }
    return made
