"""Build the site into _build/html, from the chapters as they are stored.

    python -m tools.site.build     SITE_URL=https://... says where it will stand,
                                   for search engines and for who is sent a link

Nothing is run, and nothing is asked of the network. The pages are those of myst.yml. Any warning of
Sphinx, MyST or these extensions, as of a link that leads nowhere, fails the build. The site that
was there then stays.
"""

import re
import shutil
import subprocess
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


# Pagefind takes a section's place from its heading. Sphinx gives it to what is around that, and to
# the signatures of the public names.
_SECTION = re.compile(r'<section id="([^"]+)">\s*(?:<span[^>]*></span>)*\s*<(h\d)')
_SIGNATURE = re.compile(r'<dt class="sig[^>]* id="([^"]+)">(.*?)</dt>', re.S)
_UNREAD = ".headerlink, .viewcode-link, details .cell_input"
# Code and outputs count less than prose.
_QUIET = re.compile(r'<div class="(?=highlight|output|cell_output)')


def _to_search(page: str) -> str:
    """Return a page as Pagefind is to read it."""
    page = _QUIET.sub('<div data-pagefind-weight="0.1" class="', page)
    page = _SECTION.sub(r'<section><\2 id="\1"', page)
    return _SIGNATURE.sub(r'<h4 id="\1">\2</h4>', page)


def write_search_index(out: Path, scratch: Path) -> None:
    """Write Pagefind's index of the pages into `out`, from their copies in `scratch`.

    By Pagefind's command: its Python interface may end before the files are whole (Pagefind 1.5,
    github.com/Pagefind/pagefind/issues/1271).
    """
    for file in out.rglob("*.html"):
        path = file.relative_to(out)
        if not path.as_posix().startswith(("_", "search", "CHANGELOG")):
            copy = scratch / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_to_search(file.read_text(encoding="utf-8")), encoding="utf-8")
    index = ["--site", str(scratch), "--output-path", str(out / "pagefind"), "--keep-index-url"]
    rules = ["--root-selector", "article", "--exclude-selectors", _UNREAD]
    command = [sys.executable, "-m", "pagefind", "--quiet", *index, *rules]
    subprocess.run(command, check=True)
    for file in [*out.glob("pagefind/*-ui.*"), *out.glob("pagefind/*-highlight.js")]:
        file.unlink()  # this site shows what was found by its own search.mjs


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
        write_search_index(new, Path(scratch, "searched"))
        shutil.rmtree(built / "html", ignore_errors=True)
        new.rename(built / "html")
    print(
        f"The site is built. Opened as files, its explorers do not answer. To see it, run\n"
        f"    python3 -m http.server -d {built / 'html'}\nand open http://localhost:8000"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
