"""Every stored format is read exactly, and what does not fit together is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.quantized_tensors import fp8, source

from headstart.checkpoint.quantized.packing import awq_pack, gptq_stored_zeros, pack
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.errors import (
    BadConfig,
    BrokenFile,
    HeadstartError,
    MissingTensor,
    ShapeMismatch,
    UnsupportedFamily,
)

Tensors = dict[str, TensorSource]
DRAW = torch.Generator().manual_seed(3)


def dequantized(
    name: str, tensors: Tensors, quantization: dict[str, Any] | None = None
) -> TensorSource:
    return quantized_weights(tensors, quantization or {})[name].source()


@pytest.mark.parametrize("shape", [(256, 256), (200, 130), (1, 1), (128, 300)], ids=str)
def test_blocks_are_multiplied_by_their_scale(shape: tuple[int, int]) -> None:
    weight = fp8(*shape)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    tensors = {"a.weight": source(weight), "a.weight_scale_inv": source(scale)}
    expected = weight.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            expected[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
    assert torch.equal(load(dequantized("a.weight", tensors)), expected.bfloat16())


@pytest.mark.parametrize("shape", [(2, 120, 64), (3, 128, 130), (2, 200, 300)], ids=str)
def test_no_block_of_fused_experts_reaches_into_the_next_expert(
    shape: tuple[int, int, int],
) -> None:
    weight = fp8(*shape)
    scale = torch.rand(shape[0], -(-shape[1] // 128), -(-shape[2] // 128)) + 0.5
    scale[1] *= 100
    name = "a.experts.down_proj"
    tensors = {name: source(weight), f"{name}_scale_inv": source(scale)}
    expected = weight.float()
    for expert, row in itertools.product(range(shape[0]), range(shape[1])):
        for column in range(0, shape[2], 128):
            part = expected[expert, row, column : column + 128]
            part *= scale[expert, row // 128, column // 128]
    assert torch.equal(load(dequantized(name, tensors)), expected.bfloat16())


@pytest.mark.parametrize("scale_shape", [(2, 120), (2, 120, 1)], ids=str)
def test_rows_of_fused_experts_are_multiplied_by_their_scale(scale_shape: tuple[int, ...]) -> None:
    weight, scale = fp8(2, 120, 7), torch.rand(scale_shape) + 0.5
    tensors = {"experts.down_proj": source(weight), "experts.down_proj_scale": source(scale)}
    expected = (weight.float() * scale.reshape(2, 120, 1)).bfloat16()
    assert torch.equal(load(dequantized("experts.down_proj", tensors)), expected)


def test_blocks_that_would_cross_experts_are_refused() -> None:
    """240 rows in all would make two blocks of 128, but the first holds rows of both experts."""
    name = "experts.down_proj"
    tensors = {name: source(fp8(2, 120, 64)), f"{name}_scale_inv": source(torch.ones(2, 1))}
    with pytest.raises(ShapeMismatch, match="of each expert"):
        dequantized(name, tensors)


@pytest.mark.parametrize("scale_shape", [(5,), (5, 1), (), (1,)], ids=str)
def test_rows_or_all_are_multiplied_by_their_scale(scale_shape: tuple[int, ...]) -> None:
    weight, scale = fp8(5, 7), torch.rand(scale_shape) + 0.5
    tensors = {"a.weight": source(weight), "a.weight_scale": source(scale)}
    factor = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    expected = (weight.float() * factor).bfloat16()
    assert torch.equal(load(dequantized("a.weight", tensors)), expected)


def test_a_scale_of_another_shape_is_refused() -> None:
    tensors = {"a.weight": source(fp8(256, 256)), "a.weight_scale_inv": source(torch.ones(3, 2))}
    with pytest.raises(ShapeMismatch, match="do not belong together"):
        dequantized("a.weight", tensors)


def test_a_packing_that_cannot_be_read_is_refused() -> None:
    tensors = {"a.weight_packed": source(torch.zeros(2, 2, dtype=torch.float16))}
    with pytest.raises(UnsupportedFamily, match=r"a\.weight_packed .* cannot be dequantised here"):
        dequantized("a.weight", tensors)
    tensors = {"a.qweight": source(torch.zeros(2, 2, dtype=torch.int32))}
    with pytest.raises(UnsupportedFamily, match=r"a\.qweight may be packed by AWQ or GPTQ"):
        dequantized("a.weight", tensors)


@pytest.mark.parametrize(
    ("ranks", "rows", "num_scales"),
    # V2.5-Pro; V2.5, layers that see all and those with a window; ranks of whole blocks; no ranks
    [(8, 3392, 216), (4, 3392, 108), (4, 3712, 116), (4, 256, 8), (1, 300, 3)],
)
def test_a_fused_qkv_has_blocks_of_its_own_for_each_rank(
    ranks: int, rows: int, num_scales: int
) -> None:
    """MiMo-V2.5-Pro: 8 x 3392 rows have 8 x 27 rows of scales, not the 212 of 27136 rows."""
    rows *= ranks
    weight = fp8(rows, 130)
    scale = torch.rand(num_scales, 2) + 0.5
    name = "modules.0.block.self_attn.qkv_proj.weight"
    names = {name: source(weight), f"{name}_scale_inv": source(scale)}
    per_rank, blocks = rows // ranks, num_scales // ranks
    index = torch.tensor([(r // per_rank) * blocks + (r % per_rank) // 128 for r in range(rows)])
    expected = weight.float() * scale[index].repeat_interleave(128, 1)[:, :130]
    assert torch.equal(load(dequantized(name, names)), expected.bfloat16())


def test_scales_that_fit_no_or_two_numbers_of_ranks_are_refused() -> None:
    for name, num_scales in (
        ("a.qkv_proj.weight", 15),
        ("a.qkv_proj.weight", 16),
        ("a.o_proj.weight", 16),
    ):
        names = {
            name: source(fp8(1696, 128)),
            f"{name}_scale_inv": source(torch.ones(num_scales, 1)),
        }
        with pytest.raises(ShapeMismatch, match="do not belong together"):
            dequantized(name, names)


def test_experts_of_which_there_are_none_are_refused() -> None:
    name = "a.experts.down_proj"
    tensors = {name: source(fp8(0, 4, 4)), f"{name}_scale": source(torch.ones(0, 4, 1))}
    with pytest.raises(ShapeMismatch, match=r"down_proj \(0, 4, 4\); expected one value"):
        dequantized(name, tensors)


# Integers in groups


def codes(rows: int, columns: int, bits: int = 4) -> torch.Tensor:
    return torch.randint(0, 2**bits, (rows, columns), generator=DRAW, dtype=torch.uint8)


def scales(rows: int, groups: int) -> torch.Tensor:
    return torch.rand(rows, groups, generator=DRAW).half() + 0.5


def expanded(values: torch.Tensor, columns: int) -> torch.Tensor:
    return values.float().repeat_interleave(columns // values.shape[1], 1)


def awq(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> Tensors:
    made = {"a.qweight": awq_pack(q.t().contiguous()), "a.scales": s.t().contiguous()}
    if z is not None:
        made["a.qzeros"] = awq_pack(z.t().contiguous())
    return {name: source(tensor) for name, tensor in made.items()}


def gptq(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor, bits: int = 4, v: int = 2) -> Tensors:
    zeros = pack(z.t().contiguous(), bits)
    made = {
        "a.qweight": pack(q, bits).t().contiguous(), "a.scales": s.t().contiguous(),
        "a.qzeros": gptq_stored_zeros(zeros, bits) if v == 1 else zeros,
    }  # fmt: skip
    return {name: source(tensor) for name, tensor in made.items()}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False,
    "checkpoint_format": "gptq_v2",
}  # fmt: skip


def only(tensors: Tensors, quantization: dict[str, Any]) -> StoredWeight:
    return quantized_weights(tensors, quantization)["a.weight"]


def test_awq_is_read_in_its_order_of_outputs() -> None:
    q, s, z = codes(16, 64), scales(16, 2), codes(16, 2)
    expected = (q.float() - expanded(z, 64)) * expanded(s, 64)
    found = only(awq(q, s, z), AWQ)
    assert found.shape == (16, 64) and found.form == "int4-group" and "groups of 32" in found.words
    assert torch.equal(found.values(torch.float32), expected)
    # Word by word, as the format is written down: outputs 0 2 4 6 1 3 5 7 from the low bits up.
    word = int(load(awq(q, s, z)["a.qweight"])[5, 0]) & 0xFFFFFFFF
    assert [word >> shift & 15 for shift in range(0, 32, 4)] == [
        int(q[output, 5]) for output in (0, 2, 4, 6, 1, 3, 5, 7)
    ]


def test_awq_without_zero_points_means_8() -> None:
    q, s = codes(8, 32), scales(8, 1)
    found = only(awq(q, s, None), {**AWQ, "zero_point": False})
    assert torch.equal(found.values(torch.float32), (q.float() - 8) * s.float())
    with pytest.raises(MissingTensor, match=r"a\.qzeros is missing"):
        only(awq(q, s, None), AWQ)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_in_both_conventions_of_zero_points(bits: int, version: int) -> None:
    q, s, z = codes(32, 64, bits), scales(32, 2), codes(32, 2, bits)
    form = "gptq" if version == 1 else "gptq_v2"
    found = only(gptq(q, s, z, bits, version), {**GPTQ, "bits": bits, "checkpoint_format": form})
    expected = (q.float() - expanded(z, 64)) * expanded(s, 64)
    assert torch.equal(found.values(torch.float32), expected)
    other = {**GPTQ, "bits": bits, "checkpoint_format": "gptq_v2" if version == 1 else "gptq"}
    wrong = only(gptq(q, s, z, bits, version), other).values(torch.float32)
    assert not torch.equal(wrong, expected)


def test_gptq_in_three_bits_reaches_over_words() -> None:
    q, s = codes(32, 64, 3), scales(32, 2)
    bits = [int(q[0, i // 3]) >> (i % 3) & 1 for i in range(192)]
    words = [sum(bit << place for place, bit in enumerate(bits[at : at + 32])) for at in (0, 32)]
    tensors = {
        "a.qweight": source(dense(q, 3).t().contiguous()), "a.scales": source(s.t().contiguous()),
        "a.qzeros": source(dense(codes(2, 32, 3) * 0 + 4, 3)),
    }  # fmt: skip
    stored = load(tensors["a.qweight"])[:2, 0].tolist()
    assert [word & 0xFFFFFFFF for word in stored] == words
    found = only(tensors, {**GPTQ, "bits": 3, "sym": True}).values(torch.float32)
    assert torch.equal(found, (q.float() - 4) * expanded(s, 64))


def dense(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of any width packed without gaps, by Python's own integers."""
    rows = []
    for row in values.tolist():
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [whole >> (32 * at) & 0xFFFFFFFF for at in range(count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def test_columns_that_belong_to_groups_by_g_idx() -> None:
    q, s, z = codes(32, 64), scales(32, 2), codes(32, 2)
    group = torch.arange(64)[torch.randperm(64, generator=DRAW)] % 2
    tensors = {**gptq(q, s, z), "a.g_idx": source(group.int())}
    expected = (q.float() - z[:, group].float()) * s[:, group].float()
    found = only(tensors, {**GPTQ, "desc_act": True})
    assert torch.equal(found.values(torch.float32), expected)
    assert found.quantized().inputs is not None  # type of the engine: columns sorted by group
    in_order = {**gptq(q, s, z), "a.g_idx": source(torch.arange(64, dtype=torch.int32) // 32)}
    assert only(in_order, GPTQ).quantized().inputs is None
    with pytest.raises(MissingTensor, match=r"a\.g_idx is missing and the config says desc_act"):
        only(gptq(q, s, z), {**GPTQ, "desc_act": True})
    uneven = {**tensors, "a.g_idx": source(torch.zeros(64, dtype=torch.int32))}
    with pytest.raises(BrokenFile, match=r"a\.g_idx does not give each of 2 groups 32 columns"):
        only(uneven, {**GPTQ, "desc_act": True}).quantized()


@pytest.mark.parametrize(
    ("packing", "version"),
    [("auto_round", 2), ("auto_round:gptqmodel", 2), ("auto_round:auto_gptq", 1)],
)
def test_auto_round_says_by_its_packing_format_how_zero_points_are_stored(
    packing: str, version: int
) -> None:
    q, s, z = codes(32, 64), scales(32, 2), codes(32, 2)
    method = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing}
    found = only(gptq(q, s, z, 4, version), method)
    assert torch.equal(found.values(torch.float32), (q.float() - expanded(z, 64)) * expanded(s, 64))
    in_awq = {**method, "packing_format": "auto_round:auto_awq", "sym": False}
    again = only(awq(q, s, z), in_awq)
    assert torch.equal(again.values(torch.float32), found.values(torch.float32))
    with pytest.raises(UnsupportedFamily, match="packing_format is 'auto_round:marlin'"):
        only(gptq(q, s, z), {**method, "packing_format": "auto_round:marlin"})


@pytest.mark.parametrize("packing", [None, "auto_round:fp8_static"])
def test_fp8_of_auto_round_needs_no_packing_format(packing: str | None) -> None:
    """Regression: where activations stay in 16 bits it writes none, and was refused."""
    method = {"quant_method": "auto-round", "bits": 8, "data_type": "fp", "fmt": "e4m3"}
    method |= {"group_size": 0} if packing is None else {"packing_format": packing}
    weight = fp8(6, 64)
    for scale, wide in ((torch.tensor([0.5]), [0.5] * 6), (torch.arange(1, 7).bfloat16(), None)):
        tensors = {"a.weight": source(weight), "a.weight_scale": source(scale)}
        found = only(tensors, method)
        factors = torch.tensor(wide or scale.tolist())[:, None]
        assert found.form == "fp8-row"
        assert torch.equal(found.values(torch.float32), weight.float() * factors)


@pytest.mark.parametrize(("bits", "columns"), [(4, 64), (8, 64), (3, 64), (4, 62)])
def test_compressed_tensors_packs_along_rows_and_zero_points_along_outputs(
    bits: int, columns: int
) -> None:
    q, s = codes(10, columns, bits), scales(10, 2).bfloat16()
    z = codes(10, 2, bits)
    tensors = {
        "a.weight_packed": source(dense(q, bits)), "a.weight_scale": source(s),
        "a.weight_shape": source(torch.tensor([10, columns])),
        "a.weight_zero_point": source(dense(z.t(), bits).t().contiguous()),
    }  # fmt: skip
    weights = {"num_bits": bits, "strategy": "group", "group_size": columns // 2}
    method: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    expected = (q.float() - expanded(z, columns)) * expanded(s, columns)
    assert torch.equal(only(tensors, method).values(torch.float32), expected)
    del tensors["a.weight_zero_point"]
    middle = (q.float() - 2 ** (bits - 1)) * expanded(s, columns)
    assert torch.equal(only(tensors, method).values(torch.float32), middle)
    weights["symmetric"] = False
    with pytest.raises(MissingTensor, match=r"a\.weight_zero_point is missing"):
        only(tensors, method)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_eight_bit_integers_may_be_asymmetric(has_zeros: bool) -> None:
    q = torch.randint(-128, 128, (6, 32), generator=DRAW, dtype=torch.int8)
    s, z = scales(6, 1).bfloat16(), torch.randint(-20, 20, (6, 1), generator=DRAW)
    tensors = {"a.weight": source(q), "a.weight_scale": source(s)}
    if has_zeros:
        tensors["a.weight_zero_point"] = source(z.to(torch.int8))
    expected = (q.float() - (z if has_zeros else 0)) * s.float()
    found = only(tensors, {})
    assert found.form == "int8-group"
    assert torch.equal(found.values(torch.float32), expected)


# Small floats that the engine has no form for


def test_nvfp4_is_divided_by_one_package_and_multiplied_by_the_other() -> None:
    packed = torch.randint(0, 256, (4, 16), generator=DRAW, dtype=torch.uint8)
    small = (torch.rand(4, 2, generator=DRAW) * 4).to(torch.float8_e4m3fn)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.empty(4, 32)
    for row in range(4):
        for column in range(32):
            code = int(packed[row, column // 2]) >> (4 * (column % 2)) & 15
            values[row, column] = table[code % 8] * (-1 if code > 7 else 1)
    both = values * small.float().repeat_interleave(16, 1)
    theirs = {
        "a.weight_packed": source(packed), "a.weight_scale": source(small),
        "a.weight_global_scale": source(torch.tensor([4.0])),
    }  # fmt: skip
    found = only(theirs, {"quant_method": "compressed-tensors"})
    assert found.form == "values" and torch.equal(found.values(torch.float32), both / 4)
    modelopt = {
        "a.weight": source(packed), "a.weight_scale": source(small),
        "a.weight_scale_2": source(torch.tensor(0.25)),
    }  # fmt: skip
    assert torch.equal(only(modelopt, {}).values(torch.float32), both / 4)
    del theirs["a.weight_global_scale"]
    with pytest.raises(MissingTensor, match=r"a\.weight_global_scale is missing"):
        only(theirs, {})


def test_powers_of_two_scale_32_columns() -> None:
    weight, powers = fp8(3, 64), torch.tensor([[127, 130]] * 3, dtype=torch.uint8)
    factors = torch.tensor([[1.0, 8.0]] * 3).repeat_interleave(32, 1)
    found = only({"a.weight": source(weight), "a.weight_scale": source(powers)}, {})
    assert found.words == "MXFP8"
    assert torch.equal(found.values(torch.float32), weight.float() * factors)
    packed = torch.full((3, 32), 0x92, dtype=torch.uint8)  # 1 and -0.5
    found = only({"a.weight_packed": source(packed), "a.weight_scale": source(powers)}, {})
    assert found.words == "MXFP4"
    assert found.values(torch.float32)[0, [0, 1, 32, 33]].tolist() == [1.0, -0.5, 8.0, -4.0]


def test_fp8_in_other_blocks_is_read_as_values() -> None:
    weight, scale = fp8(70, 96), torch.rand(3, 2, generator=DRAW) + 0.5
    tensors = {"a.weight": source(weight), "a.weight_scale_inv": source(scale)}
    found = only(tensors, {"quant_method": "fp8", "weight_block_size": [32, 64]})
    wide = scale.repeat_interleave(32, 0)[:70].repeat_interleave(64, 1)[:, :96]
    assert found.form == "values"
    assert torch.equal(found.values(torch.float32), weight.float() * wide)


# What does not fit together


def changed(tensors: Tensors, **other: torch.Tensor) -> Tensors:
    return {**tensors, **{f"a.{name}": source(tensor) for name, tensor in other.items()}}


def corrupted() -> dict[str, tuple[Tensors, dict[str, Any], type[HeadstartError], str]]:
    q, s, z = codes(16, 64), scales(16, 2), codes(16, 2)
    good, packed = awq(q, s, z), gptq(codes(32, 64), scales(32, 2), codes(32, 2))
    nan, wide = s.t().contiguous().clone(), s.t().contiguous()[:1].repeat(3, 1)
    nan[1, 3] = float("nan")
    fp = {"a.weight": source(fp8(4, 4)), "a.weight_scale": source(torch.full((4, 1), torch.inf))}
    sym = {**GPTQ, "sym": True}
    return {
        "NaN": (changed(good, scales=nan), AWQ, BrokenFile, "a.scales holds a scale that is no"),
        "infinite": (fp, {}, BrokenFile, "a.weight_scale holds a scale that is no finite"),
        "empty": (changed(good, scales=s.t()[:0]), AWQ, ShapeMismatch, "64 columns and 0 scales"),
        "uneven": (changed(good, scales=wide), AWQ, ShapeMismatch, "64 columns and 3 scales"),
        "group size": (good, {**AWQ, "group_size": 16}, BadConfig, "one scale for 32 columns"),
        "bits": (packed, {**GPTQ, "bits": 8}, BadConfig, "stored in 4 bits and the config says 8"),
        "rows": (changed(good, qweight=torch.zeros(64, 3, dtype=torch.int32)), AWQ, ShapeMismatch,
                 "a.qweight is I32"),
        "no scales": ({k: v for k, v in good.items() if k != "a.scales"}, AWQ, MissingTensor,
                      "a.scales is missing"),
        "zero points of sym": (packed, sym, BrokenFile, "means a zero point of .* says sym"),
        "version": (good, {**AWQ, "version": "gemv"}, UnsupportedFamily, "version is 'gemv'"),
        "planar": (packed, {**GPTQ, "checkpoint_format": "gptq_p"}, UnsupportedFamily, "'gptq_p'"),
        "no scale of fp8": ({"a.weight": source(fp8(4, 4))}, {}, MissingTensor, "no scale is"),
    }  # fmt: skip


@pytest.mark.parametrize("case", corrupted())
def test_what_does_not_fit_together_is_named(case: str) -> None:
    tensors, quantization, error, said = corrupted()[case]
    with pytest.raises(error, match=said):
        only(tensors, quantization).values(torch.float32)
