"""What is trained and what stays frozen: a model in memory, and the head to start from."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.heads.formats import open_head
from headstart.heads.head import Head, dequantize, head_of
from headstart.models.build import Held, LoadedModel, build, plain_modules_hold
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config
from headstart.models.linear import Linear, Stack
from headstart.models.loading import load_head
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk
from headstart.models.unroll import StateKind


@dataclass(frozen=True)
class FrozenModel:
    """A frozen trunk, and its head as it is stored."""

    checkpoint: Checkpoint
    built: LoadedModel
    source: Head  # dequantised where it was stored in 8 bits

    @property
    def trunk(self) -> Trunk:
        return self.built.trunk

    @property
    def device(self) -> torch.device:
        return self.built.device

    @property
    def dtype(self) -> torch.dtype:
        """Of computing; masters are at least fp32."""
        return self.built.dtype

    @property
    def head_config(self) -> ModelConfig:
        return model_config(Config(dict(self.source.config)).fields)

    @property
    def kind(self) -> StateKind:
        """The trunk state that the head's contract names."""
        return self.source.family.layout.trunk_hidden

    def master(self) -> MTPHead:
        """The stored head in at least fp32, trainable."""
        assert self.built.head is not None
        wide = torch.promote_types(self.dtype, torch.float32)
        head = copy.deepcopy(self.built.head).to(wide)
        load_head(head, self.source.tensors, self.head_config)  # again: what bf16 had rounded
        return head.requires_grad_(True)


def _trunk_only(model: LoadedModel) -> Held:
    """The trunk stays as it is stored; a head that is trained cannot."""
    return replace(plain_modules_hold(model), head=(), why_not="heads are trained unquantised")


def load_frozen_model(
    checkpoint: Checkpoint, head_folder: Path | None, *, device: str, dtype: str,
    with_layers: bool = True,
) -> FrozenModel:  # fmt: skip
    """Load a model and the head to train: `head_folder`, else the checkpoint's own."""
    built = build(
        checkpoint, head_folder, device=device, dtype=dtype, holds=_trunk_only,
        draft_lm_head=False, with_layers=with_layers,
    )  # fmt: skip
    assert built.head is not None, "a plan without a head is refused"
    for module in (built.trunk, built.head):
        module.requires_grad_(False)
        for child in module.modules():
            if isinstance(child, Linear | Stack):
                # Products for few rows are chosen by stop-watch: a resumed run could differ.
                child.plan = ()
    source = open_head(head_folder) if head_folder is not None else head_of(checkpoint)
    source = replace(dequantize(source), model=os.path.abspath(checkpoint.folder))
    return FrozenModel(checkpoint, built, source)
