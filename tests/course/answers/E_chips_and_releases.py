"""Answers to the puzzles of reference E."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

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
def one_by_one(old, new):
    for name, row in new.items():
        if name not in old or "error" in old[name]:
            continue
        if "error" in row or row["kernels"] > old[name]["kernels"] or rate(row) < rate(old[name]):
            yield name


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


@worse.right
def by_rank(old, new):
    never = {"kernels": float("inf"), "rate": 0}
    rows = [
        {
            name: never if "error" in row else row | {"rate": rate(row)}
            for name, row in release.items()
        }
        for release in (old, new)
    ]
    return {
        name: rows
        for name, before in rows[0].items()
        if before is not never
        and name in new
        and (rows[1][name]["kernels"] > before["kernels"] or rows[1][name]["rate"] < before["rate"])
    }


worse.right(functools.partial(lambda old, new: tuple(one_by_one(old, new)) * 2))


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


@worse.wrong("✗ the other FP8 format: is not worse")
def any_other_type(old, new):
    found = {
        name for name in old.keys() & new.keys() if old[name].get("gemms") != new[name].get("gemms")
    }
    return found.union(one_by_one(old, new))


@worse.wrong("✗ compiles again: is not worse")
def every_error(old, new):
    return {*one_by_one(old, new), *(name for name in old if "error" in old[name])}


@worse.wrong("✗ added: is not worse")
def what_is_new(old, new):
    return {*one_by_one(old, new), *(new.keys() - old.keys())}


@worse.wrong("✗ tensor cores lost: is worse")
def fp8_only(old, new):
    return [name for name in one_by_one(old, new) if "f8" in str(old[name])]


@worse.wrong("✗ one of two lost: is worse")
def the_first_matmul_only(old, new):
    first = [
        {
            name: row if "error" in row else row | {"gemms": row["gemms"][:1]}
            for name, row in rows.items()
        }
        for rows in (old, new)
    ]
    return [*one_by_one(*first)]


@worse.wrong("✗ a kernel less: is not worse")
def everything(old, new):
    return old.keys() | new.keys()


@worse.wrong("not yet: KeyError: 'kernels'")
def forgets_errors(old, new):
    return [name for name in old if name in new and new[name]["kernels"] > old[name]["kernels"]]


@worse.wrong("not yet: KeyError: ")
def forgets_new_programs(old, new):
    return [name for name in new if rate(new[name]) < rate(old[name])]


@worse.wrong("✗ a kernel more: is worse")
def none_of_them(old, new):
    return []


@worse.wrong("not yet: TypeError: 'int' object is not iterable")
def a_count(old, new):
    return len(list(one_by_one(old, new)))


worse.wrong("not yet: TypeError")(None)


@chapter.puzzle(lambda: (chapter.prepare, chapter.multiply))
def layouts(answer):
    return chapter.check_layouts(*answer)


def is_blackwell(chip):
    return chip.compute_capability >= (10, 0)


def prepare(w, chip):
    return w if is_blackwell(chip) else jnp.transpose(w)


def multiply(x, w, chip, result=f32):
    spec = "mk,kn->mn" if is_blackwell(chip) else "mk,nk->mn"
    return jnp.einsum(spec, x, w, preferred_element_type=result)


def by_shape(x, w, chip):
    contracted = 0 if w.shape[0] == x.shape[1] else 1
    return jax.lax.dot_general(x, w, (((1,), (contracted,)), ((), ())), preferred_element_type=f32)


def with_scales(x, w, chip):
    return x.astype(f32) @ (w if is_blackwell(chip) else w.T).astype(f32)


def prepare_a_pair(w, chip):
    return w if is_blackwell(chip) else {"transposed": w.T}


def multiply_a_pair(x, w, chip):
    if isinstance(w, dict):
        return jax.lax.dot(x, w["transposed"].T, preferred_element_type=f32)
    return jax.lax.dot(x, w, preferred_element_type=f32)


def copied(w, chip):
    return w.T


def multiply_copied(x, w, chip):
    return jax.lax.dot(x, w.T, preferred_element_type=f32)


def as_it_is(w, chip):
    return w


def multiply_as_it_is(x, w, chip):
    return jax.lax.dot(x, w, preferred_element_type=f32)


def nothing(*arguments): ...


def raises(*arguments):
    raise NotImplementedError


layouts.right((prepare, multiply))
layouts.right((prepare, by_shape))
layouts.right((prepare, with_scales))
layouts.right((prepare_a_pair, multiply_a_pair))
layouts.wrong("✗ H100: kernels 2, in FP8 1, numbers right, weight as it was")(
    (as_it_is, multiply_as_it_is)
)
layouts.wrong("✗ B200: kernels 1, in FP8 1, numbers right, weight copied (needs no copy)")(
    (copied, multiply_copied)
)
layouts.wrong("✗ L40S: kernels 2, in FP8 1")(
    (
        lambda w, chip: w if chip.compute_capability != (9, 0) else w.T,
        lambda x, w, chip: by_shape(x, w, chip),
    )
)
layouts.wrong("float16[64,128] (wanted: float32[64,128])")(
    (prepare, lambda x, w, chip: multiply(x, w, chip).astype(jnp.float16))
)
layouts.wrong("bfloat16[64,128] (wanted: float32[64,128])")(
    (prepare, functools.partial(multiply, result=bf16))
)
layouts.wrong("✗ L40S: kernels 1, in FP8 1, numbers wrong, weight copied")(
    (lambda w, chip: -prepare(w, chip), multiply)
)
layouts.wrong("in FP8 0, numbers right")(
    (
        prepare,
        lambda x, w, chip: multiply(x.astype(bf16).astype(f32), w.astype(bf16).astype(f32), chip),
    )
)
layouts.wrong("(needs no copy)")((lambda w, chip: jnp.array(prepare(w, chip)), multiply))
layouts.wrong("not yet: nothing is returned")((prepare, nothing))
layouts.wrong("not yet: nothing is returned")((nothing, multiply))
layouts.wrong("not yet: L40S: ValueError")((prepare, multiply_as_it_is))
layouts.wrong("not yet: L40S: NotImplementedError")((raises, multiply))
layouts.wrong("not yet: L40S: TracerArrayConversionError")(
    (prepare, lambda x, w, chip: np.asarray(x, np.float32) @ np.asarray(w, np.float32).T)
)
layouts.wrong("not yet: L40S: TypeError")((None, None))
