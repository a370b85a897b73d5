"""Collectives of sharded programs: compiled for 8 H100s, and as HLO text in the forms that XLA
prints elsewhere.
"""

import functools
import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8lens import (
    Inspection,
    aot_compile,
    assert_fp8_collectives,
    inspect,
    mesh,
    parse_hlo_module,
)
from fp8lens.hlo.replica_groups import groups
from fp8lens.matmul.collectives import KINDS, Collectives, Problem, collectives
from fp8lens.rules.find import of_collective
from tests.programs.corpus import PROGRAMS, corpus

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
M, N, K = 1024, 512, 256
EIGHT = {"x": 8}
ROWS = (P("x"), P("x"), None, None)


def S(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


X, W, s = S(M, K), S(N, K), S(dtype=f32)


def quantize(x, scale, dtype=e4m3):
    best = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(f32) * scale, -best, best).astype(dtype)


def dequantize(x, scale):
    return x.astype(bf16) * scale.astype(bf16)


def dot(x, w, sides=(1, 1)):
    return lax.dot_general(
        x, w, (((sides[0],), (sides[1],)), ((), ())), preferred_element_type=bf16
    )


def fp8_dot(x, w, x_scale, w_scale, sides=(1, 1)):
    return dot(dequantize(x, x_scale), dequantize(w, w_scale), sides)


def constrained(x, *specs):
    for spec in specs:
        x = lax.with_sharding_constraint(x, spec)
    return x


def mapped(f, in_specs=ROWS, out_specs=P("x")):
    """shard_map under the mesh of aot_compile; None is replicated."""
    specs = tuple(P() if spec is None else spec for spec in in_specs)
    return lambda *args: jax.shard_map(f, in_specs=specs, out_specs=out_specs, check_vma=False)(
        *args
    )


@functools.cache
def text(fn, args, in_specs=ROWS, mesh=tuple(EIGHT.items()), **options):
    return aot_compile(fn, *args, mesh_shape=dict(mesh), in_specs=in_specs, **options).as_text()


def found(fn, args=(X, W, s, s), in_specs=ROWS, mesh=EIGHT, **options):
    return collectives(text(fn, args, in_specs, tuple(mesh.items()), **options), mesh)


def only(*args, **options):
    (collective,) = found(*args, **options)
    return collective


# What each says -----------------------------------------------------------------------------------

gathered = mapped(lambda x, w, a, b: fp8_dot(x, lax.all_gather(w, "x", tiled=True), a, b))
EXPERTS = (P(None, "x"), P("x"), None, None)


def to_experts(x):
    """x is [experts, tokens, K]; each device has one expert's weights."""
    return lax.all_to_all(x, "x", 0, 1, tiled=True)[0]


def ragged(x, w, a, b):
    sizes, offsets = jnp.full(8, 16, jnp.int32), jnp.arange(8, dtype=jnp.int32) * 16
    x = lax.ragged_all_to_all(x, jnp.zeros_like(x), offsets, sizes, offsets, sizes, axis_name="x")
    return fp8_dot(x, w, a, b)


RING = [(n, (n + 1) % 8) for n in range(8)]
INNER = (P(None, "x"), P(None, "x"), None, None)
ONE = (P("x"), None, None, None)


def summed(x, w, a, b):
    return lax.psum(fp8_dot(x, w, a, b), "x")


def scattered(x, w, a, b):
    return lax.psum_scatter(fp8_dot(x, w, a, b), "x", tiled=True)


# One device's bytes by hand: w is 512 x 256 bytes, of which a device has an eighth.
PART = 64 * 256
SENT = {
    "all-gather": (gathered, ROWS, "f8e4m3fn", 7 * PART),
    "all-reduce": (mapped(summed, INNER, P()), INNER, "bf16", 2 * 7 * (M * N * 2 // 8)),
    "reduce-scatter": (mapped(scattered, INNER), INNER, "bf16", 7 * (M * N * 2 // 8)),
    "collective-permute": (
        mapped(lambda x, w, a, b: fp8_dot(x, lax.ppermute(w, "x", RING), a, b)),
        ROWS,
        "f8e4m3fn",
        PART,
    ),
    "collective-broadcast": (
        mapped(lambda x, w, a, b: fp8_dot(x, lax.pbroadcast(w, "x", 0), a, b), ONE),
        ONE,
        "f8e4m3fn",
        N * K,
    ),
    "ragged-all-to-all": (mapped(ragged), ROWS, "f8e4m3fn", 128 * 256),
}


@pytest.mark.parametrize("kind", SENT)
def test_kind_type_and_bytes(kind):
    fn, specs, dtype, sent = SENT[kind]
    one = only(fn, in_specs=specs)
    assert (one.kind, one.dtype, one.bytes_sent) == (kind, dtype, sent)
    assert (one.group_size, one.axis, one.count) == (8, "x", 1)
    assert one.source.startswith("test") or kind == "ragged-all-to-all"  # XLA drops its place
    assert not one.problems and not one.transposed_by
    assert len(one.feeds) == one.is_fp8 == one.feeds_fp8 == (dtype != "bf16")


def test_programs_on_one_device_have_none():
    assert collectives(corpus()["FP8 scan"]()) == () and str(Collectives()) == "no collectives"


def test_every_collective_of_a_program_is_there():
    name = "sharded MLP"
    hlo, mesh = corpus()[name](), PROGRAMS[name].mesh_shape
    opcodes = "|".join(KINDS)
    written = re.findall(rf"^ +(?:ROOT )?%(\S+) = .*? (?:{opcodes})(?:-start)?\(", hlo, re.M)
    cs = collectives(hlo, mesh)
    assert sorted(c.name for c in cs) == sorted(written) and written
    assert all(prod(mesh[axis] for axis in c.axis.split(", ")) == c.group_size for c in cs)
    assert max(map(len, str(cs).splitlines())) <= 100
    assert [row for row, *_ in cs.rows()][0].bytes_sent == max(c.bytes_sent for c in cs)


# Axes ---------------------------------------------------------------------------------------------


def test_axes_of_a_partitioners_own_collectives():
    """XLA's partitioner prints its groups as iota, without names: they come from mesh_shape."""
    mesh = {"data": 2, "model": 4}
    for axis, specs, bare in (
        ("data", (P("data"), P(("model", "data")), None, None), "2 of 8, stride 4"),
        ("model", (P(("data", "model")), P("model"), None, None), "4 of 8"),
    ):
        one = only(fp8_dot, in_specs=specs, mesh=mesh)
        assert (one.axis, one.group_size) == (axis, mesh[axis])
        program = one.instruction.computation.module
        assert collectives(program)[0].axis == bare
    with pytest.raises(ValueError, match="mesh_shape has 4 devices.*the program 8"):
        collectives(program, {"x": 4})


def module(*lines, attributes="num_partitions=8", computations=""):
    return (
        f"HloModule m, is_scheduled=true, {attributes}\n{computations}\nENTRY %main {{\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


def gather(replica_groups, attributes="num_partitions=8", more=", use_global_device_ids=true"):
    return module(
        "%p = f8e4m3fn[64,64]{1,0} parameter(0)",
        "ROOT %g = f8e4m3fn[512,64]{1,0} all-gather(%p), "
        f"channel_id=1, replica_groups={replica_groups}, dimensions={{0}}{more}",
        attributes=attributes,
    )


def NUMPY(dims, order, size):
    return np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(-1, size).tolist()


# Of meshes, as XLA's own tests have them: MaterializedReplicaGroups..., in
# xla/hlo/ir/replica_group_test.cc.
GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "{{0,4}, {1,5}, {2,6}, {3,7}}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "{}": [[*range(8)]],
    "[1,8]<=[8]": [[*range(8)]],
    "[2,4]<=[8]": NUMPY([8], [0], 4),
    "[4,2]<=[2,4]T(1,0)": NUMPY([2, 4], [1, 0], 2),
    "[2,4]<=[2,2,2]T(1,0,2)": NUMPY([2, 2, 2], [1, 0, 2], 4),
    "mesh['x'=8] {'x'}": [[*range(8)]],
    "mesh['data'=2,'model'=4] {'model'}": NUMPY([2, 4], [0, 1], 4),
    "mesh['data'=2,'model'=4] {'data'}": NUMPY([2, 4], [1, 0], 2),
    "mesh['a'=2,'b'=2,'c'=2] {'c','a'}": NUMPY([2, 2, 2], [1, 2, 0], 4),
    "mesh['a'=8] {'a':(1)2}": NUMPY([2, 4], [1, 0], 2),
    "mesh['a'=8] {'a':(2)2}": NUMPY([2, 2, 2], [0, 2, 1], 2),
    "mesh['a'=8] {'a':(4)2,'a':(1)2}": NUMPY([2, 2, 2], [1, 2, 0], 4),
    "@mesh<a=6,b=6> {b:(3)2}": [[n, n + 1] for n in range(0, 36, 2)],
    "@mesh<x=2,y=2>, device_ids=(3,1,0,2) {x}": [[3, 0], [1, 2]],
    "@mesh<x=2,y=4>, device_ids=([4,2]T(1,0)) {y}": [[0, 2, 4, 6], [1, 3, 5, 7]],
}


@pytest.mark.parametrize("printed", GROUPS)
def test_groups_in_each_form(printed):
    parsed = parse_hlo_module(gather(printed))
    assert sorted(groups(parsed["g"])) == sorted(GROUPS[printed])
    (one,) = collectives(parsed)
    assert one.group_size == len(GROUPS[printed][0]) and one.bytes_sent == 64 * 64 * (
        one.group_size - 1
    )


@pytest.mark.parametrize("printed, axis", [
    ("mesh['a'=8] {'a':(1)2}", "2 of 8, stride 4"),  # a part of an axis
    ("{{0,1,2},{3,4,5}}", "3 of 8"),  # some devices stay out
    ("{{0,3},{1,2},{4,7},{5,6}}", "2 of 8"),
    ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "1 of 8"),
    ("mesh['axis_0'=8] {'axis_0'}", "8 of 8"),  # a name of XLA's own
    ("mesh['data'=2,'model'=4] {'data','model'}", "data, model"),
])  # fmt: skip
def test_an_axis_without_mesh_shape(printed, axis):
    assert collectives(gather(printed))[0].axis == axis


@pytest.mark.parametrize("printed", ["<8>", "[8,0]<=[8]", "mesh['a'=99999999999] {'a'}"])
def test_groups_that_are_not_understood_are_an_error(printed):
    with pytest.raises(ValueError, match="unknown replica_groups, |contradict each other"):
        collectives(gather(printed))


def test_groups_of_replicas_and_all_their_partitions():
    """channel_id without use_global_device_ids: XLA's kCrossReplicaAndPartition."""
    both = parse_hlo_module(gather("{{0},{1}}", "replica_count=2, num_partitions=4", more=""))
    assert groups(both["g"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("pairs, size, axis", [
    ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", 4, "model"),
    ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", 4, "model"),  # a shift: the ends are not connected
    ("{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}", 2, "data"),
    ("{{0,1},{2,3}}", 2, "2 of 8"),
])  # fmt: skip
def test_a_permutes_pairs_are_groups_too(pairs, size, axis):
    hlo = module(
        "%p = bf16[64]{0} parameter(0)",
        "ROOT %c = bf16[64]{0} collective-permute(%p), channel_id=1, "
        f"source_target_pairs={pairs}",
    )
    (one,) = collectives(hlo, {"data": 2, "model": 4})
    assert (one.group_size, one.axis, one.bytes_sent) == (size, axis, 128)


# Forms that XLA prints elsewhere ------------------------------------------------------------------

ADD = """%add {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}
"""
CONFIG = (
    '{"gemm_backend_config":{"alpha_real":1,"beta":0,"epilogue":"DEFAULT","dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}'
)
CALL = f'custom_call_target="__cublas$lt$matmul$f8", backend_config={CONFIG}'
ALL = "channel_id=1, replica_groups=[1,8]<=[8]"


def fp8_call(x, w, name="%mm"):
    return (
        f"{name} = (bf16[64,512]{{1,0}}, s8[1024]{{0}}) custom-call({x}, {w}, %one, %one), {CALL}"
    )


PARAMETERS = (
    "%x = f8e4m3fn[64,64]{1,0} parameter(0)",
    "%w = f8e4m3fn[64,64]{1,0} parameter(1)",
    "%one = f32[] constant(1)",
    "%h = bf16[64,512]{1,0} parameter(2)",
)


@pytest.mark.parametrize("config, asynchronous", [
    ('{"is_sync":true,"no_parallel_custom_call":false}', False),
    ('{"collective_backend_config":{"is_sync":false}}', True),
    ("", True),
])  # fmt: skip
def test_a_start_may_say_that_it_waits(config, asynchronous):
    """Until 2025 XLA kept start and done, and said in the config that nothing runs between."""
    (one,) = collectives(
        module(
            *PARAMETERS,
            f"%s = (f8e4m3fn[64,64]{{1,0}}, f8e4m3fn[512,64]{{1,0}}) all-gather-start(%w), {ALL}, "
            "dimensions={0}" + f", backend_config={config}" * bool(config),
            "%n = bf16[64,512]{1,0} negate(%h)",
            "%g = f8e4m3fn[512,64]{1,0} all-gather-done(%s)",
            "ROOT " + fp8_call("%x", "%g"),
        )
    )
    assert (
        one.asynchronous == asynchronous
        and one.overlaps == ("n",) * asynchronous
        and one.feeds == ("mm",)
    )


def test_a_loop_of_unknown_length_and_a_branch():
    body = (
        "%body {\n  %t = (bf16[64]{0}) parameter(0)\n  %g = bf16[64]{0} get-tuple-element(%t), "
        "index=0\n"
        f"  %r = bf16[64]{{0}} all-reduce(%g), {ALL}, to_apply=%add\n  ROOT %u = (bf16[64]{{0}}) "
        f"tuple(%r)\n}}\n"
        "%cond {\n  %t2 = (bf16[64]{0}) parameter(0)\n  ROOT %go = pred[] constant(true)\n}\n"
        "%yes {\n  %y = bf16[64]{0} parameter(0)\n"
        f"  ROOT %z = bf16[64]{{0}} all-to-all(%y), {ALL}, dimensions={{0}}\n"
        "}\n%no {\n  ROOT %n = bf16[64]{0} parameter(0)\n}\n"
    )
    cs = collectives(
        module(
            "%p = bf16[64]{0} parameter(0)",
            "%q = pred[] parameter(1)",
            "%t = (bf16[64]{0}) tuple(%p)",
            "%l = (bf16[64]{0}) while(%t), condition=%cond, body=%body",
            "%e = bf16[64]{0} get-tuple-element(%l), index=0",
            "ROOT %c = bf16[64]{0} conditional(%q, %e, %e), true_computation=%yes, "
            "false_computation=%no",
            computations=ADD + body,
        )
    )
    assert {(c.kind, c.count) for c in cs} == {("all-reduce", None), ("all-to-all", 1)}
    assert "counted once" in str(cs) and "?" in str(cs)


# What is sent wide, or transposed after it --------------------------------------------------------


TOKENS_OF_EXPERTS = (S(8, 128, K, dtype=bf16), S(8, N, K), s, s)


def test_tokens_that_are_sent_wide_to_experts_and_the_fix():
    """That of gathers is proved by their rule's page."""
    wide = mapped(lambda x, w, a, b: fp8_dot(quantize(to_experts(x), a), w[0], a, b), EXPERTS)
    fixed = mapped(lambda x, w, a, b: fp8_dot(to_experts(quantize(x, a)), w[0], a, b), EXPERTS)
    hlo, better = (text(fn, TOKENS_OF_EXPERTS, EXPERTS) for fn in (wide, fixed))
    (one,) = (c for c in collectives(hlo, EIGHT) if c.problems)
    (reason,) = of_collective(one)
    assert one.problems == (Problem.GATHERED_WIDE,) and reason.rule == "gathered-wide"
    with pytest.raises(AssertionError) as error:
        assert_fp8_collectives(Inspection(parse_hlo_module(hlo), mesh=EIGHT))
    message = " ".join(str(error.value).split())
    assert reason.reason in message and reason.fix in message
    (fp8,) = (c for c in assert_fp8_collectives(better) if c.kind == one.kind and c.is_fp8)
    assert not fp8.problems and 2 * fp8.bytes_sent == one.bytes_sent
    assert assert_fp8_collectives(hlo, kinds=("all-gather",))
    with pytest.raises(ValueError, match="kinds must be some of all-gather, .*; got .'gather'"):
        assert_fp8_collectives(hlo, kinds=("gather",))


@pytest.mark.parametrize("conversion, found", [
    ("f8e4m3fn", Problem.GATHERED_WIDE),  # the clamp is that of the conversion behind the gather
    ("bf16", Problem.DEQUANTIZED),  # all that remains of FP8 that nothing reads
])  # fmt: skip
def test_a_clamp_before_the_gather_is_a_part_of_the_conversion_behind_it(conversion, found):
    """What XLA makes of one constraint on codes, if it thinks that those before it are whole too:
    it gathers between the clamp and the conversion.
    """
    (one,) = collectives(
        module(
            "%x = f8e4m3fn[64,64]{1,0} parameter(0)",
            "%v = f32[64,64]{1,0} parameter(1)",
            "%one = f32[] constant(1)",
            "%low = f32[] constant(-448)",
            "%high = f32[] constant(448)",
            "%clamped = f32[64,64]{1,0} clamp(%low, %v, %high)",
            f"%g = f32[512,64]{{1,0}} all-gather(%clamped), {ALL}, dimensions={{0}}",
            f"%q = {conversion}[512,64]{{1,0}} convert(%g)",
            "ROOT " + fp8_call("%x", "%q"),
        )
    )
    assert one.problems == (found,) and one.in_words(found)["would"] == "28.7 kB"


def test_the_axes_of_a_callers_own_mesh():
    """They are read from the program's arguments."""
    axes = {"rows": 2, "columns": 4}
    own = mesh("H100", axes)
    x = jax.ShapeDtypeStruct((M, K), e4m3, sharding=NamedSharding(own, P(tuple(axes))))
    w = jax.ShapeDtypeStruct((N, K), e4m3, sharding=NamedSharding(own, P()))
    seen = inspect(lambda x, w: dot(constrained(x, NamedSharding(own, P())), w), x, w)
    assert {c.axis for c in seen.collectives} == {", ".join(axes)}


def test_a_sum_that_is_quantized():
    """Gathers are what is asked about; of sums only if it is told."""

    def layers(x, up, down, a, b):
        h = dot(dequantize(quantize(jax.nn.relu(fp8_dot(x, up, a, b)), a), a), dequantize(down, b))
        return fp8_dot(quantize(constrained(h, P()), a), up, a, b)

    one = only(layers, (X, W, S(K, N), s, s), (None, P("x"), P(None, "x"), None, None))
    assert one.kind == "all-reduce" and one.feeds_fp8 and not one.problems
    hlo = one.instruction.computation.module
    with pytest.raises(AssertionError, match="adds in bf16"):
        assert_fp8_collectives(hlo, kinds="all-reduce")
    assert_fp8_collectives(hlo)


# What a value goes through, and who is left alone -------------------------------------------------

TOKENS, WEIGHT = S(8 * 64, K, dtype=bf16), S(N, K)
INDEX = S(8 * 64, dtype=jnp.int32)
MASK = S(8 * 64, K, dtype=jnp.bool_)
PERMUTED = [(n, (n + 1) % 8) for n in range(8)]


def gathered_tokens(x):
    return lax.all_gather(x, "x", tiled=True)


def exchanged(x):
    return lax.all_to_all(x, "x", 0, 0, tiled=True)


def taken(x, index, w, a, b):
    return fp8_dot(quantize(gathered_tokens(x)[index], a), w, a, b)


def one_of_two(x, mask, w, a, b):
    other = jnp.tile(x, (8, 1)) * 2
    return fp8_dot(quantize(jnp.where(mask, gathered_tokens(x), other), a), w, a, b)


INDEXED = (TOKENS, INDEX, WEIGHT, s, s)
HIDDEN = (TOKENS, MASK, WEIGHT, s, s)
PLAIN = (TOKENS, WEIGHT, s, s)
THROUGH = {
    taken: INDEXED,
    one_of_two: HIDDEN,
}


def seen_on_eight(fn, args, divided=(0,), out=P(), **options):
    """A function of one device's parts, of which only the arguments `divided` are parts."""
    specs = tuple(P("x") if n in divided else P() for n in range(len(args)))
    return inspect(mapped(fn, specs, out), *args, mesh_shape=EIGHT, in_specs=specs, **options)


@pytest.mark.parametrize("fn", THROUGH, ids=lambda fn: fn.__name__)
def test_a_wide_value_is_followed_to_its_quantization(fn):
    seen = seen_on_eight(fn, THROUGH[fn])
    (one,) = (c for c in seen.collectives if c.problems)
    assert one.problems == (Problem.GATHERED_WIDE,) and one.feeds_fp8
    (part,) = one.parts
    assert part.sent == 2 * part.would
    with pytest.raises(AssertionError, match="gathered-wide"):
        assert_fp8_collectives(seen)


def routed(x, router, w, a, b):
    """A gathered choice of rows, and a mask of its size, for tokens that do not travel."""
    logits = lax.all_gather(dot(x, router), "x", tiled=True)
    best = jnp.argmax(logits, 1)[: len(x)]
    chosen = jnp.where((logits[: len(x), :1] > 0), x[best % len(x)], 0)
    return fp8_dot(quantize(chosen, a), w, a, b)


def mask_that_travels(x, w, a, b):
    """Wide, but only compared: the values that are quantized are the device's own."""
    from_others = lax.ppermute(x, "x", PERMUTED)
    return fp8_dot(quantize(jnp.where(from_others > 0, x, 0), a), w, a, b)


def added_into_slots(x, index, w, a, b):
    slots = jnp.zeros((64, K), bf16).at[index % 64].add(gathered_tokens(x))
    return fp8_dot(quantize(slots, a), w, a, b)


def residual_in_a_loop(x, w, a, b):
    def layer(x, _):
        x = lax.ppermute(x, "x", PERMUTED)
        return x + fp8_dot(quantize(x, a), w[:K], a, b), None

    return lax.scan(layer, x, None, length=4)[0]


def also_for_a_router(x, w, a, b):
    x = exchanged(x)
    return fp8_dot(quantize(x, a), w, a, b), dot(x, w[:16].astype(bf16))


LEFT_ALONE = {
    routed: (TOKENS, S(64, K, dtype=bf16), WEIGHT, s, s),
    mask_that_travels: PLAIN,
    added_into_slots: INDEXED,
    residual_in_a_loop: PLAIN,
    also_for_a_router: PLAIN,
}


@pytest.mark.parametrize("fn", LEFT_ALONE, ids=lambda fn: fn.__name__)
def test_what_has_to_travel_wide_passes(fn):
    seen = seen_on_eight(fn, LEFT_ALONE[fn], (0,), P("x"))
    assert seen.report.fp8_rows
    assert not any(c.problems or c.unknown for c in assert_fp8_collectives(seen))


def test_a_gather_that_others_read_may_be_allowed():
    """Where the FP8 call adds the gathered matrix itself, the addition reads it, not the call."""

    def layer(x, w, a, b):
        x = gathered_tokens(x)
        return x + fp8_dot(quantize(x, a), w[:K], a, b)

    seen = seen_on_eight(layer, PLAIN)
    (one,) = seen.collectives
    assert one.problems == (Problem.READ_WIDE,)
    assert one.readers == (f"the addition in {one.feeds[0]}",)
    with pytest.raises(AssertionError, match=r"by\s+the addition in"):
        assert_fp8_collectives(seen)
    assert assert_fp8_collectives(seen, allow="gathered-wide-read-wide") == seen.collectives
    with pytest.raises(AssertionError):
        assert_fp8_collectives(seen, allow=("gathered-wide", "opaque"))
    with pytest.raises(ValueError, match="allow has 'late-relu'; it takes opaque, or"):
        assert_fp8_collectives(seen, allow="late-relu")


def test_of_arrays_sent_together_only_those_that_could_be_fp8_count():
    def layer(x, w1, w2, a, b):
        w1, w2 = lax.all_gather((w1, w2), "x", tiled=True)
        return fp8_dot(x, quantize(w1, b), a, b), dot(x.astype(bf16), w2)

    args = (S(64, K), S(N, K, dtype=bf16), S(8 * N, K, dtype=bf16), s, s)
    (one,) = seen_on_eight(layer, args, (1, 2), (P(), P())).collectives
    assert len(one.shapes) == 2
    (reason,) = of_collective(one)
    assert "(all-gather of bf16[64,256])" in reason.reason
    assert "sends 229 kB, and would send 115 kB" in reason.reason  # 7 * 64 * 256 elements


# What is not known --------------------------------------------------------------------------------


def own_kernel(x, w, dtype):
    """A kernel that a program brings along, as HLO shows it."""
    return (
        f'%k = {dtype}[512,64]{{1,0}} custom-call({x}, {w}), custom_call_target="mosaic_gpu_v2"',
        "ROOT %r = f32[] constant(0)",
    )


GATHERED = (
    "%h = bf16[64,64]{1,0} parameter(0)",
    "%w = f8e4m3fn[64,64]{1,0} parameter(1)",
    f"%g = bf16[512,64]{{1,0}} all-gather(%h), {ALL}, dimensions={{0}}",
)


def test_a_kernel_by_hand_that_reads_codes_is_a_reader_in_fp8():
    hlo = module(
        *GATHERED, "%q = f8e4m3fn[512,64]{1,0} convert(%g)", *own_kernel("%q", "%w", "bf16")
    )
    (one,) = collectives(hlo)
    assert one.problems == (Problem.GATHERED_WIDE,) and one.feeds == ("k",) and one.feeds_fp8
    with pytest.raises(AssertionError, match="gathered-wide"):
        assert_fp8_collectives(hlo, allow="opaque")


def test_a_kernel_by_hand_that_reads_the_wide_array_is_not_known():
    """It may quantize it for the FP8 matmul behind it, or not."""
    hlo = module(*GATHERED, *own_kernel("%g", "%w", "bf16"))
    (one,) = collectives(hlo)
    assert one.unknown == ("k",) and not one.problems
    with pytest.raises(AssertionError, match="g sends bf16 to k, which is not looked into"):
        assert_fp8_collectives(hlo)
    assert assert_fp8_collectives(hlo, allow="opaque")
    assert assert_fp8_collectives(hlo, kinds="all-to-all")
    top = hlo.replace("mosaic_gpu_v2", "__gpu$TopK")
    assert assert_fp8_collectives(top)[0].unknown == ()


def test_a_send_of_a_pipeline_is_a_permute_that_nothing_follows():
    """As XLA makes it of a permute in a loop, if its options for pipelines are set."""
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}}"
    hlo = module(
        "%h = bf16[64,64]{1,0} parameter(0)",
        "%t = token[] after-all()",
        f"%s = (bf16[64,64]{{1,0}}, u32[], token[]) send(%h, %t), channel_id=1, {pairs}",
        "ROOT %d = token[] send-done(%s), channel_id=1",
        attributes="num_partitions=4",
    )
    (one,) = collectives(hlo, {"x": 4})
    assert (one.kind, one.dtype, one.bytes_sent) == ("collective-permute", "bf16", 64 * 64 * 2)
    assert (one.axis, one.asynchronous, one.problems, one.unknown) == (
        "x",
        True,
        (),
        ("its receive",),
    )
    with pytest.raises(AssertionError, match="to its receive, which is not looked into"):
        assert_fp8_collectives(hlo)


def test_a_send_to_the_host_is_no_collective():
    hlo = module(
        "%h = bf16[64,64]{1,0} parameter(0)",
        "%t = token[] after-all()",
        "%s = (bf16[64,64]{1,0}, u32[], token[]) send(%h, %t), channel_id=1, is_host_transfer=true",
        "ROOT %d = token[] send-done(%s), channel_id=1, is_host_transfer=true",
    )
    assert collectives(hlo) == ()


def test_a_program_without_collectives_fails():
    seen = inspect(fp8_dot, X, W, s, s)
    with pytest.raises(AssertionError, match="no collective: .* give mesh_shape and in_specs"):
        assert_fp8_collectives(seen)


def test_a_program_that_is_not_a_gpus_fails():
    lowered = jax.jit(fp8_dot).lower(X, W, s, s)
    with pytest.raises(AssertionError, match="what XLA makes of it is not known yet"):
        assert_fp8_collectives(lowered)
    with pytest.raises(AssertionError, match="compiled for the CPU"):
        assert_fp8_collectives(lowered.compile())
