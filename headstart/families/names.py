"""Tensor names of a published checkpoint and ours, translated both ways by patterns.

Our names: modules.{i}.{embed_norm,hidden_norm,fuse,out_norm,embed_tokens,lm_head}.* and
modules.{i}.block.*, where the part below `block.` is the family's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headstart.errors import ConfigError

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Naming:
    """What published names depend on besides the family: prefix, trunk depth, sub-layers."""

    root: str = ""
    num_layers: int = 0
    num_sub_layers: int = 1


class KeyMap:
    """Published names <-> our names, from pairs of patterns; the first pair that fits is used.

    Patterns hold `{module}` (from 0), `{layer}` (num_layers + module), `{last}` (the last
    sub-layer) and `{rest}`. A pair that could not be inverted is refused at construction.

    `roots` are prefixes under which checkpoints store heads, the usual one first; below those of
    `unread` the loaders of other engines skip the head without a word. `respelled`: parts of names
    that some checkpoints write otherwise -> the usual; they are read, and never written.
    """

    def __init__(
        self,
        pairs: Mapping[str, str],
        roots: tuple[str, ...] = ("",),
        unread: tuple[str, ...] = (),
        *,
        respelled: Mapping[str, str] | None = None,
    ):
        self.pairs = dict(pairs)
        self.respelled = dict(respelled or {})
        self.roots = roots
        self.unread = unread
        self._starts = tuple({published.partition("{")[0] for published in self.pairs})
        # the start after which all names have the number of a layer, where it is so
        start = next(iter(self._starts), "")
        is_layered = all(published.startswith(f"{start}{{layer}}.") for published in pairs)
        self._layers = start if is_layered else ""
        for published, ours in self.pairs.items():
            left = {"module" if p == "layer" else p for p in _PLACEHOLDER.findall(published)}
            right = set(_PLACEHOLDER.findall(ours))
            if left - {"last"} != right:
                raise ConfigError(f"{published} <-> {ours}: the two sides name different parts")
        if len(set(self.pairs.values())) != len(self.pairs):
            raise ConfigError("two published patterns have the same name on our side")

    def to_ours(self, name: str, naming: Naming) -> str | None:
        """Our name of a published tensor, or None if it is not part of a head."""
        if not name.startswith(naming.root):
            return None
        below = name[len(naming.root) :]
        for theirs, usual in self.respelled.items():
            below = below.replace(theirs, usual, 1)
        if not below.startswith(self._starts) or self._is_trunk_layer(below, naming):
            return None  # at once, as for most of the many tensors of a trunk
        for published, ours in self.pairs.items():
            found = _match(published, below, naming)
            if found is not None:
                return _fill(ours, found, naming)
        return None

    def _is_trunk_layer(self, name: str, naming: Naming) -> bool:
        """Whether the name belongs to a layer below those of the head."""
        if not self._layers or not name.startswith(self._layers):
            return False
        number = name[len(self._layers) :].partition(".")[0]
        return number.isdecimal() and int(number) < naming.num_layers

    def to_published(self, name: str, naming: Naming) -> str:
        """The published name of one of ours; ConfigError if this family has no place for it."""
        for published, ours in self.pairs.items():
            found = _match(ours, name, naming)
            if found is not None:
                result = naming.root + _fill(published, found, naming)
                if self.to_ours(result, naming) == name:
                    return result
        raise ConfigError(f"{name} has no published name in this family")

    def readable(self, naming: Naming) -> Naming:
        """The naming with a root that engines read."""
        return replace(naming, root=self.roots[0]) if naming.root in self.unread else naming

    def has_place(self, name: str, naming: Naming) -> bool:
        """Whether one of our names exists in this family."""
        try:
            self.to_published(name, naming)
        except ConfigError:
            return False
        return True

    def find_root(self, names: list[str], naming: Naming) -> Naming:
        """The naming with the root under which most of `names` are head tensors."""
        candidates = [replace(naming, root=root) for root in self.roots]
        return max(candidates, key=lambda c: sum(self.to_ours(n, c) is not None for n in names))


def _match(pattern: str, name: str, naming: Naming) -> dict[str, str] | None:
    literal = pattern.partition("{")[0]
    if not name.startswith(literal):  # cheap, and almost always decisive
        return None
    found = _regex(pattern, naming.num_sub_layers).fullmatch(name)
    if found is None:
        return None
    values = found.groupdict()
    if "layer" in values:
        module = int(values.pop("layer")) - naming.num_layers
        if module < 0:
            return None
        values["module"] = str(module)
    return values


def _fill(pattern: str, values: Mapping[str, str], naming: Naming) -> str:
    layer = naming.num_layers + int(values.get("module", 0))
    return pattern.format(**values, layer=layer, last=naming.num_sub_layers - 1)


_REGEXES: dict[tuple[str, int], re.Pattern[str]] = {}
# No leading zeros, or a name would not survive the way there and back.
NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_PIECES = {
    "module": f"(?P<module>{NUMBER})",
    "layer": f"(?P<layer>{NUMBER})",
    "rest": r"(?P<rest>.+)",
}


def _regex(pattern: str, num_sub_layers: int) -> re.Pattern[str]:
    key = (pattern, num_sub_layers)
    if key not in _REGEXES:
        parts = _PLACEHOLDER.split(pattern)
        pieces = {**_PIECES, "last": str(num_sub_layers - 1)}
        text = "".join(pieces[p] if i % 2 else re.escape(p) for i, p in enumerate(parts))
        _REGEXES[key] = re.compile(text)
    return _REGEXES[key]
