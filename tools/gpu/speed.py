"""How fast: bf16 and FP8 in every form of the chapters, on cubes and on the shapes of two
transformers.

What is compared is timed side by side, in one case: a ratio of two figures of one case is of one
run. Every FP8 result stays in the chip's reach (random operands of unit size), and no call finds
its inputs in the cache. A form runs and is timed first and is described afterwards: what cannot be
read of its program costs no figure.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numerics
import numpy as np
from programs import own_compile, runnable
from record import Case, sentence
from watch import Watch

from fp8lens.matmul.kernels import bytes_moved, kernels, roofline_seconds
from helpers import TARGETS, report_gemms
from helpers.numerics import blocks
from helpers.numerics.quantize import amax_scale, quantize
from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from helpers.records.local import Timing, device_times, wait, wall_seconds
from tools.records.releases import dot
from tools.records.releases import scaled as fused

# Tokens by the matrices of Llama 2 (Touvron et al. 2023): hidden sizes 4096 and 8192, MLPs of 11008
# and 28672, and in the 70B model 8 heads of 128 for keys and for values. M is 8192 tokens, or few,
# as when text is generated.
SHAPES = {
    "8192": (8192, 8192, 8192),
    "4096": (4096, 4096, 4096),
    "16384": (16384, 16384, 16384),
    "2048": (2048, 2048, 2048),
    "1024": (1024, 1024, 1024),
    "7B gate and up": (8192, 22016, 4096),
    "7B down": (8192, 4096, 11008),
    "7B QKV": (8192, 12288, 4096),
    "7B out": (8192, 4096, 4096),
    "70B gate and up": (8192, 57344, 8192),
    "70B down": (8192, 8192, 28672),
    "70B QKV": (8192, 10240, 8192),
    "7B down, 16 tokens": (16, 4096, 11008),
    "7B down, 256 tokens": (256, 4096, 11008),
    # Neighborhood the N from which on FP8 should pay where A has to be quantized first.
    **{f"N = {n}": (8192, n, 8192) for n in (256, 512, 1024, 2048)},
}
# The shapes at which each epilogue is timed, and the same work unfused.
FUSED = ("8192", "4096", "7B gate and up")
REHEARSAL = {"8192": (64, 96, 128), "4096": (64, 128, 128), "N = 512": (32, 16, 64)}
# Bytes of inputs to walk through before the first set comes again: Hopper's L2 holds 50 or 60 MB.
BETWEEN = 200e6
BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to write a matmul: the function, the types and shapes of its arguments, and who runs
    it. `rehearsal` is what runs in its place where there is no GPU."""

    fn: Callable
    args: tuple[jax.ShapeDtypeStruct, ...]
    gemm: str = "cublaslt"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rehearsal: Callable | None = None

    @property
    def untuned(self) -> "Form":
        """By the kernel that cuBLASLt proposes first, as torch takes it. XLA by itself times
        several."""
        return dataclasses.replace(self, options={"xla_gpu_autotune_level": 0})


def unfused(act: Callable = lambda d: d, amax: str = "") -> Callable:
    """The work of `fused`, the matmul's bf16 result written to memory and read again."""

    def fn(a, b, a_scale, b_scale, d_scale, *bias):
        d = jax.lax.optimization_barrier(scaled_dot(a, b, a_scale, b_scale, BF16)).astype(
            jnp.float32
        )
        d = act(d + bias[0].astype(d.dtype) if bias else d)
        return (to_e4m3(d, d_scale), jnp.max(jnp.abs(d))) if amax else to_e4m3(d, d_scale)

    return fn


def forms(m: int, n: int, k: int) -> dict[str, dict[str, Form]]:
    """Every form at one shape, by the case in which they are timed side by side."""

    def shape(*dims: int, dtype: Any = E4M3) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    a, b, s, bias = shape(m, k), shape(n, k), shape(dtype=jnp.float32), shape(n, dtype=BF16)
    a16, b16 = shape(m, k, dtype=BF16), shape(n, k, dtype=BF16)
    scaled, relu, gelu = (a, b, s, s, s), jax.nn.relu, jax.nn.gelu
    to_bf16 = functools.partial(dot, dtype=BF16)
    bf16, plain = Form(to_bf16, (a16, b16)), Form(fused(), scaled)

    def half_scales(a, b, d_scale):
        half = jnp.float32(0.5)
        return to_e4m3(scaled_dot(a, b, half, half), d_scale)

    def layer(x, w, x_scale, w_scale):
        return scaled_dot(quantize(x, x_scale), w, x_scale, w_scale, BF16)

    def quantized(x, w, scale_of):
        x_scale, w_scale = scale_of(x), scale_of(w)
        return scaled_dot(quantize(x, x_scale), quantize(w, w_scale), x_scale, w_scale, BF16)

    def carefully(*args):
        with jax.default_matmul_precision("highest"):
            return fused()(*args)

    main = {
        "bf16": bf16,
        "FP8": Form(to_bf16, (a, b)),
        "FP8 scaled": Form(functools.partial(scaled_dot, dtype=BF16), scaled[:4]),
        "FP8 scaled, FP8 out": plain,
        "FP8 scaled, FP8 out, amax": Form(fused(amax="activated"), scaled),
        "quantize A": Form(quantize, (a16, s)),
        "quantize A by its amax": Form(
            lambda x: (quantize(x, amax_scale(x)), amax_scale(x)), (a16,)
        ),
        "FP8, A from bf16": Form(layer, (a16, b, s, s)),
        "FP8 from bf16": Form(lambda x, w, scale: quantized(x, w, lambda _: scale), (a16, b16, s)),
        "FP8 from bf16 by amax": Form(lambda x, w: quantized(x, w, amax_scale), (a16, b16)),
    }
    added: dict[str, dict[str, Any]] = {
        "relu": {"act": relu},
        "gelu": {"act": gelu},
        "bias": {},
        "amax": {"amax": "activated"},
    }
    cost: dict[str, Form] = {
        "bf16": bf16,
        "FP8 scaled, FP8 out": plain,
        "unfused: FP8 out": Form(unfused(), scaled),
    }
    for name, how in added.items():
        args = (*scaled, bias) if name == "bias" else scaled
        cost |= {
            f"+ {name}": Form(fused(**how), args),
            f"unfused: + {name}": Form(unfused(**how), args),
        }
    everything: dict[str, Any] = {"act": gelu, "amax": "activated"}
    cost |= {
        "+ bias + gelu + amax": Form(fused(**everything), (*scaled, bias)),
        "unfused: + bias + gelu + amax": Form(unfused(**everything), (*scaled, bias)),
    }
    by_all = {
        "bf16": bf16,
        "FP8 scaled": main["FP8 scaled"],
        "FP8 scaled, FP8 out": plain,
        "FP8, scaled after": Form(
            lambda a, b, x, y: (dot(a, b) * (x * y)).astype(BF16), scaled[:4]
        ),
    }
    libraries = {
        f"{name} [{gemm}]": dataclasses.replace(form, gemm=gemm)
        for name, form in by_all.items()
        for gemm in ("cublaslt", "auto", "triton")
    }
    details = {
        "FP8 scaled, FP8 out": plain,
        "B stored [K, N]": Form(
            lambda a, b, *scales: fused()(a, b.T, *scales), (a, shape(k, n), s, s, s)
        ),
        "no scales": Form(
            lambda a, b: jnp.clip(dot(a, b), -E4M3_MAX, E4M3_MAX).astype(E4M3), (a, b)
        ),
        "scales of 0.5, constants": Form(half_scales, (a, b, s)),
        "accumulated in f32": Form(carefully, scaled),
        "bf16 out": main["FP8 scaled"],
        "f32 out": Form(scaled_dot, scaled[:4]),
    }
    return {"main": main, "what is fused": cost, "libraries": libraries, "details": details}


def ladder(m: int, n: int, k: int) -> dict[str, Form]:
    """Chapter 12's ladder of block-scaled matmuls, with its kernel at the top, beside bf16 and a
    scale an operand."""
    main, size = forms(m, n, k)["main"], blocks.B
    args = (
        *main["FP8"].args,
        *(
            jax.ShapeDtypeStruct(dims, jnp.float32)
            for dims in ((k // size, m), (n // size, k // size))
        ),
    )
    spelled_out = (blocks.dequantized, blocks.batched, blocks.looped)
    rungs = {fn.__name__: Form(fn, args) for fn in spelled_out}
    kernel = Form(blocks.by_block, args, rehearsal=blocks.batched)
    return {name: main[name] for name in ("bf16", "FP8 scaled")} | rungs | {"kernel": kernel}


def inputs(args: tuple[jax.ShapeDtypeStruct, ...], seed: int) -> list[jax.Array]:
    """Random arrays on the device: scalars in 0.5 to 1.5, the rest normally distributed."""
    keys = jax.random.split(jax.random.key(seed), len(args))
    return [
        jax.random.uniform(key, (), minval=0.5, maxval=1.5).astype(arg.dtype)
        if not arg.shape
        else jax.random.normal(key, arg.shape, jnp.bfloat16).astype(arg.dtype)
        for key, arg in zip(keys, args, strict=True)
    ]


def zeros(args: tuple[jax.ShapeDtypeStruct, ...], seed: int) -> list[jax.Array]:
    """The same with operands of zeros."""
    return [jnp.zeros_like(array) if array.ndim else array for array in inputs(args, seed)]


def sets_of(size: int) -> int:
    """How many sets of inputs of `size` bytes each a form walks through."""
    return max(1, min(256, round(BETWEEN / size)))


def walked(
    call: Callable, args: tuple[jax.ShapeDtypeStruct, ...], rehearse: bool, make: Callable = inputs
) -> Callable[[], Any]:
    """A function without arguments that calls `call` with one set of inputs after the other."""
    count = 2 if rehearse else sets_of(sum(arg.size * arg.dtype.itemsize for arg in args))
    sets = itertools.cycle([make(args, seed) for seed in range(count)])
    return lambda: call(*next(sets))


# torch's call, and the form of ours that does the same: no amax, by the kernel that cuBLASLt
# proposes first.
TORCH = {
    "bf16": "torch bf16",
    "FP8 scaled": "torch._scaled_mm",
    "FP8 scaled, FP8 out": "torch._scaled_mm, FP8 out",
}


def torch_forms(m: int, n: int, k: int, rehearse: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The same matmuls by torch, where it is installed and has the GPU."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not (torch.cuda.is_available() or rehearse):
        return
    normal = functools.partial(
        torch.randn, device="cpu" if rehearse else "cuda", dtype=torch.bfloat16
    )
    count = 2 if rehearse else sets_of(m * k + n * k)
    sets = [(normal(m, k), normal(n, k)) for _ in range(count)]
    narrow = itertools.cycle(
        [(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T) for a, b in sets]
    )
    wide = itertools.cycle([(a, b.T) for a, b in sets])
    one = torch.tensor(0.75, device=normal(1).device)

    def scaled_mm(dtype, **options):
        a, b = next(narrow)
        return torch._scaled_mm(a, b, one, one, out_dtype=dtype, use_fast_accum=True, **options)

    yield TORCH["bf16"], lambda: torch.matmul(*next(wide))
    yield TORCH["FP8 scaled"], lambda: scaled_mm(torch.bfloat16)
    yield TORCH["FP8 scaled, FP8 out"], lambda: scaled_mm(torch.float8_e4m3fn, scale_result=one)


def torch_calls(
    rows: dict[str, Any], sizes: tuple[int, int, int], rehearse: bool, case: Case
) -> dict[str, Callable[[], Any]]:
    """torch's forms; none, and the reason in a row, where it cannot be imported or has no
    memory."""
    return case.attempt(rows, "torch", lambda: dict(torch_forms(*sizes, rehearse))) or {}


def as_row(timing: Timing) -> dict[str, Any]:
    """What is recorded of a timing; of the kernels each with its seconds and launches in a call."""
    row = {
        "device_seconds": timing.device,
        "wall_seconds": timing.wall,
        "quartiles": [timing.low, timing.high],
        "launches": sum(count for *_, count in timing.kernels),
        "longest": list(map(list, timing.kernels)),
    }
    return row | ({"no_clock": timing.no_clock} if timing.no_clock else {})


def description(compiled: jax.stages.Compiled, rehearse: bool) -> dict[str, Any]:
    """What the compiler made of a form: kernels, bytes, matmuls, and the least time by roofline."""
    return {
        "kernels": len(kernels(compiled)),
        "bytes": bytes_moved(compiled),
        "gemms": [
            f"{row.library} {row.math_dtype} {row.epilogue} {row.tile} {row.precision}".strip()
            for row in report_gemms(compiled).rows
        ],
        "roofline_seconds": roofline_seconds(compiled, TARGETS["H200" if rehearse else "local"]),
    }


def describe(
    rows: dict[str, Any],
    programs: Mapping[str, jax.stages.Compiled],
    case: Case,
    rehearse: bool,
    read: Callable[..., Mapping[str, Any]] = description,
) -> None:
    """Add to each row what can be read from its program, or why that cannot: it costs no figure.
    Keep the programs."""
    for name, compiled in programs.items():
        try:
            rows[name] |= read(compiled, rehearse)
        except Exception as error:
            rows[name]["not_described"] = sentence(error)
        rows[name] = whole(rows[name])
        case.keep(name, compiled)


def whole(row: dict[str, Any]) -> dict[str, Any]:
    """A row, without its time by the GPU's clock where that saw too few of the program's kernels:
    it is too short then. (Copies are no kernels to it, and a call of a library may be several.)"""
    if row.get("device_seconds") and row["launches"] < 0.9 * row.get("kernels", 0):
        saw = (
            f"CUPTI saw {row['launches']:g} of {row['kernels']} kernels, "
            f"{row['device_seconds']:.3g} s"
        )
        return row | {"device_seconds": None, "no_clock": saw}
    return row


def compile_form(form: Form, rehearse: bool) -> jax.stages.Compiled:
    """A form compiled for the attached GPU, by its own way to multiply."""
    return own_compile(
        form.fn, *form.args, rehearse=rehearse, gemm=form.gemm, compiler_options=form.options
    )


def timed(
    rows: dict[str, Any],
    calls: Mapping[str, Callable[[], Any]],
    case: Case,
    rehearse: bool,
    slices: float = 0.02,
    rounds: int = 4,
) -> None:
    """Add to each row what its call takes, and what the chip does meanwhile. A call that fails now
    is left out, and the others are timed without it."""

    @contextlib.contextmanager
    def during(name):
        with case.form(name), watch.during(name):
            yield

    few = (
        {"repeats": 3, "rounds": 2}
        if rehearse
        else {"repeats": 5, "rounds": rounds, "at_least": slices}
    )
    found: dict[str, Timing] = {}
    while calls and not found:
        try:
            with Watch() as watch:
                found = device_times(calls, during=during, **few)
        except Exception as error:
            if case.under_way not in calls:
                raise
            case.failed(rows, case.under_way, error)
            calls = {name: call for name, call in calls.items() if "error" not in rows[name]}
    for name, timing in found.items():
        rows[name] |= as_row(timing)
        if chip := watch.summary(name):
            rows[name]["chip"] = chip


def once(call: Callable[[], Any]) -> None:
    """Call it, and wait until the result is there."""
    wait(call())


def group_of(sizes: tuple[int, int, int], group: str) -> dict[str, Form]:
    """The forms of a group; "main, untuned" has those beside which torch's are like for like as
    well."""
    name, _, more = group.partition(", ")
    found = ladder(*sizes) if name == "blocks" else forms(*sizes)[name]
    return found | ({f"{form}, {more}": found[form].untuned for form in TORCH} if more else {})


def time_forms(
    sizes: tuple[int, int, int], group: str, rehearse: bool, case: Case
) -> dict[str, Any]:
    """Compile every form of a group, time all of them side by side, and then say what the compiler
    made of each."""
    rows: dict[str, Any] = {}
    calls, programs = {}, {}
    for name, form in group_of(sizes, group).items():

        def start(form=form):
            compiled = compile_form(form, rehearse)
            call = walked(
                runnable(rehearse and form.rehearsal or form.fn, compiled, rehearse),
                form.args,
                rehearse,
            )
            jax.block_until_ready(call())
            return compiled, call

        rows[name] = {}
        if started := case.attempt(rows, name, start):
            programs[name], calls[name] = started
    if group.startswith("main"):
        for name, call in torch_calls(rows, sizes, rehearse, case).items():
            rows[name] = {}
            case.attempt(rows, name, functools.partial(once, call))
            if not rows[name]:
                calls[name] = call
    # What goals are about is timed for longer: 0.1 s of each form in a round.
    longer: dict[str, Any] = {"slices": 0.1, "rounds": 6} if sizes == SHAPES["8192"] else {}
    timed(rows, calls, case, rehearse, **longer)
    describe(rows, programs, case, rehearse)
    return {"shape": list(sizes), "flops": 2 * math.prod(sizes), "forms": rows}


def first_call(sizes: tuple[int, int, int], rehearse: bool, case: Case) -> dict[str, Any]:
    """What everything else stands on: one call with all in it runs, its numbers are right, and
    CUPTI sees it. Beside it the rate at which this chip copies memory."""
    form = forms(*sizes)["what is fused"]["+ bias + gelu + amax"]
    gigabyte = jax.ShapeDtypeStruct((2**12 if rehearse else 2**29,), BF16)
    name, copy = "everything in one call", "a copy of 1 GiB"
    rows: dict[str, Any] = {name: {}, copy: {}}
    calls, programs = {}, {}

    def right() -> dict[str, Any]:
        programs[name] = compile_form(form, rehearse)
        args, call = inputs(form.args, 0), runnable(form.fn, programs[name], rehearse)
        got = jax.tree.leaves(call(*args))
        calls[name] = walked(call, form.args, rehearse)
        expected = numerics.reference(form.fn, [np.asarray(arg) for arg in args])
        errors = [numerics.errors(*pair) for pair in zip(got, expected, strict=True)]
        return {"errors": errors, "right": all(map(numerics.is_right, errors))}

    def copied() -> None:
        programs[copy] = own_compile(lambda x: -x, gigabyte, rehearse=rehearse)
        calls[copy] = walked(
            runnable(lambda x: -x, programs[copy], rehearse), (gigabyte,), rehearse
        )
        jax.block_until_ready(calls[copy]())

    rows[name] |= case.attempt(rows, name, right) or {}
    case.attempt(rows, copy, copied)
    timed(rows, calls, case, rehearse)
    describe(rows, programs, case, rehearse)
    return {"shape": list(sizes), "flops": 2 * math.prod(sizes), "forms": rows}


LOADED = ("bf16", "FP8 scaled, FP8 out, amax", "FP8 scaled, FP8 out, untuned")


def under_load(sizes: tuple[int, int, int], rehearse: bool, case: Case) -> dict[str, Any]:
    """How the rate sinks: of the first calls after a pause, and of those after a second and a half
    without one; with random operands and with zeros, which draw less power. By the host's clock, of
    calls sent one after the other."""
    rows: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name in LOADED:
        form = group_of(sizes, "main, untuned")[name]
        compiled = case.attempt(rows, name, functools.partial(compile_form, form, rehearse))
        for what, make in (("random", inputs), ("zeros", zeros)) if compiled is not None else ():
            ready = runnable(form.fn, compiled, rehearse)
            start = functools.partial(walked, ready, form.args, rehearse, make)
            call = case.attempt(rows, f"{name}, {what}", start)
            calls |= {f"{name}, {what}": call} if call else {}
    calls |= {
        f"{name}, random": call for name, call in torch_calls(rows, sizes, rehearse, case).items()
    }
    for name, call in calls.items():
        rows[name] = {}
        with Watch() as watch:
            hold = functools.partial(held, call, watch, 0.05 if rehearse else 1.5)
            found = case.attempt(rows, name, hold)
        if found:
            rows[name] = found | {
                what: chip for what in ("burst", "sustained") if (chip := watch.summary(what))
            }
    return {"shape": list(sizes), "flops": 2 * math.prod(sizes), "loads": rows}


def held(call: Callable[[], Any], watch: Watch, seconds: float) -> dict[str, float]:
    """Seconds of a call: the median of the first batches, and of the last third of those without a
    pause."""
    wait(call())
    count = max(1, round(0.02 / wall_seconds(call, 3)))  # 20 ms between two looks at the clock
    time.sleep(seconds / 3)
    with watch.during("burst"):
        first = [wall_seconds(call, count), wall_seconds(call, count)]
    stop, last = time.time() + seconds * 2 / 3, time.time() + seconds
    while time.time() < stop:
        wall_seconds(call, count)
    late: list[float] = []
    with watch.during("sustained"):
        while not late or time.time() < last:
            late.append(wall_seconds(call, count))
    return {"burst_seconds": statistics.median(first), "sustained_seconds": statistics.median(late)}


FIRST, LOAD = "2048: first call", "8192: under load"


def cases(rehearse: bool) -> dict[str, Callable[[Case], dict[str, Any]]]:
    """A case a shape and group of forms, and two of their own."""
    shapes = REHEARSAL if rehearse else SHAPES
    wanted = {
        f"{name}: main": (name, "main, untuned" if name == FUSED[0] else "main") for name in shapes
    }
    wanted |= {
        f"{name}: what is fused": (name, "what is fused") for name in FUSED if name in shapes
    }
    wanted |= {f"{FUSED[0]}: {group}": (FUSED[0], group) for group in ("details", "libraries")}
    wanted["4096: blocks"] = ("4096", "blocks")
    first, load = (shapes.get(name.split(":")[0], shapes["8192"]) for name in (FIRST, LOAD))
    return {
        FIRST: functools.partial(first_call, first, rehearse),
        LOAD: functools.partial(under_load, load, rehearse),
    } | {
        case: functools.partial(time_forms, shapes[name], group, rehearse)
        for case, (name, group) in wanted.items()
    }
