"""A Sphinx extension: what a site can offer once the repository has an address.

The address is `Repository` in pyproject.toml's [project.urls], or REPOSITORY_URL, as the workflow
that publishes the site sets it. With it the first page says how to clone the repository; a chapter
says how to run it in Google Colab or on Binder; and every page leads to its source and to a report
of an issue. Without it a page has none of these.
"""

import os
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sphinx.application import Sphinx

BRANCH = "main"
GITHUB = "https://github.com/"  # what Binder and Colab open by owner and name
FOLDER = "fp8-matmuls"  # of a clone
# How the first page starts JupyterLab: the command that clones goes there.
_START = "```bash\nmake lab"
# Colab opens a notebook without the rest of its repository. A reader may paste the cell
# anywhere.
COLAB_CELL = """\
import sys
assert "google.colab" in sys.modules, "This is for Google Colab. In a checkout, run `make lab`."
%cd /content
!test -d {folder} || git clone --quiet --depth 1 {address} {folder}
%pip install --quiet "./{folder}[jax]" flax
%cd {folder}/notebooks
sys.path.append("..")"""
_WAYS_TO_RUN = """

<details><summary>Run this chapter in Colab or on Binder</summary>

[Open it in Google Colab](https://colab.research.google.com/github/{name}/blob/{branch}/{file}).
Choose a runtime without a GPU. Then add a cell above the first one, and run this in it:

```ipython
{cell}
```

[Open it on Binder](https://mybinder.org/v2/gh/{name}/{branch}?urlpath=lab/tree/{file}). Nothing has
to be added there. Binder builds the environment first, which can take several minutes.

</details>"""


def facts(project: Path) -> dict[str, Any]:
    """What pyproject.toml says in [project]; nothing where there is no such file."""
    file = project / "pyproject.toml"
    if not file.is_file():
        return {}
    return tomllib.loads(file.read_text(encoding="utf-8"))["project"]


def address(project: Path) -> str:
    """The repository's address; empty where none is known."""
    known = os.environ.get("REPOSITORY_URL") or facts(project).get("urls", {}).get("Repository", "")
    return known.rstrip("/").removesuffix(".git")


def source(repository: str, file: str) -> str:
    """Where a file of the project is read."""
    return f"{repository}/blob/{BRANCH}/{quote(file)}"


def issue(repository: str, file: str) -> str:
    """Where an issue of a page is reported; the file of the page is its title."""
    return f"{repository}/issues/new?title={quote(f'{file}: ', safe='')}"


def with_address(readme: str, repository: str) -> str:
    """The first page's text, with the command that clones the repository."""
    if not repository:
        return readme
    clone = f"git clone {repository} {FOLDER}\ncd {FOLDER}\n"
    return readme.replace(_START, _START.replace("make lab", f"{clone}make lab"), 1)


def ways_to_run(repository: str, file: str) -> str:
    """A fold for the beginning of a chapter; empty where Colab and Binder cannot open it."""
    if not repository.startswith(GITHUB):
        return ""
    return _WAYS_TO_RUN.format(
        cell=COLAB_CELL.format(address=repository, folder=FOLDER),
        name=repository.removeprefix(GITHUB),
        branch=BRANCH,
        file=quote(file),
    )


def _complete_first_page(app: Sphinx, name: str, text: list[str]) -> None:
    if name == app.config.root_doc:
        text[0] = with_address(text[0], app.config.repository)


def _find_address(app: Sphinx, config: Any) -> None:
    config.repository = address(Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("repository", "", "env")
    app.connect("config-inited", _find_address)
    app.connect("source-read", _complete_first_page, priority=400)  # before pages.py looks at it
    return {"parallel_read_safe": True, "parallel_write_safe": True}
