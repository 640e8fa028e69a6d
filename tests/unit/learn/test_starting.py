"""How a learner is set up for the machine that it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.tiny_fixture import Tiny

from headstart.errors import ConfigError, DataError
from headstart.learn.assembly import NOT_LEARNING, learning_options
from headstart.learn.options import LearnOptions
from headstart.learn.starting import is_on, open_folder, read_overrides, start_lines
from headstart.train.options import TrainOptions


@pytest.mark.parametrize(
    ("found", "dtype"),
    [({"avx512_bf16": True}, "bfloat16"), ({"amx_bf16": True}, "bfloat16"), ({}, "float32")],
)
def test_a_cpu_computes_in_what_it_multiplies_fastest(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert learning_options({}, device="cpu", dtype="auto").dtype == dtype
    assert learning_options({"dtype": "float64"}, device="cpu", dtype="auto").dtype == "float64"
    assert learning_options({}, device="cpu", dtype="float32").dtype == "float32"


@pytest.mark.parametrize("name", NOT_LEARNING)
def test_options_that_learning_does_not_use_are_refused(name: str, tmp_path: Path) -> None:
    """Regression: with an average, heads were written that had never learned anything."""
    value = getattr(TrainOptions(), name)  # also where it changes nothing
    with pytest.raises(ConfigError, match=f"option '{name}' of `train` is not used by learning"):
        learning_options({name: value}, device="cpu", dtype="float32")
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"loss": "lk", name: value}))
    with pytest.raises(ConfigError, match=name):
        read_overrides(file)


def test_a_base_that_is_no_dataset_is_refused_before_a_folder_is_made(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Regression: the learner ended with a traceback, and the server went on without it."""
    options = LearnOptions(learn=tmp_path / "learned", learn_base=tmp_path / "none")
    with pytest.raises(DataError, match="none does not exist; expected a dataset"):
        open_folder(options, str(tiny("mimo")), None, device="cpu", dtype="auto")
    assert not list(tmp_path.iterdir())


def test_names_of_one_device() -> None:
    assert is_on("cuda", "cuda:0") and is_on("cpu", "cpu")
    assert not is_on("cuda:1", "cuda") and not is_on("cpu", "cuda:0")


@pytest.mark.parametrize(
    ("device", "shares", "said"),
    [("same", True, "at most 25% of the time while requests run, on same"),
     ("cuda:1", False, "all the time, on cuda:1")],
)  # fmt: skip
def test_the_log_says_when_learning_runs(device: str, shares: bool, said: str) -> None:
    """Regression: a share was named on another device, where nobody keeps to it."""
    options = LearnOptions(learn=Path("learned"), learn_share=0.25, learn_device=device)
    assert said in start_lines(options, (), shares_device=shares)[1]


def test_the_log_says_all_that_is_collected() -> None:
    options = LearnOptions(learn=Path("learned"), learn_gigabytes=2)
    said = "COLLECTED in learned (token ids, and on a CPU the model's states of them; at most 2 GB)"
    assert said in start_lines(options, (), shares_device=True)[0]
