"""Experts as they are stored through the kernels, against the plain modules; interpreted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from support.kernel_inputs import DEVICE, random
from support.long_runs import one_of_each
from torch import Tensor, nn

pytest.importorskip("triton")

from support.interpreted_bf16 import repair_fp8

from headstart.backends.cuda import experts
from headstart.backends.cuda.experts import moe_terms
from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.fp8_linear import KernelFp8
from headstart.backends.cuda.kernels import moe_groups, moe_rows, moe_wide_groups
from headstart.backends.cuda.kernels.group_experts import GroupExperts
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.moe import ExpertWeights
from headstart.backends.cuda.kernels.moe_fp8 import fp8_terms
from headstart.backends.cuda.kernels.moe_fp8_vector import fp8_vector_terms
from headstart.backends.cuda.kernels.moe_fp8_weights import Fp8Experts, Fp8Matrices
from headstart.backends.cuda.kernels.sorting import sort_plainly
from headstart.backends.cuda.quantized import hold_for_kernels
from headstart.backends.cuda.quantized_experts import experts_of, hold_experts
from headstart.checkpoint.quantized.weights import (
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
    fp8_rows,
    pack_nibbles,
)
from headstart.models.feed_forward import MoE
from headstart.models.linear import Linear, Stack
from headstart.models.moe_config import MoeConfig
from headstart.models.quantized import quantized_module

HIDDEN, WIDTH = 128, 64
CONFIG = MoeConfig(
    num_experts=4, top_k=2, width=WIDTH, shared_width=WIDTH, shared_gate=False, scoring="sigmoid",
    correction=True, num_groups=1, top_groups=1, renormalise=True, least_sum=1e-20, scale=1.0,
)  # fmt: skip
BLOCKS = replace(CONFIG, width=128, shared_width=128)
# Least and most error: what rounding rows to 8-bit floats does, and to pairs of integers.
FLOATS, INTEGERS = (5e-3, 0.08), (0, 2e-3)
KINDS: dict[str, tuple[str, MoeConfig, tuple[float, float]]] = {
    "fp8-row": ("fp8-row", CONFIG, FLOATS),
    "fp8-row, two shared, the last narrower": (
        "fp8-row", replace(CONFIG, shared_width=96, shared_gate=True), FLOATS),
    "fp8-block": ("fp8-block", BLOCKS, FLOATS),
    "fp8-block, two shared": ("fp8-block", replace(BLOCKS, shared_width=256), FLOATS),
    "int4": ("int4", CONFIG, INTEGERS),
    "int4 with zeros, two shared": ("zeros", replace(CONFIG, shared_width=128), INTEGERS),
    "int8": ("int8", replace(CONFIG, shared_gate=True), INTEGERS),
    "fp8-row, nothing shared": ("fp8-row", replace(CONFIG, shared_width=0), FLOATS),
}  # fmt: skip
FEW = (Shape(outputs=64, inputs=128), Shape(outputs=32, inputs=256))
WAYS = ("few", "tiles", "sorted")


@pytest.fixture(autouse=True)
def _repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        repair_fp8(monkeypatch)


def weight_of(form: str, *shape: int) -> QuantizedWeight:
    """Matrices of different sizes, so that a scale in the wrong place shows."""
    *leading, outputs, inputs = shape
    sizes = torch.logspace(-1, 0, outputs, device=DEVICE)
    for count in leading:
        sizes = torch.linspace(0.5, 1, count, device=DEVICE)[:, None] * sizes
    values = random(*shape, seed=sum(shape)) * 0.3
    if form == "fp8-row":
        return fp8_rows(values * sizes[..., None])
    if form == "fp8-block":
        blocks = (*leading, -(-outputs // 128), -(-inputs // 128))
        codes = (values * 200).to(torch.float8_e4m3fn)
        return Fp8Weight(codes, random(*blocks, seed=1).abs() / 300 + 0.001)
    bits = 8 if form == "int8" else 4
    draw = torch.Generator().manual_seed(outputs)
    codes = torch.randint(0, 1 << bits, shape, generator=draw).byte()
    groups = (*leading, outputs, inputs // 32)
    zeros = torch.randint(3, 12, groups, generator=draw).byte().to(DEVICE)
    scales = random(*groups, seed=2).abs() / (300 if bits == 8 else 20)
    packed = (codes if bits == 8 else pack_nibbles(codes)).to(DEVICE)
    return GroupWeight(bits, packed, scales, zeros if form == "zeros" else None)


def make(form: str, config: MoeConfig, *, hidden: int = HIDDEN) -> tuple[MoE, MoE]:
    """The same mixture as kernels hold it, and plain."""
    held, plain = MoE(config, hidden).to(DEVICE), MoE(config, hidden).to(DEVICE)
    for number, name in enumerate(["router.weight", "router.correction", "shared_gate.weight"]):
        parent, _, own = name.partition(".")
        for block in (held, plain):
            part = getattr(block, parent)
            if part is not None and getattr(part, own) is not None:
                tensor = getattr(part, own)
                tensor.data = random(*tensor.shape, seed=number) * 0.3
    owners = [("experts", len(held.experts.gate_up.weight))]
    owners += [("shared", 0)] if held.shared is not None else []
    for owner, count in owners:
        width = config.width if count else config.shared_width
        for name, shape in (("gate_up", (2 * width, hidden)), ("down", (hidden, width))):
            weight = weight_of(form, *([count] if count else []), *shape)
            other = weight_of(form, *([count] if count else []), *shape)
            made = quantized_module(weight, None, torch.float32)
            setattr(getattr(held, owner), name, made)
            target = getattr(getattr(plain, owner), name)
            target.weight = nn.Parameter(other.dequantized(torch.float32), requires_grad=False)
    return held, plain


def hold(block: MoE) -> list[str]:
    return hold_experts(block) + hold_for_kernels(block)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def go(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows in one of three ways: each by itself, in tiles, or sorted."""
    monkeypatch.setattr(experts, "FEW_ROWS", 5 if way == "few" else 0)
    # There is no GPU to fill, and every program takes milliseconds.
    monkeypatch.setattr(experts, "fp8_vector_terms", partial(fp8_vector_terms, shapes=FEW))
    if way == "sorted":
        monkeypatch.setattr(moe_rows, "MOST_LISTED", 4)
        monkeypatch.setattr("headstart.backends.cuda.kernels.moe_fp8.MOST_LISTED", 4)
        monkeypatch.setattr(moe_groups, "MOST_LISTED", 4)


@pytest.mark.parametrize("kind", ["fp8-block, two shared", "int4 with zeros, two shared"])
def test_lists_of_experts_and_of_pairs_give_the_same_terms(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, config, _ = KINDS[kind]
    held, _ = make(form, config)
    hold(held)
    monkeypatch.setattr(experts, "FEW_ROWS", 0)
    slots = torch.tensor([0, -1, 2, -1, 4], dtype=torch.int32, device=DEVICE)
    x, found = random(5, HIDDEN, seed=3), []
    for answer in (True, False):
        asked = Mock(return_value=answer)
        monkeypatch.setattr(moe_rows, "is_by_expert", asked)
        found.append(moe_terms(x, held, slots))
        asked.assert_called_once_with(5 * (config.top_k + 2), config.num_experts + 2)
    assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize(
    ("kind", "way"),
    one_of_each(
        2, [(kind, way) for kind in KINDS for way in WAYS if way != "few" or "int" not in kind]
    ),
)
def test_terms_add_up_to_what_the_experts_say(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, config, (least, most) = KINDS[kind]
    held, plain = make(form, config)
    assert hold(held) == []
    assert isinstance(experts_of(held), GroupExperts if "int" in kind else Fp8Experts)
    x = random(5, HIDDEN, seed=3)
    go(way, monkeypatch)
    slots = torch.tensor([0, 1, -1, 3, 4], dtype=torch.int32, device=DEVICE)
    found, k = moe_terms(x, held, slots), config.top_k
    assert found.shape[0] == k + -(-config.shared_width // config.width)
    assert not found[:, 2].any(), "a row of no request"
    kept = [0, 1, 3, 4]
    routed = plain.experts(x, *plain.router(x))
    assert least <= error(found[:k].sum(0)[kept], routed[kept]) < most
    if plain.shared is not None:
        assert least <= error(found[k:].sum(0)[kept], (plain(x) - routed)[kept]) < most


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][0] in ("int4", "zeros")])
def test_more_rows_of_4_bits_keep_their_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far closer to the plain module than pairs of integers are."""
    monkeypatch.setattr(moe_wide_groups, "IS_SHOWN_ON_GPUS", True)
    monkeypatch.setattr(moe_wide_groups, "MOST_FEW", 1)
    form, config, _ = KINDS[kind]
    held, plain = make(form, config)
    hold(held)
    x = random(5, HIDDEN, seed=3)
    slots = torch.tensor([0, 1, -1, 3, 4], dtype=torch.int32, device=DEVICE)
    found, kept = moe_terms(x, held, slots), [0, 1, 3, 4]
    assert not found[:, 2].any(), "a row of no request"
    assert error(found.sum(0)[kept], plain(x)[kept]) < 1e-5


@pytest.mark.parametrize("form", ["fp8-row", "fp8-block"])
def test_few_rows_and_tiles_multiply_the_same_numbers(form: str) -> None:
    """Far closer to one another than rounding is to the plain module."""
    held, _ = make(form, BLOCKS)
    hold(held)
    x, weights = random(3, HIDDEN, seed=3), experts_of(held)
    assert isinstance(weights, Fp8Experts)
    chosen = torch.tensor([[0, 4], [1, 4], [1, 4]], dtype=torch.int32, device=DEVICE)
    shares = random(3, 2, seed=5)
    few, tiles = (
        way(x, chosen, shares, weights)
        for way in (partial(fp8_vector_terms, shapes=(Shape(16, 128), Shape(16, 128))), fp8_terms)
    )
    assert error(few, tiles) < 2e-3
    other = fp8_terms(x, chosen.flip(0).contiguous(), shares, weights)
    assert error(other[0], tiles[0]) > 0.2, "the control: other experts"


def test_wide_tiles_give_what_narrow_ones_do() -> None:
    """40 rows of which each chooses the same two experts: 40 pairs of each, two tiles of 32."""
    held, _ = make("fp8-block", BLOCKS)
    hold(held)
    x, weights = random(40, HIDDEN, seed=3), experts_of(held)
    assert isinstance(weights, Fp8Experts)
    chosen = torch.tensor([[0, 4]] * 40, dtype=torch.int32, device=DEVICE)
    assert moe_rows.fp8_and_lists(x, chosen, 5, 128)[1].tile == 32
    found, shares = fp8_terms(x, chosen, random(40, 2, seed=5), weights), random(40, 2, seed=5)
    for at in (0, 33):
        own = slice(at, at + 3)
        alone = fp8_terms(x[own], chosen[own], shares[own].contiguous(), weights)
        assert error(found[:, own], alone) < 1e-6


@pytest.mark.parametrize("form", one_of_each(2, ["fp8-row", "fp8-block", "int4", "int8"]))
def test_a_row_says_the_same_in_every_company(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row is rounded to depends on no other row."""
    held, _ = make(form, BLOCKS if form == "fp8-block" else CONFIG)
    hold(held)
    go("tiles", monkeypatch)
    x = random(3, HIDDEN, seed=3)
    alone = moe_terms(x[2:], held, None)
    assert torch.equal(moe_terms(x, held, None)[:, 2:], alone)


@pytest.mark.parametrize("form", ["fp8-row", "int4"])
def test_shared_experts_of_another_form_go_by_themselves(form: str) -> None:
    held, plain = make(form, replace(CONFIG, shared_gate=True))
    assert held.shared is not None and plain.shared is not None
    held.shared.down = plain.shared.down  # as a list of modules that are not quantised leaves it
    held.shared.gate_up = plain.shared.gate_up
    hold(held)
    assert experts_of(held).num_shared == 0
    x, kernels = random(3, HIDDEN, seed=3), Kernels()
    found = kernels.feed(x, held, torch.zeros(3, dtype=torch.int32, device=DEVICE)).sum(0)
    assert error(found, plain(x)) < KINDS[form][2][1]


def test_plain_experts_beside_a_quantised_shared_one() -> None:
    held, plain = make("fp8-row", CONFIG)
    held.experts = plain.experts
    hold(held)
    assert held.shared is not None and isinstance(held.shared.down, KernelFp8)
    weights = experts_of(held)
    assert isinstance(weights, ExpertWeights) and weights.num_shared == 0
    x = random(3, HIDDEN, seed=3)
    found = Kernels().feed(x, held, torch.zeros(3, dtype=torch.int32, device=DEVICE)).sum(0)
    assert error(found, plain(x)) < FLOATS[1]


def test_stacks_without_a_kernel_are_dequantised_with_a_note() -> None:
    held, plain = make("fp8-row", CONFIG)
    held.experts.down = plain.experts.down
    (note,) = hold(held)
    assert note.startswith("1 stacks of experts are dequantised: kernels want gate, up and down in")
    assert type(held.experts.gate_up) is Stack
    torch.testing.assert_close(held.experts.gate_up.weight, plain.experts.gate_up.weight)


def test_a_quantised_gate_of_shared_experts_is_held_plain() -> None:
    held, plain = make("fp8-row", replace(CONFIG, shared_gate=True))
    assert held.shared_gate is not None and plain.shared_gate is not None
    weight = fp8_rows(plain.shared_gate.weight)
    held.shared_gate = quantized_module(weight, None, torch.float32)
    hold(held)
    assert type(held.shared_gate) is Linear
    torch.testing.assert_close(held.shared_gate.weight.data, weight.dequantized(torch.float32))


def test_packing_anew_takes_no_second_stack() -> None:
    held, _ = make("int4", CONFIG)
    before = held.experts.gate_up.weight.data_ptr()
    hold(held)
    assert held.experts.gate_up.weight.data_ptr() == before


@pytest.mark.parametrize("rows", [3, 20])
def test_lists_have_every_pair_once(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(6, generator=draw)[:3] for _ in range(rows)]).int()
    chosen[1] = -1
    chosen = chosen.to(DEVICE)
    x = random(rows, 64)
    rounded, lists = moe_rows.fp8_and_lists(x, chosen, 6, 128)
    assert error(rounded.values.float() * rounded.scales.repeat(64, 1).T, x) < 0.05
    found = {}
    for number, (begin, count) in enumerate(lists.starts.tolist()):
        if count:
            expert = int(lists.experts.flatten()[number])
            assert expert not in found
            found[expert] = lists.order[begin : begin + count].tolist()
    wanted = {
        expert: [pair for pair, own in enumerate(chosen.flatten().tolist()) if own == expert]
        for expert in range(6)
    }
    assert found == {expert: pairs for expert, pairs in wanted.items() if pairs}
    assert sort_plainly(chosen, 6).count  # what more rows are listed by


def test_the_way_goes_by_bytes_as_stored() -> None:
    """Half the bytes of bf16: rows that would read twice as much again still go without tiles."""
    with torch.device("meta"):
        gate_up = torch.empty(256, 2 * 1024, 4096, dtype=torch.float8_e4m3fn)
        down = torch.empty(256, 4096, 1024, dtype=torch.float8_e4m3fn)
        scales = torch.empty(256, 2 * 1024), torch.empty(256, 4096)
        plain = ExpertWeights(gate_up.bfloat16(), down.bfloat16())
    weights = Fp8Experts(Fp8Matrices(gate_up, scales[0]), Fp8Matrices(down, scales[1]))
    again = [experts.bytes_read_again(4, 8, one) for one in (weights, plain)]
    assert 0.5 < again[0] / again[1] < 0.51
