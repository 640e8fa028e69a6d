"""Sizes and routing of a mixture of experts, from a published config.

Whether there is a correction of the scores, and whether the shared experts are gated, is not in
configs: the parameters of a layer, from the family's table of tensors, say so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.dims import dims

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_SCORING: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
_TOP_K = ("num_experts_per_tok", "moe_k")
# How experts are chosen where scores are sigmoids; the only way that releases with heads use.
_TOPK_METHOD = "noaux_tc"


class Limit(NamedTuple):
    """What the halves of an inner product are cut off at."""

    most: float
    is_before: bool = False  # the gate's half before its activation, not behind it


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    num_experts: int
    top_k: int
    width: int  # of one expert
    shared_width: int  # of what every token passes through; 0 where there is none
    shared_gate: bool  # whether a sigmoid of the row scales the shared part
    scoring: Scoring
    correction: bool  # whether a bias is added to the scores that choose, not to those that weigh
    num_groups: int
    top_groups: int
    renormalise: bool  # whether the chosen weights are divided by their sum
    least_sum: float  # that the sum counts as, at least
    scale: float
    latent: int = 0  # size of the space that experts work in, where it is not the model's


def moe_config(raw: Mapping[str, Any], parameters: Collection[str]) -> MoeConfig:
    """The experts of a config; `parameters` are ours of a layer that has them."""
    known = dims(raw)
    top_k = next((raw[name] for name in _TOP_K if raw.get(name) is not None), None)
    experts, width = known.get("experts"), known.get("moe_width")
    if type(top_k) is not int or not experts or not width or not 0 < top_k <= experts:
        raise BadConfig(
            f"the config asks for {top_k!r} of {experts!r} experts of width {width!r}; expected "
            "whole numbers above 0, and no more experts in use than there are. Take the "
            "config.json of the model's release."
        )
    method = raw.get("topk_method", _TOPK_METHOD)
    given = raw.get("scoring_func", "softmax")
    scoring = next((name for name in _SCORING if name == given), None)
    if method != _TOPK_METHOD or scoring is None:
        raise UnsupportedFamily(
            f"experts are chosen by topk_method {method!r} and scoring_func {given!r}; the "
            f"engine computes {_TOPK_METHOD!r} with 'softmax', 'sigmoid' or 'sqrtsoftplus'."
        )
    groups, top_groups = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    if experts % groups or not 0 < top_groups <= groups or top_k > experts // groups * top_groups:
        raise BadConfig(
            f"the config has {experts} experts in {groups} groups and takes {top_k} of "
            f"{top_groups} groups, which does not come out even. Take the config.json of the "
            "model's release."
        )
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        width=width,
        shared_width=known.get("shared_width", 0) if "mlp.shared.down.weight" in parameters else 0,
        shared_gate="mlp.shared_gate.weight" in parameters,
        scoring=scoring,
        correction="mlp.router.correction" in parameters,
        num_groups=groups,
        top_groups=top_groups,
        renormalise=bool(raw.get("norm_topk_prob", True)),
        least_sum=float(raw.get("moe_norm_min") or 1e-20),
        scale=float(raw.get("routed_scaling_factor") or 1.0),
        latent=known.get("latent", 0) if "mlp.latent_in.weight" in parameters else 0,
    )
