"""Given conversations taken as they are: the assistant's messages stand for the model's answers.

The tokens of an answer are what the chat template puts between the prompt that asks for it and the
end of the turn, so that masks end where the model itself would have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from headstart.data.conversations import Conversation, Message
from headstart.data.fingerprints import prompt_sha
from headstart.data.journal import Answer
from headstart.data.prompt_reader import PromptReader
from headstart.distill.dialogue import Dialogue
from headstart.errors import DataError, RequestError

WARNING = (
    "imported answers are not this model's own: acceptance suffers (FastMTP measured an acceptance "
    "length of 2.54 instead of 2.73). Without --import the model answers the prompts itself"
)


class Importer:
    def __init__(self, reader: PromptReader, template_options: dict[str, Any]):
        self._reader, self._template_options = reader, template_options
        self.refused: dict[str, str] = {}  # prompt id -> why

    def ask(self, dialogues: Iterable[Dialogue], keep: Callable[[Answer], None]) -> None:
        """`keep` gets every answer that a conversation came with and is not known yet."""
        for dialogue in dialogues:
            name = dialogue.conversation.id
            try:
                answers = list(self._answers(dialogue.conversation))
            except RequestError as error:
                self.refused[name] = str(error)
                continue
            for answer in answers[dialogue.turn :]:
                keep(answer)
            if not answers:
                self.refused[name] = "no assistant message follows a user's"

    def _answers(self, conversation: Conversation) -> Iterator[Answer]:
        sha = prompt_sha(conversation.messages)
        turn = 0
        for index, message in enumerate(conversation.messages):
            before = conversation.messages[:index]
            if message["role"] != "assistant" or not before or before[-1]["role"] != "user":
                continue
            prompt_ids, answer_ids = self._ids(conversation, before, message)
            yield Answer(
                prompt_id=conversation.id, category=conversation.category, turn=turn, sample=0,
                prompt_sha=sha, user=before[-1]["content"], text=message["content"],
                prompt_ids=prompt_ids, answer_ids=answer_ids, finish_reason="stop", seed=None,
                exact_ids=False,
            )  # fmt: skip
            turn += 1

    def _ids(
        self, conversation: Conversation, before: tuple[Message, ...], message: Message
    ) -> tuple[list[int], list[int]]:
        """Tokens of the prompt and of the answer.

        Apart, as when generating: the prompt's last token is not joined with the answer's first.
        """
        asked = self._render(before, asks=True)
        whole = self._render((*before, message), asks=False)
        if not whole.startswith(asked):
            raise DataError(
                f"conversation {conversation.id!r}: the chat template renders an answer otherwise "
                "than as a continuation of its prompt, so its tokens cannot be told apart. Let the "
                "model answer instead (without --import)."
            )
        answer_ids = self._reader.encode(whole[len(asked) :], add_special_tokens=False)
        ends = [place for place, token in enumerate(answer_ids) if token in self._reader.end_ids]
        if ends:  # what the template puts behind the end token is never generated
            answer_ids = answer_ids[: ends[0] + 1]
        return self._reader.encode(asked, add_special_tokens=False), answer_ids

    def _render(self, messages: Sequence[Message], *, asks: bool) -> str:
        settings = {**self._template_options, "add_generation_prompt": asks}
        try:
            template = self._reader.tokenizer.apply_chat_template
            return str(template(list(messages), tokenize=False, **settings))
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template refuses the messages: {error}") from error
