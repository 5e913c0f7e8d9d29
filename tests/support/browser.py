"""A headless Chromium, driven through a pipe by the DevTools protocol, to look at pages as a person's browser does."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIRED_ENV = "RRL_REQUIRE_CHROMIUM"
"""Environment variable; if it is set, tests fail without Chromium instead of being skipped."""
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Program that starts Chromium, which reads commands from descriptor 3 and writes answers to descriptor 4."""
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # root may run it only so; it opens only pages of the tests
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
    "about:blank",
)


def chromium() -> str | None:
    """Return the program; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A Chromium with one page, and a context manager that ends it."""

    def __init__(self, folder: Path) -> None:
        program = chromium()
        assert program is not None
        (own_in, self._commands), (self._answers, own_out) = os.pipe(), os.pipe()
        given = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (own_in, own_out)]
        options = [f"--user-data-dir={folder / 'profile'}", *_OPTIONS]
        environment = {**os.environ, "HOME": str(folder)}
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, given), program, *options],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        for fd in (own_in, own_out, *given):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        """What the page has reported, in order."""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(60)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._commands, left) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path) -> None:
        """Open a page and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self) -> list[dict[str, Any]]:
        """Return the errors and messages in the console of the page."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended; its output is in chromium.log"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def filter_page(browser: Browser, text: str) -> dict[str, float]:
    """Type a text into the box of a report's samples; return the number of shown samples and the milliseconds taken."""
    found: dict[str, float] = browser.evaluate(
        "(() => { const box = document.querySelector('.samples input'); const before = performance.now();"
        f" box.value = {json.dumps(text)}; box.dispatchEvent(new Event('input'));"
        " const shown = [...document.querySelectorAll('.samples details')].filter(one => one.offsetHeight).length;"
        " return {shown, ms: performance.now() - before}; })()"
    )
    return found
