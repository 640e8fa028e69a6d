"""Losses by kernels, in Triton's interpreter, beside the plain ones in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.loss_reference import KINDS, Case, case

from headstart.backends.cuda.kernels import losses as kernels
from headstart.train.losses import rows as loss_rows

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU they would not be chosen; blocks are short, so that rows need some."""
    monkeypatch.setattr(loss_rows, "uses_kernels", lambda weight: weight.dtype != torch.float64)
    monkeypatch.setattr(kernels, "_BLOCK", 16)


def narrow(rows: Case) -> Case:
    own = None if rows.own is None else rows.own.float()
    return replace(
        rows, states=rows.states.float(), weight=rows.weight.float(),
        teacher=rows.teacher.float(), own=own,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_kernels_give_the_losses_and_gradients_of_the_plain_path(
    kind: str, pruned: bool, own: bool
) -> None:
    rows = case(pruned=pruned)
    if own:
        draw = torch.Generator().manual_seed(8)
        rows = replace(rows, own=torch.randn(rows.weight.shape, generator=draw).double())
    plain = rows.losses(kind, temperature=0.7)
    found = narrow(rows).losses(kind, temperature=0.7)
    for name in ("loss", "gradient", "overlap"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(plain, name), rtol=0, atol=3e-6, equal_nan=True
        )
    assert torch.equal(found.is_match, plain.is_match)
    assert torch.equal(found.is_kept, plain.is_kept)
    assert not torch.equal(found.loss.double(), plain.loss)  # computed another way, in fp32


def test_the_lowest_of_equal_logits_is_the_best_and_far_logits_do_not_overflow() -> None:
    logits = torch.tensor([[0.0] * 20 + [3.0] * 20, [1e4] + [-1e4] * 39, [-1e4] * 39 + [1e4]])
    found = kernels.row_sums(logits)
    assert found.best.tolist() == [20, 0, 39]
    torch.testing.assert_close(found.log_norm, torch.logsumexp(logits, -1))
    assert bool(found.mass.isnan().all())


def test_chunks_of_rows_are_larger_than_on_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = kernels.row_sums

    def counted(logits: torch.Tensor, *rest: torch.Tensor) -> kernels.RowSums:
        sizes.append(len(logits))
        return real(logits, *rest)

    monkeypatch.setattr("headstart.train.losses.fused.row_sums", counted)
    narrow(case(num_rows=128)).losses("ce", max_elements=41 * 32)
    assert sizes == [64, 64]
