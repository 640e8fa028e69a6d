"""A dataset folder: what is written comes back, and what is not whole is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headstart.data.dataset import Dataset, Header, write_dataset
from headstart.data.records import Record
from headstart.errors import DataError, WriteFailed

SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9}


def header() -> Header:
    return Header(
        origin="engine", trunk_digest="d", tokenizer_sha="t" * 64, template_sha="c", vocab_size=64,
        hidden_size=8, sampling=SAMPLING, seed=1, chat_template_kwargs={}, counts={}, report={},
    )  # fmt: skip


def record(number: int, length: int) -> Record:
    ids = np.arange(length, dtype=np.int32) + number
    return Record(
        id=f"p{number}/t0/s0", prompt_id=f"p{number}", category="caf\u00e9", turn=0, sample=0,
        ids=ids, mask=np.arange(length) >= 2, seed=(1 << 63) - number, sampling=SAMPLING,
        finish_reason="stop", exact_ids=True, num_prompt=2,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [record(number, 4 + number) for number in range(3)]
    write_dataset(tmp_path, header(), {"train": records[:2], "heldout": records[2:]})
    return tmp_path


def change(path: Path, **tensors: Any) -> None:
    """Another file with the same stamp."""
    stamp = json.loads((path.parent / "dataset.json").read_text())["stamp"]
    save_file({**load_file(path), **tensors}, path, metadata={"stamp": stamp})


def test_records_come_back_as_they_were(folder: Path) -> None:
    dataset = Dataset.open(folder)
    first, second = dataset.records("train")
    (third,) = dataset.records("heldout")
    for made, found in zip(
        (record(i, 4 + i) for i in range(3)), (first, second, third), strict=True
    ):
        assert found.ids.dtype == np.int32
        assert found.mask.dtype == bool
        assert np.array_equal(found.ids, made.ids)
        assert np.array_equal(found.mask, made.mask)
        assert {k: v for k, v in vars(found).items() if k not in ("ids", "mask")} == {
            k: v for k, v in vars(made).items() if k not in ("ids", "mask")
        }
    counts = {"records": 2, "prompts": 2, "tokens": 9, "answer_tokens": 5}
    assert dataset.header.counts["train"] == counts


def test_the_file_is_as_the_specification_says(folder: Path) -> None:
    stored = load_file(folder / "train.safetensors")
    assert stored["ids"].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert stored["mask"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert stored["offsets"].tolist() == [0, 4, 9]
    rows = [json.loads(line) for line in stored["rows"].tobytes().decode().splitlines()]
    assert [row["id"] for row in rows] == ["p0/t0/s0", "p1/t0/s0"]


def test_a_split_may_be_empty(tmp_path: Path) -> None:
    write_dataset(tmp_path, header(), {"train": [record(0, 4)]})
    assert Dataset.open(tmp_path).records("heldout") == []


def test_only_a_journal_is_an_unfinished_dataset(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"not finished .* command again to go on"):
        Dataset.open(tmp_path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no dataset\.json"):
        Dataset.open(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        Dataset.open(tmp_path / "nothing")


def test_files_of_two_writings_are_not_mixed(folder: Path) -> None:
    old = (folder / "train.safetensors").read_bytes()
    write_dataset(folder, header(), {"train": [record(5, 6)]})
    (folder / "train.safetensors").write_bytes(old)
    with pytest.raises(DataError, match="belongs to another writing"):
        Dataset.open(folder).records("train")


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"ids": np.array([0, 1, 2, 3, 1, 2, 3, 4, 64], np.int32)}, "ids from 0 to 64 of 64"),
        ({"mask": np.zeros(3, np.uint8)}, "9 ids and 3 mask values"),
        ({"offsets": np.array([0, 4, 8], np.int64)}, "offsets that do not cut"),
        ({"offsets": np.array([0, 4, 4, 9], np.int64)}, "offsets that do not cut"),
        ({"offsets": np.array([0, 9], np.int64)}, "2 rows and 1 records"),
        ({"ids": np.zeros(9, np.int64)}, "no vector `ids` of int32"),
        ({"rows": np.frombuffer(b"{}\n{}\n", np.uint8)}, "missing or strange fields"),
        ({"rows": np.frombuffer(b"{\n", np.uint8)}, "not JSON"),
    ],
    ids=["id outside", "short mask", "offsets end early", "empty record", "rows too many", "dtype",
         "row fields", "row text"],
)  # fmt: skip
def test_a_damaged_file_is_refused(tensors: dict[str, Any], found: str, folder: Path) -> None:
    change(folder / "train.safetensors", **tensors)
    with pytest.raises(DataError, match=found):
        Dataset.open(folder).records("train")


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "train.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="cannot be read"):
        Dataset.open(folder).records("train")


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"headstart_dataset": 9}, "has headstart_dataset 9"), ({"more": 1}, "strange more")],
    ids=["version", "field"],
)
def test_another_header_is_refused(fields: dict[str, int], found: str, folder: Path) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(DataError, match=found):
        Dataset.open(folder)


def test_a_failed_writing_leaves_the_old_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(WriteFailed, match=r"answers are kept in journal\.jsonl"):
        write_dataset(folder, header(), {"train": [record(7, 5)]})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_model_with_another_tokenizer_is_refused(folder: Path) -> None:
    own = Dataset.open(folder).header
    assert own.check(tokenizer_sha="t" * 64, vocab_size=64, trunk_digest="d") == []
    (warning,) = own.check(tokenizer_sha="t" * 64, vocab_size=64, trunk_digest="other")
    assert "another trunk" in warning
    with pytest.raises(DataError, match="token ids of another tokenizer"):
        own.check(tokenizer_sha="u" * 64, vocab_size=64)
    with pytest.raises(DataError, match="token ids of another tokenizer"):
        own.check(tokenizer_sha="t" * 64, vocab_size=65)


def test_the_stamp_is_of_the_content(tmp_path: Path) -> None:
    """A new one each time made a training run refuse data that had not changed."""

    def stamp(name: str, **changes: Any) -> str:
        (tmp_path / name).mkdir()
        own = replace(header(), **{k: v for k, v in changes.items() if k != "records"})
        records = changes.get("records", [record(0, 4), record(1, 5)])
        return write_dataset(tmp_path / name, own, {"train": records}).stamp

    first = stamp("a")
    assert first == stamp("b", report={"refused": 1}), "the report is of one run"
    moved = write_dataset(tmp_path, header(), {"heldout": [record(0, 4), record(1, 5)]}).stamp
    others = [stamp("c", seed=2), stamp("d", records=[record(0, 4)]), moved]
    assert len({first, *others}) == 4
