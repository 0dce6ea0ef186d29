"""A browser that watches what the playground page does, and servers for it to talk to.

Every page that is opened through a `Browser` is checked at the end: no script error, no refused policy, no request to
anywhere but the server.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

NETWORK_ERROR = "Failed to load resource"  # what Chromium itself says of an answer of 400 and above
REPORT_POLICY = "document.addEventListener('securitypolicyviolation', e => console.error('policy', e.blockedURI))"
DONE_MS = 40_000


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of the app on a port of its own, while it runs in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(30)


def asked(url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Any:
    """What the server answers to a client that is no browser: JSON, or text where it is none."""
    data = None if body is None else json.dumps(body).encode()
    made = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(made, timeout=60) as response:
        text = response.read().decode()
    return json.loads(text) if response.headers.get_content_type() == "application/json" else text


@dataclass
class Visit:
    """One page, what it asked for and what its console said."""

    base: str
    page: Any
    requests: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def bodies(self) -> list[dict[str, Any]]:
        """Of the chat requests that were sent."""
        return [json.loads(r.post_data) for r in self.requests if r.url.endswith("/v1/chat/completions")]

    def send(self, text: str, *, way: str = "speculative", max_tokens: int = 24) -> None:
        """Ask, as a user does; returns once the request is on its way."""
        self.page.locator(f"input[name=way][value={way}]").check(force=True)
        self.set("max_tokens", max_tokens)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_selector(".lane")

    def set(self, name: str, value: object) -> None:
        """Write into a field of the settings."""
        if not self.page.is_visible("#settings"):
            self.page.click("#settings-toggle")
        self.page.fill(f"#{name}", str(value))

    def wait(self) -> None:
        """Until nothing runs."""
        self.page.wait_for_selector("#send:visible")

    def wait_for_steps(self, number: int) -> None:
        """Until the strip shows so many steps."""
        self.page.locator(".strip g").nth(number - 1).wait_for(state="attached")

    def wait_for_server(self) -> None:
        """Until the page knows what it talks to."""
        self.page.locator("#pair", has_text="cpu").wait_for()

    def tokens(self, way: str = "speculative") -> list[dict[str, Any]]:
        """What the last answer of this way shows, token by token."""
        return self.page.evaluate(
            """way => {
                const lane = [...document.querySelectorAll(`.lane[data-way=${way}]`)].at(-1);
                const shown = [];
                for (const span of lane.querySelectorAll(".tok[data-index]")) {
                    const at = Number(span.dataset.index);
                    shown[at] ??= {text: "", kind: span.dataset.kind, step: Number(span.parentElement.dataset.step)};
                    shown[at].text += span.textContent;
                }
                return shown;
            }""",
            way,
        )


class Browser:
    """Opens pages, and checks each of them when it closes."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self._visits: list[Visit] = []

    def open(self, base: str, **settings: Any) -> Visit:
        context = self._chromium.new_context(**settings)
        context.add_init_script(REPORT_POLICY)
        visit = Visit(base, context.new_page())
        visit.page.set_default_timeout(DONE_MS)
        context.on("request", lambda request: visit.requests.append(request))
        visit.page.on("pageerror", lambda error: visit.errors.append(f"script: {error}"))
        visit.page.on("console", lambda said: visit.errors.append(said.text) if said.type == "error" else None)
        self._visits.append(visit)
        visit.page.goto(base)
        return visit

    def close(self) -> None:
        for visit in self._visits:
            visit.page.context.close()
        for visit in self._visits:
            assert [error for error in visit.errors if NETWORK_ERROR not in error] == []
            assert {r.url for r in visit.requests if not r.url.startswith(visit.base)} == set()


@contextmanager
def chromium() -> Iterator[Any]:
    """A Chromium of this machine, or a skipped test."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
