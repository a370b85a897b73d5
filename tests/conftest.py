"""The order of the tests, and what those in a real browser share: where it is, and when its absence
is a failure.
"""

import os
import shutil
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

# Several processes of tests may share a GPU: none may take most of its memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# A shell starts so what it runs in the background.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# milliseconds for a browser to start or a page to change: far more than a busy machine takes
WAIT = 120_000

# These take longest and go first, the longest before all: each of the others takes seconds.
_LONGEST = (
    "notebooks versions site explorers firefox reasons gpu corpus lab properties isolate "
    "gpt compile hlo_parse collectives cli nnx code"
)
LONGEST = [f"test_{name}" for name in _LONGEST.split()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that of two processes none is left alone with one
    of them.
    """
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)
        )
    )


@pytest.fixture(scope="session")
def needs_git() -> None:
    """For tests that make a repository of their own."""
    if not shutil.which("git"):
        pytest.skip("no git on PATH")


@pytest.fixture(
    scope="module"
)  # not longer: while playwright runs, nothing else in this thread can use asyncio
def browser() -> Iterator[Browser]:
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        message = (
            "no chromium on PATH: install your distribution's package to run the browser tests"
        )
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT)
        browser = playwright.chromium.launch(
            executable_path=chromium, headless=True, args=FLAGS, timeout=WAIT
        )
        yield browser
        browser.close()
