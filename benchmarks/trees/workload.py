"""What is asked of a model in every turn: random tokens, or questions to the demo's model."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from page_cache import read_all

from trees.process import Failed

DEMO = "demo"
_QUESTIONS = (
    "Why does the sky look blue? Explain it to reader {n}, who is a child.",
    "Write a short thank-you note to neighbour {n}, who watered my plants.",
    "A pen costs {n} cents. How much do 7 pens cost? Think step by step.",
    "Write a Python function that returns the factorial of {n}.",
    "Give five tips for sleeping well in week {n} of the year.",
)
_DEMO_PROMPT = 64  # tokens of a question with the chat template around it, at most


class Workload:
    """Prompts for one model, and what it must answer where that is known."""

    def __init__(self, path: str, tokens: range, prompt: int, following: list[int] | None):
        self.path, self._tokens, self._following = path, tokens, following
        self.is_demo = path == DEMO
        self.prompt_tokens = _DEMO_PROMPT if self.is_demo else prompt
        self.name = Path(path).name

    @classmethod
    def open(cls, model: str, given: argparse.Namespace) -> Workload:
        if model == DEMO:
            return cls(DEMO, range(0), given.prompt, None)
        folder = Path(model).resolve()
        made = folder / "headstart.json"
        active = json.loads(made.read_text()).get("active") if made.is_file() else None
        if active is None:  # not made by `headstart calibrate`
            vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
            return cls(str(folder), range(2, vocab), given.prompt, None)
        sys.path.insert(0, str(given.new))
        from headstart.calibrate.calibrated import agreement_of

        following = agreement_of(folder).following.tolist()
        return cls(str(folder), range(2, active + 2), given.prompt, following)

    def read_all(self) -> None:
        if not self.is_demo:
            read_all(Path(self.path))

    def prompts(self, count: int, seed: int) -> list[Any]:
        draw = random.Random(seed)
        if not self.is_demo:
            return [draw.choices(self._tokens, k=self.prompt_tokens) for _ in range(count)]
        texts = (draw.choice(_QUESTIONS).format(n=draw.randrange(1000)) for _ in range(count))
        return [[{"role": "user", "content": text}] for text in texts]

    def check(self, tree: str, prompts: list[Any], texts: list[list[int]], tokens: int) -> None:
        """Outside of the timing."""
        for prompt, text in zip(prompts, texts, strict=True):
            if len(text) != tokens:
                raise Failed(f"{tree}: an answer has {len(text)} tokens instead of {tokens}")
            if self._following is None:
                continue
            token = prompt[-1]
            for place, chosen in enumerate(text):
                token = self._following[token]
                if chosen != token:
                    raise Failed(f"{tree}: token {place} is {chosen}; the cycle says {token}")
