"""What XLA makes of a program of "Fusion lab": compiled for a chip that need not be here; for the
record, and for a notebook that asks while it waits.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8lens import Inspection, inspect
from fp8lens.hlo.text import format_hlo_module
from helpers.explorers.fusion_lab import FILE, Choice, check, program
from helpers.figures import source_lines

DTYPES = {
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
}
# To compile a third as long: to the end of XLA's optimizations. Neither may be left out for Triton,
# whose kernels are tried, and are looked into.
_SOON = {"assemble": False, "compiler_options": {"xla_gpu_autotune_level": 0}}


def function(
    choice: Choice, sizes: Sequence[int] = ()
) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """The program of a choice, to be compiled, and its arguments. `sizes` as `program` has them."""
    text = program(choice, sizes)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, **DTYPES}
    exec(compile(text.code, FILE, "exec"), names)
    shapes = text.arguments.values()
    return names["layer"], [jax.ShapeDtypeStruct(dims, DTYPES[dtype]) for dtype, dims in shapes]


def inspected(choice: Choice, sizes: Sequence[int] = (), soon: bool = False) -> Inspection:
    """The program of a choice, compiled. Raises what XLA raises.

    With `soon`, and by cuBLASLt, machine code is not made: the program, and all that is said of it,
    are the same.
    """
    layer, arguments = function(choice, sizes)
    options: dict[str, Any] = _SOON if soon and choice["library"] == "cublaslt" else {}
    return inspect(layer, *arguments, target=choice["chip"], gemm=choice["library"], **options)


def outcome(choice: Choice, sizes: Sequence[int] = (), soon: bool = False) -> dict[str, Any]:
    """What became of a choice, as "Fusion lab" shows it; or {"error": ...}.

    `steps` has for each line of the code, counted from 1, the numbers of the kernels that do it.
    """
    try:
        seen = inspected(choice, sizes, soon)
    except Exception as error:  # that a program does not compile is a finding
        return {"error": str(error).partition("\n")[0][:300]}
    return source_lines.outcome(seen) | {
        "reasons": [
            {"lost": str(one.lost), "reason": one.reason, "fix": one.fix, "rule": one.rule}
            for one in seen.reasons
        ],
        "hlo": format_hlo_module(seen.module).splitlines(),
        "steps": steps(seen, len(program(choice, sizes).code.splitlines())),
    }


def steps(seen: Inspection, lines: int) -> list[list[int]]:
    """For each line of the code the numbers of the kernels that do it; of the first, `def`, and of
    a line that no kernel surely does, none. What is after the last line with a kernel is left out.
    """
    does = source_lines.kernels_of_lines(seen, FILE, range(1, lines + 1))
    found = {line: sorted(some - {source_lines.UNKNOWN}) for line, some in does.items()}
    found = {line: kernels for line, kernels in found.items() if kernels}
    return [found.get(line, []) for line in range(1, max(found, default=0) + 1)]


# While a reader waits -----------------------------------------------------------------------------


def answer(choice: Choice, sizes: Sequence[int]) -> dict[str, Any]:
    """What "Fusion lab" shows of a choice, with its code: as the record has it, kept here for the
    next time. ValueError, in a sentence, for what cannot be chosen.
    """
    check(choice, sizes)
    return _answer(tuple(choice.items()), tuple(sizes))


@functools.lru_cache(512)
def _answer(choice: tuple[tuple[str, str], ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    chosen = dict(choice)
    code = program(chosen, sizes).code.splitlines()
    return outcome(chosen, sizes, soon=True) | {"code": code}


class Latest:
    """Does one request after the other in a thread of its own: whoever asks does not wait, and of
    the requests that wait only the last is done. What `do` raises is its own affair.

    Example:

        >>> done = []
        >>> latest = Latest(done.append)
        >>> latest.ask("this")
        >>> latest.finish()
        >>> done
        ['this']
    """

    def __init__(self, do: Callable[[Any], None]):
        self._do = do
        self._lock = threading.Lock()
        self._waiting: list[Any] = []
        self._thread: threading.Thread | None = None

    def ask(self, request: Any) -> None:
        """Have a request done next, in the place of one that waits."""
        with self._lock:
            self._waiting = [request]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until nothing waits."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                request = self._waiting.pop()
            self._do(request)
