"""The identity of a trunk, whatever head is beside it.

Data and cached states belong to a trunk. Tuning, stitching or grafting a head must not change the
digest; another value of any trunk tensor must, as far as samples of its bytes can tell.
"""

from __future__ import annotations

import hashlib
import json
from io import FileIO
from typing import Any

from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BrokenFile
from headstart.families.registry import GRAFTED_AS
from headstart.heads.detection import find_family, find_head_of
from headstart.heads.plain_trunk import unspoken
from headstart.heads.published import PublishedModel

_SAMPLE_BYTES = 4096
# What cannot change a trunk's text: everything else in its config counts, known here or not.
_SILENT = {
    # Names, of classes too: a grafted Llama is called mimo and computes the same.
    "_name_or_path", "name_or_path", "model_type", "architectures", "auto_map",
    "transformers_version", "_commit_hash", "finetuning_task", "task_specific_params",
    # How it is stored: the tensors say so themselves, a bias of zeros is none.
    "dtype", "torch_dtype", "quantization_config", "compression_config", "attention_bias",
    # How it is trained and run.
    "initializer_range", "attention_dropout", "hidden_dropout", "use_cache", "pad_token_id",
    "output_attentions", "output_hidden_states", "return_dict", "torchscript",
    "_attn_implementation", "attn_implementation", "pretraining_tp", "ep_size",
    "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
    # Other parts; the fields of the text part were taken out of text_config.
    "text_config", "vision_config", "audio_config",
}  # fmt: skip
_HEADS = ("mtp", "nextn")  # in the name of a field that is about a head


def trunk_digest(checkpoint: Checkpoint) -> str:
    """Of the config but for what cannot matter, and of every tensor that is not the head's."""
    state = hashlib.sha256()
    state.update(json.dumps(_meaning(checkpoint), sort_keys=True).encode())
    for name, info in sorted(_trunk(checkpoint).items()):
        sample = _sample(info)
        if sample is not None:
            state.update(f"{name} {info.dtype} {info.shape}\n".encode())
            state.update(sample)
    return f"trunk-sha256:{state.hexdigest()}"


def _trunk(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    if isinstance(checkpoint, PublishedModel):
        return {info.name: info for info in checkpoint.stored_trunk}
    owner = find_family(checkpoint)
    head = set(find_head_of(checkpoint, owner).tensors.values()) if owner is not None else set()
    return {name: info for name, info in checkpoint.tensors.items() if name not in head}


def _meaning(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config fields that change the text, with what silence means where grafting writes it."""
    fields = checkpoint.config.fields
    if fields.get("model_type") in GRAFTED_AS:
        fields |= unspoken(fields, str(fields["model_type"]))
    return {
        name: value
        for name, value in fields.items()
        if name not in _SILENT and not any(part in name for part in _HEADS)
    }


def _sample(info: TensorInfo) -> bytes | None:
    """The ends of a tensor; None for a bias of zeros, which is the same as no bias."""
    try:
        with open(info.file, "rb", buffering=0) as file:
            # Grafting a head onto a Llama adds such biases, since the layout has a place for them.
            if info.name.endswith(".bias") and not any(_read(file, info.start, info.end)):
                return None
            first = _read(file, info.start, min(info.end, info.start + _SAMPLE_BYTES))
            last = _read(file, max(info.start, info.end - _SAMPLE_BYTES), info.end)
    except OSError as error:
        raise BrokenFile(
            f"{info.file} cannot be read ({error.strerror}). Check the disk, then run again."
        ) from error
    return first + last


def _read(file: FileIO, start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)
