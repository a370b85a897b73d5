"""What the chip does while something is timed: its clock, its power, its temperature, and what
holds it back.

nvidia-smi samples all the while, in a process of its own; afterwards its samples are sorted by what
was being timed. So a ratio of two forms can be told from a ratio of two clocks.
"""

import contextlib
import datetime
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

FIELDS = (
    "timestamp",
    "clocks.sm",
    "power.draw.instant",
    "temperature.gpu",
    "clocks_event_reasons.active",
)
EVERY = 25  # milliseconds
# nvidia-smi sees all GPUs of the machine; JAX the first of those that it is given, by number or by
# name.
WHICH = f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',')[0] or '0'}"
# Bits of clocks_event_reasons.active, NVML's nvmlClocksEventReason*: what keeps a clock below its
# highest.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


# `timeout`: it must not outlive a process that is killed; in the same group, so that it is killed
# with it. `stdbuf`: a line a sample, and none left behind when it is ended.
COMMAND = ("timeout", "--foreground", "600", "stdbuf", "-oL", "nvidia-smi")


# (seconds since 1970, MHz, W, degrees, reasons), None in place of what the machine does not tell.
Sample = tuple[float, float | None, float | None, float | None, int | None]


class Watch:
    """Samples of the GPU while `with Watch() as watch:` lasts; `watch.during(name)` says what is
    timed meanwhile.

    On a machine without nvidia-smi there are no samples, and every summary is None.
    """

    def __init__(self, command: tuple[str, ...] = COMMAND):
        ask = (
            f"--query-gpu={','.join(FIELDS)}",
            "--format=csv,noheader,nounits",
            WHICH,
            f"--loop-ms={EVERY}",
        )
        self.command = (*command, *ask)
        self.slices: list[tuple[str, float, float]] = []
        self.samples: list[Sample] = []

    def __enter__(self) -> "Watch":
        self.file = tempfile.TemporaryFile("w+")
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = subprocess.Popen(
                self.command, stdout=self.file, stderr=subprocess.DEVNULL
            )
        except OSError:
            pass  # no nvidia-smi: there are no samples
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.file.seek(0)
            self.samples = list(filter(None, map(sample, self.file)))
        self.file.close()

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """What the chip does within belongs to `name`."""
        start = time.time()
        try:
            yield
        finally:
            self.slices.append((name, start, time.time()))

    def summary(self, name: str) -> dict[str, Any] | None:
        """Of the samples taken while `name` was timed: clock in MHz (lowest, median, highest),
        power in W (median, highest), temperature in degrees Celsius (highest), and what held the
        clock back."""
        within = [
            s
            for s in self.samples
            for other, start, end in self.slices
            if other == name and start <= s[0] <= end
        ]
        if not within:
            return None
        clock, power, heat, reasons = (
            [one for one in column if one is not None]
            for column in list(zip(*within, strict=True))[1:]
        )
        found: dict[str, Any] = {"samples": len(within)}
        if clock:
            found["clock_mhz"] = [min(clock), statistics.median(clock), max(clock)]
        if power:
            found["power_w"] = [statistics.median(power), max(power)]
        if heat:
            found["temperature_c"] = max(heat)
        return found | {
            "held_back_by": [
                text for bit, text in REASONS.items() if any(some & bit for some in reasons)
            ]
        }


def sample(line: str) -> Sample | None:
    """What a line of nvidia-smi's says; None for a line that is cut."""

    def number(word: str, read=float):
        try:
            return read(word.strip())
        except ValueError:
            return None

    try:
        when, clock, power, heat, reasons = line.split(",")
        moment = datetime.datetime.strptime(when.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return None
    return (
        moment,
        number(clock),
        number(power),
        number(heat),
        number(reasons, lambda word: int(word, 16)),
    )
