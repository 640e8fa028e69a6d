"""A dataset folder: what a model wrote, as token ids ready for training and scoring.

docs/data-format.md is the specification. The derived files (train, heldout, dataset.json) are
written whole and renamed, dataset.json last; all three carry one stamp, a hash of what the dataset
is, so that files of two are never read together, and writing the same again changes nothing. A
folder with only a journal is a dataset that is not finished.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from headstart.checkpoint.config import read_json_object
from headstart.data.journal import JOURNAL_NAME
from headstart.data.records import Record, pack, unpack
from headstart.documents import misfit
from headstart.errors import BadConfig, DataError, WriteFailed
from headstart.files import write_whole

HEADER_NAME = "dataset.json"
FORMAT_VERSION = 1
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, kw_only=True)
class Header:
    """dataset.json: the model that answered, how it was asked, what was kept."""

    headstart_dataset: int = FORMAT_VERSION
    origin: str  # engine, server, import or collected
    trunk_digest: str
    tokenizer_sha: str
    template_sha: str
    vocab_size: int
    hidden_size: int
    sampling: dict[str, Any]
    seed: int | None
    chat_template_kwargs: dict[str, Any]
    engine: dict[str, str] = field(default_factory=dict)  # its dtype, weights and device
    counts: dict[str, dict[str, int]]  # split -> records, prompts, tokens, answer_tokens
    report: dict[str, Any]  # what was dropped, and why
    stamp: str = ""

    def check(
        self, *, tokenizer_sha: str, vocab_size: int, trunk_digest: str | None = None
    ) -> list[str]:
        """DataError if the ids mean something else to this model; returns lesser warnings."""
        if (self.tokenizer_sha, self.vocab_size) != (tokenizer_sha, vocab_size):
            raise DataError(
                f"the dataset has token ids of another tokenizer ({self.vocab_size} tokens, sha "
                f"{self.tokenizer_sha[:12]}; the model has {vocab_size}, {tokenizer_sha[:12]}). "
                "Make a dataset with this model (headstart distill)."
            )
        if trunk_digest is not None and trunk_digest != self.trunk_digest:
            return [
                "the dataset was written by another trunk (its digest differs): acceptance on this "
                "model's own text may be lower. Distill with this model to be sure."
            ]
        return []


@dataclass(frozen=True)
class Dataset:
    """An opened dataset folder; records are read when asked for."""

    folder: Path
    header: Header

    @classmethod
    def open(cls, folder: str | Path) -> Dataset:
        """Read and check the header; DataError says what the folder is instead."""
        path = Path(folder)
        if path.is_file():
            raise DataError(
                f"{path} is a file; expected the folder of a dataset. If it holds prompts, let the "
                f"model answer them: headstart distill MODEL --prompts "
                f"{shlex.quote(str(path))} --out DATA"
            )
        if not path.is_dir():
            raise DataError(
                f"{path} does not exist; expected a dataset. Make one: headstart distill MODEL "
                f"--prompts FILE --out {shlex.quote(str(path))}"
            )
        if not (path / HEADER_NAME).is_file():
            if (path / JOURNAL_NAME).is_file():
                raise DataError(
                    f"{path} is a dataset that is not finished (a journal and no {HEADER_NAME}). "
                    "Run the same `headstart distill` command again to go on."
                )
            raise DataError(
                f"{path} has no {HEADER_NAME}; expected a folder that `headstart distill` wrote."
            )
        return cls(path, _header(path / HEADER_NAME))

    def records(self, split: Split) -> list[Record]:
        """The records of one split, in the order in which they were asked for."""
        if split not in SPLITS:
            raise DataError(f"split is {split!r}; expected {' or '.join(SPLITS)}.")
        path = self.folder / f"{split}.safetensors"
        records, stamp = unpack(
            path, vocab_size=self.header.vocab_size, sampling=self.header.sampling
        )
        if stamp != self.header.stamp:
            raise DataError(
                f"{path} belongs to another writing than {HEADER_NAME} beside it; the run was "
                "stopped while writing. Run the same `headstart distill` command again."
            )
        return records


def write_dataset(folder: Path, header: Header, splits: dict[Split, Sequence[Record]]) -> Header:
    """Write the derived files; each appears whole, and readers see old or new or neither."""
    stamp = _stamp(header, splits)
    header = replace(
        header, stamp=stamp, counts={name: _count(splits.get(name, ())) for name in SPLITS}
    )
    try:
        for name in SPLITS:
            data = pack(splits.get(name, ()), stamp)
            write_whole(folder / f"{name}.safetensors", data, is_only_writer=True)
        text = json.dumps(asdict(header), indent=2, ensure_ascii=False) + "\n"
        data = text.encode("utf-8", errors="backslashreplace")
        write_whole(folder / HEADER_NAME, data, is_only_writer=True)
    except OSError as error:
        raise WriteFailed(
            f"{folder} could not be written ({error.strerror}); the answers are kept in "
            f"{JOURNAL_NAME}. Make room and run the same command again."
        ) from error
    return header


def _stamp(header: Header, splits: dict[Split, Sequence[Record]]) -> str:
    """Digest of the records and of the header, without its report on the last run."""
    own = {k: v for k, v in asdict(header).items() if k not in ("stamp", "counts", "report")}
    found = hashlib.sha256(json.dumps(own, sort_keys=True).encode())
    for name in SPLITS:
        found.update(hashlib.sha256(pack(splits.get(name, ()), "")).digest())
    return found.hexdigest()[:32]


def _count(records: Sequence[Record]) -> dict[str, int]:
    return {
        "records": len(records),
        "prompts": len({record.prompt_id for record in records}),
        "tokens": sum(len(record.ids) for record in records),
        "answer_tokens": sum(int(record.mask.sum()) for record in records),
    }


def _header(path: Path) -> Header:
    try:
        found = read_json_object(path, "Make the dataset again: headstart distill.")
    except BadConfig as error:
        raise DataError(str(error)) from error
    version = found.get("headstart_dataset")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has headstart_dataset {version!r}; this version reads {FORMAT_VERSION}. Make "
            "the dataset again, or update Headstart."
        )
    names = {each.name for each in fields(Header)}
    if set(found) != names:
        raise DataError(
            f"{path} lacks or has a strange {', '.join(sorted(set(found) ^ names))}; expected what "
            "`headstart distill` wrote. Run it again."
        )
    if wrong := misfit(Header, found):
        raise DataError(f"{path}: {wrong}. Run `headstart distill` again.")
    return Header(**found)
