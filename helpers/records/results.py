"""Results recorded on real GPUs, for the chapters to read: `make gpu` writes them.

One file a GPU model, notebooks/results/<model>/measured.jsonl, to which a line is added for each
thing that was measured; schema.json there says what is in one. Beside it goals.json has what they
are held against, for each chip, published.json what others measured, scale.json what they measured
on many GPUs, releases.json what JAX's releases compile, rules.json what they make of the programs
of fp8lens' rules, census.json what JAX's libraries do, engine.json what Transformer Engine's layers
for JAX do, ladder.json what a layer's steps in FP8 cost, tensors.json a small model's tensors,
trained.json and trained_long.json its runs, and stacks.json what other stacks make of one matmul.
What a program recorded carries that program's digest, and is read only as it was written.
"""

import base64
import dataclasses
import gzip
import hashlib
import json
import math
import os
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp8lens.matmul.kernels import matmul_seconds
from fp8lens.targets import TARGETS, Target, model

PARTS = ("speed", "agreement", "numerics", "kernels", "train")  # of what `make gpu` measures
LINES = "measured.jsonl"  # in the folder of a GPU's model: what tools/gpu/lines.py wrote
PROGRAMS = "programs.jsonl.gz"  # beside it

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
    """One part, measured on one model of GPU. `runs` says where and with what: device, driver,
    versions of CUDA, cuBLAS and JAX, date, commit. `cases` has by the case's name its forms, and by
    the form's name what was measured of it, with the number of its run.

    A form that was timed has `wall_seconds`, by the host's clock, the median of `wall_looks`; and
    `device_seconds`, the sum of its kernels' times by the GPU's own clock, the median of
    `device_looks`. That is None where this clock could not be read, and `no_clock` says why. One
    that failed has `error`.
    """

    part: str
    runs: tuple[Mapping[str, Any], ...]
    cases: Mapping[str, Mapping[str, Row]]

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Of the newest run."""
        return self.runs[-1]

    @property
    def source(self) -> str:
        """A line for under a table: the device, what ran on it, and the command that made the
        figures.
        """
        p = self.provenance
        if p["rehearsal"]:
            return f"REHEARSAL, JAX {p['jax']}: these are not measurements of a GPU"
        lines = dict.fromkeys(
            f"driver {run['driver']}, CUDA {run['cuda']}, cuBLAS {run['cublas']}, JAX {run['jax']},"
            f" commit {run['commit'][:7]}{' with changes' if run['changed'] else ''}"
            for run in reversed(self.runs)
        )
        return f"{p['device']}, {'; some cases with '.join(lines)}: `make gpu`"

    @property
    def chip(self) -> Target | None:
        """The GPU's model with its peak rates, None where it is none of `TARGETS`, and in a
        rehearsal."""
        return None if self.provenance["rehearsal"] else model(self.provenance["device"])

    def times(self, case: str) -> dict[str, float]:
        """Seconds of each form of a case that was timed, all by one clock: the GPU's where it saw
        all of them, else the host's."""
        rows = {
            name: row for name, row in self.cases.get(case, {}).items() if "wall_seconds" in row
        }
        by_gpu = all(row["device_seconds"] for row in rows.values())
        clock = "device_seconds" if by_gpu else "wall_seconds"
        return {name: row[clock] for name, row in rows.items()}


def digest(data: Mapping[str, Any]) -> str:
    """The SHA-256 of what was recorded. Whoever records it writes it beside it under this name."""
    kept = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def recorded(folder: str | Path, name: str, command: str) -> dict[str, Any]:
    """The data of the file that `command` has recorded: one record, or one for each release of JAX.
    Raises ValueError if a record is not as it was written.
    """
    path = Path(folder, name)
    data = json.loads(path.read_text())
    for record in data["releases"].values() if "releases" in data else [data]:
        if record.get("digest") != digest(record):
            raise ValueError(f"{path} is not as it was recorded: `{command}` records it again")
    return data


def load_releases(folder: str | Path = "results") -> Mapping[str, Mapping[str, Any]]:
    """What each JAX release made of the programs of tools/recorders/releases.py, oldest first.
    Raises ValueError for a release that is not as it was written.
    """
    return recorded(folder, "releases.json", "make releases")["releases"]


def load_rules(folder: str | Path = "results") -> Mapping[str, Mapping[str, Any]]:
    """What each JAX release made of the programs on the pages of fp8lens' rules, oldest first:
    tools/recorders/rule_programs.py found it. Raises ValueError for a release that is not as it was
    written.
    """
    return recorded(folder, "rules.json", "make rules")["releases"]


class Census(NamedTuple):
    """What JAX's FP8 libraries become: of each way what is said of it, by name; and of each JAX
    release, oldest first, what was measured, its rows by (way, model, pass, chip, who multiplies).
    """

    ways: Mapping[str, Mapping[str, Any]]
    releases: Mapping[str, Mapping[str, Any]]


def load_census(folder: str | Path = "results") -> Census:
    """What tools/recorders/census.py found. Raises ValueError for a release that is not as it was
    written.
    """
    data = recorded(folder, "census.json", "make census")
    releases = {}
    for version, entry in data["releases"].items():
        rows = {tuple(name.split(" | ")): row for name, row in entry["rows"].items()}
        releases[version] = entry | {"rows": rows}
    return Census(data["ways"], releases)


def load_engine(folder: str | Path = "results") -> Mapping[str, Any]:
    """What tools/recorders/engine.py found with the newest JAX; its rows by (layer, recipe, chip).
    Raises ValueError for a record that is not as it was written.
    """
    *_, newest = recorded(folder, "engine.json", "make engine")["releases"].values()
    rows = {tuple(name.split(" | ")): row for name, row in newest["rows"].items()}
    return newest | {"rows": rows}


class Tensors(NamedTuple):
    """What `make tensors` recorded: where it comes from, in a line; the loss of each step, in nats
    a letter; of the last block's down-projection the largest magnitudes in each step, f32[steps];
    and of the last step its input x [tokens, K], weight w [N, K] and gradient g [tokens, N], in
    bfloat16.
    """

    source: str
    losses: np.ndarray
    amaxes: Mapping[str, np.ndarray]
    tensors: Mapping[str, np.ndarray]


def load_tensors(folder: str | Path = "results") -> Tensors:
    """What a small language model's tensors looked like while it was trained. Raises ValueError for
    a file that is not as it was written.
    """
    data = recorded(folder, "tensors.json", "make tensors")
    tensors = {name: _bfloat16(tensor) for name, tensor in data["tensors"].items()}
    source = f"{data['parameters']:,} parameters, {len(data['losses'])} steps, on {data['text']}"
    return Tensors(
        source,
        np.array(data["losses"]),
        {name: np.array(values) for name, values in data["amaxes"].items()},
        tensors,
    )


def _bfloat16(tensor: Mapping[str, Any]) -> np.ndarray:
    """A recorded tensor: its codes are written little-endian, compressed, in base 64."""
    codes = np.frombuffer(zlib.decompress(base64.b64decode(tensor["bfloat16"])), "<u2")
    return codes.astype(np.uint16).view(ml_dtypes.bfloat16).reshape(tensor["shape"])


class Sums(NamedTuple):
    """Sums of 32 FP8 products on an H100's tensor core: a and b [sums, 32], and what it made of
    them, f32[sums].
    """

    a: np.ndarray
    b: np.ndarray
    sums: np.ndarray


def load_sums(folder: str | Path = "results") -> tuple[str, Mapping[str, Sums]]:
    """Who measured such sums and on what, in a line; and by the name of a format what they were:
    each fifth of those in the repository and commit that the file names, as codes in base 64.
    Raises ValueError for a file that is not as it was written.
    """
    data = recorded(folder, "sums.json", "git restore sums.json")
    found = {}
    for name, arrays in data["formats"].items():
        dtype = ml_dtypes.finfo(name).dtype
        a, b = (np.frombuffer(base64.b64decode(arrays[kind]), dtype) for kind in ("a", "b"))
        sums = np.frombuffer(base64.b64decode(arrays["sums"]), "<f4")
        found[name] = Sums(a.reshape(-1, 32), b.reshape(-1, 32), sums)
    return f"{data['device']}, {data['instruction']}: {data['measured_by']}", found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's file. One that a kill has cut at the end is left out. Raises ValueError,
    with the line's number, for another that is no JSON.
    """
    found = []
    *lines, _ = path.read_text().split("\n")  # what follows the last line's end is cut, or ""
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}: restore it") from error
    return found


def rows_of(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Row]:
    """What was measured of each form, by (part, case, form). Of several runs the one that did not
    fail counts, that was timed, by the GPU's clock too; and of those the last.
    """
    by_run: dict[tuple[str, str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for line in lines:
        if "form" in line:
            key = line["part"], line["case"], line["form"]
            by_run.setdefault(key, {}).setdefault(line["run"], []).append(line)
    return {
        key: max((_row(run, of_run) for run, of_run in runs.items()), key=_worth)
        for key, runs in by_run.items()
    }


def _worth(row: Row) -> tuple[Any, ...]:
    return "error" not in row, "wall_seconds" in row, row.get("clock_asked", False), row["run"]


def _row(run: int, lines: Sequence[Mapping[str, Any]]) -> Row:
    """One form's lines of one run as one row."""
    row: Row = {"run": run}
    for line in lines:
        row |= line.get("made", {})
        if "error" in line:
            row["error"] = line["error"]
    walls = [line["wall"] for line in lines if "wall" in line]
    if walls:
        seconds = [wall["seconds"] for wall in walls]
        row |= {"wall_seconds": statistics.median(seconds), "wall_looks": sorted(seconds)}
        row |= {"device_seconds": None, "no_clock": "the GPU's clock was not read"}
        row |= {"looks": len(walls), "clock_asked": any("device" in line for line in lines)}
        chips = [wall["chip"] for wall in walls if wall["chip"]]
        for name in ("clock_mhz", "power_w") if chips else ():
            row[name] = statistics.median(chip[name] for chip in chips)
        seen = [line["device"] for line in lines if "device" in line]
        if seen:
            row |= _by_gpu(seen, row.get("kernels", 0))
    return row


def _by_gpu(looks: Sequence[Mapping[str, Any]], kernels: int) -> Row:
    """What the GPU's clock says of a form: the median of its looks. Without the looks that saw too
    few of its kernels, whose time is too short. (Copies are no kernels to it, and a call of a
    library may be several.)
    """
    reasons, whole = [], []
    for look in looks:
        if "no_clock" in look:
            reasons.append(look["no_clock"])
        elif look["launches"] < 0.9 * kernels:
            saw = f"{look['launches']:g} of {kernels} kernels, {look['seconds']:.3g} s"
            reasons.append(f"CUPTI saw {saw}")
        else:
            whole.append(look)
    if not whole:
        return {"no_clock": reasons[-1]}
    median = sorted(whole, key=lambda look: look["seconds"])[len(whole) // 2]
    return {
        "device_seconds": median["seconds"],
        "device_looks": sorted(look["seconds"] for look in whole),
        "no_clock": "",
        "longest": median["longest"],
    }


def load(part: str, folder: str | Path = "results") -> tuple[Record, ...]:
    """What has been recorded of a part ("speed", "agreement", "numerics", "kernels" or "train"), a
    Record for each GPU model; none where nothing has. `folder` is where the models' folders are;
    the environment variable FP8_RESULTS, where set, has precedence, so that a chapter can be read
    with other results.

    Raises ValueError for an unknown part, and for a file that is not as it was written.
    """
    if part not in PARTS:
        raise ValueError(f"no part {part!r}; parts are {', '.join(PARTS)}")
    found = []
    for path in sorted(Path(os.environ.get("FP8_RESULTS") or folder).glob(f"*/{LINES}")):
        lines = read_lines(path)
        runs = tuple(line["provenance"] for line in lines if "provenance" in line)
        cases: dict[str, dict[str, Row]] = {}
        for (of_part, case, form), row in rows_of(lines).items():
            if of_part == part:
                cases.setdefault(case, {})[form] = row
        if cases:
            found.append(Record(part, runs, cases))
    return tuple(found)


def load_programs(part: str, folder: str | Path = "results") -> dict[tuple[str, str], str]:
    """The HLO of a part's forms as the GPU's compiler wrote it, by case and form: of the model that
    `load(part, folder)` has first; nothing where there is none.
    """
    found = {}
    for path in sorted(Path(os.environ.get("FP8_RESULTS") or folder).glob(f"*/{PROGRAMS}"))[:1]:
        with gzip.open(path, "rt") as lines:
            for one in map(json.loads, lines):
                if one["part"] == part:
                    found[one["case"], one["form"]] = one["hlo"]
    return found


NOT_MEASURED = "not measured yet (`make gpu`)"  # in place of a table that nobody has measured


def kernel_on_gpus(name: str, folder: str | Path = "results") -> str:
    """Whether a kernel of the course, by its function's name, computed on a GPU what it computes
    elsewhere: a line for each GPU model of the record.
    """
    lines = []
    for record in load("kernels", folder):
        row = record.cases["kernels"].get(name, {})
        if "errors" in row:
            off = max(one["relative"] for one in row["errors"])
            verdict = "right" if row["right"] else "WRONG"
            lines.append(
                f"{name} on an {record.provenance['device']}: {verdict}, "
                f"largest relative error of a result {off:.1e}"
            )
    return "\n".join(lines) or f"{name} on a GPU: {NOT_MEASURED}"


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a ratio of two times of one case should be: `over` divided by `of` at `least`, or `of`
    divided by `over` at `most`, for each chip by its name in `TARGETS`. `roofline` is the ratio of
    the two programs' rooflines, and `reason` says which `share` of it is wanted and why; a test
    computes both anew.
    """

    name: str
    part: str
    case: str
    of: str
    over: str
    clock: str
    roofline: Mapping[str, float]
    reason: Mapping[str, Any]
    least: Mapping[str, float] | None = None
    most: Mapping[str, float] | None = None

    def ratio(self, record: Record) -> tuple[float, str] | None:
        """Of the times recorded, and the clock: this goal's, or the host's where the other saw
        nothing. None where one of the times is not recorded.
        """
        rows = record.cases.get(self.case, {})
        for clock in (self.clock, "wall_seconds"):
            of, over = (rows.get(form, {}).get(clock) for form in (self.of, self.over))
            if of and over:
                return (over / of if self.least else of / over), clock
        return None

    def verdict(self, record: Record) -> str:
        """What was measured, and the goal for the record's chip."""
        found = self.ratio(record)
        if found is None:
            return f"{self.name}: not measured"
        ratio, clock = found
        said = f"{self.name}: {ratio:.3f}"
        if clock != self.clock:
            said += ", by the host's clock"
        chip = record.chip.name if record.chip else ""
        wanted = self.least or self.most or {}
        if chip not in wanted:
            return f"{said}, on {record.provenance['device']}"
        bound, is_least = wanted[chip], self.least is not None
        is_reached = ratio >= bound if is_least else ratio <= bound
        said += f"; wanted at {'least' if is_least else 'most'} {bound:g} on an {chip}"
        said += f" (roofline {self.roofline[chip]:.3g}): "
        return said + ("reached" if is_reached else "MISSED")


def goals(part: str, case: str | None = None, folder: str | Path = "results") -> tuple[Goal, ...]:
    """The goals about a part, or about one case of it, from goals.json."""
    found = (Goal(**goal) for goal in json.loads(Path(folder, "goals.json").read_text())["goals"])
    return tuple(goal for goal in found if goal.part == part and case in (None, goal.case))


# What others measured -----------------------------------------------------------------------------

# Bytes for a bf16 value made FP8: a tensor is read whole to know its scale, if that is not known.
_MOVED = {"": 0, "row": 3, "block": 3, "tensor": 5}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published number. `of` begins with "bf16" or "FP8" where it is of one matmul, of `shape`
    (M, N, K). `over` is the same in bf16. `quantized` says which operands are made FP8 within the
    time: "A", or "A and B"; `per` what has a scale of its own, a "row", a "block" or a "tensor";
    `known` that the scales are those of earlier steps.
    """

    of: str
    value: float
    unit: str
    shape: tuple[int, int, int] | None = None
    over: float | None = None
    quantized: str = ""
    per: str = ""
    known: bool = False

    @property
    def bytes_moved(self) -> int:
        """For each value that is quantized within the time."""
        return _MOVED["row"] if self.known else _MOVED[self.per]

    @property
    def dtype(self) -> str | None:
        """The HLO type that is multiplied, None of what is more than a matmul."""
        return {"bf16": "bf16", "FP8": "f8e4m3fn"}.get(self.of.split(",")[0])

    @property
    def flops(self) -> int:
        """2*M*N*K, 0 where the shape is not said."""
        return 2 * math.prod(self.shape) if self.shape else 0

    @property
    def seconds(self) -> float | None:
        """What it took, None where neither that nor the FLOPs are said."""
        if self.unit == "ms":
            return self.value / 1e3
        return self.flops / self.value / 1e12 if self.flops and self.unit == "TFLOP/s" else None

    @property
    def speedup(self) -> float | None:
        """Times as fast as in bf16, None where that is not said."""
        if self.over is None:
            return self.value if self.unit == "times bf16" else None
        return self.over / self.value if self.unit in ("ms", "s") else self.value / self.over

    def estimate(self, chip: Target) -> float:
        """The roofline's seconds for the same shape with a bf16 result, and for the bytes of what
        is quantized. Raises ValueError for what is not one matmul of a known shape.
        """
        if self.shape is None or self.dtype is None:
            raise ValueError(f"{self.of!r} is not one matmul of a known shape: no estimate")
        m, n, k = self.shape
        values = {"": 0, "A": m * k, "A and B": (m + n) * k}[self.quantized]
        multiply = matmul_seconds(m, n, k, self.dtype, "bf16", chip)
        return multiply + self.bytes_moved * values / chip.memory_bandwidth


@dataclasses.dataclass(frozen=True)
class Published:
    """What one document says, in its own words (`quotes`): on which `hardware`, what exactly it
    `counts`, over which `baseline`. `chip` names the one in `TARGETS` that has its rates; some
    quotes may be of the documents `beside` it. schema.json says what form an entry has, and a test
    that each number is in the quotes.
    """

    name: str
    url: str
    date: str | None
    hardware: str
    chip: str | None
    counts: str
    baseline: str
    quotes: tuple[str, ...]
    rows: tuple[Figure, ...]
    remark: str = ""
    beside: tuple[str, ...] = ()

    def share(self, row: Figure) -> float:
        """The part of the chip's dense peak that a row's matmul reaches, 0 where nobody can say."""
        peak = None
        if self.chip and row.dtype:
            peak = TARGETS[self.chip].peak_flops.get(row.dtype)
        rate = row.value * 1e12 if row.unit == "TFLOP/s" else row.flops / (row.seconds or math.inf)
        return rate / peak if peak else 0.0


def load_published(folder: str | Path = "results") -> tuple[Published, ...]:
    """What others measured of FP8 on Hopper, from published.json."""
    return _published(Path(folder, "published.json"))


def load_scale(folder: str | Path = "results") -> tuple[Published, ...]:
    """What others published of FP8 on many GPUs, and of the wires between them, from scale.json."""
    return _published(Path(folder, "scale.json"))


def _published(path: Path) -> tuple[Published, ...]:
    found = []
    for entry in json.loads(path.read_text())["figures"]:
        rows = []
        for row in entry["rows"]:
            shape = tuple(row["shape"]) if "shape" in row else None
            rows.append(Figure(**{**row, "shape": shape}))
        lists = {name: tuple(entry.get(name, ())) for name in ("quotes", "beside")}
        found.append(Published(**{**entry, **lists, "rows": tuple(rows)}))
    return tuple(found)
