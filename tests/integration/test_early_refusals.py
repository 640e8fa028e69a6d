"""What is wrong with names and files is said before torch is imported, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.training_runs import write_inputs

CODE = """
import sys
from headstart.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "prompts.jsonl").write_text('{"prompt": "t5"}\n')
    (folder / "bad.json").write_text('[{"name": "a", "overrides": {"los": "kl"}}]')
    (folder / "finished" / "head").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("train model --data none --out run", 1, "none does not exist"),
        ("train none --data data --out run", 1, "none does not exist"),
        ("train model --data data --out run --head none", 1, "none does not exist"),
        ("train model --data data --out finished", 1, "holds a finished run"),
        ("train model --data data --out finished --dry-run", 1, "holds a finished run"),
        ("train model --data data --out run --variants bad.json", 2, "'los' is no option"),
        ("score model --data prompts.jsonl", 1, "distill MODEL --prompts prompts.jsonl --out DATA"),
        ("score model --data none", 1, "none does not exist"),
        ("score model --data data --head data", 1, "data has no config.json"),
        ("vocab model --data none --out v.json", 1, "none does not exist"),
        ("distill model --prompts none --out run", 1, "none cannot be read"),
        ("generate model hi --max-tokens 0", 2, "--max-tokens is 0"),
        ("generate none hi", 1, "none does not exist"),
        ("generate data hi", 1, "data has no config.json"),
        ("generate model hi --head none", 1, "none does not exist"),
        ("serve none --port 0", 1, "none does not exist"),
        ("serve model --port 0 --learn prompts.jsonl", 2, "prompts.jsonl, which is no folder"),
        ("serve model --port 0 --learn data", 2, "data, which holds other files"),
        ("learn run run --model model", 2, "run is not a folder of `headstart serve --learn`"),
        ("learn run run --model none --requests a --answers b", 1, "none does not exist"),
        ("bench run none --out run", 1, "none does not exist"),
        ("bench run model --num-requests 0 --out run", 2, "--num-requests is 0"),
        ("train model --data data --out run --num-depths 0", 2, "--num-depths is 0"),
        ("serve model --port many", 2, "invalid value for '--port': give a whole number"),
        ("serve model --weights foo", 2, "invalid value for '--weights': 'foo' is not one of"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) and " --" in value else "",
)
def test_it_is_said_at_once(inputs: Path, command: str, code: int, said: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE, *command.split()], cwd=inputs, capture_output=True, text=True
    )
    assert result.returncode == code and said in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stdout == ""
    assert not (inputs / "run").exists()
