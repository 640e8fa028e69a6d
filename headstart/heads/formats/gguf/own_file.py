"""A GGUF file with a head alone, made of safetensors: no GGUF file of the trunk is needed.

llama.cpp drafts with token ids, and asks of the tokenizer in such a file only that it has as many
tokens as the embedding has rows; the texts are there all the same, as its converter has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.gguf.encoding import PLAIN
from headstart.checkpoint.gguf.fields import ARRAY, BOOL, INT32, STRING, UINT32, Field, field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan
from headstart.errors import (
    BadConfig,
    ConfigError,
    MissingTensor,
    UnsupportedFamily,
    first_line,
)
from headstart.heads.formats.gguf.arch import Arch
from headstart.heads.formats.gguf.keys import as_fields
from headstart.heads.formats.gguf.plans import DraftFile, placed, spelled_of
from headstart.heads.formats.gguf.reduced import about_reduced, reduced
from headstart.heads.formats.gguf.spelling import RECORD, SpelledHead, record_text, typed
from headstart.heads.head import Head, config_fields
from headstart.heads.operation import megabytes
from headstart.heads.sharing import trunk_tensor
from headstart.vocab.draft_vocab import DraftVocab

_TRUNK = "Give the trunk that you will serve as GGUF: --trunk FILE.gguf."
# of llama.cpp's token types
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPECIAL = ("bos", "eos", "unk", "pad")
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
               "Q2_K": 10, "Q6_K": 18, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37}  # fmt: skip
# the trunk's tensors that such a file needs -> role in the checkpoint
_BESIDE = {
    "token_embd.weight": "embed_tokens", "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
}  # fmt: skip


def plan_own_draft_file(
    head: Head, head_type: str | None = None, vocab: DraftVocab | None = None
) -> DraftFile:
    """The head alone, with keys, tokenizer and tables of the safetensors that it comes from."""
    spelled = spelled_of(head, head_type)
    arch = spelled.arch
    if arch.keys_of is None:
        why = "does not draft with it" if arch.drafts_since is None else "asks for more keys"
        raise UnsupportedFamily(
            f"the keys of a GGUF file with a head of {head.family.title} alone are not made here "
            f"(llama.cpp {why}). {_TRUNK}"
        )
    model = _model_of(head)
    beside = _beside(model, spelled, head, head_type)
    tensors = {**beside, **placed(spelled, spelled.num_layers)}
    if vocab is not None:
        tensors = reduced(tensors, arch, vocab)
    fields = config_fields(head.config)
    matrices = [s.dtype for s in spelled.tensors.values() if len(s.shape) > 1]
    kind = max(set(matrices), key=matrices.count)
    listed = [
        field("general.architecture", arch.name, STRING),
        field("general.type", "model", STRING),
        field("general.name", model.folder.name, STRING),
        field(f"{arch.name}.block_count", spelled.num_layers + spelled.num_modules, UINT32),
        *_keys(arch, fields, spelled.num_modules),
        field(f"{arch.name}.nextn_predict_layers", spelled.num_modules, UINT32),
        *([field("general.file_type", _FILE_TYPES[kind], UINT32)] if kind in _FILE_TYPES else []),
        field("general.quantization_version", 2, UINT32),
        *_tokenizer(model, arch.pre_tokenizer, beside["token_embd.weight"].shape[0]),
        field(RECORD, record_text(spelled.record), STRING),
    ]  # fmt: skip
    said = (
        f"keys and tokenizer are made of {model.folder.name}, and {', '.join(beside)} "
        f"({megabytes(sum(s.num_bytes for s in beside.values()))}) are its own; llama.cpp needs "
        "them in a file with a head alone",
    )
    plan = FolderPlan({f"mtp-{model.folder.name}.gguf": GgufShard(tensors, tuple(listed))})
    details = {"arch": arch.name, "head_type": head_type}
    return DraftFile(plan, (*spelled.changes, *said, *about_reduced(vocab)), details)


def _keys(arch: Arch, fields: Mapping[str, Any], num_modules: int) -> list[Field]:
    assert arch.keys_of is not None, "files are made for architectures whose keys are known"
    try:
        return as_fields(arch.name, arch.keys_of(fields, num_modules))
    except (TypeError, ValueError, KeyError) as error:  # a list where a number is meant, and so on
        raise BadConfig(
            f"the config holds a value that no key of {arch.name} can have ({first_line(error)}). "
            f"Download it again. {_TRUNK}"
        ) from None


def _model_of(head: Head) -> Checkpoint:
    """The checkpoint that has the trunk: where the head is from, or what `--model` named."""
    if trunk_tensor(head.origin, head.family, "embed_tokens") is not None:
        return head.origin
    if head.trunk_tensors and head.model is not None:
        return Checkpoint.open(head.model)
    raise ConfigError(
        f"{head.origin.folder} is a head without its model, and a GGUF file with a head alone "
        "holds the model's embedding and tokenizer. Add --model MODEL (`headstart convert`), or "
        "give the trunk that you will serve as GGUF: --trunk FILE.gguf."
    )


def _beside(
    model: Checkpoint, spelled: SpelledHead, head: Head, head_type: str | None
) -> dict[str, TensorSource]:
    found: dict[str, TensorSource] = {}
    for name, role in _BESIDE.items():
        info = trunk_tensor(model, head.family, role)
        is_tied = role == "lm_head" and info is not None and info.name not in (
            head.family.trunk.lm_heads
        )  # fmt: skip
        if info is None:
            raise MissingTensor(
                f"{model.folder} has no {role}, which a GGUF file with a head alone needs. {_TRUNK}"
            )
        if info.dtype not in PLAIN:
            raise UnsupportedFamily(
                f"{model.folder} stores {info.name} as {info.dtype}, which is not turned into GGUF "
                f"here. {_TRUNK}"
            )
        if not is_tied:
            kind = None if head_type is None else head_type.upper()
            found[name] = typed(name, model.source(info.name), spelled.arch, kind)
    return found


def _tokenizer(model: Checkpoint, pre: str, rows: int) -> list[Field]:
    """Tokens, merges and special tokens of a byte-pair tokenizer."""
    path = model.folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{model.folder} has no tokenizer.json, which the file needs. {_TRUNK}")
    document = read_json_object(path)
    inner = document.get("model")
    inner = inner if isinstance(inner, dict) else {}
    vocab, merges = inner.get("vocab"), inner.get("merges")
    if inner.get("type") != "BPE" or not isinstance(vocab, dict) or not isinstance(merges, list):
        raise ConfigError(
            f"{path} is no byte-pair tokenizer ({str(inner.get('type'))[:40]}); only such are "
            f"turned into GGUF here. {_TRUNK}"
        )
    texts, kinds = [f"[PAD{number}]" for number in range(rows)], [_UNUSED] * rows
    for text, number in vocab.items():
        _check_number(number, rows, path)
        texts[number], kinds[number] = text, _NORMAL
    added = document.get("added_tokens")
    for each in added if isinstance(added, list) else []:
        if not isinstance(each, dict) or not isinstance(each.get("content"), str):
            continue
        _check_number(each.get("id"), rows, path)
        text, is_special = each["content"], bool(each.get("special"))
        texts[each["id"]] = text
        kinds[each["id"]] = _CONTROL if is_special or _looks_special(text) else _USER_DEFINED
    return [
        field("tokenizer.ggml.model", "gpt2", STRING),
        field("tokenizer.ggml.pre", pre, STRING),
        field("tokenizer.ggml.tokens", texts, ARRAY, STRING),
        field("tokenizer.ggml.token_type", kinds, ARRAY, INT32),
        field("tokenizer.ggml.merges", [_merge(each) for each in merges], ARRAY, STRING),
        *_special(model, {text: number for number, text in enumerate(texts)}),
    ]


def _check_number(number: Any, rows: int, path: Path) -> None:
    if type(number) is not int or not 0 <= number < rows:
        raise ConfigError(
            f"{path} gives a token the number {str(number)[:20]}; expected one below {rows}, the "
            "rows of the embedding. Take the tokenizer of this model."
        )


def _looks_special(text: str) -> bool:
    """Tokens that some tokenizers do not mark as special, and llama.cpp takes for it."""
    marks = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return text in ("<pad>", "<mask>") or any(
        text.startswith(start) and text.endswith(end) for start, end in marks
    )


def _merge(each: Any) -> str:
    """A pair as one text; newer files keep pairs, whose spaces are written as another letter."""
    parts = each if isinstance(each, list) else str(each).split(" ", 1)
    return " ".join(str(part).replace(" ", "\u0120") for part in parts)


def _special(model: Checkpoint, numbers: Mapping[str, int]) -> list[Field]:
    path: Path = model.folder / "tokenizer_config.json"
    settings = read_json_object(path) if path.is_file() else {}
    listed = []
    for role in _SPECIAL:
        named = settings.get(f"{role}_token")
        text = named.get("content") if isinstance(named, dict) else named
        number = numbers.get(text) if isinstance(text, str) else None
        if number is None:
            given = model.config.get(f"{role}_token_id")
            number = given[0] if isinstance(given, list) and given else given
        if type(number) is int and 0 <= number < len(numbers):
            name = "unknown" if role == "unk" else "padding" if role == "pad" else role
            listed.append(field(f"tokenizer.ggml.{name}_token_id", number, UINT32))
    begins = settings.get("add_bos_token")
    if isinstance(begins, bool):
        listed.append(field("tokenizer.ggml.add_bos_token", begins, BOOL))
    return listed
