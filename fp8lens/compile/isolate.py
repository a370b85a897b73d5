"""Whether a program is compiled in a process of its own, and how: XLA ends the one it fails in."""

import copy
import io
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxlib.mlir import ir

from fp8lens.apart import ended, python
from fp8lens.compile.bugs import COMPILER_BUGS, ODD_SCALED_DOT, RAGGED_DOTS_TO_CUDNN
from fp8lens.compile.meshes import elsewhere, make_mesh
from fp8lens.targets import Target


class CompilerDied(RuntimeError):
    """XLA's compiler ended its process, or exceeded a limit. The message says what ended it, its
    last output, and the fix.
    """


@dataclass(frozen=True)
class Isolated:
    """A program that another process compiled: its optimized HLO, for whatever here takes a
    Compiled.
    """

    text: str = field(repr=False)

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.text


# Operations of StableHLO between a matmul and an amax that XLA may take for the whole result's.
_THROUGH = {"func.call"} | {
    f"stablehlo.{name}"
    for name in "abs add multiply maximum minimum clamp convert reshape transpose select "
    "broadcast_in_dim".split()
}
_NO_MEMORY = re.compile("bad_alloc|MemoryError|out of memory|Cannot allocate|pthread_create")


def may_abort(lowered: jax.stages.Lowered, options: Mapping[str, Any], chip: Target) -> str | None:
    """Where it has something at which XLA was seen to abort, what to do about that, or "" if XLA
    will say it; else None. It is a scaled_dot of no block format; a ragged dot left to cuDNN; a
    Mosaic GPU kernel with instructions that the chip lacks; or where there is FP8, an amax of a
    matmul's rows, columns or tiles, which XLA may take for the whole result's.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    text = module.operation.get_asm(large_elements_limit=16)
    if RAGGED_DOTS_TO_CUDNN in options and "ragged_dot" in text:
        return ""
    if "tcgen05" in text and chip.compute_capability[0] != 10:
        return ""
    functions = ir.SymbolTable(module.operation)
    found: list[str] = []

    def look(operation: Any) -> Any:
        name = operation.name
        if name == "stablehlo.composite" and _is_odd_scaled_dot(operation):
            found.append(ODD_SCALED_DOT)
        if name == "stablehlo.reduce" and _is_partial_amax(operation, functions):
            found.append("")
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    if "xf8E" in text or "xla.scaled_dot" in text:
        module.operation.walk(look)
    return found[0] if found else None


def _is_odd_scaled_dot(composite: Any) -> bool:
    """Whether it is a scaled_dot that lacks a scale, or has one for another number of elements than
    a block's: its operands are two arrays and their scales.
    """
    if composite.attributes["name"].value != "xla.scaled_dot":
        return False
    a, b, *scales = (math.prod(ir.ShapedType(v.type).shape) for v in composite.operands)
    blocks = {size // max(1, scale) for size, scale in zip((a, b), scales, strict=False)}
    return len(scales) < 2 or not blocks <= {16, 32}


def _is_partial_amax(reduce: Any, functions: ir.SymbolTable) -> bool:
    """Whether it takes an amax of rows, columns or tiles of a matmul's result."""
    is_whole = ir.ShapedType(reduce.results[0].type).rank == 0
    if is_whole or reduce.regions[0].blocks[0].operations[0].name != "stablehlo.maximum":
        return False
    todo, behind = [reduce.operands[0]], {}
    while todo:
        op = todo.pop().owner
        if op in behind or isinstance(op, ir.Block):  # an argument
            continue
        behind[op] = op.name
        if op.name == "func.call":
            behind[op] = str(functions[op.attributes["callee"].value])
        if op.name in _THROUGH:
            todo += op.operands
    ops = " ".join(behind.values())
    return "dot_general" in ops and ("stablehlo.abs" in ops or "stablehlo.maximum" in ops)


class _Taken(Exception):
    """What JAX would have handed to XLA."""


class _Taker:
    """A backend that compiles nothing."""

    def __init__(self, backend: Any):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def compile(
        self, module: Any, executable_devices: Any = None, compile_options: Any = None, **_: Any
    ) -> None:
        raise _Taken(module, list(executable_devices), compile_options)

    compile_and_load = compile


def compile_apart(
    lowered: jax.stages.Lowered,
    options: Mapping[str, Any],
    chip: Target,
    patch: int,
    likely: str = "",
) -> Isolated:
    """Compile in a fresh process. `likely`: what to do if that ends without saying why.

    Raises CompilerDied where that process ends without an answer; ValueError where the program is
    for other devices than `chip`; and XLA's own error where it gives one.
    """
    lowering = copy.copy(lowered._lowering)
    lowering.compile_args = {
        **lowering.compile_args,
        "backend": _Taker(lowering.compile_args["backend"]),
    }
    try:
        lowering.compile(compiler_options=dict(options))
    except _Taken as taken:
        module, devices, build = taken.args
    if (kinds := {device.device_kind for device in devices}) != {chip.device}:
        raise elsewhere(", ".join(sorted(kinds)), chip, "")
    module.operation.write_bytecode(file=(code := io.BytesIO()))
    count, numbers = devices[0].client.device_count(), [device.id for device in devices]
    asked = (chip, patch, count, numbers, code.getvalue(), build.SerializeAsString())
    done = subprocess.run(
        python("from fp8lens.compile.isolate import serve; serve()"),
        input=pickle.dumps(asked),
        capture_output=True,
    )
    if done.returncode or not done.stdout:
        log = done.stderr.decode(errors="replace")
        raise CompilerDied(_last_words(done.returncode, log, likely))
    text, error = pickle.loads(done.stdout)
    if error:
        raise jax.errors.JaxRuntimeError(error)
    return Isolated(text)


def _last_words(status: int, log: str, likely: str) -> str:
    """What ended the compiler's process, what it said last, and the fix."""
    fatal = re.search(r"^F\d{4} \S+ +\d+ (.*)", log, re.M)
    said = fatal[1] if fatal else (log.strip().splitlines() or ["nothing"])[-1].strip()
    known = [*(note for sign, note in COMPILER_BUGS.items() if sign in log), likely]
    fix = known[0]
    if not fix and (status == -signal.SIGKILL or _NO_MEMORY.search(log)):
        fix = "It needs more memory than there is: give smaller shapes."
    if not fix:
        fix = (
            "It is a bug of XLA's: report it with this program at "
            "https://github.com/openxla/xla/issues."
        )
    return f"XLA's compiler died ({ended(status)}). Its last words: {said[:400]}. {fix}"


def serve() -> None:
    """In a process of its own: compile what `compile_apart` asks for on standard input, and answer
    on standard output.
    """
    import resource

    from jax._src.interpreters import mlir
    from jaxlib import xla_client

    out = os.dup(1)
    os.dup2(2, 1)
    chip, patch, count, numbers, code, build = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    devices = {device.id: device for device in make_mesh(chip, (("x", count),), patch).devices.flat}
    try:
        with mlir.make_ir_context():
            made = devices[numbers[0]].client.compile(
                ir.Module.parse(code),
                executable_devices=xla_client.DeviceList(tuple(devices[n] for n in numbers)),
                compile_options=xla_client.CompileOptions.ParseFromString(build),
            )
        answer = "\n\n".join(module.to_string() for module in made.hlo_modules()), ""
    except jax.errors.JaxRuntimeError as error:
        answer = "", str(error)
    with os.fdopen(out, "wb") as stream:
        pickle.dump(answer, stream)
    os._exit(0)  # what XLA does when Python ends is of no interest
