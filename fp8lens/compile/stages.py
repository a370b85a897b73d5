"""Which of XLA's passes changed a matmul: the program between them, as XLA dumps it while it
compiles.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fp8lens.bill.memory import Plan
from fp8lens.compile.api import aot_compile
from fp8lens.compile.isolate import Isolated
from fp8lens.dumps import Stage, is_beside, ptx_of, stages_of
from fp8lens.hlo.diff import HloDiff, describe, diff_hlo
from fp8lens.hlo.ops import DOTS
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module

_DOTS = {"ragged-dot", "convolution"} | DOTS
_CALL = re.compile("gemm|matmul|scaled_?dot", re.I)
# A line of HLO that is a matmul: a dot, a custom call, a fusion that XLA made of one.
_MATMUL = (
    rf" (?:{'|'.join(sorted(_DOTS))})\("
    rf'|(?i:custom_call_target="[^"]*(?:{_CALL.pattern})|gemm_fusion\S* = )'
)


def _plan(folder: Path) -> Plan:
    """XLA's plan of the main module's buffers."""
    texts = []
    for what in ("buffer-assignment", "live-range"):
        paths = sorted(folder.glob(f"module_*after_optimizations-{what}.txt"))
        texts.append(paths[0].read_text(encoding="utf-8") if paths else "")
    return Plan(*texts)


# JAX's wheels are built without this assembler. XLA asks for it when the program is optimized and
# dumped, and ends with an error; where XLA has it, it compiles to the end. XLA crashes if one of
# several threads ends so (JAX 0.12.0.1): one has to make all kernels. A dump would be shorter than
# as_text's text.
_NO_ASSEMBLER = {
    "xla_gpu_enable_libnvptxcompiler": True,
    "xla_gpu_force_compilation_parallelism": 1,
    "xla_dump_compact_gte": False,
}
_STOPPED = "LibNvPtxCompiler is not supported"


class Dump(NamedTuple):
    """The compiled program; the program between passes, the first stage, without names, as XLA got
    it; the PTX of each kernel that XLA made, by the kernel's name; and XLA's plan of the buffers.

    A kernel's name is its instruction's, with "_" for ".": %gemm_fusion_dot.1 is gemm_fusion_dot_1.
    A kernel of a library (cuBLASLt, cuDNN) has no PTX here.
    """

    compiled: jax.stages.Compiled | Isolated
    stages: tuple[Stage, ...]
    ptx: dict[str, str]
    plan: Plan


def dumped(
    fn: Callable,
    *args: Any,
    pattern: str = "^$",
    compiler_options: Mapping[str, Any] | None = None,
    assemble: bool = True,
    **options: Any,
) -> Dump:
    """Compile `fn(*args)` once, and keep what XLA writes of it: next to the compile it costs
    nothing, so compile here whenever more than the program may be asked for.

    `pattern` is a regular expression, of XLA's own kind (RE2): the stages are those before and
    after each pass whose name it finds somewhere. "gemm-rewriter" finds cublas-gemm-rewriter and
    triton-gemm-rewriter; ".*" finds all, of which XLA leaves out those that changed nothing; "^$",
    none: then the one stage is the program as XLA got it.

    Without `assemble` XLA may stop when the program is optimized, before it makes machine code of
    its own kernels, which takes most of the time: then the result has only the program's text, and
    no PTX, so that a Triton kernel's type is not known. XLA's autotuner makes machine code too:
    turn it off. What is compiled apart for fear of an abort fails.

    Arguments, further options, keyword arguments of `fn`, and errors are `aot_compile`'s. Nothing
    stays on disk.
    """
    with tempfile.TemporaryDirectory(prefix="xla-") as folder:
        dump = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": pattern,
            "xla_dump_hlo_module_re": "",
            "xla_dump_emitter_re": "^ptx$",
        }
        if not assemble:
            dump |= _NO_ASSEMBLER
        try:
            compiled = aot_compile(
                fn, *args, compiler_options={**(compiler_options or {}), **dump}, **options
            )
        except jax.errors.JaxRuntimeError as error:
            optimized = sorted(Path(folder).glob("module_*gpu_after_optimizations.txt"))
            if assemble or not optimized or _STOPPED not in str(error):
                raise
            compiled = Isolated(optimized[0].read_text(encoding="utf-8"))
        files = [file for file in Path(folder).iterdir() if is_beside(file.name)]
        texts = {file.name: file.read_text(encoding="utf-8") for file in files}
        return Dump(compiled, stages_of(texts), ptx_of(texts), _plan(Path(folder)))


@dataclass(frozen=True)
class PassStep:
    """One pass of XLA that changed a matmul, and the program on either side of it. Shows what it
    changed there.
    """

    pipeline: str
    name: str
    before_text: str = field(repr=False)
    after_text: str = field(repr=False)

    # Parsed when asked for, and not kept: a model's many steps would fill the memory.
    @property
    def before(self) -> HloModule:
        """The program that the pass was given."""
        return parse_hlo_module(self.before_text)

    @property
    def after(self) -> HloModule:
        """The program that the pass made of it."""
        return parse_hlo_module(self.after_text)

    @cached_property
    def diff(self) -> HloDiff:
        """All that the pass changed."""
        return diff_hlo(self.before, self.after)

    @property
    def at_matmuls(self) -> HloDiff:
        """What the pass changed at matmuls; all that it changed, where that is only their operands'
        shapes.
        """
        return self.diff.around(_MATMUL) or self.diff

    def __str__(self) -> str:
        return f"{self.pipeline}: {self.name}\n{self.at_matmuls}"

    __repr__ = __str__


class Passes(tuple[PassStep, ...]):
    """The passes that changed a matmul, in the order XLA ran them."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self)) or "no pass changed a matmul"

    __repr__ = __str__


def _is_matmul(i: Instruction) -> bool:
    return i.opcode in _DOTS or bool(_CALL.search(i.custom_call_target or ""))


def _matmuls(module: HloModule) -> Counter[tuple]:
    """How often each matmul occurs, and each fusion that has one in it: what it says, and its
    operands' shapes.
    """
    inside = {i.computation.name for i in module if _is_matmul(i)}
    found: Counter[tuple] = Counter()
    for i in module:
        has_matmul = i.opcode == "fusion" and not inside.isdisjoint(i.called)
        if has_matmul or _is_matmul(i):
            found[*describe(i), *(i.computation[name].shape_text for name in i.operands)] += 1
    return found


def passes(fn: Callable, *args: Any, **options: Any) -> Passes:
    """Compile once; the program before and after each of XLA's passes that changed a matmul.

    Arguments, further options and errors are those of `aot_compile`. For an Inspection, read its
    `passes`. A matmul is changed by what changes its instruction (a dot becomes a custom call, or
    moves into a fusion, or gets an epilogue) or the shapes, number or layout of its operands. XLA
    also changes programs between its pipelines. Such a step is named pipeline-start.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> def layer(x, w, x_scale, w_scale):
        ...     x, w = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32) * w_scale
        ...     return jax.nn.relu(x @ w.T)
        >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float8_e4m3fn)
        >>> scale = jax.ShapeDtypeStruct((), jnp.float32)
        >>> from fp8lens import passes
        >>> any("gemm-rewriter" in step.name for step in passes(layer, x, x, scale, scale))
        True
    """
    steps: list[PassStep] = []
    last: Stage | None = None
    matmuls: Counter[tuple] = Counter()
    for stage in dumped(fn, *args, pattern=".*", **options).stages:
        if last and stage.text == last.text:
            continue
        found = _matmuls(parse_hlo_module(stage.text))
        if last and found != matmuls:
            steps.append(PassStep(stage.pipeline, stage.after, last.text, stage.text))
        last, matmuls = stage, found
    return Passes(steps)
