"""What the steps of helpers.models.ladder cost by their compiled programs, and how a small lean
layer learns, as `make ladder` records it in notebooks/results/ladder.json. Nothing is timed.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fp8lens import TARGETS, aot_compile, inspect
from helpers.models import ladder
from tools.recorders.data import RESULTS, provenance, signed, write

DATA = RESULTS / "ladder.json"
STEPS = ladder.steps()


def costs(name: str) -> dict[str, dict[str, Any]]:
    """What a step costs on each of its chips. One program is compiled for a generation."""
    step, found = STEPS[name], {}
    asked = ladder.step_of(step.layer), *ladder.shapes_of(step.layer, step.sequences)
    for chips in step.chips:
        is_blackwell = chips == ladder.BLACKWELLS
        # A Blackwell's own formats are multiplied by cuDNN or Triton, which must be allowed to.
        gemm: Any = "auto" if name in ladder.ON_BLACKWELL else "cublaslt"
        # A kernel by hand compiles for a newer chip in a process of its own: fp8lens.compile.bugs.
        # For an H200 XLA makes another program of some steps, with more memory at the peak.
        seen = inspect(*asked, target=chips[-1], gemm=gemm, isolate=is_blackwell)
        graphs, alone = None, None
        if name in ladder.LAUNCHED and chips == ladder.HOPPERS:
            graphs, alone = launches(thunks(asked))
        for chip in chips:
            cost = ladder.cost_of(seen, asked[2], TARGETS[chip])
            found[chip] = rounded(cost._replace(graphs=graphs, alone=alone))
    return found


def thunks(asked: Any) -> str:
    """XLA's own list of what a step launches."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        aot_compile(*asked, target="H100", compiler_options=options)
        *_, last = sorted(Path(folder).glob("*thunk_sequence*"))
        return last.read_text()


def launches(listed: str) -> tuple[int, int]:
    """The CUDA graphs of a program, and its launches outside of them, by XLA's list."""
    graphs = alone = 0
    in_graph = False
    for indented, kind in re.findall(r"^( *)\d+: (k\w+)", listed, re.M):
        if not indented:
            in_graph = kind == "kCommandBuffer"
            graphs += in_graph
        if not in_graph and kind not in ("kAsyncStart", "kAsyncDone"):
            alone += 1
    return graphs, alone


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
    """Compile each step, train, and write the record. `--only` renews some steps of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="steps whose names have this text")
    only = parser.parse_args().only
    made = provenance("make ladder", "jax", "jaxlib", "flax")
    kept = json.loads(DATA.read_text()) if only else {"steps": {}}
    if only and kept["packages"] != made["packages"]:
        parser.error(f"the record is by {kept['packages']}: renew all of it, without --only")
    steps, trained = kept["steps"], kept.get("losses", {})
    for name in STEPS:
        if only in name:
            print(name, flush=True)
            steps[name] = costs(name)
    for name in () if only else ladder.TRAINED:
        print(name, flush=True)
        trained[name] = [losses(name, seed) for seed in range(ladder.SEEDS)]
    in_order = {name: steps[name] for name in STEPS if name in steps}
    write(DATA, signed(made | {"steps": in_order, "losses": trained}), levels=2)


if __name__ == "__main__":
    main()
