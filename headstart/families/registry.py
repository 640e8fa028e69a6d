"""All families, and which one a config belongs to. The only list of families there is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module

from headstart.errors import UnsupportedFamily
from headstart.families.base import Family
from headstart.families.dims import Fields
from headstart.families.plain import LLAMA, MISTRAL, QWEN2, PlainTrunk
from headstart.families.runtime import Runtime

# module of headstart.families : attribute; more specific families first
_FAMILIES = (
    "deepseek:V32",
    "deepseek:V3",
    "deepseek_v4:FAMILY",
    "glm:GLM4_MOE",
    "glm:GLM4_MOE_LITE",
    "glm:GLM_MOE_DSA",
    "glm:GLM_OCR",
    "glm5_next:FAMILY",
    "qwen:NEXT",
    "qwen:QWEN3_5",
    "qwen:QWEN3_5_MOE",
    "qwen:INTERN_S2",
    "qwen4_exp:FAMILY",
    "qwen:QWEN3",
    "qwen3_moe:FAMILY",
    "mellum:FAMILY",
    "mimo:MIMO",
    "mimo:V2",
    "motif:FAMILY",
    "ernie:FAMILY",
    "nemotron:FAMILY",
    "step:FAMILY",
    "step:STEP5",
    "longcat:FAMILY",
    "hunyuan:V3",
    "hunyuan:V4",
    "bailing_v3:V3",
    "bailing:V2",
    "exaone:MOE",
    "exaone:EXAONE4_5",
    "pangu:ULTRA_MOE",
    "pangu:V2",
    "gigachat:FAMILY",
    "kimi:K3",
    "minimax:M3",
    "inkling:FAMILY",
    "dots3:FAMILY",
    "gemma4:ASSISTANT",
)

# model_type -> a trunk without a published head
PLAIN_TRUNKS: dict[str, PlainTrunk] = {trunk.model_type: trunk for trunk in (LLAMA, QWEN2, MISTRAL)}
# model_type of such a trunk -> the family whose layout a grafted head gives it
GRAFTED_AS = {name: trunk.grafted_as for name, trunk in PLAIN_TRUNKS.items()}

_EAGLE = "has no head; its drafters are separate EAGLE checkpoints"

# model_type -> why it has no head that could be used, whatever its config declares
WITHOUT_HEAD: dict[str, str] = {
    "minimax_m2": "MiniMax-M2 to M2.7 declare use_mtp and num_mtp_modules but ship no head.",
    "kimi_k2": f"Kimi-K2 {_EAGLE}.",
    "kimi_k25": f"Kimi-K2.5 {_EAGLE}.",
    "glm4v_moe": "GLM-4.5V ships without a head, although its text trunk is that of GLM-4.5.",
    "muse_glimmer": "Muse Glimmer has no head; its assistant is a DFlash drafter.",
    "cohere2_moe": "Cohere's MoE models ship without a head.",
    "solar_open": "Solar Open ships without a head.",
    "youtu": "Youtu-LLM ships without a head.",
    "kimi_linear": "Kimi-Linear ships without a head.",
    "deepseek_v41": "DeepSeek-V4.1 ships a DSpark drafter below mtp.*, not a head.",
    "mistral_large4": "Mistral Large 4 ships a DSpark drafter below mtp_dspark.*, not a head.",
    "axk1": "A.X-K1 ships without a head, although its config may declare one.",
    "llama4": f"Llama 4 {_EAGLE}.",
    "llama4_text": f"Llama 4 {_EAGLE}.",
    "mistral3": f"Mistral {_EAGLE}.",
}


@cache
def families() -> tuple[Family, ...]:
    result = []
    for entry in _FAMILIES:
        module, attribute = entry.split(":")
        result.append(getattr(import_module(f"headstart.families.{module}"), attribute))
    return tuple(result)


def family(name: str) -> Family:
    """The family of that name (or with that model_type)."""
    for candidate in families():
        if name == candidate.name or name in candidate.model_types:
            return candidate
    known = ", ".join(sorted(candidate.name for candidate in families()))
    raise UnsupportedFamily(f"no family is called {name!r}; expected one of {known}.")


def match_family(
    fields: Fields, model_types: Iterable[str], architectures: Iterable[str]
) -> Family | None:
    """The family that a config claims, or None."""
    types, classes = set(model_types), set(architectures)
    for candidate in families():
        marked = bool(types & set(candidate.marked_types)) and any(
            fields.get(mark) is not None for mark in candidate.marks
        )
        if marked or types & set(candidate.model_types):
            return candidate
    for candidate in families():
        if classes & set(candidate.architectures):
            return candidate
    return None


@cache
def runtimes() -> dict[str, Runtime]:
    """Every model_type that the engine runs, and how."""
    result = {name: trunk.runtime for name, trunk in PLAIN_TRUNKS.items()}
    for candidate in families():
        for name in candidate.run_types:
            if candidate.runtime is not None:
                result.setdefault(name, candidate.runtime)
    return result


def family_of_trunk(fields: Fields, model_type: str) -> Family | None:
    """The family whose tables describe a trunk: its own, or the one that it is grafted as."""
    if model_type in GRAFTED_AS:
        return family(GRAFTED_AS[model_type])
    return match_family(fields, (model_type,), ())
