"""What XLA makes of FP8 matmuls, JAX release by JAX release: `make releases` measures, `--check` compares.

Each release gets an environment of its own, .venv-release-X. In each the same programs are compiled for chips that are
not there, and what became of them goes into notebooks/results/releases.json, with where it comes from. Notebook E reads
that file. A release that loses a fusion, or gains one, is a changed row.
"""

import argparse
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fp8lens import report_gemms
from helpers import TARGETS, Target
from helpers.recipes import E4M3_MAX, Amaxes, fp8_linear, scaled_dot, to_e4m3
from helpers.results import digest
from tools.files import in_one_step

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "notebooks" / "results" / "releases.json"
RELEASES = ("0.9.2", "0.10.2", "0.11.2")  # beside the lock's, and those that the data already has
PYTHON = "3.12"  # the oldest that all of them run on: JAX 0.11 asks for it
OF_JAX = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
)  # a release is these four, in one version
ASSEMBLER = (
    "nvidia-nvjitlink",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
)  # the lock's with every release
BIN = "Scripts" if os.name == "nt" else "bin"
UV = ROOT / ".tools" / BIN / "uv"
MEND = "run `make releases`, look at what it says has changed, and commit notebooks/results/releases.json"

# The programs ---------------------------------------------------------------------------------------------------------

M, N, K = 2048, 4096, 1024
e4m3, e5m2, f32, bf16, f16 = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
)


def shape(*dims: int, dtype=e4m3) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


A, B, S = (
    shape(M, K),
    shape(N, K),
    shape(dtype=f32),
)  # B is stored [N, K]: the layout that needs no transpose
SCALED = (A, B, S, S, S)  # with A's scale, B's scale, and D's


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, its arguments' shapes, and for which chip and by which library it is compiled."""

    fn: Callable
    args: tuple = SCALED
    target: str = "H100"
    gemm: str = "cublaslt"
    options: Mapping[str, Any] | None = None

    def of_size(self, m: int, n: int, k: int) -> "Program":
        """The same with these in the place of M, N and K."""
        sizes = {M: m, N: n, K: k}
        return dataclasses.replace(
            self,
            args=tuple(
                shape(*(sizes.get(dim, dim) for dim in arg.shape), dtype=arg.dtype)
                for arg in self.args
            ),
        )


def dot(a, b, dtype=f32):
    """a [M, K] times b [N, K], unscaled."""
    return jax.lax.dot(a, b.T, preferred_element_type=dtype)


def scaled(act=lambda d: d, dtype=f32, out=e4m3, clamp=None, amax=""):
    """Dequantize in `dtype`, multiply, add a bias where there is one more argument, `act`, and quantize to `out` with
    its own bounds, or those of `clamp`. With `amax` the largest magnitude as well: of the result "before" `act`,
    "activated", or "scaled"."""
    bound = float(jnp.finfo(out).max) if clamp is None else clamp

    def fn(a, b, a_scale, b_scale, d_scale, *bias):
        d = scaled_dot(a, b, a_scale, b_scale, dtype)
        d = d + bias[0].astype(dtype) if bias else d
        y = act(d)
        z = y * d_scale.astype(dtype)
        q = jnp.clip(z, -bound, bound).astype(out)
        return (
            (q, jnp.max(jnp.abs({"before": d, "activated": y, "scaled": z}[amax])).astype(f32))
            if amax
            else q
        )

    return fn


def wide(dtype, out):
    """Dequantize in `dtype`, multiply, and return `out`."""
    return lambda a, b, a_scale, b_scale: scaled_dot(a, b, a_scale, b_scale, dtype).astype(out)


def layer_and_gradients(x, w, g, x_scale, w_scale, g_scale):
    """A linear layer and both its gradients, from FP8 as stored: x [M, K], w [N, K], g [M, N] in E5M2."""
    y = scaled_dot(x, w, x_scale, w_scale, bf16)
    return (
        y,
        scaled_dot(g, w.T, g_scale, w_scale, bf16),
        scaled_dot(g.T, x.T, g_scale, x_scale, bf16),
    )


def trained_layer(x, w, g, *histories):
    """Chapter 08's layer, forward and backward: x [M, K] and g [M, N] in bfloat16, w [N, K] in float32."""
    y, pull = jax.vjp(fp8_linear, x, w, Amaxes(*histories))
    return y, pull(g)


def pieces(a, b, a_scales, b_scales, batched):
    """A scale for each 128 of a row, [K / 128, M] and [K / 128, N]: dequantized first, or as a batch of matmuls."""
    a, b = a.reshape(len(a), -1, 128), b.reshape(len(b), -1, 128)
    if batched:
        parts = jnp.einsum("mkc,nkc->kmn", a, b, preferred_element_type=f32)
        return jnp.sum(parts * a_scales[:, :, None] * b_scales[:, None, :], axis=0).astype(bf16)
    a, b = (
        x.astype(bf16) * scales.T[:, :, None].astype(bf16)
        for x, scales in ((a, a_scales), (b, b_scales))
    )
    return a.reshape(len(a), -1) @ b.reshape(len(b), -1).T


def layers_in_a_loop(x, w, x_scale, w_scale, d_scale):
    """`len(w)` layers with relu by `lax.scan`: x [M, K], w [layers, K, K], each as [N, K]."""

    def layer(x, w):
        return to_e4m3(jax.nn.relu(scaled_dot(x, w, x_scale, w_scale)), d_scale), None

    return jax.lax.scan(layer, x, w)[0]


def block_scaled(a, b, a_scales, b_scales):
    return jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=f32)


def programs() -> dict[str, Program]:
    """Every program by name. A new one is one line here, then `make releases`."""
    relu, gelu, silu = jax.nn.relu, jax.nn.gelu, jax.nn.silu
    found: dict[str, Program] = {}
    names = {f32: "f32", bf16: "bf16", f16: "f16", e4m3: "E4M3", e5m2: "E5M2"}

    def add(name: str, fn: Callable, *args, **options) -> None:
        assert name not in found, name
        found[name] = Program(fn, args or SCALED, **options)

    # One call, or as near as it gets: the pattern itself.
    for out in (e4m3, f32, bf16):
        add(f"unscaled, {names[out]} result", lambda a, b, out=out: dot(a, b, out), A, B)
    add("unscaled E5M2 times E5M2", dot, shape(M, K, dtype=e5m2), shape(N, K, dtype=e5m2))
    for dtype in (f32, bf16, f16):
        add(f"scaled in {names[dtype]}", scaled(dtype=dtype))
    for dtype, out in ((f32, f32), (bf16, bf16), (f16, f16), (f32, bf16), (bf16, f32)):
        add(f"scaled in {names[dtype]}, {names[out]} result", wide(dtype, out), *SCALED[:4])
    add(
        "scaled in bf16, excess precision off",
        scaled(dtype=bf16),
        options={"xla_allow_excess_precision": False},
    )
    for left, right in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3), (e5m2, e5m2)):
        add(
            f"{names[left]} times {names[right]}, E5M2 result",
            scaled(out=e5m2),
            shape(M, K, dtype=left),
            shape(N, K, dtype=right),
            S,
            S,
            S,
        )
    one = shape(1, dtype=f32)
    add("scales of shape (1,)", scaled(), A, B, one, one, one)
    add(
        "clamp by max(min())",
        lambda a, b, x, y, z: jnp.maximum(
            jnp.minimum(scaled_dot(a, b, x, y) * z, E4M3_MAX), -E4M3_MAX
        ).astype(e4m3),
    )
    add(
        "batch, bmk,bnk->bmn",
        lambda a, b: jnp.einsum("bmk,bnk->bmn", a, b, preferred_element_type=f32),
        shape(4, M, K),
        shape(4, N, K),
    )
    add(
        "sequence, bsk,nk->bsn",
        lambda a, b: jnp.einsum("bsk,nk->bsn", a, b, preferred_element_type=f32),
        shape(4, M, K),
        B,
    )
    add(
        "vmap over matrices",
        jax.vmap(scaled(), (0, 0, None, None, None)),
        shape(4, M, K),
        shape(4, N, K),
        S,
        S,
        S,
    )

    # Activations.
    for name, act in (
        ("relu", relu),
        ("gelu tanh", gelu),
        ("gelu erf", lambda d: gelu(d, approximate=False)),
        ("silu", silu),
    ):
        add(name, scaled(act))
    for dtype in (bf16, f16):
        add(f"relu in {names[dtype]}", scaled(relu, dtype))
        add(f"gelu tanh in {names[dtype]}", scaled(gelu, dtype))
    add(
        "relu after the output scale",
        lambda a, b, x, y, z: jnp.clip(
            relu(scaled_dot(a, b, x, y) * z), -E4M3_MAX, E4M3_MAX
        ).astype(e4m3),
    )
    add("relu, f32 result", lambda a, b, x, y: relu(scaled_dot(a, b, x, y)), *SCALED[:4])
    add("relu(unscaled) times an argument", lambda a, b, s: relu(dot(a, b)) * s, A, B, S)
    add("relu(unscaled) times 2", lambda a, b: relu(dot(a, b)) * 2, A, B)
    add("relu(scaled) times 2", lambda a, b, x, y: relu(scaled_dot(a, b, x, y)) * 2, *SCALED[:4])
    add("gelu(scaled) times 2", lambda a, b, x, y: gelu(scaled_dot(a, b, x, y)) * 2, *SCALED[:4])

    # Bias.
    for bias in (bf16, f16, f32):
        add(f"{names[bias]} bias", scaled(), *SCALED, shape(N, dtype=bias))
    add("bf16 bias in bf16", scaled(dtype=bf16), *SCALED, shape(N, dtype=bf16))
    add("f16 bias in f16", scaled(dtype=f16), *SCALED, shape(N, dtype=f16))
    add("bias + relu", scaled(relu), *SCALED, shape(N, dtype=bf16))
    add("bias + gelu tanh", scaled(gelu), *SCALED, shape(N, dtype=bf16))
    add("bias for each row", scaled(), *SCALED, shape(M, 1, dtype=bf16))
    add("bias for each row, M = N", scaled(), shape(N, K), B, S, S, S, shape(N, 1, dtype=bf16))
    add(
        "matrix bias, bf16 result",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + c,
        *SCALED[:4],
        shape(M, N, dtype=bf16),
    )

    add(
        "matrix bias in bf16",
        lambda a, b, x, y, z, c: to_e4m3(scaled_dot(a, b, x, y, bf16) + c, z),
        *SCALED,
        shape(M, N, dtype=bf16),
    )
    add(
        "bias + matrix bias, bf16 result",
        lambda a, b, x, y, v, c: scaled_dot(a, b, x, y, bf16) + v + c,
        *SCALED[:4],
        shape(N, dtype=bf16),
        shape(M, N, dtype=bf16),
    )

    # amax.
    add("amax", scaled(amax="activated"))
    for dtype in (bf16, f16):
        add(f"amax in {names[dtype]}", scaled(dtype=dtype, amax="activated"))
    add("amax after relu", scaled(relu, amax="activated"))
    add("amax after gelu tanh", scaled(gelu, amax="activated"))
    add("amax before relu", scaled(relu, amax="before"))
    add("amax after the output scale", scaled(amax="scaled"))
    for name, act in (("relu", relu), ("gelu tanh", gelu)):
        add(f"bias + {name} + amax", scaled(act, amax="activated"), *SCALED, shape(N, dtype=bf16))

    # What XLA does not compile, each with the error in its row.
    add(
        "amax that scales the same result",
        lambda a, b, x, y: (lambda d: to_e4m3(d, E4M3_MAX / jnp.max(jnp.abs(d))))(
            scaled_dot(a, b, x, y)
        ),
        *SCALED[:4],
    )
    add(
        "gelu tanh, its input as well",
        lambda a, b, x, y, z: (lambda d: (to_e4m3(gelu(d), z), d))(scaled_dot(a, b, x, y)),
    )

    # What stays outside, and what loses FP8.
    add("no clamp", lambda a, b, x, y, z: (scaled_dot(a, b, x, y) * z).astype(e4m3))
    add("clamp to 447", scaled(clamp=447.0))
    add(
        "clamp before the output scale",
        lambda a, b, x, y, z: (jnp.clip(scaled_dot(a, b, x, y), -E4M3_MAX, E4M3_MAX) * z).astype(
            e4m3
        ),
    )
    add(
        "divide by the scales",
        lambda a, b, x, y, z: jnp.clip(
            dot(a.astype(f32) / x, b.astype(f32) / y) / z, -E4M3_MAX, E4M3_MAX
        ).astype(e4m3),
    )
    add("scales after the dot", lambda a, b, x, y: dot(a, b) * (x * y), *SCALED[:4])
    add("scale for each row of A", scaled(), A, B, shape(M, 1, dtype=f32), S, S)
    add(
        "scale for each row of A, after the dot",
        lambda a, b, x, y: dot(a, b) * (x * y),
        A,
        B,
        shape(M, 1, dtype=f32),
        S,
    )
    for name, batched in (("dequantized", False), ("batched", True)):
        add(
            f"scale for each 128 of a row, {name}",
            functools.partial(pieces, batched=batched),
            A,
            B,
            shape(K // 128, M, dtype=f32),
            shape(K // 128, N, dtype=f32),
        )
    add(
        "abs between scale and dot",
        lambda a, b, x, y, z: to_e4m3(dot(jnp.abs(a.astype(f32) * x), b.astype(f32) * y), z),
    )
    add(
        "B stored [K, N]",
        lambda a, b: jax.lax.dot(a, b, preferred_element_type=f32),
        A,
        shape(K, N),
    )
    add(
        "A stored [K, M], B [K, N]",
        lambda a, b: jax.lax.dot(a.T, b, preferred_element_type=f32),
        shape(K, M),
        shape(K, N),
    )
    add("M = 17", dot, shape(17, K), B)
    add("K = 72", dot, shape(M, 72), shape(N, 72))

    # Precision and algorithm.
    add(
        "precision HIGHEST",
        lambda a, b: jax.lax.dot(
            a, b.T, precision=jax.lax.Precision.HIGHEST, preferred_element_type=f32
        ),
        A,
        B,
    )
    for preset in ("ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM"):
        add(
            f"algorithm {preset}",
            lambda a, b, preset=preset: jax.lax.dot(
                a, b.T, precision=jax.lax.DotAlgorithmPreset[preset], preferred_element_type=f32
            ),
            A,
            B,
        )

    # More than one matmul.
    add("a layer and its gradients", layer_and_gradients, A, B, shape(M, N, dtype=e5m2), S, S, S)
    histories = (shape(16, dtype=f32),) * 3
    add(
        "a trained layer and its gradients",
        trained_layer,
        shape(M, K, dtype=bf16),
        shape(N, K, dtype=f32),
        shape(M, N, dtype=bf16),
        *histories,
    )
    add("8 layers in a loop", layers_in_a_loop, A, shape(8, K, K), S, S, S)

    # The other way to run a matmul: the first tile that compiles, as there is no chip to time on.
    add("Triton: scaled in f32", wide(f32, f32), *SCALED[:4], gemm="triton")
    add("Triton: scaled in bf16", wide(bf16, bf16), *SCALED[:4], gemm="triton")
    add(
        "Triton: scales after the dot",
        lambda a, b, x, y: dot(a, b) * (x * y),
        *SCALED[:4],
        gemm="triton",
    )
    add("default options: scaled in f32", scaled(), gemm="auto")

    # Other chips.
    for chip in ("A100", "L40S", "B200"):
        add(f"{chip}: scaled in f32", scaled(), target=chip)
        add(
            f"{chip}: B stored [K, N]",
            lambda a, b: jax.lax.dot(a, b, preferred_element_type=f32),
            A,
            shape(K, N),
            target=chip,
        )
    e8m0 = jnp.float8_e8m0fnu
    for chip in ("H100", "B200"):
        add(
            f"{chip}: blocks of 32 (MXFP8)".removeprefix("H100: "),
            block_scaled,
            shape(1, M, K),
            shape(1, N, K),
            shape(1, M, K // 32, dtype=e8m0),
            shape(1, N, K // 32, dtype=e8m0),
            target=chip,
        )
    return found


# What becomes of them -------------------------------------------------------------------------------------------------


class OlderTarget(Target):
    """A chip as JAX 0.9 reads it: its description names cuDNN's version in the outer part alone."""

    def text_proto(self, cudnn_patch: int = 0) -> str:
        return re.sub(r'\s+dnn_version: ".*?"', "", super().text_proto(cudnn_patch))


def chip(name: str) -> Target:
    """The chip of that name, as the installed JAX can read it."""
    if by_number(jax.__version__) >= (0, 10):
        return TARGETS[name]
    return OlderTarget(
        **{field.name: getattr(TARGETS[name], field.name) for field in dataclasses.fields(Target)}
    )


def row(program: Program) -> dict[str, Any]:
    """What the installed JAX makes of a program, as it stands in the data."""
    made: dict[str, Any] = {"target": program.target, "gemm": program.gemm}
    try:  # the type a Triton kernel multiplies stands in its PTX
        report = report_gemms(
            program.fn,
            *program.args,
            target=chip(program.target),
            gemm=program.gemm,
            compiler_options=program.options,
        )
    except Exception as error:  # that a program does not compile is a finding
        return made | {"error": first_line(error)}
    gemms = [
        {
            "count": gemm.count,
            "library": gemm.library,
            "lhs_dtype": gemm.lhs_dtype,
            "rhs_dtype": gemm.rhs_dtype,
            "math_dtype": gemm.math_dtype,
            "epilogue": gemm.epilogue,
            "amax": gemm.amax,
            "alpha": gemm.alpha,
            "beta": gemm.beta,
            "scales": "".join(gemm.scales),
            "precision": gemm.precision,
            "algorithm": gemm.algorithm,
            "tile": gemm.tile,
            "out_dtype": gemm.out_dtype,
            "outside": len(gemm.outside),
        }
        for gemm in report.rows
    ]
    # The order in which independent matmuls run is the scheduler's affair.
    return made | {"kernels": report.kernels, "gemms": sorted(gemms, key=json.dumps)}


def measured(only: str = "") -> dict[str, Any]:
    """What the installed JAX makes of every program with `only` in its name, and what it is that was asked."""
    rows = {name: row(program) for name, program in programs().items() if only in name}
    return with_provenance(rows, "make releases", *OF_JAX, *ASSEMBLER)


def describe(row: Mapping[str, Any]) -> str:
    """A row as a line of text."""
    if "error" in row:
        return f"does not compile: {row['error']}"
    return f"{row['kernels']} kernel{'s' * (row['kernels'] != 1)}: " + "; ".join(
        map(describe_gemm, row["gemms"])
    )


def describe_gemm(gemm: Mapping[str, Any]) -> str:
    """A matmul's fields, those left out that say what is usual (or that an older record has not got)."""
    usual = {
        "count": 1,
        "alpha": 1,
        "beta": 0,
        "scales": "",
        "precision": "DEFAULT",
        "algorithm": "",
        "tile": "",
    }
    said = [f"{key} {gemm[key]}" for key in usual if gemm.get(key, usual[key]) != usual[key]]
    outside = f"({gemm['outside']} outside)" if gemm["outside"] else ""
    words = [
        gemm["library"],
        gemm["math_dtype"],
        gemm["epilogue"],
        "amax" * gemm["amax"],
        *said,
        "->",
        gemm["out_dtype"],
        outside,
    ]
    return " ".join(filter(None, words))


# The data, here and in tools/records/census.py --------------------------------------------------------------------------------


def first_line(error: Exception) -> str:
    """An error as it stands in a row: its type and its first line, without the paths, lines and names that change."""
    said = (str(error).strip().splitlines() or [""])[0].rstrip(";:")
    said = re.sub(r" ?\((external/|/).*?\)| while visiting instruction .*", "", said)
    return f"{type(error).__name__}: {said}"


def read_data(path: Path, command: str) -> dict[str, Any]:
    """The releases in a file, as recorded or not; none where it is missing."""
    try:
        found = json.loads(path.read_text())["releases"] if path.exists() else {}
        return {version: entry for version, entry in found.items() if entry["rows"] is not None}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"{path.name} cannot be read ({error!r}): take it from git, or delete it and run "
            f"`{command}`"
        ) from error


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def with_provenance(rows: Mapping[str, Any], command: str, *packages: str) -> dict[str, Any]:
    """The rows, and when, by which command and with which packages they were made."""
    made = {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "command": command,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version_of(name) for name in packages},
        "rows": rows,
    }
    return made | {"digest": digest(json.loads(json.dumps(made)))}


def edited(recorded: Mapping[str, Any], mend: str) -> list[str]:
    """Problems: each release whose rows are not those that its digest was made of."""
    return [
        f"JAX {name} is not as it was recorded: {mend}"
        for name, entry in recorded.items()
        if entry.get("digest") != digest(entry)
    ]


def is_news(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether more than the date differs from what was recorded before."""
    as_dated = before | {"date": now["date"], "digest": now["digest"]}
    return before.get("digest") != digest(before) or as_dated != now


def merged(before: Mapping[str, Any], now: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What was measured now, and the rest of these rows as they were recorded before, with the same packages."""
    same = (
        before
        and before["packages"].items() <= now["packages"].items()
        and before["python"] == now["python"]
    )
    if not same:
        raise SystemExit(
            "the recorded rows are not of these packages and this Python: measure all, without --only"
        )
    rows = before["rows"] | now["rows"]
    made = now | {"rows": {name: rows[name] for name in names if name in rows}}
    return made | {"digest": digest(made)}


def as_text(releases: Mapping[str, Any]) -> str:
    """The releases as JSON, a line a row, so that a changed row is a changed line."""
    text = []
    for version in sorted(releases, key=by_number):
        entry = dict(releases[version])
        rows = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in entry.pop("rows").items()
        )
        provenance = ",\n".join(
            f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()
        )
        text.append(
            f'  {json.dumps(version)}: {{\n{provenance},\n   "rows": {{\n{rows}\n   }}\n  }}'
        )
    return '"releases": {\n' + ",\n".join(text) + "\n }"


def by_number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def locked() -> dict[str, str]:
    """Versions in the lock, by package."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return {package["name"]: package["version"] for package in packages if "version" in package}


def read() -> dict[str, Any]:
    """The data: release to what was measured, oldest first."""
    return read_data(DATA, "make releases")


def write(releases: Mapping[str, Any]) -> None:
    """Write the data."""
    about = "What each JAX release makes of the programs in tools/records/releases.py. Written by `make releases`, not by hand."
    in_one_step(DATA, f'{{\n "about": {json.dumps(about)},\n {as_text(releases)}\n}}\n')


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(program, old, new) of each row that differs, as text. A program that one side lacks differs."""
    found = []
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            sides = [
                describe(rows[name]) if name in rows else "no such program" for rows in (old, new)
            ]
            if sides[0] == sides[1]:  # in a field that the text leaves out
                sides = [json.dumps(rows[name]) for rows in (old, new)]
            found.append((name, *sides))
    return found


def check(recorded: Mapping[str, Any]) -> list[str]:
    """Problems: each row of the data that is not what the installed JAX makes of the program now. Where the data lacks
    the installed release, the newest in it stands in."""
    version = jax.__version__
    if not recorded:
        return [f"notebooks/results/releases.json holds no release: {MEND}"]
    against = version if version in recorded else max(recorded, key=by_number)
    now = measured()["rows"]
    return edited(recorded, MEND) + [
        f"{name}: {old} (recorded, JAX {against}), but {new} (now, JAX {version}): {MEND}"
        for name, old, new in changes(recorded[against]["rows"], now)
    ]


# Making it ------------------------------------------------------------------------------------------------------------


def environment(version: str) -> Path:
    """The Python of a release's environment, made where it is missing or not of these packages."""
    folder = ROOT / f".venv-release-{version}"
    python = folder / BIN / "python"
    packages = [
        *(f"{name}=={version}" for name in OF_JAX),
        *(f"{name}=={locked()[name]}" for name in ASSEMBLER),
    ]
    wanted = hashlib.sha256(repr((PYTHON, packages)).encode()).hexdigest()
    stamp = folder / "made-from"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        # pyenv hides every other version than .python-version's
        kept = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        for command in (
            ["venv", "--python", PYTHON, folder],
            ["pip", "install", "--python", python, *packages],
        ):
            made = subprocess.run(
                [UV, *command, "--quiet"], cwd=ROOT, env=kept | {"PYENV_VERSION": PYTHON}
            )
            if made.returncode:
                raise SystemExit(
                    f"the environment of JAX {version} could not be made: see above; `make releases` "
                    f"goes on where it stopped"
                )
        stamp.write_text(wanted)
    return python


def measure(version: str, python: Path, only: str = "", script: str = __file__) -> dict[str, Any]:
    """What `script` measures with that release, in a process of that Python's."""
    dropped = ("JAX_", "XLA_", "PYTHON", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    quiet = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        run = subprocess.run(
            [python, script, "--measure", out, "--only", only], env=kept | quiet, cwd=ROOT
        )
        if run.returncode:
            raise SystemExit(
                f"JAX {version} could not measure: exit status {run.returncode}, see above"
            )
        return json.loads(out.read_text())


def record(versions: list[str], only: str = "") -> int:
    """Measure these releases, or `only` some programs with them, write the data after each, and print what changed."""
    for version in versions:
        releases = read()
        before, now = releases.get(version, {}), measure(version, environment(version), only)
        now = merged(before, now, programs()) if only else now
        failed = sum("error" in row for row in now["rows"].values())
        print(
            f"JAX {version}: {len(now['rows'])} programs, {failed} of which do not compile",
            flush=True,
        )
        if not is_news(before, now):
            continue  # the date stays that of the first time
        for name, old, new in changes(before["rows"], now["rows"]) if before else ():
            print(f"  {name}\n    was {old}\n    is  {new}")
        write(releases | {version: now})
    print_changes(read())
    return 0


def print_changes(releases: Mapping[str, Any]) -> None:
    """Print what each release changed over the one before it."""
    versions = list(releases)
    for old, new in zip(versions, versions[1:]):
        found = changes(releases[old]["rows"], releases[new]["rows"])
        print(f"\nJAX {old} to {new}: {len(found)} of {len(releases[new]['rows'])} rows changed")
        for name, before, after in found:
            print(f"  {name}\n    {old:9} {before}\n    {new:9} {after}")


def command(
    arguments: list[str] | None,
    about: str,
    measured: Callable[[str], dict],
    problems: Callable[[], list[str]],
    fine: str,
    record: Callable[[list[str], str], int],
    wanted: Callable[[], set[str]],
) -> int:
    """Read the arguments, and measure, compare, or record; the exit status."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("releases", nargs="*", help="JAX releases, such as 0.11.2; all without")
    parser.add_argument(
        "--check", action="store_true", help="compare what is installed with the data"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="measure only what has this in its name, and keep "
        "the other rows, if they are of the same packages",
    )
    parser.add_argument(
        "--measure", type=Path, help=argparse.SUPPRESS
    )  # what runs in each environment
    options = parser.parse_args(arguments)
    if wrong := [name for name in options.releases if not re.fullmatch(r"\d+([.]\d+)+", name)]:
        parser.error(f"{wrong[0]!r} is no release of JAX: one looks like 0.11.2")
    if options.check and (options.releases or options.only):
        parser.error("--check compares all that is installed: it takes no release and no name")
    if options.measure:
        options.measure.write_text(json.dumps(measured(options.only)))
        return 0
    if options.check:
        found = problems()
        print("\n".join(found) or fine)
        return int(bool(found))
    return record(sorted(options.releases or wanted(), key=by_number), options.only)


def main(arguments: list[str] | None = None) -> int:
    return command(
        arguments,
        __doc__,
        measured,
        lambda: check(read()),
        f"what JAX {jax.__version__} compiles is what is recorded",
        record,
        lambda: {*RELEASES, locked()["jax"], *read()},
    )


if __name__ == "__main__":
    sys.exit(main())
