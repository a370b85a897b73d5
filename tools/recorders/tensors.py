"""What a small language model's tensors look like while it is trained, as `make tensors` records
it.

The decoder of the recipe fp8_decoder learns Shakespeare's plays, letter by letter, in float32 on
the CPU. Of the last block's down-projection, whose input is a gated product, this goes into
notebooks/results/tensors.json: the largest magnitude of input, weight and output's gradient in each
step; and, of the last step, the three tensors.
"""

import base64
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.training import shakespeare
from tools.recorders.data import RESULTS, provenance, signed, write

from fp8_decoder import Decoder, decode, new_weights, weight_of

STEPS, BATCH, LENGTH = 600, 16, 128
RATE = 3e-3  # AdamW's at its highest: it rises for 100 steps, then falls as a cosine
KEPT = 128  # tokens of the last step, of one text
DECODER = Decoder("f32", width=128, heads=4, hidden=512, blocks=2)
RECORDED = f"{DECODER.blocks - 1}.down"  # the layer whose tensors are recorded


def loss(
    weights: dict[str, Any], probe: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The mean cross entropy in nats a letter, and the recorded layer's input.

    `probe` is added to what this layer gives: its gradient is that of the result.
    """
    recorded = []

    def dense(name: str, x: jax.Array) -> jax.Array:
        product = x @ weight_of(weights, name).T
        if name != RECORDED:
            return product
        recorded.append(x)
        return product + probe

    scores = decode(DECODER, tokens[:, :-1], weights["letters"], dense)
    each = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
    return jnp.mean(each), recorded[0]


optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, RATE, 100, STEPS), weight_decay=0.1)


@jax.jit
def train_step(weights, state, tokens):
    """One step of AdamW, the loss before it, and the recorded layer's tensors."""
    probe = jnp.zeros((BATCH * LENGTH, DECODER.width))
    (error, x), (gradient, g) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        weights, probe, tokens
    )
    w = weights[RECORDED]
    change, state = optimizer.update(gradient, state, weights)
    return optax.apply_updates(weights, change), state, error, {"x": x, "w": w, "g": g}


def stored(tensor: jax.Array) -> dict[str, Any]:
    """In bfloat16: its bits, compressed, as text."""
    bits = np.asarray(tensor.astype(jnp.bfloat16)).view(np.uint16).astype("<u2")
    return {
        "shape": list(tensor.shape),
        "bfloat16": base64.b64encode(zlib.compress(bits.tobytes(), 9)).decode(),
    }


def measured(steps: int = STEPS) -> dict[str, Any]:
    """Train for so many steps, and return what the file holds."""
    random = np.random.default_rng(0)
    weights = new_weights(DECODER, jax.random.key(0))
    state, losses = optimizer.init(weights), []
    amaxes: dict[str, list[float]] = {name: [] for name in "xwg"}
    for _ in range(steps):
        tokens = jnp.asarray(shakespeare.batch(random, BATCH, LENGTH))
        weights, state, error, tensors = train_step(weights, state, tokens)
        losses.append(round(float(error), 5))
        for name, tensor in tensors.items():
            amaxes[name].append(
                float(np.format_float_scientific(np.float32(jnp.max(jnp.abs(tensor))), precision=5))
            )
    return provenance("make tensors", "jax", "optax") | {
        "text": shakespeare.DESCRIPTION,
        "parameters": sum(w.size for w in weights.values()),
        "losses": losses,
        "amaxes": amaxes,
        "tensors": {name: stored(tensor[:KEPT]) for name, tensor in tensors.items()},
    }


def main() -> None:
    """Train, and write the record."""
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    made = measured()
    write(RESULTS / "tensors.json", signed(made))
    before, after = made["losses"][0], np.mean(made["losses"][-50:])
    print(f"{STEPS} steps, from {before:.2f} to {after:.2f} nats a letter")


if __name__ == "__main__":
    main()
