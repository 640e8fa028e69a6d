"""Ctrl-C before anything is worth keeping: one line, exit 130; and torchrun's refusals, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.commands import headstart
from support.long_runs import unless_long
from support.training_runs import flags, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "prompts.jsonl").write_text('{"prompt": "t5"}\n')
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


def stopped(
    inputs: Path, moment: str, *words: str, sent: int = signal.SIGINT
) -> subprocess.CompletedProcess[str]:
    """The command line, with Ctrl-C pressed at the moment that a function is called."""
    home, name = moment.rsplit(".", 1)
    real = getattr(import_module(home), name)

    def pressed(*arguments: Any, **more: Any) -> Any:
        os.kill(os.getpid(), sent)
        return real(*arguments, **more)

    ours = [m for own, m in sys.modules.items() if own.partition(".")[0] == "headstart"]
    with pytest.MonkeyPatch.context() as patch:
        for importer in ours:
            if getattr(importer, name, None) is real:
                patch.setattr(importer, name, pressed)
        try:
            return headstart(*words, cwd=inputs)
        finally:  # modules that the command was the first to import
            for module in list(sys.modules.values()):
                if getattr(module, name, None) is pressed:
                    setattr(module, name, real)


@pytest.mark.parametrize(
    ("moment", "command"),
    [
        ("headstart.checkpoint.hub.local_folder", "score model --data data"),
        ("headstart.models.build.build", "score model --data data --bandwidth 9"),
        ("headstart.checkpoint.hub.local_folder", "vocab model --data data --out v.json"),
        ("headstart.train.session.load_frozen_model", "train model --data data --out run"),
        ("headstart.distill.run.open_dialogues", "distill model --prompts prompts.jsonl --out d"),
    ],
    ids=["score start", "score", "vocab", "train", "distill"],
)
def test_an_interrupted_command_says_so_and_leaves_nothing(
    inputs: Path, moment: str, command: str
) -> None:
    before = set(inputs.iterdir())
    result = stopped(inputs, moment, *command.split())
    assert result.returncode == 130 and result.stdout == ""
    *said, last = result.stderr.splitlines()
    assert last == "interrupted"
    assert not any("Traceback" in line or "stopping" in line for line in said)
    assert set(inputs.iterdir()) == before


def test_distilling_that_has_no_answer_yet_does_not_claim_to_keep_some(inputs: Path) -> None:
    words = ["distill", "model", "--prompts", "prompts.jsonl", "--out", "d"]
    result = stopped(inputs, "headstart.distill.run._asker", *words)
    assert result.returncode == 130
    assert result.stderr == "interrupted. Run the same command again to go on.\n"
    assert not (inputs / "d").exists()


def test_a_terminated_start_ends_with_the_signals_code(inputs: Path) -> None:
    words = ["train", "model", "--data", "data", "--out", "run", *flags()]
    moment = "headstart.train.session.load_frozen_model"
    assert stopped(inputs, moment, *words, sent=signal.SIGTERM).returncode == 143
    assert not (inputs / "run").exists()


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize(
    ("more", "said"),
    [pytest.param(["--data", "none"], "none does not exist", id="data"),
     pytest.param(["--data", "data", "--num-depths", "0"], "num_depths is 0", id="option")]
    [: unless_long(1, 2)],
)  # fmt: skip
def test_what_all_processes_refuse_is_said_once(inputs: Path, more: list[str], said: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    words = ["-m", "headstart", "train", "model", "--out", "run", *more]
    result = subprocess.run(
        [*launcher, *rendezvous, *words], cwd=inputs, capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1 and said in result.stderr
