"""Train the small decoder of chapter 14 in every way of helpers.training.runs, and record it.

    python -m tools.recorders.train          make notebooks/results/trained.json, `make train`
    python -m tools.recorders.train --long   make trained_long.json, or go on with it

As many processes run as the machine has cores, with one thread each. The short runs of one way are
one process, which compiles it once. A long run is in its record as soon as it ends, so that one who
stops the command can start it again.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from helpers.training import runs, shakespeare
from tools.recorders.data import RESULTS, provenance, signed, write

from fp8_decoder import STEPS_BACK, Decoder, State
from fp8_linear import e4m3, scale_of

DATA = RESULTS / "trained.json"
LONG = RESULTS / "trained_long.json"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
TOGETHER, TOGETHER_LONG = 10, 50  # steps whose losses are kept as their mean
WATCHED = ("0.qkv", "1.down")  # the layers whose amaxes are kept, of seed 0
GATED = ("0.down", "1.down")  # the layers whose input is looked at in a long run
SEEDS = {"f32": 8, "bf16": 8, "delayed": 8, "current": 8, "blocks": 8}
OTHERWISE = 5
SEEDS_LONG = {
    "bf16": 5,
    "delayed": 5,
    "current": 5,
    "blocks": 5,
    "nvfp4": 2,
    "nvfp4, plain": 2,
    "delayed, tensor core": 1,
}
SLOW = ("nvfp4", "nvfp4, plain", "delayed, tensor core")


class Task(NamedTuple):
    """One run. `harm` is what is done to it on purpose, of HARM, or None."""

    way: str
    seed: int
    harm: str | None = None
    plan: runs.Plan = runs.SHORT


HARM = ("outlier", "frozen")


def tasks() -> list[Task]:
    """The short runs, in the order of the record."""
    found = []
    for way in runs.WAYS:
        found += [Task(way, seed) for seed in range(SEEDS.get(way, OTHERWISE))]
    return [*found, Task("bf16", 0, "outlier"), *(Task("delayed", 0, harm) for harm in HARM)]


def long_tasks() -> list[Task]:
    """The long runs: the first seed of each way, then the next one. The slow ways begin later."""
    found = [
        Task(way, seed, plan=runs.LONG)
        for way, seeds in SEEDS_LONG.items()
        for seed in range(seeds)
    ]
    return sorted(found, key=lambda task: task.seed + 2 * (task.way in SLOW))


# A run --------------------------------------------------------------------------------------------


def result(task: Task, count: int | None = None) -> dict[str, Any]:
    """Train as the task says, all steps of its plan or so many."""
    way = runs.WAYS[task.way]
    how: dict[str, Any] = {"count": count, "plan": task.plan}
    if task.harm == "outlier":
        how["meddle"] = runs.outlier()
    if task.harm == "frozen":
        how["frozen_from"] = runs.RISES
    losses, amaxes, lost, looks = [], [], [], []
    for step in runs.steps(way, task.seed, **how):
        losses.append(step.loss)
        amaxes.append(runs.latest_amaxes(step.state))
        if task.harm and step.number % TOGETHER == 0:
            lost.append(_lost(task.seed, step.state))
        if task.plan is runs.LONG and way.static is None and step.number % TOGETHER_LONG == 0:
            looks.append(_look(step.state))
    weights, histories = step.state.weights, step.state.amaxes
    made = _summary(task, losses, amaxes)
    unseen = runs.unseen_loss(way.decoder, weights, histories, task.plan)
    made["unseen"] = round(float(unseen), 6)
    if task.harm:
        return made | {"lost": lost}
    if task.plan is runs.LONG:
        made |= {"seed": task.seed} | ({"looks": looks} if looks else {})
    return made | {"snr": _noise(way.decoder, step.state, task.plan)}


def _summary(task: Task, losses: list[float], amaxes: list[dict[str, list[float]]]) -> dict:
    """The losses; which steps saturate an operand; and of few runs the amaxes."""
    is_long = task.plan is runs.LONG
    together = 1 if task.harm else TOGETHER_LONG if is_long else TOGETHER
    groups = itertools.batched(losses, together)
    made: dict[str, Any] = {"losses": [_short(sum(group) / len(group)) for group in groups]}
    if any(map(any, amaxes[0].values())):
        made["saturated"] = {
            name: [_jumps([step[name][i] for step in amaxes]) for i in range(3)]
            for name in amaxes[0]
        }
    if amaxes[0] and task.seed == 0 and not is_long:
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


def _look(state: State) -> dict[str, list[float]]:
    """Of the inputs of the gated layers, on texts that no step reads: amax, median magnitude, the
    share that becomes 0 if the whole tensor has one scale, the share above E4M3's largest number;
    and of the largest the token at its place, and the cosine of the angle between its channel's
    rows of "gate" and "up".
    """
    tokens = jnp.asarray(runs.LONG.unseen(runs.LONG.texts, runs.LONG.length))
    found = {}
    for name, x in runs.inputs(state.weights, tokens).items():
        if name not in GATED:
            continue
        sizes = np.abs(np.asarray(x))
        place, channel = np.unravel_index(sizes.argmax(), sizes.shape)
        shares = runs.flushed(x, float(scale_of(sizes, e4m3))), np.mean(sizes > 448)
        layer = name.removesuffix("down")
        gate, up = (np.asarray(state.weights[layer + half][channel]) for half in ("gate", "up"))
        cosine = gate @ up / np.linalg.norm(gate) / np.linalg.norm(up)
        seen = map(_short, [sizes.max(), np.median(sizes), *shares])
        found[name] = [*seen, int(tokens[:, :-1].reshape(-1)[place]), _short(cosine)]
    return found


def _noise(decoder: Decoder, state: State, plan: runs.Plan) -> dict[str, float]:
    """Each weight's signal-to-noise ratio on texts of its own, in decibels."""
    found = runs.signal_to_noise(decoder, state, plan.unseen(plan.texts, plan.length))
    return {name: round(value, 2) for name, value in found.items() if value != float("inf")}


def _short(value: Any) -> float:
    return float(f"{float(value):.5g}")


# All runs -----------------------------------------------------------------------------------------


def _work(todo: list[Task]) -> list[tuple[Task, dict[str, Any]]]:
    """Do the tasks one after the other."""
    found = []
    for task in todo:
        found.append((task, result(task)))
        print(*task[:3], flush=True)
    return found


def finished(groups: Iterable[list[Task]]) -> Iterator[tuple[Task, dict[str, Any]]]:
    """What became of each task, in processes of their own: as soon as its group is done."""
    context = multiprocessing.get_context("spawn")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as workers:
        begun = [workers.submit(_work, group) for group in groups]
        for group in concurrent.futures.as_completed(begun):
            yield from group.result()


def described(plan: runs.Plan, command: str, text: str, together: int) -> dict[str, Any]:
    """The start of a record."""
    return provenance(command, "jax", "optax") | {
        "text": text,
        "steps": plan.steps,
        "tokens": plan.texts * plan.length,
        "sizes": runs.SIZES,
        "together": together,
    }


def assembled(everything: list[Task]) -> dict[str, Any]:
    """The record of the short runs."""
    by_way: dict[str, list[Task]] = {}
    # Those that take longest begin first.
    for task in sorted(everything, key=lambda task: not runs.WAYS[task.way].recipe.tensor_core):
        by_way.setdefault(task.way, []).append(task)
    found = dict(finished(by_way.values()))
    ways: dict[str, list[Any]] = {}
    harmed: dict[str, Any] = {}
    for task in everything:
        if task.harm:
            harmed[f"{task.way}, {task.harm}"] = found[task]
        else:
            ways.setdefault(task.way, []).append(found[task])
    about = described(runs.SHORT, "make train", shakespeare.DESCRIPTION, TOGETHER)
    return about | {"ways": ways, "harmed": harmed}


def go_on(everything: list[Task]) -> None:
    """Do the long runs that the record does not have, and write it after each. Raises SystemExit
    if the record is of other runs.
    """
    text = f"Bigram-Backcopy of {shakespeare.DESCRIPTION}"
    about = described(runs.LONG, "make train ARGS=--long", text, TOGETHER_LONG)
    before = json.loads(LONG.read_text()) if LONG.exists() else about | {"ways": {}}
    if differ := [key for key in about if key != "date" and about[key] != before[key]]:
        raise SystemExit(
            f"{LONG.name} has another {' and '.join(differ)}: remove it, to begin anew"
        )
    ways = {way: {run["seed"]: run for run in made} for way, made in before["ways"].items()}
    todo = [task for task in everything if task.seed not in ways.get(task.way, {})]
    for task, made in finished([task] for task in todo):
        ways.setdefault(task.way, {})[task.seed] = made
        in_order = {
            way: [ways[way][seed] for seed in sorted(ways[way])] for way in runs.WAYS if way in ways
        }
        write(LONG, signed(about | {"ways": in_order}), levels=2)


def main() -> None:
    """Run all, and write the record."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--long", action="store_true", help="the long runs, or those that miss")
    if options.parse_args().long:
        go_on(long_tasks())
    else:
        write(DATA, signed(assembled(tasks())), levels=2)


if __name__ == "__main__":
    main()
