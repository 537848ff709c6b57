"""A headless Chromium for tests of pages, driven through the DevTools protocol.

The protocol runs over two pipes (``--remote-debugging-pipe``: file descriptors 3 and 4, messages that end in a zero
byte), so that no port is open and no client library is needed.
"""

import base64
import json
import os
import selectors
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Its path; None where there is none."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)

TIMEOUT_S = 30.0


class Chromium:
    """One browser with one page. Use as a context manager.

    Attributes:
        problems: texts of exceptions and of console errors and warnings of the page, since it was opened.
        requests: addresses that the page asked for, itself included.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory()
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from, selectors.EVENT_READ)
        self._buffer = b""
        self._serial = 0
        self._has_loaded = False
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> "Chromium":
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._selector.close()
        shutil.rmtree(self._folder.name, ignore_errors=True)
        self._folder.cleanup()

    def open(self, path: Path, fragment: str = "") -> None:
        """Loads a file and waits until it is there; forgets the problems and requests of the page before."""
        self._load("about:blank")  # so that another fragment of the same file is loaded anew
        self.problems, self.requests = [], []
        self._load(f"{path.resolve().as_uri()}{fragment}")

    def eval(self, expression: str) -> Any:
        """What a JavaScript expression yields, as plain data; a promise's outcome.

        Raises:
            AssertionError: it threw.
        """
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, _exception_text(reply)
        return reply["result"].get("value")

    def show(self, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Sets the size of the window, in CSS pixels, and the colour scheme that the page is told to like."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str, code: int) -> None:
        """One key, to what has the focus. ``code``: its Windows key code, such as 39 for ArrowRight."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """The whole page, not the window alone, as a PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        self._serial += 1
        serial = self._serial
        message = {"id": serial, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == serial:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    def _load(self, url: str) -> None:
        self._has_loaded = False
        self.call("Page.navigate", url=url)
        while not self._has_loaded:
            self._read()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert self._selector.select(TIMEOUT_S), "chromium does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "chromium has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        if "method" not in event:
            return
        method, params = event["method"], event["params"]
        if method == "Page.loadEventFired":
            self._has_loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(_exception_text(params))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


def _exception_text(params: dict[str, Any]) -> str:
    details = params["exceptionDetails"]
    return details.get("exception", {}).get("description", details["text"])
