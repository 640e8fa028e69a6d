"""Answers from the embedded engine: many prompts in flight, drafts on, exact token ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headstart.data.journal import Answer
from headstart.distill.dialogue import Dialogue, answer_seed
from headstart.distill.options import DistillOptions
from headstart.errors import RequestError
from headstart.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headstart.engine.engine import Engine

_SHARE_AT_ONCE = 16  # new prompts come when so much of the room is free


class LocalAsker:
    def __init__(self, engine: Engine, options: DistillOptions):
        self._engine, self._options = engine, options
        self.refused: dict[str, str] = {}  # prompt id -> why
        # Prompts are read several at a time: a pass for one costs about as much as for many.
        most = engine.options.num_requests
        self._enough = most - max(1, most // _SHARE_AT_ONCE)

    def ask(self, dialogues: Iterable[Dialogue], keep: Callable[[Answer], None]) -> None:
        """Carry every dialogue to its end; `keep` gets each answer as soon as it is there."""
        engine = self._engine
        waiting = deque(dialogue for dialogue in dialogues if dialogue.turns_left)
        running: dict[str, Dialogue] = {}
        try:
            while waiting or running:
                if len(running) <= self._enough:
                    while waiting and len(running) < engine.options.num_requests:
                        self._submit(waiting.popleft(), running)
                for update in engine.step():
                    if update.finish_reason is not None:
                        dialogue = running.pop(update.request_id)
                        keep(self._collect(update.request_id, dialogue))
                        if dialogue.turns_left:
                            waiting.appendleft(dialogue)  # its beginning is still cached
        finally:
            for request_id in running:
                engine.abort(request_id)

    @property
    def facts(self) -> dict[str, str]:
        """What else decides the text: for the journal's header."""
        built = self._engine.model
        dtype = str(built.dtype).removeprefix("torch.")
        weights = self._engine.options.weights
        return {"dtype": dtype, "weights": weights, "device": built.device.type}

    @property
    def acceptance(self) -> dict[str, Any]:
        """What the drafts were worth on this text."""
        return self._engine.stats.acceptance.as_json()

    def params(self, dialogue: Dialogue) -> SamplingParams:
        """How the next answer is drawn; the same for all unless a subclass says otherwise."""
        return SamplingParams(**self._options.sampling, seed=self._seed(dialogue))

    def _submit(self, dialogue: Dialogue, running: dict[str, Dialogue]) -> None:
        kwargs = self._options.chat_template_kwargs
        try:
            request_id = self._engine.add(
                dialogue.messages(), self.params(dialogue), chat_template_kwargs=kwargs
            )
        except RequestError as error:  # too long, mostly; the others can still be answered
            self.refused[dialogue.conversation.id] = str(error)
            return
        running[request_id] = dialogue

    def _collect(self, request_id: str, dialogue: Dialogue) -> Answer:
        result = self._engine.collect(request_id)
        (output,) = result.outputs
        answer = dialogue.answer(
            text=output.text, prompt_ids=result.prompt_token_ids, answer_ids=output.token_ids,
            finish_reason=str(output.finish_reason), seed=self._seed(dialogue), exact_ids=True,
            max_tokens=output.stats.max_tokens,
        )  # fmt: skip
        dialogue.take(answer)
        return answer

    def _seed(self, dialogue: Dialogue) -> int:
        return answer_seed(
            self._options.seed, dialogue.conversation.id, dialogue.turn, dialogue.sample
        )
