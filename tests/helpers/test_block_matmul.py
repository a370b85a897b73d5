"""The matmul of blocks by hand: the instruction and its types in the compiled program, the order of
the scales, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect
from helpers.numerics.block_matmul import BLOCKS, block_matmul, in_tiles

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")
KINDS = {
    "float8_e4m3fn": {"float8_e8m0fnu": "mxf8f6f4.block_scale.scale_vec::1X"},
    "float8_e5m2": {"float8_e8m0fnu": "mxf8f6f4.block_scale.scale_vec::1X"},
    "float4_e2m1fn": {
        "float8_e8m0fnu": "mxf4nvf4.block_scale.scale_vec::2X",
        "float8_e4m3fn": "mxf4nvf4.block_scale.scale_vec::4X",
    },
}


def shapes(element, scale, m=256, n=384, k=512):
    columns = k // BLOCKS[element, scale]
    dims = ((m, k, element), (n, k, element), (m, columns, scale), (n, columns, scale))
    return [jax.ShapeDtypeStruct((rows, width), jnp.dtype(name)) for rows, width, name in dims]


@pytest.mark.parametrize("element, scale", BLOCKS)
def test_the_tensor_core_takes_codes_and_scales(element, scale):
    given = shapes(element, scale)
    seen = inspect(block_matmul, *given, target="B200", isolate=True)  # fp8lens.compile.bugs
    (call,) = (i for i in seen.module if (i.custom_call_target or "").startswith("mosaic_gpu"))
    found = set(re.findall(r"tcgen05\.mma[^\s,;\"]*", call.attributes["backend_config"]))
    assert found == {f"tcgen05.mma.cta_group::1.kind::{KINDS[element][scale]}"}
    assert not seen.reasons  # its types are known: FP8, or FP4
    assert "of XLA's" in str(seen.report) or element.startswith("float4")


def test_scales_stand_in_the_order_of_the_instruction():
    """PTX ISA: row r, block c of a tile of 128 rows and 4 blocks is byte 16 (r mod 32) + 4 (r div
    32) + c."""
    scales = np.arange(256 * 8, dtype=np.int32).reshape(256, 8)
    found = np.asarray(in_tiles(scales))
    for row, block in np.ndindex(scales.shape):
        tile = found[row // 128, block // 4].reshape(-1)
        assert tile[16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] == scales[row, block]


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(m=100), "multiples of 128 rows"),
        (dict(k=64), "of 128 columns of float8_e4m3fn"),
        (dict(n=0), "multiples of 128 rows"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, why):
    with pytest.raises(ValueError, match=why):
        jax.eval_shape(block_matmul, *shapes("float8_e4m3fn", "float8_e8m0fnu", **change))


def test_operands_that_do_not_fit_are_refused():
    a, b, a_scales, b_scales = shapes("float8_e4m3fn", "float8_e8m0fnu")
    wide = jax.ShapeDtypeStruct(a.shape, jnp.bfloat16)
    for operands, why in (
        ((wide, b, a_scales, b_scales), "both operands are one of: float8_e4m3fn with scales"),
        ((a, b, b_scales, a_scales), r"codes \[256, 512\] have scales \[256, 16\]"),
    ):
        with pytest.raises(ValueError, match=why):
            jax.eval_shape(block_matmul, *operands)
    one, two = (
        shapes("float8_e4m3fn", "float8_e8m0fnu"),
        shapes("float8_e4m3fn", "float8_e8m0fnu", k=256),
    )
    with pytest.raises(ValueError, match="K last"):
        jax.eval_shape(block_matmul, one[0], two[1], one[2], two[3])
