"""The matmul of blocks by hand: the instruction and its types in the compiled program, the order of
the scales, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect
from helpers.numerics.block_matmul import block_matmul, in_tiles

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")
KINDS = {
    ("float8_e4m3fn", "float8_e8m0fnu", 32): "mxf8f6f4.block_scale.scale_vec::1X",
    ("float4_e2m1fn", "float8_e8m0fnu", 32): "mxf4nvf4.block_scale.scale_vec::2X",
    ("float4_e2m1fn", "float8_e4m3fn", 16): "mxf4nvf4.block_scale.scale_vec::4X",
}


def shapes(element, scale, block=32, m=256, n=384, k=512):
    columns = k // block
    dims = ((m, k, element), (n, k, element), (m, columns, scale), (n, columns, scale))
    return [jax.ShapeDtypeStruct((rows, width), jnp.dtype(name)) for rows, width, name in dims]


@pytest.mark.parametrize("element, scale, block", KINDS)
def test_the_tensor_core_takes_codes_and_scales(element, scale, block):
    given = shapes(element, scale, block)
    seen = inspect(block_matmul, *given, target="B200", isolate=True)  # fp8lens.compile.bugs
    (call,) = (i for i in seen.module if (i.custom_call_target or "").startswith("mosaic_gpu"))
    found = set(re.findall(r"tcgen05\.mma[^\s,;\"]*", call.attributes["backend_config"]))
    assert found == {f"tcgen05.mma.cta_group::1.kind::{KINDS[element, scale, block]}"}
    assert not seen.reasons  # its types are known: FP8, or FP4


def test_scales_stand_in_the_order_of_the_instruction():
    """PTX ISA: row r, block c of a tile of 128 rows and 4 blocks is byte 16 (r mod 32) + 4 (r div
    32) + c."""
    scales = np.arange(256 * 8, dtype=np.int32).reshape(256, 8)
    found = np.asarray(in_tiles(scales))
    for row, block in np.ndindex(scales.shape):
        tile = found[row // 128, block // 4].reshape(-1)
        assert tile[16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] == scales[row, block]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiples of 128 rows, and of 128 columns"):
        jax.eval_shape(block_matmul, *shapes("float8_e4m3fn", "float8_e8m0fnu", m=100))
