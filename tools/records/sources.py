"""What stands at the addresses that records name, for the weekly checks of what others measured."""

import html
import json
import re
import urllib.error
import urllib.request

GITHUB = "https://github.com"
RAW = "https://raw.githubusercontent.com"
API = "https://api.github.com"
SECONDS = 30


class Unreachable(Exception):
    """An address did not answer: there is no network here, or the page is gone."""


def text_at(url: str) -> str:
    """The text of a page or file. Raises Unreachable with the address and the reason."""
    request = urllib.request.Request(url, headers={"User-Agent": "fp8-matmuls record check"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.read().decode(errors="replace")
    except (urllib.error.URLError, OSError) as error:
        raise Unreachable(
            f"{url} cannot be read ({error}): this check needs a network. Where there is one, the "
            f"page is gone"
        ) from error


def said_at(url: str) -> str:
    """What is said at the address of a page of GitHub's: by the file, at its commit, or by the
    author of a request.

    Raises Unreachable.
    """
    if at_commit := re.fullmatch(rf"{GITHUB}/([^/]+/[^/]+)/blob/(.*)", url):
        return text_at(f"{RAW}/{at_commit[1]}/{at_commit[2]}")
    if request := re.fullmatch(rf"{GITHUB}/([^/]+/[^/]+)/pull/(\d+)", url):
        return json.loads(text_at(f"{API}/repos/{request[1]}/pulls/{request[2]}"))["body"]
    return text_at(url)


def one_line(text: str) -> str:
    """The text with its tags left out and runs of blanks made one."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())
