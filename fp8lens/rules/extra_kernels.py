"""Kernels that nobody fused, and kernels that nobody knows."""

import re
from collections.abc import Callable, Mapping

from fp8lens.formats import CUBLASLT, is_fp8, is_narrow
from fp8lens.hlo.dataflow import is_same_in_each_iteration
from fp8lens.hlo.ops import COLLECTIVES, CONTROL, SCALING
from fp8lens.hlo.origin import is_recomputed, op_name
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.program import fused, setting
from fp8lens.hlo.values import is_choice_by_flag, is_one_number, is_zero, look_through, operand
from fp8lens.hlo.walk import walk
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.operands import FAR
from fp8lens.matmul.ptx import instructions, of_kernel
from fp8lens.matmul.roles import clamp_bounds
from fp8lens.matmul.unfused import OwnWork, UnfusedKernel
from fp8lens.rules.facts import InFront, Matmul, main_work
from fp8lens.rules.rule import Found, Lost, found_if, rule


class Work:
    """What kernels do outside of a matmul's call: `works` as UnfusedKernel has it."""

    def __init__(self, matmul: Matmul, works: list[str]):
        self.matmul, self.works = matmul, works

    @property
    def fields(self) -> dict[str, str]:
        """What was lost, and all that the kernels do."""
        return {"lost": main_work(self.works), "works": ", ".join(dict.fromkeys(self.works))}


@rule(
    "outside-of-a-kernel",
    reason=(
        "kernels do {works} on what the {library} kernel has written, and XLA did not fuse it "
        "into that"
    ),
    fix="{advice}",
    source=(
        "after a dot XLA fuses what its Triton emitter can tile (gemm_fusion.cc), after a "
        "library's kernel nothing"
    ),
)
def outside_of_a_kernel(work: Work) -> Found | None:
    """Another kernel does what follows a matmul, and the matmul's own is not cuBLASLt's.

    XLA fuses what follows a matmul into a Triton kernel, if it can be computed tile by tile. One
    case where it cannot is a product with few tiles: XLA then splits K, so that more blocks of the
    GPU have work, and each block sums a part of K. A relu of a part of a sum is not a part of the
    relu, so another kernel adds the parts and does what follows. A cuBLASLt call applies its
    epilogue to the whole sum.

    cuDNN's call with the scales of blocks has no epilogue at all. It writes float32 or a 16-bit
    type, as `preferred_element_type` asks.

    Compiled with: gemm="triton", compiler_options={"xla_gpu_override_gemm_autotuner": tile}
    Loses it:

        tile = "block_m: 128 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"

        def layer(a: "f8e4m3fn[256,512]", b: "f8e4m3fn[384,512]", d_scale):
            return relu(jax.lax.dot(a, b.T, preferred_element_type=f32)) * d_scale

    Compiled with: gemm="cublaslt"
    Keeps it:

        def layer(a: "f8e4m3fn[256,512]", b: "f8e4m3fn[384,512]", d_scale):
            return relu(jax.lax.dot(a, b.T, preferred_element_type=f32)) * d_scale
    """
    advice = (
        "compile with gemm='cublaslt', whose rules are known here; or look at what stands between "
        "the two kernels, print(inspect(fn, *args).hlo)"
    )
    if work.matmul.block_scaled is not None:
        advice = (
            "leave these kernels: cuDNN's block-scaled call has no epilogue; what only converts "
            "its result goes away where preferred_element_type asks for that type"
        )
    return Found(work.fields, advice=advice)


@rule(
    "unknown-outside",
    reason=(
        "unknown: kernels do work that a call can do ({works}), and no rule known here says why "
        "this call does not (its epilogue is {epilogue}, its scales {scales}, its result {out})"
    ),
    fix=(
        "to see what XLA's rewriter says of this matmul, set TF_CPP_MIN_LOG_LEVEL=0 "
        "TF_CPP_VMODULE=gemm_rewriter=1 before Python starts, and look for FP8 in XLA's log"
    ),
    source="none found",
)
def unknown_outside(work: Work) -> Found | None:
    """Kernels do what the call could have done, and no rule of fp8lens says why.

    The other rules here are those of XLA's rewriter, as it is in the releases that fp8lens is
    tested with. If a kernel does something that a call can do, and the program breaks none of these
    rules, then a rule is missing here, or this release of XLA has a new one. XLA can log what its
    rewriter does with each matmul, and the log sometimes says why it stopped.

    No program is known that shows this.
    """
    return Found(work.fields)


@rule(
    "unknown-kernel",
    lost=Lost.KERNEL,
    reason=(
        "unknown: the kernel {kernel} {does}, and what it does there is not known here ({opcode})"
    ),
    fix="find the kernel in the compiled program and read it: print(inspect(fn, *args).hlo)",
    source="none found",
)
def unknown_kernel(o: UnfusedKernel) -> Found | None:
    """A kernel around the matmul has an operation that is not known here.

    To find out what a kernel does for a matmul, fp8lens reads the kernel's operations one by one.
    It knows the operations that move elements, compute with each element, or reduce. If a kernel
    has another operation, fp8lens does not guess: the call could do all of the kernel's work, or
    none of it.

    No program is known that shows this.
    """
    does = "reads the result" if o.after else "makes an operand"
    return found_if(o.unknown, kernel=o.instruction.name, does=does, opcode=o.unknown)


@rule(
    "multiplied-twice",
    lost=Lost.DUPLICATE,
    reason=(
        "the same matrices are multiplied twice, here and in {other}: one result is read in two "
        "forms"
    ),
    fix=(
        "derive both from one form; where one is an amax, take it of the unscaled result, and "
        "multiply that number by the scale"
    ),
    source="HandleMultiply and HandleConvert: each rewrites its own copy of the call",
)
def twice(other: str) -> Found | None:
    """XLA made two calls of one dot, one for each form of its result.

    A call returns its result in one form. If the program converts one scaled result to two types,
    XLA's rewriter takes each conversion into a call of its own, and both calls multiply the same
    matrices. The rewriter looks at each conversion alone, and does not compare what this saves with
    what it costs. To avoid the second matmul, compute the second form of the result from the first
    form.

    An amax of the scaled result, beside its conversion, is the same case: see amax-scaled.

    Loses it:

        def layer(a: "f8e5m2[64,256]", b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale) * d_scale
            return jnp.clip(d, -448, 448).astype(e4m3), jnp.clip(d, -57344, 57344).astype(e5m2)

    Keeps it:

        def layer(a: "f8e5m2[64,256]", b, a_scale, b_scale, d_scale):  # E5M2 is rounded twice
            q = quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)
            return q, q.astype(e5m2)
    """
    return Found(other=other)


@rule(
    "added-to-itself",
    lost=Lost.DUPLICATE,
    reason=(
        "the result is added to itself, and XLA multiplies twice: here again, to add it to the "
        "result of {other}"
    ),
    fix="leave out the addition, and double an operand's scale (a_scale) outside of the program",
    source="FuseMatrixBiasAdd: one use of the result becomes a call that adds the other",
)
def added_to_itself(other: str) -> Found | None:
    """The program computes d + d, and both terms become calls.

    XLA's rewriter looks for an addition that reads a call's result, and lets the call add the other
    term. Here the other term is the same result. So one call writes it, and a second one multiplies
    the same matrices again and adds. If an operand's scale is twice as large, the call's one result
    is the sum.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return d + d

    Keeps it:

        def layer(a, b, a_scale, b_scale):  # a_scale is twice as large
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return Found(other=other)


@rule(
    "multiplied-again",
    lost=Lost.DUPLICATE,
    reason=(
        "the program multiplies the same matrices twice, here and in {other}: with other scales, "
        "or for a result of another type or order"
    ),
    fix=(
        "multiply once, and compute the second result from the first: times the quotient of the "
        "scales, converted, or transposed"
    ),
    source="XLA joins only instructions that are equal: to it, dots with other scales differ",
)
def again(other: str) -> Found | None:
    """Two dots multiply the same arrays, with different scales.

    A scale is one number, so the two results differ by a factor. To XLA they are two dots of
    different operands, and it makes a call for each. Each call is in FP8, and the matmul runs
    twice. A kernel that multiplies the first result by a number reads and writes it once, which
    costs less than a second matmul unless K is small.

    If jax.checkpoint multiplies again in a backward pass, the program asks for that, and fp8lens
    gives no reason.

    Compiled with: compiler_options={"xla_gpu_dot_merger_threshold_mb": 0}
    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return scaled_dot(a, b, a_scale, b_scale), scaled_dot(a, b, a_scale, d_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return d, d * (d_scale / b_scale)
    """
    return Found(other=other)


@rule(
    "chosen-result",
    lost=Lost.DUPLICATE,
    reason="a flag decides whether the result is used, and the matmul runs in any case",
    fix="put the matmul, and what follows it, into a branch of jax.lax.cond",
    source="a select reads both its arrays: what makes them runs first",
)
def chosen_result(m: Matmul) -> Found | None:
    """One number decides whether a matmul's result is used.

    jnp.where computes both of its arrays, then chooses. If it chooses by one number, all that only
    one of the arrays needs is computed for nothing where the other is chosen. Of jax.lax.cond one
    branch runs. What follows the result in the branch can be fused into the call, too. A branch has
    a cost of its own, which fp8lens does not know: for small matmuls, leave the jnp.where. The
    bytes below count each branch as taken.

    fp8lens gives no reason if the flag is computed from floats, as a check for numbers that are not
    finite is: such a flag keeps the result in nearly every run, so a branch saves nothing.

    Loses it:

        def layer(a, b, a_scale, b_scale, c: "f32[64,128]", flag: "pred[]"):
            return jnp.where(flag, c + scaled_dot(a, b, a_scale, b_scale), c)

    Keeps it:

        def layer(a, b, a_scale, b_scale, c: "f32[64,128]", flag: "pred[]"):
            return jax.lax.cond(flag, lambda: c + scaled_dot(a, b, a_scale, b_scale), lambda: c)
    """
    is_unused = m.dot is not None and _is_unused_by_a_flag(m.dot)
    return found_if(is_unused or any(_is_zero_by_a_flag(side.scale) for side in m.sides))


def _is_zero_by_a_flag(scale: Instruction | None) -> bool:
    """Whether a flag, which is not computed from floats, makes an operand's scale 0."""
    if scale is None:
        return False
    scale = look_through(scale)
    if scale.opcode != "select" or _is_of_floats(operand(scale, 0)):
        return False
    return is_zero(look_through(operand(scale, 1))) or is_zero(look_through(operand(scale, 2)))


def _is_unused_by_a_flag(dot: Instruction) -> bool:
    """Whether all that is made of a dot's result goes into choices by one flag, on one side."""
    choices: set[tuple[Instruction, int]] = set()

    def onward(i: Instruction) -> list[Instruction]:
        following = []
        for user in i.computation.users.get(i.name, ()):
            sides = [n for n in (1, 2) if user.operands[n : n + 1] == (i.name,)]
            if is_choice_by_flag(user) and len(sides) == 1:
                choices.add((look_through(operand(user, 0), _SPREAD), sides[0]))
            else:
                following.append(user)
        return following

    reached = walk([dot], onward, FAR)
    if len(choices) != 1 or len(reached) > FAR:
        return False
    if any(i.is_root or i.opcode.startswith((*COLLECTIVES, *CONTROL)) for i in reached):
        return False
    ((flag, _),) = choices
    return not _is_of_floats(flag)


def _is_of_floats(flag: Instruction) -> bool:
    """Whether a flag is computed from floats; also where this is not known, behind a call."""

    def made_of(i: Instruction) -> list[Instruction]:
        return [] if i.opcode == "get-tuple-element" else [i.computation[n] for n in i.operands]

    made = walk([flag], made_of, FAR)
    return not all(i.shape.dtype.startswith(_NO_FLOATS) for i in made)


_NO_FLOATS = ("pred", "s", "u")
_SPREAD = ("broadcast", "bitcast", "reshape", "copy")


def _quantizing(m: Matmul, is_meant: Callable[[Instruction], bool]) -> list[Found]:
    """The operands that kernels quantize of which this holds."""
    made = [o.instruction for o in m.near if o.own is OwnWork.QUANTIZES]
    return [Found(side=InFront(m, i, "").side, dtype=i.shape.dtype) for i in made if is_meant(i)]


@rule(
    "requantized",
    lost=Lost.SCALE,
    reason="a kernel makes the {side} operand of codes in {dtype}: it quantizes them again",
    fix=(
        "pass the codes as they are, with the scale that dequantizes them (a_scale), or quantize "
        "once, with the scale that the operand is to have"
    ),
    source="the program: a call takes any scale, and reads the codes only",
)
def requantized(m: Matmul) -> list[Found]:
    """An FP8 array is dequantized, then quantized to the same format with another scale.

    The codes of an FP8 array and a scale give its numbers. With another scale, other codes give
    nearly the same numbers: they were rounded twice. A call takes each operand's scale as it is. So
    a second quantization costs a kernel and precision, and is only needed if two arrays have to be
    joined that have different scales.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            x = quantize(dequantize(a, a_scale), d_scale)
            return scaled_dot(x, b, 1 / d_scale, b_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return _quantizing(m, _quantizes_codes)


def _quantizes_codes(i: Instruction) -> bool:
    """Whether a kernel makes FP8 codes of others in the same format, and only scales them by
    numbers.
    """
    computation = fused(i)
    end = computation.root if computation else i
    *_, first = walk([end], _scaled_by_numbers)
    is_of_codes = first.opcode == "parameter" and first.shape.dtype == end.shape.dtype
    return end.opcode == "convert" and is_of_codes


def _scaled_by_numbers(i: Instruction) -> list[Instruction]:
    """The one array of which a value is made: converted, cut out of a stack, times or divided by
    numbers, or clamped to the range of an FP8 format; [] for what is made otherwise.
    """
    if i.opcode in _CONVERTS_OR_CUTS:
        return [operand(i, 0)]
    if i.opcode == "clamp" and clamp_bounds(i) in _RANGES:
        return [operand(i, 1)]
    if i.opcode in SCALING and is_one_number(operand(i, 1)):
        return [operand(i, 0)]
    if i.opcode == "multiply" and is_one_number(operand(i, 0)):
        return [operand(i, 1)]
    return []


_CONVERTS_OR_CUTS = frozenset("convert bitcast reshape copy slice dynamic-slice".split())
_RANGES = [[f"-{of.limit}", of.limit] for of in CUBLASLT.values()]


@rule(
    "quantized-in-loop",
    lost=Lost.DUPLICATE,
    reason="a loop quantizes the {side} operand in each iteration, and it is the same in each",
    fix=(
        "quantize it before the loop; dequantize it in the loop, directly before the dot; for "
        "gradients, hand the wide array to the jax.custom_vjp function too, which does not read it "
        "and returns the gradient as that array's"
    ),
    source="XLA does not move what it has fused into a kernel out of a loop",
)
def quantized_in_loop(m: Matmul) -> list[Found]:
    """A loop quantizes what does not change from one iteration to the next.

    A weight that several iterations multiply with, such as those over microbatches, has to be
    quantized once. In the body of jax.lax.scan or jax.lax.map the program asks for it in each
    iteration, and XLA does as the program says. Each time, a kernel reads the wide array and writes
    its codes. The dequantization is another matter: it must stay in the loop, see before-the-loop.

    If the loop computes gradients, as those of microbatches do, quantizing before it cuts the
    weight off from them: codes have no gradient. Then let the jax.custom_vjp function take both,
    the codes and the wide weight. It multiplies by the codes, does not read the wide weight, and
    returns the gradient as that of the wide weight. XLA removes what nobody reads.

    Loses it:

        def layer(a: "f8e4m3fn[4,64,256]", w: "bf16[128,256]", a_scale, b_scale):
            def multiply(one):
                return scaled_dot(one, quantize(w, b_scale), a_scale, b_scale)

            return jax.lax.map(multiply, a)

    Keeps it:

        def layer(a: "f8e4m3fn[4,64,256]", w: "bf16[128,256]", a_scale, b_scale):
            b = quantize(w, b_scale)
            return jax.lax.map(lambda one: scaled_dot(one, b, a_scale, b_scale), a)
    """
    return _quantizing(m, is_same_in_each_iteration)


@rule(
    "quantized-twice",
    lost=Lost.DUPLICATE,
    reason="jax.checkpoint has the {side} operand quantized again for the backward pass",
    fix=(
        "save the FP8 arrays, which are a half or a quarter of the wide ones: checkpoint_name(q, "
        "'fp8') in the forward pass, and jax.checkpoint(layer, "
        "policy=jax.checkpoint_policies.save_only_these_names('fp8')); or, where memory is scarcer "
        "than time, leave it"
    ),
    source="the program: jax.checkpoint saves a layer's arguments, and computes all else again",
)
def quantized_twice(m: Matmul) -> list[Found]:
    """jax.checkpoint saves wide arrays, and quantizes them again for the gradients.

    Without a policy jax.checkpoint saves the arguments of a function, and computes the rest again
    in the backward pass: also the codes that the gradients' matmuls read. A kernel then reads the
    wide array once more. If the codes have a name, a policy can save them instead. They need a half
    of the memory of bfloat16, a quarter of that of float32, and what is only computed for them is
    not computed again either.

    Loses it:

        from jax.ad_checkpoint import checkpoint_name

        @jax.custom_vjp
        def linear(x, w, scale):
            return forward(x, w, scale)[0]

        def forward(x, w, scale):
            x, w = (checkpoint_name(quantize(v, scale), "fp8") for v in (x, w))
            return scaled_dot(x, w, scale, scale, bf16), (x, w, scale)

        def backward(saved, g):
            x, w, scale = saved
            g = quantize(g, scale)
            dx = scaled_dot(g, w.T, scale, scale, bf16)
            return dx, scaled_dot(g.T, x.T, scale, scale, bf16), jnp.zeros_like(scale)

        linear.defvjp(forward, backward)

        def layer(x: "bf16[64,256]", w: "bf16[128,256]", scale: "f32[]", g: "bf16[64,128]"):
            y, pull = jax.vjp(jax.checkpoint(linear), x, w, scale)
            return y, pull(g)

    Keeps it:

        from jax.ad_checkpoint import checkpoint_name

        @jax.custom_vjp
        def linear(x, w, scale):
            return forward(x, w, scale)[0]

        def forward(x, w, scale):
            x, w = (checkpoint_name(quantize(v, scale), "fp8") for v in (x, w))
            return scaled_dot(x, w, scale, scale, bf16), (x, w, scale)

        def backward(saved, g):
            x, w, scale = saved
            g = quantize(g, scale)
            dx = scaled_dot(g, w.T, scale, scale, bf16)
            return dx, scaled_dot(g.T, x.T, scale, scale, bf16), jnp.zeros_like(scale)

        linear.defvjp(forward, backward)
        names = jax.checkpoint_policies.save_only_these_names("fp8")

        def layer(x: "bf16[64,256]", w: "bf16[128,256]", scale: "f32[]", g: "bf16[64,128]"):
            y, pull = jax.vjp(jax.checkpoint(linear, policy=names), x, w, scale)
            return y, pull(g)
    """
    return _quantizing(m, lambda i: is_recomputed(op_name(i)))


# Kernels that HLO does not tell of ----------------------------------------------------------------


def _call_inside(i: Instruction) -> Instruction:
    """The one call of a fusion that gives it slices of its operands, as in a loop; else `i`."""
    computation = fused(i)
    calls = [j for j in computation or () if j.opcode == "custom-call"]
    return calls[0] if len(calls) == 1 else i


class Opaque:
    """A kernel that is no instruction of HLO's, and what its code says that it multiplies."""

    def __init__(self, line: Line, ptx: Mapping[str, str]):
        i = _call_inside(line.kernel.instruction)
        self.instruction, self.target = i, i.custom_call_target or i.opcode
        self.ptx = of_kernel(str(setting(i, "name")), ptx) if "triton" in self.target else ""
        code = self.ptx
        if self.target.startswith("mosaic_gpu"):
            # Mosaic GPU hands XLA MLIR's bytecode, which has each multiply instruction in words.
            code = i.attributes.get("backend_config", "")
        self.types = instructions(code)

    @property
    def wide(self) -> str:
        """The types that it multiplies and that are neither FP8 nor FP4."""
        return " and ".join(name for name in self.types if not is_narrow(name))

    @property
    def is_known(self) -> bool:
        """Whether all that it multiplies is FP8 or FP4, or nothing is."""
        if self.types:
            return not self.wide
        # Which a loop may sum, without an instruction for matrices
        products = re.search(r"\b(fma|mul)\.(\w{1,30}\.){0,20}b?f(16|32|64)", self.ptx)
        return bool(self.ptx) and not products


@rule(
    "triton-kernel",
    lost=Lost.FP8,
    reason="the kernel is written in Triton, not made by XLA, and multiplies {types}",
    fix=(
        "leave the matmul to XLA, as jax.lax.dot; or, on B200 and later, give the kernel's dots "
        "FP8 operands: on Hopper they are multiplied in f16"
    ),
    source="the kernel's PTX: its mma instruction",
)
def triton_kernel(kernel: Opaque) -> Found | None:
    """A kernel written in Triton, as by Pallas, multiplies a wide type.

    XLA does not look into a kernel that the program brings along, so its rewriter changes nothing
    there. The kernel's PTX shows which type it multiplies. Triton, as JAX compiles it for Hopper,
    converts FP8 operands of a dot to float16 and multiplies these. So FP8 arrays save bytes, but no
    time of the tensor cores. For a B200 it multiplies FP8.

    Loses it:

        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        def layer(a: "f8e4m3fn[64,64]", b: "f8e4m3fn[64,64]"):
            def kernel(a, b, d):
                d[...] = jnp.dot(a[...], b[...].T, preferred_element_type=f32)

            d = jax.ShapeDtypeStruct((64, 64), f32)
            options = triton.CompilerParams()
            return pl.pallas_call(kernel, out_shape=d, compiler_params=options)(a, b)

    Keeps it:

        def layer(a: "f8e4m3fn[64,64]", b: "f8e4m3fn[64,64]"):
            return jax.lax.dot(a, b.T, preferred_element_type=f32)
    """
    return found_if(kernel.types and kernel.ptx, types=kernel.wide)


@rule(
    "mosaic-kernel",
    lost=Lost.FP8,
    reason="the kernel is written in Mosaic GPU, and multiplies {types}",
    fix=(
        "give its wgmma FP8 arrays, the right one as [N, K] and transposed in the call of wgmma; "
        "or leave the matmul to XLA, as jax.lax.dot"
    ),
    source="the kernel's MLIR: its wgmma, mma or tcgen05.mma instruction",
)
def mosaic_kernel(kernel: Opaque) -> Found | None:
    """A kernel written in Mosaic GPU, as by Pallas, multiplies a wide type.

    XLA does not look into a kernel that the program brings along, so its rewriter changes nothing
    there. A Mosaic GPU kernel multiplies with Hopper's wgmma instruction, in the type of the arrays
    that it is given. If the arrays are FP8, wgmma needs both with K last, so the right one is
    stored as [N, K] and transposed in the call. A row of 128 bytes, as in SwizzleTransform, is then
    128 elements, not 64.

    Loses it:

        import inspect

        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as mosaic

        parameters = inspect.signature(mosaic.kernel).parameters
        out = "out_type" if "out_type" in parameters else "out_shape"  # as JAX 0.10 calls it

        def layer(x: "bf16[64,64]", y: "bf16[64,128]"):
            def kernel(x, y, d):
                def multiply(tile_x, tile_y, total, barrier):
                    for given, tile in ((x, tile_x), (y, tile_y)):
                        mosaic.copy_gmem_to_smem(given, tile, barrier)
                        mosaic.barrier_wait(barrier)
                    mosaic.wgmma(total, tile_x, tile_y)
                    return total[...]

                tiled = mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128)
                tiles = [mosaic.SMEM(v.shape, v.dtype, transforms=tiled) for v in (x, y)]
                total = mosaic.ACC((64, 128), f32)
                d[...] = pl.run_scoped(multiply, *tiles, total, mosaic.Barrier())

            d = jax.ShapeDtypeStruct((64, 128), f32)
            return mosaic.kernel(kernel, **{out: d}, grid=(1,), grid_names=("i",))(x, y)

    Keeps it:

        import inspect

        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as mosaic

        parameters = inspect.signature(mosaic.kernel).parameters
        out = "out_type" if "out_type" in parameters else "out_shape"  # as JAX 0.10 calls it

        def layer(x: "f8e4m3fn[64,128]", y: "f8e4m3fn[128,128]"):
            def kernel(x, y, d):
                def multiply(tile_x, tile_y, total, barrier):
                    for given, tile in ((x, tile_x), (y, tile_y)):
                        mosaic.copy_gmem_to_smem(given, tile, barrier)
                        mosaic.barrier_wait(barrier)
                    mosaic.wgmma(total, tile_x, tile_y.T)
                    return total[...]

                tiled = mosaic.TilingTransform((8, 128)), mosaic.SwizzleTransform(128)
                tiles = [mosaic.SMEM(v.shape, v.dtype, transforms=tiled) for v in (x, y)]
                total = mosaic.ACC((64, 128), f32)
                d[...] = pl.run_scoped(multiply, *tiles, total, mosaic.Barrier())

            d = jax.ShapeDtypeStruct((64, 128), f32)
            return mosaic.kernel(kernel, **{out: d}, grid=(1,), grid_names=("i",))(x, y)
    """
    return found_if(kernel.types and not kernel.ptx, types=kernel.wide)


@rule(
    "wide-convolution",
    lost=Lost.FP8,
    reason=(
        "a convolution runs in {dtype}, by cuDNN: whether XLA could run it in FP8 is not checked "
        "here"
    ),
    fix="leave it, or write it as a matmul of patches",
    source="XLA's conv_rewriter.cc",
)
def convolution(kernel: Opaque) -> Found | None:
    """A convolution of wide types.

    cuDNN runs convolutions, and XLA rewrites them by other rules than matmuls. fp8lens knows only
    the rules of matmuls. So it says that the convolution is wide, but not why. A convolution is
    also a matmul of its patches: for each pixel of the result, the pixels under the filter are one
    row. Those rows are copies, so with a 3 x 3 filter the matmul reads 9 times as many elements.

    Loses it:

        def layer(x: "bf16[1,16,34,34]", w: "bf16[16,16,3,3]"):
            return jax.lax.conv(x, w, (1, 1), "VALID")

    Keeps it:

        def layer(x: "f8e4m3fn[34,34,16]", w: "f8e4m3fn[16,144]", a_scale, b_scale):
            near = [x[i : i + 32, j : j + 32] for i in range(3) for j in range(3)]
            patches = jnp.concatenate(near, -1).reshape(32 * 32, 9 * 16)
            return scaled_dot(patches, w, a_scale, b_scale)
    """
    named = ("convForward", "convBackward")
    if kernel.instruction.opcode != "convolution" and not any(n in kernel.target for n in named):
        return None
    dtype = operand(kernel.instruction, 0).shape.dtype
    return found_if(not is_fp8(dtype), dtype=dtype)


@rule(
    "opaque-kernel",
    lost=Lost.KERNEL,
    reason="unknown: what this kernel multiplies, if anything, HLO does not tell ({target})",
    fix=(
        "look up what {target} multiplies, in the documentation of its library or in its code; "
        "assert_fp8_gemms(..., allow='opaque') checks the other matmuls"
    ),
    source="none found",
)
def opaque_kernel(kernel: Opaque) -> Found | None:
    """HLO does not show what a kernel of a library, or of the program itself, multiplies.

    A compiled program calls libraries such as cuSOLVER, cuFFT and cuDNN by a name. HLO does not
    show what the library does then. It may multiply matrices, in one type or another, or none.
    fp8lens says neither that such a program is in FP8 nor that it is not: there may be nothing to
    fix.

    Loses it:

        def layer(a: "f8e4m3fn[128,256]", b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return jax.lax.linalg.cholesky(d, symmetrize_input=False)
    """
    return Found(target=kernel.target)


#: Tried in this order, for a kernel that is not known to multiply FP8 alone.
OPAQUE = (triton_kernel, mosaic_kernel, convolution, opaque_kernel)
