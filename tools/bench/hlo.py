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

E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)


def fp8_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., K] times w [K, N], both scaled by their amax and quantized to E4M3, in FP8."""

    def quantize(a):
        scale = jnp.max(jnp.abs(a)) / E4M3_MAX
        return (
            jnp.clip(a / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).astype(a.dtype)
            * scale
        )

    return jnp.einsum("...k,nk->...n", quantize(x), quantize(w.T))


def norm(x: jax.Array) -> jax.Array:
    """Layer normalization of x [..., K], without parameters."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(x: jax.Array, qkv: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention of x [batch, length, K]; qkv is [K, 3K]."""
    batch, length, width = x.shape
    q, k, v = jnp.moveaxis(
        fp8_matmul(x, qkv).reshape(batch, length, 3, heads, width // heads), 2, 0
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)


def training_step(params: dict, momentum: dict, tokens: jax.Array) -> tuple[dict, dict, jax.Array]:
    """One step of SGD with momentum on a decoder-only transformer."""

    def loss(params):
        x = params["embedding"][tokens[:, :-1]]
        for layer in params["layers"]:
            with jax.named_scope("attention"):
                x = x + fp8_matmul(attention(norm(x), layer["qkv"], heads=4), layer["out"])
            with jax.named_scope("mlp"):
                x = x + fp8_matmul(
                    jax.nn.gelu(fp8_matmul(norm(x), layer["up"]) + layer["bias"]), layer["down"]
                )
        logits = jax.nn.log_softmax(norm(x) @ params["embedding"].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum, value


def step_shapes(
    layers: int, width: int = 256, batch: int = 8
) -> tuple[dict, dict, jax.ShapeDtypeStruct]:
    """Shapes of the arguments of `training_step`."""
    layer = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "bias": (4 * width,),
    }
    dims = {"embedding": (512, width), "layers": [layer] * layers}
    params = jax.tree.map(
        lambda d: jax.ShapeDtypeStruct(d, jnp.float32), dims, is_leaf=lambda d: isinstance(d, tuple)
    )
    return params, params, jax.ShapeDtypeStruct((batch, 129), jnp.int32)


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
    small, text = (aot_compile(training_step, *step_shapes(n)).as_text() for n in (0, layers))
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
