"""Which engine serves which family's head, since which release, and what to know about it.

The facts are in the families' own files (`Family.served`, `Family.variants`).
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.families.base import Family
from headstart.families.registry import families

ENGINE_TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "xllm": "xLLM",
    "llamacpp": "llama.cpp",
    "mlx": "mlx-vlm",
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """That an engine serves the family's head, since which release, and what to know."""

    since: str
    is_apart: bool = False  # only from a folder of its own, with our plugin where it is needed
    note: str = ""  # everything there is to know, variants included, for tables
    caution: str = ""  # what holds for every model of the family


def served_by(family_name: str) -> dict[str, Served]:
    """The engines that serve the family's head; empty if none does."""
    owner = next((family for family in families() if family.name == family_name), None)
    if owner is None:
        return {}
    return {engine: _served(engine, owner) for engine in (*owner.served, *owner.served_apart)}


def _served(engine: str, owner: Family) -> Served:
    is_apart = engine not in owner.served
    said = (owner.served_apart if is_apart else owner.served)[engine]
    since, _, caution = said.partition(" ")
    notes = []
    for variant, first in owner.variants.get(engine, {}).items():
        title = owner.variant_titles.get(variant, variant)
        known = first or owner.served_apart.get(engine)
        notes.append(f"{title} is not read" if known is None else f"{title} from {known}")
    notes += [caution] if caution else []
    note = "; ".join(dict.fromkeys(notes))
    return Served(since=since, is_apart=is_apart, caution=caution, note=note)
