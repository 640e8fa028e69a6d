"""Kernels of quantised weights and K/V on a GPU, each against plain PyTorch.

PYTHONPATH=. python3 scripts/gpu_quantized_check.py [--only linear:int4,experts:fp8-block,engine:0]
    [--wide] [--jobs 12]

Sizes are those of models, so that every way to cut a product is taken. Parts run in processes of
their own, side by side, since most of their time goes into compiling. A line per check says PASS
or FAIL, the error in parts of the result's norm, and what it may be; exits 1 where one failed. An
error of 8-bit floats is against the same rounded rows, so that it is the kernel's own. The engine
runs tiny checkpoints of each format with drafts, against itself on the CPU, which rounds no rows.
With --wide codes of 4-bit experts become bf16 for more than a few rows.
Without a GPU kernels run in Triton's interpreter, with sizes of their own, and no engine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen before triton is imported

from torch import Tensor, nn

from headstart.backends.cuda import fp8_library
from headstart.backends.cuda.attending import cut_for
from headstart.backends.cuda.experts import moe_terms
from headstart.backends.cuda.fp8_linear import KernelFp8
from headstart.backends.cuda.kernel_linear import KernelLinear
from headstart.backends.cuda.kernels import moe_wide_groups
from headstart.backends.cuda.kernels.attention import paged_attention
from headstart.backends.cuda.kernels.attention_cuts import usual_context
from headstart.backends.cuda.kernels.eight_bits import GROUP, fp8_rows
from headstart.backends.cuda.quantized import hold_for_kernels
from headstart.backends.cuda.quantized_experts import hold_experts
from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.quantized import weights as stored
from headstart.checkpoint.quantized.weights import Fp8Weight, GroupWeight, QuantizedWeight
from headstart.engine.engine import Engine
from headstart.heads.quantized_copy import quantized_copy
from headstart.models.attention import empty_fp8_cache
from headstart.models.feed_forward import MoE
from headstart.models.kv_fp8 import to_kv_fp8
from headstart.models.moe_config import MoeConfig
from headstart.models.quantized import quantized_module
from headstart.sampling.params import SamplingParams

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32  # the interpreter has no products of bf16
FORMS = ("fp8-row", "fp8-block", "int4", "int4-zeros", "int8")
OWN, ROUNDED = 0.02, 0.08 if HAS_GPU else 0.16  # a kernel's error; with rows rounded to 8 bits
ROWS = (1, 4, 16, 33, 64, 100, 128, 320, 1024) if HAS_GPU else (1, 5)
SHAPES = [(6144, 4096), (4096, 11008), (576, 7168)] if HAS_GPU else [(256, 384), (192, 256)]
# requests, rows of each, tokens of a context
CONTEXTS = [(1, 1, 700), (1, 4, 3000), (16, 4, 1500), (80, 4, 1500), (3, 32, 900)]
MODELS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("mimo", "fp8-row", {}), ("mimo", "fp8-block", {}), ("mimo", "awq", {}), ("mimo", "gptq", {}),
    ("mimo", "compressed-tensors", {}), ("mimo", None, {"kv_dtype": "fp8"}),
    ("mimo", None, {"weights": "fp8"}), ("glm4_moe", "fp8-row", {}),
    ("glm4_moe", "compressed-tensors", {}), ("deepseek_v3", "fp8-block", {}),
]  # fmt: skip
Check = tuple[str, float, float]  # what, its error, what that may be


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=draw, device=DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def weight_of(form: str, *shape: int) -> QuantizedWeight:
    """Matrices whose rows, blocks and groups differ in size: a scale in the wrong place shows."""
    *leading, outputs, inputs = shape
    values = normal(*shape, seed=sum(shape)) * inputs**-0.5
    if form == "fp8-row":
        sizes = torch.logspace(-1, 0, outputs, device=DEVICE)
        return stored.fp8_rows(values * sizes[:, None])
    if form == "fp8-block":
        blocks = (*leading, -(-outputs // GROUP), -(-inputs // GROUP))
        codes = (values * inputs**0.5 * 60).to(torch.float8_e4m3fn)
        scales = (0.2 + normal(*blocks, seed=1).abs()) * inputs**-0.5 / 60
        return Fp8Weight(codes, scales)
    bits, group = (8, 128) if form == "int8" else (4, 128)
    draw = torch.Generator(DEVICE).manual_seed(outputs)
    codes = torch.randint(0, 1 << bits, shape, generator=draw, device=DEVICE).byte()
    groups = (*leading, outputs, inputs // group)
    zeros = torch.randint(3, 12, groups, generator=draw, device=DEVICE).byte()
    scales = (0.2 + normal(*groups, seed=2).abs()) * inputs**-0.5 / (1 << bits)
    packed = codes if bits == 8 else stored.pack_nibbles(codes)
    kept = scales.half() if HAS_GPU else scales
    return GroupWeight(bits, packed, kept, zeros if form == "int4-zeros" else None)


def held(weight: QuantizedWeight) -> KernelLinear:
    around = nn.Module()
    around.layer = quantized_module(weight, None, DTYPE)
    hold_for_kernels(around)
    assert isinstance(around.layer, KernelLinear)
    return around.layer


def as_rounded(layer: KernelLinear, x: Tensor) -> Tensor:
    """Rows as the layer's kernels see them, where those are 8-bit floats."""
    if not isinstance(layer, KernelFp8):
        return x.float()
    rows = fp8_rows(x.contiguous(), layer.group)
    scales = rows.scales.t().repeat_interleave(layer.group or x.shape[1], 1)[:, : x.shape[1]]
    return rows.values.float() * scales


def linear(form: str) -> Iterator[Check]:
    """A product by itself, and in parts."""
    for outputs, inputs in SHAPES:
        weight = weight_of(form, outputs, inputs)
        layer, matrix = held(weight), weight.dequantized(torch.float32)
        for rows in ROWS:
            x = normal(rows, inputs, seed=rows).to(DTYPE)
            wanted = as_rounded(layer, x) @ matrix.t()
            found = error(layer(x), wanted), error(layer.partial(x).float().sum(0), wanted)
            yield f"{form} {outputs}x{inputs}, {rows} rows", max(found), OWN


def library() -> Iterator[Check]:
    """Blocks by torch's library: whether it is taken, and what it gives with padded scales."""
    if not HAS_GPU:
        return
    refused = 0.0 if fp8_library.takes_blocks(DEVICE) else 1.0
    yield "blocks by torch's library are taken (0: yes)", refused, 0.5
    for outputs, inputs in [(6144, 4096), (4096, 11008), (22016, 4096), (2048, 7168)]:
        weight = weight_of("fp8-block", outputs, inputs)
        layer, matrix = held(weight), weight.dequantized(torch.float32)
        assert isinstance(layer, KernelFp8)
        for rows in (4, 132, 320, 2048):
            x = normal(rows, inputs, seed=rows).to(DTYPE)
            scales = fp8_library.library_scales(layer.scales)
            found = fp8_library.library_fp8(fp8_rows(x), layer.weight, scales, DTYPE)
            wanted = as_rounded(layer, x) @ matrix.t()
            yield f"library {outputs}x{inputs}, {rows} rows", error(found, wanted), OWN


def mixture(form: str, config: MoeConfig, hidden: int) -> tuple[MoE, MoE]:
    """The same experts as kernels hold them, and plain in fp32."""
    own, plain = (MoE(config, hidden).to(DEVICE) for _ in range(2))
    for block in (own, plain):
        block.router.weight.data = normal(*block.router.weight.shape) * hidden**-0.5
    for owner, count in (("experts", config.num_experts), ("shared", 0)):
        width = config.width if count else config.shared_width
        for name, shape in (("gate_up", (2 * width, hidden)), ("down", (hidden, width))):
            weight = weight_of(form, *([count] if count else []), *shape)
            values = weight.dequantized(torch.float32)
            setattr(getattr(own, owner), name, quantized_module(weight, None, DTYPE))
            target = getattr(getattr(plain, owner), name)
            target.weight = nn.Parameter(values, requires_grad=False)
    notes = hold_experts(own) + hold_for_kernels(own)
    assert not notes, notes
    return own, plain


def experts(form: str) -> Iterator[Check]:
    """Each row by itself, in tiles, and sorted, as numbers of rows have it."""
    hidden, width, count = (2048, 768, 32) if HAS_GPU else (128, 128, 4)
    config = MoeConfig(
        num_experts=count, top_k=min(8, count // 2), width=width, shared_width=width,
        shared_gate=False, scoring="softmax", correction=False, num_groups=1, top_groups=1,
        renormalise=True, least_sum=1e-20, scale=1.0,
    )  # fmt: skip
    block, plain = mixture(form, config, hidden)
    for rows in (1, 2, 4, 16, 64, 65, 300, 2048) if HAS_GPU else (2,):
        x = normal(rows, hidden, seed=rows).to(DTYPE)
        found, wanted = moe_terms(x, block, None).float().sum(0), plain(x.float())
        most = ROUNDED if "fp8" in form else OWN
        yield f"experts {form}, {rows} rows", error(found, wanted), most


def attention() -> Iterator[Check]:
    """Over 8-bit floats, against the same kernel over the numbers that they mean, and plainly."""
    heads, kv_heads, dim, page = (32, 8, 128, 16) if HAS_GPU else (4, 2, 16, 4)
    for requests, rows, context in CONTEXTS if HAS_GPU else [(2, 3, 20)]:
        each = -(-(context + rows) // page)
        tables = torch.randperm(requests * each, device=DEVICE).view(requests, each).int()
        shape, slots = (kv_heads, dim), requests * each * page
        cache = empty_fp8_cache((shape, shape), slots, DTYPE, DEVICE)
        assert cache.sizes is not None
        for number, part in enumerate((cache.k, cache.v)):
            sizes = torch.logspace(-1, 1, slots, device=DEVICE)[:, None, None] ** (1 - number)
            words, sizes = to_kv_fp8(normal(slots, *shape, seed=number) * sizes)
            part.copy_(words)
            cache.sizes[..., number] = sizes
        k, v = cache.read(slice(None))
        seen = torch.randint(context // 2, context, (requests,), device=DEVICE).int()
        q, cut = normal(requests, rows, heads, dim).to(DTYPE), cut_for(requests, rows)
        given: dict[str, Any] = {
            "block_size": page, "max_context": each * page, "cut": cut,
            "usual": usual_context(seen, cut),
        }  # fmt: skip
        found = paged_attention(q, cache.k, cache.v, tables, seen, sizes=cache.sizes, **given)
        other = paged_attention(q, k, v, tables, seen, **given)
        what = f"attention over FP8: {requests} requests, {rows} rows, {context} tokens"
        yield what, error(found, other), OWN
        request = requests - 1
        there = int(seen[request]) + rows
        at = tables[request].long().repeat_interleave(page) * page
        at = (at + torch.arange(page, device=DEVICE).repeat(each))[:there]
        keys, values = (
            part[at].float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1)
            for part in (k, v)
        )
        scores = q[request].float().transpose(0, 1) @ keys.transpose(1, 2) * dim**-0.5
        own = torch.arange(there - rows, there, device=DEVICE)
        late = torch.arange(there, device=DEVICE) > own[:, None]
        plain = (scores.masked_fill(late, -torch.inf).softmax(-1) @ values).transpose(0, 1)
        yield f"{what}, plainly", error(found[request], plain), OWN


def engine(number: str) -> Iterator[Check]:
    """Log-probabilities of a tiny model with drafts, GPU against CPU."""
    if not HAS_GPU:
        return
    variant, weights, options = MODELS[int(number)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    prompts = [[3, 4, 5, 6, 7], [9] * 40, list(range(20, 57)), list(range(2, 60, 3))]
    texts, chances, rates = [], [], list[float]()
    with tempfile.TemporaryDirectory() as work:
        kept = None if weights is None else partial(quantized_copy, weights=weights)
        folder = write_tiny(variant, Path(work) / "model", stored_as=kept)
        none: dict[str, Any] = {}
        for device, dtype, own in (("cpu", "float32", none), ("cuda", "bfloat16", options)):
            made = Engine(
                folder, device=device, dtype=dtype, speculate=3, kv_bytes=1 << 26,
                max_running_requests=4, **own,
            )  # fmt: skip
            outputs = [result.outputs[0] for result in made.generate(prompts, params)]
            texts.append([token for output in outputs for token in output.token_ids])
            chances.append([entry.logprob for o in outputs for entry in o.logprobs or ()])
            rates = [round(rate, 2) for rate in made.stats.acceptance.cumulative]
    same = [one == other for one, other in zip(*texts, strict=True)]
    far = [abs(a - b) for a, b, is_same in zip(*chances, same, strict=True) if is_same]
    off = 1 - sum(same) / len(same)
    what = f"engine {variant} {weights or options}: {off:.3f} of tokens differ, drafts {rates}"
    yield f"{what}, log-probabilities", sum(far) / max(1, len(far)) + (off > 0.3), 0.1


PARTS: dict[str, list[tuple[str, ...]]] = {
    "engine": [(str(number),) for number in range(len(MODELS))],
    "experts": [(form,) for form in FORMS],
    "linear": [(form,) for form in FORMS],
    "attention": [()],
    "library": [()],
}


def check(part: str) -> int:
    """One part in this process; 1 where something failed."""
    failures, began = 0, time.perf_counter()
    name, _, which = part.partition(":")
    # An engine enters the mode by itself: weights that it loads must not belong to another one.
    mode = nullcontext() if name == "engine" else torch.inference_mode()
    try:
        with mode:
            for what, found, most in globals()[name](*filter(None, [which])):
                failures += not found < most
                verdict = "PASS" if found < most else "FAIL"
                print(f"{verdict} {what}: {found:.5f} (at most {most})", flush=True)
    except Exception as problem:  # the other parts are still worth knowing
        traceback.print_exc()
        failures += 1
        print(f"FAIL {part}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
    print(f"{part} took {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    every = [":".join([name, *which]) for name, own in PARTS.items() for which in own]
    parser.add_argument("--only", default=",".join(every), help="default: all parts")
    parser.add_argument("--jobs", type=int, default=12, help="processes at once")
    parser.add_argument("--wide", action="store_true", help="products of bf16 with 4-bit experts")
    given = parser.parse_args()
    parts = given.only.split(",")
    if given.wide:
        moe_wide_groups.IS_SHOWN_ON_GPUS = True
    if len(parts) == 1:
        return check(parts[0])
    began, failed = time.perf_counter(), []

    def alone(part: str) -> None:
        command = [sys.executable, __file__, "--only", part, *(["--wide"] if given.wide else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            failed.append(part)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(alone, parts))
    name = torch.cuda.get_device_name() if HAS_GPU else "the interpreter"
    took = time.perf_counter() - began
    print(f"{len(failed)} of {len(parts)} parts failed {failed} on {name}, torch "
          f"{torch.__version__}, {took:.0f} s")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
