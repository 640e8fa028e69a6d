"""One served text as it is kept: token ids, how it was sampled, when, and which kind it is."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from headstart.data.fingerprints import is_heldout
from headstart.documents import misfit, parse_json

if TYPE_CHECKING:
    from headstart.data.records import Record

HELDOUT_SHARE = 0.15  # of prompts: never trained on, heads are compared on them


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and an answer."""

    id: str
    prompt: list[int]
    answer: list[int]  # its end token included
    kind: str
    time: float  # seconds since 1970
    finish_reason: str
    seed: int | None = None  # of the engine's noise; None where it cannot be replayed
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    @property
    def prompt_sha(self) -> str:
        return hashlib.sha256(array("q", self.prompt).tobytes()).hexdigest()

    @property
    def is_heldout(self) -> bool:
        """By the prompt alone: the same prompt is always on the same side."""
        return is_heldout(self.prompt_sha, HELDOUT_SHARE)

    @property
    def draw(self) -> float:
        """A number from 0 to 1: texts with low ones stay when there is no room for all."""
        return int(hashlib.sha256(self.id.encode()).hexdigest()[:13], 16) / 16**13

    def line(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    def record(self) -> Record:
        """As the trainer and the simulator take it."""
        import numpy as np

        from headstart.data.records import Record

        ids = np.array([*self.prompt, *self.answer], np.int32)
        return Record(
            id=self.id, prompt_id=self.prompt_sha, category=self.kind, turn=0, sample=0, ids=ids,
            mask=np.arange(len(ids)) >= len(self.prompt), seed=self.seed, sampling=self.sampling,
            finish_reason=self.finish_reason, exact_ids=self.seed is not None,
            num_prompt=len(self.prompt), max_tokens=self.max_tokens,
        )  # fmt: skip


_NAMES = {each.name for each in fields(Text)}


def read_line(line: bytes) -> Text | None:
    """None for what is no whole line of ours: a line that was being written at a kill is one."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or set(found) != _NAMES or misfit(Text, found):
        return None
    ids = [*found["prompt"], *found["answer"]]
    if not ids or min(ids) < 0 or max(ids) >= 1 << 31:
        return None
    return Text(**found)
