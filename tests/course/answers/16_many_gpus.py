"""Answers to the puzzles of chapter 16."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import with_sharding_constraint as shard
from jax.sharding import PartitionSpec as P

from tests.course.answers import Chapter

from fp8_experts import put, slots, take
from fp8_linear import quantize
from fp8_linear import scaled_dot as product

chapter = Chapter("16_many_gpus")
e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
ROWS, COLUMNS, EVERYWHERE = P("model"), P(None, "model"), P()


@chapter.puzzle(lambda: chapter.quieter)
def quieter(answer):
    return chapter.check_quieter(answer)


def scale_of(amax):
    return amax.astype(f32) / 448


def multiplied(codes, w, scale, w_scale):
    return shard(product(codes, w, scale, w_scale, bf16), COLUMNS)


def on_each_device(fn):
    specs = (ROWS, ROWS, EVERYWHERE)
    return lambda *args: jax.shard_map(fn, in_specs=specs, out_specs=COLUMNS, check_vma=False)(
        *args
    )


@quieter.right
def with_a_barrier(x, w, w_scale):
    x = shard(x, ROWS)
    scale = scale_of(jnp.maximum(x.max(), -x.min()))
    codes = lax.optimization_barrier(shard(quantize(x, scale, e4m3), ROWS))
    return multiplied(shard(codes, EVERYWHERE), w, scale, w_scale)


@quieter.wrong("not yet: it sends bf16")
def the_gather_first(x, w, w_scale):
    x = lax.optimization_barrier(shard(x, EVERYWHERE))
    scale = scale_of(jnp.max(jnp.abs(x)))
    return multiplied(quantize(x, scale, e4m3), w, scale, w_scale)


@quieter.wrong("not yet: its numbers differ")
@on_each_device
def each_its_own_amax(x, w, w_scale):
    scale = scale_of(jnp.max(jnp.abs(x)))
    codes = lax.all_gather(quantize(x, scale, e4m3), "model", tiled=True)
    return product(codes, w, scale, w_scale, bf16)


@quieter.wrong("not yet: NameError")
def a_name_that_is_not_there(x, w, w_scale):
    return unknown(x)  # noqa: F821


@chapter.puzzle(lambda: chapter.free)
def free(answer):
    return chapter.check_free(answer)


def at_its_expert(x, expert):
    """The rows in their experts' places, and where each choice lies."""
    place, count = slots(expert, chapter.E)
    return put(x, expert, place, (chapter.E, count)), place


@free.right
def both_scales_when_a_row_is_read(x, expert, gate, w, x_scale, w_scales):
    sent, place = at_its_expert(x, expert)
    y = jnp.einsum("eck,enk->ecn", sent, w, preferred_element_type=bf16)
    return take(y, expert, place, gate * w_scales[expert] * x_scale)


@free.wrong("not yet: a matmul is not FP8")
def in_the_operand(x, expert, gate, w, x_scale, w_scales):
    sent, place = at_its_expert(x, expert)
    y = jnp.stack(
        [product(a, b, x_scale, s, bf16) for a, b, s in zip(sent, w, w_scales, strict=True)]
    )
    return take(y, expert, place, gate)


@free.wrong("not yet: its numbers are off")
def the_scale_of_another_expert(x, expert, gate, w, x_scale, w_scales):
    sent, place = at_its_expert(x, expert)
    y = jnp.einsum("eck,enk->ecn", sent, w, preferred_element_type=f32) * x_scale
    return take(y.astype(bf16), expert, place, gate * w_scales[expert[:, ::-1]])


free.wrong("not yet: TypeError")(a_name_that_is_not_there)
