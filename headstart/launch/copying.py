"""What other engines have like drafts from the context, and whether it goes together with MTP."""

from __future__ import annotations

from headstart.families.engines import ENGINE_TITLES
from headstart.families.versions import is_at_least

_INSTEAD = (
    "{title} {version} copies drafts from the context by {how} only in place of MTP, never beside "
    "it: a server has one method{source}. `headstart serve --speculate auto` has both"
)
_VLLM = " (vllm-project/vllm#46977)"


def about_copies(engine: str, version: str) -> list[str]:
    """How an engine drafts from the context, one line; none where it cannot."""
    title = ENGINE_TITLES[engine]
    if engine == "vllm":
        # Suffix decoding keeps trees of prompts and answers in a package of its own.
        how = "the method ngram"
        if is_at_least(version, "0.12.0"):
            how += " or suffix (needs arctic-inference)"
        return [_INSTEAD.format(title=title, version=version, how=how, source=_VLLM)]
    if engine == "sglang":
        if not is_at_least(version, "0.5.6"):
            return []
        how = "--speculative-algorithm NGRAM"
        return [_INSTEAD.format(title=title, version=version, how=how, source="")]
    if engine == "trtllm":
        return [
            f"{title} can copy from the context beside MTP: speculative_config.sa_config takes "
            "over from the head where a long suffix matches; it is not set here"
        ]
    if engine == "llamacpp":
        return [
            f"{title} can copy from the context beside MTP: --spec-type takes ngram types in the "
            "same list as draft-mtp, which draft apart from each other "
            "(ggml-org/llama.cpp#23184); none is set here"
        ]
    return []
