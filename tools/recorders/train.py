"""Train the small decoder of chapter 13 in every way of helpers.training.runs, and record it.

    python -m tools.recorders.train          make notebooks/results/trained.json, `make train`

Each run's result is a file of its own in _build/train, in a folder for the code that made it. So a
run that was stopped, at any moment, goes on where it was: `make train` again does what is missing.
The runs of one way are one process, which compiles it once; as many processes run as the machine
has cores, with one thread each.
"""

import concurrent.futures
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from helpers.training import runs, shakespeare
from tools.files import in_one_step
from tools.recorders.data import RESULTS, ROOT, provenance, signed, write

from fp8_decoder import STEPS_BACK
from fp8_linear import e4m3, scale_of

DATA = RESULTS / "trained.json"
PARTS = ROOT / "_build" / "train"
# What the runs' figures depend on, beside the packages' versions.
SOURCES = (
    "notebooks/recipes/fp8_decoder.py",
    "helpers/training/runs.py",
    "notebooks/recipes/fp8_linear.py",
    "helpers/numerics/tensor_core.py",
    "helpers/training/multipliers.py",
    "helpers/training/shakespeare.py",
    "helpers/training/shakespeare.txt",
    "tools/recorders/train.py",
)
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
TOGETHER = 10  # steps whose losses are kept as their mean
WATCHED = ("0.qkv", "1.down")  # the layers whose amaxes are kept, of seed 0
SEEDS = {"f32": 8, "bf16": 8, "delayed": 8, "current": 8, "blocks": 8}
OTHERWISE = 5


class Task(NamedTuple):
    """One run. `harm` is what is done to it on purpose, of HARM, or None."""

    way: str
    seed: int
    harm: str | None = None

    @property
    def file(self) -> str:
        """The name of its result's file."""
        words = f"{self.way} {self.harm or ''} {self.seed}".replace(",", "").split()
        return "_".join(words) + ".json"


HARM = ("outlier", "frozen")


def tasks() -> list[Task]:
    """All runs, those that take longest first."""
    harmed = [Task("bf16", 0, "outlier")] + [Task("delayed", 0, harm) for harm in HARM]
    each = [
        Task(way, seed) for way in runs.WAYS for seed in range(SEEDS.get(way, OTHERWISE))
    ] + harmed
    order = list(runs.WAYS)
    return sorted(
        each, key=lambda task: (not runs.WAYS[task.way].recipe.tensor_core, order.index(task.way))
    )


# A run --------------------------------------------------------------------------------------------


def result(task: Task, count: int = runs.STEPS) -> dict[str, Any]:
    """Train as the task says, for so many steps."""
    way = runs.WAYS[task.way]
    how: dict[str, Any] = {"count": count}
    if task.harm == "outlier":
        how["meddle"] = runs.outlier()
    if task.harm == "frozen":
        how["frozen_from"] = runs.RISES
    losses, amaxes, lost = [], [], []
    for step in runs.steps(way, task.seed, **how):
        losses.append(step.loss)
        amaxes.append(runs.latest_amaxes(step.state))
        if task.harm and step.number % TOGETHER == 0:
            lost.append(_lost(task.seed, step.state))
    made = _summary(task, losses, amaxes)
    made["unseen"] = _short(runs.unseen_loss(way.decoder, step.state.weights, step.state.amaxes))
    if task.harm:
        made["lost"] = lost
    else:
        made["snr"] = _noise(way.decoder, step.state)
    return made


def _summary(task: Task, losses: list[float], amaxes: list[dict[str, list[float]]]) -> dict:
    """The losses; which steps saturate an operand; and of few runs the amaxes."""
    if task.harm:
        made: dict[str, Any] = {"losses": [_short(value) for value in losses]}
    else:
        groups = itertools.batched(losses, TOGETHER)
        made = {"losses": [_short(sum(group) / len(group)) for group in groups]}
    if amaxes[0]:
        made["saturated"] = {
            name: [_jumps([step[name][i] for step in amaxes]) for i in range(3)]
            for name in amaxes[0]
        }
    if amaxes[0] and task.seed == 0:
        made["amaxes"] = {
            name: [[_short(step[name][i]) for step in amaxes] for i in range(3)]
            for name in WATCHED
            if name in amaxes[0]
        }
    return made


def _jumps(amaxes: list[float]) -> int:
    """In how many steps an amax is above all that a delayed scale was made of: then numbers
    saturate. The first step has no history and does not count.
    """
    above = (
        amaxes[step] > max(amaxes[max(0, step - STEPS_BACK) : step])
        for step in range(1, len(amaxes))
    )
    return sum(above)


def _lost(seed: int, state: Any) -> float:
    """The share of the last down-projection's input that becomes 0 in FP8; what it would be, if
    the run is in bf16.
    """
    tokens = runs.texts(seed, 0)
    x = np.asarray(runs.inputs(state.weights, tokens)[WATCHED[-1]])
    history: Any = state.amaxes[WATCHED[-1]][0] if state.amaxes else np.abs(x)
    return _short(runs.flushed(x, float(scale_of(history, e4m3))))


def _noise(decoder: Any, state: Any) -> dict[str, float]:
    """Each weight's signal-to-noise ratio on a text of its own, in decibels."""
    found = runs.signal_to_noise(decoder, state, shakespeare.unseen(runs.TEXTS, runs.LENGTH))
    return {name: round(value, 2) for name, value in found.items() if value != float("inf")}


def _short(value: Any) -> float:
    return float(f"{float(value):.5g}")


# All runs -----------------------------------------------------------------------------------------


def _work(folder: Path, todo: list[Task]) -> None:
    """Do the tasks of one way, one after the other."""
    for task in todo:
        in_one_step(folder / task.file, json.dumps(result(task)))
        print(task.file, flush=True)


def folder_of_this_code() -> Path:
    """Where the parts of the runs of this code and these packages are."""
    said = [jax.__version__, optax.__version__, platform.machine()]
    hashed = hashlib.sha256(" ".join(said).encode())
    for source in SOURCES:
        hashed.update((ROOT / source).read_bytes())
    return PARTS / hashed.hexdigest()[:16]


def run_missing(folder: Path, everything: list[Task]) -> None:
    """Run the tasks without a result in the folder, and print the name of each that is done."""
    missing = [task for task in everything if not (folder / task.file).exists()]
    print(f"{len(missing)} of {len(everything)} runs are missing", flush=True)
    context = multiprocessing.get_context("spawn")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as workers:
        working = [
            workers.submit(_work, folder, list(group))
            for _, group in itertools.groupby(missing, lambda task: task.way)
        ]
        for done in concurrent.futures.as_completed(working):
            done.result()


def assembled(folder: Path, everything: list[Task]) -> dict[str, Any]:
    """The record, of all parts."""
    ways: dict[str, list[Any]] = {}
    harmed: dict[str, Any] = {}
    for task in sorted(everything, key=lambda task: (list(runs.WAYS).index(task.way), task.seed)):
        part = json.loads((folder / task.file).read_text())
        if task.harm:
            harmed[f"{task.way}, {task.harm}"] = part
        else:
            ways.setdefault(task.way, []).append(part)
    return provenance("make train", "jax", "optax") | {
        "text": shakespeare.DESCRIPTION,
        "steps": runs.STEPS,
        "tokens": runs.TEXTS * runs.LENGTH,
        "sizes": runs.SIZES,
        "together": TOGETHER,
        "ways": ways,
        "harmed": harmed,
    }


def main() -> None:
    """Run what is missing, and write the record."""
    everything = tasks()
    folder = folder_of_this_code()
    run_missing(folder, everything)
    write(DATA, signed(assembled(folder, everything)), levels=2)
    print(f"{len(everything)} runs are in {DATA.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
