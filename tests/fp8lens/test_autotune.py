"""Autotuning travels: a compile without a GPU follows the choices that a file says a GPU made.

No GPU chose anything here: the choices are made by hand, under the keys that XLA itself says it
looks up.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens.compile.autotune import recording
from helpers import TARGETS, aot_compile, report_gemms
from tests.programs import choices_by_hand as autotune
from tests.programs.choices_by_hand import programs

NAMES = ("unscaled, f32 result", "scaled in f32", "relu", "scaled in bf16")
TILE = {"tile": "128x128x64", "library": "triton"}


def gemms(compiled):
    asked = "library", "math_dtype", "tile"
    return [{name: getattr(row, name) for name in asked} for row in report_gemms(compiled).rows]


@pytest.fixture(scope="module")
def keys():
    return autotune.looked_up(NAMES, 4)


def compiled(name, text=None, target="H200", **options):
    program = programs(4)[name]
    return aot_compile(
        program.fn,
        *program.args,
        target=target,
        gemm="auto",
        autotune=text,
        compiler_options=options,
    )


def only_gemm(*args, **options):
    (gemm,) = gemms(compiled(*args, **options))
    return gemm


@pytest.mark.parametrize("name", NAMES)
def test_a_tile_travels(keys, name):
    untimed, chosen = only_gemm(name), only_gemm(name, autotune.by_hand(keys[name]))
    assert untimed["library"] == "triton" and untimed["tile"] != TILE["tile"]
    assert chosen == untimed | TILE


def test_cublaslt_travels_and_multiplies_what_triton_would_not(keys):
    text = autotune.by_hand(keys["relu"], autotune.CUBLASLT)
    chosen = only_gemm("relu", text)
    assert (chosen["library"], chosen["math_dtype"]) == ("cublasLt", "f8e4m3fn"), chosen
    assert only_gemm("relu")["math_dtype"] == "tf32"


def test_choices_stay_with_the_compile_that_asked_for_them(keys):
    """XLA keeps what it has loaded for the whole process, and reads a file of results once."""
    name, wide = NAMES[0], autotune.by_hand(keys[NAMES[0]])
    narrow = wide.replace("block_m: 128", "block_m: 64")
    tiles = {wide: "128x128x64", narrow: "64x128x64", None: only_gemm(name)["tile"]}
    # With the older format asked for, XLA looks where the choices are; the second option has JAX
    # compile again.
    kept = {
        key: value for key, value in recording("x.txt").items() if not key.endswith("_results_to")
    }
    for level in (3, 4):
        for text, tile in tiles.items():
            assert only_gemm(name, text, **kept, xla_gpu_autotune_level=level)["tile"] == tile, (
                level
            )


def test_what_xla_writes_is_what_is_read(keys, tmp_path):
    """XLA's own text, not this project's: where a dump is asked for, it writes the choices that it
    has."""
    text = autotune.by_hand(keys[NAMES[3]]).replace(
        "block_n: 128", "block_n: 32"
    )  # of no other test in the process
    compiled(NAMES[3], text, xla_dump_to=str(tmp_path))
    (path,) = tmp_path.glob("*autotune_results.pbtxt")
    assert "hand-made" not in path.read_text()
    choices = [
        c
        for c in autotune.CHOICE.findall(path.read_text())
        if " dot(" not in c or "block_n: 32\n" in c
    ]
    assert only_gemm(NAMES[3], autotune.HEADER + "".join(choices))["tile"] == "128x32x64"


@pytest.mark.parametrize("chip", ["A100", "L40S", "H100", "H200", "B200"])
def test_each_chips_choices_are_found(keys, chip):
    """XLA writes the chip's figures into what it looks up: those of `Target`, as it prints them."""
    target = TARGETS[chip]
    # As a driver has it: the figures of TARGETS are a data sheet's.
    device = (
        "CUDA: {}.{}, ".format(*target.compute_capability)
        + f"Cores: {target.sms}, GPU clock: 1.7 GHz, Memory "
        f"bandwidth: {1.03 * target.memory_bandwidth / 1e9:.0f} GB/s, L2 cache: 60 MB, "
        "DNN version: 9.21.1"
    )

    def fn(a, b):
        return jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)

    operand = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    options = {"target": chip, "gemm": "auto"}
    hlo = (
        "{\n  tmp_0 = bf16[512,256]{1,0} parameter(0)\n"
        "  tmp_1 = bf16[512,256]{1,0} parameter(1)\n"
        "  ROOT tmp_2 = f32[512,512]{1,0} dot(bf16[512,256]{1,0} tmp_0, bf16[512,256]{1,0} tmp_1), "
        "lhs_contracting_dims={1}, rhs_contracting_dims={1}\n}"
    )
    text = autotune.by_hand([(device, hlo, keys[NAMES[0]][0][2])]).replace(
        "block_m: 128", "block_m: 32"
    )
    (gemm,) = gemms(aot_compile(fn, operand, operand, autotune=text, **options))
    assert gemm["tile"] == "32x128x64"


# What must not pass -------------------------------------------------------------------------------


def test_a_program_that_nobody_recorded_is_said(keys):
    text = autotune.by_hand(keys[NAMES[0]])
    with pytest.raises(
        LookupError, match=rf"of the {len(keys[NAMES[0]])} recorded choices .*record this function"
    ):
        compiled("relu", text)
    # An older release's choice is none of this one's.
    with pytest.raises(
        LookupError, match=re.escape(f"NVIDIA H200 141GB HBM3e with JAX {jax.__version__}")
    ):
        compiled(NAMES[0], re.sub(r"^  version: \d+", "  version: 1", text, flags=re.M))
    partly = only_gemm("relu", text, xla_gpu_require_complete_aot_autotune_results=False)
    assert partly == only_gemm("relu")


def test_another_chips_choices_are_refused(keys):
    text = autotune.by_hand(keys[NAMES[0]])
    cut = dataclasses.replace(TARGETS["H200"], name="cut", sms=114)
    for other in ("H100", "B200", cut):
        with pytest.raises(
            ValueError, match="recorded on 'CUDA: 9.0, Cores: 132, .*is another chip"
        ):
            compiled(NAMES[0], text, target=other)


def test_what_xla_could_not_read_is_refused(keys):
    good = autotune.by_hand(keys[NAMES[0]])
    newer = 'entries {\n  key {\n    target {\n      device: "a4baa03864db7cfb"\n    }\n  }\n}\n'
    for bad in (
        newer,
        good[:-40],
        good.replace("version: 3", "version: 4"),
        good + "results {\n}\n",
    ):
        with pytest.raises(
            ValueError, match=r"not XLA's autotuning results in text.*recording\(path\)"
        ):
            compiled(NAMES[0], bad)


def test_recording_asks_for_text():
    with pytest.raises(ValueError, match="ends in .txt, .textproto or .pbtxt; got 'choices.pb'"):
        recording("choices.pb")


# The GPU's side -----------------------------------------------------------------------------------


def test_nothing_is_written_where_nothing_is_timed(tmp_path):
    path = tmp_path / "choices.txt"
    compiled(NAMES[0], **recording(path))
    assert not path.exists(), (
        "XLA now writes choices without a GPU: say so in the docstring of `recording`"
    )
