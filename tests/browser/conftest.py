"""A real Chromium and a real server for the tests of the page; skipped where one is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from support.page_runs import KEY, OpenPage, greeted
from support.server_runs import Server, running, served
from support.tiny_fixture import Tiny

_NAMES = ("chromium", "google-chrome")


def _missing(what: str) -> None:
    message = f"{what} is not installed; `make test-browser` installs it and runs these tests"
    if os.environ.get("HEADSTART_TEST_BROWSER") == "required":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where it is; everything that needs it is skipped without it."""
    if find_spec("playwright") is None:
        _missing("playwright")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        _missing("Chromium")
    assert path is not None
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Not for longer than a module: Playwright's event loop runs as long as the browser does, and
    `asyncio.run` of tests that come later in the same process would refuse to start another."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its own sandbox: it refuses to run as root with it, as in a container.
        own = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield own
        own.close()


@pytest.fixture(scope="session")
def server(chromium: str, tiny: Tiny) -> Iterator[Server]:
    with running(
        served(tiny), "--speculate", "3", "--api-key", KEY, "--served-model-name", "served"
    ) as own:
        yield own


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[OpenPage]:
    """Opens the page; its console must stay quiet, and it must ask nobody but this server."""
    contexts, noise, strangers = [], [], []

    def opened(*, key: str | None = KEY, quiet: bool = True, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('headstart-api-key', '{key}')")
        page = context.new_page()
        page.set_default_timeout(20_000)
        if quiet:
            page.on("console", lambda m: noise.append(m.text) if m.type != "log" else None)
            page.on("pageerror", lambda error: noise.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith((server.url, "data:")) else strangers.append(r.url),
        )
        page.goto(server.url)
        if key is not None:
            greeted(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert noise == [] and strangers == []
