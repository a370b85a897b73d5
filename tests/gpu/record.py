"""Where a measurement comes from, and the file it stands in."""
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from helpers import gpu_available

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "notebooks" / "results"
REHEARSAL = ROOT / "_build" / "rehearsal"  # what a run without a GPU writes: never read by a chapter
SCHEMA = 1


def commit(given: str | None) -> tuple[str, bool]:
    """(commit, whether the files differ from it). A copy without .git must be told its commit."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if given:
        if not re.fullmatch(r"[0-9a-f]{40}", given):
            raise SystemExit(f"--commit takes the whole hash, 40 hexadecimal digits, as `git rev-parse HEAD` prints "
                             f"it; got {given!r}")
        return given, False
    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "helpers", "tests", "notebooks/*.md"))
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("results name the commit they were made from, and this is no git checkout: give it with "
                         "--commit") from None


def clean(text: str) -> str:
    """Text without the paths of the machine it was said on."""
    return re.sub(r"(?<![\w./:])/[\w.-]+/[\w./-]+", "<path>", text)[:400]


def sentence(error: BaseException) -> str:
    """An error as one line."""
    return clean(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")


def dotted(number: int, *units: int) -> str:
    """13000 with the units 1000, 10 is 13.0: a version as NVIDIA's libraries give it."""
    parts = []
    for unit in units:
        part, number = divmod(number, unit)
        parts.append(part)
    return ".".join(map(str, parts))


def versions() -> dict[str, str]:
    """What runs the kernels: driver, the CUDA it runs, and the libraries that JAX has loaded."""
    from jax._src.lib import cuda_versions  # what `jax.print_environment_info` asks, too

    ask = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        said = []
    answer = said[0].split(",") if said else []
    driver, power, clock = answer if len(answer) == 3 else ("unknown",) * 3
    major, rest = divmod(cuda_versions.cublas_get_version(), 10000)  # 130400 is 13.4.0
    return {"driver": driver.strip(), "power_limit": power.strip(), "max_clock": clock.strip(),
            "cuda": dotted(cuda_versions.cuda_driver_get_version(), 1000, 10),
            "cuda_runtime": dotted(cuda_versions.cuda_runtime_get_version(), 1000, 10),
            "cublas": f"{major}.{rest // 100}.{rest % 100}"}


def provenance(command: str, given_commit: str | None, rehearse: bool) -> dict[str, Any]:
    """Everything a reader needs to judge a figure, or to make it again. No path, host or user."""
    made_from, changed = ("0" * 40, True) if rehearse and not given_commit else commit(given_commit)
    packages = {}
    for name in ("jaxlib", "jax-cuda13-plugin", "flax", "torch", "nvidia-cublas", "nvidia-cudnn-cu13"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = {"device": jax.devices()[0].device_kind, "rehearsal": rehearse, "jax": jax.__version__,
            "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
            "packages": packages, "date": str(datetime.datetime.now(datetime.UTC).date()), "commit": made_from,
            "changed": changed, "command": command, "xla_flags": clean(os.environ.get("XLA_FLAGS", ""))}
    nothing = {"driver": "none", "cuda": "none", "cublas": "none"}
    return here | (versions() if gpu_available() and not rehearse else nothing)


def folder(provenance: Mapping[str, Any], results: Path | None = None) -> Path:
    """The model's folder: "NVIDIA H200" is h200, "NVIDIA H100 80GB HBM3" h100-80gb-hbm3."""
    words = re.findall(r"[a-z0-9]+", provenance["device"].lower().replace("nvidia", ""))
    return (results or (REHEARSAL if provenance["rehearsal"] else RESULTS)) / "-".join(words)


def same_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether cases of one may stand beside cases of the other: all but the date and the command agree."""
    return all(old.get(key) == new.get(key) for key in {*old, *new} - {"date", "command"})


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def json_numbers(value: Any) -> Any:
    """A case with null in place of NaN and infinity, which JSON has not got."""
    if isinstance(value, dict):
        return {key: json_numbers(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path, part: str, provenance: Mapping[str, Any], cases: Mapping[str, Any]) -> None:
    """Write a record, a line a case, in one step: a run that is cut off leaves the file of before."""
    about = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in provenance.items())
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(json_numbers(case))}" for name, case in cases.items())
    text = (f'{{\n "schema": {SCHEMA},\n "part": {json.dumps(part)},\n "provenance": {{\n{about}\n }},\n'
            f' "cases": {{\n{rows}\n }}\n}}\n')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)
