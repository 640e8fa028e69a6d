"""The tests of a training step: alignment, packing, mask, freezing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.long_runs import unless_long
from support.training_models import VOCAB, batch, learner, toy
from torch import Tensor

from headstart.models.documents import Documents
from headstart.simulate.answers import Answer
from headstart.simulate.answers import Batch as Scored
from headstart.simulate.matches import DraftLogits, answer_matches
from headstart.train.learner import Learner
from headstart.train.losses.combine import complete_rows
from headstart.train.losses.lm_head import LmHead
from headstart.train.step import Batch, learn
from headstart.train.targets import Counts, targets

LENGTHS = (9, 1, 2, 12)
LOSSES = ("ce", "kl", "lk", "tv", "e2e-tv")


def texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator)
    return ids, torch.rand(len(ids), generator=generator) < 0.8


def counts_of(mask: Tensor, lengths: tuple[int, ...], num_depths: int = 3) -> Counts:
    found = targets(mask, Documents(lengths), num_depths)
    complete = int(complete_rows(found.starts, len(mask)).sum())
    return Counts(tuple(int((s >= 0).sum()) for s in found.starts), complete)


def gradients(learner_: Learner) -> Tensor:
    result = torch.cat([p.grad.flatten() for p in learner_.parameters.values()])
    learner_.optimizer.zero_grad()
    return result


def test_what_all_heads_share_is_made_once() -> None:
    """The host waits for every copy to a device."""
    trunk, _ = toy()
    ids, mask = texts()
    made = batch(trunk, ids, mask, LENGTHS)
    assert made.targets(3) is made.targets(3) and len(made.targets(2).starts) == 2
    place = torch.device("cpu")
    assert Documents(LENGTHS).positions(place) is Documents(LENGTHS).positions(place)
    assert Documents(LENGTHS).tokens_left(place) is Documents(LENGTHS).tokens_left(place)
    with torch.inference_mode():
        inside = Documents((3, 4)).positions(place)
    assert not inside.is_inference()  # may be used in training afterwards


def test_targets_are_those_of_the_table() -> None:
    found = targets(torch.ones(5, dtype=torch.bool), Documents((5,)), 3)
    assert found.places.tolist() == [2, 3, 4]
    assert [s.tolist() for s in found.starts] == [[0, 1, 2], [-1, 0, 1], [-1, -1, 0]]
    assert found.teachers.tolist() == [1, 2, 3]


def test_no_label_crosses_into_another_document() -> None:
    found = targets(torch.ones(sum(LENGTHS), dtype=torch.bool), Documents(LENGTHS), 3)
    document = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    for depth, starts in enumerate(found.starts, 1):
        counted = starts >= 0
        assert (document[found.places[counted]] == document[starts[counted]]).all()
        assert (found.places[counted] - starts[counted] == depth + 1).all()
        assert int(counted.sum()) == sum(max(0, n - depth - 1) for n in LENGTHS)


@pytest.mark.parametrize("context", ["prefix", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_packing(loss: str, context: str) -> None:
    """Loss and gradients of a packed row are the sums over its documents."""
    trunk, head = toy()
    own = learner(trunk, head, loss=loss, context=context)
    ids, mask = texts()
    counts = counts_of(mask, LENGTHS)
    whole = learn(own, batch(trunk, ids, mask, LENGTHS), counts).values
    whole_gradients = gradients(own)
    parts = torch.zeros_like(whole)
    for one, its in zip(ids.split(LENGTHS), mask.split(LENGTHS), strict=True):
        parts += learn(own, batch(trunk, one, its, (len(one),)), counts).values
    torch.testing.assert_close(whole, parts)
    assert whole_gradients.abs().max() > 1e-3
    torch.testing.assert_close(whole_gradients, gradients(own))


def test_packing_with_labels_across_documents_would_be_noticed() -> None:
    trunk, head = toy()
    own = learner(trunk, head, loss="ce")
    ids, mask = texts()
    counts = counts_of(mask, LENGTHS)
    right = learn(own, batch(trunk, ids, mask, LENGTHS), counts).values
    leaky = learn(own, batch(trunk, ids, mask, (sum(LENGTHS),)), counts).values
    assert (right - leaky).abs().max() > 1e-2


@pytest.mark.parametrize("loss", LOSSES)
def test_mask(loss: str) -> None:
    """Tokens that are neither learned nor before a learned one change nothing."""
    trunk, head = toy()
    own = learner(trunk, head, loss=loss)
    ids, mask = texts()
    mask[6:12] = False  # the end of the first document, and the two short ones
    counts = counts_of(mask, LENGTHS)
    before = learn(own, batch(trunk, ids, mask, LENGTHS), counts).values, gradients(own)
    changed = ids.clone()
    changed[6:12] = (changed[6:12] + 1) % VOCAB
    after = learn(own, batch(trunk, changed, mask, LENGTHS), counts).values, gradients(own)
    torch.testing.assert_close(before, after)
    changed[2] = (changed[2] + 1) % VOCAB  # one before learned ones: the control
    control = learn(own, batch(trunk, changed, mask, LENGTHS), counts).values, gradients(own)
    assert (control[0] - before[0]).abs().max() > 1e-4
    assert (control[1] - before[1]).abs().max() > 1e-4


def test_the_loss_is_that_of_the_labels_own_mask() -> None:
    """Only a learned token counts, whatever stands before it: the last prompt tokens learn, too."""
    trunk, head = toy()
    own = learner(trunk, head, loss="ce", num_depths=2, context="sequence")
    ids = texts()[0][:9]
    mask = torch.zeros(9, dtype=torch.bool)
    mask[5] = True
    made = batch(trunk, ids, mask, (9,))
    found = learn(own, made, Counts((1, 1), 0))
    depths = own.draft(
        made.embedded, made.rotary, made.states, made.documents, num_depths=2, context="sequence"
    )
    for depth, row in ((0, 3), (1, 2)):
        wanted = -torch.log_softmax(trunk.logits(depths[depth][row]), -1)[ids[5]]
        torch.testing.assert_close(found.loss[depth], wanted.detach())
    torch.testing.assert_close(found.total, found.loss @ torch.tensor([1, 0.6]).double() / 1.6)


def test_freezing() -> None:
    trunk, head = toy(dtype=torch.float32)
    own = learner(trunk, head, learning_rate=1e-2)
    frozen = {name: value.clone() for name, value in trunk.named_parameters()}
    ids, mask = texts()
    made = batch(trunk, ids, mask, LENGTHS)
    assert not made.states.requires_grad and made.states.grad_fn is None
    for is_reloaded in (False, True):
        before = {name: value.detach().clone() for name, value in own.parameters.items()}
        learn(own, made, counts_of(mask, LENGTHS))
        assert all(p.grad is not None for p in head.parameters())
        own.update(1e-2)
        assert all(p.grad is None for p in trunk.parameters())
        assert all(torch.equal(value, frozen[n]) for n, value in trunk.named_parameters())
        assert set(own.optimizer.state) == set(head.parameters())
        assert all(not torch.equal(value, before[n]) for n, value in own.parameters.items())
        if not is_reloaded:
            saved = own.tensors()
            trunk, head = toy(dtype=torch.float32)
            own = learner(trunk, head, learning_rate=1e-2)
            own.load(saved)
            made = batch(trunk, ids, mask, LENGTHS)


def test_weights_in_half_precision_have_masters_in_full() -> None:
    trunk, head = toy(dtype=torch.float32)
    trunk.to(torch.bfloat16)
    own = learner(trunk, head, learning_rate=1e-6, warmup=0.0)
    own.dtype = torch.bfloat16
    ids, mask = texts()
    made = batch(trunk, ids, mask, LENGTHS)
    before = head.modules_[0].fuse.weight.detach().clone()
    depths = own.draft(
        made.embedded, made.rotary, made.states, made.documents, num_depths=1, context="prefix"
    )
    assert depths[0].dtype == torch.bfloat16
    learn(own, made, counts_of(mask, LENGTHS))
    gradient = head.modules_[0].fuse.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32
    own.update(1e-6)
    after = head.modules_[0].fuse.weight.detach()
    # An update that bf16 weights could not have taken in.
    assert not torch.equal(after, before)
    assert (after.bfloat16() == before.bfloat16()).double().mean() > 0.99


def test_parts_of_a_head_that_no_depth_uses_are_left_as_they_are() -> None:
    """Gradients of zero would let weight decay eat them."""
    trunk, head = toy(dtype=torch.float32, modules=3)
    own = learner(
        trunk, head, num_depths=1, optimizer="adamw", learning_rate=1e-2, weight_decay=0.5
    )
    ids, mask = texts()
    before = {name: value.detach().clone() for name, value in own.parameters.items()}
    for _ in range(2):
        learn(own, batch(trunk, ids, mask, LENGTHS), counts_of(mask, LENGTHS, 1))
        own.update(1e-2)
    for name, value in own.parameters.items():
        assert torch.equal(value, before[name]) is not name.startswith("modules_.0."), name
    saved = own.tensors()
    assert {name: float(v) for name, v in saved.items() if name.startswith("updates.")} == {
        f"updates.{name}": 2.0 * name.startswith("modules_.0.") for name in before
    }
    trunk, head = toy(dtype=torch.float32, modules=3)
    again = learner(trunk, head, optimizer="adamw", learning_rate=1e-2, weight_decay=0.5)
    again.load(saved)
    assert len(again.optimizer.state) == len(own.optimizer.state) < len(before)


@pytest.mark.parametrize("loss", ["ce", "kl", "tv"])
def test_the_loss_by_depth_is_a_mean_of_rows_that_have_one(loss: str) -> None:
    """Rows that a draft vocabulary drops must not make the head look better."""
    trunk, head = toy()
    own = learner(trunk, head, loss=loss)
    kept = torch.arange(0, VOCAB, 2)
    own.lm_head = LmHead.of(trunk.lm_head.weight, kept)
    ids, mask = texts()
    made, counts = batch(trunk, ids, mask, LENGTHS), counts_of(mask, LENGTHS)
    found = learn(own, made, counts)
    wanted = targets(mask, made.documents, 3)
    chosen = {
        "ce": ids[wanted.places], "kl": trunk.logits(made.teachers[wanted.teachers]).argmax(-1),
    }  # fmt: skip
    for depth, starts in enumerate(wanted.starts):
        rows = torch.isin(chosen[loss], kept) if loss in chosen else torch.ones_like(starts).bool()
        assert int(found.kept[depth]) == int((rows & (starts >= 0)).sum())
    assert (found.kept < torch.tensor(counts.by_depth)).all() or loss == "tv"


# Alignment: a target whose next token is a function of the last two, and nothing else.
TOKENS = 5
WRONG = {
    "embedding one early": (-1, 0, 0), "embedding one late": (1, 0, 0),
    "hidden one early": (0, -1, 0), "hidden one late": (0, 1, 0),
    "label one early": (0, 0, -1), "label one late": (0, 0, 1),
}  # fmt: skip


def moved(rows: Tensor, by: int, documents: Documents) -> Tensor:
    """Row t gets row t + by of its document, zeros outside."""
    if by >= 0:
        return documents.ahead(rows, by)
    backwards = Documents(documents.lengths[::-1])
    return backwards.ahead(rows.flip(0), -by).flip(0)


def aligned_share(offsets: tuple[int, int, int]) -> float:
    """Train with shifted inputs or labels; the share of drafts that decoding then accepts."""
    trunk, head = toy(dtype=torch.float32, vocab=TOKENS)
    own = learner(trunk, head, loss="ce", num_depths=2, learning_rate=1.0)
    table = torch.randint(TOKENS, (TOKENS, TOKENS), generator=torch.Generator().manual_seed(2))
    pairs = torch.cartesian_prod(torch.arange(TOKENS), torch.arange(TOKENS))
    third = table[pairs[:, 0], pairs[:, 1]]
    ids = torch.stack([*pairs.T, third, table[pairs[:, 1], third]], 1).flatten()
    documents = Documents((4,) * len(pairs))
    mask = documents.positions(ids.device) >= 2
    made = batch(trunk, ids, mask, documents.lengths)
    # The state knows the last token only, so both inputs are needed for every draft.
    true = replace(made, states=trunk.embed[ids].detach())
    embed_by, hidden_by, label_by = offsets
    shifted = replace(
        true,
        ids=moved(ids, label_by, documents),
        embedded=moved(true.embedded, embed_by, documents),
        states=moved(true.states, hidden_by, documents),
    )
    counts = counts_of(mask, documents.lengths, 2)
    for _ in range(60):
        learn(own, shifted, counts)
        own.update(5e-3)
    return accepted_share(own, true)


@torch.no_grad()
def accepted_share(own: Learner, made: Batch) -> float:
    depths = own.draft(
        made.embedded, made.rotary, made.states, made.documents, num_depths=2, context="prefix"
    )
    # Answers begin with the second token, so that both drafts of its round are judged.
    answers = [
        Answer(record_id="", prompt_id="", document=i, start=1, stop=4)
        for i in range(len(made.documents.lengths))
    ]
    scored = Scored(made.states, made.ids, made.documents, answers)
    logits = DraftLogits.of_weight(own.lm_head.weight)
    found = answer_matches(depths, scored, answers, logits)
    return float(torch.stack([one.num_leading[0] for one in found]).double().mean() / 2)


def test_alignment() -> None:
    assert aligned_share((0, 0, 0)) == 1.0


@pytest.mark.parametrize("name", unless_long(list(WRONG)[3:4], list(WRONG)))
def test_alignment_any_other_offset_fails(name: str) -> None:
    assert aligned_share(WRONG[name]) < 0.8
