"""Write one folder to carry to a GPU machine that has no network: `make gpu-bundle`. In it: what of
the project measures, as committed, the results so far, and `run`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLACE = ROOT / "_build" / "gpu-bundle"
CARRIED = ("fp8lens", "helpers", "tools", "notebooks/recipes", "notebooks/results")
RUN = """\
#!/usr/bin/env bash
# Measures the attached Hopper GPU, with the options of `make gpu`; nothing is installed. The
# machine needs a python3 with JAX for CUDA 13, Flax, Optax and NumPy: PYTHON=/path/to/python3 names
# another.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${{PYTHON:-python3}}
"$python" -c 'import jax, flax, optax, numpy' || {{
    echo "$python needs JAX for CUDA 13 (0.11 or newer), Flax (0.12.8), Optax and NumPy" >&2
    exit 2
}}
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
tar -C "$project" -xzf "$here/project.tar.gz"
export PYTHONUNBUFFERED=1 PYTHONPATH=$project${{PYTHONPATH:+:$PYTHONPATH}}
"$python" "$project/tools/gpu/__main__.py" --commit {commit} --earlier "$here/results" \\
    --results "$here/results" "$@"
"""


def git(*words: str) -> str:
    """What git says of this checkout. SystemExit where it is none."""
    command = ["git", "-C", str(ROOT), *words]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"results name the commit they are of, and git does not know it here: {error}"
        ) from None


def main(place: Path = PLACE) -> None:
    """Write the folder. SystemExit where files differ from the commit."""
    if changed := git("status", "--porcelain"):
        raise SystemExit(
            f"{changed}\nResults name the commit they are of: commit these, or `git stash -u`."
        )
    commit = git("rev-parse", "HEAD")
    place.mkdir(parents=True, exist_ok=True)
    there = [name for name in CARRIED if (ROOT / name).exists()]
    git("archive", "--format=tar.gz", f"--output={place / 'project.tar.gz'}", "HEAD", *there)
    (place / "run").write_text(RUN.format(commit=commit))
    for recorded in (ROOT / "notebooks" / "results").glob("*/*.*"):
        carried = place / "results" / recorded.parent.name / recorded.name
        if not carried.exists():  # what came back from a run before is newer
            carried.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(recorded, carried)
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    print(
        f"{place}: {size / 1e6:.1f} MB, commit {commit[:12]}\n"
        f"Carry the folder to the machine, and there: bash {place.name}/run"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else PLACE)
