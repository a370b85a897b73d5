"""A transformer that trains in f32, in bf16, or in bf16 with its matmuls in FP8.

Copy `fp8_linear.py` beside it. It needs JAX and Optax. Chapter 14 trains it. Each choice has its
reason next to it. `unit_scaling.py` and `scale_propagation.py` have decoders of other classes, and
register what these compute otherwise. With tokens i32[batch, length + 1]:

    decoder = Decoder("fp8", letters=128)
    optimizer = optax.adamw(1e-3)
    state = new_state(decoder, optimizer, jax.random.key(0))
    for tokens in text:
        state, loss = train_step(decoder, optimizer, state, tokens)

What it leaves out: a margin on the scales, careful sums in the backward pass, checkpoints (a
checkpoint needs all of `State`), several devices (chapter 16). `lean_step.py` has careful sums, and
makes FP8 of its tensors in fewer passes.

Test what XLA makes of the step. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts:
by XLA's default Triton may take these matmuls, and then they are not FP8.

    from fp8lens import assert_fp8_gemms
    step = functools.partial(train_step, decoder, optimizer)
    assert_fp8_gemms(step, state, tokens, count=3 * len(decoder.in_fp8), target="H100")
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fp8_linear import Amaxes, backward, forward

f32, bf16 = jnp.float32, jnp.bfloat16

# How many steps back a scale looks. A longer history is safer from overflow if large amaxes come
# back; after a single large amax it keeps the scale coarse for longer. Transformer Engine and Flax
# look back 1024 steps, more than the small runs of the course have.
STEPS_BACK = 16

# FP8 ----------------------------------------------------------------------------------------------


@jax.custom_vjp
def delayed(x: jax.Array, w: jax.Array, amaxes: jax.Array) -> jax.Array:
    """x [M, K] times w [N, K] in FP8, with scales of earlier steps. `amaxes` f32[3, STEPS_BACK] are
    those of x, w and the result's gradient, the latest first. Their gradient is their new value.

    This is `fp8_linear`, with all histories of a layer in one array.
    """
    return forward(x, w, Amaxes(*amaxes))[0]


def _forward(x: jax.Array, w: jax.Array, amaxes: jax.Array) -> tuple[jax.Array, Any]:
    return forward(x, w, Amaxes(*amaxes))


def _backward(saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    of_x, of_w, amaxes = backward(saved, g)
    return of_x, of_w, jnp.stack(amaxes)


delayed.defvjp(_forward, _backward)

# The decoder --------------------------------------------------------------------------------------


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm, without weights. Squares are summed in f32: in bf16 the sum would lose its small
    summands.
    """
    square = jnp.mean(jnp.square(x.astype(f32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What is trained, and in which precision. Raises ValueError for sizes that do not fit."""

    precision: str = "fp8"  # or "bf16", "f32"
    letters: int = 128  # how many tokens there are
    width: int = 128
    heads: int = 4
    hidden: int = 512
    blocks: int = 2
    # These layers stay in bf16. The scores decide which letter is likely: their errors reach the
    # loss at once, and in a model of common size they are a small part of the work.
    in_bf16: tuple[str, ...] = ("scores",)
    # (x [M, K], w [N, K], amaxes) -> [M, N], with a gradient: another way to multiply in FP8.
    fp8: Callable[..., jax.Array] = delayed
    norm: Callable[[jax.Array], jax.Array] = norm

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"{self.heads} heads do not divide a width of {self.width} into even parts"
            )
        if unknown := set(self.in_bf16) - set(self.layers):
            raise ValueError(f"no layers {sorted(unknown)}; there are {', '.join(self.layers)}")

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Each layer's name and (outputs, inputs)."""
        wide, hidden = self.width, self.hidden
        block = {
            "qkv": (3 * wide, wide),
            "out": (wide, wide),
            "gate": (hidden, wide),
            "up": (hidden, wide),
            "down": (wide, hidden),
        }
        named = {f"{n}.{name}": sizes for n in range(self.blocks) for name, sizes in block.items()}
        return named | {"scores": (self.letters, wide)}

    @property
    def in_fp8(self) -> tuple[str, ...]:
        """The names of the layers that multiply in FP8."""
        if self.precision != "fp8":
            return ()
        return tuple(name for name in self.layers if name not in self.in_bf16)

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the layers whose operands have a history of amaxes."""
        return self.in_fp8

    @property
    def dtype(self) -> Any:
        """The type of what flows between the layers."""
        return f32 if self.precision == "f32" else bf16


def rotated(heads: jax.Array) -> jax.Array:
    """RoPE: queries or keys [batch, length, heads, size], each pair of numbers turned by an angle
    that grows with the place. So attention sees distances, and no table of places is needed.
    """
    half = heads.shape[-1] // 2
    place = jnp.arange(heads.shape[1], dtype=f32)[:, None]
    angle = place * 100.0 ** (-jnp.arange(half) / half)  # from 1 to almost 1/100 for each place
    cos, sin = (turn(angle)[:, None].astype(heads.dtype) for turn in (jnp.cos, jnp.sin))
    a, b = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def decode(
    decoder: Decoder,
    tokens: jax.Array,
    letters: jax.Array,
    dense: Callable[[str, jax.Array], jax.Array],
) -> jax.Array:
    """Scores f32[batch, length, letters] of the next token, for each of `tokens`. `letters` is the
    table of the embedding; dense(name, x) is a layer's product of x [M, K].
    """
    batch, length = tokens.shape
    x = letters[tokens] * decoder.width**0.5
    # A row a token: XLA makes no FP8 output of a result that is reshaped before it is converted.
    x = x.astype(decoder.dtype).reshape(batch * length, decoder.width)
    for n in range(decoder.blocks):
        heads = dense(f"{n}.qkv", decoder.norm(x)).reshape(batch, length, 3, decoder.heads, -1)
        q, k, v = (heads[:, :, i] for i in range(3))
        # Attention stays in bf16: its operands are results, and change in size within a text.
        seen = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + dense(f"{n}.out", seen.reshape(x.shape))
        h = decoder.norm(x)
        x = x + dense(f"{n}.down", jax.nn.silu(dense(f"{n}.gate", h)) * dense(f"{n}.up", h))
    # Softmax and loss in f32: differences of large numbers.
    return dense("scores", decoder.norm(x)).astype(f32).reshape(batch, length, decoder.letters)


# Training -----------------------------------------------------------------------------------------


class State(NamedTuple):
    """What a step starts from and what it returns: a checkpoint needs all of it."""

    weights: dict[str, jax.Array]  # f32: bf16 would lose changes below 1/256 of a weight
    amaxes: dict[str, jax.Array]  # of each FP8 layer, f32[3, STEPS_BACK]
    optimizer: Any


@functools.singledispatch
def new_weights(decoder: Decoder, key: jax.Array) -> dict[str, jax.Array]:
    """Weights f32[outputs, inputs] before the first step. A product keeps its operand's size."""
    table = {"letters": decoder.layers["scores"]}
    matrices = {name: sizes for name, sizes in decoder.layers.items() if name != "scores"}
    weights = {}
    for name, sizes in (table | matrices).items():
        key, used = jax.random.split(key)
        weights[name] = jax.random.normal(used, sizes) * sizes[1] ** -0.5
    return weights


def new_state(decoder: Decoder, optimizer: optax.GradientTransformation, key: jax.Array) -> State:
    """The state before the first step. Histories are empty, so the first step's scales are 1."""
    weights = new_weights(decoder, key)
    amaxes = {name: jnp.zeros((3, STEPS_BACK)) for name in decoder.measured}
    return State(weights, amaxes, optimizer.init(weights))


def weight_of(weights: dict[str, jax.Array], name: str) -> jax.Array:
    """A layer's weight. The table of letters is also that of the last layer."""
    return weights["letters" if name == "scores" else name]


@functools.singledispatch
def scores(
    decoder: Decoder, weights: dict[str, jax.Array], amaxes: dict[str, jax.Array], tokens: jax.Array
) -> jax.Array:
    """Scores f32[batch, length, letters] of the next token."""

    def dense(name: str, x: jax.Array) -> jax.Array:
        w = weight_of(weights, name)
        with jax.named_scope(name):
            if name in decoder.in_fp8:
                return decoder.fp8(x, w, amaxes.get(name))
            return jax.lax.dot(x, w.astype(x.dtype).T)

    return decode(decoder, tokens, weights["letters"], dense)


@functools.singledispatch
def loss(
    decoder: Decoder, weights: dict[str, jax.Array], amaxes: dict[str, jax.Array], tokens: jax.Array
) -> jax.Array:
    """The mean cross entropy of the next token, in nats, f32. `tokens` i32[batch, length + 1]."""
    given, expected = tokens[:, :-1], tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(
        scores(decoder, weights, amaxes, given), expected
    ).mean()


@functools.singledispatch
def gradients(
    decoder: Decoder, weights: dict[str, jax.Array], amaxes: dict[str, jax.Array], tokens: jax.Array
) -> tuple[jax.Array, tuple[Any, Any]]:
    """The loss; and the gradient of the weights, and of the amaxes: these are their new value."""
    return jax.value_and_grad(
        lambda weights, amaxes: loss(decoder, weights, amaxes, tokens), (0, 1)
    )(weights, amaxes)


def updated(
    optimizer: optax.GradientTransformation, state: State, gradient: Any, amaxes: Any
) -> State:
    """The state after a step. The gradient of the histories is their new value, `amaxes`: it
    replaces them, past the optimizer.
    """
    change, moments = optimizer.update(gradient, state.optimizer, state.weights)
    return State(optax.apply_updates(state.weights, change), amaxes, moments)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    decoder: Decoder, optimizer: optax.GradientTransformation, state: State, tokens: jax.Array
) -> tuple[State, jax.Array]:
    """The state after one step, and the loss before it. The state given is used up."""
    value, (gradient, amaxes) = gradients(decoder, state.weights, state.amaxes, tokens)
    return updated(optimizer, state, gradient, amaxes), value


def example(precision: str = "fp8", steps: int = 20) -> list[float]:
    """The losses of some steps on one text, on a CPU too."""
    decoder = Decoder(precision, letters=64, width=64, hidden=128, blocks=1)
    optimizer = optax.adamw(1e-2)
    tokens = jax.random.randint(jax.random.key(1), (4, 33), 0, decoder.letters)
    state, losses = new_state(decoder, optimizer, jax.random.key(0)), []
    for _ in range(steps):
        state, value = train_step(decoder, optimizer, state, tokens)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    for precision in ("bf16", "fp8"):
        losses = example(precision)
        print(f"{precision}: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
