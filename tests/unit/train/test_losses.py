"""Losses of draft rows: values, gradients, chunking, draft vocabularies and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.loss_reference import KINDS, Case, case, close, reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.errors import ConfigError, DataError
from headstart.train.losses import rows as loss_rows
from headstart.train.losses.combine import end_to_end_loss, weighted_loss
from headstart.train.losses.kinds import KINDS as REGISTRY
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.rows import (
    RowLosses,
    depth_losses,
    fitting_vocab_chunk,
    row_chunks,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
pruned_or_not = pytest.mark.parametrize("pruned", [False, True], ids=["whole", "draft vocabulary"])


def assert_same(found: RowLosses, expected: RowLosses) -> None:
    assert close(found.loss, expected.loss)
    assert close(found.gradient, expected.gradient)
    assert close(found.overlap, expected.overlap)
    assert torch.equal(found.is_match, expected.is_match)
    assert torch.equal(found.is_kept, expected.is_kept)


def test_the_registry_names_every_loss_of_the_command_line() -> None:
    assert tuple(REGISTRY) == KINDS
    assert [name for name, kind in REGISTRY.items() if not kind.needs_teacher] == ["ce"]


@every_kind
@pruned_or_not
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_autograd_of_the_plain_formula(
    kind: str, pruned: bool, temperature: float
) -> None:
    rows = case(pruned=pruned)
    states = rows.states.clone().requires_grad_()
    loss, overlap = reference(kind, rows, states, temperature=temperature)
    (gradient,) = torch.autograd.grad(loss.sum(), states)
    found = rows.losses(kind, teacher=rows.teacher, temperature=temperature)
    assert close(found.loss, loss.detach())
    assert close(found.gradient, gradient)
    assert close(found.overlap, overlap.detach())
    assert gradient.abs().max() > 1e-3
    # Control: another temperature is another loss.
    assert not close(rows.losses(kind, temperature=1.3).loss, loss.detach(), within=1e-3)


@every_kind
@pruned_or_not
@pytest.mark.parametrize("chunk", [None, 7], ids=["quick", "frugal"])
def test_an_lm_head_of_the_drafts_own_is_compared_with_the_trunks(
    kind: str, pruned: bool, chunk: int | None
) -> None:
    shared = case(pruned=pruned)
    draw = torch.Generator().manual_seed(8)
    rows = replace(shared, own=torch.randn(shared.weight.shape, generator=draw).double())
    states = rows.states.clone().requires_grad_()
    loss, overlap = reference(kind, rows, states)
    (gradient,) = torch.autograd.grad(loss.sum(), states)
    found = rows.losses(kind, teacher=rows.teacher, vocab_chunk=chunk)
    assert close(found.loss, loss.detach())
    assert close(found.gradient, gradient)
    assert close(found.overlap, overlap.detach())
    assert not close(shared.losses(kind).loss, loss.detach(), within=1e-3)


@pytest.mark.parametrize(
    ("kind", "has_teacher"), [("ce", False), *((kind, True) for kind in KINDS)], ids=str
)
@pruned_or_not
@pytest.mark.parametrize(
    "chunks",
    [
        {"max_elements": 41 * 13},
        {"max_elements": 41 * 4},
        {"max_elements": 1},
        {"max_elements": None, "vocab_chunk": 7},
        {"max_elements": 30, "vocab_chunk": 10},
        {"vocab_chunk": 1000},
    ],
    ids=["rows", "too few rows", "a row", "vocabulary", "both", "one chunk"],
)
def test_chunking_changes_neither_losses_nor_gradients(
    kind: str, has_teacher: bool, pruned: bool, chunks: dict[str, Any]
) -> None:
    rows = case(pruned=pruned)
    options = {"teacher": rows.teacher if has_teacher else None, "temperature": 0.7}
    full = rows.losses(kind, max_elements=None, **options)
    assert_same(rows.losses(kind, **options, **chunks), full)


def test_row_chunks_cover_all_rows_once_within_the_limit() -> None:
    for num_rows, limit in [(13, 41 * 4), (13, 1), (13, None), (0, 41), (0, None), (8, 41 * 8)]:
        parts = list(row_chunks(num_rows, 41, limit))
        assert [r for part in parts for r in range(num_rows)[part]] == list(range(num_rows))
        longest = max((part.stop - part.start for part in parts), default=0)
        assert limit is None or longest <= max(1, limit // 41)


def test_chunking_cuts_the_vocabulary_where_hardly_a_row_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fitting_vocab_chunk(1000, 150_000, 2**26) is None  # the usual case
    assert fitting_vocab_chunk(1000, 150_000, None) is None
    assert fitting_vocab_chunk(3, 2**24, 2**26) is None  # all rows fit as they are
    assert fitting_vocab_chunk(1000, 2**22, 2**26) == 2**21
    used = []
    real = loss_rows.score_streamed
    monkeypatch.setattr(
        loss_rows, "score_streamed", lambda *a, **k: used.append(k["vocab_chunk"]) or real(*a, **k)
    )
    rows = case(num_rows=40)
    rows.losses("lk", max_elements=41 * 32)
    assert not used
    rows.losses("lk", max_elements=41 * 31)
    assert used == [41 * 31 // 32] * 2


@pruned_or_not
def test_tv_gradient_matches_finite_differences_away_from_ties(pruned: bool) -> None:
    rows = case(num_rows=4, pruned=pruned)
    found = rows.losses("tv")
    step = 1e-6
    for index in range(rows.states.shape[1]):
        nudge = torch.zeros_like(rows.states)
        nudge[:, index] = step
        up = replace(rows, states=rows.states + nudge).losses("tv").loss
        down = replace(rows, states=rows.states - nudge).losses("tv").loss
        assert close(found.gradient[:, index], (up - down) / (2 * step), within=1e-7)


def test_tv_gradient_is_not_that_of_kl() -> None:
    rows = case()
    assert not close(rows.losses("tv").gradient, rows.losses("kl").gradient, within=1e-2)


def test_a_sure_teacher_makes_kl_cross_entropy_and_lk_its_known_mixture() -> None:
    """With p one-hot on the label: KL = CE, overlap = q[label], LK = lam CE + (1-lam)(1-q)."""
    rows = case(vocab=9, hidden=9)
    sure = replace(rows, teacher=1e4 * torch.linalg.solve(rows.weight, torch.eye(9).double()).T)
    sure = replace(sure, teacher=sure.teacher[rows.labels])
    ce = rows.losses("ce")
    hit = torch.exp(-ce.loss)
    assert close(sure.losses("kl").loss, ce.loss)
    assert close(sure.losses("kl").gradient, ce.gradient)
    lk = sure.losses("lk", lk_decay=3.0)
    far = torch.exp(-3 * hit)
    assert close(lk.overlap, hit)
    assert close(lk.loss, far * ce.loss + (1 - far) * (1 - hit))
    # d(1 - q[label]) = q[label] * d CE
    assert close(lk.gradient, (far + (1 - far) * hit).unsqueeze(-1) * ce.gradient)


def test_lk_goes_from_kl_to_tv_as_its_decay_grows() -> None:
    rows = case()
    assert close(rows.losses("lk", lk_decay=0.0).gradient, rows.losses("kl").gradient)
    assert close(rows.losses("lk", lk_decay=1e6).gradient, rows.losses("tv").gradient)


def test_a_draft_equal_to_its_teacher_has_nothing_to_learn() -> None:
    rows = case()
    rows = replace(rows, states=rows.teacher)
    for kind in ("kl", "lk", "tv"):
        found = rows.losses(kind)
        assert close(found.loss, torch.zeros(13).double())
        assert close(found.overlap, torch.ones(13).double())
    assert close(rows.losses("kl").gradient, torch.zeros_like(rows.states))


def test_a_draft_vocabulary_drops_the_rows_it_cannot_serve() -> None:
    rows = case(pruned=True)
    assert rows.ids is not None
    top = (rows.teacher @ rows.weight.T).argmax(-1)
    for kind, inside in (
        ("ce", torch.isin(rows.labels, rows.ids)),
        ("kl", torch.isin(top, rows.ids)),
    ):
        found = rows.losses(kind)
        assert inside.any() and not inside.all()
        assert torch.equal(found.is_kept, inside)
        assert found.loss[~inside].eq(0).all() and found.gradient[~inside].eq(0).all()
        assert found.loss[inside].ne(0).all() and found.gradient[inside].abs().sum(-1).ne(0).all()
    for kind in ("lk", "tv"):  # TV speaks of every row: what is outside S counts as rejected
        assert rows.losses(kind).is_kept.all()
        assert rows.losses(kind).loss.ne(0).all()


def test_overlap_counts_tokens_outside_the_draft_vocabulary_as_rejected() -> None:
    rows = case(pruned=True)
    mass = torch.softmax(rows.teacher @ rows.weight.T, -1)[:, rows.ids].sum(-1)
    assert (rows.losses("tv").overlap <= mass).all()
    # Control: without the draft vocabulary the overlap of some row exceeds that mass.
    assert (replace(rows, ids=None).losses("tv").overlap > mass).any()


@pytest.mark.parametrize("options", [{}, {"vocab_chunk": 5}], ids=["whole", "streamed"])
def test_matches_are_compared_as_original_ids(options: dict[str, Any]) -> None:
    rows = case(pruned=True)
    assert rows.ids is not None
    best = rows.ids[(rows.states @ rows.weight[rows.ids].T).argmax(-1)]
    assert replace(rows, labels=best).losses("ce", **options).is_match.all()
    assert not replace(rows, labels=best - 1).losses("ce", **options).is_match.any()


@every_kind
@pytest.mark.parametrize("options", [{}, {"vocab_chunk": 9}], ids=["whole", "streamed"])
def test_depths_that_share_a_teacher_equal_separate_calls(
    kind: str, options: dict[str, Any]
) -> None:
    rows = case(pruned=True)
    depths = [rows.states, rows.states.flip(0), rows.states * 0.5]
    together = depth_losses(
        kind, depths, LmHead.of(rows.weight, rows.ids), labels=rows.labels, teacher=rows.teacher,
        max_elements=100, **options,
    )  # fmt: skip
    for states, found in zip(depths, together, strict=True):
        assert_same(found, replace(rows, states=states).losses(kind, teacher=rows.teacher))


@every_kind
@pytest.mark.parametrize("options", [{}, {"vocab_chunk": 9}, {"max_elements": None}], ids=str)
def test_no_rows_give_empty_losses_and_a_zero_that_can_go_backward(
    kind: str, options: dict[str, Any]
) -> None:
    rows = case(num_rows=0)
    found = rows.losses(kind, **options)
    assert found.loss.shape == (0,) and found.gradient.shape == (0, 6)
    states = rows.states.requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    weighted_loss([states], [found], [none], [1.0], 1.0).backward()
    assert end_to_end_loss([states], [found], [none], 5, 1.0) == 0
    assert states.grad is not None and states.grad.shape == (0, 6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator makes, views of older ones left out."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, tensor.numel())
        return result


def largest(kind: str, vocab: int, num_depths: int, **options: Any) -> int:
    rows = case(num_rows=64, vocab=vocab, hidden=4)
    head = LmHead.of(rows.weight)
    depths = [rows.states] * num_depths
    with Largest(rows.states, rows.weight, rows.teacher, rows.labels) as seen:
        depth_losses(kind, depths, head, labels=rows.labels, teacher=rows.teacher, **options)
    return seen.elements


@every_kind
def test_memory_does_not_grow_with_vocabulary_times_depths(kind: str) -> None:
    limit = 2048
    for vocab in (512, 2048):
        assert largest(kind, vocab, 3, max_elements=limit) <= limit
        assert largest(kind, vocab, 3, max_elements=limit, vocab_chunk=128) <= limit
    assert largest(kind, 10_000, 1, max_elements=limit, vocab_chunk=256) <= limit
    # Control: the same rows at once.
    assert largest(kind, 2048, 1, max_elements=None) == 64 * 2048


@every_kind
@pytest.mark.parametrize("options", [{}, {"vocab_chunk": 11}], ids=["whole", "streamed"])
def test_bf16_stays_near_fp64_and_keeps_the_dtypes_promised(
    kind: str, options: dict[str, Any]
) -> None:
    exact = case(hidden=16)
    small = Case(
        exact.states.bfloat16(), exact.weight.bfloat16(), exact.labels, exact.teacher.bfloat16()
    )
    exact = Case(small.states.double(), small.weight.double(), exact.labels, small.teacher.double())
    found, expected = small.losses(kind, **options), exact.losses(kind)
    assert found.loss.dtype == torch.float32 and found.gradient.dtype == torch.bfloat16
    assert close(
        found.loss.double() / expected.loss.max(), expected.loss / expected.loss.max(), 0.01
    )
    scale = expected.gradient.abs().max()
    assert close(found.gradient.double() / scale, expected.gradient / scale, within=0.05)
    wide = replace(small, states=small.states.float()).losses(kind, **options)
    assert wide.gradient.dtype == torch.float32


def test_misuse_is_refused() -> None:
    rows = case()
    head = LmHead.of(rows.weight)
    with pytest.raises(ConfigError, match="loss is 'mse'; expected one of ce, kl"):
        depth_losses("mse", [rows.states], head, labels=rows.labels)
    with pytest.raises(ConfigError, match="loss kl compares with the trunk's distribution"):
        depth_losses("kl", [rows.states], head, labels=rows.labels)
    with pytest.raises(ConfigError, match="temperature is 0"):
        rows.losses("tv", temperature=0)
    with pytest.raises(ConfigError, match="vocab_chunk is 0"):
        rows.losses("tv", vocab_chunk=0)
    with pytest.raises(DataError, match="2 ids, from 3 to 41; expected ids from 0 to 40"):
        LmHead.of(rows.weight, torch.tensor([3, 41]))
    with pytest.raises(DataError, match="0 ids"):
        LmHead.of(rows.weight, torch.tensor([], dtype=torch.int64))


def test_without_a_teacher_the_overlap_is_unknown() -> None:
    assert case().losses("ce").overlap.isnan().all()
    rows = case()
    assert close(rows.losses("ce", teacher=rows.teacher).overlap, rows.losses("tv").overlap)
