"""What `demo` stands for on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headstart.cli.demo_defaults import is_demo, with_shipped_vocab
from headstart.demo.shipped import shipped_vocab
from headstart.engine.options import EngineOptions


@pytest.mark.parametrize(
    ("model", "head", "options", "vocab"),
    [("demo", None, {}, str(shipped_vocab())), ("demo", None, {"speculate": 0}, None),
     ("demo", Path("other"), {}, None), ("demo", None, {"draft_vocab": "own.json"}, "own.json"),
     ("made", None, {}, None)],
    ids=["as shipped", "no drafts", "another head", "another vocabulary", "another model"],
)  # fmt: skip
def test_only_the_demos_own_head_drafts_with_its_vocabulary(
    model: str, head: Path | None, options: dict[str, Any], vocab: str | None
) -> None:
    given = EngineOptions(**options)
    assert with_shipped_vocab(model, head, given).draft_vocab == vocab


def test_a_folder_of_that_name_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_demo("demo") and not is_demo(None)
    (tmp_path / "demo").mkdir()
    assert not is_demo("demo")
