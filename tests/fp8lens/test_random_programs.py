"""The inspector on random programs: what it says of each is held to what is known of it without the
inspector.

40 programs; with NIGHTLY=1 in the environment, 300. A seed that fails, as small as it still fails:

    JAX_PLATFORMS=cpu PYTHONPATH=.:tools .venv/bin/python tests/fp8lens/test_random_programs.py 17
"""

import functools
import re
import sys

import jax
import pytest

from fp8lens import inspect
from fp8lens.inspection import Inspection
from tests.fp8lens.test_corpus import written_flops
from tests.programs.random_programs import (
    APART,
    OPERANDS,
    Layer,
    Module,
    Program,
    call,
    launched,
    program,
    smallest,
)
from tests.weekly import NIGHTLY

SEEDS = range(300 if NIGHTLY else 40)


def seen(asked: Program) -> Inspection:
    return inspect(asked.fn, *asked.args, **asked.options)


of_seed = functools.cache(lambda seed: seen(program(seed)))


def layer_of(module: Module, name: str, asked: Program) -> int | None:
    """The number of the layer that an instruction of the compiled program multiplies for: by the
    weight that it reads; in a loop or a branch, by its sizes.
    """
    computation, line = module.find(name)
    if computation == module.entry:
        found = module.weights(name)
        return found.pop() if len(found) == 1 else None
    types = [module.computations[computation][operand].type for operand in line.operands[:2]]
    sides = sorted(
        tuple(map(int, re.search(r"\[([\d,]+)\]", type_)[1].split(","))) for type_ in types
    )
    found = [
        number
        for number, layer in asked.layers.items()
        if layer.inside in APART and sides == sorted([(layer.m, layer.k), (layer.n, layer.k)])
    ]
    return found[0] if len(found) == 1 else None


def complaints(asked: Program, inspected: Inspection) -> list[str]:
    """What is wrong with the reasons given for a program."""
    module, wrong = Module(inspected.compiled.as_text()), []
    named: dict[int, set[str]] = {number: set() for number in asked.layers}
    for reason in inspected.reasons:
        name = reason.matmul.split(" ")[0]
        try:
            backward = "transpose(" in module.find(name)[1].rest
            number = layer_of(module, name, asked)
        except LookupError:
            wrong.append(f"no such matmul: {reason}")
            continue
        if asked.gradient and (backward or number is None):
            continue
        if number is None:
            wrong.append(f"whose matmul: {reason}")
        elif asked.gradient:
            named[number].add(reason.lost)
        elif reason.lost not in asked.layers[number].may_lose:
            what = "lost something else" if asked.layers[number].loses else "lost nothing"
            wrong.append(f"false, layer {number} {what}: {reason}")
        else:
            named[number].add(reason.lost)
    for number, layer in asked.layers.items():
        # In a gradient other kernels read a layer's result: what follows the matmul may be done
        # there, scales too.
        in_front = [kinds for kinds in OPERANDS[layer.operands].loses if kinds != "scale"]
        for kinds in in_front if asked.gradient else layer.loses:
            if not named[number].intersection(kinds.split("|")):
                wrong.append(f"missed, layer {number}: lost {kinds}, named {sorted(named[number])}")
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reasons_name_what_was_planted(seed):
    asked = program(seed)
    wrong = complaints(asked, of_seed(seed))
    assert not wrong, f"{asked}\n" + "\n".join(wrong)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_flop_is_lost(seed):
    asked = program(seed)
    devices = 8 if asked.mesh else 1
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    ):
        written = written_flops(jax.make_jaxpr(asked.fn)(*asked.args).jaxpr)
    found = of_seed(seed).report.flops * devices
    # What a gradient reads in two forms, XLA may multiply twice.
    assert found >= written if asked.gradient else found == written + asked.more_flops * devices, (
        str(asked)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kernel_and_byte_is_counted(seed):
    counted = launched(of_seed(seed).compiled.as_text())
    for of in (of_seed(seed).report, of_seed(seed).ledger):
        assert (of.kernels, of.bytes_moved) == counted, str(program(seed))


@functools.cache
def alone(layer: Layer) -> tuple[set[tuple[str, ...]], int]:
    """Of a layer that is a whole program: what its calls compute, and how many kernels run."""
    module = Module(Program(-1, {0: layer}, (0,)).compile())
    kernels = [line for line, *_ in module.kernels()]
    return {call(line) for line in kernels if "__cublas" in line.rest}, len(kernels)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_oracle_is_right(seed):
    """A layer loses something where it is more than one FP8 call by itself; and its call is the
    same among others.
    """
    asked = program(seed)
    module = Module(of_seed(seed).compiled.as_text())
    calls: dict[int, set] = {number: set() for number in asked.layers}
    for line, *_ in module.kernels():
        if "__cublas" in line.rest and "transpose(" not in line.rest:
            calls[layer_of(module, line.name, asked)].add(call(line))
    for number, layer in asked.layers.items():
        sizes = layer.m, layer.n, layer.k
        by_itself, kernels = alone(
            Layer(layer.operands, layer.taken, layer.end, layer.dtype, *sizes)
        )
        own = (
            any(part.also for part in layer.parts)
            or layer.end in ("halves", "E4M3, running amax")
            or (
                layer.operands in ("masked with zeros", "quantized here", "rotated, quantized here")
            )
        )
        fp8 = all(c[0] == "matmul$f8" for c in by_itself)
        if not layer.own and layer.inside != "map":
            assert bool(layer.loses) == (kernels > 1 or not fp8) or (own and not layer.loses), (
                f"{layer} {by_itself}"
            )
        assert fp8 == ("fp8" not in layer.loses), layer
        if not asked.gradient:
            assert calls[number] == by_itself, f"{asked}\n{number}"


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        found = smallest(program(seed), lambda p: bool(complaints(p, seen(p))))
        print(found, *complaints(found, seen(found)), sep="\n", end="\n\n")
