"""Time `fp8lens.inspect` beside the compile that it needs anyway, and a saved dump beside Python's
start: `make bench`.

Of each program, in turn in one run: the compile alone, and inspect with everything asked of it but
the passes (which compile anew). JAX keeps what it has compiled: each time the function is another
one to it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from fp8lens import aot_compile, inspect
from tools.bench.hlo import compiled_text, training_step

ROUNDS = 3


def layer(x, w, x_scale, w_scale, y_scale):
    """The README's."""
    y = jax.nn.relu(
        jax.lax.dot(x.astype(jnp.float32) * x_scale, (w.astype(jnp.float32) * w_scale).T)
    )
    return jnp.clip(y * y_scale, -448, 448).astype(jnp.float8_e4m3fn)


def everything(fn: Callable, *args) -> list[str]:
    """Inspect a function and ask for all that needs no further compile."""
    seen = inspect(fn, *args)
    parts = (seen.report, seen.reasons, seen.ledger, seen.collectives, seen.hlo, seen.json())
    return [str(part) for part in parts]


def seconds(ask: Callable, fn: Callable, args: tuple) -> float:
    """How long `ask` takes for a function that JAX has not seen."""
    jax.clear_caches()
    start = time.perf_counter()
    ask(lambda *given: fn(*given), *args)
    return time.perf_counter() - start


def main() -> None:
    """Time both, and print their ratios."""
    matrix = jax.ShapeDtypeStruct((4096, 4096), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    programs: dict[str, tuple[Callable, tuple, float]] = {
        "the README's layer": (layer, (matrix, matrix, scale, scale, scale), 1.25),
        "a training step of 12 layers": (*training_step(layers=12), 1.15),
    }
    aot_compile(layer, *programs["the README's layer"][1])  # what the first compile alone costs
    for name, (fn, args, goal) in programs.items():
        rounds = [
            (seconds(aot_compile, fn, args), seconds(everything, fn, args)) for _ in range(ROUNDS)
        ]
        alone, asked = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{name}: compile {alone:.2f} s, inspect {asked:.2f} s: {asked / alone:.2f} times "
            f"(goal {goal})"
        )
    text = compiled_text(layers=12)
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder, "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt")
        dump.write_text(text)
        # As pip installs it: its modules compiled.
        compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

        def process(*arguments: str) -> float:
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, env=compiled
            )
            return time.perf_counter() - start

        process("-m", "fp8lens", "--help")
        turns = [
            (
                process("-c", "pass"),
                process("-m", "fp8lens", str(dump)),
                process("-m", "fp8lens", "--help"),
            )
            for _ in range(ROUNDS)
        ]
        start, read, told = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"a saved dump of {len(text) / 1e6:.1f} MB: {read - start:.2f} s beyond Python's start "
            f"(goal 1); --help: {told - start:.2f} s"
        )


if __name__ == "__main__":
    main()
