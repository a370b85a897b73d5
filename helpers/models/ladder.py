"""The steps from Flax's FP8 layer to one in which making FP8 costs little: their programs, and what
each costs.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8lens import Inspection, Target
from fp8lens.bill.rates import RATES, calibrated
from fp8lens.matmul.ledger import Line
from helpers.models import gpt
from helpers.models.gpt import GPTLayer, by_function
from helpers.records import results

import lean_step
from fp8_blocks import block_linear
from fp8_linear import fp8_current
from lean_step import AdamW, Descent, Lean
from mxfp8 import mx_linear
from nvfp4 import nvfp4_linear
from unit_scaling import unit_linear

Layer = GPTLayer | Lean

# AdamW's. It moves each weight by about its rate. With 1e-3 a layer of hidden size 4096 diverges in
# its first steps; with this it did not on a CPU, in bf16 with 256 tokens.
RATE = 1e-4

_ADAMW: dict[str, Any] = {"optimizer": AdamW(RATE)}
_CUDNN: dict[str, Any] = {**_ADAMW, "attention": "cudnn"}
# Steps in bf16: Flax's layer, with three kinds of attention, and the lean layer.
BASES: dict[str, Layer] = {
    "xla": GPTLayer(),
    "fused": GPTLayer(attention="fused"),
    "cudnn": GPTLayer(attention="cudnn"),
    "restructured": Lean(fp8=False),
    "restructured, AdamW": Lean(fp8=False, **_ADAMW),
    "restructured, AdamW, cudnn": Lean(fp8=False, **_CUDNN),
}
# Each rung has what those before it have.
RUNGS: dict[str, Layer] = {
    "Flax's FP8 layer": GPTLayer(fp8=True),
    "codes saved": Lean(by="xla", attention="xla", careful=False),
    "passes of Mosaic GPU": Lean(attention="xla", careful=False),
    "attention on the chip": Lean(careful=False),
    "gelu's input in FP8": Lean(up_in_fp8=True, careful=False),
    "careful sums": Lean(up_in_fp8=True),
    "AdamW": Lean(up_in_fp8=True, **_ADAMW),
    "cuDNN's attention": Lean(up_in_fp8=True, **_CUDNN),
    "FP8 attention, forward": Lean(up_in_fp8=True, fp8_attention="forward", **_CUDNN),
    "static scales": Lean(up_in_fp8=True, fp8_attention="forward", scales="static", **_CUDNN),
    "FP8 attention, both ways": Lean(
        up_in_fp8=True, fp8_attention="both", scales="static", **_CUDNN
    ),
}
# Wrong on an H200: this rung is compiled alone.
BY_COMPILE = "FP8 attention, both ways"


def mxfp8_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [M, K] times w [N, K], with JAX's own MXFP8 for training: scales for blocks of 32."""
    configs = 3 * [jax.nn.get_scaled_dot_general_config("mxfp8")]
    rows_by_rows = ((2,), (2,)), ((0,), (0,))
    return jax.nn.scaled_dot_general(
        x[None], w[None], rows_by_rows, preferred_element_type=x.dtype, configs=configs
    )[0]


# Beside the ladder: Flax's layer, and other recipes in it, each with cuDNN's attention.
_OTHERS: dict[str, Callable] = {
    "current": fp8_current,
    "unit scaled": unit_linear,
    "blocks": functools.partial(block_linear, by="mosaic"),
    "blocks by XLA": functools.partial(block_linear, by="dequantized"),
}
BESIDE: dict[str, Layer] = {
    name: GPTLayer(product=by_function(multiply), attention="cudnn")
    for name, multiply in _OTHERS.items()
}
BESIDE["Flax's FP8 layer, cudnn"] = GPTLayer(fp8=True, attention="cudnn")
# For a Blackwell; Flax's layer in bf16 and with delayed scaling is compiled for both.
ON_BLACKWELL: dict[str, Layer] = {
    "MXFP8": GPTLayer(product=by_function(mx_linear), attention="cudnn"),
    "MXFP8 by JAX": GPTLayer(product=by_function(mxfp8_linear), attention="cudnn"),
    "NVFP4": GPTLayer(product=by_function(nvfp4_linear), attention="cudnn"),
}
ON_BOTH = "bf16, cudnn", "Flax's FP8 layer, cudnn"
# Steps whose launches are counted, on a Hopper.
LAUNCHED = "bf16, cudnn", "Flax's FP8 layer, cudnn", "static scales"
HOPPERS, BLACKWELLS = ("H200", "H100"), ("B200",)
BATCH, MORE = 4, 16  # sequences in a step, and in the steps whose name ends with `MANY`
MANY = f", {MORE} sequences"


class Step(NamedTuple):
    """A step to compile: on so many sequences, for each generation of `chips` once."""

    layer: Layer
    sequences: int = BATCH
    chips: tuple[tuple[str, ...], ...] = (HOPPERS,)


def steps() -> dict[str, Step]:
    """Every step by its name. The bf16 ones are named "bf16, " and their name in BASES."""
    every = {f"bf16, {name}": layer for name, layer in BASES.items()} | RUNGS | BESIDE
    found = {name: Step(layer) for name, layer in every.items()}
    for name in ON_BOTH:
        found[name] = Step(every[name], chips=(HOPPERS, BLACKWELLS))
    for name, layer in ON_BLACKWELL.items():
        found[name] = Step(layer, chips=(BLACKWELLS,))
    many = ["bf16, restructured, AdamW, cudnn", *[*RUNGS][-4:]]
    return found | {name + MANY: Step(every[name], MORE) for name in many}


def base_of(layer: Layer) -> str:
    """Of BASES, Flax's layer with the same attention; with AdamW, the one that is restructured as
    the lean layers are, with the same attention in bf16. JAX's stands for XLA's.
    """
    if isinstance(layer, Lean) and layer.optimizer != Descent():
        return "restructured, AdamW, cudnn" if layer.attention == "cudnn" else "restructured, AdamW"
    return layer.attention


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


def shapes_of(layer: Layer, batch: int = BATCH, sequence: int = 2048) -> tuple[Any, Any, Any]:
    """What a step takes: by default, at the quickstart's size."""
    x = jax.ShapeDtypeStruct((batch, sequence, layer.hidden), jnp.bfloat16)
    return jax.eval_shape(functools.partial(state_of, layer), x), x, x


# What a kernel is for, as `parts_of` sorts a lean step's.
PARTS = {
    "matmul": "dense matmuls",
    "attention": "attention",
    "passes": "to and from FP8, copies",
    "rest": "norms, gelu, loss",
    "optimizer": "optimizer",
}


class Part(NamedTuple):
    """What the kernels of one of PARTS cost."""

    seconds: float  # at the roofline
    likely: float  # seconds, at the likely rates of fp8lens.bill.rates
    moved: int  # bytes
    kernels: int


class Cost(NamedTuple):
    """What a step costs by its compiled program: nothing of it is measured."""

    roofline: float  # seconds
    likely: float  # seconds
    flops: float  # of the layer's matmuls as they are written
    peak_memory: int  # bytes
    moved: int  # bytes
    kernels: int
    small: int  # kernels that move less than a megabyte
    matmuls: int  # those of kernels by hand are not seen
    in_fp8: int  # of the matmuls
    parts: dict[str, Part]  # by the names of PARTS
    graphs: int | None = None  # CUDA graphs, of the steps of LAUNCHED
    alone: int | None = None  # launches outside of them


def cost_of(seen: Inspection, x: Any, chip: Target) -> Cost:
    """The costs on `chip` of a step on `x` [batch, sequence, hidden] that `seen` has compiled.

    A kernel by hand counts by the bytes that it moves: a pass at the published rate of reductions,
    which it makes, too. JAX's attention counts by its FLOPs: of its nine products for each head,
    two are the forward pass's, and two it computes twice. It is taken to reach the published rate
    of matmuls. cuDNN's counts as fp8lens does it, two products and five.
    """
    of_parts: dict[str, list[Line]] = {name: [] for name in PARTS}
    for line in seen.ledger:
        of_parts[part_of(line)].append(line)
    parts = {name: _cost_of_part(lines, x, chip) for name, lines in of_parts.items()}
    batch, sequence, hidden = x.shape
    return Cost(
        sum(part.seconds for part in parts.values()),
        sum(part.likely for part in parts.values()),
        3 * batch * sequence * (24 * hidden**2 + 4 * sequence * hidden),
        seen.memory.peak,
        sum(part.moved for part in parts.values()),
        sum(part.kernels for part in parts.values()),
        sum(line.runs for line in seen.ledger if line.kernel.bytes_moved < 1e6),
        len(seen.report.rows),
        len(seen.report.fp8_rows),
        parts,
    )


def part_of(line: Line) -> str:
    """The name in PARTS. Where no scope says which kernels are the optimizer's, as in Flax's step,
    they are in the rest.
    """
    if line.layer.split("/")[0] == "optimizer":
        return "optimizer"
    of_fp8 = line.what in ("quantize", "dequantize", "scale", "move")
    if of_fp8 or is_pass(line) or "dequantize" in line.layer.split("/"):
        return "passes"
    if line.what == "opaque" or line.kernel.kind.startswith("__cudnn$fmha"):
        return "attention"
    return "matmul" if line.what == "matmul" else "rest"


def _cost_of_part(lines: list[Line], x: Any, chip: Target) -> Part:
    at_roofline = likely = 0.0
    alone = 0  # calls of JAX's attention: its passes are taken together
    for line in lines:
        seconds = line.kernel.seconds(chip) * line.runs
        if is_pass(line):
            at_roofline, likely = at_roofline + seconds, likely + seconds / RATES["reduction"].share
        elif line.what == "opaque":
            alone += 1
        elif found := calibrated([line], chip):
            at_roofline += seconds
            likely += found.likely
        else:
            raise ValueError(f"{line.name} has no published rate: cost_of is for one GPU")
    if alone:
        batch, sequence, hidden = x.shape
        seconds = 9 * 2 * batch * sequence**2 * hidden / chip.peak_flops["bf16"]
        at_roofline, likely = at_roofline + seconds, likely + seconds / RATES["matmul"].share
    moved = sum(line.nbytes for line in lines)
    return Part(at_roofline, likely, moved, sum(line.runs for line in lines))


class Ladder(NamedTuple):
    """What `make ladder` recorded: the costs of each of `steps()` by chip; the losses of small lean
    layers by name and seed, each the mean of `TOGETHER` steps; and the version of JAX.
    """

    steps: dict[str, dict[str, Cost]]
    losses: dict[str, list[list[float]]]
    jax: str


def recorded(folder: str | Path = "results") -> Ladder:
    """The record. Raises ValueError for a file that is not as it was written."""
    data = results.recorded(folder, "ladder.json", "make ladder")
    steps: dict[str, dict[str, Cost]] = {}
    for name, chips in data["steps"].items():
        steps[name] = {}
        for chip, cost in chips.items():
            parts = {part: Part(*values) for part, values in cost["parts"].items()}
            steps[name][chip] = Cost(**cost | {"parts": parts})
    return Ladder(steps, data["losses"], data["packages"]["jax"])


# A small lean layer learns what another one, in bf16, makes of normally distributed numbers.
_SMALL: dict[str, Any] = {
    "hidden": 128,
    "heads": 2,
    "by": "xla",
    "attention": "xla",
    "optimizer": AdamW(1e-3),
}
TRAINED: dict[str, Lean] = {
    "bf16": Lean(fp8=False, **_SMALL),
    "FP8": Lean(**_SMALL),
    "gelu's input in FP8": Lean(up_in_fp8=True, **_SMALL),
    "attention forward in FP8": Lean(up_in_fp8=True, fp8_attention="forward", **_SMALL),
    "forward, static scales": Lean(
        up_in_fp8=True, fp8_attention="forward", scales="static", **_SMALL
    ),
    "both ways, static scales": Lean(
        up_in_fp8=True, fp8_attention="both", scales="static", **_SMALL
    ),
}
SEEDS, LONG, TOGETHER = 5, 200, 25  # of the training


def losses_of(lean: Lean, seed: int, steps: int = LONG) -> list[float]:
    """The error of each step. Every step has new numbers, so it is one on unseen data. A seed gives
    the first weights, the numbers, and what is learnt.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    teacher = TRAINED["bf16"]
    taught = lean_step.new_state(teacher, keys[0])
    unscaled = dict.fromkeys(lean_step.TENSORS)

    @jax.jit
    def numbers(step: int) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(jax.random.fold_in(keys[1], step), (4, 64, lean.hidden), jnp.bfloat16)
        slots = lean_step.new_slots(teacher, x)
        return x, lean_step.apply(teacher, slots, taught.others, taught.codes, unscaled, x)

    state = lean_step.new_state(lean, keys[2])
    state = lean_step.warm_up(lean, state, *numbers(steps))
    losses = []
    for step in range(steps):
        state, loss = lean_step.train_step(lean, state, *numbers(step))
        losses.append(float(loss))
    return losses


RISE = 1 + 2.0**-5  # of the first loss: what quantizing every operand once may change

# Steps that are timed in the case "training step", by the names that the ladder gives them.
_BESIDE_THE_LADDER = {
    "bf16, xla": "bf16, XLA's attention",
    "bf16, cudnn": "bf16",
    "Flax's FP8 layer, cudnn": "bf16+fp8",
    "Flax's FP8 layer": "bf16+fp8, XLA's attention",
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
        beside = record.cases.get("training step", {})
        rows = {name: beside.get(form, {}) for name, form in _BESIDE_THE_LADDER.items()}
        rows |= record.cases.get("ladder", {})
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
