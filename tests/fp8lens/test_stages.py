import itertools
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fp8lens import inspect
from fp8lens.compile.stages import dumped, passes
from fp8lens.hlo.diff import diff_hlo
from helpers import HloModule, aot_compile, parse_hlo_module

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
SHAPES = (
    jax.ShapeDtypeStruct((64, 128), e4m3),
    jax.ShapeDtypeStruct((256, 128), e4m3),
    *[jax.ShapeDtypeStruct((), f32)] * 2,
)


def relu_matmul(x, w, x_scale, w_scale):
    d = jax.nn.relu((x.astype(f32) * x_scale) @ (w.astype(f32) * w_scale).T)
    return jnp.clip(d, -448, 448).astype(e4m3)


def test_nothing_stays_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dumped(relu_matmul, *SHAPES, pattern="gemm")
    with pytest.raises(TypeError, match="incompatible|contracting"):
        dumped(lambda x, y: x @ y, *SHAPES[:2], pattern="gemm")
    assert not list(tmp_path.iterdir())


def test_stages_lead_from_the_dot_to_the_call():
    compiled, stages, *_ = dumped(relu_matmul, *SHAPES, pattern="gemm")
    assert (stages[0].pipeline, stages[0].after, stages[0].before) == ("", "", "")
    assert " dot(" in stages[0].text and "cublas" not in stages[0].text
    rewritten = next(at for at, stage in enumerate(stages) if "__cublas$lt$matmul$f8" in stage.text)
    assert stages[rewritten].after == stages[rewritten - 1].before == "cublas-gemm-rewriter"
    assert stages[rewritten].pipeline and all(
        re.fullmatch(r"[\w.\- ]+", s.pipeline) for s in stages[1:]
    )
    assert all("gemm" in stage.after + stage.before for stage in stages[1:])
    assert all(parse_hlo_module(stage.text).name == "jit_relu_matmul" for stage in stages)
    assert diff_hlo(compiled, aot_compile(relu_matmul, *SHAPES)).same


def test_stages_end_with_the_program():
    compiled, stages, *_ = dumped(relu_matmul, *SHAPES, pattern=".*")
    assert diff_hlo(stages[-1].text, compiled).same


def bias_and_amax(x, w, x_scale, w_scale):
    d = (x.astype(f32) * x_scale) @ (w.astype(f32) * w_scale).T
    d = jax.nn.gelu(d + x_scale) * w_scale
    return d.astype(e4m3), jnp.max(jnp.abs(d)), jnp.min(d, axis=0)


@pytest.mark.parametrize("fn", [relu_matmul, bias_and_amax], ids=lambda fn: fn.__name__)
def test_without_machine_code_it_is_the_same_program(fn):
    """With and without kernels of XLA's own; in threads too."""
    whole = dumped(fn, *SHAPES, pattern="gemm-rewriter")
    options = {"pattern": "gemm-rewriter", "assemble": False}
    options |= {"compiler_options": {"xla_gpu_autotune_level": 0}}

    def early(_):
        return dumped(lambda *args: fn(*args), *SHAPES, **options)

    with ThreadPoolExecutor(2) as pool:
        for made in pool.map(early, range(4)):
            assert len(made.stages) == len(whole.stages)
            assert not diff_hlo(whole.compiled, made.compiled)


def test_without_machine_code_errors_are_still_xlas():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        dumped(relu_matmul, *SHAPES, assemble=False, compiler_options={"xla_no_such": 1})


def test_only_the_main_module():
    def f(
        x,
        # Sorts, folds constants, and calls a jitted function: XLA compiles, and dumps, smaller
        # modules for some.
    ):
        table = jnp.sin(jnp.arange(4096.0)).reshape(64, 64) @ jnp.cos(jnp.arange(4096.0)).reshape(
            64, 64
        )
        return jnp.sort(jax.jit(jnp.tanh)(x @ table), axis=0)

    _, stages, *_ = dumped(f, jax.ShapeDtypeStruct((64, 64), f32), pattern=".*", gemm="auto")
    assert len(stages) > 10 and {parse_hlo_module(stage.text).name for stage in stages} == {"jit_f"}


def test_a_long_name_and_a_jitted_function():
    def f(x):
        return x @ x

    f.__name__ = "f" * 240
    _, stages, *_ = dumped(jax.jit(f), jax.ShapeDtypeStruct((64, 64), f32), pattern="gemm")
    assert len(stages) > 2 and "cublas" in stages[-1].text


def test_no_pass_of_the_name():
    _, stages, *_ = dumped(relu_matmul, *SHAPES, pattern="no such pass")
    assert [stage.after for stage in stages] == [""]


def test_again_and_with_a_cache_on_disk(tmp_path):
    old = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    # JAX opens one a process, and keeps it whatever the options say later
    compilation_cache.reset_cache()
    f = jax.jit(relu_matmul)
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        aot_compile(f, *SHAPES)
        counts = []
        for _ in range(3):
            jax.clear_caches()
            counts += [
                len(dumped(f, *SHAPES, pattern="gemm")[1]),
                len(dumped(f, *SHAPES, pattern="gemm")[1]),
            ]
        assert len(set(counts)) == 1 and counts[0] > 3
        assert not list(tmp_path.iterdir())
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_static_and_keyword_arguments_reach_the_function():
    def f(x, *, power, scale):
        return jnp.linalg.matrix_power(x, power) * scale

    shapes = jax.ShapeDtypeStruct((64, 64), f32), jax.ShapeDtypeStruct((), f32)
    _, (first,), *_ = dumped(f, shapes[0], power=2, scale=shapes[1], static_argnames="power")
    assert first.text.count(" dot(") == 1
    assert len(passes(f, shapes[0], power=3, scale=shapes[1], static_argnames="power")) == 1


def test_threads_do_not_mix():
    def make(n):
        return lambda x: x.astype(f32) @ x.astype(f32).T * n

    def stages(n):
        return dumped(make(n), jax.ShapeDtypeStruct((16 * n, 64), f32), pattern="gemm")[1]

    with ThreadPoolExecutor(2) as pool:
        for n, found in zip(range(1, 5), pool.map(stages, range(1, 5)), strict=True):
            assert len(found) > 3 and all(f"f32[{16 * n},64]" in stage.text for stage in found)


def test_options_and_errors_are_aot_compiles():
    _, stages, *_ = dumped(
        relu_matmul,
        *SHAPES,
        pattern="gemm",
        compiler_options={"xla_gpu_enable_cublaslt": True, "xla_dump_to": "/nowhere"},
    )
    assert len(stages) > 3 and not Path("/nowhere").exists()
    with pytest.raises(KeyError, match="unknown chip"):
        dumped(relu_matmul, *SHAPES, pattern="gemm", target="H1000")
    with pytest.raises(TypeError, match="argument 0"):
        passes(relu_matmul, 1.0, *SHAPES[1:])


def test_ptx_of_a_triton_kernel():
    compiled, _, ptx, _ = dumped(relu_matmul, *SHAPES, gemm="triton")
    fusions = [
        i.name.replace(".", "_") for i in parse_hlo_module(compiled).entry if i.opcode == "fusion"
    ]
    assert set(fusions) <= set(ptx)
    (gemm,) = (text for name, text in ptx.items() if name.startswith("gemm_fusion"))
    assert re.search(r"mma\S*\.tf32\.tf32", gemm) and all(
        ".target sm_90a" in text for text in ptx.values()
    )
    none = dumped(relu_matmul, *SHAPES).ptx
    assert not any("mma" in text for text in none.values())


def test_passes_of_a_fused_matmul():
    steps = passes(relu_matmul, *SHAPES)
    assert [step.name for step in steps] == ["transpose-folding", "cublas-gemm-rewriter"]
    last = steps[-1]
    assert isinstance(last.before, HloModule) and isinstance(last.after, HloModule)

    def opcodes(module):
        return {i.opcode for i in module}

    assert {"dot", "maximum"} <= opcodes(last.before) and not {"dot", "maximum"} & opcodes(
        last.after
    )
    lines = str(last).splitlines()
    assert lines[0] == f"{last.pipeline}: cublas-gemm-rewriter"
    assert sum(" dot(" in line for line in lines) == 1 and len(lines) < 40
    added = " ".join(line for line in lines if line.startswith("+"))
    assert "__cublas$lt$matmul$f8" in added and '"epilogue": "RELU"' in added
    assert (
        str(steps).count("cublas-gemm-rewriter") == 1 and steps._repr_html_().count("<table") == 2
    )


@pytest.mark.parametrize("gemm", ["triton", "auto"])
def test_passes_of_a_triton_matmul(gemm):
    names = [step.name for step in passes(relu_matmul, *SHAPES, gemm=gemm)]
    assert names.index("triton-gemm-rewriter") > names.index("transpose-folding")
    step = next(
        s for s in passes(relu_matmul, *SHAPES, gemm=gemm) if s.name == "triton-gemm-rewriter"
    )
    assert "gemm_fusion_dot" in str(step)


def test_passes_that_pad():
    names = [
        s.name
        for s in passes(
            lambda x, y: x @ y.T,
            jax.ShapeDtypeStruct((63, 65), jnp.bfloat16),
            jax.ShapeDtypeStruct((66, 65), jnp.bfloat16),
        )
    ]
    assert "cublas-pad-for-gemms" in names


def test_passes_of_a_function_without_matmuls():
    steps = passes(lambda x: x + 1, SHAPES[2])
    assert (
        len(steps) == 0
        and str(steps) == "no pass changed a matmul"
        and "<p>" in steps._repr_html_()
    )


def test_each_step_changes_a_matmul_and_no_other_pass_does():
    _, stages, *_ = dumped(relu_matmul, *SHAPES, pattern=".*")
    steps = {(step.pipeline, step.name) for step in passes(relu_matmul, *SHAPES)}
    for before, after in itertools.pairwise(stages):
        calls = [
            [
                i.custom_call_target or i.opcode
                for i in parse_hlo_module(stage.text)
                if i.opcode in ("dot", "custom-call")
            ]
            for stage in (before, after)
        ]
        assert calls[0] == calls[1] or (after.pipeline, after.after) in steps


def test_passes_of_an_inspection_name_the_fix():
    seen = inspect(lambda x: x @ x.T, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    for program, fix in ((seen, "its `passes` are"), (seen.module, "give the function")):
        with pytest.raises(TypeError, match=f"got {type(program).__name__}.*{fix}"):
            passes(program)
