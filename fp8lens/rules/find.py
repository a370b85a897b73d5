"""Why a matmul is not one FP8 call, and what to change: XLA's own rules, checked on the program its
rewriter saw, in the order that stands here and at the end of each family's module.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fp8lens.formats import is_fp8
from fp8lens.hlo.origin import is_recomputed
from fp8lens.hlo.parse import HloModule, parse_hlo_module
from fp8lens.hlo.program import executions, fused
from fp8lens.hlo.values import look_through, operand
from fp8lens.matmul import collectives
from fp8lens.matmul.attribution import given_to_rewriter
from fp8lens.matmul.collectives import Collective
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.match import match
from fp8lens.matmul.operands import Operand
from fp8lens.matmul.roles import (
    Role,
    Step,
    computes_with_bits,
    could_be_fused,
    is_transcendental,
)
from fp8lens.matmul.rows import GemmRow, gemm_config, is_sum_of_products, matmuls
from fp8lens.matmul.unfused import ADDS, OwnWork, UnfusedKernel
from fp8lens.rules import (
    activations,
    amax,
    bias,
    extra_kernels,
    layout,
    operand_types,
    output,
    scales,
    wire,
)
from fp8lens.rules.extra_kernels import Opaque, Work
from fp8lens.rules.facts import (
    Amax,
    Conversion,
    InFront,
    Matmul,
    cause_of,
    is_only_cut,
)
from fp8lens.rules.reason import Reason, Reasons, of_matmul, texts_of
from fp8lens.rules.rule import Found, Rule, first
from fp8lens.targets import Target

#: For a kernel that makes an operand, a scale or a bias.
IN_FRONT = (
    layout.batch_inside,
    layout.rows_rearranged,
    layout.order_within_k,
    layout.operand_layout,
    layout.copied_choice,
    layout.joined_operand,
    layout.repeated_operand,
    activations.gradient_update,
    bias.copied_matrix,
    bias.transposed_matrix,
    bias.summed_first,
    layout.by_columns,
    bias.several_biases,
    bias.split_columns,
    bias.numbered_bias,
    bias.prepared_bias,
    scales.negated_operand,
    scales.division,
    scales.product_of_scales,
    scales.scale_of_one_element,
    scales.scale_not_f32,
)
#: For scale, clamp and conversion to FP8 that stayed outside together.
CONVERSION = (
    scales.added_several_times,
    output.no_clamp,
    output.clamp_early,
    activations.activation_after_scale,
    activations.relu_in_clamp,
    activations.bounded_relu,
    output.clamp_bounds,
    activations.lower_half,
    activations.clamp_alone,
    activations.other_activation,
    output.reshaped_first,
    output.scaled_twice,
    output.matrix_in_f32,
    activations.negated,
    activations.negated_last,
    output.other_readers,
    output.cut_first,
    output.amax_beside_it,
)
#: For any other step that stayed outside, and the steps behind it with it.
STEP = (
    output.between,
    scales.added_several_times,
    activations.selected_clamp,
    activations.activation_after_scale,
    bias.bias_after_scale,
    scales.vector_scale,
    activations.activation_and_reader,
    activations.negated,
    activations.negated_last,
    activations.relu_of_codes,
    layout.cut_twice,
    activations.late_relu,
    bias.bias_and_reader,
    bias.scalar_added,
    bias.subtracted,
    activations.compared,
    activations.rounded,
    activations.derivative,
    output.no_such_type,
    activations.bounded_relu,
    activations.lower_half,
    activations.clamp_alone,
    activations.selected_relu,
    activations.gelu_and_transpose,
    activations.with_bits,
    activations.other_activation,
    scales.late_factor,
    scales.scale_after_epilogue,
    scales.scales_one_by_one,
    scales.scale_too_many,
    bias.second_of_a_sum,
    bias.matrix_after_a_sum,
    bias.second_matrix,
    bias.matrix_after_epilogue,
    bias.for_each_row,
    layout.by_columns,
    bias.several_biases,
    bias.split_columns,
    bias.late_bias,
    bias.bias_of_another_type,
    bias.bias_in_f32,
    output.widened_and_back,
    output.another_type,
)
#: Each of these may be broken beside any other: wrong numbers, and what the GPU refuses.
WRONG = (
    scales.block_scales_misread,
    scales.padded_with_a_number,
    scales.sign_lost,
    scales.moved_constant,
    bias.bias_of_codes,
    bias.no_such_bias,
    scales.factor_of_codes,
    scales.relu_of_scaled_codes,
)


#: Of kernels that make FP8 operands, and have to run as the program is written.
AT_OPERANDS = (
    extra_kernels.requantized,
    extra_kernels.quantized_in_loop,
    extra_kernels.quantized_twice,
)


def find_reasons(
    found: Sequence[tuple[GemmRow, Sequence[UnfusedKernel]]],
    stages: Sequence[Any],
    after: HloModule,
    chip: Target,
    sent: Sequence[Collective],
    opaque: Sequence[Line],
    ptx: Mapping[str, str],
) -> Reasons:
    """The reasons for a compiled module's rows, each with the kernels around it, for its
    collectives, and for kernels that HLO does not tell of, from the stages and the PTX of its
    compile.
    """
    before = parse_hlo_module(given_to_rewriter(stages).text)
    written = parse_hlo_module(stages[0].text)
    dots = [
        dot
        for name in executions(before)
        for i in before.computations[name]
        for dot in matmuls(i)
        if dot.is_seen
    ]
    reasons = Reasons()
    if not found and not opaque:
        reasons.empty = "There is no matmul."
    found = [(row, near) for row, near in found if row.is_seen]
    rows = [row for row, _ in found]
    # What has no dot must not be taken for another's.
    of_dots = [row for row in rows if not is_sum_of_products(row)]
    matched = iter(match(after, of_dots, before, dots, _types))
    once = _Once()
    for row, near in found:
        dot = None if is_sum_of_products(row) else next(matched)
        gathered = {k for c in sent if row.name in c.feeds for k in c.transposed_by}
        near = [o for o in near if o.instruction.name not in gathered]  # a reason of their own
        m = Matmul(row, dot.instruction if dot else None, written, chip, near)
        if row.library in ("cublasLt", "cublas"):
            reasons += once.reasons(m, dot)
        reasons += of_row(m)
    reasons += of_collectives(sent, {r.instruction for r in reasons if r.rule == _GATHERED})
    for line in opaque:
        reasons += of_opaque(line, ptx)
    return reasons


_GATHERED = operand_types.gathered.name


class _Once:
    """The calls so far: what each multiplies should be multiplied once."""

    def __init__(self) -> None:
        self.by_dot: dict[tuple, str] = {}
        self.by_matrices: dict[tuple, str] = {}

    def reasons(self, m: Matmul, dot: GemmRow | None) -> list[Reason]:
        """Why a call multiplies what another one before it has multiplied."""
        row, matrices = m.row, _reads(m.row)
        same_dot = self.by_dot.setdefault((matrices, id(dot)), row.name)
        same_matrices = self.by_matrices.setdefault(matrices, row.name)
        if same_dot != row.name:
            rule = extra_kernels.added_to_itself if _added(row) == same_dot else extra_kernels.twice
            return [_reason(m, rule, same_dot)]
        if same_matrices != row.name and not is_recomputed(row.op_name):
            return [_reason(m, extra_kernels.again, same_matrices)]
        return []


def _added(row: GemmRow) -> str:
    """The name of what made the matrix that a call adds, or ""."""
    if not row.beta or fused(row.instruction):
        return ""
    return look_through(operand(row.instruction, 2), ("bitcast", "copy", "get-tuple-element")).name


def _reads(row: GemmRow) -> tuple:
    """What a call multiplies, in any order: two calls that multiply the same are one matmul, run
    twice.
    """
    i = row.instruction
    if fused(i):  # the call is inside, with slices of what the fusion reads
        return i.computation.name, i.callee("calls"), *i.operands
    numbers = gemm_config(i)["dot_dimension_numbers"]
    sides = []
    for index, side in enumerate(("lhs", "rhs")):
        array = look_through(operand(i, index), ("bitcast", "copy"))
        along = [str(numbers.get(f"{side}_{what}_dimensions")) for what in ("contracting", "batch")]
        sides.append((array.name, *along))
    return i.computation.name, *sorted(sides), *sorted((row.m, row.n)), row.k


def _types(row: GemmRow) -> tuple[str, ...]:
    """The FP8 types that a call multiplies, or that XLA would find behind the operands of a dot."""
    i = row.instruction
    if i.opcode != "dot":
        return tuple(sorted(t for t in (row.lhs_dtype, row.rhs_dtype) if is_fp8(t)))
    sides = (Operand(operand(i, n), "") for n in (0, 1))
    return tuple(sorted(side.fp8.shape.dtype for side in sides if side.fp8 is not None))


# One matmul ---------------------------------------------------------------------------------------


def _reason(m: Matmul, rule: Rule, facts: Any) -> Reason:
    """The reason of a rule that is known to be broken."""
    (found,) = rule.found(facts)
    return of_matmul(m, rule, found)


def _first(m: Matmul, rules: Iterable[Rule], facts: Any) -> Reason | None:
    """The reason of the first of some rules that the facts break."""
    broken = first(rules, facts)
    return of_matmul(m, *broken) if broken else None


def of_row(m: Matmul) -> list[Reason]:
    """All that a matmul lost."""
    reasons = [_first(m, (operand_types.ragged,), m)]
    if m.row.is_fp8:
        reasons += left_outside(m)
    else:
        reasons += not_fp8(m)
    return [reason for reason in reasons if reason is not None]


def not_fp8(m: Matmul) -> list[Reason]:
    """Why a matmul does not run in FP8: one reason, or one for each operand."""
    broken = first(operand_types.NOT_FP8, m)
    assert broken is not None  # the last of these rules always holds
    rule, found = broken
    if rule in operand_types.OF_ONE_OPERAND:
        each = [first(operand_types.OF_ONE_OPERAND, m.of_one(side)) for side in m.sides]
        of_each = [one for one in each if one is not None]
        # Of two operands that are not quantized, one sentence tells.
        is_one_reason = {rule for rule, _ in of_each} == {operand_types.not_quantized}
        if len(of_each) > 1 and not is_one_reason:
            return [of_matmul(m, *one) for one in of_each]
    return [of_matmul(m, rule, found)]


def left_outside(m: Matmul) -> list[Reason]:
    """What stayed outside of an FP8 call."""
    avoidable = [o for o in m.near if o.avoidable]
    found = [in_front(m, o, work) for o in avoidable if not o.after for work in o.work]
    if refused := _first(m, (output.no_such_kernel,), m):
        return [*dict.fromkeys(found), refused]
    if unused := _first(m, (extra_kernels.chosen_result,), m):
        # What stays outside is another matter in a branch.
        return [*dict.fromkeys(found), unused]
    for rule in WRONG + AT_OPERANDS:
        found += [of_matmul(m, rule, wrong) for wrong in rule.found(m)]
    of_result: list[Reason | None] = []
    after = [o for o in avoidable if o.after]
    works = [work for o in after for work in o.work]
    if after:
        of_result += behind(m, works)
    if set(works) <= {"amax", "transpose", "pad"}:
        of_result += in_other_kernels(m)
    alone = (
        output.result_in_fp8,
        scales.tiles_of_k,
        layout.batch_summed,
        layout.stacked_then_summed,
        layout.changed_in_part,
    )
    of_result += [_first(m, (rule,), m) for rule in alone]
    of_result += [_first(m, (extra_kernels.unknown_kernel,), o) for o in m.near]
    known = [reason for reason in of_result if reason is not None]
    return list(dict.fromkeys(found + (known or unexplained(m))))


def unexplained(m: Matmul) -> list[Reason]:
    """What the kernels show and no rule speaks of: the ledger and the reasons are two analyses, and
    where they differ nobody is told that all is well.
    """
    done_anyway = [o for o in m.near if o.after and o.own]
    kinds = [kind for o in done_anyway for kind in o.fusable]
    if any(step.kind is Role.ACTIVATION and is_transcendental(step) for step in m.left):
        kinds = [kind for kind in kinds if kind is not Role.RELU]  # a part of it, as of softplus
    works = [kind.work for kind in kinds]
    return [unknown(m, works)] if works else []


def in_front(m: Matmul, kernel: UnfusedKernel, work: str) -> Reason:
    """Why a kernel in front of a call was not fused."""
    if work == "pad":
        return padded(m)
    reason = _first(m, IN_FRONT, InFront(m, kernel.instruction, work))
    return reason or unknown(m, [work])


def padded(m: Matmul) -> Reason:
    """Why a kernel pads or cuts."""
    reason = _first(m, layout.PADDING, m)
    assert reason is not None  # the last of these rules always holds
    return reason


def unknown(m: Matmul, works: Iterable[str]) -> Reason:
    """No rule says why kernels do this."""
    return _reason(m, extra_kernels.unknown_outside, Work(m, list(works)))


def behind(m: Matmul, works: list[str]) -> list[Reason]:
    """Why kernels do `works` behind a call, which they would not have to."""
    if set(works) == {"transpose"}:
        return [_reason(m, layout.result_layout, m)]
    if set(works) == {"pad"}:
        return [padded(m)]
    if m.dot is None:
        return [unknown(m, works)]
    if not m.is_cublaslt:  # the rules below are of cuBLASLt's calls
        return [_reason(m, extra_kernels.outside_of_a_kernel, Work(m, works))]
    found: list[Reason | None] = []
    if m.main and set(works) - {"amax", "transpose", "pad"}:
        found.append(caused(m, m.main))
    if amaxes := [step for step in m.left if step.kind is Role.AMAX]:
        found += [no_amax(m, step) for step in amaxes]
    elif "amax" in works:
        found += [_first(m, (amax.amax_in_16_bits, amax.amax_of_another), m)]
    if "transpose" in works:
        found.append(_reason(m, layout.result_layout, m))
    if not found and "pad" in works:
        found.append(padded(m))
    return [reason for reason in found if reason] or [unknown(m, works)]


def no_amax(m: Matmul, step: Step) -> Reason:
    """Why a call does not compute an amax."""
    if m.dot is not None and m.result_is_fp8:
        return of_matmul(m, output.result_in_fp8, Found(to=m.dot.shape.dtype))
    return _first(m, amax.AMAX, Amax(m, step)) or unknown(m, ["amax"])


def caused(m: Matmul, left: list[Step]) -> Reason:
    """Why the first of the steps that stayed outside did: the rest stays outside because of it."""
    cause = cause_of(m, left)
    if cause.is_widened_and_back and not could_be_fused(left[1]):
        cause = cause_of(m, left[1:])  # which would stay outside without the conversion, too
    if isinstance(cause, Conversion):
        return _first(m, (*layout.MOVED, *CONVERSION), cause) or unknown(m, ["output"])
    rules = (activations.gradient_update, *layout.MOVED, *STEP)
    reason = _first(m, rules, cause) or unknown(m, [cause.lost])
    if not cause.rest:
        return reason
    stay = "stay" if " and " in cause.rest else "stays"
    return _and(reason, f"the {cause.rest} after it {stay} outside too")


def _and(reason: Reason, further: str) -> Reason:
    return dataclasses.replace(reason, reason=f"{reason.reason}; {further}")


def in_other_kernels(m: Matmul) -> list[Reason]:
    """What the call could have taken and did not, where a kernel does it that must run anyway."""
    anyway = [o for o in m.near if o.after and o.own]
    reason = _done_anyway(m, anyway)
    if reason is None:
        return []
    # What is stored in another array, or sent, is not followed: who reads that is not among these
    # kernels.
    passed_on = (OwnWork.STORES, OwnWork.READS)
    is_further = all(o.own in passed_on and not o.work for o in anyway)
    if is_further:
        return [_and(reason, "a kernel further on does it")]
    return [_and(reason, "it is done in a kernel that runs anyway")]


def _done_anyway(m: Matmul, anyway: list[UnfusedKernel]) -> Reason | None:
    if works := [work for o in anyway if o.own == ADDS for work in o.work]:
        return _reason(m, extra_kernels.outside_of_a_kernel, Work(m, works))
    if m.dot is None or not m.is_cublaslt or not anyway or m.result_is_fp8:
        return None
    if merged := _first(m, (bias.merged_then_added,), m):
        return merged
    left = [step for step in m.left if step.kind is not Role.AMAX]
    if not left:
        return None
    if left[0].kind is Role.OUTPUT and is_only_cut(m, left[0].at.shape.dtype):
        return _first(m, STEP, cause_of(m, left[:1]))
    may_be_a_factor = left[0].kind is Role.ALPHA or computes_with_bits(left[0])
    if may_be_a_factor or any(map(could_be_fused, left)):
        return caused(m, left)
    return None


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
    broken = first(extra_kernels.OPAQUE, kernel)
    assert broken is not None  # the last of these rules always holds
    name = f"{line.name} {line.layer}" if line.layer else line.name
    place: dict[str, Any] = {"source": line.source, "instruction": line.name, "layer": line.layer}
    return [Reason(matmul=name, **place, **texts_of(*broken))]
