"""Answers that vLLM gave while our worker collected them (docs/vllm.md), as a dataset.

Their last tokens are left out, so every one of them counts as cut off. The states that were
collected with them stay in their files: `train --states-from`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from headstart.data.conversations import Conversation
from headstart.data.journal import Answer
from headstart.data.prompt_reader import PromptReader
from headstart.distill.dialogue import Dialogue
from headstart.errors import DataError
from headstart.vllm_plugin.collected import SUFFIX, Collected, files, read

ORIGIN = CATEGORY = "collected"


def conversations(
    folder: Path, reader: PromptReader, limit: int | None = None
) -> list[Conversation]:
    """One for each of the first files; the text of its prompt stands for what was asked."""
    found = []
    for path in files(folder)[:limit]:
        one = read(path, with_states=False)
        prompt = reader.decode(one.ids[: one.num_prompt].tolist())
        found.append(Conversation(path.stem, CATEGORY, ({"role": "user", "content": prompt},)))
    if not found:
        raise DataError(f"{folder} holds no collected answer; expected files *{SUFFIX}.")
    return found


class Importer:
    """The answers themselves."""

    def __init__(self, folder: Path, reader: PromptReader, vocab_size: int):
        self._folder, self._reader, self._vocab_size = folder, reader, vocab_size
        self.refused: dict[str, str] = {}  # prompt id -> why

    def ask(self, dialogues: Iterable[Dialogue], keep: Callable[[Answer], None]) -> None:
        for dialogue in dialogues:
            if dialogue.turns_left:
                name = dialogue.conversation.id
                found = read(self._folder / f"{name}{SUFFIX}", with_states=False)
                keep(self._answer(dialogue, found))

    def _answer(self, dialogue: Dialogue, found: Collected) -> Answer:
        ids = found.ids.tolist()
        if max(ids) >= self._vocab_size:
            raise DataError(
                f"{self._folder}: {dialogue.conversation.id} has token {max(ids)} of a model with "
                f"{self._vocab_size}. Give the model that was served."
            )
        return Answer(
            prompt_id=dialogue.conversation.id, category=CATEGORY, turn=0, sample=0,
            prompt_sha=dialogue.prompt_sha, user=dialogue.user,
            text=self._reader.decode(ids[found.num_prompt :]), prompt_ids=ids[: found.num_prompt],
            answer_ids=ids[found.num_prompt :], finish_reason="length", seed=None, exact_ids=True,
        )  # fmt: skip
