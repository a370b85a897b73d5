import jax
import jax.numpy as jnp
import pytest

from fp8lens.matmul.kernels import (
    bytes_moved,
    matmul_seconds,
    quantize_seconds,
    roofline_seconds,
)
from helpers import TARGETS, aot_compile
from helpers.numerics.recipes import scaled_dot, to_e4m3

e4m3, f32, bf16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16
M, N, K = 64, 128, 256


def shape(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


def to_f32(a, b):
    return jax.lax.dot(a, b.T, preferred_element_type=f32)


def test_seconds_are_of_the_bytes_or_of_the_flops():
    """That each part is counted once, and loops as often as they run, XLA's thunks say to
    `test_oracle`.
    """
    given, amax = (quantize_seconds(10**9, scale, "H200") for scale in ("given", "amax"))
    assert given == pytest.approx(3e9 / 4.8e12) and amax == pytest.approx(5e9 / 4.8e12)
    with pytest.raises(ValueError, match="got 'static'"):
        quantize_seconds(1, "static")
    square, thin = (matmul_seconds(m, 8192, 8192, "bf16", "bf16", "H200") for m in (8192, 16))
    assert square == pytest.approx(2 * 8192**3 / TARGETS["H200"].peak_flops["bf16"])
    assert thin == pytest.approx(2 * (8208 * 8192 + 16 * 8192) / 4.8e12)


def test_of_stacked_weights_each_iteration_reads_its_own():
    """As many bytes as without the stack, and a copy of what each iteration takes and gives."""
    layers, m, k = 16, 256, 512
    x, w, scale = shape(m, k), shape(k, k), shape(dtype=f32)

    def step(x, w, scale):
        return to_e4m3(scaled_dot(x, w, scale, scale), scale)

    def scanned(x, weights, scale):
        def layer(x, w):
            y = step(x, w, scale)
            return y, y

        return jax.lax.scan(layer, x, weights)[1]

    stack = shape(layers, k, k)
    alone = bytes_moved(aot_compile(step, x, w, scale))
    copies = 2 * k * k + 4 * m * k  # a weight, the carry, and the result in its place
    assert bytes_moved(aot_compile(scanned, x, stack, scale)) < layers * (alone + copies) * 1.1


def test_what_is_changed_in_place_counts_unless_all_of_it_is_read():
    cache, row = shape(4096, 4096, dtype=f32), shape(1, 4096, dtype=f32)
    at, places = shape(dtype=jnp.int32), shape(16, dtype=jnp.int32)

    def moved(fn, *args):
        return bytes_moved(aot_compile(jax.jit(fn, donate_argnums=0), cache, *args))

    def put(cache, row, at):
        return jax.lax.dynamic_update_slice(cache, row, (at, 0))

    whole, of_row = 4 * 4096 * 4096, 4 * 4096
    assert moved(put, row, at) < 3 * of_row
    # The sums of what is put, which nothing writes, read all of it.
    assert moved(lambda *given: put(*given).sum(0), row, at) > whole
    rows = shape(16, 4096, dtype=f32)
    assert moved(lambda c, i, v: c.at[i].add(v), places, rows) < 16 * 4 * of_row


def test_roofline_takes_the_longer_of_the_two():
    big, h100 = aot_compile(to_f32, shape(4096, 4096), shape(4096, 4096)), TARGETS["H100"]
    assert roofline_seconds(big) == pytest.approx(2 * 4096**3 / h100.peak_flops["f8e4m3fn"])
    small = aot_compile(to_f32, shape(M, K), shape(N, K))
    assert roofline_seconds(small) == pytest.approx(bytes_moved(small) / h100.memory_bandwidth)
    assert roofline_seconds(small, TARGETS["H200"]) < roofline_seconds(small, "H100")
    with pytest.raises(KeyError):
        roofline_seconds(big, "A100")  # no FP8 peak there
