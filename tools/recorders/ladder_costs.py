"""What the steps of helpers.models.ladder cost by their compiled programs, and how a small lean
layer learns, as `make ladder` records it in notebooks/results/ladder.json. Nothing is timed.
"""

from typing import Any

import numpy as np

from fp8lens import TARGETS, inspect
from helpers.models import ladder
from tools.recorders.data import RESULTS, provenance, signed, write

CHIPS = "H200", "H100"
STEPS = ladder.steps()


def costs(name: str) -> dict[str, dict[str, Any]]:
    """What a step costs on each of CHIPS. One program is compiled for both."""
    layer, batch = STEPS[name]
    state, x, target = ladder.shapes_of(layer, batch)
    seen = inspect(ladder.step_of(layer), state, x, target, target="H100")
    return {chip: rounded(ladder.cost_of(seen, x, TARGETS[chip])) for chip in CHIPS}


def rounded(cost: ladder.Cost) -> dict[str, Any]:
    """A cost as it is recorded: times to the microsecond."""
    kept = cost._asdict()
    times = {name: round(kept[name], 6) for name in ("roofline", "likely")}
    parts = {}
    for name, part in cost.parts.items():
        parts[name] = [round(part.seconds, 6), round(part.likely, 6), part.moved, part.kernels]
    return kept | times | {"parts": parts}


def losses(name: str, seed: int, steps: int = ladder.LONG) -> list[float]:
    """Those of one of ladder.TRAINED as they are recorded: means of some steps."""
    found = ladder.losses_of(ladder.TRAINED[name], seed, steps)
    means = np.reshape(found, (-1, ladder.TOGETHER)).mean(axis=1)
    return [round(float(mean), 6) for mean in means]


def main() -> None:
    """Compile each step, train, and write the record."""
    steps, trained = {}, {}
    for name in STEPS:
        print(name, flush=True)
        steps[name] = costs(name)
    for name in ladder.TRAINED:
        print(name, flush=True)
        trained[name] = [losses(name, seed) for seed in range(ladder.SEEDS)]
    made = provenance("make ladder", "jax", "jaxlib", "flax")
    write(RESULTS / "ladder.json", signed(made | {"steps": steps, "losses": trained}))


if __name__ == "__main__":
    main()
