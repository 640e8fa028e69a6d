"""What the tests of learning while serving share: a head that learns in a few steps, and prompts.

The trunk walks a cycle of sixteen tokens; its head was made weak by noise, and few answers show all
there is to learn.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from headstart.calibrate.calibrated import write_calibrated
from headstart.engine.engine import Engine
from headstart.learn.certainty import FEWEST
from headstart.learn.folder import Folder
from headstart.learn.loop import FEWEST_TEXTS
from headstart.learn.store import TextWriter
from headstart.learn.texts import Text
from headstart.sampling.params import SamplingParams
from support.swapped_heads import Heads, heads_of

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
_SHAPE = "hidden=64,layers=1,heads=4,kv_heads=2,intermediate=64,vocab=64"
_ACTIVE = 16
KIND = "zebra quartz lattice"  # first words of prompts, which nothing else holds


def learnable_heads(folder: Path) -> Heads:
    write_calibrated(_SHAPE, 0.9, folder / "model", active=_ACTIVE, dtype="F32")
    return heads_of(folder / "model")


def prompt_of(number: int) -> list[int]:
    return random.Random(number).choices(range(2, 2 + _ACTIVE), k=8)


def enough_prompts() -> list[list[int]]:
    """The fewest that anything is learned from: to learn, and held out."""
    wanted = {False: FEWEST_TEXTS, True: FEWEST}
    found: list[list[int]] = []
    for prompt in map(prompt_of, itertools.count()):
        text = Text(id="", prompt=prompt, answer=[], kind="", time=0.0, finish_reason="")
        if wanted[text.is_heldout]:
            wanted[text.is_heldout] -= 1
            found.append(prompt)
        if not any(wanted.values()):
            break
    return found


def collect(engine: Engine, folder: Folder) -> None:
    """Answers to the fewest prompts, as a server keeps them."""
    folder.make(1.0)
    results = engine.generate(enough_prompts(), GREEDY)
    with TextWriter(folder.texts) as writer:
        writer.add(
            Text(id=f"t{number}", prompt=result.prompt_token_ids, kind=KIND, time=float(number),
                 answer=result.outputs[0].token_ids, finish_reason="length")
            for number, result in enumerate(results)
        )  # fmt: skip
