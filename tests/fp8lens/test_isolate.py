"""What ends XLA's process is refused before, or answered from a process of its own."""

import dataclasses
import pickle
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8lens import TARGETS, aot_compile, assert_fp8_gemms, inspect
from fp8lens.compile.autotune import check_tile
from fp8lens.compile.isolate import CompilerDied, Isolated
from helpers.numerics.recipes import scaled_dot, to_e4m3

MATRIX = jax.ShapeDtypeStruct((64, 128), jnp.float8_e4m3fn)
SCALE = jax.ShapeDtypeStruct((), jnp.float32)
ARGUMENTS = (MATRIX, jax.ShapeDtypeStruct((256, 128), jnp.float8_e4m3fn), SCALE, SCALE, SCALE)


def dot(a, b):
    return jnp.dot(a, b.T, preferred_element_type=jnp.bfloat16)


def amax(d, axis=None):
    return jnp.max(jnp.abs(d), axis)


AMAXES = {
    "of all": amax,
    "of rows": lambda d: amax(d, -1),
    "of tiles, behind a barrier": lambda d: amax(
        jax.lax.optimization_barrier(d).reshape(-1, 16, 16), (1, 2)
    ),
}


def with_amax(of):
    """A matmul's FP8 result, and beside it an amax."""

    def fn(a, b, x, y, z):
        d = scaled_dot(a, b, x, y)
        return to_e4m3(d, z), AMAXES[of](d)

    return fn


def one(**options):
    return aot_compile(dot, MATRIX, MATRIX, **options)


@pytest.mark.parametrize("of", AMAXES)
def test_an_amax_of_a_part_is_refused_with_the_fix(of):
    """What XLA survives is compiled here."""
    if of == "of rows":
        with pytest.raises(CompilerDied, match=r"\(SIGABRT\).* algebraic_simplifier.cc:\d+.*barr"):
            aot_compile(with_amax(of), *ARGUMENTS)
    else:
        assert type(aot_compile(with_amax(of), *ARGUMENTS)) is jax.stages.Compiled


def test_a_ragged_dot_left_to_cudnn_is_refused_with_the_fix():
    """From cuDNN 9.22, and where it is asked for."""
    shapes = ((64, 128), jnp.bfloat16), ((4, 128, 256), jnp.bfloat16), ((4,), jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    chip = dataclasses.replace(TARGETS["H100"], cudnn=(9, 22))
    options = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
    with pytest.raises(CompilerDied, match=r"died \(SIGABRT\).*cuDNN.* or leave the option out"):
        aot_compile(jax.lax.ragged_dot, *args, target=chip, compiler_options=options)
    assert type(aot_compile(jax.lax.ragged_dot, *args, target=chip)) is jax.stages.Compiled


TILE = "block_m: 64 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"


def test_a_tile_that_would_abort_the_process_is_refused():
    for more in ("", " split_k: 2", "\n is_tma_allowed: true"):
        check_tile(TILE + more)
    for bad in (
        f"triton {{ {TILE} }}",
        TILE.replace("64", "63"),
        TILE.replace("128", "many"),
        TILE.replace("128", "9" * 5000),
        f"{TILE} split_k: 08",
        f"{TILE} num_stages: 3",
        "block_m: 64",
    ):
        with pytest.raises(ValueError, match="XLA would abort"):
            one(compiler_options={"xla_gpu_override_gemm_autotuner": bad})


def test_isolated_it_is_the_same():
    fn, args = with_amax("of all"), ARGUMENTS
    here, apart = [inspect(fn, *args, isolate=isolate) for isolate in (False, True)]
    assert isinstance(apart.compiled, Isolated) and apart.module.text == here.module.text
    assert str(apart) == str(here) and apart.json() == here.json()
    assert "num_partitions=4" in one(mesh_shape=(4,), isolate=True, target="B200").as_text()
    assert pickle.loads(pickle.dumps(TARGETS["B200"])) == TARGETS["B200"]


def test_isolated_what_xla_refuses_is_said():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        one(isolate=True, compiler_options={"xla_no_such": 1})
    cpus = jax.make_mesh((1,), ("d",), devices=jax.devices("cpu")[:1])
    there = jax.jit(jnp.sin, out_shardings=jax.sharding.NamedSharding(cpus, jax.P()))
    with pytest.raises(ValueError, match="sharding is on cpu"):
        aot_compile(there, SCALE, isolate=True)


FATAL = "echo 'F1122 17:00:00.1 42 {}' >&2; echo '  @ 0x1' >&2; kill -ABRT $$"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -SEGV $$", r"\(SIGSEGV\). Its last words: nothing. It is a bug of XLA's: report"),
        (FATAL.format("some.cc:7] failed: x"), r"SIGABRT\). Its last words: some.cc:7\] failed: x"),
        ("kill -KILL $$", r"SIGKILL.* It needs more memory than there is"),
        (FATAL.format("env.cc:9] pthread_create() failed"), r"It needs more memory than there is"),
        ("exit 0", r"died \(exit status 0\)"),
    ],
)
def test_however_it_dies_this_process_lives(tmp_path, monkeypatch, script, words):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CompilerDied, match=words):
        assert_fp8_gemms(dot, MATRIX, MATRIX, isolate=True)
