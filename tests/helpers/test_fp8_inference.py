"""The recipes of chapter 08: their numbers, and what a Hopper makes of them."""

import jax
import jax.numpy as jnp
import pytest

from helpers import assert_fp8_gemms, inspect

import fp8_inference as recipe
from fp8_inference import (
    attend,
    by_token,
    calibrated,
    chain,
    gated,
    linear,
    of_blocks,
    quantized,
    weights_only,
)

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32


def array(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


S = array(dtype=f32)


def moved(fn, *arguments, **options):
    return inspect(fn, *arguments, **options).bill.totals["bytes moved"]


def normal(number, *dims):
    return jax.random.normal(jax.random.key(number), dims, bf16)


def test_a_layer_is_near_to_bf16():
    x, w = normal(0, 3, 64), normal(1, 32, 64)
    codes, scale = quantized(w)
    wide = (x @ w.T).astype(f32)
    for found in (weights_only(x, codes, scale), linear(x, codes, calibrated([x]), scale)):
        assert found.shape == wide.shape and found.dtype == bf16
        assert jnp.linalg.norm(found - wide) < 0.06 * jnp.linalg.norm(wide)
    assert recipe.example() < 0.08


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_both_matmuls_are_fp8_with_any_number_of_rows(rows):
    x, gate_up, down = array(rows, 512, dtype=bf16), array(2 * 1024, 512), array(512, 1024)
    assert_fp8_gemms(gated, x, gate_up, down, S, S, S, S, S, count=2, fused=True)
    assert_fp8_gemms(linear, x, array(1024, 512), S, S, count=1)
    assert_fp8_gemms(recipe.by_token, x, array(1024, 512), array(1024, dtype=f32), count=1)
    layers = 3 * [(array(512, 512), array(512, dtype=bf16), S, S, S)]
    seen = inspect(chain, x, S, layers)
    assert_fp8_gemms(seen, count=3, fused=True)
    assert all(row.amax and row.out_dtype == "f8e4m3fn" for row in seen.report.rows)


def test_blocks_become_rows_that_are_multiplied_in_fp8():
    x, w = normal(0, 16, 200), normal(1, 256, 200).astype(f32)  # no whole blocks of columns
    scales = jnp.array([[0.01, 0.02], [0.03, 0.01]])
    by_element = jnp.repeat(jnp.repeat(scales, 128, 0), 128, 1)[:, :200]
    codes = recipe.quantize(w, by_element)
    wide = x.astype(f32) @ (codes.astype(f32) * by_element).T
    found = by_token(x, *of_blocks(codes, scales))
    assert jnp.linalg.norm(found - wide) < 0.05 * jnp.linalg.norm(wide)


def test_what_is_stored_in_fp8_is_read_once():
    x, w = array(16, 4096, dtype=bf16), array(4096, 4096)
    assert moved(weights_only, x, w, S, gemm="triton") < 1.5 * w.size
    q, cache = array(2, 4, 4, 128, dtype=bf16), array(2, 4, 1024, 128)
    assert moved(attend, q, cache, cache, S, S, gemm="triton") < 1.5 * 2 * cache.size


def test_attention_to_a_cache_in_fp8_is_near_to_bf16():
    q, k, v = normal(0, 1, 2, 4, 32), normal(1, 1, 2, 64, 32), normal(2, 1, 2, 64, 32)
    (k_codes, k_scale), (v_codes, v_scale) = quantized(k), quantized(v)
    wide = jax.nn.softmax(jnp.einsum("bhqd,bhtd->bhqt", q, k).astype(f32) * 32**-0.5)
    wide = jnp.einsum("bhqt,bhtd->bhqd", wide.astype(bf16), v).astype(f32)
    found = attend(q, k_codes, v_codes, k_scale, v_scale)
    assert jnp.linalg.norm(found - wide) < 0.06 * jnp.linalg.norm(wide)
