"""Attack the inspector: HLO texts with something wrong in them go through all that reads one.

    python -m tools.attack.fuzz --seconds 60    and for hours, with --seed for other texts;
                                                --keep names a folder for the texts of finds

An entry has to answer, or to raise HloParseError with a line and a column; the command line, to
answer or to refuse in one sentence: within a second, and within memory that grows with the text.
What is shown has no control characters; HTML, no tags but its own; JSON, no number that JSON has
not. A text twice as long may take twice as long. All else is a find: its text is kept, as small as
Hypothesis makes it, and one for each place is printed.

The texts are those of tests/programs/hlo_grammar.py and hlo_baits.py, of which `make test` tries a
sample.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import os
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
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp

from fp8lens import (
    TARGETS,
    HloParseError,
    Inspection,
    assert_fp8_collectives,
    assert_fp8_gemms,
    diff_hlo,
    format_hlo_module,
    inspect,
    mesh,
    parse_hlo_module,
    print_hlo_module,
    why_not_fp8,
)
from fp8lens.cli import main as main_of_cli
from fp8lens.compile.stages import Stage, dumped
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import Ink, coloured
from fp8lens.matmul import kernels as cost
from fp8lens.matmul.kernels import print_kernels
from helpers.numerics.recipes import scaled_dot, to_e4m3
from tests.programs import hlo_baits, hlo_grammar

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 1.0  # for a text below 100 kB, in each entry
H100 = TARGETS["H100"]
MEMORY = 1 << 28  # bytes beside what is in use when the attack begins


# Whole texts ----------------------------------------------------------------------------------


def programs() -> list[tuple[str, str]]:
    """Programs to begin from, each with another text of it: what was compiled here, with what XLA's
    rewriter had made it of, and the reverse; and saved ones of other releases."""
    e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
    matrix, scalar = jax.ShapeDtypeStruct((256, 256), e4m3), jax.ShapeDtypeStruct((), f32)
    rest = [jax.ShapeDtypeStruct((256,), jnp.bfloat16), *[scalar] * 3]

    def layer(a, b, bias, a_scale, b_scale, d_scale):
        d = jax.nn.gelu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
        return to_e4m3(d, d_scale), jnp.max(jnp.abs(d))

    def careless(a, b, bias, a_scale, b_scale, d_scale):
        d = jax.nn.silu(jax.lax.dot(a.astype(f32) * a_scale, b.astype(f32)) + bias) * d_scale
        return d.astype(e4m3), jnp.max(jnp.abs(d))

    def loop(a, b, bias, *scales):
        return jax.lax.scan(lambda a, _: (layer(a, b, bias, *scales)[0], None), a, length=4)[0]

    split = jax.NamedSharding(mesh("H100", {"d": 4}), jax.P("d", None))
    gathered = [jax.ShapeDtypeStruct((256, 256), e4m3, sharding=split)] * 2
    get = functools.partial(dumped, pattern="gemm-rewriter")
    dumps = [get(fn, matrix, matrix, *rest) for fn in (layer, careless, loop)]
    dumps += [get(layer, matrix, matrix, *rest, gemm="triton"), get(layer, *gathered, *rest)]
    found: list[tuple[str, str]] = []
    for compiled, stages, *_ in dumps:
        text = str(compiled.as_text())
        before = next(stage.text for stage in stages if stage.before.endswith("gemm-rewriter"))
        found += [(text, before), (before, text)]
    saved = [path.read_text() for path in sorted(hlo_baits.SAVED.glob("*.*"))]
    return [*found, *((text, text) for text in saved)]


# What they go through -------------------------------------------------------------------------

TAG = re.compile(
    r"<(/?)(table|tr|th|td|code|p|pre|span|div|b|br)"
    r'(?: style="[\w\s:;,.()#%+\-]*"| colspan="\d")*>'
)
OURS = re.compile(r"\033\[[\d;]{1,4}m")  # print_hlo_module's colours
FILE = (
    Path(tempfile.gettempdir())
    / f"fuzz-{os.getpid()}"
    / "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt"
)
OPTIONS = (
    ["--ledger", "--require-fp8"],
    ["--json"],
    ["--debug"],
    ["--json", "--require-fp8"],
)  # by a text's length
LAZY = (
    *("shape", "attributes", "backend_config", "metadata", "frames", "custom_call_target"),
    *("called", "literal", "parameter_number", "is_root", "cmd"),
)
seen = functools.lru_cache(maxsize=30)(inspect)  # what an entry works out, the next need not


class Wrong(Exception):
    """An answer that is none."""


class Terminal(io.StringIO):
    """Standard output, of a terminal."""

    def isatty(self) -> bool:
        """Always: what is told a terminal is what is looked at."""
        return True


# A part of a text in one of the inspector's own colours.
COLOURED = re.compile(rf"\033\[(?:{'|'.join(ink.value for ink in Ink)})m([^\033]*)\033\[0m")


def shown(*texts: object) -> None:
    """A terminal gets no control characters, and nothing that turns the direction of writing."""
    for text in map(str, texts):
        if visible(text, "\n\t") != text:
            at = next(n for n, c in enumerate(text) if not c.isprintable() and c not in "\n\t")
            raise Wrong(f"{text[at]!r} is shown, after {text[max(at - 30, 0) : at]!r}")


def page(*views: Any) -> None:
    """HTML has fp8lens's own tags alone, each closed, and nothing else that looks like one."""
    for view in views:
        text = view if isinstance(view, str) else view._repr_html_()
        opened: list[str] = []
        for closing, name in TAG.findall(text):
            if closing and (not opened or opened.pop() != name):
                raise Wrong(f"</{name}> closes nothing")
            if not closing and name != "br":
                opened.append(name)
        if opened:
            raise Wrong(f"nothing closes <{opened[-1]}>")
        if found := re.search("<.{0,60}", TAG.sub("", text)):
            raise Wrong(f"{found[0]} in a page")


def strict(text: str) -> None:
    """JSON without the numbers that JSON has not."""

    def no_number(name: str) -> None:
        raise Wrong(f"{name} in JSON")

    json.loads(text, parse_constant=no_number)


def told(entry: Callable[..., object], *arguments: object) -> str:
    """What an entry prints to a terminal."""
    with contextlib.redirect_stdout(Terminal()) as out:
        entry(*arguments)
    return OURS.sub("", out.getvalue())


def command(*options: str) -> str:
    """The JSON of the command line, if any: its status comes with an answer, or one sentence."""
    with contextlib.redirect_stderr(Terminal()) as error:
        with contextlib.redirect_stdout(Terminal()) as output:
            status = main_of_cli([str(FILE), *options])
    out, err = (COLOURED.sub(r"\1", file.getvalue()) for file in (output, error))
    shown(out, err)
    plain = not err or "--json" in options
    if status == 2:
        plain = bool(re.fullmatch(r"error: .*\.\n", err[err.rfind("error: ") :]))
    failed = "fp8lens itself failed" in err or ("Traceback" in err and "--debug" not in options)
    answered = bool(out) == (status in (0, 1))
    if status not in (0, 1, 2) or not plain or failed or not answered:
        raise Wrong(f"{status}: {err[-150:]}")
    return out if status < 2 and "--json" in options else "{}"


def commanded(text: str, _: str) -> None:
    """The command line, of a file."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text, encoding="utf-8", errors="replace", newline="")
    strict(command(*OPTIONS[len(text) % len(OPTIONS)]))


def all_of(text: str, _: str) -> None:
    """Whatever a reader can ask of a module; a value that cannot be read is refused then."""
    module = seen(text).module
    for i in module:
        for name in LAZY:
            with contextlib.suppress(HloParseError):
                getattr(i, name)
    for computation in module.computations.values():
        if computation.root not in computation.instructions or not computation.lines:
            raise Wrong(f"%{computation.name} has no ROOT, or no lines")
        with contextlib.suppress(HloParseError):
            tuple(computation.parameters)


def costs(text: str, _: str) -> None:
    """Kernels and bytes, and the time they take."""
    module = seen(text).module
    shown(told(print_kernels, module), cost.bytes_moved(module), len(cost.fp8_calls(module)))
    # KeyError: of a type that the chip has not.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(KeyError):
        cost.roofline_seconds(module, "H100")
    page(cost._Table(cost.kernels(module)))


def asserted(text: str, _: str) -> None:
    """The assertions for tests: they pass, or say what is wrong."""
    for way in (
        lambda: assert_fp8_gemms(seen(text)),
        lambda: assert_fp8_gemms(seen(text), min_flops_share=0.5),
        lambda: assert_fp8_collectives(seen(text)),
    ):
        try:
            way()
        except AssertionError as error:
            shown(error)


def reasons(before: str, after: str) -> None:
    """The reasons of a compile that made one text of the other."""
    stages = (Stage("", "", "cublas-gemm-rewriter", seen(before).module),)
    why = Inspection(seen(after).module, "", None, stages, {}, H100)
    shown(why_not_fp8(why), why)
    page(why)
    strict(why.json())


def differs(text: str, other: str) -> None:
    """What tells two texts apart, in both directions."""
    one, two = seen(text).module, seen(other).module
    for diff in (diff_hlo(one, two), diff_hlo(two, one).around("f8|dot|%a")):
        shown(diff)
        page(diff)


def printed(text: str, _: str) -> None:
    """The module as print_hlo_module has it."""
    module = seen(text).module
    shown(told(lambda: print_hlo_module(module, metadata=True, backend_cfg=True)))
    page(coloured(format_hlo_module(module)))


def views(name: str) -> Callable[[str, str], None]:
    """An entry that shows one of an Inspection's parts."""

    def entry(text: str, _: str) -> None:
        shown(getattr(seen(text), name))
        page(getattr(seen(text), name))

    return entry


ENTRIES: dict[str, Callable[[str, str], object]] = {
    "parse": lambda text, _: parse_hlo_module(text),
    "command line": commanded,  # the next ones begin as it does, with what `parse` answers
    "all of it": all_of,
    "print": printed,
    "report": views("report"),
    "ledger": views("ledger"),
    "collectives": views("collectives"),
    "bill": views("bill"),
    "bill as JSON": lambda text, _: strict(seen(text).bill.json()),
    "json": lambda text, _: strict(seen(text).json()),
    "cost": costs,
    "assertions": asserted,
    "reasons, of what was compiled": lambda text, other: reasons(other, text),
    "reasons, of what it was made of": lambda text, other: reasons(text, other),
    "diff": differs,
}


class Slow(BaseException):
    """An entry took longer than it may. No Exception: nothing is to catch it."""


def attack(entry: str, text: str, other: str) -> str:
    """ "answer", "refused", or the find: what was raised, and where."""

    def stop(*_: object) -> None:
        raise Slow(f"more than {SECONDS:g} s")

    signal.signal(signal.SIGPROF, stop)  # of the processor's time: the machine may be busy
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS * max(1, len(text) / 100_000))
        try:
            ENTRIES[entry](text, other)
            return "answer"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except HloParseError as error:
        in_full = error.line >= 1 and error.column >= 1 and visible(str(error)) == str(error)
        in_full = in_full and f"line {error.line}, column {error.column}: " in str(error)
        wrong = f"{entry}: HloParseError without a place, or not to be shown"
        return "refused" if in_full else wrong
    except (Exception, Slow) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "fp8lens" in f.filename]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "outside of fp8lens"
        return f"{entry}: {type(error).__name__} in {place}\n    {str(error)[:300]!r}"


def attacks(text: str, other: str) -> Iterator[tuple[str, str, float]]:
    """Each entry, what came of it, and the seconds of the processor that it took. A text that is
    refused goes through the parser, and through the command line."""
    refused = False
    for entry in ENTRIES:
        start = time.process_time()
        said = attack(entry, text, other)
        yield entry, said, time.process_time() - start
        refused |= said == "refused" and entry == "parse"
        if refused and entry == "command line":
            return


def finds(text: str, other: str) -> list[str]:
    """What gets through of a text."""
    seen.cache_clear()
    said = [said for _, said, _ in attacks(text, other)]
    return [one for one in said if one not in ("answer", "refused")]


# How the time grows ---------------------------------------------------------------------------

NOTICED = 0.005  # seconds: far more than noise, and than what a linear entry takes for LENGTH
LENGTH = 8_000
LIMIT = 3.0  # times as long, for twice the text: linear time gives 2, quadratic 4


def times_of(text: str, runs: int) -> tuple[dict[str, float], list[str]]:
    """The least seconds of each entry, of a few runs; and the finds."""
    least: dict[str, float] = {}
    found: list[str] = []
    for _ in range(runs):
        seen.cache_clear()
        for entry, said, seconds in attacks(text, hlo_baits.PLAIN):
            least[entry] = min(seconds, least.get(entry, seconds))
            found += [said] if said not in ("answer", "refused") else []
    return least, found


def grows(text_of: Callable[[int], str], n: int = LENGTH) -> list[str]:
    """The entries whose time grows faster than the text, and other finds of it. What is over before
    it is noticed is not measured, and what seems to grow is measured again: the machine may be
    busy."""
    short, long = text_of(n), text_of(2 * n)
    twice = len(long) / len(short) / 2
    slow: list[str] = []
    for runs in (1, 3, 5):
        times, found = times_of(short, runs)
        noticed = [entry for entry, seconds in times.items() if seconds > NOTICED]
        if found or not noticed:
            return found
        longer, found = times_of(long, runs)
        if found:
            return found
        ratios = {entry: longer[entry] / times[entry] / twice for entry in noticed}
        slow = [f"{e}: {r:.1f} times as long for twice" for e, r in ratios.items() if r >= LIMIT]
        if not slow:
            break
    return slow


# Trying it ------------------------------------------------------------------------------------


class Find(Exception):
    """An attack got through: Hypothesis then looks for a smaller text that does."""


class Over(BaseException):
    """Enough was tried. No Exception: Hypothesis would take it for a find."""


SMALLER = 200  # texts to try for a smaller find


@dataclasses.dataclass
class Found:
    """What came of an attack: how often what, for each find the text that showed it, and the worst
    texts. `slowest`: seconds of the processor, for each 100 kB of a longer text, and what it was;
    `largest`: bytes beside what was in use before, and what it was."""

    seed: int
    keep: Path
    counted: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    finds: dict[str, Path] = dataclasses.field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")

    def attack(self, text: str, other: str, by: str) -> list[str]:
        """The finds of one text."""
        self.counted["texts"] += 1
        peak, found = memory(), []
        for entry, said, taken in attacks(text, other):
            self.counted[said if said in ("answer", "refused") else "finds"] += 1
            what = f"{entry} of {len(text)} characters, {by}"
            self.slowest = max(self.slowest, (taken / max(1, len(text) / 100_000), what))
            self.largest = max(self.largest, (memory() - peak, what))
            if said not in ("answer", "refused"):
                found.append(said)
        return found

    def keep_text(self, said: str, text: str, by: str) -> None:
        """Keep the text of a find and print it, once for each place."""
        place = said.partition("\n")[0]
        if place in self.finds:
            return
        self.keep.mkdir(parents=True, exist_ok=True)
        path = self.keep / f"{self.seed}-{len(self.finds)}.hlo"
        path.write_text(text, errors="surrogateescape")
        self.finds[place] = path
        print(f"{said}\n    by: {by}; text: {path.name}", flush=True)


def memory() -> int:
    """The most bytes that this process has used so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def by_hand(found: Found) -> None:
    """The texts made by hand."""
    for name, text in hlo_baits.SMALL.items():
        for said in found.attack(text, hlo_baits.PLAIN, name):
            found.keep_text(said, text, name)


def growing(found: Found) -> None:
    """A long word in each place, and programs that grow: whether the time grows with the text."""
    programs_that_grow = ((name, of, 400) for name, of in hlo_baits.GROWING.items())
    long_words = ((name, of, LENGTH) for name, of in hlo_baits.words())
    for name, text_of, n in (*programs_that_grow, *long_words):
        slow = grows(text_of, n)
        found.counted["texts"] += 1
        found.counted["finds"] += len(slow)
        for said in slow:
            found.keep_text(said, text_of(n), name)


def by_hypothesis(found: Found, known: list[tuple[str, str]], number: int, end: float) -> None:
    """A round of texts from the grammar; of what gets through, the smallest text is kept."""
    smallest: dict[str, tuple[str, str]] = {}
    tried_smaller = 0

    @hypothesis.seed(f"{found.seed}-{number}")
    @hypothesis.settings(
        max_examples=200,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        print_blob=False,
    )
    @hypothesis.given(hlo_grammar.texts(known))
    def attempt(texts: tuple[str, str]) -> None:
        nonlocal tried_smaller
        tried_smaller += bool(smallest)
        if time.process_time() > end or tried_smaller > SMALLER:
            raise Over
        for said in found.attack(*texts, f"round {number}"):
            place = said.partition("\n")[0]
            if place in found.finds or smallest and place not in smallest:
                continue
            if place not in smallest or len(texts[0]) < len(smallest[place][1]):
                smallest[place] = said, texts[0]
            raise Find(place)

    with contextlib.suppress(Find, Over):
        attempt()
    for said, text in smallest.values():
        found.keep_text(said, text, f"round {number} of seed {found.seed}")


def run(seconds: float, seed: int, keep: Path, words: bool = False) -> Found:
    """Attack for so long, after the baits; `words`: after all that grows, too."""
    known, (soft, hard) = programs(), resource.getrlimit(resource.RLIMIT_AS)
    found, end, number = Found(seed, keep), time.process_time() + seconds, 0
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        by_hand(found)
        if words:
            growing(found)
        while time.process_time() < end:
            by_hypothesis(found, known, number, end)
            number += 1
    except KeyboardInterrupt:
        print("stopped; so far:")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        shutil.rmtree(FILE.parent, ignore_errors=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command: prints what it tried and what got through; 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of the processor's time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--words", action="store_true", help="first all that grows, which takes minutes"
    )
    parser.add_argument(
        "--keep", type=Path, default=ROOT / "_build" / "fuzz", help="folder for the texts of finds"
    )
    options = parser.parse_args(arguments)
    found = run(options.seconds, options.seed, options.keep, options.words)
    counted = found.counted
    print(
        f"{counted['texts']} texts through {len(ENTRIES)} entries: {counted['answer']} answers, "
        f"{counted['refused']} times refused with line and column, {counted['finds']} times "
        f"something else, in {len(found.finds)} places\n"
        f"slowest: {found.slowest[0]:.2f} s, {found.slowest[1]}\n"
        f"most memory: {found.largest[0] / 1e6:.0f} MB, {found.largest[1]}"
    )
    return int(bool(found.finds))


if __name__ == "__main__":
    sys.exit(main())
