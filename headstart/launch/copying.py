"""What other engines have like drafts from the context, and whether it goes together with MTP."""

from __future__ import annotations

from headstart.families.engines import ENGINE_TITLES
from headstart.families.versions import is_at_least

_INSTEAD = (
    "{title} {version} copies drafts from the context by {how} only in place of MTP, never beside "
    "it: a server has one method{source}. `headstart serve --speculate auto` has both"
)
# Engines that copy only in place of MTP: what a method is asked for by, each method with the first
# release that takes it, and the issue that asks for more than one.
_BY = {"vllm": "the method", "sglang": "--speculative-algorithm"}
_METHODS = {
    "vllm": {"ngram": "0", "ngram_gpu": "0.18.0", "suffix (needs arctic-inference)": "0.11.1"},
    "sglang": {"NGRAM": "0.5.3"},
}
_SOURCES = {"vllm": " (vllm-project/vllm#46977)"}


def about_copies(engine: str, version: str) -> list[str]:
    """How an engine drafts from the context, one line; none where it cannot."""
    title = ENGINE_TITLES[engine]
    methods = _METHODS.get(engine, {})
    if known := [name for name, since in methods.items() if is_at_least(version, since)]:
        names = " or ".join((", ".join(known[:-1]), known[-1]) if known[1:] else known)
        return [
            _INSTEAD.format(
                title=title, version=version, how=f"{_BY[engine]} {names}",
                source=_SOURCES.get(engine, ""),
            )
        ]  # fmt: skip
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
