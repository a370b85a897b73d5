"""Answers to the puzzles of chapter 11."""

import jax.numpy as jnp

from tests.course.answers import Chapter

e4m3, e5m2, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
chapter = Chapter("11_libraries")


def said(verdict):
    print(verdict)
    return verdict == "right"


@chapter.puzzle(lambda: chapter.forward_only)
def forward_only(answer):
    return said(chapter.check_forward_only(answer))


def case(of):
    return "MLP", of, "H100", "cublaslt"


def row_by_row(rows):
    found = set()
    for (name, *key), row in rows.items():
        if tuple(key) == case("training") and "error" not in row and row["fp8"] != row["matmuls"]:
            forward = rows[name, *case("forward")]
            if forward["fp8"] == forward["matmuls"]:
                found.add(name)
    return found


@forward_only.right
def by_bf16(rows):
    def in_bf16(name, of):
        row = rows.get((name, *case(of)), {})
        return row["matmuls"] - row["fp8"] if "matmuls" in row else None

    names = {name for name, *_ in rows}
    return frozenset(
        name for name in names if in_bf16(name, "forward") == 0 and in_bf16(name, "training")
    )


@forward_only.wrong("does not belong to the set")
def all_that_are_whole_forward(rows):
    return {name for name, *_ in rows if rows.get((name, *case("forward")), {}).get("fp8") == 2}


@forward_only.wrong("is missing")
def no_fp8_in_training(rows):
    return {name for name in row_by_row(rows) if not rows[name, *case("training")]["fp8"]}


@forward_only.wrong("not yet: KeyError: 'fp8'")
def forgets_errors(rows):
    return {key[0] for key, row in rows.items() if row["fp8"] < row["matmuls"]}


@chapter.puzzle(lambda: chapter.as_written)
def kinds(answer):
    return said(chapter.check_kinds(answer))


def written(**changed):
    backward = {"x, backward": e4m3, "w, backward": e4m3}
    return {"x": e4m3, "w": e4m3, "g": e5m2} | backward | changed


names = {"x": "float8_e4m3fn", "w": "float8_e4m3fn", "g": "float8_e5m2"}
kinds.right(names | {"x, backward": "float8_e4m3fn", "w, backward": "float8_e4m3fn"})
kinds.wrong("not yet: the gradient's type must be E5M2")(written(g=e4m3))
kinds.wrong("not yet: 2 of 3 FP8")(written() | {"x, backward": e5m2})
kinds.wrong("not yet: KeyError: 'w, backward'")({name: e4m3 for name in ("x", "w", "g")})
