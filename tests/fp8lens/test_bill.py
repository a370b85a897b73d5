"""What a program costs, held to what XLA and JAX say of it themselves."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from fp8lens import compare, inspect
from fp8lens.bill.bill import TOTALS
from fp8lens.bill.memory import Holds, Plan, memory_of
from fp8lens.bill.rates import LAUNCHES, RATES, WIRES, kind_of, wire_rate
from fp8lens.cli import main
from fp8lens.hlo.parse import parse_shape
from fp8lens.targets import TARGETS
from helpers.models.gpt import GPTLayer, train_state, train_step

from fp8_decoder import Decoder, new_state
from fp8_decoder import train_step as decoder_step
from fp8_linear import Amaxes, backward, quantize, remember, scale_of, scaled_dot

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
S = jax.ShapeDtypeStruct
M, K, N = 4096, 1024, 4096  # nothing is run


# A block of two matmuls, which is rematerialized in several ways ----------------------------------


@jax.custom_vjp
def linear(x, w, amaxes):
    """Chapter 08's, which names its FP8 arrays for `jax.checkpoint`."""
    return forward(x, w, amaxes)[0]


def forward(x, w, amaxes):
    x_scale, w_scale = scale_of(amaxes.x, e4m3), scale_of(amaxes.w, e4m3)
    x_q = checkpoint_name(quantize(x, x_scale), "fp8")
    w_q = checkpoint_name(quantize(w, w_scale), "fp8")
    y = scaled_dot(x_q, w_q, x_scale, w_scale, x.dtype)
    new_x, new_w = remember(amaxes.x, x), remember(amaxes.w, w)
    return y, (x_q, w_q, x_scale, w_scale, new_x, new_w, amaxes.g)


linear.defvjp(forward, backward)


def block(weights, amaxes, x):
    h = jax.nn.gelu(linear(x, weights[0], amaxes[0]))
    return x + linear(h, weights[1], amaxes[1])


NAMES = jax.checkpoint_policies.save_only_these_names("fp8")
BLOCKS = {
    "plain": block,
    "everything again": jax.checkpoint(block),
    "FP8 saved": jax.checkpoint(block, policy=NAMES),
}
HISTORY = Amaxes(*[S((16,), f32)] * 3)
GIVEN = ([S((N, K), bf16), S((K, N), bf16)], [HISTORY, HISTORY], S((M, K), bf16))


@functools.cache
def of_block(name):
    def loss(weights, amaxes, x):
        return jnp.sum(BLOCKS[name](weights, amaxes, x).astype(f32) ** 2)

    return inspect(jax.grad(loss, argnums=(0, 1, 2)), *GIVEN)


@functools.cache
def of_step(fp8):
    layer = GPTLayer(hidden=256, heads=4, fp8=fp8)
    x = S((2, 128, 256), bf16)
    state = jax.eval_shape(functools.partial(train_state, layer), x)
    return inspect(train_step, state, x, x)


def in_a_loop(x, w):
    return jax.lax.scan(lambda x, w: (jax.nn.gelu(x @ w), x), x, w)


def of_loop():
    return inspect(in_a_loop, S((M, K), bf16), S((4, K, K), bf16))


ASKED = {
    **{name: functools.partial(of_block, name) for name in BLOCKS},
    "a step in bf16": functools.partial(of_step, False),
    "a step in FP8": functools.partial(of_step, True),
    "a loop": of_loop,
}

OPTIMIZER = optax.adamw(1e-3)


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ASKED)
def test_memory_is_what_xla_says(name):
    asked = ASKED[name]()
    memory, theirs = asked.memory, asked.compiled.memory_analysis()
    assert memory.arguments == theirs.argument_size_in_bytes
    assert memory.results == theirs.output_size_in_bytes
    assert memory.aliased == theirs.alias_size_in_bytes
    assert memory.temporaries == theirs.temp_size_in_bytes
    assert memory.total == theirs.total_allocation_bytes
    assert memory.peak == pytest.approx(theirs.peak_memory_in_bytes, rel=1e-3, abs=4096)
    assert sum(memory.by_kind.values()) == sum(memory.by_line.values()) == memory.peak


def test_what_is_alive_is_told_apart():
    in_bf16, in_fp8 = of_step(False).memory.by_kind, of_step(True).memory.by_kind
    # Both layouts: what the forward pass reads, and its transposes for the gradients.
    assert {Holds.FP8, Holds.TRANSPOSED} <= in_fp8.keys()
    assert in_bf16.keys().isdisjoint({Holds.FP8, Holds.TRANSPOSED})
    assert in_bf16[Holds.SAVED] > in_bf16[Holds.GRADIENT] > 0
    (workspace,) = [b for b in of_loop().memory.alive if b.holds is Holds.WORKSPACE]
    assert workspace.source.startswith("tests/fp8lens/test_bill.py:")


def scales_of(memory):
    return [b for b in memory.alive if b.holds is Holds.SCALES]


def test_histories_and_scales_are_told_from_other_small_arrays():
    """Of a block: three histories of each layer, given and returned, and what is made of them."""
    memory = of_block("plain").memory
    histories = [b for b in scales_of(memory) if b.nbytes == 64]
    assert len(histories) == 12 and all(b.nbytes <= 64 for b in scales_of(memory))
    assert sum(b.instruction.startswith("amaxes") for b in histories) == 6  # the arguments
    # Flax's, of 1024 amaxes; the weights of norms and the biases are as small, and no scales.
    in_fp8, in_bf16 = of_step(True).memory, of_step(False).memory
    assert not scales_of(in_bf16) and in_fp8.by_kind[Holds.SCALES] >= 11 * 4096
    more = in_fp8.by_kind[Holds.ARGUMENT] - in_bf16.by_kind[Holds.ARGUMENT]
    assert 0 <= more <= 4096  # of one amax it is not known that it is one


def test_a_scalar_that_passes_through_a_results_place_is_no_larger_than_it_is():
    """XLA puts amaxes where a result is written later; in a step that owns none of its arguments
    there are many such places.
    """
    decoder = Decoder("fp8", letters=128, width=256, heads=4, hidden=512, blocks=1)
    state = jax.eval_shape(lambda key: new_state(decoder, OPTIMIZER, key), jax.random.key(0))

    def step(state, tokens):
        return decoder_step(decoder, OPTIMIZER, state, tokens)

    memory = inspect(step, state, S((8, 65), jnp.int32)).memory
    assert len(scales_of(memory)) > 10
    for buffer in scales_of(memory):
        assert buffer.nbytes == parse_shape(buffer.shape).nbytes


@pytest.mark.parametrize(
    "fn, args",
    [
        # A weight of a norm, a bias and a temperature: float32, small, read by the quantizer.
        (
            lambda x, w, s, v: scaled_dot(
                quantize(x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True)) * v, s), w, s, s
            ),
            (S((M, K), f32), S((N, K), e4m3), S((), f32), S((K,), f32)),
        ),
        (
            lambda x, w, s, v: scaled_dot(quantize(x + v, s), w, s, s),
            (S((M, K), f32), S((N, K), e4m3), S((), f32), S((K,), f32)),
        ),
        (
            lambda x, w, s, v: scaled_dot(quantize(x * v, s), w, s, s),
            (S((M, K), f32), S((N, K), e4m3), S((), f32), S((), f32)),
        ),
        # An amax of what a vector is multiplied into: a kernel of scales reads the vector.
        (
            lambda x, w, s, v: scaled_dot(
                quantize(x * v, 448 / (m := jnp.max(jnp.abs(x * v)))), w, m / 448, s
            ),
            (S((M, K), f32), S((N, K), e4m3), S((), f32), S((K,), f32)),
        ),
    ],
)
def test_a_small_array_that_the_program_needs_anyway_is_no_scale(fn, args):
    kept = {b.instruction.partition(".")[0]: b.holds for b in inspect(fn, *args).memory.alive}
    assert kept["v"] is Holds.ARGUMENT and kept["s"] is Holds.SCALES


def test_histories_that_a_loop_carries_are_fp8_s():
    def layers(x, weights, histories):
        def layer(x, given):
            w, history = given
            scale = 448 / jnp.max(history)
            y = scaled_dot(quantize(x, 1 / scale), w, 1 / scale, jnp.float32(1), bf16)
            amax = jnp.max(jnp.abs(x)).astype(f32)
            return y, jnp.roll(history, 1).at[0].set(amax)

        return jax.lax.scan(layer, x, (weights, histories))

    memory = inspect(layers, S((K, K), bf16), S((8, K, K), e4m3), S((8, 16), f32)).memory
    whole = [b.holds for b in memory.alive if b.shape == "f32[8,16]"]
    assert whole == [Holds.SCALES] * 2  # given, and returned


def test_a_saved_program_has_no_memory_but_a_bill():
    asked = inspect(of_loop().compiled)
    with pytest.raises(TypeError, match="only while it compiles"):
        _ = asked.memory
    assert "memory at the peak" not in asked.bill.totals
    assert asked.bill.totals["bytes moved"] == of_loop().bill.totals["bytes moved"]


def test_a_plan_that_says_nothing_is_nothing():
    assert memory_of(of_loop().module, Plan()).total == 0


# What runs again ----------------------------------------------------------------------------------


def test_what_runs_again_is_what_the_plain_block_does_not_run():
    plain = of_block("plain").bill.totals
    for name in BLOCKS:
        totals = of_block(name).bill.totals
        assert totals["FLOPs again"] == totals["FLOPs"] - plain["FLOPs"]
    assert plain["bytes moved again"] == 0


def test_saved_fp8_is_not_quantized_again():
    again, saved = (of_block(name).bill.again for name in ("everything again", "FP8 saved"))
    assert again.of("quantize") and not saved.of("quantize")
    assert "again for the backward pass: 1 matmul, " in str(of_block("everything again").bill)


# The bill, and two of them ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ASKED)
def test_the_lines_of_a_bill_add_up(name):
    bill = ASKED[name]().bill
    assert list(bill.totals) == [name for name in TOTALS if name in bill.totals]
    moved, fp8, again, alive = map(sum, zip(*bill.by_line.values(), strict=True))
    assert moved == bill.totals["bytes moved"]
    assert fp8 == bill.totals["bytes moved to make FP8"]
    assert again == bill.totals["bytes moved again"]
    assert alive == bill.totals["memory at the peak"]
    written = json.loads(bill.json())
    assert written["totals"] == bill.totals and len(written["lines"]) == len(bill.by_line)
    assert max(map(len, str(bill).splitlines())) <= 100 or "GPTLayer" in str(bill)


def test_what_devices_send_is_in_the_bill():
    from jax.sharding import PartitionSpec as P

    def gathered(x, w):
        return x @ jax.lax.with_sharding_constraint(w, P())

    asked = inspect(
        gathered, S((M, K), bf16), S((K, N), bf16), mesh_shape={"x": 4}, in_specs=(P(), P("x"))
    )
    ((kind, dtype, axis),) = asked.bill.sent
    assert (kind, dtype, axis) == ("all-gather", "bf16", "x")
    assert asked.bill.totals["bytes sent"] == K * N * 2 * 3 // 4
    assert "sent by each device: 6.29 MB of bf16, all-gather over x" in str(asked.bill)


def test_two_programs_are_compared():
    both = compare(of_step(False), of_step(True), ("bf16", "FP8"))
    one, two = of_step(False).bill.totals, of_step(True).bill.totals
    assert (
        both.ratios["memory at the peak"] == two["memory at the peak"] / one["memory at the peak"]
    )
    assert "matmuls in FP8" not in both.ratios  # there is none in bf16
    text = str(both)
    assert re.search(r"^total +bf16 +FP8 +ratio$", text, re.M)
    assert re.search(r"^part +bf16 +FP8 +ratio$", text, re.M)
    assert re.search(r"^moved by kernels: quantize +0 B +\d", text, re.M)
    assert set(json.loads(both.json())) == {"bf16", "FP8", "ratios", "warning"}
    with pytest.raises(TypeError, match="give what fp8lens.inspect returns"):
        compare(of_step(False), "layer.py")


FILE = """\
import jax.numpy as jnp

def in_bf16(x, w):
    return x @ w.T

def in_fp8(x, w):
    x, w = (v.astype(jnp.float8_e4m3fn) for v in (x, w))
    return jnp.dot(x, w.T, preferred_element_type=jnp.bfloat16)
"""
SHAPES = ["--shapes", "bf16[512,256]", "bf16[512,256]"]


def test_the_command_shows_a_bill_and_a_comparison(tmp_path, capsys):
    file = tmp_path / "layers.py"
    file.write_text(FILE)
    assert main([f"{file}:in_fp8", *SHAPES, "--bill"]) == 0
    said = capsys.readouterr().out
    assert "memory: " in said and "making FP8: " in said and "not measured" in said
    assert main([f"{file}:in_fp8", *SHAPES, "--against", f"{file}:in_bf16"]) == 0
    assert re.search(r"in_bf16 +in_fp8 +ratio", capsys.readouterr().out)
    assert main([f"{file}:in_fp8", *SHAPES, "--against", f"{file}:in_bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratios"]["matmuls"] == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("in_bf16", "there is no record 'in_bf16': write it with --save, or give"),
        ("{file}:in_bf17", "has no function 'in_bf17'; nearest: in_bf16"),
    ],
)
def test_a_function_that_is_not_there_is_named(other, why, tmp_path, capsys):
    file = tmp_path / "layers.py"
    file.write_text(FILE)
    assert main([f"{file}:in_fp8", *SHAPES, "--against", other.format(file=file)]) == 2
    assert why in capsys.readouterr().err


# Time ---------------------------------------------------------------------------------------------


def test_a_time_at_published_rates_is_a_matmuls_share_of_the_peak():
    """Of one large matmul, by arithmetic alone: FLOPs over the peak, and over the rate's share."""
    n = 8192
    x = S((n, n), e4m3)

    def product(x, w):
        return jax.lax.dot(x, w.T, preferred_element_type=bf16)

    bill = inspect(product, x, x).bill
    arithmetic = 2 * n**3 / TARGETS["H100"].peak_flops["f8e4m3fn"]
    assert bill.seconds == pytest.approx(arithmetic)
    rate = RATES["matmul"]
    expected = [arithmetic / share for share in (rate.share, rate.most, rate.least)]
    assert [*bill.calibrated] == pytest.approx(expected)


@pytest.mark.parametrize("name", ASKED)
def test_times_are_in_their_order_and_never_below_the_roofline(name):
    bill = ASKED[name]().bill
    assert bill.seconds <= bill.calibrated.shortest <= bill.calibrated.likely
    assert bill.calibrated.likely <= bill.calibrated.longest
    assert "at the rates that others published" in bill.summary[-2]


@pytest.mark.parametrize(
    "fn, kind",
    [
        (lambda x: x.T.copy() + 0 * x.T, "transpose"),
        (lambda x: jnp.exp(x), "pointwise"),
        (lambda x: jnp.max(jnp.abs(x), 1), "reduction"),
    ],
)
def test_a_kernels_rate_is_of_what_it_does(fn, kind):
    ledger = inspect(fn, S((512, 1024), bf16)).ledger
    assert kind in [kind_of(line) for line in ledger]


def test_what_has_no_rate_has_no_time():
    bill = inspect(lambda x: jnp.linalg.cholesky(x), S((64, 64), f32)).bill
    assert bill.calibrated is None and "time at published rates" not in bill.totals


@pytest.mark.parametrize("name", ASKED)
def test_launches_are_a_line_of_their_own(name):
    bill = ASKED[name]().bill
    count = sum(line.runs for line in bill.ledger)
    for how, gap in LAUNCHES.items():
        expected = [count * seconds for seconds in (gap.likely, gap.least, gap.most)]
        assert [*bill.launches[how]] == pytest.approx(expected)
    said = bill.summary[-1]
    assert said.startswith(f"launches: {count} kernel") and said.endswith("not measured")
    assert json.loads(bill.json())["launches"].keys() == LAUNCHES.keys()


def test_each_gap_has_a_range_and_says_from_where():
    for gap in LAUNCHES.values():
        assert 0 < gap.least <= gap.likely <= gap.most < 1e-5
        assert re.search(r"20\d\d-\d\d-\d\d", gap.source)


def test_each_rate_has_a_range_around_it_and_says_from_where():
    for rate in RATES.values():
        assert 0 < rate.least <= rate.share <= rate.most <= 1
        assert "assumption" in rate.source or re.search(r"20\d\d-\d\d-\d\d", rate.source)


def test_a_wires_rate_is_that_of_the_network_cards_which_a_group_has():
    nvlink, card = WIRES["NVLink"].likely, WIRES["network"].likely
    assert wire_rate(8) == wire_rate(2, stride=4) == nvlink  # within a host
    assert wire_rate(64) == min(nvlink, 8 * card) == nvlink  # all cards of a host
    assert wire_rate(32, stride=8) == card  # one of each host
    assert wire_rate(8, stride=4) == 2 * card
    assert wire_rate(64, kind="all-to-all") == card
    assert wire_rate(16, stride=8, end="most") == WIRES["network"].most
    assert all(wire.likely <= wire.most and wire.source for wire in WIRES.values())
