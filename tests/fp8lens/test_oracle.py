"""What `inspect` says of a program, held to an oracle that shares no code with it."""

import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from fp8lens import inspect
from tests.fp8lens.oracle import Dot, Seen, dots, flops, launched

from fp8_decoder import Decoder, new_state
from fp8_decoder import train_step as decoder_step
from fp8_linear import fp8_linear, new_amaxes

bf16, f32, e4m3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
TYPES = {"s32": jnp.int32, "c64": jnp.complex64, "f8e4m3fn": e4m3, "f8e5m2": jnp.float8_e5m2}
TYPES |= {"f32": f32, "bf16": bf16}


class Program(NamedTuple):
    """A function, its arguments, and for what it is compiled. `rows`: whether XLA keeps each matmul
    as JAX wrote it; else it joins some, and only their FLOPs are compared.
    """

    fn: Any
    given: Any
    target: str = "H100"
    gemm: str = "cublaslt"
    rows: bool = True

    @property
    def args(self) -> list:
        """Arrays, also for those that are given as text."""
        parts = [self.given] if isinstance(self.given, str) else self.given
        found = []
        for part in parts:
            found += [array(text) for text in part.split()] if isinstance(part, str) else [part]
        return found


def array(text: str) -> jax.ShapeDtypeStruct:
    """Such as f32[8,16]."""
    dtype, dims = text.rstrip("]").split("[")
    return jax.ShapeDtypeStruct([int(d) for d in dims.split(",") if d], TYPES[dtype])


def wide(a, scale):
    """Dequantized."""
    return a.astype(bf16) * scale.astype(bf16)


def codes(a, scale):
    """Quantized with a given scale."""
    return jnp.clip(a.astype(f32) / scale, -448, 448).astype(e4m3)


# Single matmuls -----------------------------------------------------------------------------------


def scaled(x, w, x_scale, w_scale):
    return wide(x, x_scale) @ wide(w, w_scale).T


def unscaled(x, w):
    return jax.lax.dot(x, w.T, preferred_element_type=f32)


def current(x, x_scale, w, w_scale, v, v_scale):
    """The first result is quantized with its own amax."""
    y = wide(x, x_scale) @ wide(w, w_scale).T
    y_scale = jnp.max(jnp.abs(y)).astype(f32) / 448
    return wide(codes(y, y_scale), y_scale) @ wide(v, v_scale).T


def weight_only(x, w, scale):
    return x @ wide(w, scale)


def decode(x, w, x_scale, w_scale):
    return wide(codes(x, x_scale), x_scale) @ wide(w, w_scale)


def outer(a, b, w):
    """K is 1 in the first product."""
    return jnp.outer(a, b) @ w


def precise(x, w, v):
    y = jnp.dot(x, w, precision="highest")
    return jnp.dot(y, v)


def one_hot(x, w):
    return jnp.einsum("nk,kd->nd", jax.nn.one_hot(x, 64, dtype=bf16), w)


def by_heads(x, w):
    return jnp.einsum("hk,khd->hd", x, w)


def gradients(x, w):
    """For each example the gradient of a sum: K is 1."""
    return jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.square(x @ w))), (None, 0))(w, x)


def update(w, g):
    """A weight that is overwritten."""
    return w - 0.1 * (g.T @ g)


# Loops and branches -------------------------------------------------------------------------------


def layer(h, w):
    return jax.nn.gelu(h @ w), None


def scanned(ws, head, x, layer=layer, unroll=1):
    """The activations of a scan over layers are kept for the backward pass."""

    def loss(ws, head, x):
        h, _ = jax.lax.scan(layer, x, ws, unroll=unroll)
        return jax.nn.logsumexp((h @ head).astype(f32), -1).mean()

    return jax.grad(loss, (0, 1, 2))(ws, head, x)


def accumulated(w, xs):
    """Gradients of several microbatches are added up."""

    def add(total, x):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w).astype(f32)))(w), None

    return jax.lax.scan(add, jnp.zeros_like(w), xs)[0]


def by_blocks(x, w, x_scale, w_scale):
    """Scales of blocks of K are multiplied into the partial sums."""
    k = x.shape[1] // 128
    xs = x.reshape(-1, k, 128).swapaxes(0, 1)

    def add(total, part):
        x, w, scale = part
        return total + jax.lax.dot(x, w.T, preferred_element_type=f32) * scale, None

    zeros = jnp.zeros((x.shape[0], w.shape[1]), f32)
    return jax.lax.scan(add, zeros, (xs, w, x_scale * w_scale))[0]


def branches(p, x, ws):
    """In loops: a scan in a loop of known length, then a loop of unknown length."""

    def step(h, w):
        return jax.lax.cond(p > 0, lambda h: h @ w, lambda h: jnp.tanh(h) @ (w + 1), h), None

    h = jax.lax.fori_loop(0, 3, lambda i, h: jax.lax.scan(step, h, ws)[0], x)
    first = ws[0, :, :64]

    def body(carry):
        return carry[0] + 1, jnp.pad(carry[1] @ first, ((0, 0), (0, 64)))

    return jax.lax.while_loop(lambda carry: carry[0] < p, body, (0, h))[1]


# Layers -------------------------------------------------------------------------------------------


def attention(x, qkv, out):
    q, k, v = jnp.split(jnp.einsum("bld,dnhk->nbhlk", x, qkv), 3)
    weights = jax.nn.softmax(jnp.einsum("nbhlk,nbhmk->nbhlm", q, k).astype(f32)).astype(bf16)
    return jnp.einsum("nbhlm,nbhmk,hkd->bld", weights, v, out)


def head(w, x, labels):
    """A vocabulary's logits in FP8, with constant scales, and their gradients."""

    def loss(w, x):
        scales = jnp.asarray(0.25, f32), jnp.asarray(0.005, f32)
        z = wide(codes(x, scales[0]), scales[0]) @ wide(codes(w, scales[1]), scales[1]).T
        z = 15 * jnp.tanh(z.astype(f32) / 15)
        return jnp.mean(jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels, 1)[:, 0])

    return jax.value_and_grad(loss, (0, 1))(w, x)


def linear_step(w, amaxes, x, target):
    """A layer with delayed scaling, and its loss."""

    def loss(w, amaxes, x):
        return jnp.mean(jnp.square(fp8_linear(x, w, amaxes).astype(f32) - target))

    return jax.value_and_grad(loss, (0, 1, 2))(w, amaxes, x)


def stack(ws, amaxes, x, policy=None):
    """Layers with delayed scaling, scanned, each computed again in the backward pass."""

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(h, own):
        return jax.nn.gelu(fp8_linear(h, *own)), None

    def loss(ws, amaxes):
        return jnp.sum(jax.lax.scan(layer, x, (ws, amaxes))[0].astype(f32))

    return jax.grad(loss, (0, 1))(ws, amaxes)


def lora(w, scale, down, up, x):
    """A frozen FP8 weight, and an update of rank 16 that is trained."""

    def loss(down, up):
        y = wide(codes(x, scale), scale) @ wide(w, scale)
        return jnp.sum(jnp.square((y + x @ down @ up).astype(f32)))

    return jax.grad(loss, (0, 1))(down, up)


def decoder():
    """A training step of the recipe's decoder, and its arguments."""
    model = Decoder(letters=64, width=64, heads=2, hidden=128, blocks=1)
    optimizer = optax.sgd(0.1)
    state = jax.eval_shape(lambda: new_state(model, optimizer, jax.random.key(0)))
    step = functools.partial(decoder_step, model, optimizer)
    return step, (state, jax.ShapeDtypeStruct((2, 33), jnp.int32))


SCALED = "f8e4m3fn[128,512] f8e4m3fn[256,512] f32[] f32[]"
WEIGHT = "bf16[16,512] f8e4m3fn[512,256] f32[]"
SCANNED = "bf16[4,256,256] bf16[256,1024] bf16[128,256]"
ONE = jax.eval_shape(new_amaxes)
FOUR = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, *a.shape), a.dtype), ONE)
PROGRAMS = {
    "scaled": Program(scaled, SCALED),
    "scaled, L40S": Program(scaled, SCALED, "L40S"),
    "scaled, B200": Program(scaled, SCALED, "B200"),
    "scaled, A100": Program(scaled, SCALED, "A100"),
    "scaled, Triton": Program(scaled, SCALED, gemm="triton"),
    "scaled, Triton, B200": Program(scaled, SCALED, "B200", "triton"),
    "unscaled, Triton": Program(unscaled, "f8e4m3fn[64,512] f8e5m2[96,512]", gemm="triton"),
    "unscaled, Triton, L40S": Program(
        unscaled, "f8e4m3fn[64,512] f8e4m3fn[96,512]", "L40S", "triton"
    ),
    "unscaled, Triton, B200": Program(
        unscaled, "f8e4m3fn[64,512] f8e4m3fn[96,512]", "B200", "triton"
    ),
    "split K, L40S": Program(scaled, "f8e4m3fn[128,128] f8e4m3fn[128,128] f32[] f32[]", "L40S"),
    "E5M2": Program(scaled, "f8e5m2[64,256] f8e4m3fn[96,256] f32[] f32[]"),
    "E5M2, Triton": Program(scaled, "f8e5m2[64,256] f8e4m3fn[96,256] f32[] f32[]", gemm="triton"),
    "current scaling": Program(
        current, "f8e4m3fn[128,256] f32[] f8e4m3fn[512,256] f32[] f8e4m3fn[128,512] f32[]"
    ),
    "weight only": Program(weight_only, WEIGHT),
    "weight only, Triton": Program(weight_only, WEIGHT, gemm="triton"),
    "M = 1": Program(decode, "bf16[1,512] f8e4m3fn[512,256] f32[] f32[]"),
    "M = 1, bf16": Program(jnp.matmul, "bf16[1,512] bf16[512,256]"),
    "heads of one row": Program(by_heads, "bf16[8,512] bf16[512,8,64]"),
    "vector": Program(jnp.matmul, "bf16[512,512] bf16[512]"),
    "vector, Triton": Program(jnp.matmul, "bf16[4096,4096] bf16[4096]", gemm="triton"),
    "K = 1": Program(outer, "bf16[256] bf16[256] bf16[256,128]"),
    "gradients of sums": Program(gradients, "f32[8,256] f32[256,128]"),
    "precise": Program(precise, "f32[128,256] f32[256,512] f32[512,64]"),
    "complex": Program(jnp.matmul, "c64[128,256] c64[256,64]"),
    "one hot": Program(one_hot, "s32[128] bf16[64,256]"),
    "scan": Program(scanned, SCANNED),
    "scan, remat": Program(functools.partial(scanned, layer=jax.checkpoint(layer)), SCANNED),
    "scan, unrolled": Program(functools.partial(scanned, unroll=4), SCANNED),
    "scan, Triton": Program(scanned, SCANNED, gemm="triton"),
    "accumulated": Program(accumulated, "bf16[256,512] bf16[4,64,256]"),
    "by blocks": Program(by_blocks, "f8e4m3fn[128,512] f8e4m3fn[4,256,128] f32[4] f32[4]"),
    "branches": Program(branches, "s32[] bf16[64,128] bf16[4,128,128]"),
    "attention": Program(attention, "bf16[2,64,128] bf16[128,3,4,32] bf16[4,32,128]"),
    "head": Program(head, "bf16[512,128] bf16[256,128] s32[256,1]"),
    "linear": Program(linear_step, ["f32[512,256]", ONE, "bf16[128,256] f32[128,512]"]),
    "stack, remat": Program(stack, ["f32[4,256,256]", FOUR, "bf16[128,256]"]),
    "lora": Program(lora, "f8e4m3fn[256,256] f32[] bf16[256,16] bf16[16,256] bf16[64,256]"),
    "decoder": Program(*decoder(), rows=False),
    "donated": Program(jax.jit(update, donate_argnums=0), "f32[256,256] f32[64,256]"),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def both(request, tmp_path_factory):
    """The program, what the oracle sees of it, and what `inspect` says."""
    program = PROGRAMS[request.param]
    options = {"target": program.target, "gemm": program.gemm}
    seen = Seen(program.fn, program.args, tmp_path_factory.mktemp("xla"), **options)
    return program, seen, inspect(program.fn, *program.args, **options)


def test_matmuls_are_those_of_the_jaxpr(both):
    program, _, said = both
    assert said.report.flops == flops(jax.make_jaxpr(program.fn)(*program.args).jaxpr)
    rows: dict[Dot, int | None] = {}
    for row in said.report.rows:
        dot = Dot(row.batch, min(row.m, row.n), max(row.m, row.n), row.k)
        known = rows.get(dot, 0)
        rows[dot] = None if known is None or row.count is None else known + row.count
    if program.rows:
        assert rows == dots(program.fn, *program.args)


def test_types_are_those_of_the_calls_and_of_the_machine_code(both):
    _, seen, said = both
    rows = said.report.rows
    calls = [(r.lhs_dtype, r.rhs_dtype) for r in rows if r.library.startswith("cublas")]
    assert Counter(calls) == seen.cublas_types()
    multiplied = seen.multiplied()
    for row in rows:
        name = row.name.replace(".", "_")
        if row.library == "triton" and name in multiplied:  # of kernels that are alike, one is
            assert {row.math_dtype} == multiplied[name]


def test_memory_is_xlas_plan(both):
    _, seen, said = both
    memory = said.memory
    planned = seen.memory()
    assert {name: getattr(memory, name) for name in planned._fields} == planned._asdict()


def test_kernels_are_xlas_thunks(both):
    _, seen, said = both
    assert said.report.kernels == seen.kernels()
    assert (said.report.kernels, said.report.bytes_moved) == launched(seen.hlo)
