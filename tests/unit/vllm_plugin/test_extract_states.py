"""The program that lets vLLM compute states, up to what it asks of vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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

    def extracted(given: dict[str, Any], records: list[Any]) -> Iterator[tuple[Any, Any]]:
        places.extend(path.name for path in out.iterdir())
        yield records[0], torch.ones(3, 2)

    monkeypatch.setattr(extract, "_extracted", extracted)
    monkeypatch.setattr(sys, "argv", ["extract", str(tmp_path / "job.json")])
    extract.main()
    (place,) = places
    assert place.startswith(".extracted-")
    (path,) = files(out)
    assert read(path).kind == "before_final_norm"
