"""What mlx-vlm's drafters call the tensors of a head, and which of their values they change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headstart.checkpoint.reader import Checkpoint
from headstart.families.names import NUMBER

EXPERTS, STACKS = ".experts.", ".switch_mlp."
KEYS, VALUES = "embed_q.weight", "unembed_out.weight"  # latent attention's up-projection in two


@dataclass(frozen=True, kw_only=True)
class Drafter:
    model_type: str
    names: Mapping[str, str]  # our names up to a dot -> theirs; `{module}` in both
    shifts_norms: bool = False  # norms are stored as 1 + w
    kv_b: str = ""  # our name of what is stored as `embed_q` and `unembed_out`
    has_tables: bool = False  # holds embedding and LM head, of the trunk where it has none
    is_tied: bool = False  # whether those are one where the config does not say
    block_size: int = 1  # tokens of a round beside one draft per module
    in_fp32: tuple[str, ...] = ()  # endings of names
    layouts: tuple[str, ...] = ()  # in which runtimes of MLX read such heads inside a model

    def theirs(self, name: str) -> str | None:
        """Their name of one of ours."""
        return _renamed(name, self.names, EXPERTS, STACKS)

    def ours(self, name: str) -> str | None:
        """Our name of one of theirs."""
        back = {theirs: ours for ours, theirs in self.names.items()}
        return _renamed(name, back, STACKS, EXPERTS)


def _renamed(name: str, names: Mapping[str, str], old: str, new: str) -> str | None:
    for before, after in names.items():
        module = _module(name, before)
        if module is not None:
            rest = name[len(before.format(module=module)) :]
            return after.format(module=module) + rest.replace(old, new)
    return None


def _module(name: str, pattern: str) -> str | None:
    """The number of the module where a name begins as the pattern says, None where it does not."""
    start, mark, end = pattern.partition("{module}")
    if not mark:
        return "0" if name.startswith(f"{pattern}.") else None
    if not name.startswith(start):
        return None
    number = name[len(start) :].partition(".")[0]
    is_there = re.fullmatch(NUMBER, number) and name[len(start) + len(number) :].startswith(
        f"{end}."
    )
    return number if is_there else None


_QWEN_NAMES = {
    "modules.0.fuse": "fc",
    "modules.0.embed_norm": "pre_fc_norm_embedding",
    "modules.0.hidden_norm": "pre_fc_norm_hidden",
    "modules.0.out_norm": "norm",
    "modules.{module}.block": "layers.{module}",
}
_GLM_NAMES = {
    "modules.0.fuse": "model.eh_proj",
    "modules.0.embed_norm": "model.enorm",
    "modules.0.hidden_norm": "model.hnorm",
    "modules.0.out_norm": "model.shared_head_norm",
    "modules.0.embed_tokens": "model.embed_tokens",
    "modules.0.lm_head": "lm_head",
    "modules.0.block": "model.mtp_block",
}
_SPARSE_NAMES = {  # without the tables, which its class has no place for
    "modules.0.fuse": "mtp.eh_proj",
    "modules.0.embed_norm": "mtp.enorm",
    "modules.0.hidden_norm": "mtp.hnorm",
    "modules.0.out_norm": "mtp.shared_head_norm",
    "modules.0.block": "mtp",
}


def _qwen(is_tied: bool, *layouts: str) -> Drafter:
    return Drafter(
        model_type="qwen3_5_mtp", names=_QWEN_NAMES, shifts_norms=True, is_tied=is_tied,
        block_size=2, layouts=("sidecar", *layouts),
    )  # fmt: skip


# family -> its drafters
DRAFTERS: Mapping[str, Drafter] = {
    "qwen3_5": _qwen(True, "vllm-mlx", "embedded"),
    "qwen3_5_moe": _qwen(True, "vllm-mlx", "embedded"),
    # mlx-lm loads no converted Qwen3-Next with mtp.* in it, and vllm-mlx looks there alone
    "qwen3_next": _qwen(False),
    "glm4_moe_lite": Drafter(
        model_type="glm4_moe_lite_mtp",
        names=_GLM_NAMES,
        kv_b="modules.0.block.self_attn.kv_b_proj.weight",
        has_tables=True,
        in_fp32=("e_score_correction_bias",),
    ),
    "glm_moe_dsa": Drafter(
        model_type="glm_moe_dsa_mtp",
        names=_SPARSE_NAMES,
        kv_b="modules.0.block.self_attn.kv_b_proj.weight",
    ),
}


def is_drafter(checkpoint: Checkpoint) -> bool:
    """Whether a folder is one of mlx-vlm's drafters, by its model type."""
    types = {drafter.model_type for drafter in DRAFTERS.values()}
    return checkpoint.config.model_type in types
