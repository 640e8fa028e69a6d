"""Draft vocabularies on disk: our JSON, SGLang's token map, d2t/t2d tensors, d2t in GGUF.

`read` takes all of them, told apart by suffix and content. Ours alone holds several maps and
everything that is known of them; docs/vocabulary.md specifies it. A written file appears whole or
not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headstart.checkpoint.atomic import check_parents, write_failed
from headstart.documents import parse_json
from headstart.errors import ConfigError, DataError, HeadstartError, some
from headstart.files import read_plain, write_whole
from headstart.vocab.draft_vocab import ALL, DraftVocab
from headstart.vocab.engine_files import (
    AGAIN,
    array_file,
    gguf_map,
    has_other_tensors,
    read_array,
    read_gguf_map,
    read_tensors,
    read_token_map,
    tensors,
    token_map,
    whole_numbers,
)

VERSION = 1
# format: suffixes of its files. The first format of a suffix is the one that is taken unasked.
FORMATS = {
    "headstart": (".json",),
    "sglang": (".pt",),
    "d2t": (".safetensors", ".npy"),
    "t2d": (".npy",),
    "gguf": (".gguf",),
}


def format_of(path: Path, given: str | None = None) -> str:
    """The format of a file to write: the given one if the name allows it, else by its name."""
    if given is not None and given not in FORMATS:
        raise ConfigError(f"--format is {given!r}; expected one of {', '.join(FORMATS)}.")
    fitting = [name for name, suffixes in FORMATS.items() if path.suffix in suffixes]
    if given is not None:
        if given not in fitting:
            raise ConfigError(
                f"{path.name} cannot be of format {given}; its name must end in "
                f"{' or '.join(FORMATS[given])}."
            )
        return given
    if not fitting:
        known = ", ".join(dict.fromkeys(s for suffixes in FORMATS.values() for s in suffixes))
        raise ConfigError(f"{path.name}: its name must end in one of {known}.")
    # Trainers that take both arrays look for d2t.npy and t2d.npy.
    return "t2d" if "t2d" in fitting and path.stem.endswith("t2d") else fitting[0]


def check_file_target(path: Path, *, overwrite: bool) -> None:
    """Refuse an existing file, unless it is a draft vocabulary that may be replaced."""
    check_parents(path)
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise DataError(f"{path} exists. Choose another --out, or add --overwrite.")
    try:
        if path.is_symlink():
            raise DataError(f"{path} is a symbolic link")
        read(path)
        if path.suffix in (".safetensors", ".gguf") and has_other_tensors(path):
            raise DataError("it holds other tensors, too")
    except HeadstartError as error:
        raise DataError(
            f"{path} is not a draft vocabulary ({error}), so --overwrite does not replace it. "
            f"Remove it yourself, or choose another --out."
        ) from error


def write(
    vocabs: Sequence[DraftVocab],
    path: Path,
    *,
    format: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write one or, in our own format, several vocabularies."""
    kind = format_of(path, format)
    check_file_target(path, overwrite=overwrite)
    if not vocabs:
        raise DataError(f"no draft vocabulary to write to {path}.")
    if kind == "headstart":
        _install(document(vocabs).encode(), path)
        return
    if len(vocabs) > 1:
        raise ConfigError(
            f"a {path.suffix} file holds one map and there are {len(vocabs)} "
            f"({some(v.name for v in vocabs)}); choose one with --only, or write a .json file."
        )
    if kind == "sglang":
        _install(token_map(vocabs[0]), path)
    elif kind == "gguf":
        _install(gguf_map(vocabs[0]), path)
    elif path.suffix == ".npy":
        _install(array_file(vocabs[0], kind), path)
    else:
        _install(tensors(vocabs[0]), path)


def read(path: Path) -> list[DraftVocab]:
    """The vocabularies of a file in any of the formats, checked as far as they can be alone."""
    readers: dict[str, Callable[[Path], list[DraftVocab]]] = {
        ".json": _read_document, ".pt": read_token_map, ".safetensors": read_tensors,
        ".npy": read_array, ".gguf": read_gguf_map,
    }  # fmt: skip
    if path.suffix not in readers:
        raise DataError(f"{path}: a draft vocabulary's name ends in one of {', '.join(readers)}.")
    if not path.is_file():
        raise DataError(f"{path} is not a file; give a draft vocabulary.")
    try:
        return readers[path.suffix](path)
    except HeadstartError as error:
        raise DataError(f"{path}: {error}") from error


def read_one(path: Path) -> DraftVocab:
    """The only map of a file, else the one over all languages: other engines draft from one."""
    found = read(path)
    chosen = found if len(found) == 1 else [vocab for vocab in found if vocab.name == ALL]
    if not chosen:
        raise ConfigError(
            f"{path} holds {len(found)} draft vocabularies ({some(v.name for v in found)}); "
            f"expected one, or {ALL!r} among them. Write one with `headstart vocab --from FILE "
            "--only NAME`."
        )
    return chosen[0]


def _install(data: bytes, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise write_failed(path, error) from error


def document(vocabs: Sequence[DraftVocab]) -> str:
    """Vocabularies as our own format has them."""
    for field in ("vocab_size", "tokenizer_sha"):
        if len({getattr(vocab, field) for vocab in vocabs}) > 1:
            raise DataError(f"maps of one file must have the same {field}; write several files.")
    names = [vocab.name for vocab in vocabs]
    if len(set(names)) < len(names):
        raise DataError(f"two maps of one file have the same name ({some(names)}); rename one.")
    maps = {
        vocab.name: {
            "language": vocab.language,
            "coverage": vocab.coverage,
            "forced": vocab.forced,
            "ids": list(vocab.ids),
        }
        for vocab in vocabs
    }
    head = {
        "draft_vocab_version": VERSION,
        "tokenizer_sha": vocabs[0].tokenizer_sha,
        "vocab_size": vocabs[0].vocab_size,
    }
    return json.dumps({**head, "maps": maps}) + "\n"


def _read_document(path: Path) -> list[DraftVocab]:
    try:
        parsed = parse_json(read_plain(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read as JSON ({error}). {AGAIN}") from error
    version = parsed.get("draft_vocab_version") if isinstance(parsed, dict) else None
    if version is None:
        raise DataError(f"is no draft vocabulary (draft_vocab_version is not in it). {AGAIN}")
    if version != VERSION:
        raise DataError(f"draft_vocab_version is {version!r}; this Headstart reads {VERSION}.")
    size = _field(parsed, "vocab_size", int)
    sha = _field(parsed, "tokenizer_sha", str)
    maps = parsed.get("maps")
    if not isinstance(maps, dict) or not maps:
        raise DataError(f"maps is {repr(maps)[:60]}; expected an object of named maps. {AGAIN}")
    result = []
    for name, entry in maps.items():
        if not isinstance(entry, dict):
            raise DataError(f"map {name!r} is {repr(entry)[:60]}; expected an object. {AGAIN}")
        coverage = _field(entry, "coverage", (int, float))
        if coverage is not None and not 0 <= coverage <= 1:
            raise DataError(
                f"coverage of map {name!r} is {str(coverage)[:60]}; expected 0 to 1. {AGAIN}"
            )
        result.append(
            DraftVocab.of(
                whole_numbers(entry.get("ids"), name), name=name, vocab_size=size,
                tokenizer_sha=sha, language=_field(entry, "language", str) or "",
                coverage=None if coverage is None else float(coverage),
                forced=_field(entry, "forced", int) or 0,
            )
        )  # fmt: skip
    return result


def _field(document: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = document.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise DataError(f"{name} is {repr(value)[:60]}, which is of the wrong type. {AGAIN}")
    return value
