"""A command allows Python code only where all of it is what Headstart wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch_examples import report

from headstart.families.mimo import MIMO
from headstart.launch import LaunchOptions, build
from headstart.launch.command import EngineCommand
from headstart.launch.own_code import has_own_code_only

OURS = "configuration_mimo.py"
THEIRS = '{"auto_map": {"AutoTokenizer": ["someone/else--tokenizer.Own", null]}}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": dict(MIMO.auto_map)}))
    (tmp_path / OURS).write_text(MIMO.remote_code[OURS])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def launched(model: Path, options: LaunchOptions | None = None) -> EngineCommand:
    config = json.loads((model / "config.json").read_text())
    return build(
        "vllm", report("mimo", path=model, config=config), options or LaunchOptions(), "0.33.0"
    )


def test_the_command_for_our_own_code_is_complete(model: Path) -> None:
    command = launched(model)
    assert "--trust-remote-code" in command.argv and not command.code_files
    assert not any("--trust-remote-code" in warning for warning in command.warnings)


def test_another_head_may_bring_code_of_its_own(model: Path, tmp_path: Path) -> None:
    command = launched(model, LaunchOptions(head=tmp_path / "elsewhere"))
    assert "--trust-remote-code" not in command.argv and command.code_files == (OURS,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (OURS, MIMO.remote_code[OURS] + "import os\n"),
        ("modeling.py", ""),
        ("config.json", json.dumps({"auto_map": {**MIMO.auto_map, "AutoModel": "a--b.C"}})),
        ("config.json", json.dumps({"auto_map": dict(MIMO.auto_map), "text_config": THEIRS})[:-2]),
        ("tokenizer_config.json", THEIRS),
        ("tokenizer_config.json", THEIRS.replace("auto_map", "auto\\u005fmap")),
        ("processor_config.json", json.dumps({"image_processor": json.loads(THEIRS)})),
    ],
    ids=["changed", "another file", "map", "broken", "tokenizer", "escaped", "nested"],
)
def test_any_other_code_is_foreign(model: Path, name: str, text: str) -> None:
    assert has_own_code_only(model, MIMO)
    (model / name).write_text(text)
    assert not has_own_code_only(model, MIMO)
