"""Time what reads HLO, `make bench`: every figure is a ratio of two times of this run.

The parser beside XLA's own in C++ (jaxlib's private `_hlo`); parsing, reporting and printing at a
few sizes, for each MB, which stays the same where the time grows with the text alone; `inspect`,
and the fusion lab's live answer, beside a compile. The program is a transformer's training step
with FP8 matmuls, compiled for an H100.
"""

import functools
import gc
import re
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from helpers import aot_compile, format_hlo_module, inspect, parse_hlo_module, report_gemms
from helpers.explorers import compiled, fusion_lab

from fp8_decoder import STEPS_BACK, Decoder, loss, new_weights

LAYERS = 12
MEGABYTES = (0.1, 1, 10)
E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)


def fp8_matmul(x: jax.Array, w: jax.Array, _: jax.Array) -> jax.Array:
    """x [M, K] times w [N, K], both scaled by their amax and quantized to E4M3, in FP8. For
    `Decoder.fp8`, without its histories, and with the backward pass that JAX makes of it.
    """

    def quantize(a):
        scale = jnp.max(jnp.abs(a)) / E4M3_MAX
        codes = jnp.clip(a / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
        return codes.astype(a.dtype) * scale

    return jax.lax.dot(quantize(x), quantize(w.astype(x.dtype)).T)


def training_step(layers: int, width: int = 256, batch: int = 8) -> tuple[Callable, tuple]:
    """A function, one step of SGD with momentum on a decoder of so many layers; and the shapes of
    its arguments: weights, momentum, tokens.
    """
    decoder = Decoder(
        "fp8", letters=512, width=width, hidden=2 * width, blocks=layers, fp8=fp8_matmul
    )
    unused = {name: jnp.zeros((3, STEPS_BACK)) for name in decoder.in_fp8}

    def step(
        weights: dict[str, jax.Array], momentum: dict[str, jax.Array], tokens: jax.Array
    ) -> tuple[dict, dict, jax.Array]:
        value, gradients = jax.value_and_grad(lambda w: loss(decoder, w, unused, tokens))(weights)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - 1e-3 * m, weights, momentum), momentum, value

    weights = jax.eval_shape(lambda key: new_weights(decoder, key), jax.random.key(0))
    return step, (weights, weights, jax.ShapeDtypeStruct((batch, 129), jnp.int32))


def replicated(text: str, times: int) -> str:
    """The module with its computations `times` over: the copies have names of their own, and ENTRY
    calls what was the ENTRY of each.
    """
    head, _, body = text.partition("\n\n\n")
    entry = re.search(r"^ENTRY %(\S+) \((.*)\) -> (.*) \{$", body, re.M)
    assert entry, "a module has an ENTRY computation"
    given = ", ".join(f"%{name}" for name in re.findall(r"([\w.\-]+): ", entry[2]))
    copies = [
        re.sub(r"%([\w.\-]+)", rf"%\1.copy{n}", body).replace("\nENTRY ", "\n")
        for n in range(times - 1)
    ]
    calls = [
        f"  %again.{n} = {entry[3]} call({given}), to_apply=%{entry[1]}.copy{n}\n"
        for n in range(times - 1)
    ]
    root = body.index("\n  ROOT ", entry.end()) + 1
    return "\n\n".join([head, *copies, body[:root] + "".join(calls) + body[root:]])


def seconds(runs: int, *functions: Callable[[], object]) -> list[float]:
    """Median time of each function, run in turn, so that what else the machine does falls on all of
    them.
    """
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for function, times in zip(functions, taken, strict=True):
            gc.collect()
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def read(text: str) -> int:
    """Parse a module and read every instruction. Returns the number of operands."""
    return sum(len(i.operands) for i in parse_hlo_module(text) if i.name and i.opcode)


def everything(fn: Callable, *args) -> list[str]:
    """Inspect a function and ask for all that needs no further compile."""
    seen = inspect(fn, *args)
    parts = (seen.report, seen.reasons, seen.ledger, seen.collectives, seen.hlo, seen.json())
    return [str(part) for part in parts]


def for_new(ask: Callable, fn: Callable, args: tuple) -> Callable[[], object]:
    """A call that asks about a function which JAX has not seen."""

    def asked() -> object:
        jax.clear_caches()
        return ask(lambda *given: fn(*given), *args)

    return asked


def main() -> None:
    """Print the ratios."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    fn, args = training_step(LAYERS)
    text = aot_compile(fn, *args).as_text()
    ours, xla = seconds(5, lambda: read(text), lambda: _hlo.hlo_module_from_text(text))
    print(f"{len(text) / 1e6:.1f} MB: the parser takes {ours / xla:.2f} of the time of XLA's own")

    empty, its_args = training_step(0)
    small = aot_compile(empty, *its_args).as_text()
    first: dict[str, float] = {}
    ways: dict[str, Callable] = {
        "parse": parse_hlo_module,
        "report": report_gemms,
        "print": format_hlo_module,
    }
    for megabytes in MEGABYTES:
        module = replicated(small, max(1, round(megabytes * 1e6 / len(small))))
        found = []
        for name, way in ways.items():
            (taken,) = seconds(3, functools.partial(way, module))
            each = taken / len(module)
            found.append(f"{name} {each / first.setdefault(name, each):.2f}")
        print(f"{len(module) / 1e6:.1f} MB: time for each MB, beside the first: {', '.join(found)}")

    alone, asked = seconds(3, for_new(aot_compile, fn, args), for_new(everything, fn, args))
    print(f"inspect takes {asked / alone:.2f} times the compile alone")

    layer, shapes = compiled.function(fusion_lab.FIRST)
    alone, answered = seconds(
        5,
        for_new(aot_compile, layer, tuple(shapes)),
        lambda: compiled.outcome(fusion_lab.FIRST, soon=True),
    )
    print(f"the fusion lab answers in {answered / alone:.2f} of the time of a whole compile")


if __name__ == "__main__":
    main()
