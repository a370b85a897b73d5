"""What the programs on the pages of fp8lens' rules become: `make rules` measures.

The page of a rule has a program that breaks it, and in most cases the same one fixed. Both are
compiled for chips that are not there, with several JAX releases, each in an environment of its own.
What became of them goes into notebooks/results/rules.json, with where it comes from. The site's
pages of rules and reference D read that file.
"""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fp8lens import Inspection
from fp8lens.rules.find import every_name, explain
from fp8lens.rules.page import PRELUDE, Page, Program
from helpers.rule_index import compiled
from tools.recorders.data import Record, first_line

RELEASES = ("0.10.2", "0.11.2")  # beside the lock's: the oldest that is supported, and one between
CHIPS = ("H100", "B200")
AT_ONCE = 2  # XLA's compiler takes a core for each

Row = dict[str, Any]


def with_programs() -> list[str]:
    """The rules whose pages have programs."""
    return [name for name in every_name() if explain(name).loses]


def programs_of(page: Page) -> dict[str, Program]:
    """A page's programs by what becomes of them: "loses" and "keeps"."""
    both = {"loses": page.loses, "keeps": page.keeps}
    return {which: program for which, program in both.items() if program}


def mark_of(page: Page) -> str:
    """A digest of a page's programs: a row with another one is of other programs."""
    written = [PRELUDE, *(f"{one.options}\n{one.code}" for one in programs_of(page).values())]
    return hashlib.sha256("\n\n".join(written).encode()).hexdigest()[:16]


def chips_of(page: Page) -> tuple[str, ...]:
    """The chips for which a page's programs are compiled, H100 first; or the one that its options
    name for the program that loses something: then the fixed one is for an H100.
    """
    assert page.loses
    own = re.search(r"\btarget=[\"'](\w+)[\"']", page.loses.options)
    return (own[1],) if own else CHIPS


def outcome(inspection: Inspection, rule: str = "") -> Row:
    """What became of one program; with the sentences of a rule, where it breaks that."""
    report, reasons = inspection.report, inspection.reasons
    row: Row = {
        "types": sorted({"FP8" if row.is_fp8 else row.math_dtype for row in report.rows}),
        "matmuls": len(report.rows),
        "kernels": report.kernels,
        "bytes": report.bytes_moved,
        "rules": sorted({reason.rule for reason in reasons if reason.rule}),
    }
    of_rule = [reason for reason in reasons if rule and reason.rule == rule]
    if of_rule:
        row["says"] = [{"reason": reason.reason, "fix": reason.fix} for reason in of_rule]
    return row


def tried(program: Program, chip: str, rule: str = "") -> Row:
    """What becomes of a program on one of the chips of its page."""
    try:
        return outcome(compiled(program, target=chip if chip in CHIPS else CHIPS[0]), rule)
    except Exception as error:  # that a program does not compile is a finding
        return {"error": first_line(error)}


def row(name: str) -> Row:
    """What becomes of the programs on a rule's page, by chip."""
    page = explain(name)
    chips: Row = {}
    for chip in chips_of(page):
        # Of each page once, the rule's sentences are recorded.
        rule_of = {"loses": name} if chip == chips_of(page)[0] else {}
        chips[chip] = {
            which: tried(program, chip, rule_of.get(which, ""))
            for which, program in programs_of(page).items()
        }
    return {"programs": mark_of(page), "chips": chips}


def rows(names: Sequence[str]) -> Row:
    """What the installed JAX makes of the programs of these rules."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(row, names), strict=True))


RECORD = Record(
    name="rules",
    module="tools.recorders.rule_programs",
    about="What each JAX release makes of the programs on the pages of fp8lens' rules.",
    releases=RELEASES,
    names=lambda version: with_programs(),
    rows=rows,
)

if __name__ == "__main__":
    RECORD.main()
