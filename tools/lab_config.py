"""JupyterLab's configuration for `make lab`: what it saves of a chapter is what `make refresh` would write, so that a
chapter that was opened, run and saved is the one that git has."""

import re
import sys
from pathlib import Path

import jupytext
import nbformat
from ipykernel.ipkernel import IPythonKernel
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import outputs

FORMATS = outputs.METADATA["jupytext"]["formats"]


class Contents(AsyncLargeFileManager):
    """Saves a chapter's two halves as `make refresh` writes them. And says of a chapter's kernel what it will say of
    itself, with its version: else JupyterLab writes that into a chapter that is only opened, and asks to save it."""

    async def get(self, path, *arguments, **options):
        model = await super().get(path, *arguments, **options)
        if model["type"] == "notebook" and model["content"]:
            model["content"].metadata["language_info"] = IPythonKernel.language_info
        return model

    def run_pre_save_hooks(self, model, path, **options):
        super().run_pre_save_hooks(model, path, **options)
        content, kind = model.get("content"), model["type"]
        if (
            kind == "notebook"
            and outputs.lookup(content.get("metadata", {}), "jupytext.formats") == FORMATS
        ):
            model["content"] = outputs.normalise(nbformat.from_dict(content))
        elif (
            kind == "file"
            and path.endswith(".md")
            and re.search(f"^  formats: {FORMATS}$", content, re.M)
        ):
            model["content"] = outputs.twin_of(
                outputs.normalise(jupytext.reads(content, fmt="md:myst"))
            )


c.ServerApp.contents_manager_class = Contents
# What a kernel and the server say to each other is encrypted where the kernel can: else it warns, in the terminal.
c.KernelManager.transport_encryption = "auto"
c.ServerApp.log_level = c.LabApp.log_level = "ERROR"
