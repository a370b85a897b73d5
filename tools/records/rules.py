"""What the programs on the pages of fp8lens' rules become: `make rules` measures, `--check`
compares.

The page of a rule has a program that breaks it, and in most cases the same one fixed. Both are
compiled for chips that are not there, with several JAX releases, each in an environment of its own.
What became of them goes into notebooks/results/rules.json, with where it comes from. The site's
pages of rules and reference D read that file.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from fp8lens import Inspection
from fp8lens.rules.page import PRELUDE, Page, Program, every_name, explain
from helpers.records.results import load_rules
from helpers.rule_index import compiled
from tools.records import data
from tools.records.data import ASSEMBLER, OF_JAX, ROOT, by_number, environment, locked

DATA = ROOT / "notebooks" / "results" / "rules.json"
COMMAND = "make rules"
RELEASES = ("0.10.2", "0.11.2")  # beside the lock's: the oldest that is supported, and one between
CHIPS = ("H100", "B200")
AT_ONCE = 2  # XLA's compiler takes a core for each
FIX = "run `make rules`, look at what it says has changed, and commit notebooks/results/rules.json"

Row = dict[str, Any]


def pages() -> dict[str, Page]:
    """The pages with programs, by the names of their rules."""
    found = {name: explain(name) for name in every_name()}
    return {name: page for name, page in found.items() if page.loses}


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


def asked_of(page: Page, chip: str, which: str) -> str:
    """The rule whose sentences are recorded of a program: of each page once. Else ""."""
    is_shown = which == "loses" and chip == chips_of(page)[0]
    return page.rule.name if is_shown else ""


def tried(program: Program, chip: str, rule: str = "") -> Row:
    """What becomes of a program on one of the chips of its page."""
    try:
        return outcome(compiled(program, target=chip if chip in CHIPS else CHIPS[0]), rule)
    except Exception as error:  # that a program does not compile is a finding
        return {"error": data.first_line(error)}


def of_page(page: Page, chip: str, which: str) -> Row:
    """What becomes of one of a page's programs on a chip."""
    return tried(programs_of(page)[which], chip, asked_of(page, chip, which))


def measured(only: str = "") -> Row:
    """What the installed JAX makes of the programs of each rule with `only` in its name, and its
    provenance.
    """
    chosen = {name: page for name, page in pages().items() if only in name}
    asked = [
        (page, chip, which)
        for page in chosen.values()
        for chip in chips_of(page)
        for which in programs_of(page)
    ]
    rows: Row = {name: {"programs": mark_of(page), "chips": {}} for name, page in chosen.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda one: of_page(*one), asked)
        for (page, chip, which), made in zip(asked, found, strict=True):
            rows[page.rule.name]["chips"].setdefault(chip, {})[which] = made
    return data.with_provenance(rows, COMMAND, *OF_JAX, *ASSEMBLER)


# The data -----------------------------------------------------------------------------------------


def read() -> dict[str, Any]:
    """The data: release to what was measured, oldest first."""
    return data.read(DATA, COMMAND)


def write(releases: Mapping[str, Any]) -> None:
    """Write the data."""
    about = (
        "What each JAX release makes of the programs on the pages of fp8lens' rules. "
        "Written by `make rules`, not by hand."
    )
    data.write(DATA, about, releases)


def describe(made: Row | None) -> str:
    """What became of a program, as a line of text."""
    if made is None:
        return "no such program"
    if "error" in made:
        return f"does not compile: {made['error']}"
    kernels = "1 kernel" if made["kernels"] == 1 else f"{made['kernels']} kernels"
    types = ", ".join(made["types"]) or "no matmul"
    rules = ", ".join(made["rules"]) or "none"
    said = [f"{what}: {text}" for one in made.get("says", ()) for what, text in one.items()]
    return "; ".join([f"{types}, {kernels}, {made['bytes']:,} bytes, rules: {rules}", *said])


def changes(old: Mapping[str, Row], new: Mapping[str, Row]) -> Iterator[str]:
    """Each program that became something else, as text."""
    for name in {**old, **new}:
        before, after = (rows.get(name, {}).get("chips", {}) for rows in (old, new))
        for chip in {**before, **after}:
            for which in ("loses", "keeps"):
                was, now = (chips.get(chip, {}).get(which) for chips in (before, after))
                if was != now:
                    yield f"{name}, {chip}, {which}: was {describe(was)}; is {describe(now)}"


def problem(name: str, chip: str, made: Mapping[str, Row], recorded: Mapping[str, Any]) -> str:
    """What is wrong with the record of a rule on a chip with the installed JAX, of whose programs
    became `made`; "" for nothing. A release that is not recorded is not compared.
    """
    if (version := jax.__version__) not in recorded:
        return ""
    row = recorded[version]["rows"].get(name)
    if row is None:
        return f"{name} is not recorded with JAX {version}: {FIX}"
    now = {name: {"chips": {chip: made}}}
    then = {name: {"chips": {chip: row["chips"].get(chip, {})}}}
    return "; ".join(f"{change}: {FIX}" for change in changes(then, now))


def unrecorded(recorded: Mapping[str, Any]) -> list[str]:
    """Releases and rules that the data lacks, has without need, or has of other programs."""
    wanted = {name: mark_of(page) for name, page in pages().items()}
    missing = sorted({*RELEASES, locked()["jax"]} - set(recorded), key=by_number)
    found = [f"JAX {version} is not recorded: {FIX}" for version in missing]
    for version, entry in recorded.items():
        marks = {name: row["programs"] for name, row in entry["rows"].items()}
        for name in {**wanted, **marks}:
            if wanted.get(name) != marks.get(name):
                found.append(f"JAX {version}: the programs of {name} are not those recorded: {FIX}")
    return found


def check(recorded: Mapping[str, Any], only: str = "") -> list[str]:
    """Problems: what the data lacks, and each program of which the installed JAX makes another
    thing than the data has of this release, or of the newest where that is not recorded.
    """
    version = jax.__version__ if jax.__version__ in recorded else max(recorded, key=by_number)
    then = {name: row for name, row in recorded[version]["rows"].items() if only in name}
    return unrecorded(recorded) + [
        f"{change} (recorded with JAX {version}): {FIX}"
        for change in changes(then, measured(only)["rows"])
    ]


# Making it ----------------------------------------------------------------------------------------


def record(versions: list[str], only: str = "") -> int:
    """Measure with these releases, or with all, and `only` some rules; write the data after each,
    and print what changed.
    """
    for version in sorted(versions or {*RELEASES, locked()["jax"], *read()}, key=by_number):
        releases = read()
        before = releases.get(version, {})
        now = data.measure(version, environment(version), "tools.records.rules", only)
        print(f"JAX {version}: the programs of {len(now['rows'])} rules", flush=True)
        if only:
            now = data.merged(before, now, pages())
        if not data.is_news(before, now):
            continue  # the date stays that of the first time
        for change in changes(before["rows"], now["rows"]) if before else ():
            print(f"  {change}")
        write(releases | {version: now})
    return 0


def problems(only: str) -> list[str]:
    """What differs from what is compiled here. ValueError for an altered file."""
    return check(load_rules(DATA.parent), only)


def main(arguments: list[str] | None = None) -> int:
    """Measure, compare or record, as the arguments say; the exit status."""
    options = data.read_arguments(str(__doc__), arguments)
    fine = f"what JAX {jax.__version__} compiles is what is recorded"
    return data.carry_out(options, measured, problems, fine, record)


if __name__ == "__main__":
    sys.exit(main())
