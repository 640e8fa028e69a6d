"""What is carried to a machine without a network, and home from it, in pieces of limited size.

    python recipes/demo_head/carry.py pack work/passages.jsonl.xz model.gguf ... --out carry
    cat carry/piece-* | tar x                                                     # there

`pack` makes one archive of the paths and cuts it. What comes home is packed by `wide.py --home`:
the text that was made, as chunks of records in archives text-N.tar, as much of it as the limits
allow; the tables and small files; the head. `unpack_text` makes the dataset of the chunks again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

from headstart.data.dataset import Dataset, Header
from headstart.data.records import Record, pack, unpack

PIECE_MB = 40.0
_CHUNKS = 60  # of the text; each is compressed by itself
_FILE_BYTES, _TEXT_BYTES, _TEXT_FILES = 15 << 20, 50 << 20, 4
_WINDOW = 1 << 23  # bytes that compressing looks back
_HEADER = "header.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["pack"])
    parser.add_argument("paths", nargs="+", type=Path, help="files and folders, by their names")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--piece-mb", type=float, default=PIECE_MB, help="largest piece")
    arguments = parser.parse_args()
    pieces = cut(arguments.paths, arguments.out, int(arguments.piece_mb * 1e6))
    for piece in pieces:
        print(f"{piece}: {piece.stat().st_size / 1e6:.1f} MB")


def cut(paths: list[Path], out: Path, size: int) -> list[Path]:
    """An archive of the paths, each under its own name, in pieces of at most `size` bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("piece-*"):
        old.unlink()
    pieces: list[Path] = []
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w") as archive:
            for path in paths:
                archive.add(path, path.name)
        whole.seek(0)
        while data := whole.read(size):
            pieces.append(out / f"piece-{len(pieces):02d}")
            pieces[-1].write_bytes(data)
    return pieces


def pack_text(answers: Path, out: Path) -> str:
    """Training and validation records as archives; says which share of them found room.

    Answers to one prompt stay together, where they compress best; which chunk they go to is decided
    by a hash, so every chunk is a fair sample of the whole.
    """
    data = Dataset.open(answers)
    records = data.records("train")
    out.mkdir(parents=True, exist_ok=True)
    chunks: list[list[Record]] = [[] for _ in range(_CHUNKS)]
    for record in records:
        first = record.prompt_id.partition("-then-")[0]
        chunks[int(hashlib.sha256(first.encode()).hexdigest()[:8], 16) % _CHUNKS].append(record)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compressing releases the interpreter's lock
        packed = list(pool.map(compressed, chunks))
    files: list[list[tuple[str, bytes]]] = [[] for _ in range(_TEXT_FILES)]
    heldout = compressed(data.records("heldout"))
    files[0] = [(_HEADER, (answers / "dataset.json").read_bytes()), ("heldout.xz", heldout)]
    used = [sum(len(part) for _, part in file) for file in files]
    kept = 0
    for number, part in enumerate(packed):
        place = min(range(_TEXT_FILES), key=lambda i: used[i])
        if used[place] + len(part) > _FILE_BYTES or sum(used) + len(part) > _TEXT_BYTES:
            break
        files[place].append((f"chunk-{number:03d}.xz", part))
        used[place] += len(part)
        kept += 1
    for place, file in enumerate(files):
        _write_tar(out / f"text-{place}.tar", file)
    tokens, size = sum(len(record.ids) for record in records), sum(map(len, packed))
    return (
        f"{kept} of {_CHUNKS} chunks, {sum(used) / 1e6:.1f} MB; all {tokens} tokens would be "
        f"{size / 1e6:.1f} MB, {8 * size / max(1, tokens):.1f} bits each"
    )


def compressed(records: list[Record]) -> bytes:
    """Token ids are numbers of four bytes: places count by four."""
    data = pack(records, "")
    window = min(_WINDOW, max(1 << 16, len(data)))
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": window, "lc": 0, "lp": 2, "pb": 2}
    return lzma.compress(data, format=lzma.FORMAT_XZ, filters=[lzma2])


def _write_tar(path: Path, files: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, BytesIO(data))


def unpack_text(folder: Path) -> tuple[Header, dict[str, list[Record]]]:
    """Header and records by split, of the archives in `folder`."""
    found = dict(_members(folder))
    header = Header(**json.loads(found.pop(_HEADER)))
    records = {name: _records(data, header) for name, data in sorted(found.items())}
    heldout = records.pop("heldout.xz")
    train = sorted((r for part in records.values() for r in part), key=lambda record: record.id)
    return header, {"train": train, "heldout": heldout}


def _members(folder: Path) -> Iterator[tuple[str, bytes]]:
    paths = sorted(folder.glob("text-*.tar"))
    if not paths:
        raise SystemExit(f"{folder} has no text-*.tar; give the folder that --home filled.")
    for path in paths:
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def _records(data: bytes, header: Header) -> list[Record]:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(lzma.decompress(data))
        file.flush()
        records, _ = unpack(Path(file.name), vocab_size=header.vocab_size, sampling=header.sampling)
    return records


def pack_small(work: Path, out: Path) -> None:
    """Tables, metrics and questions: results.tar.gz. And the answers that were scored."""
    out.mkdir(parents=True, exist_ok=True)
    small = work / "small"
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir()
    for pattern in ("*.md", "curve.json", "look.json", "scores.jsonl", "draft_vocab.json",
                    "times.jsonl", "questions.jsonl", "sources.json"):  # fmt: skip
        for path in work.glob(pattern):
            shutil.copy(path, small)
    for run in work.glob("*/metrics.jsonl"):
        shutil.copy(run, small / f"{run.parent.name}-metrics.jsonl")
    if (work / "evaluation").is_dir():
        shutil.copytree(work / "evaluation", small / "evaluation")
    shutil.make_archive(str(out / "results"), "gztar", small)
    shutil.rmtree(small)


if __name__ == "__main__":
    main()
