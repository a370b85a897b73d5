"""XLA's passes, one by one: the program between them, as XLA dumps it while it compiles."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from helpers.aot import aot_compile
from helpers.targets import Target

_FILE = re.compile(r"module_(\d+)\.(?:.+\.)?(?:before_optimizations|(\d{4,})\.(.+)\.after_(.+?)(?:\.before_(.+))?)\.txt")
_ENTRY = re.compile(r"^\.visible \.entry ([\w$]+)", re.M)


@dataclass(frozen=True)
class Stage:
    """The program between two passes: `after` has run, `before` is next ("" where XLA does not say), in `pipeline`."""
    pipeline: str
    after: str
    before: str
    text: str = field(repr=False)


@contextmanager
def _dumping(fn: Callable, args: tuple, pattern: str, options: Mapping[str, Any] | None,
             **how) -> Iterator[tuple[jax.stages.Compiled, Path]]:
    """`fn` compiled, and the folder that XLA dumped into, which goes when the block ends."""
    with tempfile.TemporaryDirectory(prefix="xla-") as folder:
        dump = {
            "xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": pattern,
            "xla_dump_hlo_module_re": "",
            # The PTX; and the folder's name, never the same twice. JAX's cache on disk ignores the options above, and
            # would answer with a program that XLA compiled, and dumped, on another day.
            "xla_dump_emitter_re": f"^ptx$|{Path(folder).name}",
        }
        yield aot_compile(fn, *args, compiler_options={**(options or {}), **dump}, **how), Path(folder)


def _stages(folder: Path) -> Iterator[Stage]:
    """Of the main module: others, of constants folded and of kernels tried, come after it and have higher numbers."""
    files = [(int(m[1]), int(m[2] or -1), m) for p in folder.iterdir() if (m := _FILE.fullmatch(p.name))]
    main = min((number for number, *_ in files), default=0)
    for _, _, m in sorted(f for f in files if f[0] == main):
        text = (folder / m[0]).read_text(encoding="utf-8")
        yield Stage(m[3] or "", m[4] or "", m[5] or "", text)


def dumped(fn: Callable, *args: Any, pattern: str, target: str | Target = "H100", gemm: str = "cublaslt",
           compiler_options: Mapping[str, Any] | None = None) -> tuple[jax.stages.Compiled, tuple[Stage, ...]]:
    """Compile once; the compiled program, and the program before and after each pass whose name `pattern` finds.

    Arguments and errors are `aot_compile`'s. The first stage, whose names are empty, is the program as XLA got it. With
    the pattern ".*" XLA leaves out passes that changed nothing.
    """
    with _dumping(fn, args, pattern, compiler_options, target=target, gemm=gemm) as (compiled, folder):
        return compiled, tuple(_stages(folder))


def dumped_ptx(fn: Callable, *args: Any, target: str | Target = "H100", gemm: str = "cublaslt",
               compiler_options: Mapping[str, Any] | None = None) -> tuple[jax.stages.Compiled, dict[str, str]]:
    """Compile once; the compiled program, and the PTX of each kernel that XLA made, by the kernel's name.

    Arguments and errors are `aot_compile`'s. A kernel is named as its instruction, with "_" for "." (a Triton GEMM:
    %gemm_fusion_dot.1 is gemm_fusion_dot_1); a kernel of a library (cuBLASLt, cuDNN) has no PTX here.
    """
    with _dumping(fn, args, "^$", compiler_options, target=target, gemm=gemm) as (compiled, folder):
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("module_*.ptx"))]
        return compiled, {name: text for text in texts for name in _ENTRY.findall(text)}
