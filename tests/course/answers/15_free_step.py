"""Answers to the puzzles of chapter 15."""

import jax.numpy as jnp

from tests.course.answers import Chapter

chapter = Chapter("15_free_step")


@chapter.puzzle(lambda: chapter.sequences_for)
def sequences_for(answer):
    return chapter.check_sequences(answer)


@sequences_for.right
def one_by_one(goal, fp8, bf16):
    def seconds(step, count):
        return step[0] + (step[1] - step[0]) * (count - 4) / 12

    counts = range(1, 10_000)
    return next((n for n in counts if seconds(fp8, n) < goal * seconds(bf16, n)), None)


@sequences_for.wrong("not yet: ZeroDivisionError")
def with_no_fixed_part(goal, fp8, bf16):
    return round(goal / (fp8[0] / fp8[0] - bf16[0] / bf16[0]))


@sequences_for.wrong("expected None")
def of_the_sizes_that_are_given(goal, fp8, bf16):
    return 4 if fp8[0] < goal * bf16[0] else 16


@sequences_for.wrong("not yet: a goal of")
def without_a_sign(goal, fp8, bf16):
    (fixed, each), (base, base_each) = (
        (few - (many - few) / 3, (many - few) / 12) for few, many in (fp8, bf16)
    )
    return max(1, int((fixed - goal * base) // (goal * base_each - each)) + 1)


@chapter.puzzle(lambda: chapter.Lion())
def lion(answer):
    return chapter.check_lion(answer)


class Lion:
    """By Optax's formula, with what a mistake changes as arguments."""

    def __init__(self, moments=1, is_late=False):
        self.moments, self._is_late = moments, is_late

    def scalars(self, count):
        return ()

    def update(self, weight, moment, gradient):
        new = 0.99 * moment + 0.01 * gradient
        blend = 0.9 * (new if self._is_late else moment) + 0.1 * gradient
        return weight * (1 - 1e-7) - 1e-4 * jnp.sign(blend), new


class Forgetful(Lion):
    """Returns no moment."""

    def update(self, weight, moment, gradient):
        return super().update(weight, moment, gradient)[:1]


lion.right(Lion())
lion.wrong("not yet: it keeps 2 moments")(Lion(moments=2))
lion.wrong("away from Optax's")(Lion(is_late=True))
lion.wrong("not yet: ValueError")(Forgetful())
