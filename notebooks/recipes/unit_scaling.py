"""FP8 whose scales are never measured: they follow from shapes. A linear layer, and a decoder.

Copy `fp8_linear.py` and `fp8_decoder.py` beside it. It needs JAX and Optax. Chapter 13 derives it.

If weights begin with variance 1, and each product is multiplied by 1 / sqrt(K), then activations
and gradients have variance 1 too, as long as they are independent. E4M3 and E5M2 hold such numbers
as they are: they are cast without a scale. No amax is taken, there is no history, and in most calls
XLA makes the factor a constant of the matmul's call. A cast saturates, infinity too: look at the
loss for numbers that are not finite.

- `unit_linear` is a matmul of unit scaling: Blake et al. 2023 (arXiv 2303.11257), with u-muP's
  factor for both directions, 1 / sqrt(inputs), and a factor of its own for the weight's gradient
  (Blake et al. 2024, arXiv 2407.17465). An optimizer must not depend on that gradient's size: Adam
  does not, gradient descent and a clipped norm do.
- `munit_linear` is a matmul of munit scaling (Narayan et al. 2025, arXiv 2502.05967), which trained
  models of 1B to 13B parameters: the same casts, and the true gradients.
- `UnitDecoder` is a transformer around one of them. Its residual sums keep their variance. In unit
  scaling also the gated product is divided by the size that it has before the training. In munit
  scaling each branch ends with a norm instead of beginning with one. In both, the gradient enters
  the model at unit size, not divided by the number of tokens.

Its weights [N, K] are sqrt(K) times as large as common ones, and their best rate is another one:
look for it again. `adamw` divides it by sqrt(K), as muP does, so one rate suits several widths.

    decoder = UnitDecoder(letters=128)
    optimizer = adamw(0.5)
    state = new_state(decoder, optimizer, jax.random.key(0))
    for tokens in text:
        state, loss = train_step(decoder, optimizer, state, tokens)

What it leaves out: anything that measures, so tensors that grow in a training saturate (log them);
muP's rules for depth and for a table of scores of its own (here it is that of the embedding); a
factor for attention, whose result is smaller, the more so the later the token (u-muP divides it by
its mean size; the square root of softmax would keep it); munit scaling's weight decay.

Test what XLA makes of the step. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts:
by XLA's default Triton may take these matmuls, and then they are not FP8.

    from fp8lens import assert_fp8_gemms
    step = functools.partial(train_step, decoder, optimizer)
    assert_fp8_gemms(step, state, tokens, count=3 * len(decoder.in_fp8), target="H100")
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fp8_decoder
from fp8_decoder import Decoder, new_state, rotated, train_step, weight_of
from fp8_linear import e4m3, e5m2, f32, quantize

# The linear layer ---------------------------------------------------------------------------------


class Casts(NamedTuple):
    """The formats of the operands: of x and w, and of the result's gradient; None leaves them in
    x's type. With `own_size` the weight's gradient has a factor of its own, which brings it to unit
    size; otherwise it is the true one.
    """

    forward: Any = e4m3
    backward: Any = e5m2
    own_size: bool = True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def static_linear(casts: Casts, x: jax.Array, w: jax.Array) -> jax.Array:
    """x [.., K] times w [N, K], over sqrt(K): [.., N] in x's type. Raises ValueError for other
    shapes.
    """
    return _forward(casts, x, w)[0]


def _forward(casts: Casts, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    if w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x{list(x.shape)} and w{list(w.shape)} do not fit: give x [.., K] and w [N, K]"
        )
    x_q = _cast(x.reshape(-1, x.shape[-1]), casts.forward, x.dtype)
    w_q = _cast(w, casts.forward, x.dtype)
    y = _product(x_q, w_q, w.shape[1] ** -0.5, x.dtype)
    return y.reshape(*x.shape[:-1], -1), (x_q, w_q)


def _backward(casts: Casts, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_q, w_q = saved
    tokens, inputs = x_q.shape
    g_q = _cast(g.reshape(tokens, -1), casts.backward, g.dtype)
    # As in the forward pass: with another factor the sum of a residual's gradients would be wrong.
    x_gradient = _product(g_q, w_q.T, inputs**-0.5, g.dtype)
    # A sum over the tokens, in f32. Of bf16 operands XLA would make TF32 for it.
    own = tokens**-0.5 if casts.own_size else inputs**-0.5
    dtype = f32 if casts.forward else g.dtype
    w_gradient = _product(g_q.T, x_q.T, own, dtype).astype(f32)
    return x_gradient.reshape(*g.shape[:-1], -1), w_gradient


static_linear.defvjp(_forward, _backward)


def _cast(tensor: jax.Array, dtype: Any, otherwise: Any) -> jax.Array:
    """Codes without a scale. Beyond the range it saturates."""
    return tensor.astype(otherwise) if dtype is None else quantize(tensor, jnp.float32(1), dtype)


def _product(a: jax.Array, b: jax.Array, factor: float, dtype: Any) -> jax.Array:
    """`dtype`[M, N] of a [M, K] and b [N, K]. XLA makes the factor `alpha`, a constant of the
    call, and finds no scales.
    """
    sums = jax.lax.dot(a.astype(dtype), b.astype(dtype).T)
    return sums * jnp.asarray(factor, dtype)


def unit_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [.., K] times w [N, K] over sqrt(K), in FP8. w's gradient has unit size for the tokens of
    one call: under jax.vmap, or summed over microbatches, it is a sum of such gradients.
    """
    return static_linear(Casts(), x, w)


def munit_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [.., K] times w [N, K] over sqrt(K), in FP8, with the true gradients."""
    return static_linear(Casts(own_size=False), x, w)


# What else keeps the size of its numbers ----------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sized(x: jax.Array, forward: float, backward: float) -> jax.Array:
    """x times `forward`; its gradient is multiplied by `backward`."""
    return x * jnp.asarray(forward, x.dtype)


sized.defvjp(
    lambda x, forward, backward: (sized(x, forward, backward), None),
    lambda forward, backward, _, g: (g * jnp.asarray(backward, g.dtype),),
)

# The root of the mean of (silu(a) b)^2, of independent a and b with variance 1.
OF_GATED = 0.596


def of_scores(tokens: int, letters: int) -> float:
    """What brings the gradient of the scores to unit size: before training each of L letters has
    the probability 1 / L, and the loss is a mean over the tokens.
    """
    return tokens * letters / (letters - 1) ** 0.5


# The decoder --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class UnitDecoder(Decoder):
    """A decoder whose weights begin with variance 1. `new_state`, `train_step`, `loss` and `scores`
    of fp8_decoder take it; it has no amaxes.
    """

    munit: bool = False
    # In munit scaling, a branch's share of the variance of a residual sum: the same for all.
    branch: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.branch < 1:
            raise ValueError(f"a branch's share of {self.branch} is not between 0 and 1")

    @property
    def measured(self) -> tuple[str, ...]:
        """No layer has amaxes."""
        return ()

    def share(self, branch: int) -> float:
        """The share of the n-th branch of two in each block, from 0. In unit scaling, as u-muP has
        it: in the end all embeddings, all attention and all gated layers have contributed alike.
        """
        return self.branch if self.munit else 1 / (self.blocks + 1 + branch)

    def casts(self, name: str) -> Casts:
        """The formats of a layer's operands."""
        own_size = not self.munit and name != "scores"  # that table has a second gradient
        if name in self.in_fp8:
            return Casts(own_size=own_size)
        return Casts(None, None, own_size)


@fp8_decoder.new_weights.register
def new_weights(decoder: UnitDecoder, key: jax.Array) -> dict[str, jax.Array]:
    """Weights f32[outputs, inputs] with variance 1."""
    weights = fp8_decoder.new_weights.dispatch(Decoder)(decoder, key)
    return {name: w * w.shape[1] ** 0.5 for name, w in weights.items()}


@fp8_decoder.scores.register
def scores(decoder: UnitDecoder, weights: Any, amaxes: Any, tokens: jax.Array) -> jax.Array:
    """Scores f32[batch, length, letters] of the next token."""
    batch, length = tokens.shape

    def dense(name: str, x: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            return static_linear(decoder.casts(name), x, weight_of(weights, name))

    def attend(n: int, x: jax.Array) -> jax.Array:
        heads = dense(f"{n}.qkv", x).reshape(batch, length, 3, decoder.heads, -1)
        q, k, v = (heads[:, :, i] for i in range(3))
        seen = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return dense(f"{n}.out", seen.reshape(x.shape))

    def gated(n: int, x: jax.Array) -> jax.Array:
        h = jax.nn.silu(dense(f"{n}.gate", x)) * dense(f"{n}.up", x)
        if not decoder.munit:
            h = h * jnp.asarray(1 / OF_GATED, h.dtype)
        return dense(f"{n}.down", h)

    def residual(branch: Any, n: int, x: jax.Array) -> jax.Array:
        share = decoder.share(2 * n + (branch is gated))
        stays, joins = (1 - share) ** 0.5, share**0.5
        if decoder.munit:
            return stays * x + joins * decoder.norm(branch(n, x))
        # The gradient is made smaller where it leaves the branch, not where it enters it: so it has
        # unit size inside, and is the same.
        inside = branch(n, decoder.norm(sized(x, 1.0, joins)))
        return stays * x + sized(inside, joins, 1.0)

    x = weights["letters"][tokens].astype(decoder.dtype).reshape(batch * length, decoder.width)
    for n in range(decoder.blocks):
        x = residual(attend, n, x)
        x = residual(gated, n, x)
    found = dense("scores", decoder.norm(x)).astype(f32)
    found = sized(found, 1.0, of_scores(batch * length, decoder.letters))
    return found.reshape(batch, length, decoder.letters)


def adamw(rate: Any, decay: float = 1e-3) -> optax.GradientTransformation:
    """AdamW with muP's rates: a weight [N, K] has the rate `rate` / sqrt(K), so one rate suits
    several widths. `rate` is a number, or a function of the step's number. In a step each weight
    also loses `rate` times `decay` of itself, whatever its shape.
    """

    def by_inputs(changes: Any, _: Any) -> Any:
        return jax.tree.map(lambda change: change * change.shape[1] ** -0.5, changes)

    return optax.chain(
        optax.scale_by_adam(b2=0.95),
        optax.stateless(by_inputs),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(rate),
    )


def example(munit: bool = False, steps: int = 20) -> list[float]:
    """The losses of some steps on one text, on a CPU too."""
    decoder = UnitDecoder(munit=munit, letters=64, width=64, hidden=128, blocks=1)
    optimizer = adamw(1.0)
    tokens = jax.random.randint(jax.random.key(1), (4, 33), 0, decoder.letters)
    state, losses = new_state(decoder, optimizer, jax.random.key(0)), []
    for _ in range(steps):
        state, value = train_step(decoder, optimizer, state, tokens)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    for name, munit in (("unit scaling", False), ("munit scaling", True)):
        losses = example(munit)
        print(f"{name}: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
