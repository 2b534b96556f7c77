"""One page of a real browser that a test looks at and works: typing, clicking, reading, taking a picture.

It speaks the DevTools protocol over two pipes, which Chromium has as its descriptors 3 and 4.
"""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.chromium import options

# Chromium wants these very numbers, and `subprocess` passes descriptors on under their own.
_WITH_PIPES = """
import fcntl, os, sys
given = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, copy in zip((3, 4), given):
    os.dup2(copy, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE = 60.0  # seconds
_CHANGING = ("Inspected target navigated or closed", "Execution context was destroyed.")


class BrowserPage:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._session: str | None = None
        self._number = 0
        (page,) = [one for one in self._do("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self._do("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def close(self) -> None:
        self._commands.close()
        self._answers.close()

    def _do(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self._ask(method, **params)
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        return answer

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            text += byte
        answer: dict[str, Any] = json.loads(text)
        return answer

    def size(self, width: int, height: int, *, language: str = "en") -> None:
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=True)
        self._do("Emulation.setLocaleOverride", locale=language)
        agent = self._do("Browser.getVersion")["userAgent"]
        self._do("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)

    def before_each_page(self, script: str) -> None:
        self._do("Page.enable")
        self._do("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, url: str) -> None:
        self._do("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return what a piece of JavaScript gives; None while the page is being changed."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if answer.get("error", {}).get("message") in _CHANGING:
            return None
        return answer["result"]["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self.value(expression) is not True:
            shown = self.value("document.body.innerText")
            assert time.monotonic() < deadline, f"{expression} did not become true on the page:\n{shown}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self._do("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self._do("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._do("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser_page(program: str, profile: Path) -> Iterator[BrowserPage]:
    """Give an empty page of a new browser."""
    for_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    pipes = (for_browser, from_browser)
    command = [program, *options(profile), "--remote-debugging-pipe", "about:blank"]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, *map(str, pipes), *command],
            pass_fds=pipes,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        for pipe in pipes:
            os.close(pipe)
        page = BrowserPage(commands, answers)
        try:
            yield page
        finally:
            page.close()
            os.killpg(process.pid, 9)
            process.wait()
