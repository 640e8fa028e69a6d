"""Weights with which a head agrees with its trunk at a chosen rate.

The hidden space is split into halves U and V. Token t has a key u_t in U and, for a share S of the
tokens, also 0.7 v_t in V. LM-head row A(t) holds u_t in its U half, row B(t) holds v_t in its V
half; A is one cycle over the tokens, B another permutation. Trunk layers change little, so the
trunk continues with A(t). The head passes the embedding with U halved: inside S it says B(t),
outside A(t), so it is right for a share 1 - |S|/N of tokens at every depth, less what its block
and the hidden state it is fed disturb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SECOND_KEY = 0.7
_HEAD_U_SCALE = 0.5
_ROWS = 2048


@dataclass(frozen=True)
class Agreement:
    """Keys and permutations of one construction.

    The keys are all that is held in memory: four bytes for each value of the embedding, of active
    tokens only. Large tensors are made from them a few rows at a time.
    """

    keys_u: torch.Tensor  # [active, hidden / 2]
    keys_v: torch.Tensor
    key_of: torch.Tensor  # [vocab] which key a token has
    following: torch.Tensor  # [vocab] A: what the trunk says after each token
    mistaken: torch.Tensor  # B: what the head says after a token of S
    in_s: torch.Tensor  # bool per token

    @property
    def vocab(self) -> int:
        return len(self.key_of)

    def embedding_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.embeddings(slice(start, stop))

    def embeddings(self, tokens: slice | torch.Tensor) -> torch.Tensor:
        """What the model reads for some tokens."""
        import torch

        keys = self.key_of[tokens]
        second = self.keys_v[keys] * (_SECOND_KEY * self.in_s[tokens, None])
        return torch.cat([self.keys_u[keys], second], dim=1)

    def lm_head_rows(self, start: int, stop: int) -> torch.Tensor:
        import torch

        half = self.keys_u.shape[1]
        rows = torch.zeros(stop - start, 2 * half)
        for said, keys, columns in (
            (self.following, self.keys_u, slice(0, half)),
            (self.mistaken, self.keys_v, slice(half, 2 * half)),
        ):
            tokens = ((said >= start) & (said < stop)).nonzero().squeeze(1)
            rows[said[tokens] - start, columns] = keys[self.key_of[tokens]]
        return rows

    def pass_embedding(self) -> torch.Tensor:
        """The [hidden, hidden] half of a fusion matrix that hands the embedding on."""
        import torch

        half = self.keys_u.shape[1]
        scales = torch.cat([torch.full((half,), _HEAD_U_SCALE), torch.ones(half)])
        return torch.diag(scales)


def make_agreement(
    vocab: int, hidden: int, *, rate: float, seed: int, active: int | Sequence[int] | None = None
) -> Agreement:
    """Keys are orthonormal where the vocabulary fits into half the hidden size, else random.

    With `active` only these tokens take part, or where it is a number tokens 2 to active + 1 (0
    and 1 begin and end a text): the others look like one of those when read, and are never said.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    if active is None:
        tokens = torch.arange(vocab)
    elif isinstance(active, int):
        tokens = torch.arange(2, active + 2)
    else:
        tokens = torch.tensor(active)
    count = len(tokens)
    half = hidden // 2
    keys = [_keys(count, half, generator) for _ in range(2)]
    cycle = torch.randperm(count, generator=generator)
    following = torch.empty(count, dtype=torch.long)
    following[cycle] = cycle.roll(-1)
    # Within the cycle two steps ahead instead of one: a mistake is always one.
    mistaken = following[following]
    in_s = torch.zeros(count, dtype=torch.bool)
    in_s[torch.randperm(count, generator=generator)[: round((1 - rate) * count)]] = True
    like = (torch.arange(vocab) - tokens[0]) % count
    like[tokens] = torch.arange(count)
    ids = [tokens[part][like] for part in (following, mistaken)]
    return Agreement(keys[0], keys[1], like, ids[0], ids[1], in_s[like])


def _keys(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    random = torch.randn(max(count, size), size, generator=generator)
    if count <= size:
        random = torch.linalg.qr(random[:size])[0]
    for start in range(0, count, _ROWS):  # in place: a second copy of the keys may be gigabytes
        part = random[start : min(start + _ROWS, count)]
        part.copy_(torch.nn.functional.normalize(part, dim=1))
    return random[:count]


def walk(agreement: Agreement, token: int, num_tokens: int, num_drafts: int) -> list[list[int]]:
    """What an engine must count after `token`: [drafted by depth, accepted by depth].

    The trunk follows A; the head is right after every token outside S, whatever came before. The
    last round drafts only what is of use.
    """
    following, in_s = agreement.following.tolist(), agreement.in_s.tolist()
    drafted, accepted = [0] * num_drafts, [0] * num_drafts
    token = following[token]  # the first output token comes from the prompt alone
    done = 1
    while done < num_tokens:
        drafts = min(num_drafts, num_tokens - done - 1)
        right, at = 0, token
        while right < drafts and not in_s[at]:
            right, at = right + 1, following[at]
        for depth in range(drafts):
            drafted[depth] += 1
            accepted[depth] += depth < right
        token = following[at]
        done += right + 1
    return [drafted, accepted]
