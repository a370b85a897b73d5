"""Choices of XLA's autotuner, made by hand: no GPU is here to be timed. XLA logs what it looks up
and does not find; that and an answer is a choice. As a program it compiles, and XLA's log is
read."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8lens.compile.autotune import recording
from helpers import aot_compile
from tools.recorders import releases

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = "version: 3\n"
CHOICE = re.compile(r"^results \{\n.*?^\}\n", re.M | re.S)

TILE = """triton {
      block_m: 128
      block_n: 128
      block_k: 64
      num_stages: 2
      num_warps: 4
      num_ctas: 1
    }"""
CUBLASLT = """gemm {
      algorithm: 0
    }"""
NATIVE = """other {
      name: "NATIVE_EMITTER"
      config {
        [type.googleapis.com/xla.autotuner.BackendConfig] {
          native_emitter {
          }
        }
      }
    }"""
MISSED = re.compile(
    r"Autotune cache miss: key = <key model='(.*?)', hlo='(.*?)', version=(\d+)>", re.S
)
LOGGING = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_MAX_VLOG_LEVEL": "0",
    "TF_CPP_VMODULE": "autotuner_cache=2",
}  # read once, when XLA is loaded: so in a process of its own


def programs(divide: int) -> dict[str, releases.Program]:
    """The programs of a table of releases, small."""
    return {
        name: program.of_size(releases.M // divide, releases.N // divide, releases.K)
        for name, program in releases.programs().items()
    }


def options(program: releases.Program, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A program's own compiler options, those that have XLA keep choices as text, and `more`."""
    kept = {
        key: value
        for key, value in recording("unused.txt").items()
        if not key.endswith("_results_to")
    }
    return {**kept, **(program.options or {}), **(more or {})}


@functools.cache
def looked_up(names: tuple[str, ...], divide: int) -> dict[str, list[tuple[str, str, str]]]:
    """For each program, what XLA looks up when it compiles it without a GPU: (chip, instructions,
    release)."""
    found = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, __file__, str(divide), *names],
        env=os.environ | LOGGING | {"PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
    )
    said = re.split(r"^program (.*)\n", child.stderr, flags=re.M)
    if child.returncode:
        raise RuntimeError(f"XLA could not say what it looks up: {said[-1][-400:]}")
    return {name: MISSED.findall(log) for name, log in zip(said[1::2], said[2::2], strict=True)}


def by_hand(keys: list[tuple[str, str, str]], matmul: str = TILE) -> str:
    """HAND-MADE results, chosen by nobody's timing: `matmul` for every matmul, XLA's own emitter
    for the rest."""
    text = f"# hand-made, not measured\n{HEADER}"
    for device, hlo, version in keys:
        quoted = hlo.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        answer = CUBLASLT if "custom-call(" in hlo else matmul if " dot(" in hlo else NATIVE
        text += (
            f'results {{\n  device: "{device}"\n  hlo: "{quoted}"\n'
            f"  result {{\n    {answer}\n  }}\n"
            f"  version: {version}\n}}\n"
        )
    return text


def main(divide: str, *names: str) -> None:
    """Compile programs without a GPU, for XLA to log what it looks up."""
    for name in names:
        program = programs(int(divide))[name]
        print(f"program {name}", file=sys.stderr, flush=True)
        aot_compile(
            program.fn,
            *program.args,
            target="H200",
            gemm="auto",
            compiler_options=options(program),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
