"""A learning server that is killed at any stage, or whose disk is full: the next start goes on.

Each starts two servers and two learners, so they run in `make test-long` alone: on 2026-11-19 all
seven stages and the full disk passed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from support.learning_runs import enough_prompts, learnable_heads
from support.long_runs import long_only
from support.server_runs import HTTP, Server, running
from support.server_threads import wait_until
from support.swapped_heads import Heads

from headstart.checkpoint.reader import Checkpoint
from headstart.learn.appending import size_of
from headstart.learn.folder import STATES, Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.state_files import SERVED, StoredStates
from headstart.learn.store import Store
from headstart.train.frozen_model import load_frozen_model
from headstart.train.packing import Row
from headstart.train.states.source import InProcess

EAGER = Path(__file__).parents[1] / "support" / "scripts" / "eager_learner.py"
PROMPTS = enough_prompts()
_SECONDS = 600  # a limit for what hangs


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return learnable_heads(tmp_path_factory.mktemp("learning"))


@pytest.fixture
def flags(heads: Heads, tmp_path: Path) -> list[str]:
    options = tmp_path / "options.json"
    options.write_text(json.dumps({"learning_rate": 3e-3, "batch_tokens": 256}))
    return ["--head", str(heads.weak), "--speculate", "3", "--learn", str(tmp_path / "learn"),
            "--learn-options", str(options)]  # fmt: skip


def learning(heads: Heads, flags: list[str]) -> AbstractContextManager[Server]:
    return running(heads.model, *flags, script=(str(EAGER),))


def answers(server: Server, prompts: Sequence[list[int]]) -> list[list[int]]:
    def ask(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True,
                "ignore_eos": True}  # fmt: skip
        found = HTTP.post(f"{server.url}/v1/completions", json=body)
        assert found.status_code == 200, found.text
        return list(found.json()["choices"][0]["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, prompts))


def said(server: Server, text: str) -> bool:
    return any(text in line for line in server.lines)


def steps(folder: Path) -> int:
    status = folder / "status.json"
    return int(json.loads(status.read_text())["steps"]) if status.is_file() else 0


# What has to be seen before the kill.
STAGES: dict[str, Callable[[Server, Path], bool]] = {
    "answers are held": lambda server, folder: True,
    "texts are written": lambda server, folder: any((folder / "texts").glob("*.jsonl")),
    "states are written": lambda server, folder: any(
        size_of(path) for path in (folder / "states").glob(f"{SERVED}-*{STATES}")
    ),
    "steps": lambda server, folder: steps(folder) > 0,
    "a check": lambda server, folder: said(server, "learning: after"),
    "a head is written": lambda server, folder: any((folder / "heads").glob("*0001*")),
    "a swap": lambda server, folder: said(server, "serves instead of start"),
}


STAGES_OF_WRITING = ("answers are held", "texts are written", "states are written")


def num_with_states(heads: Heads, folder: Folder, store: Store) -> int:
    """Kept texts whose states can be read whole, and are the trunk's."""
    model = load_frozen_model(Checkpoint.open(heads.model), None, device="cpu", dtype="float32")
    stored = StoredStates(folder.states, model.kind, model.trunk.config.hidden)
    count = 0
    for text in store.texts.values():
        record = text.record
        found = stored.find(record)
        if found is not None:
            wanted = InProcess(model).states(Row((record,)))
            torch.testing.assert_close(found[:-1].float(), wanted[:-1], rtol=0.02, atol=0.02)
            count += 1
    return count


@long_only
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_server_starts_again_with_a_head_that_served(
    stage: str, heads: Heads, flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "learn"
    with learning(heads, flags) as server:
        before = answers(server, PROMPTS)
        wait_until(lambda: STAGES[stage](server, folder), _SECONDS)
        server.end(signal.SIGKILL)
    recorded = LearnedHeads(Folder(folder))
    serving = "start" if recorded.serving is None else recorded.serving.name
    store = Store(Folder(folder).texts, 1 << 30)
    kept = len(store.refresh())
    assert kept == len(PROMPTS) or stage in STAGES_OF_WRITING, "seconds are lost"
    with_states = num_with_states(heads, Folder(folder), store)
    assert with_states or stage in ("answers are held", "texts are written")
    with learning(heads, flags) as server:
        assert answers(server, PROMPTS) == before
        wait_until(lambda: said(server, "learner is ready"), _SECONDS)
        assert (folder / "heads" / serving / "config.json").is_file()
        assert server.end() == 0


@long_only
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted")
def test_a_full_disk_costs_texts_and_heads_and_no_answer(
    heads: Heads, flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "learn"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=4m tmpfs {folder}"):
        pytest.skip("nothing can be mounted here")
    try:
        with learning(heads, flags) as server:
            before = answers(server, PROMPTS)
            wait_until(lambda: steps(folder) > 0, _SECONDS)
            with open(folder / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
                while file.write(bytes(1 << 12)):
                    pass
            wait_until(lambda: said(server, "could not be written"), _SECONDS)
            assert answers(server, PROMPTS) == before
            wait_until(lambda: said(server, "texts are not collected"), 60)
            (folder / "filler").unlink()
            wait_until(lambda: said(server, "serves instead of start"), _SECONDS)
            assert answers(server, PROMPTS[:8]) == before[:8]
            assert server.end() == 0
    finally:
        os.system(f"umount {folder}")


@long_only
def test_on_another_device_it_learns_while_requests_run(heads: Heads, flags: list[str]) -> None:
    """With no share of the server's device; torch takes `cpu:1` for another one, and computes on
    the same cores."""
    end = threading.Event()
    with learning(heads, [*flags, "--learn-device", "cpu:1", "--learn-share", "0"]) as server:
        assert said(server, "learning: all the time, on cpu:1")
        before = answers(server, PROMPTS)

        def busy() -> int:
            count = 0
            while not end.is_set():
                assert answers(server, PROMPTS[:8]) == before[:8]
                count += 1
            return count

        with ThreadPoolExecutor(1) as pool:
            rounds = pool.submit(busy)
            try:
                wait_until(lambda: said(server, "serves instead of start"), _SECONDS)
            finally:
                end.set()
            assert rounds.result(60) > 1
        assert server.end() == 0
