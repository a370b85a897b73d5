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

from sphinx.cmd.build import main as sphinx_build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIRST_PAGE = "README.md"


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
