"""What XLA dumps: which file of a folder has the compiled program, which beside it say what XLA's
rewriter was given, and the text of a file, gzipped or not. The command line and the page that reads
dumps choose alike.
"""

import enum
import gzip
import io
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from fp8lens.hlo.parse import HloModule
from fp8lens.hlo.text import counted
from fp8lens.matmul.rows import matmuls
from fp8lens.targets import TARGETS, Target

#: How XLA ends the name of what it compiled for a GPU.
COMPILED = "gpu_after_optimizations.txt"
_FOR_CPU = "cpu_after_optimizations.txt"
_GZIP = b"\x1f\x8b"
# What XLA writes beside a program, in files that end in .txt too.
_BESIDE = re.compile(
    r"-(?:buffer-assignment|memory-usage-report|live-range)\.txt$"
    r"|\b(?:thunk_sequence|execution_options|debug_options|flagfile|autotune_results)\b"
)

# What XLA's GPU compiler, and no other, writes: in the header from JAX 0.4.31 on, and beside its
# kernels and calls.
_OF_GPU = re.compile(
    r"fingerprint_before_lhs|operation_queue_id|fusion_backend_config|gemm_backend_config"
    r'|custom_call_target="__cu'
)

# With this option beside xla_dump_to, a dump says what XLA's rewriter was given; with the other it
# has PTX, which alone tells in which type a Triton kernel multiplies.
_PASSES = "--xla_dump_hlo_pass_re=gemm-rewriter"
PTX = "--xla_dump_emitter_re=ptx"
_COMPILED_FOR = re.compile(r"(module_\d+\.(?:.+\.)?)sm_(\d+)\.(\d+)[a-z]?_" + re.escape(COMPILED))
_STAGE = re.compile(
    r"module_(\d+)\.(?:.+\.)?"
    r"(?:before_optimizations|(\d{4,})\.(.+)\.after_(.+?)(?:\.before_(.+))?)\.txt"
)
_GIVEN = re.compile(r"\.before_[^.]*-gemm-rewriter\.txt")
_PTX_ENTRY = re.compile(r"^\.visible \.entry ([\w$]+)", re.M)


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
    """The file to read: the largest of `alike` files of its kind, of `files` in all."""

    name: str
    kind: Kind
    alike: int
    files: int

    def __str__(self) -> str:
        one, several = self.kind.value
        if self.files == 1:
            return f"{self.name}."
        if self.alike > 1:
            return f"{self.name}, the largest of {self.alike} {several}, of {self.files} files."
        return f"{self.name}, the one {one} among {counted(self.files, 'file')}."


def kind_of(name: str) -> Kind | None:
    """What a file's name says of the program in it; None of what has no program as text."""
    plain = _plain(name)
    if _BESIDE.search(plain):
        return None
    return next((kind for end, kind in _ENDS if plain.endswith(end)), None)


def choose(sizes: Mapping[str, int]) -> Choice | None:
    """The file to read, of files by name with their bytes; None if none of them has a program."""
    for kind in Kind:
        alike = sorted(name for name in sizes if kind_of(name) is kind)
        if alike:
            return Choice(max(alike, key=sizes.__getitem__), kind, len(alike), len(sizes))
    return None


def text_of(data: bytes, most: int = 0) -> str:
    """The text of a file, gzipped or not, be it twice. NoText for what is empty, damaged or no
    text, and for more than `most` bytes of text, unless that is 0.
    """
    while data.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(most + 1 if most else -1)
        except (OSError, EOFError, zlib.error) as error:
            raise NoText("gzipped, and damaged") from error
    if most and len(data) > most:
        raise NoText(f"more than {most / 1e6:g} MB of text")
    if not data.strip():
        raise NoText("empty")
    if b"\0" in data:
        raise NoText("no text")
    return data.decode("utf-8-sig", errors="replace")


def not_of_a_gpu(name: str, module: HloModule) -> str:
    """What a program is, read from a file of this name, where it is not one that XLA compiled for a
    GPU; else "".
    """
    kind = kind_of(name)
    # The order of the kernels is the last that XLA settles.
    if kind is Kind.WRITTEN or module.attributes.get("is_scheduled") != "true":
        return "a program that XLA has not optimized yet"
    if kind is Kind.GPU or _OF_GPU.search(module.text):
        return ""
    if _plain(name).endswith(_FOR_CPU):
        return "a program that XLA compiled for a CPU"
    return "a program in which nothing says that XLA compiled it for a GPU"


# What stands beside a compiled program ------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """The program between two passes: `after` has run, `before` is next ("" where XLA does not
    say), in `pipeline`.
    """

    pipeline: str
    after: str
    before: str
    text: str = field(repr=False)


def needs_ptx(module: HloModule) -> bool:
    """Whether Triton kernels of a compiled program multiply: others may only sum, as a softmax."""
    return any(row.library == "triton" for i in module for row in matmuls(i))


def flags(module: HloModule) -> str:
    """What XLA_FLAGS has to have, beside --xla_dump_to, for the dump of a program to say what XLA's
    rewriter was given.
    """
    return f"{_PASSES} {PTX}" if needs_ptx(module) else _PASSES


def is_beside(name: str) -> bool:
    """Whether a file's name is that of the program between passes, or of PTX."""
    return bool(_STAGE.fullmatch(_plain(name))) or is_ptx(name)


def is_ptx(name: str) -> bool:
    """Whether a file's name is that of PTX, gzipped or not."""
    return _plain(name).endswith(".ptx")


def stages_of(texts: Mapping[str, str]) -> tuple[Stage, ...]:
    """The program between passes, from files by name. Of the main module: others, of constants
    folded and of kernels tried, come after it and have higher numbers.
    """
    files = [(m, text) for name, text in texts.items() if (m := _STAGE.fullmatch(_plain(name)))]
    main = min((int(m[1]) for m, _ in files), default=0)
    of_main = [(m, text) for m, text in files if int(m[1]) == main]
    in_order = sorted(of_main, key=lambda file: int(file[0][2] or -1))
    return tuple(Stage(m[3] or "", m[4] or "", m[5] or "", text) for m, text in in_order)


def ptx_of(texts: Mapping[str, str]) -> dict[str, str]:
    """The PTX of each kernel by the kernel's name, from files by name."""
    found: dict[str, str] = {}
    for name, text in sorted(texts.items()):
        if is_ptx(name):
            found |= dict.fromkeys(_PTX_ENTRY.findall(text), text)
    return found


def is_of_another(stage: str, module: HloModule, op_names: Collection[str]) -> bool:
    """Whether the text of a program between passes is of another program than a compiled one: of
    another name, with arguments or results of other types, or with none of these `op_names`, which
    are those of the compiled program's matmuls.
    """
    if _signature(stage) != _signature(module.text):
        return True
    known = [name for name in op_names if name]
    return bool(known) and not any(name in stage for name in known)


def _signature(text: str) -> list[str]:
    """A program's name, and the types of its arguments and results."""
    header = text.partition("\n")[0]
    layout = header.partition("entry_computation_layout=")[2]
    return [header.partition(",")[0], *re.findall(r"\w+\[[\d,]*\]", layout)]


def files_beside(name: str, names: Iterable[str]) -> list[str]:
    """Of files by name, those that say what XLA's rewriter was given of the compiled program of
    this name: the program between passes, and PTX. Empty where XLA was not asked for them, as
    `flags` says, or where it is not known for which chip it compiled.
    """
    compiled = _COMPILED_FOR.fullmatch(_plain(name))
    if compiled is None or chip_of(name) is None:
        return []
    folder = PurePath(name).parent
    near = [
        other
        for other in sorted(names)
        if PurePath(other).parent == folder and _plain(other).startswith(compiled[1])
    ]
    written = [other for other in near if _plain(other).endswith("before_optimizations.txt")]
    given = [other for other in near if _GIVEN.search(_plain(other))]
    if not written or not given:
        return []
    return written + given + [other for other in near if is_ptx(other)]


def chip_of(name: str) -> Target | None:
    """A chip of the compute capability in a compiled program's name: those that have the same
    follow the same rules.
    """
    compiled = _COMPILED_FOR.fullmatch(_plain(name))
    if compiled is None:
        return None
    capability = (int(compiled[2]), int(compiled[3]))
    return next((t for t in TARGETS.values() if t.compute_capability == capability), None)


def _plain(name: str) -> str:
    return PurePath(name).name.removesuffix(".gz")
