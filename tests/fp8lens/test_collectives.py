"""Collectives of sharded programs: compiled for 8 H100s, and as HLO text in the forms that XLA
prints elsewhere.
"""

import functools
import itertools
import re

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
from fp8lens.rules.wire import WIRE
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


def test_a_collective_in_a_loop_runs_as_often_and_feeds_its_matmul():
    def layers(x, weights, a, b):
        def layer(x, w):
            return (quantize(jax.nn.relu(fp8_dot(x, constrained(w, P()), a, b)), a), None)

        return lax.scan(layer, x, weights)[0]

    cs = found(layers, (X, S(5, K, K), s, s), (P("x"), P(None, "x"), None, None))
    assert [(c.count, c.dtype, c.bytes_sent, len(c.feeds)) for c in cs] == [
        (5, "f8e4m3fn", 7 * 32 * K, 1)
    ]
    assert cs.bytes_sent == 5 * 7 * 32 * K


def test_programs_on_one_device_have_none():
    assert collectives(corpus()["FP8 scan"]()) == () and str(Collectives()) == "no collectives"


def test_every_collective_of_a_program_is_there():
    name = "sharded MLP"
    hlo, mesh = corpus()[name](), PROGRAMS[name].mesh_shape
    written = re.findall(
        rf"^ +(?:ROOT )?%(\S+) = .*? (?:{'|'.join(KINDS)})(?:-start)?\(", hlo, re.M
    )
    cs = collectives(hlo, mesh)
    assert sorted(c.name for c in cs) == sorted(written) and written
    for c in cs:
        assert np.prod([mesh[axis] for axis in c.axis.split(", ")]) == c.group_size
    table = str(cs).splitlines()
    assert max(map(len, table)) <= 100
    assert [row for row, *_ in cs.rows()][0].bytes_sent == max(c.bytes_sent for c in cs)
    opcodes = "|".join(KINDS)
    written = re.findall(rf"^ +(?:ROOT )?%(\S+) = .*? (?:{opcodes})(?:-start)?\(", hlo, re.M)


# Axes ---------------------------------------------------------------------------------------------


def test_axes_of_a_partitioners_own_collectives():
    """XLA's partitioner prints its groups as iota, without names: they come from mesh_shape."""
    mesh = {"data": 2, "model": 4}
    w = found(fp8_dot, in_specs=(P("data"), P(("model", "data")), None, None), mesh=mesh)
    x = found(fp8_dot, in_specs=(P(("data", "model")), P("model"), None, None), mesh=mesh)
    assert [(c.axis, c.group_size) for c in (*w, *x)] == [("data", 2), ("model", 4)]
    bare = [collectives(c.instruction.computation.module) for c in (*w, *x)]
    assert [c.axis for (c,) in bare] == ["2 of 8, stride 4", "4 of 8"]
    with pytest.raises(ValueError, match="mesh_shape has 4 devices.*the program 8"):
        collectives(w[0].instruction.computation.module, {"x": 4})


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


@pytest.mark.parametrize("names", [n for k in (1, 2, 3) for n in itertools.combinations("abc", k)])
def test_every_subset_of_a_meshs_axes(names):
    """By NumPy: the other axes first, those of `names` last."""
    places = ["abc".index(name) for name in names]
    ids = np.moveaxis(np.arange(24).reshape(2, 3, 4), places, range(-len(places), 0))
    together = ids.reshape(-1, np.prod([(2, 3, 4)[place] for place in places])).tolist()
    lists = ",".join("{" + ",".join(map(str, group)) + "}" for group in together)
    hlo = gather("{" + lists + "}", "num_partitions=24")
    (one,) = collectives(hlo, {"a": 2, "b": 3, "c": 4})
    assert (one.axis, one.group_size) == (", ".join(names), len(together[0]))


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


@pytest.mark.parametrize(
    "printed",
    [
        "<8>",
        "[8,0]<=[8]",
        "[1,99999999999]<=[99999999999]",
        "mesh['a'=99999999999] {'a'}",
        "mesh['a'=8] {'a':(1)0}",
    ],
)
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


def test_an_asynchronous_computation_that_wraps_a_collective():
    """As XLA printed reduce-scatter and all-to-all until 2025; async-update may stand between."""
    wrapped = ADD + (
        "%wrapped {\n  %p = bf16[64,512]{1,0} parameter(0)\n  ROOT %rs = bf16[8,512]{1,0} "
        f"reduce-scatter(%p), {ALL}, dimensions={{0}}, to_apply=%add\n}}\n"
    )
    (one,) = collectives(
        module(
            *PARAMETERS,
            fp8_call("%x", "%g"),
            "%y = bf16[64,512]{1,0} get-tuple-element(%mm), index=0",
            "%start = ((bf16[64,512]{1,0}), bf16[8,512]{1,0}) async-start(%y), calls=%wrapped",
            "%n = bf16[64,512]{1,0} negate(%h)",
            "%update = ((bf16[64,512]{1,0}), bf16[8,512]{1,0}) async-update(%start)",
            "%e = bf16[64,512]{1,0} exponential(%n)",
            "ROOT %done = bf16[8,512]{1,0} async-done(%update)",
        )
        .replace("%one = ", "%g = f8e4m3fn[512,64]{1,0} parameter(3)\n  %one = ")
        .replace("ENTRY", wrapped + "ENTRY")
    )
    assert (one.name, one.kind, one.bytes_sent) == (
        "start",
        "reduce-scatter",
        64 * 512 * 2 * 7 // 8,
    )
    assert one.asynchronous and one.overlaps == ("n", "e") and one.count == 1


@pytest.mark.parametrize("config, asynchronous", [
    ('{"is_sync":true,"no_parallel_custom_call":false}', False),
    ('{"collective_backend_config":{"is_sync":true}}', False),
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

B = S(M, K, dtype=bf16)
V = S(N, K, dtype=bf16)


def mlp(x, up, down, a, b, *, scattered):
    """Tensor parallel, and a third layer that reads the sum of the second in FP8."""
    h = dot(dequantize(quantize(jax.nn.relu(fp8_dot(x, up, a, b)), a), a), dequantize(down, b))
    h = quantize(constrained(h, P("x")) if scattered else constrained(h, P()), a)
    return fp8_dot(constrained(h, P("x"), P()) if scattered else h, up, a, b)


MLP = ((X, W, S(K, N), s, s), (None, P("x"), P(None, "x"), None, None))


WIDE = {
    "gathered, then quantized": (
        Problem.GATHERED_WIDE,
        (lambda x, w, a, b: fp8_dot(x, quantize(constrained(w, P()), b), a, b), (X, V, s, s)),
        (
            lambda x, w, a, b: fp8_dot(x, constrained(quantize(w, b), P("x"), P()), a, b),
            (X, V, s, s),
        ),
    ),
    "tokens to experts": (
        Problem.GATHERED_WIDE,
        (
            mapped(lambda x, w, a, b: fp8_dot(quantize(to_experts(x), a), w[0], a, b), EXPERTS),
            (S(8, 128, K, dtype=bf16), S(8, N, K), s, s),
            EXPERTS,
        ),
        (
            mapped(lambda x, w, a, b: fp8_dot(to_experts(quantize(x, a)), w[0], a, b), EXPERTS),
            (S(8, 128, K, dtype=bf16), S(8, N, K), s, s),
            EXPERTS,
        ),
    ),
    "dequantized and transposed": (
        Problem.DEQUANTIZED,
        (lambda x, w, a, b: lax.dot(dequantize(x, a), dequantize(w, b).T), (X, W, s, s)),
        (fp8_dot, (X, W, s, s)),
    ),
    "read in bfloat16 too": (
        Problem.READ_WIDE,
        (
            lambda x, w, a, b: (fp8_dot(quantize(h := constrained(x, P()), a), w, a, b), h * 2),
            (B, W, s, s),
        ),
        (
            lambda x, w, a, b: (fp8_dot(constrained(quantize(x, a), P("x"), P()), w, a, b), x * 2),
            (B, W, s, s),
        ),
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_sent_wide_and_the_fix(name):
    problem, *both = WIDE[name]
    hlo, better = (text(fn, args, *specs) for fn, args, *specs in both)
    (one,) = (c for c in collectives(hlo, EIGHT) if c.problems)
    assert one.problems == (problem,)
    with pytest.raises(AssertionError) as error:
        assert_fp8_collectives(Inspection(parse_hlo_module(hlo), mesh=EIGHT))
    message = " ".join(str(error.value).split())
    (reason,) = of_collective(one)
    assert reason.rule == WIRE[problem].name and reason.reason in message and reason.fix in message
    assert f"{size(one.bytes_sent // 2)}" in reason.reason + reason.fix
    assert max(map(len, str(error.value).splitlines())) <= 100
    passed = assert_fp8_collectives(better)
    (fp8,) = (c for c in passed if c.kind == one.kind and c.is_fp8)
    assert not fp8.problems and 2 * fp8.bytes_sent == one.bytes_sent


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


def size(n):
    return f"{n / 1e6:.3g} MB" if n >= 1e6 else f"{n / 1e3:.3g} kB"


def test_the_axes_of_a_callers_own_mesh():
    """They are read from the program's arguments. Where those are on two meshes, the collective
    itself may name its own.
    """
    flat, square = mesh("H100", {"data": 8}), mesh("H100", {"rows": 2, "columns": 4})
    places = (
        ("data", flat, P("data"), flat, P()),
        ("rows, columns", square, P(("rows", "columns")), square, P()),
        ("data", flat, P("data"), square, P()),
    )
    for axis, one, part, other, whole in places:
        x = jax.ShapeDtypeStruct((M, K), e4m3, sharding=NamedSharding(one, part))
        w = jax.ShapeDtypeStruct((N, K), e4m3, sharding=NamedSharding(other, whole))
        seen = inspect(lambda x, w, to=NamedSharding(one, P()): dot(constrained(x, to), w), x, w)
        assert {c.axis for c in seen.collectives} == {axis}


def test_a_sum_that_is_quantized_and_the_fix():
    (one,) = found(functools.partial(mlp, scattered=False), *MLP)
    assert one.kind == "all-reduce" and one.feeds_fp8 and not one.problems
    (reason,) = of_collective(one)
    assert "adds in bf16" in reason.reason
    with pytest.raises(AssertionError, match="adds in bf16"):
        assert_fp8_collectives(one.instruction.computation.module, kinds="all-reduce")
    assert_fp8_collectives(
        one.instruction.computation.module
    )  # gathers are what is asked about unless told
    scatter, gather = found(functools.partial(mlp, scattered=True), *MLP)
    assert (scatter.kind, gather.kind, gather.dtype) == ("reduce-scatter", "all-gather", "f8e4m3fn")
    assert scatter.bytes_sent + gather.bytes_sent == one.bytes_sent * 3 // 4
    assert not of_collective(scatter) and not of_collective(gather)
    assert_fp8_collectives(scatter.instruction.computation.module, kinds=KINDS)


def sides(w_last, w_spec):
    return (
        lambda x, w, a, b: fp8_dot(x, w, a, b, (1, w_last)),
        (X, S(N, K) if w_last else S(K, N), s, s),
        (P("x"), w_spec, None, None),
    )


@pytest.mark.parametrize("w_last, w_spec, transposes, of_all", [
    (1, P("x"), 0, False),  # [N, K], sharded over N: the fix
    (1, P(None, "x"), 2, True),  # [N, K] over K: the part, to gather it, and then all of it
    (0, P("x"), 1, True),  # [K, N] over K
    (0, P(None, "x"), 1, False),  # [K, N] over N: the part alone, the other fix
])  # fmt: skip
def test_transposed_after_gathering(w_last, w_spec, transposes, of_all):
    fn, args, specs = sides(w_last, w_spec)
    hlo = text(fn, args, specs)
    assert len(re.findall(r" = f8e4m3fn\S+ fusion\(.*transpose", hlo)) == transposes
    cs = collectives(hlo, EIGHT)
    assert [bool(c.transposed_by) for c in cs] == [of_all]
    if of_all:
        (kernel,) = cs[0].transposed_by
        assert cs[0].instruction.computation[kernel].shape.size == N * K
        (reason,) = of_collective(cs[0])
        assert (
            kernel in reason.reason
            and reason.lost == "transpose"
            and "transposed after gathering" in str(cs)
        )


@pytest.mark.parametrize("once", [False, True])
def test_a_weight_that_two_matmuls_read_is_gathered_twice_and_the_fix(once):
    """XLA gathers for each dot on its own."""

    def both(x, d, w):
        w = constrained(w, P("x"), P()) if once else w
        first = lax.dot(x, w.T, preferred_element_type=bf16)
        return first, lax.dot(d, w.T, preferred_element_type=f32)

    (one,) = found(both, (X, S(M, K, dtype=e5m2), W), (P("x"), P("x"), P("x")))
    assert one.is_fp8 and one.bytes_sent == (2 - once) * 7 * PART
    assert [reason.rule for reason in of_collective(one)] == ["gathered-twice"] * (not once)


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


def masked(x, mask, w, a, b):
    return fp8_dot(quantize(jnp.where(mask, gathered_tokens(x), 0), a), w, a, b)


def one_of_two(x, mask, w, a, b):
    other = jnp.tile(x, (8, 1)) * 2
    return fp8_dot(quantize(jnp.where(mask, gathered_tokens(x), other), a), w, a, b)


INDEXED = (TOKENS, INDEX, WEIGHT, s, s)
HIDDEN = (TOKENS, MASK, WEIGHT, s, s)
PLAIN = (TOKENS, WEIGHT, s, s)
THROUGH = {
    taken: INDEXED,
    masked: HIDDEN,
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


def test_without_an_fp8_matmul_nothing_is_judged():
    def wide(x, w, a, b):
        return gathered_tokens(x) @ w.astype(bf16).T

    seen = seen_on_eight(wide, PLAIN, (0,), P("x"))
    with pytest.raises(AssertionError, match="no matmul is FP8"):
        assert_fp8_collectives(seen)


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
    sent = 7 * 64 * K
    assert f"sends {size(2 * sent)}, and would send {size(sent)}" in reason.reason


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


def test_a_send_and_its_receive_are_a_permute():
    """As XLA makes them of a permute in a loop, for a pipeline."""

    def stages(x, w, a, b):
        def stage(x, _):
            x = lax.ppermute(x, "x", [(n, n + 1) for n in range(7)])
            return fp8_dot(quantize(x, a), w[:K], a, b), None

        return lax.scan(stage, x, None, length=6)[0]

    options = {"xla_gpu_experimental_pipeline_parallelism_opt_level": 1}
    seen = seen_on_eight(stages, PLAIN, out=P("x"), compiler_options=options)
    assert " send(" in seen.module.text and "collective-permute" not in seen.module.text
    (one,) = seen.collectives
    assert (one.kind, one.dtype, one.bytes_sent, one.count) == (
        "collective-permute",
        "bf16",
        64 * K * 2,
        6,
    )
    assert (one.axis, one.group_size, one.asynchronous) == ("x", 8, True)
    assert one.unknown == ("its receive",) and not one.problems
    with pytest.raises(AssertionError, match="which is not looked into"):
        assert_fp8_collectives(seen)


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


@pytest.mark.parametrize("options, said", [
    ({"kinds": ()}, r"kinds must be some of all-gather, .*; got \[\]"),
])  # fmt: skip
def test_what_asks_nothing_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        assert_fp8_collectives(gather("{}"), **options)


# The assertion and the table ----------------------------------------------------------------------


def test_what_the_assertion_asks_of():
    hlo = text(WIDE["gathered, then quantized"][1][0], (X, V, s, s))
    assert assert_fp8_collectives(hlo, kinds=("all-to-all",))
    for kinds in ("all-gather", ("all-gather", "all-to-all")):
        with pytest.raises(AssertionError, match="1 of 1 collectives"):
            assert_fp8_collectives(hlo, kinds=kinds)
    with pytest.raises(ValueError, match="kinds must be some of all-gather, .*; got .'gather'"):
        assert_fp8_collectives(hlo, kinds=("gather",))
