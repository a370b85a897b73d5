"""The options of the command, and which of them contradict each other."""

import argparse
import math
from pathlib import Path
from typing import NoReturn

from fp8lens.cli.functions import named
from fp8lens.cli.mistakes import Mistake, answered, cannot_be_read, nearest
from fp8lens.cli.shapes import EXAMPLE
from fp8lens.guard import MAY_GROW
from fp8lens.hlo.parse import visible
from fp8lens.records import read_record
from fp8lens.report.gemms import UNSCALED
from fp8lens.rules.find import every_name
from fp8lens.targets import GEMM_OPTIONS, TARGETS

_EPILOG = """examples:
  fp8lens layers.py:layer --shapes "f8e4m3fn[64,256] f8e4m3fn[128,256] f32[] f32[]" --require-fp8
  fp8lens layers.py:layer --shapes "bf16[4096,4096] bf16[4096,4096]" --against layers.py:in_bf16
  fp8lens layers.py:layer --args sample --gemm both
  fp8lens train.py:step --shapes "bf16[512@data,64] f32[64@data,64]" --mesh data=8 --reasons
  fp8lens layers.py:layer --args sample --save fp8.json
  fp8lens layers.py:layer --args sample --against fp8.json
  fp8lens dumps/module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt
  fp8lens dumps/ --reasons
  unzip -p dumps.zip module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt | fp8lens -

FILE.py is imported: what it does at its top level, it does here too. The function is compiled and
not run.
exit status: 0; 1 where --require-fp8 does not hold, or where something is worse than the record of
--against; 2 for what cannot be used, and a sentence that says why; 3 where the file, or XLA's
compiler, ended the process before there was an answer.
On a terminal there are colours, unless NO_COLOR is set, and lines as wide as the terminal, but at
least 100 columns.
`python -m fp8lens` is the same command."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with 2 and the message, in which nothing can reach the terminal."""
        super().error(visible(message))  # it repeats what was given


def _share(text: str) -> float:
    """A share, as of growth."""
    share = float(text)
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 0.02")
    return share


def parser() -> argparse.ArgumentParser:
    """What reads the command line."""
    parser = _Parser(
        "fp8lens",
        description=(
            "Judge the matmuls of a JAX program. For each: what it multiplies, in which type, "
            "who runs it, what is left outside."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        metavar="FILE.py:FUNCTION | DUMP | -",
        help=(
            "a function, compiled for --target, "
            "or a program saved by XLA_FLAGS=--xla_dump_to=FOLDER: its text, gzipped or not, or "
            "the folder, of which the largest compiled program is read; - reads standard input"
        ),
    )
    arguments = parser.add_mutually_exclusive_group()
    arguments.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", help=f"of the function's arguments: {EXAMPLE}"
    )
    arguments.add_argument(
        "--args",
        metavar="[FILE.py:]FUNCTION",
        help=(
            "a function that returns the arguments: "
            "a tuple of arrays, ShapeDtypeStructs, or pytrees"
        ),
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=DEVICES,...",
        help=(
            "compile for several devices, as in data=8,model=4, and list what they send to each "
            'other; --shapes "bf16[64@data,32]" shards the 64 over data, and 64@(data,model) over '
            "both; the function of --args runs within jax.set_mesh; of a saved program, the "
            "names of its axes"
        ),
    )
    parser.add_argument(
        "--target", help=f"{', '.join(TARGETS)}, or local, the attached GPU (default: H100)"
    )
    parser.add_argument(
        "--gemm",
        choices=(*GEMM_OPTIONS, "both"),
        help=(
            "who may run the matmuls: NVIDIA's library (cublaslt, the default), "
            "kernels that XLA generates (triton), or who is faster, as XLA does unless told "
            "(auto: without a GPU to time them on, the first Triton kernel that compiles); both: "
            "cublaslt, and which matmuls differ with auto"
        ),
    )
    parser.add_argument(
        "--ledger",
        action="store_true",
        help="list every kernel: what it does, for which matmul, and the bytes it moves",
    )
    parser.add_argument(
        "--reasons",
        action="store_true",
        help=(
            "say why what was lost was lost, and the fix; of a saved program, where its folder has "
            "what XLA's rewriter was given (--xla_dump_hlo_pass_re=gemm-rewriter)"
        ),
    )
    parser.add_argument(
        "--chain",
        action="store_true",
        help=(
            "with the reasons, list all that stands around each matmul: what is between the FP8 "
            "arrays and the dot, what is behind the dot and which of it is in the call, and the "
            "kernels beside it"
        ),
    )
    parser.add_argument(
        "--bill",
        action="store_true",
        help=(
            "what the program costs: memory, bytes moved, what FP8 alone needs, what runs again "
            "for jax.checkpoint, what is sent, and the time by the roofline"
        ),
    )
    parser.add_argument(
        "--against",
        metavar="FILE.py:FUNCTION or FILE.json",
        help=(
            "the same beside another function of the same arguments, such as the layer in bf16; or "
            "compare with the record in a JSON file, and exit with 1, and what is worse, if a "
            "matmul lost FP8, a kernel was added, or bytes or memory grew"
        ),
    )
    parser.add_argument(
        "--save",
        metavar="FILE.json",
        help=(
            "write what the program costs into a record, which keeps its other programs; not where "
            "--against names the same record, and something is worse"
        ),
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="begin the record of --save anew, without what its file has now",
    )
    parser.add_argument(
        "--name",
        help=(
            "the program's name in a record (default: its file, from the record's folder, and its "
            "function)"
        ),
    )
    parser.add_argument(
        "--summary",
        metavar="FILE",
        help=(
            "append what --against says of the record, or why there is no answer, to a file, as "
            "for a pull request's comment"
        ),
    )
    parser.add_argument(
        "--may-grow",
        metavar="SHARE",
        type=_share,
        help=(
            "by which share bytes and memory may grow over the record (default: "
            f"{MAY_GROW}, which is {MAY_GROW:.0%}%)"
        ),
    )
    parser.add_argument(
        "--require-fp8",
        action="store_true",
        help=(
            "exit with 1, and why, if a matmul is not FP8, or if a collective that moves values "
            "sends wide what an FP8 matmul reads, or what was FP8"
        ),
    )
    parser.add_argument(
        "--allow",
        metavar="RULE",
        action="append",
        help=(
            "what --require-fp8 accepts, and may be repeated: a rule of a matmul, such as "
            "not-quantized, which lets a matmul be wide if this is why, or of a collective, such "
            "as gathered-wide; opaque, kernels that cannot be looked into; unscaled, a gradient "
            "that becomes FP8 without a scale"
        ),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help=(
            "one JSON object: rows, totals, devices and their mesh, and reasons if asked for; or "
            "what --bill or --against says"
        ),
    )
    parser.add_argument(
        "--debug", action="store_true", help="before an error's sentence, Python's traceback"
    )
    parser.add_argument("--version", action="store_true", help="print the version, and exit")
    return parser


def is_record(given: argparse.Namespace) -> bool:
    """Whether --against names a record, and not a function."""
    return bool(given.against) and not named(given.against)


def check(given: argparse.Namespace) -> None:
    """A Mistake for what cannot be used of the options, before anything is compiled."""
    with_record = is_record(given)
    alone = {
        "--allow is for --require-fp8": given.allow and not given.require_fp8,
        "--anew is for --save": given.anew and not given.save,
        "--name is for --save, or for --against with a record": (
            given.name and not given.save and not with_record
        ),
        "--summary is for --against with a record": given.summary and not with_record,
        "--may-grow is for --against with a record": (
            given.may_grow is not None and not with_record
        ),
    }
    for sentence, is_mistaken in alone.items():
        if is_mistaken:
            raise Mistake(f"{sentence}: add that, or leave the option out.")
    known = ("opaque", UNSCALED, *every_name())
    for name in given.allow or ():
        if name not in known:
            raise Mistake(f"--allow: there is no rule {name!r}{nearest(name, known)}.")
    if with_record:
        if not Path(given.against).is_file():
            raise Mistake(
                f"--against: there is no record {given.against!r}: write it with --save, or give "
                "path/to/file.py:function."
            )
        _check_record("--against", given.against)
    if given.save and not given.anew and Path(given.save).exists():
        _check_record("--save", given.save)


def _check_record(option: str, path: str) -> None:
    """A Mistake where a file cannot be read as a record."""
    with cannot_be_read(path), answered(ValueError, lambda error: f"{option}: {error}"):
        read_record(path)
