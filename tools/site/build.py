"""Build the site into _build/html, from the chapters as they are stored.

    python -m tools.site.build     SITE_URL=https://... says where it will stand,
                                   for search engines and for who is sent a link

Nothing is run, and nothing is asked of the network. The pages are those of myst.yml. Any warning of
Sphinx, MyST or these extensions, as of a link that leads nowhere, fails the build. The site that
was there then stays.
"""

import shutil
import sys
import tempfile
from pathlib import Path

<<<<<<< HEAD
from sphinx.cmd.build import main as sphinx_build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIRST_PAGE = "README.md"
=======
import yaml

from tools.setup import try_lock
from tools.site import changes

HERE = Path(__file__).resolve().parent
_LEAST = 1_000_000  # bytes of a disk that is not full
_SCRATCH = "site-"  # how the folder of a running build begins
_STOPPED = 130  # as a shell tells of a command that Ctrl-C ended


class BuildError(Exception):
    """The site is not right; the message lists what is wrong, a line each."""


def _contents(project: Path) -> tuple[Path, list[Path]]:
    """Return the first page of myst.yml, and the others."""
    try:
        text = (project / "myst.yml").read_text(encoding="utf-8")
        first, *entries = yaml.safe_load(text)["project"]["toc"]
        pages = []
        for entry in entries:
            if "file" in entry:
                pages.append(Path(entry["file"]))
            elif entry["title"]:
                pages += [Path(page["file"]) for page in entry["children"]]
        return Path(first["file"]), pages
    except (FileNotFoundError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise BuildError(
            f"{project}/myst.yml: it must have project: toc:, a list of pages (file: ...) and of "
            "parts (title: ..., children: a list of pages). "
            f"It gave {type(error).__name__}: {error}"
        ) from error


def _copy(source: str, target: str) -> None:
    """Copy a file. Where that fails, end: shutil.copytree would go on, and lose the reason."""
    try:
        shutil.copy2(source, target)
    except OSError as error:
        raise BuildError(str(error)) from error
>>>>>>> records


def copy_sources(project: Path, folder: Path) -> None:
    """Copy the project's files, with its README as the index."""
    ignored = shutil.ignore_patterns(".*", "_*", "*.egg-info")
    shutil.copytree(project, folder, ignore=ignored, ignore_dangling_symlinks=True)
    (folder / FIRST_PAGE).rename(folder / "index.md")


def run_sphinx(source: Path, out: Path, doctrees: Path) -> int:
    """Write the pages of `source` into `out`. Returns 0, or another number after any warning."""
    return sphinx_build(
        ["-q", "-W", "-c", str(HERE), "-d", str(doctrees), str(source), str(out)],
    )


def _drop_unused(static: Path) -> None:
    """Remove what the theme brings and no page loads: Font Awesome, maps for debuggers."""
    shutil.rmtree(static / "vendor" / "fontawesome")
    for pattern in ("scripts/fontawesome.*", "**/*.map", "*webpack-macros.html"):
        for file in static.glob(pattern):
            file.unlink()


<<<<<<< HEAD
=======
def run_sphinx(
    source: Path, out: Path, doctrees: Path, dates: Mapping[str, str] | None = None
) -> list[str]:
    """Write the pages of `source` into `out`. Returns what Sphinx and its extensions warn of.

    `dates`: by file, when it changed last.
    """
    # It takes a second to import, in which Ctrl-C is to end in a sentence too.
    from sphinx.application import Sphinx
    from sphinx.util.console import nocolor
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    said = io.StringIO()
    nocolor()
    with (
        contextlib.redirect_stderr(said),
        patch_docutils(str(HERE)),
        docutils_namespace(),
    ):
        app = Sphinx(
            source,
            HERE,
            out,
            doctrees,
            "html",
            confoverrides={"dates": dict(dates or {})},
            status=None,
            warning=said,
        )
        app.build()
    lines = said.getvalue().replace(f"{source}{os.sep}", "").splitlines()
    return list(dict.fromkeys(line for line in lines if line.strip()))


@contextlib.contextmanager
def alone(project: Path) -> Iterator[None]:
    """Wait until no other build of this project runs, and keep others waiting meanwhile.

    What is locked is myst.yml itself, so no file is left behind. The system frees the lock when the
    process ends, however it ends.
    """
    contents = project / "myst.yml"
    # Some network file systems lock only what is open for writing.
    mode = "r+b" if os.access(contents, os.W_OK) else "rb"
    with contents.open(mode) as file:
        if not try_lock(file):
            print("Waiting for another make site in this checkout", flush=True)
            while not try_lock(file):
                time.sleep(0.2)
        yield


def build(project: Path) -> str:
    """Build `project` into its _build/html, which stays as it was where that fails.

    Returns what to tell the reader. Raises BuildError for what is wrong with the project.
    """
    _contents(project)
    built = project / "_build"
    built.mkdir(exist_ok=True)
    with (
        alone(project),
        tempfile.TemporaryDirectory(dir=built, prefix=_SCRATCH) as scratch,
    ):
        for folder in built.glob(f"{_SCRATCH}*"):
            if folder != Path(scratch):  # of a build that was killed
                shutil.rmtree(folder, ignore_errors=True)
        source, new = Path(scratch, "source"), Path(scratch, "html")
        copy_sources(project, source)
        problems = run_sphinx(source, new, Path(scratch, "doctrees"), changes.dates(project))
        if shutil.disk_usage(scratch).free < _LEAST:  # Sphinx warns of files it could not copy
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(built))
        if problems:
            raise BuildError("\n".join(problems))
        _drop_unused(new / "_static")
        if (built / "html").exists():  # it goes with the scratch folder
            (built / "html").rename(Path(scratch, "old"))
        new.rename(built / "html")
    return f"The site is built: {built / 'html' / 'index.html'}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it: Sphinx wraps what its extensions raise."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def explained(error: Exception) -> str | None:
    """Return what an error of the machine means and what to do; None for any other error."""
    for cause in _causes(error):
        if isinstance(cause, MemoryError):
            return "The memory is not enough. Close other programs, and run the command again."
        if isinstance(cause, OSError) and cause.errno:
            return str(cause)
    return None


>>>>>>> records
def main() -> int:
    """Build the site. Returns the exit status."""
    built = ROOT / "_build"
    built.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built, prefix="site-") as scratch:
        source, new = Path(scratch, "source"), Path(scratch, "html")
        copy_sources(ROOT, source)
        if run_sphinx(source, new, Path(scratch, "doctrees")):
            print("The site was not built: see the warnings above.", file=sys.stderr)
            return 1
        _drop_unused(new / "_static")
        shutil.rmtree(built / "html", ignore_errors=True)
        new.rename(built / "html")
    print(f"The site is built: {built / 'html' / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
