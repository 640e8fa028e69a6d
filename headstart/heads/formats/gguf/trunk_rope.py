"""How positions turn queries and keys, read back from the keys of a GGUF file."""

from __future__ import annotations

from typing import Any

from headstart.checkpoint.gguf.values import floats_of
from headstart.checkpoint.source import stored
from headstart.errors import UnsupportedFamily
from headstart.heads.formats.gguf.trunk_keys import Keys, shortest

Config = dict[str, Any]
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


def rotation(keys: Keys) -> Config:
    kind, theta = keys.get("rope.scaling.type", str), keys.get("rope.freq_base", float)
    rope: Config = {"rope_type": kind or "default", "rope_theta": theta or 10000.0}
    if kind in (None, "none"):
        rope["rope_type"] = "default"
    elif kind not in ("linear", "yarn"):
        raise UnsupportedFamily(
            f"{keys.model.folder}: rope.scaling.type is {str(kind)[:40]!r}; expected none, linear "
            "or yarn. llama.cpp runs the file."
        )
    names = {
        "factor": "factor", "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
        "yarn_attn_factor": "attention_factor",
    }  # fmt: skip
    for theirs, ours in names.items():
        is_length = theirs.endswith("length")
        value = keys.get(f"rope.scaling.{theirs}", int if is_length else float)
        if value is not None and rope["rope_type"] != "default":
            rope[ours] = value
    share = keys.get("rope.scaling.yarn_log_multiplier", float)
    if share is not None:  # for DeepSeek's files a tenth of mscale_all_dim, which mscale equals
        rope["mscale"] = rope["mscale_all_dim"] = shortest(share * 10)
    if "rope_freqs.weight" in keys.model.tensors:
        rope |= _llama3(keys, rope)
    return {"rope_theta": rope["rope_theta"], "rope_parameters": rope}


def _llama3(keys: Keys, rope: Config) -> Config:
    """Llama 3's scaling, which is stored as one factor for each frequency."""
    import numpy as np

    found = floats_of(stored(keys.model.tensors["rope_freqs.weight"])).reshape(-1)
    dim = keys.number("rope.dimension_count", 2 * len(found))
    scaling = {**_LLAMA3, "factor": shortest(float(found.max()))}
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    share = ((turns - 1.0) / 3.0).clip(0, 1)
    made = 1 / ((1 - share) / scaling["factor"] + share)
    if made.shape != found.shape or not np.allclose(made, found, rtol=1e-5):
        raise UnsupportedFamily(
            f"{keys.model.folder}: rope_freqs.weight scales frequencies in another way than Llama "
            "3 (factors 1 and 4 over 8192 positions), which is not computed here. llama.cpp runs "
            "the file."
        )
    return scaling


def partly_rotated(keys: Keys, config: Config) -> Config:
    """How much of a head is rotated."""
    rotated = keys.number("rope.dimension_count", config["head_dim"])
    share = rotated / max(config["head_dim"], 1)
    rope = {**config["rope_parameters"], "partial_rotary_factor": share}
    return {"partial_rotary_factor": share, "rope_parameters": rope}


def wholly_rotated(keys: Keys, config: Config) -> Config:
    """Nothing, where all of a head is rotated as the engine has it."""
    rotated = keys.number("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise UnsupportedFamily(
            f"{keys.model.folder} rotates {rotated} of {config['head_dim']} values of a head; "
            f"expected all for {keys.model.arch_name}. llama.cpp runs the file."
        )
    return {}
