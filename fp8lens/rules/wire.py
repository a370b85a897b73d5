"""What a sharded program sends between devices in a wide type, or moves after it was sent."""

from typing import Any

from fp8lens.rules.rule import Found, Lost, Rule, found_if, rule

#: A `fp8lens.matmul.collectives.Collective`, and the {names} of these texts.
Sent = tuple[Any, dict[str, str]]


@rule(
    "gathered-wide",
    lost=Lost.WIRE,
    reason=(
        "an array is sent as {dtype} ({kind} of {shapes}) and quantized after it: each device "
        "sends {sent}, and quantized {would}"
    ),
    fix=(
        "quantize each device's part and send that: jax.lax.with_sharding_constraint on the "
        "quantized array, first as the part is sharded, then as the matmul reads it; in "
        "jax.shard_map, quantize in front of the collective"
    ),
    source=(
        "CollectiveQuantizer exchanges the two only where the scale is a scalar and nothing but "
        "bitcast, copy, reshape or slice stands between: no transpose, no other conversion; and "
        "nothing else reads the wide array (XLA's collective_quantizer.cc)"
    ),
)
def gathered_wide(sent: Sent) -> Found | None:
    """An array is sent wide, and each device quantizes all of it."""
    return _problem(sent, "gathered wide")


def _problem(sent: Sent, problem: str) -> Found | None:
    collective, fields = sent
    return found_if(problem in collective.problems, **fields)


@rule(
    "dequantized-then-gathered",
    lost=Lost.WIRE,
    reason=(
        "an FP8 array is dequantized, then sent as {dtype} ({kind} of {shapes}): each device "
        "sends {sent}, and before its dequantization {would}"
    ),
    fix=(
        "send the quantized array (jax.lax.with_sharding_constraint on it), then dequantize; and "
        "contract the dimension that it has (jax.lax.dot_general) in place of a transpose"
    ),
    source=(
        "CollectiveQuantizer exchanges the two only where the scale is a scalar and nothing but "
        "bitcast, copy, reshape or slice stands between: no transpose, no other conversion "
        "(XLA's collective_quantizer.cc)"
    ),
)
def dequantized_then_gathered(sent: Sent) -> Found | None:
    """An FP8 array is widened, then sent."""
    return _problem(sent, "dequantized, then gathered")


@rule(
    "gathered-wide-read-wide",
    lost=Lost.WIRE,
    reason=(
        "an array is sent as {dtype} ({kind} of {shapes}) and quantized after it for {feeds}, "
        "but {readers} read it as {dtype} too"
    ),
    fix=(
        "quantize each device's part and send that ({would} for {sent}), where the other readers "
        "can read it, or their own part as it was; else leave it"
    ),
    source=(
        "CollectiveQuantizer exchanges the two only where the scale is a scalar and nothing but "
        "bitcast, copy, reshape or slice stands between: no transpose, no other conversion; and "
        "nothing else reads the wide array (XLA's collective_quantizer.cc)"
    ),
)
def gathered_wide_read_wide(sent: Sent) -> Found | None:
    """An array is sent wide and quantized, and others read it wide too."""
    return _problem(sent, "gathered wide, read wide")


@rule(
    "gathered-twice",
    lost=Lost.WIRE,
    reason="the same array is gathered twice at once: {shapes} of each device",
    fix=(
        "gather it once, where it is made: jax.lax.with_sharding_constraint on it, first as it "
        "is sharded, then as the matmuls read it; a backward pass gets it saved"
    ),
    source=(
        "the partitioner gathers for each dot on its own; CSE leaves two channels apart, and the "
        "combiner sends both (XLA's all_gather_combiner.cc)"
    ),
)
def gathered_twice(sent: Sent) -> Found | None:
    """Two collectives send the same array."""
    return _problem(sent, "gathered twice")


@rule(
    "summed-wide",
    lost=Lost.WIRE,
    reason="{kind} adds in {dtype}, and the sum is quantized after it, for {feeds}",
    fix=(
        "leave it where others read the sum too: sums need the digits. Else scatter the sum "
        "(jax.lax.with_sharding_constraint, jax.lax.psum_scatter), quantize the part, and gather "
        "that"
    ),
    source=(
        "an all-reduce sends what a reduce-scatter and an all-gather do (nccl-tests, "
        "doc/PERFORMANCE.md)"
    ),
)
def summed_wide(sent: Sent) -> Found | None:
    """A sum over devices is quantized behind it: it needs its digits until then."""
    collective, fields = sent
    return found_if(collective.is_summed_wide, **fields)


@rule(
    "transposed-after-gathering",
    lost=Lost.TRANSPOSE,
    reason=(
        "an FP8 array is gathered ({shapes} of each device), then each device transposes all of "
        "it in {kernels}, for {feeds}"
    ),
    fix=(
        "store it with the contracting dimension last and shard the other one: then the call "
        "reads what is gathered. Or shard a [K, N] array over N: then each device transposes its "
        "part. Where another matmul reads it the other way round, as a gradient does, one "
        "transpose stays"
    ),
    source=(
        "CreateF8CustomCall: before Blackwell, A row-major and B column-major (XLA's "
        "gemm_rewriter.cc)"
    ),
)
def transposed_after_gathering(sent: Sent) -> Found | None:
    """Each device transposes all of what it has gathered."""
    return _problem(sent, "transposed after gathering")


#: By the names that Collective.problems has.
WIRE: dict[str, Rule] = {
    "gathered wide": gathered_wide,
    "dequantized, then gathered": dequantized_then_gathered,
    "gathered wide, read wide": gathered_wide_read_wide,
    "gathered twice": gathered_twice,
    "transposed after gathering": transposed_after_gathering,
}
