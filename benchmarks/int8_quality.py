"""What int8 weights change in a model's predictions: perplexity and agreement on a text.

python benchmarks/int8_quality.py MODEL --text FILE [--tokens 4096] [--window 512]

Runs the trunk over windows of the text in fp32 and with int8 weights and compares: perplexity, how
often the most likely token is the same, and the mean KL divergence. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from headstart.engine.engine import Engine
from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.sampling.params import SamplingParams


@torch.inference_mode()
def log_probs(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """log P(next token) at every position of one window, [n, vocab]."""
    request = Request("text", tokens, SamplingParams(), 0, 1, frozenset(), 0)
    request.blocks = list(range(-(-len(tokens) // engine.options.block_size)))
    (states,), _ = engine.runner.trunk([Work(request, 0, len(tokens), ())])
    return engine.runner.trunk_model.logits(states).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    arguments = parser.parse_args()
    engines = [
        Engine(arguments.model, device="cpu", speculate=0, weights=weights, kv_bytes=1 << 28)
        for weights in ("as-dtype", "int8")
    ]
    text = engines[0].prompts.read(arguments.text.read_text())[: arguments.tokens]
    losses = [0.0, 0.0]
    same = divergence = 0.0
    count = 0
    for start in range(0, len(text) - 1, arguments.window):
        window = text[start : start + arguments.window]
        following = torch.tensor(window[1:])
        plain, rounded = (log_probs(engine, window)[:-1] for engine in engines)
        for place, values in enumerate((plain, rounded)):
            losses[place] -= float(values.gather(1, following[:, None]).sum())
        same += float((plain.argmax(-1) == rounded.argmax(-1)).sum())
        divergence += float((plain.exp() * (plain - rounded)).sum())
        count += len(following)
    result = {
        "tokens": count,
        "perplexity_fp32": round(math.exp(losses[0] / count), 4),
        "perplexity_int8": round(math.exp(losses[1] / count), 4),
        "change_percent": round(100 * (math.exp((losses[1] - losses[0]) / count) - 1), 3),
        "same_most_likely_token": round(same / count, 4),
        "mean_kl": round(divergence / count, 6),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
