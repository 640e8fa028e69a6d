"""`headstart learn run`: the same loop without a server, on what was collected or on logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.errors import TrainError
from headstart.learn.assembly import make_loop
from headstart.learn.certainty import FEWEST
from headstart.learn.folder import START, Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.loop import FEWEST_TEXTS
from headstart.learn.process import Task
from headstart.learn.store import Store, TextWriter
from headstart.learn.texts import Text


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    head: str | None  # folder of the newest head; None: none was better
    steps: int
    checks: int
    swaps: int
    reason: str  # of the last check

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def add_texts(folder: Folder, texts: list[Text]) -> None:
    """Put texts of other servers beside those that were collected, each once."""
    with folder.lock(), TextWriter(folder.texts) as writer:
        known = {text.record.id for text in Store(folder.texts, 0).refresh()}
        for text in texts:  # one by one, so that they fill files of the usual size
            if text.id not in known:
                writer.add([text])


def learn_offline(task: Task, minutes: float, say: Callable[[str], None]) -> Outcome:
    """Learn until no better head is found, or time is up; every accepted head goes on from there.

    TrainError where there are too few texts.
    """
    folder = Folder(Path(task.folder))
    counts = {"steps": 0, "checks": 0, "swaps": 0}
    told: dict[str, Any] = {"offer": None, "rests": False, "reason": "there was no check yet"}

    def tell(name: str, facts: dict[str, Any]) -> None:
        if name == "step":
            counts["steps"] = facts["steps"]
        elif name == "checked":
            counts["checks"] += 1
            told["reason"] = facts["reason"]
            say(f"after {facts['steps']} steps {facts['reason']}")
        elif name == "offer":
            told["offer"] = facts
        elif name in ("diverged", "failed", "crowded", "rests"):
            told["rests"] = name == "rests"
            say(str(facts["reason"]))
        elif name == "texts":
            say(f"{facts['train']} texts to learn from, {facts['heldout']} held out")

    with folder.lock():
        heads = LearnedHeads(folder)
        serving = START if heads.serving is None else heads.serving.name
        loop = make_loop(replace(task, head=str(heads.path(serving))), tell, waits=False)
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes and not told["rests"]:
            if not loop.turn() and told["offer"] is None and not told["rests"]:
                raise TrainError(
                    f"{folder.texts} has too few texts; at least {FEWEST_TEXTS} to learn from and "
                    f"{FEWEST} held out are needed. Serve more with --learn, or give --requests "
                    "and --answers."
                )
            if told["offer"] is not None:
                offer, told["offer"] = told["offer"], None
                heads.add(offer["name"], offer["promise"])
                heads.serve(offer["name"])
                counts["swaps"] += 1
                loop.served(heads.path(offer["name"]))
        newest = heads.serving
    return Outcome(str(heads.path(newest.name)) if newest else None, **counts,
                   reason=told["reason"])  # fmt: skip
