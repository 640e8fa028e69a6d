"""Training on states that another engine computed, and datasets of what vLLM collected."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support.commands import headstart
from support.long_runs import unless_long
from support.training_runs import QUICK, flags, metrics, trained, write_inputs

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.data.records import Record
from headstart.errors import ConfigError, DataError
from headstart.heads.digest import trunk_digest
from headstart.models.build import build
from headstart.models.documents import Documents
from headstart.models.unroll import StateKind, trunk_states
from headstart.train.options import TrainOptions
from headstart.train.states.elsewhere import extracted_name, missing
from headstart.vllm_plugin.collected import Collected, write


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("states"))


def records_of(data: Path) -> list[Record]:
    opened = Dataset.open(data)
    return opened.records("train") + opened.records("heldout")


def digest_of(model: Path) -> str:
    return trunk_digest(Checkpoint.open(model))


def fill(model: Path, records: list[Record], folder: Path, kind: StateKind) -> Path:
    """What another engine would have given: our own trunk's states."""
    folder.mkdir()
    built = build(Checkpoint.open(model), device="cpu", dtype="float32")
    trunk = digest_of(model)
    for record in records:
        ids = torch.from_numpy(record.ids.copy())
        with torch.no_grad():
            states = trunk_states(built.trunk, ids.long(), Documents((len(ids),)), kind)
        assert kind != "before_hc_head"
        found = Collected(ids, states, record.num_prompt, kind)
        write(folder, extracted_name(record, trunk), found)
    return folder


@pytest.mark.parametrize(
    "kind", unless_long(["after_final_norm"], ["before_final_norm", "after_final_norm"])
)
def test_states_from_elsewhere_train_as_computed_ones_do(
    inputs: Path, tmp_path: Path, kind: StateKind
) -> None:
    folder = fill(inputs / "model", records_of(inputs / "data"), tmp_path / "states", kind)
    trained(inputs, tmp_path / "own")
    trained(inputs, tmp_path / "other", states_from=str(folder))
    own, other = metrics(tmp_path / "own"), metrics(tmp_path / "other")
    assert len(own) == len(other) > 0
    for one, two in zip(own, other, strict=True):
        assert one.keys() == two.keys()
        numbers = {name: value for name, value in one.items() if isinstance(value, float)}
        assert {name: two[name] for name in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)


def test_states_of_other_records_are_refused(inputs: Path, tmp_path: Path) -> None:
    records = records_of(inputs / "data")
    folder = fill(inputs / "model", records[:-2], tmp_path / "states", "after_final_norm")
    with pytest.raises(DataError, match="lacks the states of 2 of 46 records"):
        trained(inputs, tmp_path / "run", states_from=str(folder))
    trunk = digest_of(inputs / "model")
    second = (folder / f"{extracted_name(records[1], trunk)}.safetensors").read_bytes()
    for record in (records[0], *records[-2:]):
        (folder / f"{extracted_name(record, trunk)}.safetensors").write_bytes(second)
    with pytest.raises(DataError, match="states of another text than record"):
        trained(inputs, tmp_path / "run", states_from=str(folder))
    with pytest.raises(ConfigError, match="cache and states_from are both given"):
        TrainOptions(**{**QUICK, "cache": "a", "states_from": "b"})


STAND_IN = """
import json, os, sys
job = json.load(open(sys.argv[-1]))
packages = os.listdir(os.environ["PYTHONPATH"].split(os.pathsep)[0])
print(json.dumps([job["arguments"], packages]), file=open({seen!r}, "a"))
from pathlib import Path
for record in job["records"]:
    name = record["name"] + ".safetensors"
    Path(job["folder"]).mkdir(exist_ok=True)
    Path(job["folder"], name).write_bytes(Path({states!r}, name).read_bytes())
"""


FAILED = """(Worker pid=2) ERROR [executor.py:1] RuntimeError: no pinned memory
(EngineCore pid=1) ERROR [core.py:2] RuntimeError: Worker failed 'no pinned memory'
Traceback (most recent call last):
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def test_vllm_is_asked_for_them_in_its_own_environment(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter that gives states stands in for the one that has vLLM."""
    records = records_of(inputs / "data")
    states = fill(inputs / "model", records, tmp_path / "states", "before_final_norm")
    seen, program = tmp_path / "seen", tmp_path / "program.py"
    program.write_text(STAND_IN.format(seen=str(seen), states=str(states)))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", str(python))
    monkeypatch.setenv("HEADSTART_VLLM_ARGS", '{"tensor_parallel_size": 8}')
    trained(inputs, tmp_path / "run", states_from="vllm", epochs=1)
    assert json.loads(seen.read_text()) == [{"tensor_parallel_size": 8}, ["headstart"]]
    assert not missing(tmp_path / "run-states", records, digest_of(inputs / "model"))
    trained(inputs, tmp_path / "run", states_from="vllm", epochs=1, overwrite=True)
    assert len(seen.read_text().splitlines()) == 1  # they are there
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="which does not run"):
        trained(inputs, tmp_path / "again", states_from="vllm")
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", "/bin/false")
    with pytest.raises(DataError, match="vLLM did not give the states"):
        trained(inputs, tmp_path / "again", states_from="vllm")
    # Regression: the end of vLLM's log alone says only that one of its processes died.
    program.write_text(f"import sys\nsys.exit({FAILED!r})\n")
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", str(python))
    with pytest.raises(DataError, match=r"exit 1: RuntimeError: Worker failed .no pinned memory."):
        trained(inputs, tmp_path / "again", states_from="vllm")
    monkeypatch.setenv("HEADSTART_VLLM_ARGS", "[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        trained(inputs, tmp_path / "again", states_from="vllm")


def test_collected_answers_become_a_dataset_that_is_trained_on(
    inputs: Path, tmp_path: Path
) -> None:
    model, folder = inputs / "model", tmp_path / "collected"
    fill(model, records_of(inputs / "data"), folder, "after_final_norm")
    for number, path in enumerate(sorted(folder.iterdir())):  # as our worker calls them
        path.rename(folder / f"0123456789ab-{number:08d}.safetensors")
    words = ("--prompts", str(folder), "--import", "--min-answer-tokens", "1", "--heldout", "0.2")
    done = headstart("distill", str(model), *words, "--out", str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    header = Dataset.open(tmp_path / "data").header
    assert header.origin == "collected"
    assert header.counts["train"]["records"] > 20
    words = ("--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"))
    given = flags(states_from=str(folder), epochs=1)
    done = headstart("train", str(model), *words, *given)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "head" / "head.safetensors").exists()
    again = headstart("distill", str(model), "--prompts", str(tmp_path / "run"), "--import",
                      "--out", str(tmp_path / "none"))  # fmt: skip
    assert "holds no collected answer" in again.stderr
