"""The trained model that the chapter on inference quantizes, as `make model` records it.

It is the decoder of helpers.training.runs in bf16, trained on more text than a run there. Its
weights go into notebooks/results/shakespeare.safetensors, in bf16, as models are published.
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import safetensors.numpy

from helpers.training import runs, shakespeare
from tools.recorders.data import RESULTS, provenance

from fp8_decoder import new_state, train_step

STEPS, TEXTS, LENGTH = 2000, 16, 64
RATE, RISES = 4e-3, 60
OPTIMIZER = optax.adamw(
    optax.warmup_cosine_decay_schedule(0, RATE, RISES, STEPS), b2=0.95, weight_decay=0.1
)
FILE = RESULTS / "shakespeare.safetensors"


def trained() -> dict[str, jax.Array]:
    """The weights after the last step, f32[outputs, inputs] by name."""
    decoder = runs.WAYS["bf16"].decoder
    state = new_state(decoder, OPTIMIZER, jax.random.key(0))
    for number in range(STEPS):
        texts = shakespeare.batch(np.random.default_rng((0, number)), TEXTS, LENGTH)
        state, value = train_step(decoder, OPTIMIZER, state, jnp.asarray(texts))
        if number % 100 == 0:
            print(f"step {number}: loss {float(value):.3f}", flush=True)
    return state.weights


if __name__ == "__main__":
    weights = {name: np.asarray(w, ml_dtypes.bfloat16) for name, w in trained().items()}
    made = provenance("make model", "jax", "optax") | {"text": shakespeare.DESCRIPTION}
    said = {name: json.dumps(value) for name, value in made.items()}
    safetensors.numpy.save_file(weights, FILE, metadata=said)
    FILE.chmod(0o644)
