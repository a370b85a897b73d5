"""The matrix multiplications of a program, read from its HLO: what each multiplies, in which type,
and who runs it.
"""

import dataclasses
import functools
import heapq
import math
import re
from collections.abc import Mapping

from fp8lens.hlo.ops import DOTS
from fp8lens.hlo.origin import is_backward, layer, op_name, primitive, source_line
from fp8lens.hlo.parse import Computation, HloParseError, Instruction, Shape
from fp8lens.hlo.program import fused, fusion_kind, results
from fp8lens.hlo.values import look_through, reducer

FP8_CALL = "__cublas$lt$matmul$f8"
_MULTIPLY = DOTS | {"fusion", "custom-call"}
_PASS_ON = frozenset("convert bitcast reshape copy transpose broadcast".split())
# cuBLASLt rounds f32 operands to TF32 unless more is asked for; so does Triton.
_TF32 = frozenset(("DEFAULT", "HIGH"))


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
    instruction: Instruction | None = dataclasses.field(default=None, repr=False, compare=False)

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
        """The layer that the matmul belongs to, as `op_name` tells it: the names of Flax's modules,
        or of jax.named_scope; with "backward" where JAX transposed it for a gradient. Empty where
        there is none.
        """
        name = layer(self.op_name)
        return f"{name} backward" if name and is_backward(self.op_name) else name

    @property
    def is_fp8(self) -> bool:
        """Whether the hardware multiplies 8-bit floats."""
        return self.math_dtype.startswith("f8")


def gemm_config(call: Instruction) -> dict:
    """The part of a cuBLASLt call's `backend_config` that describes the matmul: epilogue, alpha,
    beta, amax, ...
    """
    return call.backend_config["gemm_backend_config"]


def once(read):
    """What was read of an instruction is kept, with its module: fusions may share a computation,
    and many ask.
    """

    def known(i: Instruction):
        kept = i.computation.module.__dict__.setdefault(f"_of{read.__name__}", {})
        if i not in kept:
            kept[i] = read(i)
        return kept[i]

    return functools.update_wrapper(known, read)


@once
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
        if target in ("__cudnn$blockScaledDot", "__op$block_scaled_dot"):
            return (_block_scaled(instruction, "cudnn" if "cudnn" in target else "kernel"),)
        return _attention(instruction) if target.startswith("__cudnn$fmha") else ()
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, HloParseError):
            raise
        raise instruction.error(
            f"this says that it multiplies matrices, but not which ({error!r})"
        ) from error


def _dims(text: str) -> list[int]:
    return [int(d) for d in text.strip("{}").split(",") if d.strip()]


def _sizes(lhs: Shape, rhs: Shape, numbers: Mapping) -> tuple[int, int, int, int]:
    """m, n, k, batch of two operands, from dimension numbers as backend_config and dot's attributes
    name them.
    """

    def of(side: str, what: str) -> set[int]:
        found = [int(d) for d in numbers.get(f"{side}_{what}_dimensions", ())]
        if len({*found}) < len(found) or min(found, default=0) < 0:
            raise ValueError(f"{side}_{what}_dimensions has a dimension twice, or a negative one")
        return {*found}

    k = math.prod(max(lhs.dims[d], 1) for d in of("lhs", "contracting"))
    batch = math.prod(max(lhs.dims[d], 1) for d in of("lhs", "batch"))
    bound = {side: of(side, "contracting") | of(side, "batch") for side in ("lhs", "rhs")}
    free = [
        math.prod(max(size, 1) for d, size in enumerate(shape.dims) if d not in bound[side])
        for side, shape in (("lhs", lhs), ("rhs", rhs))
    ]
    return free[0], free[1], k, batch


def _common(*dtypes: str) -> str:
    """The type in which operands of these types can be multiplied: FP8, the first one's, only where
    all are FP8; else the widest of those that are not.
    """
    wide = [dtype for dtype in dtypes if not dtype.startswith("f8")]
    return max(wide, key=lambda dtype: Shape(dtype).bits) if wide else dtypes[0]


def _math(given: str, out: str, precision: str, algorithm: str) -> str:
    """The type the hardware multiplies operands of type `given` in."""
    asked = re.match(r"ALG_DOT_(BF16|TF32|F16|F32|F64)_", algorithm)
    if asked and given in ("f32", "f64"):
        return asked[1].lower()
    # XLA's GetBlasComputationType: xla/service/gpu/matmul_utils.cc (TF32 for f32 to f32, at DEFAULT
    # and HIGH).
    return (
        {"f32": "tf32", "c64": "tf32"}.get(given, given)
        if precision in _TF32 and given == out
        else given
    )


def _row(
    i: Instruction,
    sizes: tuple[int, int, int, int],
    lhs: str,
    rhs: str,
    math_dtype: str,
    library: str,
    out: str,
    origin: Instruction | None = None,
    **fields,
) -> GemmRow:
    origin = origin or i
    fields = {"epilogue": "DEFAULT", "amax": False, "beta": 0.0} | fields
    return GemmRow(
        *sizes,
        lhs,
        rhs,
        math_dtype,
        library,
        out_dtype=out,
        outside=(),
        count=1,
        name=i.name,
        source=source_line(origin) or source_line(i),
        op_name=op_name(origin) or op_name(i),
        instruction=i,
        **fields,
    )


def _cublas(i: Instruction, target: str) -> GemmRow:
    config, computation = gemm_config(i), i.computation
    lhs, rhs, *others = (computation[name].shape for name in i.operands)
    sizes = _sizes(lhs, rhs, config["dot_dimension_numbers"])
    settings = config.get("precision_config", {})
    precision = max(
        settings.get("operand_precision") or ["DEFAULT"], key=("DEFAULT", "HIGH", "HIGHEST").index
    )
    algorithm = settings.get("algorithm", "ALG_UNSET").replace("ALG_UNSET", "")
    out = results(i)[0].dtype
    scales = ()
    if (
        target == FP8_CALL
    ):  # scalars: A's and B's scale, then D's; where the program has none, the constant 1
        taken = (
            "abd" if out.startswith("f8") else "ab"
        )  # XLA's emitter passes D's scale on for an FP8 result alone
        scalars = [
            computation[name] for name in i.operands[2:] if computation[name].shape.size == 1
        ]
        named = zip("abd" if len(scalars) < 4 else "abcd", scalars)
        scales = tuple(
            letter for letter, s in named if letter in taken and s.literal not in ("1", "{1}")
        )
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
        scales=scales,
        precision=precision,
        algorithm=algorithm,
    )


def _dot_settings(dot: Instruction) -> tuple[str, str]:
    """Precision and algorithm of a dot."""
    precision = dot.attributes.get("operand_precision", "").strip("{}").upper().split(",")
    precision = max(
        (p.strip() or "DEFAULT" for p in precision), key=("DEFAULT", "HIGH", "HIGHEST").index
    )
    algorithm = dot.attributes.get("algorithm", "")
    return precision, f"ALG_{algorithm.upper()}" if algorithm.startswith("dot_") else ""


def _dot(i: Instruction, dot: Instruction, library: str, tile: str = "") -> GemmRow:
    """The row of a dot that the kernel `i` runs, `i` itself or inside it."""
    numbers = {
        f"{side}_{what}_dimensions": _dims(dot.attributes.get(f"{side}_{what}_dims", "{}"))
        for side in ("lhs", "rhs")
        for what in ("contracting", "batch")
    }
    lhs, rhs = (dot.computation[name].shape for name in dot.operands[:2])
    precision, algorithm = _dot_settings(dot)
    tensor_cores = (
        library != "kernel" or i is dot
    )  # a dot of a program not yet compiled may still get them
    given = _common(lhs.dtype, rhs.dtype)
    math_dtype = _math(given, dot.shape.dtype, precision, algorithm) if tensor_cores else given
    compiled = i.computation.module.attributes.get("is_scheduled") == "true"
    if library == "kernel" and compiled and given.startswith("f8"):
        math_dtype = "unknown"  # no GPU multiplies FP8 outside of its tensor cores
    stored = [
        _stored(dot.computation, name) if dot is not i else dot.computation[name].shape.dtype
        for name in dot.operands[:2]
    ]
    after = _following(dot) if dot is not i else []
    return _row(
        i,
        _sizes(lhs, rhs, numbers),
        *stored,
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
    largest: dict[str, Shape | None] = computation.__dict__.setdefault("_largest", {})
    for i in computation if not largest else ():
        shapes = [largest[operand] for operand in reversed(i.operands)]
        largest[i.name] = max(filter(None, shapes), key=lambda shape: shape.size, default=None)
        if i.opcode == "parameter" and i.shape.dtype != "pred":
            largest[i.name] = i.shape
    return (largest[name] or computation[name].shape).dtype


@once
def _following(dot: Instruction) -> list[str]:
    """Opcodes of what a kernel computes of its dot's result, in order, without what only names or
    moves it; the first hundred.
    """
    todo, seen, found = [(dot.index, dot)], {dot.index}, []
    while todo and len(found) < 100:
        _, i = heapq.heappop(todo)
        if (
            i is not dot
            and i.opcode not in _PASS_ON
            and i.opcode not in ("tuple", "get-tuple-element")
        ):
            found.append(i.opcode)
        for user in dot.computation.users.get(i.name, ()):
            if user.index not in seen:
                seen.add(user.index)
                heapq.heappush(todo, (user.index, user))
    return found


def _in_fusion(i: Instruction) -> tuple[GemmRow, ...]:
    computation = fused(i)
    found, calls = _multiplying(computation.root)
    if calls:
        return tuple(dataclasses.replace(row, name=i.name, instruction=i) for row in calls)
    if not found:
        return _expanded(i, computation)
    kind = fusion_kind(i)
    library = "triton" if "triton" in kind else "cudnn" if "cudnn" in kind else "kernel"
    tile = ""
    if library == "triton":
        settings = i.backend_config["fusion_backend_config"]
        tile = _tile(settings, found[0])
    return tuple(_split_k(_dot(i, dot, library, tile), dot) for dot in found)


@once
def _multiplying(root: Instruction) -> tuple[list[Instruction], list[GemmRow]]:
    """The dots of a fused computation, given its root, and the matmuls of the library calls in it."""
    found, calls, todo, seen = [], [], [root.computation], set()
    while todo:
        inner = todo.pop()
        if inner.name in seen:
            continue
        seen.add(inner.name)
        for j in inner:
            if j.opcode in DOTS:
                found.append(j)
            elif j.opcode == "fusion":
                todo.append(fused(j))
            elif (
                j.opcode == "custom-call"
            ):  # a library's, which reads a slice of its operand, or writes one, in place
                calls += matmuls(j)
    return found, calls


def _tile(settings: Mapping, dot: Instruction) -> str:
    """Rows x columns x depth of the block of the result that one thread block computes."""
    if gemm := settings.get("triton_gemm_config"):
        return "x".join(str(gemm[key]) for key in ("block_m", "block_n", "block_k") if key in gemm)
    blocks = (
        settings.get("block_level_fusion_config", {}).get("output_tiles", [{}])[0].get("sizes", [])
    )
    depth = dot.backend_config if isinstance(dot.backend_config, Mapping) else {}
    depth = depth.get("sizes", [])
    return "x".join(str(b) for b in [*blocks[-2:], *depth[-1:]])


def _split_k(row: GemmRow, dot: Instruction) -> GemmRow:
    """A kernel may sum K in parts, as a batch that the next kernel adds up, and does nothing to
    before: then K is the whole. A sum over a batch of products is one contraction, whoever wrote
    it.
    """
    i, name = row.instruction, row.name
    batch = len(_dims(dot.attributes.get("lhs_batch_dims", "{}")))  # a dot's result has them first
    written = dot.computation.root
    if (
        row.library != "triton"
        or row.batch == 1
        or look_through(written, ("convert", "bitcast")) is not dot
        or (_outermost(written.shape, batch) != _outermost(dot.shape, batch))
    ):
        return row
    users = i.computation.users.get(name, ())
    inside = fused(users[0]) if len(users) == 1 else None
    if not inside:
        return row
    parameter = inside.parameters[users[0].operands.index(name)]
    for reduce in inside:
        if (
            reduce.opcode != "reduce"
            or reduce.operands[0] != parameter.name
            or reducer(reduce) != "add"
        ):
            continue
        summed = set(_dims(reduce.attributes.get("dimensions", "{}")))
        if summed <= set(range(batch)):
            parts = math.prod(max(dot.shape.dims[d], 1) for d in summed)
            return dataclasses.replace(row, k=row.k * parts, batch=row.batch // parts)
    return row


def _outermost(shape: Shape, count: int) -> list[tuple[int, int]]:
    """The dimensions that vary slowest in memory, so many, and how long each is."""
    order = (
        _dims(shape.layout.partition(":")[0])
        if shape.layout
        else [*reversed(range(len(shape.dims)))]
    )
    return [(d, shape.dims[d]) for d in order[len(order) - count :]]


def _expanded(i: Instruction, computation: Computation) -> tuple[GemmRow, ...]:
    """A dot that XLA spelled out as multiplications and a sum: vectors, outer products, K of 1."""
    found = []
    for product in _products(computation.root):
        sides = [_spread(computation, name) for name in product.operands]
        if not all(sides) and product.shape.size > 1:
            continue
        sums = [
            r
            for r in computation
            if r.opcode == "reduce" and _leads(computation, r.operands[0], product.name)
        ]
        summed = set(_dims(sums[0].attributes.get("dimensions", "{}"))) if sums else set()
        sizes = dict(enumerate(product.shape.dims))
        both = sides[0][1] & sides[1][1]
        part = lambda dims: math.prod(sizes[d] for d in dims)
        m, n = part(sides[0][1] - both), part(sides[1][1] - both)
        found.append(
            _row(
                i,
                (m, n, part(both & summed), part(both - summed)),
                sides[0][0],
                sides[1][0],
                product.shape.dtype,
                "kernel",
                results(i)[0].dtype,
                product,
            )
        )
    return tuple(found)


@once
def _products(root: Instruction) -> list[Instruction]:
    """The multiplications of a fused computation, given its root, that JAX wrote as a dot."""
    computation = root.computation
    if "dot_general" not in computation.module.text[slice(*computation._body)]:  # as in most
        return []
    return [
        i
        for i in computation
        if i.opcode == "multiply" and primitive(op_name(i)).endswith("dot_general")
    ]


def _leads(computation: Computation, name: str, start: str) -> bool:
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
        varies &= set(_dims(i.attributes.get("dimensions", "{}")))
    return _stored(computation, i.name), varies


def _block_scaled(i: Instruction, library: str) -> GemmRow:
    lhs, rhs = (i.computation[name].shape for name in i.operands[:2])
    batched = len(lhs.dims) == 3
    numbers = {
        f"{side}_{what}_dimensions": dims
        for side in ("lhs", "rhs")
        for what, dims in (("contracting", [len(lhs.dims) - 1]), ("batch", [0] * batched))
    }
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
    config = i.backend_config["cudnn_fmha_backend_config"]
    q, k, v = (i.computation[name].shape for name in i.operands[:3])
    backward = "Backward" in i.custom_call_target
    numbers = config[
        "bmm1_grad_gemm2_dot_dimension_numbers" if backward else "bmm1_dot_dimension_numbers"
    ]
    if backward:  # of dQ = dS K: K's contracting dimension is its length
        length = int(numbers["rhs_contracting_dimensions"][0])
        batch = [int(d) for d in numbers["rhs_batch_dimensions"]]
        (depth,) = set(range(len(k.dims))) - {length, *batch}
        numbers = {
            f"{s}_{w}_dimensions": d
            for s in ("lhs", "rhs")
            for w, d in (("contracting", [depth]), ("batch", batch))
        }
    m, n, depth, batch = _sizes(q, k, numbers)
    shared = math.prod(
        k.dims[int(d)] for d in numbers["rhs_batch_dimensions"]
    )  # several queries' heads may share one
    values = v.size // (shared * n)
    sizes = [(m, n, depth), (m, values, n)]
    if backward:
        sizes = [(m, n, depth), (n, values, m), (m, n, values), (m, depth, n), (n, depth, m)]
    given = _common(q.dtype, k.dtype, v.dtype)
    return tuple(
        _row(i, (*s, batch), q.dtype, k.dtype, given, "cudnn", results(i)[0].dtype) for s in sizes
    )
