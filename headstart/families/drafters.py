"""Drafters that are no MTP heads and may be taken for one: DSpark and DFlash.

Both draft a whole block of tokens in one pass, from hidden states of several trunk layers. DSpark
drafters lie inside some models, below the names of heads, or are models of their own; DFlash
drafters are models of their own. Headstart names them and treats their tensors as opaque.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.families.dims import Fields

_INSIDE = re.compile(r"(?:[\w.]+\.)?(?:mtp|mtp_dspark)\.")
_STAGE = re.compile(r"(?:[\w.]+\.)?mtp(?:_dspark)?\.(?:layers\.)?(\d+)\.")
_BLOCK = 5  # draft tokens per block where a config does not say


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """How to recognise a kind of drafter, and which engines serve it with which flags."""

    name: str
    fields: tuple[str, ...]  # config fields that only it has
    tensors: tuple[str, ...]  # parts of tensor names that only it has
    words: tuple[str, ...]  # parts of names of types and classes, in lower case
    types: tuple[str, ...]  # model types
    block_fields: tuple[str, ...]  # of the config, the first that is there counts
    # engine -> first release, and the flags, where an object stands for its JSON; {k} is the block,
    # {model} the drafter's own folder, which is left out with its flag where it has none
    served: Mapping[str, tuple[str, tuple[str | Mapping[str, str], ...]]]

    def flags(self, engine: str, config: Fields, model: str) -> str:
        """What an engine is started with to draft with it, as shell words; `model` is the drafter's
        own folder, empty where it lies inside the model that it drafts for."""
        blocks = [config.get(name) for name in self.block_fields]
        found = (block for block in blocks if type(block) is int and block > 0)
        values = {"{k}": next(found, _BLOCK), "{model}": model}
        words: list[str] = []
        for word in self.served[engine][1]:
            if isinstance(word, str):
                if word == "{model}" and not model:
                    words.pop()
                else:
                    words.append(str(values.get(word, word)))
            else:
                filled = {key: values.get(value, value) for key, value in word.items()}
                words.append(json.dumps({key: value for key, value in filled.items() if value}))
        return shlex.join(words)


DSPARK = Drafter(
    name="DSpark",
    fields=(
        "dspark_block_size",
        "dspark_markov_rank",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
    ),
    tensors=(".main_proj.", ".main_norm.", ".markov_head.", ".confidence_head.", "mtp_dspark."),
    words=("dspark",),
    types=("deepseek_v41", "k3_dspark"),
    block_fields=("dspark_block_size", "block_size"),
    served={
        "vllm": (
            "0.25.0 (DeepSeek-V4.1 0.30.0)",
            (
                "--speculative-config",
                {"method": "dspark", "model": "{model}", "num_speculative_tokens": "{k}"},
            ),
        ),
        "sglang": (
            "0.5.16",
            ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "{model}"),
        ),
    },
)

DFLASH = Drafter(
    name="DFlash",
    fields=("dflash_config",),
    tensors=(),
    words=("dflash",),
    types=("muse_glimmer_assistant",),
    block_fields=("block_size",),
    served={
        "vllm": (
            "0.20.0",
            (
                "--speculative-config",
                {"method": "dflash", "model": "{model}", "num_speculative_tokens": "{k}"},
            ),
        ),
        "sglang": (
            "0.5.11",
            ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "{model}"),
        ),
    },
)
DRAFTERS = (DSPARK, DFLASH)


def of_config(config: Mapping[str, Any], fields: Fields) -> tuple[Drafter, str] | None:
    """The drafter that a config describes, and what says so; `fields` with its text part."""
    kinds = ("model_type", "architectures", "speculators_model_type")
    names = {kind: str(config.get(kind) or "") for kind in kinds}
    for drafter in DRAFTERS:
        present = [field for field in drafter.fields if fields.get(field) is not None]
        if present:
            return drafter, f"the config has {', '.join(present)}"
        for kind, name in names.items():
            if name in drafter.types or any(word in name.lower() for word in drafter.words):
                return drafter, f"{kind} is {name}"
    return None


def is_inside(name: str) -> bool:
    """Whether a tensor has a name of those that drafters have inside a model."""
    return "mtp" in name and _INSIDE.match(name) is not None  # the first is cheap, and mostly no


def of_names(names: Iterable[str]) -> tuple[Drafter, str] | None:
    """The drafter whose tensors are among `names`, and one of them."""
    for name in names:
        if is_inside(name):
            for drafter in DRAFTERS:
                if any(part in name for part in drafter.tensors):
                    return drafter, f"{name} is stored"
    return None


def num_stages(names: Iterable[str]) -> int:
    """Layers of a drafter that lies inside a model; each drafts the whole block."""
    return len({found[1] for name in names if (found := _STAGE.match(name))})
