import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8lens import TARGETS, aot_compile, compile, gpu_available, run

e4m3 = jnp.float8_e4m3fn
MATRIX, SCALAR = jax.ShapeDtypeStruct((64, 256), e4m3), jax.ShapeDtypeStruct((), jnp.float32)
SCALED = (MATRIX, MATRIX, SCALAR, SCALAR, SCALAR)


def scaled_matmul(a, b, a_scale, b_scale, d_scale):
    d = jax.lax.dot(a.astype(jnp.float32) * a_scale, (b.astype(jnp.float32) * b_scale).T)
    return jnp.clip(d * d_scale, -448, 448).astype(e4m3)


def targets_of(compiled):
    return re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())


@pytest.mark.parametrize("name", ["A100", "L40S", "H100", "H200", "B200"])
def test_each_chip_compiles_and_has_fp8_or_not(name):
    expected = "__cublas$lt$matmul$f8" if TARGETS[name].has_fp8 else "__cublas$lt$matmul"
    assert targets_of(aot_compile(scaled_matmul, *SCALED, target=name)) == [expected]


def test_a_target_can_be_made():
    half = dataclasses.replace(TARGETS["H100"], name="half an H100", sms=66)
    assert targets_of(aot_compile(scaled_matmul, *SCALED, target=half)) == ["__cublas$lt$matmul$f8"]


def test_gemm_chooses_the_library():
    assert targets_of(aot_compile(scaled_matmul, *SCALED)) == ["__cublas$lt$matmul$f8"]
    for gemm in ("triton", "auto"):
        text = aot_compile(scaled_matmul, *SCALED, gemm=gemm).as_text()
        assert "__triton" in text and "custom_call_target" not in text


def test_compiler_options_win_over_gemm():
    compiled = aot_compile(scaled_matmul, *SCALED, compiler_options={"xla_gpu_enable_triton_gemm": True})
    assert "__triton" in compiled.as_text()


def test_arrays_shapes_trees_and_jitted_functions_give_one_program():
    def f(params, x):
        return jax.lax.dot(x, params["w"].T)

    concrete = ({"w": jnp.ones((64, 256), e4m3)}, np.ones((64, 256), jnp.dtype(e4m3)))
    body = lambda compiled: compiled.as_text().split("\nENTRY")[1]
    first = body(aot_compile(f, *concrete))
    assert body(aot_compile(f, {"w": MATRIX}, MATRIX)) == first
    assert body(aot_compile(jax.jit(f), {"w": MATRIX}, MATRIX)) == first


def test_mesh_shape_compiles_for_several_devices():
    def f(w, x):
        return jax.lax.dot(x, jax.lax.with_sharding_constraint(w, P()).T)

    for mesh_shape, axis in (((8,), "x"), ({"data": 8}, "data")):
        text = aot_compile(f, MATRIX, MATRIX, mesh_shape=mesh_shape, in_specs=(P(axis), None)).as_text()
        assert "num_partitions=8" in text and "all-gather" in text and "__cublas$lt$matmul$f8" in text


def test_arguments_keep_the_spec_of_their_own_sharding():
    sharded = jax.ShapeDtypeStruct((64, 256), e4m3, sharding=NamedSharding(AbstractMesh((4,), ("data",)), P("data")))
    text = aot_compile(lambda x: x.astype(jnp.float32) * 2, sharded, mesh_shape={"data": 4}).as_text()
    assert "f8e4m3fn[16,256]" in text.split("\nENTRY")[1].splitlines()[0]


def test_specs_may_be_given_for_a_whole_tree_or_its_leaves():
    def f(params):
        return params["w"].astype(jnp.float32), params["v"].astype(jnp.float32)

    tree = {"w": MATRIX, "v": MATRIX}
    whole = aot_compile(f, tree, mesh_shape=(2,), in_specs=(P("x"),)).as_text().split("\nENTRY")[1]
    leaves = aot_compile(f, tree, mesh_shape=(2,), in_specs=({"w": P("x"), "v": None},)).as_text().split("\nENTRY")[1]
    assert whole.count("f8e4m3fn[32,256]{1,0} parameter") == 2
    assert leaves.count("f8e4m3fn[32,256]{1,0} parameter") == leaves.count("f8e4m3fn[64,256]{1,0} parameter") == 1


TILE = "block_m: 64 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"


def test_a_forced_triton_tile():
    options = {"xla_gpu_override_gemm_autotuner": TILE}
    text = aot_compile(scaled_matmul, *SCALED, gemm="triton", compiler_options=options).as_text()
    assert '"num_stages":3' in text


@pytest.mark.parametrize(
    "tile",
    ["triton { " + TILE + " }", TILE.replace("m: 64", "m: 63"), TILE + " block_q: 1", TILE + " }", "block_m: 64",
     TILE.replace("num_warps: 4", "num_warps: 3"), TILE + " block_m: 32", TILE.replace("n: 128", "n: many")],
)  # fmt: skip
def test_a_tile_that_would_abort_the_process_is_refused(tile):
    with pytest.raises(ValueError, match="XLA would abort"):
        aot_compile(scaled_matmul, *SCALED, gemm="auto", compiler_options={"xla_gpu_override_gemm_autotuner": tile})


@pytest.mark.parametrize(
    "error, words, call",
    [
        (KeyError, "Did you mean 'H100'", lambda: aot_compile(scaled_matmul, *SCALED, target="h100")),
        (TypeError, "a name or a Target", lambda: aot_compile(scaled_matmul, *SCALED, target=90)),
        (ValueError, "'cublaslt', 'triton', 'auto'", lambda: aot_compile(scaled_matmul, *SCALED, gemm="cublas")),
        (TypeError, "argument 2 is 0.5, a float",
         lambda: aot_compile(scaled_matmul, MATRIX, MATRIX, 0.5, SCALAR, SCALAR)),
        (TypeError, r"argument 0\['w'\]\[1\] is 'x'", lambda: aot_compile(lambda p: p, {"w": [MATRIX, "x"]})),
        (TypeError, "must be a function", lambda: aot_compile(MATRIX, MATRIX)),
        (ValueError, "mesh_shape must be", lambda: aot_compile(scaled_matmul, *SCALED, mesh_shape=(0,))),
        (ValueError, "mesh_shape must be", lambda: aot_compile(scaled_matmul, *SCALED, mesh_shape=(2, 2, 2, 2))),
        (ValueError, "in_specs has 1 entries for 5", lambda: aot_compile(scaled_matmul, *SCALED, in_specs=(P(),))),
        (ValueError, r"sharded over \['q'\]",
         lambda: aot_compile(scaled_matmul, *SCALED, mesh_shape=(8,), in_specs=(P("q"), None, None, None, None))),
        (jax.errors.JaxRuntimeError, "No such compile option",
         lambda: aot_compile(scaled_matmul, *SCALED, compiler_options={"xla_no_such": 1})),
    ],
)  # fmt: skip
def test_bad_input_is_answered_by_name(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.skipif(gpu_available(), reason="a GPU is attached")
def test_local_needs_a_gpu():
    with pytest.raises(KeyError, match="needs an NVIDIA GPU"):
        aot_compile(scaled_matmul, *SCALED, target="local")


@pytest.mark.parametrize(
    "platform, words",
    [
        ("linux", "is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-nvjitlink nvidia-nvvm"),
        ("darwin", "has no wheels for this system: use a Linux container, Google Colab, or WSL."),
    ],
)
def test_without_the_plugin_one_sentence_says_what_to_do(platform, words):
    # A process of its own, in which the CUDA plugin cannot be found, as on macOS and Windows.
    program = """
import importlib.metadata as m, sys
real = m.version
def hidden(name):
    if name.startswith("jax-cuda13"):
        raise m.PackageNotFoundError(name)
    return real(name)
m.version = hidden
entries = m.entry_points
m.entry_points = lambda **k: [e for e in entries(**k) if k.get("group") != "jax_plugins"]
sys.modules["jax_plugins"] = None
sys.modules["jax_cuda13_plugin"] = None
import jax, jax.numpy as jnp
from helpers import aot_compile
sys.platform = PLATFORM
try:
    aot_compile(lambda x: x @ x.T, jax.ShapeDtypeStruct((8, 8), jnp.float32))
except RuntimeError as error:
    print(error)
print(jnp.ones(2).sum())
"""
    program = program.replace("PLATFORM", repr(platform))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    first, last = done.stdout.strip().splitlines()
    assert first.startswith("compiling for H100 needs XLA's CUDA compiler, which ") and words in first
    assert last == "2.0"


@pytest.mark.skipif(gpu_available(), reason="a GPU is attached: nothing gives up")
def test_it_compiles_even_where_jax_was_used_first():
    program = """
import jax, jax.numpy as jnp
print(jnp.ones(2).sum())
from helpers import aot_compile
print("lt$matmul$f8" in aot_compile(lambda a: a @ a.T, jax.ShapeDtypeStruct((16, 16), jnp.float8_e4m3fn)).as_text())
"""
    bare = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=bare)
    assert done.stdout == "2.0\nTrue\n", done.stderr


def test_start_up_is_silent():
    program = "import jax, jax.numpy as jnp; import helpers; print(jnp.ones(2).sum())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2.0\n", "")


def test_run_gives_numbers():
    a = jnp.eye(16, dtype=jnp.float32).astype(e4m3)
    one = jnp.float32(1)
    result = run(scaled_matmul, a, a, one, one, jnp.float32(3))
    assert result.dtype == e4m3
    np.testing.assert_array_equal(np.asarray(result, np.float32), 3 * np.eye(16, dtype=np.float32))


def test_an_attached_gpu_takes_no_part(monkeypatch):
    """JAX hands a compile-only compile to the client of a GPU that is there, to time candidates on it, if both have one
    version of the platform. They have not: a described chip's is its name, a GPU's is CUDA's version.
    """
    from jax._src import xla_bridge

    class Attached:
        platform_version = "PJRT C API\ncuda 13000"
        device_count = staticmethod(lambda: 1)

        def compile(self, *args, **options):
            raise AssertionError("compiled by the attached GPU's client")

    find, asked = xla_bridge.get_backend, []
    monkeypatch.setattr(xla_bridge, "get_backend", lambda platform=None: (
        asked.append(platform) or Attached() if platform in ("gpu", "cuda") else find(platform)))
    dot = lambda a, b: a @ b.T
    assert "gemm_fusion" in aot_compile(dot, MATRIX, MATRIX, target="H200", gemm="auto").as_text()
    assert asked, "JAX no longer looks for a GPU here"
    described = compile._mesh(TARGETS["H200"], (("x", 1),)).devices.flat[0].client.platform_version
    assert TARGETS["H200"].device in described and "cuda" not in described
    Attached.platform_version = described  # were it so, the GPU would take part
    with pytest.raises(AssertionError, match="attached GPU's client"):
        aot_compile(dot, MATRIX, MATRIX, target="H200", gemm="auto", compiler_options={"xla_gpu_autotune_level": 3})
