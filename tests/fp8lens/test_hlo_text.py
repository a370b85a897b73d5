import html
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp8lens.hlo import text
from fp8lens.hlo.text import format_hlo_module, print_hlo_module
from helpers import aot_compile

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
OLD = sorted(Path(__file__).parent.glob("hlo/*.txt"))


def scaled(a, b, a_scale, b_scale, d_scale):
    d = jax.nn.relu(jax.lax.dot(a.astype(f32) * a_scale, (b.astype(f32) * b_scale).T))
    return jnp.clip(d * d_scale, -448, 448).astype(e4m3), jnp.max(jnp.abs(d))


SHAPES = (
    jax.ShapeDtypeStruct((32, 64), e4m3),
    jax.ShapeDtypeStruct((128, 64), e4m3),
    *[jax.ShapeDtypeStruct((), f32)] * 3,
)


@pytest.fixture(scope="module")
def fused():
    return aot_compile(scaled, *SHAPES)


def test_text_of_a_fused_matmul(fused):
    assert (
        format_hlo_module(fused).splitlines()
        == """\
HloModule jit_scaled, entry_computation_layout={(f8e4m3fn[32,64], f8e4m3fn[128,64], f32[], f32[],
    f32[])->(f8e4m3fn[32,128], f32[])}

ENTRY %main.4 (a.1: f8e4m3fn[32,64], b.1: f8e4m3fn[128,64], a_scale.1: f32[], b_scale.1: f32[],
    d_scale.1: f32[]) -> (f8e4m3fn[32,128], f32[]) {
  %d_scale.1 = f32[] parameter(4)
  %b_scale.1 = f32[] parameter(3)
  %a_scale.1 = f32[] parameter(2)
  %b.1 = f8e4m3fn[128,64] parameter(1)
  %a.1 = f8e4m3fn[32,64] parameter(0)
  %cublas-gemm.1.clone.1 = (f8e4m3fn[32,128], f32[], s8[4194304]) custom-call(%a.1, %b.1,
      %a_scale.1, %b_scale.1, %d_scale.1), custom_call_target="__cublas$lt$matmul$f8"
  %get-tuple-element.1.0 = f32[] get-tuple-element(%cublas-gemm.1.clone.1), index=1
  %get-tuple-element.4 = f8e4m3fn[32,128] get-tuple-element(%cublas-gemm.1.clone.1), index=0
  ROOT %tuple.1.0 = (f8e4m3fn[32,128], f32[]) tuple(%get-tuple-element.4, %get-tuple-element.1.0)
}""".splitlines()
    )


def test_only_layouts_that_matter_are_shown():
    dot = aot_compile(
        jnp.matmul, jax.ShapeDtypeStruct((32, 64), e4m3), jax.ShapeDtypeStruct((64, 128), e4m3)
    )
    shown_dot = format_hlo_module(dot)
    assert "{0,1}" in shown_dot and "{1,0}" not in shown_dot.replace("dimensions={1,0}", "")
    shown = "parameter(0), sharding={devices=[2,1]<=[2]}"
    one = f"HloModule m\nENTRY %e {{\n  ROOT %p = f32[2,3]{{1,0}} {shown}\n}}"
    assert f"= f32[2,3] {shown}" in format_hlo_module(one)
    assert "f32[2,3]{1,0:T(8,128)} p" in format_hlo_module(one.replace("{1,0}", "{1,0:T(8,128)}"))


def test_metadata_names_the_line(fused, monkeypatch):
    lines = Path(__file__).read_text().splitlines()
    (line,) = [n for n, line in enumerate(lines, 1) if line.startswith("    return jnp.clip")]
    for folder, file in ((Path(__file__).parents[2], "tests/fp8lens/"), (OLD[0].parent, "")):
        monkeypatch.chdir(folder)
        shown = format_hlo_module(fused, metadata=True)
        assert f'source_file="{file}test_hlo_text.py" source_line={line}' in shown


def test_backend_config_is_readable(fused):
    shown = format_hlo_module(fused, backend_cfg=True)
    for line in ('"epilogue": "RELU"', '"damax_output": true'):
        assert f"\n          {line},\n" in shown


def test_notebooks_get_colour_and_plain_text(monkeypatch):
    shown = []
    monkeypatch.setattr(text, "notebook_display", lambda: lambda data, raw: shown.append(data))
    old = (Path(__file__).parent / "hlo/jax_0_4_31_plain.txt").read_text()
    print_hlo_module(old)
    (data,) = shown
    assert data["text/plain"] == format_hlo_module(old)
    # A browser drops the line's end behind <pre>; folded, JupyterLab shows what stands before it.
    without_tags = re.sub(r"<[^>]+>", "", re.sub(r"(<pre[^>]*>)\n", r"\1", data["text/html"]))
    assert html.unescape(without_tags) == data["text/plain"]
    assert 'font-weight:bold">"__cublas$lt$matmul$f8"</span>' in data["text/html"]
