"""Colours stand out from their ground and from each other, also for the colour-blind."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from headstart.report import style, svg

SCHEMES = [(style.LIGHT, style.LIGHT_SERIES), (style.DARK, style.DARK_SERIES)]
# Machado, Oliveira and Fernandes (2009) at severity 1: what the eye gets, in linear RGB.
SIGHT = {
    "all": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted(float((TO_XYZ @ linear(colour))[1]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("colours", "series"), SCHEMES, ids=["light", "dark"])
def test_text_and_series_stand_out_from_the_ground(
    colours: dict[str, str], series: tuple[str, ...]
) -> None:
    assert min(contrast(colours["ground"], colours[name]) for name in ("text", "quiet")) >= 4.5
    assert min(contrast(colours["ground"], colour) for colour in series) >= 3


@pytest.mark.parametrize(("colours", "series"), SCHEMES, ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_series_are_apart_for_every_sight(
    colours: dict[str, str], series: tuple[str, ...], sight: str
) -> None:
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in series]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) >= 25


def test_red_and_green_of_one_lightness_would_fail() -> None:
    seen = [lab(np.array(SIGHT["deutan"]) @ linear(c)) for c in ("#c05000", "#708000")]
    assert np.linalg.norm(seen[0] - seen[1]) < 25


def test_every_series_has_a_colour_in_both_schemes() -> None:
    assert len(style.LIGHT_SERIES) == len(style.DARK_SERIES) == svg.NUM_COLOURS
    assert all(f".series-{i} " in style.stylesheet() for i in range(svg.NUM_COLOURS))


def test_dark_colours_are_for_screens_alone() -> None:
    sheet = style.stylesheet()
    assert sheet.count(style.DARK["ground"]) == 1
    assert sheet.index("@media screen and (prefers-color-scheme: dark)") < sheet.index(
        style.DARK["ground"]
    )
