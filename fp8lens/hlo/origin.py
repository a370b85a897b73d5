"""Where an instruction comes from: the program's line, its layer, JAX's primitive."""

import functools
import os
import re
from pathlib import Path

from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.text import source_path

# Parts of an op_name that JAX's own functions add.
_NO_LAYER = re.compile(
    r"(?:jit|vmap|pjit|shard_map)\("
    r"|(?:while|body|cond|closed_call|checkpoint|rematted_computation|eval_jaxpr"
    r"|branch_\d+_fun|custom_[jv]{1,3}p_call\w*)$"
)
# Folders, beside those of installed packages, whose lines are nobody's program.
_left_out: tuple[str, ...] = (str(Path(__file__).parent.parent),)


def leave_out(folder: str | os.PathLike) -> None:
    """From now on no line of a file in `folder` is shown as the source of an instruction, where
    another line called it: for a package of recipes that programs are made of.
    """
    global _left_out
    if os.fspath(folder) not in _left_out:
        _left_out = (*_left_out, os.fspath(folder))


def left_out() -> tuple[str, ...]:
    """The folders whose lines are nobody's program: this package's, and those of `leave_out`."""
    return _left_out


def layer(op_name: str) -> str:
    """The names of Flax's modules, or of jax.named_scope, in an op_name."""
    parts = [part for part in op_name.split("/")[1:-1] if not _NO_LAYER.match(part)]
    # transpose(jvp(Dense_0)) is Dense_0.
    names = [re.sub(r"^(?:\w++\()++", "", part).rstrip(")") for part in parts]
    return "/".join(name for name in names if re.fullmatch(r"[\w.\-]+", name))


def is_backward(op_name: str) -> bool:
    """Whether JAX transposed what the instruction was made from, for a gradient, as op_name tells
    it. It is for what is shown alone: a scope of the program may be named so.
    """
    return "transpose(" in op_name


def is_of_a_gradient(op_name: str) -> bool:
    """Whether JAX made an operation for a gradient, as op_name tells it, and not to compute once
    more what the gradient needs.
    """
    _, transposed, rest = op_name.rpartition("transpose(jvp(")
    return bool(transposed) and not is_recomputed(rest)


def is_recomputed(op_name: str) -> bool:
    """Whether jax.checkpoint computes an operation once more, for a gradient, as op_name tells
    it.
    """
    return "rematted_computation" in op_name


@remembered
def op_name(instruction: Instruction) -> str:
    """Where JAX made the instruction: the function, its scopes, and the primitive. Empty where the
    text has none.
    """
    metadata = instruction.metadata
    return (metadata.op_name or "") if metadata else ""


def primitive(op_name: str) -> str:
    """The name of JAX's primitive, the last part of an op_name. It is the only part to judge by:
    scopes, which have whatever name the program gave them, come before it.
    """
    return op_name.rpartition("/")[2]


@functools.lru_cache(maxsize=4096)
def _is_elsewhere(file: str, folders: tuple[str, ...]) -> bool:
    return bool(re.search(r"[/\\](site|dist)-packages[/\\]", file)) or file.startswith(folders)


def source_line(instruction: Instruction) -> str:
    """file:line of the program that wrote the instruction; "" where the text has none.

    If a line of its call stack is outside installed packages and the folders that are left out, it
    is the innermost such line. The path is relative to the working directory, or the file's name
    alone.
    """
    frames = instruction.frames
    if not frames:
        return ""
    own = (frame for frame in frames if not _is_elsewhere(frame[0], _left_out))
    file, line = next(own, frames[0])
    return f"{source_path(file)}:{line}"
