"""Draft vocabularies on disk: every format there and back, and everything that is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headstart.errors import ConfigError, DataError, WriteFailed
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import check_file_target, format_of, read, write

IDS = (0, 1, 5, 9, 20)
EN = DraftVocab(
    ids=IDS, name="en", language="en", vocab_size=32, tokenizer_sha="abc", coverage=0.5, forced=2
)
ZH = DraftVocab(
    ids=(0, 1, 30), name="zh", language="zh", vocab_size=32, tokenizer_sha="abc", forced=2
)


def test_our_format_keeps_several_maps_and_everything_about_them(tmp_path: Path) -> None:
    write([EN, ZH], tmp_path / "v.json")
    assert read(tmp_path / "v.json") == [EN, ZH]
    document = json.loads((tmp_path / "v.json").read_text())
    assert (document["draft_vocab_version"], document["vocab_size"]) == (1, 32)
    assert list(document["maps"]) == ["en", "zh"]


def test_sglang_gets_a_plain_list_of_ints(tmp_path: Path) -> None:
    write([EN], tmp_path / "v.pt")
    found = torch.load(tmp_path / "v.pt", weights_only=True)
    assert found == list(IDS) and all(type(token) is int for token in found)
    assert [v.ids for v in read(tmp_path / "v.pt")] == [IDS]


def test_a_token_map_may_be_a_tensor_in_any_order(tmp_path: Path) -> None:
    torch.save(torch.tensor([9, 5, 0, 20, 1]), tmp_path / "v.pt")
    assert read(tmp_path / "v.pt")[0].ids == IDS


def test_safetensors_hold_offsets_and_flags(tmp_path: Path) -> None:
    write([EN], tmp_path / "v.safetensors")
    tensors = load_file(tmp_path / "v.safetensors")
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    assert tensors["d2t"].tolist() == [0, 0, 3, 6, 16]
    assert (tensors["t2d"].shape, tensors["t2d"].sum()) == ((32,), 5)
    (found,) = read(tmp_path / "v.safetensors")
    known = (found.ids, found.name, found.language, found.vocab_size, found.tokenizer_sha)
    assert known == (IDS, "en", "en", 32, "abc")


@pytest.mark.parametrize(("name", "size"), [("d2t.npy", None), ("t2d.npy", 32)])
def test_arrays_are_told_apart_by_name_and_content(
    name: str, size: int | None, tmp_path: Path
) -> None:
    write([EN], tmp_path / name)
    assert np.load(tmp_path / name).dtype == (np.bool_ if size else np.int64)
    (found,) = read(tmp_path / name)
    assert (found.ids, found.vocab_size) == (IDS, size)


def test_maps_are_found_among_the_tensors_of_a_draft_model(tmp_path: Path) -> None:
    tensors = {"d2t": np.array([0, 0, 3], dtype=np.int64), "fc.weight": np.zeros((2, 2))}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read(tmp_path / "model.safetensors")[0].ids == (0, 1, 5)
    with pytest.raises(DataError, match="it holds other tensors, too"):
        check_file_target(tmp_path / "model.safetensors", overwrite=True)


def test_names_and_formats_must_agree() -> None:
    assert format_of(Path("x.npy"), "t2d") == "t2d"
    with pytest.raises(ConfigError, match=r"cannot be of format sglang; its name must end in \.pt"):
        format_of(Path("x.json"), "sglang")
    with pytest.raises(ConfigError, match=r"must end in one of \.json, \.pt, \.safetensors"):
        format_of(Path("x.txt"))
    with pytest.raises(ConfigError, match="--format is 'vllm'; expected one of headstart, sglang"):
        format_of(Path("x.json"), "vllm")


def test_an_existing_file_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "v.json"
    write([EN], out)
    with pytest.raises(DataError, match=r"exists\. Choose another --out, or add --overwrite"):
        write([ZH], out)
    assert read(out) == [EN]
    write([ZH], out, overwrite=True)
    assert read(out) == [ZH]
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 8}')
    with pytest.raises(DataError, match=r"is not a draft vocabulary .* does not replace it"):
        write([ZH], config, overwrite=True)
    assert config.read_text() == '{"hidden_size": 8}'


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteFailed, match="no space left"):
        write([EN], tmp_path / "v.json")
    assert list(tmp_path.iterdir()) == []


def test_formats_with_one_map_refuse_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.pt file holds one map and there are 2 \(en, zh\)"):
        write([EN, ZH], tmp_path / "v.pt")


def test_flags_need_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="t2d needs the size"):
        write([DraftVocab(ids=IDS)], tmp_path / "t2d.npy")


def _json(**fields: Any) -> str:
    usual = {"draft_vocab_version": 1, "vocab_size": 32, "maps": {"en": {"ids": [1, 2]}}}
    return json.dumps({**usual, **fields})


BROKEN: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "cannot be read as JSON"),
    "another document": ("[1, 2]", "is no draft vocabulary"),
    "newer": (_json(draft_vocab_version=2), "draft_vocab_version is 2; this Headstart reads 1"),
    "no maps": (_json(maps={}), "expected an object of named maps"),
    "size of a wrong type": (_json(vocab_size="32"), "vocab_size is '32', which is of the wrong"),
    "empty": (_json(maps={"en": {"ids": []}}), "'en' is empty"),
    "outside": (_json(maps={"en": {"ids": [1, 32]}}), "'en' holds 32; the model has tokens 0 to"),
    "twice": (_json(maps={"en": {"ids": [4, 4]}}), "'en' holds 4 more than once"),
    "not ints": (_json(maps={"en": {"ids": [1, "x"]}}), "'en': ids are not a list of whole"),
    "true": (_json(maps={"en": {"ids": [True]}}), "'en': ids are not a list of whole"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_document_is_refused_with_its_name(case: str, tmp_path: Path) -> None:
    text, said = BROKEN[case]
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(DataError, match=f"v.json: .*{said}"):
        read(tmp_path / "v.json")


def test_broken_files_of_engines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "v.pt").write_bytes(b"no pickle")
    with pytest.raises(DataError, match=r"v\.pt: cannot be read as a token map"):
        read(tmp_path / "v.pt")
    torch.save({"a": 1}, tmp_path / "w.pt")
    with pytest.raises(DataError, match="not a list of whole numbers"):
        read(tmp_path / "w.pt")
    (tmp_path / "v.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        read(tmp_path / "v.safetensors")
    save_file({"x": np.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(DataError, match="neither d2t nor t2d"):
        read(tmp_path / "w.safetensors")
    both = {"d2t": np.array([0, 1], np.int64), "t2d": np.array([True, True, False])}
    save_file(both, tmp_path / "x.safetensors")
    with pytest.raises(DataError, match="d2t and t2d name different tokens"):
        read(tmp_path / "x.safetensors")
    np.save(tmp_path / "v.npy", np.zeros(4))
    with pytest.raises(DataError, match="expected one row of offsets"):
        read(tmp_path / "v.npy")
    (tmp_path / "w.npy").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read as an array"):
        read(tmp_path / "w.npy")
    with pytest.raises(DataError, match="is not a file"):
        read(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"ends in one of \.json"):
        read(tmp_path / "v.txt")


@pytest.mark.parametrize("coverage", [10**400, -1, 1.5], ids=["huge", "negative", "above"])
def test_a_coverage_that_is_no_share_is_refused(tmp_path: Path, coverage: float) -> None:
    write([EN], tmp_path / "v.json")
    document = json.loads((tmp_path / "v.json").read_text())
    document["maps"]["en"]["coverage"] = coverage
    (tmp_path / "v.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"coverage of map 'en' is .*; expected 0 to 1"):
        read(tmp_path / "v.json")
