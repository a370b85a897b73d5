"""What is listed and not explained, and what is known without a search for a reason.

`find` asks for each of these by its name.
"""

from fp8lens.hlo.origin import primitive, source_line
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import dimensions, operand
from fp8lens.rules.facts import Matmul, Work
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule("unknown-not-fp8", lost=Lost.FP8)
def unknown_not_fp8(m: Matmul) -> Found | None:
    """The matmul is not FP8, and none of the rules known here explains it."""
    out = m.dot.shape.dtype if m.dot is not None else m.row.out_dtype
    types = m.types or [m.row.lhs_dtype, m.row.rhs_dtype]
    facts = (
        f"operands {' and '.join(types)}, result {out}, run by {m.row.library} in "
        f"{m.row.math_dtype}, precision {m.row.algorithm or m.row.precision}"
    )
    return Found(facts=facts)


@rule("unknown-outside")
def unknown_outside(work: Work) -> Found | None:
    """Kernels do what the call could have done, and no rule of fp8lens says why."""
    return Found(lost=work.lost, works=work.listed)


@rule("result-layout", lost=Lost.TRANSPOSE)
def result_layout(work: Work) -> Found | None:
    """The result is transposed, and nothing else."""
    return found_if(set(work.works) == {"transpose"})


@rule("ragged-dot", lost=Lost.DUPLICATE)
def ragged(m: Matmul) -> Found | None:
    """Each row of a ragged_dot belongs to one group, and on a GPU it is multiplied by every group's
    matrix.
    """
    if not primitive(m.row.op_name).startswith("ragged_dot"):
        return None
    of_line = [i for i in m.written if i.opcode == "ragged-dot" and source_line(i) == m.row.source]
    if not of_line or not all(map(_is_repeated, of_line)):
        return None
    # Where the groups divide what is summed, XLA makes a matmul for each group.
    is_batched = m.row.batch > 1
    dense = f"{m.row.batch} dense matmuls" if is_batched else "one dense matmul"
    each = _SUMS if is_batched else _ROWS
    return Found(m=m.row.m, n=m.row.n, k=m.row.k, dense=dense, each=each)


def _is_repeated(i: Instruction) -> bool:
    """Whether XLA does the work of a ragged_dot once for each group: it has several, and they do
    not divide a batch.
    """
    groups = operand(i, 2).shape.dims[-1]
    divided = dimensions(i, "lhs_ragged_dims")
    return groups > 1 and not {*divided} & {*dimensions(i, "lhs_batch_dims")}


_ROWS = (
    "each row is multiplied by every group's matrix, with zeros for the groups that are not its own"
)
_SUMS = "each group's sums run over the rows of all groups, with zeros for the others' rows"
