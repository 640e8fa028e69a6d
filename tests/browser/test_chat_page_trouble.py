"""What the page shows when something is missing, breaks off, or comes late."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.page_runs import KEY, QUESTION, OpenPage, greeted, last_answer, part, scripted
from support.server_runs import Server


def test_errors_are_shown_and_the_question_can_be_asked_again(open_page: OpenPage) -> None:
    page = open_page(quiet=False)  # Chromium itself reports failed requests
    page.fill("#max-tokens", "99999")
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.locator("#problem:not([hidden])").wait_for()
    assert "max_tokens" in page.inner_text("#problem")
    assert page.input_value("#text") == QUESTION
    page.context.set_offline(True)
    page.press("#text", "Enter")
    page.locator("#problem", has_text="cannot be reached").wait_for()
    page.context.set_offline(False)
    page.fill("#max-tokens", "5")
    page.press("#text", "Enter")
    page.locator(".said.assistant .end", has_text="5 tokens").wait_for()
    assert page.is_hidden("#problem")


def test_text_that_comes_later_than_its_tokens_keeps_their_tints(open_page: OpenPage) -> None:
    """Markers of reasoning are left out, and what may begin one is held back for a while."""
    page = open_page()
    scripted(
        page,
        part({"role": "assistant", "content": ""}),
        part({"reasoning_content": "Well"}, ("<think>", "bonus"), ("Well", "bonus")),
        part({}, ("</", "accepted"), ("think", "recovered")),
        part({"content": "Ye"}, (">", "accepted"), ("Yes", "accepted"), ("!", "bonus")),
        part({"content": "s!"}),
        part({"content": " unseen"}),
    )
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.locator(".said.assistant .end").wait_for()
    shown = page.evaluate(
        """() => [...document.querySelectorAll('.said.assistant span')]
        .map(e => [e.closest('details, .text').className, e.textContent, e.title])"""
    )
    assert shown == [
        ["", "Well", "bonus"], ["text", "Ye", "accepted"], ["text", "s", "accepted"],
        ["text", "!", "bonus"], ["text", " unseen", ""],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([part({"content": "Half"}), {"error": {"message": "the engine failed"}}], "engine failed"),
        ([part({"content": "Half"})], "ended before the answer"),
    ],
    ids=["error in the stream", "connection lost"],
)
def test_answers_that_break_off_say_so(
    open_page: OpenPage, events: list[dict[str, Any]], said: str
) -> None:
    page = open_page()
    scripted(page, *events, is_whole=False)
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.locator("#problem", has_text=said).wait_for()
    assert "Half" in last_answer(page).inner_text() and "failed" in last_answer(page).inner_text()


def test_a_key_is_asked_for_where_one_is_needed(open_page: OpenPage) -> None:
    page = open_page(key=None, quiet=False)
    page.locator("#access").wait_for()
    assert "API key" in page.inner_text("#problem")
    page.fill("#key", "wrong")
    page.click("#use-key")
    page.locator("#problem", has_text="not one of this server's").wait_for()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    greeted(page)
    assert page.is_hidden("#access") and page.is_hidden("#problem")


def test_what_the_server_cannot_do_is_not_offered(open_page: OpenPage) -> None:
    page = open_page()
    assert page.locator("#drafts option[value=auto]").is_disabled()
    assert page.input_value("#drafts") == "", "a server with a fixed K decides by itself"


def test_the_policy_forbids_outside_requests(open_page: OpenPage, server: Server) -> None:
    page = open_page(quiet=False)
    blocked = page.evaluate(
        """() => new Promise(resolve => {
            const told = event => resolve(event.effectiveDirective);
            document.addEventListener('securitypolicyviolation', told);
            fetch('http://127.0.0.2:9/').catch(() => {});
            setTimeout(() => resolve('nothing'), 3000); })"""
    )
    assert blocked == "connect-src"
    policy = httpx.get(server.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
