"""The rejection rule's kernels against the sampler; interpreted on a CPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.long_runs import unless_long
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.kernels import adjusting, rejection, sampling
from headstart.backends.cuda.sampling import bits_of, settings_of
from headstart.sampling.acceptance import reject
from headstart.sampling.choose import draft_probs, target_probs
from headstart.sampling.params import Row, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, DRAFTS, REQUESTS = 90, unless_long(2, 3), unless_long(5, 12)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjusting, "TILE", 32)
    for module in (sampling, rejection):
        monkeypatch.setattr(module, "TILE", 32)
        monkeypatch.setattr(module, "STEP", 64)


def some_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=draw.choice([0, 0.5, 1, 1.5]), top_k=draw.choice([0, 0, 4, 70]),
        top_p=draw.choice([1, 0.9, 0.5]), min_p=draw.choice([0, 0.05]),
        frequency_penalty=draw.choice([0, 0.5]), logit_bias=draw.choice([None, {3: 2.0}]),
        acceptance="rejection",
    )  # fmt: skip


class Round:
    """Drafts of some requests, and what the target says to them."""

    def __init__(self, seed: int, ids: Tensor | None, *, copies: bool):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.ids = ids
        self.params = [some_params(draw) for _ in range(REQUESTS)]
        self.params[0] = replace(self.params[0], acceptance="match")
        self.seeds = [draw.getrandbits(60) for _ in range(REQUESTS)]
        self.lengths = [draw.randrange(5, 50) for _ in range(REQUESTS)]
        self.limits = [draw.randrange(DRAFTS + 1) for _ in range(REQUESTS)]
        # Drafts behind those of the head are copied.
        self.of_head = [draw.randint(0, limit) if copies else limit for limit in self.limits]
        width = VOCAB if ids is None else len(ids)
        target = 2 * torch.randn(REQUESTS, DRAFTS + 1, VOCAB, generator=generator)
        near = target[:, :DRAFTS] if ids is None else target[:, :DRAFTS][..., ids.cpu()]
        noise = torch.randn(REQUESTS, DRAFTS, width, generator=generator)
        self.target, self.draft = target.to(DEVICE), (near + 0.7 * noise).to(DEVICE)

    def row(self, index: int, depth: int) -> Row:
        return Row(self.params[index], self.seeds[index], self.lengths[index] + depth)


@pytest.mark.parametrize("is_reduced", [False, True], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("copies", [False, True], ids=["of the head", "copied behind it"])
@pytest.mark.parametrize("seed", unless_long([1], [1, 2, 3]))
def test_drafts_are_accepted_and_followed_as_by_the_sampler(
    is_reduced: bool, seed: int, copies: bool
) -> None:
    ids = torch.arange(0, VOCAB, 2, device=DEVICE) if is_reduced else None
    columns_of = None
    if ids is not None:
        columns_of = torch.full((VOCAB,), -1, dtype=torch.int32, device=DEVICE)
        columns_of[ids] = torch.arange(len(ids), dtype=torch.int32, device=DEVICE)
    own = Round(seed, ids, copies=copies)
    settings = settings_of([own.row(i, 0) for i in range(REQUESTS)], VOCAB, own.target.device)
    lengths, limits, of_head = (
        torch.tensor(n, dtype=torch.int32, device=DEVICE)
        for n in (own.lengths, own.limits, own.of_head)
    )
    left = torch.full_like(limits, 100)
    drafts = torch.zeros(REQUESTS, DRAFTS, dtype=torch.int64, device=DEVICE)
    shares = torch.zeros(REQUESTS, DRAFTS, device=DEVICE)
    probs = torch.zeros(REQUESTS, DRAFTS, VOCAB)
    for depth in range(DRAFTS):
        rows = [own.row(i, depth) for i in range(REQUESTS)]
        adjusted = adjusting.adjust(
            own.draft[None, :, depth].contiguous(), settings, lengths.long() + depth,
            token_ids=ids, penalises=False,
        )  # fmt: skip
        columns = sampling.draw(adjusted, settings)
        drafts[:, depth] = columns if ids is None else ids[columns]
        drawn = rejection.shares_of(adjusted, settings)
        shares[:, depth] = rejection.share_of_drafts(drawn, settings, columns)
        host = None if ids is None else ids.cpu()
        probs[:, depth] = draft_probs(own.draft[:, depth].cpu(), rows, host, VOCAB)
    for i, count in enumerate(own.of_head):  # those could be nothing else
        probs[i, count:] = torch.nn.functional.one_hot(drafts[i, count:].cpu(), VOCAB).float()
        shares[i, count:] = 1e-3  # left by a round before
    flat = own.target.flatten(0, 1)
    positions = (lengths[:, None] + torch.arange(DRAFTS + 1, device=DEVICE)).flatten().long()
    adjusted = adjusting.adjust(flat[None], settings, positions, drafts=drafts)
    choices = sampling.draw(adjusted, settings).view(REQUESTS, -1)
    before = choices.clone()
    target = rejection.shares_of(adjusted, settings)
    at = limits, of_head, left, lengths
    accepted = rejection.accept_drafts(target, settings, drafts, shares, *at)
    rejected = own.draft[
        torch.arange(REQUESTS, device=DEVICE), accepted.long().clamp_max(DRAFTS - 1)
    ]
    again = adjusting.adjust(
        rejected[None].contiguous(), settings, lengths.long(), token_ids=ids, penalises=False
    )
    rejection.follow(
        target, rejection.shares_of(again, settings), settings, drafts, accepted, choices, *at,
        columns_of,
    )  # fmt: skip
    assert accepted[0] == limits[0] and choices[0].tolist() == before[0].tolist()
    kinds = set()
    for i in range(1, REQUESTS):
        outputs = [drafts[i, :depth].tolist() for depth in range(DRAFTS + 1)]
        rows = [replace(own.row(i, d), output_ids=outputs[d]) for d in range(DRAFTS + 1)]
        wanted, following = reject(
            drafts[i : i + 1].cpu(), probs[i : i + 1],
            target_probs(own.target[i].cpu(), rows).unsqueeze(0), limits[i : i + 1].cpu(),
            [own.seeds[i]], [own.lengths[i]],
        )  # fmt: skip
        count = int(wanted[0])
        assert accepted[i] == count
        emitted = [*drafts[i, :count].tolist(), int(following[0])]
        assert choices[i, : count + 1].tolist() == emitted
        kinds.add("bonus" if count == own.limits[i] else "recovered")
    assert kinds == {"bonus", "recovered"}


@pytest.mark.filterwarnings("ignore:invalid value")  # of NaN, which accepts nothing
@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_is_accepted_where_nothing_is_allowed(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, acceptance="rejection", allowed_token_ids=(3,),
        banned_token_ids=(4,), logit_bias={5: 1.0},
    )  # fmt: skip
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[7] = True
    logits = torch.zeros(2, VOCAB, device=DEVICE)
    row = Row(params, 1, 5, mask=mask)
    settings, masks = settings_of([row], VOCAB, logits.device), bits_of([row, row], logits)
    positions = torch.tensor([5, 6], device=DEVICE)
    one, lengths = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (1, 5))
    for token in (0, 3, 7):
        drafts = torch.tensor([[token]], device=DEVICE)
        adjusted = adjusting.adjust(logits[None], settings, positions, drafts=drafts, masks=masks)
        choices = sampling.draw(adjusted, settings).view(1, 2)
        target = rejection.shares_of(adjusted, settings)
        shares = torch.ones(1, 1, device=DEVICE)
        accepted = rejection.accept_drafts(
            target, settings, drafts, shares, one, one, torch.full_like(one, 9), lengths
        )
        assert accepted.tolist() == [0] and choices[0, 0] == -1
