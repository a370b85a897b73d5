"""What can be asked of a program, compiled once; and what of JAX's and of ours counts as one."""

import dataclasses
import html
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8lens.bill.bill import Bill
from fp8lens.bill.memory import Memory, Plan, memory_of
from fp8lens.dumps import (
    NoText,
    Stage,
    chip_of,
    is_of_another,
    is_ptx,
    needs_ptx,
    ptx_of,
    stages_of,
    text_of,
)
from fp8lens.hlo.parse import (
    HloModule,
    HloParseError,
    is_exported,
    parse_hlo_module,
    uncollected,
)
from fp8lens.hlo.replica_groups import device_counts
from fp8lens.hlo.text import format_hlo_module
from fp8lens.matmul.collectives import Collectives, collectives
from fp8lens.matmul.ledger import Ledger, make_ledger
from fp8lens.matmul.places import placed
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import Neighborhood, UnfusedKernel, find_unfused
from fp8lens.report.differences import Differences, differences
from fp8lens.report.gemms import GemmReport, make_report
from fp8lens.rules.chain import chain_of
from fp8lens.rules.facts import Matmul
from fp8lens.rules.find import find_reasons, given_to_rewriter, matmuls_of
from fp8lens.rules.reason import Reasons
from fp8lens.rules.rule import Lost
from fp8lens.targets import Target, resolve

# What to know of each choice of who runs the matmuls, which may not be the choice of the real job.
_REMARKS = {
    "cublaslt": "XLA's default, gemm='auto', also considers Triton",
    "triton": "XLA's default, gemm='auto', also considers cuBLASLt",
    "auto": "XLA's default, which also considers Triton",
}
_UNTIMED = ", and without a GPU takes its first kernel that compiles"


@dataclasses.dataclass(eq=False, repr=False)
class Inspection:
    """A compiled program. Each answer is computed when it is first read, and kept; the program is
    parsed once.

    `module` is the optimized HLO, parsed. `note` says how it was compiled, and `remark` what else
    XLA could have chosen. `compiled` is the `jax.stages.Compiled`, or None for a saved program.
    `stages` has the program that XLA's rewriter was given, and `ptx` the PTX of the kernels that
    XLA generated, by their names: of kernels that are alike, one has it; None where they are not
    known. `mesh` has the axes of the devices' mesh, with the devices of each; None where they are
    not known: HLO does not name them. `default` is the same function with XLA's default, if
    gemm="both" asked for both.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> def layer(x, w, x_scale, w_scale):
        ...     x, w = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32) * w_scale
        ...     return jax.nn.relu(x @ w.T)
        >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float8_e4m3fn)
        >>> scale = jax.ShapeDtypeStruct((), jnp.float32)
        >>> from fp8lens import inspect
        >>> seen = inspect(layer, x, x, scale, scale, target="H100")
        >>> seen.report.kernels, len(seen.ledger), seen.reasons == []
        (1, 1, True)
    """

    module: HloModule
    note: str = ""
    remark: str = ""
    compiled: Any = None
    stages: tuple[Stage, ...] = ()
    ptx: dict[str, str] | None = None
    chip: Target | None = None
    mesh: Mapping[str, int] | None = None
    plan: Plan = Plan()
    find_passes: Callable[[], Any] | None = None
    saved: bool = False
    default: "Inspection | None" = None

    @property
    def is_ours(self) -> bool:
        """Whether it was compiled here: a saved program has no passes and no plan of its memory,
        and in most cases no PTX and no reasons.
        """
        return bool(self.stages) and not self.saved

    @property
    def has_reasons(self) -> bool:
        """Whether it is known what XLA's rewriter was given: where it was compiled here, and of a
        dump that has the program before the rewriter too.
        """
        return bool(self.stages) and self.chip is not None

    @property
    def given(self) -> HloModule:
        """The program that XLA's gemm rewriter was given. TypeError as of `reasons`."""
        assert self.matmuls is not None
        return given_to_rewriter(self.stages)

    @property
    def devices(self) -> int:
        """For how many devices it was compiled."""
        return math.prod(device_counts(self.module))

    @cached_property
    def unfused(self) -> list[tuple[GemmRow, tuple[UnfusedKernel, ...]]]:
        """Each matmul, with the kernels around it that do work which its call could do."""
        return self._rows[0]

    @cached_property
    @uncollected()
    def _rows(self) -> tuple[list[tuple[GemmRow, tuple[UnfusedKernel, ...]]], Neighborhood]:
        found, around = find_unfused(self.module, self.ptx)
        rows = placed(self.module, [row for row, _ in found])
        return [(row, near) for row, (_, near) in zip(rows, found, strict=True)], around

    @cached_property
    def report(self) -> GemmReport:
        """How each matmul was compiled."""
        rows = [row for row, _ in self.unfused]
        note = "; ".join(filter(None, (self.note, self.remark)))
        return make_report(self.module, rows, self.ledger, note, self.ptx is not None)

    @property
    def differences(self) -> Differences | None:
        """Which matmuls differ with XLA's default; None if only one program was compiled."""
        return differences(self.report, self.default.report) if self.default else None

    @cached_property
    @uncollected()
    def ledger(self) -> Ledger:
        """Every kernel, in one line: what it does, for which matmul, and the bytes it moves."""
        return make_ledger(self.module, *self._rows)

    @cached_property
    @uncollected()
    def reasons(self) -> Reasons:
        """Why a matmul is not FP8, or left work to other kernels. TypeError for a saved program
        that does not show what XLA's rewriter was given.
        """
        opaque = self.ledger.of("opaque")
        return find_reasons(self.matmuls, self.collectives, opaque, self.ptx or {})

    @cached_property
    @uncollected()
    def matmuls(self) -> list[Matmul]:
        """The matmuls, each with what XLA's rewriter was given of it. TypeError as of `reasons`."""
        if self.chip is None or not self.stages:
            raise TypeError(
                "a saved or compiled program says no more what XLA's rewriter was given: "
                "inspect the function and its arguments."
            )
        return matmuls_of(self.unfused, self.stages, self.module, self.chip, self.collectives)

    def chain(self) -> str:
        """All that stands around each matmul: what is between the FP8 arrays and the dot, what is
        behind the dot and which of it is in the call, and the kernels beside it, each with its
        lines. TypeError for a saved program that does not show what XLA's rewriter was given.
        """
        parts = []
        for m in self.matmuls:
            place = f" ({m.given.source})" if m.given.source else ""
            parts.append(f"{m.row.title} {m.row.path}".rstrip() + place)
            parts += [f"  {line}" for line in chain_of(m, whole=True)]
        return "\n".join(parts)

    @cached_property
    def bill(self) -> Bill:
        """What the program costs: memory, work, what is computed again, what FP8 alone needs, what
        is sent, and the time that it takes at least, on an H100 where it is not known for what it
        was compiled.
        """
        return Bill(
            self.report,
            self.ledger,
            self.collectives,
            self.chip or resolve("H100"),
            self.memory if self.plan.ranges else None,
        )

    @cached_property
    def memory(self) -> Memory:
        """What lies in a device's memory, and what of it is there when most is. TypeError for a
        saved or compiled program: XLA writes its plan of the buffers only while it compiles.
        """
        if not self.plan.ranges:
            raise TypeError(
                "XLA writes its plan of a program's buffers only while it compiles: "
                "inspect the function and its arguments."
            )
        return memory_of(self.module, self.plan, self.compiled)

    @cached_property
    def collectives(self) -> Collectives:
        """What a sharded program sends between devices."""
        return collectives(self.module, self.mesh)

    def wide_rows(self, allowed: Collection[str] = ()) -> list[GemmRow]:
        """The matmuls that are not in FP8, but for those of which all reasons are by rules that are
        `allowed`. Of a saved program no reason is looked for.
        """
        # Kernels that are not looked into are asked for by `unknown`.
        wide = [row for row in self.report.rows if row.is_told and not row.is_fp8]
        if not allowed or not self.is_ours:
            return wide
        why: dict[str, set[str]] = defaultdict(set)
        for reason in self.reasons:
            if reason.lost == Lost.FP8:
                why[reason.instruction].add(reason.rule)
        return [row for row in wide if not why[row.name] or why[row.name] - {*allowed}]

    @property
    def unknown(self) -> list[tuple[str, str]]:
        """(kernel, why) of the kernels that HLO does not describe, and that may multiply in another
        type than FP8.
        """
        names = self.report.opaque
        if not self.is_ours:
            return [(name, "not looked into") for name in names]
        return [(r.matmul, r.reason) for r in self.reasons if r.instruction in names]

    @property
    def hlo(self) -> str:
        """The optimized HLO, readable: what `print_hlo_module` prints."""
        return format_hlo_module(self.module)

    @cached_property
    def passes(self) -> Any:
        """What each of XLA's passes changed at a matmul. This compiles once more, because XLA
        writes its passes only on request, and then takes up to twice as long. TypeError for a saved
        program.
        """
        if not self.find_passes:
            raise TypeError(
                "a saved or compiled program says no more by which passes it came about: "
                "inspect the function and its arguments."
            )
        return self.find_passes()

    def json(self, reasons: bool = True) -> str:
        """Rows, totals, devices, mesh, ledger, collectives and reasons as one JSON document; "mesh"
        is null where its axes are not known, "reasons" if they are not asked for, and for a saved
        program, and "differences" unless both programs of gemm="both" are compiled.
        """
        report = self.report
        totals = _fields(report)
        del totals["rows"]
        for name in ("flops", "fp8_flops", "fp8_flops_share"):
            totals[name] = getattr(report, name)
        ledger = []
        for line in self.ledger:
            more = {"name": line.name, "bytes": line.nbytes, "runs": line.kernel.count}
            ledger.append(_fields(line) | more)
            del ledger[-1]["kernel"]
        document = {
            "rows": [
                _fields(row) | {"path": row.path, "is_fp8": row.is_fp8} for row in report.rows
            ],
            "totals": totals,
            "devices": self.devices,
            "mesh": self.mesh,
            "ledger": ledger,
            "collectives": [_fields(c) for c in self.collectives],
            "reasons": None,
            "differences": self.differences and self.differences.fields(),
        }
        if reasons and self.has_reasons:
            document["reasons"] = [dataclasses.asdict(reason) for reason in self.reasons]
        return json.dumps(document, indent=1)

    @property
    def _further(self) -> list[str]:
        """What stands below the report."""
        parts = [self.differences, self.reasons if self.has_reasons else None]
        return [str(part) for part in parts if part is not None]

    def __str__(self) -> str:
        return "\n\n".join([str(self.report), *self._further])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        further = (f"<pre>{html.escape(part)}</pre>" for part in self._further)
        return "".join([self.report._repr_html_(), *further])


def _fields(of: Any) -> dict[str, Any]:
    """A dataclass's fields, without HLO's own objects; what JSON has no number for is text."""
    found = {}
    for field in dataclasses.fields(of):
        if field.repr:
            value = getattr(of, field.name)
            no_number = isinstance(value, float) and not math.isfinite(value)
            found[field.name] = str(value) if no_number else value
    return found


def inspect(x: Any, *args: Any, **options: Any) -> Inspection:
    """Compile once, and read any number of answers: an Inspection of a function, or of a program
    that was compiled before.

    `x` is a function, with its arguments and options as `aot_compile` takes them (target="H100",
    gemm="cublaslt", ...); or a `jax.export.Exported`, which has the shapes of its arguments; or
    a `jax.stages.Compiled`, HLO text, the path of a file with HLO text, or an HloModule. An
    Inspection is returned as it is.

    With gemm="both" a function is compiled twice: with cuBLASLt alone, of which are all answers,
    and with XLA's default. `.differences` has a line for each matmul that differs. A record of
    `autotune` is for the default.

    Raises TypeError for arguments or options without a function, FileNotFoundError for a path that
    does not exist, HloParseError for text that is not HLO, and what `aot_compile` raises.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> def layer(x, w, x_scale, w_scale):
        ...     x, w = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32) * w_scale
        ...     return jax.nn.relu(x @ w.T)
        >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float8_e4m3fn)
        >>> scale = jax.ShapeDtypeStruct((), jnp.float32)
        >>> from fp8lens import inspect
        >>> (row,) = inspect(layer, x, x, scale, scale).report.rows
        >>> row.m, row.n, row.k, row.math_dtype, row.epilogue
        (64, 64, 256, 'f8e4m3fn', 'RELU')
    """
    if isinstance(x, Inspection):
        if args or options:
            raise TypeError(
                "an Inspection is compiled already: give arguments and options to inspect() alone."
            )
        return x
    if not (callable(x) or is_exported(x)) or hasattr(x, "as_text"):
        if args or options:
            what = next(iter(options), "further arguments")
            raise TypeError(
                f"{what}: only with a function and its arguments, to compile it; "
                f"got {type(x).__name__}."
            )
        return Inspection(
            parse_hlo_module(_text_at(x)),
            not_a_gpus(x),
            compiled=x if hasattr(x, "as_text") else None,
        )

    from fp8lens.compile.meshes import axes_of
    from fp8lens.compile.stages import dumped, passes

    gemm = options.get("gemm", "cublaslt")
    if gemm == "both":
        seen = inspect(x, *args, **options | {"gemm": "cublaslt", "autotune": None})
        seen.default = inspect(x, *args, **options | {"gemm": "auto"})
        return seen
    compiled, stages, ptx, plan = dumped(x, *args, pattern="gemm-rewriter", **options)
    chip = resolve(options.get("target", "H100"))
    note, remark = f"compiled for {chip.name}, gemm={gemm!r}", _REMARKS[gemm]
    if gemm == "auto" and options.get("target") != "local" and not options.get("autotune"):
        remark += _UNTIMED
    axes = options.get("mesh_shape") or axes_of(compiled)
    return Inspection(
        parse_hlo_module(compiled),
        note,
        remark,
        compiled,
        stages,
        ptx,
        chip,
        dict(axes) if isinstance(axes, Mapping) else None,
        plan,
        lambda: passes(x, *args, **options),
    )


def _text_at(x: Any) -> Any:
    """The text of a file, if a path is given; else what is given. FileNotFoundError for what looks
    like a path, and is none.
    """
    if isinstance(x, os.PathLike) or (isinstance(x, str) and "\n" not in x and os.path.isfile(x)):
        return Path(x).read_text(encoding="utf-8", errors="replace")
    if isinstance(x, str) and re.fullmatch(r"\S*(?:\.\w+|[/\\]\S*)", x):
        raise FileNotFoundError(
            f"there is no file {x!r}: give a path from here to a file with HLO text."
        )
    return x


def of_dump(
    module: HloModule,
    name: str,
    beside: Mapping[str, bytes],
    mesh: Mapping[str, int] | None = None,
    reasons: bool = True,
    most: int = 0,
) -> tuple[Inspection, str]:
    """A program that XLA dumped, from a file of this name; and what is wrong with a file beside it,
    in words, "" for nothing. `beside` has the files, by name, that `fp8lens.dumps.files_beside`
    names: with them it has reasons, which are looked for at once if `reasons`. If one of the files
    is damaged, or of another program, or all together have more than `most` bytes of text, unless
    that is 0, none is used.
    """
    alone = Inspection(module, mesh=mesh)
    texts: dict[str, str] = {}
    for file, data in beside.items():
        try:
            texts[file] = text_of(data, most)
            if most and sum(map(len, texts.values())) > most:
                raise NoText(f"the last of more than {most / 1e6:g} MB of text")
            if reasons and not is_ptx(file):
                parse_hlo_module(texts[file])
        except NoText as error:
            return alone, f"{file} is {error}"
        except HloParseError as error:
            return alone, f"{file} is not one whole HLO module ({error})"
    stages, chip, ptx = stages_of(texts), chip_of(name), ptx_of(texts) or None
    if not stages or chip is None or (ptx is None and needs_ptx(module)):
        return alone, ""
    seen = Inspection(module, stages=stages, ptx=ptx, chip=chip, mesh=mesh, saved=True)
    op_names = [row.op_name for row in seen.report.rows]
    # Before the passes, the types are those of all devices together.
    if any(is_of_another(stage.text, module, op_names) for stage in stages if stage.after):
        return alone, "what XLA dumped of its passes beside it is of another program"
    try:
        _ = reasons and seen.reasons
    except HloParseError as error:
        return alone, str(error)
    return seen, ""


def report_gemms(x: Any, *args: Any, **options: Any) -> GemmReport:
    """How each matrix multiplication was compiled: a `GemmReport`, with one `GemmRow` for each.

    Takes what `inspect` takes: a function, compiled as by `aot_compile`, whose `args` and `options`
    it takes (target, gemm, mesh_shape, in_specs, compiler_options); a Compiled, an HloModule, HLO
    text, a file's path, or an Inspection. For a Lowered, or another module that is not optimized,
    the rows are its dots. If the program is sharded, the rows are those of one device.

    If a function was compiled, a Triton kernel's `math_dtype` is read from the multiply
    instructions of the kernel's PTX. A saved program has no PTX, so there it is the type of the
    kernel's dot, and the kernel may run in a wider type.

    Raises TypeError for `args` without a function, HloParseError for text that is not HLO, and what
    `aot_compile` raises.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        >>> from fp8lens import report_gemms
        >>> report = report_gemms(lambda x: x @ x, x, target="H100")
        >>> report.fp8_flops_share, report.flops == 2 * 64 * 64 * 64
        (0.0, True)
    """
    return inspect(x, *args, **options).report


def why_not_fp8(fn: Any, *args: Any, **options: Any) -> Reasons:
    """For every matmul that is not FP8, or whose FP8 call left work to other kernels: the reason
    and the fix.

    Takes what `inspect` takes, but no saved program, which does not show what XLA's rewriter was
    given: a function with its arguments, compiled once, or an Inspection. Compares the program that
    the rewriter was given with the compiled program. An empty list means that every matmul is FP8,
    and that no work that its call could do was left outside. If no known rule explains the loss,
    `reason` starts with "unknown".

    Raises TypeError for a saved program, and what `inspect` raises.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        >>> from fp8lens import why_not_fp8
        >>> [(str(reason.lost), reason.rule) for reason in why_not_fp8(lambda x: x @ x, x)]
        [('fp8', 'not-quantized')]
    """
    return inspect(fn, *args, **options).reasons


def not_a_gpus(x: Any) -> str:
    """A note on what JAX compiled for the CPU."""
    if not hasattr(x, "input_shardings"):
        return ""
    import jax

    shardings = jax.tree.leaves(x.input_shardings)
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    if platforms != {"cpu"}:
        return ""
    return "compiled for the CPU, which says nothing of a GPU: give the function"
