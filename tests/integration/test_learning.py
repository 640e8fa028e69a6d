"""A server that learns: a weak head becomes a better one, and nothing that fails stops serving.

The server runs in a thread of the test, the learner is the real process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learning_runs import enough_prompts, learnable_heads, prompt_of
from support.long_runs import long_only
from support.server_runs import HTTP
from support.server_threads import Running, wait_until
from support.swapped_heads import Heads

from headstart.checkpoint.reader import Checkpoint
from headstart.engine.engine import Engine
from headstart.learn import collector
from headstart.learn.folder import Folder, forget
from headstart.learn.heads import LearnedHeads
from headstart.learn.options import LearnOptions, key_name
from headstart.learn.starting import open_folder
from headstart.learn.state_files import StoredStates
from headstart.learn.supervisor import Learning
from headstart.learn.texts import Text
from headstart.server.lifecycle import Serving
from headstart.server.options import ServerOptions, listen
from headstart.train.frozen_model import load_frozen_model
from headstart.train.packing import Row
from headstart.train.states.source import InProcess


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_WRITE_SECONDS", 0.1)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return learnable_heads(tmp_path_factory.mktemp("learning"))


@dataclass
class Learner:
    """A running server with its learning."""

    server: Running
    learning: Learning
    folder: Folder
    key: str | None = None

    def ask(self, prompt: list[int], **changes: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True,
                "ignore_eos": True, **changes}  # fmt: skip
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        answer = HTTP.post(f"{self.server.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def ask_many(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(self.ask, prompts))
        return [answer["choices"][0]["token_ids"] for answer in found]

    def wait(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        wait_until(condition, seconds)


@contextmanager
def learner(
    heads: Heads, folder: Path, *, keys: list[str] | None = None, not_for: list[str] | None = None,
    **task_changes: Any,
) -> Iterator[Learner]:  # fmt: skip
    options = LearnOptions(learn=folder, learn_share=0.5, learn_not_for=not_for)
    task = replace(
        open_folder(options, str(heads.model), heads.weak, device="cpu", dtype="auto"),
        overrides={"learning_rate": 3e-3, "batch_tokens": 256}, gives_way=False, warm_up=1,
        **{"least_seconds": 0.2, **task_changes},
    )  # fmt: skip
    learning = Learning(options, lambda path: replace(task, head=str(path)))
    learning.start()

    def make() -> Engine:
        learning.wait_for_memory()
        return Engine(heads.model, learning.serving_path, speculate=3, threads=1, kernels="off")

    own = ServerOptions(port=0, api_key=keys)
    server = Running(Serving("small", own, make, listen(own), learning=learning))
    wait_until(lambda: server.status() == "ready", 90)
    try:
        yield Learner(server, learning, Folder(folder), keys[0] if keys else None)
    finally:
        for _ in range(2):
            if server._thread.is_alive():
                server.serving.signal(signal.SIGTERM)
        server._thread.join(15)


def test_a_weak_head_learns_is_swapped_and_is_the_one_of_a_restart(
    heads: Heads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headstart.learn")
    folder = tmp_path / "learn"
    with learner(
        heads, folder, keys=["secret-a", "secret-b"], not_for=[key_name("secret-b")]
    ) as own:
        first = own.learning.serving_name
        declined, unstored, excluded = (prompt_of(number) for number in (1000, 1002, 1001))
        own.ask(declined, headstart={"learn": False})
        own.ask(unstored, store=False)
        own.key = "secret-b"
        own.ask(excluded)
        own.key = "secret-a"
        prompts = enough_prompts()
        before = own.ask_many(prompts)
        own.wait(lambda: own.learning.numbers["swaps"] > 0)
        assert first == "start" and own.learning.serving_name != "start"
        assert own.ask_many(prompts) == before, "texts never depend on a head"
        page = HTTP.get(f"{own.server.url}/metrics").text
        assert "headstart:learn_swaps_total" in page and "headstart:learn_collected_texts" in page
        name = own.learning.serving_name
        assert (own.learning.heads.path(name) / "config.json").is_file()
    found = LearnedHeads(Folder(folder))
    assert found.serving is not None
    promise = found.serving.promise
    assert promise["recent"]["new"] > promise["recent"]["old"]
    assert any("serves instead of start" in record.getMessage() for record in caplog.records)
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "stopped" and status["collected"]["texts"] >= len(before)
    lines = [
        json.loads(line)
        for path in (folder / "texts").iterdir()
        for line in path.read_text().splitlines()
    ]
    kept = [line["answer"] for line in lines]
    assert sorted(map(tuple, kept[: len(before)])) == sorted(map(tuple, before))
    asked = [line["prompt"] for line in lines]
    assert prompts[0] in asked and excluded not in asked
    assert declined not in asked and unstored not in asked
    check_states(heads, Folder(folder), lines)
    assert "secret" not in "".join(path.read_text() for path in folder.glob("*.*"))
    again = Learning(LearnOptions(learn=folder), lambda path: pytest.fail("not started"))
    assert again.serving_name == found.serving.name
    again.close()
    assert "learned head" in forget(Folder(folder), heads=False)
    assert not list(again.folder.states.iterdir())


def check_states(heads: Heads, folder: Folder, lines: Sequence[dict[str, Any]]) -> None:
    """Those that the server had, of kept texts alone: the trunk's for these tokens."""
    model = load_frozen_model(Checkpoint.open(heads.model), None, device="cpu", dtype="float32")
    stored = StoredStates(folder.states, model.kind, model.trunk.config.hidden)
    texts = [Text(**line) for line in lines]
    first = texts[0].record()
    found = stored.find(first)
    assert found is not None
    wanted = InProcess(model).states(Row((first,)))
    torch.testing.assert_close(found[:-1].float(), wanted[:-1], rtol=0.02, atol=0.02)
    # A prompt that comes again may find its beginning cached: then its text has none.
    with_states = {text.id for text in texts if stored.has(text.record())}
    assert with_states == set(stored._entries) and len(with_states) > len(texts) / 3


@long_only
def test_a_head_that_is_worse_than_promised_is_taken_back(heads: Heads, tmp_path: Path) -> None:
    # Time to be judged before another head follows.
    with learner(heads, tmp_path / "learn", fault="worse", least_seconds=5.0) as own:
        prompts = [prompt_of(number) for number in range(90)]  # enough to judge by
        before = own.ask_many(prompts)
        own.wait(lambda: own.learning.numbers["swaps"] > 0)
        assert own.ask_many(prompts) == before
        # Until a head has answered enough to be judged: others may follow it quickly.
        own.wait(lambda: own.ask_many(prompts) == before and own.learning.numbers["rollbacks"] > 0)
        taken = [head for head in own.learning.heads.heads if head.state == "rolled back"]
        assert taken and "promised" in taken[0].note
        assert own.ask_many(prompts[:8]) == before[:8]


@long_only
def test_a_step_that_diverges_and_a_learner_that_is_killed_leave_the_head(
    heads: Heads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headstart.learn")
    with learner(heads, tmp_path / "learn", fault="nan") as own:
        prompts = enough_prompts()
        before = own.ask_many(prompts)
        own.wait(lambda: own.learning.numbers["failures"] > 0)
        assert own.learning.serving_name == "start"
        assert own.learning._child is not None
        os.kill(own.learning._child.pid, signal.SIGKILL)
        own.wait(lambda: "is started again" in caplog.text)
        assert own.ask_many(prompts[:8]) == before[:8]
    assert "not a finite" in caplog.text or "the loss is nan" in caplog.text


def test_nothing_of_learning_is_there_without_the_option(heads: Heads) -> None:
    before = {thread.name for thread in threading.enumerate()}
    own = ServerOptions(port=0)
    make = partial(Engine, heads.model, heads.weak, speculate=3, kernels="off")
    server = Running(Serving("small", own, make, listen(own)))
    try:
        wait_until(lambda: server.status() == "ready", 90)
        names = {thread.name for thread in threading.enumerate()} - before
        assert not [name for name in names if name.startswith("learn")]
        assert server.serving.state.worker.on_result is None
        assert "headstart:learn_" not in HTTP.get(f"{server.url}/metrics").text
    finally:
        for _ in range(2):
            server.serving.signal(signal.SIGTERM)
        server._thread.join(15)
