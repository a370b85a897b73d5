"""Did I get the fused FP8 kernel? One row for every matrix multiplication of a program, with what stayed outside."""

import dataclasses
import html
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from fp8lens.cost import launches, moved
from fp8lens.gemms import GemmRow, executions, fused, fusion_kind, matmuls, results
from fp8lens.hlo.parse import Computation, HloModule, Instruction, parse_hlo_module
from fp8lens.steps import POINTWISE, depends, is_zero, reducer

_VIEWS = frozenset("bitcast get-tuple-element reshape opt-barrier".split())
_MOVES = _VIEWS | frozenset("copy transpose slice dynamic-slice pad broadcast concatenate tuple".split())
_SUPPLY = _MOVES | frozenset("parameter constant convert iota".split())
_SCALING = frozenset("multiply divide".split())
_SCALAR = _SUPPLY | _SCALING | frozenset("add subtract negate power sqrt rsqrt".split())
# The last two types of `wgmma.mma_async...f32.e4m3.e4m3` and `mma...f32.e4m3.e4m3.f32`: what is multiplied.
# Blackwell's `tcgen05.mma...kind::f16` names a kind: of f8f6f4, the operands say which.
_MMA = re.compile(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(?:\w+\.)*?(e4m3|e5m2|bf16|f16|tf32|s8|u8|f64)\.\w+\b"
                  r"|\btcgen05\.mma\S*?kind::(?:(f16|tf32|i8)|f8f6f4|mxf8f6f4)")
_PTX_TYPES = {"e4m3": "f8e4m3fn", "e5m2": "f8e5m2"}


@dataclasses.dataclass(frozen=True)
class Outside:
    """A kernel on a matmul's way that it could have done without. `work`: what the kernel does there, of "fp8"
    (dequantizes an operand), "transpose", "pad", "scale", "bias", "epilogue" (an activation), "amax", "output" (clamps
    or narrows the result)."""

    instruction: Instruction
    work: tuple[str, ...]


def _inside(i: Instruction) -> list[Instruction]:
    """What a kernel computes, parameters included: the fused instructions, or the instruction alone."""
    computation = fused(i)
    return list(computation) if computation else [i]


def _layout_changes(i: Instruction) -> bool:
    before = i.computation[i.operands[0]].shape
    return i.opcode == "transpose" or (i.opcode == "copy" and i.shape.layout != before.layout)


def _moving(inside: list[Instruction]) -> str | None:
    """"transpose", or "pad" for what makes FP8 operands multiples of 16 long or undoes it; None for other moves."""
    for i in inside:
        if i.opcode in ("transpose", "copy") and _layout_changes(i):
            return "transpose"
    for i in inside:
        if i.opcode in ("pad", "slice"):
            small, large = i.shape.dims, i.computation[i.operands[0]].shape.dims
            small, large = (large, small) if i.opcode == "pad" else (small, large)
            if all(b in (a, -a % 16 + a) for a, b in zip(small, large)) and not re.search(r"\[[1-9]\d*:", i.cmd):
                return "pad"
    return None


def _before(i: Instruction, role: str) -> tuple[str, ...]:
    """What a kernel does that makes an operand; `role` is "matrix", "scale" or "bias". Empty where it must run."""
    inside = _inside(i)
    opcodes = {j.opcode for j in inside} if fused(i) else {i.opcode}
    work = [j for j in inside if j.opcode not in ("parameter", "constant")]
    if role == "scale":
        return ("scale",) if opcodes <= _SCALAR and all(s.size == 1 for s in results(i)) and opcodes & (
            _SCALING | {"convert"}) else ()
    if role == "bias":
        return ("bias",) if opcodes <= _SUPPLY | _SCALING and opcodes & (_SCALING | {"convert", "broadcast"}) else ()
    if opcodes <= _MOVES | {"parameter", "constant"} and (moved := _moving(work)):
        return (moved,)
    if opcodes <= _SUPPLY | POINTWISE and all(s.dtype[:2] != "f8" for s in results(i)) and _from_fp8(i):
        return ("fp8",)
    return ()


def _from_fp8(i: Instruction, steps: int = 4) -> bool:
    """Whether a kernel reads FP8, or what a few kernels that only convert, scale and move made of it."""
    if i.shape.dtype.startswith("f8") and i.shape.size > 1:
        return True
    return steps > 0 and {j.opcode for j in _inside(i)} <= _SUPPLY | POINTWISE and any(
        _from_fp8(i.computation[name], steps - 1) for name in i.operands)


def _after(i: Instruction, value: str, mark: str, around: "Neighbours",
           gemm: Instruction) -> tuple[tuple[str, ...], tuple]:
    """What a kernel does with the result named `value`, empty where it must run anyway; and what then each of the
    kernel's own results is: the "value", "abs" of it, its "amax", or None."""
    computation = fused(i)
    live: dict[str, str] = {}
    if computation:
        live |= {p.name: mark for p, name in zip(computation.parameters, i.operands) if name == value}
        inside = list(computation)
    else:
        live[value] = mark
        inside = [i]

    def of_result(origin: Instruction) -> bool:
        """Whether a value, in the kernel or around it, comes from the matmul."""
        if origin.computation is not i.computation:
            if origin.opcode != "parameter":
                return False
            origin = i.computation[i.operands[origin.parameter_number]]
        return depends(origin, gemm)

    size = i.computation[value].shape.size
    work, moves, derived = [], [], set()  # derived: of scalars and vectors alone, whatever its shape
    for j in inside:
        sources = [live[name] for name in j.operands if name in live]
        if not sources:
            # What does not come from the matmul may only prepare scales and biases.
            of_vectors = j.opcode != "parameter" and derived.issuperset(j.operands)
            if j.opcode in ("broadcast", "constant", "iota") or of_vectors or 2 * j.shape.size <= size:
                derived.add(j.name)
            if not (j.opcode in _SUPPLY or (j.opcode in _SCALAR and j.name in derived)):
                return (), ()
            continue
        state = "amax" if "amax" in sources else "abs" if "abs" in sources else "value"
        others = [j.computation[name] for name in j.operands if name not in live]
        live[j.name] = state
        if j.opcode in ("slice", "dynamic-slice") and _moving([j]) != "pad":
            return (), ()  # of a part of the result, which no call has on its own
        if j.opcode in _MOVES:
            moves.append(j)
        elif j.opcode == "convert":
            narrower = j.shape.bits < j.computation[j.operands[0]].shape.bits
            alone = all(k.opcode in ("parameter", "convert", "bitcast") for k in inside)
            work += ["amax" if state == "amax" else "output"] if narrower or alone or state == "amax" else []
        elif j.opcode == "reduce":
            # Of all elements it is an amax however it is written; of some, softmax takes a maximum too.
            positive = state != "value" or "epilogue" in work or j.shape.size == 1 or around.goes_on_to_a_scalar(i)
            if reducer(j) not in ("maximum", "minimum") or not positive:
                return (), ()
            work.append("amax")
            live[j.name] = "amax"
        elif state == "amax" and j.shape.size == 1 and j.opcode in ("negate", "maximum", "minimum", "abs") and all(
                of_result(other) for other in others):
            work.append("amax")
        elif state == "amax" or j.opcode not in POINTWISE:
            return (), ()
        elif j.opcode == "abs":
            live[j.name] = "abs"
        else:
            kind = _pointwise(j, others, of_result, derived)
            if not kind:
                return (), ()
            work.append(kind)
    if not work and moves:
        moved = _moving(moves)
        work = [moved] if moved else []
    root = computation.root if computation else i
    made = root.operands if root.opcode == "tuple" else (root.name,)
    return tuple(dict.fromkeys(work)), tuple(live.get(name) for name in made)


def _pointwise(j: Instruction, others: list[Instruction], of_result: Callable[[Instruction], bool],
               derived: set[str]) -> str | None:
    """What one elementwise instruction on the result is part of; None where it needs another matrix's elements."""
    vector = constant = None
    for other in others:
        origin = other
        while origin.opcode in ("convert", "bitcast", "reshape", "broadcast", "copy") and origin.operands:
            if origin.opcode == "broadcast":
                vector = origin.computation[origin.operands[0]].shape.size > 1 or vector
            origin = origin.computation[origin.operands[0]]
        constant = origin if origin.opcode == "constant" else constant
        if other.name in derived and origin.shape.size > 1:
            vector = True
        elif origin.shape.size == j.shape.size > 1 and j.opcode not in ("add", "subtract"):
            return None
        if of_result(origin):
            return None
    if j.opcode in ("clamp", "minimum"):
        return "output"
    if j.opcode == "maximum":
        return "epilogue" if is_zero(constant) else "output"
    if j.opcode in _SCALING and others:
        return "epilogue" if j.opcode == "divide" and j.operands[0] in {o.name for o in others} else "scale"
    if j.opcode in ("add", "subtract") and others and not (constant is not None and not vector):
        return "bias"
    return "epilogue"


class Neighbours:
    """Who uses what in one computation, and which values come from a matmul."""

    def __init__(self, computation: Computation, rows: list[GemmRow]):
        self.computation, self.users = computation, computation.users
        self.multiplies = {row.name for row in rows}

    def outside(self, row: GemmRow) -> list[Outside]:
        found: dict[str, Outside] = {}
        self._before(row.instruction, found)
        self._after(row, found)
        return sorted(found.values(), key=lambda o: o.instruction.index)

    def _before(self, gemm: Instruction, found: dict[str, Outside]) -> None:
        todo = []
        for index, name in enumerate(gemm.operands):
            scalar = self.computation[name].shape.size == 1
            matrix = index < 2 if gemm.opcode == "custom-call" else True
            todo.append((name, "scale" if scalar else "matrix" if matrix else "bias"))
        while todo:
            name, role = todo.pop()
            i = self.computation[name]
            while i.opcode in _VIEWS and i.operands:
                i = self.computation[i.operands[0]]
            if i.name in found or i.name in self.multiplies or not launches(i) or not _is_plain(i):
                continue
            if work := _before(i, role):
                found[i.name] = Outside(i, work)
                todo += [(operand, role) for operand in i.operands]

    def _after(self, row: GemmRow, found: dict[str, Outside]) -> None:
        reached: dict[str, tuple] = {row.name: ("value", "amax" if row.amax else None)}  # a mark for each result
        todo = [row.name]
        while todo:
            name = todo.pop()
            for user in self.users.get(name, ()):
                if user.name in reached or user.name in self.multiplies:
                    continue
                if user.opcode in _VIEWS:
                    index = re.search(r"\bindex=(\d+)", user.cmd) if user.opcode == "get-tuple-element" else None
                    marks = reached[name]
                    if index:
                        marks = marks[int(index[1]):int(index[1]) + 1]
                    if marks and marks[0]:
                        reached[user.name] = marks
                        todo.append(user.name)
                elif reached[name][0] and launches(user) and _is_plain(user):
                    work, made = _after(user, name, reached[name][0], self, row.instruction)
                    if work:
                        found.setdefault(user.name, Outside(user, work))
                        reached[user.name] = made
                        todo.append(user.name)

    def goes_on_to_a_scalar(self, kernel: Instruction) -> bool:
        """Whether other kernels reduce to one element what this one leaves."""
        users = [u for name in (kernel.name, *(v.name for v in self.users.get(kernel.name, ()) if v.opcode in _VIEWS))
                 for u in self.users.get(name, ()) if u.opcode not in _VIEWS]
        return any(u.opcode != "tuple" and u.shape.size == 1 and any(j.opcode == "reduce" for j in _inside(u))
                   for u in users)


def _is_plain(i: Instruction) -> bool:
    """A kernel, of those without a matmul, that XLA generated for elementwise work, moves or reductions: no library
    call, no collective."""
    return i.opcode in POINTWISE | _SUPPLY | {"fusion", "reduce"}


@dataclasses.dataclass(frozen=True, repr=False)
class GemmReport:
    """Every matrix multiplication of a program, ENTRY's first. Prints as text, shows as a table in a notebook.

    `kernels` and `bytes_moved` count what the whole program launches and moves, loops as often as they run where that
    is known and else once; `unread` names custom calls that are no matmuls to HLO: convolutions, hand-written kernels,
    other libraries; what they multiply, if anything, is not counted. `note` says what the program was compiled for, or
    why the rows are not a GPU's.
    """

    rows: tuple[GemmRow, ...]
    kernels: int = 0
    bytes_moved: int = 0
    unread: tuple[str, ...] = ()
    note: str = ""

    @property
    def flops(self) -> int:
        """2*M*N*K of all rows, as often as they run."""
        return _flops(self.rows)

    @property
    def fp8_flops(self) -> int:
        """Those of `flops` that the hardware multiplies in an 8-bit float type."""
        return _flops(self.fp8_rows)

    @property
    def fp8_flops_share(self) -> float:
        """fp8_flops / flops, from 0 to 1; 0 for a program without a matrix multiplication."""
        return self.fp8_flops / self.flops if self.flops else 0.0

    @property
    def fp8_rows(self) -> tuple[GemmRow, ...]:
        return tuple(row for row in self.rows if row.is_fp8)

    def _lines(self) -> list[tuple[GemmRow, tuple[str, ...], list[str]]]:
        """(row, cells, further lines), rows alike in all they show but their layer taken together."""
        groups: dict[tuple, list[GemmRow]] = {}
        for row in self.rows:
            alike = dataclasses.replace(row, name="", outside=tuple(_bare(n) for n in row.outside), instruction=None,
                                        op_name="", count=None if row.count is None else 1)
            groups.setdefault(alike, []).append(row)
        lines = []
        for rows in groups.values():
            counts, paths = [row.count for row in rows], list(dict.fromkeys(row.path for row in rows if row.path))
            further = [f"in {', '.join(paths[:4])}" + f" and {len(paths) - 4} more" * (len(paths) > 4)] * bool(paths)
            if rows[0].outside:
                each = " in each" if len(rows) > 1 else ""
                further.append(f"outside{each}: {', '.join(rows[0].outside)}: {_size(rows[0].outside_bytes)}")
            lines.append((rows[0], ("?" if None in counts else str(sum(counts)), *_cells(rows[0])), further))
        return lines

    def _totals(self) -> str:
        share = f"{100 * self.fp8_flops_share:.1f}%".replace("100.0%", "100%") if self.fp8_flops else "none"
        text = f"{len(self.rows)} matmul{'s' * (len(self.rows) != 1)}, {len(self.fp8_rows)} in FP8"
        if self.rows:
            text += f" ({share} of {_metric(self.flops)}FLOP)"
        text += f"; {self.kernels} kernel{'s' * (self.kernels != 1)}, {_size(self.bytes_moved)} moved"
        if any(row.count is None for row in self.rows):
            text += "; loops of unknown length counted once"
        text += f"; not looked into: {', '.join(self.unread)}" if self.unread else ""
        return text + (f"\n{self.note}" if self.note else "")

    def __str__(self) -> str:
        lines = self._lines()
        table = [_HEADER, *(cells for _, cells, _ in lines)]
        shown = [c for c in range(len(_HEADER)) if c or any(row[0] != "1" for row in table[1:])]
        widths = [max(len(row[c]) for row in table) for c in range(len(_HEADER))]
        if sum(widths[c] + 2 for c in shown) - 2 > _WIDTH:
            shown.remove(_SOURCE)
        text = []
        for row, (_, _, further) in zip(table, [(None, (), []), *lines]) if lines else ():
            text.append("  ".join(f"{row[c]:>{widths[c]}}" if c in (0, 1) else f"{row[c]:<{widths[c]}}"
                                  for c in shown).rstrip())
            if further and _SOURCE not in shown and row[_SOURCE] or row is not _HEADER and _SOURCE not in shown:
                further = [f"at {row[_SOURCE]}", *further] if row[_SOURCE] else further
            for line in further:
                text += textwrap.wrap(line, _WIDTH, initial_indent="    ", subsequent_indent=" " * 6,
                                      break_long_words=False, break_on_hyphens=False)
        for line in self._totals().split("\n"):
            text += textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(text)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        style = "text-align:left;vertical-align:top"
        rows = ["<tr>" + "".join(f'<th style="{style}">{html.escape(text)}</th>' for text in _HEADER) + "</tr>"]
        for row, cells, further in self._lines():
            tint = f' style="background:{_LOST}"' if not row.is_fp8 else ""
            texts = "".join(f'<td style="{style}">{html.escape(text)}</td>' for text in cells)
            rows.append(f"<tr{tint}>{texts}</tr>")
            for line in further:
                tint = f";background:{_OUTSIDE}" if line.startswith("outside") else ""
                rows.append(f'<tr><td style="{style};padding-left:3em{tint}" colspan="{len(_HEADER)}">'
                            f"{html.escape(line)}</td></tr>")
        legend = "".join(f'<span style="background:{colour}">&nbsp;{text}&nbsp;</span> ' for colour, text, there in (
            (_LOST, "not FP8", any(not row.is_fp8 for row in self.rows)),
            (_OUTSIDE, "FP8, and work left outside", any(row.outside for row in self.rows))) if there)
        table = f"<table>{''.join(rows)}</table>" if self.rows else ""
        return f"{table}<p>{legend}{html.escape(self._totals())}</p>"


_LOST, _OUTSIDE = "rgba(213,94,0,.28)", "rgba(86,180,233,.22)"
_WIDTH = 100  # columns
_HEADER = ("runs", "M x N x K", "operands", "multiplied in", "by", "epilogue", "result", "source")
_SOURCE = _HEADER.index("source")


def _cells(row: GemmRow) -> tuple[str, ...]:
    shape = f"{row.m} x {row.n} x {row.k}"
    operands = row.lhs_dtype if row.lhs_dtype == row.rhs_dtype else f"{row.lhs_dtype}, {row.rhs_dtype}"
    extras = [f"scales {''.join(row.scales)}"] * bool(row.scales) + [f"alpha {row.alpha:g}"] * (row.alpha != 1)
    extras += [f"beta {row.beta:g}"] * (row.beta != 0) + ["amax"] * row.amax
    extras += [f"precision {row.precision}"] * (row.precision != "DEFAULT") + [row.algorithm] * bool(row.algorithm)
    return (f"{row.batch} of {shape}" if row.batch > 1 else shape, operands, row.math_dtype,
            row.library + f" {row.tile}" * bool(row.tile), " ".join([row.epilogue, *extras]), row.out_dtype, row.source)


def _bare(name: str) -> str:
    return re.sub(r"[.\d]+$", "", name)


def _flops(rows: tuple[GemmRow, ...]) -> int:
    return sum(row.flops * (1 if row.count is None else row.count) for row in rows)


def _metric(x: float) -> str:
    if x >= 1e18:
        return f"{Decimal(x):.2e} "  # of nested loops: more than a float holds
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= scale:
            return f"{x / scale:.3g} {prefix}"
    return f"{x:.3g} "


def _size(n: int) -> str:
    return f"{_metric(n)}B"


def report_gemms(x: Any, *args: Any, verify_mma: bool = False, **options: Any) -> GemmReport:
    """What became of every matrix multiplication: one `GemmRow` each, wherever it is, as a `GemmReport`.

    `x` is what `parse_hlo_module` takes (a Compiled, an HloModule, HLO text; of a Lowered or another module that is not
    optimized, the rows are its dots), or a function, compiled as by `aot_compile`, whose `args` and `options` it takes:
    target="H100", gemm="cublaslt", mesh_shape, in_specs, compiler_options. Sharded, the rows are one device's.

    A Triton kernel's `math_dtype` is what its dot multiplies; a dot of FP8 types may still run in wider ones. With
    `verify_mma`, which needs a function, it is read from the multiply instructions of the kernel's PTX.

    Raises TypeError for `args` or `verify_mma` without a function, HloParseError for text that is not HLO, and what
    `aot_compile` raises.
    """
    ptx: Mapping[str, str] | None = None
    note = _not_a_gpus(x)
    if callable(x) and not hasattr(x, "as_text"):
        from fp8lens.compile import aot_compile
        from fp8lens.stages import dumped

        if verify_mma:
            x, _, ptx = dumped(x, *args, **options)
        else:
            x = aot_compile(x, *args, **options)
        chip, gemm = options.get("target", "H100"), options.get("gemm", "cublaslt")
        note = f"compiled for {getattr(chip, 'name', chip)}, gemm={gemm!r}"
    elif args or verify_mma or options:
        what = "verify_mma" if verify_mma else next(iter(options), "further arguments")
        raise TypeError(f"{what}: only with a function and its arguments, to compile it; got {type(x).__name__}.")
    elif not (isinstance(x, (str, HloModule)) or hasattr(x, "as_text")):
        raise TypeError(f"got {type(x).__name__}: give a function and its arguments, a Compiled, or HLO text.")
    module = parse_hlo_module(x)
    if not note and module.attributes.get("is_scheduled") != "true":
        note = "not optimized: these are the program's dots as written, not what a GPU runs"
    rows = tuple(row for row, _ in gemms_and_outside(module, ptx))
    multiply, unread, count, total = {row.instruction for row in rows}, [], 0, 0
    for name, times in executions(module).items():
        times = 1 if times is None else times
        for i in module.computations[name]:
            if launches(i):
                count += times
                total += moved(i) * times
                target = i.custom_call_target or "__cub$"
                if not target.startswith("__cub$") and i not in multiply:
                    unread.append(i.name)
    if not verify_mma and any(row.library == "triton" and row.is_fp8 for row in rows):
        note += "; " * bool(note) + "of Triton's kernels, what the dot says: verify_mma=True reads the instruction"
    return GemmReport(rows, count, total, tuple(unread), note)


def _not_a_gpus(x: Any) -> str:
    """A note on what JAX compiled for the CPU."""
    if not hasattr(x, "input_shardings"):
        return ""
    import jax

    shardings = jax.tree.leaves(x.input_shardings)
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    return "compiled for the CPU, which says nothing of a GPU: give the function" if platforms == {"cpu"} else ""


def gemms_and_outside(
        module: HloModule, ptx: Mapping[str, str] | None = None) -> Iterator[tuple[GemmRow, list[Outside]]]:
    """The rows of a module's report, each with the kernels left outside and what they do. `ptx` of kernels by name."""
    for name, times in executions(module).items():
        computation = module.computations[name]
        rows = [dataclasses.replace(row, count=times) for i in computation for row in matmuls(i)]
        around = Neighbours(computation, rows) if rows else None
        for row in rows:
            try:
                outside = around.outside(row)
            except LookupError as error:
                raise row.instruction.error("the instructions around this matmul contradict each other") from error
            math_dtype = _multiplied(row, ptx) if ptx is not None and row.library == "triton" else row.math_dtype
            yield dataclasses.replace(
                row, outside=tuple(o.instruction.name for o in outside), math_dtype=math_dtype,
                outside_bytes=sum(moved(o.instruction) for o in outside)), outside


def _multiplied(row: GemmRow, ptx: Mapping[str, str]) -> str:
    """The type that a Triton kernel's PTX multiplies. Kernels that are alike share one PTX, under the name of one."""
    def computed(i: Instruction) -> tuple:
        return [(j.opcode, j.shape_text) for j in fused(i)], i.backend_config
    texts = [ptx.get(re.sub(r"[.-]", "_", row.name))]
    if not texts[0]:
        alike = [i for i in row.instruction.computation.module
                 if i.opcode == "fusion" and "triton" in fusion_kind(i) and computed(i) == computed(row.instruction)]
        texts = [ptx[name] for i in alike if (name := re.sub(r"[.-]", "_", i.name)) in ptx]
    mma = _MMA.search(texts[0]) if texts and texts[0] else None
    if not mma:
        return "unknown" if not texts or not texts[0] else row.math_dtype if "fma." not in texts[0] else "f32"
    if mma[1]:
        return _PTX_TYPES.get(mma[1], mma[1])
    if not mma[2]:  # kind::f8f6f4
        return row.math_dtype
    return {"f16": "bf16" if row.math_dtype == "bf16" else "f16", "i8": "s8"}.get(mma[2], mma[2])
