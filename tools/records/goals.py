"""Why a goal in notebooks/results/goals.json is what it is: a share of a ratio of rooflines,
computed anew.
"""

import math

from fp8lens.matmul.kernels import matmul_seconds
from helpers.records.results import Goal

SIZE = 8192  # of M, N and K, in the cases that are of one matmul


def share(goal: Goal) -> float:
    """The part of the rooflines' ratio that is wanted; goals.json says why under the same name."""
    if goal.part == "train":
        return 1.01
    if goal.most:
        return 1.03
    return 0.9 if goal.over == "bf16" else 0.98


def roofline(goal: Goal, chip: str) -> float:
    """The ratio of the rooflines of the two forms of one matmul: all but "bf16" multiply FP8 and
    write it.
    """

    def seconds(form: str) -> float:
        kind = "bf16" if form == "bf16" else "f8e4m3fn"
        return matmul_seconds(SIZE, SIZE, SIZE, kind, kind, chip)

    of, over = seconds(goal.of), seconds(goal.over)
    return over / of if goal.least else of / over


def problems(goal: Goal) -> list[str]:
    """What in a goal does not follow from its reason. The roofline of a training step is compiled
    in another test.
    """
    found = []
    if goal.reason["share"] != share(goal):
        found.append(f"{goal.name}: the share is {goal.reason['share']}, not {share(goal)}")
    for chip, value in (goal.least or goal.most or {}).items():
        least = goal.roofline[chip]
        if goal.part == "speed" and abs(roofline(goal, chip) - least) > 0.005:
            found.append(f"{goal.name}: the roofline on an {chip} is {roofline(goal, chip):.3f}")
        wanted = math.ceil(round(100 * share(goal) * least, 6)) / 100
        if value != wanted:
            found.append(f"{goal.name}: {value} on an {chip}; its reason gives {wanted}")
    return found
