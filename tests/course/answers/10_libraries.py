"""Answers to the puzzles of chapter 10."""

import types

import jax.numpy as jnp

from tests.course.answers import Chapter

e4m3, e5m2, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
chapter = Chapter("10_libraries")


def said(verdict):
    print(verdict)
    return verdict == "right"


@chapter.puzzle(lambda: chapter.forward_only)
def forward_only(answer):
    return said(chapter.check_forward_only(answer))


def case(of):
    return "MLP", of, "H100", "cublaslt"


@forward_only.right
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


@forward_only.right
def by_sets(rows):
    whole = {key[:3] for key, row in rows.items() if key[1:] in map(case, ("forward", "training"))
             and "fp8" in row and row["fp8"] == row["matmuls"]}  # fmt: skip
    trained = {key[0] for key, row in rows.items() if key[1:] == case("training") and "fp8" in row}
    forward = {name for name, _, of in whole if of == "forward"}
    return trained & forward - {name for name, _, of in whole if of == "training"}


@forward_only.wrong("does not belong to the set")
def all_that_are_whole_forward(rows):
    return {name for name, *_ in rows if rows.get((name, *case("forward")), {}).get("fp8") == 2}


@forward_only.wrong("does not belong to the set")
def everything(rows):
    return {name for name, *_ in rows}


@forward_only.wrong("is missing")
def no_fp8_in_training(rows):
    return {name for name in row_by_row(rows) if not rows[name, *case("training")]["fp8"]}


@forward_only.wrong("does not belong to the set")
def not_whole_in_training(rows):
    return {
        key[0] for key, row in rows.items() if key[1:] == case("training") and row.get("fp8") != 6
    }


@forward_only.wrong(" has no row for training")
def with_those_of_inference(rows):
    trained = {key[0] for key in rows if key[1:] == case("training")}
    return row_by_row(rows) | ({name for name, *_ in rows} - trained)


@forward_only.wrong("None has no row for training")
def with_none(rows):
    return row_by_row(rows) | {None}


@forward_only.wrong("is missing")
def in_the_block(rows):
    return {name for name, *_ in rows
            if rows.get((name, "block", *case("training")[1:]), {}).get("fp8") == 0}  # fmt: skip


@forward_only.wrong("not yet: forward_only must return a set of names")
def as_a_list(rows):
    return sorted(row_by_row(rows))


@forward_only.wrong("not yet: KeyError: 'fp8'")
def forgets_errors(rows):
    return {key[0] for key, row in rows.items() if row["fp8"] < row["matmuls"]}


@forward_only.wrong("not yet: forward_only must return a set of names")
def nothing(rows): ...


forward_only.wrong("not yet: TypeError")(None)


@chapter.puzzle(lambda: chapter.as_written)
def kinds(answer):
    return said(chapter.check_kinds(answer))


def written(**changed):
    backward = {"x, backward": e4m3, "w, backward": e4m3}
    return {"x": e4m3, "w": e4m3, "g": e5m2} | backward | changed


names = {"x": "float8_e4m3fn", "w": "float8_e4m3fn", "g": "float8_e5m2"}
kinds.right(written())
kinds.right(names | {"x, backward": "float8_e4m3fn", "w, backward": "float8_e4m3fn"})
kinds.right({name: jnp.dtype(kind) for name, kind in written().items()})
kinds.right(types.MappingProxyType(written()))
kinds.wrong("not yet: the gradient's type must be E5M2")(written(g=e4m3))
kinds.wrong("not yet: the gradient's type must be E5M2")(
    written(g=e4m3) | {"x, backward": e5m2, "w, backward": e5m2}
)
kinds.wrong("not yet: 2 of 3 FP8")(written() | {"x, backward": e5m2})
kinds.wrong("not yet: 2 of 3 FP8")(written() | {"w, backward": e5m2})
kinds.wrong("not yet: 1 of 3 FP8")(written(g=bf16))
kinds.wrong("not yet: 2 of 3 FP8")(written(x=e5m2, w=e5m2))
kinds.wrong("not yet: forward, both types must be E4M3")(written(x=e5m2))
kinds.wrong("not yet: forward, both types must be E4M3")(written(w="float8_e5m2"))
kinds.wrong("not yet: KeyError: 'w, backward'")({name: e4m3 for name in ("x", "w", "g")})
kinds.wrong("not yet: TypeError")(written(g="e5m2"))
kinds.wrong("not yet: TypeError")(None)
