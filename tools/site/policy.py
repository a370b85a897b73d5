"""A Sphinx extension: every page has a Content-Security-Policy.

A page may load and run only what the site has, and its own inline scripts as they were written. So
whatever an output or a text of a chapter holds, nothing is fetched from elsewhere and no script of
it runs.
"""

import base64
import hashlib
import html
import re
from pathlib import Path

from sphinx.application import Sphinx

_INLINE = re.compile(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.S)
_HANDLER = re.compile(r"\son\w+=\"([^\"]*)\"")
_HEAD = re.compile(r"<head>\s*<meta charset=\"utf-8\"\s*/?>")
_RULES = (
    "default-src 'self'",
    "object-src 'none'",
    "frame-src 'none'",
    "style-src 'self' 'unsafe-inline'",  # the theme and MyST have style attributes
    "img-src 'self' data:",
    "worker-src 'self' blob:",
    "form-action 'self'",
    "base-uri 'none'",
)


def policy(page: str) -> str:
    """The policy of a page as it was written: its inline scripts may run by their digests."""
    scripts = [*_INLINE.findall(page), *map(html.unescape, _HANDLER.findall(page))]
    digests = {base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts}
    allowed = " ".join(f"'sha256-{one}'" for one in sorted(digests))
    # WebAssembly: Python, on the page that reads dumps.
    own = f"script-src 'self' 'wasm-unsafe-eval' 'unsafe-hashes' {allowed}"
    return "; ".join([*_RULES, own])


def _write(app: Sphinx, error: Exception | None) -> None:
    if error:
        return
    for file in Path(app.outdir).rglob("*.html"):
        page = file.read_text(encoding="utf-8")
        head = _HEAD.search(page)
        if head:
            content = html.escape(policy(page))
            meta = f'<meta http-equiv="Content-Security-Policy" content="{content}">'
            page = page[: head.end()] + meta + page[head.end() :]
            file.write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", _write, priority=900)  # the pages are as they will be
    return {"parallel_read_safe": True, "parallel_write_safe": True}
