"""What the records of a chip say, in a screen: printed at the end of a run, for whoever must decide
at once."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import RESULTS, read

from helpers.records.results import Record, goals


def summary(folder: Path, parts: Sequence[str]) -> str:
    """What goals are reached, and a few lines for each of the parts that has a record in the
    folder."""
    records = {part: record for part in parts if (record := read(folder / f"{part}.json"))["cases"]}
    lines = ["## goals"] if {"speed", "train"} & records.keys() else []
    for part in ("speed", "train"):
        if part in records and not records[part]["runs"][-1]["rehearsal"]:
            one = Record(part, tuple(records[part]["runs"]), records[part]["cases"])
            lines += [f"   {goal.verdict(one)}" for goal in goals(part, folder=RESULTS)]
    lines += ["   a rehearsal reaches none"] if lines == ["## goals"] else []
    return "\n".join(
        [*lines, *(line for part, record in records.items() for line in of_part(part, record))]
    )


def of_part(part: str, record: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one part: how many cases, what failed, and what its cases say."""
    failed = {name: case["error"] for name, case in record["cases"].items() if "error" in case}
    cases = {name: case for name, case in record["cases"].items() if name not in failed}
    took, about = sum(case.get("took", 0) for case in record["cases"].values()), record["runs"][-1]
    chapters = sum(case.get("passed") is False for case in cases.values())
    yield (
        f"## {part}: {len(record['cases'])} cases in {took:.0f} s, "
        f"{len(failed) + chapters} failed; {about['device']}, cuBLAS {about['cublas']}, "
        f"{about.get('power_limit', 'no power limit')}"
    )
    yield from (
        f"   FAILED {name}: {why[:120]} [...] {why[-120:]}"
        for name, why in list(failed.items())[:6]
    )
    yield from {
        "agreement": agreement,
        "numerics": numerics,
        "speed": speed,
        "train": train,
        "autotune": autotune,
        "notebooks": notebooks,
    }[part](cases)


def few(names: list[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    return (
        ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
        or "none"
    )


def agreement(cases: Mapping[str, Any]) -> Iterator[str]:
    """How many programs agree and ran, and the first that were refused."""
    for gemm in ("cublaslt", "auto"):
        some = {name: case for name, case in cases.items() if case["gemm"] == gemm}
        if some:
            yield (
                f"   {gemm}: {len(some)} programs, {sum(c['agree'] for c in some.values())} agree, "
                f"{sum(c['ran'] for c in some.values())} ran; differ: "
                f"{few([name for name, case in some.items() if not case['agree']])}"
            )
            refused = {name: case["refused"] for name, case in some.items() if not case["ran"]}
            yield from (
                f"      refused {name}: {why[:90]} [...] {why[-90:]}"
                for name, why in list(refused.items())[:8]
            )


def numerics(cases: Mapping[str, Any]) -> Iterator[str]:
    """The errors of the sums, and which programs are wrong."""
    judged = {name: case for name, case in cases.items() if "inputs" in case}
    for name, case in cases.items():
        if "sums" in case:
            yield f"   {name}: " + "; ".join(
                f"{what}: fast {e['fast']:.1e}, careful {e['careful']:.1e}"
                for what, e in case["sums"].items()
            )
            yield from (
                f"      {what}, as the model: "
                + ", ".join(f"{how} {part:.1%}" for how, part in same.items())
                for what, same in case.get("same_as_model", {}).items()
            )
    if judged:
        wrong = [name for name, case in judged.items() if case["right"] is False]
        elsewhere = [name for name, case in judged.items() if case["keeps_nan"] is False]
        refused = [name for name, case in judged.items() if case["refused"]]
        yield (f"   wrong: {few(wrong)}; NaN elsewhere: {few(elsewhere)}; refused: {few(refused)}")


def speed(cases: Mapping[str, Any]) -> Iterator[str]:
    """Rates under load, and each form's time beside the first form's."""
    for name, case in cases.items():
        for load, row in case.get("loads", {}).items():
            yield f"   {name}: {load}: " + (
                row["error"][:120]
                if "error" in row
                else (
                    f"{case['flops'] / row['burst_seconds'] / 1e12:.4g} TFLOP/s, then "
                    f"{case['flops'] / row['sustained_seconds'] / 1e12:.4g} "
                    f"{chip(row.get('sustained'))}"
                )
            )
        forms = {form: row for form, row in case.get("forms", {}).items() if "wall_seconds" in row}
        if forms:
            by_gpu = all(row["device_seconds"] for row in forms.values())
            clock = "device_seconds" if by_gpu else "wall_seconds"
            base = next(iter(forms.values()))[clock]
            # All forms where goals are about them, the first few elsewhere: a screen is all that
            # may come back.
            some = list(forms.items())[: None if name.startswith("8192") else 5]
            said = ", ".join(
                f"{form} {row[clock] * 1e6:.0f}us x{base / row[clock]:.2f}" for form, row in some
            )
            why = (
                ""
                if by_gpu
                else f" BY THE HOST'S CLOCK ({next(iter(forms.values())).get('no_clock', '')[:80]})"
            )
            yield f"   {name}:{why} {said}"
        bad = [
            form
            for form, row in case.get("forms", {}).items()
            if "error" in row or row.get("right") is False
        ]
        if bad:
            yield f"      BAD: {few(bad)}"


def chip(row: Mapping[str, Any] | None) -> str:
    """What the chip did meanwhile: clock, power, what held it back. Empty where nobody looked."""
    if not row:
        return ""
    clock, power = row.get("clock_mhz", [0, 0])[1], row.get("power_w", [0])[0]
    return f"({clock:.0f} MHz, {power:.0f} W, {few(row['held_back_by'])})"


def train(cases: Mapping[str, Any]) -> Iterator[str]:
    """Each precision's time, and its ratio to bf16's."""
    for name, case in cases.items():
        rows = {form: row for form, row in case["precisions"].items() if "wall_seconds" in row}
        for form, row in case["precisions"].items():
            if form not in rows:
                yield f"   {name}, {form}: FAILED {row.get('error', '')[-150:]}"
                continue
            losses = f"loss {row['losses'][0]} to {row['losses'][-1]}" if row.get("losses") else ""
            clock = (
                f"kernels {row['device_seconds'] * 1e3:.2f} ms in {row['launches']:.0f}"
                if row["device_seconds"]
                else row.get("no_clock", "")
            )
            yield (
                f"   {name}, {form}: wall {row['wall_seconds'] * 1e3:.2f} ms, {clock}, roofline "
                f"{row.get('roofline_seconds', 0) * 1e3:.2f}, attention {row['attention']} "
                f"{row.get('cudnn_refused', '')[-90:]} {losses} {chip(row.get('chip'))}"
            )
        if "bf16" in rows:
            yield "      over bf16: " + ", ".join(
                f"{form} {row['wall_seconds'] / rows['bf16']['wall_seconds']:.3f}"
                for form, row in rows.items()
            )


def autotune(cases: Mapping[str, Any]) -> Iterator[str]:
    """What the GPU chose, and whether a compile without it follows."""
    for name, case in cases.items():
        chosen = " + ".join(
            f"{row['library']} {row['tile']}".strip() for row in case["on_gpu"].get("gemms", ())
        )
        chosen = chosen or case["on_gpu"].get("error", "")[:100]
        yield f"   {name}: {chosen}; {'travels' if case['agree'] else 'differs'}"


def notebooks(cases: Mapping[str, Any]) -> Iterator[str]:
    """Which chapters passed, and of the others the end of what was said."""
    for name, case in cases.items():
        how = "passed" if case["passed"] else f"FAILED {case['failure'][-200:]}"
        yield f"   {name}: {how} ({case['seconds']} s)"
