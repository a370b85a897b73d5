"""The formats' data, against ml_dtypes."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from fp8lens.formats import BLOCK_FORMATS, CUBLASLT, E4M3, E5M2, FORMATS, block_format, is_fp8
from helpers.numerics.number_formats import code_values


@pytest.mark.parametrize("name", FORMATS)
def test_a_formats_numbers_are_those_of_ml_dtypes(name):
    of, dtype = FORMATS[name], np.dtype(FORMATS[name].jax)
    known = (
        ml_dtypes.iinfo(dtype) if dtype.name.startswith(("int", "uint")) else ml_dtypes.finfo(dtype)
    )
    assert (of.bits, of.largest) == (known.bits, float(known.max))


@pytest.mark.parametrize("of", CUBLASLT.values(), ids=lambda of: of.name)
def test_a_formats_codes_are_what_it_holds(of):
    values = np.unique(code_values(of.jax))
    positive = [float(value) for value in values if 0 < value < np.inf]
    assert all(map(of.holds, positive)) and positive[0] == of.smallest
    between = [(low + high) / 2 for low, high in itertools.pairwise(positive)]
    assert not any(map(of.holds, [of.smallest / 2, *between, of.largest * 2]))


def test_fp8_is_a_float_of_eight_bits_and_no_scale():
    assert is_fp8("f8e4m3fn") and is_fp8("f8e5m2fnuz") and is_fp8("f8e3m4")
    assert not any(map(is_fp8, ("f8e8m0fnu", "f4e2m1fn", "s8", "bf16", "tuple", "")))
    assert {*CUBLASLT} == {"f8e4m3fn", "f8e5m2"}
    assert (E4M3.limit, E5M2.limit) == ("448", "57344")


def test_a_block_format_is_found_by_its_types():
    assert block_format("f8e4m3fn", "f8e8m0fnu", 32).name == "MXFP8"
    assert block_format("f4e2m1fn", "f8e4m3fn", 16).name == "NVFP4"
    assert block_format("f8e4m3fn", "f8e8m0fnu", 16) is None
    for of in BLOCK_FORMATS:
        assert of.element.bits * of.block % 8 == 0 and of.per_tensor == (of.name == "NVFP4")
