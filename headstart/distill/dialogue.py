"""One conversation being carried on with the model's own answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headstart.data.conversations import Conversation, Message
from headstart.data.fingerprints import prompt_sha
from headstart.data.journal import Answer
from headstart.errors import DataError
from headstart.sampling.params import derive_seed

_TURN_STEP = 1 << 32  # samples of one turn never meet those of another


def answer_seed(seed: int, prompt_id: str, turn: int, sample: int) -> int:
    """The seed of one answer's noise: the engine's Request.seed, and what a server is sent.

    It follows from the prompt's id, not from its place, so that adding prompts changes nothing;
    63 bits, because servers take signed numbers.
    """
    number = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:7], "big")
    return derive_seed(seed, sample + turn * _TURN_STEP, number + 1) >> 1


@dataclass
class Dialogue:
    """One sample of a conversation: what was answered so far, and what comes next."""

    conversation: Conversation
    sample: int
    goes_on_after_cut: bool  # whether an answer that was cut off may stand in the history
    prompt_sha: str
    answers: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def turn(self) -> int:
        return len(self.answers)

    @property
    def turns_left(self) -> int:
        return 0 if self.is_over else self.conversation.num_turns - self.turn

    @property
    def user(self) -> str:
        """The message to be answered next."""
        return self.messages()[-1]["content"]

    def messages(self) -> list[Message]:
        """Everything up to the message to be answered next, with the model's own answers."""
        return self.conversation.next_messages(self.answers)

    def take(self, answer: Answer) -> None:
        """Go on after an answer. One that was cut off is no history that a user would see."""
        self.answers.append(answer.text)
        if answer.finish_reason != "stop" and not self.goes_on_after_cut:
            self.is_over = True

    def answer(
        self, *, text: str, prompt_ids: Sequence[int], answer_ids: Sequence[int],
        finish_reason: str, exact_ids: bool, seed: int | None = None,
        server_seed: int | None = None, max_tokens: int | None = None,
    ) -> Answer:  # fmt: skip
        """The next turn's answer, as it goes into the journal."""
        return Answer(
            prompt_id=self.conversation.id, category=self.conversation.category, turn=self.turn,
            sample=self.sample, prompt_sha=self.prompt_sha, user=self.user, text=text,
            prompt_ids=prompt_ids, answer_ids=answer_ids, finish_reason=finish_reason, seed=seed,
            exact_ids=exact_ids, server_seed=server_seed, max_tokens=max_tokens,
        )  # fmt: skip


def open_dialogues(
    conversations: Iterable[Conversation],
    answers: Iterable[Answer],
    *,
    samples: int,
    goes_on_after_cut: bool,
) -> list[Dialogue]:
    """Every sample of every conversation, with the answers that are known already."""
    known: dict[tuple[str, int], list[Answer]] = {}
    for answer in answers:
        known.setdefault((answer.prompt_id, answer.sample), []).append(answer)
    dialogues = []
    for conversation in conversations:
        sha = prompt_sha(conversation.messages)
        for sample in range(samples):
            dialogue = Dialogue(conversation, sample, goes_on_after_cut, sha)
            for answer in sorted(known.get((conversation.id, sample), ()), key=lambda a: a.turn):
                _check(conversation, sha, answer)
                dialogue.take(answer)
            dialogues.append(dialogue)
    return dialogues


def _check(conversation: Conversation, sha: str, answer: Answer) -> None:
    if answer.prompt_sha != sha:
        raise DataError(
            f"prompt {conversation.id!r} was answered before with another text. Give changed "
            "prompts new ids, or choose another --out."
        )
