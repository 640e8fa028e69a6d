"""Experts through the kernels against the plain modules; on the CPU interpreted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.interpreted_bf16 import repair_bf16
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda import experts
from headstart.backends.cuda.experts import (
    bytes_read_again,
    is_without_tiles,
    moe_terms,
    routing_of,
)
from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.kernels import moe as kernels
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe import ExpertWeights, expert_terms
from headstart.backends.cuda.kernels.moe_vector import vector_terms
from headstart.backends.cuda.kernels.routing import choose_experts
from headstart.models.feed_forward import MoE
from headstart.models.moe_config import Limit, MoeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 32
PLAIN = MoeConfig(
    num_experts=8, top_k=3, width=24, shared_width=24, shared_gate=False, scoring="sigmoid",
    correction=True, num_groups=1, top_groups=1, renormalise=True, least_sum=1e-20, scale=1.0,
)  # fmt: skip
SOFTMAX = replace(PLAIN, scoring="softmax", correction=False)
KINDS = {
    "sigmoid": PLAIN,
    "groups and scale": replace(PLAIN, num_groups=4, top_groups=2, scale=2.5),
    "groups of one": replace(PLAIN, num_groups=8, top_groups=5),
    "ten experts in odd groups": replace(PLAIN, num_experts=10, num_groups=2, top_groups=1),
    "softmax, shared experts gated": replace(SOFTMAX, shared_width=40, shared_gate=True),
    "softmax, weights as they are": replace(SOFTMAX, renormalise=False, shared_width=0),
    "a least sum": replace(PLAIN, scoring="softmax", shared_width=48, least_sum=0.9),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def make(config: MoeConfig, dtype: torch.dtype = torch.float32) -> MoE:
    block = MoE(config, HIDDEN)
    for number, value in enumerate([*block.parameters(), *block.buffers()]):
        value.data = random(*value.shape, seed=number) * 0.3
    return block.to(DEVICE, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_where_the_router_sends_them(kind: str) -> None:
    config, block, x = KINDS[kind], make(KINDS[kind]), random(4, HIDDEN)
    num_shared = -(-config.shared_width // config.width)
    partial = torch.stack([x @ block.router.weight.T - 1, torch.ones(4, config.num_experts)])
    gate = (x, block.shared_gate.weight) if block.shared_gate is not None else None
    found, weights = choose_experts(
        partial.to(DEVICE), routing_of(block, num_shared), block.router.correction, None, gate
    )
    chosen, shares = block.router(x)
    k = config.top_k
    assert torch.equal(found[:, :k].long(), chosen)
    torch.testing.assert_close(weights[:, :k], shares)
    assert found[:, k:].tolist() == [[config.num_experts + i for i in range(num_shared)]] * 4
    wanted = torch.ones(4, num_shared, device=DEVICE)
    if block.shared_gate is not None:
        wanted *= block.shared_gate(x).sigmoid()
    torch.testing.assert_close(weights[:, k:], wanted)


@pytest.mark.parametrize("kind", [name for name in KINDS if "group" not in name])
def test_terms_add_up_to_what_the_experts_say(kind: str) -> None:
    block, x = make(KINDS[kind]), random(3, HIDDEN)
    found = moe_terms(x, block, None).sum(0)
    torch.testing.assert_close(found, block(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 9], ids=["without tiles", "in tiles"])
@pytest.mark.parametrize("shared", [0.1, 0.3], ids=["alike", "apart"])
def test_inner_products_may_be_cut_off(rows: int, shared: float) -> None:
    """At the same limit the shared MLP is one expert more; at another it goes by itself."""
    block, x = make(PLAIN), random(rows, HIDDEN)
    free = block(x)
    block.experts.limit, block.shared.limit = Limit(0.1), Limit(shared)
    by_itself = Kernels().feed(x, block, torch.zeros(rows, dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(by_itself.sum(0), block(x), rtol=1e-4, atol=1e-5)
    assert (block(x) - free).abs().max() > 0.1


@pytest.mark.parametrize("rows", [19, 40])
def test_many_rows_of_one_expert(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of it: found by scanning, or sorted (40 are many here)."""
    monkeypatch.setattr(kernels, "MAX_SCANNED_ROWS", 32)
    block, x = make(replace(SOFTMAX, num_experts=3, top_k=1, shared_width=0)), random(rows, HIDDEN)
    chosen = torch.ones(rows, 1, dtype=torch.int32, device=DEVICE)
    chosen[3], chosen[7] = 0, -1
    weights = ExpertWeights(block.experts.gate_up.weight, block.experts.down.weight)
    shares = random(rows, 1, seed=5)
    found = expert_terms(x, chosen, shares, weights, (Shape(16, 32), Shape(32, 16)))[0]
    wanted = block.experts(x, chosen.long().clamp_min(0), shares)
    wanted[7] = 0
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_experts_with_more_pairs_than_64_have_wider_tiles() -> None:
    """Of 200 rows one expert has 130, two tiles, another 70; the shared one has all of them."""
    block, x = make(replace(SOFTMAX, num_experts=2, top_k=1)), random(200, HIDDEN)
    chosen = torch.tensor([[int(row % 20 > 12), 2] for row in range(200)], dtype=torch.int32)
    chosen[5] = -1
    weights = experts.experts_of(block)
    shares = random(200, 2, seed=5)
    lists = kernels.sort_pairs(chosen.to(DEVICE), 3, most=kernels.most_pairs(x.dtype, x.device))
    assert lists.tile == 128
    found = expert_terms(x, chosen.to(DEVICE), shares, weights).sum(0)
    wanted = block.experts(x, chosen[:, :1].long().clamp_min(0).to(DEVICE), shares[:, :1])
    wanted += block.shared(x) * shares[:, 1:]
    wanted[5] = 0
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("room", "most"),
    [(166912, [128, 64]), (232448, [128, 64]), (101376, [64, 64])],
    ids=["8.0", "9.0", "8.6, 8.9 and 12.0"],
)
def test_tiles_of_128_pairs_are_for_types_of_two_bytes_on_gpus_with_room(
    room: int, most: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By compute capability; what does not fit would end the server at its first long prompt."""
    properties = SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernels, "has_room", kernels.has_room.__wrapped__)  # without its cache
    monkeypatch.setattr(kernels.triton.knobs.runtime, "interpret", False)
    gpu = torch.device("cuda", 0)
    assert [kernels.most_pairs(kind, gpu) for kind in (torch.bfloat16, torch.float32)] == most


def test_what_wide_tiles_need_is_what_their_stages_hold() -> None:
    """Of 16-bit numbers: the rows of a tile, and of gate and up or of down."""
    for cut, matrices in zip(kernels._cuts_many(128), (2, 1), strict=True):
        held = cut.stages * cut.inputs * (matrices * cut.outputs + 128) * 2
        assert held == kernels._WIDE_BYTES


def test_few_rows_without_tiles_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shared experts, the last one narrower, and a row that chooses none."""
    block, x = make(KINDS["softmax, shared experts gated"]), random(3, HIDDEN)
    slots = torch.tensor([0, -1, 2], dtype=torch.int32, device=DEVICE)
    found = moe_terms(x, block, slots)
    asked: list[int] = []

    def by_tiles(x: Tensor, *given: Tensor | ExpertWeights, limit: float) -> Tensor:
        asked.append(len(x))
        return expert_terms(x, *given, limit=limit)

    monkeypatch.setattr(experts, "FEW_ROWS", 0)
    monkeypatch.setattr(experts, "expert_terms", by_tiles)
    wanted = moe_terms(x, block, slots)
    assert asked == [3]
    assert not found[:, 1].any()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "without"),
    [
        ((512, 10, 2048, 512), [1, 2, 3, 4]),  # Qwen3-Next: what meets is small
        ((256, 8, 7168, 2048), [1]),  # DeepSeek-V3
        ((128, 8, 4096, 1408), [1]),  # GLM-4.5-Air
        ((4, 4, 64, 32), [1, 2, 3, 4]),  # everything meets, and is nothing
    ],
)
def test_rows_that_would_read_much_again_go_by_tiles(
    layer: tuple[int, int, int, int], without: list[int]
) -> None:
    count, top_k, hidden, width = layer
    with torch.device("meta"):
        shared = torch.empty(2 * width, hidden), torch.empty(hidden, width)
        each = torch.empty(count, 2 * width, hidden), torch.empty(count, hidden, width)
    weights = ExpertWeights(*(part.bfloat16() for part in (*each, *shared)))
    found = [rows for rows in range(1, 9) if is_without_tiles(rows, top_k + 1, weights)]
    assert found == without


def test_bytes_read_again() -> None:
    """Two rows with 2 of 4 experts each: one choice is expected to meet another; shared ones do."""
    weights = ExpertWeights(random(4, 8, 16), random(4, 16, 4), random(8, 16), random(16, 4))
    assert bytes_read_again(1, 3, weights) == 0
    expert = 4 * (8 * 16 + 16 * 4)
    assert bytes_read_again(2, 3, weights) == (1 + 1) * expert
    assert bytes_read_again(2, 2, ExpertWeights(weights.gate_up, weights.down)) == expert
    assert bytes_read_again(3, 5, weights) == 2 * (4 + 1) * expert, "every expert by every row"


@pytest.mark.parametrize("cuts", [(Shape(2, 16), Shape(4, 8)), (Shape(8, 32), Shape(2, 32))])
def test_cuts_of_few_rows_change_only_the_order(cuts: tuple[Shape, Shape]) -> None:
    x, chosen = random(2, HIDDEN), torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    weights = ExpertWeights(random(2, 48, HIDDEN), random(2, HIDDEN, 24))
    shares = random(2, 1, seed=5)
    wanted = expert_terms(x, chosen, shares, weights)
    found = vector_terms(x, chosen, shares, weights, cuts)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    other = vector_terms(x, 1 - chosen, shares, weights, cuts)
    assert (other - wanted).abs().max() > 1, "the control: the other expert"


def test_more_rows_than_are_scanned_or_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = make(KINDS["softmax, shared experts gated"]), random(7, HIDDEN)
    slots = torch.tensor([0, 1, -1, 3, 4, 5, 6], dtype=torch.int32, device=DEVICE)
    wanted = block(x)
    wanted[2] = 0
    monkeypatch.setattr(kernels, "MAX_SCANNED_ROWS", 4)
    monkeypatch.setattr(experts, "MAX_SCANNED_ROWS", 4)
    found = moe_terms(x, block, slots)
    torch.testing.assert_close(found.sum(0), wanted, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(experts, "_MOST_ROWS", 5)
    again = moe_terms(x, block, slots)
    assert again.shape[0] == 1 < found.shape[0]
    torch.testing.assert_close(again[0], wanted, rtol=1e-4, atol=1e-5)


def test_rows_of_nobody_ask_no_expert() -> None:
    """Their own experts hold no numbers here, which changes nothing."""
    config = replace(SOFTMAX, num_experts=16, top_k=2, shared_width=0)
    block, x = make(config), random(4, HIDDEN)
    wanted = block(x)
    chosen = block.router(x)[0]
    alone = sorted(set(chosen[2].tolist()) - set(chosen[[0, 1, 3]].flatten().tolist()))
    assert alone
    block.experts.gate_up.weight.data[alone] = torch.nan
    slots = torch.tensor([5, 0, -1, 7], dtype=torch.int32, device=DEVICE)
    found = moe_terms(x, block, slots).sum(0)
    assert not found[2].any()
    torch.testing.assert_close(found[[0, 1, 3]], wanted[[0, 1, 3]], rtol=1e-4, atol=1e-5)
    assert moe_terms(x, block, None).sum(0)[2].isnan().all(), "the control: it would have asked"


def test_a_row_says_the_same_in_every_company() -> None:
    block, x = make(PLAIN), random(3, HIDDEN)
    alone = moe_terms(x[2:], block, None)
    assert torch.equal(moe_terms(x, block, None)[:, 2:], alone)


def test_experts_in_bf16_and_their_router_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        repair_bf16(monkeypatch)
    block, x = make(PLAIN, torch.bfloat16), random(2, HIDDEN).bfloat16()
    assert block.router.weight.dtype == torch.float32
    found = moe_terms(x, block, None).sum(0)
    wanted = block.float()(x.float())
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01 * float(wanted.abs().max()))
