"""How fast: a training step of a transformer layer, in bf16 and with FP8 matmuls, and the steps of
chapter 15's ladder.

Each step has trained the layer before it is timed: what is multiplied has the scales of training.
A step is right if its loss falls, without a jump, and begins where that of the same layer in bf16
does: the first one of its kind. The numbers of a layer that diverges are no training's, and a chip
under its limit of power takes another time for other numbers.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from helpers.models import ladder
from helpers.models.gpt import GPTLayer
from tools.gpu.machine import Gpu
from tools.gpu.stage import Case, Ready

from lean_step import Lean

# Those of Transformer Engine's quickstart and of the readme of fp8layers.
SIZES = {"hidden": 4096, "heads": 32, "sequence": 2048, "batch": 4}
REHEARSAL = {"hidden": 128, "heads": 4, "sequence": 32, "batch": 2}
STEPS = 20  # of training, whose losses are recorded
# By name: the layers of a training step, with who runs attention.
LAYERS: dict[str, GPTLayer] = {
    "bf16": GPTLayer(attention="cudnn"),
    "bf16+fp8": GPTLayer(attention="cudnn", fp8=True),
    "bf16, XLA's attention": GPTLayer(),
    "bf16+fp8, XLA's attention": GPTLayer(fp8=True),
}


def steps(gpu: Gpu) -> Iterator[Case]:
    """A training step, by cuDNN's attention and by XLA's."""
    yield case(gpu, "training step", LAYERS)


# The ladder's steps whose attention is XLA's: they were timed, and are slow.
NOT_TIMED = {"Flax's FP8 layer", "codes saved", "passes of Mosaic GPU"}
# What the others are compared with.
BASES = "restructured", "restructured, AdamW, cudnn", "fused"


def rungs(gpu: Gpu) -> Iterator[Case]:
    """The ladder, its last steps first, beside bf16 restructured alike."""
    bases = {f"bf16, {name}": ladder.BASES[name] for name in BASES}
    first = {"bf16, restructured": bases["bf16, restructured"]}
    steps = [item for item in ladder.RUNGS.items() if item[0] not in NOT_TIMED]
    yield case(gpu, "ladder", first | dict(reversed(steps)) | bases)


def case(gpu: Gpu, name: str, layers: Mapping[str, ladder.Layer]) -> Case:
    """Layers whose steps are timed side by side."""
    begins: dict[type, float] = {}
    builds = {form: functools.partial(build, gpu, one, begins) for form, one in layers.items()}
    seconds, looks = (0.01, 2) if gpu.rehearsal else (0.25, 5)
    # A step with AdamW compiles for a minute on two busy cores.
    return Case("train", name, builds, looks, seconds, limit=90)


def small(layer: Any) -> Any:
    """A layer that a CPU runs."""
    fields: dict[str, Any] = {
        "hidden": REHEARSAL["hidden"],
        "heads": REHEARSAL["heads"],
        "attention": "xla",
    }
    if isinstance(layer, GPTLayer):
        return layer.clone(**fields)
    return dataclasses.replace(layer, **fields)


def alike(layer: Any) -> Any:
    """A layer whose state is the same: states of layers that differ in this alone are made by one
    program."""
    if isinstance(layer, Lean):
        return dataclasses.replace(layer, by="xla", attention="xla", careful=True)
    return layer


def build(gpu: Gpu, layer: ladder.Layer, begins: dict[type, float]) -> Ready:
    """A step that has trained the layer a little. Raises whatever XLA, cuDNN and Mosaic GPU
    raise."""
    sizes = REHEARSAL if gpu.rehearsal else SIZES
    attention, rehearsed = layer.attention, None
    if gpu.rehearsal:
        layer = small(layer)
        if isinstance(layer, Lean) and layer.by == "mosaic":
            rehearsed = _step(ladder.step_of(dataclasses.replace(layer, by="xla")))
    dims = sizes["batch"], sizes["sequence"], sizes["hidden"]
    keys = jax.random.split(jax.random.key(0))
    x, target = (jax.random.normal(key, dims, jnp.bfloat16) for key in keys)
    state = ladder.state_of(alike(layer), x)
    step = _step(ladder.step_of(layer))
    program = gpu.compile(step, state, x, target, rehearsed=rehearsed)
    losses = []
    for _ in range(STEPS):
        state, loss = program.call(state, x, target)
        losses.append(float(loss))

    def call() -> jax.Array:
        nonlocal state  # a step uses up the state it is given
        state, loss = program.call(state, x, target)
        return loss

    begin = begins.setdefault(type(layer), losses[0])
    begins_alike = abs(losses[0] - begin) < (ladder.RISE - 1) * begin
    falls = losses[-1] < losses[0] and max(losses) < ladder.RISE * losses[0]
    made = {
        **sizes,
        "attention": attention,
        "losses": losses,  # one that is not finite makes the line an error
        "flops": model_flops(sizes),
        "right": falls and begins_alike,
    }
    return Ready(made, call, program.compiled)


def _step(step: Any) -> Any:
    """A step that uses up its state."""
    plain = getattr(step, "__wrapped__", step)
    return jax.jit(lambda *args: plain(*args), donate_argnums=0)


def model_flops(sizes: dict[str, int]) -> int:
    """Of the layer's matmuls as written, whoever runs them: 12 hidden^2 weights, and attention's
    two for each head; the backward pass multiplies twice as much."""
    hidden, sequence = sizes["hidden"], sizes["sequence"]
    tokens = sequence * sizes["batch"]
    return 3 * tokens * (2 * 12 * hidden**2 + 4 * sequence * hidden)
