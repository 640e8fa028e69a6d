"""Which slots of the KV cache belong to which request, as vLLM's scheduler tells its workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Followed:
    """A request that is being answered."""

    prompt: list[int]
    blocks: list[int]  # of the draft's group, in order
    num_computed: int = 0  # tokens, as of the last step; drafts of that step may be among them

    def slots(self, count: int, block_size: int) -> list[int]:
        """Of the first `count` tokens, as far as blocks are known."""
        count = min(count, len(self.blocks) * block_size)
        return [self.blocks[p // block_size] * block_size + p % block_size for p in range(count)]


class Requests:
    """All that are being answered, fed with each step's `SchedulerOutput`."""

    def __init__(self, group: int):
        self._group = group
        self._known: dict[str, Followed] = {}

    def finished(self, step: Any) -> Iterator[Followed]:
        """Those that have ended before this step. Their blocks may be another's after it."""
        for name in step.finished_req_ids:
            found = self._known.pop(name, None)
            if found is not None:
                yield found

    def follow(self, step: Any) -> None:
        """What this step begins, and what it goes on with."""
        for new in step.scheduled_new_reqs:
            # A prompt of embeddings, or with images or an adapter, is not text for this trunk.
            if new.prompt_token_ids and not new.mm_features and new.lora_request is None:
                blocks = list(new.block_ids[self._group])
                self._known[new.req_id] = Followed(list(new.prompt_token_ids), blocks)
        cached = step.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known = self._known.get(name)
            if known is None:
                continue
            known.num_computed = computed
            if blocks is None:
                continue
            if name in cached.resumed_req_ids:  # it was interrupted and has other blocks now
                known.blocks = list(blocks[self._group])
            else:
                known.blocks += blocks[self._group]
