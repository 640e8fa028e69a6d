"""What the tests of the page share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

KEY = "a-key-for-the-page"
QUESTION = "What is a head?"
OpenPage = Callable[..., Any]


def greeted(page: Any) -> None:
    """Wait until the page knows the model, and what it can do."""
    # Not with `wait_for_function`: it needs `eval`, which the page's policy forbids.
    page.locator("#model", has_text="served").wait_for()
    page.locator("#drafts option[value=auto][disabled]").wait_for(state="attached")


def ask(page: Any, text: str = QUESTION, *, drafts: str = "3", tokens: int = 70) -> None:
    """Set everything, send, and wait for the end of the answer."""
    page.set_checked("#mtp", drafts != "off")
    if drafts != "off":
        page.select_option("#drafts", drafts)
    page.fill("#max-tokens", str(tokens))
    page.fill("#seed", "7")
    page.fill("#temperature", "0.6")
    page.fill("#text", text)
    before = page.locator(".said.assistant .end").count()
    page.press("#text", "Enter")
    page.locator(".said.assistant .end").nth(before).wait_for()


def last_answer(page: Any) -> Any:
    return page.locator(".said.assistant").last


def endless(page: Any) -> None:
    """From now on answers go on until they are stopped."""

    def longer(route: Any) -> None:
        body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": 3500}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", longer)


def numbers(page: Any) -> dict[str, str]:
    return {name: page.inner_text(f"#{name}") for name in ("speed", "length", "chosen")}
