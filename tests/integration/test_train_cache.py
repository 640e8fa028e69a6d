"""Filling a cache of states: it can be stopped, and goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_data import random_records
from support.training_runs import StopAt, trained, write_inputs

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import DataError
from headstart.train.frozen_model import FrozenModel, load_frozen_model
from headstart.train.packing import pack
from headstart.train.parallel import World
from headstart.train.states.cache import StateCache
from headstart.train.states.header import CacheHeader, read_object
from headstart.train.states.source import InProcess, cached, fingerprint

RECORDS = random_records(20)
TOKENS = sum(len(record.ids) for record in RECORDS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def load(inputs: Path, dtype: str = "float32") -> FrozenModel:
    return load_frozen_model(Checkpoint.open(inputs / "model"), None, device="cpu", dtype=dtype)


def filled(frozen: FrozenModel, folder: Path, **options: Any) -> Any:
    header = CacheHeader(
        trunk_digest="t", tokenizer_sha="k", dataset_fingerprint=fingerprint(RECORDS),
        hidden_kind=frozen.kind, dtype="fp32", hidden_size=frozen.built.config.hidden,
    )  # fmt: skip
    given = {"pack_tokens": 40, "world": World(), "say": lambda text: None, **options}
    return cached(folder, header, frozen, RECORDS, **given)


def test_a_stopped_cache_is_kept_and_gone_on_with(inputs: Path, tmp_path: Path) -> None:
    frozen, said, heard = load(inputs), list[str](), list[tuple[int, int]]()

    def after_three() -> bool:
        return len(heard) >= 3

    with pytest.raises(KeyboardInterrupt):
        filled(
            frozen, tmp_path / "c", is_stopped=after_three, say=said.append,
            progress=lambda done, total: heard.append((done, total)),
        )  # fmt: skip
    assert "records are in" in said[-1] and "run the same command to go on" in said[-1]
    assert not StateCache.is_finished(tmp_path / "c")
    assert len(heard) == 3 and 0 < heard[-1][0] < TOKENS == heard[-1][1]
    stopped_at = heard[-1][0]
    heard.clear()
    source = filled(
        frozen, tmp_path / "c", progress=lambda done, total: heard.append((done, total))
    )
    assert heard[0][0] > stopped_at and heard[-1] == (TOKENS, TOKENS)
    for row in pack(RECORDS, 40):
        torch.testing.assert_close(source.states(row), InProcess(frozen).states(row))


def test_a_run_that_is_stopped_while_it_fills_a_cache_goes_on(inputs: Path, tmp_path: Path) -> None:
    cache, watch = str(tmp_path / "cache"), StopAt(0)
    with pytest.raises(KeyboardInterrupt):
        trained(inputs, tmp_path / "run", watch, cache=cache, epochs=1)
    assert "stopped while caching states: 0 of 46 records" in watch.said[-1]
    assert not (tmp_path / "run").exists()
    assert trained(inputs, tmp_path / "run", cache=cache, epochs=1).is_finished


def test_the_whole_contract_is_stored_and_checked(inputs: Path, tmp_path: Path) -> None:
    frozen = load(inputs)
    filled(frozen, tmp_path / "c")
    stored = read_object(tmp_path / "c" / "header.json")
    assert frozen.built.head is not None
    layout = frozen.built.head.layout
    assert (stored["fuse_order"], stored["recycled_hidden"]) == (
        layout.fuse_order,
        layout.recycled_hidden,
    )
    assert stored["compute_dtype"] == "float32" and stored["template_sha"]
    with pytest.raises(DataError, match="compute_dtype is 'float32', expected 'float64'"):
        filled(load(inputs, "float64"), tmp_path / "c")


def test_another_length_is_called_so(inputs: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    trained(inputs, tmp_path / "run", StopAt(1), cache=cache, epochs=1, max_len=20)
    with pytest.raises(DataError, match=r"cut at another length .20 tokens, now 9: --max-len"):
        trained(inputs, tmp_path / "cut", cache=cache, epochs=1, max_len=9)
