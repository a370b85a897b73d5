"""Attack the inspector: HLO texts with something wrong in them go through everything that reads one.

    python tools/attack/fuzz.py --seconds 60        and for hours, with --seed for other texts; --keep names a folder for finds

An entry has to answer, or to raise HloParseError with a line and a column; the command line, to answer or to refuse in
one sentence: within a second, and within memory that grows with the text. What is shown has no control characters;
HTML, no tags but its own; JSON, no number that JSON has not. All else is a find: its text is kept, and one for each
place is printed.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from fp8lens import (
    TARGETS,
    HloParseError,
    Inspection,
    assert_fp8_collectives,
    assert_fp8_gemms,
    cost,
    diff_hlo,
    format_hlo_module,
    inspect,
    mesh,
    parse_hlo_module,
    print_hlo_module,
    why_not_fp8,
)
from fp8lens.cli import main as main_of_cli
from fp8lens.cost import print_kernels
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import coloured
from fp8lens.stages import Stage, dumped
from helpers.recipes import scaled_dot, to_e4m3

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 1.0  # for a text below 100 kB, in each entry
H100 = TARGETS["H100"]
MEMORY = 1 << 28  # bytes beside what is in use when the attack begins
NUMBERS = (
    "0",
    "-1",
    "1",
    "7",
    "255",
    "4294967296",
    "9223372036854775808",
    "9" * 30,
    "9" * 5000,
    "1e999",
    "nan",
)
MARKS = '()[]{},=%"#\\/*<>: \n\0\x1b\u202e'


OTHERS: dict[
    str, str
] = {}  # of a whole text, the same program before XLA's rewriter, and of that, the compiled one


# Whole texts ----------------------------------------------------------------------------------------------------------


def whole() -> list[str]:
    """Programs to begin from: compiled here, and saved ones of other releases."""
    e4m3, f32, bf16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16
    matrix, scalar = jax.ShapeDtypeStruct((256, 256), e4m3), jax.ShapeDtypeStruct((), f32)
    bias, scales = jax.ShapeDtypeStruct((256,), bf16), [scalar] * 3

    def layer(a, b, bias, a_scale, b_scale, d_scale):
        d = jax.nn.gelu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
        return to_e4m3(d, d_scale), jnp.max(jnp.abs(d))

    def careless(a, b, bias, a_scale, b_scale, d_scale):
        d = jax.nn.silu(jax.lax.dot(a.astype(f32) * a_scale, b.astype(f32)) + bias) * d_scale
        return d.astype(e4m3), jnp.max(jnp.abs(d))

    def loop(a, b, bias, *scales):
        return jax.lax.scan(lambda a, _: (layer(a, b, bias, *scales)[0], None), a, length=4)[0]

    axis = mesh("H100", {"d": 4})
    split = jax.NamedSharding(axis, jax.P("d", None))
    gathered = [jax.ShapeDtypeStruct((256, 256), e4m3, sharding=split)] * 2
    dumps = [
        dumped(fn, matrix, matrix, bias, *scales, pattern="gemm-rewriter")
        for fn in (layer, careless, loop)
    ]
    dumps += [
        dumped(layer, matrix, matrix, bias, *scales, pattern="gemm-rewriter", gemm="triton"),
        dumped(layer, *gathered, bias, *scales, pattern="gemm-rewriter"),
    ]
    for compiled, stages, _ in dumps:
        before = next(stage.text for stage in stages if stage.before.endswith("gemm-rewriter"))
        OTHERS.update({(text := compiled.as_text()): before, before: text})
    return [
        *OTHERS,
        *(path.read_text() for path in sorted((ROOT / "tests" / "fp8lens" / "hlo").glob("*.*"))),
    ]


_HEADER = "HloModule m, is_scheduled=true"  # as of what XLA has compiled


def _module(*lines: str, before: str = "", shape: str = "f32[8]") -> str:
    return (
        f"{_HEADER}\n\n{before}ENTRY %main (p: f32[8]) -> {shape} {{\n  %p = f32[8] parameter(0)\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


def _called(n: int) -> str:
    """Computations that call each other, n deep."""
    one = "%c{} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] {}\n}}\n\n"
    return one.format(0, "negate(%p)") + "".join(
        one.format(k, f"call(%p), to_apply=%c{k - 1}") for k in range(1, n)
    )


def _concatenates(n: int) -> str:
    lines = ["%c0 = f32[16] concatenate(%p, %p), dimensions={0}"]
    lines += [
        f"%c{k} = f32[{16 << k}] concatenate(%c{k - 1}, %c{k - 1}), dimensions={{0}}"
        for k in range(1, n)
    ]
    return _module(*lines, f"ROOT %r = f32[8] slice(%c{n - 1}), slice={{[0:8]}}")


def _fusions(n: int) -> str:
    """Fusions that fuse each other, n deep."""
    one = "%f{} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] {}\n}}\n\n"
    return one.format(0, "multiply(%p, %p)") + "".join(
        one.format(k, f"fusion(%p), kind=kLoop, calls=%f{k - 1}") for k in range(1, n)
    )


def _loops(n: int, trips: int) -> str:
    """Loops in loops, n deep, each of so many turns."""
    one = (
        "%b{0} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] {1}\n}}\n\n"
    )
    loop = (
        'while(%p), condition=%cond, body=%b{}, backend_config={{"known_trip_count":{{"n":"{}"}}}}'
    )
    dot = "dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    return (
        _CONDITION
        + one.format(0, dot)
        + "".join(one.format(k, loop.format(k - 1, trips)) for k in range(1, n))
    )


_CONDITION = "%cond (p: f32[8]) -> pred[] {\n  %p = f32[8] parameter(0)\n  ROOT %c = pred[] constant(true)\n}\n\n"


def _doubled(
    n: int, step: str, first: str = "", last: str = "negate(%x{})", size: str = "8"
) -> str:
    """Instructions that each read the one before them twice."""
    lines = [f"%x0 = f32[{size}] {first or 'negate(%p)'}"]
    lines += [f"%x{k} = {step.format(f'%x{k - 1}, %x{k - 1}')}" for k in range(1, n)]
    return _module(*lines, f"ROOT %r = f32[8] {last.format(n - 1)}")


def _sent(groups: str, n: int = 1, before: str = "HloModule m, num_partitions=8") -> str:
    """A program that gathers, and multiplies what it has gathered."""
    lines = [
        f"%g{k} = f32[8] all-gather(%p), channel_id={k + 1}, dimensions={{0}}, {groups.replace('@', str(k))}"
        for k in range(n)
    ]
    return _module(*lines, _DOT.format(n="", a="g0", b=f"g{n - 1}")).replace(
        "HloModule m", before, 1
    )


_DOT = "ROOT %r{n} = f32[] dot(%{a}, %{b}), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}"
_FP8 = (
    '%c{n} = (f32[16,16], s8[64]) custom-call(%a{n}, %a{n}, %s), custom_call_target="__cublas$lt$matmul$f8", '
    'backend_config={{"gemm_backend_config":{{"alpha_real":1,"beta":0,"epilogue":"{epilogue}",'
    '"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}}}}{more}'
)
_MARK = "<img src=x onerror=1>"
_ESCAPED = r"\033[31m\007\x1b[2J\302\233\342\200\256" + "\x1b[1m\x9b\u202e\u2066" + _MARK + "$x$"


def _fp8(epilogue: str = "DEFAULT", more: str = "", n: int = 1, between: str = "") -> str:
    """FP8 calls, each with a kernel before it and one behind it."""
    lines = ["%s = f32[] constant(1)", "%q = f32[16,16] broadcast(%p), dimensions={0}"]
    for k in range(n):
        call = _FP8.format(n=k, epilogue=epilogue, more=more)
        lines += [
            f"%a{k} = f8e4m3fn[16,16] convert(%{f'o{k - 1}' if k else 'q'}){between}",
            call,
            f"%e{k} = f32[16,16] get-tuple-element(%c{k}), index=0",
            f"%o{k} = f32[16,16] tanh(%e{k}){between}",
        ]
    return _module(*lines, f"ROOT %r = f32[16,16] negate(%o{n - 1})", shape="f32[16,16]")


def _shared(fusions: int, steps: int, matmuls: int = 10**9) -> str:
    """Fusions of one computation, so many steps long, of which so many multiply."""
    square = "dot(%x{0}, %x{0}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    inner = "".join(
        f"  %x{k + 1} = f32[8,8] {square if steps - k <= matmuls else 'tanh(%x{0})'}\n".format(k)
        for k in range(steps)
    )
    before = (
        f"%many (p: f32[8,8]) -> f32[8,8] {{\n  %x0 = f32[8,8] parameter(0)\n{inner}"
        f"  ROOT %d = f32[8,8] negate(%x{steps})\n}}\n\n"
    )
    kind = 'kind=kCustom, calls=%many, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}'
    return _module(
        "%q = f32[8,8] broadcast(%p), dimensions={0}",
        *(
            f"%r{k} = f32[8,8] fusion(%{f'r{k - 1}' if k % 2 else 'q'}), {kind}"
            for k in range(fusions)
        ),
        "ROOT %r = f32[8,8] negate(%r9)" if fusions > 9 else "ROOT %r = f32[8,8] negate(%r1)",
        before=before,
        shape="f32[8,8]",
    )


def _sum_of_calls(n: int) -> str:
    """FP8 calls of one operand, each added to those before by a kernel of its own."""
    lines = [
        "%s = f32[] constant(1)",
        "%q = f32[16,16] broadcast(%p), dimensions={0}",
        "%a = f8e4m3fn[16,16] convert(%q)",
        "%t = f32[16,16] tanh(%q)",
    ]
    for k in range(n):
        lines += [
            _FP8.format(n=k, epilogue="DEFAULT", more="").replace(f"%a{k}", "%a"),
            f"%e{k} = f32[16,16] get-tuple-element(%c{k}), index=0",
            f"%u{k} = f32[16,16] add(%e{k}, %{f'u{k - 1}' if k else 't'})",
        ]
    return _module(*lines, f"ROOT %r = f32[16,16] negate(%u{n - 1})", shape="f32[16,16]")


def baits() -> dict[str, str]:
    """Texts made by hand against one weakness each."""
    deep = "(" * 190 + "f32[8]" + ",)" * 190
    tuples = "(" * 190 + "f32[8]" + ")" * 190
    parts = "%body (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8] parameter(0)\n}\n\n" + _CONDITION
    loop = (
        "%w = f32[8] while(%p), condition=%cond, body=%body, "
        'backend_config={{"known_trip_count":{{"n":"{}"}}}}'
    )
    wide = ", ".join(["%p"] * 1000)
    one = "%c{} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  {}\n}}\n\n"
    call, root = "%r{} = f32[8] call(%p), to_apply=%c{}", "ROOT %r = f32[8] negate(%p)"
    target = "custom_call_target"
    return {
        "reads itself": _module("ROOT %b = f32[8] bitcast(%b)"),
        "read each other": _module("%a = f32[8] negate(%b)", "ROOT %b = f32[8] negate(%a)"),
        "read before it is there": _module("ROOT %a = f32[8] negate(%b)", "%b = f32[8] negate(%p)"),
        "calls itself": _module("ROOT %a = f32[8] call(%p), to_apply=%main"),
        "a trip count of 5000 digits": _module(
            loop.format("9" * 5000), "ROOT %r = f32[8] negate(%w)", before=parts
        ),
        "trip counts whose product is large": _module(
            *(loop.replace("%w =", f"%w{k} =").format("9" * 300) for k in range(9)),
            "ROOT %r = f32[8] negate(%w8)",
            before=parts,
        ),
        "loops in loops, of very many turns": _module(
            "ROOT %r = f32[8] " + "while(%p), condition=%cond, body=%b299",
            before=_loops(300, 10**17),
        ),
        "an element of 5000 digits": _module(
            f"ROOT %g = f32[8] get-tuple-element(%p), index={'9' * 5000}"
        ),
        "a computation of matmuls that fusions share": _shared(60, 60),
        "very many matmuls, in a few fusions": _shared(9, 600),
        "a large computation that very many fusions share": _shared(400, 400, matmuls=1),
        "a sum of calls": _sum_of_calls(150),
        "attention over nothing": (ROOT / "tests" / "fp8lens" / "hlo" / "cudnn_attention.hlo")
        .read_text()
        .replace("bf16[2,128,8,64]", "bf16[0,128,8,64]"),
        "a size of 5000 digits": _module(
            f"ROOT %n = f32[{'9' * 5000}] broadcast(%p), dimensions={{}}"
        ),
        "a type of 5000 digits": _module(
            f"ROOT %n = f{'9' * 5000}[8] broadcast(%p), dimensions={{}}"
        ),
        "a line of 5000 digits": _module(
            f'ROOT %n = f32[8] dot(%p, %p), metadata={{source_file="a" source_line={"9" * 5000}}}'
        ),
        "dimensions of 5000 digits": _module(
            f"ROOT %n = f32[] dot(%p, %p), lhs_contracting_dims={{{'9' * 5000}}}"
        ),
        "groups of 5000 digits": _sent(f"replica_groups={{{{{'9' * 5000}}}}}"),
        "devices of 5000 digits": _sent(
            "replica_groups={}", 1, f"HloModule m, num_partitions={'9' * 5000}"
        ),
        "a mesh of 5000 digits": _sent(f"replica_groups=mesh['a'={'9' * 5000}] {{'a'}}"),
        "numbers of 5000 digits in a configuration": _fp8(
            more=f", operand_precision={{{'9' * 5000}}}"
        )
        .replace('"beta":0', f'"beta":{"9" * 5000}')
        .replace('"alpha_real":1', f'"alpha_real":1{"0" * 400}'),
        "sizes whose product is large": _module(
            f"ROOT %n = f32[{','.join(['9' * 18] * 300)}] broadcast(%p)"
        ),
        "sizes of nothing times much": _module(
            f"%n = f32[0{f',{10**17}' * 300}] broadcast(%p)", _DOT.format(n="", a="n", b="n")
        ),
        "a rank of ten thousand": _module(
            f"%n = f32[{'1,' * 10_000}1] broadcast(%p)",
            f"ROOT %r = f32[] dot(%n, %n), lhs_contracting_dims={{{','.join(map(str, range(9000)))}}}",
        ),
        "one dimension contracted again and again": _module(
            _DOT.format(n="", a="p", b="p").replace("{0}", f"{{{'0,' * 20_000}0}}")
        ),
        "bytes whose sum is large": _module(
            *(f"%n{k} = c128[{'9' * 18}] broadcast(%p)" for k in range(900)),
            "ROOT %r = f32[8] negate(%p)",
        ),
        "400 calls deep": _module("ROOT %r = f32[8] call(%p), to_apply=%c399", before=_called(400)),
        "900 calls deep": _module("ROOT %r = f32[8] call(%p), to_apply=%c899", before=_called(900)),
        "800 fusions deep": _module(
            "ROOT %r = f32[8] fusion(%p), kind=kLoop, calls=%f799", before=_fusions(800)
        ),
        "calls that double": _module(
            "ROOT %r = f32[8] call(%p), to_apply=%c299",
            before=one.format(0, root)
            + "".join(
                one.format(k, f"{call.format(0, k - 1)}\n  ROOT {call.format(1, k - 1)}")
                for k in range(1, 300)
            ),
        ),
        "one computation called by a thousand": _module(
            *(call.format(k, 0) for k in range(1000)),
            root.replace("%r", "%r_"),
            before=one.format(0, root),
        ),
        "thirty computations called by thirty each": _module(
            *(call.format(k, k) for k in range(30)),
            root.replace("%r", "%r_"),
            before=one.format(30, root)
            + "".join(
                one.format(
                    k, "\n  ".join(call.format(n, n) for n in range(k + 1, 31)) + "\n  " + root
                )
                for k in reversed(range(30))
            ),
        ),
        "concatenates of themselves": _concatenates(40),
        "concatenates of themselves, without end": _doubled(
            1000, "f32[8] concatenate({}), dimensions={{0}}"
        ),
        "sums of themselves": _doubled(
            1000, "f32[8] add({})", "broadcast(%p), dimensions={{}}", "clamp(%x{0}, %p, %x{0})"
        ),
        "a clamp between sums of themselves": _doubled(
            60,
            "f32[8] add({})",
            "broadcast(%p), dimensions={{}}",
            "clamp(%x{0}, %p, %x{0})\n  %g = f32[8] all-gather(%r), replica_groups={{}}, dimensions={{0}}\n  "
            "%d = f32[] dot(%g, %g), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}",
        ),
        "a clamp between a thousand sums": _doubled(
            1000,
            "f32[8] add({})",
            "broadcast(%p), dimensions={{}}",
            "clamp(%x{0}, %p, %x{0})\n  %g = f32[8] all-gather(%r), replica_groups={{}}, dimensions={{0}}\n  "
            "%d = f32[] dot(%g, %g), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}",
        ),
        "a dot behind products of themselves": _doubled(
            1000,
            "f32[8] multiply({})",
            last="dot(%x{0}, %x{0}), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}",
        ),
        "a dot in front of products of themselves": _doubled(
            1000,
            "f32[8] multiply({})",
            "dot(%p, %p), lhs_contracting_dims={{}}, rhs_contracting_dims={{}}",
        ),
        "tuples of themselves": _doubled(
            1000, "(f32[8], f32[8]) tuple({})", last="get-tuple-element(%x{}), index=0"
        ),
        "tuples of themselves that are none": _doubled(1000, "f32[8] tuple({})"),
        "selects of themselves": _doubled(1000, "f32[8] select(%p, {})"),
        "tuples that grow": _module(
            *(
                f"%t{k} = ({', '.join(['f32[8]'] * k)}) tuple({', '.join(['%p'] * k)})"
                for k in range(60)
            ),
            "ROOT %r = f32[8] get-tuple-element(%t59), index=0",
        ),
        "a tuple of a thousand": _module(
            f"%t = ({', '.join(['f32[8]'] * 1000)}) tuple({wide})",
            *(f"%g{k} = f32[8] get-tuple-element(%t), index={k}" for k in range(1000)),
            root,
        ),
        "elements of elements": _module(
            f'%n = {tuples} custom-call(%p), {target}="x"',
            f"ROOT %r = f32[8] negate(%n{'#0' * 190})",
        ),
        "elements of elements of many": _module(
            *(
                f'%n{k} = {tuples} custom-call(%p), {target}="x"\n  %r{k} = f32[8] negate(%n{k}{"#0" * 190})'
                for k in range(20)
            ),
            root,
        ),
        "elements of a wide tuple": _module(
            f'%t = ({", ".join(["f32[8]"] * 3000)}) custom-call(%p), {target}="x"',
            *(f"%g{k} = f32[8] negate(%t#{k})" for k in range(1000)),
            root,
        ),
        "elements of as many tuples": _module(
            *(
                f'%t{k} = ((f32[8])) custom-call(%p), {target}="x"\n  %g{k} = f32[8] negate(%t{k}#0#0)'
                for k in range(800)
            ),
            root,
        ),
        "a thousand operands, a hundred times": _module(
            *(f"%p{k} = f32[8] negate(%p)" for k in range(300)),
            *(
                f'%f{k} = f32[8] custom-call({", ".join(f"%p{n}" for n in range(300))}), {target}="x"'
                for k in range(40)
            ),
            root,
        ),
        "operands that are all one": _module(
            *(f'%f{k} = f32[8] custom-call({wide}), {target}="x"' for k in range(20)), root
        ),
        **{
            f"very many of {opcode}": f"{_HEADER}\nENTRY %e () -> {shape} {{\n  a0={shape} parameter(0)\n".replace(
                "=", " = "
            )
            + "".join(f" a{k} = {shape} {opcode}(a{k - 1})\n" for k in range(1, 3000))
            + "}\n"
            for opcode, shape in (
                ("copy", "s8[9]"),
                ("negate", "f32[9]"),
                ("convert", "f8e5m2[9]"),
                ("bitcast", "s8[9]"),
                ("broadcast", "f32[]"),
                ("all-gather", "f32[9]"),
                ("reduce", "f32[]"),
            )
        },
        "matmuls in a row": _fp8(n=160),
        "dots in a row": _module(
            *(
                _DOT.format(n=k, a=f"r{k - 1}" if k else "p", b="p")[5 * (k < 799) :]
                for k in range(800)
            )
        ),
        "dots of what a thousand kernels make": _module(
            *(f"%n{k} = f32[8] tanh(%{f'n{k - 1}' if k else 'p'})" for k in range(900)),
            *(_DOT.format(n=k, a=f"n{k}", b="n899")[5 * (k < 299) :] for k in range(300)),
        ),
        "collectives in a row": _module(
            *(
                f"%g{k} = f32[8] all-gather(%{f'g{k - 1}' if k else 'p'}), replica_groups={{{{0,1}}}}, dimensions={{0}}"
                for k in range(900)
            ),
            _DOT.format(n="", a="g899", b="g0"),
        ),
        "groups of a million": _sent("replica_groups=[1,1048576]<=[1048576]"),
        "groups of a million, many times": _sent("replica_groups=[@,262144]<=[262144]", 300),
        "devices beyond number": _sent(
            "replica_groups=[1,8]<=[8]", 1, "HloModule m, num_partitions=999999999999"
        ),
        "more numbers than devices": _sent(
            "replica_groups=mesh['a'=8], device_ids=([65536,65536]T(1,0)) {'a'}"
        ),
        "one dimension again and again": _sent("replica_groups=[1,64]<=[8,8]T(0,0,0,0,0,0,0,0,0)"),
        "groups of nothing": _sent("replica_groups=[0,0]<=[0]"),
        "a mesh of nothing": _sent("replica_groups=mesh['a'=0,'b'=9] {'b'}"),
        "a mesh of a thousand axes": _sent(
            f"replica_groups=mesh[{','.join(f'a{k}=1' for k in range(5000))}] {{a1}}"
        ),
        "a mesh of many halves": _sent("replica_groups=mesh[" + "], device_ids=(" * 6000),
        "a mesh in a mesh": _sent("replica_groups=mesh[" * 4000),
        "groups of ten thousand": _sent(
            f"replica_groups={{{','.join('{%d}' % k for k in range(10_000))}}}"
        ),
        "pairs of ten thousand": _module(
            f"%g = f32[8] collective-permute(%p), source_target_pairs={{{
                ','.join('{%d,%d}' % (2 * k, 2 * k + 1) for k in range(7000))
            }}}",
            root,
        ),
        "a sharding of many": _module(
            f"ROOT %n = f32[8] negate(%p), sharding={{devices=[{'2,' * 10_000}1]<=[{'2,' * 10_000}1]}}"
        ),
        "a long word in the metadata": _module(
            f'ROOT %n = f32[8] negate(%p), metadata={{op_name="{"a" * 60_000}"}}'
        ),
        "a long word, not quoted, in the metadata": _module(f"{root}, metadata={{{'a' * 60_000}}}"),
        "a long path in the metadata": _module(
            f'ROOT %n = f32[8] negate(%p), metadata={{op_name="{"a/" * 30_000}"}}'
        ),
        "numbers behind a name": _module(f"ROOT %n{'.1' * 20_000}x = f32[8] negate(%p)"),
        "brackets behind a name": _module(f"ROOT %n = f32[8] negate(%p), a={')' * 20_000}x"),
        "comments that do not end": _module(f"ROOT %n = f32[8] negate({'/*' * 20_000}%p)"),
        "a long name in the signature": _module(root).replace("(p:", f"({'p' * 60_000}:"),
        "brackets in a string of the header": _module(root).replace(
            "true\n", f'true, a={{b="{"a[" * 30_000}"}}\n', 1
        ),
        "quotes in a string": _module(root + r', a="' + r"\"" * 30_000 + '"'),
        "quotes in no string": _module(root + r", a=" + r"\"" * 30_000),
        "a literal of twenty thousand": _module(
            f"%c = f32[20000] constant({{{', '.join(['0'] * 20_000)}}})", root
        ),
        "a deep literal": _module(f"%c = f32[8] constant({'{' * 190}0{'}' * 190})", root),
        **{
            f"{bracket} in each other": _module(
                f"ROOT %n = f32[8] negate(%p), a={bracket * 20_000}{close * 20_000}"
            )
            for bracket, close in ("()", "[]", "{}", "<>")
        },
        "a deep configuration": _module(f'{root}, backend_config={{"a":{"[" * 190}{"]" * 190}}}'),
        "a deep configuration of MLIR": _module(
            f"{root}, backend_config={{{'a={' * 190}{'}' * 190}}}"
        ),
        "many frames": _HEADER
        + '\n\nFileNames\n1 "a.py"\n\nFileLocations\n1 {file_name_id=1 line=1}\n\nStackFrames\n'
        + "".join(f"{k} {{file_location_id=1 parent_frame_id={k + 1}}}\n" for k in range(1, 900))
        + "\n"
        + _module(
            *(f"%n{k} = f32[8] dot(%p, %p), metadata={{stack_frame_id=1}}" for k in range(800)),
            root,
        ).partition("\n\n")[2],
        "a shape 190 deep": _module(f'ROOT %n = {deep} custom-call(%p), {target}="x"', shape=deep),
        "a long layout": _module(f"ROOT %n = f32[8]{{{'0,' * 20_000}0}} negate(%p)"),
        "numbers that JSON has not": _fp8()
        .replace('"alpha_real":1', '"alpha_real":1e999')
        .replace('a":0', 'a":NaN'),
        "a configuration of other types": _module(
            f'ROOT %n = f32[8] custom-call(%p, %p), {target}="__cublas$lt$matmul$f8", '
            'backend_config={"gemm_backend_config":[1,{"epilogue":null}]}'
        ),
        **{
            f"{value} for each value of a configuration": re.sub(
                r'(?<=":)(?:"\w*"|\d|\[.*?\])', lambda m: value, _fp8()
            )
            for value in ("null", "[]", "{}", '"x"', "true", "-1", "1e400")
        },
        "a table that goes round": _HEADER
        + "\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=2}\n"
        "2 {file_location_id=1 parent_frame_id=1}\n\n"
        + _module("ROOT %n = f32[8] negate(%p), metadata={stack_frame_id=1}").partition("\n\n")[2],
        "escapes in a file's name": _module(
            r'ROOT %n = f32[8] dot(%p, %p), metadata={source_file="\033[2J\007x.py" source_line=1}'
        ),
        "escapes everywhere": _sent(
            "replica_groups={{0,1}}"
            + (
                f', metadata={{op_name="f/{_ESCAPED}/{_ESCAPED}" source_file="{_ESCAPED}.py" source_line=3}}'
            )
        )
        .replace("  %g0", f'  %k = f32[8] custom-call(%p), {target}="{_ESCAPED}"\n  %g0')
        .replace("HloModule m", f'HloModule m, a="{_ESCAPED}"'),
        "escapes in a call": _fp8(
            _ESCAPED.replace("\\", r"\\").replace("\x1b", "").replace("\x9b", ""),
            f', sharding={{devices=[2]"{_ESCAPED}"}}, metadata={{op_name="jit(f)/{_ESCAPED}/a" '
            f'source_file="/site-packages/{_ESCAPED}.py" source_line=3}}',
        ),
        "escapes in an opcode": _module(f"ROOT %n = f32[8] a\x1b(%p), b=\x1b{_MARK}"),
    }


PLACES = {  # of a word that may be long
    "module": "HloModule m@, is_scheduled=true\n",
    "header": f"{_HEADER}, a=@\n",
    "header's list": f"{_HEADER}, a={{@}}\n",
    "header's string": f'{_HEADER}, a={{b="@"}}\n',
    "file": f'{_HEADER}\n\nFileNames\n1 "@"\n',
    "between": f"{_HEADER}\n\n@\n",
    "signature": "(p@: f32[8])",
    "signature's shape": "(p: f32[8@])",
    "computation": "%main@ (",
    **{
        place: f"  ROOT %n = {line}\n"
        for place, line in {
            "shape": "f32[@] negate(%p)",
            "type": "f@[8] negate(%p)",
            "layout": "f32[8]{@} negate(%p)",
            "tuple": "(@) negate(%p)",
            "opcode": "f32[8] n@(%p)",
            "operand": "f32[8] negate(@%p)",
            "operand's shape": "f32[8] negate(f32[8] @ %p)",
            "element": "f32[8] negate(%p@)",
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
            "groups": "f32[8] all-gather(%p), replica_groups=@",
            "group": "f32[8] all-gather(%p), replica_groups={{@}}",
            "iota": "f32[8] all-gather(%p), replica_groups=[1,8]<=[@]",
            "mesh": "f32[8] all-gather(%p), replica_groups=mesh[@] {a}",
            "pairs": "f32[8] collective-permute(%p), source_target_pairs={@}",
            "target": 'f32[8] custom-call(%p, %p), custom_call_target="@"',
            "configuration": "f32[8] custom-call(%p, %p), backend_config={@}",
            "quoted configuration": 'f32[8] custom-call(%p, %p), backend_config="{@}"',
            "configuration's value": 'f32[8] custom-call(%p, %p), custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"epilogue":@}}',
            "behind": "f32[8] negate(%p) @",
        }.items()
    },
}
UNITS = (
    "a",
    "a.",
    ".1",
    "9",
    "1,",
    "-1,",
    "2]",
    "a=",
    "a=1 ",
    "a, ",
    "%a, ",
    " ",
    "\t",
    "/*",
    "*/",
    "/**/",
    "//",
    '"',
    '\\"',
    "\\",
    "\\n",
    "()",
    "[]",
    "{}",
    "(",
    "[",
    "{",
    "<",
    ")",
    "{0},",
    "{0,1},",
    "a[",
    "a[1]",
    "a[1]{0}",
    "(a)",
    "#0",
    "$",
    "'",
    "/a",
    "vmap(",
    "é",
    "\u202e",
    "\\033[31m",
    "T(",
    "<=[",
    "f32[8],",
    '"a":',
    "'a'=2,",
    ".py/",
    "site-packages/",
    _MARK,
)


def long_words(length: int = 60_000) -> Iterator[tuple[str, str]]:
    """A long word in each place: what a search that is not linear takes long for."""
    plain = _module("ROOT %n = f32[8] negate(%p)")
    for (place, form), unit in itertools.product(PLACES.items(), UNITS):
        line = form.replace("@", unit * (length // len(unit)))
        text = (
            plain.replace(_HEADER + "\n", line, 1)
            if form.startswith("Hlo")
            else (
                plain.replace("  ROOT %n = f32[8] negate(%p)\n", line)
                if form.startswith("  ")
                else plain.replace(form.replace("@", ""), line)
            )
        )
        yield f"{unit!r} as {place}", text


# What is done to them -------------------------------------------------------------------------------------------------


def _of_lines(
    change: Callable[[random.Random, list[str]], None],
) -> Callable[[random.Random, str, str], str]:
    def changed(r: random.Random, text: str, other: str) -> str:
        lines = text.split("\n")
        change(r, lines)
        return "\n".join(lines)

    return changed


def _moved(r: random.Random, lines: list[str]) -> None:
    lines.insert(r.randrange(len(lines)), lines.pop(r.randrange(len(lines))))


def _of_words(
    pattern: str, choose: Callable[[random.Random, list[str]], str]
) -> Callable[..., str]:
    def changed(r: random.Random, text: str, other: str) -> str:
        found = list(re.finditer(pattern, text))
        if not found:
            return text
        at = r.choice(found)
        return text[: at.start()] + choose(r, [m[0] for m in found]) + text[at.end() :]

    return changed


def _marked(r: random.Random, text: str, other: str) -> str:
    at, count = r.randrange(len(text)), r.choice((0, 1, 1, 1, 300))
    return text[:at] + r.choice(MARKS) * count + text[at + r.choice((0, 1)) :]


def _spliced(r: random.Random, text: str, other: str) -> str:
    ours, theirs = text.split("\n"), other.split("\n")
    return "\n".join(ours[: r.randrange(len(ours))] + theirs[r.randrange(len(theirs)) :])


any_of = lambda r, found: r.choice(found)
CHANGES = {
    "a line is lost": _of_lines(lambda r, lines: lines.pop(r.randrange(len(lines)))),
    "a line is there twice": _of_lines(
        lambda r, lines: lines.insert(r.randrange(len(lines)), r.choice(lines))
    ),
    "a line is elsewhere": _of_lines(_moved),
    "another name": _of_words(r"%[\w.\-]+", any_of),
    "another number": _of_words(
        r"\b\d+\b", lambda r, found: r.choice(found + [*NUMBERS] * len(found))
    ),
    "another type": _of_words(r"\b(?:f8e4m3fn|f32|bf16|s8|s32|pred)\[", any_of),
    "another opcode": _of_words(r"\b[a-z][a-z\-]+(?=\()", any_of),
    "another key": _of_words(r"\b\w+(?==)|\"\w+\"(?=:)", any_of),
    "another value": _of_words(
        r"(?<==)\{[^{}\n]*\}|(?<=\":)[^,{}\n]+",
        lambda r, found: r.choice([*found, "{}", "null", "[]", "true", "1e400", "{1,0,1}"]),
    ),
    "another string": _of_words(
        r'(?<=")[^"\n]*(?=")',
        lambda r, found: r.choice(
            [*found, _ESCAPED, _ESCAPED.replace("\\", r"\\"), _MARK, "$x$", "a/" * 300]
        ),
    ),
    "a long word": _of_words(
        r"[\w.\-]+|\S", lambda r, found: r.choice(UNITS) * r.choice((2, 30, 1000))
    ),
    "another shape": _of_words(r"\w+\[[\d,]*\](?:\{[^{}\n]*\})?", any_of),
    "a character": _marked,
    "two halves": _spliced,
    "the end is lost": lambda r, text, other: text[: r.randrange(len(text))],
}


def texts(seed: int, known: list[str]) -> Iterator[tuple[str, str, str]]:
    """What was done, what came of it, and the whole text; without end."""
    r = random.Random(seed)
    while True:
        text, other = r.choice(known), r.choice(known)
        done, changed = [], text
        for _ in range(r.choice((1, 1, 1, 2, 4))):
            done.append(r.choice(list(CHANGES)))
            changed = CHANGES[done[-1]](r, changed or "\n", other)
        yield ", ".join(done), changed, text


# What they go through -------------------------------------------------------------------------------------------------

_TAG = re.compile(
    r'<(/?)(table|tr|th|td|code|p|pre|span|div|b|br)(?: style="[\w\s:;,.()#%+\-]*"| colspan="\d")*>'
)
_OURS = re.compile(r"\033\[[\d;]{1,4}m")  # print_hlo_module's colours
_FILE = (
    Path(tempfile.gettempdir())
    / f"fuzz-{os.getpid()}"
    / "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt"
)
_OPTIONS = (
    ["--ledger", "--require-fp8"],
    ["--json"],
    ["--debug"],
    ["--json", "--require-fp8"],
)  # by a text's length
seen = functools.lru_cache(maxsize=30)(inspect)  # what an entry works out, the next need not


class Wrong(Exception):
    """An answer that is none."""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(*texts: object) -> None:
    """What a terminal gets has no control characters, and nothing that turns the direction of writing."""
    for text in map(str, texts):
        if visible(text, "\n\t") != text:
            at = next(n for n, c in enumerate(text) if not c.isprintable() and c not in "\n\t")
            raise Wrong(f"{text[at]!r} is shown, after {text[max(at - 30, 0) : at]!r}")


def _page(*views: object) -> None:
    """HTML has fp8lens's own tags alone, each closed, and nothing else that looks like one."""
    for view in views:
        text, opened = view if isinstance(view, str) else view._repr_html_(), []
        for closing, name in _TAG.findall(text):
            if closing and (not opened or opened.pop() != name):
                raise Wrong(f"</{name}> closes nothing")
            opened += [name] * (not closing and name != "br")
        if opened or (found := re.search("<.{0,60}", _TAG.sub("", text))):
            raise Wrong(f"nothing closes <{opened[-1]}>" if opened else f"{found[0]} in a page")


def _strict(text: str) -> None:
    def no_number(name: str) -> None:
        raise Wrong(f"{name} in JSON")

    json.loads(text, parse_constant=no_number)


def _told(entry: Callable[..., object], *arguments: object) -> str:
    """What it prints to a terminal."""
    with contextlib.redirect_stdout(_Terminal()) as out:
        entry(*arguments)
    return _OURS.sub("", out.getvalue())


def _command(*options: str) -> str:
    """The JSON of the command line, if any: with its exit code comes an answer, or one sentence."""
    with (
        contextlib.redirect_stderr(_Terminal()) as err,
        contextlib.redirect_stdout(_Terminal()) as out,
    ):
        status = main_of_cli([str(_FILE), *options])
    out, err = out.getvalue(), err.getvalue()
    _shown(out, err)
    plain = not err or "--json" in options
    if status == 2:
        plain = re.fullmatch(r"error: .*\.\n", err[err.rfind("error: ") :])
    if (
        status not in (0, 1, 2)
        or not plain
        or "fp8lens itself failed" in err
        or ("Traceback" in err and "--debug" not in options)
        or bool(out) == (status == 2)
    ):
        raise Wrong(f"{status}: {err[-150:]}")
    return out if status < 2 and "--json" in options else "{}"


def _commanded(text: str, _: str) -> None:
    _FILE.parent.mkdir(exist_ok=True)
    _FILE.write_text(text, encoding="utf-8", errors="replace", newline="")
    _strict(_command(*_OPTIONS[len(text) % len(_OPTIONS)]))


def _costs(text: str, _: str) -> None:
    module = seen(text).module
    _shown(_told(print_kernels, module), cost.bytes_moved(module), len(cost.fp8_calls(module)))
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(KeyError),
    ):  # of a type that the chip has not
        cost.roofline_seconds(module, "H100")
    _page(cost._Table(cost.kernels(module)))


def _asserted(text: str, _: str) -> None:
    for way in (
        lambda: assert_fp8_gemms(seen(text)),
        lambda: assert_fp8_gemms(seen(text), min_flops_share=0.5),
        lambda: assert_fp8_collectives(seen(text)),
    ):
        try:
            way()
        except AssertionError as error:
            _shown(error)


def _reasons(before: str, after: str) -> None:
    stages = (Stage("", "", "cublas-gemm-rewriter", seen(before).module),)
    why = Inspection(seen(after).module, "", None, stages, {}, H100)
    _shown(why_not_fp8(why), why)
    _page(why)
    _strict(why.json())


def _differs(text: str, known: str) -> None:
    one, other = seen(text).module, seen(known).module
    for diff in (diff_hlo(one, other), diff_hlo(other, one).around("f8|dot|%a")):
        _shown(diff)
        _page(diff)


def _printed(text: str, _: str) -> None:
    module = seen(text).module
    _shown(_told(lambda: print_hlo_module(module, metadata=True, backend_cfg=True)))
    _page(coloured(format_hlo_module(module)))


def _views(name: str) -> Callable[[str, str], None]:
    def entry(text: str, _: str) -> None:
        _shown(getattr(seen(text), name))
        _page(getattr(seen(text), name))

    return entry


ENTRIES: dict[str, Callable[[str, str], object]] = {
    "parse": lambda text, _: parse_hlo_module(text),
    "command line": _commanded,  # the next ones begin as it does, with what `parse` answers
    "print": _printed,
    "report": _views("report"),
    "ledger": _views("ledger"),
    "collectives": _views("collectives"),
    "json": lambda text, _: _strict(seen(text).json()),
    "cost": _costs,
    "assertions": _asserted,
    "reasons, of what was compiled": lambda text, known: _reasons(OTHERS.get(known, text), text),
    "reasons, of what it was made of": lambda text, known: _reasons(text, OTHERS.get(known, text)),
    "diff": _differs,
}


class Slow(BaseException):
    """An entry took longer than it may. No Exception: nothing is to catch it."""


def attack(entry: str, text: str, known: str) -> str:
    """ "answer", "refused", or the find: what was raised, and where."""

    def stop(*_):
        raise Slow(f"more than {SECONDS:g} s")

    signal.signal(signal.SIGPROF, stop)  # of the processor's time: the machine may be busy
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS * max(1, len(text) / 100_000))
        try:
            ENTRIES[entry](text, known)
            return "answer"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except HloParseError as error:
        in_full = error.line >= 1 and error.column >= 1 and visible(str(error)) == str(error)
        return (
            "refused" if in_full else f"{entry}: HloParseError without a place, or not to be shown"
        )
    except (Exception, Slow) as error:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "fp8lens" in f.filename]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "outside of fp8lens"
        return f"{entry}: {type(error).__name__} in {place}\n    {str(error)[:300]!r}"


def attacks(text: str, known: str) -> Iterator[tuple[str, str, float]]:
    """Each entry, what came of it, and the seconds of the processor that it took. A text that is refused goes through
    the parser, and through the command line."""
    refused = False
    for entry in ENTRIES:
        start = time.process_time()
        said = attack(entry, text, known)
        yield entry, said, time.process_time() - start
        refused |= said == "refused" and entry == "parse"
        if refused and entry == "command line":
            return


@dataclasses.dataclass
class Found:
    """What came of an attack: how often what, for each find the text that showed it first, and the worst texts."""

    counted: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    finds: dict[str, Path] = dataclasses.field(default_factory=dict)
    slowest: tuple[float, str] = (
        0.0,
        "",
    )  # seconds of the processor, for each 100 kB of a longer text; what it was
    largest: tuple[int, str] = (0, "")  # bytes beside what was in use before


def run(seconds: float, seed: int, keep: Path, words: bool = False) -> Found:
    """Attack for so long, after the baits; `words`: after the long words, too."""
    known, (soft, hard) = whole(), resource.getrlimit(resource.RLIMIT_AS)
    found, end = Found(), time.monotonic() + seconds
    by_hand = [(name, text, known[0]) for name, text in baits().items()]
    by_hand += [(name, text, known[0]) for name, text in long_words()] if words else []
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    first = last = peak()
    try:
        for number, (done, text, original) in enumerate(
            itertools.chain(by_hand, texts(seed, known))
        ):
            if time.monotonic() > end and number >= len(by_hand):
                break
            found.counted["texts"] += 1
            for entry, said, taken in attacks(text, original):
                found.counted[said if said in ("answer", "refused") else "finds"] += 1
                what = f"{entry} of {len(text)} characters, {done}"
                found.slowest = max(found.slowest, (taken / max(1, len(text) / 100_000), what))
                if peak() > last:
                    last, found.largest = peak(), (peak() - first, what)
                place = said.partition("\n")[0]
                if said not in ("answer", "refused") and place not in found.finds:
                    keep.mkdir(parents=True, exist_ok=True)
                    found.finds[place] = keep / f"{seed}-{number}.hlo"
                    found.finds[place].write_text(text, errors="surrogateescape")
                    print(f"{said}\n    by: {done}; text: {found.finds[place].name}", flush=True)
    except KeyboardInterrupt:
        print("stopped; so far:")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        shutil.rmtree(_FILE.parent, ignore_errors=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--words", action="store_true", help="a long word in each place first, which takes minutes"
    )
    parser.add_argument(
        "--keep", type=Path, default=ROOT / "_build" / "fuzz", help="folder for the texts of finds"
    )
    options = parser.parse_args(arguments)
    found = run(options.seconds, options.seed, options.keep, options.words)
    counted = found.counted
    print(
        f"{counted['texts']} texts through {len(ENTRIES)} entries: {counted['answer']} answers, {counted['refused']} "
        f"times refused with line and column, {counted['finds']} times something else, in {len(found.finds)} places\n"
        f"slowest: {found.slowest[0]:.2f} s, {found.slowest[1]}\n"
        f"most memory: {found.largest[0] / 1e6:.0f} MB, {found.largest[1]}"
    )
    return int(bool(found.finds))


if __name__ == "__main__":
    sys.exit(main())
