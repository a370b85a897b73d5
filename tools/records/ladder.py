"""What the steps of helpers.models.ladder cost by their compiled programs, as `make ladder` records
it in notebooks/results/ladder.json. Nothing runs, and nothing is timed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.progress import track

from fp8lens import TARGETS, inspect
from helpers.models import ladder
from helpers.records.results import digest
from tools.files import in_one_step
from tools.platforms import require_platform
from tools.records.data import provenance

DATA = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results" / "ladder.json"
COMMAND = "make ladder"
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


def problems(recorded: dict[str, Any], name: str) -> list[str]:
    """Where the record of a step is not what it compiles to."""
    found = costs(name)
    return [
        f"{name}, {chip}, {field}: recorded {recorded['steps'][name][chip][field]}, now {value}"
        for chip, cost in found.items()
        for field, value in cost.items()
        if recorded["steps"][name][chip][field] != value
    ]


def main() -> None:
    """Compile each step, and write the record."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    require_platform()
    steps = {name: costs(name) for name in track(STEPS, "Compiling steps")}
    made = provenance(COMMAND, "jax", "jaxlib", "flax") | {"steps": steps}
    made |= {"digest": digest(made)}
    in_one_step(DATA, json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
