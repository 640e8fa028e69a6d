"""Answers of POST /v1/responses: items of output, and the events that build them up."""

from __future__ import annotations

import secrets
from typing import Any

from headstart.server.apis.blocks import Block, BlockWriter, Step
from headstart.server.apis.responses_request import LOGPROBS, ResponsesRequest
from headstart.server.refusals import Refusal

_CUT = {"reason": "max_output_tokens"}
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesWriter(BlockWriter):
    def __init__(self, *args: Any, asked: ResponsesRequest, **options: Any):
        super().__init__(*args, **options)
        self._asked = asked
        self._ids: list[str] = []  # of items
        self._num_sent = 0
        self._entries: list[dict[str, Any]] = []  # log-probabilities

    def first_chunks(self) -> list[dict[str, Any]]:
        return [
            self._event("response.created", response=self.document()),
            self._event("response.in_progress", response=self.document()),
        ]

    def last_chunks(self) -> list[dict[str, Any]]:
        document = self.document()
        return [self._event(f"response.{document['status']}", response=document)]

    def error(self, refusal: Refusal) -> dict[str, Any]:
        own = refusal.body["error"]
        return self._event("error", code=own["code"], message=own["message"], param=own["param"])

    def spelled(self, step: Step) -> list[dict[str, Any]]:
        block, kind = step.block, step.block.kind
        at: dict[str, Any] = {"output_index": block.index}
        if step.kind == "start":
            item = self._item(block, is_open=True)
            return [
                self._event("response.output_item.added", **at, item=item),
                *([] if kind == "call" else [self._part_event("added", block, "")]),
            ]
        at["item_id"] = self._id(block)
        if kind == "call":
            name = "response.function_call_arguments"
            if step.kind == "more":
                return [self._event(f"{name}.delta", **at, delta=step.text)]
            end = self._event(f"{name}.done", **at, arguments=block.text, name=block.name)
            return [end, self._item_done(block)]
        at["content_index"] = 0
        name = f"response.{'output_text' if kind == 'text' else 'reasoning_text'}"
        if step.kind == "more":
            more = {"logprobs": self._new_entries()} if kind == "text" else {}
            return [self._event(f"{name}.delta", **at, delta=step.text, **more)]
        more = {"logprobs": self._entries} if kind == "text" else {}
        return [
            self._event(f"{name}.done", **at, text=block.text, **more),
            self._part_event("done", block, block.text),
            self._item_done(block),
        ]

    def _new_entries(self) -> list[dict[str, Any]]:
        """Log-probabilities since the last text."""
        if not self.unsent:
            return []
        new: list[dict[str, Any]] = self.logprobs(self.unsent)["content"]
        self.unsent = []
        self._entries += new
        return new

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_sent += 1
        return {"type": kind, "sequence_number": self._num_sent - 1, **fields}

    def _item_done(self, block: Block) -> dict[str, Any]:
        item = self._item(block, is_open=False)
        return self._event("response.output_item.done", output_index=block.index, item=item)

    def _part_event(self, what: str, block: Block, text: str) -> dict[str, Any]:
        return self._event(
            f"response.content_part.{what}", item_id=self._id(block), output_index=block.index,
            content_index=0, part=self._part(block, text),
        )  # fmt: skip

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text", "text": text, "annotations": [],
            "logprobs": self._entries if text else [],
        }  # fmt: skip

    def _id(self, block: Block) -> str:
        while len(self._ids) <= block.index:
            self._ids.append(secrets.token_hex(16))
        return f"{_PREFIXES[block.kind]}_{self._ids[block.index]}"

    def _item(self, block: Block, *, is_open: bool) -> dict[str, Any]:
        is_cut = block is self.blocks.all[-1] and self._status == "incomplete"
        status = "in_progress" if is_open else "incomplete" if is_cut else "completed"
        own = {"id": self._id(block), "status": status}
        if block.kind == "call":
            return {
                **own, "type": "function_call", "call_id": block.call_id, "name": block.name,
                "arguments": block.text,
            }  # fmt: skip
        content = [] if is_open else [self._part(block, block.text)]
        if block.kind == "reasoning":
            return {**own, "type": "reasoning", "summary": [], "content": content}
        return {**own, "type": "message", "role": "assistant", "content": content}

    @property
    def _status(self) -> str:
        if self.ending is None:
            return "in_progress"
        return "incomplete" if self.ending.finish_reason == "length" else "completed"

    def document(self) -> dict[str, Any]:
        asked, status = self._asked, self._status
        if self.ending is not None and self.ending.logprobs and LOGPROBS in (asked.include or ()):
            self._entries = self.logprobs(self.ending.logprobs)["content"]
        effort = asked.reasoning.effort
        extra = {"headstart": self.statistics()} if asked.headstart.statistics else {}
        return {
            "id": self.answer_id, "object": "response", "created_at": self.created,
            "status": status, "error": None,
            "incomplete_details": _CUT if status == "incomplete" else None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "model": self.name,
            "output": [] if self.ending is None else [
                self._item(block, is_open=False) for block in self.blocks.all
            ],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": {"effort": effort, "summary": None},
            "store": False, "temperature": asked.temperature, "top_p": asked.top_p,
            "text": {"format": asked.text.format or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto", "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0, "truncation": "disabled", "metadata": {},
            "usage": None if self.ending is None else self._usage(), **extra,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        own = self.usage()
        return {
            "input_tokens": own["prompt_tokens"],
            "input_tokens_details": own["prompt_tokens_details"],
            "output_tokens": own["completion_tokens"],
            "output_tokens_details": own["completion_tokens_details"],
            "total_tokens": own["total_tokens"],
        }
