"""The chips, as facts, and what cannot be a chip."""

import dataclasses

import pytest

from fp8lens.targets import UnknownTarget, attached_gpu, model
from helpers import TARGETS

CHIPS = ("A100", "L40S", "H100", "H200", "B200")


# Multiply-adds per SM and cycle, from NVIDIA's architecture whitepapers, and the boost clock the
# peaks are quoted at (GHz): an independent way to the same figures.
@pytest.mark.parametrize(
    "name, dtype, fma, clock",
    [
        ("A100", "bf16", 1024, 1.41),
        ("A100", "tf32", 512, 1.41),
        ("A100", "f32", 64, 1.41),
        ("L40S", "f8e4m3fn", 1024, 2.52),
        ("L40S", "bf16", 512, 2.49),
        ("H100", "f8e4m3fn", 4096, 1.83),
        ("H100", "bf16", 2048, 1.83),
        ("H100", "tf32", 1024, 1.83),
        ("H100", "f32", 128, 1.98),
        ("B200", "f8e5m2", 8192, 1.85),
    ],
)
def test_peaks_agree_with_units_times_clock(name, dtype, fma, clock):
    chip = TARGETS[name]
    assert chip.sms * fma * 2 * clock * 1e9 == pytest.approx(chip.peak_flops[dtype], rel=0.02)


def test_formats_of_one_width_share_a_rate():
    assert [name for name in CHIPS if TARGETS[name].has_fp8] == ["L40S", "H100", "H200", "B200"]
    for name in CHIPS:
        peaks = TARGETS[name].peak_flops
        assert TARGETS[name].source and TARGETS[name].has_fp8 == ("f8e4m3fn" in peaks)
        assert peaks["bf16"] == peaks["f16"] == pytest.approx(2 * peaks["tf32"], rel=0.03)
        assert peaks.get("f8e4m3fn") == peaks.get("f8e5m2")


@pytest.mark.parametrize("name", ["h100", "V100", None])
def test_an_unknown_chip_names_the_known_ones(name):
    with pytest.raises(UnknownTarget) as error:
        TARGETS[name]
    assert all(chip in str(error.value) for chip in CHIPS)


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
def test_local_without_a_gpu_names_the_fix():
    with pytest.raises(KeyError, match="name a chip to compile for without it: A100"):
        TARGETS["local"]


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_a_model_is_known_by_the_name_its_driver_gives_it(device, name):
    assert model(device) == (TARGETS[name] if name else None)


@pytest.mark.parametrize(
    "field, value, words",
    [
        *[("clock_ghz", value, "clock_ghz") for value in (0, -1.0, float("nan"), "fast")],
        ("memory_bandwidth", float("inf"), "memory_bandwidth"),
        ("cuda_runtime", (11, 8), "unrewritten"),
        ("compute_capability", (7, 0), "older"),
    ],
)
def test_a_description_that_would_crash_xla_is_refused(field, value, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TARGETS["H100"], **{field: value})
