"""What weights of 8 and 4 bits change in a model's predictions: perplexity and agreement on a text.

python benchmarks/weights_quality.py MODEL --text FILE [--weights fp8] [--only layers]
    [--lm-head int8] [--kernels] [--device cpu] [--tokens 4096] [--window 512]

Runs the trunk over windows of the text as it is (fp32 on a CPU, bf16 on a GPU) and with its weights
rounded, and compares: perplexity, how often the most likely token is the same, and the mean KL
divergence. On a CPU fp8 is emulated: the same weights, products in fp32; products of integers are
torch's or, with --kernels, those of headstart/backends/numba. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch

from headstart.backends.base import TrunkRows
from headstart.backends.numba.compiler import why_missing
from headstart.backends.weights import (
    Int8Linear,
    WeightFormat,
    convert_weights,
    int4_linear,
)
from headstart.checkpoint.quantized.rounding import INT4_GROUP
from headstart.engine.engine import Engine
from headstart.models.quantized import Fp8Linear

FORMATS: dict[str, WeightFormat] = {
    "int8": Int8Linear, "int4": int4_linear, "int4-64": partial(int4_linear, group=64),
    "fp8": Fp8Linear.of,
}  # fmt: skip


def weight_format(name: str, *, is_compiled: bool) -> WeightFormat:
    """How matrices are held; integers by the compiled kernels where this machine has them."""
    if not is_compiled or name == "fp8" or why_missing() is not None:
        return FORMATS[name]
    from headstart.backends.numba.linear import PackedLinear
    from headstart.backends.numba.weight_formats import packed_as_stored

    if name == "int8":
        return PackedLinear
    group = 64 if name == "int4-64" else INT4_GROUP
    return lambda source: packed_as_stored(int4_linear(source, group))


@torch.inference_mode()
def log_probs(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """log P(next token) at every position of one window, [n, vocab]."""
    blocks = range(-(-len(tokens) // engine.options.block_size))
    rows = TrunkRows(tokens, 0, blocks, num_logits=len(tokens), feeds_head=False)
    _, logits = engine.backend.trunk_pass([rows])
    return logits.log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--weights", choices=sorted(FORMATS), default="fp8")
    parser.add_argument("--only", choices=("layers", "lm_head"), help="round a part of the trunk")
    parser.add_argument("--lm-head", choices=sorted(FORMATS), help="if it has another format")
    parser.add_argument("--kernels", action="store_true", help="by the compiled kernels")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    arguments = parser.parse_args()
    engines = [
        Engine(
            arguments.model, device=arguments.device, speculate=0, kv_bytes=1 << 28, kernels="off"
        )
        for _ in range(2)
    ]
    weights = arguments.weights
    trunk = engines[1].model.trunk
    form = weight_format(weights, is_compiled=arguments.kernels)
    if arguments.only != "lm_head":
        convert_weights(trunk.layers, form)
    if arguments.only != "layers":
        own = form if arguments.lm_head is None else weight_format(
            arguments.lm_head, is_compiled=arguments.kernels
        )  # fmt: skip
        trunk.add_module("lm_head", own(trunk.lm_head))
    text = engines[0].prompts.read(arguments.text.read_text())[: arguments.tokens]
    losses = [0.0, 0.0]
    same = divergence = 0.0
    count = 0
    for start in range(0, len(text) - 1, arguments.window):
        window = text[start : start + arguments.window]
        following = torch.tensor(window[1:], device=arguments.device)
        plain, rounded = (log_probs(engine, window)[:-1] for engine in engines)
        for place, values in enumerate((plain, rounded)):
            losses[place] -= float(values.gather(1, following[:, None]).sum())
        same += float((plain.argmax(-1) == rounded.argmax(-1)).sum())
        divergence += float((plain.exp() * (plain - rounded)).sum())
        count += len(following)
    result = {
        "weights": weights,
        "products": "compiled" if arguments.kernels else "torch",
        "lm_head": arguments.lm_head or weights,
        "rounded": arguments.only or "everything",
        "against": str(engines[0].model.dtype),
        "tokens": count,
        "perplexity": round(math.exp(losses[0] / count), 4),
        "perplexity_rounded": round(math.exp(losses[1] / count), 4),
        "change_percent": round(100 * (math.exp((losses[1] - losses[0]) / count) - 1), 3),
        "same_most_likely_token": round(same / count, 4),
        "mean_kl": round(divergence / count, 6),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
