"""The same program under other names: no name that a program gives may change what is said of it.

Renamed are scopes and functions, arguments, instructions and computations, each everywhere alike,
to names that look like what a careless reader searches for. JAX's own words in an op_name stay: its
primitives and transformations.
"""

import dataclasses
import json
import re
from typing import NamedTuple

from fp8lens.hlo.parse import parse_hlo_module
from fp8lens.inspection import Inspection

# Of scopes, functions and arguments, which may have any name.
HOSTILE = (
    "known_trip_count:{n:1000000}",
    '"known_trip_count":{"n":"1000000"}',
    "calls=%main, body=%main",
    'custom_call_target="__cublas$lt$matmul$f8"',
    '"__custom_fusion" "__triton_gemm" "fusion_backend_config":{"kind":"__triton"}',
    "replica_groups=mesh[a=2,b=2] {a}, use_global_device_ids=true",
    '"is_sync":true, backend_config={"is_sync": true}',
    "dot_general multiply(%a, %b) dot(%a, %b), lhs_batch_dims={0}",
    "wgmma.mma_async.sync.aligned.m64n128k32.f32.bf16.bf16 fma.rn.f32 mul.f32",
    'op_name="x" source_file="evil.py" source_line=7 stack_frame_id=1',
    "ragged_dot reshape ROOT %r = f8e4m3fn[8,8]{1,0} -> (f32[]) }",
    "__op$block_scaled_dot fingerprint_before_lhs \\ é remat transpose",
)
# Of instructions and computations: letters, digits, dots, dashes and underscores.
HOSTILE_NAMES = (
    "known_trip_count.n.1000000",
    "calls",
    "custom-call.__cublas_lt_matmul_f8",
    "gemm_fusion_dot",
    "ragged_dot_general",
    "parameter",
    "ROOT",
)
# What JAX writes around the program's names.
_OF_JAX = frozenset(
    "jit vmap jvp transpose pjit shard_map while body cond closed_call checkpoint "
    "rematted_computation "
    "custom_jvp_call custom_vjp_call".split()
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_WORD = re.compile(r"[\w.<>\-]+")


class Names(NamedTuple):
    """What each name became, by the old one."""

    instructions: dict[str, str]
    arguments: dict[str, str]
    scopes: dict[str, str]


def _quoted(text: str) -> str:
    """As XLA writes it between quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _new(old: str, known: dict[str, str], hostile: tuple[str, ...]) -> str:
    """The name that stands for an old one, another for each."""
    taken = len(known)
    return known.setdefault(old, f"{hostile[taken % len(hostile)]}.of{taken}")


def renamed(text: str, names: Names) -> str:
    """HLO text with other names; `names` is added to, and what it has stays."""

    def op_name(m: re.Match) -> str:
        scopes, slash, primitive = m[1].rpartition("/")
        if not slash:
            return f'op_name="{_quoted(_new(m[1], names.arguments, HOSTILE))}"'
        evil = _quoted(_new(scopes, names.scopes, HOSTILE))
        scopes = _WORD.sub(lambda word: word[0] if word[0] in _OF_JAX else evil, scopes)
        return f'op_name="{scopes}/{evil}/{primitive}"'

    def name(m: re.Match) -> str:
        return "%" + _new(m[1], names.instructions, HOSTILE_NAMES)

    parts = _STRING.split(_OP_NAME.sub(op_name, text))
    for n in range(0, len(parts), 2):  # between strings
        parts[n] = re.sub(r"%([\w.\-]+)", name, parts[n])
    return "".join(parts)


def renamed_ptx(ptx: dict[str, str], names: Names) -> dict[str, str]:
    """A program's PTX, whose kernels have their instructions' names with underscores."""
    known = {re.sub(r"[.-]", "_", old): new for old, new in names.instructions.items()}
    return {re.sub(r"[.-]", "_", known.get(entry, entry)): text for entry, text in ptx.items()}


def figures(inspection: Inspection, names: Names | None = None) -> str:
    """All that an inspection says but for what only shows names; under the old ones, where `names`
    tells them.
    """
    found = json.loads(inspection.json())
    for row in found["rows"]:
        del row["op_name"], row["path"]
    for line in found["ledger"]:
        del line["layer"], line["backward"]
    for collective in found["collectives"]:
        del collective["op_name"]
    for reason in found["reasons"] or ():
        # "NAME [SIZES] LAYER", "NAME LAYER", or of a collective "NAME, NAME".
        shown = re.match(r".*?\]|\S+(?:, \S+)*", reason["matmul"])
        reason["matmul"] = shown[0]
        del reason["layer"]
    text = json.dumps(found, indent=1, ensure_ascii=False)
    if names:
        old = {new: old for old, new in names.instructions.items()}
        text = re.sub(r"[\w.\-]+\.of\d+", lambda m: old.get(m[0], m[0]), text)
        for argument, new in names.arguments.items():
            text = text.replace(json.dumps(new, ensure_ascii=False)[1:-1], argument)
    return text


def under_other_names(seen: Inspection) -> tuple[Inspection, Names]:
    """An inspection of the same program with other names in each of its texts, and the names."""
    names = Names({}, {}, {})
    module = parse_hlo_module(renamed(seen.module.text, names))
    stages = tuple(
        dataclasses.replace(stage, text=renamed(stage.text, names)) for stage in seen.stages
    )
    # A saved program comes without PTX, which is not the same as with none.
    ptx = None if seen.ptx is None else renamed_ptx(seen.ptx, names)
    told = {"note": seen.note, "remark": seen.remark, "stages": stages, "ptx": ptx}
    other = Inspection(module, **told, chip=seen.chip, mesh=seen.mesh)
    return other, names
