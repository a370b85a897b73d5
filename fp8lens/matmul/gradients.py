"""Gradients that may be lost: one that becomes FP8 without a scale, and a matmul through which no
gradient goes. Both are read from where JAX says that each operation comes from.
"""

from collections.abc import Iterator

from fp8lens.formats import is_fp8
from fp8lens.hlo.dataflow import Graph, Value
from fp8lens.hlo.ops import DOTS, SCALING
from fp8lens.hlo.origin import is_backward, is_recomputed, op_name, primitive
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.values import is_one_number, look_through, operand

_WIDE = ("bf16", "f16", "f32", "f64")
_CLAMPS = ("clamp", "minimum", "maximum")
_MOST = 2000  # values that are looked at behind a conversion


def unscaled(module: HloModule) -> list[Instruction]:
    """The conversions by which a gradient becomes FP8 with neither a scale nor a clamp, in a
    program as JAX writes it or as XLA compiled it.

    JAX makes such a conversion where it transposes one from FP8: of an FP8 activation, or of an FP8
    result. Gradients are mostly below the smallest number of E4M3, and become zero. Nothing is said
    of a program that multiplies its loss by a number that it is given: its gradients may fit.
    """
    conversions = [i for i in module if _becomes_fp8(i)]
    if not conversions:
        return []
    backward = _Backward(module)
    found = [i for i in conversions if backward.is_bare(i)]
    return [] if found and any(map(_lifts_the_loss, module)) else found


def _is_gradients(i: Instruction) -> bool:
    """Whether an instruction is of the backward pass, and no forward operation done again."""
    return is_backward(op_name(i)) and not is_recomputed(op_name(i))


def _becomes_fp8(i: Instruction) -> bool:
    """Whether an instruction of the backward pass converts a wide array to FP8."""
    is_conversion = i.opcode == "convert" and i.shape.size > 1 and is_fp8(i.shape.dtype)
    return is_conversion and operand(i, 0).shape.dtype in _WIDE and _is_gradients(i)


def _lifts_the_loss(i: Instruction) -> bool:
    """Whether a gradient begins with a number that the program is given: the loss times it."""
    name = op_name(i)
    if i.opcode != "broadcast" or primitive(name) != "broadcast_in_dim" or not _is_gradients(i):
        return False
    number = operand(i, 0)
    while number.shape.size == 1 and number.opcode in ("multiply", "divide", "convert", "bitcast"):
        sides = [operand(number, n) for n in range(len(number.operands))]
        if number.opcode == "multiply":
            sides = [side for side in sides if look_through(side).opcode != "constant"]
        number = (sides or [operand(number, 0)])[0]
    return number.shape.size == 1 and number.opcode in ("parameter", "get-tuple-element")


def _place(i: Instruction) -> tuple:
    """Where the program writes an operation, and what it is."""
    types = (operand(i, 0).shape.dtype, i.shape.dtype) if i.opcode == "convert" else ()
    return i.stack_frame, i.opcode, *types


class _Backward:
    """The backward pass of a module. JAX gives an operation that it transposes the place of the
    one that was transposed; what a program writes as a gradient of its own has its own place.
    """

    def __init__(self, module: HloModule):
        self._graph = Graph(module, _multiplies, _MOST, mixes=True)
        self._forward = set()
        for i in module:
            if i.opcode in {"convert", *SCALING} and op_name(i) and not is_backward(op_name(i)):
                self._forward.add(_place(i))

    def _is_transposed(self, i: Instruction) -> bool:
        """Whether JAX made an operation from one of the forward pass."""
        frame, opcode, *types = _place(i)
        return frame is not None and (frame, opcode, *reversed(types)) in self._forward

    def is_bare(self, conversion: Instruction) -> bool:
        """Whether what is converted is a gradient that nothing has scaled or clamped."""
        is_gradient = self._is_transposed(conversion)
        for i, _ in self._graph.walk([Value(conversion, 0)], self._before, lambda i: False):
            if i.opcode in _CLAMPS:
                return False
            if not _is_gradients(i):
                continue
            is_gradient = is_gradient or _multiplies(i)
            if i.opcode in SCALING:
                is_gradient = is_gradient or self._is_transposed(i)
                if _has_factor(i) and not self._is_transposed(i):
                    return False
                if _has_factor(i) and self._is_shared(conversion, i):
                    return False
        return is_gradient

    def _is_shared(self, conversion: Instruction, i: Instruction) -> bool:
        """Whether both are of a function that forward and backward call, and that JAX traced once:
        it has one place in both.
        """
        scopes = {op_name(j).rpartition("/")[0] for j in (conversion, i)}
        return _place(conversion) in self._forward and len(scopes) == 1

    def _before(self, value: Value) -> Iterator[Value]:
        """What a value of the backward pass is made of."""
        name = op_name(value.instruction)
        if not name or _is_gradients(value.instruction):
            yield from self._graph.before(value)


def _multiplies(i: Instruction) -> bool:
    return i.opcode in DOTS or i.opcode.startswith("custom-call")


def _has_factor(i: Instruction) -> bool:
    """Whether an array is multiplied or divided by one number, or one for each row or column."""
    for n in range(2):
        factor = look_through(operand(i, n))
        if factor.opcode == "broadcast" or is_one_number(factor):
            return not _is_one(factor)
    return False


def _is_one(i: Instruction) -> bool:
    while i.opcode == "broadcast":
        i = look_through(operand(i, 0))
    return i.opcode == "constant" and i.literal == "1"
