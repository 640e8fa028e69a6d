"""States that another engine computed, one file a record: for trunks that do not fit here.

Files are those of `vllm_plugin/collected.py`: what our worker collected while vLLM served, named as
the records of the dataset that was made of them, or what vLLM extracted for the records of any
dataset. A record that was cut to --max-len has the first of its collected states.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headstart.data.records import Record
from headstart.errors import DataError
from headstart.models.unroll import StateKind
from headstart.train.frozen_model import FrozenModel
from headstart.train.packing import Row
from headstart.vllm_plugin.collected import SUFFIX, Collected, read

_COLLECTED = re.compile(r"[0-9a-f]{12}-\d{8,}")  # a name that our worker gave


def file_of(folder: Path, record: Record, trunk: str) -> Path:
    """Where the states that a trunk (its digest) has for a record are, or would be."""
    if _COLLECTED.fullmatch(record.prompt_id) and (folder / f"{record.prompt_id}{SUFFIX}").exists():
        return folder / f"{record.prompt_id}{SUFFIX}"
    return folder / f"{extracted_name(record, trunk)}{SUFFIX}"


def extracted_name(record: Record, trunk: str) -> str:
    """Another for another trunk, or another cut of the record: neither has the same states."""
    state = hashlib.sha256(f"{trunk}\n{record.id}\n".encode(errors="backslashreplace"))
    state.update(record.ids.tobytes())
    return state.hexdigest()[:32]


def missing(folder: Path, records: Sequence[Record], trunk: str) -> list[Record]:
    return [record for record in records if not file_of(folder, record, trunk).is_file()]


@dataclass(frozen=True)
class Elsewhere:
    """A source of states (states/source.py)."""

    folder: Path
    frozen: FrozenModel
    trunk: str  # its digest (heads/digest.py)

    def states(self, row: Row) -> Tensor:
        return torch.cat([self._one(record) for record in row.records])

    def _one(self, record: Record) -> Tensor:
        path = file_of(self.folder, record, self.trunk)
        found = read(path)
        count = len(record.ids)
        if found.ids[:count].tolist() != record.ids.tolist():
            raise DataError(
                f"{path} has states of another text than record {record.id}. Give the folder that "
                "the dataset was made of, or remove it."
            )
        trunk, wanted = self.frozen.trunk, self.frozen.kind
        states = found.states[:count].to(self.frozen.device, self.frozen.dtype)
        if states.shape[1] != trunk.config.hidden or not bool(torch.isfinite(states).all()):
            raise DataError(
                f"{path} has states of width {states.shape[1]}, or some that are not finite; the "
                f"trunk has {trunk.config.hidden}. Collect them again."
            )
        kind = kind_of(found, self.frozen)
        if kind == wanted:
            return states
        if (kind, wanted) == ("before_final_norm", "after_final_norm"):
            with torch.no_grad():
                normed: Tensor = trunk.final_norm(states)
            return normed
        raise DataError(
            f"{path} has states {kind.replace('_', ' ')}, and the head is trained on those "
            f"{wanted.replace('_', ' ')}, which do not follow from them. Leave --states-from out."
        )


def kind_of(found: Collected, frozen: FrozenModel) -> StateKind:
    """Collected ones are what vLLM gives to this family's heads."""
    if found.kind is not None:
        return found.kind
    return frozen.source.family.layout.as_("vllm").trunk_hidden
