"""Which kernel computes with which weight format, and for how many rows, against plain PyTorch."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch
from support.kernel_inputs import DEVICE, random
from support.long_runs import one_of_each
from torch import Tensor, nn
from torch.nn.functional import silu

pytest.importorskip("triton")

from support.interpreted_bf16 import repair_fp8

from headstart.backends.cuda import fp8_library, fp8_linear, group_linear
from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.fp8_linear import KernelFp8
from headstart.backends.cuda.group_linear import KernelGroups, copied_bytes
from headstart.backends.cuda.kernel_linear import KernelLinear
from headstart.backends.cuda.kernels import wide_groups
from headstart.backends.cuda.kernels.eight_bits import Fp8Rows
from headstart.backends.cuda.kernels.eight_bits import fp8_rows as fp8_rows_of
from headstart.backends.cuda.kernels.rows import add_norm
from headstart.backends.cuda.quantized import add_norm_for, hold_for_kernels, round_to_fp8
from headstart.checkpoint.quantized.weights import (
    Fp8Weight,
    GroupWeight,
    QuantizedWeight,
    fp8_rows,
    pack_nibbles,
)
from headstart.models.feed_forward import MLP
from headstart.models.linear import Linear
from headstart.models.quantized import quantized_module

HIDDEN, INNER = 64, 128
# Least and most error: what rounding rows to 8-bit floats does, and to pairs of integers.
FLOATS, INTEGERS = (5e-3, 0.07), (0, 1e-3)
ERRORS = {
    "fp8-row": FLOATS, "fp8-block": FLOATS, "int4": INTEGERS, "int8": INTEGERS, "sorted": INTEGERS,
}  # fmt: skip
FUSED, MOST = 2, 3  # rows, in place of those of a GPU: three ways for 2, 3 and 4 rows
WAYS = [(form, rows) for rows in (2, 3, 4) for form in ERRORS]
DTYPE = torch.float32


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        repair_fp8(monkeypatch)
    monkeypatch.setattr(fp8_linear, "MAX_FUSED_ROWS", {False: FUSED, True: FUSED})
    monkeypatch.setattr(fp8_linear, "MAX_FP8_ROWS", MOST)
    monkeypatch.setattr(group_linear, "MAX_ROWS", MOST)
    monkeypatch.setattr(group_linear, "_COPIED_VALUES", 48 * HIDDEN)  # a matrix in parts


def weight_of(form: str, outputs: int, inputs: int) -> QuantizedWeight:
    """Rows of different sizes, so that a scale in the wrong place shows."""
    sizes = torch.logspace(-1, 0, outputs, device=DEVICE)
    if form == "fp8-row":
        return fp8_rows(random(outputs, inputs) * sizes[:, None])
    if form == "fp8-block":
        blocks = -(-outputs // 128), -(-inputs // 128)
        values = (random(outputs, inputs) * 60).to(torch.float8_e4m3fn)
        return Fp8Weight(values, random(*blocks).abs() / 60 + 0.01)
    bits = 8 if form == "int8" else 4
    draw = torch.Generator().manual_seed(outputs)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=draw).byte()
    shape = outputs, inputs // 32
    zeros = torch.randint(3, 12, shape, generator=draw).byte() if form != "int4" else None
    order = torch.randperm(inputs, generator=draw).int() if form == "sorted" else None
    made = GroupWeight(
        bits, codes if bits == 8 else pack_nibbles(codes), random(*shape).abs().cpu() / 8, zeros,
        order,
    )  # fmt: skip
    return cast(GroupWeight, quantized_module(made, None, DTYPE).to(DEVICE).quantized)


def layer_of(form: str, outputs: int, inputs: int) -> tuple[KernelLinear, Tensor]:
    """As kernels hold it, and the same matrix in fp32."""
    module = nn.ModuleDict({"it": quantized_module(weight_of(form, outputs, inputs), None, DTYPE)})
    assert hold_for_kernels(module) == []
    made = module["it"]
    assert isinstance(made, KernelLinear)
    return made, weight_of(form, outputs, inputs).dequantized(torch.float32)


def assert_near(found: Tensor, wanted: Tensor, form: str) -> None:
    least, most = ERRORS[form]
    assert least <= (found - wanted).norm() / wanted.norm() < most


@pytest.mark.parametrize(("form", "rows"), one_of_each(3, WAYS))
def test_every_way_is_the_product(form: str, rows: int) -> None:
    kernels, (layer, matrix) = Kernels(), layer_of(form, INNER, HIDDEN)
    x = random(rows, HIDDEN, seed=3)
    wanted = x @ matrix.T
    for found in (kernels.logits(x, layer).sum(0), layer(x)):
        assert_near(found, wanted, form)
    noise = torch.zeros(3, rows, dtype=torch.int64, device=DEVICE)
    chosen = kernels.choose(x, layer, noise[0].float(), noise[1], noise[2])
    if form.startswith("fp8"):  # near ties may fall otherwise
        best = wanted.gather(1, chosen[:, None]).squeeze(1)
        assert (wanted.amax(1) - best <= 0.08 * wanted.abs().amax(1)).all()
    else:
        assert chosen.tolist() == wanted.argmax(1).tolist()


@pytest.mark.parametrize(("form", "rows"), one_of_each(3, WAYS, first=1))
def test_an_mlp_is_rounded_on_its_way(form: str, rows: int) -> None:
    kernels, mlp = Kernels(), MLP(HIDDEN, INNER)
    (mlp.gate_up, first), (mlp.down, second) = (
        layer_of(form, 2 * INNER, HIDDEN), layer_of(form, HIDDEN, INNER),
    )  # fmt: skip
    x = random(rows, HIDDEN, seed=3) / 8
    gate, up = (x @ first.T).chunk(2, 1)
    inner = silu(gate) * up
    wanted = inner @ second.T
    assert_near(kernels.gated(x, mlp.gate_up), inner, form)
    assert_near(kernels.feed(x, mlp, torch.zeros(rows)).sum(0), wanted, form)
    plain = Linear(0, 0)
    plain.weight = nn.Parameter(second, requires_grad=False)
    mlp.down = plain  # formats may differ within a layer
    assert_near(kernels.feed(x, mlp, torch.zeros(rows)).sum(0), wanted, form)


@pytest.mark.parametrize("form", ["int4", "sorted"])
def test_more_rows_of_4_bits_keep_their_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_groups, "MOST_FEW", 1)
    kernels, mlp = Kernels(), MLP(HIDDEN, INNER)
    (mlp.gate_up, first), (mlp.down, second) = (
        layer_of(form, 2 * INNER, HIDDEN), layer_of(form, HIDDEN, INNER),
    )  # fmt: skip
    x = random(5, HIDDEN, seed=3) / 8
    gate, up = (x @ first.T).chunk(2, 1)
    wanted = (silu(gate) * up) @ second.T
    found = kernels.feed(x, mlp, torch.zeros(5)).sum(0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=wanted.abs().max() * 1e-5)
    torch.testing.assert_close(mlp.gate_up(x), x @ first.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["fp8-row", "fp8-block"])
def test_a_norm_is_rounded_by_its_own_kernel_as_by_another(form: str) -> None:
    layer, _ = layer_of(form, INNER, HIDDEN)
    stream, partial, gain = random(3, HIDDEN), random(2, 3, HIDDEN), random(HIDDEN)
    again = stream.clone()
    wanted = fp8_rows_of(add_norm(stream, partial, gain, 1e-6), layer.group)
    found = add_norm_for(layer, again, partial, gain, 1e-6)
    assert torch.equal(stream, again) and isinstance(found, Fp8Rows)
    assert torch.equal(found.values.float(), wanted.values.float())
    torch.testing.assert_close(found.scales, wanted.scales)
    many = add_norm_for(layer, random(4, HIDDEN), random(1, 4, HIDDEN), gain, 0)
    assert isinstance(many, Fp8Rows) and layer.partial(many).shape == (1, 4, INNER)
    assert isinstance(add_norm_for(None, again, partial, gain, 1e-6), Tensor)


@pytest.mark.parametrize("form", ["fp8-row", "sorted"])
def test_a_draft_vocabulary_is_some_rows_of_the_same_format(form: str) -> None:
    layer, matrix = layer_of(form, INNER, HIDDEN)
    ids = torch.tensor([3, 40, 77], device=DEVICE)
    part = layer.only_rows(ids)
    assert type(part) is type(layer)
    torch.testing.assert_close(part.matrix, matrix[ids])
    torch.testing.assert_close(layer.matrix, matrix)


@pytest.mark.parametrize("form", ["fp8-row", "fp8-block"])
def test_many_rows_go_to_the_library(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product of 8-bit floats gets rows, columns and scales in the places it wants."""
    layer, matrix = layer_of(form, INNER, 5 * 128)
    monkeypatch.setattr(fp8_library, "takes", lambda rows, *_: True)
    asked = []

    def product(a: Tensor, b: Tensor, first: Tensor, second: Tensor, dtype: Any) -> Tensor:
        assert a.is_contiguous() and b.t().is_contiguous()
        asked.append(len(a))
        return ((a.float() * first) @ (b.float() * second)).to(dtype)

    def by_rows(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: Any) -> Any:
        assert scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
        return product(a, b, scale_a, scale_b, out_dtype)

    def by_blocks(
        a: Tensor, b: Tensor, first: Tensor, kind: Any, second: Tensor, other: Any, *,
        output_dtype: Any,
    ) -> Any:  # fmt: skip
        assert (kind.name, other.name) == ("BlockWise1x128", "BlockWise128x128")
        assert first.shape == (len(a), 5) and first.stride() == (1, len(a)), "rows side by side"
        assert second.shape == (8, 1) and second.stride(0) == 1, "lines of fours"
        wide = second[:5].repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : b.shape[1]]
        return product(a, b, first.repeat_interleave(128, 1), wide, output_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", by_rows)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", by_blocks)
    x = random(4, 5 * 128, seed=3)
    assert_near(Kernels().product(x, layer)[0], x @ matrix.T, form)
    assert asked == [4]


@pytest.mark.parametrize("form", ["fp8-row", "fp8-block", "int4"])
def test_a_pass_without_rows_has_a_result_without_rows(form: str) -> None:
    """Of an LM head in the middle of a prompt."""
    layer, _ = layer_of(form, INNER, HIDDEN)
    assert layer(random(0, HIDDEN)).shape == (0, INNER)


def test_originals_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [quantized_module(weight_of("int4", 32, HIDDEN), None, DTYPE) for _ in range(2)]
    originals, alive = [weakref.ref(layer) for layer in made], []
    module, of = nn.ModuleList(made), KernelGroups.of
    made.clear()

    def watched(layer: Any) -> Any:
        alive.append([original() is not None for original in originals])
        return of(layer)

    monkeypatch.setattr(KernelGroups, "of", watched)
    hold_for_kernels(module)
    assert alive == [[True, True], [False, True]]


def test_groups_too_small_for_kernels_are_dequantised_with_a_note() -> None:
    codes = torch.randint(0, 16, (8, 48), generator=torch.Generator().manual_seed(0)).byte()
    weight = GroupWeight(4, pack_nibbles(codes), torch.ones(8, 2))
    module = nn.ModuleDict({"it": quantized_module(weight, None, DTYPE)})
    (note,) = hold_for_kernels(module)
    assert note.startswith("1 matrices are dequantised: kernels want groups")
    assert type(module["it"]) is Linear
    assert torch.equal(module["it"].weight, weight.dequantized(DTYPE))


def test_copies_for_many_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ModuleList([layer_of("int4", INNER, HIDDEN)[0], layer_of("int4", 32, HIDDEN)[0]])
    assert copied_bytes(module, torch.bfloat16) == 48 * HIDDEN * 2  # a part of the larger one
    monkeypatch.setattr(group_linear, "_COPIED_VALUES", 1 << 27)
    assert copied_bytes(module, torch.bfloat16) == INNER * HIDDEN * 2
    assert copied_bytes(nn.ModuleList([layer_of("fp8-row", 64, 64)[0]]), DTYPE) == 0


def test_rounding_a_model_leaves_lm_heads_and_quantised_matrices() -> None:
    module = nn.ModuleDict({"lm_head": Linear(32, 32), "block": nn.ModuleDict()})
    module["block"] = nn.ModuleDict(
        {"plain": Linear(32, 32), "groups": layer_of("int4", 32, 64)[0]}
    )
    for layer in (module["lm_head"], module["block"]["plain"]):
        layer.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    round_to_fp8(module)
    kinds = [type(module["lm_head"]), *(type(own) for own in module["block"].values())]
    assert kinds == [Linear, KernelFp8, KernelGroups]
