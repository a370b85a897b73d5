"""The lean layer: the function of `gpt`'s layer, gradients as good as Flax's in FP8, scales that
follow what was measured, and the kernels that it promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8lens import inspect
from helpers.models import gpt
from tests.weekly import weekly

import lean_step
from fused_attention import fused_attention
from lean_step import AdamW, Descent, Lean, State, new_state, train_step, warm_up

f32, bf16 = jnp.float32, jnp.bfloat16
HIDDEN, HEADS, SHAPE = 128, 2, (2, 64, 128)
SMALL = functools.partial(Lean, hidden=HIDDEN, heads=HEADS, by="xla", attention="xla")


def batch(seed=1, shape=SHAPE):
    return [jax.random.normal(key, shape, bf16) for key in jax.random.split(jax.random.key(seed))]


def copied(state):
    """A step uses up its state."""
    return jax.tree.map(jnp.copy, state)


def in_flax(state: State):
    """The same parameters for `gpt.GPTLayer`."""

    def of_each_head(parts):
        """Flax's queries, keys and values of a head are next to each other."""
        parts = [part.reshape(HEADS, HIDDEN // HEADS, *part.shape[1:]) for part in parts]
        joined = jnp.concatenate(parts, axis=1)
        return joined.reshape(3 * HIDDEN, *joined.shape[2:])

    weights = state.weights | {"qkv": of_each_head([state.weights[n] for n in "qkv"])}
    biases = {n: state.others[f"{n} bias"] for n in state.weights}
    biases["qkv"] = of_each_head([biases[n] for n in "qkv"])
    names = ("qkv", "projection", "up", "down")
    params = {n: {"kernel": weights[n].T, "bias": biases[n]} for n in names}
    for norm in ("norm 1", "norm 2"):
        params[norm.replace(" ", "_")] = {
            part: state.others[f"{norm} {part}"] for part in ("scale", "bias")
        }
    return params


@pytest.fixture(scope="module")
def trained():
    """A state with histories, and with no bias zero and no norm's scale one."""
    state = new_state(SMALL(), jax.random.key(0))
    for seed in range(3):
        state, _ = train_step(SMALL(), state, *batch(seed))
    return state


def gradients(lean, state, x, target):
    """By name, as Flax has them, f32."""
    scales = lean_step.scales_of(state.histories)
    _, slots, others = jax.jit(lean_step.gradients, static_argnums=0)(
        lean, state, scales, x, target
    )
    weights = jax.tree.map(lambda g: g.astype(f32), slots.weights)
    return in_flax(state._replace(weights=weights, others=others))


def of_flax(layer, state, x, target):
    """The gradients of `gpt`'s layer, with scales of the third step on the same batch."""
    variables = {"params": in_flax(state)}
    if layer.fp8:
        meta = gpt.train_state(layer, x).params
        for _ in range(3):
            meta = variables | {k: v for k, v in meta.items() if k != "params"}
            found = _of_flax(layer, meta, x, target)
            meta = {k: v for k, v in found.items() if k != "params"}
        return found["params"]
    return _of_flax(layer, variables, x, target)["params"]


@functools.partial(jax.jit, static_argnums=0)
def _of_flax(layer, variables, x, target):
    def loss(variables):
        return jnp.mean(jnp.square(layer.apply(variables, x).astype(f32) - target))

    return jax.grad(loss)(variables)


def decibels(found, exact):
    """How far a gradient's error is below it."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    with np.errstate(divide="ignore"):  # none: infinitely many
        return 10 * np.log10(np.sum(exact**2) / np.sum((found - exact) ** 2))


@pytest.mark.parametrize("up_in_fp8", [False, True])
def test_gradients_are_as_near_to_f32_as_flaxs_in_fp8(trained, up_in_fp8):
    lean, state = SMALL(up_in_fp8=up_in_fp8), copied(trained)
    x, target = batch(5)
    state = warm_up(lean, state, x, target)  # amaxes of this batch
    layer = functools.partial(gpt.GPTLayer, HIDDEN, HEADS)
    with jax.default_matmul_precision("highest"):
        exact = of_flax(layer(dtype=f32), state, x.astype(f32), target)
    ours, theirs = gradients(lean, state, x, target), of_flax(layer(fp8=True), state, x, target)
    assert jax.tree.structure(ours) == jax.tree.structure(exact)
    for path, g in jax.tree.leaves_with_path(exact):
        own, other = (
            decibels(dict(jax.tree.leaves_with_path(tree))[path], g) for tree in (ours, theirs)
        )
        assert own > 15 and own > other - (2 if up_in_fp8 else 1), (path, own, other)


def test_it_computes_the_layer_of_the_quickstart(trained):
    x, _ = batch(5)
    with jax.default_matmul_precision("highest"):
        exact = gpt.GPTLayer(HIDDEN, HEADS, f32).apply({"params": in_flax(trained)}, x)
    scales = lean_step.scales_of(trained.histories) | trained.code_scales
    for up_in_fp8 in (False, True):
        lean = SMALL(up_in_fp8=up_in_fp8)
        slots = lean_step._slots(lean, x)
        y = lean_step.apply(lean, slots, trained.others, trained.codes, scales, x)
        assert decibels(y, exact) > 25


def test_gradients_of_what_is_around_it(trained):
    """`apply` is differentiated for its input, too."""
    x, target = batch(5)
    scales = lean_step.scales_of(trained.histories) | trained.code_scales

    def loss(x):
        slots = lean_step._slots(SMALL(), x)
        y = lean_step.apply(SMALL(), slots, trained.others, trained.codes, scales, x)
        return jnp.mean(jnp.square(y.astype(f32) - target))

    def exact(x):
        y = gpt.GPTLayer(HIDDEN, HEADS, f32).apply({"params": in_flax(trained)}, x)
        return jnp.mean(jnp.square(y - target))

    assert decibels(jax.grad(loss)(x), jax.grad(exact)(x.astype(f32))) > 15


def test_what_is_measured_is_the_amax_of_each_tensor(trained):
    x, target = batch(5)
    before = copied(trained)
    after, _ = train_step(SMALL(), copied(trained), x, target)
    rows = dict(zip(lean_step.TENSORS, np.asarray(after.histories), strict=True))
    old = dict(zip(lean_step.TENSORS, np.asarray(before.histories), strict=True))
    for name, row in rows.items():
        assert np.array_equal(row[1:], old[name][:-1]), name
        assert (row[0] > 0) == (name != lean_step.RESULT), name
    for name, w in after.weights.items():
        assert rows[name][0] == jnp.max(jnp.abs(w))  # the new weight's: its codes are the next's
    values = x.astype(f32).reshape(-1, HIDDEN)
    mean, inverse = lean_step._statistics(values)
    norm = (values - mean[:, None]) * inverse[:, None]
    norm = norm * before.others["norm 1 scale"] + before.others["norm 1 bias"]
    np.testing.assert_allclose(rows["norm 1"][0], jnp.max(jnp.abs(norm)), rtol=1e-5)


def test_codes_are_those_of_the_new_weights(trained):
    state, _ = train_step(SMALL(), copied(trained), *batch(5))
    for name, w in state.weights.items():
        codes, transposed = state.codes[name]
        assert np.array_equal(codes, transposed.T)
        error = np.abs(codes.astype(f32) * state.code_scales[name] - w)
        unit = 448 * state.code_scales[name] * 2.0**-9  # the smallest of E4M3 times its scale
        assert (error <= 2.0**-4 * np.abs(w) + unit).all(), name


@pytest.mark.parametrize("up_in_fp8", [pytest.param(False, marks=weekly), True])
def test_the_kernels_train_as_xla_does(up_in_fp8):
    """By the interpreter: a code may be its neighbour where XLA computes a bit otherwise."""
    ours, errors = {}, {}
    for by in ("xla", "interpret"):
        lean = SMALL(by=by, up_in_fp8=up_in_fp8)
        state = new_state(lean, jax.random.key(0))
        for seed in range(3):
            state, errors[by] = train_step(lean, state, *batch(seed))
        ours[by] = state
    assert abs(errors["xla"] / errors["interpret"] - 1) < 3e-3
    for a, b in zip(*map(jax.tree.leaves, (s.weights for s in ours.values())), strict=True):
        assert decibels(a, b) > 50


def test_after_the_warm_up_small_gradients_do_not_vanish():
    """Those of a mean over millions of numbers are below E5M2's smallest."""
    lean, state = SMALL(), new_state(SMALL(), jax.random.key(0))
    x, target = batch()

    def weights_with_gradients(state):
        scales = lean_step.scales_of(state.histories)

        def loss(slots):
            out = lean_step.apply(
                lean, slots, state.others, state.codes, scales | state.code_scales, x
            )
            return 1e-9 * jnp.mean(jnp.square(out.astype(f32) - target))

        return jax.grad(loss)(lean_step._slots(lean, x))

    found = weights_with_gradients(state)
    assert not any(jnp.any(g) for g in found.weights.values())
    for _ in range(3):
        amaxes = weights_with_gradients(state).amaxes | dict.fromkeys(state.weights, jnp.ones(1))
        state = state._replace(histories=lean_step.remember(state.histories, amaxes))
    found = weights_with_gradients(state)
    assert all(jnp.any(g) for g in found.weights.values())


def test_it_learns_and_microbatches_are_one_batch():
    lean, losses = SMALL(), []
    x, target = batch(shape=(4, 64, 128))
    one = new_state(lean, jax.random.key(0))
    parts = copied(one)
    for _ in range(10):
        one, loss = train_step(lean, one, x, target)
        split = (t.reshape(2, 2, 64, 128) for t in (x, target))
        parts, same = train_step(lean, parts, *split)
        losses.append(float(loss))
        assert abs(loss / same - 1) < 0.01
    assert all(after < before for before, after in zip(losses, losses[1:], strict=False))
    for a, b in zip(*map(jax.tree.leaves, (one.weights, parts.weights)), strict=True):
        assert decibels(a, b) > 40


def shapes(lean, *dims):
    x = jax.ShapeDtypeStruct((*dims, lean.hidden), bf16)
    state = jax.eval_shape(functools.partial(new_state, lean), jax.random.key(0))
    return state, x, x


def test_adamw_in_a_pass_is_optaxs():
    """In bf16, where a step hides no rounding in a code; biases and norms decay in both."""
    rate = optax.linear_schedule(1e-2, 1e-3, 10)
    ours, theirs = (
        SMALL(fp8=False, optimizer=one)
        for one in (AdamW(rate, decay=0.1), optax.adamw(rate, weight_decay=0.1))
    )
    state, other = (new_state(lean, jax.random.key(0)) for lean in (ours, theirs))
    for seed in range(4):
        state, _ = train_step(ours, state, *batch(seed))
        other, _ = train_step(theirs, other, *batch(seed))
        # From one state, so that a difference is that of one step.
        _, first, second = zip(*[(n, *state.moments[n]) for n in state.moments], strict=True)
        for part, found in (("mu", first), ("nu", second)):
            exact = getattr(other.moments[0], part)
            for name, value in zip(state.moments, found, strict=True):
                assert decibels(value, exact[name]) > 60, (part, name)
        for name, w in (state.weights | state.others).items():
            np.testing.assert_allclose(w, (other.weights | other.others)[name], atol=1e-4)


def test_any_transformation_of_optax_trains():
    """Also one that reads all gradients at once; and the codes are those of the new weights."""
    lean = SMALL(optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    x, target = batch()
    state, losses = warm_up(lean, new_state(lean, jax.random.key(0)), x, target), []
    for _ in range(5):
        state, loss = train_step(lean, state, x, target)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    for name, w in state.weights.items():
        assert decibels(state.codes[name][0].astype(f32) * state.code_scales[name], w) > 25


def test_the_warm_up_measures_alone():
    lean = SMALL(optimizer=AdamW())
    state = new_state(lean, jax.random.key(0))
    after = warm_up(lean, state, *batch())
    assert jnp.all(after.histories[:, 0] > 0) or not lean.up_in_fp8
    for a, b in zip(
        *(jax.tree.leaves(one._replace(histories=None)) for one in (state, after)), strict=True
    ):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("fp8", [False, True])
def test_causal_attention_sees_no_later_token(trained, fp8):
    lean = SMALL(causal=True, fp8=fp8)
    state = trained if fp8 else new_state(lean, jax.random.key(0))
    x, _ = batch(5)
    scales = lean_step.scales_of(state.histories) | state.code_scales

    def of(x):
        slots = lean_step._slots(lean, x)
        return lean_step.apply(lean, slots, state.others, state.codes, scales, x)

    changed = x.at[:, 40:].multiply(-1)
    assert np.array_equal(of(x)[:, :40], of(changed)[:, :40])
    assert not np.array_equal(of(x)[:, 40:], of(changed)[:, 40:])
    exact = gpt.GPTLayer(HIDDEN, HEADS, f32, causal=True).apply({"params": in_flax(state)}, x)
    assert decibels(of(x), exact) > 25


def test_gradients_in_bf16_are_as_near_to_f32_as_flaxs():
    lean = SMALL(fp8=False)
    x, target = batch(5)
    state = new_state(lean, jax.random.key(0))
    layer = functools.partial(gpt.GPTLayer, HIDDEN, HEADS)
    with jax.default_matmul_precision("highest"):
        exact = of_flax(layer(dtype=f32), state, x.astype(f32), target)
    ours, theirs = gradients(lean, state, x, target), of_flax(layer(), state, x, target)
    for path, g in jax.tree.leaves_with_path(exact):
        own, other = (
            decibels(dict(jax.tree.leaves_with_path(tree))[path], g) for tree in (ours, theirs)
        )
        assert own > other - 3, (path, own, other)


@pytest.mark.parametrize("careful, optimizer", [(True, AdamW()), (False, Descent())])
def test_the_backward_pass_asks_for_careful_sums_and_stays_fp8(careful, optimizer):
    lean = Lean(hidden=512, heads=4, up_in_fp8=True, careful=careful, optimizer=optimizer)
    seen = inspect(functools.partial(train_step, lean), *shapes(lean, 1, 256))
    rows = seen.report.fp8_rows
    assert len(rows) == 18 and all(row.library == "cublasLt" for row in rows)
    assert sum(row.precision == "HIGHEST" for row in rows) == (12 if careful else 0)


def test_the_step_in_bf16_is_restructured_alike():
    """Biases in the calls, scores on the chip, and no weight converted but where it is updated."""
    lean = Lean(hidden=512, heads=4, fp8=False)
    seen = inspect(functools.partial(train_step, lean), *shapes(lean, 2, 1, 256))
    assert not seen.report.fp8_rows
    lines = [*seen.ledger]
    in_calls = [line for line in lines if "epilogue" in str(line.kernel.instruction)]
    assert len(in_calls) >= 5
    converted = [line for line in lines if "bf16[512,2048]" in line.kernel.result]
    of_weights = [line for line in converted if line.what != "matmul"]
    assert {line.runs for line in of_weights} <= {1}


def test_every_matmul_of_a_weight_is_fp8_and_weights_are_quantized_once():
    """At a size at which XLA would merge the products of queries, keys and values; of three
    microbatches."""
    lean = Lean(hidden=512, heads=4)
    seen = inspect(functools.partial(train_step, lean), *shapes(lean, 3, 1, 256))
    rows = [row for row in seen.report.rows if row.library == "cublasLt"]
    assert len(rows) == 18 and all("f8" in row.math_dtype for row in rows)
    lines = [*seen.ledger]
    moved = [line.kernel for line in lines if line.kernel.bytes_moved > 1e5]
    assert not [k for k in moved if "transpose" in k.name]
    passes = [line for line in lines if line.what == "opaque" and "f8e" in line.kernel.result]
    of_weights = [line for line in passes if "f8e4m3fn" in line.kernel.result and line.runs == 1]
    others = [line for line in passes if line not in of_weights]
    assert len(of_weights) == 6 and {line.runs for line in others} == {3}
    assert len(others) == 4 + 6  # operands and gradients


@pytest.mark.parametrize(
    "shape, dtype, says",
    [
        ((1, 128, 2, 64), bf16, "multiples of 256 queries .* not 128, 128 and 64"),
        ((1, 256, 2, 32), bf16, "heads of 64 or 128 numbers, not 256, 256 and 32"),
        ((1, 256, 2, 64), f32, "compiled for bf16, not float32"),
    ],
)
def test_attention_says_what_it_takes(shape, dtype, says):
    x = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(fused_attention, x, x, x)


@pytest.mark.parametrize(
    "x, target, says",
    [
        (
            (2, 64, 256),
            (2, 64, 256),
            r"takes bf16\[batch, sequence, 128\], not bfloat16\[2, 64, 256\]",
        ),
        ((64, 128), (64, 128), r"or microbatches of it, and of one shape: got \[64, 128\]"),
        ((2, 2, 64, 128), (2, 64, 128), r"got \[2, 2, 64, 128\] and \[2, 64, 128\]"),
    ],
)
def test_an_input_of_another_shape_is_refused(x, target, says):
    state = jax.eval_shape(functools.partial(new_state, SMALL()), jax.random.key(0))
    x, target = (jax.ShapeDtypeStruct(shape, bf16) for shape in (x, target))
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(functools.partial(train_step, SMALL()), state, x, target)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not 0 heads"):
        Lean(heads=0)
    with pytest.raises(ValueError, match="not 3 heads and a multiple of 16"):
        Lean(hidden=128, heads=3)
    with pytest.raises(ValueError, match="no causal backward pass: give attention"):
        Lean(causal=True)
    with pytest.raises(ValueError, match="up_in_fp8 is for fp8=True"):
        Lean(fp8=False, up_in_fp8=True)
    with pytest.raises(ValueError, match="masks nothing"):
        layer = gpt.GPTLayer(128, 2, attention="fused", causal=True)
        jax.eval_shape(layer.init, jax.random.key(0), batch()[0])
