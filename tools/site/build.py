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
import shutil
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from sphinx.cmd.build import build_main

HERE = Path(__file__).resolve().parent


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
                self.loads |= {
                    part.split()[0]: None for part in (value or "").split(",") if part.strip()
                }
            elif name == "href" and tag in ("link", "image", "use"):
                if named.get("rel") != "canonical":  # where the page itself will stand
                    self.loads[value or ""] = None
            elif name == "href":
                self.links[value or ""] = None
        if tag == "meta" and "http-equiv" in named and named["http-equiv"].lower() == "refresh":
            self.loads[f"<meta> {named.get('content')}"] = None


def _pages(out: Path) -> list[Path]:
    return sorted(file for file in out.rglob("*.html") if "_static" not in file.parts)


def check_pages(out: Path) -> list[str]:
    """What is wrong with the links and loads of the pages under `out`: what Sphinx does not look at, as in outputs."""
    pages = {file: _Links(file.read_text(encoding="utf-8")) for file in _pages(out)}
    problems = []
    for file, page in pages.items():
        where = file.relative_to(out).as_posix()
        problems += [
            f"{where}: the page would load {url!r} from elsewhere"
            for url in page.loads
            if urlsplit(url).netloc
            or urlsplit(url).scheme not in ("", "data")
            or url.startswith("/")
        ]
        for url in {**page.links, **page.loads}:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if parts.path.startswith("/") or not target.is_file():
                problems.append(f"{where}: {url!r} leads to no file of the site")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                problems.append(f"{where}: {url!r} leads to no place on its page")
    return problems


def _sources(project: Path, folder: Path) -> None:
    """A copy of the project's files in which the first page of myst.yml is the index. They keep their times."""
    try:
        toc = yaml.safe_load((project / "myst.yml").read_text(encoding="utf-8"))["project"]["toc"]
        first = Path(toc[0]["file"])
        parts = [entry for entry in toc if "file" not in entry]
        pages = [page for part in parts if part["title"] for page in part["children"]]
        for page in [*(entry for entry in toc if "file" in entry), *pages]:
            if not (project / page["file"]).is_file():
                raise BuildError(f"myst.yml: {page['file']} is not there")
    except (OSError, yaml.YAMLError, LookupError, TypeError) as error:
        raise BuildError(
            f"{project}/myst.yml: it must have project: toc:, a list of pages (file: ...) and of parts "
            f"(title: ..., children: a list of pages). It gave {type(error).__name__}: {error}"
        ) from error
    if (
        first.parent != Path(".")
        or first.suffix != ".md"
        or first.name != "index.md"
        and (project / "index.md").exists()
    ):
        raise BuildError(
            f"myst.yml: its first page becomes index.html, and must be a .md file beside it, with no "
            f"other index.md: got {first}"
        )
    shutil.copytree(
        project,
        folder,
        ignore=shutil.ignore_patterns(".*", "_*", "*.egg-info"),
        ignore_dangling_symlinks=True,
    )
    (folder / first).rename(folder / "index.md")


def build(project: Path) -> str:
    """Build `project` into its _build/html, which stays as it was where that fails. Returns what to tell the reader;
    raises BuildError."""
    built, out = project / "_build", project / "_build" / "html"
    built.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built, prefix="site-") as scratch:
        source, new = Path(scratch, "source"), Path(scratch, "html")
        _sources(project, source)
        said = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        arguments = [
            "-q",
            "--no-color",
            "-c",
            HERE,
            "-d",
            Path(scratch, "doctrees"),
            "-b",
            "html",
            "-j",
            "auto",
            source,
            new,
        ]
        with contextlib.redirect_stderr(said):
            status = build_main(list(map(str, arguments)))
        text = said.buffer.getvalue().decode().replace(f"{source}{os.sep}", "")
        problems = [line for line in text.splitlines() if line.strip()]
        problems += [] if status else check_pages(new)
        if problems or status:
            raise BuildError("\n".join(dict.fromkeys(problems)) or f"Sphinx exited with {status}")
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)
    return f"{len(_pages(out))} pages in {out / 'index.html'}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--project",
        type=Path,
        default=HERE.parent.parent,
        help="folder of myst.yml (default: this)",
    )
    try:
        print(build(parser.parse_args().project.resolve()))
    except BuildError as error:
        print(f"The site was not built:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
