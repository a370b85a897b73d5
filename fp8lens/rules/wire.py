"""What a sharded program sends between devices in a wide type, or moves after it was sent."""

from typing import Any

from fp8lens.matmul.collectives import Problem
from fp8lens.rules.rule import Found, Lost, Rule, found_if, rule

#: A `fp8lens.matmul.collectives.Collective`, which gives the {names} of these texts.
Sent = Any


@rule(
    "gathered-wide",
    lost=Lost.WIRE,
    reason=(
        "an array is sent as {dtype} ({kind} of {shapes}) and quantized after that: each device "
        "sends {sent}, and would send {would} in FP8"
    ),
    fix=(
        "quantize each device's part and send that: in jax.shard_map, quantize before the "
        "collective; where XLA places it, constrain the quantized array twice "
        "(jax.lax.with_sharding_constraint), first to the sharding of the parts, then to the one "
        "that the matmul reads"
    ),
    source=(
        "CollectiveQuantizer exchanges the two only where the scale is a scalar and nothing but "
        "bitcast, copy, reshape or slice stands between: no transpose, no other conversion; and "
        "nothing else reads the wide array (XLA's collective_quantizer.cc)"
    ),
)
def gathered_wide(sent: Sent) -> Found | None:
    """An array is sent in a wide type, and each device quantizes all of it.

    Each device has a part of a weight, and gathers the whole before its matmul. In FP8 the parts
    have half of bfloat16's bytes, and each device quantizes only its own part. XLA's
    CollectiveQuantizer moves a quantization before the collective, but only if nothing else stands
    between the two. Here a conversion to float32 does.

    A sharding constraint says where an array is gathered. Two constraints, one after the other, say
    that the quantized array is still in parts, and that it is then gathered. If the scale is
    computed from the weight, take the amax of the parts too: the devices then exchange one number.

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P(), P())
    Loses it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a, w: "bf16[128,256]", a_scale, b_scale):
            w = shard(w, P())
            b = quantize(w.astype(f32), 1 / b_scale)
            return scaled_dot(a, b, a_scale, b_scale, bf16)

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P(), P())
    Keeps it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a, w: "bf16[128,256]", a_scale, b_scale):
            b = quantize(w.astype(f32), 1 / b_scale)
            b = shard(shard(b, P("x")), P())
            return scaled_dot(a, b, a_scale, b_scale, bf16)
    """
    return _problem(sent, Problem.GATHERED_WIDE)


def _problem(sent: Sent, problem: Problem) -> Found | None:
    return found_if(problem in sent.problems, **sent.in_words(problem))


@rule(
    "dequantized-then-gathered",
    lost=Lost.WIRE,
    reason=(
        "an FP8 array is dequantized, then sent as {dtype} ({kind} of {shapes}): each device "
        "sends {sent}, and would send {would} in FP8"
    ),
    fix=(
        "send the quantized array, then dequantize: in jax.shard_map give it to the collective, "
        "else use jax.lax.with_sharding_constraint on it; do not transpose it for a dot: "
        "jax.lax.dot_general contracts any dimension"
    ),
    source=(
        "CollectiveQuantizer exchanges the two only where the scale is a scalar and nothing but "
        "bitcast, copy, reshape or slice stands between: no transpose, no other conversion "
        "(XLA's collective_quantizer.cc)"
    ),
)
def dequantized_then_gathered(sent: Sent) -> Found | None:
    """An FP8 array is dequantized, then sent in the wide type.

    The FP8 codes and their scales hold the same numbers in about half of bfloat16's bytes. XLA's
    CollectiveQuantizer moves a dequantization after the collective if the scale is a scalar. With a
    scale for each row, as here, it does not. The program can send codes and scales itself, and
    dequantize what arrives.

    If a matmul loses FP8 because its operand is gathered in a wide type, fp8lens gives only the
    reason gathered-operand, and not this one.

    Compiled with: mesh_shape=(4,), in_specs=(P(), P(), P(), P(), P("x"), P("x"))
    Loses it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a, b, a_scale, b_scale, gate: "f8e4m3fn[64,128]", scales: "bf16[64,1]"):
            gate = shard(dequantize(gate, scales, bf16), P())
            return scaled_dot(a, b, a_scale, b_scale, bf16) * gate

    Compiled with: mesh_shape=(4,), in_specs=(P(), P(), P(), P(), P("x"), P("x"))
    Keeps it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a, b, a_scale, b_scale, gate: "f8e4m3fn[64,128]", scales: "bf16[64,1]"):
            gate = dequantize(shard(gate, P()), shard(scales, P()), bf16)
            return scaled_dot(a, b, a_scale, b_scale, bf16) * gate
    """
    return _problem(sent, Problem.DEQUANTIZED)


@rule(
    "gathered-wide-read-wide",
    lost=Lost.WIRE,
    reason=(
        "an array is sent as {dtype} ({kind} of {shapes}) and quantized after that for {feeds}, "
        "but it is also read as {dtype}, by {readers}"
    ),
    fix=(
        "if the other readers can read the quantized array, or need their own device's part "
        "alone, quantize each device's part and send that ({would} in place of {sent}); else "
        "leave it: assert_fp8_collectives(..., allow='gathered-wide-read-wide') accepts it"
    ),
    source=(
        "CollectiveQuantizer exchanges the two only where the scale is a scalar and nothing but "
        "bitcast, copy, reshape or slice stands between: no transpose, no other conversion; and "
        "nothing else reads the wide array (XLA's collective_quantizer.cc)"
    ),
)
def gathered_wide_read_wide(sent: Sent) -> Found | None:
    """An array is sent in a wide type and quantized, and something else reads it in the wide type.

    FP8 codes have fewer digits than the numbers that were quantized. XLA's CollectiveQuantizer
    therefore does not send them if something else reads the gathered array too. Often that reader
    does not need all of it: a mean of each row, as in a norm, can be computed by the device that
    has the row. Then only the codes have to be gathered. If the other reader needs all of the array
    in the wide type, leave it as it is.

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P(), P())
    Loses it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(x, b, a_scale, b_scale):
            x = shard(x, P())
            a = quantize(x, 1 / a_scale)
            return scaled_dot(a, b, a_scale, b_scale, bf16), jnp.mean(x, 1)

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P(), P())
    Keeps it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(x, b, a_scale, b_scale):
            a = quantize(x, 1 / a_scale)
            a = shard(shard(a, P("x")), P())
            return scaled_dot(a, b, a_scale, b_scale, bf16), jnp.mean(x, 1)
    """
    return _problem(sent, Problem.READ_WIDE)


@rule(
    "gathered-twice",
    lost=Lost.WIRE,
    reason="the same array is gathered twice, by one collective: {shapes} of each device",
    fix=(
        "gather it once, where it is made: constrain it twice (jax.lax.with_sharding_constraint), "
        "first to the sharding that it has, then to the one that the matmuls read; and save the "
        "gathered array for a backward pass"
    ),
    source=(
        "the partitioner gathers for each dot on its own; CSE leaves two channels apart, and the "
        "combiner sends both (XLA's all_gather_combiner.cc)"
    ),
)
def gathered_twice(sent: Sent) -> Found | None:
    """The same array is gathered twice at once.

    XLA's partitioner looks at each dot by itself. If two dots read a sharded weight, it gathers the
    weight for each, as for the forward and the backward pass of a training step. It gives the two
    collectives different channels, so XLA does not see that they are the same. It combines them
    into one collective that sends both. A sharding constraint gathers the weight once, before both
    dots. The two dots here have different types, because XLA merges two of the same types that
    share an operand.

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P("x"))
    Loses it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a: "f8e4m3fn[512,256]", d: "f8e5m2[512,256]", b):
            first = jax.lax.dot(a, b.T, preferred_element_type=bf16)
            return first, jax.lax.dot(d, b.T, preferred_element_type=f32)

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P("x"))
    Keeps it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a: "f8e4m3fn[512,256]", d: "f8e5m2[512,256]", b):
            b = shard(shard(b, P("x")), P())
            first = jax.lax.dot(a, b.T, preferred_element_type=bf16)
            return first, jax.lax.dot(d, b.T, preferred_element_type=f32)
    """
    return _problem(sent, Problem.TWICE)


@rule(
    "summed-wide",
    lost=Lost.WIRE,
    reason="{kind} adds in {dtype}, and the sum is quantized after that, for {feeds}",
    fix=(
        "if others read the sum too, leave it: a sum needs the digits. Else scatter the sum "
        "(jax.lax.with_sharding_constraint, jax.lax.psum_scatter), quantize each device's part, "
        "and gather that"
    ),
    source=(
        "an all-reduce sends what a reduce-scatter and an all-gather do (nccl-tests, "
        "doc/PERFORMANCE.md)"
    ),
)
def summed_wide(sent: Sent) -> Found | None:
    """A sum over devices is computed in a wide type, and quantized after that.

    If the contracting dimension is sharded, each device computes a part of every sum, and an
    all-reduce adds the parts. It adds in a wide type, because sums in FP8 would be rounded with
    each addition. An all-reduce sends as much as two other collectives together: a reduce-scatter,
    which leaves each device some of the sums, and an all-gather of these sums. The all-gather can
    send FP8. With sums in bfloat16, that saves a quarter of the bytes.

    If the sum has other readers, as in a residual connection, the wide all-reduce is right.
    Therefore this rule is never among a program's reasons, and this page has no program that breaks
    it. fp8lens.assert_fp8_collectives checks for it if you give kinds="all-reduce".
    """
    return found_if(sent.is_summed_wide, **sent.in_words())


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
    """An FP8 array is gathered, and then each device transposes all of it.

    Before Blackwell an FP8 call needs K last in memory: see operand-layout. If a weight is stored
    [K, N] and sharded over K, it is gathered as it is, and each device transposes all of it, each
    time. If it is stored [N, K] and sharded over N, it arrives as the call reads it.

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P(), P())
    Loses it:

        def layer(a, b: "f8e4m3fn[256,128]", a_scale, b_scale):
            return jax.lax.dot(dequantize(a, a_scale, bf16), dequantize(b, b_scale, bf16))

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P("x"), P(), P())
    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return jax.lax.dot(dequantize(a, a_scale, bf16), dequantize(b, b_scale, bf16).T)
    """
    return _problem(sent, Problem.TRANSPOSED)


#: By what is wrong with a collective.
WIRE: dict[Problem, Rule] = {
    Problem.GATHERED_WIDE: gathered_wide,
    Problem.DEQUANTIZED: dequantized_then_gathered,
    Problem.READ_WIDE: gathered_wide_read_wide,
    Problem.TWICE: gathered_twice,
    Problem.TRANSPOSED: transposed_after_gathering,
}
