"""What XLA finds, or does not find, behind an operand: MatchFp8Param and FindF8SubgraphRecursive in
XLA's gemm_rewriter.cc.

Each rule takes a `Matmul` that is not FP8, with the operands that it is asked about in `sides`.
"""

import re
from collections.abc import Iterable

from fp8lens.formats import is_fp8
from fp8lens.hlo.ops import COLLECTIVES, COMMUTES
from fp8lens.hlo.values import look_through
from fp8lens.matmul.operands import Operand, Problem
from fp8lens.rules.facts import Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule

_ALLOWED = ", ".join(sorted(COMMUTES))


@rule("not-quantized", lost=Lost.FP8)
def not_quantized(m: Matmul) -> Found | None:
    """An operand is not FP8 anywhere in the program."""
    if m.dot is None:
        wide = [d for d in (m.row.lhs_dtype, m.row.rhs_dtype) if not is_fp8(d)]
        which = "both operands are" if len(wide) == 2 else "an operand is"
        return found_if(wide, which=which, dtypes=_listed(wide), parts="")
    if not m.missing or m.folded or m.blocked is not None or m.block_scaled is not None:
        return None
    which = "both operands are" if len(m.missing) == 2 else f"the {m.missing[0].side} operand is"
    types = [_stored_type(side) for side in m.missing]
    is_complex = any(re.match(r"c\d", dtype) for dtype in types)
    parts = "multiply the real and the imaginary parts as real matrices, and " if is_complex else ""
    return Found(which=which, dtypes=_listed(types), parts=parts)


def _listed(types: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(types))


def _stored_type(side: Operand) -> str:
    """The type of an operand in the program: of integers and 4-bit floats their own, whatever they
    are converted to in front of the dot.
    """
    stored = look_through(side.operand, ("bitcast", "transpose", "multiply", "convert"))
    return stored.shape.dtype if re.match(r"f4|[su]\d", stored.shape.dtype) else side.dtype


@rule("constant-operand", lost=Lost.FP8)
def constant_operand(m: Matmul) -> Found | None:
    """An operand is a constant in a wide type: XLA computes with constants while it compiles."""
    side = m.folded
    return Found(side=side.side, dtype=side.dtype, at=side.operand) if side else None


@rule("gathered-operand", lost=Lost.FP8)
def gathered_operand(m: Matmul) -> Found | None:
    """A sharded operand is dequantized first, and gathered from the devices after that."""
    if (opcode := _blocked_by(m)).startswith(COLLECTIVES):
        side = m.missing[0]
        return Found(side=side.side, opcode=opcode, dtype=side.dtype, at=m.blocked)
    return _changed(m, Problem.GATHERED)


def _blocked_by(m: Matmul) -> str:
    """The opcode at which XLA's search for an FP8 array ends, or ""."""
    return m.blocked.opcode if m.blocked is not None and not m.folded else ""


def _changed(m: Matmul, problem: Problem) -> Found | None:
    """The operand with an FP8 array that has this problem, and its fields."""
    if m.broken is None or m.broken.problem is not problem:
        return None
    return Found(side=m.broken.side, allowed=_ALLOWED, at=m.broken.at, **m.broken.fields)


@rule("merged-dots", lost=Lost.FP8)
def merged_dots(m: Matmul) -> Found | None:
    """XLA merges dots that read the same operand, and joins their other operands, dequantized."""
    is_merged = _blocked_by(m) == "concatenate" and not m.as_written
    return Found(side=m.missing[0].side, at=m.blocked) if is_merged else None


@rule("array-of-scales", lost=Lost.FP8)
def array_of_scales(m: Matmul) -> Found | None:
    """An operand is dequantized with an array of scales."""
    return _changed(m, Problem.ARRAY_OF_SCALES)


@rule("converted-twice", lost=Lost.FP8)
def converted_twice(m: Matmul) -> Found | None:
    """The dequantized operand is converted to a second type before the dot."""
    return _changed(m, Problem.CONVERTED_TWICE)


@rule("changed-between", lost=Lost.FP8)
def changed_between(m: Matmul) -> Found | None:
    """The program computes with the dequantized operand before the dot."""
    if m.blocked is not None and not m.folded:
        side = m.missing[0]
        return Found(side=side.side, allowed=_ALLOWED, opcode=m.blocked.opcode, at=m.blocked)
    return _changed(m, Problem.CHANGED_BETWEEN)
