"""Which engine serves which family's head, since which release, and what to know about it.

`since` is the first release whose sources register the head, or `main` where no release has it yet.
A family that an engine does not list cannot be served with its head there.
"""

from __future__ import annotations

from headstart.families.base import Served

ENGINE_TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "xllm": "xLLM",
}

# family -> release; a text after the release holds for the whole family
_VLLM = {
    "deepseek_v3": "0.7.3",
    "deepseek_v32": "0.11.0",
    "deepseek_v4": "0.20.0",
    "glm4_moe": "0.10.0",
    "glm4_moe_lite": "0.15.0",
    "glm_moe_dsa": "0.16.0",
    "glm_ocr": "0.16.0",
    "qwen3_next": "0.10.2",
    "qwen3_5": "0.17.0",
    "qwen3_5_moe": "0.17.0",
    "intern_s2": "0.22.0",
    "mimo": "0.9.0",
    "mimo_v2": "0.21.0 only the first module is loaded and reused for every draft",
    "ernie4_5_moe": "0.10.2 one module, reused for every draft",
    "longcat_flash": "0.11.0",
    "nemotron_h": "0.17.0",
    "step3p5": "0.15.1",
    "hy_v3": "0.20.0",
    "bailing_moe": "0.25.0",
    "bailing_moe_v3": "0.28.0rc1",
    "exaone_moe": "0.14.0",
    "exaone4_5": "0.20.0",
    "pangu_ultra_moe": "0.11.1",
    "kimi_k3": "0.27.0",
    "minimax_m3": "0.24.0",
    "inkling": "0.26.0",
    "dots3_note": "0.28.0rc1",
    "gemma4_assistant": "0.21.0 the assistant is the draft of a Gemma 4 model",
}
_SGLANG = {
    "deepseek_v3": "0.4.3.post1",
    "deepseek_v32": "0.5.3",
    "deepseek_v4": "0.5.12",
    "glm4_moe": "0.4.9.post5",
    "glm4_moe_lite": "0.5.13 earlier releases load it into a class without MLA",
    "glm_moe_dsa": "0.5.9",
    "glm_ocr": "0.5.9",
    "qwen3_next": "0.5.2",
    "qwen3_5": "0.5.9",
    "qwen3_5_moe": "0.5.9",
    "intern_s2": "0.5.12",
    "mimo": "0.4.6.post5",
    "mimo_v2": "0.5.7 one draft runner per module",
    "ernie4_5_moe": "0.5.1",
    "longcat_flash": "0.5.2",
    "nemotron_h": "0.5.8",
    "step3p5": "0.5.9 one draft runner per module",
    "hy_v3": "0.5.11",
    "bailing_moe": "0.5.3",
    "exaone_moe": "0.5.9",
    "inkling": "0.5.16",
    "dots3_note": "main",
    "gemma4_assistant": "0.5.12 the assistant is the draft of a Gemma 4 model",
}
_TRTLLM = {
    "deepseek_v3": "1.0.0",
    "deepseek_v32": "1.2.0",
    "deepseek_v4": "1.3.0rc20 Blackwell GPUs only",
    "glm4_moe": "1.2.0",
    "glm_moe_dsa": "1.3.0rc9",
    "qwen3_5_moe": "1.3.0rc14",
    "nemotron_h": "1.3.0rc9",
    "step3p5": "1.3.0rc20",
    "exaone_moe": "1.3.0rc2",
    "gemma4_assistant": "1.3.0rc20 the assistant is the draft of a Gemma 4 model",
}
_XLLM = {
    "deepseek_v3": "0.6.0",
    "deepseek_v32": "0.9.0",
    "deepseek_v4": "0.10.0",
    "glm4_moe": "0.7.0",
    "glm_moe_dsa": "0.9.0",
    "qwen3_5": "0.9.0",
    "qwen3_5_moe": "0.9.0",
    "mimo": "main CUDA devices only",
}
_TABLES = {"vllm": _VLLM, "sglang": _SGLANG, "trtllm": _TRTLLM, "xllm": _XLLM}


# Variants of a family that came later than the family itself, or never (None): by the model_type or
# the architecture that a config names.
_VARIANTS: dict[str, dict[str, dict[str, str | None]]] = {
    "vllm": {
        "intern_s2": {"interns2_mobius": "0.28.0rc1"},
        "longcat_flash": {"longcat_flash_ngram": "0.26.0"},
        "nemotron_h": {"nemotron_h_puzzle": "0.19.0"},
        "step3p5": {"step3p7": "0.23.0"},
        "bailing_moe": {"bailing_moe": None, "bailing_moe_v2": None},
    },
    "sglang": {
        # By architecture: the text part of every Qwen3.5 has the model_type of a text-only one.
        "qwen3_5": {"Qwen3_5ForCausalLM": "0.5.17"},
        "qwen3_5_moe": {"Qwen3_5MoeForCausalLM": "0.5.17"},
        "intern_s2": {"interns2_mobius": "0.5.18"},
        "mimo_v2": {"mimo_v2": "0.5.11"},
        "longcat_flash": {"longcat_flash_ngram": None},
        "nemotron_h": {"nemotron_h_puzzle": "0.5.13"},
        "step3p5": {"step3p7": "0.5.13"},
        "bailing_moe": {"bailing_hybrid": "0.5.9"},
    },
}
# What people call a variant, where that is not its model_type.
_TITLES = {
    "bailing_moe": "Ling 2.0",
    "bailing_moe_v2": "Ling 2.0",
    "bailing_hybrid": "Ling 2.5 and 2.6",
    "mimo_v2": "V2-Pro and V2.5",
    "Qwen3_5ForCausalLM": "text-only checkpoints",
    "Qwen3_5MoeForCausalLM": "text-only checkpoints",
}


def _served(engine: str, name: str) -> Served:
    since, _, caution = _TABLES[engine][name].partition(" ")
    variants = _VARIANTS.get(engine, {}).get(name, {})
    limits = [
        f"{variant_title(variant)} {'is not read' if first is None else f'from {first}'}"
        for variant, first in variants.items()
    ]
    note = "; ".join(dict.fromkeys([*limits, *([caution] if caution else [])]))
    return Served(since=since, caution=caution, note=note, variants=variants)


def variant_title(variant: str) -> str:
    """What people call a variant of a family, by its model_type or architecture."""
    return _TITLES.get(variant, variant)


SERVED: dict[str, dict[str, Served]] = {
    name: {engine: _served(engine, name) for engine, table in _TABLES.items() if name in table}
    for name in dict.fromkeys(name for table in _TABLES.values() for name in table)
}


def served_by(family_name: str) -> dict[str, Served]:
    """The engines that serve the family's head; empty if none does."""
    return dict(SERVED.get(family_name, {}))
