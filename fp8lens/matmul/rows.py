"""The matrix multiplications of a program, read from its HLO: what each multiplies, in which type,
and who runs it.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fp8lens.formats import is_fp8, is_narrow
from fp8lens.hlo.dataflow import callers
from fp8lens.hlo.ops import DOTS, ELEMENTWISE, LAYOUT
from fp8lens.hlo.origin import layer, op_name, primitive, source_line
from fp8lens.hlo.parse import Computation, HloModule, HloParseError, Instruction, Shape
from fp8lens.hlo.program import fused, fusion_body, fusion_kind, results, setting
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import dimensions, minor_to_major, operand, reducer
from fp8lens.hlo.walk import walk

FP8_CALL = "__cublas$lt$matmul$f8"
#: The epilogue of a call of another library's, or of somebody's own kernel.
NOT_SEEN = "not seen"
#: A block-scaled dot as JAX writes it, and the call that XLA makes of it where a chip has one.
BLOCK_SCALED_DOT = "__op$block_scaled_dot"
_CUDNN_BLOCK_SCALED = "__cudnn$blockScaledDot"
# How the names of Transformer Engine's calls for JAX begin; and of those that multiply matrices, as
# cuBLASLt and cuDNN do it (gemm.cpp and attention.cpp in transformer_engine/jax/csrc/extensions).
ENGINE = "te_"
ENGINE_GEMM, ENGINE_ATTENTION = "te_gemm", "te_fused_attn"
ENGINE_MULTIPLIES = (ENGINE_GEMM, ENGINE_ATTENTION, "te_grouped_gemm")
_MULTIPLY = DOTS | {"fusion", "custom-call"}
_PASS_ON = LAYOUT | {"convert", "broadcast", "tuple", "get-tuple-element"}
# cuBLASLt rounds f32 operands to TF32 unless more is asked for; so does Triton.
_TF32 = frozenset(("DEFAULT", "HIGH"))
_PRECISIONS = ("DEFAULT", "HIGH", "HIGHEST")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRow:
    """One matrix multiplication, [m, k] x [k, n], `batch` times. Dtypes are named as in HLO:
    "f8e4m3fn", "bf16", ...

    `lhs_dtype` and `rhs_dtype` are the operands' in memory; `math_dtype` is what the hardware
    multiplies: "tf32" where f32 is rounded to it; of two FP8 types, the lhs's; FP8 only where both
    operands are; "unknown" where nothing tells. `library` is "cublasLt", "cublas", "triton",
    "cudnn", or "kernel" for a plain kernel of XLA's own; of a call of another library or of
    somebody's own kernel it is the call's target, such as "te_gemm_v2_ffi". `epilogue` is
    cuBLASLt's name ("DEFAULT": none); of a kernel XLA generated, the opcodes that follow the dot in
    it; NOT_SEEN of such another call. `amax`: it also returns max(abs(result)). `beta`: factor
    of an added matrix. `outside`: kernels on its operands' and its result's way that would not have
    to run, had the call taken their work. `count`: how often it runs, None where a loop's trip
    count is not known; a branch counts as taken. `scales`: which of "a", "b", "d" are multiplied
    in. `tile`: Triton's, as the program says it. M, N and K are those of the kernel, padding
    included.
    """

    m: int
    n: int
    k: int
    batch: int
    lhs_dtype: str
    rhs_dtype: str
    math_dtype: str
    library: str
    epilogue: str = "DEFAULT"
    amax: bool = False
    beta: float = 0.0
    out_dtype: str
    outside: tuple[str, ...] = ()
    source: str
    op_name: str
    count: int | None = 1
    name: str
    alpha: float = 1.0
    scales: tuple[str, ...] = ()
    precision: str = "DEFAULT"
    algorithm: str = ""
    tile: str = ""
    outside_bytes: int = 0
    place: str = dataclasses.field(default="", repr=False, compare=False)
    # Whether JAX made it by transposing a matmul that runs in FP8
    is_transposed_fp8: bool = dataclasses.field(default=False, repr=False, compare=False)
    instruction: Instruction = dataclasses.field(repr=False, compare=False)

    @property
    def flops(self) -> int:
        """2*M*N*K*batch, of one run; four times that of complex numbers."""
        each = 8 if self.lhs_dtype in ("c64", "c128") else 2
        return each * self.m * self.n * self.k * self.batch

    @property
    def fp8_in_memory(self) -> int:
        """The bytes of operands in FP8, of one run, that the hardware multiplies in another type:
        in 16 bits they would be as many more.
        """
        if self.is_fp8:
            return 0
        sides = (self.m * self.k, self.lhs_dtype), (self.k * self.n, self.rhs_dtype)
        read = self.batch * sum(size for size, dtype in sides if is_fp8(dtype))
        i = self.instruction
        given = [shape for n in range(len(i.operands)) for shape in results(operand(i, n))]
        # A kernel may repeat what it reads, as rows that it gathers.
        return min(read, sum(shape.size for shape in given if is_fp8(shape.dtype)))

    @property
    def title(self) -> str:
        """The instruction's name and the sizes."""
        return f"{self.name} [{self.m} x {self.n} x {self.k}]"

    @property
    def path(self) -> str:
        """The layer that the matmul belongs to, as `op_name` tells it: the names of the modules of
        Flax's linen, or of jax.named_scope. If several weights have the same layer and line, as in
        Flax's NNX, which names no scopes, it is the argument that is the weight. Then the pass:
        "backward (dgrad)" makes the gradient of an input, "backward (wgrad)" that of a weight.
        """
        return self.place or layer(self.op_name)

    @property
    def is_seen(self) -> bool:
        """Whether what runs it is known here: not another library's call, or somebody's own."""
        return self.epilogue != NOT_SEEN

    @property
    def is_told(self) -> bool:
        """Whether it is known what it multiplies: HLO says it, or the settings of Transformer
        Engine's call."""
        return self.is_seen or self.library.startswith((ENGINE_GEMM, ENGINE_ATTENTION))

    @property
    def is_refused(self) -> bool:
        """Whether a GPU refuses to run it, although it compiles without one: XLA hands cuBLASLt
        only the combinations of types in its cuda_blas_lt.cc, and looks there when the call
        runs."""
        types = (self.lhs_dtype, self.rhs_dtype, self.out_dtype)
        return self.library == "cublasLt" and types == ("f8e4m3fn", "f8e4m3fn", "f8e5m2")

    @property
    def is_fp8(self) -> bool:
        """Whether the hardware multiplies floats of 8 bits, or of 4 with the scales of blocks."""
        return is_narrow(self.math_dtype)


def gemm_config(call: Instruction) -> dict:
    """The part of a cuBLASLt call's `backend_config` that describes the matmul: epilogue, alpha,
    beta, amax, ...
    """
    return _config(call)["gemm_backend_config"]


def _config(i: Instruction) -> dict:
    """A backend_config that must be a dict: TypeError where it is none."""
    config = i.backend_config
    if not isinstance(config, dict):
        raise TypeError(f"backend_config is {config!r}")
    return config


@remembered
def matmuls(instruction: Instruction) -> tuple[GemmRow, ...]:
    """The matrix multiplications that one instruction runs; `outside` is empty and `count` 1. Where
    K is 1 and no library multiplies, there is nothing to sum: that is elementwise work, and no
    matmul. Raises HloParseError where it says that it multiplies, but not what.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in _MULTIPLY:
        return ()
    try:
        rows = _matmuls(instruction, opcode)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, HloParseError):
            raise
        raise instruction.error(
            f"this says that it multiplies matrices, but not which ({error!r})"
        ) from error
    return tuple(row for row in rows if row.k != 1 or row.library != "kernel")


def is_known(i: Instruction) -> bool:
    """Whether a kernel multiplies matrices, and it is seen how."""
    return any(row.is_seen for row in matmuls(i))


def _matmuls(i: Instruction, opcode: str) -> tuple[GemmRow, ...]:
    if opcode in DOTS:
        return (_dot(i, i, "kernel"),)
    if opcode == "fusion":
        return _in_fusion(i)
    target = i.custom_call_target or ""
    if target.startswith(("__cublas$lt$matmul", "__cublas$gemm")):
        return (_cublas(i, target),)
    if target in (BLOCK_SCALED_DOT, _CUDNN_BLOCK_SCALED):
        return (_block_scaled(i, "cudnn" if target == _CUDNN_BLOCK_SCALED else "kernel"),)
    if target.startswith("__cudnn$fmha"):
        return _attention(i)
    said = _engines_settings(i) if target.startswith(ENGINE) else {}
    if target.startswith(ENGINE_GEMM) and "lhs_axis_boundary" in said:
        return (_engines_gemm(i, target, said),)
    if target.startswith(ENGINE_ATTENTION) and "attn_heads" in said:
        return _engines_attention(i, target, said)
    return _another_librarys(i, target)


def _sizes(lhs: Shape, rhs: Shape, numbers: Mapping) -> tuple[int, int, int, int]:
    """m, n, k, batch of two operands, from dimension numbers as backend_config and dot's attributes
    name them.
    """

    def of(side: str, what: str) -> set[int]:
        found = [int(d) for d in numbers.get(f"{side}_{what}_dimensions", ())]
        if len({*found}) < len(found) or min(found, default=0) < 0:
            raise ValueError(f"{side}_{what}_dimensions has a dimension twice, or a negative one")
        return {*found}

    def free(side: str, shape: Shape) -> int:
        bound = of(side, "contracting") | of(side, "batch")
        return math.prod(max(size, 1) for d, size in enumerate(shape.dims) if d not in bound)

    k = math.prod(max(lhs.dims[d], 1) for d in of("lhs", "contracting"))
    batch = math.prod(max(lhs.dims[d], 1) for d in of("lhs", "batch"))
    m = free("lhs", lhs)
    n = free("rhs", rhs)
    return m, n, k, batch


def _common(*dtypes: str) -> str:
    """The type in which operands of these types can be multiplied: FP8, the first one's, only where
    all are FP8; else the widest of those that are not.
    """
    wide = [dtype for dtype in dtypes if not is_fp8(dtype)]
    return max(wide, key=lambda dtype: Shape(dtype).bits) if wide else dtypes[0]


def _math(given: str, out: str, precision: str, algorithm: str) -> str:
    """The type the hardware multiplies operands of type `given` in."""
    asked = re.match(r"ALG_DOT_(BF16|TF32|F16|F32|F64)_", algorithm)
    if asked and given in ("f32", "f64"):
        return asked[1].lower()
    # XLA's GetBlasComputationType, in xla/service/gpu/matmul_utils.cc: TF32 for f32 to f32, at
    # DEFAULT and HIGH.
    rounds = precision in _TF32 and given == out
    return "tf32" if rounds and given in ("f32", "c64") else given


def _row(
    i: Instruction,
    sizes: tuple[int, int, int, int],
    origin: Instruction | None = None,
    **fields: Any,
) -> GemmRow:
    """The row of a matmul that the kernel `i` runs; `origin` is what JAX wrote, inside of it."""
    origin = origin or i
    m, n, k, batch = sizes
    return GemmRow(
        m=m,
        n=n,
        k=k,
        batch=batch,
        name=i.name,
        source=source_line(origin) or source_line(i),
        op_name=op_name(origin) or op_name(i),
        instruction=i,
        **fields,
    )


def _cublas(i: Instruction, target: str) -> GemmRow:
    config, computation = gemm_config(i), i.computation
    lhs, rhs = (computation[name].shape for name in i.operands[:2])
    settings = config.get("precision_config", {})
    precision = max(settings.get("operand_precision") or ["DEFAULT"], key=_PRECISIONS.index)
    algorithm = settings.get("algorithm", "ALG_UNSET").replace("ALG_UNSET", "")
    result = results(i)[0]
    return _row(
        i,
        _whole(i, result, lhs, rhs, config["dot_dimension_numbers"]),
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        math_dtype=_math(_common(lhs.dtype, rhs.dtype), result.dtype, precision, algorithm),
        library="cublasLt" if "$lt$" in target else "cublas",
        out_dtype=result.dtype,
        epilogue=str(config.get("epilogue", "DEFAULT")),
        amax=bool(config.get("damax_output", False)),
        beta=float(config.get("beta", 0)),
        alpha=float(config.get("alpha_real", 1)),
        scales=_call_scales(i, result.dtype) if target == FP8_CALL else (),
        precision=precision,
        algorithm=algorithm,
    )


def _call_scales(call: Instruction, out: str) -> tuple[str, ...]:
    """The scales that an FP8 call multiplies in."""
    # Its scalar operands are A's and B's scale, then D's, with C's before that of four. Where the
    # program has none, XLA passes the constant 1.
    operands = [call.computation[name] for name in call.operands[2:]]
    scalars = [i for i in operands if i.shape.size == 1]
    named = zip("abd" if len(scalars) < 4 else "abcd", scalars, strict=False)
    # XLA's emitter passes D's scale on for an FP8 result alone.
    taken = "abd" if is_fp8(out) else "ab"
    return tuple(letter for letter, i in named if letter in taken and i.literal not in ("1", "{1}"))


def _dot_settings(dot: Instruction) -> tuple[str, str]:
    """Precision and algorithm of a dot."""
    asked = dot.attributes.get("operand_precision", "").strip("{}").upper().split(",")
    precision = max((p.strip() or "DEFAULT" for p in asked), key=_PRECISIONS.index)
    algorithm = dot.attributes.get("algorithm", "")
    return precision, f"ALG_{algorithm.upper()}" if algorithm.startswith("dot_") else ""


def _dot(i: Instruction, dot: Instruction, library: str, tile: str = "") -> GemmRow:
    """The row of a dot that the kernel `i` runs, `i` itself or inside it."""
    numbers = {
        f"{side}_{what}_dimensions": dimensions(dot, f"{side}_{what}_dims")
        for side in ("lhs", "rhs")
        for what in ("contracting", "batch")
    }
    lhs, rhs = (dot.computation[name].shape for name in dot.operands[:2])
    precision, algorithm = _dot_settings(dot)
    # A dot of a program not yet compiled may still get them.
    tensor_cores = library != "kernel" or i is dot
    given = _common(lhs.dtype, rhs.dtype)
    math_dtype = _math(given, dot.shape.dtype, precision, algorithm) if tensor_cores else given
    compiled = i.computation.module.attributes.get("is_scheduled") == "true"
    if library == "kernel" and compiled and is_narrow(given):
        math_dtype = "unknown"  # no GPU multiplies FP8 or FP4 outside of its tensor cores
    after: list[str] = []
    stored_lhs, stored_rhs = lhs.dtype, rhs.dtype
    if dot is not i:
        after = _following(dot)
        stored_lhs, stored_rhs = (_stored(dot.computation, name) for name in dot.operands[:2])
    return _row(
        i,
        _whole(dot, dot.shape, lhs, rhs, numbers),
        dot,
        lhs_dtype=stored_lhs,
        rhs_dtype=stored_rhs,
        math_dtype=math_dtype,
        library=library,
        out_dtype=results(i)[0].dtype,
        tile=tile,
        epilogue="+".join(after) or "DEFAULT",
        precision=precision,
        algorithm=algorithm,
        scales=("a", "b") if dot.opcode == "scaled-dot" else (),
    )


def _stored(computation: Computation, name: str) -> str:
    """The dtype in memory of what a fusion's dot multiplies: of the largest parameter that its
    operand comes from, masks left out.
    """
    read = computation[name]
    made_of = walk([read], lambda i: map(computation.__getitem__, i.operands))
    given = [i.shape for i in made_of if i.opcode == "parameter" and i.shape.dtype != "pred"]
    return max(given or [read.shape], key=lambda shape: shape.size).dtype


@remembered
def _following(dot: Instruction) -> list[str]:
    """Opcodes of what a kernel computes of its dot's result, in order, without what only names or
    moves it.
    """
    found, made = [], {dot.name}
    for i in dot.computation.instructions[dot.index + 1 :]:
        if not made.isdisjoint(i.operands):
            made.add(i.name)
            if i.opcode not in _PASS_ON:
                found.append(i.opcode)
    return found


def _in_fusion(i: Instruction) -> tuple[GemmRow, ...]:
    """The matmuls of a fusion: those of its dots, of a library's call, or spelled out."""
    computation = fusion_body(i)
    parts = _parts(computation)
    # A library's call reads a slice of its operand, or writes one, in place.
    calls = [row for j in parts if j.opcode == "custom-call" for row in matmuls(j)]
    if calls:
        return tuple(dataclasses.replace(row, name=i.name, instruction=i) for row in calls)
    dots = [j for j in parts if j.opcode in DOTS]
    kind = fusion_kind(i)
    if not dots:
        return _expanded(i, computation)
    if "triton" not in kind:
        return tuple(_dot(i, dot, "cudnn" if "cudnn" in kind else "kernel") for dot in dots)
    tile = _tile(_config(i)["fusion_backend_config"], dots[0])
    return tuple(_dot(i, dot, "triton", tile) for dot in dots)


@remembered
def _parts(computation: Computation) -> list[Instruction]:
    """What a fused computation, and the fusions in it, multiply with."""
    inner = walk([computation], lambda c: (fusion_body(j) for j in c if j.opcode == "fusion"))
    return [j for c in inner for j in c if j.opcode in _MULTIPLY]


def _tile(settings: Mapping, dot: Instruction) -> str:
    """Rows x columns x depth of the block of the result that one thread block computes."""
    if gemm := settings.get("triton_gemm_config"):
        return "x".join(str(gemm[key]) for key in ("block_m", "block_n", "block_k") if key in gemm)
    config = settings.get("block_level_fusion_config", {})
    block = config.get("output_tiles", [{}])[0].get("sizes", [])
    depth = setting(dot, "sizes") or []
    return "x".join(str(size) for size in [*block[-2:], *depth[-1:]])


def _whole(
    made: Instruction, result: Shape, lhs: Shape, rhs: Shape, numbers: Mapping
) -> tuple[int, int, int, int]:
    """The same as `_sizes`, K whole: XLA may split it, and have a kernel multiply its parts as a
    batch, which another kernel adds up. A result has so many dimensions of a batch first.
    """
    m, n, k, parts = sizes = _sizes(lhs, rhs, numbers)
    total = sums(made.computation.module).get(made) if parts > 1 else None
    if total is None or not total.is_xlas:
        return sizes
    added_up = total.length(result, range(len(numbers.get("lhs_batch_dimensions", ()))))
    return m, n, k * added_up, parts // added_up


def _expanded(i: Instruction, computation: Computation) -> tuple[GemmRow, ...]:
    """The matmuls that a kernel multiplies and adds up without a dot, or leaves to another to add
    up: XLA spells out dots with vectors, and a program may write one so.
    """
    found = []
    for product in products(computation):
        lhs, rhs = (_stored(computation, side.name) for side in (product.lhs, product.rhs))
        row = _row(
            i,
            product.sizes,
            product.multiply,
            lhs_dtype=lhs,
            rhs_dtype=rhs,
            math_dtype=product.multiply.shape.dtype,
            library="kernel",
            out_dtype=results(i)[0].dtype,
        )
        found.append(row)
    return tuple(found)


def is_sum_of_products(row: GemmRow) -> bool:
    """Whether the program has no dot for a matmul: it multiplies, and adds the products up."""
    computation = fused(row.instruction)
    if row.library != "kernel" or computation is None:
        return False
    sizes = (row.m, row.n, row.k, row.batch)
    return any(product.is_written for product in products(computation) if product.sizes == sizes)


def _engines_settings(i: Instruction) -> dict[str, str]:
    """What a call of Transformer Engine's is told, by name: an MLIR dictionary, perhaps with others
    in it.
    """
    return dict(re.findall(r"(\w+) = (\w+)", str(i.backend_config)))


def _engines_gemm(i: Instruction, target: str, said: Mapping[str, str]) -> GemmRow:
    """The row of Transformer Engine's GEMM: its first and third operand, each with the scales after
    it, as matrices whose rows are the dimensions before the boundary.
    """
    lhs, rhs = (operand(i, n).shape for n in (0, 2))

    def matrix(shape: Shape, side: str) -> tuple[int, int]:
        boundary = int(said[f"{side}_axis_boundary"])
        rows, columns = math.prod(shape.dims[:boundary]), math.prod(shape.dims[boundary:])
        return (columns, rows) if said[f"{side}_transposed"] == "true" else (rows, columns)

    (m, k), (rows, n) = matrix(lhs, "lhs"), matrix(rhs, "rhs")
    if rows != k:
        raise ValueError(f"[{m}, {k}] by [{rows}, {n}]")
    return _row(
        i,
        (m, n, k, 1),
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        math_dtype=_common(lhs.dtype, rhs.dtype),
        library=target,
        out_dtype=results(i)[0].dtype,
        epilogue=NOT_SEEN,
        # cuBLASLt's fast sums are off if it is true: common/gemm/cublaslt_gemm.cu
        precision="HIGHEST" if said["use_split_accumulator"] == "true" else "DEFAULT",
        scales=("a", "b") if said["scaling_mode"] != "0" else (),
    )


def _engines_attention(i: Instruction, target: str, said: Mapping[str, str]) -> tuple[GemmRow, ...]:
    """The rows of Transformer Engine's fused attention, which is cuDNN's."""
    m, n = int(said["q_max_seqlen"]), int(said["kv_max_seqlen"])
    depth, values = int(said["qk_head_dim"]), int(said["v_head_dim"])
    sizes = _of_attention(m, n, depth, values, "backward" in target)
    batch = int(said["input_batch"]) * int(said["attn_heads"])
    given, made = operand(i, 0).shape.dtype, results(i)[0].dtype
    fields: dict[str, Any] = {"lhs_dtype": given, "rhs_dtype": given, "math_dtype": given}
    fields |= {"library": target, "out_dtype": made, "epilogue": NOT_SEEN}
    return tuple(_row(i, (*each, batch), **fields) for each in sizes)


def _another_librarys(i: Instruction, target: str) -> tuple[GemmRow, ...]:
    """The row of a call whose kernel is not known here, of two FP8 matrices, if their shapes and
    the result's tell M, N and K.
    """
    given = [i.computation[name].shape for name in i.operands]
    matrices = [s for s in given if is_narrow(s.dtype) and len(s.dims) > 1 and s.size > 1]
    written = results(i)
    if len(matrices) != 2 or not written:
        return ()
    lhs, rhs = matrices
    told = {
        (m, n, k)
        for m, n in _halves(written[0])
        for rows, k in _both_ways(lhs)
        if rows == m and (n, k) in _both_ways(rhs)
    }
    if len(told) != 1:
        return ()
    multiplied = _common(lhs.dtype, rhs.dtype) if target.startswith(ENGINE_GEMM) else "unknown"
    row = _row(
        i,
        (*told.pop(), 1),
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        math_dtype=multiplied,
        library=target,
        out_dtype=written[0].dtype,
        epilogue=NOT_SEEN,
    )
    return (row,)


def _halves(shape: Shape) -> list[tuple[int, int]]:
    """An array as a matrix: its first dimensions are rows, and the rest columns."""
    dims = shape.dims
    return [(math.prod(dims[:d]), math.prod(dims[d:])) for d in range(1, len(dims))]


def _both_ways(shape: Shape) -> set[tuple[int, int]]:
    """The same, and transposed."""
    halves = _halves(shape)
    return {*halves, *((columns, rows) for rows, columns in halves)}


def _block_scaled(i: Instruction, library: str) -> GemmRow:
    """The row of a call that multiplies with a scale for each block of an operand."""
    lhs, rhs = (i.computation[name].shape for name in i.operands[:2])
    batch = [0] if len(lhs.dims) == 3 else []
    return _row(
        i,
        _sizes(lhs, rhs, _alike([len(lhs.dims) - 1], batch)),
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        math_dtype=_common(lhs.dtype, rhs.dtype),
        library=library,
        out_dtype=results(i)[0].dtype,
        scales=("a", "b"),
    )


def _attention(i: Instruction) -> tuple[GemmRow, ...]:
    """cuDNN's fused attention: two matmuls forward; backward, the first again and two for each
    one's operands.
    """
    config = _config(i)["cudnn_fmha_backend_config"]
    q, k, v = (i.computation[name].shape for name in i.operands[:3])
    backward = "Backward" in (i.custom_call_target or "")
    numbers = config["bmm1_grad_gemm2_dot_dimension_numbers" if backward else _FORWARD]
    if backward:  # of dQ = dS K: K's contracting dimension is its length
        (length,) = numbers["rhs_contracting_dimensions"]
        batch_dims = [int(d) for d in numbers["rhs_batch_dimensions"]]
        numbers = _alike(set(range(len(k.dims))) - {int(length), *batch_dims}, batch_dims)
    m, n, depth, batch = _sizes(q, k, numbers)
    # Several queries' heads may share one of the keys.
    shared = math.prod(k.dims[int(d)] for d in numbers["rhs_batch_dimensions"])
    values = v.size // (shared * n)
    sizes = _of_attention(m, n, depth, values, backward)
    fields: dict[str, Any] = {"lhs_dtype": q.dtype, "rhs_dtype": k.dtype, "library": "cudnn"}
    fields |= {"math_dtype": _common(q.dtype, k.dtype, v.dtype), "out_dtype": results(i)[0].dtype}
    return tuple(_row(i, (*each, batch), **fields) for each in sizes)


def _of_attention(
    m: int, n: int, depth: int, values: int, backward: bool
) -> list[tuple[int, int, int]]:
    """The sizes of what attention multiplies, of m queries and n keys of that depth, and values of
    another.
    """
    if backward:
        return [(m, n, depth), (n, values, m), (m, n, values), (m, depth, n), (n, depth, m)]
    return [(m, n, depth), (m, values, n)]


_FORWARD = "bmm1_dot_dimension_numbers"


def _alike(contracting: Iterable[int], batch: Iterable[int]) -> dict[str, Iterable[int]]:
    """Dimension numbers that are the same of both operands, as `_sizes` takes them."""
    both = {"contracting": contracting, "batch": batch}
    return {f"{side}_{what}_dimensions": both[what] for side in ("lhs", "rhs") for what in both}


# Matmuls without a dot ----------------------------------------------------------------------------

# XLA makes multiplications and sums of dots with a vector, and programs write them. A kernel may
# add up what another has multiplied, as where XLA splits K. What a sum adds up is followed back to
# what is multiplied, through kernels, by where its elements lie in memory: views change an array's
# dimensions, and not this.

_FAR = 100  # instructions between a sum and what it adds up
_SAME_PLACES = frozenset("convert copy negate".split())

# A dimension in memory: how far apart its neighbours are, in elements, and that times its length.
# A dimension that a view makes of it lies within it, or it within that.
Span = tuple[int, int]


class Sum(NamedTuple):
    """What sums add up of an array, `spans`; `reduce` is the last of them."""

    reduce: Instruction
    spans: tuple[Span, ...]

    @property
    def is_xlas(self) -> bool:
        """Whether XLA has made it, of a dot: it has the dot's name, or none."""
        return not primitive(op_name(self.reduce)).startswith("reduce")

    def length(self, shape: Shape, dims: Iterable[int]) -> int:
        """How many elements are added up along some of the array's dimensions."""
        spans = _spans(shape)
        common = [_overlap(spans[d], summed) for d in dims for summed in self.spans]
        return math.prod(high // low for low, high in common if low < high)


class Product(NamedTuple):
    """A matmul as a multiplication and a sum: of `lhs` and `rhs`, which are factors of `multiply`.
    K is more than 1. `is_written`: the program has no dot for it.
    """

    multiply: Instruction
    lhs: Instruction
    rhs: Instruction
    sizes: tuple[int, int, int, int]  # M, N, K, batch
    is_written: bool


@remembered
def products(computation: Computation) -> tuple[Product, ...]:
    """The matmuls that a fused computation multiplies without a dot."""
    found = []
    for i in computation:
        total = sums(computation.module).get(i) if i.opcode == "multiply" else None
        if total is not None and (product := _product(i, total)):
            found.append(product)
    return tuple(found)


def _product(multiply: Instruction, total: Sum) -> Product | None:
    """The matmul of the two factors of a multiplication; None where it is none. Of a dot either
    may be a vector.
    """
    name = op_name(multiply)
    # XLA may give a dot the name of the transpose that it takes in.
    is_named = primitive(name).endswith("dot_general") or (
        primitive(name) == "transpose" and name == op_name(total.reduce)
    )
    is_of_dot = total.is_xlas and is_named
    lhs, rhs = operand(multiply, 0), operand(multiply, 1)
    shape, varies = multiply.shape, _varies(multiply.computation)
    rows, columns = varies[lhs.name], varies[rhs.name]
    both = rows & columns
    k = total.length(shape, both)
    batch = _length(shape, both) // k
    m, n = (_length(shape, d) // total.length(shape, d) for d in (rows - both, columns - both))
    is_written = min(m, n) > 1 and bool(re.match(r"b?f\d", shape.dtype))
    # Of M = N = 1 it is elementwise work and a sum, as in the gradient of a norm.
    if k == 1 or max(m, n) == 1 or not (is_of_dot or is_written):
        return None
    return Product(multiply, lhs, rhs, (m, n, k, batch), not is_of_dot)


def _length(shape: Shape, dims: Iterable[int]) -> int:
    return math.prod(shape.dims[d] for d in dims)


@remembered
def _varies(computation: Computation) -> dict[str, set[int]]:
    """Of each instruction, the dimensions along which it may vary: not those that it is broadcast
    along.
    """
    varies: dict[str, set[int]] = {}
    for i in computation:
        found = {d for d, size in enumerate(i.shape.dims) if size > 1}
        if i.opcode == "constant":
            found = set()
        elif i.opcode == "broadcast":
            found &= {d for n, d in enumerate(dimensions(i)) if n in varies[i.operands[0]]}
        elif i.opcode == "bitcast":
            given, made = _spans(operand(i, 0).shape), _spans(i.shape)
            kept = [given[d] for d in varies[i.operands[0]]]
            found = {d for d in found if any(_meet(made[d], span) for span in kept)}
        elif i.opcode == "copy" or i.opcode in ELEMENTWISE:
            found = set().union(*(varies[name] for name in i.operands))
        varies[i.name] = found
    return varies


# Sums ---------------------------------------------------------------------------------------------


@remembered
def sums(module: HloModule) -> dict[Instruction, Sum]:
    """What is added up, by the instruction that makes it, in whichever kernel. Where several sums
    add up one after the other, all of them together.
    """
    found: dict[Instruction, Sum] = {}
    for i in module:
        if not _adds_up(i):
            continue
        for made, spans in _added_up(i):
            if made not in found or _size(found[made].spans) < _size(spans):
                found[made] = Sum(i, spans)
    return found


def _added_up(total: Instruction) -> Iterator[tuple[Instruction, tuple[Span, ...]]]:
    """What a sum adds up, and along which spans of that. If it is a multiplication and no matmul,
    as of a product by a scale, also the multiplications behind its factors.
    """
    todo: list[tuple[Instruction, tuple[Span, ...]]] = [(total, ())]
    is_factor = False
    for at, spans in itertools.islice(todo, _FAR):
        if is_factor and _adds_up(at):
            continue  # another sum, which is asked about itself
        before, behind = _behind(at, spans)
        if before is not None:
            todo.append((before, behind))
            continue
        if not is_factor or at.opcode == "multiply":
            yield at, spans
        is_factor = True
        if at.opcode == "multiply" and _product(at, Sum(total, spans)) is None:
            todo += [(operand(at, n), spans) for n in (0, 1)]


def _adds_up(i: Instruction) -> bool:
    return i.opcode == "reduce" and len(i.operands) == 2 and reducer(i) == "add"


def _size(spans: Iterable[Span]) -> int:
    return math.prod(high // low for low, high in spans)


def _behind(i: Instruction, spans: tuple[Span, ...]) -> tuple[Instruction | None, tuple[Span, ...]]:
    """What an instruction only moves, converts or adds up, and the spans of that; None for what it
    computes otherwise.
    """
    if i.opcode == "parameter":
        return _given(i), spans
    if i.opcode in ("fusion", "get-tuple-element"):
        return _result(i), spans
    if i.opcode not in (*_SAME_PLACES, "bitcast", "transpose") and not _adds_up(i):
        return None, spans
    before = operand(i, 0)
    if i.opcode == "bitcast":
        return before, spans
    if i.opcode == "transpose":
        return before, _carried(spans, i.shape, before.shape, dimensions(i))
    # Of what is converted none of the dimensions is summed.
    summed = dimensions(i) if i.opcode == "reduce" else []
    kept = [d for d in range(len(before.shape.dims)) if d not in summed]
    own = [span for d, span in enumerate(_spans(before.shape)) if d in summed]
    return before, (*own, *_carried(spans, i.shape, before.shape, kept))


def _given(parameter: Instruction) -> Instruction | None:
    """What a fusion is given."""
    computation, number = parameter.computation, parameter.parameter_number
    around = callers(computation.module).get(computation.name, [])
    if len(around) != 1 or around[0].opcode != "fusion" or number is None:
        return None
    return operand(around[0], number)


def _result(i: Instruction) -> Instruction | None:
    """What makes a fusion's result, or the first result of a library's call."""
    element = 0
    if i.opcode == "get-tuple-element":
        element, i = i.element or 0, operand(i, 0)
        if i.opcode == "custom-call":
            return i if element == 0 else None
    if i.opcode != "fusion":
        return None
    root = fusion_body(i).root
    return operand(root, element) if root.opcode == "tuple" else root


def _carried(
    spans: Iterable[Span], after: Shape, before: Shape, was: Sequence[int]
) -> tuple[Span, ...]:
    """Spans of an array as those of what it is made of; `was` has, for each of its dimensions,
    which that was before.
    """
    of_after, of_before = _spans(after), _spans(before)
    found = []
    for d, whole in enumerate(of_after):
        stride = of_before[was[d]][0]
        for low, high in (_overlap(whole, span) for span in spans):
            if low < high:
                found.append((low // whole[0] * stride, high // whole[0] * stride))
    return tuple(found)


def _spans(shape: Shape) -> list[Span]:
    """Each dimension of an array as it lies in memory."""
    found = [(1, 1)] * len(shape.dims)
    stride = 1
    for d in minor_to_major(shape):
        found[d] = (stride, stride * max(1, shape.dims[d]))
        stride = found[d][1]
    return found


def _overlap(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _meet(one: Span, other: Span) -> bool:
    low, high = _overlap(one, other)
    return low < high
