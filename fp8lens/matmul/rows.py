"""The matrix multiplications of a program, read from its HLO: what each multiplies, in which type,
and who runs it.
"""

import dataclasses
import heapq
import math
import re
from collections.abc import Mapping
from typing import Any

from fp8lens.formats import is_fp8, is_narrow
from fp8lens.hlo.ops import DOTS
from fp8lens.hlo.origin import layer, op_name, primitive, source_line
from fp8lens.hlo.parse import Computation, HloParseError, Instruction, Shape
from fp8lens.hlo.program import fused, fusion_body, fusion_kind, results, setting
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import dimensions, look_through, minor_to_major, reducer
from fp8lens.matmul.products import added_by_loop, sums_of_products

FP8_CALL = "__cublas$lt$matmul$f8"
#: A block-scaled dot as JAX writes it, and the call that XLA makes of it where a chip has one.
BLOCK_SCALED_DOT = "__op$block_scaled_dot"
_CUDNN_BLOCK_SCALED = "__cudnn$blockScaledDot"
_MULTIPLY = DOTS | {"fusion", "custom-call"}
_PASS_ON = frozenset("convert bitcast reshape copy transpose broadcast".split())
# cuBLASLt rounds f32 operands to TF32 unless more is asked for; so does Triton.
_TF32 = frozenset(("DEFAULT", "HIGH"))
_PRECISIONS = ("DEFAULT", "HIGH", "HIGHEST")


@dataclasses.dataclass(frozen=True)
class GemmRow:
    """One matrix multiplication, [m, k] x [k, n], `batch` times. Dtypes are named as in HLO:
    "f8e4m3fn", "bf16", ...

    `lhs_dtype` and `rhs_dtype` are the operands' in memory; `math_dtype` is what the hardware
    multiplies: "tf32" where f32 is rounded to it; of two FP8 types, the lhs's; FP8 only where both
    operands are. `library` is "cublasLt", "cublas", "triton", "cudnn", or "kernel" for a plain
    kernel of XLA's own. `epilogue` is cuBLASLt's name ("DEFAULT": none); of a kernel XLA generated,
    the opcodes that follow the dot in it. `amax`: it also returns max(abs(result)). `beta`: factor
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
    epilogue: str
    amax: bool
    beta: float
    out_dtype: str
    outside: tuple[str, ...]
    source: str
    op_name: str
    count: int | None
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
    instruction: Instruction = dataclasses.field(kw_only=True, repr=False, compare=False)

    @property
    def flops(self) -> int:
        """2*M*N*K*batch, of one run."""
        return 2 * self.m * self.n * self.k * self.batch

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
    """The matrix multiplications that one instruction runs; `outside` is empty and `count` 1.
    Raises HloParseError where it says that it multiplies, but not what.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in _MULTIPLY:
        return ()
    try:
        if opcode in DOTS:
            return (_dot(instruction, instruction, "kernel"),)
        if opcode == "fusion":
            return _in_fusion(instruction)
        target = instruction.custom_call_target or ""
        if target.startswith(("__cublas$lt$matmul", "__cublas$gemm")):
            return (_cublas(instruction, target),)
        if target in (BLOCK_SCALED_DOT, _CUDNN_BLOCK_SCALED):
            library = "cudnn" if target == _CUDNN_BLOCK_SCALED else "kernel"
            return (_block_scaled(instruction, library),)
        return _attention(instruction) if target.startswith("__cudnn$fmha") else ()
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, HloParseError):
            raise
        raise instruction.error(
            f"this says that it multiplies matrices, but not which ({error!r})"
        ) from error


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
    lhs: str,
    rhs: str,
    math_dtype: str,
    library: str,
    out: str,
    origin: Instruction | None = None,
    **fields: Any,
) -> GemmRow:
    """The row of a matmul that the kernel `i` runs; `origin` is what JAX wrote, inside of it."""
    origin = origin or i
    m, n, k, batch = sizes
    further: dict[str, Any] = {"epilogue": "DEFAULT", "amax": False, "beta": 0.0} | fields
    return GemmRow(
        m=m,
        n=n,
        k=k,
        batch=batch,
        lhs_dtype=lhs,
        rhs_dtype=rhs,
        math_dtype=math_dtype,
        library=library,
        out_dtype=out,
        outside=(),
        count=1,
        name=i.name,
        source=source_line(origin) or source_line(i),
        op_name=op_name(origin) or op_name(i),
        instruction=i,
        **further,
    )


def _cublas(i: Instruction, target: str) -> GemmRow:
    config, computation = gemm_config(i), i.computation
    lhs, rhs = (computation[name].shape for name in i.operands[:2])
    sizes = _sizes(lhs, rhs, config["dot_dimension_numbers"])
    settings = config.get("precision_config", {})
    precision = max(settings.get("operand_precision") or ["DEFAULT"], key=_PRECISIONS.index)
    algorithm = settings.get("algorithm", "ALG_UNSET").replace("ALG_UNSET", "")
    out = results(i)[0].dtype
    return _row(
        i,
        sizes,
        lhs.dtype,
        rhs.dtype,
        _math(_common(lhs.dtype, rhs.dtype), out, precision, algorithm),
        "cublasLt" if "$lt$" in target else "cublas",
        out,
        epilogue=str(config.get("epilogue", "DEFAULT")),
        amax=bool(config.get("damax_output", False)),
        beta=float(config.get("beta", 0)),
        alpha=float(config.get("alpha_real", 1)),
        scales=_call_scales(i, out) if target == FP8_CALL else (),
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
        _sizes(lhs, rhs, numbers),
        stored_lhs,
        stored_rhs,
        math_dtype,
        library,
        results(i)[0].dtype,
        dot,
        tile=tile,
        epilogue="+".join(after) or "DEFAULT",
        precision=precision,
        algorithm=algorithm,
        scales=("a", "b") if dot.opcode == "scaled-dot" else (),
    )


def _stored(computation: Computation, name: str) -> str:
    """The dtype in memory of what a fusion's dot multiplies: of the largest parameter that its
    operand comes from.
    """
    return (_largest_parameters(computation)[name] or computation[name].shape).dtype


@remembered
def _largest_parameters(computation: Computation) -> dict[str, Shape | None]:
    """Of each instruction, the shape of the largest parameter that it comes from, masks left out;
    of several as large, the last operand's.
    """
    largest: dict[str, Shape | None] = {}
    for i in computation:
        if i.opcode == "parameter" and i.shape.dtype != "pred":
            largest[i.name] = i.shape
            continue
        shapes = [shape for name in reversed(i.operands) if (shape := largest[name]) is not None]
        largest[i.name] = max(shapes, key=lambda shape: shape.size, default=None)
    return largest


@remembered
def _following(dot: Instruction) -> list[str]:
    """Opcodes of what a kernel computes of its dot's result, in order, without what only names or
    moves it; the first hundred.
    """
    passed = _PASS_ON | {"tuple", "get-tuple-element"}
    todo, seen = [(dot.index, dot)], {dot.index}
    found: list[str] = []
    while todo and len(found) < 100:
        _, i = heapq.heappop(todo)
        if i is not dot and i.opcode not in passed:
            found.append(i.opcode)
        for user in dot.computation.users.get(i.name, ()):
            if user.index not in seen:
                seen.add(user.index)
                heapq.heappush(todo, (user.index, user))
    return found


def _in_fusion(i: Instruction) -> tuple[GemmRow, ...]:
    """The matmuls of a fusion: those of its dots, of a library's call, or spelled out."""
    computation = fusion_body(i)
    found, calls = _multiplying(computation)
    if calls:
        return tuple(dataclasses.replace(row, name=i.name, instruction=i) for row in calls)
    if not found:
        return _expanded(i, computation)
    kind, tile = fusion_kind(i), ""
    if "triton" in kind:
        library = "triton"
        tile = _tile(_config(i)["fusion_backend_config"], found[0])
    else:
        library = "cudnn" if "cudnn" in kind else "kernel"
    return tuple(_split_k(_dot(i, dot, library, tile), dot) for dot in found)


@remembered
def _multiplying(computation: Computation) -> tuple[list[Instruction], list[GemmRow]]:
    """The dots of a fused computation, and the matmuls of the library calls in it."""
    found: list[Instruction] = []
    calls: list[GemmRow] = []
    todo, seen = [computation], set()
    while todo:
        inner = todo.pop()
        if inner.name in seen:
            continue
        seen.add(inner.name)
        for j in inner:
            if j.opcode in DOTS:
                found.append(j)
            elif j.opcode == "fusion":
                todo.append(fusion_body(j))
            elif j.opcode == "custom-call":
                # A library's, which reads a slice of its operand, or writes one, in place.
                calls += matmuls(j)
    return found, calls


def _tile(settings: Mapping, dot: Instruction) -> str:
    """Rows x columns x depth of the block of the result that one thread block computes."""
    if gemm := settings.get("triton_gemm_config"):
        return "x".join(str(gemm[key]) for key in ("block_m", "block_n", "block_k") if key in gemm)
    config = settings.get("block_level_fusion_config", {})
    block = config.get("output_tiles", [{}])[0].get("sizes", [])
    depth = setting(dot, "sizes") or []
    return "x".join(str(size) for size in [*block[-2:], *depth[-1:]])


def _split_k(row: GemmRow, dot: Instruction) -> GemmRow:
    """A kernel may sum K in parts, as a batch that the next kernel adds up, and does nothing to
    before: then K is the whole. A sum over a batch of products is one contraction, whoever wrote
    it.
    """
    name = row.name
    batch = len(dimensions(dot, "lhs_batch_dims"))  # a dot's result has them first
    if row.library != "triton" or row.batch == 1 or not _writes_as_it_is(dot, batch):
        return row
    users = row.instruction.computation.users.get(name, [])
    inside = fused(users[0]) if len(users) == 1 else None
    if not inside:
        return row
    parameter = inside.parameters[users[0].operands.index(name)]
    sums = (i for i in inside if i.opcode == "reduce" and reducer(i) == "add")
    for reduce in sums:
        if reduce.operands[0] != parameter.name:
            continue
        summed = set(dimensions(reduce))
        if summed <= set(range(batch)):
            parts = math.prod(max(dot.shape.dims[d], 1) for d in summed)
            return dataclasses.replace(row, k=row.k * parts, batch=row.batch // parts)
    return row


def _writes_as_it_is(dot: Instruction, batch: int) -> bool:
    """Whether a kernel writes its dot's result, at most converted, with its batch outermost."""
    written = dot.computation.root
    if look_through(written, ("convert", "bitcast")) is not dot:
        return False
    return _outermost(written.shape, batch) == _outermost(dot.shape, batch)


def _outermost(shape: Shape, count: int) -> list[tuple[int, int]]:
    """The dimensions that vary slowest in memory, so many, and how long each is."""
    order = minor_to_major(shape)
    return [(d, shape.dims[d]) for d in order[len(order) - count :]]


def _expanded(i: Instruction, computation: Computation) -> tuple[GemmRow, ...]:
    """A dot that XLA spelled out as multiplications and a sum: vectors, outer products, K of 1; or
    one that the program has written so.
    """
    found = []
    for product in _products(computation):
        sides = [_spread(computation, name) for name in product.operands]
        if not all(sides) and product.shape.size > 1:
            continue
        (lhs, rows), (rhs, columns) = sides
        sums = [
            r
            for r in computation
            if r.opcode == "reduce" and _leads(computation, r.operands[0], product.name)
        ]
        summed = set(dimensions(sums[0])) if sums else set()
        both = rows & columns
        dims = (rows - both, columns - both, both & summed, both - summed)
        m, n, k, batch = (_size(product.shape, part) for part in dims)
        written = results(i)[0].dtype
        row = _row(i, (m, n, k, batch), lhs, rhs, product.shape.dtype, "kernel", written, product)
        found.append(row)
    return (*found, *_written_out(i, computation))


def is_sum_of_products(row: GemmRow) -> bool:
    """Whether the program has no dot for a matmul: it multiplies, and adds the products up."""
    computation = fused(row.instruction)
    return (
        row.library == "kernel"
        and computation is not None
        and not _multiplying(computation)[0]
        and not primitive(row.op_name).endswith("dot_general")
    )


def _written_out(i: Instruction, computation: Computation) -> tuple[GemmRow, ...]:
    """The matmuls that the program itself has written as a multiplication and a sum."""
    found = []
    for product, left, right, sizes in (*sums_of_products(computation), *added_by_loop(i)):
        lhs, rhs = _stored(computation, left.name), _stored(computation, right.name)
        dtype, written = product.shape.dtype, results(i)[0].dtype
        found.append(_row(i, sizes, lhs, rhs, dtype, "kernel", written, product))
    return tuple(found)


def _size(shape: Shape, dims: set[int]) -> int:
    """How many elements an array has along some of its dimensions."""
    return math.prod(shape.dims[d] for d in dims)


@remembered
def _products(computation: Computation) -> list[Instruction]:
    """The multiplications of a fused computation that JAX wrote as a dot."""
    if computation.module.text.find("dot_general", *computation._body) < 0:  # as in most
        return []
    return [
        i
        for i in computation
        if i.opcode == "multiply"
        and primitive(op_name(i)).endswith("dot_general")
        and not _is_place(computation, i)
    ]


def _is_place(computation: Computation, product: Instruction) -> bool:
    """Whether a product is where a device's part of an array begins: XLA's partitioner multiplies
    the part's number by its size, in the name of the dot that reads the part.
    """
    is_number = product.shape.size == 1 and re.fullmatch(r"[su]\d+", product.shape.dtype)
    return bool(is_number) and any(computation[o].opcode == "constant" for o in product.operands)


def _leads(computation: Computation, name: str, start: str) -> bool:
    """Whether one instruction is another, converted or copied."""
    while name != start:
        i = computation[name]
        if i.opcode not in ("convert", "copy"):
            return False
        name = i.operands[0]
    return True


def _spread(computation: Computation, name: str) -> tuple[str, set[int]]:
    """The dtype in memory of a factor, and the dimensions along which it varies: not those it is
    broadcast over.
    """
    i = computation[name]
    varies = {d for d, size in enumerate(i.shape.dims) if size > 1}
    while i.opcode in ("convert", "copy"):
        i = computation[i.operands[0]]
    if i.opcode == "broadcast":
        varies &= set(dimensions(i))
    return _stored(computation, i.name), varies


def _block_scaled(i: Instruction, library: str) -> GemmRow:
    """The row of a call that multiplies with a scale for each block of an operand."""
    lhs, rhs = (i.computation[name].shape for name in i.operands[:2])
    batch = [0] if len(lhs.dims) == 3 else []
    numbers = _alike([len(lhs.dims) - 1], batch)
    return _row(
        i,
        _sizes(lhs, rhs, numbers),
        lhs.dtype,
        rhs.dtype,
        _common(lhs.dtype, rhs.dtype),
        library,
        results(i)[0].dtype,
        scales=("a", "b"),
    )


def _attention(i: Instruction) -> tuple[GemmRow, ...]:
    """cuDNN's fused attention: two matmuls forward; backward, the first again and two for each
    one's operands.
    """
    config = _config(i)["cudnn_fmha_backend_config"]
    q, k, v = (i.computation[name].shape for name in i.operands[:3])
    backward = "Backward" in (i.custom_call_target or "")
    if backward:  # of dQ = dS K: K's contracting dimension is its length
        numbers = config["bmm1_grad_gemm2_dot_dimension_numbers"]
        length = int(numbers["rhs_contracting_dimensions"][0])
        batch_dims = [int(d) for d in numbers["rhs_batch_dimensions"]]
        (depth_dim,) = set(range(len(k.dims))) - {length, *batch_dims}
        numbers = _alike([depth_dim], batch_dims)
    else:
        numbers = config["bmm1_dot_dimension_numbers"]
    m, n, depth, batch = _sizes(q, k, numbers)
    # Several queries' heads may share one of the keys.
    shared = math.prod(k.dims[int(d)] for d in numbers["rhs_batch_dimensions"])
    values = v.size // (shared * n)
    sizes = [(m, n, depth), (m, values, n)]
    if backward:
        sizes = [(m, n, depth), (n, values, m), (m, n, values), (m, depth, n), (n, depth, m)]
    given, out = _common(q.dtype, k.dtype, v.dtype), results(i)[0].dtype
    return tuple(_row(i, (*s, batch), q.dtype, k.dtype, given, "cudnn", out) for s in sizes)


def _alike(contracting: list[int], batch: list[int]) -> dict[str, list[int]]:
    """Dimension numbers that are the same of both operands, as `_sizes` takes them."""
    return {
        "lhs_contracting_dimensions": contracting,
        "rhs_contracting_dimensions": contracting,
        "lhs_batch_dimensions": batch,
        "rhs_batch_dimensions": batch,
    }
