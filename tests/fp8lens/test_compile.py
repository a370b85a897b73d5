import dataclasses
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
    compiled = aot_compile(
        scaled_matmul, *SCALED, compiler_options={"xla_gpu_enable_triton_gemm": True}
    )
    assert "__triton" in compiled.as_text()


def test_arrays_shapes_trees_and_jitted_functions_give_one_program():
    def f(params, x):
        return jax.lax.dot(x, params["w"].T)

    concrete = ({"w": jnp.ones((64, 256), e4m3)}, np.ones((64, 256), jnp.dtype(e4m3)))

    def body(compiled):
        return compiled.as_text().split("\nENTRY")[1]

    first = body(aot_compile(f, *concrete))
    assert body(aot_compile(f, {"w": MATRIX}, MATRIX)) == first
    assert body(aot_compile(jax.jit(f), {"w": MATRIX}, MATRIX)) == first


def test_mesh_shape_compiles_for_several_devices():
    def f(w, x):
        return jax.lax.dot(x, jax.lax.with_sharding_constraint(w, P()).T)

    for mesh_shape, axis in (((8,), "x"), ({"data": 8}, "data")):
        text = aot_compile(
            f, MATRIX, MATRIX, mesh_shape=mesh_shape, in_specs=(P(axis), None)
        ).as_text()
        assert (
            "num_partitions=8" in text and "all-gather" in text and "__cublas$lt$matmul$f8" in text
        )


def test_arguments_keep_the_spec_of_their_own_sharding():
    sharded = jax.ShapeDtypeStruct(
        (64, 256), e4m3, sharding=NamedSharding(AbstractMesh((4,), ("data",)), P("data"))
    )
    text = aot_compile(
        lambda x: x.astype(jnp.float32) * 2, sharded, mesh_shape={"data": 4}
    ).as_text()
    assert "f8e4m3fn[16,256]" in text.split("\nENTRY")[1].splitlines()[0]


def test_specs_may_be_given_for_a_whole_tree_or_its_leaves():
    def f(params):
        return params["w"].astype(jnp.float32), params["v"].astype(jnp.float32)

    tree = {"w": MATRIX, "v": MATRIX}
    whole = aot_compile(f, tree, mesh_shape=(2,), in_specs=(P("x"),)).as_text().split("\nENTRY")[1]
    leaves = (
        aot_compile(f, tree, mesh_shape=(2,), in_specs=({"w": P("x"), "v": None},))
        .as_text()
        .split("\nENTRY")[1]
    )
    assert whole.count("f8e4m3fn[32,256]{1,0} parameter") == 2
    assert (
        leaves.count("f8e4m3fn[32,256]{1,0} parameter")
        == leaves.count("f8e4m3fn[64,256]{1,0} parameter")
        == 1
    )


TILE = "block_m: 64 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"


def test_a_forced_triton_tile():
    options = {"xla_gpu_override_gemm_autotuner": TILE}
    text = aot_compile(scaled_matmul, *SCALED, gemm="triton", compiler_options=options).as_text()
    assert '"num_stages":3' in text


@pytest.mark.parametrize(
    "tile",
    [
        "triton { " + TILE + " }",
        TILE.replace("m: 64", "m: 63"),
        TILE + " block_q: 1",
        TILE + " }",
        "block_m: 64",
        TILE.replace("num_warps: 4", "num_warps: 3"),
        TILE + " block_m: 32",
        TILE.replace("n: 128", "n: many"),
    ],
)
def test_a_tile_that_would_abort_the_process_is_refused(tile):
    with pytest.raises(ValueError, match="XLA would abort"):
        aot_compile(
            scaled_matmul,
            *SCALED,
            gemm="auto",
            compiler_options={"xla_gpu_override_gemm_autotuner": tile},
        )


@pytest.mark.parametrize(
    "error, words, call",
    [
        (
            KeyError,
            "Did you mean 'H100'",
            lambda: aot_compile(scaled_matmul, *SCALED, target="h100"),
        ),
        (TypeError, "a name or a Target", lambda: aot_compile(scaled_matmul, *SCALED, target=90)),
        (
            ValueError,
            "'cublaslt', 'triton', 'auto'",
            lambda: aot_compile(scaled_matmul, *SCALED, gemm="cublas"),
        ),
        (
            TypeError,
            "argument 2 is 0.5, a float",
            lambda: aot_compile(scaled_matmul, MATRIX, MATRIX, 0.5, SCALAR, SCALAR),
        ),
        (
            TypeError,
            r"argument 0\['w'\]\[1\] is 'x'",
            lambda: aot_compile(lambda p: p, {"w": [MATRIX, "x"]}),
        ),
        (TypeError, "must be a function", lambda: aot_compile(MATRIX, MATRIX)),
        (
            ValueError,
            "mesh_shape must be",
            lambda: aot_compile(scaled_matmul, *SCALED, mesh_shape=(0,)),
        ),
        (
            ValueError,
            "mesh_shape must be",
            lambda: aot_compile(scaled_matmul, *SCALED, mesh_shape=(2, 2, 2, 2)),
        ),
        (
            ValueError,
            "in_specs has 1 entries for 5",
            lambda: aot_compile(scaled_matmul, *SCALED, in_specs=(P(),)),
        ),
        (
            ValueError,
            r"sharded over \['q'\]",
            lambda: aot_compile(
                scaled_matmul, *SCALED, mesh_shape=(8,), in_specs=(P("q"), None, None, None, None)
            ),
        ),
        (
            jax.errors.JaxRuntimeError,
            "No such compile option",
            lambda: aot_compile(scaled_matmul, *SCALED, compiler_options={"xla_no_such": 1}),
        ),
    ],
)
def test_bad_input_is_answered_by_name(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.skipif(gpu_available(), reason="a GPU is attached")
def test_local_needs_a_gpu():
    with pytest.raises(KeyError, match="needs an NVIDIA GPU"):
        aot_compile(scaled_matmul, *SCALED, target="local")


def test_local_needs_no_recorded_rates(monkeypatch):
    monkeypatch.setattr(
        "fp8lens.compile.api.require_gpu", lambda: None
    )  # the CPU stands in for the GPU
    one = jnp.ones(4)
    compiled = aot_compile(
        lambda x, n, *, y: x * n + y, one, 3, y=one, static_argnums=1, target="local"
    )
    np.testing.assert_array_equal(compiled(one, y=one), 4)
    with pytest.raises(ValueError, match="name a chip"):
        aot_compile(jnp.sin, jnp.ones(4), mesh_shape=(2,), target="local")


@pytest.mark.parametrize(
    "platform, words",
    [
        (
            "linux",
            "is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-nvjitlink "
            "nvidia-nvvm",
        ),
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
    assert (
        first.startswith("compiling for H100 needs XLA's CUDA compiler, which ") and words in first
    )
    assert last == "2.0"


@pytest.mark.skipif(gpu_available(), reason="a GPU is attached: nothing gives up")
def test_it_compiles_even_where_jax_was_used_first():
    program = """
import jax, jax.numpy as jnp
print(jnp.ones(2).sum())
from helpers import aot_compile
shape = jax.ShapeDtypeStruct((16, 16), jnp.float8_e4m3fn)
print("lt$matmul$f8" in aot_compile(lambda a: a @ a.T, shape).as_text())
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
    """JAX hands a compile-only compile to the client of a GPU that is there, to time candidates on
    it, if both have one version of the platform. They have not: a described chip's is its name, a
    GPU's is CUDA's version.
    """
    from jax._src import xla_bridge

    class Attached:
        platform_version = "PJRT C API\ncuda 13000"
        device_count = staticmethod(lambda: 1)

        def compile(self, *args, **options):
            raise AssertionError("compiled by the attached GPU's client")

    find, asked = xla_bridge.get_backend, []
    monkeypatch.setattr(
        xla_bridge,
        "get_backend",
        lambda platform=None: (
            asked.append(platform) or Attached() if platform in ("gpu", "cuda") else find(platform)
        ),
    )

    def dot(a, b):
        return a @ b.T

    assert "gemm_fusion" in aot_compile(dot, MATRIX, MATRIX, target="H200", gemm="auto").as_text()
    assert asked, "JAX no longer looks for a GPU here"
    described = mesh("H200").devices.flat[0].client.platform_version
    assert TARGETS["H200"].device in described and "cuda" not in described
    Attached.platform_version = described  # were it so, the GPU would take part
    with pytest.raises(AssertionError, match="attached GPU's client"):
        aot_compile(
            dot,
            MATRIX,
            MATRIX,
            target="H200",
            gemm="auto",
            compiler_options={"xla_gpu_autotune_level": 3},
        )


X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def parameters(compiled):
    """Types of the program's parameters, in order."""
    entry = next(line for line in compiled.as_text().splitlines() if line.startswith("ENTRY"))
    return re.findall(r": (\w+\[[\d,]*\])", entry.split("->")[0])


class Doubler:
    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return x * 2

    def method(self, x):
        return x * 2

    __call__ = method


def times(x, n):
    assert isinstance(n, int)
    return x * n


WEIGHT = jnp.ones((64, 64))


@pytest.mark.parametrize(
    "expected, call",
    [
        (2, lambda: aot_compile(lambda x, *, y: x @ y, X, y=WEIGHT)),
        (1, lambda: aot_compile(times, X, 2, static_argnums=1)),
        (1, lambda: aot_compile(times, X, 2, static_argnums=(-1,))),
        (1, lambda: aot_compile(times, X, n=2, static_argnums=1)),
        (1, lambda: aot_compile(times, X, 2, static_argnames="n")),
        (1, lambda: aot_compile(times, X, n=2, static_argnames=["n"])),
        (1, lambda: aot_compile(jax.jit(times, static_argnums=1), X, 2)),
        (1, lambda: aot_compile(jax.jit(jnp.astype, static_argnums=1), X, np.float16)),
        (
            1,
            lambda: aot_compile(
                jax.jit(lambda x, n: x * n.item(), static_argnums=1), X, np.int64(3)
            ),
        ),
        (2, lambda: aot_compile(jax.jit(lambda x, n: x * n), X, 2.0)),
        (1, lambda: aot_compile(jax.jit(lambda x: x * 2, donate_argnums=0), X)),
        (1, lambda: aot_compile(functools.partial(times, n=2), X)),
        (1, lambda: aot_compile(functools.partial(jax.jit(times, static_argnums=1), n=2), X)),
        (2, lambda: aot_compile(functools.partial(jax.jit(jnp.matmul), WEIGHT), X)),
        (2, lambda: aot_compile(jax.tree_util.Partial(jnp.matmul, WEIGHT), X)),
        (1, lambda: aot_compile(Doubler().jitted, X)),
        (1, lambda: aot_compile(functools.partial(Doubler().jitted), X)),
        (1, lambda: aot_compile(Doubler().method, X)),
        (1, lambda: aot_compile(Doubler(), X)),
        (1, lambda: aot_compile(jax.vmap(jnp.sin), X)),
        (1, lambda: aot_compile(jax.grad(lambda x: (x @ x).sum()), X)),
        (1, lambda: aot_compile(lambda p: p["w"] * 2, {"w": X, "b": None})),
        (1, lambda: aot_compile(lambda key: jax.random.normal(key, (3,)), jax.random.key(0))),
        (0, lambda: aot_compile(lambda: jnp.arange(3))),
    ],
)
def test_what_is_callable_compiles(expected, call):
    compiled = call()
    assert type(compiled) is jax.stages.Compiled and len(parameters(compiled)) == expected


def test_donated_arguments_stay_donated():
    assert (
        "input_output_alias" in aot_compile(jax.jit(lambda x: x * 2, donate_argnums=0), X).as_text()
    )


def test_specs_count_the_arguments_that_are_given():
    jitted = functools.partial(jax.jit(lambda n, x: x * n, static_argnums=0), 2)
    assert parameters(aot_compile(jitted, X, mesh_shape=(8,), in_specs=(P("x"),))) == ["f32[8,64]"]
    assert parameters(
        aot_compile(
            lambda n, x: x * n, 2, X, static_argnums=0, mesh_shape=(8,), in_specs=(None, P("x"))
        )
    ) == ["f32[8,64]"]


def test_a_functions_own_error_is_left_alone():
    for error in (ValueError("my mesh of devices"), KeyError("my sharding"), TypeError("mine")):
        calls = []

        def fails(x, calls=calls, error=error):
            calls.append(x)
            raise error

        with pytest.raises(type(error)) as caught:
            aot_compile(fails, X)
        assert caught.value is error and error.__cause__ is None and calls


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


WAYS = ["shard_map", "in_shardings", "out_shardings", "constraint"]


@pytest.mark.parametrize("way", WAYS)
def test_a_function_may_have_a_mesh_of_its_own(way):
    devices = mesh("H100", {"data": 8})
    fn = on_mesh(devices)[way]
    for argument in (X, WEIGHT, np.ones((64, 64), np.float32)):
        compiled = aot_compile(fn, argument)
        assert "num_partitions=8" in compiled.as_text() and parameters(compiled) == ["f32[8,64]"]
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(devices, P("data")))
    assert parameters(aot_compile(fn, placed)) == ["f32[8,64]"]
    assert "num_partitions=8" in aot_compile(fn, X, mesh_shape={"data": 8}).as_text()
    assert "num_partitions=8" in aot_compile(jax.jit(fn), X).as_text()


def test_an_argument_on_another_mesh_is_refused():
    """Of one device, or of the same axes, it is not another."""

    def on(*axes):
        own = AbstractMesh(tuple(n for _, n in axes), tuple(name for name, _ in axes))
        return jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(own, P("data")))

    wanted = {"data": 4, "model": 2}
    for axes in ([("data", 8)], [("model", 2), ("data", 4)]):
        with pytest.raises(ValueError, match=r"argument 1 is on the mesh .*put all arguments on"):
            aot_compile(jnp.dot, on(*wanted.items()), on(*axes), mesh_shape=wanted)
    one, alike = on(("data", 1)), on(*wanted.items(), ("spare", 1))
    compiled = aot_compile(jnp.dot, one, alike, mesh_shape=wanted)
    assert "bf16[16,64]" in compiled.as_text()
    here, there = placed_on(mesh("H100", {"data": 8})), placed_on(mesh("H100", {"data": 4}))
    with pytest.raises(ValueError, match=r"1 is on the mesh {'data': 4}.* for {'data': 8}: put"):
        aot_compile(jnp.dot, here, there)


def test_a_mesh_may_come_with_an_argument_or_from_set_mesh():
    devices = mesh("B200", {"data": 4})
    assert devices == mesh("B200", {"data": 4}) and devices.shape == {"data": 4}
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(devices, P("data")))
    assert parameters(aot_compile(jnp.matmul, placed, X, target="B200")) == [
        "f32[16,64]",
        "f32[64,64]",
    ]
    with jax.set_mesh(devices):
        assert parameters(
            aot_compile(jax.jit(jnp.sin, in_shardings=P("data")), X, target="B200")
        ) == ["f32[16,64]"]
    sharded = aot_compile(jax.jit(jnp.sin, in_shardings=P("data")), X, mesh_shape={"data": 4})
    assert parameters(sharded) == ["f32[16,64]"]


def cpus():
    return jax.make_mesh(
        (1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:1]
    )


def placed_on(devices):
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(devices, P("data")))


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_of_other_devices_is_answered_with_the_fix(way):
    with pytest.raises(
        ValueError, match=r"on cpu, .* for H100: .* fp8lens\.mesh\('H100', {\"data\": 8}\)"
    ):
        aot_compile(on_mesh(cpus())[way], X)
    with pytest.raises(
        ValueError, match=r"on NVIDIA H100.*, and .* for B200: .* fp8lens\.mesh\('B200'"
    ):
        aot_compile(on_mesh(mesh("H100", {"data": 8}))[way], X, target="B200")


@pytest.mark.parametrize(
    "error, words, call",
    [
        (ValueError, r"sharded over \['data'\]", lambda: aot_compile(jnp.sin, placed_on(cpus()))),
        (
            ValueError,
            r"on NVIDIA H100.*fp8lens\.mesh\('B200'",
            lambda: aot_compile(jnp.sin, placed_on(mesh("H100", {"data": 8})), target="B200"),
        ),
        (
            ValueError,
            "Give mesh_shape, as in",
            lambda: aot_compile(lambda x: jax.lax.with_sharding_constraint(x, P("data")), X),
        ),
        (ValueError, "jax.make_mesh", lambda: mesh("local")),
        (KeyError, "Did you mean 'H100'", lambda: mesh("h100")),
        (ValueError, "mesh_shape must be", lambda: mesh("H100", (0,))),
        (
            TypeError,
            "argument y is 2.0, a float.* static_argnames",
            lambda: aot_compile(lambda x, *, y: x, X, y=2.0),
        ),
        (
            TypeError,
            "argument 1 is 2, a int.* static_argnums",
            lambda: aot_compile(times, X, 2, static_argnums=0),
        ),
        (
            TypeError,
            r"argument 0\['act'\] is .*filter_jit",
            lambda: aot_compile(lambda p: p["w"], {"w": X, "act": abs}),
        ),
        (TypeError, "jitted already", lambda: aot_compile(jax.jit(times), X, 2, static_argnums=1)),
        (TypeError, "marked as static", lambda: aot_compile(jax.jit(lambda x, way: x), X, "up")),
        (TypeError, "contracting dimensions", lambda: aot_compile(jnp.matmul, X, jnp.ones((3, 3)))),
    ],
)
def test_bad_calls_are_answered_with_the_fix(error, words, call):
    with pytest.raises(error, match=words):
        call()


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
    for compiled in (
        aot_compile(call, layer, X),
        aot_compile(layer.jitted, X),
        aot_compile(call, nnx.eval_shape(Tied), X),
    ):
        assert type(compiled) is jax.stages.Compiled
        assert sorted(parameters(compiled)) == tied, "the weights, once; x; the state"
        assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul"') == 2
    scaled = nnx.jit(lambda layer, x, n: layer(x) * n, static_argnums=2)
    assert sorted(parameters(aot_compile(scaled, layer, X, 3))) == tied
    sharded = aot_compile(call, layer, X, mesh_shape=(8,), in_specs=(None, P("x")))
    assert "f32[8,64]" in parameters(sharded)
    assert "f32[64,64]" in parameters(aot_compile(layer, X)), "as arguments, not as constants"
    own = NamedSharding(mesh("H100", {"data": 8}), P("data"))
    fn = nnx.jit(lambda layer, x: layer(jax.lax.with_sharding_constraint(x, own)))
    assert "f32[8,64]" in parameters(aot_compile(fn, layer, X))


def test_a_training_step_of_nnx_keeps_its_updates():
    @nnx.jit
    def step(layer, x):
        loss, grads = nnx.value_and_grad(lambda layer: layer(x).sum())(layer)
        nnx.update(layer, jax.tree.map(lambda w, g: w - g, nnx.state(layer, nnx.Param), grads))
        return loss

    assert (
        aot_compile(step, Tied(), X).as_text().count('custom_call_target="__cublas$lt$matmul"') > 3
    )


def test_equinox():
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.MLP(64, 8, 16, 2, activation=jax.nn.relu, key=jax.random.key(0))

    def call(layer, x):
        return jax.vmap(layer)(x)

    weights = ["f32[16,64]", "f32[16]", "f32[16,16]", "f32[16]", "f32[8,16]", "f32[8]"]
    for fn in (eqx.filter_jit(call), eqx.filter_jit(eqx.filter_jit(call))):
        for skeleton in (layer, eqx.filter_eval_shape(lambda: layer)):
            compiled = aot_compile(fn, skeleton, X)
            assert type(compiled) is jax.stages.Compiled and parameters(compiled) == [
                *weights,
                "f32[64,64]",
            ]
    for fn in (eqx.filter_vmap(layer), eqx.filter_jit(eqx.filter_vmap(layer))):
        assert parameters(aot_compile(fn, X)) == [*weights, "f32[64,64]"], "not constants"
    assert (
        parameters(aot_compile(eqx.filter_jit(lambda layer, x, n: layer(x[0]) * n), layer, X, 2))[
            -1
        ]
        == "f32[64,64]"
    )
    sharded = aot_compile(eqx.filter_jit(call), layer, X, mesh_shape=(8,), in_specs=(None, P("x")))
    assert "f32[8,64]" in parameters(sharded)
    with pytest.raises(TypeError, match="argument 0.activation is .* give eqx.filter_jit"):
        aot_compile(call, layer, X)
    with pytest.raises(TypeError, match="jitted already"):
        aot_compile(eqx.filter_jit(call), layer, X, static_argnums=1)


def test_haiku():
    hk = pytest.importorskip("haiku")
    net = hk.transform(lambda x: hk.nets.MLP([16, 8])(x))
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    for fn, rng in ((net.apply, None), (jax.jit(net.apply), jax.random.key(0))):
        assert sorted(parameters(aot_compile(fn, params, rng, X))) == [
            "f32[16,8]",
            "f32[16]",
            "f32[64,16]",
            "f32[64,64]",
            "f32[8]",
        ]


def with_cache(folder, program, argument):
    told = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, argument],
        capture_output=True,
        text=True,
        env=os.environ | told,
    )


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
    there."""
    for _ in range(2):
        done = with_cache(tmp_path, CACHED, when)
        assert done.stdout == "1 0.0 True\n", done.stderr


def test_what_another_program_kept_is_not_read(tmp_path):
    """JAX's own compile for a chip that is not here is kept, and cannot be read: that warns, and
    ours must not ask."""
    program = """
import sys, jax, jax.numpy as jnp
from fp8lens import aot_compile, mesh
f = jax.jit(lambda x: x @ x)
replicated = jax.sharding.NamedSharding(mesh("H100"), jax.sharding.PartitionSpec())
x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=replicated)
if sys.argv[1] == "jax":
    f.lower(x).compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
else:
    aot_compile(f, x)
"""
    results = [with_cache(tmp_path, program, who) for who in ("jax", "fp8lens", "jax")]
    assert [done.returncode for done in results] == [0, 0, 1], results[1].stderr
    assert "Error reading persistent compilation cache" in results[2].stderr


FORKED = """
import faulthandler, os, signal, sys, threading, time
import jax, jax.numpy as jnp

def program(n):
    def fn(x):  # many functions: to lower them JAX asks its threads for help
        for k in range(6):
            step = jax.jit(lambda x, k=k: jnp.where(x > n + k, jnp.cos(x), x) @ jnp.clip(x, 0, 1))
            x = jax.nn.gelu(jax.nn.softmax(step(x)))
        return x
    return fn

x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
if sys.argv[1] == "compiled":
    import fp8lens
    fp8lens.aot_compile(program(0), x)
else:
    jax.block_until_ready(jax.jit(program(0))(jnp.ones((64, 64))))
jax.clear_caches()  # not in the child, where JAX would at times wait for a thread here already
if os.fork() == 0:
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(120)  # ends a child that waits, and says where it did
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
    faulthandler.dump_traceback_later(300)  # a thread of which Python does not know
    import fp8lens
    numbers = iter(range(1, 99))
    for name in ("aot_compile", "inspect", "report_gemms", "why_not_fp8", "assert_fp8_gemms",
                 "assert_fp8_collectives", "passes", "run", "mesh"):
        for isolate in (False, True)[: 1 if name in ("run", "mesh") else 2]:
            args = (program(next(numbers)), x) if name != "mesh" else ()
            try:
                getattr(fp8lens, name)(*args, **({"isolate": True} if isolate else {}))
            except RuntimeError as error:
                print(name, "forked" in str(error) and "spawn" in str(error), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
@pytest.mark.parametrize("parent", ["compiled", "used"])
def test_a_forked_process_is_told_before_it_hangs(parent):
    """A fork has none of JAX's threads, and lowering waits for them without end: whatever compiles
    says so first. The package may have been there before the fork, or be imported in the child."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, parent],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = dict(line.split() for line in done.stdout.splitlines())
    assert set(said.values()) == {"True"} and len(said) == 9, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 16


@pytest.mark.parametrize(
    "parent, child", [("import fp8lens.compile.api", "pass"), ("pass", "jax.devices()")]
)
def test_a_fork_that_comes_first_may_compile(parent, child):
    """What the parent has imported, and not used, does no harm; nor does JAX used in the child."""
    script = (
        f"import os, jax, jax.numpy as jnp\n{parent}\n"
        "if os.fork() == 0:\n"
        f"    {child}\n"
        "    import fp8lens\n"
        "    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)\n"
        "    print(type(fp8lens.aot_compile(lambda x: x @ x, x)).__name__, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "Compiled\n", done.stderr


@pytest.mark.parametrize("asked", ["cuda", "gpu", "cuda,cpu"])
def test_a_gpu_that_is_not_there_is_named(monkeypatch, asked):
    monkeypatch.setattr("fp8lens.targets.attached_gpu", lambda: None)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", asked)
    try:
        for call in (aot_compile, run):
            with pytest.raises(
                RuntimeError, match=f"JAX_PLATFORMS={asked} asks.*JAX_PLATFORMS=cpu"
            ):
                call(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32))
        with pytest.raises(RuntimeError, match="JAX_PLATFORMS"):
            mesh("H100")
    finally:
        jax.config.update("jax_platforms", before)
