"""Every file that a command reads, made odd in every way: the commands, the files, the oddities.

A `Reader` is a command with the files that it reads (odd_readers.py has them all). A trial
replaces one of the files; the command must do its work, or refuse in one line and leave no half of
a result. What a server answers is among the files: `answers/` holds the bodies that it gives.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commands import headstart

DEEP = b"[" * 100_000
WHOLE: dict[str, bytes] = {
    "empty": b"", "zeros": b"\0" * 64, "null": b"null", "list": b"[]", "text": b'"x"',
    "number": b"1", "half": b"{", "object": b"{}", "nan": b'{"a": NaN}', "deep": DEEP,
    "deep object": b'{"a":' * 50_000, "nested": b'{"a":' * 500 + b"1" + b"}" * 500,
    "no text": b"\xff\xfe", "byte order": b"\xef\xbb\xbf{}", "lone surrogate": b'{"\\ud800": 1}',
    "huge number": b'{"a": 1' + b"0" * 5000 + b"}", "newlines": b"\n\n\n",
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 10**25, 0.5, float("nan"), float("inf"), "", "x", "\ud800",
    "a\nb", [], [1], ["x"], [None], {}, {"a": 1}, [[]], {"": {}},
)  # fmt: skip
# Parts of a tokenizer.json that load, and make `tokenizers` panic when they are used.
PANICS: dict[str, Any] = {
    "pre_tokenizer": {"type": "FixedLength", "length": 0},
    "normalizer": {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "b"},
    "post_processor": {
        "type": "TemplateProcessing", "special_tokens": {},
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    },
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""},
        {"type": "Strip", "content": "a", "start": 0, "stop": 5},
    ]},
}  # fmt: skip
_NUM_DAMAGED = 40  # random places per file
_MOST_NAMES = 100  # of an object; of longer ones (vocabularies) the first two are tried


@dataclass(frozen=True)
class Reader:
    """A command, and the files that it reads: paths inside of its folder."""

    name: str
    files: tuple[str, ...]
    words: Callable[[], list[str]]


def places(document: Any) -> list[tuple[Any, ...]]:
    """Paths to every value of a document; of lists and long objects only to the first."""
    found: list[tuple[Any, ...]] = []
    if isinstance(document, dict):
        names = list(document)
        keys: list[Any] = names if len(names) <= _MOST_NAMES else names[:2]
    elif isinstance(document, list):
        keys = list(range(min(1, len(document))))
    else:
        return found
    for key in keys:
        found.append((key,))
        found += [(key, *rest) for rest in places(document[key])]
    return found


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    made = copy.deepcopy(document)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


def removed(document: Any, place: tuple[Any, ...]) -> Any:
    made = copy.deepcopy(document)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    return made


def odd_json(document: Any) -> Iterator[tuple[str, bytes]]:
    """The document with each value replaced by each odd one, or left out."""
    for place in places(document):
        where = ".".join(map(str, place))
        yield f"{where} left out", json.dumps(removed(document, place)).encode()
        for value in VALUES:
            made = json.dumps(replaced(document, place, value))
            yield f"{where} = {json.dumps(value)[:30]}", made.encode()


def odd_lines(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A file of JSON lines with its first or its last line made odd."""
    lines = data.splitlines()
    for at in {0, len(lines) - 1}:
        for label, line in odd_json(json.loads(lines[at])):
            yield f"line {at + 1}: {label}", b"\n".join([*lines[:at], line, *lines[at + 1 :], b""])
        for label, content in WHOLE.items():
            made = b"\n".join([*lines[:at], content, *lines[at + 1 :], b""])
            yield f"line {at + 1} is {label}", made


def odd_header(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A safetensors file with an odd header."""
    end = 8 + int.from_bytes(data[:8], "little")
    for label, made in odd_json(json.loads(data[8:end])):
        yield f"header: {label}", len(made).to_bytes(8, "little") + made + data[end:]
    for label, made in WHOLE.items():
        yield f"header is {label}", len(made).to_bytes(8, "little") + made + data[end:]


def odd_bytes(data: bytes, draw: random.Random, number: int) -> Iterator[tuple[str, bytes]]:
    """Bytes cut off, changed or inserted at random places, more of them near the beginning."""
    for _ in range(number):
        at = int(draw.random() ** 3 * len(data))
        new = bytes(draw.randrange(256) for _ in range(draw.choice([1, 4, 30])))
        kind = draw.choice(["cut", "changed", "inserted"])
        rest = {"cut": b"", "changed": data[at + len(new) :], "inserted": data[at:]}[kind]
        yield f"{kind} at {at}", data[:at] + (b"" if kind == "cut" else new) + rest


def oddities(path: Path, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """All that is tried with one file."""
    data = path.read_bytes()
    yield from WHOLE.items()
    if path.name == "tokenizer.json":
        for part, value in PANICS.items():
            yield f"{part} panics", json.dumps({**json.loads(data), part: value}).encode()
    if path.suffix == ".json":
        yield from odd_json(json.loads(data))
    elif path.suffix == ".jsonl":
        yield from odd_lines(data)
    elif path.suffix == ".safetensors":
        yield from odd_header(data)
    yield from odd_bytes(data, draw, _NUM_DAMAGED)


def chosen(path: Path, number: int, seed: int) -> list[tuple[str, bytes]]:
    """So many of a file's oddities, each as likely as any other."""
    draw = random.Random(f"{path.name} {seed}")
    kept: list[tuple[str, bytes]] = []
    for at, trial in enumerate(oddities(path, draw)):
        if at < number:
            kept.append(trial)
        elif (place := draw.randrange(at + 1)) < number:
            kept[place] = trial
    return kept


USED, REFUSED = 0, (1, 2)  # exit codes


def attempt(reader: Reader, template: Path, work: Path, file: str, content: bytes) -> int:
    """Run a reader in a fresh copy of its folder with one file replaced; returns the exit code."""
    if work.exists():
        shutil.rmtree(work)
    shutil.copytree(template, work, copy_function=_copy)
    (work / file).unlink()
    (work / file).write_bytes(content)
    done = headstart(*reader.words(), cwd=work, HEADSTART_API_KEY="")
    said = done.stderr
    assert "Traceback" not in said, said
    assert done.returncode in (USED, *REFUSED), (done.returncode, said)
    if done.returncode:
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, said
        assert len(errors[0]) < 2500, said
    assert not [path for path in work.rglob("*") if ".partial" in path.name], "half a result"
    return done.returncode


def _copy(source: str, target: str) -> None:
    """Weights of models are only read: a second name for them takes no time."""
    if Path(source).suffix == ".safetensors" and "models" in Path(source).parts:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)
