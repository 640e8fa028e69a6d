"""The page, used as people use it: in Chromium, against a real server with a small model."""

from __future__ import annotations

import re
from typing import Any

import httpx
from support.page_runs import (
    KEY,
    QUESTION,
    OpenPage,
    ask,
    endless,
    greeted,
    last_answer,
    numbers,
)
from support.server_runs import Server


def test_tokens_stream_in_and_are_tinted_by_origin(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
        const tokens = document.querySelectorAll('.token[title]').length;
        if (!document.getElementById('stop').hidden && seen.at(-1) !== tokens) seen.push(tokens);
        }).observe(document.getElementById('log'), {childList: true, subtree: true}); }"""
    )
    ask(page, tokens=300)  # a small model is quick, and what comes within a frame is drawn at once
    # How many frames that takes is up to the machine.
    assert page.evaluate("seen.length") > 2, "tokens came all at once"
    colours = {
        origin: page.evaluate(
            "o => getComputedStyle(document.querySelector(`.said .${o}`)).backgroundColor", origin
        )
        for origin in ("accepted", "recovered", "bonus")
    }
    assert len(set(colours.values())) == 3 and "rgba(0, 0, 0, 0)" not in colours.values()
    page.uncheck("#tint")
    plain = page.evaluate(
        "getComputedStyle(document.querySelector('.said .accepted')).backgroundColor"
    )
    assert plain == "rgba(0, 0, 0, 0)"


def test_mtp_off_and_on_give_the_same_text_and_other_numbers(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page()
    ask(page, drafts="off")
    off, text = numbers(page), last_answer(page).locator(".text").inner_text()
    assert off["length"] == "1.00" and off["chosen"] == "0"
    assert page.locator(".said .accepted").count() == 0
    page.click("#clear")
    ask(page, drafts="3")
    on = numbers(page)
    assert last_answer(page).locator(".text").inner_text() == text, "drafts changed the text"
    assert on["chosen"] == "3" and float(on["length"]) > 1.1
    assert page.locator(".said .accepted").count() > 0
    rows = page.locator("#answers tbody tr")
    assert [rows.nth(at).locator("td").first.inner_text() for at in (0, 1)] == ["3", "off"]
    # What is shown is what the server says about the same request.
    body = {
        "model": "default", "messages": [{"role": "user", "content": QUESTION}], "seed": 7,
        "max_tokens": 70, "temperature": 0.6, "headstart": {"speculate": 3, "statistics": True},
    }  # fmt: skip
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}
    ).json()
    statistics = answer["headstart"]["statistics"]
    assert on["length"] == f"{statistics['acceptance_length']:.2f}"
    shown = page.get_attribute("#drafts-chart", "aria-label")
    full = statistics["draft_tokens_per_depth"]
    assert f"K=3 {full[2]}" in shown and f"K=2 {full[1] - full[2]}" in shown


def test_charts_show_the_rounds_that_came(open_page: OpenPage) -> None:
    page = open_page()
    ask(page)
    label = page.get_attribute("#depth-chart", "aria-label")
    rates = [float(rate) for rate in re.findall(r"\d\.\d+", label)]
    assert len(rates) == 3 and all(0 < rate <= 1 for rate in rates)
    rounds = int(page.get_attribute("#round-chart", "aria-label").split()[0])
    assert page.locator("#round-chart rect").count() > min(rounds, 50)
    assert page.locator("#speed-chart polyline").count() == 1
    assert float(numbers(page)["speed"]) > 0


def test_a_conversation_goes_on(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, tokens=8)
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "And then?", tokens=8)
    roles = [message["role"] for message in caught.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.click("#clear")
    assert page.locator(".said").count() == 0


def test_a_system_prompt_comes_first_and_is_no_part_of_the_conversation(
    open_page: OpenPage,
) -> None:
    page = open_page()
    page.click("#system summary")
    page.fill("#system-text", "You are a river.")
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, tokens=8)
    assert caught.value.post_data_json["messages"] == [
        {"role": "system", "content": "You are a river."}, {"role": "user", "content": QUESTION},
    ]  # fmt: skip
    page.fill("#system-text", "")
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "And then?", tokens=8)
    roles = [message["role"] for message in caught.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_a_comparison_asks_twice_with_one_seed_and_shows_both(open_page: OpenPage) -> None:
    page, asked = open_page(), []
    page.on("request", lambda r: asked.append(r.post_data_json) if "chat/comp" in r.url else None)
    page.check("#compare")
    page.select_option("#drafts", "3")
    page.fill("#max-tokens", "40")
    page.fill("#temperature", "0.6")
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.locator(".verdict", has_text="the same text").wait_for()
    assert [body["headstart"]["speculate"] for body in asked] == ["off", 3]
    assert asked[0]["seed"] == asked[1]["seed"]
    columns = last_answer(page).locator(".column")
    assert columns.locator("h3").all_inner_texts() == ["without MTP", "with MTP, K = 3"]
    assert columns.nth(0).locator(".accepted").count() == 0
    assert columns.nth(1).locator(".accepted").count() > 0
    left, right = (columns.nth(at).bounding_box() for at in (0, 1))
    assert left["y"] == right["y"] and right["x"] >= left["x"] + left["width"]
    # The conversation goes on with one of them.
    page.uncheck("#compare")
    ask(page, "And then?", tokens=8)
    assert [message["role"] for message in asked[2]["messages"]] == ["user", "assistant", "user"]


def test_everything_works_by_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#text") == "one\ntwo" and page.locator(".said").count() == 0
    order = []
    for _ in range(7):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == ["send", "mtp", "drafts", "max-tokens", "temperature", "seed", "compare"]
    page.focus("#mtp")
    page.keyboard.press("Space")
    assert not page.is_checked("#mtp")
    endless(page)
    page.focus("#text")
    page.keyboard.press("Enter")
    page.locator(".said.assistant .token").first.wait_for()
    page.keyboard.press("Escape")
    page.locator(".said.assistant .end").wait_for()
    assert "stopped" in last_answer(page).inner_text()
    assert page.inner_text(".said.user .text") == "one\ntwo"
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button')]
        .filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.id)"""
    )
    assert unnamed == []


def test_the_stop_button_aborts_the_request_on_the_server(
    open_page: OpenPage, server: Server
) -> None:
    def aborted() -> float:
        metrics = httpx.get(f"{server.url}/metrics").text
        found = re.search(r'^vllm:request_success_total\{.*"abort".*\} (\S+)$', metrics, re.M)
        assert found is not None
        return float(found[1])

    page, before = open_page(), aborted()
    endless(page)
    page.fill("#text", QUESTION)
    page.click("#send")
    page.locator(".said.assistant .token").first.wait_for()
    page.click("#stop")
    page.locator("#send:not([hidden])").wait_for()
    assert "stopped" in last_answer(page).inner_text()
    assert page.evaluate("document.activeElement.id") == "text"
    for _ in range(50):
        if aborted() == before + 1:
            return
        page.wait_for_timeout(100)
    raise AssertionError("the server went on")


def test_a_server_that_learns_says_so_and_how_its_head_gets_on(open_page: OpenPage) -> None:
    page = open_page()
    assert page.locator("#learning").is_hidden(), "without --learn nothing is said of it"
    found = {"collected_texts_total": 12, "steps_total": 340, "checks_total": 5, "swaps_total": 2,
             "rollbacks_total": 1}  # fmt: skip

    def learning(route: Any) -> None:
        lines = [f'headstart:learn_{name}{{model_name="x"}} {n}' for name, n in found.items()]
        lines += [
            f'headstart:learn_acceptance_length{{kind="other",head="{head}"}} {length}'
            for head, length in (("before", 1.5), ("after", 1.75))
        ]
        text = route.fetch().text() + "\n".join(lines) + "\n"
        route.fulfill(body=text, content_type="text/plain")

    page.route("**/metrics", learning)
    page.reload()
    greeted(page)
    lines = page.locator("#learned li")
    lines.nth(3).wait_for()
    assert lines.all_inner_texts() == [
        "12 answers kept", "340 training steps, 5 checks", "2 heads swapped in, 1 taken back",
        "tokens per round on held-out answers: 1.50 serving, 1.75 learning",
    ]  # fmt: skip
    found["swaps_total"] = 3
    page.locator("#learned", has_text="3 heads swapped in").wait_for()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.post_data else None)
    ask(page, tokens=4)
    page.check("#decline")
    ask(page, tokens=4)
    assert ["learn" in body["headstart"] for body in bodies] == [False, True]
    assert bodies[1]["headstart"]["learn"] is False
