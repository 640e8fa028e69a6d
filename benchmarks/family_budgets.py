"""Where a round of each family has to spend its time: the floors of its parts, as a table.

PYTHONPATH=. python3 benchmarks/family_budgets.py [--requests 1,64] [--drafts 3] [--context 1200]
    [--families ernie,qwen3.5]

Milliseconds on an H200 for the checkpoints of gpu_families.py, each part's bytes or arithmetic,
whichever takes longer (versus/floor.py). Needs no GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from versus.family_cases import DRAFTS, FAMILIES, PROMPT, sizes_of
from versus.floor import Speeds, Work, experts_of_layer, head_pass, lm_head_pass, mixing
from versus.floor import prompt_seconds as prompts

from headstart.models.config import ModelConfig
from headstart.simulate.cost import layer_weights

PARTS = ("mixers", "contexts", "MLPs", "experts", "LM head", "drafts")
_NUMBER = 2  # bytes of one


def budget(config: ModelConfig, requests: int, drafts: int, seen: float) -> dict[str, float]:
    """Seconds of each part: matrices of mixers, what they see or keep, MLPs and routers, experts,
    the LM head, and all passes of the head."""
    lines, speeds = requests * (drafts + 1), Speeds()
    parts = dict.fromkeys(PARTS, 0.0)
    for layer, kind in enumerate(config.layers):
        alone = layer_weights(config, replace(kind, feed="none"))
        window = config.windows[layer]
        work = {
            "mixers": _products(alone, lines),
            "contexts": mixing(config, kind, requests, drafts + 1, seen, window),
            "MLPs": _products(layer_weights(config, kind) - alone, lines),
            "experts": experts_of_layer(config, kind, lines),
        }
        for name, own in work.items():
            parts[name] += own.seconds(speeds)
    parts["LM head"] = lm_head_pass(config, lines).seconds(speeds)
    parts["drafts"] = drafts * head_pass(config, requests, seen).seconds(speeds)
    return parts


def _products(weights: float, lines: int) -> Work:
    return Work(_NUMBER * weights, 2 * lines * weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="1,64")
    parser.add_argument("--drafts", type=int, default=DRAFTS)
    parser.add_argument("--context", type=int, default=1200)
    parser.add_argument("--families", default=",".join(FAMILIES))
    given = parser.parse_args()
    print(f"| checkpoint | requests | {' | '.join(PARTS)} | together | their prompts of {PROMPT} |")
    print("|---" * (len(PARTS) + 4) + "|")
    for name in given.families.split(","):
        config = sizes_of(FAMILIES[name].shape)
        for requests in map(int, given.requests.split(",")):
            parts = budget(config, requests, given.drafts, given.context)
            times = [*parts.values(), sum(parts.values())]
            times.append(prompts(config, requests, PROMPT, Speeds()))
            shown = " | ".join(f"{own * 1e3:.2f}" for own in times)
            print(f"| {FAMILIES[name].shape} | {requests} | {shown} |")


if __name__ == "__main__":
    main()
