"""JupyterLab's configuration for `make lab`: what it saves of a chapter is what `make refresh`
would write, so that a chapter that was opened, run and saved is the one that git has.
"""

import re
import sys
from pathlib import Path, PurePosixPath

import jupytext
import nbformat
from ipykernel.ipkernel import IPythonKernel
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import outputs

FORMATS = outputs.METADATA["jupytext"]["formats"]


class Contents(AsyncLargeFileManager):
    """Saves a chapter's two halves as `make refresh` writes them."""

    async def get(self, path, *arguments, **options):
        """Give a chapter's kernel the description that it will give of itself, with its version.

        JupyterLab would otherwise write that into a chapter that is only opened, and ask to save.
        A folder is listed without the text halves of its chapters; their path opens them.
        """
        model = await super().get(path, *arguments, **options)
        if model["type"] == "directory" and model["content"]:
            names = (Path(file["name"]) for file in model["content"])
            halves = {name.with_suffix(".md").name for name in names if name.suffix == ".ipynb"}
            model["content"] = [f for f in model["content"] if f["name"] not in halves]
        if model["type"] == "notebook" and model["content"]:
            model["content"].metadata["language_info"] = IPythonKernel.language_info
        return model

    def run_pre_save_hooks(self, model, path, **options):
        """Write a chapter, either half of it, as `make refresh` does, and an explorer's notebook
        with its picture: what a reader tries changes no file.
        """
        super().run_pre_save_hooks(model, path, **options)
        content = model.get("content")
        if model["type"] == "notebook":
            metadata = content.get("metadata", {})
            if outputs.lookup(metadata, "jupytext.formats") == FORMATS:
                model["content"] = outputs.normalise(nbformat.from_dict(content))
                return
            file = Path(self._get_os_path(path))
            if PurePosixPath(path).match("try/*.ipynb") and file.is_file():
                stored = nbformat.read(file, 4)
                model["content"] = outputs.of_explorer(nbformat.from_dict(content), stored)
        elif model["type"] == "file" and path.endswith(".md"):
            if re.search(f"^  formats: {FORMATS}$", content, re.M):
                notebook = outputs.normalise(jupytext.reads(content, fmt="md:myst"))
                model["content"] = outputs.twin_of(notebook)


# JupyterLab defines get_config for this file.
c = get_config()  # type: ignore[name-defined] # noqa: F821
c.ServerApp.contents_manager_class = Contents
# What a kernel and the server say to each other is encrypted where the kernel can: else it warns,
# in the terminal.
c.KernelManager.transport_encryption = "auto"
c.ServerApp.log_level = c.LabApp.log_level = "ERROR"
