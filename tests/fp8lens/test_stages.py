"""The program between XLA's passes, and which of them changed a matmul."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from fp8lens import inspect
from fp8lens.compile.stages import dumped, passes
from fp8lens.hlo.diff import diff_hlo
from helpers import aot_compile

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
S = jax.ShapeDtypeStruct
SHAPES = (S((64, 128), e4m3), S((256, 128), e4m3), S((), f32), S((), f32))


def relu_matmul(x, w, x_scale, w_scale):
    d = jax.nn.relu((x.astype(f32) * x_scale) @ (w.astype(f32) * w_scale).T)
    return jnp.clip(d, -448, 448).astype(e4m3)


def bias_and_amax(x, w, x_scale, w_scale):
    d = (x.astype(f32) * x_scale) @ (w.astype(f32) * w_scale).T
    d = jax.nn.gelu(d + x_scale) * w_scale
    return d.astype(e4m3), jnp.max(jnp.abs(d)), jnp.min(d, axis=0)


def test_stages_lead_from_the_dot_to_the_call():
    compiled, stages, *_ = dumped(relu_matmul, *SHAPES, pattern="gemm")
    assert (stages[0].pipeline, stages[0].after, stages[0].before) == ("", "", "")
    assert " dot(" in stages[0].text and "cublas" not in stages[0].text
    rewritten = next(at for at, stage in enumerate(stages) if "__cublas$lt$matmul$f8" in stage.text)
    assert stages[rewritten].after == stages[rewritten - 1].before == "cublas-gemm-rewriter"
    assert all("gemm" in stage.after + stage.before for stage in stages[1:])
    assert diff_hlo(compiled, aot_compile(relu_matmul, *SHAPES)).same
    assert len(dumped(relu_matmul, *SHAPES, pattern="no such pass").stages) == 1


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


def test_threads_do_not_mix_and_nothing_stays_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def stages(n):
        def f(x, *, power):
            return jnp.linalg.matrix_power(x.astype(f32) @ x.astype(f32).T, power)

        f.__name__ = "f" * 240
        options = {"power": 2, "static_argnames": "power", "pattern": "gemm"}
        options["compiler_options"] = {"xla_dump_to": "/nowhere"}
        return dumped(f, S((16 * n, 64), f32), **options).stages

    with ThreadPoolExecutor(2) as pool:
        for n, found in zip(range(1, 5), pool.map(stages, range(1, 5)), strict=True):
            assert len(found) > 3 and all(f"f32[{16 * n},64]" in stage.text for stage in found)
    assert not list(tmp_path.iterdir())


def test_passes_of_a_fused_matmul():
    steps = passes(relu_matmul, *SHAPES)
    assert [step.name for step in steps] == ["transpose-folding", "cublas-gemm-rewriter"]
    before, after = ({i.opcode for i in m} for m in (steps[-1].before, steps[-1].after))
    assert {"dot", "maximum"} <= before and not {"dot", "maximum"} & after
    lines = str(steps[-1]).splitlines()
    assert lines[0] == f"{steps[-1].pipeline}: cublas-gemm-rewriter"
    assert sum(" dot(" in line for line in lines) == 1 and len(lines) < 40
    added = " ".join(line for line in lines if line.startswith("+"))
    assert "__cublas$lt$matmul$f8" in added and '"epilogue": "RELU"' in added


def test_passes_of_other_matmuls_and_of_none():
    def matmul(x, y):
        return x @ y.T

    names = [step.name for step in passes(relu_matmul, *SHAPES, gemm="auto")]
    assert names.index("triton-gemm-rewriter") > names.index("transpose-folding")
    odd = S((63, 65), jnp.bfloat16), S((66, 65), jnp.bfloat16)
    assert "cublas-pad-for-gemms" in [step.name for step in passes(matmul, *odd)]
    assert str(passes(lambda x: x + 1, SHAPES[2])) == "no pass changed a matmul"
    with pytest.raises(TypeError, match="give a function and its arguments.* got Inspection"):
        passes(inspect(matmul, *odd))
