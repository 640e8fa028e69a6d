"""The state cache on disk: round trips, precision, refusals and damage."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_records import HEADER, check_whole, fill, states
from support.training_data import record

from headstart.data.records import Record
from headstart.errors import ConfigError, DataError
from headstart.train.states.cache import StateCache
from headstart.train.states.header import check_free_space, check_header, disk_bill
from headstart.train.states.source import fingerprint
from headstart.train.states.writer import CacheWriter


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_come_back_as_they_were_stored(tmp_path: Path, dtype: str) -> None:
    header = replace(HEADER, dtype=dtype)
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    fill(tmp_path / "c", header)
    cache = StateCache.open(tmp_path / "c", header)
    for number in range(12):
        found = cache.states(f"r{number}", stored)
        assert found.dtype == stored and torch.equal(found, states(number).to(stored))
        assert cache.num_tokens(f"r{number}") == len(states(number))
    assert len(list((tmp_path / "c").glob("shard-*.bin"))) > 2
    assert {path.name for path in (tmp_path / "c").iterdir() if path.suffix != ".bin"} == {
        "header.json",
        "index.json",
    }


def test_reading_copies_nothing_and_cannot_change_the_file(tmp_path: Path) -> None:
    fill(tmp_path)
    cache = StateCache.open(tmp_path, HEADER)
    first, again = cache.states("r0", torch.float32), cache.states("r0", torch.float32)
    assert first.data_ptr() == again.data_ptr()
    first.zero_()
    check_whole(tmp_path)


def test_fp8_error_is_bounded_for_each_token_by_its_own_scale(tmp_path: Path) -> None:
    header = replace(HEADER, dtype="fp8")
    fill(tmp_path, header)
    cache = StateCache.open(tmp_path, header)
    for number in range(12):
        expected, found = states(number), cache.states(f"r{number}", torch.float32)
        largest = expected.abs().amax(-1, keepdim=True)
        # Three bits behind the point: half a step of 1/8; below 2^-6 of 448, steps are even.
        bound = expected.abs() / 16 + largest / 448 * 2**-10
        assert ((found - expected).abs() <= bound * 1.0001).all()
        # Control: one scale for the whole record would lose its small tokens.
        coarse = (expected / expected.abs().max() * 448).to(torch.float8_e4m3fn).float()
        coarse *= expected.abs().max() / 448
        assert not ((coarse - expected).abs() <= bound * 1.0001).all()
    assert cache.states("r1").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_odd_sizes_lie_where_they_can_be_read(tmp_path: Path, dtype: str) -> None:
    header = replace(HEADER, dtype=dtype, hidden_size=5)
    rows = [torch.full((length, 5), float(length)) for length in (1, 3, 7)]
    with CacheWriter(tmp_path, header) as writer:
        for number, record in enumerate(rows):
            writer.add(str(number), record)
        writer.finish()
    cache = StateCache.open(tmp_path, header)
    for number, record in enumerate(rows):
        assert torch.equal(cache.states(str(number)), record.bfloat16())


def test_fp8_keeps_a_token_of_zeros(tmp_path: Path) -> None:
    header = replace(HEADER, dtype="fp8")
    with CacheWriter(tmp_path, header) as writer:
        writer.add("zeros", torch.zeros(2, 24, dtype=torch.bfloat16))
        writer.finish()
    assert StateCache.open(tmp_path, header).states("zeros").eq(0).all()


@pytest.mark.parametrize("file", ["shard-00001.bin", "index.json", "header.json"])
def test_a_corrupt_byte_is_found(tmp_path: Path, file: str) -> None:
    fill(tmp_path)
    data = bytearray((tmp_path / file).read_bytes())
    at = len(data) // 2
    data[at] = ord("7") if data[at] != ord("7") else ord("8")
    (tmp_path / file).write_bytes(data)
    with pytest.raises(DataError, match=r"damaged|expected"):
        StateCache.open(tmp_path, HEADER)


def test_a_shard_of_another_length_is_found_even_without_checksums(tmp_path: Path) -> None:
    fill(tmp_path)
    os.truncate(tmp_path / "shard-00001.bin", 100)
    with pytest.raises(DataError, match="has 100 bytes, expected"):
        StateCache.open(tmp_path, HEADER, verify=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trunk_digest", "trunk-b"),
        ("tokenizer_sha", "tok-b"),
        ("template_sha", "template-b"),
        ("dataset_fingerprint", "data-b"),
        ("hidden_kind", "before_final_norm"),
        ("fuse_order", "hidden_first"),
        ("recycled_hidden", "before_out_norm"),
        ("compute_dtype", "bfloat16"),
        ("dtype", "bf16"),
        ("hidden_size", 48),
        ("format_version", 1),
    ],
)
def test_a_mismatch_is_refused_with_the_field_and_both_values(
    tmp_path: Path, field: str, value: Any
) -> None:
    fill(tmp_path)
    expected = replace(HEADER, **{field: value})
    here = getattr(HEADER, field)
    with pytest.raises(
        DataError, match=rf"--cache .*\({field} is {here!r}, expected {value!r}\)$"
    ) as told:
        StateCache.open(tmp_path, expected)
    assert "\n" not in str(told.value)
    (tmp_path / "index.json").unlink()
    with pytest.raises(DataError, match=f"{field} is"):  # nor may a writer go on with it
        CacheWriter(tmp_path, expected)


def test_fields_that_are_not_known_yet_are_not_compared(tmp_path: Path) -> None:
    fill(tmp_path)
    check_header(tmp_path, replace(HEADER, compute_dtype=None, fuse_order=None))
    with pytest.raises(DataError, match="trunk_digest"):
        check_header(tmp_path, replace(HEADER, compute_dtype=None, trunk_digest="b"))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([record("a", range(9), 2), record("b", range(6), 2)], "cut at another length .*12.*9"),
        ([record("a", range(12), 2), record("c", range(6), 2)], "belong to another dataset"),
        ([record("a", range(1, 13), 2), record("b", range(6), 2)], "with another text"),
    ],
    ids=["max-len", "data", "text"],
)
def test_a_refusal_says_whether_texts_or_lengths_have_changed(
    now: list[Record], said: str, tmp_path: Path
) -> None:
    before = [record("a", range(12), 2), record("b", range(6), 2)]
    fill(tmp_path, replace(HEADER, dataset_fingerprint=fingerprint(before)))
    check_header(tmp_path, replace(HEADER, dataset_fingerprint=fingerprint(before)))
    with pytest.raises(DataError, match=said):
        check_header(tmp_path, replace(HEADER, dataset_fingerprint=fingerprint(now)))


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, HEADER), pytest.raises(DataError, match="another process"):
        CacheWriter(tmp_path, HEADER)
    CacheWriter(tmp_path, HEADER).close()


def test_a_writer_touches_no_folder_but_a_cache(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds thesis.txt and no header.json"):
        CacheWriter(tmp_path, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(DataError, match="cannot be written"):
        CacheWriter(tmp_path / "thesis.txt" / "cache", HEADER)
    fill(tmp_path / "done")
    with pytest.raises(DataError, match="holds a finished state cache"):
        CacheWriter(tmp_path / "done", HEADER)


def test_records_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, HEADER) as writer:
        writer.add("a", states(1))
        with pytest.raises(DataError, match=r"record a is in .* already"):
            writer.add("a", states(1))
        with pytest.raises(DataError, match=r"states \(3, 8\); expected .*24"):
            writer.add("b", torch.zeros(3, 8))
        with pytest.raises(DataError, match="not finite"):
            writer.add("c", torch.full((1, 24), torch.nan))
        writer.finish()
    cache = StateCache.open(tmp_path, HEADER)
    assert list(cache) == ["a"]
    with pytest.raises(DataError, match="has no states of record b; it holds 1: a"):
        cache.states("b")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_the_disk_bill_is_what_the_shards_weigh(tmp_path: Path, dtype: str) -> None:
    header = replace(HEADER, dtype=dtype)
    fill(tmp_path, header)
    weight = sum(path.stat().st_size for path in tmp_path.glob("shard-*.bin"))
    num_tokens = sum(len(states(number)) for number in range(12))
    assert disk_bill(num_tokens, 24, dtype) == weight
    assert disk_bill(1, 4096, "bf16") == 8192 and disk_bill(1, 4096, "fp8") == 4100


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    check_free_space(tmp_path / "new" / "cache", 1)
    with pytest.raises(DataError, match=r"needs \d+.* GiB .* free\. Give a --cache folder"):
        check_free_space(tmp_path / "new" / "cache", 2**60)
    assert not (tmp_path / "new").exists()


def test_unknown_dtypes_and_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="cache dtype is 'int8'; expected one of bf16"):
        replace(HEADER, dtype="int8")
    with pytest.raises(ConfigError, match="hidden_kind is 'logits'"):
        replace(HEADER, hidden_kind="logits")
