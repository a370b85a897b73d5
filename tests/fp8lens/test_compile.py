"""Compiling for a chip that is not here: what is taken, what it makes, and what is refused."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8lens import TARGETS, aot_compile, gpu_available, mesh, run

e4m3 = jnp.float8_e4m3fn
MATRIX, SCALAR = jax.ShapeDtypeStruct((64, 256), e4m3), jax.ShapeDtypeStruct((), jnp.float32)
SCALED = (MATRIX, MATRIX, SCALAR, SCALAR, SCALAR)
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
WEIGHT = jnp.ones((64, 64))


def scaled_matmul(a, b, a_scale, b_scale, d_scale):
    d = jax.lax.dot(a.astype(jnp.float32) * a_scale, (b.astype(jnp.float32) * b_scale).T)
    return jnp.clip(d * d_scale, -448, 448).astype(e4m3)


def targets_of(compiled) -> list[str]:
    return re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())


def parameters(compiled) -> list[str]:
    """Types of the program's parameters, in order."""
    entry = next(line for line in compiled.as_text().splitlines() if line.startswith("ENTRY"))
    return re.findall(r": (\w+\[[\d,]*\])", entry.split("->")[0])


def python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | variables,
    )


# Chips and libraries ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A100", "L40S", "H100", "H200", "B200"])
def test_each_chip_compiles_and_has_fp8_or_not(name):
    expected = "__cublas$lt$matmul$f8" if TARGETS[name].has_fp8 else "__cublas$lt$matmul"
    assert targets_of(aot_compile(scaled_matmul, *SCALED, target=name)) == [expected]


TILE = "block_m: 64 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"


@pytest.mark.parametrize(
    "options",
    [
        {"gemm": "triton"},
        {"gemm": "auto"},
        {"gemm": "triton", "compiler_options": {"xla_gpu_override_gemm_autotuner": TILE}},
    ],
)
def test_options_choose_the_library(options):
    text = aot_compile(scaled_matmul, *SCALED, **options).as_text()
    assert "__triton" in text and "custom_call_target" not in text
    assert ('"num_stages":3' in text) == ("override" in str(options))


def test_run_gives_numbers():
    a = jnp.eye(16, dtype=jnp.float32).astype(e4m3)
    one = jnp.float32(1)
    result = run(scaled_matmul, a, a, one, one, jnp.float32(3))
    assert result.dtype == e4m3
    np.testing.assert_array_equal(np.asarray(result, np.float32), 3 * np.eye(16, dtype=np.float32))


def test_local_is_compiled_to_be_called(monkeypatch):
    if not gpu_available():
        with pytest.raises(KeyError, match="needs an NVIDIA GPU"):
            aot_compile(scaled_matmul, *SCALED, target="local")
    monkeypatch.setattr("fp8lens.compile.api.require_gpu", lambda: None)  # the CPU stands in
    one = jnp.ones(4)

    def fn(x, n, *, y):
        return x * n + y

    compiled = aot_compile(fn, one, 3, y=one, static_argnums=1, target="local")
    np.testing.assert_array_equal(compiled(one, y=one), 4)


# What is compiled ---------------------------------------------------------------------------------


def test_arrays_shapes_and_jitted_functions_give_one_program():
    def f(params, x):
        return jax.lax.dot(x, params["w"].T)

    def body(fn, *args):
        return aot_compile(fn, *args).as_text().split("\nENTRY")[1]

    first = body(f, {"w": jnp.ones((64, 256), e4m3)}, np.ones((64, 256), jnp.dtype(e4m3)))
    assert body(f, {"w": MATRIX}, MATRIX) == first
    assert body(jax.jit(f), {"w": MATRIX}, MATRIX) == first


class Doubler:
    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return x * 2

    def __call__(self, x):
        return x * 2


def times(x, n):
    assert isinstance(n, int)
    return x * n


jitted_times = jax.jit(times, static_argnums=1)


@pytest.mark.parametrize(
    "count, fn, args, options",
    [
        (2, lambda x, *, y: x @ y, [X], {"y": WEIGHT}),
        (1, times, [X], {"n": 2, "static_argnames": ["n"]}),
        (1, jax.jit(jnp.astype, static_argnums=1), [X, np.float16], {}),
        (2, jax.jit(lambda x, n: x * n), [X, 2.0], {}),
        (1, functools.partial(jitted_times, n=2), [X], {}),
        (2, functools.partial(jax.jit(jnp.matmul), WEIGHT), [X], {}),
        (2, jax.tree_util.Partial(jnp.matmul, WEIGHT), [X], {}),
        (1, Doubler().jitted, [X], {}),
        (1, Doubler(), [X], {}),
        (1, lambda key: jax.random.normal(key, (3,)), [jax.random.key(0)], {}),
        (0, lambda: jnp.arange(3), [], {}),
    ],
)
def test_what_is_callable_compiles(count, fn, args, options):
    compiled = aot_compile(fn, *args, **options)
    assert type(compiled) is jax.stages.Compiled and len(parameters(compiled)) == count


class Tied(nnx.Module):
    """A function in it, two names for its weights, and a state."""

    def __init__(self):
        self.first = self.last = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
        self.count = nnx.Variable(jnp.float32(0))
        self.activation = jax.nn.relu

    def __call__(self, x):
        self.count[...] += 1
        return self.last(self.activation(self.first(x)))

    @nnx.jit
    def jitted(self, x):
        return self(x)


def test_nnx():
    layer, call = Tied(), nnx.jit(lambda layer, x: layer(x))
    tied = ["f32[64,64]", "f32[64,64]", "f32[]"]
    for fn, *args in ((call, layer, X), (layer.jitted, X), (call, nnx.eval_shape(Tied), X)):
        compiled = aot_compile(fn, *args)
        assert sorted(parameters(compiled)) == tied, "the weights, once; x; the state"
        assert targets_of(compiled) == ["__cublas$lt$matmul"] * 2
    sharded = aot_compile(call, layer, X, mesh_shape=(8,), in_specs=(None, P("x")))
    assert "f32[8,64]" in parameters(sharded)
    assert "f32[64,64]" in parameters(aot_compile(layer, X)), "as arguments, not as constants"


def test_equinox():
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.MLP(64, 8, 16, 2, activation=jax.nn.relu, key=jax.random.key(0))
    call = eqx.filter_jit(lambda layer, x, n: jax.vmap(layer)(x) * n)
    weights = ["f32[16,64]", "f32[16]", "f32[16,16]", "f32[16]", "f32[8,16]", "f32[8]"]
    for skeleton in (layer, eqx.filter_eval_shape(lambda: layer)):
        assert parameters(aot_compile(call, skeleton, X, 2)) == [*weights, "f32[64,64]"]
    inside = aot_compile(eqx.filter_vmap(layer), X)
    assert parameters(inside) == [*weights, "f32[64,64]"], "not constants"
    sharded = aot_compile(call, layer, X, 2, mesh_shape=(8,), in_specs=(None, P("x"), None))
    assert "f32[8,64]" in parameters(sharded)


# Meshes -------------------------------------------------------------------------------------------


def placed_on(devices):
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(devices, P("data")))


def add(tree):
    return tree["w"] + tree["v"]


TREE = {"w": X, "v": X}
DATA = {"data": 8}


@pytest.mark.parametrize(
    "expected, fn, arg, options",
    [
        (["f32[8,64]"], jnp.sin, X, {"mesh_shape": DATA, "in_specs": (P("data"),)}),
        (
            ["f32[64,64]", "f32[8,64]"],
            add,
            TREE,
            {"mesh_shape": (8,), "in_specs": ({"w": P("x"), "v": None},)},
        ),
        (["f32[8,64]"], jnp.sin, placed_on(AbstractMesh((8,), ("data",))), {"mesh_shape": DATA}),
        (["f32[8,64]"], jnp.sin, placed_on(mesh("H100", DATA)), {}),
        (["f32[8,64]"], jax.jit(jnp.sin, in_shardings=P("data")), X, {"mesh_shape": DATA}),
    ],
)
def test_arguments_are_sharded_by_specs_or_by_themselves(expected, fn, arg, options):
    compiled = aot_compile(fn, arg, **options)
    assert parameters(compiled) == expected and "num_partitions=8" in compiled.as_text()


def cpus():
    axes = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("data",), axes, devices=jax.devices("cpu")[:1])


def on_mesh(devices):
    """Functions that have the mesh in them, each in its own way: of X, sharded over "data"."""
    sharding = NamedSharding(devices, P("data"))
    return {
        "shard_map": jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=devices, in_specs=P("data"), out_specs=P()
        ),
        "in_shardings": jax.jit(lambda x: x.sum(0), in_shardings=sharding),
        "out_shardings": jax.jit(lambda x: x * 2, out_shardings=sharding),
        "constraint": lambda x: jax.lax.with_sharding_constraint(x * 2, sharding),
    }


@pytest.mark.parametrize("way", on_mesh(cpus()))
def test_a_function_may_have_a_mesh_of_its_own(way):
    """One of compile-only devices of the chip; of others it is answered with the fix."""
    fn = on_mesh(mesh("H100", DATA))[way]
    for argument in (X, WEIGHT):
        assert parameters(aot_compile(fn, argument)) == ["f32[8,64]"]
    assert "num_partitions=8" in aot_compile(fn, X, mesh_shape=DATA).as_text()
    with pytest.raises(ValueError, match=r"on cpu, .* for H100: .*fp8lens\.mesh\('H100', {\"data"):
        aot_compile(on_mesh(cpus())[way], X)
    with pytest.raises(ValueError, match=r"on NVIDIA H100.*, and .* for B200: .*mesh\('B200'"):
        aot_compile(fn, X, target="B200")


def test_a_mesh_that_is_set_and_one_that_contradicts():
    with jax.set_mesh(mesh("B200", {"data": 4})):
        fn = jax.jit(jnp.sin, in_shardings=P("data"))
        assert parameters(aot_compile(fn, X, target="B200")) == ["f32[16,64]"]

    def on(*shape):
        return placed_on(AbstractMesh(shape, ("data", "model")[: len(shape)]))

    wanted = {"mesh_shape": {"data": 4, "model": 2}}
    assert aot_compile(jnp.dot, on(1), on(4, 2), **wanted), "one device is no other mesh"
    with pytest.raises(ValueError, match=r"argument 1 is on the mesh .*put all arguments on"):
        aot_compile(jnp.dot, on(4, 2), on(8), **wanted)
    here, there = placed_on(mesh("H100", DATA)), placed_on(mesh("H100", {"data": 4}))
    with pytest.raises(ValueError, match=r"1 is on the mesh {'data': 4}.* for {'data': 8}: put"):
        aot_compile(jnp.dot, here, there)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, words, fn, args, options",
    [
        (KeyError, "known are A100, L40S, H100", jnp.sin, [X], {"target": "h100"}),
        (ValueError, "'cublaslt', 'triton', 'auto'", jnp.sin, [X], {"gemm": "cublas"}),
        (TypeError, "give a function .* got ShapeDtypeStruct", MATRIX, [MATRIX], {}),
        (ValueError, "mesh_shape must be", jnp.sin, [X], {"mesh_shape": (2, 2, 2, 2)}),
        (ValueError, "in_specs has 1 entries for 2", jnp.dot, [X, X], {"in_specs": (P(),)}),
        (
            ValueError,
            r"sharded over \['q'\]",
            jnp.sin,
            [X],
            {"mesh_shape": (8,), "in_specs": (P("q"),)},
        ),
        (ValueError, r"sharded over \['data'\]", jnp.sin, [placed_on(cpus())], {}),
        (
            ValueError,
            "Give mesh_shape, as in",
            lambda x: jax.lax.with_sharding_constraint(x, P("data")),
            [X],
            {},
        ),
        (TypeError, "jitted already", jitted_times, [X, 2], {"static_argnums": 1}),
        (TypeError, r"kwargs\['targt'\]", jnp.sin, [X], {"targt": "A100"}),
    ],
)
def test_what_cannot_be_compiled_is_answered_by_name(error, words, fn, args, options):
    with pytest.raises(error, match=words):
        aot_compile(fn, *args, **options)


def test_a_functions_own_error_is_left_alone():
    error = ValueError("my mesh of devices")

    def fails(x):
        raise error

    with pytest.raises(ValueError) as caught:
        aot_compile(fails, X)
    assert caught.value is error and error.__cause__ is None
    with pytest.raises(ValueError, match="jax.make_mesh"):
        mesh("local")


@pytest.mark.parametrize("asked", ["cuda", "cuda,cpu"])
def test_a_gpu_that_is_not_there_is_named(monkeypatch, asked):
    monkeypatch.setattr("fp8lens.targets.attached_gpu", lambda: None)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", asked)
    try:
        for call in (aot_compile, run):
            with pytest.raises(RuntimeError, match=f"{asked} asks.*JAX_PLATFORMS=cpu"):
                call(jnp.sin, X)
    finally:
        jax.config.update("jax_platforms", before)


# A process of its own -----------------------------------------------------------------------------

HIDDEN = """
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
sys.platform = sys.argv[1]
try:
    aot_compile(lambda x: x @ x.T, jax.ShapeDtypeStruct((8, 8), jnp.float32))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "platform, words",
    [
        ("linux", "is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-nvj"),
        ("darwin", "has no wheels for this system: use a Linux container, Google Colab, or WSL."),
    ],
)
def test_without_the_plugin_one_sentence_says_what_to_do(platform, words):
    done = python(HIDDEN, platform)
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("compiling for H100 needs XLA's CUDA compiler, which ")
    assert words in done.stdout


USED_FIRST = """
import jax, jax.numpy as jnp
print(jnp.ones(2).sum())
from helpers import aot_compile
shape = jax.ShapeDtypeStruct((16, 16), jnp.float8_e4m3fn)
print("lt$matmul$f8" in aot_compile(lambda a: a @ a.T, shape).as_text())
"""


@pytest.mark.skipif(gpu_available(), reason="a GPU is attached: nothing gives up")
def test_it_compiles_even_where_jax_was_used_first(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    done = python(USED_FIRST)
    assert done.stdout == "2.0\nTrue\n", done.stderr


CACHED = """
import os, sys, jax, jax.numpy as jnp
from concurrent.futures import ThreadPoolExecutor
from fp8lens import aot_compile
from fp8lens.compile.stages import dumped
def ours(n):
    x = jax.ShapeDtypeStruct((16 * n, 16 * n), jnp.float32)
    return aot_compile(lambda x: x @ x, x), len(dumped(lambda x: x @ x, x, pattern="gemm").stages)
def theirs():
    jax.jit(lambda x: jnp.sin(x) @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
if sys.argv[1] == "first":
    theirs()
with ThreadPoolExecutor(2) as pool:
    stages = [n for _, n in pool.map(ours, range(1, 4))]
assert min(stages) > 3, stages
theirs()
print(len(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"])),
      jax.config.jax_persistent_cache_min_compile_time_secs,
      jax.config.jax_enable_compilation_cache)
"""


@pytest.mark.parametrize("when", ["first", "last"])
def test_jaxs_cache_on_disk_is_left_alone(tmp_path, when):
    """Nothing of ours in it, nothing read, and what the process compiles for itself still goes
    there.
    """
    cache = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for _ in range(2):
        done = python(CACHED, when, **cache)
        assert done.stdout == "1 0.0 True\n", done.stderr


FORKED = """
import os, signal, jax, jax.numpy as jnp
import fp8lens.compile.api

def program(n):
    return lambda x: jax.nn.gelu(jax.nn.softmax(jnp.where(x > n, jnp.cos(x), x) @ x))

x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
if os.fork() == 0:  # nothing was used before
    print(type(fp8lens.aot_compile(program(0), x)).__name__, flush=True)
    os._exit(0)
os.wait()
jax.block_until_ready(jax.jit(program(0))(jnp.ones((64, 64))))
if os.fork() == 0:
    signal.alarm(120)  # ends a child that waits
    for name in ("aot_compile", "inspect", "assert_fp8_gemms", "passes", "run"):
        try:
            getattr(fp8lens, name)(program(1), x)
        except RuntimeError as error:
            print(name, "forked" in str(error) and "spawn" in str(error), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_forked_process_is_told_before_it_hangs():
    """A fork has none of JAX's threads, and lowering waits for them without end: whatever compiles
    says so first, if it was imported before. What comes before JAX is used may compile.
    """
    done = python(FORKED, JAX_PLATFORMS="cpu")
    first, *said = done.stdout.splitlines()
    assert first == "Compiled" and len(said) == 5, done.stdout + done.stderr
    assert all(line.endswith(" True") for line in said)
