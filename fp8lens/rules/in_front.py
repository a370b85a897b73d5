"""Kernels in front of an FP8 call that do what the call could do.

Each rule takes an `InFront`: a kernel, and one piece of its work.
"""

from fp8lens.rules.facts import InFront
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule("operand-layout", lost=Lost.TRANSPOSE)
def operand_layout(kernel: InFront) -> Found | None:
    """K is not an operand's last dimension in memory."""
    return _transposed(kernel, "rows")


def _transposed(kernel: InFront, last_becomes: str) -> Found | None:
    if kernel.work != "transpose" or kernel.last_becomes != last_becomes:
        return None
    return Found(operand=kernel.operand, shape=kernel.kernel.shape.brief)


@rule("order-within-k", lost=Lost.TRANSPOSE)
def order_within_k(kernel: InFront) -> Found | None:
    """Several dimensions are contracted, and the two operands have them in different orders."""
    return _transposed(kernel, "k")


@rule("rows-rearranged", lost=Lost.TRANSPOSE)
def rows_rearranged(kernel: InFront) -> Found | None:
    """The rows of an operand are transposed among themselves, and K stays last."""
    return _transposed(kernel, "last")


@rule("padded-operands", lost=Lost.PAD)
def padded_operands(kernel: InFront) -> Found | None:
    """A size is not a multiple of 16, and kernels pad."""
    odd = kernel.matmul.odd("MNK") if kernel.work == "pad" else []
    return found_if(odd, sizes=" and ".join(odd))


@rule("divided-by-scale", lost=Lost.SCALE)
def divided_by_scale(kernel: InFront) -> Found | None:
    """The program divides by a scale, but the call multiplies."""
    return found_if(kernel.work == "scale" and "divide" in kernel.opcodes)


@rule("product-of-scales", lost=Lost.SCALE)
def product_of_scales(kernel: InFront) -> Found | None:
    """A kernel multiplies scalars to make one scale of them."""
    return found_if(kernel.work == "scale" and "multiply" in kernel.opcodes)


@rule("prepared-bias", lost=Lost.BIAS)
def prepared_bias(kernel: InFront) -> Found | None:
    """A kernel converts or scales what is added."""
    prepares = kernel.opcodes & {"convert", "multiply", "divide", "negate", "add", "broadcast"}
    return found_if(kernel.work == "bias" and prepares)
