"""A training step of a GPT layer in which making FP8 costs little: a recipe to copy.

Copy `one_pass.py`, `fused_attention.py` and `fp8_attention.py` beside it. It needs JAX. Chapter 15
takes the steps that lead here. What it does beside the FP8 matmuls, and why:

- For the backward pass it saves codes, in the layout in which they are multiplied there, not the
  tensors that they were made of.
- `one_pass` makes codes, their transpose and the amax of what it computes itself: a norm, gelu,
  their gradients, and the optimizer's new weights.
- So weights are quantized once for each step, where they are updated.
- All scales are made of all histories by one line, after the last amax.
- Attention keeps its scores on the chip, and computes them again in the backward pass. With cuDNN's
  it may be causal, and its forward pass may be FP8.
- With scales="static" nothing is measured: scales follow from shapes and the first weights.
- The backward matmuls add up carefully: cuBLASLt moves its partial sums to f32 registers at
  intervals. Gradients of weights sum over all tokens of a step.

    lean = Lean(hidden=4096, heads=32, optimizer=AdamW(rate=3e-4))
    state = warm_up(lean, new_state(lean, key), x, target)
    state, error = train_step(lean, state, x, target)

What it leaves out: dropout, several devices, microbatches, a margin on the scales, an embedding and
a loss of tokens (it learns a target; `apply` is a function like any other, to build a model with).
A causal mask needs cuDNN: JAX's attention kernel has none in its backward pass. With fp8=False it
is the same step in bf16, to compare with. Chapter 15 has both steps' times on an H200.

Test what XLA makes of the step. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts:
by XLA's default Triton may take these matmuls, and then they are not FP8.

    from fp8lens import inspect
    step = functools.partial(train_step, lean)
    rows = inspect(step, state, x, target, target="H100").report.fp8_rows
    assert len(rows) == 18  # six weights: forward, and two in the backward pass
    assert sum(row.precision == "HIGHEST" for row in rows) == 12

Gradients are written by hand: a function's gradient, as JAX derives it, would save what the
function was given. `apply` is nevertheless a function like any other, and `jax.grad` differentiates
what is around it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fp8_attention
from fused_attention import fused_attention
from one_pass import Made, Passed, one_pass

f32, bf16, e4m3, e5m2 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
STEPS_BACK = 16  # how many steps' amaxes a scale follows from

# Each weight's (outputs, inputs), as multiples of the hidden size; and the operand it multiplies.
WEIGHTS = {
    "q": (1, 1),
    "k": (1, 1),
    "v": (1, 1),
    "projection": (1, 1),
    "up": (4, 1),
    "down": (1, 4),
}
OPERAND = {
    **dict.fromkeys("qkv", "norm 1"),
    "projection": "heads",
    "up": "norm 2",
    "down": "gelu",
}
OPERANDS = [*dict.fromkeys(OPERAND.values())]
GRADIENTS = [f"gradient of {name}" for name in WEIGHTS]
# Results that a matmul's call writes in FP8, where they are; and what FP8 attention's backward pass
# reads and makes beside the gradients of q, k and v.
RESULTS = [f"result of {name}" for name in ("up", *"qkv")]
IN_ATTENTION = ["gradient of heads", "gradient of scores"]
MEASURED = [*OPERANDS, *RESULTS, *GRADIENTS, *IN_ATTENTION]  # in each pass over the layer
TENSORS = [*MEASURED, *WEIGHTS]  # what has a history and a scale


# The optimizer ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Descent:
    """Gradient descent. An optimizer of a pass has these three: how many f32 arrays like the weight
    it keeps; the scalars of a step, before which `count` steps were taken; and the new weight and
    arrays, elementwise and in f32.
    """

    rate: float = 0.1
    moments = 0

    def scalars(self, count: jax.Array) -> tuple[Any, ...]:
        """The rate."""
        return (self.rate,)

    def update(self, weight, gradient, rate):
        """The new weight."""
        return (weight - rate * gradient,)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """What optax.adamw computes, in the pass that quantizes the weights. `rate` may be a function
    of the number of steps before this one: with 1e-3 and no warm-up a layer of hidden size 4096
    diverges. Biases and norms decay, too.
    """

    rate: float | Callable[[jax.Array], Any] = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 1e-4
    moments = 2

    def scalars(self, count: jax.Array) -> tuple[Any, ...]:
        """The rate, and by what the moments are divided that began as zeros."""
        rate = self.rate(count) if callable(self.rate) else self.rate
        steps = (count + 1).astype(f32)
        return rate, 1 - self.b1**steps, 1 - self.b2**steps

    def update(self, weight, first, second, gradient, rate, first_share, second_share):
        """The new weight and moments."""
        first = self.b1 * first + (1 - self.b1) * gradient
        second = self.b2 * second + (1 - self.b2) * gradient * gradient
        change = first / first_share / (jnp.sqrt(second / second_share) + self.eps)
        return weight - rate * (change + self.decay * weight), first, second


@dataclasses.dataclass(frozen=True)
class Lean:
    """The layer's sizes, and who computes what. Raises ValueError for what does not fit."""

    hidden: int = 4096
    heads: int = 32
    # On a CPU only by="xla" and attention="xla" run; all of them compile for a Hopper.
    by: str = "mosaic"  # as in one_pass
    attention: str = "fused"  # or as jax.nn.dot_product_attention has it: "xla", "cudnn"
    # Save gelu's input, the largest saved tensor, in FP8: the matmul's call writes its codes and
    # its amax. Gelu and its gradient then compute with rounded numbers.
    up_in_fp8: bool = False
    # The backward matmuls ask for precision HIGHEST: careful sums. All stay FP8.
    careful: bool = True
    # Descent, AdamW, another class with their three members; or any transformation of Optax. Those
    # run in kernels of XLA's, and a pass over the new weights quantizes them.
    optimizer: Any = Descent()
    fp8: bool = True  # or the same step in bf16
    causal: bool = False  # a query sees itself and what is before it; not with "fused"
    # Which passes of attention multiply in FP8: "", "forward" or "both". By cuDNN or, to try it on
    # a CPU, "xla". On an H200 cuDNN's gradients of "both" were wrong: fp8_attention.py.
    fp8_attention: str = ""
    # "delayed": of amaxes of earlier steps. "static": of shapes and of how weights begin, once.
    scales: str = "delayed"

    def __post_init__(self) -> None:
        if self.heads < 1 or self.hidden % self.heads or self.hidden % 16:
            raise ValueError(
                f"a hidden size of {self.hidden} is not {self.heads} heads and a multiple of 16"
            )
        wants_cudnn = self.causal or self.fp8_attention
        if self.attention == "fused" and wants_cudnn:
            raise ValueError('a causal mask and FP8 attention need attention="cudnn", or "xla"')
        if self.fp8_attention not in ("", "forward", "both") or (
            self.fp8_attention and not self.fp8
        ):
            raise ValueError('fp8_attention is "", or "forward" or "both" with fp8=True')
        if self.scales not in ("delayed", "static"):
            raise ValueError(f'scales are "delayed" or "static", not {self.scales!r}')

    @property
    def measures(self) -> bool:
        """Whether a step takes amaxes."""
        return self.fp8 and self.scales == "delayed"

    def format_of(self, name: str) -> Any:
        """The FP8 format of one of TENSORS. cuDNN's attention takes and gives E4M3 alone."""
        by_attention = ("gradient of q", "gradient of k", "gradient of v")
        if name not in GRADIENTS or (self.fp8_attention == "both" and name in by_attention):
            return e4m3
        return e5m2

    def shape(self, name: str) -> tuple[int, int]:
        """A weight's (outputs, inputs)."""
        outputs, inputs = WEIGHTS[name]
        return outputs * self.hidden, inputs * self.hidden


class Slots(NamedTuple):
    """Dummy inputs, of zeros: their gradients carry the gradients of the weights and the amaxes out
    of a backward pass. Each application of a layer needs its own: the amaxes of shared ones would
    be added up.
    """

    weights: dict[str, jax.Array]  # bf16, the type of their gradients
    amaxes: dict[str, jax.Array]  # of MEASURED, f32[parts]; none if nothing is measured


# What is computed in passes: f32, and elementwise ------------------------------------------------


def same(x: jax.Array) -> Made:
    """What is quantized as it is."""
    return Made(x)


def gradient(g: jax.Array) -> Made:
    """A gradient of a product: its sum over the tokens is that of the bias."""
    return Made(g, summed=(g,))


def normed(x, mean, inverse, scale, bias) -> Made:
    """Layer norm, with its mean and inverse deviation of each row."""
    return Made((x - mean) * inverse * scale + bias)


def norm_gradient(g, x, residual, mean, inverse, of_g, of_both, scale) -> Made:
    """The gradient of layer norm's input, with that of the `residual` added. `of_g` and `of_both`
    are the means of each row that `_means_of_gradient` returns.
    """
    standard = (x - mean) * inverse
    of_x = inverse * (g * scale - of_g - standard * of_both) + residual
    return Made(of_x, (of_x,), (of_x, g * standard, g))


_GELU = 2 * (2 / jnp.pi) ** 0.5, 0.044715  # of the tanh form: tanh(z) = 2 sigmoid(2 z) - 1


def gelu(u: jax.Array, scale: jax.Array | None = None) -> Made:
    """As jax.nn.gelu computes it, with one exponential; of u or, with a scale, of its codes."""
    slope, cubic = _GELU
    u = u if scale is None else u * scale
    return Made(u * jax.nn.sigmoid(slope * (u + cubic * u * u * u)))


def gelu_gradient(g: jax.Array, u: jax.Array, scale: jax.Array | None = None) -> Made:
    """Of gelu's input."""
    slope, cubic = _GELU
    u = u if scale is None else u * scale
    share = jax.nn.sigmoid(slope * (u + cubic * u * u * u))
    return gradient(g * (share + u * share * (1 - share) * slope * (1 + 3 * cubic * u * u)))


# The layer ----------------------------------------------------------------------------------------


def product(a, b, a_scale, b_scale, factor: float = 1.0, precision: Any = None) -> jax.Array:
    """bf16[M, N] of codes a [M, K] and b [N, K], times a factor: one FP8 matmul. Numbers in bf16
    have no scales.
    """
    # XLA would merge small products that share an operand, as queries, keys and values do, and
    # would then multiply in bf16.
    a, b = jax.lax.optimization_barrier((a, b))
    if a.dtype == bf16:
        if factor != 1 and b.shape[1] < a.shape[0]:  # the weight is smaller than the result
            return jax.lax.dot(a, (b * factor).T)
        y = jax.lax.dot(a, b.T)
        return y if factor == 1 else y * factor
    # So XLA finds it: dequantized in the type of the result.
    a, b = a.astype(bf16) * (a_scale * factor).astype(bf16), b.astype(bf16) * b_scale.astype(bf16)
    return jax.lax.dot(a, b.T, precision=precision)


def in_call(result: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A product's codes and amax, written as the matmul's call takes them in: chapter 05."""
    largest = float(jnp.finfo(e4m3).max)
    codes = jnp.clip(result * (1 / scale).astype(result.dtype), -largest, largest).astype(e4m3)
    return codes, jnp.max(jnp.abs(result)).astype(f32)


def attend(lean: Lean, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k^T) v of [batch, sequence, heads, size], in bf16."""
    if lean.attention == "fused":
        return fused_attention(q, k, v)
    how: Any = lean.attention
    root = (lean.heads / lean.hidden) ** 0.5
    return jax.nn.dot_product_attention(
        q, k, v, scale=root / _of_q(lean), is_causal=lean.causal, implementation=how
    )


class InFp8(NamedTuple):
    """What FP8 attention's backward pass needs of its forward pass."""

    codes: fp8_attention.Codes
    seen: fp8_attention.Attended


def _attend_in_fp8(
    lean: Lean, scales: dict[str, Any], results: list[jax.Array], heads: tuple[int, ...]
) -> tuple[Passed, dict[str, jax.Array], InFp8]:
    """The operand of the projection, amaxes, and what to save, of q, k and v as matmuls give them.
    Their calls write the codes, and attention's writes those of its result.
    """
    amaxes, parts = {}, []
    for name, result in zip("qkv", results, strict=True):
        of_one, amaxes[f"result of {name}"] = in_call(result, scales[f"result of {name}"])
        parts.append(of_one.reshape(heads))
    codes = fp8_attention.Codes(*parts)
    seen = fp8_attention.forward(codes, _in_attention(scales), **_way(lean))
    operand = seen.codes.reshape(-1, lean.hidden)
    return Passed(operand, operand.T, seen.amax, (), ()), amaxes, InFp8(codes, seen)


def _attention_back_in_fp8(
    lean: Lean, scales: dict[str, Any], saved: InFp8, g: jax.Array, heads: tuple[int, ...]
) -> tuple[list[Passed], dict[str, jax.Array]]:
    """The gradients of q, k and v as operands, in both layouts, and amaxes. The matmul's call that
    makes the gradient g also writes its codes.
    """
    amaxes = {}
    codes, amaxes["gradient of heads"] = in_call(g, scales["gradient of heads"])
    names = ("heads", "scores", *"qkv")
    of_gradients = fp8_attention.GradientScales(*(scales[f"gradient of {n}"] for n in names))
    found, measured = fp8_attention.backward_in_fp8(
        *saved,
        _in_attention(scales),
        codes.reshape(heads),
        of_gradients,
        **_way(lean),
    )
    amaxes["gradient of scores"] = measured.scores
    made = []
    for name, one in zip("qkv", found, strict=True):
        operand, scale = one.reshape(g.shape), getattr(of_gradients, name)
        total = jnp.sum(operand.astype(f32), axis=0) * scale
        made.append(Passed(operand, operand.T, getattr(measured, name), (), (total,)))
    return made, amaxes


def _in_attention(scales: dict[str, Any]) -> fp8_attention.Scales:
    q, k, v = (scales[f"result of {name}"] for name in "qkv")
    return fp8_attention.Scales(q, k, v, scales["heads"])


def _way(lean: Lean) -> dict[str, Any]:
    return {"causal": lean.causal, "by": lean.attention}


class Rows(NamedTuple):
    """What layer norm needs of each row, f32[M]: the mean, and one over the deviation."""

    mean: jax.Array
    inverse: jax.Array


def _statistics(x: jax.Array) -> Rows:
    """Those of x [M, hidden]."""
    x = x.astype(f32)
    mean = jnp.mean(x, axis=1)
    variance = jnp.mean(jnp.square(x), axis=1) - jnp.square(mean)
    return Rows(mean, jax.lax.rsqrt(jnp.maximum(variance, 0) + 1e-5))


def _means_of_gradient(
    g: jax.Array, x: jax.Array, rows: Rows, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the gradient of layer norm takes off each row."""
    scaled = g.astype(f32) * scale
    standard = (x.astype(f32) - rows.mean[:, None]) * rows.inverse[:, None]
    return jnp.mean(scaled, axis=1), jnp.mean(scaled * standard, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(
    lean: Lean,
    slots: Slots,
    others: dict[str, jax.Array],
    codes: dict[str, tuple[jax.Array, jax.Array]],
    scales: dict[str, jax.Array],
    x: jax.Array,
) -> jax.Array:
    """The layer's output for x bf16[batch, sequence, hidden].

    `others` are biases and norms; `codes` those of the weights, and transposed; `scales` those of
    TENSORS. The gradients of `slots` are those of the weights, and the amaxes; codes and scales
    have none. Raises ValueError for another x.
    """
    return _forward(lean, slots, others, codes, scales, x)[0]


def _pass(
    lean: Lean,
    scales: dict[str, Any],
    name: str,
    function,
    tensors,
    rows=(),
    columns=(),
    scalars=(),
    keep=(),
) -> Passed:
    """The pass that makes codes of one of TENSORS. That of a weight overwrites what it keeps."""
    if not lean.fp8:
        return _in_bf16(function, tensors, rows, columns, scalars, keep)
    options = {"scale": scales[name], "dtype": lean.format_of(name), "keep": keep, "by": lean.by}
    options |= {"overwrite": bool(keep) and name in WEIGHTS, "measure": lean.measures}
    return one_pass(function, tensors, rows, columns, scalars, **options)


def _in_bf16(function, tensors, rows, columns, scalars, keep) -> Passed:
    """What a pass computes, by XLA's kernels. A bf16 matmul reads its operands in any layout, so no
    kernel transposes; and there is no amax.
    """
    values = [tensor.astype(f32) for tensor in tensors]
    made = function(*values, *(row[:, None] for row in rows), *columns, *scalars)
    rounded, summed = made.quantized.astype(bf16), made.summed
    if keep and summed:
        # XLA would write in f32 what it sums, and convert it in a second kernel.
        rounded = jax.lax.optimization_barrier(rounded)
        summed = [rounded.astype(f32) if v is made.quantized else v for v in summed]
    kept = tuple(
        rounded if value is made.quantized and dtype == bf16 else value.astype(dtype)
        for value, dtype in zip(made.kept, keep, strict=True)
    )
    return Passed(rounded, rounded.T, (), kept, tuple(jnp.sum(v, axis=0) for v in summed))


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    operands: dict[str, jax.Array]  # codes of OPERANDS, transposed
    weights: dict[str, jax.Array]  # codes of WEIGHTS, transposed
    amaxes: dict[str, jax.Array]
    x: jax.Array  # what is normed, bf16[M, hidden]
    rows: Rows
    after: jax.Array  # x after attention, and what is normed again
    after_rows: Rows
    up: jax.Array  # gelu's input
    of_attention: Any  # its gradient; or InFp8
    others: dict[str, jax.Array]
    scales: dict[str, jax.Array]


def _forward(lean, slots, others, codes, scales, x) -> tuple[jax.Array, Saved]:
    if x.ndim != 3 or x.shape[2] != lean.hidden or x.dtype != bf16:
        raise ValueError(
            f"the layer takes bf16[batch, sequence, {lean.hidden}], not {x.dtype}{list(x.shape)}"
        )
    batch, sequence, _ = shape = x.shape
    passed = functools.partial(_pass, lean, scales)

    def dense(name: str, operand: Passed, factor: float = 1.0) -> jax.Array:
        args = operand.codes, codes[name][0], scales[OPERAND[name]], scales[name]
        y = product(*args, factor)
        return y + (others[f"{name} bias"] * factor).astype(bf16)

    def norm(name: str, x: jax.Array) -> tuple[Rows, Passed]:
        rows, columns = _statistics(x), [others[f"{name} scale"], others[f"{name} bias"]]
        return rows, passed(name, normed, [x], rows, columns)

    x = x.reshape(-1, lean.hidden)
    rows, norm_1 = norm("norm 1", x)
    heads = batch, sequence, lean.heads, -1
    factors = {"q": _of_q(lean), "k": 1.0, "v": 1.0}
    qkv = [dense(name, norm_1, factors[name]) for name in factors]
    amaxes: dict[str, jax.Array] = {}
    of_attention: Any
    if lean.fp8_attention:
        heads_seen, amaxes, of_attention = _attend_in_fp8(lean, scales, qkv, heads)
    else:
        of_heads = [one.reshape(heads) for one in qkv]
        seen, of_attention = jax.vjp(functools.partial(attend, lean), *of_heads)
        heads_seen = passed("heads", same, [seen.reshape(x.shape)])
    after = x + dense("projection", heads_seen)

    after_rows, norm_2 = norm("norm 2", after)
    up = dense("up", norm_2)
    if lean.up_in_fp8:
        up, amaxes["result of up"] = in_call(up, scales["result of up"])
    active = passed("gelu", gelu, [up], scalars=_of_up(lean, scales))
    y = after + dense("down", active)

    made = {"norm 1": norm_1, "heads": heads_seen, "norm 2": norm_2, "gelu": active}
    saved = Saved(
        {name: one.transposed for name, one in made.items()},
        {name: of_w[-1] if lean.fp8 else of_w[0].T for name, of_w in codes.items()},
        {name: one.amaxes for name, one in made.items()} | amaxes,
        x,
        rows,
        after,
        after_rows,
        up,
        of_attention,
        others,
        scales,
    )
    return y.reshape(shape), saved


def _of_up(lean: Lean, scales: dict[str, jax.Array]) -> list[jax.Array]:
    """The scale of what `up` gives, if that is FP8."""
    return [scales["result of up"]] if lean.up_in_fp8 else []


def _of_q(lean: Lean) -> float:
    """The part of attention's factor that q has: all of it if q's scale takes it for nothing, or if
    attention takes none.
    """
    return (lean.heads / lean.hidden) ** 0.5 if lean.fp8 or lean.attention == "fused" else 1.0


def _backward(lean: Lean, saved: Saved, g: jax.Array) -> tuple[Any, ...]:
    scales, others = saved.scales, saved.others
    passed = functools.partial(_pass, lean, scales)
    amaxes, weights, new = dict(saved.amaxes), {}, {}
    sums = jax.lax.Precision.HIGHEST if lean.careful else None

    def to_operand(name: str, made: Passed, factor: float = 1.0) -> jax.Array:
        """The gradient of a weight is noted; that of what it multiplies, returned."""
        operand, of_g = OPERAND[name], scales[f"gradient of {name}"]
        amaxes[f"gradient of {name}"] = made.amaxes
        args = made.transposed, saved.operands[operand], of_g, scales[operand]
        weights[name] = product(*args, factor, sums)
        new[f"{name} bias"] = made.sums[0] * factor
        return product(made.codes, saved.weights[name], of_g, scales[name], factor, sums)

    batch, sequence, _ = shape = g.shape
    g = g.reshape(saved.x.shape)
    of_active = to_operand("down", passed("gradient of down", gradient, [g]))
    made = passed(
        "gradient of up", gelu_gradient, [of_active, saved.up], scalars=_of_up(lean, scales)
    )
    of_norm = to_operand("up", made)

    scale = others["norm 2 scale"]
    rows = *saved.after_rows, *_means_of_gradient(of_norm, saved.after, saved.after_rows, scale)
    tensors = [of_norm, saved.after, g]
    made = passed("gradient of projection", norm_gradient, tensors, rows, [scale], keep=[bf16])
    (g,), (_, new["norm 2 scale"], new["norm 2 bias"]) = made.kept, made.sums
    seen = to_operand("projection", made)

    heads = batch, sequence, lean.heads, -1
    if lean.fp8_attention == "both":
        of_qkv, found = _attention_back_in_fp8(lean, scales, saved.of_attention, seen, heads)
        amaxes |= found
    else:
        if lean.fp8_attention:
            codes, attended = saved.of_attention
            results = fp8_attention.backward(
                codes, attended, _in_attention(scales), seen.reshape(heads), **_way(lean)
            )
        else:
            results = saved.of_attention(seen.reshape(heads))
        of_qkv = [
            passed(f"gradient of {name}", gradient, [result.reshape(g.shape)])
            for name, result in zip("qkv", results, strict=True)
        ]
    parts = []
    for name, made in zip("qkv", of_qkv, strict=True):
        parts.append(to_operand(name, made, _of_q(lean) if name == "q" else 1.0))
    of_norm = parts[0] + parts[1] + parts[2]

    scale = others["norm 1 scale"]
    rows = *saved.rows, *_means_of_gradient(of_norm, saved.x, saved.rows, scale)
    # In no pass: nothing is quantized, and for the first layer the compiler leaves out what it can.
    made = _in_bf16(norm_gradient, [of_norm, saved.x, g], rows, [scale], [], [bf16])
    (of_x,), (_, new["norm 1 scale"], new["norm 1 bias"]) = made.kept, made.sums
    measured = {name: amaxes[name].ravel() for name in _parts(lean, g.shape[0])}
    return Slots(weights, measured), new, None, None, of_x.reshape(shape)


apply.defvjp(_forward, _backward)

# Training -----------------------------------------------------------------------------------------


class State(NamedTuple):
    """What a step starts from and what it returns."""

    weights: dict[str, jax.Array]  # f32[outputs, inputs]
    codes: dict[str, tuple[jax.Array, ...]]  # of the weights; and transposed. Or (bf16,)
    code_scales: dict[str, Any]  # those of these codes; None in bf16
    others: dict[str, jax.Array]  # biases and norms, f32
    # of TENSORS' amaxes, f32[TENSORS, STEPS_BACK], the latest first. None if nothing is measured
    histories: jax.Array | None
    taken: jax.Array  # how many steps, i32
    moments: Any  # the optimizer's: of each weight, bias and norm; or Optax's state


def scales_of(
    lean: Lean, histories: jax.Array | None, shape: tuple[int, ...] = (1, 1)
) -> dict[str, Any]:
    """The scale of each of TENSORS, for x of this shape: the largest amax of the history goes to
    the format's largest number. Static ones need no history; in bf16 there are none.
    """
    if not lean.fp8:
        return dict.fromkeys(TENSORS)
    if not lean.measures:
        return static_scales(lean, *shape[:2])
    largest = [float(jnp.finfo(lean.format_of(name)).max) for name in TENSORS]
    amaxes = jnp.max(jnp.asarray(histories), axis=1)
    scales = jnp.maximum(amaxes / jnp.array(largest), jnp.finfo(f32).tiny)
    return dict(zip(TENSORS, jnp.where(amaxes > 0, scales, 1.0), strict=True))


def static_scales(lean: Lean, batch: int, sequence: int) -> dict[str, jax.Array]:
    """A power of two near each tensor's deviation before the first step, for x and a target of
    deviation 1: so codes are about 1, and E4M3 has room for numbers 448 times as large.

    Weights begin with a deviation of 1 / sqrt(inputs), and results with 1. Attention averages: what
    it gives is smaller by about the square root of how many keys it averages, and so are the
    gradients of q, k and v. The gradient of the mean squared error is 2 / size times the error.
    """
    deviations = dict.fromkeys(TENSORS, 1.0)
    deviations |= {name: lean.shape(name)[1] ** -0.5 for name in WEIGHTS}
    averaged, error = sequence**-0.5, 2 / (batch * sequence * lean.hidden)
    deviations |= {"heads": averaged, "result of q": _of_q(lean)}
    deviations |= dict.fromkeys([*GRADIENTS, *IN_ATTENTION], error)
    deviations |= {f"gradient of {name}": error * averaged for name in "qkv"}
    deviations["gradient of scores"] = error / averaged / sequence
    return {name: jnp.float32(2.0 ** round(math.log2(d))) for name, d in deviations.items()}


def remember(histories: Any, amaxes: dict[str, jax.Array]) -> jax.Array:
    """The histories after a step that measured parts' `amaxes`, of all tensors at once. One that is
    not finite is left out; what was not measured gets 0.
    """
    longest = max(parts.size for parts in amaxes.values())
    latest = [amaxes.get(name, jnp.zeros(1)).ravel() for name in TENSORS]
    parts = [jnp.pad(of_one, (0, longest - of_one.size)) for of_one in latest]
    largest = jnp.max(jnp.stack(parts), axis=1, keepdims=True)
    kept = jnp.concatenate([largest, histories[:, :-1]], axis=1)
    return jnp.where(jnp.isfinite(largest), kept, histories)


@functools.partial(jax.jit, static_argnums=0)
def new_state(lean: Lean, key: jax.Array) -> State:
    """The state before the first step. Weights have their own amax's scale; the others' is 1, with
    which small gradients vanish: `warm_up` before you train.
    """
    weights = {}
    for name, used in zip(WEIGHTS, jax.random.split(key, len(WEIGHTS)), strict=True):
        outputs, inputs = lean.shape(name)
        weights[name] = jax.random.normal(used, (outputs, inputs)) * inputs**-0.5
    others = {f"{name} bias": jnp.zeros(lean.shape(name)[0]) for name in WEIGHTS}
    for norm in ("norm 1", "norm 2"):
        others |= {f"{norm} scale": jnp.ones(lean.hidden), f"{norm} bias": jnp.zeros(lean.hidden)}
    if hasattr(lean.optimizer, "init"):  # Optax
        moments = lean.optimizer.init(weights | others)
    else:
        count = range(lean.optimizer.moments)
        moments = {
            n: tuple(jnp.zeros_like(p) for _ in count) for n, p in (weights | others).items()
        }
    histories = None
    if lean.measures:
        histories = remember(jnp.zeros((len(TENSORS), STEPS_BACK)), _amaxes(weights))
    scales, by_xla = scales_of(lean, histories), dataclasses.replace(lean, by="xla")
    codes = {name: _codes(_pass(by_xla, scales, name, same, [w])) for name, w in weights.items()}
    code_scales = {name: scales[name] for name in WEIGHTS}
    return State(weights, codes, code_scales, others, histories, jnp.int32(0), moments)


def _amaxes(weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.max(jnp.abs(w)) for name, w in weights.items()}


def _codes(made: Passed) -> tuple[jax.Array, ...]:
    """What a state keeps of a weight's pass."""
    return (made.codes,) if made.codes.dtype == bf16 else (made.codes, made.transposed)


def gradients(
    lean: Lean, state: State, scales: dict[str, jax.Array], x: jax.Array, target: jax.Array
) -> tuple[jax.Array, Slots, dict[str, jax.Array]]:
    """The mean squared error, f32; the gradients of the weights and the amaxes of MEASURED; the
    gradients of the others.
    """
    if target.shape != x.shape:
        raise ValueError(f"the target has x's shape {x.shape}, not {target.shape}")

    def loss(slots: Slots, others: dict[str, jax.Array]) -> jax.Array:
        y = apply(lean, slots, others, state.codes, scales | state.code_scales, x)
        return jnp.mean(jnp.square(y.astype(f32) - target))

    error, found = jax.value_and_grad(loss, (0, 1))(new_slots(lean, x), state.others)
    return error, *found


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    lean: Lean, state: State, x: jax.Array, target: jax.Array
) -> tuple[State, jax.Array]:
    """The state after one step of the optimizer for the mean squared error, and that error before
    the step, in f32. x and target are bf16[batch, sequence, hidden]. The state given is used up.
    Raises ValueError for another x.
    """
    scales = scales_of(lean, state.histories, x.shape)
    error, found, of_others = gradients(lean, state, scales, x, target)
    with jax.named_scope("optimizer"):
        return _updated(lean, state, scales, found, of_others), error


def _updated(lean: Lean, state: State, scales, found: Slots, of_others) -> State:
    """The state after the optimizer's step."""
    if hasattr(lean.optimizer, "init"):
        # A transformation of Optax may read all gradients at once.
        parameters = state.weights | state.others
        of_weights = {name: g.astype(f32) for name, g in found.weights.items()}
        change, moments = lean.optimizer.update(of_weights | of_others, state.moments, parameters)
        new = {name: p + change[name] for name, p in parameters.items()}
        passes = {name: _pass(lean, scales, name, same, [new[name]]) for name in WEIGHTS}
    else:
        # Elementwise: the pass that quantizes a weight also updates it.
        new, moments, passes = {}, {}, {}
        scalars = lean.optimizer.scalars(state.taken)
        function = functools.partial(_update, lean.optimizer)
        for name, w in state.weights.items():
            kept = w, *state.moments[name]
            tensors, keep = [*kept, found.weights[name]], [f32] * len(kept)
            passes[name] = _pass(lean, scales, name, function, tensors, [], [], scalars, keep)
            new[name], *moments[name] = passes[name].kept
        for name, g in of_others.items():
            given = state.others[name], *state.moments[name], g
            new[name], *moments[name] = lean.optimizer.update(*given, *scalars)
        moments = {name: tuple(arrays) for name, arrays in moments.items()}
    histories = state.histories
    if lean.measures:
        amaxes = {name: made.amaxes for name, made in passes.items()}
        histories = remember(histories, found.amaxes | amaxes)
    return State(
        {name: new[name] for name in state.weights},
        {name: _codes(made) for name, made in passes.items()},
        {name: scales[name] for name in WEIGHTS},
        {name: new[name] for name in state.others},
        histories,
        state.taken + 1,
        moments,
    )


def _update(optimizer: Any, *args: jax.Array) -> Made:
    kept = optimizer.update(*args)
    return Made(kept[0], kept)


def warm_up(lean: Lean, state: State, x: jax.Array, target: jax.Array) -> State:
    """The state with amaxes for the first scales; nothing else changes. Static scales need none.

    With scales of 1 a gradient below E5M2's smallest number vanishes, and with it all gradients
    behind it. Each of three passes measures those that the one before could not see.
    """
    for _ in range(3 if lean.measures else 0):
        state = state._replace(histories=_measured(lean, state, x, target))
    return state


@functools.partial(jax.jit, static_argnums=0)
def _measured(lean: Lean, state: State, x: jax.Array, target: jax.Array) -> jax.Array:
    """The histories after a step that is not taken."""
    _, found, _ = gradients(lean, state, scales_of(lean, state.histories), x, target)
    return remember(state.histories, found.amaxes | _amaxes(state.weights))


def new_slots(lean: Lean, x: jax.Array) -> Slots:
    """Zeros, of the shapes of what a backward pass returns in their place."""
    weights = {name: jnp.zeros(lean.shape(name), bf16) for name in WEIGHTS}
    parts = _parts(lean, x.size // lean.hidden)
    return Slots(weights, {name: jnp.zeros(count) for name, count in parts.items()})


def _parts(lean: Lean, tokens: int) -> dict[str, int]:
    """Which of MEASURED are measured, and of how many parts: a call gives one amax, XLA's passes
    one for each token, and the kernel's one for 128 numbers of it.
    """
    if not lean.measures:
        return {}
    by_calls = ["result of up"] if lean.up_in_fp8 else []
    if lean.fp8_attention:
        by_calls += ["heads", *(f"result of {name}" for name in "qkv")]
    if lean.fp8_attention == "both":
        by_calls += [*IN_ATTENTION, *(f"gradient of {name}" for name in "qkv")]
    parts = {}
    for name in (*OPERANDS, *GRADIENTS):
        width = 4 * lean.hidden if name in ("gelu", "gradient of up") else lean.hidden
        parts[name] = tokens * (1 if lean.by == "xla" else width // 128)
    return parts | dict.fromkeys(by_calls, 1)


def example(steps: int = 10, **options: Any) -> list[float]:
    """The errors of some steps of a small layer, on a CPU too."""
    lean = Lean(hidden=64, heads=2, by="xla", attention="xla", optimizer=AdamW(3e-3), **options)
    x, target = (jax.random.normal(key, (2, 16, 64), bf16) for key in map(jax.random.key, (1, 2)))
    state = warm_up(lean, new_state(lean, jax.random.key(0)), x, target)
    errors = []
    for _ in range(steps):
        state, error = train_step(lean, state, x, target)
        errors.append(float(error))
    return errors


if __name__ == "__main__":
    for fp8 in (False, True):
        errors = example(fp8=fp8)
        print(
            f"{'FP8' if fp8 else 'bf16'}: the error falls from {errors[0]:.3f} to {errors[-1]:.3f}"
        )
