"""The steps from Flax's FP8 layer to one in which making FP8 costs little: their programs, and what
each costs.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fp8lens import Inspection, Target
from fp8lens.bill.rates import RATES, calibrated
from fp8lens.matmul.ledger import Line
from helpers.models import gpt
from helpers.models.gpt import GPTLayer
from helpers.records import results

import lean_step
from lean_step import AdamW, Descent, Lean

Layer = GPTLayer | Lean

# AdamW's. It moves each weight by about its rate. With 1e-3 a layer of hidden size 4096 diverges in
# its first steps; with this it did not on a CPU, in bf16 with 256 tokens.
RATE = 1e-4

# Steps in bf16: Flax's layer, with two kinds of attention, and the lean layer.
BASES: dict[str, Layer] = {
    "xla": GPTLayer(),
    "fused": GPTLayer(attention="fused"),
    "restructured": Lean(fp8=False),
    "restructured, AdamW": Lean(fp8=False, optimizer=AdamW(RATE)),
}
# Each rung has what those before it have.
RUNGS: dict[str, Layer] = {
    "Flax's FP8 layer": GPTLayer(fp8=True),
    "codes saved": Lean(by="xla", attention="xla", careful=False),
    "passes of Mosaic GPU": Lean(attention="xla", careful=False),
    "attention on the chip": Lean(careful=False),
    "gelu's input in FP8": Lean(up_in_fp8=True, careful=False),
    "careful sums": Lean(up_in_fp8=True),
    "AdamW": Lean(up_in_fp8=True, optimizer=AdamW(RATE)),
}
# The last rung with Optax's optimizer, to see what the pass saves that also quantizes.
BESIDE: dict[str, Layer] = {
    "AdamW by Optax": Lean(up_in_fp8=True, optimizer=optax.adamw(RATE)),
}


def base_of(layer: Layer) -> str:
    """Of BASES, Flax's layer with the same attention, where it has the same optimizer, too."""
    if isinstance(layer, Lean) and layer.optimizer != Descent():
        return fair_base_of(layer)
    return layer.attention


def fair_base_of(layer: Layer) -> str:
    """Of BASES, the one that is restructured as the lean layers with fused attention are, and has
    the same optimizer.
    """
    is_descent = isinstance(layer, Lean) and layer.optimizer == Descent()
    return "restructured" if is_descent else "restructured, AdamW"


def step_of(layer: Layer) -> Callable:
    """step(state, x, target) -> (state, error)."""
    if isinstance(layer, Lean):
        return functools.partial(lean_step.train_step, layer)
    return gpt.train_step


def state_of(layer: Layer, x: Any) -> Any:
    """A state to begin with. With shapes for `x`, give this to jax.eval_shape."""
    if isinstance(layer, Lean):
        return lean_step.new_state(layer, jax.random.key(0))
    return gpt.train_state(layer, x)


def shapes_of(layer: Layer, batch: int = 4, sequence: int = 2048) -> tuple[Any, Any, Any]:
    """What a step takes: by default, at the quickstart's size."""
    x = jax.ShapeDtypeStruct((batch, sequence, layer.hidden), jnp.bfloat16)
    return jax.eval_shape(functools.partial(state_of, layer), x), x, x


class Cost(NamedTuple):
    """What a step costs by its compiled program: nothing of it is measured."""

    roofline: float  # seconds
    likely: float  # seconds, at the likely rates of fp8lens.bill.rates
    flops: float  # of the layer's matmuls as they are written
    peak_memory: int  # bytes
    moved: int  # bytes
    kernels: int
    small: int  # kernels that move less than a megabyte


def cost_of(seen: Inspection, x: Any, chip: Target) -> Cost:
    """The costs on `chip` of a step on `x` [batch, sequence, hidden] that `seen` has compiled.

    A kernel by hand counts by the bytes that it moves: a pass at the published rate of reductions,
    which it makes, too. Fused attention counts by its FLOPs: of its nine products for each head,
    two are the forward pass's, and two it computes twice. It is taken to reach the published rate
    of matmuls.
    """
    lines = [*seen.ledger]
    by_hand = [line for line in lines if line.what == "opaque"]
    passes = [line for line in by_hand if is_pass(line)]
    attention = [line for line in by_hand if not is_pass(line)]
    batch, sequence, hidden = x.shape
    product = 2 * batch * sequence**2 * hidden
    alone = 9 * product / chip.peak_flops["bf16"] if attention else 0.0
    of_passes = sum(line.kernel.seconds(chip) * line.runs for line in passes)
    others = [line for line in lines if line.what != "opaque"]
    rest = sum(line.kernel.seconds(chip) * line.runs for line in others)
    likely = calibrated(others, chip)
    if likely is None:
        raise ValueError("a kernel of the step has no published rate: cost_of is for one GPU")
    return Cost(
        rest + of_passes + alone,
        likely.likely + of_passes / RATES["reduction"].share + alone / RATES["matmul"].share,
        3 * batch * sequence * (24 * hidden**2 + 4 * sequence * hidden),
        seen.memory.peak,
        sum(line.kernel.bytes_moved * line.runs for line in lines),
        sum(line.runs for line in lines),
        sum(line.runs for line in lines if line.kernel.bytes_moved < 1e6),
    )


class Ladder(NamedTuple):
    """What `make ladder` recorded: each step's costs by chip, and the version of JAX that compiled
    them. The bf16 steps are named "bf16, " and their attention.
    """

    steps: dict[str, dict[str, Cost]]
    jax: str


def recorded(folder: str | Path = "results") -> Ladder:
    """The record. Raises ValueError for a file that is not as it was written."""
    data = results.recorded(folder, "ladder.json", "make ladder")
    steps = {
        name: {chip: Cost(**cost) for chip, cost in chips.items()}
        for name, chips in data["steps"].items()
    }
    return Ladder(steps, data["packages"]["jax"])


RISE = 1 + 2.0**-5  # of the first loss: what quantizing every operand once may change

# Steps that are timed in the case "training step", by the names that the ladder gives them.
_BESIDE_THE_LADDER = {
    "bf16, xla": "bf16, XLA's attention",
    "bf16, cudnn": "bf16",
    "Flax's FP8 layer, cudnn": "bf16+fp8",
}


class Timed(NamedTuple):
    """A step that `make gpu` has timed."""

    seconds: float  # by the host's clock
    clock_mhz: float  # of the GPU, meanwhile
    power_w: float
    losses: list[float]  # of the steps that trained the layer before

    @property
    def is_trained(self) -> bool:
        """Whether no step made the loss much larger than it was at first."""
        return max(self.losses) < RISE * self.losses[0]


def timed(folder: str | Path = "results") -> dict[str, dict[str, Timed]]:
    """What `make gpu` measured of each step, by chip; nothing where it has not run."""
    found: dict[str, dict[str, Timed]] = {}
    for record in results.load("train", folder):
        rows = dict(record.cases.get("ladder", {}))
        beside = record.cases.get("training step", {})
        rows |= {name: beside.get(form, {}) for name, form in _BESIDE_THE_LADDER.items()}
        if record.chip:
            found[record.chip.name] = {
                name: Timed(row["wall_seconds"], row["clock_mhz"], row["power_w"], row["losses"])
                for name, row in rows.items()
                if "wall_seconds" in row
            }
    return found


def is_pass(line: Line) -> bool:
    """Whether a kernel by hand is one of `one_pass`; the others are attention's."""
    return "one_pass" in line.layer.split("/")
