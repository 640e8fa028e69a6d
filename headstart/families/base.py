"""What a family is: names, layout, sizes and engines, as data.

`KeyMap` translates tensor names between a published checkpoint and ours, both ways. `HeadLayout`
is the hidden-state contract. `Part` tables give every tensor of a head or of a trunk layer with
its shape. Nothing here reads files or computes with tensors.

Our names: modules.{i}.{embed_norm,hidden_norm,fuse,out_norm,embed_tokens,lm_head}.* and
modules.{i}.block.*, where the part below `block.` is the family's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headstart.errors import ConfigError
from headstart.families.dims import Fields, dims, size

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
    """

    def __init__(self, pairs: Mapping[str, str], roots: tuple[str, ...] = ("",)):
        self.pairs = dict(pairs)
        self.roots = roots
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
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_PIECES = {
    "module": f"(?P<module>{_NUMBER})",
    "layer": f"(?P<layer>{_NUMBER})",
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


@dataclass(frozen=True)
class Part:
    """One tensor of a block: its name, its shape in `dims` names, and when a config has it."""

    name: str
    shape: tuple[str, ...]
    when: str = ""  # a config field that must be true (or, as `!field`, false or absent)

    def applies(self, fields: Fields) -> bool:
        if not self.when:
            return True
        return bool(fields.get(self.when.lstrip("!"))) != self.when.startswith("!")


def parts(table: str) -> tuple[Part, ...]:
    """Parse lines of `name  size size  [if field]`."""
    result = []
    for line in table.split("\n"):
        words = line.split()
        if words:
            cut = words.index("if") if "if" in words else len(words)
            result.append(Part(words[0], tuple(words[1:cut]), "".join(words[cut + 1 :])))
    return tuple(result)


def expand(table: tuple[Part, ...], fields: Fields) -> dict[str, tuple[int, ...] | None]:
    """Names of a part table for one config, experts counted out, with shapes where known."""
    known = dims(fields)
    result: dict[str, tuple[int, ...] | None] = {}
    for part in table:
        if not part.applies(fields):
            continue
        sizes = [size(expression, known) for expression in part.shape]
        shape = None if any(s is None for s in sizes) else tuple(s for s in sizes if s is not None)
        if "{expert}" in part.name:
            for expert in range(known.get("experts", 0)):
                result[part.name.replace("{expert}", str(expert))] = shape
        else:
            result[part.name] = shape
    return result


FuseOrder = Literal["embed_first", "hidden_first", "summed"]
HiddenState = Literal["after_final_norm", "before_final_norm", "before_hc_head"]
Recycled = Literal["after_out_norm", "before_out_norm", "streams"]
Topology = Literal["recursive", "chained", "parallel"]


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The hidden-state contract of a head: what it is fed, how it fuses, what it hands on."""

    fuse_order: FuseOrder = "embed_first"
    zero_centred_norms: bool = False  # effective norm weight is 1 + w
    trunk_hidden: HiddenState = "after_final_norm"
    recycled_hidden: Recycled = "after_out_norm"
    zero_embed_at_position_0: bool = False
    topology: Topology = "recursive"
    out_norm: Literal["own", "shared", "none"] = "own"
    shares: tuple[str, ...] = ("embed_tokens", "lm_head")  # taken from the trunk when running
    # engine -> the fields in which that engine departs from the above
    deviations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def as_(self, engine: str) -> HeadLayout:
        """The layout as `engine` runs it, to reproduce its acceptance counters."""
        return replace(self, **self.deviations.get(engine, {}))


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """Names of the trunk's own tensors, below one of several prefixes."""

    prefixes: tuple[str, ...] = ("model.",)
    embed: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    layer: str = "layers.{layer}."
    lm_heads: tuple[str, ...] = ("lm_head.weight",)  # full names
    kinds: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    kind_of: Callable[[Fields, int], str] = lambda fields, layer: "dense"
    extras: tuple[Part, ...] = ()  # further tensors outside the layers, below the prefix


@dataclass(frozen=True, kw_only=True)
class Served:
    """That an engine serves the family's head, since which release, and what to know."""

    since: str
    note: str = ""  # everything there is to know, variants included, for tables
    caution: str = ""  # what holds for every model of the family
    # model_type or architecture -> first release for that variant, None: no release
    variants: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    title: str  # as people call it
    model_types: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    # a config of one of these types belongs here only if it has one of the marks
    marked_types: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    count_field: str | None = "num_nextn_predict_layers"  # in the text part of the config
    default_modules: int = 1
    keys: KeyMap
    layout: HeadLayout
    head: tuple[Part, ...] = ()  # the tensors outside the block, under our names
    block: Callable[[Fields], tuple[Part, ...]] = lambda fields: ()  # the tensors of the block
    # other blocks that some releases have; what is stored tells which (heads/detection.py)
    block_variants: tuple[tuple[Part, ...], ...] = ()
    # config field -> dotted path of the value that holds for the head, where it has its own
    head_fields: Mapping[str, str] = field(default_factory=dict)
    block_kind: str = ""  # the kind of trunk layer that the block resembles, if any
    copies: tuple[str, ...] = ()  # trunk tensors that checkpoints may store again in the head
    trunk: Trunk = field(default_factory=Trunk)
    kv_elements: str = "kv_heads*head_dim+kv_heads*v_dim"  # per token and module
    num_sub_layers: Callable[[Fields], int] = lambda fields: 1
    # engine -> prefix under which it looks up the block's modules in a quantisation ignore list
    looked_up_as: Mapping[str, str] = field(default_factory=dict)
    # part of the head (our name) -> further names under which engines ask for it
    also_asked_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_published: bool = True  # False: only grafted or privately trained heads exist
    is_complete: bool = False  # fully supported: fixture, tiny checkpoint, all file operations
    notes: tuple[str, ...] = ()

    def naming(self, fields: Fields, root: str | None = None) -> Naming:
        layers = fields.get("num_hidden_layers")
        return Naming(
            self.keys.roots[0] if root is None else root,
            layers if isinstance(layers, int) else 0,
            self.num_sub_layers(fields),
        )

    def fields_of_head(self, fields: Fields) -> Fields:
        """The config as it holds inside the head."""
        own = {name: _at(fields, path) for name, path in self.head_fields.items()}
        return {**fields, **{name: value for name, value in own.items() if value is not None}}

    def expected(
        self, fields: Fields, num_modules: int, block: tuple[Part, ...] | None = None
    ) -> dict[str, tuple[int, ...] | None]:
        """Every tensor a complete head has, under our names, with shapes where known.

        `block` is one of `block_variants`; without it the usual one is meant.
        """
        fields = self.fields_of_head(fields)
        naming = self.naming(fields)
        block = self.block(fields) if block is None else block
        result: dict[str, tuple[int, ...] | None] = {}
        for module in range(num_modules):
            for name, shape in expand(self.head, fields).items():
                # Names that start with `shared.` exist once, whatever the number of modules.
                key = name if name.startswith("shared.") else f"modules.{module}.{name}"
                if self.keys.has_place(key, naming):  # Qwen-style fusion tensors exist once, too
                    result.setdefault(key, shape)
            for name, shape in expand(block, fields).items():
                key = f"modules.{module}.block.{name}"
                # Some names have room for one module, however often a config counts its use.
                if module == 0 or self.keys.has_place(key, naming):
                    result[key] = shape
        return result


def _at(fields: Fields, path: str) -> Any:
    value: Any = fields
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
