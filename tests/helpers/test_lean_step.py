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
from tests.weekly import one_in, weekly

import lean_step
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
    scales = lean_step.scales_of(lean, state.histories, x.shape)
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


@pytest.mark.parametrize(
    "fields, worse",
    one_in(
        5,
        [
            ({}, 2),
            ({"up_in_fp8": True}, 3),
            ({"fp8": False}, 3),
            ({"fp8_attention": "forward"}, 3),
            ({"fp8_attention": "both", "causal": True}, 4),
            ({"scales": "static", "up_in_fp8": True, "fp8_attention": "both"}, 4),
        ],
    ),
)
def test_results_and_gradients_are_as_near_to_f32_as_flaxs(trained, fields, worse):
    """In decibels, of the same weights; the result, and each gradient."""
    lean, (x, target) = SMALL(**fields), batch(5)
    state = trained if lean.measures else new_state(lean, jax.random.key(0))
    state = warm_up(lean, copied(state), x, target)  # amaxes of this batch
    layer = functools.partial(gpt.GPTLayer, HIDDEN, HEADS, causal=lean.causal)
    with jax.default_matmul_precision("highest"):
        wide = layer(dtype=f32)
        y = wide.apply({"params": in_flax(state)}, x)
        exact = of_flax(wide, state, x.astype(f32), target)
    scales = lean_step.scales_of(lean, state.histories, x.shape) | state.code_scales
    made = lean_step.apply(lean, lean_step.new_slots(lean, x), state.others, state.codes, scales, x)
    assert decibels(made, y) > 25
    ours, theirs = gradients(lean, state, x, target), of_flax(layer(fp8=lean.fp8), state, x, target)
    assert jax.tree.structure(ours) == jax.tree.structure(exact)
    leaves = zip(*map(jax.tree.leaves, (ours, theirs, exact)), strict=True)
    for own, other, g in leaves:
        assert decibels(own, g) > max(15, decibels(other, g) - worse)


def test_histories_and_codes_are_those_of_the_step(trained):
    x, target = batch(5)
    after, _ = train_step(SMALL(), copied(trained), x, target)
    rows = dict(zip(lean_step.TENSORS, np.asarray(after.histories), strict=True))
    old = dict(zip(lean_step.TENSORS, np.asarray(trained.histories), strict=True))
    for name, row in rows.items():
        assert np.array_equal(row[1:], old[name][:-1]), name
        unused = name in (*lean_step.RESULTS, *lean_step.IN_ATTENTION)
        assert (row[0] > 0) != unused, name
    for name, w in after.weights.items():
        assert rows[name][0] == jnp.max(jnp.abs(w))  # the new weight's: its codes are the next's
        codes, transposed = after.codes[name]
        assert np.array_equal(codes, transposed.T)
        assert decibels(codes.astype(f32) * after.code_scales[name], w) > 28, name


@weekly
def test_the_kernels_train_as_xla_does():
    """By the interpreter: a code may be its neighbour where XLA computes a bit otherwise. The pass
    of AdamW has four tensors, in narrower tiles.
    """
    states, errors = [], []
    for by in ("xla", "interpret"):
        lean = SMALL(by=by, up_in_fp8=True, optimizer=AdamW(1e-3))
        state = new_state(lean, jax.random.key(0))
        for seed in range(2):
            state, error = train_step(lean, state, *batch(seed))
        states.append(state)
        errors.append(float(error))
    assert errors[0] == pytest.approx(errors[1], rel=3e-3)
    for a, b in zip(*(jax.tree.leaves(state.weights) for state in states), strict=True):
        assert decibels(a, b) > 40


def test_adamw_in_a_pass_is_optaxs():
    """In bf16, where a step hides no rounding in a code; biases and norms decay in both."""
    rate = optax.linear_schedule(1e-2, 1e-3, 10)
    ours, theirs = (
        SMALL(fp8=False, optimizer=one)
        for one in (AdamW(rate, decay=0.1), optax.adamw(rate, weight_decay=0.1))
    )
    state, other = (new_state(lean, jax.random.key(0)) for lean in (ours, theirs))
    for seed in range(3):
        state, _ = train_step(ours, state, *batch(seed))
        other, _ = train_step(theirs, other, *batch(seed))
    for name, (first, second) in state.moments.items():
        if name != "k bias":  # its gradient is zero but for rounding: softmax does not see it
            assert decibels(first, other.moments[0].mu[name]) > 40, name
            assert decibels(second, other.moments[0].nu[name]) > 40, name
    for name, w in (state.weights | state.others).items():
        if name != "k bias":
            np.testing.assert_allclose(w, (other.weights | other.others)[name], atol=1e-3)


def test_any_transformation_of_optax_trains():
    """Also one that reads all gradients at once."""
    lean = SMALL(optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    x, target = batch()
    state, losses = warm_up(lean, new_state(lean, jax.random.key(0)), x, target), []
    for _ in range(5):
        state, loss = train_step(lean, state, x, target)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("careful, optimizer", [(True, AdamW()), (False, Descent())])
def test_every_matmul_of_a_weight_is_fp8_and_no_kernel_transposes(careful, optimizer):
    lean = Lean(hidden=512, heads=4, careful=careful, optimizer=optimizer)
    x = jax.ShapeDtypeStruct((1, 256, 512), bf16)
    state = jax.eval_shape(functools.partial(new_state, lean), jax.random.key(0))
    seen = inspect(functools.partial(train_step, lean), state, x, x)
    rows = seen.report.fp8_rows
    assert len(rows) == 18 and all(row.library == "cublasLt" for row in rows)
    assert sum(row.precision == "HIGHEST" for row in rows) == (12 if careful else 0)
    moved = [line.kernel for line in seen.ledger if line.kernel.bytes_moved > 1e5]
    assert not [kernel for kernel in moved if "transpose" in kernel.name]


@pytest.mark.parametrize(
    "passes, scales, in_fp8", [("forward", "delayed", 20), ("both", "static", 25)]
)
def test_cudnns_attention_reads_codes_that_matmuls_write(passes, scales, in_fp8):
    """No kernel quantizes q, k, v or the result; with static scales no call takes an amax."""
    x = jax.ShapeDtypeStruct((1, 256, 512), bf16)
    lean = Lean(512, 4, attention="cudnn", fp8_attention=passes, scales=scales, up_in_fp8=True)
    state = jax.eval_shape(functools.partial(new_state, lean), jax.random.key(0))
    rows = inspect(functools.partial(train_step, lean), state, x, x).report.rows
    assert len(rows) == 25 and sum(row.is_fp8 for row in rows) == in_fp8
    into_attention = 4 if passes == "forward" else 5  # q, k, v, up; and the heads' gradient
    made = [row for row in rows if row.library == "cublasLt" and row.out_dtype == "f8e4m3fn"]
    assert len(made) == into_attention and all(row.amax == lean.measures for row in made)


def test_what_does_not_fit_is_refused(trained):
    with pytest.raises(ValueError, match="not 3 heads and a multiple of 16"):
        Lean(hidden=128, heads=3)
    with pytest.raises(ValueError, match='FP8 attention need attention="cudnn"'):
        Lean(causal=True)
    with pytest.raises(ValueError, match='"forward" or "both" with fp8=True'):
        Lean(attention="cudnn", fp8_attention="forward", fp8=False)
    with pytest.raises(ValueError, match='"delayed" or "static", not \'current\''):
        Lean(scales="current")
    with pytest.raises(ValueError, match=r"takes bf16\[batch, sequence, 128\], not"):
        jax.eval_shape(functools.partial(train_step, SMALL()), trained, *batch(shape=(2, 64, 256)))
