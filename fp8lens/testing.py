"""When a reader's own test fails: a matmul that is not FP8, work left outside of it, a collective
that sends wide numbers.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from inspect import unwrap
from typing import Any

from fp8lens.guard import MAY_GROW, Changes, changes
from fp8lens.hlo.parse import visible
from fp8lens.inspection import Inspection, inspect
from fp8lens.matmul.collectives import (
    KINDS,
    MOVES,
    Collective,
    Collectives,
    of_kinds,
)
from fp8lens.matmul.roles import Role
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import UnfusedKernel
from fp8lens.records import entry_of, name_in, read_record, recorded, write_record
from fp8lens.report.gemms import UNSCALED, GemmReport
from fp8lens.rules import wire
from fp8lens.rules.find import SENT_WIDE, sent_wide
from fp8lens.rules.reason import Reasons, paragraph
from fp8lens.rules.rule import RULES, Lost
from fp8lens.rules.whole_call import no_such_kernel

#: The variable of the environment that has `assert_no_worse` write its record.
UPDATE = "FP8LENS_UPDATE"
_WORK = ("scale", "bias", "epilogue", "amax", "output", "transpose", "pad")
_NO_WORK = ("duplicate", "kernel", "wire", "opaque", UNSCALED)  # what else may be allowed
_EPILOGUE = re.compile(r"(BIAS_)?(RELU|GELU)(_AUX)?|BIAS|DEFAULT")  # as cuBLASLt names them
_NOT_OPTIMIZED = "what XLA makes of it is not known yet: give the function, or its compiled program"
# Files of installed packages, and what is no file.
_NO_FILE = re.compile(r"[/\\](site|dist)-packages[/\\]|^<")
# Whether an FP8 call does a kind of work, where its row tells.
_DONE: dict[str, Callable[[GemmRow], bool]] = {
    "scale": lambda row: bool(row.scales) or row.alpha != 1,
    "bias": lambda row: "BIAS" in row.epilogue or bool(row.beta),
    "epilogue": lambda row: row.epilogue != "DEFAULT",
    "amax": lambda row: row.amax,
}


def assert_fp8_gemms(
    fn: Any,
    *args: Any,
    count: int | None = None,
    min_flops_share: float | None = None,
    fused: bool | str | Collection[str] = (),
    allow: str | Collection[str] = (),
    **options: Any,
) -> GemmReport:
    """Assert that a program multiplies in FP8; for your own tests. Takes a function with its
    arguments and options as `inspect` takes them, or an Inspection. For a saved program it can
    check only whether it multiplies in FP8, not what is `fused`.

    `count`: that many of its matmuls must be FP8; each is counted once, however often it runs.
    `min_flops_share`: at least this part, 0 to 1, of its matmul FLOPs must be FP8. With neither,
    every matmul must be FP8. A matmul whose numbers are wrong, by an error of XLA's that a rule
    knows, fails in any case, and so does one that a GPU refuses to run. Except with `count` alone,
    there may be no kernel that fp8lens cannot look into, such as a hand-written one or a library's,
    because its FLOPs are unknown. `fused`: if True, no work may be left outside any FP8 matmul.
    Names of work ask only for that work: "scale", "bias", "epilogue", "amax", "output",
    "transpose", "pad". If one of the first four is named, at least one call must also do that work.
    cuBLASLt's names, such as "RELU" or "BIAS_GELU", ask that every FP8 call has that epilogue.
    `allow` names what a layer's user cannot change and what `fused` then ignores: kinds of work,
    ("transpose", "bias"), or rules, "late-relu". A matmul may be wide if all reasons for it are by
    allowed rules: a router, which is meant to be, by "not-quantized". With "opaque" the assertion
    ignores kernels that fp8lens cannot look into.

    With gemm="both" the program must be so in both ways to compile it.

    Returns the report. Raises AssertionError, whose message is the report and the reasons;
    ValueError for a name that `fused` does not know; and what `aot_compile` raises.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> def layer(x, w, x_scale, w_scale):
        ...     x, w = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32) * w_scale
        ...     return jax.nn.relu(x @ w.T)
        >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float8_e4m3fn)
        >>> scale = jax.ShapeDtypeStruct((), jnp.float32)
        >>> from fp8lens import assert_fp8_gemms
        >>> assert_fp8_gemms(layer, x, x, scale, scale, fused=True, target="H100").kernels
        1
    """
    asked = _Asked.of(count, min_flops_share, fused, allow)
    seen = inspect(fn, *args, **options)
    name = getattr(fn, "__name__", "the program")
    for one in filter(None, (seen, seen.default)):
        _check(one, name, asked)
    return seen.report


def fp8_failures(seen: Inspection, allowed: Collection[str] = ()) -> list[str]:
    """Why a program does not multiply in FP8 alone, in sentences; none where it does. `allowed` are
    rules, and "opaque", as for `assert_fp8_gemms`.
    """
    reasons = seen.reasons if seen.is_ours else Reasons()
    return [*_failures(seen, reasons, _Asked(allowed=frozenset(allowed)))]


def _check(seen: Inspection, name: str, asked: "_Asked") -> None:
    """Raise AssertionError where a program is not what was asked for."""
    asks_for_work = bool(asked.works or asked.epilogues)
    reasons = seen.reasons if seen.is_ours or asks_for_work else Reasons()
    failures = [
        *_failures(seen, reasons, asked),
        *_outside(seen, reasons, asked),
        *_not_there(seen.report, asked),
    ]
    if not failures:
        return
    # What it was compiled for stands before all.
    title = ", ".join(filter(None, (name, seen.report.note)))
    report = dataclasses.replace(seen.report, note="")
    lines = [f"{visible(title)}:", *(f"  {failure}" for failure in failures), str(report)]
    if not asks_for_work:
        reasons = Reasons(reason for reason in reasons if reason.lost == Lost.FP8)
    if reasons:
        lines.append(str(reasons))
    raise AssertionError("\n".join(lines))


def _failures(seen: Inspection, reasons: Reasons, asked: "_Asked") -> Iterator[str]:
    """What of FP8 is not as it was asked for, whatever stays outside."""
    report = seen.report
    if not report.optimized:
        yield _NOT_OPTIMIZED
    for row in report.fp8_rows:
        if row.library == "triton" and not seen.is_ours:
            yield (
                f"{row.title}: only its PTX tells what a Triton kernel multiplies: "
                "give the function"
            )
        if row.is_refused and no_such_kernel.name not in asked.allowed:
            yield f"{row.title}: {no_such_kernel.page.reason}; fix: {no_such_kernel.page.fix}"
    yield from _not_fp8(seen, asked)
    is_default = asked.count is None and asked.min_flops_share is None
    if is_default and report.unscaled and UNSCALED not in asked.allowed:
        yield f'{report.of_gradients()[0]}; allow="{UNSCALED}" accepts it'
    for reason in reasons:
        if reason.gives_wrong_numbers and reason.rule not in asked.allowed:
            yield f"{reason.matmul}: {reason.reason}"
    # A count alone does not ask for FLOPs.
    asks_for_all = asked.count is None or asked.min_flops_share
    for name, why_not in seen.unknown if asks_for_all and "opaque" not in asked.allowed else ():
        yield f'{name}: {why_not}; allowing "opaque" leaves such kernels out of what is asked'


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What `assert_fp8_gemms` was asked for. `works` are kinds of work of which none may be left
    outside, `everything` whether that is all there are; `epilogues` are those that every call must
    have.
    """

    count: int | None = None
    min_flops_share: float | None = None
    works: frozenset[str] = frozenset()
    everything: bool = False
    epilogues: tuple[str, ...] = ()
    allowed: frozenset[str] = frozenset()

    @staticmethod
    def of(
        count: int | None,
        share: float | None,
        fused: bool | str | Collection[str],
        allow: str | Collection[str],
    ) -> "_Asked":
        """The same, checked; ValueError for what cannot be asked."""
        if share is not None and not 0 <= share <= 1:
            raise ValueError(
                f"min_flops_share must be from 0 to 1, such as 0.9 for 90%; got {share!r}."
            )
        allowed = _allowed(allow, (*_WORK, *_NO_WORK), RULES, "late-relu")
        if fused is True:
            works = frozenset((*_WORK, "duplicate", "kernel", "wire"))
            return _Asked(count, share, works, True, allowed=allowed)
        wanted = _words(fused or ())
        epilogues = tuple(sorted(name.upper() for name in wanted.difference(_WORK)))
        for name in epilogues:
            if not _EPILOGUE.fullmatch(name):
                raise ValueError(
                    f"fused has {name!r}; "
                    f"it takes {', '.join(_WORK)}, or an epilogue, such as BIAS_RELU."
                )
        return _Asked(count, share, wanted.intersection(_WORK), False, epilogues, allowed)


def _words(given: Any) -> frozenset[str]:
    """One word, or several."""
    return frozenset((given,) if isinstance(given, str) else given)


def _allowed(
    allow: str | Collection[str], words: Sequence[str], rules: Iterable[str], such_as: str
) -> frozenset[str]:
    """What is allowed: some of these words and rules; ValueError for anything else."""
    allowed = _words(allow)
    if unknown := sorted(allowed - {*words, *rules}):
        raise ValueError(
            f"allow has {unknown[0]!r}; it takes {', '.join(words)}, or the name of a rule, such "
            f"as {such_as}."
        )
    return allowed


def _not_fp8(seen: Inspection, asked: _Asked) -> Iterator[str]:
    """Too few matmuls that are FP8, or not the number asked for."""
    report, share = seen.report, asked.min_flops_share
    rows, fp8, wide = len(report.rows), len(report.fp8_rows), seen.wide_rows(asked.allowed)
    if asked.count is not None:
        if fp8 != asked.count:
            yield f"{fp8} matmuls are FP8, not {asked.count}"
    elif not rows:
        beside = " beside kernels that are not looked into" if report.opaque else ""
        yield f"the program has no matmul{beside}"
    elif share is None and wide:
        yield f"{len(wide)} of {rows} matmuls are not FP8"
    elif share is None and not fp8:
        yield "no matmul is FP8"
    if not share:
        return
    if report.fp8_flops_share < share:
        yield f"{report.fp8_flops_share:.1%} of the FLOPs are FP8, less than {share:.1%}"
    for row in report.rows:
        if row.count is None and not row.is_fp8:
            yield (
                f"{row.title} is not FP8, and how often its loop runs is not known, "
                "nor then the share of the FLOPs: ask for a count"
            )


def _outside(seen: Inspection, reasons: Reasons, asked: _Asked) -> Iterator[str]:
    """Work left outside that was asked for, and epilogues that are others."""
    for name in asked.epilogues:
        others = [row.epilogue for row in seen.report.fp8_rows if row.epilogue != name]
        if others:
            yield f"an FP8 call has the epilogue {others[0]}, not {name}"
    works = asked.works - asked.allowed
    for reason in reasons:
        if reason.lost in works and reason.rule not in asked.allowed:
            yield f"{reason.matmul} left outside: {reason.lost}"
    if not asked.everything:
        # One reason may stand for all that comes after an obstacle: what was named is looked for
        # in every kernel.
        yield from _in_kernels(seen, works - {reason.lost for reason in reasons})


def _in_kernels(seen: Inspection, works: Collection[str]) -> Iterator[str]:
    """Work of these kinds that a kernel beside an FP8 matmul does."""
    for row, kernels in seen.unfused:
        if not row.is_fp8:
            continue
        for kernel in kernels:
            for work in kernel.work:
                if work in works and not _adds_a_matrix(kernel, work):
                    yield f"{row.title} left outside: {work}, to {kernel.instruction.name}"


def _adds_a_matrix(kernel: UnfusedKernel, work: str) -> bool:
    """Whether what looks like a bias is a whole matrix, added in a kernel that must run anyway: a
    residual, or an optimizer's step.
    """
    return work == "bias" and kernel.own and Role.BIAS not in kernel.roles


def _not_there(report: GemmReport, asked: _Asked) -> Iterator[str]:
    """Work that was named and that no call does."""
    if asked.everything:
        return
    for work in sorted(asked.works):
        if work in _DONE and not any(map(_DONE[work], report.fp8_rows)):
            yield f"no FP8 call has fused: {work}"


def assert_no_worse(
    fn: Any,
    *args: Any,
    record: str | os.PathLike,
    name: str = "",
    may_grow: float = MAY_GROW,
    **options: Any,
) -> Changes:
    """Assert that a program costs no more than a record says; for your own tests. Takes a function
    with its arguments and options as `inspect` takes them, or an Inspection.

    `record` is the path of a JSON file, which may have many programs; `name` is the program's name
    there. By default it is the function's file, from the record's folder, and the function's name,
    as in "layer.py:layer", the name that the command gives it; in a parametrized test the test's
    parameters follow, as in "layer.py:layer[256]". `may_grow`: bytes moved, bytes sent and memory
    at the peak may grow by this share of what is recorded. Fewer matmuls of a size in FP8 always
    fail, and so does an added kernel that does what a matmul's call could do, or over 2% more
    kernels. To write what the program costs now into the record, run pytest with --fp8lens-update,
    or set FP8LENS_UPDATE=1.

    Returns what has changed. Raises AssertionError, whose message is a paragraph that says what is
    worse, where, and why, and what is better; FileNotFoundError or KeyError where nothing is
    recorded; ValueError for a file that is no record, or is of another chip, and while records are
    written, for another program under a name that this run has recorded; and what `inspect` raises.

    Example:

        >>> import jax, jax.numpy as jnp, os, tempfile
        >>> from fp8lens import assert_no_worse
        >>> def product(x, w):
        ...     return jax.lax.dot(x, w.T, preferred_element_type=jnp.float32)
        >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float8_e4m3fn)
        >>> record = os.path.join(tempfile.mkdtemp(), "fp8.json")
        >>> os.environ["FP8LENS_UPDATE"] = "1"
        >>> assert_no_worse(product, x, x, record=record)
        Changes(worse=(), better=(), about=())
        >>> del os.environ["FP8LENS_UPDATE"]
        >>> print(assert_no_worse(product, x, x, record=record))
        Nothing is worse than recorded.
    """
    if not may_grow >= 0:
        raise ValueError(f"may_grow must be a share such as 0.02, for 2%; got {may_grow!r}.")
    updates = os.environ.get(UPDATE, "") not in ("", "0")
    if not updates and not os.path.exists(record):
        raise FileNotFoundError(
            f"there is no record {os.fspath(record)!r}: run pytest once with --fp8lens-update, and "
            "commit the file that it writes."
        )
    if os.path.exists(record):
        read_record(record)  # what is wrong with it is said before anything is compiled
    seen = inspect(fn, *args, **options)
    name = name or _default_name(fn, seen, record)
    if updates:
        write_record(record, name, entry_of(seen))
        return Changes((), ())
    found = changes(recorded(record, name), seen, may_grow)
    if found.worse:
        raise AssertionError(
            f"{visible(name)} is worse than recorded in {visible(os.fspath(record))}: {found} To "
            "record it as it is now, run pytest with --fp8lens-update."
        )
    return found


def _default_name(fn: Any, seen: Inspection, record: str | os.PathLike) -> str:
    """A program's name in a record: where its function is written, and the parameters of the test
    that runs. Of a function in an installed package the folder differs between machines: only its
    name; of a program that is no function, the module's.
    """
    fn = unwrap(fn.func if isinstance(fn, functools.partial) else fn)
    code = getattr(fn, "__code__", None)
    if code and not _NO_FILE.search(code.co_filename):
        name = name_in(record, code.co_filename, fn.__qualname__)
    else:
        name = getattr(fn, "__qualname__", seen.module.name)
    # pytest's name of the test that runs: "test_layer.py::test_costs[256] (call)".
    test, _, _ = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")
    _, bracket, parameters = test.partition("[")
    return f"{name}{bracket}{parameters}"


def assert_fp8_collectives(
    fn: Any,
    *args: Any,
    kinds: str | Collection[str] = MOVES,
    allow: str | Collection[str] = (),
    **options: Any,
) -> Collectives:
    """Assert that each collective of these kinds sends FP8, if it feeds an FP8 matmul or sends what
    was FP8 before. Unless told otherwise, of all kinds that move values and add none: sums in FP8
    would lose too much.

    What others read in its wide type too, as a residual stream or a router does, has to travel
    wide, and passes. Only an all-gather of it fails, by the rule gathered-wide-read-wide: of what
    is gathered, the others often need their own device's part alone. The same holds for the
    running sums of a ring. A collective also fails if it gives a wide array to a kernel that
    fp8lens does not look into, such as a hand-written one: whether that quantizes it is not known.

    Of an array that is combined with others before it is quantized, as the two halves of a SwiGLU
    are, nothing is asked.

    Takes what `inspect` takes. `allow` names rules that a collective may break, such as
    "gathered-wide-read-wide". With "opaque" it may give a wide array to kernels that fp8lens cannot
    look into.

    Returns the collectives. Raises AssertionError, whose message is their table, and the reason and
    the fix of each that fails; also for a program without any collective or FP8 matmul, for one
    that is not compiled yet, and for one that JAX compiled for the CPU. Raises ValueError for
    `kinds` that are none of KINDS, or empty, for a `min_bytes` that is no number, and for a name
    that `allow` does not know; and what `inspect` raises.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from fp8lens import assert_fp8_collectives
        >>> def matmul(x, w):
        ...     return jnp.dot(x, w, preferred_element_type=jnp.float32)
        >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn)
        >>> specs = [PartitionSpec("data"), PartitionSpec("data")]
        >>> sent = assert_fp8_collectives(matmul, x, x, mesh_shape={"data": 4}, in_specs=specs)
        >>> [(collective.kind, collective.dtype) for collective in sent]
        [('all-gather', 'f8e4m3fn')]
    """
    kinds = _words(kinds)
    if not kinds or not kinds.issubset(KINDS):
        raise ValueError(f"kinds must be some of {', '.join(KINDS)}; got {sorted(kinds)}.")
    allowed = _allowed(allow, ("opaque",), SENT_WIDE, wire.gathered_wide_read_wide.name)
    seen = inspect(fn, *args, **options)
    found = seen.collectives
    asked = of_kinds(found, kinds)
    broken = [(c, reasons) for c in asked if (reasons := sent_wide(c, allowed))]
    lines = [*_sends_nothing(seen), *_sent_to_unknown(asked, allowed)]
    if not lines and not broken:
        if seen.report.fp8_rows or seen.report.opaque:
            return found
        lines.append(
            "no matmul is FP8, so nothing tells which collectives should be: assert_fp8_gemms says "
            "why"
        )
    if broken:
        should = ", ".join(dict.fromkeys(c.kind for c, _ in broken))
        lines.append(
            f"{len(broken)} of {len(found)} collectives do not send FP8, and {should} should:"
        )
    lines.append(str(found))
    for c, reasons in broken:
        lines += [paragraph(f"{c.title}: {r.reason}", r) for r in reasons]
    raise AssertionError("\n".join(lines))


def _sends_nothing(seen: Inspection) -> Iterator[str]:
    """Why a program's collectives are not known, or that it has none."""
    if not seen.report.optimized:
        yield _NOT_OPTIMIZED
    elif not seen.is_ours and seen.note:
        yield seen.note
    elif not seen.collectives:
        yield (
            "the program has no collective: to compile it for several devices, give mesh_shape and "
            "in_specs, or arguments with shardings"
        )


def _sent_to_unknown(asked: Iterable[Collective], allowed: Collection[str]) -> Iterator[str]:
    """Kernels that may quantize unseen what was sent wide."""
    for c in asked if "opaque" not in allowed else ():
        for name in c.unknown:
            yield (
                f"{c.name} sends {c.dtype} to {name}, which is not looked into: whether that "
                'quantizes it is not known; allow="opaque" leaves such kernels out of what is asked'
            )
