"""What a GPU's compiler chose by timing: have it recorded, and compile elsewhere with the same
choices.
"""

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import jax

from fp8lens.targets import Target

_TILE = re.compile(
    r"block_m: (\d+) block_n: (\d+) block_k: (\d+) num_warps: (\d+) num_ctas: (\d+) "
    r"num_stages: [1-9]\d*( split_k: [1-9]\d*)?( is_tma_allowed: (true|false))?"
)


def check_tile(text: str) -> None:
    """Refuse a forced Triton tile that could abort the process: XLA checks it with a fatal
    assertion.
    """
    tile = _TILE.fullmatch(" ".join(str(text).split())) if len(str(text)) < 1000 else None
    sizes = [int(size) for size in tile.groups()[:5]] if tile else []
    if not sizes or any(size.bit_count() != 1 for size in sizes):
        raise ValueError(
            f"xla_gpu_override_gemm_autotuner: XLA would abort on {str(text)[:1000]!r}. "
            "Give powers of two, all but num_stages, in this order: 'block_m: 64 block_n: 128 "
            "block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3'."
        )


# A choice as XLA writes it. Since JAX 0.11 XLA has another format by default, which holds only the
# hash of what a choice is looked up by, and whose choices of cuBLASLt count for one CUDA version
# only; an option keeps this one.
_CHOICE = re.compile(  # what follows "results {"
    r'  device: "(.*)"\n  hlo: "(.*)"\n  result {\n((?:    .*+\n)*+)  }\n  version: (\d+)\n}\n'
)
AS_TEXT = (
    {"xla_gpu_use_new_autotune_cache_format": False} if jax.__version_info__ >= (0, 11) else {}
)


def recording(path: str | os.PathLike) -> dict[str, Any]:
    """Compiler options with which the attached GPU's compiler writes what it chose to `path`, for
    `autotune`.

    For `target="local"`: if XLA has nothing to time, it writes no file. The file holds every choice
    that the process has made with these options. Raises ValueError for a name that XLA would not
    fill with text.
    """
    if Path(path).suffix not in (".txt", ".textproto", ".pbtxt"):
        raise ValueError(
            "XLA writes text only to a name that ends in .txt, .textproto or .pbtxt; got"
            f" {str(path)!r}."
        )
    return {**AS_TEXT, "xla_gpu_dump_autotune_results_to": os.path.abspath(path)}


def choices(autotune: str | os.PathLike, target: Target) -> tuple[int, dict[str, str]]:
    """The recorded choices as files of a folder that XLA looks in, and the cuDNN patch release they
    are filed under.

    Once found, a choice stays with XLA for the whole process, under the chip, cuDNN's version and
    the instructions. The patch release is one that no cuDNN has, and no other text: so only the
    compiles that ask for a text see its choices.
    """
    text = str(autotune)
    if "\n" not in text:
        text = Path(text).read_text(encoding="utf-8", errors="replace")
    rest, *written = re.split("^results {\n", text, flags=re.M)
    recorded = [m for choice in written if (m := _CHOICE.match(choice))]
    rest += "".join(m.string[m.end() :] for m in recorded)
    rest = re.sub("^#.*", "", rest, flags=re.M).strip()
    if rest != "version: 3" or not recorded or len(recorded) < len(written):
        raise ValueError(
            f"autotune: these are not XLA's autotuning results in text: {rest[:60]!r}. "
            "Record them with the options of recording(path); each is then "
            "results { device hlo result version }, after a line 'version: 3'."
        )
    patch = 1 + int(hashlib.sha256(text.encode()).hexdigest()[:5], 16)
    (major, minor), bandwidth = target.compute_capability, target.memory_bandwidth / 1e9
    chip = f"CUDA: {major}.{minor}, Cores: {target.sms}"
    cudnn = f"{target.cudnn[0]}.{target.cudnn[1]}.{patch}"
    key = (
        f"{chip}, GPU clock: {target.clock_ghz:g} GHz, Memory bandwidth: {bandwidth:.0f} GB/s, "
        f"L2 cache: {target.l2_bytes / 2**20:g} MB, DNN version: {cudnn}"
    )
    files = {}
    for device, hlo, result, version in (m.groups() for m in recorded):
        # What tells chips apart. A driver gives slightly other clocks, bandwidths and caches than
        # the data sheet.
        theirs = re.match(r"(.*), GPU clock: .* Memory bandwidth: (\d+) GB/s", device)
        if not theirs or theirs[1] != chip or not 0.8 < int(theirs[2]) / bandwidth < 1.25:
            raise ValueError(
                f"autotune: recorded on {device!r}, and {target.name} is another chip: {key!r}."
            )
        hlo = hlo.encode().decode("unicode_escape").encode("latin-1")
        name = f"<key model='{key}', hlo='".encode() + hlo + f"', version={version}>".encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(name).digest())
        files[digest.decode().strip("=") + ".textproto"] = result
    return patch, files
