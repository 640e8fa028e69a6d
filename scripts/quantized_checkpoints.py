"""Make tests/fixtures/quantized/whole: tiny checkpoints as the reference packages write them.

Run once for each name, in an environment with that package, transformers and torch:

    python scripts/quantized_checkpoints.py tests/fixtures/quantized/whole NAME

A folder is what the package wrote, its config.json with the lists and overrides of its own, without
a path of the machine. Beside it lies NAME.safetensors: logits of transformers with the weights that
the package itself dequantised, and in its metadata a SHA-256 of each of these weights, in which 0
has no sign.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

GROUP, VOCAB = 32, 64
KEPT = ("config.json", "model.safetensors")
WHOLE = "model.layers.1.mlp.down_proj"  # stays plain
FINE = "model.layers.0.self_attn.o_proj"  # gets 8 bits where there are 4
Weights = dict[str, torch.Tensor]


def plain(folder: Path) -> Any:
    """A tiny Llama with a tokenizer, saved, and loaded as users load a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(24)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, max_position_embeddings=128,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", pad_token="t0", eos_token="t2"
    )
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), tokenizer


def texts(length: int) -> list[torch.Tensor]:
    """Ids for a calibration that wants some."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1, length), generator=draw) for _ in range(8)]


def auto_round(out: Path, **asked: Any) -> tuple[Weights, str]:
    """Rounded to nearest, and the product of each loaded module with the unit matrix."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM

    model, tokenizer = plain(out / "plain")
    rounder = AutoRound(model, tokenizer, iters=0, device_map="cpu", disable_opt_rtn=True, **asked)
    rounder.quantize_and_save(output_dir=str(out / "made"), format="auto_round")
    (folder,) = (path.parent for path in (out / "made").rglob("config.json"))
    shutil.copytree(folder, out / "written")
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    found = {}
    for name, module in loaded.named_modules():
        if hasattr(module, "qweight"):
            unit = torch.eye(module.infeatures, dtype=torch.float16)
            found[name] = module(unit).t().contiguous()
        elif hasattr(module, "dequant_weight_online"):
            found[name] = module.dequant_weight_online()
    return found, "AutoRound.quantize_and_save, modules of AutoModelForCausalLM"


def gptq(out: Path) -> tuple[Weights, str]:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    plain(out / "plain")
    dynamic = {f"-:{WHOLE}": {}, FINE.replace(".", r"\."): {"bits": 8}}
    asked = QuantizeConfig(bits=4, group_size=GROUP, desc_act=True, sym=False, dynamic=dynamic)
    model = GPTQModel.load(str(out / "plain"), asked, device="cpu")
    calibration = [{"input_ids": ids[0].tolist(), "attention_mask": [1] * 48} for ids in texts(48)]
    model.quantize(calibration, batch_size=1)
    model.save(str(out / "written"))
    loaded = GPTQModel.load(
        str(out / "written"), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16
    )
    found = {
        name: module.dequantize_weight().t().contiguous()
        for name, module in loaded.model.named_modules() if hasattr(module, "dequantize_weight")
    }  # fmt: skip
    return found, "GPTQModel.quantize, TorchLinear.dequantize_weight"


def compressed(out: Path) -> tuple[Weights, str]:
    """Attention in 4 bits with zero points, MLPs in FP8 by row."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model, tokenizer = plain(out / "plain")
    four = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": GROUP}
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": {**four, "type": "int"}},
        "group_1": {
            "targets": ["re:.*mlp.*"], "weights": {**eight, "strategy": "channel"},
            "input_activations": {**eight, "strategy": "token", "dynamic": True},
        },
    }  # fmt: skip
    lists = QuantizationModifier(config_groups=groups, ignore=["lm_head", f"re:.*{WHOLE}"])
    oneshot(model=model, processor=tokenizer, recipe=lists)
    model.save_pretrained(out / "written", save_compressed=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        out / "written", quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    found = {
        name: module.weight.detach() for name, module in loaded.named_modules()
        if hasattr(module, "quantization_scheme")
    }  # fmt: skip
    return found, "oneshot, AutoModelForCausalLM with run_compressed=False"


BITS: dict[str, Any] = {"layer_config": {WHOLE: {"bits": 16}, FINE: {"bits": 8}}}
CASES: dict[str, tuple[str, Callable[[Path], tuple[Weights, str]]]] = {
    "auto-round": (
        "auto-round", lambda out: auto_round(out, scheme="W4A16", group_size=GROUP, **BITS),
    ),
    "auto-round-fp8": (
        "auto-round",
        lambda out: auto_round(out, scheme="FP8_STATIC", dataset=texts(128), seqlen=128),
    ),
    "gptqmodel": ("gptqmodel", gptq),
    "llmcompressor": ("llmcompressor", compressed),
}  # fmt: skip


def logits(folder: Path, dequantized: Weights) -> torch.Tensor:
    """Of a plain model in fp32 with these weights, for the tokens 2 to 19."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, weight in dequantized.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        module.weight.data = weight.float()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(2, 20)[None]).logits[0]
    return found


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256((weight + 0.0).view(torch.int16).numpy().tobytes()).hexdigest()


def main(out: Path, name: str) -> None:
    package, make = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights, how = make(folder)
        assert len(weights) >= 13, "a package dequantises its modules otherwise"
        (out / name).mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            shutil.copy(folder / "written" / file, out / name / file)
        found = logits(folder / "plain", weights)
    config = json.loads((out / name / "config.json").read_text())
    config["quantization_config"].get("meta", {}).pop("offload_to_disk_path", None)
    (out / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    digests = {f"{name}.weight": [str(w.dtype), digest(w)] for name, w in weights.items()}
    metadata = {
        "made_by": f"{package} {version(package)}: {how}",
        "made_with": "scripts/quantized_checkpoints.py", "digests": json.dumps(digests),
    }  # fmt: skip
    save_file({"logits": found.contiguous()}, out / f"{name}.safetensors", metadata)
    sys.stdout.write(f"{name}: {metadata['made_by']}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
