"""What is compared, and under which loads, as people type it."""

from __future__ import annotations

import pytest

from headstart.bench.arrivals import LoadOptions
from headstart.bench.axes import parse_axes, points_of
from headstart.bench.cells import Point
from headstart.bench.variants import Variant, alternated, base_of, parse_compare, parse_urls
from headstart.errors import ConfigError


def test_variants_of_our_server_are_request_fields() -> None:
    plain, some, auto, own = parse_compare("0,3,auto,3+vocab=en")
    assert plain.is_plain and plain.name == "K=0"
    assert some.fields == {"headstart": {"speculate": 3}} and not some.server_flags
    assert auto.drafts == "auto" and auto.name == "auto"
    assert own.fields == {"headstart": {"speculate": 3, "draft_vocab": "en"}}
    assert own.name == "K=3 vocab=en"


def test_a_variant_says_where_its_drafts_come_from() -> None:
    words = "auto,auto+draft-from=head,auto+draft-from=context,16+draft-from=context"
    both, *others = parse_compare(words)
    assert both.fields == {"headstart": {"speculate": "auto"}}
    assert [(v.name, v.drafts, v.fields["headstart"]["draft_from"]) for v in others] == [
        ("auto draft-from=head", "auto", "head"), ("auto draft-from=context", "auto", "context"),
        ("K=16 draft-from=context", 16, "context"),
    ]  # fmt: skip
    assert not any(variant.server_flags for variant in others)


def test_what_only_a_start_can_change_is_a_flag() -> None:
    _, cut, off = parse_compare("k=3,3+chunked-prefill=off,off")
    assert cut.server_flags == ("--no-chunked-prefill",)
    assert off.is_plain and off.name == "off" and off.server_flags == ("--speculate", "0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0,0",
        "99",
        "-1",
        "²",
        "x",
        "3+nonsense=1",
        "3+vocab=",
        "auto+draft-from=tail",
        "auto+draft-from",
        "auto+draft-from=head,auto+draft-from=head",
    ],
)
def test_variants_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--compare"):
        parse_compare(text)


def test_servers_have_names_that_may_say_how_many_are_drafted() -> None:
    found = parse_urls(["plain=http://a:1/v1", "K=3=http://b:2", "http://c:3/"])
    assert [(v.name, v.url, v.drafts) for v in found] == [
        ("plain", "http://a:1", 0), ("K=3", "http://b:2", 3), ("c:3", "http://c:3", None),
    ]  # fmt: skip
    assert parse_urls(["http://c:3"])[0].name == "server"


@pytest.mark.parametrize("texts", [["c:3"], ["ftp://c"], ["a=http://x:1", "a=http://y:1"]])
def test_servers_that_cannot_be_read_are_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="--url"):
        parse_urls(texts)


def test_the_base_is_named_or_plain_or_first() -> None:
    variants = parse_compare("3,0,1")
    assert base_of(variants).name == "K=0"
    assert base_of(variants, "K=1").name == "K=1"
    assert base_of(parse_compare("3,1")).name == "K=3"
    with pytest.raises(ConfigError, match="the variants are K=3, K=0, K=1"):
        base_of(variants, "K=9")


def test_every_variant_has_every_place_in_the_order_of_repeats() -> None:
    variants = [Variant(name=name) for name in "abc"]
    orders = [[v.name for v in alternated(variants, repeat)] for repeat in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == list("aabbcc")


def test_axes_make_loads_and_variants() -> None:
    axes = parse_axes(["concurrency=1,8 k=0,3"])
    assert axes.points == (Point(concurrency=1), Point(concurrency=8)) and axes.compare == "0,3"
    assert parse_axes(["rate=0.5,2"]).points == (Point(rate=0.5), Point(rate=2.0))
    assert points_of(parse_axes([]), LoadOptions(concurrency=4)) == (Point(concurrency=4),)


@pytest.mark.parametrize(
    "words", [["k"], ["size=3"], ["k=1", "k=2"], ["concurrency=0"], ["concurrency=²"],
              ["rate=-1"], ["rate=1,1"],
              ["concurrency=1", "rate=1"]],
)  # fmt: skip
def test_axes_that_cannot_be_read_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        parse_axes(words)


def test_a_spacing_needs_a_rate() -> None:
    with pytest.raises(ConfigError, match="--spacing is constant without a rate"):
        points_of(parse_axes(["concurrency=1,2"]), LoadOptions(spacing="constant"))
    assert points_of(parse_axes(["rate=2"]), LoadOptions(spacing="constant"))
    assert points_of(parse_axes([]), LoadOptions(spacing="poisson", rate=1.0))


def test_a_sweep_does_not_mix_with_a_single_load() -> None:
    with pytest.raises(ConfigError, match="put it into --sweep"):
        points_of(parse_axes(["concurrency=1,2"]), LoadOptions(concurrency=4))
