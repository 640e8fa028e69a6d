"""vLLM's MTP classes by the name of the architecture, and whose heads they run.

Releases have had all names since 0.26 unless another one stands here. What a release does not have
is passed over; what it has and is not listed here, is said in its log when it is used.
"""

from __future__ import annotations

from headstart.heads.formats.vllm import PLUGIN as GRAFTED

# architecture -> families of ours (families/registry.py)
DRAFT_CLASSES: dict[str, tuple[str, ...]] = {
    "DeepSeekMTPModel": ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    "DeepseekV32MTPModel": ("deepseek_v32", "glm_moe_dsa"),  # 0.32
    "DeepSeekV4MTPModel": ("deepseek_v4",),
    "MiMoMTPModel": ("mimo", "qwen3", "qwen3_moe"),
    "MiMoV2MTPModel": ("mimo_v2",),
    "MiMoV2OmniMTPModel": ("mimo_v2",),
    "Glm4MoeMTPModel": ("glm4_moe",),
    "Glm4MoeLiteMTPModel": ("glm4_moe_lite",),
    "GlmOcrMTPModel": ("glm_ocr",),
    "Glm5NextMTPModel": ("glm5_next",),  # 0.30
    "ErnieMTPModel": ("ernie4_5_moe",),
    "NemotronHMTPModel": ("nemotron_h",),
    "Qwen3NextMTP": ("qwen3_next",),
    "Qwen3_5MTP": ("qwen3_5",),
    "Qwen3_5MoeMTP": ("qwen3_5_moe",),
    "Qwen4ExpMTP": ("qwen4_exp",),  # 0.29
    "InternS2MobiusMTP": ("intern_s2",),  # by 0.32
    "ExaoneMoeMTP": ("exaone_moe",),
    "Exaone4_5_MTP": ("exaone4_5",),
    "LongCatFlashMTPModel": ("longcat_flash",),
    "Step3p5MTP": ("step3p5",),
    "HYV3MTPModel": ("hy_v3",),
    "HYV4MTPModel": ("hy_v4",),  # 0.29
    "BailingMoeV25MTPModel": ("bailing_moe",),
    "BailingMoeV3MTPModel": ("bailing_moe_v3",),  # 0.28
    "OpenPanguMTPModel": ("pangu_ultra_moe",),
    "InklingMTPModel": ("inkling",),
    "MiniMaxM3MTP": ("minimax_m3",),
    "Dots3NoteMTPModel": ("dots3_note",),  # 0.28
    "KimiK3MTPModel": ("kimi_k3",),  # 0.27
}
# Classes that choose their drafts by themselves, and why no list of tokens can be given to them.
WITHOUT_VOCAB: dict[str, str] = {
    "Gemma4MTPModel": "Gemma 4's assistants choose among clusters of tokens already",
}


def why_no_vocab(architecture: str) -> str:
    """Why this architecture cannot draft from a list of tokens; empty where it can."""
    if architecture in DRAFT_CLASSES or architecture == GRAFTED:
        return ""
    return WITHOUT_VOCAB.get(architecture, "the plugin does not know this class of vLLM's")
