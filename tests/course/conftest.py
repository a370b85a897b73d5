"""The pages of "Try it", for the tests of each: built once in a process. A module of tests names
its explorer in EXPLORER.
"""

import contextlib
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.course.test_explorers import shown, try_site
from tests.course.test_site import opened
from tools.site import pyodide


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site with the pages of explorers alone. Pyodide is fetched before it is
    built, where there is a network.
    """
    with contextlib.suppress(pyodide.NotFetched):
        pyodide.fetched()
    with try_site(tmp_path_factory.mktemp("try")) as address:
        yield address


@pytest.fixture(scope="module")
def address(site: str, request: pytest.FixtureRequest) -> str:
    """That of the module's explorer."""
    return f"{site}notebooks/try/{request.module.EXPLORER}.html"


@pytest.fixture(scope="module")
def desktop(address: str, browser: Browser) -> Iterator[Page]:
    """Its page, opened once for all tests of the module."""
    with opened(browser, address, 1366) as page:
        shown(page)
        yield page


@pytest.fixture(scope="module")
def page(desktop: Page) -> Page:
    """The same, where a module has no page of its own."""
    return desktop
