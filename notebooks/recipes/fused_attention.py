"""Attention that keeps its scores on the chip: JAX's own kernel for a Hopper, in Pallas, which any
machine compiles.

It needs JAX alone. `lean_step.py` uses it; chapter 15 says what it saves. JAX's module allocates
buffers of f16. This file has it allocate bf16, the type of its operands.

What it leaves out: a causal mask (JAX's kernel has none in its backward pass), dropout, scaling,
FP8 (attention stays bf16), chips other than a Hopper. There is no interpreter for its matmuls: on a
CPU it compiles and does not run. On an H200 it runs, and cuDNN's attention is faster (chapter 15).

Test that it is compiled, and that no scores reach memory:

    from fp8lens import inspect
    print(inspect(fused_attention, q, k, v, target="H100").ledger)
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

# A tile of scores has so many queries and keys. JAX's kernel gives two tiles of queries to a block
# of threads.
QUERIES = KEYS = 128
TILES: dict[str, Any] = {
    "block_q": QUERIES,
    "block_kv": KEYS,
    "max_concurrent_steps": 2,
    "block_q_dkv": 64,
    "block_kv_dkv": 64,
    "block_q_dq": 64,
    "block_kv_dq": 64,
}


@jax.custom_vjp
def fused_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k^T) v of q, k and v bf16[batch, sequence, heads, size], each query with all keys.
    Nothing is scaled: do that to q. The backward pass computes the scores again.

    Raises ValueError for what the kernel does not take, and where it is not compiled for a GPU.
    """
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    _, sequence, _, size = q.shape
    if sequence % (2 * QUERIES) or k.shape[1] % KEYS or size not in (64, 128):
        raise ValueError(
            f"JAX's kernel takes multiples of {2 * QUERIES} queries and of {KEYS} keys, and heads "
            f"of 64 or 128 numbers, not {sequence}, {k.shape[1]} and {size}: use "
            "jax.nn.dot_product_attention"
        )
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"the kernel is compiled for bf16, not {q.dtype}: convert q, k and v")
    with _in_bf16() as kernel:
        config = kernel.TuningConfig(**TILES)
        return jax.vjp(lambda *qkv: kernel.attention(*qkv, config), q, k, v)


def _backward(vjp: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    with _in_bf16():
        return vjp(g)


fused_attention.defvjp(_forward, _backward)


@contextlib.contextmanager
def _in_bf16() -> Iterator[ModuleType]:
    """JAX's module with buffers of bf16: its kernel accepts bf16, but allocates f16."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    numpy = SimpleNamespace(**{**vars(jnp), "float16": jnp.bfloat16})
    with mock.patch.object(attention_mgpu, "jnp", numpy):
        yield attention_mgpu


def example() -> str:
    """The type of the result and of three gradients, traced: a CPU does not run the kernel."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    y = jax.eval_shape(fused_attention, q, q, q)
    gradients = jax.eval_shape(
        lambda q, k, v, g: jax.vjp(fused_attention, q, k, v)[1](g), q, q, q, y
    )
    return f"{y.dtype}{list(y.shape)}, and {len(gradients)} gradients of its shape"


if __name__ == "__main__":
    print(example())
