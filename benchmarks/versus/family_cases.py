"""Checkpoints of every family for a comparison on one GPU, and the memory that engines need there.

Each is about as deep as fits on a disk of 64 GB; two engines hold it on one GPU of 141 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from headstart.calibrate.shape_config import shape_config
from headstart.calibrate.tensors import head_shapes, trunk_shapes
from headstart.checkpoint.config import Config
from headstart.families.registry import match_family
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config

PROMPT, ANSWER, SPARE_TOKENS = 1000, 400, 64
RATE, ACTIVE, DRAFTS = 0.8, 32000, 3
GIB = 2**30
_SPARE = 1.1  # of what is counted
_NUMBER = 2  # bytes of one in bf16,
_STATE_NUMBER = 4  # of one in a recurrent state
_PAGE = 800  # tokens that a block of vLLM's has at most where states share it


@dataclass(frozen=True)
class Case:
    """A shape, and what vLLM is told beside that."""

    shape: str
    vllm: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "ernie": Case("ernie-4.5-21b"),
    "qwen3.5": Case("qwen3.5-27b,layers=32"),
    "qwen3.5-moe": Case("qwen3.5-35b,layers=20"),
    "qwen3-next": Case("qwen3-next-80b,layers=12"),
    "glm": Case("glm-4.5-air,layers=7"),
    "deepseek": Case("deepseek-v3,layers=10,experts=32"),
    "deepseek-sparse": Case("deepseek-v3.2,layers=10,experts=32"),
    "mimo-v2": Case("mimo-v2-flash,layers=16,experts=32"),
    "step": Case("step-3.5-flash,layers=24,experts=32"),
}


@dataclass(frozen=True)
class Needs:
    """Bytes on a GPU: weights as they are on disk, and what each engine keeps of requests."""

    weights: int
    headstart_kv: int
    vllm_kv: int


def needs_of(shape: str, requests: int, *, tokens: int = PROMPT + ANSWER) -> Needs:
    """For so many requests of so many tokens, or one prompt of 30,000."""
    config, modules = sizes_of(shape), modules_of(shape)
    each = sum(config.slot_values(kind) for kind in config.layers)
    each += modules * (config.slot_values(config.head_layer) + config.hidden // 16)
    slots = max(requests * (tokens + SPARE_TOKENS), 32_000) * each * _NUMBER
    states, rings = requests * state_bytes(config), requests * ring_bytes(config)
    ours = rings + max(2 * states, states + slots)  # states get half at most
    theirs = slots
    if states:  # one for each draft that may be rejected
        theirs += requests * _PAGE * each * _NUMBER + states * (1 + DRAFTS)
    return Needs(weight_bytes(shape), int(_SPARE * ours), int(_SPARE * theirs))


@cache
def sizes_of(shape: str) -> ModelConfig:
    return model_config(shape_config(shape))


@cache
def weight_bytes(shape: str) -> int:
    return _NUMBER * sum(prod(own) for part in _shapes(shape) for own in part.values())


def modules_of(shape: str) -> int:
    """Of the head."""
    return len({name.split(".")[1] for name in _shapes(shape)[1]})


def state_bytes(config: ModelConfig) -> int:
    """Of one request in all recurrent layers."""
    own = config.recurrent
    if own is None:
        return 0
    each = own.conv_values * _NUMBER + own.memory_values * _STATE_NUMBER
    return config.num_recurrent * each


def ring_bytes(config: ModelConfig) -> int:
    """Of what the newest rows of a request brought, where our rounds keep that."""
    own = config.recurrent
    rows = 2 * (DRAFTS + 1)
    return 0 if own is None else config.num_recurrent * rows * 2 * own.channels * _NUMBER


@cache
def _shapes(shape: str) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tensors of trunk and head, by name."""
    parsed = Config(shape_config(shape))
    owner = match_family(parsed.fields, parsed.model_types, parsed.architectures)
    assert owner is not None, f"{shape} is of no family"
    return trunk_shapes(owner, parsed.fields), head_shapes(owner, parsed.fields)
