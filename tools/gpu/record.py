"""Where a measurement comes from, the file it stands in, and what to do about one that fails.

A record is a file a part: its cases, each with the number of the run that measured it, and the
runs, each with all that its figures depend on. So a run may go on where another stopped, on a
machine or a commit of its own, and no case is taken for another run's.
"""

import contextlib
import datetime
import gzip
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from watch import WHICH

from helpers import gpu_available
from helpers.records.results import digest
from tools.files import in_one_step

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "notebooks" / "results"
REHEARSAL = (
    ROOT / "_build" / "rehearsal"
)  # what a run without a GPU writes: never read by a chapter
SCHEMA = 2
HLO = (
    "hlo.jsonl.gz"  # beside the records: the programs as the GPU's compiler wrote them, a line each
)
LOOKED_AT = ("fp8lens", "helpers", "tools", "notebooks")  # folders whose files can change a result


def commit(given: str | None, tree: Path | None = None) -> tuple[str, bool | None]:
    """(commit, whether the files differ from it; None where nobody can tell).

    Of a copy without .git the commit is given, or it comes with `tree`: a line with its hash and
    what `git ls-tree -r` says of it, which the files are compared with.
    """

    def git(*words: str) -> str:
        not_above = os.environ | {
            "GIT_CEILING_DIRECTORIES": str(ROOT.parent)
        }  # where an archive may be unpacked
        return subprocess.run(
            ["git", *words], cwd=ROOT, env=not_above, capture_output=True, text=True, check=True
        ).stdout.strip()

    if given and not re.fullmatch(r"[0-9a-f]{40}", given):
        raise SystemExit(
            f"--commit takes the whole hash, 40 hexadecimal digits, as `git rev-parse HEAD` prints "
            f"it; got {given!r}"
        )
    if tree is not None:
        made_from, *listed = tree.read_text().splitlines()
        return made_from, differs(listed)
    if given:
        return given, None
    try:
        return git("rev-parse", "HEAD"), bool(
            git("status", "--porcelain", *LOOKED_AT[:3], "notebooks/*.md")
        )
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(
            "results name the commit they were made from, and this is no git checkout: give it "
            "with --commit"
        ) from None


def differs(listed: Iterable[str]) -> bool:
    """Whether a file under `LOOKED_AT` is not the one that `git ls-tree -r` lists, or is missing,
    or is not listed."""
    wanted = {}
    for line in listed:  # "<mode> blob <hash>\t<path>"
        blob, name = line.split(" ", 2)[2].split("\t")
        if _counts(name):
            wanted[name] = blob
    here = {
        path.relative_to(ROOT).as_posix()
        for folder in LOOKED_AT
        for path in (ROOT / folder).rglob("*.*")
    }
    here = {name for name in here if _counts(name)}
    return here != wanted.keys() or any(
        blob_id((ROOT / name).read_bytes()) != blob for name, blob in wanted.items()
    )


def _counts(name: str) -> bool:
    return (
        name.split("/")[0] in LOOKED_AT
        and name.endswith((".py", ".md"))
        and "/results/" not in name
    )


def blob_id(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def without_paths(text: str) -> str:
    """Text without the paths of the machine it was said on."""
    return re.sub(r"(?<![\w./:])/[\w.-]+/[\w./-]+", "<path>", text)


def clean(text: str) -> str:
    """An error's text as one line without paths: its beginning, and its end, where cuBLAS and XLA
    give the reason."""
    text = " ".join(without_paths(text).split())
    return text if len(text) <= 800 else f"{text[:350]} [...] {text[-440:]}"


def sentence(error: BaseException) -> str:
    """An error as one line."""
    return clean(f"{type(error).__name__}: {str(error).strip()}")


def dotted(number: int, *units: int) -> str:
    """13000 with the units 1000, 10 is 13.0: a version as NVIDIA's libraries give it."""
    parts = []
    for unit in units:
        part, number = divmod(number, unit)
        parts.append(part)
    return ".".join(map(str, parts))


def versions() -> dict[str, str]:
    """What runs the kernels: driver, the CUDA it runs, and the libraries that JAX has loaded."""
    from jax._src.lib import cuda_versions as found  # what `jax.print_environment_info` asks, too

    cuda_versions: Any = found  # None without JAX's CUDA plugin, and nobody asks then

    ask = [
        "nvidia-smi",
        WHICH,
        "--query-gpu=driver_version,power.limit,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        said = subprocess.run(ask, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        said = []
    answer = said[0].split(",") if said else []
    driver, power, clock = answer if len(answer) == 3 else ("unknown",) * 3
    major, rest = divmod(cuda_versions.cublas_get_version(), 10000)  # 130400 is 13.4.0
    return {
        "driver": driver.strip(),
        "power_limit": power.strip(),
        "max_clock": clock.strip(),
        "cuda": dotted(cuda_versions.cuda_driver_get_version(), 1000, 10),
        "cuda_runtime": dotted(cuda_versions.cuda_runtime_get_version(), 1000, 10),
        "cublas": f"{major}.{rest // 100}.{rest % 100}",
    }


def provenance(made_from: tuple[str, bool | None], rehearse: bool) -> dict[str, Any]:
    """Everything a reader needs to judge a figure, or to make it again, but for the command, which
    is a part's own. No path, host or user. `made_from` is what `commit` says."""
    packages = {}
    for name in (
        "jaxlib",
        "jax-cuda13-plugin",
        "flax",
        "torch",
        "nvidia-cublas",
        "nvidia-cudnn-cu13",
    ):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = {
        "device": jax.devices()[0].device_kind,
        "rehearsal": rehearse,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "commit": made_from[0],
        "changed": made_from[1],
        "xla_flags": clean(os.environ.get("XLA_FLAGS", "")),
    }
    nothing = {"driver": "none", "cuda": "none", "cublas": "none"}
    return here | (versions() if gpu_available() and not rehearse else nothing)


def folder(provenance: Mapping[str, Any], results: Path | None = None) -> Path:
    """The model's folder: "NVIDIA H200" is h200, "NVIDIA H100 80GB HBM3" h100-80gb-hbm3."""
    words = re.findall(r"[a-z0-9]+", provenance["device"].lower().replace("nvidia", ""))
    return (results or (REHEARSAL if provenance["rehearsal"] else RESULTS)) / "-".join(words)


def same_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two runs measure the same thing: all but the date and the command agree."""
    return all(old.get(key) == new.get(key) for key in {*old, *new} - {"date", "command"})


# The file -----------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """A record, or an empty one where there is none. Raises ValueError for a file that is no
    record."""
    if not path.exists():
        return {"runs": [], "cases": {}}
    try:
        data = json.loads(path.read_text())
        assert data["digest"] == digest(data), "it is not as it was written"
        assert data["schema"] == SCHEMA and all(
            case["run"] < len(data["runs"]) for case in data["cases"].values()
        )
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(
            f"{path} is no record that a run can go on from ({error!r}): move it away"
        ) from error
    return data


def failed_chapters(path: Path) -> list[str]:
    """The chapters that failed, by a record of the notebooks: their own code, or what runs it."""
    cases = read(path)["cases"]
    return [name for name, case in cases.items() if not case.get("passed")]


def json_numbers(value: Any) -> Any:
    """A case with null in place of NaN and infinity, which JSON has not got."""
    if isinstance(value, dict):
        return {key: json_numbers(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(
    path: Path, part: str, runs: list[Mapping[str, Any]], cases: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write a record, a line a case, in one step: a run that is cut off leaves the file of before.
    Equal runs become one, and those that have no case any more are left out."""
    first = [runs.index(run) for run in runs]
    used = sorted({first[case["run"]] for case in cases.values()})
    about = ",\n".join(
        "  {\n"
        + ",\n".join(
            f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in runs[number].items()
        )
        + "\n  }"
        for number in used
    )
    numbered = {
        name: json_numbers({**case, "run": used.index(first[case["run"]])})
        for name, case in cases.items()
    }
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in numbered.items()
    )
    text = (
        f'{{\n "schema": {SCHEMA},\n "part": {json.dumps(part)},\n "runs": [\n{about}\n ],\n'
        f' "cases": {{\n{rows}\n }}'
    )
    in_one_step(path, f'{text},\n "digest": "{digest(json.loads(text + "}"))}"\n}}\n')


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def add(path: Path, part: str, run: Mapping[str, Any], name: str, case: Mapping[str, Any]) -> None:
    """Write one more case of a run, in place of what another has measured of it."""
    old = read(path)
    new = {**case, "run": len(old["runs"]), "at": now()}
    write(path, part, [*old["runs"], run], {**old["cases"], name: new})


def merge(path: Path, part: str, other: Path, run: Mapping[str, Any]) -> None:
    """Take into a record what another has. Of a case that both have, what counts is what is the
    same as `run`'s, and then what is newer."""
    here, there = read(path), read(other)

    def weight(data: Mapping[str, Any], name: str) -> tuple[bool, str]:
        case = data["cases"].get(name)
        return (same_run(data["runs"][case["run"]], run), case["at"]) if case else (False, "")

    moved = {
        name: {**case, "run": case["run"] + len(here["runs"])}
        for name, case in there["cases"].items()
        if weight(there, name) > weight(here, name)
    }
    if moved:
        write(path, part, here["runs"] + there["runs"], {**here["cases"], **moved})


def keep_hlo(path: Path, key: str, compiled: Any) -> None:
    """Keep a program's HLO as the compiler wrote it, without paths, under the file of that name
    beside `path`: what the parser makes of a GPU's own programs can then be looked at anywhere."""
    file = path.parent / HLO
    new = _packed({key: without_paths(compiled.as_text())})
    in_one_step(file, (file.read_bytes() if file.exists() else b"") + new)


def _packed(programs: Mapping[str, str]) -> bytes:
    lines = "".join(
        json.dumps({"program": key, "hlo": text}) + "\n" for key, text in programs.items()
    )
    return gzip.compress(lines.encode(), mtime=0)


def kept_hlo(file: Path) -> dict[str, str]:
    """The programs that a file holds, by part, case and form; of two of one name the last. Of a
    file that is cut off or damaged, those before that."""
    programs: dict[str, str] = {}
    with (
        contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError, zlib.error),
        gzip.open(file) as lines,
    ):
        for row in map(json.loads, lines):
            programs[row["program"]] = row["hlo"]
    return programs


def merge_hlo(file: Path, newer: Path) -> None:
    """Take into a file of programs what another has, each once."""
    if programs := kept_hlo(file) | kept_hlo(newer):
        in_one_step(file, _packed(programs))


# A case under way ---------------------------------------------------------------------------------


class GpuLost(RuntimeError):
    """After a form of a case the GPU answers nothing any more: what follows needs a process of its
    own."""


class Case:
    """The case under way in this process: which form of it is tried, what to leave out, and where
    its programs go.

    `marker` is the file that says what is under way, so that what takes the process down is known;
    `avoid` says of forms that have done so, by name, how.
    """

    def __init__(self, path: Path, part: str, name: str, marker: Path, avoid: Mapping[str, str]):
        self.path, self.part, self.name, self.marker, self.avoid = path, part, name, marker, avoid
        self.since, self.under_way = time.time(), ""

    @contextlib.contextmanager
    def form(self, form: str) -> Iterator[None]:
        """What is done within is a form's: if the process goes down, it is that form's doing.
        Raises RuntimeError for one that has brought processes down before."""
        if form in self.avoid:
            raise RuntimeError(self.avoid[form])
        self.note(form)
        yield
        self.note()

    def note(self, form: str = "", error: str = "") -> None:
        """Write down which form is under way, or that it was and the GPU is lost."""
        self.under_way = form
        said = {"case": self.name, "form": form, "error": error, "since": self.since}
        in_one_step(self.marker, json.dumps(said).encode())

    def attempt(self, rows: dict[str, Any], form: str, do: Callable[[], Any]) -> Any:
        """What `do` returns, or None and the error in the form's row. Raises GpuLost where the GPU
        is gone after it."""
        try:
            with self.form(form):
                return do()
        except GpuLost:
            raise
        except Exception as error:
            self.failed(rows, form, error)
            return None

    def failed(self, rows: dict[str, Any], form: str, error: Exception) -> None:
        """Put an error into its form's row; raise GpuLost where the GPU is gone with it."""
        rows.setdefault(form, {})["error"] = sentence(error)
        self.refused(error, form)
        self.note()

    def refused(self, error: Exception, form: str = "") -> str:
        """What a GPU refuses is a result: the error as one line. Raises GpuLost where the GPU is
        gone with it."""
        if form not in self.avoid and not answers():
            raise GpuLost(form, sentence(error)) from error
        return sentence(error)

    def keep(self, form: str, compiled: Any) -> None:
        """Keep a program's text; what cannot be had does not cost the case."""
        with contextlib.suppress(Exception):
            keep_hlo(self.path, " / ".join(filter(None, (self.part, self.name, form))), compiled)


def answers() -> bool:
    """Whether the GPU still computes: after an illegal access, nothing does in this process."""
    try:
        return bool(jax.block_until_ready(jax.numpy.ones(8).sum() == 8))
    except Exception:
        return False
