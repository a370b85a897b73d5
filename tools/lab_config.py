"""JupyterLab's configuration for `make lab`: what it saves of a chapter is what `make refresh`
would write, so that a chapter that was opened, run and saved is the one that git has.
"""

import sys
import warnings
from pathlib import Path, PurePosixPath

import jupytext
import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.outputs import notebook

FORMATS = notebook.PAIRED["jupytext"]["formats"]


def as_git_has_it(model, path, contents_manager):
    """Write either half of a chapter as `make refresh` does, and an explorer's notebook with its
    picture: what a reader tries changes no file.
    """
    content = model.get("content")
    if model["type"] == "notebook":
        saved = nbformat.from_dict(content)
        file = Path(contents_manager.root_dir, path.strip("/"))
        if saved.metadata.get("jupytext", {}).get("formats") == FORMATS:
            model["content"] = notebook.normalise(saved)
        elif PurePosixPath(path).match("try/*.ipynb") and file.is_file():
            model["content"] = notebook.of_explorer(saved, nbformat.read(file, 4))
    elif path.endswith(".md") and f"\n  formats: {FORMATS}\n" in (content or ""):
        saved = jupytext.reads(content, fmt="md:myst")
        model["content"] = notebook.twin_of(notebook.normalise(saved))


# JupyterLab defines get_config for this file.
c = get_config()  # type: ignore[name-defined] # noqa: F821
c.ContentsManager.pre_save_hook = as_git_has_it
# Jupyter takes its configuration in two steps, and warns in the second that it sets the hook again.
warnings.filterwarnings("ignore", message="Overriding existing pre_save_hook")
# A folder is listed without the text halves of its chapters; their path opens them.
c.ContentsManager.hide_globs = ["__pycache__", "[0-9A-Z]*_*.md"]
# What a kernel and the server say to each other is encrypted where the kernel can: else it warns,
# in the terminal.
c.KernelManager.transport_encryption = "auto"
c.ServerApp.log_level = c.LabApp.log_level = "ERROR"
