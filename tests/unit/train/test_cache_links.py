"""An untrusted state cache: names and links in it never lead to other files."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
from support.cache_records import HEADER, SHARD_BYTES, check_whole, fill, states

from headstart.errors import DataError
from headstart.train.states.cache import StateCache
from headstart.train.states.header import HEADER_NAME, INDEX_NAME, JOURNAL_NAME, canonical
from headstart.train.states.journal import shard_name
from headstart.train.states.writer import CacheWriter


def unfinished(folder: Path) -> None:
    with CacheWriter(folder, HEADER, shard_bytes=SHARD_BYTES) as writer:
        for number in range(4):
            writer.add(f"r{number}", states(number))


@pytest.mark.parametrize(
    "name", ["../outside.bin", "sub/../../outside.bin", "/outside.bin", "other.bin", None, 3]
)
def test_an_index_names_shards_of_its_own_folder_only(tmp_path: Path, name: object) -> None:
    fill(tmp_path / "cache")
    path = tmp_path / "cache" / INDEX_NAME
    (tmp_path / "cache" / shard_name(0)).rename(tmp_path / "outside.bin")
    document = json.loads(path.read_bytes())
    del document["crc32"]
    document["shards"][0]["file"] = name
    path.write_text(json.dumps({**document, "crc32": zlib.crc32(canonical(document))}))
    with pytest.raises(DataError, match=r"names shard .*, expected shard-00000\.bin"):
        StateCache.open(tmp_path / "cache", HEADER)


def test_a_shard_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    fill(tmp_path / "cache")
    shard = tmp_path / "cache" / shard_name(1)
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    for verify in (True, False):
        with pytest.raises(DataError, match=r"shard-00001\.bin is a link"):
            StateCache.open(tmp_path / "cache", HEADER, verify=verify)


def test_what_a_link_leads_to_is_not_written(tmp_path: Path) -> None:
    folder, precious = tmp_path / "cache", tmp_path / "precious"
    unfinished(folder)
    last = max(folder.glob("shard-*.bin"))
    last.rename(precious)
    last.symlink_to(precious)
    before = precious.read_bytes()
    assert len(before) < SHARD_BYTES  # more would be appended
    with pytest.raises(DataError, match=f"{last.name} is a link; expected a file of the cache"):
        fill(folder)
    assert precious.read_bytes() == before


def test_a_partial_file_that_is_a_link_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f".{HEADER_NAME}.partial").symlink_to(precious)
    fill(tmp_path / "cache")
    check_whole(tmp_path / "cache")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("shard", ["../x", -1, 1.5, None])
def test_a_journal_with_other_shards_counts_up_to_there(tmp_path: Path, shard: object) -> None:
    unfinished(tmp_path)
    path = tmp_path / JOURNAL_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["shard"] = shard
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "shard-new.bin").touch()
    fill(tmp_path)
    (tmp_path / "shard-new.bin").unlink()
    check_whole(tmp_path)
