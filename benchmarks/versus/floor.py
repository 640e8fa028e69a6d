"""The least time that a GPU needs for what a cell asks: the larger of bytes and arithmetic.

Counted of bf16 weights: every pass reads what its rows need of the weights, of routed experts as
many as so many rows choose if they choose independently, and the entries that its rows see; states
of recurrent layers are read and written. Products of weights and of attention count as arithmetic.
The head counts once for every draft. What moves between kernels and the choice of tokens are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.models.config import LayerKind, ModelConfig
from headstart.simulate.cost import expert_weights, layer_weights
from versus.family_cases import sizes_of, state_bytes

_NUMBER = 2  # bytes of one


@dataclass(frozen=True)
class Speeds:
    """Of a GPU; an H200 by default, as measured: a copy, and products of bf16."""

    bytes_per_second: float = 4.2e12
    flops: float = 7.9e14


@dataclass(frozen=True)
class Work:
    bytes: float
    flops: float

    def seconds(self, speeds: Speeds) -> float:
        return max(self.bytes / speeds.bytes_per_second, self.flops / speeds.flops)

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def answer_seconds(
    config: ModelConfig, *, requests: int, prompt: int, answer: int, drafts: int, per_round: float,
    speeds: Speeds,
) -> float:  # fmt: skip
    """Of `requests` that come at once; `per_round`: tokens that a round gives each of them."""
    rounds = (answer - 1) / per_round
    seen = prompt + answer / 2
    trunk = trunk_pass(config, requests, drafts + 1, seen).seconds(speeds)
    draft = head_pass(config, requests, seen).seconds(speeds)
    return prompt_seconds(config, requests, prompt, speeds) + rounds * (trunk + drafts * draft)


def prompt_seconds(config: ModelConfig, requests: int, prompt: int, speeds: Speeds) -> float:
    """Prompts that are read one after another, weights once; one row of each has logits."""
    layers = Work(0, 0)
    for layer, kind in enumerate(config.layers):
        layers += _layer(config, kind, requests, prompt, prompt / 2, config.windows[layer])
    return (layers + lm_head_pass(config, requests)).seconds(speeds)


def trunk_pass(config: ModelConfig, requests: int, rows: int, seen: float) -> Work:
    """`rows` rows of each request, which see `seen` tokens before them."""
    total = lm_head_pass(config, requests * rows)
    for layer, kind in enumerate(config.layers):
        total += _layer(config, kind, requests, rows, seen, config.windows[layer])
    return total


def head_pass(config: ModelConfig, requests: int, seen: float) -> Work:
    """One draft of each request."""
    fuse = 2 * config.hidden**2
    own = _layer(config, config.head_layer, requests, 1, seen, None)
    return lm_head_pass(config, requests) + own + Work(_NUMBER * fuse, 2 * requests * fuse)


def lm_head_pass(config: ModelConfig, rows: int) -> Work:
    weights = config.vocab * config.hidden
    return Work(_NUMBER * weights, 2 * rows * weights)


def _layer(
    config: ModelConfig, kind: LayerKind, requests: int, rows: int, seen: float, window: int | None
) -> Work:
    """`seen`: tokens that a row sees in the mean; all of a prompt are read for its rows once."""
    lines, weights = requests * rows, layer_weights(config, kind)
    own = Work(_NUMBER * weights, 2 * lines * weights)
    own += experts_of_layer(config, kind, lines)
    return own + mixing(config, kind, requests, rows, seen, window)


def experts_of_layer(config: ModelConfig, kind: LayerKind, lines: int) -> Work:
    """Routed experts of so many rows."""
    if kind.feed != "moe" or config.moe is None:
        return Work(0, 0)
    share, experts = config.moe.top_k / config.moe.num_experts, expert_weights(config, kind)
    read = experts * (1 - (1 - share) ** lines)
    return Work(_NUMBER * read, 2 * lines * experts * share)


def mixing(
    config: ModelConfig, kind: LayerKind, requests: int, rows: int, seen: float, window: int | None
) -> Work:
    """What rows of a request have to do with the others."""
    lines = requests * rows
    if kind.is_recurrent:
        own = config.recurrent
        assert own is not None
        states = 2 * requests * state_bytes(config) / config.num_recurrent
        return Work(states, 6 * lines * own.memory_values)  # forget, write, read
    if not kind.attends:
        return Work(0, 0)
    near = seen if window is None else min(seen, window)
    if kind.mixer == "latent":
        return _latent(config, kind, requests, rows, near)
    shape = config.shape(kind)
    flops = 2 * lines * near * shape.heads * (shape.dim + shape.v_dim)
    return Work(_NUMBER * requests * near * config.slot_values(kind), flops)


def _latent(config: ModelConfig, kind: LayerKind, requests: int, rows: int, seen: float) -> Work:
    mla, lines = config.mla, requests * rows
    assert mla is not None
    total, chosen = Work(0, 0), seen
    if kind.index == "own" and mla.index is not None and seen > mla.index.top_k:
        scoring = 2 * lines * seen * mla.index.heads * mla.index.dim
        total += Work(_NUMBER * requests * seen * mla.index.dim, scoring)
    if kind.index != "none" and mla.index is not None:
        chosen = min(seen, mla.index.top_k)
    # Few rows are compared with latents, many with keys and values of each head.
    few = rows <= mla.few_rows or chosen < seen
    each = mla.entry + mla.kv_rank if few else mla.qk_dim + mla.v_dim
    read = requests * min(rows, seen / chosen if chosen else 1) * chosen
    return total + Work(_NUMBER * read * mla.entry, 2 * lines * chosen * config.num_heads * each)


def add_floors(document: dict[str, Any], speeds: Speeds | None = None) -> None:
    """Each row of a run's document gets `floor`: tokens, or first tokens, per second at most."""
    sizes, config = document["sizes"], sizes_of(document["checkpoint"]["shape"])
    speeds = speeds or Speeds()
    for row in document["rows"]:
        if row["stage"] == "first":
            row["floor"] = 1 / prompt_seconds(config, 1, row["prompt"], speeds)
        elif row["stage"] == "answer":
            row["floor"] = row["requests"] * sizes["answer"] / answer_seconds(
                config, requests=row["requests"], prompt=sizes["prompt"], answer=sizes["answer"],
                drafts=row["k"], per_round=_per_round(row, document), speeds=speeds,
            )  # fmt: skip


def _per_round(row: dict[str, Any], document: dict[str, Any]) -> float:
    """As ours counted it, or what the calibrated rate gives."""
    found = row["engines"].get("headstart", {}).get("cumulative_acceptance")
    rate, drafts = document["checkpoint"]["rate"], row["k"]
    accepted = found or [rate ** (depth + 1) for depth in range(drafts)]
    return 1 + float(sum(accepted[:drafts]))
