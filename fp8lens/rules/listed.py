"""What is listed and not explained, and what is known without a search for a reason.

`find` asks for each of these by its name.
"""

from fp8lens.hlo.origin import primitive
from fp8lens.rules.facts import Matmul, Work, ragged_of
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
    found = ragged_of(m)
    if found is None or not found.is_repeated:
        return None
    dense = f"{m.row.batch} dense matmuls" if m.row.batch > 1 else "one dense matmul"
    return Found(m=m.row.m, n=m.row.n, k=m.row.k, dense=dense, each=_RAGGED[found.over])


# What each multiplies more than it has to, by what the groups divide.
_RAGGED = {
    "rows": (
        "each row is multiplied by every group's matrix, with zeros for the groups that are not "
        "its own"
    ),
    "sums": "each group's sums run over the rows of all groups, with zeros for the others' rows",
}
