"""Train the small decoder of chapter 14 in every way of helpers.training.runs, and record it.

    python -m tools.recorders.train          make notebooks/results/trained.json, `make train`

The runs of one way are one process, which compiles it once; as many processes run as the machine
has cores, with one thread each.
"""

import concurrent.futures
import itertools
import multiprocessing
import os
from typing import Any, NamedTuple

import numpy as np

from helpers.training import runs, shakespeare
from tools.recorders.data import RESULTS, provenance, signed, write

from fp8_decoder import STEPS_BACK
from fp8_linear import e4m3, scale_of

DATA = RESULTS / "trained.json"
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


HARM = ("outlier", "frozen")


def tasks() -> list[Task]:
    """All runs, in the order of the record."""
    found = []
    for way in runs.WAYS:
        found += [Task(way, seed) for seed in range(SEEDS.get(way, OTHERWISE))]
    return [*found, Task("bf16", 0, "outlier"), *(Task("delayed", 0, harm) for harm in HARM)]


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


def _work(todo: list[Task]) -> list[dict[str, Any]]:
    """Do the tasks of one way, one after the other."""
    found = []
    for task in todo:
        found.append(result(task))
        print(*task, flush=True)
    return found


def all_results(everything: list[Task]) -> dict[Task, dict[str, Any]]:
    """What became of each task, in processes of their own."""
    by_way: dict[str, list[Task]] = {}
    # Those that take longest begin first.
    for task in sorted(everything, key=lambda task: not runs.WAYS[task.way].recipe.tensor_core):
        by_way.setdefault(task.way, []).append(task)
    context = multiprocessing.get_context("spawn")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    found: dict[Task, dict[str, Any]] = {}
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as workers:
        for todo, made in zip(by_way.values(), workers.map(_work, by_way.values()), strict=True):
            found |= dict(zip(todo, made, strict=True))
    return found


def assembled(everything: list[Task]) -> dict[str, Any]:
    """The record, of all runs."""
    found = all_results(everything)
    ways: dict[str, list[Any]] = {}
    harmed: dict[str, Any] = {}
    for task in everything:
        if task.harm:
            harmed[f"{task.way}, {task.harm}"] = found[task]
        else:
            ways.setdefault(task.way, []).append(found[task])
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
    """Run all, and write the record."""
    write(DATA, signed(assembled(tasks())), levels=2)


if __name__ == "__main__":
    main()
