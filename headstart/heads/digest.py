"""The identity of a trunk, whatever head is beside it.

Data and cached states belong to a trunk. Tuning, stitching or grafting a head must not change the
digest; another value of any trunk tensor must, as far as samples of its bytes can tell.
"""

from __future__ import annotations

import hashlib
import json
from io import FileIO

from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BrokenFile
from headstart.heads.detection import find_family, find_head_of

_SAMPLE_BYTES = 4096
# What changes a trunk's text without changing a tensor. Names of classes are not among them: a
# grafted Llama is called mimo and computes the same.
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "sliding_window", "use_sliding_window", "layer_types", "tie_word_embeddings",
    "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "scoring_func",
)  # fmt: skip


def trunk_digest(checkpoint: Checkpoint) -> str:
    """Of the config fields that matter and of every tensor that is not the head's."""
    fields = checkpoint.config.fields
    state = hashlib.sha256()
    kept = {name: fields[name] for name in _FIELDS if name in fields}
    state.update(json.dumps(kept, sort_keys=True).encode())
    owner = find_family(checkpoint)
    head = set(find_head_of(checkpoint, owner).tensors.values()) if owner is not None else set()
    for name, info in sorted(checkpoint.tensors.items()):
        if name in head:
            continue
        sample = _sample(info)
        if sample is not None:
            state.update(f"{name} {info.dtype} {info.shape}\n".encode())
            state.update(sample)
    return f"trunk-sha256:{state.hexdigest()}"


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
