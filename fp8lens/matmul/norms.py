"""Norms by the largest magnitude, x / max|x|: their maxima are found as an amax is, and are not
FP8's.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

from fp8lens.formats import is_narrow
from fp8lens.hlo.ops import SCALING
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.program import fused, results
from fp8lens.hlo.values import operand, returned
from fp8lens.hlo.walk import walk
from fp8lens.matmul.unfused import Neighborhood, inside, is_small

# Kernels between a maximum and those that scale by it: the second step of the maximum, an inverse.
_FAR = 20


def norms(
    magnitudes: Iterable[Instruction],
    plain: Set[Instruction],
    most: int,
    around: Neighborhood,
) -> set[Instruction]:
    """The kernels that find the maxima of norms, and those that compute with these alone.
    `magnitudes`: the kernels that find maxima; `plain`: those that XLA generated and that multiply
    no matrices; `most`: as many elements may an array of maxima have.

    FP8's maxima scale what they are of, for a conversion to FP8, and undo that after it, or are
    kept for the next step. A norm's scale what they are of, and nothing else; and the quotient is
    used as it is, or is converted to FP8 with a scale of its own.
    """
    of: dict[Instruction, list[bool]] = {}
    for finder in magnitudes:
        maximum = _Maximum(finder, max(1, most), around)
        is_norm = maximum.is_of_a_norm(plain)
        for i in maximum.made_of_it:
            of.setdefault(i, []).append(is_norm)
    return {i for i, each in of.items() if all(each)}


class _Maximum:
    """The largest magnitude of an array, or those of its parts. `made_of_it`: the kernel that finds
    it, and those that compute with it and with nothing large.
    """

    def __init__(self, finder: Instruction, most: int, around: Neighborhood):
        self._most, self._around = most, around
        self.made_of_it = [*walk([finder], self._small_readers, _FAR)]
        large, small = self._written(finder, large=True), set[int]()
        for i in self.made_of_it:
            small |= self._written(i, large=False)
        for n in range(len(finder.operands)):
            if operand(finder, n).shape.size > most:
                large |= around.makers(finder, n)
        #: The numbers of who made the array, and of who made the maximum and what is made of it.
        self._array, self._small = large, small

    def _written(self, i: Instruction, large: bool) -> set[int]:
        """The numbers of a kernel's results that are large, or of those that are not."""
        shapes = zip(self._around.numbers(i), results(i), strict=False)
        return {number for number, shape in shapes if (shape.size > self._most) is large}

    def _small_readers(self, i: Instruction) -> list[Instruction]:
        readers = self._around.next.get(i, ())
        return [reader for reader in readers if is_small(reader, self._most)]

    def is_of_a_norm(self, plain: Set[Instruction]) -> bool:
        """Whether all who read it scale the array by it, and nobody asks for it otherwise."""
        if not self._small.isdisjoint(self._around.returned):
            return False
        readers = dict.fromkeys(
            reader
            for i in self.made_of_it
            for reader in self._around.next.get(i, ())
            if reader not in self.made_of_it and self._read_by(reader)
        )
        if not readers or not plain >= readers.keys():
            return False
        uses = [self._use(reader) for reader in readers]
        made = [end for use in uses for end in use.made]
        is_wide = any(not end.is_codes for end in made)
        is_scaled = all(end.is_scaled for end in made)
        return all(use.is_known for use in uses) and bool(made) and (is_wide or is_scaled)

    def _read_by(self, i: Instruction) -> list[int]:
        """The operands of a kernel, by index, that are made of the maximum."""
        every = range(len(i.operands))
        return [n for n in every if not self._small.isdisjoint(self._around.makers(i, n))]

    def _use(self, i: Instruction) -> "_Use":
        """What a kernel does with the maximum."""
        computation = fused(i)
        given = [p.name for p in computation.parameters] if computation else i.operands
        known: dict[str, _Value] = {}
        maxima = self._read_by(i)
        for n, name in enumerate(given[: len(i.operands)]):
            size = operand(i, n).shape.size
            is_of_array = not self._array.isdisjoint(self._around.makers(i, n))
            if n in maxima:
                known[name] = _Value(is_maximum=True)
            elif size > self._most:
                known[name] = _Value(is_array=is_of_array, is_another=not is_of_array)
            else:
                known[name] = _Value(is_factor=True)
        return _Use(inside(i), known, returned(computation) if computation else [i])


@dataclasses.dataclass(frozen=True)
class _Value:
    """What a value is made of: the maximum alone; the array; another matrix; a factor, small and no
    constant; the quotient of array and maximum (`is_scaled`: and of a factor); that as FP8.
    """

    is_maximum: bool = False
    is_array: bool = False
    is_another: bool = False
    is_factor: bool = False
    is_quotient: bool = False
    is_scaled: bool = False
    is_codes: bool = False

    @property
    def is_large(self) -> bool:
        return self.is_array or self.is_another or self.is_quotient


_NOTHING = _Value()


def _together(values: Iterable[_Value]) -> _Value:
    """What is made of several values."""
    fields = [field.name for field in dataclasses.fields(_Value)]
    return _Value(**{name: any(getattr(value, name) for value in values) for name in fields})


class _Use:
    """What some instructions do with the maximum. `is_known`: they scale the array by it, and do
    nothing else with it; `made` are the quotients among what they return.
    """

    def __init__(
        self,
        part: Sequence[Instruction],
        known: Mapping[str, _Value],
        ends: Iterable[Instruction],
    ):
        self.is_known = True
        self._values = {**known}
        for j in part:
            if j.name not in self._values:
                self._values[j.name] = self._value(j)
        made = (self._values[end.name] for end in ends)
        self.made = [value for value in made if value.is_quotient]

    def _value(self, j: Instruction) -> _Value:
        read = [self._values.get(name, _NOTHING) for name in j.operands]
        if all(value is _NOTHING for value in read):
            return _NOTHING
        maxima = [value for value in read if value.is_maximum]
        large = [value for value in read if value.is_large]
        if maxima and large:
            is_choice = j.opcode == "select" and not any(v.is_maximum for v in read[1:])
            if not is_choice:
                return self._scaled_by_it(j, read)
        if not large:  # with a factor it is as one number
            is_factor = any(value.is_factor for value in read)
            return _Value(is_maximum=bool(maxima), is_factor=is_factor and not maxima)
        together = _together(read)
        is_scaled = j.opcode in SCALING and len(large) == 1 and together.is_factor
        is_to_fp8 = j.opcode == "convert" and is_narrow(j.shape.dtype)
        return dataclasses.replace(
            together,
            is_maximum=False,
            is_factor=False,
            is_scaled=together.is_scaled or is_scaled,
            is_codes=together.is_codes or is_to_fp8,
        )

    def _scaled_by_it(self, j: Instruction, read: list[_Value]) -> _Value:
        """The array multiplied by what is made of the maximum, or divided by it."""
        array = next(value for value in read if value.is_large)
        is_plain = array.is_array and not (array.is_another or array.is_quotient or array.is_codes)
        is_scaling = j.opcode in SCALING and len(read) == 2
        if not is_plain or not is_scaling or (j.opcode == "divide" and read[0].is_maximum):
            self.is_known = False
        return dataclasses.replace(array, is_quotient=True)
