"""What XLA's autotuning chose on the attached GPU, and whether a compile without the GPU follows
what was recorded.

A case keeps its choices as XLA's text, those that no case before it in the same process already
has. The whole is "version: 3" and the choices of all cases: that goes into `aot_compile(...,
gemm="auto", autotune=...)`.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from agreement import side
from programs import chip, own_compile, programs
from record import Case, sentence

from fp8lens.compile.autotune import recording
from helpers import Target, aot_compile
from tools.records import releases

ROOT = Path(__file__).resolve().parent.parent.parent
CHOSEN = (
    "unscaled, f32 result",
    "scaled in f32",
    "scaled in bf16",
    "scales after the dot",
    "relu",
    "gelu tanh",
    "bf16 bias",
    "amax",
    "B stored [K, N]",
)
HEADER = "version: 3\n"
CHOICE = re.compile(r"^results \{\n.*?^\}\n", re.M | re.S)

# Choices made by hand -----------------------------------------------------------------------------
# For what is not there to be timed: tests, and rehearsals. XLA logs what it looks up and does not
# find; that and an answer is a choice.

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


# The part -----------------------------------------------------------------------------------------


def recorded(program: releases.Program) -> tuple[jax.stages.Compiled, str]:
    """The attached GPU's own program, and all that XLA has chosen in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "choices.txt")
        own = own_compile(
            program.fn,
            *program.args,
            rehearse=False,
            gemm="auto",
            compiler_options=options(program, recording(path)),
        )
        return own, path.read_text()


def travels(
    program: releases.Program, text: str, target: Target, own: jax.stages.Compiled
) -> dict[str, Any]:
    """What a compile without the GPU makes of a program, untimed and with the GPU's choices: is
    that the GPU's own?"""

    def compile_without(autotune: str | None) -> dict[str, Any]:
        try:
            return side(
                aot_compile(
                    program.fn,
                    *program.args,
                    target=target,
                    gemm="auto",
                    autotune=autotune,
                    compiler_options=program.options,
                )
            )
        except Exception as error:
            return {"error": sentence(error)}

    found = {
        "untimed": compile_without(None),
        "without_gpu": compile_without(text),
        "on_gpu": side(own),
    }
    return found | {
        "agree": found["without_gpu"] == found["on_gpu"] and "error" not in found["on_gpu"]
    }


def cases(rehearse: bool) -> dict[str, Callable[[Case], dict[str, Any]]]:
    """A case a program, of those on which the ways to multiply differ."""
    names, divide = (CHOSEN[::3], 16) if rehearse else (CHOSEN, 1)
    everything, before = programs(divide), set()

    def choose(name: str, case: Case) -> dict[str, Any]:
        program, target = everything[name], chip(rehearse)
        if rehearse:  # the hand-made program stands in for the GPU's own
            text = by_hand(looked_up(names, divide)[name])
            own = aot_compile(
                program.fn,
                *program.args,
                target=target,
                gemm="auto",
                autotune=text,
                compiler_options=program.options,
            )
        else:
            own, text = recorded(program)
        case.keep("", own)
        choices = [choice for choice in CHOICE.findall(text) if choice not in before]
        before.update(choices)
        return {"hand_made": rehearse, "choices": "".join(choices)} | travels(
            program, text, target, own
        )

    return {name: functools.partial(choose, name) for name in names}


def main(divide: str, *names: str) -> None:
    """Compile programs without a GPU, for XLA to log what it looks up."""
    for name in names:
        program = programs(int(divide))[name]
        print(f"program {name}", file=sys.stderr, flush=True)
        aot_compile(
            program.fn,
            *program.args,
            target=chip(True),
            gemm="auto",
            compiler_options=options(program),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
