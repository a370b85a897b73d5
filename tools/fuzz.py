"""Attack the inspector: HLO texts with something wrong in them go through everything that reads one.

    python tools/fuzz.py --seconds 60        and for hours, with --seed for other texts; --keep names a folder for finds

An entry has to answer, or to raise HloParseError with a line and a column: within a second, and within memory that
grows with the text. All else is a find: its text is kept, and one for each place is printed.
"""
import argparse
import collections
import itertools
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from fp8lens import HloParseError, aot_compile, diff_hlo, format_hlo_module, inspect, mesh, parse_hlo_module
from helpers.recipes import scaled_dot, to_e4m3

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 1.0  # for a text below 100 kB, in each entry
MEMORY = 1 << 30  # bytes beside what is in use when the attack begins
NUMBERS = ("0", "-1", "1", "7", "255", "4294967296", "9223372036854775808", "9" * 30, "9" * 5000, "1e999", "nan")
MARKS = '()[]{},=%"#\\/*<>: \n\0\x1b‮'


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
    programs = [aot_compile(fn, matrix, matrix, bias, *scales) for fn in (layer, careless, loop)]
    programs += [aot_compile(layer, matrix, matrix, bias, *scales, gemm="triton"),
                 aot_compile(layer, *gathered, bias, *scales)]
    return [program.as_text() for program in programs] + [
        path.read_text() for path in sorted((ROOT / "tests" / "hlo").glob("*.*"))]


def _module(*lines: str, before: str = "", shape: str = "f32[8]") -> str:
    return (f"HloModule m\n\n{before}ENTRY %main (p: f32[8]) -> {shape} {{\n  %p = f32[8] parameter(0)\n"
            + "".join(f"  {line}\n" for line in lines) + "}\n")


def _called(n: int) -> str:
    """Computations that call each other, n deep."""
    one = "%c{} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] {}\n}}\n\n"
    return one.format(0, "negate(%p)") + "".join(
        one.format(k, f"call(%p), to_apply=%c{k - 1}") for k in range(1, n))


def _concatenates(n: int) -> str:
    lines = ["%c0 = f32[16] concatenate(%p, %p), dimensions={0}"]
    lines += [f"%c{k} = f32[{16 << k}] concatenate(%c{k - 1}, %c{k - 1}), dimensions={{0}}" for k in range(1, n)]
    return _module(*lines, f"ROOT %r = f32[8] slice(%c{n - 1}), slice={{[0:8]}}")


def baits() -> dict[str, str]:
    """Texts made by hand against one weakness each."""
    deep = "(" * 190 + "f32[8]" + ",)" * 190
    parts = ("%body (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8] parameter(0)\n}\n\n%cond (p: f32[8]) -> pred[] {\n"
             "  %p = f32[8] parameter(0)\n  ROOT %c = pred[] constant(true)\n}\n\n")
    loop = ('%w = f32[8] while(%p), condition=%cond, body=%body, '
            'backend_config={{"known_trip_count":{{"n":"{}"}}}}')
    return {
        "reads itself": _module("ROOT %b = f32[8] bitcast(%b)"),
        "read each other": _module("%a = f32[8] negate(%b)", "ROOT %b = f32[8] negate(%a)"),
        "read before it is there": _module("ROOT %a = f32[8] negate(%b)", "%b = f32[8] negate(%p)"),
        "calls itself": _module("ROOT %a = f32[8] call(%p), to_apply=%main"),
        "a trip count of 5000 digits": _module(loop.format("9" * 5000), "ROOT %r = f32[8] negate(%w)",
                                               before=parts),
        "trip counts whose product is large": _module(
            *(loop.replace("%w =", f"%w{k} =").format("9" * 300) for k in range(9)), "ROOT %r = f32[8] negate(%w8)",
            before=parts),
        "an element of 5000 digits": _module(f"ROOT %g = f32[8] get-tuple-element(%p), index={'9' * 5000}"),
        "a size of 5000 digits": _module(f"ROOT %n = f32[{'9' * 5000}] broadcast(%p), dimensions={{}}"),
        "sizes whose product is large": _module(f"ROOT %n = f32[{','.join(['9' * 18] * 300)}] broadcast(%p)"),
        "400 calls deep": _module("ROOT %r = f32[8] call(%p), to_apply=%c399", before=_called(400)),
        "concatenates of themselves": _concatenates(40),
        "a long word in the metadata": _module(f'ROOT %n = f32[8] negate(%p), metadata={{op_name="{"a" * 60_000}"}}'),
        "a long path in the metadata": _module(f'ROOT %n = f32[8] negate(%p), metadata={{op_name="{"a/" * 30_000}"}}'),
        "numbers behind a name": _module(f"ROOT %n{'.1' * 20_000}x = f32[8] negate(%p)"),
        "brackets behind a name": _module(f"ROOT %n = f32[8] negate(%p), a={')' * 20_000}x"),
        "a shape 190 deep": _module(f"ROOT %n = {deep} custom-call(%p), custom_call_target=\"x\"", shape=deep),
        "a long layout": _module(f"ROOT %n = f32[8]{{{'0,' * 20_000}0}} negate(%p)"),
        "numbers that JSON has not": _module(
            'ROOT %n = f32[8] custom-call(%p), custom_call_target="__cublas$lt$matmul$f8", '
            'backend_config={"gemm_backend_config":{"alpha_real":1e999,"beta":NaN}}'),
        "a configuration of other types": _module(
            'ROOT %n = f32[8] custom-call(%p, %p), custom_call_target="__cublas$lt$matmul$f8", '
            'backend_config={"gemm_backend_config":[1,{"epilogue":null}]}'),
        "a table that goes round": "HloModule m\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=2}\n"
                                   "2 {file_location_id=1 parent_frame_id=1}\n\n" + _module(
            "ROOT %n = f32[8] negate(%p), metadata={stack_frame_id=1}").partition("\n\n")[2],
        "escapes in a file's name": _module(
            r'ROOT %n = f32[8] dot(%p, %p), metadata={source_file="\033[2J\007x.py" source_line=1}'),
    }


# What is done to them -------------------------------------------------------------------------------------------------

def _of_lines(change: Callable[[random.Random, list[str]], None]) -> Callable[[random.Random, str, str], str]:
    def changed(r: random.Random, text: str, other: str) -> str:
        lines = text.split("\n")
        change(r, lines)
        return "\n".join(lines)
    return changed


def _moved(r: random.Random, lines: list[str]) -> None:
    lines.insert(r.randrange(len(lines)), lines.pop(r.randrange(len(lines))))


def _of_words(pattern: str, choose: Callable[[random.Random, list[str]], str]) -> Callable[..., str]:
    def changed(r: random.Random, text: str, other: str) -> str:
        found = list(re.finditer(pattern, text))
        if not found:
            return text
        at = r.choice(found)
        return text[:at.start()] + choose(r, [m[0] for m in found]) + text[at.end():]
    return changed


def _marked(r: random.Random, text: str, other: str) -> str:
    at, count = r.randrange(len(text)), r.choice((0, 1, 1, 1, 300))
    return text[:at] + r.choice(MARKS) * count + text[at + r.choice((0, 1)):]


def _spliced(r: random.Random, text: str, other: str) -> str:
    ours, theirs = text.split("\n"), other.split("\n")
    return "\n".join(ours[:r.randrange(len(ours))] + theirs[r.randrange(len(theirs)):])


any_of = lambda r, found: r.choice(found)
CHANGES = {
    "a line is lost": _of_lines(lambda r, lines: lines.pop(r.randrange(len(lines)))),
    "a line is there twice": _of_lines(lambda r, lines: lines.insert(r.randrange(len(lines)), r.choice(lines))),
    "a line is elsewhere": _of_lines(_moved),
    "another name": _of_words(r"%[\w.\-]+", any_of),
    "another number": _of_words(r"\b\d+\b", lambda r, found: r.choice(found + [*NUMBERS] * len(found))),
    "another type": _of_words(r"\b(?:f8e4m3fn|f32|bf16|s8|s32|pred)\[", any_of),
    "another opcode": _of_words(r"\b[a-z][a-z\-]+(?=\()", any_of),
    "another key": _of_words(r"\b\w+(?==)|\"\w+\"(?=:)", any_of),
    "another value": _of_words(r"(?<==)\{[^{}\n]*\}|(?<=\":)[^,{}\n]+",
                               lambda r, found: r.choice([*found, "{}", "null", "[]", "true", "1e400", "{1,0,1}"])),
    "another shape": _of_words(r"\w+\[[\d,]*\](?:\{[^{}\n]*\})?", any_of),
    "a character": _marked,
    "two halves": _spliced,
    "the end is lost": lambda r, text, other: text[:r.randrange(len(text))],
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

ENTRIES: dict[str, Callable[[str, str], object]] = {
    "parse": lambda text, _: parse_hlo_module(text),
    "print": lambda text, _: format_hlo_module(text, metadata=True, backend_cfg=True),
    "report": lambda text, _: (str(inspect(text).report), inspect(text).report._repr_html_()),
    "ledger": lambda text, _: (str(inspect(text).ledger), inspect(text).ledger._repr_html_()),
    "json": lambda text, _: inspect(text).json(),
    "collectives": lambda text, _: str(inspect(text).collectives),
    "diff": lambda text, known: str(diff_hlo(text, known)),
}


class Slow(BaseException):
    """An entry took longer than it may. No Exception: nothing is to catch it."""


def attack(entry: str, text: str, known: str) -> str:
    """"answer", "refused", or the find: what was raised, and where."""
    def stop(*_):
        raise Slow(f"more than {SECONDS:g} s")

    signal.signal(signal.SIGPROF, stop)  # of the processor's time: the machine may be busy
    signal.setitimer(signal.ITIMER_PROF, SECONDS * max(1, len(text) / 100_000))
    try:
        ENTRIES[entry](text, known)
        return "answer"
    except HloParseError as error:
        return "refused" if error.line >= 1 and error.column >= 1 else "HloParseError without a place"
    except (Exception, Slow) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "fp8lens" in f.filename]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "outside of fp8lens"
        return f"{entry}: {type(error).__name__} in {place}\n    {str(error)[:80]!r}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def run(seconds: float, seed: int, keep: Path) -> tuple[collections.Counter, dict[str, Path]]:
    """Attack for so long. How often what came out, and for each find the text that showed it first."""
    known, (soft, hard) = whole(), resource.getrlimit(resource.RLIMIT_AS)
    counted, finds, end = collections.Counter(), {}, time.monotonic() + seconds
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        by_hand = [(name, text, known[0]) for name, text in baits().items()]
        for number, (done, text, original) in enumerate(itertools.chain(by_hand, texts(seed, known))):
            if time.monotonic() > end and number >= len(by_hand):
                break
            counted["texts"] += 1
            for entry in ENTRIES:
                said = attack(entry, text, original)
                counted[said if said in ("answer", "refused") else "finds"] += 1
                place = said.partition("\n")[0]
                if said not in ("answer", "refused") and place not in finds:
                    keep.mkdir(parents=True, exist_ok=True)
                    finds[place] = keep / f"{seed}-{number}.hlo"
                    finds[place].write_text(text, errors="surrogateescape")
                    print(f"{said}\n    by: {done}; text: {finds[place].name}", flush=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return counted, finds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=ROOT / "_build" / "fuzz", help="folder for the texts of finds")
    options = parser.parse_args(arguments)
    counted, finds = run(options.seconds, options.seed, options.keep)
    print(f"{counted['texts']} texts through {len(ENTRIES)} entries: {counted['answer']} answers, {counted['refused']} "
          f"times refused with line and column, {counted['finds']} times something else, in {len(finds)} places")
    return int(bool(finds))


if __name__ == "__main__":
    sys.exit(main())
