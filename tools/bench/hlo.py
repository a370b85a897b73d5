"""Time what reads HLO, `make bench`.

First `parse_hlo_module` beside XLA's own C++ parser (jaxlib's private `_hlo`); then parsing,
printing, reporting and comparing 0.1 to 50 MB, with time and memory for each MB, which stay the
same where they grow with the text alone. --quick leaves out what is larger than 1 MB.

Both parsers read the whole text; ours also reads every instruction's name, opcode and operands,
which XLA's parser resolves as it goes. The module is a transformer's training step with FP8
matmuls, compiled for an H100.
"""

import argparse
import gc
import multiprocessing.connection
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from helpers import aot_compile, diff_hlo, format_hlo_module, parse_hlo_module, report_gemms

from fp8_decoder import STEPS_BACK, Decoder, loss, new_weights

E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)


def fp8_matmul(x: jax.Array, w: jax.Array, _: jax.Array) -> jax.Array:
    """x [M, K] times w [N, K], both scaled by their amax and quantized to E4M3, in FP8. For
    `Decoder.fp8`, without its histories, and with the backward pass that JAX makes of it.
    """

    def quantize(a):
        scale = jnp.max(jnp.abs(a)) / E4M3_MAX
        return (
            jnp.clip(a / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).astype(a.dtype)
            * scale
        )

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


def compiled_text(layers: int) -> str:
    """The training step of so many layers, as XLA prints what it compiled for an H100."""
    step, shapes = training_step(layers)
    return aot_compile(step, *shapes).as_text()


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


def read(text: str) -> int:
    """Parse a module and read every instruction. Returns the number of operands."""
    return sum(len(i.operands) for i in parse_hlo_module(text) if i.name and i.opcode)


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


WAYS: dict[str, Callable[[str], object]] = {
    "parse": parse_hlo_module,
    "print": lambda text: format_hlo_module(text, metadata=True, backend_cfg=True),
    "report": lambda text: str(report_gemms(text)),
    "diff": lambda text: str(diff_hlo(text, text.replace(" multiply(", " add(", 1))),
}


def _memory(what: str) -> int:
    """Bytes: VmRSS in use, VmHWM at the most so far."""
    found = re.search(rf"{what}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found, f"Linux says {what} of each process"
    return 1024 * int(found[1])


def _measure(way: str, text: str, answer: multiprocessing.connection.Connection) -> None:
    in_use, start = _memory("VmRSS"), time.process_time()
    WAYS[way](text)
    answer.send((time.process_time() - start, _memory("VmHWM") - in_use))


def measured(way: str, text: str) -> tuple[float, float]:
    """Seconds of the processor, and bytes at the most beside what was in use before, in a process
    of its own.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_measure, args=(way, text, there))
    child.start()
    taken = here.recv()
    child.join()
    return taken


def main() -> None:
    """Compile a large program and print what reading it takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="nothing larger than 1 MB")
    quick = parser.parse_args().quick
    layers = 1 if quick else 14
    print(f"compiling training steps of 0 and {layers} layers for H100 ...", file=sys.stderr)
    small, text = (compiled_text(n) for n in (0, layers))
    ours, rows = seconds(5, lambda: read(text), lambda: report_gemms(text))
    print(
        f"{len(text) / 1e6:5.1f} MB, median of 5: report_gemms {rows:6.3f} s, "
        f"{rows / ours:.1f} times the parser's time, for {len(report_gemms(text).rows)} matmuls"
    )
    beside_xla(text, 9)
    if not quick:
        beside_xla(replicated(text, round(50e6 / len(text))), 3)
    heads = "".join(f"{way:>16}" for way in WAYS)
    print(f"\nfor each MB, milliseconds and MB of memory:\n   MB{heads}")
    for size in (0.1, 1) if quick else (0.1, 1, 10, 50):
        print(row(replicated(small, max(1, round(size * 1e6 / len(small))))), flush=True)


def beside_xla(module: str, runs: int) -> None:
    """Print how long our parser and XLA's take for a module."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    ours, xla = seconds(runs, lambda: read(module), lambda: _hlo.hlo_module_from_text(module))
    size = len(module) / 1e6
    print(
        f"{size:5.1f} MB, median of {runs}: parse_hlo_module {ours:6.3f} s = "
        f"{size / ours:5.1f} MB/s; XLA's parser {xla:6.3f} s = {size / xla:5.1f} MB/s; "
        f"ratio {xla / ours:.2f}"
    )


def row(module: str) -> str:
    """What each way to read a module takes, by megabyte."""
    megabytes = len(module) / 1e6
    cells = []
    for way in WAYS:
        taken, memory = measured(way, module)
        cells.append(f"{1000 * taken / megabytes:7.0f} ms {memory / 1e6 / megabytes:3.0f} MB")
    return f"{megabytes:5.1f}" + "  ".join(["", *cells])


if __name__ == "__main__":
    main()
