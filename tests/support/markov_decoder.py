"""A small speculative decoder over a Markov target, for tests of both acceptance rules.

The target's logits depend on the last two tokens, the draft's are a noisy copy; both are tables,
so a test knows every probability. Requests run side by side, each at its own position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.engine.request import origins
from headstart.sampling.acceptance import reject
from headstart.sampling.choose import choose, choose_drafts, draft_probs, target_probs
from headstart.sampling.params import Row, SamplingParams

Grammar = Callable[[Sequence[int]], Tensor]


@dataclass
class Markov:
    """logits[a, b] of the token after a, b; `draft` the same with noise."""

    target: Tensor  # [V, V, V]
    draft: Tensor
    prompt: tuple[int, ...] | None = (1, 0)  # None: another one for every seed

    def prompt_of(self, seed: int) -> tuple[int, ...]:
        size = self.target.shape[0]
        return self.prompt or (seed * 7 % size, seed // 3 % size)

    @classmethod
    def make(
        cls, num_tokens: int, *, noise: float, spread: float = 1.5, dtype: torch.dtype
    ) -> Markov:
        draw = torch.Generator().manual_seed(num_tokens)
        shape = (num_tokens, num_tokens, num_tokens)
        target = torch.randn(shape, generator=draw, dtype=torch.float64) * spread
        draft = target + torch.randn(shape, generator=draw, dtype=torch.float64) * noise
        return cls(target.to(dtype), draft.to(dtype))


@dataclass
class Decoder:
    model: Markov
    params: SamplingParams
    num_drafts: int
    rule: str = "match"
    end_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    emits_drafts: bool = False  # controls: each of these must be caught by a test
    forgets_drafts: bool = False
    wrong_draft_probs: bool = False
    noise_by_step: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, seeds: Sequence[int], length: int) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in seeds]
        step = 0
        while live := [i for i, text in enumerate(texts) if len(text) < length]:
            emitted = self.round([seeds[i] for i in live], [texts[i] for i in live], step)
            for i, tokens in zip(live, emitted, strict=True):
                texts[i] += tokens
            step += 1
        return [text[:length] for text in texts]

    def row(self, seed: int, text: Sequence[int], drafts: Sequence[int], step: int) -> Row:
        history = list(text) if self.forgets_drafts else [*text, *drafts]
        at = len(text) + len(drafts)
        prompt = self.model.prompt_of(seed)
        position = step if self.noise_by_step else len(prompt) + at
        mask = None if self.grammar is None else self.grammar([*text, *drafts])
        return Row(self.params, seed, position, prompt, history, at, self.end_ids, mask)

    def round(self, seeds: list[int], texts: list[list[int]], step: int) -> list[list[int]]:
        size, k = len(seeds), self.num_drafts
        drafts: list[list[int]] = [[] for _ in seeds]
        shape = (size, k, self.model.draft.shape[-1])
        probs = torch.zeros(shape, dtype=self.model.draft.dtype)
        for depth in range(k):
            rows = [self.row(*one, step) for one in zip(seeds, texts, drafts, strict=True)]
            logits = self.logits(self.model.draft, seeds, texts, drafts)
            chosen = choose_drafts(logits, rows).tolist()
            if self.rule == "rejection":
                probs[:, depth] = draft_probs(logits, rows)
            for own, token in zip(drafts, chosen, strict=True):
                own.append(token)
        before = [[own[:j] for own in drafts] for j in range(k + 1)]
        rows = [
            self.row(seeds[i], texts[i], before[j][i], step)
            for i in range(size)
            for j in range(k + 1)
        ]
        per_depth = [self.logits(self.model.target, seeds, texts, own) for own in before]
        logits = torch.stack(per_depth, 1).flatten(0, 1)
        ids = torch.tensor(drafts, dtype=torch.int64).view(size, k)
        return self.accept(ids, probs, logits, rows, seeds)

    def accept(
        self, ids: Tensor, probs: Tensor, logits: Tensor, rows: list[Row], seeds: list[int]
    ) -> list[list[int]]:
        size, k = ids.shape
        limits = torch.full((size,), k)
        if self.rule == "match":
            choices = choose(logits, rows).view(size, k + 1)
            accepted = (ids == choices[:, :k]).int().cumprod(1).sum(1)
            if self.emits_drafts:
                accepted = limits
                choices[:, :k] = ids
            following = choices.gather(1, accepted.unsqueeze(-1)).squeeze(-1)
        else:
            if self.wrong_draft_probs:
                probs = (probs + 1e-9).sqrt()
                probs = probs / probs.sum(-1, keepdim=True)
            target = target_probs(logits, rows).view(size, k + 1, -1)
            positions = [row.position for row in rows[:: k + 1]]
            accepted, following = reject(ids, probs, target, limits, seeds, positions)
        result = []
        for own, count, last in zip(
            ids.tolist(), accepted.tolist(), following.tolist(), strict=True
        ):
            self.counts.update(origins(count, k))
            result.append([*own[:count], last])
        return result

    def logits(
        self, table: Tensor, seeds: list[int], texts: list[list[int]], drafts: list[list[int]]
    ) -> Tensor:
        """[B, V] after prompt, text and drafts of each request."""
        recent = [
            [*self.model.prompt_of(seed), *text[-2:], *own][-2:]
            for seed, text, own in zip(seeds, texts, drafts, strict=True)
        ]
        pairs = torch.tensor(recent)
        return table[pairs[:, 0], pairs[:, 1]]
