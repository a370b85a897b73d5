"""What the steps of helpers.models.ladder cost by their compiled programs, as `make ladder` records
it in notebooks/results/ladder.json. Nothing runs, and nothing is timed.
"""

from typing import Any

from fp8lens import TARGETS, inspect
from helpers.models import ladder
from tools.recorders.data import RESULTS, provenance, signed, write

CHIPS = "H200", "H100"
STEPS = {f"bf16, {name}": layer for name, layer in ladder.BASES.items()}
STEPS |= ladder.RUNGS | ladder.BESIDE


def costs(name: str) -> dict[str, dict[str, Any]]:
    """What a step costs on each of CHIPS. One program is compiled for both."""
    layer = STEPS[name]
    state, x, target = ladder.shapes_of(layer)
    seen = inspect(ladder.step_of(layer), state, x, target, target="H100")
    return {chip: rounded(ladder.cost_of(seen, x, TARGETS[chip])) for chip in CHIPS}


def rounded(cost: ladder.Cost) -> dict[str, Any]:
    """A cost as it is recorded: times to the microsecond."""
    kept = cost._asdict()
    return kept | {name: round(kept[name], 6) for name in ("roofline", "likely")}


def main() -> None:
    """Compile each step, and write the record."""
    steps = {}
    for name in STEPS:
        print(name, flush=True)
        steps[name] = costs(name)
    made = provenance("make ladder", "jax", "jaxlib", "flax") | {"steps": steps}
    write(RESULTS / "ladder.json", signed(made))


if __name__ == "__main__":
    main()
