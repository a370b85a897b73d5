"""Build the site into _build/html, from the chapters as they are stored: nothing is run, nothing asked of the network.

    python tools/site/build.py                  SITE_URL=https://... says where it will stand, for what search engines
                                                and a link's readers are shown

The pages are those of myst.yml. What is wrong is listed, and the build exits with 1: whatever Sphinx warns of, an
output that a page may not hold (conf.py), a link or picture that leads nowhere, anything loaded from elsewhere.
"""
import argparse
import contextlib
import io
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from sphinx.cmd.build import build_main

HERE = Path(__file__).resolve().parent
# Sphinx colours what it writes to a terminal.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class BuildError(Exception):
    """The site is not right; the message lists what is wrong, a line each."""


class _Links(HTMLParser):
    """What a page defines (ids), leads to (links) and loads."""

    def __init__(self, page: str):
        super().__init__()
        self.ids, self.links, self.loads = {"top"}, {}, {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        for name, value in attrs:
            if name in ("id", "name"):
                self.ids.add(value or "")
            elif name in ("src", "poster") or tag == "object" and name == "data":
                self.loads[value or ""] = None
            elif name == "srcset":
                self.loads |= {part.split()[0]: None for part in (value or "").split(",") if part.strip()}
            elif name == "href" and tag in ("link", "image", "use"):
                if named.get("rel") != "canonical":  # where the page itself will stand
                    self.loads[value or ""] = None
            elif name == "href":
                self.links[value or ""] = None
            elif name == "style":
                self.loads |= dict.fromkeys(re.findall(r"url\(['\"]?(.*?)['\"]?\)", value or ""))


def _pages(out: Path) -> list[Path]:
    return sorted(file for file in out.rglob("*.html") if "_static" not in file.parts)


def check_pages(out: Path) -> list[str]:
    """What is wrong with the links and loads of the pages under `out`: what Sphinx does not look at, as in outputs."""
    pages = {file: _Links(file.read_text(encoding="utf-8")) for file in _pages(out)}
    problems = []
    for file, page in pages.items():
        where = file.relative_to(out).as_posix()
        problems += [f"{where}: the page would load {url!r} from elsewhere" for url in page.loads
                     if urlsplit(url).netloc or urlsplit(url).scheme not in ("", "data") or url.startswith("/")]
        for url in {**page.links, **page.loads}:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if parts.path.startswith("/") or not target.is_file():
                problems.append(f"{where}: {url!r} leads to no file of the site")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                problems.append(f"{where}: {url!r} leads to no place on its page")
    return problems


def _sources(project: Path, folder: Path) -> Path:
    """A copy of the project's files in which the first page of myst.yml is the index. They keep their times."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns(".*", "_*", "*.egg-info"))
    toc = yaml.safe_load((folder / "myst.yml").read_text(encoding="utf-8"))["project"]["toc"]
    first = folder / toc[0]["file"]
    if not first.is_file():
        raise BuildError(f"myst.yml: its first page, {toc[0]['file']}, is not there")
    if first.name != "index.md":
        first.rename(folder / "index.md")
    return folder


def build(project: Path) -> str:
    """Build `project` into its _build/html. Returns what to tell the reader; raises BuildError."""
    built = project / "_build"
    out, doctrees = built / "html", built / "doctrees"
    for stale in (out, doctrees):
        shutil.rmtree(stale, ignore_errors=True)
    source = _sources(project, built / "source")
    arguments = ["-q", "-c", HERE, "-d", doctrees, "-b", "html", "-j", "auto", source, out]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = build_main([str(argument) for argument in arguments])
    lines = [line.replace(f"{source}{os.sep}", "") for line in _COLOUR.sub("", said.getvalue()).splitlines()]
    problems = [line for line in lines if line.strip()]
    if not status:
        problems += check_pages(out)
    if problems or status:
        raise BuildError("\n".join(problems) or f"Sphinx exited with {status}")
    return f"{len(_pages(out))} pages in {out / 'index.html'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=HERE.parent.parent, help="folder of myst.yml (default: this)")
    try:
        print(build(parser.parse_args().project.resolve()))
    except BuildError as error:
        print(f"The site was not built:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
