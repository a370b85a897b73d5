"""How fast: one matmul in bf16, in FP8 in every form of the chapters, and by torch.

Every form's result is compared once with the same function of the same operands in float32: those
it multiplies one by one, without the FP8 tensor cores. Operands are random, of unit size, and no
call finds its operands in the cache.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8lens.targets import GEMM_OPTIONS
from helpers.numerics import blocks
from helpers.numerics.quantize import amax_scale, quantize
from helpers.numerics.recipes import scaled_dot, to_e4m3
from tools.gpu.errors import errors_of_all, is_right
from tools.gpu.machine import Gpu, Program
from tools.gpu.stage import Case, Ready
from tools.recorders.releases import dot
from tools.recorders.releases import scaled as fused

bf16, f32, e4m3, e5m2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
# Bytes of operands to walk through before the first set comes again: Hopper's L2 has 50 or 60 MB.
BETWEEN = 200e6
Shape = jax.ShapeDtypeStruct
# A reference runs once: nothing is to be timed for it.
ONCE = {**GEMM_OPTIONS["cublaslt"], "xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to write a matmul. `precision` is that of matmuls: "highest" asks for careful sums.
    `reference` is compared with in place of `fn`, where `fn` makes FP8 itself. `rehearsed` is what
    a CPU can run. `most` is an error that is right at any rate: of several layers, each of which
    rounds what rounding has changed before."""

    fn: Callable
    args: tuple[Shape, ...]
    gemm: str = "cublaslt"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    precision: str | None = None
    reference: Callable | None = None
    rehearsed: Callable | None = None
    most: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        (m, k), (n, _) = self.args[0].shape, self.args[1].shape
        return m, n, k

    @property
    def factors(self) -> tuple[float, ...]:
        """Of its scalars. The first two scale operands, so that sums over K are of unit size: a
        bias and an activation count then. The third scales a result to FP8's range."""
        depth = self.args[0].shape[-1] ** -0.25
        return depth, depth, 64.0

    def compile(self, gpu: Gpu) -> Program:
        """Compiled by its own way to multiply."""

        def own(*args):  # what has been traced with another precision is not taken again
            return self.fn(*args)

        with jax.default_matmul_precision(self.precision):
            return gpu.compile(
                own, *self.args, gemm=self.gemm, options=self.options, rehearsed=self.rehearsed
            )

    def build(self, gpu: Gpu) -> Ready:
        """Compile it, compare it once, and return what to time."""
        program = self.compile(gpu)
        sets = operands(self.args, 2 if gpu.rehearsal else sets_of(self.args), self.factors)
        made = compare(program.call(*sets[0]), self.reference or self.fn, sets[0], self.most)
        made |= {"shape": list(self.sizes), "flops": 2 * math.prod(self.sizes)}
        walk = itertools.cycle(sets)
        return Ready(made, lambda: program.call(*next(walk)), program.compiled)


def compare(
    got: Any, fn: Callable, args: tuple[jax.Array, ...], most: float = 0.0
) -> dict[str, Any]:
    """How far a result is from that of `fn` with operands in float32, and whether rounding, or
    `most`, explains it. No FP8 goes into the reference's matmul, so XLA finds no FP8 matmul in
    it."""

    def wide(*args):
        return fn(*args)

    with jax.default_matmul_precision("highest"):
        given = [arg.astype(f32) if arg.dtype in (e4m3, e5m2) else arg for arg in args]
        found = errors_of_all(got, jax.jit(wide, compiler_options=ONCE)(*given))
    k = args[0].shape[-1]
    return {"errors": found, "right": all(is_right(one, k, most) for one in found)}


@functools.lru_cache(maxsize=8)  # forms side by side take the same arguments
def operands(
    args: tuple[Shape, ...], count: int, factors: tuple[float, ...]
) -> list[tuple[jax.Array, ...]]:
    """Sets of random operands on the device, normally distributed; scalars are of the size of
    `factors`."""
    of_scalars = iter(factors)
    factor_of = [1.0 if arg.shape else next(of_scalars) for arg in args]

    def one(key: jax.Array, arg: Shape, factor: float) -> jax.Array:
        if not arg.shape:
            scale = factor * jax.random.uniform(key, (), minval=0.5, maxval=1.5)
            return scale.astype(arg.dtype)
        return jax.random.normal(key, arg.shape, bf16).astype(arg.dtype)

    @jax.jit
    def a_set(key):
        return tuple(map(one, jax.random.split(key, len(args)), args, factor_of))

    return [a_set(jax.random.key(seed)) for seed in range(count)]


def sets_of(args: tuple[Shape, ...]) -> int:
    """How many sets of operands a form walks through."""
    size = sum(arg.size * arg.dtype.itemsize for arg in args)
    return max(1, min(64, round(BETWEEN / size)))


# The forms ----------------------------------------------------------------------------------------


def unfused(act: Callable = lambda d: d, amax: str = "") -> Callable:
    """The work of `fused`, the matmul's bf16 result written to memory and read again."""

    def fn(a, b, a_scale, b_scale, d_scale, *bias):
        d = jax.lax.optimization_barrier(scaled_dot(a, b, a_scale, b_scale, bf16)).astype(f32)
        d = act(d + bias[0].astype(d.dtype) if bias else d)
        return (to_e4m3(d, d_scale), jnp.max(jnp.abs(d))) if amax else to_e4m3(d, d_scale)

    return fn


ALL: dict[str, Any] = {"act": jax.nn.gelu, "amax": "activated"}  # and a bias
ADDED: dict[str, dict[str, Any]] = {
    "relu": {"act": jax.nn.relu},
    "gelu": {"act": jax.nn.gelu},
    "bias": {},
    "amax": {"amax": "activated"},
}
OUT = "FP8 scaled, FP8 out"
EVERYTHING = "bias + gelu + amax"


class Forms:
    """Every form at one size."""

    def __init__(self, m: int, n: int, k: int):
        self.sizes = m, n, k
        self.a, self.b, self.s = Shape((m, k), e4m3), Shape((n, k), e4m3), Shape((), f32)
        self.scaled = self.a, self.b, self.s, self.s, self.s
        self.biased = *self.scaled, Shape((n,), bf16)
        self.wide = Shape((m, k), bf16), Shape((n, k), bf16)

    def first(self) -> dict[str, Form]:
        """What is worth knowing first."""
        return {
            "bf16": Form(functools.partial(dot, dtype=bf16), self.wide),
            f"+ {EVERYTHING}": Form(fused(**ALL), self.biased),
            f"unfused: + {EVERYTHING}": Form(unfused(**ALL), self.biased),
            OUT: Form(fused(), self.scaled),
        }

    def more(self) -> dict[str, Form]:
        """What the goals are about besides. torch takes the kernel that cuBLASLt proposes first,
        XLA times several: "untuned" is like torch."""
        untuned = {"xla_gpu_autotune_level": 0}
        return {
            f"{OUT}, amax": Form(fused(amax="activated"), self.scaled),
            f"{OUT}, untuned": Form(fused(), self.scaled, options=untuned),
            f"{OUT}, careful sums": Form(fused(), self.scaled, precision="highest"),
            "FP8 scaled": Form(functools.partial(scaled_dot, dtype=bf16), self.scaled[:4]),
        }

    def epilogues(self) -> dict[str, Form]:
        """Each thing in the call and outside of it."""
        first = self.first()
        found = {name: first[name] for name in (OUT, "bf16")}
        found["unfused: FP8 out"] = Form(unfused(), self.scaled)
        for name, how in ADDED.items():
            args = self.biased if name == "bias" else self.scaled
            found[f"+ {name}"] = Form(fused(**how), args)
            found[f"unfused: + {name}"] = Form(unfused(**how), args)
        return found | {name: first[name] for name in first if EVERYTHING in name}

    def from_bf16(self) -> dict[str, Form]:
        """What making the operands FP8 costs."""

        def by(scale_of, hide=lambda codes: codes):
            def fn(x, w, *scales):
                x_scale, w_scale = scale_of(x, w, *scales)
                x = hide(quantize(x, x_scale))
                w = hide(quantize(w, w_scale)) if w.dtype == bf16 else w
                return scaled_dot(x, w, x_scale, w_scale, bf16)

            return fn

        def form(scale_of, *args):
            # The reference multiplies the same codes, which XLA does not see to be FP8.
            hidden = by(scale_of, lambda codes: jax.lax.optimization_barrier(codes.astype(f32)))
            return Form(by(scale_of), args, reference=hidden)

        a, b = self.wide
        return {
            "bf16": self.first()["bf16"],
            "FP8, A from bf16": form(lambda x, w, *scales: scales, a, self.b, self.s, self.s),
            "FP8 from bf16": form(lambda x, w, scale: (scale, scale), a, b, self.s),
            "FP8 from bf16 by amax": form(lambda x, w: (amax_scale(x), amax_scale(w)), a, b),
        }

    def blocks(self) -> dict[str, Form]:
        """Chapter 13's ways to multiply blocks. "kernel" in older results is an earlier kernel."""
        (m, n, k), size = self.sizes, blocks.B
        scales = Shape((k // size, m), f32), Shape((n // size, k // size), f32)
        args = self.a, self.b, *scales
        by_hand = Form(blocks.by_block, args, reference=blocks.batched, rehearsed=blocks.batched)
        return {
            "bf16": self.first()["bf16"],
            "FP8 scaled": self.more()["FP8 scaled"],
            "kernel of pairs": by_hand,
            "dequantized": Form(blocks.dequantized, args),
            "batched": Form(blocks.batched, args),
        }


# torch --------------------------------------------------------------------------------------------


def torch_forms(m: int, n: int, k: int, gpu: Gpu) -> dict[str, Callable[[], Ready]]:
    """The FP8 matmul by torch, where it is installed, with a bf16 result and an FP8 one."""
    if importlib.util.find_spec("torch") is None:
        return {}
    return {
        name: functools.partial(_torch, name, m, n, k, gpu)
        for name in ("torch._scaled_mm", "torch._scaled_mm, FP8 out")
    }


@functools.lru_cache(maxsize=2)
def _torch_operands(m: int, n: int, k: int, place: str, count: int) -> list[tuple[Any, Any]]:
    import torch

    normal = functools.partial(torch.randn, device=place, dtype=torch.bfloat16)
    fp8 = torch.float8_e4m3fn
    return [(normal(m, k).to(fp8), normal(n, k).to(fp8)) for _ in range(count)]


def _torch(name: str, m: int, n: int, k: int, gpu: Gpu) -> Ready:
    import torch

    place, count = ("cpu", 2) if gpu.rehearsal else ("cuda", sets_of((Shape((m + n, k), e4m3),)))
    sets = _torch_operands(m, n, k, place, count)
    fp8, one = torch.float8_e4m3fn, torch.tensor(0.75, device=place)
    dtype = fp8 if name.endswith("FP8 out") else torch.bfloat16
    more = {"scale_result": torch.tensor(1.0, device=place)} if dtype is fp8 else {}
    walk = itertools.cycle([(a, b.T) for a, b in sets])

    def call():
        a, b = next(walk)
        return torch._scaled_mm(a, b, one, one, out_dtype=dtype, use_fast_accum=True, **more)

    got = call()
    a, b = sets[0]
    # In float32, as torch multiplies unless TF32 is allowed: here it is not.
    expected = (a.float() @ b.float().T) * 0.75**2
    as_jax = {fp8: e4m3, torch.bfloat16: bf16}[dtype]
    found = errors_of_all(_of_torch(got, as_jax), _of_torch(expected.to(dtype), as_jax))
    return Ready({"errors": found, "right": is_right(found[0], k)}, call)


def _of_torch(tensor: Any, dtype: Any) -> jax.Array:
    """A tensor as an array of JAX, by the host: in float32, which holds every number of `dtype`."""
    return jnp.asarray(tensor.float().cpu().numpy()).astype(dtype)


# The cases ----------------------------------------------------------------------------------------


def sized(gpu: Gpu, size: int) -> tuple[int, int, int]:
    """M, N and K; in a rehearsal small ones, of which no two are equal."""
    return (128, 256, 384) if gpu.rehearsal else (size, size, size)


def case(gpu: Gpu, name: str, forms: Mapping[str, Form], looks: int = 5) -> Case:
    """Forms as a case; what takes long is looked at for longer."""
    flops = max(2 * math.prod(form.sizes) for form in forms.values())
    builds = {form: functools.partial(one.build, gpu) for form, one in forms.items()}
    seconds = 0.01 if gpu.rehearsal else 0.1 if flops > 5e11 else 0.03
    return Case("speed", name, builds, 2 if gpu.rehearsal else looks, seconds)


def first(gpu: Gpu) -> Iterator[Case]:
    """FP8 fused, FP8 unfused, bf16 and torch, at both sizes."""
    for size in (4096, 8192):
        sizes = sized(gpu, size)
        forms = Forms(*sizes)
        one = case(gpu, f"{size}: main", forms.first() | (forms.more() if size == 8192 else {}))
        # torch's before what is worth less: after the first four.
        builds = [*one.forms.items()]
        every = dict([*builds[:4], *torch_forms(*sizes, gpu).items(), *builds[4:]])
        yield dataclasses.replace(one, forms=every, limit=90)  # torch's first form starts torch


def epilogues(gpu: Gpu) -> Iterator[Case]:
    """What each thing in the call costs, and outside of it."""
    yield case(gpu, "8192: what is fused", Forms(*sized(gpu, 8192)).epilogues())


def streamed(gpu: Gpu, fn: Callable, dtype: Any) -> Ready:
    """How fast the memory is: 2 GB of operands, each read once."""
    x = jax.random.normal(jax.random.key(0), (2**8 if gpu.rehearsal else 2**15, 2**15), bf16)
    x = x.astype(dtype)
    program = gpu.compile(fn, x)
    found = errors_of_all(program.call(x), jax.jit(fn)(x))
    right = all(one["largest"] == 0 for one in found)
    return Ready({"errors": found, "right": right}, lambda: program.call(x), program.compiled)


STREAMED: dict[str, tuple[Callable, Any]] = {
    "copy": (jnp.copy, bf16),
    "negate": (jnp.negative, bf16),
    "bf16 to FP8": (lambda x: to_e4m3(x, jnp.float32(1)), bf16),
    "amax": (lambda x: jnp.max(jnp.abs(x)), bf16),
    "transpose FP8": (jnp.transpose, e4m3),
}


def others(gpu: Gpu) -> Iterator[Case]:
    """What is worth knowing last: the memory's bandwidth, and what making FP8 costs."""
    builds = {name: functools.partial(streamed, gpu, *how) for name, how in STREAMED.items()}
    yield Case("speed", "memory", builds, looks=3)
    yield case(gpu, "8192: from bf16", Forms(*sized(gpu, 8192)).from_bf16(), looks=3)


def blocked(gpu: Gpu) -> Iterator[Case]:
    """Chapter 13's kernel beside XLA's forms."""
    yield case(gpu, "4096: blocks", Forms(*sized(gpu, 4096)).blocks(), looks=3)


# By default ---------------------------------------------------------------------------------------

TRAINED = {  # the matmuls of a training step: hidden size 4096, 8192 tokens; M, N, K
    "forward, up": (8192, 16384, 4096, e4m3),
    "gradient of the input, up": (8192, 4096, 16384, e5m2),
    "gradient of the weight, up": (16384, 4096, 8192, e5m2),
}


def by_default(gpu: Gpu) -> Iterator[Case]:
    """What XLA's default options choose, which time Triton's kernels too: for the fused layer, and
    for the matmuls of a training step. Beside it cuBLASLt alone, which is what it is compared
    with."""
    found = {"fused layer, 8192": Form(fused(**ALL), Forms(*sized(gpu, 8192)).biased)}
    for name, (m, n, k, dtype) in TRAINED.items():
        if gpu.rehearsal:
            m, n, k = 128, 256, 384
        args = Shape((m, k), dtype), Shape((n, k), e4m3), Shape((), f32), Shape((), f32)
        careful = "highest" if dtype == e5m2 else None  # as Flax asks for in the backward pass
        found[name] = Form(functools.partial(scaled_dot, dtype=bf16), args, precision=careful)
    for name, form in found.items():
        forms = {"cuBLASLt": form, "default": dataclasses.replace(form, gemm="auto")}
        yield case(gpu, f"default: {name}", forms)
