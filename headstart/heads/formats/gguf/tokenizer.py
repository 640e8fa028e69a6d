"""The tokenizer inside a GGUF file, as the files of a published checkpoint.

Byte-level BPE with those ways of splitting a text (`tokenizer.ggml.pre`) that the families here
have. Other tokenizers are not guessed at: a `tokenizer.json` beside the file, with the same
tokens, is used in their place, and without one prompts have to be token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.gguf.fields import ARRAY, STRING
from headstart.errors import BadConfig
from headstart.files import read_plain
from headstart.heads.formats.gguf.model import GgufModel

_AT = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # of token_type: tokens that are cut out of a text whole
_ROLES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
}  # fmt: skip
# control tokens that end a turn; files name one of them, releases often two
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|"


@dataclass(frozen=True)
class _Splitting:
    """How a text is cut before merges: by patterns, one after the other."""

    patterns: tuple[str, ...] = ()  # none: GPT-2's, which the library has
    single_digits: bool = False
    is_composed: bool = False  # characters are composed first (NFC)
    ignores_merges: bool = False  # a word that is a token is one, whatever its merges
    adds_first: bool = False  # the first token is put in front, where the file does not say


_LLAMA3 = (_CASED + _WORD + r"\p{N}{1,3}|" + _ENDING,)
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": _Splitting(_LLAMA3, ignores_merges=True, adds_first=True),
    "glm4": _Splitting(_LLAMA3),
    "qwen2": _Splitting((_CASED + _WORD + r"\p{N}|" + _ENDING,), is_composed=True),
    "deepseek-r1-qwen": _Splitting((_CASED + _WORD + r"\p{N}|" + _ENDING,)),
    "qwen35": _Splitting(
        (
            _CASED + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        is_composed=True,
    ),
    "deepseek-v3": _Splitting(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}
_SPLITTINGS |= {
    "llama3": _SPLITTINGS["llama-bpe"], "llama-v3": _SPLITTINGS["llama-bpe"],
    "chatglm-bpe": _SPLITTINGS["glm4"],
}  # fmt: skip


def token_ids(model: GgufModel) -> dict[str, Any]:
    """Tokens that begin and end texts, as configs name them."""
    own, tokens = _own(model), _texts(model, "tokens")
    kinds = own.get("token_type")
    kinds = kinds if isinstance(kinds, list) else []
    ends = [own.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [
        number
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and text in _ENDS
    ]
    known = sorted({number for number in ends if type(number) is int and number >= 0})
    first = own.get("bos_token_id")
    found: dict[str, Any] = {"eos_token_id": known} if known else {}
    return found | ({"bos_token_id": first} if type(first) is int else {})


def tokenizer_of(model: GgufModel) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tokenizer's files, and what to know about them; none where it cannot be read."""
    beside = model.folder.parent
    if (beside / _BESIDE[0]).is_file():
        return _given(model, beside)
    own = _own(model)
    kind, splitting = own.get("model"), _SPLITTINGS.get(str(own.get("pre")))
    if kind == "gpt2" and splitting is not None and _texts(model, "tokens"):
        return _documents(model, own, splitting), ()
    said = f"{kind!r} with pre-tokenizer {own.get('pre')!r}" if kind else "none"
    return {}, (
        f"no tokenizer: the GGUF file has {said}; 'gpt2' with one of {', '.join(_SPLITTINGS)} is "
        "read here. Put the release's tokenizer.json and tokenizer_config.json beside the file, or "
        "give token ids",
    )


def _own(model: GgufModel) -> dict[str, Any]:
    """Small keys of the tokenizer; lists are read apart."""
    lists = ("tokens", "merges", "scores")
    return {
        name.removeprefix(_AT): field.value
        for name, field in model.fields.items()
        if name.startswith(_AT) and name.removeprefix(_AT) not in lists
    }


def _texts(model: GgufModel, name: str) -> list[str]:
    found = model.fields.get(_AT + name)
    is_list = found is not None and found.kind == ARRAY and found.item_kind == STRING
    return list(found.value) if found is not None and is_list else []


def _given(model: GgufModel, folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The release's own files, held against the tokens of the file."""
    path = folder / _BESIDE[0]
    document = read_json_object(path)
    inner = document.get("model")
    vocab = inner.get("vocab") if isinstance(inner, dict) else None
    added = document.get("added_tokens")
    known = dict(vocab) if isinstance(vocab, dict) else {}
    known |= {
        each["content"]: each["id"]
        for each in (added if isinstance(added, list) else [])
        if isinstance(each, dict) and {"content", "id"} <= each.keys()
    }
    tokens = _texts(model, "tokens")
    wrong = next(
        (t for t, i in known.items() if type(i) is not int or tokens[i : i + 1] != [t]), None
    )
    if not known or wrong is not None:
        raise BadConfig(
            f"{path} lies beside the GGUF file and is of another model: its token "
            f"{str(wrong)[:40]!r} is not where the file has it. Remove it, or take that of the "
            "release."
        )
    documents: dict[str, Any] = {_BESIDE[0]: json.dumps(document, ensure_ascii=False)}
    for name in _BESIDE[1:]:
        if (folder / name).is_file():
            documents[name] = read_plain(folder / name).decode("utf-8", errors="replace")
    template = model.fields.get("tokenizer.chat_template")
    if _BESIDE[2] not in documents and template is not None and template.kind == STRING:
        documents[_BESIDE[2]] = str(template.value)
    return documents, (f"the tokenizer is {path}",)


def _documents(model: GgufModel, own: Mapping[str, Any], splitting: _Splitting) -> dict[str, Any]:
    tokens = _texts(model, "tokens")
    roles = {
        role: tokens[number]
        for role, name in _ROLES.items()
        if type(number := own.get(f"{name}_token_id")) is int and 0 <= number < len(tokens)
    }
    length = model.value("context_length")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length if type(length) is int else 1 << 20,
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    inner = _tokenizer(model, own, splitting, roles.get("bos_token"))
    documents: dict[str, Any] = {
        # Without spaces: half the size for 98,000 entries.
        "tokenizer.json": json.dumps(inner, ensure_ascii=False, separators=(",", ":")),
        "tokenizer_config.json": settings,
    }
    template = model.fields.get("tokenizer.chat_template")
    if template is not None and template.kind == STRING:
        documents["chat_template.jinja"] = str(template.value)
    return documents


def _tokenizer(
    model: GgufModel, own: Mapping[str, Any], splitting: _Splitting, first: str | None
) -> dict[str, Any]:
    tokens, merges = _texts(model, "tokens"), _texts(model, "merges")
    kinds = own.get("token_type")
    kinds = kinds if isinstance(kinds, list) else [1] * len(tokens)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    cuts: list[dict[str, Any]] = [digits] if splitting.single_digits else []
    cuts += [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in splitting.patterns
    ]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    adds_first = own.get("add_bos_token", splitting.adds_first)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **plain, "special": kind == _CONTROL}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if splitting.is_composed else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*cuts, {**byte_level, "use_regex": not splitting.patterns}],
        },
        "post_processor": _in_front(first, own.get("bos_token_id")) if adds_first else None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": splitting.ignores_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _in_front(first: str | None, number: Any) -> dict[str, Any] | None:
    """What puts the first token in front of a text."""
    if first is None:
        return None
    text = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    more = [{"Sequence": {"id": "B", "type_id": 1}}]
    token = {"id": first, "ids": [number], "tokens": [first]}
    return {
        "type": "TemplateProcessing", "single": text, "pair": [*text, *more],
        "special_tokens": {first: token},
    }  # fmt: skip
