"""What an architecture of llama.cpp is to a head: names, value changes, what arrays hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.families.dims import Fields
from headstart.families.engines import served_by

FUSION = "nextn.eh_proj.weight"  # below `blk.N.`: what tells a block of a head from the trunk's
SHARED = "nextn_shared_target_tensors"  # the key by which a file borrows its target's tables
# keys with one value for each layer, which must cover the head's blocks too
PER_LAYER = (
    "attention.head_count", "attention.head_count_kv", "feed_forward_length",
    "attention.sliding_window_pattern", "attention.recurrent_layers", "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)  # fmt: skip
LayerValues = Callable[[Fields, int], Mapping[str, Any]]
KeysOf = Callable[[Fields, int], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture of llama.cpp, as it spells the heads of one family."""

    name: str
    family: str
    names: Mapping[str, str]
    shifts_norms: bool = False  # every norm is stored as 1 + w
    kv_b: str = ""  # the projection that is stored as two: attn_k_b (transposed) and attn_v_b
    # GGUF names whose rows, in each attention head, are stored as pairs instead of halves
    paired: tuple[str, ...] = ()
    shares_roles: bool = False  # the tensors around the block exist once and are stored in each
    tolerates_missing: bool = True  # loads where a count is declared and no head is there
    # models without any head have the name, too: without one, whose file it is cannot be known
    is_shared: bool = False
    max_modules: int | None = None  # more are refused by llama.cpp
    # keys of a file with a head alone, of a config and a number of modules; None: not known here
    keys_of: KeysOf | None = None
    pre_tokenizer: str = "default"  # what llama.cpp calls the way in which its texts are split
    # what arrays with one value per layer hold for a module
    layer_values: LayerValues = lambda fields, module: {}

    @property
    def drafts_since(self) -> str | None:
        """The build that first drafted with it; None: none does."""
        found = served_by(self.family).get("llamacpp")
        return None if found is None else found.since

    @property
    def caution(self) -> str:
        """What to know about how llama.cpp runs it."""
        found = served_by(self.family).get("llamacpp")
        return "" if found is None else found.caution
