"""Make tests/fixtures/quantized: small matrices as the reference packages store and read them.

Run in an environment of its own, with the packages in `PACKAGES` and torch:

    python scripts/quantized_fixtures.py tests/fixtures/quantized [NAME ...]

`ct-sorted` wants compressed-tensors 0.17, the last release that sorted columns by group.
Each file holds the tensors of one linear module as they are stored (`linear.*`) and what the
package itself makes of them (`expected`); its metadata says which package and function that was,
and the quantisation config of such a checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import pad

PACKAGES = ("compressed-tensors", "auto-round", "transformers", "gptqmodel")
ROWS, COLUMNS, GROUP = 32, 64, 32
Made = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any], str]


def weight(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    """Values of another size in each row, and not centred."""
    draw = torch.Generator().manual_seed(24)
    sizes = torch.logspace(-2, 0, rows)[:, None]
    return (torch.randn(rows, columns, generator=draw) + 0.3) * sizes


def order() -> torch.Tensor:
    """Which group each column belongs to, out of order."""
    draw = torch.Generator().manual_seed(1)
    return (torch.arange(COLUMNS) // GROUP)[torch.randperm(COLUMNS, generator=draw)].int()


def ranges(values: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of the values that share a scale."""
    rows, columns = values.shape
    if args.strategy == "tensor":
        return values.min().reshape(1), values.max().reshape(1)
    if args.strategy == "block":
        high, wide = args.block_structure
        padded = pad(values, (0, -columns % wide, 0, -rows % high))
        tiles = padded.view(padded.shape[0] // high, high, -1, wide)
        return tiles.amin(dim=(1, 3)), tiles.amax(dim=(1, 3))
    if args.actorder == "group":
        values = values[:, order().argsort(stable=True)]
    parts = values.view(rows, -1, args.group_size or columns)
    return parts.amin(-1), parts.amax(-1)


def compressed(
    form: str, weights: dict[str, Any], *, shape: tuple[int, int] = (ROWS, COLUMNS), **fields: Any
) -> Made:
    """What a compressor of compressed-tensors writes and decompresses; `fields` of its scheme."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    values = weight(*shape).bfloat16()
    args = QuantizationArgs(**weights)
    others = {name: QuantizationArgs(**given) for name, given in fields.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=args, **others)
    low, high = ranges(values.float(), args)
    state: dict[str, torch.Tensor] = {"weight": values}
    whole = None
    if form == "nvfp4-pack-quantized":
        whole = generate_gparam(values.amin().float(), values.amax().float()).reshape(1)
        state["weight_global_scale"] = whole
    scales, zeros = calculate_qparams(low, high, args, global_scale=whole)
    is_mx = "fp4" in form or "mx" in form
    state["weight_scale"] = scales if is_mx else scales.to(torch.bfloat16)
    if not args.symmetric:
        state["weight_zero_point"] = zeros
    if args.actorder == "group":
        state["weight_g_idx"] = order()
    if "input_activations" in fields:
        state["input_scale"] = torch.tensor([0.02], dtype=torch.bfloat16)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **fields}},
    }  # fmt: skip
    return stored, expected, config, f"{compressor.__name__}.compress, .decompress"


def grouped(bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor | int]:
    parts = weight().view(ROWS, -1, GROUP)
    if symmetric:
        scales = parts.abs().amax(-1) / (2 ** (bits - 1) - 0.5)
        return scales.half().float(), 2 ** (bits - 1)
    scales = ((parts.amax(-1) - parts.amin(-1)) / (2**bits - 1)).half().float()
    return scales, (-parts.amin(-1) / scales).round().clamp(1, 2**bits - 1)


def linear() -> nn.Linear:
    made = nn.Linear(COLUMNS, ROWS, bias=False)
    made.weight.data = weight()
    return made


def auto_round(packing: str, bits: int, symmetric: bool) -> Made:
    """AutoRound's own packing, and the product of its module with the unit matrix, in fp16."""
    scales, zeros = grouped(bits, symmetric=symmetric)
    if packing.endswith("awq"):
        from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm

        points = torch.full_like(scales, zeros) if isinstance(zeros, int) else zeros
        module = WQLinear_GEMM.from_linear(
            linear(), bits, GROUP, scales=scales.t().contiguous(), zeros=points.t().contiguous()
        )
        expected = dequantize_gemm(module.qweight, module.qzeros, module.scales, bits, GROUP).t()
        how = "WQLinear_GEMM.from_linear, dequantize_gemm"
    else:
        is_first = packing.endswith("auto_gptq")
        if is_first:
            from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
        else:
            from auto_round_extension.torch.qlinear_torch import QuantLinear
        module = QuantLinear(bits, GROUP, COLUMNS, ROWS, False, g_idx=is_first)
        module.device = torch.device("cpu")  # which one of the two forgets to set
        module.pack(linear(), scales, zeros, None)
        expected = module(torch.eye(COLUMNS, dtype=torch.float16)).t()
        how = f"{module.__class__.__module__}.QuantLinear.pack, forward of the unit matrix"
    config = {
        "quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": symmetric,
        "packing_format": packing,
    }  # fmt: skip
    stored = {n: t for n, t in module.state_dict().items() if n != "bias"}
    return stored, expected.contiguous(), config, how


class Model(nn.Sequential):
    """With the type that a model of transformers has."""

    dtype = torch.bfloat16


def auto_round_fp8(act_bits: int, group: int) -> Made:
    """FP8 as AutoRound packs it, one scale for all (group 0) or per row (-1)."""
    from auto_round.experimental.qmodules.fp8_static import WeightFP8ActFP8StaticQuantLinear
    from auto_round.export.export_to_autoround.export_to_fp8 import pack_layer

    layer = linear().bfloat16()
    model = Model(layer)
    sizes = layer.weight.abs()
    largest = sizes.max() if group == 0 else sizes.amax(1)
    given = {"bits": 8, "group_size": group, "act_bits": act_bits, "data_type": "fp", "zp": None}
    given["scale"] = (largest / 448).float()
    if act_bits == 8:
        given["act_scale"] = torch.tensor([0.02])
    for name, value in given.items():
        setattr(layer, name, value)
    pack_layer("0", model, "fp")
    stored = dict(model[0].state_dict())
    reader = WeightFP8ActFP8StaticQuantLinear(
        COLUMNS, ROWS, stored["weight"], stored["weight_scale"], dtype=torch.bfloat16
    )
    expected = reader.dequant_weight_online()
    config: dict[str, Any] = {
        "quant_method": "auto-round", "bits": 8, "group_size": group, "data_type": "fp",
        "sym": True, "fmt": "e4m3", "activation_scheme": "static",
    }  # fmt: skip
    if act_bits == 8:
        config["packing_format"] = "auto_round:fp8_static"
    how = "export_to_fp8.pack_layer, WeightFP8ActFP8StaticQuantLinear.dequant_weight_online"
    return stored, expected, config, how


def gptq(bits: int, form: str, *, is_sorted: bool, symmetric: bool) -> Made:
    """GPTQModel's own packing and dequantising, in fp16."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    scales, zeros = grouped(bits, symmetric=symmetric)
    points = torch.full_like(scales, zeros) if isinstance(zeros, int) else zeros
    group = order() if is_sorted else torch.arange(COLUMNS) // GROUP
    module = TorchLinear(
        bits=bits, group_size=GROUP, sym=symmetric, desc_act=is_sorted, in_features=COLUMNS,
        out_features=ROWS, bias=False, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    module.pack(linear(), scales, points, g_idx=group.int())
    module.post_init()
    expected = module.dequantize_weight().t().contiguous()
    stored = {n: t.clone() for n, t in module.state_dict().items() if n in _GPTQ_TENSORS}
    if form == FORMAT.GPTQ.value:
        asked = QuantizeConfig(bits=bits, group_size=GROUP)
        convert_gptq_v2_to_v1_format_module(module, asked)
        stored["qzeros"] = module.qzeros.clone()
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric,
        "desc_act": is_sorted, "checkpoint_format": form,
    }  # fmt: skip
    return stored, expected, config, "TorchLinear.pack, dequantize_weight"


_GPTQ_TENSORS = ("qweight", "qzeros", "scales", "g_idx")


def blocks() -> Made:
    """Block FP8 as transformers quantises and dequantises it."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = weight(256, 16).bfloat16()
    tiles = values.float().view(2, 128, 1, 16)
    scales = tiles.abs().amax(dim=(1, 3)) / 448
    stored = (tiles / scales[:, None, :, None]).view(256, 16).to(torch.float8_e4m3fn)
    expected = Fp8Dequantize(None)._dequantize_one(stored, scales, torch.bfloat16)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return {"weight": stored, "weight_scale_inv": scales}, expected, config, "Fp8Dequantize"


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
CHANNEL = {"num_bits": 8, "strategy": "channel"}
FLOAT = {"type": "float", "symmetric": True}
TENSOR = {"num_bits": 8, "strategy": "tensor", **FLOAT}
STATIC = {**TENSOR, "dynamic": False}
BLOCK = {**TENSOR, "strategy": "block"}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
CT: dict[str, tuple[str, dict[str, Any]]] = {
    "ct-pack": ("pack-quantized", {**INT4, "symmetric": True}),
    "ct-pack-asymmetric": ("pack-quantized", {**INT4, "symmetric": False}),
    "ct-pack-3-bits": ("pack-quantized", {**INT4, "num_bits": 3, "symmetric": False}),
    "ct-pack-8-bits": ("pack-quantized", {**INT4, "num_bits": 8, "symmetric": True}),
    "ct-int": ("int-quantized", {**CHANNEL, "type": "int", "symmetric": True}),
    "ct-int-asymmetric": ("int-quantized", {**CHANNEL, "type": "int", "symmetric": False}),
    "ct-float-row": ("float-quantized", {**CHANNEL, **FLOAT}),
    "ct-float-tensor": ("float-quantized", {**CHANNEL, **FLOAT, "strategy": "tensor"}),
    "ct-int-groups": ("int-quantized", {**INT4, "num_bits": 8, "symmetric": True}),
    "ct-sorted": ("pack-quantized", {**INT4, "symmetric": False, "actorder": "group"}),
    "ct-nvfp4": (
        "nvfp4-pack-quantized",
        {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    ),
    "ct-mxfp4": ("mxfp4-pack-quantized", {**FLOAT, **MX, "num_bits": 4}),
    "ct-mxfp8": ("mxfp8-quantized", {**FLOAT, **MX, "num_bits": 8}),
}
CASES: dict[str, tuple[str, Callable[[], Made]]] = {
    **{name: ("compressed-tensors", partial(compressed, *case)) for name, case in CT.items()},
    "ct-float-static": (
        "compressed-tensors",
        partial(compressed, "float-quantized", TENSOR, input_activations=STATIC),
    ),
    **{
        f"ct-float-blocks-{size[0]}x{size[1]}": (
            "compressed-tensors",
            partial(compressed, "float-quantized", {**BLOCK, "block_structure": size}, shape=shape),
        )
        for size, shape in (([128, 128], (136, 130)), ([16, 24], (40, 64)))
    },
    "auto-round-fp8": ("auto-round", partial(auto_round_fp8, 16, 0)),
    "auto-round-fp8-static": ("auto-round", partial(auto_round_fp8, 8, -1)),
    "auto-round-gptq": ("auto-round", partial(auto_round, "auto_round:auto_gptq", 4, True)),
    "auto-round-gptq-asymmetric": (
        "auto-round", partial(auto_round, "auto_round:auto_gptq", 4, False),
    ),
    "auto-round": ("auto-round", partial(auto_round, "auto_round", 4, False)),
    "auto-round-8-bits": ("auto-round", partial(auto_round, "auto_round", 8, True)),
    "auto-round-3-bits": ("auto-round", partial(auto_round, "auto_round:auto_gptq", 3, False)),
    "auto-round-awq": ("auto-round", partial(auto_round, "auto_round:auto_awq", 4, False)),
    "gptq": ("gptqmodel", partial(gptq, 4, "gptq", is_sorted=False, symmetric=True)),
    "gptq-sorted": ("gptqmodel", partial(gptq, 4, "gptq_v2", is_sorted=True, symmetric=False)),
    "gptq-sorted-8-bits": ("gptqmodel", partial(gptq, 8, "gptq", is_sorted=True, symmetric=False)),
    "block-fp8": ("transformers", blocks),
}  # fmt: skip


def main(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        package, make = CASES[name]
        stored, expected, config, how = make()
        tensors = {f"linear.{n}": t.detach().clone().contiguous() for n, t in stored.items()}
        metadata = {
            "made_by": f"{package} {version(package)}: {how}",
            "made_with": "scripts/quantized_fixtures.py",
            "quantization_config": json.dumps(config, default=str),
        }
        path = out / f"{name}.safetensors"
        save_file({**tensors, "expected": expected.detach().clone().contiguous()}, path, metadata)
        sys.stdout.write(f"{name}: {path.stat().st_size} bytes, {metadata['made_by']}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
