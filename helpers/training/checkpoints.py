"""Stop a training and go on from its last checkpoint, bit for bit; and export FP8 weights.

Orbax writes a checkpoint into a folder of its own and renames it when it is complete: a process
that is killed meanwhile leaves the one before.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "helpers.training.checkpoints needs Orbax, of the group lab in pyproject.toml: "
        "pip install orbax-checkpoint"
    ) from error

from fp8_decoder import (
    Decoder,
    State,
    decode,
    e4m3,
    product,
    quantize,
    scale_of,
    weight_of,
)

KEPT = 2  # the newest, and one more in case a disk fails it


def _manager(folder: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def save(folder: Path, step: int, state: State) -> None:
    """Keep all that the step after this one starts from: weights, histories of amaxes, and the
    optimizer's state. The histories belong to it: with empty ones every scale would be 1 again.
    """
    with _manager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(state), force=True)


def restore(folder: Path, like: State) -> tuple[int, State] | None:
    """The newest checkpoint: the step after which it was kept, and the state. None if there is no
    checkpoint. `like` is a new state of the same decoder and optimizer. Raises ValueError if the
    checkpoint is of another model.
    """
    if not Path(folder).is_dir():
        return None
    with _manager(folder) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return step, State(*manager.restore(step, args=ocp.args.StandardRestore(shapes)))


class Exported(NamedTuple):
    """What inference needs: of each FP8 layer E4M3 codes [N, K] of the weight, and two scales; of
    the other layers bf16 weights, and the embedding's table in f32.
    """

    codes: dict[str, jax.Array]
    w_scales: dict[str, jax.Array]
    x_scales: dict[str, jax.Array]
    rest: dict[str, jax.Array]


def export(decoder: Decoder, state: State) -> Exported:
    """The weights as the next step would multiply them. Raises ValueError for a decoder without FP8
    layers.
    """
    if not decoder.in_fp8:
        raise ValueError(f'a decoder in {decoder.precision} has no FP8 weights: give it "fp8"')
    scales = {
        name: (scale_of(amaxes[0], e4m3), scale_of(amaxes[1], e4m3))
        for name, amaxes in state.amaxes.items()
    }
    rest = {
        name: w if name == "letters" else w.astype(jnp.bfloat16)
        for name, w in state.weights.items()
        if name not in scales
    }
    return Exported(
        codes={n: quantize(state.weights[n], w_scale, e4m3) for n, (_, w_scale) in scales.items()},
        w_scales={name: w_scale for name, (_, w_scale) in scales.items()},
        x_scales={name: x_scale for name, (x_scale, _) in scales.items()},
        rest=rest,
    )


def exported_scores(decoder: Decoder, exported: Exported, tokens: jax.Array) -> jax.Array:
    """Scores f32[batch, length, letters] of the next token, of the exported weights."""

    def dense(name: str, x: jax.Array) -> jax.Array:
        if name in exported.codes:
            x_scale, w_scale = exported.x_scales[name], exported.w_scales[name]
            x_q = quantize(x, x_scale, e4m3)
            return product(x_q, exported.codes[name], x_scale, w_scale, x.dtype)
        return jax.lax.dot(x, weight_of(exported.rest, name).astype(x.dtype).T)

    return decode(decoder, tokens, exported.rest["letters"], dense)


def save_exported(folder: Path, exported: Exported) -> None:
    """Write exported weights into a folder that does not exist yet."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder).absolute(), exported._asdict())


def load_exported(folder: Path) -> Exported:
    """Read exported weights: nothing else is needed beside the decoder's sizes."""
    with ocp.StandardCheckpointer() as checkpointer:
        kept: dict[str, Any] = checkpointer.restore(Path(folder).absolute())
    return Exported(**kept)
