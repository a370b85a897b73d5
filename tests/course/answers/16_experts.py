"""Answers to the puzzle of chapter 16."""

import jax.numpy as jnp

from tests.course.answers import Chapter

from fp8_linear import scaled_dot as product

chapter = Chapter("16_experts")
bf16, f32 = jnp.bfloat16, jnp.float32


@chapter.puzzle(lambda: chapter.free)
def free(answer):
    return chapter.check_free(answer)


def placed(x, expert):
    """The rows in their experts' places, and where each choice lies."""
    place, count = chapter.slots(expert)
    sent = jnp.zeros((chapter.E, count, x.shape[1]), x.dtype)
    return sent.at[expert, place].set(x[:, None], mode="drop"), place


def read(y, expert, place, factor):
    back = y.at[expert, place].get(mode="fill", fill_value=0)
    return (back * factor.astype(y.dtype)[..., None]).sum(axis=1)


@free.right
def both_scales_when_a_row_is_read(x, expert, gate, w, x_scale, w_scales):
    sent, place = placed(x, expert)
    y = jnp.einsum("eck,enk->ecn", sent, w, preferred_element_type=bf16)
    return read(y, expert, place, gate * w_scales[expert] * x_scale)


@free.wrong("not yet: a matmul is not FP8")
def in_the_operand(x, expert, gate, w, x_scale, w_scales):
    sent, place = placed(x, expert)
    y = jnp.stack(
        [product(a, b, x_scale, s, bf16) for a, b, s in zip(sent, w, w_scales, strict=True)]
    )
    return read(y, expert, place, gate)


@free.wrong("not yet: its numbers are off")
def the_scale_of_another_expert(x, expert, gate, w, x_scale, w_scales):
    sent, place = placed(x, expert)
    y = chapter.for_each(sent, w, (x_scale, f32(1)))
    return read(y, expert, place, gate * w_scales[expert[:, ::-1]])


@free.wrong("not yet: NameError")
def a_name_that_is_not_there(x, expert, gate, w, x_scale, w_scales):
    return unknown(x)  # noqa: F821
