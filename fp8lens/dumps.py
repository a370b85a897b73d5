"""What XLA dumps: which file of a folder has the compiled program, and the text of a file, gzipped
or not. The command line and the page that reads dumps choose alike.
"""

import enum
import gzip
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.text import counted

#: How XLA ends the name of what it compiled for a GPU.
COMPILED = "gpu_after_optimizations.txt"
_GZIP = b"\x1f\x8b"
# What XLA writes beside a program, in files that end in .txt too.
_BESIDE = re.compile(
    r"-(?:buffer-assignment|memory-usage-report|live-range)\.txt$"
    r"|\b(?:thunk_sequence|execution_options|debug_options|flagfile|autotune_results)\b"
)

# What XLA's GPU compiler, and no other, writes beside its kernels and calls.
_OF_GPU = frozenset(("operation_queue_id", "fusion_backend_config", "gemm_backend_config"))


class Kind(enum.Enum):
    """What a file's name says of the program in it; the value says it in words, one and several.
    What stands first is read first.
    """

    GPU = "program that XLA compiled for a GPU", "programs that XLA compiled for a GPU"
    OPTIMIZED = "optimized program", "optimized programs"
    WRITTEN = "program before XLA's optimizations", "programs before XLA's optimizations"
    OTHER = "text", "texts"


_ENDS = (
    (COMPILED, Kind.GPU),
    ("after_optimizations.txt", Kind.OPTIMIZED),
    ("before_optimizations.txt", Kind.WRITTEN),
    (".txt", Kind.OTHER),
    (".hlo", Kind.OTHER),
)


class NoText(ValueError):
    """What was given is no text; the message says what it is instead."""


@dataclass(frozen=True)
class Choice:
    """The file to read: the largest of its kind. `others` has the names of those beside it that are
    of the same kind, the largest first; `files` is how many there were.
    """

    name: str
    kind: Kind
    others: tuple[str, ...]
    files: int

    def __str__(self) -> str:
        one, several = self.kind.value
        if self.files == 1:
            return f"{self.name}."
        if self.others:
            number = 1 + len(self.others)
            return f"{self.name}, the largest of {number} {several}, of {self.files} files."
        return f"{self.name}, the one {one} among {counted(self.files, 'file')}."


def kind_of(name: str) -> Kind | None:
    """What a file's name says of the program in it; None of what has no program as text."""
    plain = PurePath(name).name.removesuffix(".gz")
    if _BESIDE.search(plain):
        return None
    return next((kind for end, kind in _ENDS if plain.endswith(end)), None)


def choose(sizes: Mapping[str, int]) -> Choice | None:
    """The file to read, of files by name with their bytes; None if none of them has a program."""
    found: dict[Kind, list[str]] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if kind := kind_of(name):
            found.setdefault(kind, []).append(name)
    for kind in Kind:
        if kind in found:
            first, *others = found[kind]
            return Choice(first, kind, tuple(others), len(sizes))
    return None


def text_of(data: bytes) -> str:
    """The text of a file, gzipped or not. NoText for what is empty, damaged or no text."""
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise NoText("gzipped, and damaged") from error
    if not data.strip():
        raise NoText("empty")
    if b"\0" in data:
        raise NoText("no text")
    return data.decode("utf-8-sig", errors="replace")


def not_of_a_gpu(name: str, module: HloModule) -> str:
    """What a program is, read from a file of this name, where it is not one that XLA compiled for a
    GPU; else "".
    """
    # The order of the kernels is the last that XLA settles.
    if module.attributes.get("is_scheduled") != "true":
        return "a program that XLA has not optimized yet"
    # In the header its GPU compiler writes a fingerprint, from JAX 0.4.31 on.
    has_fingerprint = "fingerprint_before_lhs" in module.attributes.get("frontend_attributes", "")
    if kind_of(name) is Kind.GPU or has_fingerprint or any(map(_is_a_gpus, module)):
        return ""
    return "a program that XLA compiled for a CPU"


def _is_a_gpus(i: Instruction) -> bool:
    """Whether XLA wrote an instruction for a GPU."""
    if (i.custom_call_target or "").startswith("__cu"):
        return True
    config = i.backend_config if "backend_config" in i.attributes else None
    return isinstance(config, dict) and not _OF_GPU.isdisjoint(config)
