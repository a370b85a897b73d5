"""How fast a transformer layer is, forward and in training: in f32, in bf16, and in bf16 with FP8 matmuls.

The precisions of a case are built first and then timed side by side, so a ratio of two of them is of one run. Each has
trained a few steps before it is timed: what is multiplied has the scales of training, and that the loss falls is
recorded beside the time. Going forward, as in training, parameters are f32 and converted in each call.
"""
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from programs import own_compile, runnable
from record import sentence
from speed import as_row

from helpers import TARGETS, report_gemms
from helpers.cost import bytes_moved, kernels, roofline_seconds
from helpers.gpt import GPTLayer, train_state, train_step
from helpers.local import device_times

# Those of Transformer Engine's quickstart and of the readme of fp8layers.
SIZES = {"hidden": 4096, "heads": 32, "sequence": 2048, "batch": 4}
REHEARSAL = {"hidden": 64, "heads": 4, "sequence": 32, "batch": 2}
FAST = "bf16+fp8, fast backward"
PRECISIONS = {"bf16": {"dtype": jnp.bfloat16}, "bf16+fp8": {"dtype": jnp.bfloat16, "fp8": True},
              "f32": {"dtype": jnp.float32}, FAST: {"dtype": jnp.bfloat16, "fp8": True}}
STEPS = 20  # of training, whose losses are recorded
LONGEST = 10  # kernels that are recorded by name


@contextlib.contextmanager
def fast_backward() -> Iterator[None]:
    """What Flax does not offer: gradients accumulated as fast as the forward pass. Flax asks for exact accumulation
    there, and cuBLASLt then adds up more slowly: this is to measure how much of a step that is."""
    exact, fast = fp8_ops.dot_general_transpose_lhs, jax.lax.Precision.DEFAULT
    with mock.patch.object(fp8_ops, "dot_general_transpose_lhs",
                           lambda *args, precision, **options: exact(*args, precision=fast, **options)):
        yield


def model_flops(sizes: dict[str, int], training: bool) -> int:
    """Of the layer's matmuls as written, whoever runs them: 12 hidden^2 weights, and attention's two for each head; the
    backward pass multiplies twice as much."""
    hidden, sequence, tokens = sizes["hidden"], sizes["sequence"], sizes["sequence"] * sizes["batch"]
    return (3 if training else 1) * tokens * (2 * 12 * hidden**2 + 4 * sequence * hidden)


def build(layer: GPTLayer, sizes: dict[str, int], gemm: str, training: bool,
          rehearse: bool) -> tuple[dict[str, Any], Callable[[], jax.Array]]:
    """What was compiled, and a function without arguments that runs it once. Raises whatever XLA and cuDNN raise."""
    keys = jax.random.split(jax.random.key(0))
    dims = sizes["batch"], sizes["sequence"], sizes["hidden"]
    x, target = (jax.random.normal(key, dims, jnp.bfloat16).astype(layer.dtype) for key in keys)
    state, losses = train_state(layer, x), []
    if training:
        # A function of its own each time: JAX must not reuse what it has traced with the other accumulation.
        one_step = jax.jit(lambda *args: train_step.__wrapped__(*args), donate_argnums=0)
        compiled = own_compile(one_step, state, x, target, rehearse=rehearse, gemm=gemm)
        step = runnable(one_step, compiled, rehearse)
        for _ in range(STEPS):
            state, loss = step(state, x, target)
            losses.append(float(loss))

        def call() -> jax.Array:
            nonlocal state  # a step uses up the state it is given
            state, loss = step(state, x, target)
            return loss
    else:
        compiled = own_compile(layer.apply, state.params, x, rehearse=rehearse, gemm=gemm)
        call = functools.partial(runnable(layer.apply, compiled, rehearse), state.params, x)
        jax.block_until_ready(call())
    report = report_gemms(compiled)
    row = {"attention": layer.attention, "fp8_matmuls": len(report.fp8_rows), "matmuls": len(report.rows),
           "compiled_flops": report.flops, "fp8_flops_share": report.fp8_flops_share,
           "gemms": [f"{r.m}x{r.n}x{r.k} {r.library} {r.math_dtype} {r.epilogue} {r.precision} {r.tile}".strip()
                     for r in report.rows],
           "kernels": len(kernels(compiled)), "bytes": bytes_moved(compiled),
           "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
           "roofline_seconds": roofline_seconds(compiled, TARGETS["H200" if rehearse else "local"])}
    return row | ({"losses": losses} if training else {}), call


def build_best(precision: str, sizes: dict[str, int], gemm: str, training: bool,
               rehearse: bool) -> tuple[dict[str, Any], Callable[[], jax.Array]]:
    """With cuDNN's fused attention where it takes the layer, else with XLA's."""
    fields = {"hidden": sizes["hidden"], "heads": sizes["heads"], **PRECISIONS[precision]}
    row = {"dtype": jnp.dtype(fields["dtype"]).name, "fp8": fields.get("fp8", False), "gemm": gemm}
    if row["dtype"] == "bfloat16":
        try:
            built, call = build(GPTLayer(**fields, attention="cudnn"), sizes, gemm, training, rehearse)
            return row | built, call
        except Exception as error:
            row["cudnn_refused"] = sentence(error)
    built, call = build(GPTLayer(**fields), sizes, gemm, training, rehearse)
    return row | built, call


def measure(training: bool, gemm: str, precisions: tuple[str, ...], rehearse: bool) -> dict[str, Any]:
    """One pass over the layer in each precision, timed side by side. What one of them raises, its row says."""
    sizes = REHEARSAL if rehearse else SIZES
    rows, calls = {}, {}
    for precision in precisions:
        try:
            with fast_backward() if precision == FAST else contextlib.nullcontext():
                rows[precision], calls[precision] = build_best(precision, sizes, gemm, training, rehearse)
        except Exception as error:
            rows[precision] = {"error": sentence(error)}
    if not calls:
        raise RuntimeError(f"no precision ran: {rows}")
    for precision, timing in device_times(calls, repeats=3 if rehearse else 10, rounds=2 if rehearse else 5).items():
        rows[precision] |= as_row(timing) | {"longest": [list(kernel) for kernel in timing.kernels[:LONGEST]]}
    return {**sizes, "flops": model_flops(sizes, training), "precisions": rows}


def cases(rehearse: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """A training step and a forward pass with cuBLASLt's matmuls, then with those that XLA chooses by timing (of f32 it
    would have much to time, and no goal is about it; a rehearsal times nothing)."""
    one = functools.partial(functools.partial, measure, rehearse=rehearse)
    by_cublaslt = {"training step": one(True, "cublaslt", tuple(PRECISIONS)),
                   "forward": one(False, "cublaslt", ("bf16", "bf16+fp8", "f32"))}
    return by_cublaslt if rehearse else by_cublaslt | {
        "training step, autotuned": one(True, "auto", ("bf16", "bf16+fp8")),
        "forward, autotuned": one(False, "auto", ("bf16", "bf16+fp8"))}
