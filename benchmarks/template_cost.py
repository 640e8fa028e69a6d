"""What it costs that chat templates run in another process: microseconds per rendering.

    python benchmarks/template_cost.py MODEL [--turns 2000]

MODEL is a folder with a tokenizer and a chat template. Renders conversations of three lengths in
this process and through `TemplateProcess`, in turn, and prints medians and 99th percentiles. Ends
with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from headstart.server.templates.client import TemplateProcess

SENTENCE = "The quick brown fox jumps over the lazy dog. "
OPTIONS = {"add_generation_prompt": True}


def conversation(turns: int, sentences: int) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn, the last one the user's."""
    return [
        {"role": "assistant" if number % 2 else "user", "content": SENTENCE * sentences}
        for number in range(turns)
    ]


CONVERSATIONS = {
    "1 message, 45 characters": conversation(1, 1),
    "21 messages, 19 KB": conversation(21, 20),
    "201 messages, 1.8 MB": conversation(201, 200),
}


def microseconds(render: Callable[[], Any]) -> float:
    started = time.perf_counter()
    render()
    return 1e6 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=2000)
    asked = parser.parse_args()
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked.model)
    process = TemplateProcess(tokenizer, max_seconds=60)
    found = {}
    for name, messages in CONVERSATIONS.items():
        turns = max(20, asked.turns // len(messages))

        def here(messages: list[dict[str, str]] = messages) -> Any:
            return tokenizer.apply_chat_template(messages, tokenize=False, **OPTIONS)

        def there(messages: list[dict[str, str]] = messages) -> Any:
            return process.render(messages, OPTIONS)

        assert here() == there()
        times = {"here": list[float](), "there": list[float]()}
        for _ in range(turns):
            times["here"].append(microseconds(here))
            times["there"].append(microseconds(there))
        found[name] = {
            place: {"median": round(median(own), 1), "p99": round(quantiles(own, n=100)[98], 1)}
            for place, own in times.items()
        }
        print(f"{name}: {found[name]}")
    process.close()
    print(json.dumps({"microseconds": found, "turns": asked.turns}))


if __name__ == "__main__":
    main()
