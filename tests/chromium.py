# SPDX-License-Identifier: Apache-2.0
"""A page in headless Chromium, spoken to over the DevTools protocol through a pipe; no package is needed for it.

with opened(path.as_uri(), size=(390, 844)) as page:
    page.run("document.querySelector('button').click()")
    assert page.run("document.title") == "quickstart" and not page.errors
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
ANSWER_S = 60.0
PIPES = 'exec "$0" "$@" 3<&{} 4>&{}'
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run")


class Page:
    """An open page. `errors`: exceptions of its scripts, and what the browser refused or did not find."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._count, self._read = to_browser, from_browser, 0, b""
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Result of a method of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._await(lambda told: told.get("id") == self._count)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, script: str) -> Any:
        """Value of an expression in the page; of a promise what it resolves to."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def visit(self, url: str) -> None:
        """Open `url`, up to the end of its scripts."""
        self.call("Page.navigate", url=url)
        self._await(lambda told: told.get("method") == "Page.loadEventFired")

    def follow(self, script: str) -> None:
        """Run what leads to another page, up to the end of its scripts."""
        self.run(script)
        self._await(lambda told: told.get("method") == "Page.loadEventFired")

    def screenshot(self, path: Path) -> None:
        """Write a PNG of what is visible."""
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _await(self, is_meant: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until_s = time.monotonic() + ANSWER_S
        while True:
            message, end, rest = self._read.partition(b"\0")
            if not end:
                ready, _, _ = select.select([self._from], [], [], max(0.0, until_s - time.monotonic()))
                part = os.read(self._from, 1 << 20) if ready else b""
                assert part, "Chromium has ended, or does not answer"
                self._read += part
                continue
            self._read, told = rest, json.loads(message)
            match told:
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                    self.errors.append(str(details))
                case {"method": "Log.entryAdded", "params": {"entry": {"level": "error", "text": text}}}:
                    self.errors.append(text)
            if is_meant(told):
                return told


@contextmanager
def opened(url: str, *, size: tuple[int, int] = (1280, 900), is_dark: bool = False) -> Iterator[Page]:
    """The page at `url`, in a browser of its own, which ends with the block."""
    assert CHROMIUM is not None
    (to_child, to_browser), (from_browser, from_child) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["bash", "-c", PIPES.format(to_child, from_child), CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
        with subprocess.Popen(command, pass_fds=(to_child, from_child), stderr=subprocess.DEVNULL) as process:
            os.close(to_child)
            os.close(from_child)
            try:
                page = Page(to_browser, from_browser)
                screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
                page.call("Emulation.setDeviceMetricsOverride", **screen)
                scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
                page.call("Emulation.setEmulatedMedia", features=[scheme])
                page.visit(url)
                yield page
            finally:
                process.kill()
                os.close(to_browser)
                os.close(from_browser)
