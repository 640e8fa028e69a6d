"""One engine in each process: it writes user turns, and it answers at several temperatures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from kinds import Draw
from wide_settings import Wide

from headstart.checkpoint.hub import local_folder
from headstart.data.prompt_reader import Message, PromptReader
from headstart.distill.dialogue import Dialogue, answer_seed
from headstart.distill.local import LocalAsker
from headstart.distill.options import DistillOptions
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.sampling.params import SamplingParams

_SHARE_AT_ONCE = 16  # new prompts come when so much of the room is free
_MARK = "PLACE-OF-THE-USERS-WORDS"


def open_engine(settings: Wide) -> Engine:
    """Without drafts: with hundreds of requests they cost more than they bring."""
    is_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    options = EngineOptions(
        speculate=0, device=settings.device, max_running_requests=settings.running,
        max_model_len=settings.max_len, kv_bytes=settings.kv_bytes if is_gpu else None,
    )  # fmt: skip
    return Engine(local_folder(settings.model), None, options=options)


@dataclass(frozen=True)
class Turn:
    """A user's turn to be written: what is there before it, and how it is drawn."""

    ids: list[int]
    opening: str  # the first words, which are given
    temperature: float
    seed: int
    name: str = ""  # whose turn it is, for whoever asked


def turn_ids(reader: PromptReader, messages: Sequence[Message], opening: str) -> list[int]:
    """Everything up to the words of the user's next turn, by the model's own chat template."""
    rendered = reader.render_here(
        [*messages, {"role": "user", "content": _MARK}], {"add_generation_prompt": True}
    )
    before = rendered[: rendered.index(_MARK)]
    return reader.encode(before + opening, add_special_tokens=False)


def write_turns(
    engine: Engine,
    turns: Iterable[Turn],
    max_tokens: int,
    keep: Callable[[Turn, str, bool], None],
    deadline: float = float("inf"),
) -> None:
    """Each turn's text, with its opening, and whether it ended by itself, until the deadline."""
    waiting, running = iter(turns), dict[str, Turn]()
    most, is_over = engine.options.num_requests, False
    # Prompts are read several at a time: a pass for one costs about as much as for many.
    enough = most - max(1, most // _SHARE_AT_ONCE)
    while True:
        is_over = is_over or time.monotonic() > deadline
        room = most - len(running) if len(running) <= enough and not is_over else 0
        new = list(islice(waiting, room))
        is_over = is_over or len(new) < room
        for turn in new:
            params = SamplingParams(
                temperature=turn.temperature, top_k=0, top_p=1.0, max_tokens=max_tokens,
                seed=turn.seed,
            )  # fmt: skip
            running[engine.add(turn.ids, params)] = turn
        if not running:
            return
        for update in engine.step():
            if update.finish_reason is not None:
                turn = running.pop(update.request_id)
                (output,) = engine.collect(update.request_id).outputs
                keep(turn, turn.opening + output.text, output.finish_reason == "stop")


class MixedAsker(LocalAsker):
    """Sample i of a prompt is drawn at temperature i; some prompts may be answered at length."""

    def __init__(self, engine: Engine, options: DistillOptions, settings: Wide) -> None:
        super().__init__(engine, options)
        self._settings, self._seed_of_all = settings, options.seed

    def params(self, dialogue: Dialogue) -> SamplingParams:
        settings, name = self._settings, dialogue.conversation.id
        is_long = Draw(name).share() < settings.long_share
        return SamplingParams(
            temperature=settings.temperatures[dialogue.sample], top_k=0, top_p=1.0,
            max_tokens=settings.long_tokens if is_long else settings.max_tokens,
            seed=answer_seed(self._seed_of_all, name, dialogue.turn, dialogue.sample),
        )  # fmt: skip


def in_order(dialogues: Iterable[Dialogue], settings: Wide) -> list[Dialogue]:
    """The first temperatures of all prompts, then the others of all prompts."""
    return sorted(dialogues, key=lambda dialogue: dialogue.sample >= settings.at_first)
