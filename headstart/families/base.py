"""What a family is: names, layout, sizes and engines, as data.

`KeyMap` (names.py) translates tensor names between a published checkpoint and ours, both ways.
`HeadLayout` is the hidden-state contract. `Part` tables give every tensor of a head or of a trunk
layer with its shape. Nothing here reads files or computes with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headstart.families.cautions import Caution
from headstart.families.dims import Fields, at, dims, size
from headstart.families.names import KeyMap, Naming
from headstart.families.runtime import Runtime
from headstart.families.versions import MAIN, is_at_least

_NOT_WRITTEN = "its decoder layers, which are not written for it yet"


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
        if "{shard}" in part.name:
            for shard in range(known.get("ngram_shards", 0)):
                result[part.name.replace("{shard}", str(shard))] = shape
        elif "{expert}" in part.name:
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
    normalises_hidden: bool = True  # whether the state that it is fed passes a norm of the head's
    zero_embed_at_position_0: bool = False
    rotates_halves: bool = False  # pairs are halves, even where the trunk's are neighbours
    topology: Topology = "recursive"
    out_norm: Literal["own", "shared", "none"] = "own"
    out_norm_mean: Literal["kept", "subtracted"] = "kept"  # of what the out norm is given
    shares: tuple[str, ...] = ("embed_tokens", "lm_head")  # taken from the trunk when running
    # engine -> the fields in which that engine departs from the above
    deviations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # engine -> the first release without them, and further departures of those before it
    former: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    unsettled: tuple[str, ...] = ()  # fields that engines disagree on: `inspect --probe` tries them

    def as_(self, engine: str, version: str = MAIN) -> HeadLayout:
        """The layout as `engine` runs it, to reproduce its acceptance counters."""
        end, older = self.former.get(engine, (version, {}))
        changes = {} if is_at_least(version, end) else older
        return replace(self, **{**self.deviations.get(engine, {}), **changes})


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """Names of the trunk's own tensors, below one of several prefixes."""

    prefixes: tuple[str, ...] = ("model.",)
    embed: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"  # empty where the trunk has none
    hc_head: str = "hc_head_"  # below it: what joins the residual streams, where there are several
    layer: str = "layers.{layer}."
    lm_heads: tuple[str, ...] = ("lm_head.weight",)  # full names
    kinds: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    # the same where the config decides which tensors a kind has
    kinds_of: Callable[[Fields], Mapping[str, tuple[Part, ...]]] | None = None
    kind_of: Callable[[Fields, int], str] = lambda fields, layer: "dense"
    # whether a layer sees a window only, with a geometry of its own; from num_hidden_layers: heads'
    slides: Callable[[Fields, int], bool] = lambda fields, layer: False
    extras: tuple[Part, ...] = ()  # further tensors outside the layers, below the prefix
    beside: tuple[str, ...] = ()  # prefixes of what is no part of the text model: a vision tower

    def layer_kinds(self, fields: Fields) -> Mapping[str, tuple[Part, ...]]:
        """The tensors of each kind of layer, for one config; empty where they are not known."""
        return self.kinds if self.kinds_of is None else self.kinds_of(fields)


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
    may_count_one_more: bool = False  # some exports declare a module more than they store
    keys: KeyMap
    layout: HeadLayout
    head: tuple[Part, ...] = ()  # the tensors outside the block, under our names
    head_of: Callable[[Fields], tuple[Part, ...]] | None = None  # where the config decides
    # whether norms are 1 + w, where the config and not the family decides
    centred_norms: Callable[[Fields], bool] | None = None
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
    # engine -> the first release whose sources register the head (`main`: none yet), and what holds
    # for the whole family; an engine that is not listed cannot serve the head
    served: Mapping[str, str] = field(default_factory=dict)
    # engine -> the first release that runs the head from a folder of its own (`export` writes it),
    # with our plugin where no class of the engine's fits; then what to know, as in `served`. Of an
    # engine that is in `served`, too, it holds for the variants that are not read there (None)
    served_apart: Mapping[str, str] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()  # further programs that draft with the head
    # engine -> model_type or architecture that came later than the family, or never (None)
    variants: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    variant_titles: Mapping[str, str] = field(default_factory=dict)  # as people call them
    disputed: str = ""  # what engines do differently, where none is known to be right
    cautions: tuple[Caution, ...] = ()  # faults of some releases of engines
    # its releases are quantised as part of the layout, which no quantisation config describes
    is_quantized_by_layout: bool = False
    # where transformers lacks its config class: `auto_map` of a config, and the files that it names
    auto_map: Mapping[str, str] = field(default_factory=dict)
    remote_code: Mapping[str, str] = field(default_factory=dict)
    reasoning: str = ""  # the format (server/reasoning.py), where chat templates do not show it
    runtime: Runtime | None = None  # how the engine runs it; None: it does not
    is_probed_apart: bool = False  # whether `inspect --probe` runs it, which the engine does not
    lacks: str = ""  # what the engine lacks for it, or for those of its model types that do not run
    notes: tuple[str, ...] = ()

    @property
    def run_types(self) -> tuple[str, ...]:
        """The model types that the engine runs, and training and scoring with it."""
        if self.runtime is None:
            return ()
        return self.runtime.model_types or (*self.model_types, *self.marked_types)

    @property
    def engine_lacks(self) -> str:
        """What the engine lacks to run all of the family's model types; empty if nothing."""
        return self.lacks if self.lacks or self.runtime is not None else _NOT_WRITTEN

    def naming(self, fields: Fields, root: str | None = None) -> Naming:
        layers = fields.get("num_hidden_layers")
        return Naming(
            self.keys.roots[0] if root is None else root,
            layers if isinstance(layers, int) else 0,
            self.num_sub_layers(fields),
        )

    def head_parts(self, fields: Fields) -> tuple[Part, ...]:
        """The tensors outside the block, for one config."""
        return self.head if self.head_of is None else self.head_of(fields)

    def has_centred_norms(self, fields: Fields) -> bool:
        """Whether norms are stored as w for an effective weight of 1 + w."""
        if self.centred_norms is None:
            return self.layout.zero_centred_norms
        return self.centred_norms(fields)

    def fields_of_head(self, fields: Fields) -> Fields:
        """The config as it holds inside the head."""
        own = {name: at(fields, path) for name, path in self.head_fields.items()}
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
            for name, shape in expand(self.head_parts(fields), fields).items():
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
