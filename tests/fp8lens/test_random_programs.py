"""The report on random programs, held to what is known of each without the inspector: 12 of them;
with NIGHTLY=1 in the environment, 300.
"""

import functools

import jax
import pytest

from fp8lens import inspect
from fp8lens.inspection import Inspection
from tests.fp8lens.test_corpus import written_flops
from tests.programs.random_programs import IN_FP8, launched, program
from tests.weekly import NIGHTLY

SEEDS = range(300 if NIGHTLY else 12)


@functools.cache
def seen(seed: int) -> Inspection:
    asked = program(seed)
    return inspect(asked.fn, *asked.args, **asked.options)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_flop_is_lost_and_those_in_fp8_are_known(seed):
    asked, report = program(seed), seen(seed).report
    mesh = jax.sharding.AbstractMesh(
        (asked.devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        written = written_flops(jax.make_jaxpr(asked.fn)(*asked.args).jaxpr)
    in_fp8 = sum(layer.flops for layer in asked.layers if layer.operands in IN_FP8)
    if asked.gradient:
        # What a gradient reads in two forms, XLA may multiply twice; and none of it is FP8.
        assert report.flops >= written and report.fp8_flops >= in_fp8, str(asked)
    else:
        assert report.flops * asked.devices == written, str(asked)
        assert report.fp8_flops == in_fp8, str(asked)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kernel_and_byte_is_counted(seed):
    counted = launched(seen(seed).module.text)
    for of in (seen(seed).report, seen(seed).ledger):
        assert (of.kernels, of.bytes_moved) == counted, str(program(seed))
