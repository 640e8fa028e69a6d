"""How the engine runs a family: what its published class does and a config does not say, as data.

`models/config_reader.py` reads every config through the `Runtime` of its model type. What a layer
is made of is not here: the family's tables of tensors say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headstart.errors import UnsupportedFamily
from headstart.families.dims import Fields


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Defaults and names of a family's config, and options of its layers that no config names."""

    model_types: tuple[str, ...] = ()  # those of the family that run; none given: all of them
    defaults: Fields = field(default_factory=dict)  # where a config is silent
    fixed: Fields = field(default_factory=dict)  # whatever a config says
    renamed: Mapping[str, str] = field(default_factory=dict)  # the family's field -> the usual one
    # fields to add or to replace, where tables cannot say it; may refuse a config
    normalise: Callable[[Fields], Fields] = lambda fields: {}
    refused: Mapping[str, str] = field(default_factory=dict)  # a field that must not be true -> why
    rotates: bool = True  # False: attention is blind to positions
    partial_rotary: bool = False  # a config may rotate a part of each head only
    gated_attention: bool = False  # a sigmoid of the row scales what attention gives
    # how layers read and write several residual streams (models/streams.py); None: there is one
    streams: Literal["independent", "balanced", "gated"] | None = None
    output_bias: bool = False  # attention_bias holds for the output projection as well
    has_windows: bool = True  # sliding_window and layer_types count, as Qwen reads them
    # our parameter -> its published tensors, where they differ from the usual (parameters.py)
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_parameters: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of a head's block
    # the field that counts the ranks for which q, k and v are stored one rank after another, where
    # they are one tensor (FUSED_MODULES); empty: a fused one is not read
    qkv_ranks: str = ""
    has_gpu_kernels: bool = True  # False: plain PyTorch on GPUs; held against the kernels by a test

    def complete(self, raw: Fields) -> dict[str, Any]:
        """A config with everything that the family's class adds to it, under the usual names."""
        silent = {name: value for name, value in self.defaults.items() if raw.get(name) is None}
        fields = {**raw, **silent, **self.fixed}
        for theirs, usual in self.renamed.items():
            if fields.get(theirs) is not None:
                fields[usual] = fields[theirs]
        fields.update(self.normalise(fields))
        for name, why in self.refused.items():
            if fields.get(name):
                raise UnsupportedFamily(f"{name} is true; {why}")
        return fields
