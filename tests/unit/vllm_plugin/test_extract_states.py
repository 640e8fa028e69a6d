"""The program that lets vLLM compute states, up to what it asks of vLLM."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.errors import DataError
from headstart.vllm_plugin import extract
from headstart.vllm_plugin.collected import files, read


def test_nothing_but_answers_has_a_name_without_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    out = tmp_path / "out"
    record = {"name": "a", "ids": [1, 2, 3], "num_prompt": 1}
    job = {"model": str(tmp_path), "folder": str(out), "arguments": {}, "records": [record]}
    (tmp_path / "job.json").write_text(json.dumps(job))
    places = []
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def extracted(given: dict[str, Any], records: list[Any]) -> Iterator[tuple[Any, Any]]:
        places.extend(path.name for path in out.iterdir())
        # Regression: an engine in this process never wrote the last states.
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        yield records[0], torch.ones(3, 2)

    monkeypatch.setattr(extract, "_extracted", extracted)
    monkeypatch.setattr(sys, "argv", ["extract", str(tmp_path / "job.json")])
    extract.main()
    (place,) = places
    assert place.startswith(".extracted-")
    (path,) = files(out)
    assert read(path).kind == "before_final_norm"


def test_a_file_that_is_never_written_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "_WRITING_SECONDS", 0.05)
    path = tmp_path / "0.safetensors"
    extract.until_written(path)  # a release without locks
    lock = tmp_path / "0.safetensors.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"has not written 0\.safetensors within"):
            extract.until_written(path)
    extract.until_written(path)
