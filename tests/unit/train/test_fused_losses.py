"""Losses by kernels, a CPU's and in Triton's interpreter a GPU's, beside the plain ones in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.loss_reference import KINDS, Case, case

from headstart.backends.cuda.kernels import losses as gpu_losses
from headstart.backends.losses import LossKernels, Mixture, RowSums
from headstart.backends.numba import losses as cpu_losses
from headstart.train.losses import rows as loss_rows
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.rows import depth_losses, loss_kernels

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(params=[gpu_losses, cpu_losses], ids=["gpu", "cpu"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LossKernels:
    """Without a GPU, and of so few rows, they would not be chosen; blocks are short, so that rows
    need some."""
    found: LossKernels = request.param
    monkeypatch.setattr(
        loss_rows, "loss_kernels",
        lambda weight, num_rows: None if weight.dtype == torch.float64 else found,
    )  # fmt: skip
    monkeypatch.setattr(gpu_losses, "_BLOCK", 16)
    return found


def narrow(rows: Case) -> Case:
    own = None if rows.own is None else rows.own.float()
    return replace(
        rows, states=rows.states.float(), weight=rows.weight.float(),
        teacher=rows.teacher.float(), own=own,
    )  # fmt: skip


@pytest.mark.usefixtures("kernels")
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


def test_the_lowest_of_equal_logits_is_the_best_and_far_logits_do_not_overflow(
    kernels: LossKernels,
) -> None:
    logits = torch.tensor([[0.0] * 20 + [3.0] * 20, [1e4] + [-1e4] * 39, [-1e4] * 39 + [1e4]])
    found = kernels.row_sums(logits)
    assert found.best.tolist() == [20, 0, 39]
    torch.testing.assert_close(found.log_norm, torch.logsumexp(logits, -1))
    assert bool(found.mass.isnan().all())


def test_chunks_of_rows_are_larger_than_on_the_plain_path(
    kernels: LossKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = kernels.row_sums

    def counted(logits: torch.Tensor, *rest: torch.Tensor) -> RowSums:
        sizes.append(len(logits))
        return real(logits, *rest)

    monkeypatch.setattr(kernels, "row_sums", counted)
    narrow(case(num_rows=128)).losses("ce", max_elements=41 * 32)
    assert sizes == [64, 64]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("spoiled", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["draft", "trunk"])
def test_a_row_that_is_not_finite_has_a_loss_that_is_not_and_others_keep_theirs(
    kernels: LossKernels, side: str, spoiled: float
) -> None:
    """Training skips a step by its loss; a number would hide what became of the head."""
    torch.manual_seed(4)
    places = torch.tensor([3, 7, 11])

    def overlaps(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm = kernels.row_sums(target).log_norm
        sums = kernels.row_sums(logits, places, target, norm)
        weights = Mixture(torch.ones(3), below=-torch.ones(3))
        return sums.overlap, kernels.mix_(logits, sums.log_norm, weights, places, target, norm)

    logits, target = torch.randn(3, 40), torch.randn(3, 40)
    wanted, slopes = overlaps(logits.clone(), target)
    (logits if side == "draft" else target)[1, 5] = spoiled
    found, given = overlaps(logits, target)
    assert not found[1].isfinite() and (side == "trunk" or not bool(given[1].isfinite().all()))
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]])
    torch.testing.assert_close(given[[0, 2]], slopes[[0, 2]])


@pytest.mark.parametrize("kind", ["tv", "lk", "ce"])
def test_a_cpu_forms_losses_of_bf16_rows_by_kernels(kind: str) -> None:
    """Of many rows only; what is rounded is what the plain path rounds."""
    torch.manual_seed(1)
    weight, states, teacher = torch.randn(4096, 16), torch.randn(300, 16), torch.randn(300, 16)
    head = LmHead.of(weight.bfloat16())
    labels = torch.randint(4096, (300,))
    assert loss_kernels(head.weight, 300) is cpu_losses
    assert loss_kernels(head.weight, 200) is None
    assert loss_kernels(head.weight.double(), 300) is None
    found, plain = (
        depth_losses(
            kind, [states.bfloat16()[:size]], head, labels=labels[:size],
            teacher=None if kind == "ce" else teacher.bfloat16()[:size],
        )[0]
        for size in (300, 200)
    )  # fmt: skip
    torch.testing.assert_close(found.loss[:200], plain.loss, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        found.gradient[:200].float(), plain.gradient.float(), rtol=0.02, atol=2e-3
    )
    assert torch.equal(found.is_match[:200], plain.is_match)


def test_a_gradient_in_bf16_is_rounded_as_torch_rounds() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 70).bfloat16()
    sums = cpu_losses.row_sums(logits, torch.tensor([0, 5, 69]))
    weights = Mixture(torch.tensor([1.0, -2.0, 0.3]), label=torch.tensor([0.5, 1.0, -0.3]))
    shares = torch.exp(logits.float() - sums.log_norm[:, None])
    wanted = shares * weights.draft[:, None]
    wanted[[0, 1, 2], [0, 5, 69]] += torch.tensor([0.5, 1.0, -0.3])
    mixed = cpu_losses.mix_(logits, sums.log_norm, weights, torch.tensor([0, 5, 69]))
    near = (mixed.float() - wanted).abs() <= 2**-8 * wanted.abs()  # half of the last bit
    assert mixed.dtype == torch.bfloat16 and bool(near.all())
