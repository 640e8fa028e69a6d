"""Safetensors files of models with malformed headers: every command that reads them refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.outcome import Outcome, complaint, support

_ENGINE = ("--device", "cpu", "--dtype", "float32", "--kernels", "off", "--kv-bytes", "67108864")
COMMANDS = (
    ("inspect", "model"),
    ("export", "model", "--out", "out"),
    ("stitch", "head", "model", "--out", "out"),
    ("generate", "model", "t1", "--max-tokens", "2", *_ENGINE),
)
Change = Callable[[dict[str, Any], list[str]], Any]


def _field(name: str, value: Any) -> Change:
    return lambda header, names: header[names[0]].update({name: value})


def _same_place(header: dict[str, Any], names: list[str]) -> None:
    header[names[1]] = dict(header[names[0]])


def _reversed(header: dict[str, Any], names: list[str]) -> None:
    header[names[0]]["data_offsets"].reverse()


# What is changed in the header's object.
CHANGES: dict[str, Change] = {
    "an unknown dtype": _field("dtype", "X9"),
    "a dtype that is no text": _field("dtype", [1]),
    "a negative size": _field("shape", [-1, 4]),
    "a shape of more than all memory": _field("shape", [2**40, 2**40]),
    "a shape that is no list": _field("shape", 5),
    "offsets behind the end": _field("data_offsets", [0, 2**60]),
    "offsets below zero": _field("data_offsets", [-8, 8]),
    "offsets that are no whole numbers": _field("data_offsets", [0.5, 1.5]),
    "one offset": _field("data_offsets", [0]),
    "offsets the wrong way round": _reversed,
    "two tensors at one place": _same_place,
    "a hole between tensors": lambda header, names: header.pop(names[1]),
    "a tensor that is no object": lambda header, names: header.update({names[0]: 7}),
    "metadata that is a list": lambda header, names: header.update({"__metadata__": [1]}),
}


def malformed(data: bytes) -> dict[str, bytes]:
    """By name, a whole file in each of the ways in which its header can be wrong."""
    end = 8 + int.from_bytes(data[:8], "little")
    header, rest = data[8:end], data[end:]

    def whole(made: bytes, length: int | None = None) -> bytes:
        return (len(made) if length is None else length).to_bytes(8, "little") + made + rest

    twice = header.rstrip()[:-1] + b"," + header.lstrip()[1:]
    files = {
        "an empty file": b"", "seven bytes": data[:7], "a length of zero": whole(b"", 0),
        "a length of 2^63": whole(header, 2**63), "a length behind the end": whole(header, 10**12),
        "no JSON": whole(b"\xff" * 64), "a list": whole(b"[]"), "depth": whole(b"[" * 100_000),
        "each name twice": whole(twice), "half of the data": data[: end + len(rest) // 2],
        "bytes behind the data": data + b"\0" * 64,
    }  # fmt: skip
    for name, change in CHANGES.items():
        document = json.loads(header)
        names = sorted(set(document) - {"__metadata__"}, key=lambda n: document[n]["data_offsets"])
        change(document, names)
        files[name] = whole(json.dumps(document).encode())
    return files


def malformed_headers(template: Path, work: Path) -> Outcome:
    """Each wrong header, in the first file of a model, before each command."""
    outcome, headstart = Outcome("malformed headers"), support("commands").headstart
    data = _weights(template / "models/mimo").read_bytes()
    for what, content in malformed(data).items():
        for words in COMMANDS:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(template / "models/mimo", work / "model")
            shutil.copytree(template / "head", work / "head")
            _weights(work / "model").write_bytes(content)
            before = {path.name for path in work.iterdir()}
            done = headstart(*words, cwd=work)
            outcome.ends["used" if done.returncode == 0 else "refused"] += 1
            wrong = complaint(done.returncode, done.stderr)
            if done.returncode == 0:
                wrong = "was used"
            elif left := {path.name for path in work.iterdir()} - before:
                wrong = f"left {left}"
            if wrong:
                outcome.broken.append(f"{words[0]} of a model with {what}: {wrong}")
    return outcome


def _weights(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]
