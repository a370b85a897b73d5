"""Train the small decoder of chapter 14 in every way of helpers.training.runs, and record it.

    python -m tools.recorders.train          go on with notebooks/results/trained.json, `make train`
    python -m tools.recorders.train --long   the same with the longer runs and trained_long.json
    ... --again current "scores in FP8"      do these ways again, too

It does the runs that a record does not have, so one who stops it can start it again; to do all of
them, remove the file. As many processes run as the machine has cores, with one thread each.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
from collections.abc import Collection, Iterator, Mapping
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
SEEDS |= {"unit scaled": 8, "munit scaled": 8, "propagated": 8}
OTHERWISE = 5
# Of the long runs: how many seeds a way has, and the round in which its first one begins.
LONG_RUNS = {"bf16": (5, 0), "delayed": (5, 0), "current": (3, 0), "blocks": (3, 0)}
LONG_RUNS |= {"gradients in E4M3": (2, 0), "unit scaled": (3, 1), "unit scaled, bf16": (3, 1)}
LONG_RUNS |= {"munit scaled": (3, 1), "munit scaled, bf16": (3, 1)}
LONG_RUNS |= {"nvfp4": (1, 2), "nvfp4, plain": (1, 2), "delayed, tensor core": (1, 2)}


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
    """The long runs: the first seed of each way, then the next one."""
    rounds = [
        (first + seed, Task(way, seed, plan=runs.LONG))
        for way, (seeds, first) in LONG_RUNS.items()
        for seed in range(seeds)
    ]
    return [task for _, task in sorted(rounds, key=lambda found: found[0])]


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
        if task.plan == runs.LONG and way.static is None and step.number % TOGETHER_LONG == 0:
            looks.append(_look(step.state))
    weights, histories = step.state.weights, step.state.amaxes
    made = _summary(task, losses, amaxes)
    unseen = runs.unseen_loss(way.decoder, weights, histories, task.plan)
    made["unseen"] = round(float(unseen), 6)
    if task.harm:
        return made | {"lost": lost}
    if task.plan == runs.LONG:
        made |= {"seed": task.seed} | ({"looks": looks} if looks else {})
    if way.static and way.precision == "fp8":
        made["casts"] = _casts(way.decoder, step.state, task.plan)
    return made | {"snr": _noise(way.decoder, step.state, task.plan)}


def _summary(task: Task, losses: list[float], amaxes: list[dict[str, list[float]]]) -> dict:
    """The losses; which steps saturate an operand; and of few runs the amaxes."""
    is_long = task.plan == runs.LONG
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
    tokens = jnp.asarray(_own_texts(runs.LONG))
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


def _own_texts(plan: runs.Plan) -> np.ndarray:
    """As many as a step reads, which no step reads."""
    return plan.unseen(plan.texts, plan.length)


def _noise(decoder: Decoder, state: State, plan: runs.Plan) -> dict[str, float]:
    """Each weight's signal-to-noise ratio on texts of its own, in decibels."""
    found = runs.signal_to_noise(decoder, state, _own_texts(plan))
    return {name: round(value, 2) for name, value in found.items() if value != float("inf")}


def _casts(decoder: Decoder, state: State, plan: runs.Plan) -> dict[str, list[float]]:
    """By format, the shares of all numbers that saturate and that become 0, on texts of its own."""
    found = runs.casts(decoder, state, _own_texts(plan))
    shares = {}
    for dtype in sorted({cast.dtype for cast in found}):
        mine = [cast for cast in found if cast.dtype == dtype]
        numbers = [cast.numbers for cast in mine]
        of_both = [cast.saturated for cast in mine], [cast.lost for cast in mine]
        shares[dtype] = [_short(np.average(each, weights=numbers)) for each in of_both]
    return shares


def _short(value: Any) -> float:
    return float(f"{float(value):.5g}")


# All runs -----------------------------------------------------------------------------------------


def _work(todo: list[Task]) -> dict[Task, dict[str, Any]]:
    """Do the tasks one after the other."""
    found = {}
    for task in todo:
        found[task] = result(task)
        print(*task[:3], flush=True)
    return found


def finished(groups: list[list[Task]]) -> Iterator[dict[Task, dict[str, Any]]]:
    """What became of the tasks of each group, as soon as all of it is done. It is one process."""
    context = multiprocessing.get_context("spawn")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as workers:
        begun = [workers.submit(_work, group) for group in groups]
        for group in concurrent.futures.as_completed(begun):
            yield group.result()


def recorded(record: Mapping[str, Any], plan: runs.Plan) -> dict[Task, dict[str, Any]]:
    """The runs of a record."""
    found: dict[Task, dict[str, Any]] = {}
    for way, made in record["ways"].items():
        found |= {Task(way, run.get("seed", n), None, plan): run for n, run in enumerate(made)}
    for name, run in record.get("harmed", {}).items():
        way, harm = name.rsplit(", ", 1)
        found[Task(way, 0, harm)] = run
    return found


def arranged(everything: list[Task], found: Mapping[Task, dict[str, Any]]) -> dict[str, Any]:
    """The runs as they stand in a record."""
    done = [task for task in everything if task in found]
    ways = {
        way: [found[task] for task in done if task.way == way and not task.harm]
        for way in dict.fromkeys(task.way for task in done)
    }
    harmed = {f"{task.way}, {task.harm}": found[task] for task in done if task.harm}
    return {"ways": ways} | ({"harmed": harmed} if harmed else {})


def go_on(plan: runs.Plan, again: Collection[str] = ()) -> None:
    """Do the runs that the plan's record does not have, and those of the ways `again`. Write it
    whenever some are done. SystemExit if it is of other packages, sizes or steps.
    """
    is_long = plan == runs.LONG
    path, everything = (LONG, long_tasks()) if is_long else (DATA, tasks())
    about = provenance("make train ARGS=--long" if is_long else "make train", "jax", "optax") | {
        "text": ("Bigram-Backcopy of " if is_long else "") + shakespeare.DESCRIPTION,
        "steps": plan.steps,
        "tokens": plan.texts * plan.length,
        "sizes": runs.SIZES,
        "together": TOGETHER_LONG if is_long else TOGETHER,
    }
    before = json.loads(path.read_text()) if path.exists() else about | {"ways": {}}
    if differ := [key for key in about if key != "date" and about[key] != before[key]]:
        raise SystemExit(f"{path.name} has another {', '.join(differ)}: remove it, to begin anew")
    found = {task: run for task, run in recorded(before, plan).items() if task.way not in again}
    todo = [task for task in everything if task not in found]
    # Of the short runs those of a way are one process, which compiles it once.
    groups = itertools.groupby(todo, key=lambda task: (task.way, task.seed if is_long else None))
    for made in finished([list(group) for _, group in groups]):
        found |= made
        write(path, signed(about | arranged(everything, found)), levels=2)


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description="Train the small decoder in many ways.")
    parser.add_argument("--long", action="store_true", help="the longer runs")
    parser.add_argument("--again", nargs="+", default=[], metavar="WAY", choices=runs.WAYS)
    options = parser.parse_args()
    go_on(runs.LONG if options.long else runs.SHORT, options.again)


if __name__ == "__main__":
    main()
