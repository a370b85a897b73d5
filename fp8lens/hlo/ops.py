"""HLO's opcodes by what they do: each set stands here once."""

# What runs other computations.
CONTROL = frozenset("call while conditional async".split())
DOTS = frozenset("dot scaled-dot".split())
# Other names of what is there.
VIEWS = frozenset("bitcast get-tuple-element reshape opt-barrier optimization-barrier".split())
# Names, views, and what waits for the end of what was launched before. A program's kernels are
# counted without them.
LAUNCHES_NOTHING = CONTROL | frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all add-dependency opt-barrier"
    " optimization-barrier partition-id replica-id".split()
)
# How the opcodes of collectives begin.
COLLECTIVES = ("all-", "collective", "reduce-scatter", "ragged-all-to-all")
# Elementwise: from the elements at one place of the operands, the element there of the result.
POINTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp clz compare complex cosine count-leading-zeros divide erf"
    " exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum"
    " minimum multiply negate not or popcnt power real reduce-precision remainder round-nearest-afz"
    " round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign"
    " sine sqrt stochastic-convert subtract tan tanh xor bitcast-convert acos acosh asin asinh atan"
    " atanh cosh sinh".split()
)
ELEMENTWISE = POINTWISE | {"convert"}
SCALING = frozenset("multiply divide".split())
# Without arithmetic: elements come to other places, or are repeated, or left out.
MOVES = VIEWS | frozenset(
    "copy transpose slice dynamic-slice pad broadcast concatenate reverse gather tuple".split()
)
LAYOUT = frozenset("transpose bitcast reshape copy".split())
CUTS = ("slice", "dynamic-slice")
SOURCES = frozenset("parameter constant iota".split())
# What may stand between dequantization and dot: MatchFp8Param in XLA's gemm_rewriter.cc.
COMMUTES = frozenset(
    "bitcast broadcast copy dynamic-slice pad reshape select slice transpose".split()
)
# What a program does with a matrix that no matmul call could do in its place, beside reductions:
# whatever is fused into the call, a kernel runs for it.
ALWAYS_A_KERNEL = frozenset(
    "dynamic-update-slice scatter sort reduce-window select-and-scatter map rng rng-bit-generator"
    " rng-get-and-update-state fft cholesky triangular-solve topk get-dimension-size"
    " set-dimension-size custom-call dot convolution infeed outfeed send recv domain iota".split()
)

_ONE_OPERAND = (ELEMENTWISE | MOVES | CONTROL | {"reduce", "sort", "map"}) - {
    "tuple",
    "call",
    "async",
}
_TWO_OPERANDS = frozenset(
    "add and atan2 compare complex divide maximum minimum multiply or power remainder shift-left"
    " dot convolution shift-right-arithmetic shift-right-logical subtract xor pad gather"
    " dynamic-update-slice scaled-dot".split()
)
# How many operands an opcode takes at least. XLA's parser refuses fewer, and so does ours, so that
# whoever reads an instruction finds its operands.
FEWEST_OPERANDS = (
    dict.fromkeys(_ONE_OPERAND, 1)
    | dict.fromkeys(_TWO_OPERANDS, 2)
    | dict.fromkeys(("select", "clamp"), 3)
)

# M, N and K of an FP8 call are multiples of it: PadOperandToMultipleOf16 in XLA's gemm_rewriter.cc.
FP8_MULTIPLE = 16


def padded(size: int) -> int:
    """The next multiple that an FP8 call takes."""
    return -(-size // FP8_MULTIPLE) * FP8_MULTIPLE
