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


def scripted(page: Any, *events: Any, is_whole: bool = True) -> None:
    """Answer questions with these events instead of the server's."""
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    text = "".join(lines) + ("data: [DONE]\n\n" if is_whole else "")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=text, content_type="text/event-stream"),
    )


def part(delta: dict[str, str], *tokens: tuple[str, str]) -> dict[str, Any]:
    """A chunk with text and, of its step, (token text, origin)."""
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
    if tokens:
        texts, origins = zip(*tokens, strict=True)
        choice["headstart"] = {"origins": origins, "token_texts": texts}
    return {"choices": [choice]}


def numbers(page: Any) -> dict[str, str]:
    return {name: page.inner_text(f"#{name}") for name in ("speed", "length", "chosen")}
