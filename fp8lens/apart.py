"""Another Python process, which ends with the one that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def python(code: str, *arguments: str) -> list[str]:
    """The command line of a Python process that runs `code`. It looks for modules where this one
    does. On Linux, where alone something is compiled, it is killed when this process ends, even by
    SIGKILL.
    """
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from fp8lens.apart import end_with; end_with({os.getpid()}); {code}"
    )
    return [sys.executable, "-P", "-c", program, *arguments]


def end_with(parent: int) -> None:
    """Have Linux kill this process when `parent` ends, the process that started it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def ended(status: int) -> str:
    """How a process ended, of its exit status as `subprocess` gives it."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
