"""Assertions for readers' own tests: that a function multiplies in FP8, and that nothing was left
outside.
"""

import re
from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any

from fp8lens.hlo.parse import visible
from fp8lens.inspection import inspect
from fp8lens.matmul.collectives import KINDS, Collectives, collectives, sends_wide
from fp8lens.report.gemms import GemmReport
from fp8lens.rules.find import of_collective
from fp8lens.rules.reason import paragraph

_WORK = ("scale", "bias", "epilogue", "amax", "output", "transpose", "pad")
_NO_WORK = ("duplicate", "kernel", "opaque")  # what else may be allowed


def assert_fp8_gemms(
    fn: Any,
    *args: Any,
    count: int | None = None,
    min_flops_share: float | None = None,
    fused: bool | str | Collection[str] = (),
    allow: str | Collection[str] = (),
    **options: Any,
) -> GemmReport:
    """Assert that a program multiplies in FP8; for your own tests. Takes a function, its arguments
    and options as `inspect` takes them, or an Inspection; of a saved program, whether it multiplies
    in FP8, and not what is `fused`.

    `count`: that many of its matmuls are FP8, each counted once however often it runs.
    `min_flops_share`: at least this part, 0 to 1, of its matmul FLOPs is. With neither, every
    matmul must be. Except with `count` alone, no kernel may multiply unseen, as a hand-written one
    or a library's may: nobody knows its FLOPs. `fused`: True, and nothing may be left outside any
    FP8 matmul; or names of work, of which none may: "scale", "bias", "epilogue", "amax", "output",
    "transpose", "pad" (and of the first four each must be there: some call has an amax); or
    cuBLASLt's names, such as "RELU" or "BIAS_GELU": every FP8 call has that epilogue. `allow` names
    work that `fused` does not ask about, for what a layer's user cannot change: ("transpose",
    "bias"); "opaque" leaves kernels that nobody can look into out of what is asked.

    Returns the report. Raises AssertionError, whose message is the report and the reasons;
    ValueError for a name that `fused` does not know; and what `aot_compile` raises.
    """
    wanted = [fused] if isinstance(fused, str) else _WORK if fused is True else list(fused or ())
    epilogues = [name for name in wanted if name not in _WORK]
    for name in epilogues:
        if not re.fullmatch(r"(BIAS_)?(RELU|GELU)(_AUX)?|BIAS|DEFAULT", name.upper()):
            raise ValueError(
                f"fused has {name!r}; it takes {', '.join(_WORK)}, or an epilogue, such as"
                " BIAS_RELU."
            )
    if min_flops_share is not None and not (
        isinstance(min_flops_share, Real) and 0 <= min_flops_share <= 1
    ):
        raise ValueError(
            f"min_flops_share must be from 0 to 1, such as 0.9 for 90%; got {min_flops_share!r}."
        )
    allowed = {allow} if isinstance(allow, str) else set(allow or ())
    if unknown := sorted(allowed - {*_WORK, *_NO_WORK}):
        raise ValueError(f"allow has {unknown[0]!r}; it takes {', '.join((*_WORK, *_NO_WORK))}.")
    seen = inspect(fn, *args, **options)
    report, reasons = seen.report, seen.reasons if seen.is_ours or wanted else []
    rows, failures = report.fp8_rows, []
    if report.note.startswith("not optimized"):
        failures.append(
            "what XLA makes of it is not known yet: give the function, or its compiled program"
        )
    if not seen.is_ours:  # HLO does not have a Triton kernel's instructions
        failures += [
            f"{row.title}: only its PTX tells what a Triton kernel multiplies: give the function"
            for row in rows
            if row.library == "triton"
        ]
    if count is not None and len(rows) != count:
        failures.append(f"{len(rows)} matmuls are FP8, not {count}")
    if count is None and not report.rows:
        failures.append("the program has no matmul")
    elif min_flops_share is not None and report.fp8_flops_share < min_flops_share:
        failures.append(
            f"{report.fp8_flops_share:.1%} of the FLOPs are FP8, less than {min_flops_share:.1%}"
        )
    elif count is None and min_flops_share is None and len(rows) < len(report.rows):
        failures.append(f"{len(report.rows) - len(rows)} of {len(report.rows)} matmuls are not FP8")
    if min_flops_share:
        failures += [
            f"{row.title} is not FP8, and how often its loop runs is not known, nor then the share"
            " of the FLOPs: ask for a count"
            for row in report.rows
            if row.count is None and not row.is_fp8
        ]
    if (count is None or min_flops_share) and "opaque" not in allowed:
        failures += [
            f'{name}: {told}; allow="opaque" leaves such kernels out of what is asked'
            for name, told in seen.unknown
        ]
    for name in epilogues:
        if wrong := [row.epilogue for row in rows if row.epilogue != name.upper()]:
            failures.append(f"an FP8 call has the epilogue {wrong[0]}, not {name.upper()}")
    works = {w for w in wanted if w in _WORK}
    works |= {"duplicate", "kernel"} if fused is True else set()
    failures += [f"{r.matmul} left outside: {r.lost}" for r in reasons if r.lost in works - allowed]
    there = {
        "scale": lambda r: r.scales or r.alpha != 1,
        "bias": lambda r: "BIAS" in r.epilogue or r.beta,
        "epilogue": lambda r: r.epilogue != "DEFAULT",
        "amax": lambda r: r.amax,
    }
    if fused is not True:
        # One reason may stand for all that comes after an obstacle: what was named is looked for in
        # every kernel.
        told = {r.lost for r in reasons}
        failures += [
            f"{row.title} left outside: {w}, to {o.instruction.name}"
            for row, near in seen._rows[0]
            if row.is_fp8
            for o in near
            for w in o.work
            if w in works - allowed - told
        ]
        missing = [w for w in sorted(works) if w in there and not any(map(there[w], rows))]
        failures += [f"no FP8 call has fused: {w}" for w in missing]
    if failures:
        lines = [
            visible(f"{getattr(fn, '__name__', 'the program')} {seen.note}".strip()) + ":",
            *(f"  {f}" for f in failures),
            str(report),
            *([str(reasons)] if reasons else []),
        ]
        raise AssertionError("\n".join(lines))
    return report


def assert_fp8_collectives(
    fn: Any,
    *args: Any,
    kinds: str | Iterable[str] = ("all-gather",),
    min_bytes: int = 0,
    mesh_shape: Any = None,
    **options: Any,
) -> Collectives:
    """Assert that each collective of those kinds that feeds an FP8 matmul, or sends what was FP8
    before, sends FP8.

    Takes what `inspect` takes; of a saved program, `mesh_shape` gives the names of the mesh's axes.
    `min_bytes`: of those from which each device sends at least so many bytes in one run. Returns
    the collectives. Raises AssertionError, whose message is their table, and the reason and the
    fix of each that fails; ValueError for a kind that is none of KINDS, and what `inspect` raises.
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if unknown := [name for name in kinds if name not in KINDS]:
        raise ValueError(f"kinds has {unknown[0]!r}; it takes {', '.join(KINDS)}.")
    if callable(fn) and not hasattr(fn, "as_text"):
        found = inspect(fn, *args, mesh_shape=mesh_shape, **options).collectives
    else:
        seen = inspect(fn, *args, **options)
        found = seen.collectives if mesh_shape is None else collectives(seen.module, mesh_shape)
    failed = sends_wide(found, kinds, min_bytes)
    if not failed:
        return found
    lines = [
        (
            f"{len(failed)} of {len(found)} collectives do not send FP8, and"
            f" {', '.join(kinds)} should:"
        ),
        str(found),
    ]
    for c in failed:
        where = f" ({c.source})" if c.source else ""
        lines += [paragraph(f"{c.name}{where}: {r.reason}", r) for r in of_collective(c)]
    raise AssertionError("\n".join(lines))
