"""A training that was stopped goes on bit for bit, scales included; exported weights give the same
scores."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers.training import checkpoints

from fp8_decoder import Decoder, new_state, scores, train_step

SMALL = {"letters": 64, "width": 32, "heads": 2, "hidden": 48, "blocks": 2}
ADAM = optax.adamw(1e-3)
DECODER = Decoder("fp8", **SMALL)


def tokens(step: int) -> jax.Array:
    return jax.random.randint(jax.random.key(step), (4, 17), 0, 64)


def begun(seed: int = 0):
    return new_state(DECODER, ADAM, jax.random.key(seed))


def trained(state, first: int, last: int):
    for step in range(first, last):
        state, _ = train_step(DECODER, ADAM, state, tokens(step))
    return state


def test_a_training_goes_on_bit_for_bit(tmp_path):
    checkpoints.save(tmp_path / "run", 3, trained(begun(), 0, 4))
    step, state = checkpoints.restore(tmp_path / "run", begun(1))
    assert step == 3
    jax.tree.map(np.testing.assert_array_equal, trained(state, step + 1, 7), trained(begun(), 0, 7))


def test_without_the_histories_it_does_not(tmp_path):
    """So the checkpoint needs them."""
    state = trained(begun(), 0, 4)
    empty = jax.tree.map(jnp.zeros_like, state.amaxes)
    forgot = state._replace(
        amaxes=empty,
        weights=jax.tree.map(jnp.copy, state.weights),
        optimizer=jax.tree.map(jnp.copy, state.optimizer),
    )
    whole, without = trained(state, 4, 5), trained(forgot, 4, 5)
    assert any(np.any(whole.weights[n] != without.weights[n]) for n in whole.weights)


def test_the_newest_checkpoint_is_taken_and_few_are_kept(tmp_path):
    state = begun()
    for step in range(4):
        checkpoints.save(tmp_path, step, state)
    assert checkpoints.restore(tmp_path, begun())[0] == 3
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == checkpoints.KEPT


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoints.restore(tmp_path / "none", begun()) is None
    assert checkpoints.restore(tmp_path, begun()) is None


def test_another_models_checkpoint_is_refused(tmp_path):
    checkpoints.save(tmp_path, 0, begun())
    wider = Decoder("fp8", **(SMALL | {"hidden": 64}))
    with pytest.raises(ValueError, match="shape|hidden|match"):
        checkpoints.restore(tmp_path, new_state(wider, ADAM, jax.random.key(0)))


def test_exported_weights_give_the_same_scores_in_another_process(tmp_path):
    state = trained(begun(), 0, 4)
    exported = checkpoints.export(DECODER, state)
    checkpoints.save_exported(tmp_path / "weights", exported)
    expected = scores(DECODER, state.weights, state.amaxes, tokens(9)[:, :-1])
    np.save(tmp_path / "tokens.npy", tokens(9)[:, :-1])
    code = (
        "import sys, numpy as np\n"
        "from helpers.training import checkpoints\n"
        "from fp8_decoder import Decoder\n"
        f"loaded = checkpoints.load_exported(sys.argv[1] + '/weights')\n"
        f"given = np.load(sys.argv[1] + '/tokens.npy')\n"
        f"out = checkpoints.exported_scores(Decoder('fp8', **{SMALL}), loaded, given)\n"
        "np.save(sys.argv[1] + '/out.npy', out)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_exported_weights_are_fp8():
    state = trained(begun(), 0, 2)
    exported = checkpoints.export(DECODER, state)
    assert set(exported.codes) == set(DECODER.in_fp8)
    assert {codes.dtype for codes in exported.codes.values()} == {jnp.dtype(jnp.float8_e4m3fn)}
    assert set(exported.rest) == {"letters"}


def test_a_decoder_without_fp8_has_nothing_to_export():
    plain = Decoder("bf16", **SMALL)
    with pytest.raises(ValueError, match='give it "fp8"'):
        checkpoints.export(plain, new_state(plain, ADAM, jax.random.key(0)))
