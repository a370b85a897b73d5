"""Why a matmul is not one FP8 call, and what to change: XLA's own rules, checked on the program
that its rewriter saw. What no rule explains is listed.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fp8lens.formats import is_fp8
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module
from fp8lens.hlo.program import executions
from fp8lens.hlo.values import operand
from fp8lens.matmul import collectives
from fp8lens.matmul.collectives import Collective
from fp8lens.matmul.kernels import moved
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.operands import Operand
from fp8lens.matmul.places import match
from fp8lens.matmul.roles import Role, could_be_fused
from fp8lens.matmul.rows import GemmRow, is_sum_of_products, matmuls
from fp8lens.matmul.unfused import UnfusedKernel
from fp8lens.rules import (  # noqa: F401  each module has its rules registered
    after_the_dot,
    amax,
    behind_operands,
    conversion,
    in_front,
    listed,
    no_fp8_call,
    opaque,
    still_wide,
    whole_call,
    wire,
)
from fp8lens.rules.chain import chain_of
from fp8lens.rules.facts import Amax, Cause, Conversion, InFront, Matmul, Work, cause_of
from fp8lens.rules.opaque import Opaque
from fp8lens.rules.page import Page
from fp8lens.rules.reason import Reason, Reasons, of_matmul, texts_of
from fp8lens.rules.rule import RULES, Rule, every, first
from fp8lens.targets import Target

# The passes of XLA's before which a program is as the rewriter is given it.
_REWRITERS = ("triton-gemm-rewriter", "cublas-gemm-rewriter")


def given_to_rewriter(stages: Sequence[Any]) -> HloModule:
    """Of a compile's stages the program that XLA's gemm rewriter was given; the first stage where
    it was given none.
    """
    given = next((stage for stage in stages if stage.before in _REWRITERS), stages[0])
    return parse_hlo_module(given.text)


def matmuls_of(
    found: Sequence[tuple[GemmRow, Sequence[UnfusedKernel]]],
    stages: Sequence[Any],
    after: HloModule,
    chip: Target,
    sent: Sequence[Collective],
) -> list[Matmul]:
    """The matmuls of a compiled module, from its rows, each with the kernels around it, and from
    the stages of its compile.
    """
    before = given_to_rewriter(stages)
    written = parse_hlo_module(stages[0].text)
    dots = [
        dot
        for name in executions(before)
        for i in before.computations[name]
        for dot in matmuls(i)
        if dot.is_seen
    ]
    found = [(row, near) for row, near in found if row.is_seen]
    # What has no dot must not be taken for another's.
    of_dots = [row for row, _ in found if not is_sum_of_products(row)]
    matched = iter(match(after, of_dots, before, dots, _types))
    made: list[Matmul] = []
    for row, near in found:
        dot = None if is_sum_of_products(row) else next(matched)
        gathered = {k for c in sent if row.name in c.feeds for k in c.transposed_by}
        near = [o for o in near if o.instruction.name not in gathered]  # a reason of their own
        m = Matmul(row, dot.instruction if dot else None, written, chip, near)
        m.twin = next((other for other in made if m.dot is not None and other.dot is m.dot), None)
        made.append(m)
    return made


def find_reasons(
    made: Sequence[Matmul],
    sent: Sequence[Collective],
    opaques: Sequence[Line],
    ptx: Mapping[str, str],
) -> Reasons:
    """The reasons for a program's matmuls, for its collectives, and for kernels that HLO does not
    tell of, from their PTX.
    """
    reasons = Reasons()
    if not made and not opaques:
        reasons.empty = "There is no matmul."
    for m in made:
        reasons += of_row(m)
    told = {r.instruction for r in reasons if r.rule == _GATHERED}
    reasons += of_collectives(sent, told)
    for line in opaques:
        reasons += of_opaque(line, ptx)
    return reasons


_GATHERED = behind_operands.gathered_operand.name


def _types(row: GemmRow) -> tuple[str, ...]:
    """The FP8 types that a call multiplies, or that XLA would find behind the operands of a dot."""
    i = row.instruction
    if i.opcode != "dot":
        return tuple(sorted(t for t in (row.lhs_dtype, row.rhs_dtype) if is_fp8(t)))
    sides = (Operand(operand(i, n), "") for n in (0, 1))
    return tuple(sorted(side.fp8.shape.dtype for side in sides if side.fp8 is not None))


# One matmul ---------------------------------------------------------------------------------------


def _first(m: Matmul, family: str, facts: Any) -> Reason | None:
    """The reason of the first rule of a family that the facts break."""
    broken = first(family, facts)
    if broken is None:
        return None
    return of_matmul(m, *broken, getattr(facts, "at", None), _bytes_of(m, facts))


def _bytes_of(m: Matmul, facts: Any) -> int:
    """What the kernels that facts tell of read and write, in all runs: one in front of the call, or
    those behind it that would not have to run.
    """
    kernels = [o.instruction for o in m.near if o.avoidable and o.after]
    if isinstance(facts, InFront):
        kernels = [facts.kernel]
    elif isinstance(facts, Matmul):
        kernels = []
    return sum(map(_moved_in_all_runs, kernels))


def _moved_in_all_runs(i: Instruction) -> int:
    runs = executions(i.computation.module).get(i.computation.name)
    return moved(i) * (runs or 1)


def _by_name(m: Matmul, rule: Rule, facts: Any) -> list[Reason]:
    return [of_matmul(m, rule, found) for found in rule.found(facts)]


def of_row(m: Matmul) -> list[Reason]:
    """All that a matmul lost."""
    reasons = _by_name(m, listed.ragged, m)
    reasons += left_outside(m) if m.row.is_fp8 else not_fp8(m)
    said: dict[tuple[str, str], Reason] = {}
    for reason in reasons:  # of several kernels one sentence tells, as of padding and cutting
        key = reason.rule, reason.reason
        before = said[key].nbytes if key in said else 0
        first_said = said.get(key, reason)
        said[key] = dataclasses.replace(first_said, nbytes=before + reason.nbytes)
    return list(said.values())


def not_fp8(m: Matmul) -> list[Reason]:
    """Why a matmul does not run in FP8: one reason, or one for each operand."""
    if none := _first(m, "no_fp8_call", m):
        return [none]
    of_both = first("behind_operands", m)
    if of_both and (m.dot is None or of_both[1].get("which", "").startswith("both")):
        return [of_matmul(m, *of_both)]  # of two that are not quantized, one sentence tells
    of_each = [_first(m, "behind_operands", m.of_one(side)) for side in m.sides]
    if known := [reason for reason in of_each if reason is not None]:
        return known
    wide = _first(m, "still_wide", m) if m.is_quantized else None
    return [wide or _listing(m, listed.unknown_not_fp8, m)]


def left_outside(m: Matmul) -> list[Reason]:
    """What stayed outside of an FP8 call."""
    avoidable = [o for o in m.near if o.avoidable]
    reasons, unknown = [], []
    for kernel in avoidable:
        for work in () if kernel.after else kernel.work:
            reason = _first(m, "in_front", InFront(m, kernel.instruction, work))
            reasons += [reason] if reason else []
            unknown += [] if reason else [work]
    for rule, found in every("whole_call", m):
        cost = _moved_in_all_runs(found["kernel"]) if "kernel" in found else 0
        reasons.append(of_matmul(m, rule, found, nbytes=cost))
    after = [kernel for kernel in avoidable if kernel.after]
    behind, told = _behind(m, after)
    works = [work for kernel in after for work in kernel.work]
    unknown += [work for work in works if not told]
    reasons += behind
    if unknown:
        reasons.append(_listing(m, listed.unknown_outside, Work(unknown)))
    return reasons


def _behind(m: Matmul, after: list[UnfusedKernel]) -> tuple[list[Reason], bool]:
    """Why kernels work behind a call, and whether that tells of all that they do."""
    works = [work for kernel in after for work in kernel.work]
    if transposed := _by_name(m, listed.result_layout, Work(works)):
        return transposed, True
    if set(works) == {"pad"}:
        cuts = [_first(m, "in_front", InFront(m, kernel.instruction, "pad")) for kernel in after]
        return [reason for reason in cuts if reason], None not in cuts
    if m.dot is None or not m.is_cublaslt or m.result_is_fp8:
        return [], False
    cause = cause_of(m, m.main) if m.main else None
    left = [step for step in m.left if step.kind is Role.AMAX] if "amax" in works else []
    found = [_first(m, "amax", Amax(m, step)) for step in left]
    of_amaxes = [reason for reason in found if reason]
    if cause is None or not (works or (_is_worth_a_reason(cause) and _has_readers(m))):
        return of_amaxes, bool(found) and None not in found
    family = "conversion" if isinstance(cause, Conversion) else "after_the_dot"
    reason = _first(m, family, cause)
    if reason is None:
        return of_amaxes, False
    if reason.rule == conversion.scale_of_own_amax.name:
        of_amaxes = []  # it is what the reason tells of
    return [_with_the_rest(reason, cause, bool(works)), *of_amaxes], True


def _is_worth_a_reason(cause: Cause) -> bool:
    """Whether it matters that a step stayed outside, where no kernel could be saved: it does for a
    conversion to FP8, and for an activation that a call has.
    """
    is_activation = cause.kind in (Role.RELU, Role.ACTIVATION) and could_be_fused(cause.first)
    return isinstance(cause, Conversion) or is_activation


def _has_readers(m: Matmul) -> bool:
    """Whether kernels that must run in any case read the result."""
    return any(kernel.after and kernel.own for kernel in m.near)


def _with_the_rest(reason: Reason, cause: Cause, is_saved: bool) -> Reason:
    """A reason with what stays outside because of it."""
    further = []
    if cause.rest:
        verb = "stay" if " and " in cause.rest else "stays"
        further.append(f"the {cause.rest} after it {verb} outside too")
    if not is_saved:
        further.append("it is done in a kernel that runs anyway")
    return dataclasses.replace(reason, reason="; ".join([reason.reason, *further]))


def _listing(m: Matmul, rule: Rule, facts: Any) -> Reason:
    """What no rule explains, with what stands around the matmul."""
    (found,) = rule.found(facts)
    return dataclasses.replace(of_matmul(m, rule, found), chain=chain_of(m))


# Collectives, and kernels that are no instructions of HLO's ---------------------------------------

# Names of the rules by which a collective should send FP8.
SENT_WIDE = frozenset(
    (*(wire.WIRE[problem].name for problem in collectives.SENT_WIDE), wire.summed_wide.name)
)


def of_collectives(sent: Iterable[Collective], told: set[str]) -> list[Reason]:
    """What is sent wide, or moved behind the wire. Of the matmuls in `told` a reason says already
    that they are gathered wide. A sum over devices needs its digits: no reason, unless asked for.
    """
    reasons = []
    for c in sent:
        left_out = {wire.summed_wide.name}
        if not told.isdisjoint(c.feeds):
            left_out.add(wire.dequantized_then_gathered.name)
        reasons += [reason for reason in of_collective(c) if reason.rule not in left_out]
    return reasons


def of_collective(c: Collective) -> list[Reason]:
    """What a collective lost; of a sum that is quantized for an FP8 matmul, what could be sent in
    place of it.
    """
    rules = [wire.WIRE[problem] for problem in c.problems]
    if c.is_summed_wide:
        rules.append(wire.summed_wide)
    place: dict[str, Any] = {
        "matmul": ", ".join(c.feeds[:3]) or c.name,
        "source": c.source,
        "instruction": c.name,
    }
    return [Reason(**place, **texts_of(r, found)) for r in rules for found in r.found(c)]


def sent_wide(c: Collective, allowed: Collection[str] = ()) -> list[Reason]:
    """Why a collective should send FP8, by the rules that are not allowed to be broken."""
    asked = SENT_WIDE - {*allowed}
    return [reason for reason in of_collective(c) if reason.rule in asked]


def of_opaque(line: Line, ptx: Mapping[str, str]) -> list[Reason]:
    """What is known of a kernel that is no instruction of HLO's: of Pallas's kernels, what they
    multiply.
    """
    kernel = Opaque(line, ptx)
    if kernel.is_known:
        return []
    broken = first("opaque", kernel)
    assert broken is not None  # the last of these rules always holds
    name = f"{line.name} {line.layer}" if line.layer else line.name
    place: dict[str, Any] = {"source": line.source, "instruction": line.name, "layer": line.layer}
    return [Reason(matmul=name, **place, **texts_of(*broken))]


# Rules by their names --------------------------------------------------------------------------


def every_name() -> list[str]:
    """The names of all rules, by what is lost and then by name."""
    return sorted(RULES, key=lambda name: (RULES[name].lost or "", name))


def explain(name: str) -> Page:
    """The page of the rule with this name. KeyError, which tells names like it, for no rule's."""
    if name not in every_name():
        close = difflib.get_close_matches(name, RULES, 3) or sorted(RULES)[:3]
        raise KeyError(f"no rule {name!r}: did you mean {', '.join(close)}?")
    return RULES[name].page
