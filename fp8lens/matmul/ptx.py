"""What a kernel that XLA generated multiplies, read from its PTX: the multiply instruction names
the types.
"""

import collections
import re
from collections.abc import Mapping

from fp8lens.formats import E2M1, is_fp8, is_narrow
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.program import fusion_body, fusion_kind
from fp8lens.hlo.remember import remembered
from fp8lens.matmul.rows import GemmRow

# What is multiplied: the types after the sum's in `wgmma.mma_async...f32.e4m3.e4m3` and in
# `mma...f32.e4m3.e4m3.f32`. Blackwell's `tcgen05.mma...kind::f16` names a kind; of the kinds f8f6f4
# and mxf8f6f4 the operands say which type. Those with mx have block scales.
_MMA = re.compile(
    r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(?:[\w:]{1,30}\.){0,20}?(?:f16|f32|f64|s32)\."
    r"(?P<type>e4m3|e5m2|e3m2|e2m3|e2m1|bf16|f16|tf32|s8|u8|f64)\.\w+\b"
    r"|\btcgen05\.mma\S{0,200}?kind::(?P<kind>f16|tf32|i8|mxf4nvf4|mxf4|mxf8f6f4|f8f6f4)\b"
)
# As HLO names them. "f8" and "f4" are multiplied at the rate of 8 and of 4 bits; of the kind f8f6f4
# narrower elements are so at that of 8.
_PTX_TYPES = {"e4m3": "f8e4m3fn", "e5m2": "f8e5m2", "i8": "s8"}
_PTX_TYPES |= dict.fromkeys(("e3m2", "e2m3", "e2m1", "f8f6f4", "mxf8f6f4"), "f8")
_PTX_TYPES |= dict.fromkeys(("mxf4", "mxf4nvf4"), "f4")


def _type(mma: re.Match) -> str:
    """The type that one instruction multiplies."""
    if mma["type"] == "e2m1" and "kind::mxf4" in mma[0]:
        return "f4"
    name = mma["type"] or mma["kind"]
    return _PTX_TYPES.get(name, name)


def instructions(text: str) -> tuple[str, ...]:
    """The types that the matrix instructions of a kernel's PTX multiply, as HLO names them; none
    where it has none.
    """
    return tuple(dict.fromkeys(map(_type, _MMA.finditer(text))))


def own_code(call: Instruction, ptx: Mapping[str, str]) -> str:
    """The instructions of somebody's own kernel. Mosaic GPU hands XLA MLIR's bytecode, which has
    each multiply instruction in words. A Triton kernel has PTX, which is here together with that of
    others of its name: XLA numbers them name__1, name__2, and nothing tells which is which.
    """
    target, config = call.custom_call_target or "", call.attributes.get("backend_config", "")
    if target.startswith("mosaic_gpu"):
        return config
    # A Triton kernel's config is MLIR: {name = "add", ...}.
    name = re.search(r'\bname = "([^"]*)"', config)
    if "triton" not in target or not name:
        return ""
    entry = re.compile(rf"{re.escape(_in_ptx(name[1]))}(__\d+)?")
    return "\n".join(text for name, text in ptx.items() if entry.fullmatch(name))


def _computed(i: Instruction) -> tuple[str, ...]:
    """What two Triton kernels have in common that are alike: all but the names."""
    operations = (f"{j.opcode} {j.shape_text}" for j in fusion_body(i))
    return i.attributes.get("backend_config", ""), *operations


@remembered
def _fusions(module: HloModule) -> dict[tuple[str, ...], list[str]]:
    """The Triton kernels of a module by what they compute: their names in PTX."""
    found = collections.defaultdict(list)
    for i in module:
        if "triton" in fusion_kind(i):
            found[_computed(i)].append(_in_ptx(i.name))
    return found


def _in_ptx(name: str) -> str:
    """What PTX calls a kernel."""
    return re.sub(r"[.-]", "_", name)


def multiplied(row: GemmRow, ptx: Mapping[str, str]) -> str:
    """The type that a Triton kernel's PTX multiplies, or somebody's own kernel; of several, one
    that is not FP8. Kernels that are alike share one PTX, under the name of one.
    """
    if row.is_seen:
        text = ptx.get(_in_ptx(row.name))
        if not text:
            alike = _fusions(row.instruction.computation.module)[_computed(row.instruction)]
            text = next((ptx[name] for name in alike if name in ptx), "")
        found = [_of_operands(name, row) for name in instructions(text)]
    else:
        text, found = "", [*instructions(own_code(row.instruction, ptx))]
    if found:
        return next((dtype for dtype in found if not is_narrow(dtype)), found[0])
    if "fma." in text:
        return "f32"
    return "unknown" if row.is_seen and (row.is_fp8 or not text) else row.math_dtype


def _of_operands(name: str, row: GemmRow) -> str:
    """The type of an instruction that leaves it to its operands, or to what the dot says."""
    if name == "f8":
        return next(filter(is_fp8, (row.lhs_dtype, row.rhs_dtype)), name)
    if name == "f4":
        return E2M1.name
    return "bf16" if (name, row.math_dtype) == ("f16", "bf16") else name
