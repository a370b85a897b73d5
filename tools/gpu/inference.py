"""How fast: a trained model's layers. Weights alone in FP8, both operands, and a chain of calls,
beside bf16, for few rows and for many; a cache in FP8; and cuDNN's attention in FP8, with its
error.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import fp8_params_keys

from helpers.numerics.quantize import quantize
from helpers.numerics.recipes import scaled_dot, to_e4m3
from tools.gpu.errors import errors_of_all, is_right
from tools.gpu.machine import Gpu
from tools.gpu.matmuls import Form, Shape, bf16, case, e4m3, f32
from tools.gpu.stage import Case, Ready

from fp8_inference import attend, linear, rows_by_rows, weights_only

DECODED = (1, 16, 64, 512)  # rows
WIDTH, LAYERS = 8192, 4
SCALAR = Shape((), f32)
# By default XLA records what follows one another as a CUDA graph, and launches that.
ONE_BY_ONE = {"xla_gpu_enable_command_buffer": ""}


def forms(gpu: Gpu) -> Iterator[Case]:
    """Decoding, the chain, the cache and attention."""
    width = 256 if gpu.rehearsal else WIDTH
    for rows in DECODED[:2] if gpu.rehearsal else DECODED:
        yield case(gpu, f"decode: {rows} rows", layer(rows, width), looks=3)
    for rows in (16, 4096):
        yield case(
            gpu, f"chain: {rows} rows", chains(32 if gpu.rehearsal else rows, width), looks=3
        )
    builds: dict[str, Callable[[], Ready]] = {
        name: functools.partial(cached, gpu, name) for name in CACHES
    }
    yield Case("speed", "decode: cache of 4096", builds, looks=3, seconds=0.03)
    builds = {name: functools.partial(attention, gpu, *how) for name, how in ATTENTION.items()}
    yield Case("speed", "attention", builds, looks=3, seconds=0.05)


# Layers -------------------------------------------------------------------------------------------


def hidden(codes: jax.Array) -> jax.Array:
    """FP8 codes that XLA does not see to be FP8: a reference multiplies them in float32."""
    return jax.lax.optimization_barrier(codes.astype(f32))


def plain(x: jax.Array, codes: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    """The reference of `linear`."""
    d = rows_by_rows(hidden(quantize(x, x_scale)), codes.astype(f32))
    return (d * x_scale * w_scale).astype(bf16)


def layer(rows: int, width: int) -> dict[str, Form]:
    """One layer by each recipe. cuBLASLt multiplies "both in FP8", and where a form says so; of the
    others XLA chooses who does."""
    x, wide = Shape((rows, width), bf16), Shape((width, width), bf16)
    codes = Shape((width, width), e4m3)
    alone = Form(weights_only, (x, codes, SCALAR), gemm="auto")
    return {
        "bf16": Form(rows_by_rows, (x, wide), gemm="auto"),
        "weights in FP8": alone,
        "both in FP8": Form(linear, (x, codes, SCALAR, SCALAR), reference=plain),
        "weights in FP8, by cuBLASLt": dataclasses.replace(alone, gemm="cublaslt"),
        "bf16, by cuBLASLt": Form(rows_by_rows, (x, wide)),
    }


@dataclasses.dataclass(frozen=True)
class Chain(Form):
    """Several layers of one size: x, then their weights."""

    most: float = 2.0**-3

    @property
    def factors(self) -> tuple[float, ...]:
        """Such that relu's result is as large as the layer's input."""
        scalars = len(self.args) - 1 - LAYERS
        return (1.0, (2 / self.args[0].shape[-1]) ** 0.5)[2 - scalars :]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of all layers side by side."""
        m, n, k = super().sizes
        return m, LAYERS * n, k


def chains(rows: int, width: int) -> dict[str, Form]:
    """Layers with relu, one behind the other. In `called` each is one FP8 call, whose result is the
    next one's operand."""
    x, wide = Shape((rows, width), bf16), LAYERS * (Shape((width, width), bf16),)
    codes = LAYERS * (Shape((width, width), e4m3),)

    def by_layer(multiply):
        def fn(x, *rest):
            weights, scales = rest[:LAYERS], rest[LAYERS:]
            for w in weights:
                x = jax.nn.relu(multiply(x, w, *scales))
            return x

        return fn

    def wide_layer(x, w):
        # Sums of so many products are sqrt(width) times as large as x.
        return rows_by_rows(x, w) * jnp.asarray(width**-0.5, bf16)

    def called(x, *rest):
        weights, (x_scale, w_scale) = rest[:LAYERS], rest[LAYERS:]
        h = quantize(x, x_scale)
        for w in weights:
            y = jax.nn.relu(scaled_dot(h, w, x_scale, w_scale, bf16))
            h = to_e4m3(y, jnp.float32(1))
        return h

    def expected(x, *rest):
        weights, (x_scale, w_scale) = rest[:LAYERS], rest[LAYERS:]
        h = hidden(quantize(x, x_scale))
        for w in weights:
            y = jax.nn.relu(rows_by_rows(h, w.astype(f32)) * (x_scale * w_scale))
            codes = to_e4m3(y, jnp.float32(1))
            h = hidden(codes)
        return codes

    one_call = Chain(called, (x, *codes, SCALAR, SCALAR), reference=expected)
    return {
        "bf16": Chain(by_layer(wide_layer), (x, *wide), gemm="auto"),
        "weights in FP8": Chain(by_layer(weights_only), (x, *codes, SCALAR), gemm="auto"),
        "each in one call": one_call,
        "each in one call, launched one by one": dataclasses.replace(one_call, options=ONE_BY_ONE),
        "both in FP8": Chain(
            by_layer(linear), (x, *codes, SCALAR, SCALAR), reference=by_layer(plain)
        ),
    }


# Attention to a cache -----------------------------------------------------------------------------


CACHES = {"bf16": bf16, "cache in FP8": e4m3}


def normal(seed: int, *dims: int, dtype: Any = bf16) -> jax.Array:
    """Random numbers on the device."""
    return jax.random.normal(jax.random.key(seed), dims, bf16).astype(dtype)


def cached(gpu: Gpu, name: str) -> Ready:
    """Attention of 4 queries to a cache of 16 texts, 8 heads and 4096 tokens: larger than the
    GPU's own cache."""
    batch, length = (1, 64) if gpu.rehearsal else (16, 4096)
    one = jnp.ones((), f32)
    args = (
        normal(0, batch, 8, 4, 128),
        *(normal(seed, batch, 8, length, 128, dtype=CACHES[name]) for seed in (1, 2)),
    )
    program = gpu.compile(attend, *args, one, one, gemm="auto")
    expected = jax.jit(attend)(*(arg.astype(f32) for arg in args), one, one)
    found = errors_of_all(program.call(*args, one, one), expected.astype(bf16))
    made = {"errors": found, "right": is_right(found[0], 4096)}
    return Ready(made, lambda: program.call(*args, one, one), program.compiled)


# cuDNN's attention --------------------------------------------------------------------------------

ATTENTION = {
    "bf16": (False, False),
    "FP8": (True, False),
    "bf16, forward and backward": (False, True),
    "FP8, forward and backward": (True, True),
}
LIMIT = 2.0**-3  # of the relative error: scores, result and gradients are each rounded to FP8
RESULTS = ("o", "dQ", "dK", "dV")
# Which tensors have scales other than 1, by the name of a setting. A number is the scale itself;
# with None it is such that the tensor's amax is half of E4M3's largest number.
SETTINGS: dict[str, dict[str, float | None]] = {
    "all 1": {},
    "scores by 256": {"s": 256.0},
    "scores by their amax": {"s": None},
    "result": {"o": None},
    "dP": {"dP": None},
    "gradients": {"dQ": None, "dK": None, "dV": None},
    "result and gradients": dict.fromkeys(RESULTS),
    "all, scores by 256": {"s": 256.0, "dP": None, **dict.fromkeys(RESULTS)},
}


def by_cudnn(is_fp8: bool, both_ways: bool) -> Callable:
    """(q, k, v, g, scales) to the result or the gradients, and amaxes."""

    def attention(q, k, v, scales):
        if not is_fp8:
            return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

        return dot_product_attention(
            q, k, v, scale=q.shape[-1] ** -0.5, use_fp8=True, fp8_params=scales
        )

    def forward(q, k, v, g, scales):
        return attention(q, k, v, scales)

    def backward(q, k, v, g, scales):
        out, pull = jax.vjp(attention, q, k, v, scales)
        cotangent = (g, *map(jnp.zeros_like, out[1:])) if is_fp8 else g
        return out, pull(cotangent)

    return backward if both_ways else forward


def rehearsed(is_fp8: bool, both_ways: bool) -> Callable:
    """What a CPU runs in place of `by_cudnn`."""

    def fn(q, k, v, g, scales):
        out, *grads = exact(q, k, v, g, both_ways)
        if not is_fp8:
            return (out.astype(bf16), [one.astype(bf16) for one in grads]) if both_ways else out
        amax = functools.partial(jnp.max, keepdims=True)
        made = to_e4m3(out, scales["scale_o"]), jnp.ones((1, 1, 1, 1)), amax(jnp.abs(out))
        if not both_ways:
            return made
        named = dict(zip(("dQ", "dK", "dV"), grads, strict=True))
        codes = [to_e4m3(d, scales[f"scale_{name}"]) for name, d in named.items()]
        amaxes = {f"amax_{name}": amax(jnp.abs(d)) for name, d in named.items()}
        return made, (*codes, amaxes | {"amax_dP": jnp.ones((1, 1, 1, 1))})

    return fn


def exact(q, k, v, g, both_ways: bool) -> tuple[jax.Array, ...]:
    """In float32: the result, and the gradients."""

    def plainly(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    wide = [one.astype(f32) for one in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        if not both_ways:
            return (plainly(*wide),)
        out, pull = jax.vjp(plainly, *wide)
        return (out, *pull(g.astype(f32)))


def attention(gpu: Gpu, is_fp8: bool, both_ways: bool) -> Ready:
    """cuDNN's attention, of normally distributed q, k, v and gradient. In FP8 with each setting of
    the scales; it is timed, and right, with all of them 1."""
    dims = (1, 64, 2, 128) if gpu.rehearsal else (4, 2048, 16, 128)
    dtype = e4m3 if is_fp8 else bf16
    q, k, v, g = (normal(seed, *dims, dtype=dtype) for seed in range(4))
    ones = {name: jnp.ones((1, 1, 1, 1), f32) for name in fp8_params_keys}
    # In a rehearsal no cuDNN is there to compile it.
    fn = rehearsed(is_fp8, both_ways) if gpu.rehearsal else by_cudnn(is_fp8, both_ways)
    program = gpu.compile(fn, q, k, v, g, ones)
    expected = list(exact(q, k, v, g, both_ways))

    def errors_with(scales: dict[str, jax.Array]) -> list[dict[str, Any]]:
        results, _ = parts(program.call(q, k, v, g, scales), is_fp8, both_ways)
        factors = [scales[f"scale_{name}"] if is_fp8 else 1 for name in RESULTS]
        pairs = zip(results, factors, strict=False)
        return errors_of_all([one.astype(f32) / factor for one, factor in pairs], expected)

    _, amaxes = parts(program.call(q, k, v, g, ones), is_fp8, both_ways)
    found = {}
    for setting, changed in SETTINGS.items():
        if changed.keys() <= amaxes.keys():
            scales = dict(ones)
            for name, scale in changed.items():
                scales |= scaled_by(name, jnp.float32(scale or 224 / float(amaxes[name].max())))
            found[setting] = errors_with(scales)
    made = {
        "errors": found,
        "amaxes": {name: float(amax.max()) for name, amax in amaxes.items()},
        "right": all(is_right(one, most=LIMIT) for one in found["all 1"]),
        **dict(zip(("batch", "sequence", "heads"), dims, strict=False)),
        # The backward pass has five matmuls, the forward pass two.
        "flops": 2 * (7 if both_ways else 2) * dims[0] * dims[2] * dims[1] ** 2 * dims[3],
    }
    return Ready(made, lambda: program.call(q, k, v, g, ones), program.compiled)


def scaled_by(name: str, scale: jax.Array) -> dict[str, jax.Array]:
    """The scale of a tensor, and what divides it again where cuDNN reads it."""
    scale = scale.reshape(1, 1, 1, 1)
    again = {f"descale_{name}": 1 / scale} if name in ("s", "o", "dP") else {}
    return {f"scale_{name}": scale} | again


def parts(found: Any, is_fp8: bool, both_ways: bool) -> tuple[list[jax.Array], dict[str, Any]]:
    """The result and the gradients of a call, and the amaxes by the name of what they are of."""
    out, grads = found if both_ways else (found, [])
    if not is_fp8:
        return [out, *grads[:3]], {}
    amaxes = dict(zip(("s", "o"), out[1:], strict=True))
    if both_ways:
        amaxes |= {name: grads[3][f"amax_{name}"] for name in ("dQ", "dK", "dV", "dP")}
    return [out[0], *grads[:3]], amaxes
