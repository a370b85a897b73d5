"""What XLA makes of FP8 matmuls, by JAX release: `make releases` measures.

Each release gets an environment of its own. In each the same programs are compiled for chips that
are not there, and what became of them goes into notebooks/results/releases.json, with where it
comes from. Notebook E reads that file. A release that loses a fusion, or gains one, is a changed
row.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as shard
from jax.sharding import PartitionSpec as P

from helpers import TARGETS, Target, inspect
from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tools.recorders.data import Record, by_number, changes, first_line

from fp8_linear import Amaxes, fp8_linear

# The programs -----------------------------------------------------------------------------------

M, N, K = 2048, 4096, 1024
e4m3, e5m2, f32, bf16, f16 = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
)


def shape(*dims: int, dtype=e4m3) -> jax.ShapeDtypeStruct:
    """An array to compile for."""
    return jax.ShapeDtypeStruct(dims, dtype)


# B is stored [N, K]: the layout that needs no transpose.
A, B, S = shape(M, K), shape(N, K), shape(dtype=f32)
WIDE = (A, B, S, S)  # with A's scale and B's
SCALED = (*WIDE, S)  # and with D's


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, its arguments' shapes, and for which chip and by which library it is compiled.
    With `specs` it is for eight chips on one axis, "data", between which these divide the
    arguments.
    """

    fn: Callable
    args: tuple = SCALED
    target: str = "H100"
    gemm: str = "cublaslt"
    options: Mapping[str, Any] | None = None
    specs: tuple[P, ...] | None = None

    def of_size(self, m: int, n: int, k: int) -> "Program":
        """The same with these in the place of M, N and K."""
        sizes = {M: m, N: n, K: k}

        def sized(arg: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return shape(*(sizes.get(dim, dim) for dim in arg.shape), dtype=arg.dtype)

        return dataclasses.replace(self, args=jax.tree.map(sized, self.args))


def plain(a, b, dtype=f32, **how):
    """a [M, K] times b [K, N], unscaled."""
    return jax.lax.dot(a, b, preferred_element_type=dtype, **how)


def dot(a, b, dtype=f32, **how):
    """a [M, K] times b [N, K], unscaled."""
    return plain(a, b.T, dtype, **how)


def scaled_after(a, b, a_scale, b_scale):
    """The scales after the matmul."""
    return dot(a, b) * (a_scale * b_scale)


def clamped(d):
    """Clamped to E4M3's range, and converted."""
    return jnp.clip(d, -E4M3_MAX, E4M3_MAX).astype(e4m3)


def scaled(act=lambda d: d, dtype=f32, out=e4m3, clamp=None, amax=""):
    """Dequantize in `dtype`, multiply, add a bias where there is one more argument, `act`, and
    quantize to `out` with its own bounds, or those of `clamp`. With `amax` the largest magnitude as
    well: of the result "before" `act`, "activated", or "scaled".
    """
    bound = float(jnp.finfo(out).max) if clamp is None else clamp

    def fn(a, b, a_scale, b_scale, d_scale, *bias):
        d = scaled_dot(a, b, a_scale, b_scale, dtype)
        d = d + bias[0].astype(dtype) if bias else d
        y = act(d)
        z = y * d_scale.astype(dtype)
        q = jnp.clip(z, -bound, bound).astype(out)
        if not amax:
            return q
        measured = {"before": d, "activated": y, "scaled": z}[amax]
        return q, jnp.max(jnp.abs(measured)).astype(f32)

    return fn


def wide(dtype, out):
    """Dequantize in `dtype`, multiply, and return `out`."""
    return lambda a, b, a_scale, b_scale: scaled_dot(a, b, a_scale, b_scale, dtype).astype(out)


def layer_and_gradients(x, w, g, x_scale, w_scale, g_scale):
    """A linear layer and both its gradients, from FP8 as stored: x [M, K], w [N, K], g [M, N] in
    E5M2.
    """
    y = scaled_dot(x, w, x_scale, w_scale, bf16)
    return (
        y,
        scaled_dot(g, w.T, g_scale, w_scale, bf16),
        scaled_dot(g.T, x.T, g_scale, x_scale, bf16),
    )


def trained_layer(x, w, g, *histories):
    """Chapter 09's layer, forward and backward: x [M, K] and g [M, N] in bfloat16, w [N, K] in
    float32.
    """
    y, pull = jax.vjp(fp8_linear, x, w, Amaxes(*histories))
    return y, pull(g)


def pieces(a, b, a_scales, b_scales, batched):
    """A scale for each 128 of a row, [K / 128, M] and [K / 128, N]: dequantized first, or as a
    batch of matmuls.
    """
    a, b = a.reshape(len(a), -1, 128), b.reshape(len(b), -1, 128)
    if batched:
        parts = jnp.einsum("mkc,nkc->kmn", a, b, preferred_element_type=f32)
        return jnp.sum(parts * a_scales[:, :, None] * b_scales[:, None, :], axis=0).astype(bf16)
    a, b = (
        x.astype(bf16) * scales.T[:, :, None].astype(bf16)
        for x, scales in ((a, a_scales), (b, b_scales))
    )
    return a.reshape(len(a), -1) @ b.reshape(len(b), -1).T


def layers_in_a_loop(x, w, x_scale, w_scale, d_scale):
    """`len(w)` layers with relu by `lax.scan`: x [M, K], w [layers, K, K], each as [N, K]."""

    def layer(x, w):
        return to_e4m3(jax.nn.relu(scaled_dot(x, w, x_scale, w_scale)), d_scale), None

    return jax.lax.scan(layer, x, w)[0]


def block_scaled(a, b, a_scales, b_scales):
    """JAX's own product of blocks."""
    return jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=f32)


NAMES = {f32: "f32", bf16: "bf16", f16: "f16", e4m3: "E4M3", e5m2: "E5M2"}
relu, gelu, silu = jax.nn.relu, jax.nn.gelu, jax.nn.silu
Add = Callable[..., None]  # takes a name, a function, its arguments, and fields of Program


def one_call(add: Add) -> None:
    """One call, or as near as it gets: the pattern itself."""
    for out in (e4m3, f32, bf16):
        add(f"unscaled, {NAMES[out]} result", functools.partial(dot, dtype=out), A, B)
    add("unscaled E5M2 times E5M2", dot, shape(M, K, dtype=e5m2), shape(N, K, dtype=e5m2))
    for dtype in (f32, bf16, f16):
        add(f"scaled in {NAMES[dtype]}", scaled(dtype=dtype))
    for dtype, out in ((f32, f32), (bf16, bf16), (f16, f16), (f32, bf16), (bf16, f32)):
        add(f"scaled in {NAMES[dtype]}, {NAMES[out]} result", wide(dtype, out), *WIDE)
    add(
        "scaled in bf16, excess precision off",
        scaled(dtype=bf16),
        options={"xla_allow_excess_precision": False},
    )
    for left, right in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3), (e5m2, e5m2)):
        add(
            f"{NAMES[left]} times {NAMES[right]}, E5M2 result",
            scaled(out=e5m2),
            shape(M, K, dtype=left),
            shape(N, K, dtype=right),
            *SCALED[2:],
        )
    one = shape(1, dtype=f32)
    add("scales of shape (1,)", scaled(), A, B, one, one, one)
    add(
        "clamp by max(min())",
        lambda a, b, x, y, z: jnp.maximum(
            jnp.minimum(scaled_dot(a, b, x, y) * z, E4M3_MAX), -E4M3_MAX
        ).astype(e4m3),
    )
    add(
        "batch, bmk,bnk->bmn",
        functools.partial(jnp.einsum, "bmk,bnk->bmn", preferred_element_type=f32),
        shape(4, M, K),
        shape(4, N, K),
    )
    add(
        "sequence, bsk,nk->bsn",
        functools.partial(jnp.einsum, "bsk,nk->bsn", preferred_element_type=f32),
        shape(4, M, K),
        B,
    )
    add(
        "vmap over matrices",
        jax.vmap(scaled(), (0, 0, None, None, None)),
        shape(4, M, K),
        shape(4, N, K),
        *SCALED[2:],
    )


def activations(add: Add) -> None:
    """An activation after the matmul."""
    for name, act in (
        ("relu", relu),
        ("gelu tanh", gelu),
        ("gelu erf", lambda d: gelu(d, approximate=False)),
        ("silu", silu),
    ):
        add(name, scaled(act))
    for dtype in (bf16, f16):
        add(f"relu in {NAMES[dtype]}", scaled(relu, dtype))
        add(f"gelu tanh in {NAMES[dtype]}", scaled(gelu, dtype))
    add(
        "relu after the output scale",
        lambda a, b, x, y, z: clamped(relu(scaled_dot(a, b, x, y) * z)),
    )
    add("relu, f32 result", lambda a, b, x, y: relu(scaled_dot(a, b, x, y)), *WIDE)
    add("relu(unscaled) times an argument", lambda a, b, s: relu(dot(a, b)) * s, A, B, S)
    add("relu(unscaled) times 2", lambda a, b: relu(dot(a, b)) * 2, A, B)
    for name, act in (("relu", relu), ("gelu", gelu)):
        add(
            f"{name}(scaled) times 2",
            lambda a, b, x, y, act=act: act(scaled_dot(a, b, x, y)) * 2,
            *WIDE,
        )


def biases(add: Add) -> None:
    """A vector or a matrix added to the result."""
    for bias in (bf16, f16, f32):
        add(f"{NAMES[bias]} bias", scaled(), *SCALED, shape(N, dtype=bias))
    add("bf16 bias in bf16", scaled(dtype=bf16), *SCALED, shape(N, dtype=bf16))
    add("f16 bias in f16", scaled(dtype=f16), *SCALED, shape(N, dtype=f16))
    add("bias + relu", scaled(relu), *SCALED, shape(N, dtype=bf16))
    add("bias + gelu tanh", scaled(gelu), *SCALED, shape(N, dtype=bf16))
    add("bias for each row", scaled(), *SCALED, shape(M, 1, dtype=bf16))
    add("bias for each row, M = N", scaled(), shape(N, K), B, S, S, S, shape(N, 1, dtype=bf16))
    add(
        "matrix bias, bf16 result",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + c,
        *WIDE,
        shape(M, N, dtype=bf16),
    )

    add(
        "matrix bias in bf16",
        lambda a, b, x, y, z, c: to_e4m3(scaled_dot(a, b, x, y, bf16) + c, z),
        *SCALED,
        shape(M, N, dtype=bf16),
    )
    add(
        "bias + matrix bias, bf16 result",
        lambda a, b, x, y, v, c: scaled_dot(a, b, x, y, bf16) + v + c,
        *WIDE,
        shape(N, dtype=bf16),
        shape(M, N, dtype=bf16),
    )


def amaxes(add: Add) -> None:
    """The largest magnitude of a result beside it."""
    add("amax", scaled(amax="activated"))
    for dtype in (bf16, f16):
        add(f"amax in {NAMES[dtype]}", scaled(dtype=dtype, amax="activated"))
    add("amax after relu", scaled(relu, amax="activated"))
    add("amax after gelu tanh", scaled(gelu, amax="activated"))
    add("amax before relu", scaled(relu, amax="before"))
    add("amax after the output scale", scaled(amax="scaled"))
    for name, act in (("relu", relu), ("gelu tanh", gelu)):
        add(f"bias + {name} + amax", scaled(act, amax="activated"), *SCALED, shape(N, dtype=bf16))


def errors(add: Add) -> None:
    """What XLA does not compile, each with the error in its row."""
    add(
        "amax that scales the same result",
        lambda a, b, x, y: (lambda d: to_e4m3(d, E4M3_MAX / jnp.max(jnp.abs(d))))(
            scaled_dot(a, b, x, y)
        ),
        *WIDE,
    )
    add(
        "gelu tanh, its input as well",
        lambda a, b, x, y, z: (lambda d: (to_e4m3(gelu(d), z), d))(scaled_dot(a, b, x, y)),
    )


def left_outside(add: Add) -> None:
    """What stays outside the call, and what loses FP8."""
    add("no clamp", lambda a, b, x, y, z: (scaled_dot(a, b, x, y) * z).astype(e4m3))
    add("clamp to 447", scaled(clamp=447.0))
    add(
        "clamp before the output scale",
        lambda a, b, x, y, z: (jnp.clip(scaled_dot(a, b, x, y), -E4M3_MAX, E4M3_MAX) * z).astype(
            e4m3
        ),
    )
    add(
        "divide by the scales",
        lambda a, b, x, y, z: clamped(dot(a.astype(f32) / x, b.astype(f32) / y) / z),
    )
    add("scales after the dot", scaled_after, *WIDE)
    add("scale for each row of A", scaled(), A, B, shape(M, 1, dtype=f32), S, S)
    add(
        "scale for each row of A, after the dot",
        scaled_after,
        A,
        B,
        shape(M, 1, dtype=f32),
        S,
    )
    for name, batched in (("dequantized", False), ("batched", True)):
        add(
            f"scale for each 128 of a row, {name}",
            functools.partial(pieces, batched=batched),
            A,
            B,
            shape(K // 128, M, dtype=f32),
            shape(K // 128, N, dtype=f32),
        )
    add(
        "abs between scale and dot",
        lambda a, b, x, y, z: to_e4m3(dot(jnp.abs(a.astype(f32) * x), b.astype(f32) * y), z),
    )
    add(
        "B stored [K, N]",
        plain,
        A,
        shape(K, N),
    )
    add(
        "A stored [K, M], B [K, N]",
        lambda a, b: plain(a.T, b),
        shape(K, M),
        shape(K, N),
    )
    add("M = 17", dot, shape(17, K), B)
    add("K = 72", dot, shape(M, 72), shape(N, 72))


def precisions(add: Add) -> None:
    """Precision and algorithm."""
    highest = functools.partial(dot, precision=jax.lax.Precision.HIGHEST)
    add("precision HIGHEST", highest, A, B)
    for preset in ("ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM"):
        algorithm = jax.lax.DotAlgorithmPreset[preset]
        add(f"algorithm {preset}", functools.partial(dot, precision=algorithm), A, B)


def several(add: Add) -> None:
    """More than one matmul."""
    add("a layer and its gradients", layer_and_gradients, A, B, shape(M, N, dtype=e5m2), S, S, S)
    histories = (shape(16, dtype=f32),) * 3
    add(
        "a trained layer and its gradients",
        trained_layer,
        shape(M, K, dtype=bf16),
        shape(N, K, dtype=f32),
        shape(M, N, dtype=bf16),
        *histories,
    )
    add("8 layers in a loop", layers_in_a_loop, A, shape(8, K, K), S, S, S)


def triton(add: Add) -> None:
    """The other way to run a matmul: the first tile that compiles, as there is no chip to time
    on.
    """
    add("Triton: scaled in f32", wide(f32, f32), *WIDE, gemm="triton")
    add("Triton: scaled in bf16", wide(bf16, bf16), *WIDE, gemm="triton")
    add(
        "Triton: scales after the dot",
        scaled_after,
        *WIDE,
        gemm="triton",
    )
    add("default options: scaled in f32", scaled(), gemm="auto")


def other_chips(add: Add) -> None:
    """The same programs, and block scales, for other chips."""
    for chip in ("A100", "L40S", "B200"):
        add(f"{chip}: scaled in f32", scaled(), target=chip)
        add(
            f"{chip}: B stored [K, N]",
            plain,
            A,
            shape(K, N),
            target=chip,
        )
    e8m0 = jnp.float8_e8m0fnu
    for chip in ("H100", "B200"):
        add(
            f"{chip}: blocks of 32 (MXFP8)".removeprefix("H100: "),
            block_scaled,
            shape(1, M, K),
            shape(1, N, K),
            shape(1, M, K // 32, dtype=e8m0),
            shape(1, N, K // 32, dtype=e8m0),
            target=chip,
        )


DIVIDED, WHOLE = P("data"), P()
barrier = jax.lax.optimization_barrier


def codes(w, scale):
    """E4M3 by a scale that divides."""
    return clamped(w.astype(f32) / scale)


# What becomes of a weight [N, K], of which each chip has some rows and needs all, before a matmul:
# the forms of chapter 16.
GATHERS: Mapping[str, Callable] = {
    "gather, quantize": lambda w, s: codes(shard(w, WHOLE), s),
    "gather, quantize, barrier": lambda w, s: barrier(codes(shard(w, WHOLE), s)),
    "quantize": codes,
    "quantize, barrier": lambda w, s: barrier(codes(w, s)),
    "quantize, gather": lambda w, s: shard(codes(w, s), WHOLE),
    "quantize, stay, gather": lambda w, s: shard(shard(codes(w, s), DIVIDED), WHOLE),
    "quantize, barrier, gather": lambda w, s: shard(barrier(codes(w, s)), WHOLE),
    "gather, quantize in bf16": lambda w, s: (
        (shard(w, WHOLE) / s.astype(bf16)).clip(-448, 448).astype(e4m3)
    ),
}


def gathers(add: Add) -> None:
    """A weight that is divided between eight chips: which form gathers it in FP8."""
    tokens, weight = shape(8192, 2048), shape(4096, 2048, dtype=bf16)
    specs = (DIVIDED, DIVIDED, WHOLE, WHOLE)
    for name, form in GATHERS.items():
        add(
            f"8 chips: {name}",
            lambda x, w, x_scale, w_scale, form=form: scaled_dot(
                x, form(w, w_scale), x_scale, w_scale, bf16
            ),
            tokens,
            weight,
            S,
            S,
            specs=specs,
        )


def hidden(add: Add) -> None:
    """Four layers, whose weights are gathered: which gathers have a kernel beside them."""

    def layers(x, weights, scale):
        for w in weights:
            gathered = GATHERS["quantize, stay, gather"](w, scale)
            x = scaled_dot(codes(x, scale), gathered, scale, scale, bf16)
        return x

    weights = [shape(4096, 4096, dtype=bf16)] * 4
    off = {"xla_gpu_enable_latency_hiding_scheduler": False}
    for how, options in {"": None, ", no scheduler": off}.items():
        add(
            f"8 chips: four layers{how}",
            layers,
            shape(16384, 4096, dtype=bf16),
            weights,
            S,
            specs=(DIVIDED, DIVIDED, WHOLE),
            options=options,
        )


# A new program is one line in one of these, then `make releases`.
SECTIONS = (
    one_call,
    activations,
    biases,
    amaxes,
    errors,
    left_outside,
    precisions,
    several,
    triton,
    other_chips,
    gathers,
    hidden,
)


def programs() -> dict[str, Program]:
    """Every program by name."""
    found: dict[str, Program] = {}

    def add(name: str, fn: Callable, *args: Any, **options: Any) -> None:
        assert name not in found, name
        found[name] = Program(fn, args or SCALED, **options)

    for section in SECTIONS:
        section(add)
    return found


# What becomes of them ---------------------------------------------------------------------------


class OlderTarget(Target):
    """A chip as JAX 0.9 reads it: its description names cuDNN's version in the outer part alone."""

    def text_proto(self, cudnn_patch: int = 0) -> str:
        """The description, without that version in its inner part."""
        return re.sub(r'\s+dnn_version: ".*?"', "", super().text_proto(cudnn_patch))


def chip(name: str) -> Target:
    """The chip of that name, as the installed JAX can read it."""
    if by_number(jax.__version__) >= (0, 10):
        return TARGETS[name]
    return OlderTarget(
        **{field.name: getattr(TARGETS[name], field.name) for field in dataclasses.fields(Target)}
    )


# What a row has of each matmul, in this order.
FIELDS = (
    "count",
    "library",
    "lhs_dtype",
    "rhs_dtype",
    "math_dtype",
    "epilogue",
    "amax",
    "alpha",
    "beta",
    "scales",
    "precision",
    "algorithm",
    "tile",
    "out_dtype",
    "outside",
)


def row(program: Program) -> dict[str, Any]:
    """What the installed JAX makes of a program, as it stands in the data."""
    made: dict[str, Any] = {"target": program.target, "gemm": program.gemm}
    try:  # the type a Triton kernel multiplies stands in its PTX
        seen = inspect(
            program.fn,
            *program.args,
            target=chip(program.target),
            gemm=program.gemm,
            compiler_options=program.options,
            mesh_shape={"data": 8} if program.specs else None,
            in_specs=program.specs,
        )
        report = seen.report
    except Exception as error:  # that a program does not compile is a finding
        return made | {"error": first_line(error)}
    gemms = []
    for gemm in report.rows:
        found = {field: getattr(gemm, field) for field in FIELDS}
        gemms.append(found | {"scales": "".join(gemm.scales), "outside": len(gemm.outside)})
    if program.specs:
        made["sent"] = [
            {"dtype": one.dtype, "bytes": one.bytes_sent, "beside": len(one.overlaps)}
            for one in seen.collectives
        ]
    # The order in which independent matmuls run is the scheduler's affair.
    return made | {"kernels": report.kernels, "gemms": sorted(gemms, key=json.dumps)}


def rows(names: Sequence[str]) -> dict[str, Any]:
    """What the installed JAX makes of the programs of these names."""
    every = programs()
    return {name: row(every[name]) for name in names}


RECORD = Record(
    name="releases",
    module="tools.recorders.releases",
    about="What each JAX release makes of the programs in tools/recorders/releases.py.",
    releases=("0.9.2", "0.10.2", "0.11.2"),
    names=lambda version: [*programs()],
    rows=rows,
)


def print_changes(releases: Mapping[str, Any]) -> None:
    """Print what each release changed over the one before it."""
    for old, new in itertools.pairwise(releases):
        print(f"\nJAX {old} to {new}:")
        for line in changes(releases[old]["rows"], releases[new]["rows"]):
            print(f"  {line}")


if __name__ == "__main__":
    RECORD.main()
    print_changes(RECORD.read())
