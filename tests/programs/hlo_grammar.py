"""HLO as Hypothesis writes it: modules from a grammar, and texts with something wrong in them.

A module has computations that ENTRY, or each other, calls; in them stands a bit of everything that
XLA prints: elementwise operations, moves, reductions, matmuls and the libraries' calls that they
become, fusions, loops, branches, collectives, tuples of tuples and of nothing, attributes in any
order. Needs no JAX.
"""

import json
import os
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SCALE = int(os.environ.get("HYPOTHESIS_SCALE", 1))  # so many times the examples, others each time
NAMES = st.from_regex(r"[a-z][a-z0-9_\-]{0,6}", fullmatch=True)
FLOATS = st.sampled_from(["f32", "bf16", "f16", "f8e4m3fn", "f8e5m2"])
DTYPES = st.sampled_from(
    ["f32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "s8", "s32", "c64", "f64", "pred"]
)
SIZES = st.integers(1, 300)
STRINGS = st.text(
    alphabet=string.ascii_letters + string.digits + " {}()[],=%/*'é.-<>$\x1b\u202e", max_size=20
)
MARK = "<img src=x onerror=1>"  # what must not reach a page as it is
OP_NAMES = st.one_of(
    STRINGS,
    st.sampled_from([MARK, "jit(f)/transpose(jvp(a))/dot", "a)))", "f.1.2", r"\033[31m", "$x$"]),
)


def examples(number: int) -> settings:
    """So many examples, the same in every run."""
    return settings(
        max_examples=number * SCALE,
        derandomize=SCALE == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# An array's shape is (dtype, dims), a tuple's a list of shapes.
Array = tuple[str, tuple[int, ...]]
Shape = Array | list


@dataclass
class Written:
    """A module as text, with what is known of it because it was written so."""

    text: str = ""
    # Of each computation: (name, opcode, operands, shape) of its instructions.
    instructions: dict[str, list[tuple]] = field(default_factory=dict)
    # m, n, k, batch, lhs, rhs, out, count, library
    gemms: list[tuple] = field(default_factory=list)
    style: dict = field(default_factory=dict)
    names: int = 0

    @property
    def percent(self) -> str:
        return "%" if self.style["percent"] else ""


class Writer:
    """Writes one computation, line by line. `count`: how often it runs, None if that is unknown."""

    def __init__(self, draw: Callable, module: Written, count: int | None):
        self.draw, self.module, self.count = draw, module, count
        self.lines: list[str] = []
        self.made: list[tuple] = []
        self.shapes: dict[str, Shape] = {}
        self.parameters = 0

    def chance(self) -> bool:
        return self.draw(st.booleans())

    def one_of(self, values: list):
        return self.draw(st.sampled_from(values))

    def text_of(self, shape: Shape) -> str:
        if isinstance(shape, list):
            comment = "/*index=5*/" if self.module.style["typed"] else ""
            parts = [(comment if n == 5 else "") + self.text_of(s) for n, s in enumerate(shape)]
            return f"({', '.join(parts)})"
        dtype, dims = shape
        layout = ""
        if self.module.style["layout"] and dims:
            layout = "{" + ",".join(map(str, reversed(range(len(dims))))) + "}"
        return f"{dtype}[{','.join(map(str, dims))}]{layout}"

    def add(
        self,
        shape: Shape,
        opcode: str,
        operands: tuple[str, ...] = (),
        attributes: tuple[str, ...] = (),
        inside: str = "",
    ) -> str:
        """One instruction; its name. `inside`: what stands between the brackets if no operands."""
        self.module.names += 1  # in all of the module: XLA's parser renames what is there already
        name = f"{self.draw(NAMES)}.{self.module.names}"
        typed, percent = self.module.style["typed"], self.module.percent
        if operands:
            types = [f"{self.text_of(self.shapes[o])} " if typed else "" for o in operands]
            named = zip(types, operands, strict=True)
            inside = ", ".join(f"{shape_before}{percent}{o}" for shape_before, o in named)
        op_name = self.draw(st.none() | OP_NAMES)
        if op_name is not None:
            given = f'metadata={{op_name="{op_name}"'
            frame = " stack_frame_id=1" if self.module.style["tables"] else ""
            given += self.one_of(["", ' source_file="a.py" source_line=3', frame])
            attributes = (*attributes, given + "}")
        if len(attributes) > 1 and self.module.style["shuffled"]:
            attributes = tuple(self.draw(st.permutations(attributes)))
        line = f"{percent}{name} = {self.text_of(shape)} {opcode}({inside})"
        self.lines.append(", ".join([line, *attributes]))
        self.shapes[name] = shape
        self.made.append((name, opcode, operands, self.text_of(shape)))
        return name

    def parameter(self, shape: Shape) -> str:
        self.parameters += 1
        return self.add(shape, "parameter", inside=str(self.parameters - 1))

    def array(self, rank: int | None = None, dtype: str = "") -> str:
        """An array of the program: one that is there, a constant, or a parameter."""
        fit = [
            name
            for name, shape in self.shapes.items()
            if not isinstance(shape, list)
            and (rank is None or len(shape[1]) == rank)
            and dtype in ("", shape[0])
        ]
        if fit and self.chance():
            return self.one_of(fit)
        length = rank if rank is not None else self.draw(st.integers(0, 3))
        dims = tuple(self.draw(SIZES) for _ in range(length))
        dtype = dtype or self.draw(DTYPES)
        if not dims and dtype in ("f32", "s32") and self.chance():
            return self.constant(dtype)
        return self.parameter((dtype, dims))

    def constant(self, dtype: str) -> str:
        return self.add((dtype, ()), "constant", inside=str(self.draw(st.integers(0, 448))))

    def like(self, name: str) -> str:
        """An array of the same shape."""
        shape = self.shapes[name]
        return self.one_of([n for n, s in self.shapes.items() if s == shape])

    def scalar(self, dtype: str) -> str:
        return self.array(0, dtype)

    # Other computations ---------------------------------------------------------------

    def computation(
        self, shapes: list[Shape], body: Callable[["Writer", list[str]], object]
    ) -> str:
        """A computation of these parameters; its name, as it is called."""
        writer = Writer(self.draw, self.module, None)
        body(writer, [writer.parameter(shape) for shape in shapes])
        self.module.names += 1
        return self.module.percent + writer.write(f"inner{self.module.names}")

    def reducer(self, dtype: str, opcode: str = "add") -> str:
        shape = (dtype, ())
        return self.computation([shape] * 2, lambda w, given: w.add(shape, opcode, tuple(given)))

    def write(self, name: str, entry: bool = False) -> str:
        """End with the last instruction as the ROOT."""
        self.lines[-1] = "ROOT " + self.lines[-1]
        body = "\n".join("  " + line for line in self.lines)
        head = f"{'ENTRY ' if entry else ''}{self.module.percent}{name}"
        self.module.text += f"{head} {{\n{body}\n}}\n\n"
        self.module.instructions[name] = self.made
        return name

    def finish(self, name: str, entry: bool = False) -> None:
        """End with a tuple of some of it."""
        names = st.sampled_from([made[0] for made in self.made])
        chosen = tuple(dict.fromkeys(self.draw(st.lists(names, max_size=7))))
        self.add([self.shapes[name] for name in chosen], "tuple", chosen)
        self.write(name, entry)


# What a computation has -----------------------------------------------------------------------

UNARY = (
    "abs ceil cosine exponential floor log logistic negate not rsqrt sign sine sqrt tanh".split()
)
BINARY = "add and atan2 divide maximum minimum multiply or power remainder subtract xor".split()


def elementwise(w: Writer) -> None:
    """Some operations in a row, each on the result before it."""
    value = w.array()
    dtype, dims = shape = w.shapes[value]
    for _ in range(w.draw(st.integers(1, 3))):
        match w.one_of(["unary", "binary", "ternary", "convert", "compare"]):
            case "unary":
                value = w.add(shape, w.one_of(UNARY), (value,))
            case "binary":
                value = w.add(shape, w.one_of(BINARY), (value, w.like(value)))
            case "ternary" if dtype == "pred":
                value = w.add(shape, "select", (value, value, value))
            case "ternary":
                value = w.add(shape, "clamp", (w.like(value), value, w.like(value)))
            case "convert":
                dtype = w.draw(DTYPES)
                shape = (dtype, dims)
                value = w.add(shape, "convert", (value,))
            case "compare":
                w.add(("pred", dims), "compare", (value, w.like(value)), ("direction=GT",))


def moves(w: Writer) -> None:
    """Elements come to other places, are repeated, or left out."""
    value = w.array(2)
    dtype, (rows, columns) = w.shapes[value]
    zero = w.scalar("s32")
    flipped, wide = (dtype, (columns, rows)), (dtype, (rows, 2 * columns))
    part = (dtype, (1, columns))
    forms: dict[str, tuple] = {
        "transpose": (flipped, (value,), ("dimensions={1,0}",)),
        "bitcast": (flipped, (value,), ()),
        "copy": (w.shapes[value], (value,), ()),
        "reshape": ((dtype, (rows * columns,)), (value,), ()),
        "slice": (part, (value,), (f"slice={{[0:1], [0:{columns}]}}",)),
        "concatenate": (wide, (value, value), ("dimensions={1}",)),
        "reverse": (w.shapes[value], (value,), ("dimensions={0}",)),
        "broadcast": ((dtype, (3, rows, columns)), (value,), ("dimensions={1,2}",)),
        "dynamic-slice": (part, (value, zero, zero), (f"dynamic_slice_sizes={{1,{columns}}}",)),
        "dynamic-update-slice": (w.shapes[value], (value, value, zero, zero), ()),
        "pad": ((dtype, (rows + 1, columns)), (value, w.scalar(dtype)), ("padding=0_1x0_0",)),
        "iota": (w.shapes[value], (), ("iota_dimension=0",)),
        "opt-barrier": (w.shapes[value], (value,), ()),
    }
    opcode = w.one_of(list(forms))
    shape, operands, attributes = forms[opcode]
    w.add(shape, opcode, operands, attributes)


def reductions(w: Writer) -> None:
    """Sums, maxima, sorts, windows: what calls a computation for each pair of elements."""
    value = w.array(1)
    dtype, (size,) = shape = w.shapes[value]
    start = w.scalar(dtype)
    by = f"to_apply={w.reducer(dtype, w.one_of(['add', 'maximum', 'multiply']))}"
    match w.one_of(["reduce", "two", "reduce-window", "sort", "map"]):
        case "reduce":
            w.add((dtype, ()), "reduce", (value, start), ("dimensions={0}", by))
        case "two":
            scalars: list[Shape] = [(dtype, ())] * 2

            def both(inner: Writer, given: list[str]) -> None:
                inner.add(scalars, "tuple", (given[0], given[1]))

            by = f"to_apply={w.computation(scalars * 2, both)}"
            w.add(scalars, "reduce", (value, value, start, start), ("dimensions={0}", by))
        case "reduce-window":
            w.add(shape, "reduce-window", (value, start), ("window={size=1}", by))
        case "map":
            w.add(shape, "map", (value, value), ("dimensions={0}", by))
        case "sort":
            scalar = (dtype, ())

            def less(inner: Writer, given: list[str]) -> None:
                inner.add(("pred", ()), "compare", tuple(given), ("direction=LT",))

            by = f"to_apply={w.computation([scalar] * 2, less)}"
            w.add(shape, "sort", (value,), ("dimensions={0}", by))


def tuples(w: Writer) -> None:
    """Of a few values, of nothing, and of tuples; and an element of one."""
    chosen = (
        [w.one_of(list(w.shapes)) for _ in range(w.draw(st.integers(0, 7)))] if w.shapes else []
    )
    inner = w.add([w.shapes[name] for name in chosen], "tuple", tuple(chosen))
    outer = w.add([w.shapes[inner], w.shapes[inner]], "tuple", (inner, inner))
    element = w.add(w.shapes[inner], "get-tuple-element", (outer,), ("index=1",))
    if chosen:
        w.add(w.shapes[chosen[0]], "get-tuple-element", (element,), ("index=0",))


def odd(w: Writer) -> None:
    """What few programs have."""
    key, image, square = ("u64", (2,)), ("f32", (1, 8, 4)), ("f32", (4, 4))
    forms: dict[str, tuple] = {
        "rng-bit-generator": ([key, ("u32", (8,))], [key], ("algorithm=rng_default",)),
        "partition-id": (("u32", ()), [], ()),
        "replica-id": (("u32", ()), [], ()),
        "after-all": (("token", ()), [], ()),
        "cholesky": (square, [square], ("lower=true",)),
        "fft": (("c64", (8,)), [("c64", (8,))], ("fft_type=FFT", "fft_length={8}")),
        "get-dimension-size": (("s32", ()), [square], ("dimensions={0}",)),
        "triangular-solve": (square, [square, square], ("left_side=true", "lower=true")),
        "convolution": (
            image,
            [image, ("f32", (1, 4, 4))],
            ("window={size=1}", "dim_labels=b0f_0io->b0f"),
        ),
        "gather": (
            ("f32", (3, 4)),
            [square, ("s32", (3,))],
            ("offset_dims={1}", "collapsed_slice_dims={0}", "start_index_map={0}")
            + ("index_vector_dim=1", "slice_sizes={1,4}"),
        ),
        "topk": ([("f32", (2,)), ("s32", (2,))], [("f32", (8,))], ("k=2", "largest=true")),
        "bitcast-convert": (("s32", (4, 4)), [square], ()),
        "reduce-precision": (square, [square], ("exponent_bits=5", "mantissa_bits=2")),
    }
    opcode = w.one_of(list(forms))
    shape, given, attributes = forms[opcode]
    w.add(shape, opcode, tuple(w.parameter(s) for s in given), attributes)


EPILOGUES = ["DEFAULT", "BIAS", "GELU", "RELU_AUX", "BIAS_RELU", "ODD"]
PLAIN_GEMM, FP8_GEMM = "__cublas$lt$matmul", "__cublas$lt$matmul$f8"


def config_of(w: Writer, value: dict) -> str:
    """A backend_config as JSON, or as JAX 0.4 printed it, quoted."""
    text = json.dumps(value)
    if w.module.style["quoted"]:
        text = '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'
    return f"backend_config={text}"


def gemm(w: Writer) -> None:
    """A dot, or the call that it becomes, its batch dimension first or absent; or a fusion of it,
    as XLA makes them around a Triton kernel or around a call that reads a slice."""
    m, n, k, batch = (w.draw(SIZES) for _ in range(4))
    batch = min(batch, 5)
    lhs, rhs, out = w.draw(FLOATS), w.draw(FLOATS), w.one_of(["f32", "bf16"])
    lead = (batch,) if batch > 1 else ()
    left, right, is_dot, is_fused = (w.chance() for _ in range(4))  # the first two: K last?
    result: Shape = (out, (*lead, m, n))
    operands = [
        (lhs, lead + ((m, k) if left else (k, m))),
        (rhs, lead + ((n, k) if right else (k, n))),
    ]
    contracted = {"lhs": len(lead) + left, "rhs": len(lead) + right}
    library = "kernel" if is_dot else "cublasLt"
    w.module.gemms.append((m, n, k, batch, lhs, rhs, out, w.count, library))
    writer = Writer(w.draw, w.module, w.count) if is_fused else w
    names = tuple(writer.parameter(shape) for shape in operands)
    if is_dot:
        attributes = [f"{side}_contracting_dims={{{dim}}}" for side, dim in contracted.items()]
        if lead:
            attributes += [f"{side}_batch_dims={{0}}" for side in contracted]
        writer.add(result, "dot", names, tuple(attributes))
    else:
        numbers = {f"{s}_contracting_dimensions": [str(dim)] for s, dim in contracted.items()}
        numbers |= {f"{s}_batch_dimensions": ["0"] if lead else [] for s in contracted}
        config: dict = {"beta": 0, "epilogue": "DEFAULT", "dot_dimension_numbers": numbers}
        target = PLAIN_GEMM
        if lhs.startswith("f8") and rhs.startswith("f8") and w.chance():
            target = FP8_GEMM
            config["epilogue"] = w.one_of(EPILOGUES)
            names += tuple(writer.parameter(("f32", ())) for _ in range(w.draw(st.integers(0, 3))))
        result = [result, ("s8", (4194304,))]
        attributes = [
            f'custom_call_target="{target}"',
            config_of(w, {"gemm_backend_config": config}),
        ]
        writer.add(result, "custom-call", names, tuple(attributes))
    if is_fused:
        given = tuple(w.parameter(writer.shapes[name]) for name in names)
        name = writer.write(f"fused{w.module.names}")
        called = ("kind=kCustom", f"calls={w.module.percent}{name}")
        w.add(result, "fusion", given, called)
    around(w, result)


def around(w: Writer, result: Shape) -> None:
    """What may follow a matmul: its element, scaled, clamped, quantized, with an amax beside it."""
    if not w.chance():
        return
    value = w.made[-1][0]
    if isinstance(result, list):
        result = result[0]
        value = w.add(result, "get-tuple-element", (value,), ("index=0",))
    dtype, dims = result
    scale = w.add(result, "broadcast", (w.scalar(dtype),), ("dimensions={}",))
    value = w.add(result, w.one_of(["multiply", "divide", "add", "maximum"]), (value, scale))
    if w.chance():
        size = w.add(result, "abs", (value,))
        by = f"to_apply={w.reducer(dtype, 'maximum')}"
        every = f"dimensions={{{','.join(map(str, range(len(dims))))}}}"
        w.add((dtype, ()), "reduce", (size, w.scalar(dtype)), (every, by))
    if w.chance():
        value = w.add(result, "clamp", (w.scalar(dtype), value, w.scalar(dtype)))
        w.add(("f8e4m3fn", dims), "convert", (value,))


def calls_of_others(w: Writer) -> None:
    """A call that is no matmul to HLO: of a kernel with any name, that may return nothing."""
    target = w.one_of(
        ["x", "triton_kernel_call", "mosaic_gpu_v2", "__cudnn$norm", "cu_threefry", MARK]
    )
    form = w.one_of(
        ['{"a":[1]}', '"opaque"', r'"{a = 1 : i32, b = \"x\"}"', '{"name":"k", "n":{}}']
    )
    result: Shape = w.one_of(
        [[], ("f32", (8,)), [("f32", (8,)), ("u8", (16,))], [[("f32", ())], []]]
    )
    attributes = (f'custom_call_target="{target}"', f"backend_config={form}")
    operands = tuple(w.array() for _ in range(w.draw(st.integers(0, 3))))
    w.add(result, "custom-call", operands, attributes)


GROUPS = [
    "{}",
    "{{0,1},{2,3},{4,5},{6,7}}",
    "{{0,1,2,3,4,5,6,7}}",
    "[2,4]<=[8]",
    "[4,2]<=[2,2,2]T(2,1,0)",
    "[1,8]<=[8]",
    "mesh['a'=2,'b'=4] {'b'}",
    "mesh['a'=2,'b'=4] {'a','b'}",
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
    "mesh['a'=2,'b'=4] {'b':(1)2}",
]


def collectives(w: Writer) -> None:
    """One of each kind, started and waited for, or not."""
    value = w.array(1)
    dtype, (size,) = shape = w.shapes[value]
    groups = f"replica_groups={w.one_of(GROUPS)}"
    long: Shape = (dtype, (8 * size,))
    kind = w.one_of(
        ["all-gather", "all-reduce", "collective-permute"]
        + ["reduce-scatter", "all-to-all", "collective-broadcast"]
    )
    channel = f"channel_id={1 + w.module.names}"
    result, attributes = shape, [channel, groups]
    if kind in ("all-reduce", "reduce-scatter"):
        attributes.append(f"to_apply={w.reducer(dtype)}")
    if kind in ("all-reduce", "all-gather", "reduce-scatter") and w.chance():
        attributes.append("use_global_device_ids=true")
    if kind in ("all-gather", "reduce-scatter", "all-to-all"):
        attributes.append("dimensions={0}")
    if kind == "all-gather":
        result = long
    if kind == "reduce-scatter":
        value, result = w.parameter(long), shape
    if kind == "collective-permute":
        attributes = [channel, "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"]
    operands, attributes = (value,), tuple(attributes)
    if kind in ("all-gather", "all-reduce", "collective-permute") and w.chance():
        both = result if kind == "all-reduce" else [w.shapes[value], result]
        started = w.add(both, f"{kind}-start", operands, attributes)
        elementwise(w)
        w.add(result, f"{kind}-done", (started,))
    else:
        w.add(result, kind, operands, attributes)


def wrapped(w: Writer) -> None:
    """A fusion, or a computation that runs beside the others."""
    value = w.array()
    shape = w.shapes[value]
    opcode = w.one_of(UNARY)

    def both(inner: Writer, given: list[str]) -> None:
        # Two: XLA spells an async-start of one operation as that operation's own start.
        inner.add(shape, opcode, (inner.add(shape, opcode, (given[0],)),))

    callee = w.computation([shape], both)
    if w.chance():
        w.add(
            shape, "fusion", (value,), (f"kind={w.one_of(['kLoop', 'kInput'])}", f"calls={callee}")
        )
        return
    state: Shape = [[shape], shape, ("u32", ())]
    started = w.add(state, "async-start", (value,), (f"calls={callee}",))
    w.add(shape, "async-done", (started,))


FAMILIES = [
    elementwise,
    moves,
    reductions,
    tuples,
    odd,
    gemm,
    calls_of_others,
    collectives,
    wrapped,
]


# Modules --------------------------------------------------------------------------------------

TABLES = (
    '\nFileNames\n1 "/a/site-packages/x.py"\n2 "b\\"c.py"\n\nFunctionNames\n1 "f"\n\n'
    "FileLocations\n1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=9}\n"
    "\n"
    "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n"
)


def caller(w: Writer, kind: str, trips: int | None, inner: int) -> None:
    """An instruction that runs computation c<inner>."""
    value = w.array()
    state = w.add([w.shapes[value]], "tuple", (value,))
    shape = w.shapes[state]
    body, other = f"{w.module.percent}c{inner}", f"{w.module.percent}other{inner}"
    if kind in ("while", "conditional"):
        helper = Writer(w.draw, w.module, None)
        helper.parameter(shape)
        helper.finish(f"other{inner}")
    if kind == "while":
        attributes = [f"condition={other}", f"body={body}"]
        if trips is not None:
            attributes.append(config_of(w, {"known_trip_count": {"n": str(trips)}}))
        w.add(shape, "while", (state,), tuple(attributes))
    elif kind == "conditional" and w.chance():
        choice = w.parameter(("pred", ()))
        branches = (f"true_computation={body}", f"false_computation={other}")
        w.add(shape, "conditional", (choice, state, state), branches)
    elif kind == "conditional":
        choice = w.parameter(("s32", ()))
        branches = (f"branch_computations={{{body}, {other}}}",)
        w.add(shape, "conditional", (choice, state, state), branches)
    else:
        w.add(shape, "call", (state,), (f"to_apply={body}",))


@st.composite
def modules(draw: Callable) -> Written:
    """Computations that ENTRY, or each other, calls once, by a call, a loop or a branch."""
    names = ("percent", "typed", "layout", "shuffled", "quoted", "tables")
    module = Written(style={key: draw(st.booleans()) for key in names})
    module.text = "HloModule made_up, is_scheduled=true"
    module.text += draw(st.sampled_from(["", ", num_partitions=8", ", replica_count=8"]))
    module.text += draw(st.sampled_from(["", ', frontend_attributes={a="b,{"}'])) + "\n"
    module.text += TABLES if module.style["tables"] else "\n"
    # Of each computation, whom it calls: (kind, trips, callee).
    callers: list[list[tuple]] = [[]]
    counts: list[int | None] = [1]
    for index in range(1, draw(st.integers(1, 4))):
        above = draw(st.integers(0, index - 1))
        kind = draw(st.sampled_from(["call", "while", "conditional"]))
        trips = draw(st.none() | st.integers(1, 20)) if kind == "while" else 1
        callers.append([])
        callers[above].append((kind, trips, index))
        known = trips is not None and counts[above] is not None
        counts.append(trips * counts[above] if known else None)
    for index in reversed(range(len(callers))):  # what is called comes first in the text
        writer = Writer(draw, module, counts[index])
        for family in draw(st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=5)):
            family(writer)
        for kind, trips, inner in callers[index]:
            caller(writer, kind, trips, inner)
        writer.finish(f"c{index}", entry=index == 0)
    return module


# Texts with something wrong in them -----------------------------------------------------------

DIGITS = ["0", "-1", "1", "7", "99", "4294967296", "9" * 18, "9" * 30, "9" * 5000]
# What may stand for what without breaking the text: a number for a number, a name for a name, ...
# Where there are no values, another of the text's own takes the place.
VALUES: dict[str, list[str]] = {
    r"(?<![\w.])\d+(?![\w.])": [*DIGITS, "nan", "1e999"],
    r'(?<=":)("[^"]*"|\d+|true|false|\[[^][{}]*\]|\{\})': [
        *('0 -1 1e999 "" "9" null true [] {} [[]] ["7"] ["x"] [{"a":1}] {"0":[]} NaN'.split()),
        "9" * 5000,
    ],
    r"(?<=\{)[\d, ]*(?=\})": ["", "0", "1", "0,1", "1,0", "2,1,0", "9", "x", "0,0", "?", "-1"],
    r"(?<=\[)[\d,]*(?=\])": ["", "0", "1", "32,32", "32,32,32", "0,32", "<=4,4", "?,2", "1,1,1,1"],
    r"\b(?:f32|f8e4m3fn|s8|bf16|s32|pred)(?=\[)": (
        "f32 f8e5m2 f8e4m3fn bf16 pred token opaque u4 c128 weird f8".split()
    ),
    r"\w+\[[\d,]*\](?:\{[^{}\n]*\})?": ["()", "(())", "token[]", "f32[0]", "(f32[8], s8[8])"],
    r"(?<= )[a-z][a-z\-]+(?=\()": (
        "dot fusion custom-call while call reduce broadcast tuple multiply copy transpose convert "
        "constant get-tuple-element all-gather dot-start fusion-start async-start conditional "
        "all-reduce-start clamp concatenate parameter a\x1b".split()
    ),
    r'"[^"\n]*"(?!:)': [
        *('"" "__cublas$lt$matmul$f8" "__cublas$gemm" "__cudnn$fmhaSoftmax" "\\\\303"'.split()),
        '"__cudnn$blockScaledDot"',
        '"__op$block_scaled_dot"',
        '"__cudnn$fmhaSoftmaxBackward"',
        f'"{MARK}"',
        r'"\033[31m\302\233"',
        '"\x9b\u202e$x$"',
    ],
    r"(?<==)%?[\w.\-]+": [],
    r"(?<=[( ])%[\w.\-]+(?=[,)])": [],
    r"(?<=[a-z]\()[^()\n]*(?=\))": ["", "0"],
    r"\w+(?==)": ["to_apply", "body", "calls", "metadata", "backend_config", "replica_groups"],
    r"(?<==)\{[^{}\n]*\}": ["{}", "null", "{1,0,1}", "{{0},{1}}"],
}
JUNK = st.one_of(
    st.sampled_from(
        ["(", ")", "{", "}", "[", "]", '"', "\\", ",", "=", "%", "#0", "/*", "*/", "//", "\n"]
        + ["\0", "\r", "\x1b", "\u202e", "é", "\ud800", "-1", "9" * 30, "{...}", "ENTRY ", "ROOT "]
        + ["f32[", "f8e4m3fn[-1]{9}", "while", "fusion", "()", "calls=%main", "body=%c0", MARK]
        + ["backend_config={}", 'backend_config={"a":[1]}', "metadata={}", "a/" * 300, "(" * 300]
    ),
    st.text(max_size=8),
)
TOKEN = re.compile(r"[\w.\-]+|\s+|.")


def with_another_value(draw: Callable, text: str, other: str) -> str:
    """One value in the place of another, so that most of the text can still be read."""
    pattern = draw(st.sampled_from(sorted(VALUES)))
    places = list(re.finditer(pattern, text))
    if not places:
        return text
    place = draw(st.sampled_from(places))
    value = draw(st.sampled_from(VALUES[pattern] or sorted({m[0] for m in places})))
    return text[: place.start()] + value + text[place.end() :]


def with_other_characters(draw: Callable, text: str, other: str) -> str:
    """Some characters lost, others there, or one bit of one changed."""
    at = draw(st.integers(0, len(text)))
    match draw(st.sampled_from(["flip", "cut", "junk", "end"])):
        case "end":
            return text[:at]
        case "cut":
            return text[:at] + text[at + draw(st.integers(1, 40)) :]
        case "junk":
            return text[:at] + draw(JUNK) + text[at:]
        case _ if at < len(text):
            changed = chr(ord(text[at]) ^ 1 << draw(st.integers(0, 7)))
            return text[:at] + changed + text[at + 1 :]
    return text


def with_other_lines(draw: Callable, text: str, other: str) -> str:
    """A line lost, there twice, or elsewhere; or the second half of another text."""
    lines, others = text.split("\n"), other.split("\n")
    a, b = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    match draw(st.sampled_from(["lost", "exchanged", "twice", "spliced"])):
        case "lost":
            del lines[a]
        case "exchanged":
            lines[a], lines[b] = lines[b], lines[a]
        case "twice":
            lines.insert(a, lines[b])
        case "spliced":
            lines[a:] = others[draw(st.integers(0, len(others))) :]
    return "\n".join(lines)


def with_another_token(draw: Callable, text: str, other: str) -> str:
    """A token for another one of the same lines, or for what belongs nowhere."""
    at = draw(st.integers(0, len(text)))
    start = text.rfind("\n", 0, at) + 1
    found = list(TOKEN.finditer(text, start, at + 400))
    if not found:
        return text
    token = draw(st.sampled_from(found))
    instead = draw(st.sampled_from(found))[0] if draw(st.booleans()) else draw(JUNK)
    return text[: token.start()] + instead + text[token.end() :]


CHANGES = (with_another_value, with_other_characters, with_other_lines, with_another_token)


@st.composite
def damaged(draw: Callable, text: str, other: str) -> str:
    """The text after a few changes. `other`: a text of which parts may come in."""
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(CHANGES))(draw, text, other)
    return text


# Where any text may stand.
AROUND = (
    "{}",
    "HloModule m{}",
    "HloModule m\n\nENTRY %e {} {{\n  ROOT %p = f32[] parameter(0)\n}}\n",
    "HloModule m\n\nENTRY %e {{\n  ROOT %p = f32[] parameter(0){}\n}}\n",
    "HloModule m\n\nENTRY %e {{\n  %p = f32[8,8] parameter(0)\n"
    "  ROOT %d = f32[8,8] dot(%p, %p), {}\n}}\n",
    "HloModule m\n\nENTRY %e {{\n  %p = f32[8,8] parameter(0)\n"
    '  ROOT %d = f32[8,8] custom-call(%p, %p), custom_call_target="__cublas$lt$matmul$f8", '
    "backend_config={{{}}}\n}}\n",
    "HloModule m\n\nFileNames\n1 {}\n\nENTRY %e {{\n  ROOT %p = f32[] parameter(0), "
    "metadata={{stack_frame_id=1}}\n}}\n",
)
ANY_TEXT = st.text(alphabet=string.printable + "é\ud800\x9b", max_size=200)


@st.composite
def texts(draw: Callable, programs: list[tuple[str, str]]) -> tuple[str, str]:
    """A text, and one to set it beside: of a module from the grammar, whole or with something
    wrong, of one of `programs` (pairs of such texts) with something wrong, or of any characters."""
    match draw(st.sampled_from(["module", "damaged module", "damaged program", "any"])):
        case "any":
            text = draw(st.sampled_from(AROUND)).format(draw(ANY_TEXT))
            return text, programs[0][0]
        case "damaged program":
            known, other = draw(st.sampled_from(programs))
            return draw(damaged(known, other)), other
        case kind:
            text, known = draw(modules()).text, programs[0][0]
            return (text if kind == "module" else draw(damaged(text, known))), text
