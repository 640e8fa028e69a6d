"""A toy trunk with a toy head, in memory, for the tests of training."""

from __future__ import annotations

import torch

from headstart.families.base import HeadLayout
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config
from headstart.models.documents import Documents
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable
from headstart.models.trunk import Trunk
from headstart.models.unroll import trunk_states
from headstart.train.learner import Learner
from headstart.train.losses.lm_head import LmHead
from headstart.train.options import TrainOptions, resolve
from headstart.train.parallel import World
from headstart.train.step import Batch

VOCAB = 19


def toy_config(hidden: int = 32, vocab: int = VOCAB) -> ModelConfig:
    return model_config(
        {
            "model_type": "qwen2", "hidden_size": hidden, "vocab_size": vocab,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 2 * hidden, "max_position_embeddings": 64,
        }
    )  # fmt: skip


def toy(
    *, dtype: torch.dtype = torch.float64, modules: int = 1, hidden: int = 32, vocab: int = VOCAB
) -> tuple[Trunk, MTPHead]:
    """Random weights; the same ones at every call."""
    config = toy_config(hidden, vocab)
    generator = torch.Generator().manual_seed(5)
    trunk, head = Trunk(config, 64, dtype), MTPHead(config, HeadLayout(), modules)
    for module in (trunk, head):
        for name, parameter in module.named_parameters():
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            shift, scale = (1.0, 0.1) if "norm" in name else (0.0, 0.2)
            parameter.data = (shift + scale * random).to(dtype)
    trunk.rotary = RotaryTable(config.rope, 64, dtype)
    return trunk.requires_grad_(False), head.requires_grad_(True)


def learner(trunk: Trunk, head: MTPHead, **options: object) -> Learner:
    given = resolve(TrainOptions(**options))
    dtype = head.modules_[0].fuse.weight.dtype
    lm_head = LmHead.of(trunk.lm_head.weight)
    return Learner("toy", given, head, lm_head, dtype=dtype, world=World())


def batch(trunk: Trunk, ids: torch.Tensor, mask: torch.Tensor, lengths: tuple[int, ...]) -> Batch:
    documents = Documents(lengths)
    states = trunk_states(trunk, ids, documents, "after_final_norm")
    return Batch(
        ["toy"], ids, mask, documents, trunk.embed[ids].detach(), states, states, trunk.rotary
    )
