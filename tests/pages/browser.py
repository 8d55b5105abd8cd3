"""Headless Chromium, controlled over the DevTools protocol through a pair of pipes; its methods block, for use in a
thread.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

TIMEOUT = 60.0
"""Seconds to wait for an answer on a busy machine."""
PHONE_WIDTH, PHONE_HEIGHT = 390, 844
"""Size of a phone's window in CSS pixels."""
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)

_TOO_WIDE = """(() => {
  const moves = (one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowX);
  const scrolls = (one) => one && (moves(one) || scrolls(one.parentElement));
  return [...document.body.querySelectorAll("*")]
    .filter((one) => one instanceof HTMLElement && !scrolls(one.parentElement))
    .filter((one) => one.getBoundingClientRect().right > WIDTH)
    .map((one) => `${one.tagName} ${one.className}: ${one.textContent.slice(0, 60)}`);
})()"""
_TEXTS = """[...document.querySelectorAll(SELECTOR)]
  .map((one) => [one.innerText.trim(), one.getBoundingClientRect()])
  .filter(([text, at]) => text && at.height > 0 && at.left >= 0 && at.right <= WIDTH)
  .map(([text, at]) => text)"""


def chromium() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Browser with a single page."""

    def __init__(self, *options: str) -> None:
        program = chromium()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(prefix="dmsg-browser-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def at_three_and_four() -> None:
            # Chromium expects these two descriptors, 3 and 4; both pipes are moved away from these numbers first.
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [program, *OPTIONS, *options, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=at_three_and_four,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN | select.POLLHUP)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT
        while True:
            while b"\0" in self._buffer:
                text, _, self._buffer = self._buffer.partition(b"\0")
                answer = json.loads(text)
                if answer.get("id") == self._number:
                    if "error" in answer:
                        raise AssertionError(f"{method}: {answer['error']}")
                    result: dict[str, Any] = answer["result"]
                    return result
            if not self._poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise AssertionError(f"{method}: no answer of the browser")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise AssertionError(f"{method}: the browser has ended")
            self._buffer += data

    def go(self, url: str) -> None:
        """Open a page."""
        self.ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str, timeout: float = TIMEOUT) -> Any:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + timeout
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true within {timeout:g} s: {expression}")
            time.sleep(0.05)
        return found

    def look(self, width: int, height: int, *, dark: bool = False, scripts: bool = True) -> None:
        """Set the size of the window and the preferences of its user."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)

    def look_by_phone(self) -> None:
        """Set the size of the window to that of a phone."""
        self.look(PHONE_WIDTH, PHONE_HEIGHT)

    def too_wide(self) -> list[str]:
        """Return what a user of a phone would have to move the whole page for: elements beyond the right edge of the
        window that are in no box that scrolls by itself.
        """
        found: list[str] = self.value(_TOO_WIDE.replace("WIDTH", str(PHONE_WIDTH)))
        if (width := self.value("document.documentElement.scrollWidth")) > PHONE_WIDTH:
            found.append(f"the document: {width} pixels")
        return found

    def texts(self, selector: str) -> list[str]:
        """Return the texts of elements that lie completely within the width of a phone."""
        wanted = _TEXTS.replace("SELECTOR", json.dumps(selector)).replace("WIDTH", str(PHONE_WIDTH))
        found: list[str] = self.value(wanted)
        return found

    def picture(self, path: str | None = None) -> bytes:
        """Return the visible page as PNG."""
        data = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        if path is not None:
            with open(path, "wb") as file:
                file.write(data)
        return data

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()
