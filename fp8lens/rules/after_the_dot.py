"""What stays outside behind an FP8 call: the first step that the call did not take.

Each rule takes a `Cause`; those of a conversion to FP8, with its scale and clamp, stand in
`conversion`. GemmRewriterVisitor in XLA's gemm_rewriter.cc takes one step after the other, each
from an operation that reads the call itself.
"""

from fp8lens.formats import FORMATS
from fp8lens.hlo.origin import source_line
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import look_through
from fp8lens.matmul.roles import Role, along_columns, could_be_fused, is_tanh_gelu, telling
from fp8lens.rules.facts import Cause
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule("moved-first")
def moved_first(cause: Cause) -> Found | None:
    """The result is transposed before a step that the call could have done."""
    move = cause.transposed
    # What XLA itself transposes has no line of the program.
    is_moved = move is not None and bool(source_line(move)) and could_be_fused(cause.first)
    return found_if(is_moved, step=cause.noun, lost=cause.lost, at=move)


@rule("activation-and-reader", lost=Lost.EPILOGUE)
def activation_and_reader(cause: Cause) -> Found | None:
    """The activation's input is read by something else too, and a call has one result."""
    is_gelu = cause.kind is Role.ACTIVATION and is_tanh_gelu(cause.first)
    is_activation = is_gelu or cause.kind is Role.RELU
    return found_if(is_activation and cause.is_read_twice, step=cause.kind)


@rule("late-relu", lost=Lost.EPILOGUE)
def late_relu(cause: Cause) -> Found | None:
    """The relu comes after something that the call does last."""
    is_late = cause.row.epilogue not in ("DEFAULT", "BIAS")
    return found_if(cause.kind is Role.RELU and is_late)


@rule("other-activation", lost=Lost.EPILOGUE)
def other_activation(cause: Cause) -> Found | None:
    """The activation is one that cuBLASLt does not have: it has relu, and gelu by tanh."""
    if cause.kind is Role.CLAMP:
        return Found()
    is_other = cause.kind is Role.ACTIVATION and not is_tanh_gelu(cause.first)
    return found_if(is_other, at=telling(cause.first))


@rule("vector-scale", lost=Lost.SCALE)
def vector_scale(cause: Cause) -> Found | None:
    """The result has a scale for each row or column."""
    return found_if(cause.kind is Role.VECTOR_SCALE)


@rule("scale-after-epilogue", lost=Lost.SCALE)
def scale_after_epilogue(cause: Cause) -> Found | None:
    """The result is scaled after the call's epilogue, and is not FP8."""
    is_factor = cause.kind in (Role.SCALE, Role.ALPHA)
    return found_if(is_factor and cause.row.epilogue != "DEFAULT")


@rule("scale-too-many", lost=Lost.SCALE)
def scale_too_many(cause: Cause) -> Found | None:
    """The result is multiplied by a scale, and the call has no place for it."""
    scale = cause.first.other
    if cause.kind is not Role.SCALE or scale is None:
        return None
    has_no_place = "a" in cause.row.scales or cause.row.beta or cause.is_read_twice
    return found_if(has_no_place or scale.shape.dims, scale=scale.shape.brief)


@rule("second-matrix", lost=Lost.BIAS)
def second_matrix(cause: Cause) -> Found | None:
    """Two matrices are added to the result, and a call adds one."""
    return found_if(cause.kind is Role.MATRIX_BIAS and cause.row.beta)


@rule("matrix-after-epilogue", lost=Lost.BIAS)
def matrix_after_epilogue(cause: Cause) -> Found | None:
    """A matrix is added after an activation."""
    activates = "RELU" in cause.row.epilogue or "GELU" in cause.row.epilogue
    return found_if(cause.kind is Role.MATRIX_BIAS and activates)


@rule("bias-per-row", lost=Lost.BIAS)
def bias_per_row(cause: Cause) -> Found | None:
    """The vector has one element for each row of the result, and the call's bias has one for each
    column.
    """
    if _vector(cause) is None:
        return None
    step = cause.first
    added = next(name for name in step.at.operands if name != step.value.name)
    return found_if(not along_columns(step.at.computation[added]))


@rule("bias-in-f32", lost=Lost.BIAS)
def bias_in_f32(cause: Cause) -> Found | None:
    """The vector is float32, and XLA looks for a 16-bit one."""
    bias, fits = _bias_type(cause), _fitting_type(cause)
    jax_fits = f"jnp.{FORMATS[fits].jax}"
    return found_if(bias == "f32", bias=bias, dtype=_dot_type(cause), fits=fits, jax_fits=jax_fits)


@rule("late-bias", lost=Lost.BIAS)
def late_bias(cause: Cause) -> Found | None:
    """The vector is added after an activation, a scale or a matrix."""
    row = cause.row
    is_late = row.epilogue != "DEFAULT" or row.beta or row.alpha != 1 or "d" in row.scales
    return found_if(_bias_type(cause) == _fitting_type(cause) and is_late)


def _bias_type(cause: Cause) -> str:
    """The type of an added vector, behind a conversion to float32; "" where none is added."""
    added = _vector(cause)
    return look_through(added).shape.dtype if added is not None else ""


def _vector(cause: Cause) -> Instruction | None:
    """The vector that is added; None where another array is, or nothing."""
    added = cause.first.other if cause.kind is Role.BIAS else None
    return added if added is not None and len(added.shape.dims) == 1 else None


def _dot_type(cause: Cause) -> str:
    assert cause.matmul.dot is not None
    return cause.matmul.dot.shape.dtype


def _fitting_type(cause: Cause) -> str:
    """The type of a vector that the call adds to what it multiplies."""
    return "f16" if _dot_type(cause) == "f16" else "bf16"


@rule("another-type", lost=Lost.OUTPUT)
def another_type(cause: Cause) -> Found | None:
    """The result is converted to a wider or another 16-bit type than the dot's."""
    if cause.kind is not Role.OUTPUT or cause.writes not in ("bf16", "f16", "f32"):
        return None
    wider = ""
    if cause.writes == "f32":
        wider = f"; if only what is added, such as a bias, is f32, pass that in {cause.reads}"
    jax_to = f"jnp.{FORMATS[cause.writes].jax}"
    return Found(dtype=cause.reads, to=cause.writes, wider=wider, jax_to=jax_to)
