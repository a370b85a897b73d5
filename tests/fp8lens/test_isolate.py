"""What ends XLA's process is refused before, or answered from a process of its own."""

import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8lens import TARGETS, aot_compile, assert_fp8_gemms, inspect, mesh
from fp8lens.compile.autotune import check_tile
from fp8lens.compile.isolate import CompilerDied, Isolated
from helpers.numerics.recipes import scaled_dot, to_e4m3

MATRIX = jax.ShapeDtypeStruct((64, 128), jnp.float8_e4m3fn)


def dot(a, b):
    return jnp.dot(a, b.T, preferred_element_type=jnp.bfloat16)


TILE = "block_m: 64 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"
SCALE = jax.ShapeDtypeStruct((), jnp.float32)
ARGUMENTS = (MATRIX, jax.ShapeDtypeStruct((256, 128), jnp.float8_e4m3fn), SCALE, SCALE, SCALE)


def amax(d, axis=None):
    return jnp.max(jnp.abs(d), axis)


AMAXES = {
    "of all": amax,
    "of rows": lambda d: amax(d, -1),
    "scattered": lambda d: jnp.zeros(8).at[jnp.arange(64) % 8].max(amax(d, -1)),
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


@pytest.mark.parametrize("of", ["of rows", "scattered"])
def test_an_amax_of_a_part_is_refused_with_the_fix(of):
    with pytest.raises(
        CompilerDied, match=r"died \(SIGABRT\).* algebraic_simplifier.cc:\d+.*optimization_barrier"
    ):
        aot_compile(with_amax(of), *ARGUMENTS)


def test_a_ragged_dot_left_to_cudnn_is_refused_with_the_fix():
    """From cuDNN 9.22, and where it is asked for."""
    shapes = ((64, 128), jnp.bfloat16), ((4, 128, 256), jnp.bfloat16), ((4,), jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    chip = dataclasses.replace(TARGETS["H100"], cudnn=(9, 22))
    options = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
    with pytest.raises(CompilerDied, match=r"died \(SIGABRT\).*cuDNN.* or leave the option out"):
        aot_compile(jax.lax.ragged_dot, *args, target=chip, compiler_options=options)
    assert type(aot_compile(jax.lax.ragged_dot, *args, target=chip)) is jax.stages.Compiled


def test_what_xla_survives_is_compiled_here():
    """An amax of tiles is not taken for the whole's."""
    assert (
        type(aot_compile(with_amax("of tiles, behind a barrier"), *ARGUMENTS))
        is jax.stages.Compiled
    )


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (
            TypeError,
            "'xla_gpu_autotune_level' is .*; XLA takes",
            {"compiler_options": {"xla_gpu_autotune_level": [1]}},
        ),
        (TypeError, "5 is 5; XLA takes a name", {"compiler_options": {5: 5}}),
        (TypeError, "must be a mapping", {"compiler_options": "xla_gpu_autotune_level"}),
        (ValueError, "XLA aborts: give 0 to 2", {"compiler_options": {"xla_gpu_shape_checks": 3}}),
        (
            ValueError,
            "XLA aborts: give 0 to 1024",
            {"compiler_options": {"xla_gpu_force_compilation_parallelism": "-1"}},
        ),
        (
            ValueError,
            "1,000,000,000 devices on 1 axes: the limit is 65,536",
            {"mesh_shape": {"d": 10**9}},
        ),
        (ValueError, "limit", {"mesh_shape": {f"a{n}": 1 for n in range(100)}}),
        (ValueError, "mesh_shape must be", {"mesh_shape": {5: 8}}),
        (ValueError, "mesh_shape must be", {"mesh_shape": 8}),
        (ValueError, "isolate must be True", {"isolate": {"minutes": 1}}),
        (ValueError, "isolate must be True", {"isolate": {"seconds": 0}}),
        (ValueError, "isolate must be True", {"isolate": "yes"}),
    ],
)
def test_what_is_known_to_abort_is_refused(error, words, options):
    with pytest.raises(error, match=words):
        one(**options)
    with pytest.raises(ValueError, match="limit"):
        mesh("H100", (10**9,))


def test_tiles():
    for tile, more in itertools.product(
        (TILE, TILE.replace(" block", ", block")),
        ("", " split_k: 2", " is_tma_allowed: true split_k: 1"),
    ):
        check_tile(tile + more)
    for bad in (
        "is_tma_allowed: maybe",
        "is_tma_allowed: 2",
        "split_k: abc",
        "split_k: 08",
        "split_k: true",
        f"split_k: {'9' * 20}",
        ",,,",
        "num_stages: 3",
    ):
        with pytest.raises(ValueError, match="XLA would abort"):
            check_tile(f"{TILE} {bad}")


def test_isolated_it_is_the_same():
    fn, args = with_amax("of all"), ARGUMENTS
    here, apart = [
        inspect(fn, *args, isolate=isolate) for isolate in (False, {"seconds": 300, "gigabytes": 8})
    ]
    assert isinstance(apart.compiled, Isolated) and apart.module.text == here.module.text
    assert (
        str(apart) == str(here)
        and apart.json() == here.json()
        and str(apart.ledger) == str(here.ledger)
    )


def test_isolated_on_a_mesh_and_what_xla_refuses():
    assert "num_partitions=4" in one(mesh_shape=(4,), isolate=True, target="B200").as_text()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        one(isolate=True, compiler_options={"xla_no_such": 1})
    with pytest.raises(ValueError, match="sharding is on cpu"):
        cpus = jax.sharding.NamedSharding(
            jax.make_mesh((1,), ("d",), devices=jax.devices("cpu")[:1]), jax.P()
        )
        aot_compile(
            jax.jit(jnp.sin, out_shardings=cpus),
            jax.ShapeDtypeStruct((8,), jnp.float32),
            isolate=True,
        )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "kill -SEGV $$",
            r"died \(SIGSEGV\). Its last words: nothing. It is a bug of XLA's: report it",
        ),
        (
            "echo 'F1122 17:00:00.1    42 some.cc:7] Check failed: x' >&2; echo '  @ 0x1' >&2; "
            "kill -ABRT $$",
            r"died \(SIGABRT\). Its last words: some.cc:7\] Check failed: x. It is a bug",
        ),
        ("kill -KILL $$", r"SIGKILL.* It needs more memory than there is"),
        (
            "echo 'F1122 17:00:00.1 42 env.cc:9] pthread_create() failed' >&2; kill -ABRT $$",
            r"died \(SIGABRT\).* It needs more memory than there is",
        ),
        ("exit 0", r"died \(exit status 0\)"),
        ("sleep 60", "did not end within 1 s"),
    ],
)
def test_however_it_dies_this_process_lives(tmp_path, monkeypatch, script, words):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CompilerDied, match=words):
        assert_fp8_gemms(dot, MATRIX, MATRIX, isolate={"seconds": 1} if "sleep" in script else True)


def test_a_limit_of_memory():
    with pytest.raises(CompilerDied, match="It (needs|may need) more memory than 0.01 GB: give"):
        one(isolate={"gigabytes": 0.01})


def test_a_target_goes_to_another_process():
    import pickle

    assert pickle.loads(pickle.dumps(TARGETS["B200"])) == TARGETS["B200"]
