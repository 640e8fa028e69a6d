"""How the page looks: on a phone, in dark and in light."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.page_runs import OpenPage, ask


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
