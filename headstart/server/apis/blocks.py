"""An answer as a row of blocks: reasoning, text, calls of tools, one after another.

Both APIs of this folder send answers so; they differ in how they spell the beginning of a block,
more of it, and its end. Neither gives several answers to one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from headstart.engine.output import Completion
from headstart.sampling.choose import TokenLogprob
from headstart.server.answers.writer import ChatWriter
from headstart.server.channels import Event

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer, which grows up to its end."""

    index: int
    kind: Kind
    text: str = ""  # of a call: its arguments
    call_id: str = ""
    name: str = ""  # of the tool


@dataclass(frozen=True)
class Step:
    """What happened to a block."""

    kind: Literal["start", "more", "stop"]
    block: Block
    text: str = ""  # that was added


class Blocks:
    """Takes the deltas of a chat message, gives what they do to blocks."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def feed(self, delta: dict[str, Any]) -> Iterator[Step]:
        if delta.get("reasoning_content"):
            yield from self._add("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._add("text", delta["content"])
        for call in delta.get("tool_calls") or ():
            if "id" in call:  # a new one
                yield from self.finish()
                yield self._start(
                    Block(len(self.all), "call", "", call["id"], call["function"]["name"])
                )
            yield from self._add("call", call["function"]["arguments"])

    def finish(self) -> Iterator[Step]:
        """The end of the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            yield Step("stop", self.all[-1])

    def _add(self, kind: Kind, text: str) -> Iterator[Step]:
        if not self._is_open or self.all[-1].kind != kind:
            yield from self.finish()
            yield self._start(Block(len(self.all), kind))
        if text:
            self.all[-1].text += text
            yield Step("more", self.all[-1], text)

    def _start(self, block: Block) -> Step:
        self.all.append(block)
        self._is_open = True
        return Step("start", block)


class BlockWriter(ChatWriter):
    """Events of a stream are named; subclasses spell steps and whole documents."""

    names_events = True

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.blocks = Blocks()
        self.ending: Completion | None = None  # when the answer is complete
        self.unsent: list[TokenLogprob] = []  # log-probabilities whose text has not come

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        steps = [step for delta in self.deltas(event) for step in self.blocks.feed(delta)]
        if event.result is not None:
            steps += self.blocks.finish()
            self.ending = event.result.outputs[0]
        self.unsent += event.update.logprobs
        return [document for step in steps for document in self.spelled(step)]

    def spelled(self, step: Step) -> list[dict[str, Any]]:
        """The events of a step."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        self.ending = self.results[0].outputs[0]
        message = self.message(0, self.ending)
        calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls") or ())]
        for _ in self.blocks.feed({**message, "tool_calls": calls}):
            pass
        return self.document()

    def document(self) -> dict[str, Any]:
        """The answer as it is now."""
        raise NotImplementedError
