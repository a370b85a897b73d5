"""Answers to the puzzles of reference E."""

import jax
import jax.numpy as jnp

from tests.course.answers import Chapter

bf16, f32 = jnp.bfloat16, jnp.float32
chapter = Chapter("E_chips_and_releases")


@chapter.puzzle(lambda: chapter.worse)
def worse(answer):
    return chapter.check_worse(answer)


def rate(row):
    peaks = chapter.TARGETS["H100"].peak_flops
    return min(peaks[gemm["math_dtype"]] for gemm in row["gemms"])


@worse.right
def matmul_by_matmul(old, new):
    peaks = chapter.TARGETS["H100"].peak_flops

    def got_worse(before, after):
        if "error" in after:
            return True
        pairs = zip(before["gemms"], after["gemms"], strict=True)
        slower = [peaks[b["math_dtype"]] > peaks[a["math_dtype"]] for b, a in pairs]
        return any(slower) or before["kernels"] < after["kernels"]

    compiled = {name: row for name, row in old.items() if "kernels" in row}
    return frozenset(name for name in compiled if name in new and got_worse(old[name], new[name]))


@worse.wrong("✗ FP8 lost, as many kernels: is worse")
def kernels_only(old, new):
    return [
        name
        for name in old.keys() & new.keys()
        if "error" not in old[name]
        and ("error" in new[name] or new[name]["kernels"] > old[name]["kernels"])
    ]


@worse.wrong("✗ a kernel more: is worse")
def types_only(old, new):
    both = [(name, old[name], new[name]) for name in old if name in new and "gemms" in old[name]]
    return {name for name, before, after in both if "error" in after or rate(after) < rate(before)}


@worse.wrong("not yet: KeyError: 'kernels'")
def forgets_errors(old, new):
    return [name for name in old if name in new and new[name]["kernels"] > old[name]["kernels"]]


@chapter.puzzle(lambda: (chapter.prepare, chapter.multiply))
def layouts(answer):
    return chapter.check_layouts(*answer)


def is_blackwell(chip):
    return chip.compute_capability >= (10, 0)


def prepare(w, chip):
    return w if is_blackwell(chip) else jnp.transpose(w)


def by_shape(x, w, chip):
    contracted = 0 if w.shape[0] == x.shape[1] else 1
    return jax.lax.dot_general(x, w, (((1,), (contracted,)), ((), ())), preferred_element_type=f32)


def copied(w, chip):
    return w.T


def multiply_copied(x, w, chip):
    return jax.lax.dot(x, w.T, preferred_element_type=f32)


def as_it_is(w, chip):
    return w


def multiply_as_it_is(x, w, chip):
    return jax.lax.dot(x, w, preferred_element_type=f32)


layouts.right((prepare, by_shape))
layouts.wrong("✗ H100: kernels 2, in FP8 1, numbers right, weight as it was")(
    (as_it_is, multiply_as_it_is)
)
layouts.wrong("✗ B200: kernels 1, in FP8 1, numbers right, weight copied (needs no copy)")(
    (copied, multiply_copied)
)
layouts.wrong("not yet: L40S: ValueError")((prepare, multiply_as_it_is))
