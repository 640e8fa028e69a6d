"""How the page looks: on a phone, in dark and in light."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.page_runs import QUESTION, OpenPage, ask, part, scripted


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(open_page: OpenPage, scheme: str) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    ask(page, "x" * 300, tokens=60)
    page.click("#measurements > summary")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    too_wide = page.evaluate(
        """() => [...document.querySelectorAll('body *')]
        .filter(e => !e.closest('.scroll, .unseen'))
        .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
        .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert too_wide == []
    assert page.locator("#send").is_visible() and page.locator("#text").is_visible()


def test_dark_and_light_are_readable(open_page: OpenPage) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        ask(page, tokens=60)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for selector in (
            ".said .accepted",
            ".said .recovered",
            ".said .bonus",
            "#send",
            "figcaption",
        ):
            assert contrast(page, selector) >= 4.5, f"{selector} in {scheme}"
    assert luminance(grounds[0]) > 0.8 and luminance(grounds[1]) < 0.05


def test_the_colours_can_be_chosen_and_stay(open_page: OpenPage) -> None:
    page = open_page(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert luminance(page.evaluate(ground)) > 0.8
    page.click("#theme")
    assert luminance(page.evaluate(ground)) < 0.05
    page.reload()
    assert luminance(page.evaluate(ground)) < 0.05 and page.inner_text("#theme") == "Light"


def test_every_origin_has_a_colour_of_its_own(open_page: OpenPage) -> None:
    """`copied` is not known to every server, and explained only where it occurs."""
    names = ("accepted", "copied", "recovered", "bonus")
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        assert page.is_hidden(".legend .copied")
        first = part({"content": "a"}, ("a", "bonus"))
        rest = [part({"content": name}, (name, name)) for name in names]
        scripted(page, first, *rest)
        page.fill("#text", QUESTION)
        page.press("#text", "Enter")
        page.locator(".said.assistant .end").wait_for()
        assert page.is_visible(".legend .copied")
        assert all(contrast(page, f".said .{name}") >= 4.5 for name in names), scheme
        grounds = {
            page.evaluate("s => getComputedStyle(document.querySelector(s)).backgroundColor", name)
            for name in (f".said .{name}" for name in names)
        }
        assert len(grounds) == 4


@pytest.mark.parametrize("width", [360, 820, 1280])
def test_labels_of_nine_bars_do_not_overlap(open_page: OpenPage, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 900})
    drafted = [120_000 - 10_000 * depth for depth in range(8)]
    statistics = {
        "rounds": 130_000, "acceptance_length": 3.2, "chosen_k": 8, "tokens_per_second": 100.0,
        "draft_tokens_per_depth": drafted, "time_to_first_token_seconds": 0.1,
    }  # fmt: skip
    chain = [("x", "accepted")] * 8 + [("y", "bonus")]
    events = [part({"content": "x" * 8 + "y"}, *chain) for _ in range(3)]
    scripted(page, *events, {"choices": [], "headstart": {"statistics": statistics}})
    page.evaluate("document.getElementById('measurements').open = true")
    page.fill("#text", QUESTION)
    page.press("#text", "Enter")
    page.locator(".said.assistant .end").wait_for()
    for chart, num_bars in (("#drafts-chart", 9), ("#depth-chart", 8)):
        boxes = page.locator(f"{chart} text").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect()).map(b => [b.x, b.y, b.right, b.bottom])"
        )
        assert len(boxes) == 2 * num_bars
        for one in boxes:
            others = [box for box in boxes if box is not one]
            assert not any(overlap(one, other) for other in others), (chart, width)


def overlap(one: list[float], other: list[float]) -> bool:
    return max(one[0], other[0]) < min(one[2], other[2]) and max(one[1], other[1]) < min(
        one[3], other[3]
    )


def contrast(page: Any, selector: str) -> float:
    """Of an element's text and the nearest ground behind it that is not transparent."""
    text, ground = page.evaluate(
        """selector => {
            const groundOf = element => getComputedStyle(element).backgroundColor;
            const element = document.querySelector(selector);
            let behind = element;
            while (groundOf(behind) === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
            return [getComputedStyle(element).color, groundOf(behind)]; }""",
        selector,
    )
    light, dark = sorted((luminance(text), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_tablet_shows_charts_in_pairs_and_comparisons_side_by_side(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 1280, "height": 900})
    assert page.evaluate("document.getElementById('measurements').open")
    page.set_viewport_size({"width": 820, "height": 1100})
    page.wait_for_function("!document.getElementById('measurements').open")  # the chat has the room
    page.locator("#measurements summary").click()
    first, second = (page.locator("aside figure").nth(at).bounding_box() for at in (0, 1))
    assert first["y"] == second["y"] and first["x"] + first["width"] <= second["x"]
    page.check("#compare")
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    page.locator(".verdict").wait_for()
    left, right = (page.locator(".column").nth(at).bounding_box() for at in (0, 1))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
