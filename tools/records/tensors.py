"""What a small language model's tensors look like while it is trained, as `make training` records
it.

A decoder of two blocks learns Python's own documentation, which comes with Python, letter by
letter, in float32 on the CPU. Of the last block's down-projection, whose input is a gated product,
this goes into notebooks/results/training.json: the largest magnitude of input, weight and output's
gradient in each step; and, of the last step, the three tensors.
"""

import argparse
import ast
import base64
import datetime
import json
import platform
import pydoc_data.topics
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.records.results import digest
from tools.files import in_one_step
from tools.platforms import require_platform
from tools.records import sources

DATA = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results" / "training.json"
STEPS, BATCH, LENGTH, WIDTH, HIDDEN, HEADS, BLOCKS = 600, 16, 128, 128, 512, 4, 2
RATE = 3e-3  # AdamW's at its highest: it rises for 100 steps, then falls as a cosine
KEPT = 128  # tokens of the last step, of one text


def text(python: str | None = None) -> np.ndarray:
    """The documentation's letters as numbers: of this Python, or of another, which GitHub then has
    to give.

    Raises sources.Unreachable.
    """
    topics = pydoc_data.topics.topics
    if python and python != platform.python_version():
        module = sources.text_at(f"{sources.RAW}/python/cpython/v{python}/Lib/pydoc_data/topics.py")
        topics = ast.literal_eval(module.partition("topics = ")[2])
    return np.frombuffer(
        "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace"), np.uint8
    )


def new_weights(key: jax.Array) -> dict[str, Any]:
    """The decoder's weights before the first step."""

    def matrix(*dims):
        nonlocal key
        key, used = jax.random.split(key)
        return jax.random.normal(used, dims) * dims[-1] ** -0.5  # [outputs, inputs]

    return {
        "letters": matrix(128, WIDTH),
        "places": matrix(LENGTH, WIDTH),
        "blocks": [
            {
                "qkv": matrix(3 * WIDTH, WIDTH),
                "out": matrix(WIDTH, WIDTH),
                "gate": matrix(HIDDEN, WIDTH),
                "up": matrix(HIDDEN, WIDTH),
                "down": matrix(WIDTH, HIDDEN),
            }
            for _ in range(BLOCKS)
        ],
    }


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm, without weights."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss(
    weights: dict[str, Any], probe: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The mean cross entropy in nats a letter, and the last block's gated product.

    `probe` is added to what the last block's down-projection gives: its gradient is that of the
    result.
    """
    x = weights["letters"][tokens[:, :-1]] * WIDTH**0.5 + weights["places"]
    for n, block in enumerate(weights["blocks"]):
        heads = (norm(x) @ block["qkv"].T).reshape(*x.shape[:2], 3, HEADS, -1)
        seen = jax.nn.dot_product_attention(*(heads[:, :, i] for i in range(3)), is_causal=True)
        x = x + seen.reshape(x.shape) @ block["out"].T
        h = norm(x)
        gated = jax.nn.silu(h @ block["gate"].T) * (h @ block["up"].T)
        x = x + gated @ block["down"].T + (probe if n == BLOCKS - 1 else 0)
    scores = norm(x) @ weights["letters"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])), gated


optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, RATE, 100, STEPS), weight_decay=0.1)


@jax.jit
def train_step(weights, state, tokens):
    """One step of AdamW, the loss before it, and the last down-projection's tensors."""
    probe = jnp.zeros((BATCH, LENGTH, WIDTH))
    (error, x), (gradient, g) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        weights, probe, tokens
    )
    w = weights["blocks"][-1]["down"]
    change, state = optimizer.update(gradient, state, weights)
    return optax.apply_updates(weights, change), state, error, {"x": x, "w": w, "g": g}


def stored(tensor: jax.Array) -> dict[str, Any]:
    """In bfloat16: its bits, compressed, as text."""
    bits = np.asarray(tensor.astype(jnp.bfloat16)).view(np.uint16).astype("<u2")
    return {
        "shape": list(tensor.shape),
        "bfloat16": base64.b64encode(zlib.compress(bits.tobytes(), 9)).decode(),
    }


def tensor(kept: dict[str, Any]) -> np.ndarray:
    """What `stored` made, in float64."""
    bits = np.frombuffer(zlib.decompress(base64.b64decode(kept["bfloat16"])), "<u2")
    return bits.astype(np.uint16).view(jnp.bfloat16).reshape(kept["shape"]).astype(np.float64)


def measured(letters: np.ndarray, steps: int = STEPS) -> dict[str, Any]:
    """Train for so many steps, and return what the file holds."""
    random = np.random.default_rng(0)
    weights = new_weights(jax.random.key(0))
    state, losses = optimizer.init(weights), []
    amaxes: dict[str, list[float]] = {name: [] for name in "xwg"}
    for _ in range(steps):
        starts = random.integers(0, len(letters) - LENGTH, BATCH)
        tokens = jnp.asarray(letters[starts[:, None] + np.arange(LENGTH + 1)], jnp.int32)
        weights, state, error, tensors = train_step(weights, state, tokens)
        losses.append(round(float(error), 5))
        for name, tensor in tensors.items():
            amaxes[name].append(
                float(np.format_float_scientific(np.float32(jnp.max(jnp.abs(tensor))), precision=5))
            )
    tensors = {
        name: tensor.reshape(-1, tensor.shape[-1])[:KEPT] for name, tensor in tensors.items()
    }
    made = {
        "date": datetime.date.today().isoformat(),
        "command": "make training",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, CPU",
        "packages": {"jax": jax.__version__, "optax": optax.__version__},
        "text": f"pydoc_data.topics, {len(letters)} letters",
        "parameters": sum(w.size for w in jax.tree.leaves(weights)),
        "losses": losses,
        "amaxes": amaxes,
        "tensors": {name: stored(tensor) for name, tensor in tensors.items()},
    }
    return made | {"digest": digest(made)}


def problems(recorded: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """Where a record is not what the same training gives again, in as many steps as `again` has.

    A CPU of another kind adds in another order, and each step goes on from that: losses may differ
    by a thousandth, largest magnitudes by a hundredth, and what is kept of the last step by two
    hundredths of its norm. The same kind of CPU with other work beside it gave 1e-5, 6e-6 and 2e-4.
    """
    found = []
    if (said := recorded["text"]) != again["text"] or recorded["parameters"] != again["parameters"]:
        return [f"{said}, {recorded['parameters']} parameters: not what was trained again"]
    steps = len(again["losses"])
    if not np.allclose(recorded["losses"][:steps], again["losses"], rtol=1e-3):
        found.append("losses")
    for name in "xwg":
        before, now = (np.array(data["amaxes"][name][:steps]) for data in (recorded, again))
        if not np.allclose(before, now, rtol=1e-2):
            found.append(f"amaxes of {name}")
        if steps == len(recorded["losses"]):
            kept, made = (tensor(data["tensors"][name]) for data in (recorded, again))
            if not np.linalg.norm(kept - made) <= 2e-2 * np.linalg.norm(made):
                found.append(f"the last step's {name}")
    return found


def main() -> None:
    """Train, and write the record."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    require_platform()
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    made = measured(text(), STEPS)
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in made.items())
    in_one_step(DATA, "{" + ",\n ".join(lines) + "}\n")
    before, after = made["losses"][0], np.mean(made["losses"][-50:])
    print(f"{STEPS} steps, from {before:.2f} to {after:.2f} nats a letter")


if __name__ == "__main__":
    main()
