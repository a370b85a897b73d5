"""The runs of chapter 14: a small decoder trained in many ways, and what is looked at meanwhile.

A way has a name in WAYS. What is read, and for how long, is a plan: SHORT or LONG. Runs of the same
seed and plan begin with the same weights and read the same texts in the same order, so the
difference between two ways is taken seed by seed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from helpers.numerics.number_formats import snr_db
from helpers.training import shakespeare
from helpers.training.multipliers import Recipe, multiplier

from fp8_decoder import (
    Decoder,
    State,
    decode,
    gradients,
    loss,
    new_state,
    norm,
    train_step,
    updated,
    weight_of,
)
from fp8_linear import e4m3, e5m2, f32, quantize, scale_of
from scale_propagation import INLINED, PropagatedDecoder
from unit_scaling import UnitDecoder, adamw

STEPS, TEXTS, LENGTH = 300, 4, 64
RATE, RISES = 4e-3, 30  # AdamW's highest rate, and the steps until it is reached
UNSEEN_TEXTS = 64
SIZES: dict[str, Any] = {
    "letters": 128,
    "width": 128,
    "heads": 4,
    "hidden": 384,
    "blocks": 2,
}

# That of weights with variance 1, over sqrt(inputs): for both models the best of 1/8, 1/4, 1/2, 1
# and 2 on seeds 0 and 1. RATE was chosen for the common ones.
UNIT_RATE = 0.5
DECAY = 0.1


class Plan(NamedTuple):
    """What runs read, and for how long: so many steps of so many texts. Both functions take texts
    and length, and `read` a generator before them.
    """

    steps: int
    texts: int
    length: int
    read: Callable[[np.random.Generator, int, int], np.ndarray]
    unseen: Callable[[int, int], np.ndarray]


SHORT = Plan(STEPS, TEXTS, LENGTH, shakespeare.batch, shakespeare.unseen)
# In texts of this task outliers arise.
LONG = Plan(3000, 4, 128, shakespeare.backcopy, shakespeare.unseen_backcopy)


@functools.cache
def optimizer(plan: Plan, unit: bool) -> optax.GradientTransformation:
    """AdamW, of weights with variance 1 or of common ones; its rate falls to 0 at the last step.
    One object for all runs: train_step is compiled once for each decoder and optimizer.
    """
    highest = UNIT_RATE if unit else RATE
    rate = optax.warmup_cosine_decay_schedule(0, highest, RISES, plan.steps)
    if unit:  # a weight loses as much of itself in each step as with the other
        return adamw(rate, decay=DECAY * RATE / UNIT_RATE)
    return optax.adamw(rate, b2=0.95, weight_decay=DECAY)


OPTIMIZER = optimizer(SHORT, False)


class Way(NamedTuple):
    """How a run trains. `changed` has fields of the decoder; `rounded` names what, beside the
    matmuls' operands, is rounded to E4M3: "embedding" or "norms". `static` has scales that are
    never measured: "unit", "munit", which change the model and its rates too, or "propagated".
    """

    precision: str = "fp8"
    recipe: Recipe = Recipe()
    changed: tuple[tuple[str, Any], ...] = ()
    rounded: str | None = None
    static: str | None = None

    @property
    def decoder(self) -> Decoder:
        """The model of this way."""
        changed: Any = SIZES | dict(self.changed)
        if self.static == "propagated":
            return PropagatedDecoder(self.precision, **changed)
        if self.static:
            return UnitDecoder(self.precision, munit=self.static == "munit", **changed)
        if self.rounded == "norms":
            changed["norm"] = norm_of_rounded
        return Decoder(self.precision, fp8=multiplier(self.recipe), **changed)


PLAIN = Decoder("f32", **SIZES)


def _in_bf16(block: int | None = None) -> tuple[tuple[str, Any], ...]:
    """The field of a decoder in which the scores and a block stay in bf16."""
    names = tuple(name for name in PLAIN.layers if name.startswith(f"{block}."))
    return (("in_bf16", ("scores", *names)),)


BLOCKS = Recipe("blocks", backward=e4m3)  # as DeepSeek-V3: E4M3 for gradients too
WAYS = {
    "f32": Way("f32"),
    "bf16": Way("bf16"),
    "delayed": Way(),
    "current": Way(recipe=Recipe("current")),
    "blocks": Way(recipe=BLOCKS),
    "delayed, tensor core": Way(recipe=Recipe(tensor_core=True)),
    "current, tensor core": Way(recipe=Recipe("current", tensor_core=True)),
    "blocks, tensor core": Way(recipe=BLOCKS._replace(tensor_core=True)),
    # Scales that are never measured. The first two are also another model, so each stands beside
    # itself in bf16.
    "unit scaled": Way(static="unit"),
    "unit scaled, bf16": Way("bf16", static="unit"),
    "munit scaled": Way(static="munit"),
    "munit scaled, bf16": Way("bf16", static="munit"),
    "propagated": Way(static="propagated"),
    # Which layers stay in bf16. By default these are the scores.
    "scores in FP8": Way(changed=(("in_bf16", ()),)),
    "first block in bf16": Way(changed=_in_bf16(0)),
    "last block in bf16": Way(changed=_in_bf16(SIZES["blocks"] - 1)),
    "embedding in FP8": Way(rounded="embedding"),
    "norms of FP8": Way(rounded="norms"),
    # What else was tried.
    "forward in E5M2": Way(recipe=Recipe(forward=e5m2)),
    "gradients in E4M3": Way(recipe=Recipe(backward=e4m3)),
    "no scales": Way(recipe=Recipe("frozen")),  # the histories stay empty, so each scale is 1
    # In 4 bits: as the recipe nvfp4 does it, and without its transform and its rounding.
    "nvfp4": Way(recipe=Recipe("nvfp4")),
    "nvfp4, plain": Way(recipe=Recipe("nvfp4, plain")),
}
MAIN = tuple(WAYS)[:8]


@jax.custom_jvp
def rounded(tensor: jax.Array) -> jax.Array:
    """The numbers that E4M3 has nearest to the tensor's, by the tensor's own scale. The gradient
    passes as if nothing was rounded.
    """
    scale = scale_of(jnp.abs(tensor).astype(f32), e4m3)
    return quantize(tensor, scale, e4m3).astype(tensor.dtype) * scale.astype(tensor.dtype)


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))


def norm_of_rounded(x: jax.Array) -> jax.Array:
    """RMSNorm of a residual stream that is read in FP8."""
    return norm(rounded(x))


@functools.partial(jax.jit, static_argnums=(0, 3))
def unseen_loss(decoder: Decoder, weights: Any, amaxes: Any, plan: Plan = SHORT) -> jax.Array:
    """The loss on the texts that no step trains on, with the decoder's own precision."""
    return loss(decoder, weights, amaxes, jnp.asarray(plan.unseen(UNSEEN_TEXTS, plan.length)))


@functools.partial(jax.jit, static_argnums=0)
def _gradient(decoder: Decoder, weights: Any, amaxes: Any, tokens: jax.Array) -> Any:
    return gradients(decoder, weights, amaxes, tokens)[1][0]


def signal_to_noise(decoder: Decoder, state: State, tokens: np.ndarray) -> dict[str, float]:
    """For each weight, how far its gradient is from the one in f32, of the same weights and tokens:
    10 log10(|g|^2 / |g - g_f32|^2), in decibels; infinite where they are equal.
    """
    plain = dataclasses.replace(decoder, precision="f32", norm=norm)
    exact = _gradient(plain, state.weights, {}, tokens)
    given = _gradient(decoder, state.weights, state.amaxes, tokens)
    return {name: snr_db(exact[name], given[name]) for name in exact}


class Cast(NamedTuple):
    """What becomes of a tensor that is cast to FP8: the format, the root of the mean square before,
    and the shares of its numbers that are the format's largest or beyond, and that become 0.
    """

    dtype: str
    size: float
    saturated: float
    lost: float
    numbers: int


def casts(decoder: Decoder, state: State, tokens: np.ndarray) -> list[Cast]:
    """All casts to FP8 of a step's two passes, in their order."""
    given = state.weights, state.amaxes, jnp.asarray(tokens)
    program = jax.make_jaxpr(functools.partial(gradients, decoder))(*given)
    found: list[Cast] = []
    _watched(program.jaxpr, program.consts, jax.tree.leaves(given), found)
    return found


def _watched(jaxpr: Any, consts: Any, given: Any, found: list[Cast]) -> list[Any]:
    """The results of a jaxpr, and its casts to FP8."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))

    def read(one: Any) -> Any:
        return one.val if isinstance(one, Literal) else values[one]

    for equation in jaxpr.eqns:
        arrays = [read(one) for one in equation.invars]
        if name := INLINED.get(equation.primitive.name):
            inner = equation.params[name]
            made = _watched(inner.jaxpr, inner.consts, arrays, found)
        else:
            made = equation.primitive.bind(*arrays, **equation.params)
            made = made if equation.primitive.multiple_results else [made]
        if equation.primitive.name == "convert_element_type" and made[0].dtype in (e4m3, e5m2):
            x, codes = np.asarray(arrays[0], np.float32), np.asarray(made[0], np.float32)
            beyond = np.abs(x) >= float(jnp.finfo(made[0].dtype).max)
            size, lost = np.sqrt(np.mean(np.square(x))), np.mean((codes == 0) & (x != 0))
            shares = float(np.mean(beyond)), float(lost)
            found.append(Cast(str(made[0].dtype), float(size), *shares, x.size))
        values |= dict(zip(equation.outvars, made, strict=True))
    return [read(one) for one in jaxpr.outvars]


@jax.jit
def inputs(weights: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """What each layer multiplies with its weight, [M, K], as f32 computes it."""
    seen = {}

    def dense(name: str, x: jax.Array) -> jax.Array:
        seen[name] = x
        return x @ weight_of(weights, name).T

    decode(PLAIN, tokens[:, :-1], weights["letters"], dense)
    return seen


def flushed(x: np.ndarray, scale: float) -> float:
    """The share of x's numbers that are not 0 and become 0 in E4M3 with this scale."""
    x = np.asarray(x, np.float32)
    codes = np.asarray(quantize(jnp.asarray(x), jnp.float32(scale), e4m3), np.float32)
    return float(np.mean((codes == 0) & (x != 0)))


def texts(seed: int, number: int, plan: Plan = SHORT) -> jax.Array:
    """i32[texts, length + 1], what a step reads. It follows from the step's number, so a run that
    goes on from a checkpoint reads what it would have read.
    """
    random = np.random.default_rng((seed, number))
    return jnp.asarray(plan.read(random, plan.texts, plan.length))


class Step(NamedTuple):
    """What a step of a run gives: its number, the state after it, the loss before it."""

    number: int
    state: State
    loss: float


# Changes a state before a step of this number.
Meddle = Callable[[int, State], State]


def steps(
    way: Way,
    seed: int,
    count: int | None = None,
    meddle: Meddle | None = None,
    frozen_from: int | None = None,
    plan: Plan = SHORT,
) -> Iterator[Step]:
    """Train from the start, step by step, all steps of the plan or so many. The state that is given
    is valid until the next one. From step `frozen_from` on the histories stay as they are, and so
    do the scales.
    """
    decoder = way.decoder
    updates = optimizer(plan, way.static in ("unit", "munit"))
    state = new_state(decoder, updates, jax.random.key(seed))
    for number in range(plan.steps if count is None else count):
        if meddle:
            state = meddle(number, state)
        if number == frozen_from:
            decoder = way._replace(recipe=way.recipe._replace(scaling="frozen")).decoder
        tokens = texts(seed, number, plan)
        if way.rounded == "embedding":
            state, value = _step_with_rounded_letters(decoder, updates, state, tokens)
        else:
            state, value = train_step(decoder, updates, state, tokens)
        yield Step(number, state, float(value))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step_with_rounded_letters(
    decoder: Decoder, optimizer: Any, state: State, tokens: jax.Array
) -> tuple[State, jax.Array]:
    """train_step, with the table of letters read in FP8."""

    def of_rounded(weights: Any, amaxes: Any) -> jax.Array:
        read = weights | {"letters": rounded(weights["letters"])}
        return loss(decoder, read, amaxes, tokens)

    value, (gradient, amaxes) = jax.value_and_grad(of_rounded, (0, 1))(state.weights, state.amaxes)
    return updated(optimizer, state, gradient, amaxes), value


def latest_amaxes(state: State) -> dict[str, list[float]]:
    """Of each FP8 layer, the last step's amax of x, w and the result's gradient."""
    histories = jax.device_get(state.amaxes)
    return {name: history[:, 0].tolist() for name, history in histories.items()}


def outlier(layer: str = "1", from_step: int = 45, every: int = 6) -> Meddle:
    """From this step on one channel of a block's hidden layer doubles every so many steps: its row
    of "up" doubles, its column of "down" halves. The model computes the same function, exactly in
    bf16; what changes is the range of one FP8 operand.
    """

    def meddle(number: int, state: State) -> State:
        if number < from_step or (number - from_step) % every:
            return state
        up, down = state.weights[f"{layer}.up"], state.weights[f"{layer}.down"]
        changed = {
            f"{layer}.up": up.at[0].multiply(2),
            f"{layer}.down": down.at[:, 0].divide(2),
        }
        return state._replace(weights=state.weights | changed)

    return meddle
