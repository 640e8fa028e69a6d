"""A learner takes its memory before a server sizes K/V, and no weight is another one for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.learning_runs import learnable_heads, prompt_of
from support.swapped_heads import Heads

from headstart.checkpoint.reader import Checkpoint
from headstart.data.records import Record
from headstart.learn import memory, process, training
from headstart.learn.assembly import learning_options
from headstart.learn.memory import blank_row, held_bytes, state_bytes
from headstart.learn.process import Task
from headstart.learn.texts import Text
from headstart.learn.training import HeadTraining

SIZES = {"pack_tokens": 100, "max_len": 40}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return learnable_heads(tmp_path_factory.mktemp("learning"))


@pytest.fixture
def make(heads: Heads) -> Callable[..., HeadTraining]:
    def made(**given: Any) -> HeadTraining:
        options = learning_options({**SIZES, **given}, device="cpu", dtype="float32")
        return HeadTraining(Checkpoint.open(heads.model), heads.weak, options, state_bytes=1 << 20)

    return made


def weights(own: HeadTraining) -> list[bytes]:
    """Of all copies of the head, bit by bit."""
    copies = (own._learner, own._mean, own._serving, own._between)
    return [
        parameter.detach().numpy().tobytes()
        for copy in copies
        for parameter in copy.parameters.values()
    ]


def moments(own: HeadTraining) -> list[torch.Tensor]:
    learner = own._learner
    state = learner.optimizer.state
    kept = [state.get(parameter, {}) for parameter in learner.parameters.values()]
    return [each for own in kept for each in own.values() if each.dim()]


def answers() -> list[Record]:
    return [
        Text(id=f"t{number}", prompt=prompt_of(number), answer=prompt_of(number + 1), kind="a",
             time=0.0, finish_reason="length").record()
        for number in range(12)
    ]  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("blank_step", [False, True])
def test_moments_are_there_and_weights_and_steps_are_as_without(
    optimizer: str, blank_step: bool, make: Callable[..., HeadTraining],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows: list[int] = []
    learn = training.learn

    def watched(learner: Any, batch: Any, counts: Any) -> Any:
        rows.append(len(batch.ids))
        return learn(learner, batch, counts)

    own, control = make(optimizer=optimizer), make(optimizer=optimizer)
    before = weights(own)
    assert not moments(own)
    monkeypatch.setattr(training, "learn", watched)
    said = own.take_memory(blank_step=blank_step)
    assert rows == ([80] if blank_step else []), "texts of the longest length, as many as fit"
    assert weights(own) == before == weights(control)
    per_weight = 2 if optimizer == "adamw" else 1
    assert len(moments(own)) >= per_weight * len(own._learner.parameters)
    assert not any(bool(each.any()) for each in moments(own))
    assert own.num_steps == 0 and own._source.num_bytes == 0, "nothing of it is remembered"
    assert said["bytes"] > 0 and said["to_come"] == 1 << 20
    losses = [each.step(answers(), 1e-3) for each in (own, control)]
    assert losses[0] == losses[1] and weights(own) == weights(control) != before
    assert own.take_memory(blank_step=False)["to_come"] == (1 << 20) - own._source.num_bytes


def test_a_blank_row_is_as_full_as_rows_get() -> None:
    assert blank_row(100, 40).documents.lengths == (40, 40)
    assert blank_row(40, 40).documents.lengths == (40,)
    assert blank_row(30, 40).documents.lengths == (30,)
    assert bool(blank_row(30, 40).mask.all())


def test_states_get_a_gigabyte_or_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for free, wanted in ((8 << 30, 1 << 30), (2 << 30, 1 << 29)):
        monkeypatch.setattr(memory, "available_bytes", lambda free=free: free)
        assert state_bytes(torch.device("cpu")) == wanted
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    assert state_bytes(torch.device("cuda")) == 1 << 28


def test_on_a_gpu_its_own_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the memory of the process beside it was said, which no K/V is taken from."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 77)
    assert held_bytes(torch.device("cuda", 1)) == 77 != held_bytes(torch.device("cpu"))


@pytest.mark.parametrize("blank_step", [False, True])
def test_a_learner_says_that_it_is_ready_when_it_has_its_memory(
    blank_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.learn import assembly

    class Ended(Exception):
        pass

    happened: list[Any] = []

    class Loop:
        def take_memory(self, *, blank_step: bool) -> dict[str, int]:
            happened.append(("memory", blank_step))
            return {"bytes": 3, "to_come": 4}

        def turn(self) -> bool:
            raise Ended

    monkeypatch.setattr(assembly, "make_loop", lambda task, tell: Loop())
    monkeypatch.setattr(process, "tell", lambda name, facts: happened.append((name, facts)))
    task = Task(folder=str(Path()), model="", head=None, base=None, device="cpu", dtype="auto",
                max_bytes=1, overrides={}, gives_way=False,
                makes_blank_step=blank_step)  # fmt: skip
    commands: Any = SimpleNamespace(get_nowait=lambda: (_ for _ in ()).throw(process.Empty))
    with pytest.raises(Ended):
        process._learn(task, commands)
    assert happened == [("memory", blank_step), ("ready", {"bytes": 3, "to_come": 4})]
