"""How fast a transformer layer is, forward and in training: in f32, in bf16, and in bf16 with FP8
matmuls; and the steps of the ladder that leads to a lean FP8 step.

The precisions of a case are built first and then timed side by side, so a ratio of two of them is
of one run. Each has trained a few steps before it is timed: what is multiplied has the scales of
training, and that the loss falls is recorded beside the time. Going forward, as in training,
parameters are f32 and converted in each call. What the compiler made of a step is read after
everything is timed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from programs import own_compile, runnable
from record import Case
from speed import describe, description, timed

from helpers import report_gemms
from helpers.models import ladder
from helpers.models.gpt import GPTLayer, train_state, train_step

from lean_step import Lean

# Those of Transformer Engine's quickstart and of the readme of fp8layers.
SIZES = {"hidden": 4096, "heads": 32, "sequence": 2048, "batch": 4}
REHEARSAL = {"hidden": 128, "heads": 4, "sequence": 32, "batch": 2}
FAST, XLA = ", fast backward", ", XLA's attention"
# By name: which layer it is; the layer is "bf16" or "bf16+fp8" with another backward pass, or
# another attention.
LAYERS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": jnp.bfloat16},
    "bf16+fp8": {"dtype": jnp.bfloat16, "fp8": True},
    "f32": {"dtype": jnp.float32},
}
FORWARD = ("bf16", "bf16+fp8", "f32", "bf16" + XLA, "bf16+fp8" + XLA)
TRAINING = (*FORWARD[:2], *FORWARD[3:], "bf16+fp8" + FAST, "f32")
STEPS = 20  # of training, whose losses are recorded
# The steps of chapter 13's ladder; and what it cannot compile without a GPU.
RUNGS: dict[str, ladder.Layer] = {
    "bf16, fused attention": ladder.BASES["fused"],
    "bf16, cuDNN's attention": GPTLayer(attention="cudnn"),
    **ladder.RUNGS,
    "passes of Mosaic GPU, cuDNN's attention": Lean(attention="cudnn"),
}


@contextlib.contextmanager
def fast_backward() -> Iterator[None]:
    """What Flax does not offer: gradients accumulated as fast as the forward pass. Flax asks for
    exact accumulation there, and cuBLASLt then adds up more slowly: this is to measure how much of
    a step that is."""
    exact, fast = fp8_ops.dot_general_transpose_lhs, jax.lax.Precision.DEFAULT
    with mock.patch.object(
        fp8_ops,
        "dot_general_transpose_lhs",
        lambda *args, precision, **options: exact(*args, precision=fast, **options),
    ):
        yield


def model_flops(sizes: dict[str, int], training: bool) -> int:
    """Of the layer's matmuls as written, whoever runs them: 12 hidden^2 weights, and attention's
    two for each head; the backward pass multiplies twice as much."""
    hidden, sequence, tokens = (
        sizes["hidden"],
        sizes["sequence"],
        sizes["sequence"] * sizes["batch"],
    )
    return (3 if training else 1) * tokens * (2 * 12 * hidden**2 + 4 * sequence * hidden)


def build(
    layer: GPTLayer, sizes: dict[str, int], gemm: str, training: bool, rehearse: bool
) -> tuple[jax.stages.Compiled, Callable[[], jax.Array], list[float]]:
    """The compiled pass, a function without arguments that runs it once, and the losses of the
    first steps. It has run. Raises whatever XLA and cuDNN raise."""
    if training:
        # What jax.jit was given: JAX must not reuse what it has traced with the other accumulation.
        untraced = train_step.__wrapped__  # type: ignore[attr-defined]
        return build_step(layer, untraced, sizes, gemm, rehearse)
    x, _ = batch_of(sizes, layer.dtype)
    params = train_state(layer, x).params
    compiled = own_compile(layer.apply, params, x, rehearse=rehearse, gemm=gemm)
    call = functools.partial(runnable(layer.apply, compiled, rehearse), params, x)
    jax.block_until_ready(call())
    return compiled, call, []


def batch_of(sizes: dict[str, int], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """An input and a target, random."""
    dims = sizes["batch"], sizes["sequence"], sizes["hidden"]
    keys = jax.random.split(jax.random.key(0))
    x, target = (jax.random.normal(key, dims, jnp.bfloat16).astype(dtype) for key in keys)
    return x, target


def build_step(
    layer: ladder.Layer,
    step: Callable,
    sizes: dict[str, int],
    gemm: str,
    rehearse: bool,
    interpreted: Callable | None = None,
) -> tuple[jax.stages.Compiled, Callable[[], jax.Array], list[float]]:
    """A compiled training step of the layer, a function that takes it once more, and the losses of
    the first steps. In a rehearsal the CPU takes the `interpreted` step, if there is one, in its
    place. Raises whatever XLA, cuDNN and Mosaic GPU raise."""
    x, target = batch_of(sizes, getattr(layer, "dtype", jnp.bfloat16))
    state, losses = ladder.state_of(layer, x), []
    one_step = jax.jit(lambda *args: step(*args), donate_argnums=0)
    compiled = own_compile(one_step, state, x, target, rehearse=rehearse, gemm=gemm)
    run = runnable(interpreted or one_step, compiled, rehearse)
    for _ in range(STEPS):
        state, loss = run(state, x, target)
        losses.append(float(loss))

    def call() -> jax.Array:
        nonlocal state  # a step uses up the state it is given
        state, loss = run(state, x, target)
        return loss

    return compiled, call, losses


def build_rung(
    name: str, sizes: dict[str, int], rehearse: bool, case: Case
) -> tuple[dict[str, Any], jax.stages.Compiled, Callable[[], jax.Array]]:
    """A step of the ladder; in a rehearsal a small one, whose kernels are interpreted."""
    layer = RUNGS[name]
    row = {
        "dtype": "bfloat16",
        "fp8": isinstance(layer, Lean) or layer.fp8,
        "gemm": "cublaslt",
        "attention": layer.attention,
    }
    interpreted = None
    if rehearse:
        fields: dict[str, Any] = {"hidden": sizes["hidden"], "heads": sizes["heads"]}
        fields["attention"] = "xla"
        if isinstance(layer, Lean):
            layer = dataclasses.replace(layer, **fields)
        else:
            layer = layer.clone(**fields)
        if isinstance(layer, Lean) and layer.by == "mosaic":
            interpreted = ladder.step_of(dataclasses.replace(layer, by="interpret"))
    step = ladder.step_of(layer)
    with case.form(name):
        compiled, call, losses = build_step(layer, step, sizes, "cublaslt", rehearse, interpreted)
    return row | {"losses": losses}, compiled, call


def build_best(
    precision: str, sizes: dict[str, int], gemm: str, training: bool, rehearse: bool, case: Case
) -> tuple[dict[str, Any], jax.stages.Compiled, Callable[[], jax.Array]]:
    """With cuDNN's fused attention where it takes the layer, else with XLA's; with XLA's where the
    name says so."""
    fields: dict[str, Any] = {
        "hidden": sizes["hidden"],
        "heads": sizes["heads"],
        **LAYERS[precision.split(",")[0]],
    }
    row = {"dtype": jnp.dtype(fields["dtype"]).name, "fp8": fields.get("fp8", False), "gemm": gemm}
    for attention in (
        ("cudnn", "xla") if row["dtype"] == "bfloat16" and not precision.endswith(XLA) else ("xla",)
    ):
        form = f"{precision}, by cuDNN" if attention == "cudnn" else precision
        try:
            with (
                case.form(form),
                fast_backward() if precision.endswith(FAST) else contextlib.nullcontext(),
            ):
                compiled, call, losses = build(
                    GPTLayer(**fields, attention=attention), sizes, gemm, training, rehearse
                )
        except Exception as error:
            if attention == "xla":
                raise
            row["cudnn_refused"] = case.refused(error, form)
            continue
        return (
            row | {"attention": attention} | ({"losses": losses} if training else {}),
            compiled,
            call,
        )
    raise AssertionError("XLA's attention either runs or raises")


def read(compiled: jax.stages.Compiled, rehearse: bool) -> dict[str, Any]:
    """What the compiler made of a pass."""
    report, memory = report_gemms(compiled), compiled.memory_analysis()
    return description(compiled, rehearse) | {
        "fp8_matmuls": len(report.fp8_rows),
        "matmuls": len(report.rows),
        "compiled_flops": report.flops,
        "fp8_flops_share": report.fp8_flops_share,
        "gemms": [
            f"{row.m}x{row.n}x{row.k} {row.library} {row.math_dtype} {row.epilogue} "
            f"{row.precision} {row.tile}".strip()
            for row in report.rows
        ],
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
    }


def measure(
    training: bool, gemm: str, precisions: tuple[str, ...], rehearse: bool, case: Case
) -> dict[str, Any]:
    """One pass over the layer in each precision, timed side by side. What one of them raises, its
    row says."""
    sizes = REHEARSAL if rehearse else SIZES
    builds = {
        name: functools.partial(build_best, name, sizes, gemm, training, rehearse, case)
        for name in precisions
    }
    return side_by_side(builds, sizes, training, rehearse, case)


def measure_ladder(rehearse: bool, case: Case) -> dict[str, Any]:
    """The steps of the ladder, timed side by side."""
    sizes = REHEARSAL if rehearse else SIZES
    builds = {name: functools.partial(build_rung, name, sizes, rehearse, case) for name in RUNGS}
    return side_by_side(builds, sizes, True, rehearse, case)


def side_by_side(
    builds: Mapping[str, Callable],
    sizes: dict[str, int],
    training: bool,
    rehearse: bool,
    case: Case,
) -> dict[str, Any]:
    """Build all forms of a pass, and time them."""
    rows: dict[str, Any] = {}
    calls, programs = {}, {}
    for name, build_this in builds.items():
        rows[name] = {}
        built = case.attempt(rows, name, build_this)
        if built:
            rows[name], programs[name], calls[name] = built
    timed(rows, calls, case, rehearse, slices=0.25, rounds=6)
    describe(rows, programs, case, rehearse, read)
    return {**sizes, "flops": model_flops(sizes, training), "precisions": rows}


def cases(rehearse: bool) -> dict[str, Callable[[Case], dict[str, Any]]]:
    """A training step and a forward pass with cuBLASLt's matmuls, then with those that XLA chooses
    by timing (of f32 it would have much to time, and no goal is about it; a rehearsal times
    nothing)."""
    one = functools.partial(functools.partial, measure, rehearse=rehearse)
    if rehearse:
        return {
            "training step": one(True, "cublaslt", TRAINING[:-1]),
            "forward": one(False, "cublaslt", FORWARD[:2]),
            "ladder": functools.partial(measure_ladder, rehearse),
        }
    return {
        "training step": one(True, "cublaslt", TRAINING),
        "forward": one(False, "cublaslt", FORWARD),
        "ladder": functools.partial(measure_ladder, rehearse),
        "training step, autotuned": one(True, "auto", ("bf16", "bf16+fp8")),
        "forward, autotuned": one(False, "auto", ("bf16", "bf16+fp8")),
    }
