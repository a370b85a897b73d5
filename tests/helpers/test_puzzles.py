import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.puzzles import alike, as_number, check, raised, same_results, types_of

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
a = jax.random.normal(jax.random.key(0), (32, 64)).astype(e4m3)
b = jax.random.normal(jax.random.key(1), (48, 64)).astype(e4m3)


def right(a, b):
    return jnp.clip(jax.nn.relu(jax.lax.dot(a, b.T, preferred_element_type=f32)), -448, 448).astype(
        e4m3
    )


def said(capsys, *args, **kwargs):
    solved = check(*args, **kwargs)
    return solved, capsys.readouterr().out


def test_a_right_answer_is_solved(capsys):
    solved, text = said(capsys, right, a, b, like=right, epilogue="RELU", amax=False, alpha=1)
    assert solved and text.startswith("right: solved") and "✗" not in text


def test_an_empty_answer_is_not(capsys):
    def stub(a, b): ...

    solved, text = said(capsys, stub, a, b)
    assert not solved and "returns nothing yet" in text


def test_an_answer_that_does_not_trace_says_why(capsys):
    solved, text = said(capsys, lambda a, b: jax.lax.dot(a, b), a, b)
    assert not solved and "it does not trace: " in text


def test_wrong_numbers_are_seen(capsys):
    solved, text = said(capsys, lambda a, b: right(a, b) * 2, a, b, like=right)
    assert not solved and "its numbers differ" in text


def test_which_result_is_wrong_is_named(capsys):
    def two(a, b, factor=1):
        d = jax.lax.dot(a, b.T, preferred_element_type=f32)
        return d, jnp.max(jnp.abs(d)) * factor

    solved, text = said(capsys, lambda a, b: two(a, b, factor=3), a, b, like=two)
    assert not solved and "the numbers of result 2 differ: they are 3 times the right ones" in text


def test_a_wrong_type_or_shape_is_named(capsys):
    solved, text = said(capsys, lambda a, b: right(a, b).astype(f32), a, b, like=right)
    assert not solved and "it returns float32[32,48] (wanted float8_e4m3fn[32,48])" in text


def test_a_kernel_outside_is_named(capsys):
    def unclamped(a, b):
        return jax.nn.relu(jax.lax.dot(a, b.T, preferred_element_type=f32)).astype(e4m3)

    solved, text = said(capsys, unclamped, a, b, like=right, epilogue="RELU")
    assert not solved and "2 kernels in all (at most 1); outside the call:" in text


def test_what_moves_beside_the_call_is_counted(capsys):
    def halves(a, b):
        return jax.lax.dot(a, b.T, preferred_element_type=f32) / 2 + 1

    most = 2 * 4 * 32 * 48
    assert said(capsys, halves, a, b, kernels_wanted=2, most_beside=most)[0]
    solved, text = said(capsys, halves, a, b, kernels_wanted=2, most_beside=most - 1)
    assert not solved and f"✗ {most} bytes moved outside the call (at most {most - 1})" in text


def test_lost_fp8_and_a_missing_epilogue_are_named(capsys):
    solved, text = said(capsys, lambda a, b: jax.lax.dot(a, a.T), a.astype(jnp.float8_e5m2), b)
    assert not solved and "0 FP8 matmul calls (wanted 1)" in text
    solved, text = said(capsys, lambda a, b: jax.lax.dot(a, b.T), a, b, epilogue="RELU", amax=True)
    assert (
        not solved
        and "epilogue is DEFAULT (wanted RELU)" in text
        and "amax is False (wanted True)" in text
    )


def test_a_scale_that_is_not_the_argument_is_seen(capsys):
    def scaled(a, b, scale):
        d = jax.nn.relu(jax.lax.dot(a.astype(f32) * scale, b.astype(f32).T))
        return jnp.clip(d, -448, 448).astype(e4m3)

    scale = jnp.float32(0.5)
    assert said(capsys, scaled, a, b, scale, like=scaled)[0]
    solved, text = said(capsys, lambda a, b, _: scaled(a, b, scale), a, b, scale, like=scaled)
    assert not solved and "with other scales its numbers differ" in text


@pytest.mark.parametrize(
    "value", [3, 3.0, np.float32(3), np.array(3.0), jnp.float32(3), jnp.bfloat16(3), np.int64(3)]
)
def test_numbers_of_every_library_are_numbers(value):
    assert as_number(value) == 3


@pytest.mark.parametrize(
    "value", [None, ..., "3", [3], np.array([3.0]), jnp.ones(1), 3j, np.nan, jnp.inf, len]
)
def test_what_is_not_one_finite_number_is_none(value):
    assert as_number(value) is None


def test_results_are_alike_in_structure_shapes_and_types():
    x = jnp.zeros((2, 3))
    assert alike({"x": x, "n": (x[0],)}, {"n": (x[1],), "x": x + 1})
    for other in (None, x, [x], (x, x), {"x": x}, (x[0],), (x.astype(e4m3),)):
        assert not alike(other, (x,))


def test_types_are_said_in_jaxs_own_names():
    assert types_of((a, {"n": jnp.float32(1)})) == "float8_e4m3fn[32,64], float32[]"
    assert types_of(None) == ""


def test_what_is_raised_is_said_in_one_line():
    assert raised(ValueError("too large\nby far")) == "ValueError: too large"
    assert raised(NotImplementedError()) == "NotImplementedError"


def test_results_are_compared_without_a_compiler():
    assert same_results(right, right, (a, b)) == (True, "its numbers are right")
    assert same_results(lambda a, b: None, right, (a, b))[1].startswith("it returns nothing yet")
    with pytest.raises(ZeroDivisionError):
        same_results(lambda a, b: 1 / 0, right, (a, b))
