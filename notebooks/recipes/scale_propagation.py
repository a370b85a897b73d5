"""Scale propagation: each value becomes data and a scale, and a program computes with such pairs.

Copy `fp8_decoder.py` and `fp8_linear.py` beside it. It needs JAX and Optax; without its last part,
a decoder, JAX alone. Chapter 13 derives it. The idea is Scalify's (Balança et al. 2024, arXiv
2407.17353), which was written for JAX, too.

A pair stands for data * scale, and the scale is a power of two. `propagated(f)` runs f's jaxpr, the
list of its operations, with a rule for each: the data of a product are the product of the data,
over about sqrt(K), and its scale is the product of the scales, times as much. So data have a size
near 1 whatever the values are, and all scales follow from shapes. A power of two rounds nothing, so
f's values are the same, but for what leaves the range of a type. A cast to FP8 casts the data: it
needs no amax.

    @jax.jit
    def step(x, w):
        pairs = pair(x, 1), pair(w, 2**-6)
        return value(propagated(cast_and_multiply)(*pairs))

`cast_and_multiply` is an ordinary function, which would lose small numbers alone. Make pairs inside
of `jax.jit`, with numbers as scales: then scales are constants of the program, and XLA leaves out
what they multiply. `rescale(x)`, written into f, measures x where the rules are wrong about a size,
and so is its gradient; without `propagated` it does nothing. The rules assume independent numbers
with mean 0, or positive ones with mean 1. Take a gradient inside, as `propagated(jax.grad(f))`
does: an outer jax.grad of `propagated(f)` would not use the gradients that f's functions define.

What it leaves out: `while` and `scan`, and operations that no rule is written for (a
NotImplementedError names the operation, and how to add a rule); scales for rows or blocks; the
optimizer, which reads values.

Test that the rewritten program still multiplies in FP8. Set
XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts: by XLA's default Triton may take
these matmuls, and then they are not FP8.

    from fp8lens import assert_fp8_gemms
    assert_fp8_gemms(step, x, w, count=1, target="H100")
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, mlir

import fp8_decoder
from fp8_decoder import Decoder, new_state, train_step

f32, e4m3, e5m2 = jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
Scale = Any  # a power of two: a float, or f32[] if it was measured


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale"],
    meta_fields=["positive", "fill"],
)
@dataclasses.dataclass(frozen=True)
class Pair:
    """data * scale. `positive`: no number is below 0. `fill`: all numbers are this one."""

    data: jax.Array
    scale: Scale
    positive: bool = False
    fill: float | None = None


def pair(x: jax.Array, scale: Scale) -> Pair:
    """x as a pair. Raises ValueError for a scale that is not a power of two."""
    if isinstance(scale, (int, float, np.floating)) and (scale <= 0 or math.frexp(scale)[0] != 0.5):
        raise ValueError(f"a scale of {scale} is no power of two: give {_near(abs(float(scale)))}")
    scale = float(scale) if isinstance(scale, (int, np.floating)) else scale
    return Pair(x / jnp.asarray(scale, x.dtype), scale)


def value(of: Any) -> jax.Array:
    """What a pair stands for, in its data's type; anything else as it is."""
    if not isinstance(of, Pair):
        return of
    info, scale = jnp.finfo(of.data.dtype), of.scale
    if isinstance(scale, float) and not float(info.tiny) <= scale <= float(info.max):
        half = 2.0 ** (round(math.log2(scale)) // 2)  # the type cannot hold the scale itself
        return of.data * jnp.asarray(half, info.dtype) * jnp.asarray(scale / half, info.dtype)
    return of.data * jnp.asarray(scale, info.dtype)


def _near(size: Any) -> Scale:
    """The power of two that is nearest to a size, by ratio; of 0 and infinity, 1."""
    if isinstance(size, (int, float)):
        return 2.0 ** round(math.log2(size)) if size and math.isfinite(size) else 1.0
    exponent = jnp.round(jnp.log2(size)).astype(jnp.int32)
    # By its bits: exp2 of a whole number is not exact everywhere.
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, f32)


def _larger(a: Scale, b: Scale) -> Scale:
    if isinstance(a, float) and isinstance(b, float):
        return max(a, b)
    return jnp.maximum(a, b)


# Where the rules are wrong ------------------------------------------------------------------------

_rescale = Primitive("rescale")
_rescale.def_impl(lambda x: x)
_rescale.def_abstract_eval(lambda x: x)
mlir.register_lowering(_rescale, lambda _, x: [x])
ad.deflinear2(_rescale, lambda g, x: [_rescale.bind(g)])


def rescale(x: jax.Array) -> jax.Array:
    """x. In a propagated program its data have a size of 1 from here on, measured at run time; and
    so has its gradient. This costs a pass over each.
    """
    return _rescale.bind(x)


# The program --------------------------------------------------------------------------------------


def propagated(function: Callable) -> Callable:
    """The same function, of pairs. Arrays that are no pairs stay what they are, such as tokens.
    The results that depend on a pair are pairs.
    """

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args, is_leaf=lambda one: isinstance(one, Pair))
        data = [one.data if isinstance(one, Pair) else one for one in leaves]
        closed, out = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(tree, data))
        results = _run(closed.jaxpr, closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run


INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def _run(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    """Each equation with its rule, if it reads a pair."""
    found = dict(zip(jaxpr.constvars, consts, strict=True))
    found |= dict(zip(jaxpr.invars, args, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else found[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        # Layers keep their names.
        names = str(equation.source_info.name_stack)
        with jax.named_scope(names) if names else contextlib.nullcontext():
            results = _results(equation, given)
        found |= dict(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _results(equation: Any, given: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name in INLINED:
        inner = equation.params[INLINED[name]]
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)
    if name == "broadcast_in_dim" and _is_number(given[0]):
        return [_filled(equation, given[0])]
    if any(isinstance(one, Pair) for one in given):
        return _by_rule(equation, given)
    return _as_it_is(equation, given)


def _is_number(x: Any) -> bool:
    """Whether x is a floating-point number that is known now."""
    known = not isinstance(x, (Pair, jax.core.Tracer))
    return known and np.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _filled(equation: Any, number: Any) -> Pair:
    """An array of one number, whose scale it brings along."""
    number, aval = float(number), equation.outvars[0].aval
    return _fill(number, aval, _near(abs(number)))


def _fill(number: float, like: Any, scale: Scale) -> Pair:
    """An array of one number, as large and of the type of another one. A scale that it does not
    fit saturates it.
    """
    largest = float(jnp.finfo(like.dtype).max)
    data = jnp.asarray(number, f32) / scale
    if math.isfinite(number):  # infinity stays
        data = jnp.clip(data, -largest, largest)
    data = data.astype(like.dtype)
    return Pair(jnp.broadcast_to(data, like.shape), scale, number >= 0, number)


KNOWN: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "convert_element_type": lambda a: a,
    "div": lambda a, b: a / b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "sub": lambda a, b: a - b,
}


def _as_it_is(equation: Any, given: list[Any]) -> list[Any]:
    """An equation without pairs. Numbers that are known stay known: a factor can join a scale."""
    name = equation.primitive.name
    is_float = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    if name in KNOWN and is_float and all(map(_is_number, given)):
        return [np.float32(KNOWN[name](*map(float, given)))]
    made = equation.primitive.bind(*given, **equation.params)
    return made if equation.primitive.multiple_results else [made]


def _by_rule(equation: Any, given: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name not in RULES:
        raise NotImplementedError(
            f"no rule says what becomes of the scale in {name!r}: "
            f'write one with @rule("{name}"), or compute this outside of `propagated`'
        )
    made = RULES[name](Operation(equation.primitive, equation.params), *given)
    return made if equation.primitive.multiple_results else [made]


# Rules --------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """What a rule receives before the pairs and arrays. Called with arrays, it computes them."""

    primitive: Primitive
    params: dict[str, Any]

    @property
    def name(self) -> str:
        """As a jaxpr prints it."""
        return self.primitive.name

    def __call__(self, *arrays: Any) -> Any:
        """The operation on arrays."""
        return self.primitive.bind(*arrays, **self.params)


RULES: dict[str, Callable] = {}


def rule(*names: str) -> Callable:
    """The decorated function is the rule of these operations."""

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _pair(x: Any) -> Pair:
    """What is no pair has the scale 1, a number that of its size."""
    if isinstance(x, Pair):
        return x
    if _is_number(x):
        return _fill(float(x), jnp.asarray(x), _near(abs(float(x))))
    return Pair(jnp.asarray(x), 1.0)


def _alike(*given: Any) -> tuple[list[jax.Array], Scale, bool]:
    """The data of all with one scale, the largest; that scale; whether all are positive. Where one
    number fills an array, or is one, it does not count: it may be huge, as in a mask, or 0.
    """
    pairs = [_pair(one) for one in given]
    scales = [one.scale for one in pairs if one.fill is None]
    scale = functools.reduce(_larger, scales or [one.scale for one in pairs])
    data = []
    for one in pairs:
        if one.fill is not None:
            data.append(_fill(one.fill, one.data, scale).data)
        elif isinstance(scale, float) and one.scale == scale:
            data.append(one.data)
        else:
            data.append(one.data * jnp.asarray(one.scale / scale, one.data.dtype))
    return data, scale, all(one.positive for one in pairs)


@rule(
    "broadcast_in_dim",
    "copy",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "reduce_max",
    "reduce_min",
    "reduce_precision",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
)
def _keep(do, first, *others):
    """The scale stays. What else is given are places."""
    filled = do.params.get("fill_value")
    if filled and not math.isnan(filled):
        raise NotImplementedError("no rule fills rows that are not there: gather with fill_value=0")
    made = do(first.data, *others)
    several = do.primitive.multiple_results
    pairs = [dataclasses.replace(first, data=one) for one in (made if several else [made])]
    return pairs if several else pairs[0]


@rule("optimization_barrier")
def _hold(do, *given):
    made = do(*(one.data if isinstance(one, Pair) else one for one in given))
    return [
        dataclasses.replace(one, data=data) if isinstance(one, Pair) else data
        for one, data in zip(given, made, strict=True)
    ]


@rule("neg")
def _neg(do, x):
    return Pair(do(x.data), x.scale)


@rule("abs")
def _abs(do, x):
    return Pair(do(x.data), x.scale, positive=True)


@rule("add", "add_any", "sub", "max", "min", "concatenate", "pad", "clamp")
def _join(do, *given):
    """A sum of numbers of one size has about that size."""
    data, scale, positive = _alike(*given)
    return Pair(do(*data), scale, positive and do.name != "sub")


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _compare(do, *given):
    data, _, _ = _alike(*given)
    return do(*data)


@rule("is_finite", "sign", "argmax", "argmin")
def _read(do, x):
    """What does not depend on the scale."""
    return do(x.data)


@rule("select_n")
def _select(do, which, *given):
    data, scale, positive = _alike(*given)
    return Pair(do(which, *data), scale, positive)


@rule("scatter-add")
def _scatter(do, x, places, updates):
    (x, updates), scale, positive = _alike(x, updates)
    return Pair(do(x, places, updates), scale, positive)


@rule("mul")
def _mul(do, a, b):
    a, b = _pair(a), _pair(b)
    return Pair(do(a.data, b.data), a.scale * b.scale, a.positive and b.positive)


@rule("div")
def _div(do, a, b):
    a, b = _pair(a), _pair(b)
    return Pair(do(a.data, b.data), a.scale / b.scale, a.positive and b.positive)


@rule("square", "integer_pow")
def _power(do, x):
    power = do.params.get("y", 2)
    return Pair(do(x.data), x.scale**power, x.positive or power % 2 == 0)


@rule("sqrt", "rsqrt")
def _root(do, x):
    """Of data * 4^n * rest, where rest is 1 or 2, the root has the scale 2^n."""
    numbers = math if isinstance(x.scale, float) else jnp
    exponent = numbers.log2(x.scale)
    half = numbers.floor(exponent / 2)
    rest = 2.0 ** (exponent - 2 * half)
    sign = 1 if do.name == "sqrt" else -1
    made = do(x.data * jnp.asarray(rest, x.data.dtype))
    return Pair(made, 2.0 ** (sign * half), positive=True)


@rule(
    "cos",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "one_minus_square",
    "pow",
    "sin",
    "tanh",
)
def _function(do, *given):
    """Of values. The result has a size of its own, near 1."""
    positive = do.name in ("exp", "exp2", "logistic")
    return Pair(do(*map(value, given)), 1.0, positive)


@rule("reduce_sum", "cumsum")
def _sum(do, x):
    axes = do.params["axes"] if "axes" in do.params else [do.params["axis"]]
    return _sized(do(x.data), [x.data.shape[axis] for axis in axes], x.scale, x.positive)


@rule("dot_general")
def _dot(do, a, b):
    a, b = _pair(a), _pair(b)
    (contracted, _), _ = do.params["dimension_numbers"]
    summed = [a.data.shape[axis] for axis in contracted]
    return _sized(do(a.data, b.data), summed, a.scale * b.scale, a.positive and b.positive)


def _sized(sums: jax.Array, summed: list[int], scale: Scale, positive: bool) -> Pair:
    """Sums of so many numbers, over what brings them to their summands' size: their count, if they
    are positive; its root, if their signs are mixed.
    """
    count = math.prod(summed)
    size = _near(float(count if positive else count**0.5))
    return Pair(sums / jnp.asarray(size, sums.dtype), scale * size, positive)


@rule("convert_element_type")
def _cast(do, x):
    """To FP8: the data, which saturate. To an integer: the value."""
    dtype = do.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        return do(value(x))
    if jnp.finfo(dtype).bits == 8:
        largest = float(jnp.finfo(dtype).max)
        return Pair(do(jnp.clip(x.data, -largest, largest)), x.scale, x.positive)
    return Pair(do(x.data), x.scale, x.positive)


@rule("rescale")
def _measure(do, x):
    data = x.data.astype(f32)
    largest = jnp.max(jnp.abs(data))
    largest = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    mean = jnp.sqrt(jnp.mean(jnp.square(data / largest)))
    size = largest * jnp.where((mean > 0) & jnp.isfinite(mean), mean, 1.0)
    size = _near(jnp.maximum(size, jnp.finfo(f32).tiny))
    return Pair(x.data / size.astype(x.data.dtype), x.scale * size, x.positive)


# A decoder ----------------------------------------------------------------------------------------


@jax.custom_vjp
def cast_and_multiply(x: jax.Array, w: jax.Array, unused: Any = None) -> jax.Array:
    """x [M, K] times w [N, K] in FP8, without scales: the operands are cast as they are, gradients
    to E5M2. For `propagated`: alone it loses small numbers, and beyond the range there is NaN.
    """
    return _multiply(x, w)[0]


def _multiply(x: jax.Array, w: jax.Array, unused: Any = None) -> tuple[jax.Array, Any]:
    x_q, w_q = x.astype(e4m3), w.astype(e4m3)
    return jax.lax.dot(x_q.astype(x.dtype), w_q.astype(x.dtype).T), (x_q, w_q)


def _gradients(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_q, w_q = saved
    g_q = g.astype(e5m2)
    of_x = jax.lax.dot(g_q.astype(g.dtype), w_q.astype(g.dtype))
    of_w = jax.lax.dot(g_q.astype(f32).T, x_q.astype(f32))
    return of_x, of_w, None


cast_and_multiply.defvjp(_multiply, _gradients)


@dataclasses.dataclass(frozen=True)
class PropagatedDecoder(Decoder):
    """The decoder of fp8_decoder, whose training step is rewritten."""

    fp8: Callable[..., jax.Array] = cast_and_multiply

    @property
    def measured(self) -> tuple[str, ...]:
        """No layer has amaxes."""
        return ()


def _pairs(weights: dict[str, jax.Array]) -> dict[str, Pair]:
    """Weights with the scale that their first numbers have, as `new_weights` makes them."""
    return {name: pair(w, _near(w.shape[1] ** -0.5)) for name, w in weights.items()}


@fp8_decoder.loss.register
def loss(decoder: PropagatedDecoder, weights: Any, amaxes: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the next token, f32."""
    of_values = functools.partial(fp8_decoder.loss.dispatch(Decoder), decoder)
    return value(propagated(of_values)(_pairs(weights), amaxes, tokens))


@fp8_decoder.gradients.register
def gradients(
    decoder: PropagatedDecoder, weights: Any, amaxes: Any, tokens: jax.Array
) -> tuple[jax.Array, tuple[Any, Any]]:
    """The loss and the gradients. Both passes are rewritten: the gradient of a rewritten forward
    pass would have no scales.
    """
    of_values = functools.partial(fp8_decoder.loss.dispatch(Decoder), decoder)
    both = propagated(jax.value_and_grad(of_values))
    error, found = both(_pairs(weights), amaxes, tokens)
    return value(error), ({name: value(of_w) for name, of_w in found.items()}, amaxes)


def example(steps: int = 20) -> list[float]:
    """The losses of some steps on one text, on a CPU too."""
    decoder = PropagatedDecoder(letters=64, width=64, hidden=128, blocks=1)
    optimizer = optax.adamw(1e-2)
    tokens = jax.random.randint(jax.random.key(1), (4, 33), 0, decoder.letters)
    state, losses = new_state(decoder, optimizer, jax.random.key(0)), []
    for _ in range(steps):
        state, error = train_step(decoder, optimizer, state, tokens)
        losses.append(float(error))
    return losses


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
