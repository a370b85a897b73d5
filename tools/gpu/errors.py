"""How far a result is from its reference, and whether rounding explains it: the project's own
bound."""

from typing import Any

import jax
import jax.numpy as jnp

# Largest relative error, ||got - reference|| / ||reference||, of a result that counts as right. A
# wrong scale, a lost activation or bias gives over 1e-1; a sum of 1,024 products in 14 bits about
# 1e-3. An FP8 result is compared with the reference rounded to FP8 as well: what is left are values
# that a small error pushed over to the next code, a tenth of them in E4M3 where the function
# computes in bfloat16. Those hold for K = 1,024. Fast sums lose bits as they grow longer, so it may
# be more for a larger K, up to LIMIT.
LIMIT = 2.0**-4
RIGHT = {"float8_e4m3fn": 2.0**-5, "float8_e5m2": 2.0**-4}
RIGHT_OF_OTHERS = 2.0**-7


@jax.jit
def _compared(got: jax.Array, expected: jax.Array) -> tuple[jax.Array, ...]:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    both = jnp.isfinite(got) & jnp.isfinite(expected)
    same_kind = both | (got == expected) | (jnp.isnan(got) & jnp.isnan(expected))
    gap = jnp.where(both, got - expected, 0)
    size = jnp.where(both, expected, 0)
    # Divided by the largest, squares neither overflow nor vanish.
    largest = jnp.maximum(jnp.max(jnp.abs(size)), jnp.finfo(jnp.float32).tiny)
    norm = jnp.sqrt(jnp.sum((size / largest) ** 2))
    relative = jnp.sqrt(jnp.sum((gap / largest) ** 2)) / jnp.where(norm > 0, norm, 1)
    return relative, jnp.max(jnp.abs(gap)), jnp.sum(~same_kind)


def errors(got: Any, expected: Any) -> dict[str, Any]:
    """The relative error, the largest error, and in how many places NaN or an infinity stands in
    one and not in the other. Places that are not finite on either side count in no error. Raises
    ValueError for results of two types or shapes."""
    kinds = [f"{one.dtype.name}{list(one.shape)}" for one in (got, expected)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the result is {kinds[0]}, its reference {kinds[1]}")
    relative, largest, other = _compared(got, expected)
    return {
        "dtype": got.dtype.name,
        "relative": float(relative),
        "largest": float(largest),
        "other_kind": int(other),
    }


def errors_of_all(got: Any, expected: Any) -> list[dict[str, Any]]:
    """The errors of each array of two pytrees."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return [errors(*pair) for pair in pairs]


def is_right(error: dict[str, Any], k: int = 1024, most: float = 0.0) -> bool:
    """Whether a result is one that rounding explains, of sums of `k` products; or whose error is
    `most`."""
    bound = RIGHT.get(error["dtype"], RIGHT_OF_OTHERS)
    most = max(most, bound, min(bound * k / 1024, LIMIT))
    return error["other_kind"] == 0 and error["relative"] <= most
