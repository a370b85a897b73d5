"""Some pages of the site in Firefox, another engine than Chromium: none has an error, and each
explorer answers to a change. The distribution's Firefox is spoken to by WebDriver BiDi, which
Playwright's own protocol is not.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import websocket

from tests.conftest import WAIT
from tests.course.test_explorers import CHAPTERS
from tools.site import explorers, pyodide

pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")


class Firefox:
    """A session of a browser, with one page, whose errors are kept in `wrong`."""

    def __init__(self, address: str):
        self.wrong: list[str] = []
        self._count = itertools.count()
        # Firefox refuses who says that a page of another origin asks.
        self._socket = websocket.create_connection(
            f"{address}/session", timeout=WAIT / 1000, suppress_origin=True
        )
        self.ask("session.new", capabilities={})
        self.ask("session.subscribe", events=["log.entryAdded", "network.responseCompleted"])
        (page,) = self.ask("browsingContext.getTree")["contexts"]
        self._page = page["context"]

    def ask(self, method: str, **params: Any) -> Any:
        """The result of a command. AssertionError for one that failed."""
        number = next(self._count)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (said := json.loads(self._socket.recv())).get("id") != number:
            self._hear(**said)
        assert said["type"] == "success", said
        return said["result"]

    def _hear(self, method: str, params: Any, **_: Any) -> None:
        if method == "log.entryAdded" and params["level"] in ("error", "warn"):
            self.wrong.append(params["text"])
        if method == "network.responseCompleted" and params["response"]["status"] >= 400:
            self.wrong.append(params["response"]["url"])

    def open(self, address: str) -> None:
        """Open a page, and forget what went wrong before."""
        self.wrong.clear()
        self.ask("browsingContext.navigate", context=self._page, url=address, wait="complete")

    def run(self, script: str) -> Any:
        """What a script of the page's returns, a text or a number; of a promise, what it gives."""
        found = self.ask(
            "script.evaluate", expression=script, target={"context": self._page}, awaitPromise=True
        )
        assert found["type"] == "success", found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a condition holds in the page, looked at in each frame."""
        self.run(
            f"(async () => {{ while (!({condition})) await new Promise(requestAnimationFrame) }})()"
        )


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        message = "no firefox on PATH: install your distribution's package to run these tests"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    profile = tmp_path_factory.mktemp("firefox")
    command = [program, "--headless", "--no-remote", "--profile", profile]
    with subprocess.Popen(
        [*command, "--remote-debugging-port=0", "about:blank"],
        env=os.environ | {"HOME": str(profile), "MOZ_CRASHREPORTER_DISABLE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            found = (re.search(r"BiDi listening on (ws://\S+)", line) for line in process.stderr)
            yield Firefox(next(filter(None, found))[1])
        finally:
            process.kill()


@pytest.mark.parametrize("page", ["index", *CHAPTERS])
def test_a_page_has_no_error(site, firefox, page):
    firefox.open(f"{site}{page}.html")
    firefox.wait("document.querySelector('h1') && document.fonts.status == 'loaded'")
    assert firefox.run("document.documentElement.scrollWidth - innerWidth") <= 0
    assert not firefox.wrong


# The first select gets its last value; without a select the button that matters most is pressed.
CHANGE = """(() => {
    const explorer = document.querySelector('.explorer'), control = explorer.querySelector('select')
    window.before = explorer.textContent
    if (!control) return explorer.querySelector('button.main').click()
    control.value = control.options[control.options.length - 1].value
    control.dispatchEvent(new Event('change', {bubbles: true}))
})()"""


@pytest.mark.parametrize("name", [*explorers.EXPLORERS])
def test_an_explorer_answers_to_a_change(site, firefox, name):
    if name == "dump" and not pyodide.FOLDER.is_dir():
        pytest.fail("no Pyodide") if os.environ.get("CI") else pytest.skip("no Pyodide")
    firefox.open(f"{site}{explorers.FOLDER}/{name}.html")
    firefox.wait("document.querySelector('.explorer[data-shown]')")
    firefox.run(CHANGE)
    firefox.wait("document.querySelector('.explorer').textContent != before")
    if name == "dump":
        firefox.wait("document.querySelector('.explorer:not([data-busy]) .verdict')")
    assert firefox.run("document.documentElement.scrollWidth - innerWidth") <= 0
    # It writes its state into the address a moment later. Until then no other page is opened.
    firefox.run("new Promise(written => setTimeout(written, 500))")
    assert not firefox.wrong
