"""Gradients that may be lost: one that becomes FP8 without a scale, and a matmul through which no
gradient goes. Both are read from where JAX says that each operation comes from.
"""

from collections.abc import Iterator

from fp8lens.formats import is_fp8
from fp8lens.hlo.dataflow import Graph, Value
from fp8lens.hlo.ops import DOTS, ELEMENTWISE, SCALING
from fp8lens.hlo.origin import is_backward, is_recomputed, op_name, primitive
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.values import is_one_number, look_through, operand
from fp8lens.hlo.walk import walk

_WIDE = ("bf16", "f16", "f32", "f64")
_CLAMPS = ("clamp", "minimum", "maximum")
_MOST = 2000  # values that are looked at behind a conversion
_LARGE = 16


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


class _Backward:
    """The backward pass of a module. JAX gives an operation that it transposes the place of the
    one that was transposed, and the same factor. What a program writes as a gradient of its own may
    have the place of the call alone.
    """

    def __init__(self, module: HloModule):
        self._graph = Graph(module, _multiplies, _MOST)
        self._forward: set[tuple] = set()
        for i in module:
            if i.opcode in {"convert", *SCALING} and op_name(i) and not is_backward(op_name(i)):
                self._forward |= {_place(i), (*_place(i), self._factor(i))}

    def is_bare(self, conversion: Instruction) -> bool:
        """Whether what is converted is a gradient that nothing has scaled or clamped."""
        frame, opcode, *types = _place(conversion)
        is_gradient = (frame, opcode, *reversed(types)) in self._forward
        for i, _ in self._graph.walk([Value(conversion, 0)], self._before, lambda i: False):
            if i.opcode in _CLAMPS:
                return False
            if i.opcode in SCALING and _is_gradients(i):
                if self._scales(i, conversion):
                    return False
                is_gradient = is_gradient or _place(i) in self._forward
            is_gradient = is_gradient or (_multiplies(i) and _is_gradients(i))
        return is_gradient

    def _scales(self, i: Instruction, conversion: Instruction) -> bool:
        """Whether an operation of the backward pass multiplies by a scale of the program's own: not
        by what JAX transposed, and not by the share that one element has in the loss.
        """
        factor = self._factor(i)
        if factor in (None, "1"):
            return False
        # A function within jax.jit is traced once, so that it has one place in both passes.
        is_shared = _place(conversion) in self._forward and _scope(conversion) == _scope(i)
        if is_shared or not isinstance(factor, str):
            return is_shared or (*_place(i), factor) not in self._forward
        if (*_place(i), factor) in self._forward:
            return False
        of_the_loss = _place(i) in self._forward or primitive(op_name(i)) == "broadcast_in_dim"
        return not of_the_loss or _enlarges(i.opcode, factor)

    def _factor(self, i: Instruction) -> str | frozenset[str] | None:
        """By what an array is multiplied or divided: the constant, or the names of what one number,
        or one for each row or column, is made of. None where it is another array, and where a sum
        of gradients is spread over what the forward pass has computed, as in softmax's gradient.
        """
        for n in range(2) if i.opcode in SCALING else ():
            factor, array = (look_through(operand(i, m)) for m in (n, 1 - n))
            if factor.opcode != "broadcast" and not is_one_number(factor):
                continue
            ends = [j for j in walk([factor], self._numbers, _MOST) if not [*self._numbers(j)]]
            if len(ends) == 1 and ends[0].opcode == "constant":
                return ends[0].literal
            is_sum = any(map(_is_gradients, ends))
            if is_sum and op_name(array) and not is_backward(op_name(array)):
                return None
            return frozenset(j.name for j in ends if j.opcode != "constant")
        return None

    def _numbers(self, i: Instruction) -> Iterator[Instruction]:
        """What one number is made of, or a few, out of fusions too."""
        if i.opcode == "parameter":
            around = self._graph.launcher(i)
            if around is not i:
                yield operand(around, i.parameter_number or 0)
        elif i.opcode in ELEMENTWISE | {"broadcast", "bitcast", "reshape"}:
            yield from map(i.computation.__getitem__, i.operands)

    def _before(self, value: Value) -> Iterator[Value]:
        """What an array of the backward pass is made of, beside what is spread over it."""
        i = value.instruction
        if i.opcode == "broadcast" or (op_name(i) and not _is_gradients(i)):
            return
        if i.opcode in ELEMENTWISE:
            arrays = map(i.computation.__getitem__, i.operands)
            yield from (Value(array, 0) for array in arrays if array.shape.size > 1)
        else:
            yield from self._graph.before(value)


def _place(i: Instruction) -> tuple:
    """Where the program writes an operation, and what it is."""
    types = (operand(i, 0).shape.dtype, i.shape.dtype) if i.opcode == "convert" else ()
    return i.stack_frame, i.opcode, *types


def _scope(i: Instruction) -> str:
    return op_name(i).rpartition("/")[0]


def _enlarges(opcode: str, factor: str) -> bool:
    """Whether a constant makes numbers much larger, as a gradient's scale does."""
    try:
        number = abs(float(factor))
    except ValueError:
        return True
    return number >= _LARGE if opcode == "multiply" else number <= 1 / _LARGE


def _multiplies(i: Instruction) -> bool:
    return i.opcode in DOTS or i.opcode.startswith("custom-call")
