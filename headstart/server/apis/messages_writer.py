"""Answers of POST /v1/messages: blocks of content, and the events that build them up."""

from __future__ import annotations

import json
from typing import Any

from headstart.server.apis.blocks import Block, BlockWriter, Step
from headstart.server.refusals import Refusal

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter(BlockWriter):
    def first_chunks(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self.document()}]

    def last_chunks(self) -> list[dict[str, Any]]:
        assert self.ending is not None
        document = self.document()
        delta = {name: document[name] for name in ("stop_reason", "stop_sequence")}
        usage = {"type": "message_delta", "delta": delta, "usage": document["usage"]}
        return [usage, {"type": "message_stop"}]

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return refusal.anthropic_body

    def spelled(self, step: Step) -> list[dict[str, Any]]:
        block = step.block
        if step.kind == "start":
            shown = _shown(Block(block.index, block.kind, "", block.call_id, block.name))
            return [{"type": "content_block_start", "index": block.index, "content_block": shown}]
        if step.kind == "stop":
            return [{"type": "content_block_stop", "index": block.index}]
        return [{"type": "content_block_delta", "index": block.index, "delta": _delta(step)}]

    def document(self) -> dict[str, Any]:
        reason = sequence = None
        content: list[dict[str, Any]] = []
        if self.ending is not None:
            reason = _REASONS.get(self.finish_reason(0, self.ending), "end_turn")
            stops = self.request.stops
            if self.ending.finish_reason == "stop" and self.ending.stop_reason in stops:
                reason, sequence = "stop_sequence", self.ending.stop_reason
            content = [_shown(block) for block in self.blocks.all]
        extra = {"headstart": self.statistics()} if self._says_statistics else {}
        return {
            "id": self.answer_id, "type": "message", "role": "assistant", "model": self.name,
            "content": content, "stop_reason": reason, "stop_sequence": sequence,
            "usage": self._usage(), **extra,
        }  # fmt: skip

    @property
    def _says_statistics(self) -> bool:
        return self.request.headstart.statistics and self.ending is not None

    def _usage(self) -> dict[str, Any]:
        """Cached tokens are counted apart, and are known at the end only."""
        total = sum(len(job.asked.ids) for job in self.jobs)
        cached = self.results[0].num_cached_tokens if self.results else 0
        return {
            "input_tokens": total - cached, "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0, "output_tokens": self.num_output,
        }  # fmt: skip


def _delta(step: Step) -> dict[str, Any]:
    if step.block.kind == "text":
        return {"type": "text_delta", "text": step.text}
    if step.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": step.text}
    return {"type": "input_json_delta", "partial_json": step.text}


def _shown(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        arguments = json.loads(block.text or "{}")
    except ValueError:  # cut off by max_tokens
        arguments = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
