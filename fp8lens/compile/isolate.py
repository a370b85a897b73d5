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

from fp8lens.apart import python
from fp8lens.compile.bugs import COMPILER_BUGS, ODD_SCALED_DOT, RAGGED_DOTS_TO_CUDNN
from fp8lens.compile.meshes import elsewhere, make_mesh
from fp8lens.formats import block_format
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
_THROUGH = set(
    "abs add multiply maximum minimum clamp convert reshape transpose call select broadcast_in_dim "
    "dot_general".split()
)
# A size of ten digits; `"0x` begins the bytes of a constant.
_FATAL = re.compile(r'(?:tensor<|(?<!"0)x)\d{10}|custom_call @__cu')
_OPERATION = re.compile(r"^ *(%\w+)(?::\d+)? = (?:stablehlo\.|func\.)?(\w+)(.*)", re.M)
_SCALED_DOT = 'composite "xla.scaled_dot"'
_TENSOR = re.compile(r"tensor<([^<>]++)>")
_NO_MEMORY = re.compile("bad_alloc|MemoryError|out of memory|Cannot allocate|pthread_create")
# Of rows, columns or tiles: to an array, not to a scalar.
_PARTIAL_MAXIMUM = re.compile(
    r"^ *%\w+ = stablehlo\.reduce\((%\w+) init: .* applies stablehlo\.maximum .*-> tensor<\d", re.M
)


def may_abort(lowered: jax.stages.Lowered, options: Mapping[str, Any], chip: Target) -> bool:
    """Whether it has something at which XLA was seen to abort: flags of the assembler's, a size of
    ten digits, a call of a kernel of XLA's own; a scaled_dot of no known block format; a ragged dot
    left to cuDNN; a Mosaic GPU kernel with instructions that the chip lacks; or where there is FP8,
    an amax of a matmul's rows, columns or tiles, which XLA may take for the whole result's.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    text = module.operation.get_asm(large_elements_limit=16)
    if "xla_gpu_ptx_compiler_extra_flags" in options or _FATAL.search(text):
        return True
    if _has_odd_scaled_dot(text):
        return True
    if RAGGED_DOTS_TO_CUDNN in options and "ragged_dot" in text:
        return True
    if "tcgen05" in text and chip.compute_capability[0] != 10:
        return True
    functions = {}
    for function in text.split("func.func ")[1:] if "xf8E" in text else ():
        head, _, rest = function.partition("(")
        functions[head.rpartition("@")[2]] = rest.partition("\n  }")[0]
    return any(_has_partial_amax(body, functions) for body in functions.values())


def _has_odd_scaled_dot(text: str) -> bool:
    """Whether StableHLO has a scaled_dot of no known block format."""
    return any(_is_odd(line) for line in text.splitlines() if _SCALED_DOT in line)


def _is_odd(line: str) -> bool:
    """Whether a scaled_dot is of no block format. Its line ends with the types of its operands and
    of its result.
    """
    arrays = []
    for tensor in _TENSOR.findall(line.rpartition(" : (")[2])[:-1]:
        *dims, of = tensor.split("x")
        arrays.append((math.prod(map(int, dims)), of))
    if len(arrays) != 4:
        return True
    pairs = zip(arrays[:2], arrays[2:], strict=True)
    return any(
        block_format(name.lower(), of.lower(), elements // max(1, scales)) is None
        for (elements, name), (scales, of) in pairs
    )


def _has_partial_amax(body: str, functions: Mapping[str, str]) -> bool:
    """Whether a function's body takes an amax of rows, columns or tiles that an FP8 matmul may have
    made. `functions` are the bodies of all, by name.
    """
    if "stablehlo.maximum across" not in body:
        return False
    made = {name: (op, rest) for name, op, rest in _OPERATION.findall(body)}
    for first in _PARTIAL_MAXIMUM.findall(body):
        behind = _behind(first, made, _THROUGH)
        ops = {made[name][0] for name in behind if name in made}
        if not ops & {"abs", "maximum", "call"}:
            continue
        for name in behind:
            op, rest = made.get(name, ("", ""))
            if op == "dot_general" and _may_be_fp8(rest, made, functions):
                return True
            if op == "call" and "dot_general" in _callee(rest, functions):
                return True
    return False


def _may_be_fp8(dot: str, made: Mapping, functions: Mapping[str, str]) -> bool:
    """Whether a matmul, or anything behind it up to other matmuls, reads FP8: an operation's line
    ends with the types of its operands.
    """
    if "xf8E" in dot:
        return True
    for first in re.findall(r"%\w+", dot):
        for name in _behind(first, made):
            op, rest = made.get(name, ("", ""))
            if op != "dot_general" and "xf8E" in rest + _callee(rest, functions):
                return True
    return False


def _callee(rest: str, functions: Mapping[str, str]) -> str:
    """The body of the function that an operation calls; "" if it calls none."""
    called = re.match(r" @([\w.]+)", rest)
    return functions.get(called[1], "") if called else ""


def _behind(first: str, made: Mapping, through: set[str] | None = None) -> set[str]:
    """The values that one is made of, back to the matmuls: through these operations, or through
    all. What is no operation of the body is an argument.
    """
    todo, seen = [first], set()
    while todo:
        name = todo.pop()
        op, rest = made.get(name, ("", ""))
        if name in seen or through is not None and op not in through:
            continue
        seen.add(name)
        if op != "dot_general":
            todo += re.findall(r"%\w+", rest)
    return seen


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
    seconds: float | None = None,
    gigabytes: float | None = None,
) -> Isolated:
    """Compile in a fresh process, within limits of time and of its memory.

    Raises CompilerDied where that process ends without an answer, or takes longer; ValueError where
    the program is for other devices than `chip`; and XLA's own error where it gives one.
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
    asked = (
        chip,
        patch,
        devices[0].client.device_count(),
        [device.id for device in devices],
        code.getvalue(),
        build.SerializeAsString(),
        gigabytes,
    )
    try:
        done = subprocess.run(
            python("from fp8lens.compile.isolate import serve; serve()"),
            input=pickle.dumps(asked),
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise CompilerDied(
            f"XLA's compiler did not end within {seconds:g} s, and was ended."
        ) from None
    if done.returncode or not done.stdout:
        log = done.stderr.decode(errors="replace")
        likely = ODD_SCALED_DOT if _has_odd_scaled_dot(str(module)) else ""
        raise CompilerDied(_last_words(done.returncode, log, gigabytes, likely))
    text, error = pickle.loads(done.stdout)
    if error:
        raise jax.errors.JaxRuntimeError(error)
    return Isolated(text)


def _last_words(status: int, log: str, gigabytes: float | None, likely: str = "") -> str:
    """What ended the compiler's process, what it said last, and the fix: the `likely` one where its
    words tell of none.
    """
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = re.search(r"^F\d{4} \S+ +\d+ (.*)", log, re.M)
    said = fatal[1] if fatal else (lines or ["nothing"])[-1]
    known = [note for sign, note in COMPILER_BUGS.items() if sign in log]
    short = status == -signal.SIGKILL or _NO_MEMORY.search(log)
    if short or (gigabytes and not lines):  # where its memory ends it may die without a word
        needs = "needs" if short else "may need"
        limit = f"{gigabytes:g} GB" if gigabytes else "there is"
        fix = f"It {needs} more memory than {limit}: give smaller shapes."
    elif known:
        fix = known[0]
    elif likely:
        fix = likely
    else:
        fix = (
            "It is a bug of XLA's: report it with this program at "
            "https://github.com/openxla/xla/issues."
        )
    return f"XLA's compiler died ({how}). Its last words: {said[:400]}. {fix}"


def serve() -> None:
    """In a process of its own: compile what `compile_apart` asks for on standard input, and answer
    on standard output.
    """
    import resource

    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    out = os.dup(1)
    os.dup2(2, 1)
    chip, patch, count, numbers, code, build, gigabytes = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    devices = {device.id: device for device in make_mesh(chip, (("x", count),), patch).devices.flat}
    if gigabytes:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9),) * 2)
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
