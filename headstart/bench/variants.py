"""What is compared: the same server with other drafting, or several servers.

On our server a request says how to draft, so one server gives all numbers of drafts. What only a
server's start can change (no head at all, chunked prefill) needs a server of its own. Other engines
draft as they were started: each variant is a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headstart.engine.options import MAX_DRAFTS
from headstart.errors import ConfigError

Drafts = int | Literal["auto"]
_FORM = "off,0,3,auto,auto+draft-from=head,3+vocab=NAME,3+chunked-prefill=off"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to answer: where requests go and what they say besides the prompt."""

    name: str
    url: str = ""  # "" until our own server runs
    drafts: Drafts | None = None  # None: as the server was started, and not known
    fields: Mapping[str, Any] = field(default_factory=dict)
    server_flags: tuple[str, ...] = ()  # that our own server must be started with

    @property
    def is_plain(self) -> bool:
        return self.drafts == 0

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "url": self.url, "drafts": self.drafts,
            "fields": dict(self.fields), "server_flags": list(self.server_flags),
        }  # fmt: skip


def parse_compare(text: str) -> list[Variant]:
    """Variants of our own server: numbers of drafts, with other settings joined by `+`."""
    words = text.replace(",", " ").split()
    variants = [_variant(word) for word in words]
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not variants:
        raise ConfigError(
            f"--compare is {text!r}: {', '.join(twice) or 'nothing'} "
            f"{'twice' if twice else 'to compare'}; give each variant once, as in {_FORM}."
        )
    return variants


def _variant(word: str) -> Variant:
    first, *settings = word.split("+")
    drafts = _drafts(first.removeprefix("k="), word)
    name = "auto" if drafts == "auto" else f"K={drafts}"
    own: dict[str, Any] = {"speculate": drafts}
    flags: list[str] = []
    if first == "off":
        # A request that does not draft still lets a loaded head read along, so that it can later.
        name, flags = "off", ["--speculate", "0"]
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "vocab" and value:
            own["draft_vocab"] = value
        elif key == "draft-from" and value in ("auto", "head", "context"):
            own["draft_from"] = value
        elif key == "chunked-prefill" and value in ("on", "off"):
            flags.append("--chunked-prefill" if value == "on" else "--no-chunked-prefill")
        else:
            raise ConfigError(
                f"--compare has {word!r}: the setting {setting!r} is not known; give variants as "
                f"in {_FORM}."
            )
        name += f" {setting}"
    return Variant(name=name, drafts=drafts, fields={"headstart": own}, server_flags=tuple(flags))


def _drafts(text: str, word: str) -> Drafts:
    if text == "auto":
        return "auto"
    if text == "off":
        return 0
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_DRAFTS:
        raise ConfigError(
            f"--compare has {word!r}; give a number of drafts from 0 to {MAX_DRAFTS}, off or auto, "
            f"as in {_FORM}."
        )
    return int(text)


def parse_urls(texts: Sequence[str]) -> list[Variant]:
    """`URL` or `NAME=URL`; a name as k0, K=3, plain or auto also says how many are drafted."""
    found: list[Variant] = []
    for text in texts:
        named = re.fullmatch(r"(?:(?P<name>[^/]+)=)?(?P<url>https?://[^/\s]+(?:/\S*)?)", text)
        if named is None:
            raise ConfigError(
                f"--url is {text!r}; give http://HOST:PORT, or NAME=http://HOST:PORT."
            )
        url = named["url"].rstrip("/").removesuffix("/v1")
        name = named["name"] or (re.sub(r"^https?://", "", url) if len(texts) > 1 else "server")
        if name in (variant.name for variant in found):
            raise ConfigError(f"--url gives the name {name!r} twice; give each server its own.")
        found.append(Variant(name=name, url=url, drafts=_drafts_of_name(name)))
    return found


def _drafts_of_name(name: str) -> Drafts | None:
    if name.lower() in ("plain", "off", "baseline", "base"):
        return 0
    if name == "auto":
        return "auto"
    number = re.fullmatch(r"(?:k=?|K=?)(\d+)", name)
    return int(number[1]) if number else None


def base_of(variants: Sequence[Variant], name: str | None = None) -> Variant:
    """What the others are compared with: the one named, the one without drafts, or the first."""
    if name is not None:
        named = [variant for variant in variants if variant.name == name]
        if not named:
            known = ", ".join(variant.name for variant in variants)
            raise ConfigError(f"--base is {name!r}; the variants are {known}.")
        return named[0]
    return next((variant for variant in variants if variant.is_plain), variants[0])


def alternated(variants: Sequence[Variant], repeat: int) -> Iterator[Variant]:
    """The order of one repeat: rotated and reversed, so that a drift favours no variant."""
    begin = (repeat // 2) % len(variants)
    order = [*variants[begin:], *variants[:begin]]
    yield from reversed(order) if repeat % 2 else order
