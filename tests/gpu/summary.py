"""What the records of a chip say, in a screen: printed at the end of a run, for whoever must decide at once."""
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from record import read


def summary(folder: Path) -> str:
    """A few lines for each part that has a record in the folder."""
    return "\n".join(line for path in sorted(folder.glob("*.json")) for line in of_part(path.stem, read(path)))


def of_part(part: str, record: Mapping[str, Any]) -> Iterator[str]:
    failed = {name: case["error"] for name, case in record["cases"].items() if "error" in case}
    cases = {name: case for name, case in record["cases"].items() if name not in failed}
    took, about = sum(case.get("took", 0) for case in record["cases"].values()), record["runs"][-1]
    yield (f"## {part}: {len(record['cases'])} cases in {took:.0f} s, {len(failed)} failed; {about['device']}, cuBLAS "
           f"{about['cublas']}, {about.get('power_limit', 'no power limit')}")
    yield from (f"   FAILED {name}: {why[:120]} [...] {why[-120:]}" for name, why in list(failed.items())[:6])
    yield from {"agreement": agreement, "numerics": numerics, "speed": speed, "train": train, "autotune": autotune,
                "notebooks": notebooks}[part](cases)


def few(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def agreement(cases: Mapping[str, Any]) -> Iterator[str]:
    for gemm in ("cublaslt", "auto"):
        some = {name: case for name, case in cases.items() if case["gemm"] == gemm}
        if some:
            yield (f"   {gemm}: {len(some)} programs, {sum(c['agree'] for c in some.values())} agree, "
                   f"{sum(c['ran'] for c in some.values())} ran; differ: "
                   f"{few([name for name, case in some.items() if not case['agree']])}")
            refused = {name: case["refused"] for name, case in some.items() if not case["ran"]}
            yield from (f"      refused {name}: {why[:90]} [...] {why[-90:]}"
                        for name, why in list(refused.items())[:8])


def numerics(cases: Mapping[str, Any]) -> Iterator[str]:
    judged = {name: case for name, case in cases.items() if "inputs" in case}
    for name, case in cases.items():
        if "sums" in case:
            yield f"   {name}: " + "; ".join(f"{what}: fast {e['fast']:.1e}, exact {e['exact']:.1e}"
                                             for what, e in case["sums"].items())
    if judged:
        yield (f"   wrong: {few([name for name, case in judged.items() if case['right'] is False])}; NaN elsewhere: "
               f"{few([name for name, case in judged.items() if case['keeps_nan'] is False])}; refused: "
               f"{few([name for name, case in judged.items() if case['refused']])}")


def speed(cases: Mapping[str, Any]) -> Iterator[str]:
    for name, case in cases.items():
        for load, row in case.get("loads", {}).items():
            yield f"   {name}: {load}: " + (row["error"][:120] if "error" in row else (
                f"{case['flops'] / row['burst_seconds'] / 1e12:.0f} TFLOP/s, then "
                f"{case['flops'] / row['sustained_seconds'] / 1e12:.0f} {chip(row.get('sustained'))}"))
        forms = {form: row for form, row in case.get("forms", {}).items() if "wall_seconds" in row}
        if forms:
            by_gpu = all(row["device_seconds"] for row in forms.values())
            clock = "device_seconds" if by_gpu else "wall_seconds"
            base = next(iter(forms.values()))[clock]
            said = ", ".join(f"{form} {row[clock] * 1e6:.0f}us x{base / row[clock]:.2f}" for form, row in forms.items())
            why = "" if by_gpu else f" BY THE HOST'S CLOCK ({next(iter(forms.values())).get('no_clock', '')[:80]})"
            yield f"   {name}:{why} {said[:600 if name.startswith('8192') else 240]}"
        bad = [form for form, row in case.get("forms", {}).items() if "error" in row or row.get("right") is False]
        if bad:
            yield f"      BAD: {few(bad)}"


def chip(row: Mapping[str, Any] | None) -> str:
    return f"({row['clock_mhz'][1]:.0f} MHz, {row['power_w'][0]:.0f} W, {few(row['held_back_by'])})" if row else ""


def train(cases: Mapping[str, Any]) -> Iterator[str]:
    for name, case in cases.items():
        rows = {form: row for form, row in case["precisions"].items() if "wall_seconds" in row}
        for form, row in case["precisions"].items():
            if form not in rows:
                yield f"   {name}, {form}: FAILED {row.get('error', '')[-150:]}"
                continue
            losses = row.get("losses") or [None]
            yield (f"   {name}, {form}: wall {row['wall_seconds'] * 1e3:.2f} ms, kernels "
                   f"{(row['device_seconds'] or 0) * 1e3:.2f} ms in {row['launches']:.0f}, roofline "
                   f"{row.get('roofline_seconds', 0) * 1e3:.2f}, attention {row['attention']} "
                   f"{row.get('cudnn_refused', '')[-90:]} loss {losses[0]} to {losses[-1]} {chip(row.get('chip'))}")
        if "bf16" in rows:
            yield "      over bf16: " + ", ".join(f"{form} {row['wall_seconds'] / rows['bf16']['wall_seconds']:.3f}"
                                                  for form, row in rows.items())


def autotune(cases: Mapping[str, Any]) -> Iterator[str]:
    for name, case in cases.items():
        chosen = " + ".join(f"{row['library']} {row['tile']}".strip() for row in case["on_gpu"].get("gemms", ()))
        chosen = chosen or case["on_gpu"].get("error", "")[:100]
        yield f"   {name}: {chosen}; {'travels' if case['agree'] else 'differs'}"


def notebooks(cases: Mapping[str, Any]) -> Iterator[str]:
    for name, case in cases.items():
        yield f"   {name}: {'passed' if case['passed'] else 'FAILED ' + case['failure'][-200:]} ({case['seconds']} s)"
