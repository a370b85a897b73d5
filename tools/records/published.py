"""Whether what others published is still there, in the words that published.json and scale.json in
notebooks/results quote.

    python -m tools.records.published --check    needs a network

A file is read at the commit in its address, so it is the one that was quoted. A commit's date is
compared too.
"""

import argparse
import datetime
import email.utils
import re
import sys
from pathlib import Path

from helpers.records.results import Published, load_published, load_scale
from tools.records import sources

RESULTS = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results"


def problems(entry: Published) -> list[str]:
    """What of an entry its source does not say. Raises Unreachable."""
    pages = [sources.said_at(url) for url in (entry.url, *entry.beside)]
    # As it stands, and without tags: a quotation can hold "<" itself.
    said = [" ".join(page.split()) for page in pages] + [sources.one_line(page) for page in pages]
    found = [
        f"{entry.name}: {entry.url} does not say {quote!r}"
        for quote in entry.quotes
        if not any(" ".join(quote.split()) in page for page in said)
    ]
    at_commit = re.match(r"(https?://[^/]+/[^/]+/[^/]+)/blob/([0-9a-f]{40})/", entry.url)
    if at_commit:
        dated = _date(sources.text_at(f"{at_commit[1]}/commit/{at_commit[2]}.patch"))
        if entry.date is None or abs(datetime.date.fromisoformat(entry.date) - dated).days > 1:
            found.append(f"{entry.name}: its commit is of {dated}, and {entry.date} is recorded")
    return found


def _date(patch: str) -> datetime.date:
    """The day of a commit, from its patch as mail; a time zone can make it a day off."""
    (said,) = re.findall(r"^Date: (.*)", patch, re.M)[:1]
    return email.utils.parsedate_to_datetime(said).date()


def main(arguments: list[str] | None = None) -> int:
    """Print every quotation that is not found; return 1 if there is one, 2 without a network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    entries = load_published(options.results)
    if (options.results / "scale.json").exists():
        entries += load_scale(options.results)
    found = []
    try:
        for entry in entries:
            found += problems(entry)
    except sources.Unreachable as error:
        print(error, file=sys.stderr)
        return 2
    quotes = sum(len(entry.quotes) for entry in entries)
    print("\n".join(found) or f"{quotes} quotations of {len(entries)} sources are as recorded")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
