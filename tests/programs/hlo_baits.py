"""HLO texts made by hand: long words in every place, programs that grow, and one bait for each
weakness that the inspector once had and the grammar does not come to by itself."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.programs.hlo_grammar import FP8_GEMM, MARK

SAVED = Path(__file__).resolve().parent.parent / "fp8lens" / "hlo"
HEADER = "HloModule m, is_scheduled=true"  # as of what XLA has compiled


def module(*lines: str, before: str = "", shape: str = "f32[8]") -> str:
    """A program of one parameter, %p = f32[8]; `before`: other computations."""
    body = "".join(f"  {line}\n" for line in lines)
    return (
        f"{HEADER}\n\n{before}ENTRY %main (p: f32[8]) -> {shape} {{\n"
        f"  %p = f32[8] parameter(0)\n{body}}}\n"
    )


def computation(name: str, *lines: str) -> str:
    """A computation of one parameter."""
    body = "".join(f"  {line}\n" for line in lines)
    return f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n{body}}}\n\n"


ROOT = "ROOT %r = f32[8] negate(%p)"
CONDITION = (
    "%cond (p: f32[8]) -> pred[] {\n  %p = f32[8] parameter(0)\n"
    "  ROOT %c = pred[] constant(true)\n}\n\n"
)
BODY = "%body (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8] parameter(0)\n}\n\n"
ESCAPED = r"\033[31m\007\x1b[2J\302\233\342\200\256" + "\x1b[1m\x9b\u202e\u2066" + MARK + "$x$"
TARGET = "custom_call_target"


def dot(name: str, a: str, b: str, root: bool = False) -> str:
    """A product of two vectors."""
    start = "ROOT " if root else ""
    dims = "lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    return f"{start}%{name} = f32[] dot(%{a}, %{b}), {dims}"


def sent(groups: str, n: int = 1, before: str = "HloModule m, num_partitions=8") -> str:
    """A program that gathers n times, and multiplies what it has. @ in `groups`: 0, 1, ..."""
    lines = [
        f"%g{k} = f32[8] all-gather(%p), channel_id={k + 1}, dimensions={{0}}, "
        + groups.replace("@", str(k))
        for k in range(n)
    ]
    text = module(*lines, dot("r", "g0", f"g{n - 1}", root=True))
    return text.replace("HloModule m", before, 1)


def fp8_call(k: int, operand: str, epilogue: str = "DEFAULT", more: str = "") -> str:
    """A call of cuBLASLt's FP8 matmul."""
    dims = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}'
    config = (
        f'{{"gemm_backend_config":{{"alpha_real":1,"beta":0,"epilogue":"{epilogue}",'
        f'"dot_dimension_numbers":{dims}}}}}'
    )
    return (
        f"%c{k} = (f32[16,16], s8[64]) custom-call(%{operand}, %{operand}, %s), "
        f'{TARGET}="{FP8_GEMM}", backend_config={config}{more}'
    )


def fp8(epilogue: str = "DEFAULT", more: str = "", n: int = 1) -> str:
    """FP8 calls in a row, each with a kernel before it and one behind it."""
    lines = ["%s = f32[] constant(1)", "%q = f32[16,16] broadcast(%p), dimensions={0}"]
    for k in range(n):
        before = f"o{k - 1}" if k else "q"
        lines += [
            f"%a{k} = f8e4m3fn[16,16] convert(%{before})",
            fp8_call(k, f"a{k}", epilogue, more),
            f"%e{k} = f32[16,16] get-tuple-element(%c{k}), index=0",
            f"%o{k} = f32[16,16] tanh(%e{k})",
        ]
    return module(*lines, f"ROOT %r = f32[16,16] negate(%o{n - 1})", shape="f32[16,16]")


# Long words -----------------------------------------------------------------------------------

LINES = {  # of a word that may be long, @, in an instruction
    "shape": "f32[@] negate(%p)",
    "type": "f@[8] negate(%p)",
    "layout": "f32[8]{@} negate(%p)",
    "tuple": "(@) negate(%p)",
    "opcode": "f32[8] n@(%p)",
    "operand": "f32[8] negate(@%p)",
    "operand's shape": "f32[8] negate(f32[8] @ %p)",
    "element": "f32[8] negate(%p@)",
    "index": "f32[8] get-tuple-element(%p), index=@",
    "literal": "f32[8] constant(@)",
    "number": "f32[8] parameter(@)",
    "key": "f32[8] negate(%p), @=1",
    "value": "f32[8] negate(%p), a=@",
    "list": "f32[8] negate(%p), a={@}",
    "string": 'f32[8] negate(%p), a="@"',
    "sharding": "f32[8] negate(%p), sharding={@}",
    "slice": "f32[8] slice(%p), slice={@}",
    "dimensions": "f32[8] broadcast(%p), dimensions={@}",
    "call": "f32[8] call(%p), to_apply=%@",
    "fusion": "f32[8] fusion(%p), calls=%@",
    "contracted": "f32[] dot(%p, %p), lhs_contracting_dims={@}",
    "metadata": "f32[] dot(%p, %p), metadata={@}",
    "op_name": 'f32[] dot(%p, %p), metadata={op_name="a/@/b"}',
    "source": 'f32[] dot(%p, %p), metadata={source_file="/a/@" source_line=1}',
    "line": 'f32[] dot(%p, %p), metadata={source_file="a" source_line=@}',
    "frame": "f32[] dot(%p, %p), metadata={stack_frame_id=@}",
    "groups": "f32[8] all-gather(%p), dimensions={0}, replica_groups=@",
    "groups' list": "f32[8] all-gather(%p), dimensions={0}, replica_groups={@}",
    "group": "f32[8] all-gather(%p), dimensions={0}, replica_groups={{@}}",
    "iota": "f32[8] all-gather(%p), dimensions={0}, replica_groups=[1,8]<=[@]",
    "mesh": "f32[8] all-gather(%p), dimensions={0}, replica_groups=mesh[@] {a}",
    "axes": "f32[8] all-gather(%p), dimensions={0}, replica_groups=mesh['a'=8] {@}",
    "axis": "f32[8] all-gather(%p), dimensions={0}, replica_groups=mesh['a'=@] {a}",
    "pairs": "f32[8] collective-permute(%p), source_target_pairs={@}",
    "target": 'f32[8] custom-call(%p, %p), custom_call_target="@"',
    "configuration": "f32[8] custom-call(%p, %p), backend_config={@}",
    "quoted configuration": 'f32[8] custom-call(%p, %p), backend_config="{@}"',
    "configuration's value": 'f32[8] custom-call(%p, %p), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"epilogue":@}}',
    "matrix instruction": "f32[8] custom-call(%p), custom_call_target="
    '"mosaic_gpu_v2", backend_config={"a":"wgmma.mma_async.sync.aligned.@"}',
    "behind": "f32[8] negate(%p) @",
}
PLAIN = module("ROOT %n = f32[8] negate(%p)")
LOOP = module(
    "ROOT %n = f32[8] while(%p), condition=%cond, body=%body, backend_config="
    '{"known_trip_count":{"n":"4"}}',
    before=BODY + CONDITION,
)
LINE = "ROOT %n = f32[8] negate(%p)"
GEMM = fp8()


def named(name: str) -> str:
    """A program with the name for its matmul, and for a kernel that the matmul did not take in."""
    return module(
        "%s = f32[] constant(1)",
        "%x = f8e4m3fn[16,16] parameter(1)",
        f"%a{name} = f8e4m3fn[16,16] transpose(%x), dimensions={{1,0}}",
        fp8_call(0, f"a{name}").replace("%c0", f"%c{name}"),
        f"ROOT %e = f32[16,16] get-tuple-element(%c{name}), index=0",
        shape="f32[16,16]",
    )


PLACES: dict[str, Callable[[str], str]] = {  # to a text with a word in that place
    **{
        place: lambda word, line=line: PLAIN.replace(LINE, f"ROOT %n = {line.replace('@', word)}")
        for place, line in LINES.items()
    },
    "name": named,
    "module": lambda word: PLAIN.replace("HloModule m", f"HloModule m{word}"),
    "header": lambda word: PLAIN.replace(HEADER, f"{HEADER}, a={word}"),
    "header's list": lambda word: PLAIN.replace(HEADER, f"{HEADER}, a={{{word}}}"),
    "header's string": lambda word: PLAIN.replace(HEADER, f'{HEADER}, a={{b="{word}"}}'),
    "devices": lambda word: sent("replica_groups={}", 1, f"HloModule m, num_partitions={word}"),
    "file": lambda word: PLAIN.replace(HEADER, f'{HEADER}\n\nFileNames\n1 "{word}"\n'),
    "between": lambda word: PLAIN.replace(HEADER, f"{HEADER}\n\n{word}\n"),
    "signature": lambda word: PLAIN.replace("(p:", f"(p{word}:"),
    "signature's shape": lambda word: PLAIN.replace("(p: f32[8", f"(p: f32[8{word}"),
    "computation": lambda word: PLAIN.replace("%main", f"%main{word}"),
    "trip count": lambda word: LOOP.replace('"4"', f'"{word}"'),
    "epilogue": lambda word: GEMM.replace('"DEFAULT"', f'"{word}"'),
    "factor": lambda word: GEMM.replace('"alpha_real":1', f'"alpha_real":{word}'),
    "layer": lambda word: fp8(more=f', metadata={{op_name="jit(f)/{word}/a"}}'),
}
UNITS = (
    "a", "a.", ".1", ".clone", "9", "1,", "-1,", "2]", "a=", "a=1 ", "a, ", "%a, ", " ", "\t",
    "/*", "*/", "/**/", "//", '"', '\\"', "\\", "\\n", "()", "[]", "{}", "(", "[", "{", "<", ")",
    "{0},", "{0} ", "{0,1},", "a[", "a[1]", "a[1]{0}", "(a)", "#0", "$", "'", "/a", "vmap(", "é",
    "\u202e", "\\033[31m", "T(", "<=[", "f32[8],", '"a":', "'a'=2,", ".py/", "site-packages/", MARK,
    "mesh[", "], device_ids=(", "aligned.", "wgmma.mma_async.sync.aligned.",
)  # fmt: skip
TAILS = ("", "x")  # what ends a word: a search that had nearly found has to begin again


def words() -> Iterator[tuple[str, Callable[[int], str]]]:
    """Each unit in each place: its name, and the text with a word of so many characters."""
    for (place, put), unit, tail in itertools.product(PLACES.items(), UNITS, TAILS):

        def text(n: int, put=put, unit=unit, tail=tail) -> str:
            return put(unit * (n // len(unit)) + tail)

        yield f"{unit!r} and {tail!r} as {place}", text


# Programs that grow ---------------------------------------------------------------------------


def chained(line: str, n: int, first: str = ROOT) -> str:
    """n computations, each of which calls the one before it; @ in `line` is its number."""
    rest = (computation(f"c{k}", line.replace("@", str(k - 1))) for k in range(1, n))
    return computation("c0", first) + "".join(rest)


def called(line: str, n: int, first: str = ROOT) -> str:
    """A program that calls the last of n such computations."""
    return module(line.replace("@", str(n - 1)), before=chained(line, n, first))


CALLS = {  # of computation c@
    "call": "ROOT %r = f32[8] call(%p), to_apply=%c@",
    "while": "ROOT %r = f32[8] while(%p), condition=%c@, body=%c@",
    "conditional": "ROOT %r = f32[8] conditional(%p, %p, %p), branch_computations={%c@, %c@}",
    "fusion": "ROOT %r = f32[8] fusion(%p), kind=kLoop, calls=%c@",
    "async": "%s = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%c@\n"
    "  ROOT %r = f32[8] async-done(%s)",
    "reduce": "ROOT %r = f32[8] reduce(%p, %p), dimensions={}, to_apply=%c@",
}
SQUARE = "dot(%x@, %x@), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


def doubled(n: int, step: str, first: str = "negate(%p)", last: str = "negate(%x)") -> str:
    """Instructions that each read the one before them twice; %x in `last` is the last one."""
    lines = [f"%x0 = f32[8] {first}"]
    lines += [f"%x{k} = {step.replace('@', f'%x{k - 1}, %x{k - 1}')}" for k in range(1, n)]
    return module(*lines, f"ROOT %r = f32[8] {last.replace('%x', f'%x{n - 1}')}")


def twice(n: int, kind: str) -> str:
    """Computations that each call the one before them twice."""
    line = CALLS[kind].replace("ROOT %r", "%q") + "\n  " + CALLS[kind]
    return called(line, n, f"%n = f32[8] negate(%p)\n  {dot('d', 'n', 'n', root=True)}")


def loops(n: int, trips: int) -> str:
    """Loops in loops, n deep, around a matmul."""
    count = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    line = f"ROOT %r = f32[8] while(%p), condition=%cond, body=%c@, {count}"
    return called(line, n, dot("d", "p", "p", root=True)).replace("%c0 (", CONDITION + "%c0 (", 1)


def shared(fusions: int, steps: int, matmuls: int) -> str:
    """Fusions of one computation, so many steps long, of which so many multiply."""
    inner = ""
    for k in range(steps):
        step = SQUARE if k < matmuls else "tanh(%x@)"
        inner += f"  %x{k + 1} = f32[8,8] {step.replace('@', str(k))}\n"
    before = (
        f"%many (p: f32[8,8]) -> f32[8,8] {{\n  %x0 = f32[8,8] parameter(0)\n{inner}"
        f"  ROOT %d = f32[8,8] negate(%x{steps})\n}}\n\n"
    )
    kind = 'kind=kCustom, calls=%many, backend_config={"fusion_backend_config":{"kind":"__triton"}}'
    lines = ["%q = f32[8,8] broadcast(%p), dimensions={0}"]
    for k in range(fusions):
        read = f"r{k - 1}" if k % 2 else "q"
        lines.append(f"%r{k} = f32[8,8] fusion(%{read}), {kind}")
    last = f"ROOT %r = f32[8,8] negate(%r{min(9, fusions - 1)})"
    return module(*lines, last, before=before, shape="f32[8,8]")


def sum_of_calls(n: int) -> str:
    """FP8 calls of one operand, each added to those before by a kernel of its own."""
    lines = [
        "%s = f32[] constant(1)",
        "%q = f32[16,16] broadcast(%p), dimensions={0}",
        "%a = f8e4m3fn[16,16] convert(%q)",
        "%t = f32[16,16] tanh(%q)",
    ]
    for k in range(n):
        sum_before = f"u{k - 1}" if k else "t"
        lines += [
            fp8_call(k, "a"),
            f"%e{k} = f32[16,16] get-tuple-element(%c{k}), index=0",
            f"%u{k} = f32[16,16] add(%e{k}, %{sum_before})",
        ]
    return module(*lines, f"ROOT %r = f32[16,16] negate(%u{n - 1})", shape="f32[16,16]")


def repeated(line: str, n: int, first: str = "p") -> str:
    """A line n times; $ in it is the name of the line before it."""
    names = [first, *(f"x{k}" for k in range(n - 1))]
    lines = [f"%x{k} = " + line.replace("$", name) for k, name in enumerate(names)]
    return module(*lines, ROOT)


def frames(n: int) -> str:
    """A stack of n frames, and as many matmuls that name the innermost."""
    table = '\n\nFileNames\n1 "a.py"\n\nFileLocations\n1 {file_name_id=1 line=1}\n\nStackFrames\n'
    for k in range(1, n):
        table += f"{k} {{file_location_id=1 parent_frame_id={k + 1}}}\n"
    lines = (f"%n{k} = f32[8] dot(%p, %p), metadata={{stack_frame_id=1}}" for k in range(n))
    return HEADER + table + "\n" + module(*lines, ROOT).partition("\n\n")[2]


def call_of(result: str, operands: str) -> str:
    return f'{result} custom-call({operands}), {TARGET}="x"'


GATHER = "f32[8] all-gather(%$), replica_groups={{0,1}}, dimensions={0}"
CLAMPED = (
    "clamp(%x, %p, %x)\n  %g = f32[8] all-gather(%r), replica_groups={}, dimensions={0}\n  "
    + dot("d", "g", "g")
)
CONTRACTED = "lhs_contracting_dims={0}, rhs_contracting_dims={0}"
# To a program of about n instructions, or n times as much of something else.
GROWING: dict[str, Callable[[int], str]] = {
    **{f"{kind}, deep": lambda n, line=line: called(line, n) for kind, line in CALLS.items()},
    **{
        f"{kind}, twice at each level": lambda n, kind=kind: twice(n, kind)
        for kind in ("call", "while", "conditional")
    },
    **{
        f"very many of {line}": lambda n, line=line: repeated(line, n)
        for line in (
            *("s8[9] copy(%$)", "f32[8] negate(%$)", "f8e5m2[9] convert(%$)"),
            *("s8[9] bitcast(%$)", "f32[] broadcast(%$)", "f32[] reduce(%$)"),
            f"f32[] dot(%$, %p), {CONTRACTED}",
            GATHER,
        )
    },
    "loops in loops": lambda n: loops(n, 10**17),
    "concatenates of themselves": lambda n: doubled(n, "f32[8] concatenate(@), dimensions={0}"),
    "sums, and a clamp of them": lambda n: doubled(
        n, "f32[8] add(@)", "broadcast(%p), dimensions={}", "clamp(%x, %p, %x)"
    ),
    "sums, a clamp of them, gathered": lambda n: doubled(
        n, "f32[8] add(@)", "broadcast(%p), dimensions={}", CLAMPED
    ),
    "products, and a dot of them": lambda n: doubled(
        n, "f32[8] multiply(@)", last=f"dot(%x, %x), {CONTRACTED}"
    ),
    "a dot, and products of it": lambda n: doubled(
        n, "f32[8] multiply(@)", "dot(%p, %p), lhs_contracting_dims={}, rhs_contracting_dims={}"
    ),
    "tuples of themselves": lambda n: doubled(
        n, "(f32[8], f32[8]) tuple(@)", last="get-tuple-element(%x), index=0"
    ),
    "tuples of themselves that are none": lambda n: doubled(n, "f32[8] tuple(@)"),
    "selects of themselves": lambda n: doubled(n, "f32[8] select(%p, @)"),
    "fusions of many matmuls": lambda n: shared(9, n, n),
    "fusions of one matmul": lambda n: shared(n, 20, 1),
    "a sum of calls": sum_of_calls,
    "FP8 calls in a row": lambda n: fp8(n=n),
    "stacks": frames,
    "matmuls of one operand": lambda n: repeated(f"f32[] dot(%p, %p), {CONTRACTED}", n),
    "groups of one kind": lambda n: sent("replica_groups=[1,4]<=[4]", n),
    "one computation called by many": lambda n: module(
        *(f"%r{k} = f32[8] call(%p), to_apply=%c0" for k in range(n)),
        ROOT,
        before=computation("c0", ROOT),
    ),
    "a tuple of many": lambda n: module(
        f"%t = ({', '.join(['f32[8]'] * n)}) tuple({', '.join(['%p'] * n)})",
        *(f"%g{k} = f32[8] get-tuple-element(%t), index={k}" for k in range(n)),
        ROOT,
    ),
    "elements of a wide tuple": lambda n: module(
        f"%t = {call_of(f'({", ".join(["f32[8]"] * n)})', '%p')}",
        *(f"%g{k} = f32[8] negate(%t#{k})" for k in range(n)),
        ROOT,
    ),
    "elements of as many tuples": lambda n: module(
        *(f"%t{k} = {call_of('((f32[8]))', '%p')}\n  %g{k} = f32[8] negate(%t{k}#0#0)"
          for k in range(n)),
        ROOT,
    ),
    "operands": lambda n: module(f"ROOT %t = {call_of('f32[]', ', '.join(['%p'] * 10 * n))}"),
    "a literal": lambda n: module(
        f"ROOT %t = f32[{100 * n}] constant({{{', '.join('1' * (100 * n))}}})"
    ),
    "a literal over lines": lambda n: module(
        f"ROOT %t = f32[{10 * n},2] constant({{\n" + ",\n".join(["  { 1, 2 }"] * 10 * n) + "\n  })"
    ),
    "JSON": lambda n: module(f'{ROOT}, backend_config={{"a":[{"1, " * 30 * n}1]}}'),
    "blank lines": lambda n: module("\n" * 100 * n + ROOT),
}  # fmt: skip

# Of these, some hundred kernels around each matmul are looked at, and no more: the time grows with
# the text only from so many matmuls on that a test of each run would take too long.
FROM_HUNDREDS_ON = {"a sum of calls", "FP8 calls in a row", "fusions of many matmuls"}


# One bait for each weakness -------------------------------------------------------------------


def deep(opening: str, closing: str = "", inner: str = "", n: int = 190) -> str:
    return opening * n + inner + closing * n


OPCODES = (
    "all-gather all-reduce bitcast broadcast call clamp conditional convert copy custom-call dot "
    "dynamic-slice fusion get-tuple-element multiply pad parameter reduce reshape scaled-dot "
    "select slice transpose tuple while"
).split()


def without_operands(opcode: str) -> str:
    """An instruction that reads nothing, before a matmul and behind one, and a collective."""
    return module(
        f"%x = f8e4m3fn[8] {opcode}(), dimensions={{0}}, to_apply=%c0, calls=%c0",
        "%y = f8e4m3fn[8] convert(%p)",
        dot("d", "x", "y"),
        "%b = f32[8] broadcast(%d), dimensions={}",
        f"%z = f32[8] {opcode}(), dimensions={{0}}, index=0",
        "%m = f32[8] multiply(%b, %z)",
        "%g = f32[8] all-gather(%m), replica_groups={}, dimensions={0}",
        dot("r", "g", "x", root=True),
        before=computation("c0", ROOT),
    )


SMALL: dict[str, str] = {
    **{f"{opcode} of nothing": without_operands(opcode) for opcode in OPCODES},
    "reads itself": module("ROOT %b = f32[8] bitcast(%b)"),
    "read each other": module("%a = f32[8] negate(%b)", "ROOT %b = f32[8] negate(%a)"),
    "read before it is there": module("ROOT %a = f32[8] negate(%b)", "%b = f32[8] negate(%p)"),
    "calls itself": module("ROOT %a = f32[8] call(%p), to_apply=%main"),
    "a kernel before a matmul gives nothing": module(
        "%e = () negate(%p)", "%b = f32[8] bitcast(%e)", dot("d", "b", "p", root=True)
    ),
    "a fusion before a matmul gives nothing": module(
        "%e = () fusion(%p), kind=kLoop, calls=%c0",
        "%b = f32[8] get-tuple-element(%e), index=0",
        dot("d", "b", "p", root=True),
        before=computation("c0", ROOT),
    ),
    "a matmul of nothing": module("%e = () copy(%p)", dot("d", "e", "p", root=True)),
    "trip counts whose product is large": loops(9, 10**17 + 1),
    "attention over nothing": (SAVED / "cudnn_attention.hlo")
    .read_text()
    .replace("bf16[2,128,8,64]", "bf16[0,128,8,64]"),
    "sizes whose product is large": module(
        f"ROOT %n = f32[{','.join(['9' * 18] * 300)}] broadcast(%p)"
    ),
    "sizes of nothing times much": module(
        f"%n = f32[0{f',{10**17}' * 300}] broadcast(%p)", dot("r", "n", "n")
    ),
    "bytes whose sum is large": module(
        *(f"%n{k} = c128[{'9' * 18}] broadcast(%p)" for k in range(900)), ROOT
    ),
    "concatenates that double": module(
        *(
            f"%c{k} = f32[{16 << k}] concatenate(%c{k - 1}, %c{k - 1}), dimensions={{0}}".replace(
                "%c-1", "%p"
            )
            for k in range(40)
        ),
        "ROOT %r = f32[8] slice(%c39), slice={[0:8]}",
    ),
    "a rank of ten thousand": module(
        f"%n = f32[{'1,' * 10_000}1] broadcast(%p)",
        f"ROOT %r = f32[] dot(%n, %n), lhs_contracting_dims={{{','.join(map(str, range(9000)))}}}",
    ),
    "tuples that grow": module(
        *(
            f"%t{k} = ({', '.join(['f32[8]'] * k)}) tuple({', '.join(['%p'] * k)})"
            for k in range(60)
        ),
        "ROOT %r = f32[8] get-tuple-element(%t59), index=0",
    ),
    "elements of elements": module(
        f"%n = {call_of(deep('(', ')', 'f32[8]'), '%p')}",
        f"ROOT %r = f32[8] negate(%n{'#0' * 190})",
    ),
    "groups of a million": sent("replica_groups=[1,1048576]<=[1048576]"),
    "groups of many, many times": sent("replica_groups=[@,262144]<=[262144]", 300),
    "devices beyond number": sent(
        "replica_groups=[1,8]<=[8]", 1, "HloModule m, num_partitions=999999999999"
    ),
    "more numbers than devices": sent(
        "replica_groups=mesh['a'=8], device_ids=([65536,65536]T(1,0)) {'a'}"
    ),
    "one dimension again and again": sent("replica_groups=[1,64]<=[8,8]T(0,0,0,0,0,0,0,0,0)"),
    "groups of nothing": sent("replica_groups=[0,0]<=[0]"),
    "a mesh of nothing": sent("replica_groups=mesh['a'=0,'b'=9] {'b'}"),
    "a mesh of a thousand axes": sent(
        f"replica_groups=mesh[{','.join(f'a{k}=1' for k in range(5000))}] {{a1}}"
    ),
    "groups that nearly end": sent(f"replica_groups={{{'{0} ' * 70}x}}"),
    "pairs of many": module(
        "%g = f32[8] collective-permute(%p), source_target_pairs={"
        + ",".join(f"{{{2 * k},{2 * k + 1}}}" for k in range(7000)) + "}",
        ROOT,
    ),
    "a deep literal": module(f"%c = f32[8] constant({deep('{', '}', '0')})", ROOT),
    "a deep configuration": module(f'{ROOT}, backend_config={{"a":{deep("[", "]")}}}'),
    "a deep configuration of MLIR": module(f"{ROOT}, backend_config={{{deep('a={', '}')}}}"),
    "a shape 190 deep": module(f"ROOT %n = {call_of(deep('(', ',)', 'f32[8]'), '%p')}"),
    "a transpose without its dimensions": GEMM.replace(
        "f32[16,16] tanh(%e0)", "f32[16,16] transpose(%e0)"
    ),
    "a transpose of other dimensions": GEMM.replace(
        "f32[16,16] tanh(%e0)", "f32[16,16] transpose(%e0), dimensions={0,7}"
    ),
    "a copy of another rank": GEMM.replace("f32[16,16] tanh(%e0)", "f32[256] copy(%e0)"),
    "a layout of more dimensions": GEMM.replace(
        "f32[16,16] tanh(%e0)", "f32[16,16]{3,1,0} copy(%e0)"
    ),
    "numbers that JSON has not": fp8()
    .replace('"alpha_real":1', '"alpha_real":1e999')
    .replace('"beta":0', '"beta":NaN'),
    "a configuration of other types": module(
        f'ROOT %n = f32[8] custom-call(%p, %p), {TARGET}="{FP8_GEMM}", '
        'backend_config={"gemm_backend_config":[1,{"epilogue":null}]}'
    ),
    **{
        f"{value} for each value of a configuration": re.sub(
            r'(?<=":)(?:"\w*"|\d|\[.*?\])', lambda m, value=value: value, GEMM
        )
        for value in ("null", "[]", "{}", '"x"', "true", "-1", "1e400")
    },
    "a table that goes round": HEADER
    + "\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=2}\n"
    "2 {file_location_id=1 parent_frame_id=1}\n\n"
    + module("ROOT %n = f32[8] negate(%p), metadata={stack_frame_id=1}").partition("\n\n")[2],
    "escapes in a file's name": module(
        "ROOT %n = f32[8] dot(%p, %p), "
        r'metadata={source_file="\033[2J\007x.py" source_line=1}'
    ),
    "escapes everywhere": sent(
        f'replica_groups={{{{0,1}}}}, metadata={{op_name="f/{ESCAPED}/{ESCAPED}" '
        f'source_file="{ESCAPED}.py" source_line=3}}'
    )
    .replace("  %g0", f'  %k = f32[8] custom-call(%p), {TARGET}="{ESCAPED}"\n  %g0')
    .replace("HloModule m", f'HloModule m, a="{ESCAPED}"'),
    "escapes in a call": fp8(
        ESCAPED.replace("\\", r"\\").replace("\x1b", "").replace("\x9b", ""),
        f', sharding={{devices=[2]"{ESCAPED}"}}, metadata={{op_name="jit(f)/{ESCAPED}/a" '
        f'source_file="/site-packages/{ESCAPED}.py" source_line=3}}',
    ),
    "escapes in an opcode": module(f"ROOT %n = f32[8] a\x1b(%p), b=\x1b{MARK}"),
}  # fmt: skip
