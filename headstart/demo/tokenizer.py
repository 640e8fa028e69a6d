"""tokenizer.json and its companions from a GGUF file's metadata.

Byte-level BPE with the pre-tokenizer that GGUF calls "smollm": digits one by one, then GPT-2's
pattern, no space in front.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headstart.calibrate.given_tokenizer import GivenTokenizer
from headstart.demo.gguf_file import GgufFile
from headstart.demo.package import PACKAGE, check, gguf_path
from headstart.errors import UnsupportedFamily

_KIND, _PRE_TOKENIZER = "gpt2", "smollm"
_CONTROL, _USER_DEFINED = 3, 4  # of token_type: tokens that are cut out of a text whole
_ROLES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
}  # fmt: skip


def demo_tokenizer() -> GivenTokenizer:
    """The one of the demo's model, from the installed package."""
    path = gguf_path()
    check(path)
    return GivenTokenizer(PACKAGE, tokenizer_documents(GgufFile(path).metadata))


def tokenizer_documents(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Files by name."""
    own = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    if (own.get("model"), own.get("pre")) != (_KIND, _PRE_TOKENIZER):
        raise UnsupportedFamily(
            f"the GGUF file has tokenizer {own.get('model')!r} with pre-tokenizer "
            f"{own.get('pre')!r}; {_KIND!r} with {_PRE_TOKENIZER!r} is what is read here. Take "
            "the file of the package."
        )
    tokens: list[str] = own["tokens"]
    roles = {
        role: tokens[own[f"{name}_token_id"]]
        for role, name in _ROLES.items()
        if f"{name}_token_id" in own
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    documents: dict[str, Any] = {
        # Without spaces: half the size for 98,000 entries.
        "tokenizer.json": json.dumps(_tokenizer(own), ensure_ascii=False, separators=(",", ":")),
        "tokenizer_config.json": settings,
    }
    if "tokenizer.chat_template" in metadata:
        documents["chat_template.jinja"] = metadata["tokenizer.chat_template"]
    return documents


def _tokenizer(own: Mapping[str, Any]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre_tokenizers = [{"type": "Digits", "individual_digits": True}]
    pre_tokenizers.append({**byte_level, "use_regex": True})
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **plain, "special": kind == _CONTROL}
            for i, (token, kind) in enumerate(zip(own["tokens"], own["token_type"], strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(own["tokens"])},
            "merges": [merge.split(" ") for merge in own["merges"]],
        },
    }
