"""The programs on the rules' pages, each compiled once, and in other shapes."""

import ast
import functools
from collections.abc import Callable
from typing import Any

import jax

from fp8lens import Inspection, inspect
from fp8lens.cli import parse_shapes
from fp8lens.rules.page import PRELUDE, Program
from helpers.rule_index import compiled

#: A page's program, compiled: once for all tests.
seen = functools.cache(compiled)


def in_a_loop(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `fn` on three of its first argument."""

    def looped(first: Any, *rest: Any) -> Any:
        return jax.lax.scan(lambda n, one: (n + 1, fn(one, *rest)), 0, first)

    return looped


def in_a_batch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `fn` on a batch of three of its first argument."""

    def batched(first: Any, *rest: Any) -> Any:
        return jax.vmap(fn, (0, *(None for _ in rest)))(first, *rest)

    return batched


def seen_in(program: Program, shape: Callable[..., Any]) -> Inspection:
    """A page's program `in_a_loop` or `in_a_batch`, compiled with its options."""
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    exec(program.code, names)
    function = ast.parse(program.code).body[-1]
    assert isinstance(function, ast.FunctionDef)
    first, *rest = parse_shapes(" ".join(program.arguments.values()))
    three = jax.ShapeDtypeStruct((3, *first.shape), first.dtype)
    options = eval(f"dict({program.options})", names | {"P": jax.sharding.PartitionSpec})
    return inspect(shape(names[function.name]), three, *rest, **options)
