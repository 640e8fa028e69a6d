"""Damaged tensors, and configs that contradict the file, are refused with one clear line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.quantized_tensors import fp8, source

from headstart.checkpoint.quantized.described import described
from headstart.checkpoint.quantized.packing import awq_pack, pack
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.errors import BadConfig, BrokenFile, HeadstartError, ShapeMismatch, UnsupportedFamily

Tensors = dict[str, torch.Tensor]
DRAW = torch.Generator().manual_seed(5)
CODES = torch.randint(0, 16, (8, 64), generator=DRAW, dtype=torch.uint8)
SCALES = torch.rand(8, 2, generator=DRAW) + 0.5
MIDDLE = torch.full((8, 2), 8, dtype=torch.uint8)
AWQ = {"quant_method": "awq", "zero_point": False}
ROUND = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "sym": True}
BNB = {"quant_method": "bitsandbytes"}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": "gptq_v2"}


def values(tensors: Tensors, quantization: dict[str, Any]) -> torch.Tensor:
    sources = {f"a.{name}": source(tensor) for name, tensor in tensors.items()}
    return quantized_weights(sources, quantization)["a.weight"].values(torch.float32)


def awq(**other: torch.Tensor) -> Tensors:
    return {"qweight": awq_pack(CODES.t().contiguous()), "scales": SCALES.t().contiguous(), **other}


def gptq(**other: torch.Tensor) -> Tensors:
    made = {"qweight": pack(CODES, 4).t().contiguous(), "scales": SCALES.t().contiguous()}
    return {**made, "qzeros": pack(MIDDLE.t().contiguous(), 4), **other}


def packed(**other: torch.Tensor) -> Tensors:
    made = {"weight_packed": pack(CODES, 4), "weight_scale": SCALES}
    return {**made, "weight_shape": torch.tensor([8, 64]), **other}


def int8(**other: torch.Tensor) -> Tensors:
    return {"weight": CODES.to(torch.int8), "weight_scale": SCALES, **other}


def mxfp4(**other: torch.Tensor) -> Tensors:
    powers = torch.full((8, 2), 127, dtype=torch.uint8)
    return {"weight_packed": CODES[:, :32].contiguous(), "weight_scale": powers, **other}


def nvfp4(**other: torch.Tensor) -> Tensors:
    small = torch.ones(8, 4).to(torch.float8_e4m3fn)
    made = {"weight_packed": CODES[:, :32].contiguous(), "weight_scale": small}
    return {**made, "weight_global_scale": torch.tensor([2.0]), **other}


def fp8_row(**other: torch.Tensor) -> Tensors:
    return {"weight": fp8(8, 64), "weight_scale": torch.ones(8, 1), **other}


def with_code(code: int, dtype: torch.dtype) -> torch.Tensor:
    """8-bit floats, one of which is `code`."""
    return CODES.clone().index_fill_(1, torch.tensor([9]), code).view(dtype)


def compressed(form: str | None = None, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}}
    method = {"quant_method": "compressed-tensors", "config_groups": groups}
    return method if form is None else {**method, "format": form}


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def small(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int8)


LARGE = torch.full((64,), 2**31 - 1, dtype=torch.int32)
MX8 = {"weight": fp8(2, 32), "weight_scale": torch.full((2, 1), 255, dtype=torch.uint8)}
BLOCKS = {"weight": fp8(4, 4), "weight_scale_inv": torch.ones(1, 1)}
CT = compressed()
CASES: dict[str, tuple[Tensors, dict[str, Any], type[HeadstartError], str]] = {
    "a group out of range": (gptq(g_idx=LARGE), GPTQ, BrokenFile, "a.g_idx does not give each"),
    "AWQ without shape": (awq(qweight=words()), AWQ, ShapeMismatch, r"shape \(\); expected a matr"),
    "AWQ in three": (awq(qweight=words(1, 2, 3)), AWQ, ShapeMismatch, "a.qweight .* a matrix"),
    "AWQ's scales": (awq(scales=words(2, 8)), AWQ, ShapeMismatch, "a.scales is I32; expected BF16"),
    "a row of words": (packed(weight_packed=words(8)), CT, ShapeMismatch, "a stack of them"),
    "no shape": (packed(weight_shape=torch.zeros(0).long()), CT, ShapeMismatch, r"says \(0,\)"),
    "other rows": (packed(weight_shape=torch.tensor([9, 64])), CT, ShapeMismatch, "expected 8"),
    "a lone scale": (packed(weight_scale=torch.tensor(1.0)), CT, ShapeMismatch, "0 scales per row"),
    "a row of bytes": ({"weight": small(8), "weight_scale": torch.ones(1)}, {}, ShapeMismatch,
                       "a.weight is I8 of shape"),
    "small floats without shape": (mxfp4(weight_packed=torch.tensor(1, dtype=torch.uint8)), {},
                                   ShapeMismatch, "a.weight_packed is U8"),
    "a row of small floats": (nvfp4(weight_packed=CODES[0]), {}, ShapeMismatch, "is U8 of shape"),
    "packed zeros": (packed(weight_zero_point=words(2, 2)), CT, ShapeMismatch,
                     r"a.weight_zero_point is I32 \(2, 2\); expected I32 \(1, 2\)"),
    "plain zeros": (packed(weight_zero_point=small(2, 8)), CT, ShapeMismatch,
                    r"expected I8 \(8, 2\)"),
    "zeros of floats": (packed(weight_zero_point=SCALES), CT, ShapeMismatch, "is F32 .* I8"),
    "large zeros": (packed(weight_zero_point=small(8, 2, value=9)), CT, BrokenFile, "4 bits"),
    "zeros of int8": (int8(weight_zero_point=small(8, 1)), {}, ShapeMismatch, "weight_zero_point"),
    "no number of MXFP8": (MX8, {}, BrokenFile, "a.weight_scale holds a scale that is no finite"),
    "no number of MXFP4": (mxfp4(weight_scale=torch.full((8, 2), 255, dtype=torch.uint8)), {},
                           BrokenFile, "a.weight_scale holds"),
    "NVFP4 of 0": (nvfp4(weight_global_scale=torch.zeros(1)), {}, BrokenFile, "a scale of 0"),
    "NVFP4 of two": (nvfp4(weight_global_scale=torch.ones(2)), {}, ShapeMismatch, "one F32 value"),
    "transforms": (packed(), {**CT, "transform_config": {"config_groups": {"R1": {}}}},
                   UnsupportedFamily, "transform_config asks for turns"),
    "rotation": (gptq(), {**GPTQ, "rotation": "hadamard"}, UnsupportedFamily, "rotation asks"),
    "rotation in meta": (gptq(), {**GPTQ, "meta": {"rotation": "hadamard"}}, UnsupportedFamily,
                         "rotation asks"),
    "AutoRound's rotation": (gptq(), {**ROUND, "rotation_config": {"hadamard_type": "hadamard"}},
                             UnsupportedFamily, "quantization_config.rotation_config asks"),
    "SpinQuant": (gptq(), {**ROUND, "spinquant_config": {"r1": True}}, UnsupportedFamily,
                  "quantization_config.spinquant_config asks"),
    "integers beside powers": (mxfp4(), {**ROUND, "data_type": "mx_int"}, UnsupportedFamily,
                               r"data_type is 'mx_int' of auto-round \(a\)"),
    "such in one layer": (mxfp4(), {**ROUND, "extra_config": {"a": {"data_type": "mx_int"}}},
                          UnsupportedFamily, "data_type is 'mx_int'"),
    "words without packing": (gptq(), {"quant_method": "auto-round", "data_type": "fp", "bits": 8},
                              UnsupportedFamily, "a.qweight may be packed .* packing_format"),
    "bitsandbytes int8": ({"weight": small(8, 64), "SCB": torch.ones(8)}, BNB, UnsupportedFamily,
                          r"a.weight is stored as I8 .*bitsandbytes\)"),
    "nf4": ({"weight": torch.zeros(256, 1).byte(), "weight.absmax": torch.ones(8)}, BNB,
            UnsupportedFamily, r"a.weight is stored as U8 .*bitsandbytes\)"),
    "AWQ of ModelOpt": (nvfp4(pre_quant_scale=torch.ones(64)), {"quant_method": "modelopt"},
                        UnsupportedFamily, r"a.weight_packed is stored .*modelopt\)"),
    "FP8 of ModelOpt's AWQ": (fp8_row(pre_quant_scale=torch.ones(64)), {}, UnsupportedFamily,
                              "a.weight is stored as F8_E4M3 in a scheme"),
    **{f"no number of {dtype} {code:x}": (fp8_row(weight=with_code(code, dtype)), {}, BrokenFile,
                                          "a.weight holds F8_.* no finite numbers")
       for dtype, code in ((E4M3, 0x7F), (E4M3, 0xFF), (E5M2, 0x7C), (E5M2, 0xFC), (E5M2, 0xFF))},
    "no number of MXFP8's codes": (
        {"weight": with_code(0xFF, E4M3), "weight_scale": torch.full((8, 2), 127).byte()}, {},
        BrokenFile, "a.weight holds F8_E4M3 codes"),
    "a scale below 0": (fp8_row(weight_scale=-torch.ones(8, 1)), {}, BrokenFile,
                        "a.weight_scale holds a scale below 0 beside a.weight"),
    "a type": (packed(), compressed(type="float"), BadConfig, "I32 and the config says type 'flo"),
    "a format": (packed(), compressed("int-quantized"), BadConfig, "stores weight as I8"),
    "an unknown format": (packed(), compressed("marlin-24"), UnsupportedFamily, "'marlin-24'"),
    "a method": (gptq(), {**GPTQ, "quant_method": "gptq_marlin_24"}, UnsupportedFamily,
                 "names gptq_marlin_24"),
    "blocks": (BLOCKS, {"quant_method": "fp8", "weight_block_size": [128]}, BadConfig,
               r"weight_block_size is \[128\]; expected two numbers"),
    "structure": (BLOCKS, compressed(num_bits=8, block_structure="128x"), BadConfig,
                  "block_structure is '128x'"),
    "an order": (packed(), compressed(actorder="some"), BadConfig, "actorder is 'some'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_damaged_is_named(case: str) -> None:
    tensors, quantization, error, said = CASES[case]
    with pytest.raises(error, match=said):
        values(tensors, quantization)


@pytest.mark.parametrize("made", [awq, gptq, packed, int8, mxfp4, nvfp4])
def test_undamaged_they_are_read(made: Any) -> None:
    """The control, with configs whose turns are empty."""
    method = {awq: AWQ, gptq: {**GPTQ, "rotation": None}, packed: CT}.get(made, {})
    assert values(made(), {**method, "transform_config": {"config_groups": {}}}).isfinite().all()


def test_every_finite_code_is_read_and_a_scale_of_0_makes_zeros() -> None:
    """The control: neither is damage."""
    for dtype, last in ((E4M3, 0x7E), (E5M2, 0x7B)):
        magnitudes = torch.arange(last + 1, dtype=torch.uint8)
        codes = torch.stack([magnitudes, magnitudes | 0x80]).view(dtype)
        scales = torch.tensor([[1.0], [0.0]])
        found = values({"weight": codes, "weight_scale": scales}, {})
        assert torch.equal(found[0], codes[0].float()) and not found[1].any()


ORDER = (torch.randperm(64, generator=DRAW) % 2).int()


@pytest.mark.parametrize("said", [None, "group", "dynamic", True])
def test_the_stored_order_of_columns_decides(said: str | bool | None) -> None:
    own = ORDER.long()
    expected = (CODES.float() - 8) * SCALES[:, own]
    method = compressed(strategy="group", group_size=32, actorder=said)
    assert torch.equal(values(packed(weight_g_idx=ORDER), method), expected)
    of_bytes = values(int8(weight_g_idx=ORDER), {})
    assert torch.equal(of_bytes, CODES.float() * SCALES[:, own])
    in_order = (CODES.float() - 8) * SCALES.repeat_interleave(32, 1)
    none = torch.full((64,), -1, dtype=torch.int32)
    assert torch.equal(values(packed(weight_g_idx=none), method), in_order)


@pytest.mark.parametrize("said", ["weight", "static", False])
def test_an_order_that_the_config_denies_is_refused(said: str | bool) -> None:
    with pytest.raises(BadConfig, match=r"a\.weight_g_idx gives columns to groups out of order"):
        values(packed(weight_g_idx=ORDER), compressed(actorder=said))
    with pytest.raises(HeadstartError, match=r"a\.weight_g_idx is missing"):
        values(packed(), compressed(actorder="group"))


def test_every_matrix_of_a_stack_has_its_own_global_scale() -> None:
    one = nvfp4(weight_global_scale=torch.tensor([2.0]))
    stack = {name: torch.stack([tensor] * 2) for name, tensor in one.items()}
    stack["weight_global_scale"] = torch.tensor([2.0, 4.0])
    sources = {f"a.{name}": source(tensor) for name, tensor in stack.items()}
    found = quantized_weights(sources, {})["a.weight"]
    first, second = (found.values(torch.float32, number) for number in (0, 1))
    assert first.any() and torch.equal(first, 2 * second)


def test_a_name_of_auto_round_is_no_pattern() -> None:
    extra = {"layers.1": {"bits": 2}, "a.layers.1": {"bits": 8}, r".*\.2$": {"bits": 3}}
    method = {
        "quant_method": "auto-round", "packing_format": "auto_round", "bits": 4,
        "extra_config": {r".*layers\.1$": {"bits": 5}, **extra},
    }  # fmt: skip
    names = ("a.layers.1", "a.layersX1", "b.layers.1", "a.layers.2", "a.layers.10")
    assert [described(name, method).bits for name in names] == [8, 4, 5, 3, 4]
